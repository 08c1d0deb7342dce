//! The last work of a concluded plan: adding up the two sums of a block.
//!
//! This module holds `unsafe`; the module above explains why it is sound.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libmodelio::vocabulary::ids::BlockId;

use super::PartitionJob;

/// The blocks that have two sums, which must be added to each other. No other plan begins until that is done and this
/// is dropped. Dropping it does the rest of the work.
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

    /// The number of blocks.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Merges some of the blocks, by their index below [`Self::len`]. Blocks that another thread has taken are left
    /// to it.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn run(&self, range: Range<usize>) {
        let sums = &self.job.sums;
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
