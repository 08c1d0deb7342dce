//! How a client reaches the shards of its model, and what it can do there.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::client::callers::Answers;
use crate::transport::local::Shard;
use crate::transport::reactor::Handle;

/// The shards of a model.
pub(super) enum Shards {
    /// The only one is in this process.
    Local(Local),
    /// They are reached by connections on this reactor.
    Connected(Handle),
}

/// The shard in this process.
pub(super) struct Local {
    pub(super) shard: Arc<dyn Shard>,
    /// Answers that wait until its mailbox is empty.
    pub(super) unanswered: Mutex<Vec<Answers>>,
}

impl Shards {
    /// The only one, in this process.
    pub(super) fn here(shard: Arc<dyn Shard>) -> Shards {
        Shards::Local(Local { shard, unanswered: Mutex::default() })
    }

    /// The shard in this process.
    pub(super) fn local(&self) -> Option<&Local> {
        match self {
            Shards::Local(local) => Some(local),
            Shards::Connected(_) => None,
        }
    }

    /// The reactor of the connections.
    pub(super) fn reactor(&self) -> Option<&Handle> {
        match self {
            Shards::Local(_) => None,
            Shards::Connected(reactor) => Some(reactor),
        }
    }

    /// Whether they read blocks where programs have written them, so that nothing is sent.
    pub(super) fn read_in_place(&self) -> bool {
        matches!(self, Shards::Local(_))
    }

    /// Whether versions are shown in the buffers that they were made in, so that none is pulled.
    pub(super) fn show_their_buffers(&self) -> bool {
        matches!(self, Shards::Local(_))
    }
}
