//! Versions for followers: the blocks of the version that is shown, and of the one that is being pulled.
//!
//! This module holds `unsafe`: connections send from blocks of versions. It says why that is sound.

use std::sync::atomic::Ordering;

use crate::bytes::block::span;
use crate::bytes::changes::Changed;
use crate::bytes::crc32c::crc32c;
use crate::client::relay::{Asked, Relayed};
use crate::client::shared::{Inner, Shared};
use crate::client::versions::Lent;
use crate::transport::frames::Outgoing;
use crate::transport::stream::LentPayload;
use crate::vocabulary::ids::{BlockId, Generation, Version};
use crate::wire::{Message, Refusal};

/// What can be done about a request.
enum Turn {
    Send(Version, BlockId, Option<Version>, Lent),
    Refuse(Version),
    Wait,
}

impl Inner {
    /// The first request of which something is here, or is not here any more.
    fn turn(&mut self, asked: &mut Asked) -> Turn {
        for at in 0..asked.pulls.len() {
            let (version, ref mut range, base) = asked.pulls[at];
            let block = BlockId(range.start);
            let is_back = self.core.has_pulled(version, block);
            if let Some(lent) = self.versions.lend(version, is_back, base) {
                range.start += 1;
                return Turn::Send(version, block, base, lent);
            }
            if version <= self.core.version() {
                asked.pulls.retain(|(of, ..)| *of != version);
                return Turn::Refuse(version);
            }
        }
        Turn::Wait
    }

    /// Keeps the version that a follower is being sent, if it is shown, and no other one. Returns the one that was kept.
    fn keep_for(&mut self, asked: &mut Asked) -> Option<Version> {
        let wanted = asked.pulls.front().map(|(version, ..)| *version);
        if asked.pinned.is_some() && asked.pinned == wanted {
            return None;
        }
        let pinned = wanted.filter(|version| self.versions.pin(*version));
        std::mem::replace(&mut asked.pinned, pinned)
    }
}

impl Relayed for Shared {
    fn generation(&self) -> Generation {
        self.record.generation
    }

    fn next_for(&self, asked: &mut Asked) -> Option<Outgoing> {
        let mut inner = self.inner.lock();
        let blocks = self.layout.blocks();
        asked.pulls.retain(|(_, range, _)| range.start < range.end.min(blocks));
        let before = inner.keep_for(asked);
        let turn = inner.turn(asked);
        if let (Turn::Wait, Some((wanted, ..))) = (&turn, asked.pulls.back()) {
            inner.peers.follower_waits(&asked.link);
            let mut actions = Vec::new();
            inner.core.follower_wants(*wanted, self.now(), &mut actions);
            self.rouse_keeper(&inner);
            self.act(inner, actions);
        } else {
            drop(inner);
        }
        before.into_iter().for_each(|before| self.unpin(before, 1));
        let epoch = asked.epoch;
        match turn {
            Turn::Send(version, block, base, lent) => {
                let (message, payload) = self.relayed(version, block, base, lent);
                self.accounts.relayed.fetch_add(payload.len() as u64, Ordering::Relaxed);
                Some(Outgoing { message, request: 0, epoch, payload: Some(payload) })
            }
            Turn::Refuse(wanted) => {
                let refusal = Refusal::NoVersion { wanted, newest: self.inner.lock().core.version() };
                Some(Outgoing { epoch, ..Outgoing::new(0, Message::Refused(refusal)) })
            }
            Turn::Wait => None,
        }
    }

    fn dismisses(&self, asked: &mut Asked) -> Version {
        asked.pulls.clear();
        asked.pinned.take().into_iter().for_each(|pinned| self.unpin(pinned, 1));
        self.inner.lock().core.version()
    }
}

impl Shared {
    /// A block for a follower: what has changed in it since the version that the follower has, or all of it.
    fn relayed(
        &self,
        version: Version,
        block: BlockId,
        base: Option<Version>,
        Lent { memory, guard, step }: Lent,
    ) -> (Message, LentPayload) {
        // SAFETY: the block has come whole, and nobody writes it any more in this version. The buffer is not used for
        // another one while its memory is held: `Versions::begin_back` and `Versions::free` see to that.
        let bytes = unsafe { memory.bytes(span(&self.layout.block_bytes(block))) };
        if let (Some(base), Some(patch)) = (base, step.and_then(|step| step.patch(block, bytes))) {
            let crc = (patch.len() > Changed::NOTHING_BYTES).then(|| crc32c(bytes));
            return (Message::Changes { version, block, base, crc }, LentPayload::owned(patch));
        }
        // SAFETY: as above, and the guard holds the memory, or what keeps the shard from writing it.
        let payload = unsafe { LentPayload::new(bytes, self.options.checksum.of(bytes), guard) };
        (Message::Block { version, block }, payload)
    }
}
