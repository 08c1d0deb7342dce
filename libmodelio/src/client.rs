//! A client of a job: it contributes for learners, and shows versions.
//!
//! | module | holds |
//! |---|---|
//! | `core` | the decisions (pure) |
//! | `commit_notice` | what a contribution holds when it ends |
//! | `job` | [`Job`], the interface |
//! | `options` | options, events, errors |
//! | `memory` | accounts of memory |
//! | `lifetime` | the keeper's alarm, and the end |
//! | `observed` | what is noted for the status, metrics and traces |
//! | `shared` | lock, clock and memory around the core; within: deadlines, opening connections, the paths of blocks, another block map, blocks on their way (`unsafe`), versions for followers (`unsafe`), small models (`unsafe`) |
//! | `callers` | who waits for an answer |
//! | `payloads` | contributions and new weights that are sent; within: their sums, their form, what a form has lost |
//! | `peers` | the coordinator and the shards; within: the routes to them, their connections, fallbacks to TCP |
//! | `relay` | taking connections of clients that pull from this one |
//! | `shards` | where the shards are, and what can be done there |
//! | `conversation` | the messages on each kind of connection |
//! | `parts` | which shard is asked for which pieces of a version (pure) |
//! | `patching` | pulling what has changed (`unsafe`) |
//! | `versions` | the versions that the client shows |

mod callers;
mod commit_notice;
mod conversation;
pub mod core;
mod job;
mod lifetime;
mod memory;
mod observed;
mod options;
mod parts;
mod patching;
mod payloads;
mod peers;
mod relay;
mod shards;
mod shared;
#[cfg(test)]
mod tests;
mod versions;

pub use self::core::{LastCommit, ToldLearners};
pub use commit_notice::CommitNotice;
pub use job::{
    ChangesError, Job, JobStatus, PartError, PartsError, PartsPeers, RelayView, ShardView, VersionView,
    wait_for,
};
pub use memory::JobMemory;
pub use observed::Phases;
pub use options::{
    Answered, ClientError, ClientOptions, Done, Event, Listener, Opening, SetDone, SetError, TransportChoice,
};
pub use relay::RelayPort;
