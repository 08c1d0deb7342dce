//! Which bytes, blocks and tensors the open contribution has.

use fixedbitset::FixedBitSet;

use crate::tracker::{ContributionTracker, Gaps};
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::partly::{MAX_PIECES, PartlyWritten};

/// What the open contribution has.
pub(super) struct Coverage {
    pub(super) tracker: ContributionTracker,
    /// Blocks that were filled up with zeros at the end.
    pub(super) unchecked: FixedBitSet,
    /// The written ranges of those blocks.
    partly: PartlyWritten,
    /// Tensors of which something was written.
    pub(super) tensors: FixedBitSet,
}

impl Coverage {
    pub(super) fn new(layout: &ModelLayout) -> Coverage {
        Coverage {
            tracker: ContributionTracker::new(layout.size(), layout.block_size()),
            unchecked: FixedBitSet::with_capacity(layout.blocks() as usize),
            partly: PartlyWritten::default(),
            tensors: FixedBitSet::with_capacity(layout.tensors().len()),
        }
    }

    pub(super) fn clear(&mut self) {
        self.tracker.reset();
        self.unchecked.clear();
        self.partly.clear();
        self.tensors.clear();
    }

    /// Blocks that were written in part are filled up.
    pub(super) fn fill(&mut self, gaps: Vec<Gaps>) {
        for gaps in gaps {
            self.unchecked.insert(gaps.block.index());
            self.partly.insert(gaps.block, gaps.written);
        }
    }

    /// The written ranges of blocks that were filled up. None if there are too many.
    pub(super) fn partly(&self) -> Option<PartlyWritten> {
        Some(&self.partly).filter(|partly| partly.pieces() <= MAX_PIECES).cloned()
    }
}
