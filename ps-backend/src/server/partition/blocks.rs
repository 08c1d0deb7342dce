//! Sending versions block by block, as a whole version or as they are computed, and reporting to a client which of its
//! blocks are missing.
//!
//! This module holds `unsafe`: it lends memory of versions to connections.

use std::sync::Arc;

use fixedbitset::FixedBitSet;
use libmodelio::bytes::changes::{self, Changed};
use libmodelio::transport::frames::{Link, Outgoing};
use libmodelio::transport::stream::{Guard, LentPayload};
use libmodelio::transport::tally::Flow;
use libmodelio::vocabulary::block_ranges::{BlockRanges, MAX_RANGES};
use libmodelio::vocabulary::ids::{BlockId, ClientId, PlanId, Version};
use libmodelio::wire::{Message, Refusal};

use super::{Partition, PartitionState};
use crate::partition::core::Ahead;
use crate::partition::store::{EarlyBlock, PartitionJob, PinnedVersion, Since};

/// A client that gets the blocks of a version as they are computed, over any of its connections.
pub(super) struct Follower {
    plan: PlanId,
    /// The version that it has.
    base: Option<Version>,
    /// The blocks that were sent.
    sent: FixedBitSet,
}

/// What a connection sends to a client that follows a plan.
pub(in crate::server) enum Followed {
    /// A block.
    Block(Outgoing),
    /// Nothing yet. The connection is woken when there may be something.
    Wait,
    /// The version is gone, and some of its blocks were not sent.
    Gone(Refusal),
    /// Nothing any more.
    Over,
}

/// A version that a connection sends.
#[derive(Clone)]
pub(in crate::server) struct Sending {
    pub(in crate::server) version: Arc<PinnedVersion>,
    /// What has changed since the version that the client has, if the shard knows.
    since: Option<Since>,
}

impl Sending {
    /// Whether it is this version, for a client that has `base`.
    pub(in crate::server) fn is_of(&self, version: Version, base: Option<Version>) -> bool {
        // What the shard does not know, it may have known before.
        let has_base = self.since.as_ref().is_none_or(|since| Some(since.base()) == base);
        self.version.version() == version && has_base
    }
}

/// Blocks in their order, as ranges. Of more than a message takes, the first ones.
fn ranges_of(blocks: impl Iterator<Item = BlockId>) -> BlockRanges {
    let mut ranges = BlockRanges::new();
    for BlockId(block) in blocks {
        let is_full = ranges.len() == MAX_RANGES;
        match ranges.last_mut() {
            Some(last) if last.end == block => last.end += 1,
            _ if is_full => break,
            _ => ranges.push(block..block + 1),
        }
    }
    ranges
}

impl Partition {
    /// A client follows `plan` from now on, and no other plan. If it follows the plan already, it gets no block twice.
    pub(in crate::server) fn begin_following(&self, client: ClientId, plan: PlanId, base: Option<Version>) {
        let blocks = self.store.partition().blocks().len();
        let mut state = self.state.lock();
        if state.followers.get(&client).is_none_or(|follower| follower.plan != plan) {
            let sent = FixedBitSet::with_capacity(blocks);
            state.followers.insert(client, Follower { plan, base, sent });
        }
    }

