//! TCP: how sockets are set up, connected and accepted. A reactor moves their bytes.
//!
//! | module | holds |
//! |---|---|
//! | `options` | the options of a socket |
//! | `connect` | a connection that a reactor makes |
//! | `listen` | a listener that a reactor accepts from |

mod connect;
mod listen;
mod options;

pub use listen::bind;
pub use options::{SocketOptions, connect};
