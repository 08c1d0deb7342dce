//! A client in this process. Its blocks are reduced where they lie, and it shows versions from the partition's
//! memory.

use std::sync::Arc;

use libmodelio::transport::local::{Mail, MailboxEnd, Pushed, SharedBlock, SharedPayload};
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::ids::Version;
use smallvec::SmallVec;

use super::reservation::{INLINE, Reserved, Room, Sender};
use super::{Partition, PartitionState};
use crate::partition::store::{BlockInput, Limits, PartitionStore, Payload, PinnedVersion};

/// The partition's state for a client in this process.
#[derive(Debug)]
pub(super) struct HereState {
    /// Whether a block of the client's had to wait, or a version that it wants is still being made.
    pub(super) waits: bool,
    /// Whether the coordinator knows that the next version has a buffer, or will know with the next answer.
    pub(super) has_buffer: bool,
}

impl Partition {
    /// Takes a block of a client in this process. See [`libmodelio::transport::local::Shard::push`].
    pub(in crate::server) fn push_here(
        self: &Arc<Partition>,
        shared: SharedBlock<'_>,
        stands: &dyn Fn() -> bool,
    ) -> Pushed {
        let SharedBlock { client, plan, block, payloads, ahead, is_weights } = shared;
        let reserved = self
            .push_of(plan, block, Form::Plain, ahead)
            .and_then(|push| self.reserve(&mut Sender::here(client), push, Room::None));
        let reservation = match reserved {
            Ok(Reserved::Ready(reservation)) => reservation,
            Ok(Reserved::Later) => return Pushed::Later,
            Ok(Reserved::Kept | Reserved::Skip) | Err(_) => return Pushed::Unwanted,
        };
        let inputs = payloads.iter().map(|of| {
            let SharedPayload { bytes, written, check } = *of;
            BlockInput { payload: Payload::Plain(bytes), written, check }
        });
        let inputs: SmallVec<[BlockInput<'_>; INLINE]> = inputs.collect();
        reservation.complete_with(&inputs, is_weights, stands).unwrap_or_else(|error| {
            tracing::error!(model = %self.model, %plan, %block, %error, "cannot be reduced");
            Pushed::Unwanted
        })
    }

    /// A version for the client in this process. If it is gone, the newest one's number. If it is still being made, an
    /// older number, and the client is told to ask again.
    pub(in crate::server) fn version_here(&self, version: Version) -> Result<PinnedVersion, Version> {
        if let Some(pinned) = self.store.version(version) {
            return Ok(pinned);
        }
        // A version is published under this lock.
        let mut state = self.state.lock();
        self.store.version(version).ok_or_else(|| {
            let newest = state.core.version();
            state.here.waits |= newest < version;
            newest
        })
    }

    /// Sets the most version buffers. The client in this process holds the versions that are retained.
    pub(in crate::server) fn set_buffers(&self, most: usize) {
        self.store.set_limits(Limits { retain: 0, buffers: most });
    }

    /// Tells the coordinator whether the next version has a buffer, if it does not know. Returns whether it has one.
    pub(in crate::server) fn find_buffer(&self) -> bool {
        let mut state = self.state.lock();
        let ready = state.report_buffer(&self.store);
        PartitionState::deliver(state);
        ready
    }
}

impl PartitionState {
    /// Like [`Partition::find_buffer`]. The caller must drain the mailbox.
    pub(super) fn report_buffer(&mut self, store: &PartitionStore) -> bool {
        let ready = store.find_buffer();
        if std::mem::replace(&mut self.here.has_buffer, ready) != ready
            && let Some(mailbox) = self.mailbox()
        {
            mailbox.put(MailboxEnd::Partition, MailboxEnd::Coordinator, Mail::Buffer(ready));
        }
        ready
    }

    /// A block that had to wait may be offered again, and a version may be there.
    pub(super) fn wake_here(&mut self) {
        if std::mem::take(&mut self.here.waits)
            && let Some(mailbox) = self.mailbox()
        {
            mailbox.put(MailboxEnd::Partition, MailboxEnd::Client, Mail::Retry);
        }
    }
}