    /// The next block of the version that `plan` makes, for a client that follows the plan. `pinned` keeps the version
    /// between two calls, once it is published.
    pub(in crate::server) fn follow(
        &self,
        client: ClientId,
        plan: PlanId,
        pinned: &mut Option<Sending>,
        link: &Link,
    ) -> Followed {
        let mut state = self.state.lock();
        let PartitionState { core, followers, job, .. } = &mut *state;
        // The client may follow another plan by now, over another connection.
        let Some(follower) = followers.get_mut(&client).filter(|follower| follower.plan == plan) else {
            return Followed::Over;
        };
        let local = match core.ahead(plan, &follower.sent) {
            Ahead::Computed(block) => {
                let job = job.as_ref().filter(|(of, _)| *of == plan);
                let early = job.and_then(|(_, job)| Some((Arc::clone(job), job.early(BlockId(block))?)));
                let Some((job, early)) = early else {
                    state.wait_for_blocks(link);
                    return Followed::Wait;
                };
                follower.sent.insert(block as usize);
                let base = follower.base.filter(|base| *base == core.version());
                drop(state);
                return self.block_ahead(plan, BlockId(block), (&job, early), base);
            }
            Ahead::Made(version) => {
                let Some(block) = follower.sent.zeroes().next() else {
                    return Followed::Over;
                };
                follower.sent.insert(block);
                let (newest, base) = (core.version(), follower.base);
                drop(state);
                if pinned.as_ref().is_none_or(|pinned| !pinned.is_of(version, base)) {
                    *pinned =
                        self.store.version(version).map(|version| self.sending(Arc::new(version), base));
                    if pinned.is_none() {
                        return Followed::Gone(Refusal::NoVersion { wanted: version, newest });
                    }
                }
                BlockId(block as u32)
            }
            Ahead::Wait => {
                state.wait_for_blocks(link);
                return Followed::Wait;
            }
            Ahead::Over => return Followed::Over,
        };
        let block = self.store.partition().global(local);
        let block = block.zip(pinned.as_ref()).and_then(|(block, pinned)| self.block(pinned, block));
        block.map_or(Followed::Over, |block| {
            let message = match block.message {
                Message::Block { block, .. } => Message::BlockAhead { plan, block },
                Message::Changes { block, base, crc, .. } => Message::ChangesAhead { plan, block, base, crc },
                _ => return Followed::Over,
            };
            Followed::Block(Outgoing { message, ..block })
        })
    }

    /// All bytes of a version that is here, or is complete but for its conclusion.
    pub(in crate::server) fn whole(&self, version: Version) -> Option<Vec<u8>> {
        let blocks = || (0..self.layout().blocks()).map(BlockId);
        let mut bytes = Vec::with_capacity(self.layout().size() as usize);
        if let Some(pinned) = self.store.version(version) {
            blocks().for_each(|block| bytes.extend_from_slice(pinned.block(block)));
        } else {
            let state = self.state.lock();
            let (plan, job) = state.job.as_ref().filter(|_| state.core.version().next() == version)?;
            let (job, is_ready) = (Arc::clone(job), state.core.running() == Some((*plan, 0)));
            drop(state);
            for block in blocks().filter(|_| is_ready) {
                bytes.extend_from_slice(job.early(block)?.bytes());
            }
        }
        self.store.tally().moved(Flow::Pull, bytes.len());
        self.store.tally().copied(Flow::Pull, bytes.len());
        (bytes.len() as u64 == self.layout().size()).then_some(bytes)
    }

    fn block_ahead(
        &self,
        plan: PlanId,
        local: BlockId,
        (job, early): (&PartitionJob, EarlyBlock),
        base: Option<Version>,
    ) -> Followed {
        let Some(block) = self.store.partition().global(local) else { return Followed::Over };
        if let Some(base) = base
            && let Some(patch) = job.early_patch(local, &early)
        {
            let crc = (patch.len() > Changed::NOTHING_BYTES).then(|| early.checksum());
            return Followed::Block(self.patch(Message::ChangesAhead { plan, block, base, crc }, patch));
        }
        let (crc, guard) = (self.checksum.or_none(|| early.checksum()), Arc::new(early));
        // SAFETY: the bytes of an early block do not change while it lives, and the guard keeps it.
        let piece = unsafe { LentPayload::new(guard.bytes(), crc, Arc::clone(&guard) as Guard) };
        self.store.tally().moved(Flow::Pull, guard.bytes().len());
        let message = Message::BlockAhead { plan, block };
        Followed::Block(Outgoing { message, request: 0, epoch: self.epoch, payload: Some(piece) })
    }

    /// The blocks that `client` has not sent yet. None if that is not known yet.
    pub(in crate::server) fn missing(&self, client: ClientId, plan: PlanId) -> Option<Message> {
        let missing = self.state.lock().core.missing(client, plan)?;
        let mine = self.store.partition().blocks();
        Some(Message::Missing { plan, blocks: ranges_of(missing.ones().map(|block| mine[block])) })
    }

    /// A message with a patch.
    fn patch(&self, message: Message, patch: Vec<u8>) -> Outgoing {
        self.store.tally().moved(Flow::Pull, patch.len());
        let payload = Some(LentPayload::owned(patch));
        Outgoing { message, request: 0, epoch: self.epoch, payload }
    }

