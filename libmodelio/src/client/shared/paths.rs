//! The paths by which blocks go to a shard and come from it.
//!
//! | module | holds |
//! |---|---|
//! | `tcp` | blocks are sent, and received into their place |
//! | `named` | blocks are named where they lie: the common part of `shm` and `rdma` (`unsafe`) |
//! | `shm` | memory that processes of one host share (`unsafe`) |
//! | `rdma` | memory that devices reach |
//! | `local` | a shard in this process, without a connection (`unsafe`) |

mod local;
mod named;
mod rdma;
mod shm;
mod tcp;

use std::sync::Arc;
use std::time::Instant;

use crate::client::peers::fallback::FastPath;
use crate::client::peers::peer::EndOfLoan;
use crate::client::peers::routes::Route;
use crate::client::shared::Shared;
use crate::transport::frames::{Link, Outgoing};
use crate::transport::stream::Close;
use crate::vocabulary::ids::BlockId;
use crate::wire::Received;

/// A connection, with its client and its route.
pub(in crate::client) struct Connection {
    pub(in crate::client) shared: Arc<Shared>,
    pub(in crate::client) route: Route,
    pub(in crate::client) link: Link,
}

/// The way of blocks over one connection to a shard. The connection's thread makes all calls.
pub(in crate::client) trait BlockPath: Send {
    /// The next message about blocks, and how many blocks it asks for. The connection waits for `due` blocks already.
    fn next(&mut self, to: &Connection, due: usize) -> Option<(Outgoing, usize)>;

    /// Takes a message of the shard's. False if the message does not concern this path.
    ///
    /// # Errors
    /// The connection ends.
    fn receive(&mut self, to: &Connection, received: &Received) -> Result<bool, Close> {
        let _ = (to, received);
        Ok(false)
    }

    /// Time passes, or the connection was woken. Returns when to call again at the latest.
    fn tick(&mut self, to: &Connection) -> Option<Instant> {
        let _ = to;
        None
    }

    /// The connection has ended.
    fn closed(&mut self, to: &Connection) {
        let _ = to;
    }

    /// The path, if it is better than TCP.
    fn fast(&self) -> Option<FastPath> {
        None
    }

    /// Ends the shard's reading of this end's memory. `None` if the shard does not read it.
    fn end_of_loan(&self) -> Option<EndOfLoan> {
        None
    }
}

impl Connection {
    /// Checks that a payload is as long as a block of the model.
    pub(in crate::client) fn expect_block(&self, received: &Received, block: BlockId) -> Result<(), Close> {
        let malformed = |why: String| Close::Asked(why.into());
        let layout = &self.shared.layout;
        if block.0 >= layout.blocks() {
            return Err(malformed(format!("block {block} is outside of the model")));
        }
        let extent = layout.block_bytes(block);
        let expected = received.expect_payload((extent.end - extent.start) as u32);
        expected.map_err(|error| malformed(error.to_string()))
    }

    /// The shard parks the connection, or uses it like the others again. Then all of them are asked what they send.
    pub(in crate::client) fn park(&self, parked: bool) {
        let mut inner = self.shared.inner.lock();
        if !inner.peers.is_in_force(&self.route) {
            return;
        }
        let peer = inner.peers.peer(&self.route);
        if peer.park(&self.link, parked) {
            peer.links.iter().for_each(Link::wake);
        }
    }
}
