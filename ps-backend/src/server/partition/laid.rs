//! New weights in parts, which clients have brought before they are published. A plan lays those of its set over the newest
//! version: the executor makes each block, which comes to its place as if somebody had sent it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use fixedbitset::FixedBitSet;
use libmodelio::transport::tally::Flow;
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::ids::{BlockId, ClientId, Epoch, PlanId, Version};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::strided::Strided;
use libmodelio::wire::{Message, PlanPart, Refusal, SetOfParts};
use parking_lot::RwLock;

use super::reservation::{Reserved, Room, Sender};
use super::{Partition, PartitionState};
use crate::coordinator::NOBODY;
use crate::partition::core::local_blocks;
use crate::partition::executor::{Batch, Pass};
use crate::partition::store::PinnedVersion;

/// What clients have brought, and what a plan takes of it.
#[derive(Default)]
pub(super) struct Brought {
    /// The parts that are here, by their clients and the clients' names for them.
    parts: BTreeMap<(ClientId, u64), Weak<Part>>,
    /// The plan under way, if it publishes parts.
    laid: Option<(PlanId, Arc<Laid>)>,
}

/// What a client has brought of a part. It is here as long as its connection, or a plan that takes it.
#[derive(Default)]
pub(in crate::server) struct Part(RwLock<PartBytes>);

#[derive(Default)]
struct PartBytes {
    bytes: u64,
    blocks: BTreeMap<BlockId, Pieces>,
}

/// Pieces of a block, and their bytes, one behind the other.
#[derive(Default)]
struct Pieces {
    ranges: Vec<Range<u32>>,
    bytes: Vec<u8>,
}

/// The parts that a plan takes.
struct Laid {
    set: SetOfParts,
    /// Of each part, what is here of it, and the blocks here of which it holds something.
    parts: Vec<(Option<Arc<Part>>, FixedBitSet)>,
    base: Version,
    /// Why they make no version.
    failed: OnceLock<ShardError>,
}

impl Partition {
    /// A place for a part, or what has come of it.
    pub(in crate::server) fn part(&self, client: ClientId, token: u64) -> Arc<Part> {
        let parts = &mut self.brought.lock().parts;
        parts.retain(|_, part| part.strong_count() > 0);
        let part = parts.get(&(client, token)).and_then(Weak::upgrade).unwrap_or_default();
        parts.insert((client, token), Arc::downgrade(&part));
        part
    }