    /// A version for a client that has `base`.
    fn sending(&self, version: Arc<PinnedVersion>, base: Option<Version>) -> Sending {
        let since = base.and_then(|base| self.store.since(base, version.version()));
        Sending { version, since }
    }

    /// A version to read from, for a client that has `base`. `None` if it is not here yet: the connection is woken when
    /// it may be.
    pub(in crate::server) fn version(
        &self,
        wanted: Version,
        base: Option<Version>,
        link: &Link,
    ) -> Result<Option<Sending>, Refusal> {
        if let Some(version) = self.store.version(wanted) {
            return Ok(Some(self.sending(Arc::new(version), base)));
        }
        let mut state = self.state.lock();
        let newest = state.core.version();
        if wanted > newest {
            state.wait(link);
            return Ok(None);
        }
        drop(state);
        // The version may have come in between.
        match self.store.version(wanted) {
            Some(version) => Ok(Some(self.sending(Arc::new(version), base))),
            None => Err(Refusal::NoVersion { wanted, newest }),
        }
    }

    /// Which elements have changed after `base` until `version`, of this shard's blocks from `first` on: the encoded form
    /// of about `room` bytes, and the block after them.
    pub(in crate::server) fn changed_since(
        &self,
        (base, version): (Version, Version),
        first: BlockId,
        room: usize,
    ) -> Result<(Vec<u8>, Option<BlockId>), Refusal> {
        // Asked for first: what is known of this version is known by then.
        let newest = self.store.versions().last().copied().unwrap_or_default();
        let since = self.store.since(base, version);
        let since = since.ok_or(Refusal::NoVersion { wanted: base, newest })?;
        let (mut encoded, blocks) = (Vec::new(), self.store.partition().blocks());
        for (local, &block) in blocks.iter().enumerate().filter(|(_, block)| **block >= first) {
            if encoded.len() >= room {
                return Ok((encoded, Some(block)));
            }
            let changed = since.changed(self.layout(), BlockId(local as u32));
            changes::encode_block(block, &changed, &mut encoded);
        }
        Ok((encoded, None))
    }

    /// The blocks of a version that are the same in `base`, the version that the client has. If the shard does not know,
    /// it names none.
    pub(in crate::server) fn unchanged(&self, of: &Sending, base: Version) -> Message {
        let mine = self.store.partition().blocks().iter().zip(0..);
        let is_same = |local| of.since.as_ref().is_some_and(|since| since.is_same(BlockId(local)));
        let blocks = ranges_of(mine.filter(|(_, local)| is_same(*local)).map(|(block, _)| *block));
        Message::Unchanged { version: of.version.version(), base, blocks }
    }

    /// A block of a version: what has changed in it, or all of it.
    pub(in crate::server) fn block(&self, of: &Sending, block: BlockId) -> Option<Outgoing> {
        self.changes(of, block).or_else(|| self.whole_block(&of.version, block))
    }

    /// What has changed in a block, if the shard knows.
    pub(in crate::server) fn changes(&self, of: &Sending, block: BlockId) -> Option<Outgoing> {
        let (since, local) = (of.since.as_ref()?, self.store.partition().local(block)?);
        let (patch, crc) = since.patch(self.layout(), local, &of.version)?;
        let (version, base) = (of.version.version(), since.base());
        Some(self.patch(Message::Changes { version, block, base, crc }, patch))
    }

    pub(in crate::server) fn whole_block(
        &self,
        version: &Arc<PinnedVersion>,
        block: BlockId,
    ) -> Option<Outgoing> {
        let local = self.store.partition().local(block)?;
        let crc = self.checksum.or_none(|| version.checksum(local));
        let guard = Arc::clone(version) as Guard;
        // SAFETY: a pinned version's bytes do not change, and the guard pins it.
        let piece = unsafe { LentPayload::new(version.block(local), crc, guard) };
        self.store.tally().moved(Flow::Pull, version.block(local).len());
        let message = Message::Block { version: version.version(), block };
        Some(Outgoing { message, request: 0, epoch: self.epoch, payload: Some(piece) })
    }
}
