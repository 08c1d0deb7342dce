//! New weights in parts: what clients have brought, and what a plan lays over the newest version. It knows no executor
//! and no connection.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::ids::{BlockId, ClientId, PlanId, Version};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::strided::Strided;
use libmodelio::wire::{PlanPart, Refusal, SetOfParts};
use parking_lot::RwLock;

use super::core::local_blocks;

/// What clients have brought, and what a plan takes of it.
#[derive(Default)]
pub struct Brought {
    /// The parts that are here, by their clients and the clients' names for them.
    parts: BTreeMap<(ClientId, u64), Weak<Part>>,
    /// The plan under way, if it publishes parts.
    laid: Option<(PlanId, Arc<Laid>)>,
}

/// What a client has brought of a part. It is here as long as its connection, or a plan that takes it.
#[derive(Default)]
pub struct Part(RwLock<PartBytes>);

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
pub struct Laid {
    set: SetOfParts,
    /// Of each part, what is here of it, and the blocks here of which it holds something.
    parts: Vec<(Option<Arc<Part>>, FixedBitSet)>,
    base: Version,
    /// Why they make no version.
    failed: OnceLock<ShardError>,
}

/// The bytes of a model, as those see them who bring pieces of it.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Of the whole model.
    pub model: u64,
    /// Of a block.
    pub block: u64,
    /// The most bytes that a part may have.
    pub part: u64,
}

impl Brought {
    /// A place for a part, or what has come of it.
    pub fn part(&mut self, client: ClientId, token: u64) -> Arc<Part> {
        self.parts.retain(|_, part| part.strong_count() > 0);
        let part = self.parts.get(&(client, token)).and_then(Weak::upgrade).unwrap_or_default();
        self.parts.insert((client, token), Arc::downgrade(&part));
        part
    }

    /// A plan on top of `base` publishes this set, or no parts. These blocks are here.
    pub fn takes(&mut self, plan: PlanId, set: Option<SetOfParts>, base: Version, mine: &[BlockId]) {
        let of = |part: &PlanPart| {
            let here = self.parts.get(&(part.client, part.token)).and_then(Weak::upgrade);
            (here, local_blocks(&part.blocks, mine))
        };
        self.laid = set.map(|set| {
            let parts = set.parts.iter().map(of).collect();
            (plan, Arc::new(Laid { set, parts, base, failed: OnceLock::new() }))
        });
    }

    /// The parts that this plan takes.
    pub fn laid(&self, plan: PlanId) -> Option<&Arc<Laid>> {
        self.laid.as_ref().filter(|(of, _)| *of == plan).map(|(_, laid)| laid)
    }

    /// Why the parts of this plan make no version, if that is known.
    pub fn why_not(&self, plan: PlanId) -> Option<ShardError> {
        self.laid(plan)?.failed.get().cloned()
    }

    /// A plan is over. The caller drops its parts.
    pub fn lets_go(&mut self, plan: PlanId) -> impl Sized + use<> {
        self.laid.take_if(|(of, _)| *of == plan)
    }
}

impl Part {
    /// Keeps packed pieces of it. `local` names the blocks that are here.
    ///
    /// # Errors
    /// If they do not lie here, or are no pieces, or the part has more bytes than there are.
    pub fn keep(
        &self,
        sizes: Sizes,
        local: impl Fn(BlockId) -> Option<BlockId>,
        (pieces, mut packed): (&[Strided], &[u8]),
    ) -> Result<(), Refusal> {
        if Strided::total(pieces, sizes.model) != Some(packed.len() as u64) {
            return Err(ShardError::OutOfRange.into());
        }
        let size = sizes.block;
        let local = |at: u64| {
            let block = BlockId((at / size) as u32);
            local(block).ok_or(Refusal::NotMine { block })
        };
        let mut part = self.0.write();
        part.bytes += packed.len() as u64;
        if part.bytes > sizes.part {
            return Err(ShardError::OutOfRange.into());
        }
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
}

impl Laid {
    /// The blocks here that somebody has to make.
    pub fn blocks(&self, all: usize) -> FixedBitSet {
        let mut blocks = FixedBitSet::with_capacity(all);
        self.parts.iter().for_each(|(_, of)| blocks.union_with(of));
        if self.set.all {
            blocks.insert_range(..);
        }
        blocks
    }

    /// The version that the parts are laid over.
    pub fn base(&self) -> Version {
        self.base
    }

    /// They make no version. Whether this is news.
    pub fn fails(&self, why: ShardError) -> bool {
        self.failed.set(why).is_ok()
    }

    /// Makes a block of the next version, which begins at `start` in the model and has the bytes `before`.
    ///
    /// # Errors
    /// If a part is not here, or no part has a byte that one must have.
    pub fn block(
        &self,
        before: &[u8],
        (block, start): (BlockId, u64),
        made: &mut Vec<u8>,
    ) -> Result<(), ShardError> {
        let mut covered = Vec::new();
        made.clear();
        made.extend_from_slice(before);
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
