//! The work that is left when a plan is concluded: adding up the two sums of a block.
//!
//! Holds `unsafe`; the module above explains why it is sound.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libmodelio::vocabulary::ids::BlockId;

use super::PartitionJob;

/// Blocks of which both sums hold something, to be added to each other. Until that is done and this is
/// dropped, no other plan begins. Dropping it does the work that is left.
#[derive(Debug)]
pub struct Merge {
    job: Arc<PartitionJob>,
    blocks: Vec<BlockId>,
    taken: Box<[AtomicBool]>,
}

impl Merge {
    pub(super) fn new(job: Arc<PartitionJob>, blocks: Vec<BlockId>) -> Merge {
        let taken = blocks.iter().map(|_| AtomicBool::new(false)).collect();
        Merge { job, blocks, taken }
    }

    /// How many blocks there are to do.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Adds some of the blocks, by their index below [`Self::len`]; blocks that another thread has taken are
    /// left to it.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn run(&self, range: Range<usize>) {
        let sums = self.job.sums();
        for (&block, taken) in self.blocks[range.clone()].iter().zip(&self.taken[range]) {
            if taken.swap(true, Ordering::Relaxed) {
                continue;
            }
            // SAFETY: the job is concluded, so that nobody can claim the block; no other job begins while
            // this one exists; and the thread that has taken the block here is alone with it.
            unsafe { sums.merge(block) };
        }
    }
}

impl Drop for Merge {
    fn drop(&mut self) {
        self.run(0..self.blocks.len());
    }
}