    /// Keeps packed pieces of a part.
    ///
    /// # Errors
    /// If they do not lie here, or not by this block map, or are no pieces, or the part has more bytes than there are.
    pub(in crate::server) fn keep_part(
        &self,
        part: &Part,
        epoch: Epoch,
        (pieces, packed): (&[Strided], &[u8]),
    ) -> Result<(), Refusal> {
        if self.epoch != epoch {
            return Err(Refusal::Epoch { expected: self.epoch, got: epoch });
        }
        let (partition, size) = (self.store.partition(), u64::from(self.layout().block_size()));
        if Strided::total(pieces, self.model_bytes) != Some(packed.len() as u64) {
            return Err(ShardError::OutOfRange.into());
        }
        let local = |at: u64| {
            let block = BlockId((at / size) as u32);
            partition.local(block).ok_or(Refusal::NotMine { block })
        };
        self.store.tally().moved(Flow::Push, packed.len());
        self.store.tally().copied(Flow::Push, packed.len());
        let mut part = part.0.write();
        part.bytes += packed.len() as u64;
        if part.bytes > self.layout().size() {
            return Err(ShardError::OutOfRange.into());
        }
        let mut packed = packed;
        for piece in pieces.iter().flat_map(Strided::pieces) {
            let mut at = piece.start;
            while at < piece.end {
                let (block, start) = (local(at)?, at - at % size);
                let end = piece.end.min(start + size);
                let (now, later) = packed.split_at((end - at) as usize);
                let of = part.blocks.entry(block).or_default();
                let range = (at - start) as u32..(end - start) as u32;
                match of.ranges.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => of.ranges.push(range),
                }
                of.bytes.extend_from_slice(now);
                (packed, at) = (later, end);
            }
        }
        Ok(())
    }

    /// A plan on top of `base` publishes this set, or no parts.
    pub(super) fn takes_parts(&self, plan: PlanId, set: Option<SetOfParts>, base: Version) {
        let (brought, mine) = (&mut *self.brought.lock(), self.store.partition().blocks());
        let of = |part: &PlanPart| {
            let here = brought.parts.get(&(part.client, part.token)).and_then(Weak::upgrade);
            (here, local_blocks(&part.blocks, mine))
        };
        let laid = set.map(|set| {
            let parts = set.parts.iter().map(of).collect();
            (plan, Arc::new(Laid { set, parts, base, failed: OnceLock::new() }))
        });
        brought.laid = laid;
    }

    /// Why the parts of this plan make no version, if that is known.
    pub(super) fn parts_fail(&self, plan: PlanId) -> Option<ShardError> {
        self.brought.lock().laid.as_ref().filter(|(of, _)| *of == plan)?.1.failed.get().cloned()
    }

    /// A plan is over. The caller drops its parts once it holds no lock, because freeing them takes a while.
    pub(super) fn lets_parts_go(&self, plan: PlanId) -> impl Sized + use<> {
        self.brought.lock().laid.take_if(|(of, _)| *of == plan)
    }

    /// Has the executor make the blocks of a plan that publishes parts, once it has its memory.
    pub(super) fn lay(self: &Arc<Partition>, plan: PlanId) {
        let brought = self.brought.lock();
        let laid = brought.laid.as_ref().filter(|(of, _)| *of == plan).map(|(_, laid)| Arc::clone(laid));
        drop(brought);
        let Some(laid) = laid else { return };
        let mut blocks = FixedBitSet::with_capacity(self.layout().blocks() as usize);
        laid.parts.iter().for_each(|(_, of)| blocks.union_with(of));
        if laid.set.all {
            blocks.insert_range(..);
        }
        let partition = Arc::clone(self);
        let lays = Box::new(move |block| partition.lay_block(plan, &laid, block));
        let blocks = blocks.ones().map(|block| BlockId(block as u32)).collect();
        self.executor.execute(Batch { pass: Pass::Gather(lays, blocks), done: Box::new(drop) });
    }

    fn lay_block(self: &Arc<Partition>, plan: PlanId, laid: &Laid, block: BlockId) {
        thread_local!(static MADE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) });
        let Some(global) = self.store.partition().global(block) else { return };
        let reserved = self
            .push_of(plan, global, Form::Plain, false)
            .and_then(|push| self.reserve(&mut Sender::here(NOBODY), push, Room::None));
        // If not, the plan was dropped.
        let Ok(Reserved::Ready(reservation)) = reserved else { return };
        let start = u64::from(global.0) * u64::from(self.layout().block_size());
        let base = self.store.version(laid.base).ok_or(ShardError::Unreachable);
        let outcome = MADE.with_borrow_mut(|made| {
            laid.block(&base?, (block, start), made)?;
            let failed = |refusal| ShardError::Lost(format!("block {global} cannot be made: {refusal}"));
            reservation.complete(made, || true).map_err(failed)
        });
        if let Err(why) = outcome
            && laid.failed.set(why.clone()).is_ok()
        {
            let state = self.state.lock();
            state.send(self.epoch, 0, Message::Unmade { plan, why });
            PartitionState::deliver(state);
        }
    }
}

impl Laid {
    /// Makes a block of the next version, which begins at `start` in the model.
    fn block(
        &self,
        base: &PinnedVersion,
        (block, start): (BlockId, u64),
        made: &mut Vec<u8>,
    ) -> Result<(), ShardError> {
        let mut covered = Vec::new();
        made.clear();
        made.extend_from_slice(base.block(block));
        // The lowest part is the last one over the others.
        for (number, (part, blocks)) in self.parts.iter().enumerate().rev() {
            if !blocks.contains(block.index()) {
                continue;
            }
            let gone = || ShardError::PartGone(number as u32);
            let part = part.as_ref().ok_or_else(gone)?.0.read();
            let Pieces { ranges, bytes } = part.blocks.get(&block).ok_or_else(gone)?;
            let mut rest = &bytes[..];
            for range in ranges {
                let (now, later) = rest.split_at(range.len());
                made[range.start as usize..range.end as usize].copy_from_slice(now);
                rest = later;
            }
            if self.set.all {
                covered.extend_from_slice(ranges);
            }
        }
        if self.set.all {
            covered.sort_unstable_by_key(|range: &Range<u32>| range.start);
            let end = covered.iter().try_fold(0, |end, range| match range.start <= end {
                true => Ok(range.end.max(end)),
                false => Err(end),
            });
            let hole = end.map_or_else(Some, |end| Some(end).filter(|end| (*end as usize) < made.len()));
            if let Some(at) = hole {
                return Err(ShardError::Uncovered(start + u64::from(at)));
            }
        }
        Ok(())
    }
}
