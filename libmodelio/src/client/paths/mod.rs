//! The paths by which blocks go to a shard and come from it.
//!
//! | module | holds |
//! |---|---|
//! | `tcp` | blocks are sent, and received where they belong |
//! | `named` | blocks are named where they lie: what `shm` and `rdma` have in common (`unsafe`) |
//! | `shm` | memory that the processes of one host have in common (`unsafe`) |
//! | `rdma` | memory that devices reach |
//! | `local` | a shard in this process, to which no connection leads (`unsafe`) |

mod local;
mod named;
#[cfg(feature = "rdma")]
mod rdma;
mod shm;
mod tcp;

use std::sync::Arc;
use std::time::Instant;

use super::fallback::FastPath;
use super::peer::EndOfLoan;
use super::routes::Route;
use super::shared::Shared;
use crate::transport::frames::{Link, Outgoing};
use crate::transport::stream::Close;
use crate::wire::Received;

/// What is said over a connection is said by this.
pub(super) struct Connection {
    pub(super) shared: Arc<Shared>,
    pub(super) route: Route,
    pub(super) link: Link,
}

/// How blocks go over one connection to a shard. All calls come from the connection's thread.
pub(super) trait BlockPath: Send {
    /// The next message of blocks, and how many blocks it asks for; the connection waits for `due` already.
    fn next(&mut self, to: &Connection, due: usize) -> Option<(Outgoing, usize)>;

    /// A message of the shard's. False if it has nothing to do with this path.
    ///
    /// # Errors
    /// The connection ends.
    fn receive(&mut self, to: &Connection, received: &Received) -> Result<bool, Close> {
        let _ = (to, received);
        Ok(false)
    }

    /// Time passes, or the connection was woken; when to call again at the latest.
    fn tick(&mut self, to: &Connection) -> Option<Instant> {
        let _ = to;
        None
    }

    /// The connection is over.
    fn closed(&mut self, to: &Connection) {
        let _ = to;
    }

    /// Which path better than TCP it is.
    fn fast(&self) -> Option<FastPath> {
        None
    }

    /// What ends the shard's reading of this end's memory, if it reads that.
    fn end_of_loan(&self) -> Option<EndOfLoan> {
        None
    }
}
