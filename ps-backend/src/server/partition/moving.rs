//! A partition whose model moves: it begins at a version, or is left for another block map.

use std::borrow::Cow;
use std::sync::Arc;

use libmodelio::transport::stream::Close;
use libmodelio::vocabulary::ids::{BlockId, Epoch, Version};
use libmodelio::wire::{DataKind, ModelRecord, Refusal};

use super::Partition;
use crate::server::redirect::Redirect;

impl Partition {
    /// The same blocks in the same memory, under another block map.
    pub(in crate::server) fn again(&self, record: &ModelRecord) -> Arc<Partition> {
        let (store, executor) = (self.store.clone(), &self.executor);
        let partition = Partition::of(record, (self.model_bytes, false), store, executor, self.checksum);
        // The store has its watcher already.
        partition.shown.lock().clone_from(&self.shown.lock());
        partition
    }

    /// Plans go on from this version.
    pub(in crate::server) fn begin_at(&self, version: Version) {
        self.state.lock().core = self.core_at(version);
    }

    /// The data of one kind of a block in the newest version, which must be `wanted`, under the block map of `epoch`.
    pub(in crate::server) fn kept(
        &self,
        epoch: Epoch,
        wanted: Version,
        block: BlockId,
        what: DataKind,
    ) -> Result<Vec<u8>, Refusal> {
        if self.epoch != epoch {
            return Err(Refusal::Epoch { expected: self.epoch, got: epoch });
        }
        let local = self.store.partition().local(block).ok_or(Refusal::NotMine { block })?;
        let kept = self.store.keep().map_err(Refusal::other)?;
        if kept.version() != wanted {
            return Err(Refusal::NoVersion { wanted, newest: kept.version() });
        }
        kept.bytes(local, what).map(Cow::into_owned).map_err(Refusal::other)
    }

    /// Another block map is in force. Sends all connected peers the redirect. The partition takes nothing any more.
    pub(in crate::server) fn has_moved(&self, to: &Redirect) {
        if self.moved.set(to.clone()).is_err() {
            return;
        }
        let mut state = self.state.lock();
        state.leave_coordinator(Close::Asked("the model has moved".into()));
        state.wake();
        state.following.clear();
        drop(state);
        self.links.lock().iter().for_each(|known| known.link.wake());
    }

    /// The model was deleted. Connections no longer keep its memory.
    pub(in crate::server) fn is_deleted(&self) {
        let why = || Close::Asked("the model was deleted".into());
        self.state.lock().leave_coordinator(why());
        self.links.lock().iter().for_each(|known| known.link.close(why()));
    }

    /// Where the model is now, if it has moved.
    pub(in crate::server) fn moved(&self) -> Option<&Redirect> {
        self.moved.get()
    }
}
