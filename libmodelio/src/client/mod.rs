//! Taking part in a job whose shards are on a network.
//!
//! | module | holds |
//! |---|---|
//! | `core` | what is decided (pure) |
//! | `edge` | [`Client`]: lock, clock, connections |
//! | `edge::blocks`, `edge::memory` | payload on its way, over sockets and through shared memory (`unsafe`) |
//! | `conversation` | what is said on each kind of connection |
//! | `versions` | the versions that are shown here |
//! | `sum` | adding up contributions before they cross the network |

mod conversation;
pub mod core;
mod edge;
mod sum;
#[cfg(test)]
mod tests;
mod versions;

pub use self::core::LastCommit;
pub use edge::{
    Answered, Awaited, Client, ClientError, ClientEvent, ClientListener, ClientOptions, Offered, PeerView,
    Pulls, Staged, TransportChoice,
};
