//! A client in this process: its blocks are reduced where they lie, and versions are shown to it as they lie here.

use std::sync::Arc;

use libmodelio::transport::local::{End, Mail, Pushed, SharedBlock, SharedPayload};
use libmodelio::vocabulary::ids::Version;
use smallvec::SmallVec;

use super::Partition;
use super::reservation::{INLINE, Reserved, Room, Sender};
use crate::partition::store::{BlockInput, Limits, Payload, PinnedVersion};

/// A client in this process, as its partition sees it.
#[derive(Debug)]
pub(super) struct Here {
    /// A block of it had to wait.
    pub(super) waits: bool,
    /// The coordinator knows that the next version has a buffer, or will with the answer that comes next.
    pub(super) has_buffer: bool,
}

impl Partition {
    /// Takes a block of a client in this process. See [`libmodelio::transport::local::Shard::push`].
    pub(in crate::server) fn push_here(
        self: &Arc<Partition>,
        shared: SharedBlock<'_>,
        stands: &dyn Fn() -> bool,
    ) -> Pushed {
        let SharedBlock { client, plan, block, payloads, is_own } = shared;
        let reserved = self
            .push_of(plan, block, false)
            .and_then(|push| self.reserve(&mut Sender::here(client), push, Room::None));
        let reservation = match reserved {
            Ok(Reserved::Ready(reservation)) => reservation,
            Ok(Reserved::Later) => return Pushed::Later,
            Ok(Reserved::Kept | Reserved::Skip) | Err(_) => return Pushed::Unwanted,
        };
        let parts = payloads.iter().map(|of| {
            let SharedPayload { bytes, written, check } = *of;
            BlockInput { payload: Payload::Plain(bytes), written, check }
        });
        let parts: SmallVec<[BlockInput<'_>; INLINE]> = parts.collect();
        // The coordinator hears whose it is.
        let is_reported = payloads.len() == 1 && !is_own;
        reservation.complete_with(&parts, is_reported, stands).unwrap_or_else(|error| {
            tracing::error!(model = %self.model, %plan, %block, %error, "cannot be reduced");
            Pushed::Unwanted
        })
    }

    /// A version for the client in this process; the newest one's number, if it is gone.
    pub(in crate::server) fn version_here(&self, version: Version) -> Result<PinnedVersion, Version> {
        self.store
            .version(version)
            .ok_or_else(|| self.store.newest().map_or(version, |newest| newest.version()))
    }

    /// There may be so many version buffers. Which versions are retained, the client in this process says: it holds them.
    pub(in crate::server) fn set_buffers(&self, most: usize) {
        self.store.set_limits(Limits { retain: 0, buffers: most });
    }

    /// Tells the coordinator whether the next version has a buffer, if it does not know. Returns whether it has one.
    pub(in crate::server) fn find_buffer(&self) -> bool {
        let mut state = self.state.lock();
        let ready = state.report_buffer(&self.store);
        let mailbox = state.mailbox();
        drop(state);
        if let Some(mailbox) = mailbox {
            mailbox.drain();
        }
        ready
    }
}

impl super::State {
    /// As [`Partition::find_buffer`]; the mailbox is to be drained.
    pub(super) fn report_buffer(&mut self, store: &crate::partition::store::PartitionStore) -> bool {
        let ready = store.find_buffer();
        if std::mem::replace(&mut self.here.has_buffer, ready) != ready
            && let Some(mailbox) = self.mailbox()
        {
            mailbox.put(End::Partition, End::Coordinator, Mail::Buffer(ready));
        }
        ready
    }

    /// What had to wait may be taken.
    pub(super) fn wake_here(&mut self) {
        if std::mem::take(&mut self.here.waits)
            && let Some(mailbox) = self.mailbox()
        {
            mailbox.put(End::Partition, End::Client, Mail::Retry);
        }
    }
}
