//! The parts of a mapping that its program has declared final before its fsync.
//!
//! Pure: it reads no memory. A block is due once the declared ranges cover all of it, whatever their order and however
//! much they overlap. It is due once in a contribution.

use std::collections::BTreeMap;
use std::ops::Range;

use fixedbitset::FixedBitSet;

use crate::vocabulary::ids::{BlockId, Step};
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::ranges;

/// The most ranges that are remembered of blocks that are covered in part. Blocks beyond that wait for fsync.
const MAX_RANGES: usize = 1 << 16;

/// The final parts of one contribution.
#[derive(Debug)]
pub(super) struct FinalParts {
    /// The step of the contribution that was opened for blocks that are sent now. `None` while nothing is sent.
    step: Option<Step>,
    /// Blocks that are covered.
    whole: FixedBitSet,
    /// Those that were not handed out yet.
    due: FixedBitSet,
    /// The covered ranges of other blocks, relative to the block.
    partial: BTreeMap<BlockId, Vec<Range<u32>>>,
    /// The number of those ranges.
    ranges: usize,
}

impl FinalParts {
    /// Nothing of a model with this many blocks.
    pub(super) fn new(blocks: u32) -> FinalParts {
        let none = FixedBitSet::with_capacity(blocks as usize);
        FinalParts { step: None, whole: none.clone(), due: none, partial: BTreeMap::new(), ranges: 0 }
    }

    /// The step of the contribution that was opened for them.
    pub(super) fn step(&self) -> Option<Step> {
        self.step
    }

    /// A contribution to `step` is open for them.
    pub(super) fn opened(&mut self, step: Step) {
        self.step = Some(step);
    }

    /// These bytes of the model are final.
    pub(super) fn add(&mut self, layout: &ModelLayout, bytes: Range<u64>) {
        if bytes.is_empty() {
            return;
        }
        let block_size = u64::from(layout.block_size());
        let blocks = bytes.start / block_size..(bytes.end - 1) / block_size + 1;
        for block in blocks.map(|block| BlockId(block as u32)) {
            if self.whole.contains(block.index()) {
                continue;
            }
            let extent = layout.block_bytes(block);
            let relative = |at: u64| (at.clamp(extent.start, extent.end) - extent.start) as u32;
            let covered = relative(bytes.start)..relative(bytes.end);
            let all = 0..relative(extent.end);
            let known = self.partial.entry(block).or_default();
            self.ranges -= known.len();
            ranges::insert(known, covered);
            if known[..] == [all] {
                self.partial.remove(&block);
                self.whole.insert(block.index());
                self.due.insert(block.index());
            } else if self.ranges + known.len() > MAX_RANGES {
                self.partial.remove(&block);
            } else {
                self.ranges += known.len();
            }
        }
    }

    /// Whether blocks are due.
    pub(super) fn has_due(&self) -> bool {
        !self.due.is_clear()
    }

    /// Hands out the blocks that are due.
    pub(super) fn take_due(&mut self) -> Vec<BlockId> {
        let due = self.due.ones().map(|block| BlockId(block as u32)).collect();
        self.due.clear();
        due
    }

    /// Nothing is final any more. Returns the step of the contribution that was open for it.
    pub(super) fn clear(&mut self) -> Option<Step> {
        self.whole.clear();
        self.due.clear();
        self.partial.clear();
        self.ranges = 0;
        self.step.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::layout::DType;

    const BLOCK: u64 = 64 << 10;
    const SIZE: u64 = 3 * BLOCK + 100;

    fn parts() -> (ModelLayout, FinalParts) {
        let layout = ModelLayout::blank(SIZE, DType::F32, BLOCK as u32).unwrap();
        let parts = FinalParts::new(layout.blocks());
        (layout, parts)
    }

    fn due(parts: &mut FinalParts) -> Vec<u32> {
        assert_eq!(parts.has_due(), !parts.due.is_clear());
        parts.take_due().into_iter().map(|block| block.0).collect()
    }

    #[test]
    fn a_block_is_due_once_it_is_covered_and_only_once() {
        let (layout, mut parts) = parts();
        parts.add(&layout, 10..2 * BLOCK + 10);
        assert_eq!(due(&mut parts), [1], "the others are covered in part");
        parts.add(&layout, 5..20);
        parts.add(&layout, 2 * BLOCK..2 * BLOCK + 5);
        assert_eq!(due(&mut parts), [0; 0]);
        parts.add(&layout, 0..5);
        assert_eq!(due(&mut parts), [0]);
        parts.add(&layout, 0..SIZE);
        assert_eq!(due(&mut parts), [2, 3], "the last block is short");
        parts.add(&layout, 0..SIZE);
        assert!(!parts.has_due());
    }

    #[test]
    fn what_is_cleared_is_due_again_when_it_is_covered_again() {
        let (layout, mut parts) = parts();
        parts.add(&layout, 0..BLOCK + 1);
        parts.opened(Step(7));
        assert_eq!((parts.step(), parts.clear(), parts.step()), (Some(Step(7)), Some(Step(7)), None));
        assert!(!parts.has_due());
        parts.add(&layout, BLOCK + 1..2 * BLOCK);
        assert!(!parts.has_due(), "the first byte is no longer final");
        parts.add(&layout, 0..BLOCK + 1);
        assert_eq!(due(&mut parts), [0, 1]);
    }

    #[test]
    fn what_is_scattered_is_forgotten_and_no_memory_is_taken_for_it() {
        let (layout, mut parts) = parts();
        for _ in 0..2 {
            for byte in (0..SIZE).step_by(2) {
                parts.add(&layout, byte..byte + 1);
                assert!(parts.ranges <= MAX_RANGES);
            }
        }
        assert_eq!(parts.ranges, parts.partial.values().map(Vec::len).sum::<usize>());
        assert!(!parts.has_due());
        parts.add(&layout, 0..SIZE);
        assert_eq!(due(&mut parts), [0, 1, 2, 3]);
        assert_eq!((parts.ranges, parts.partial.len()), (0, 0));
    }
}
