//! The written bytes of a contribution's blocks, where not all bytes were written. Gradients do not need it:
//! unwritten bytes count as zero. Values do.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::vocabulary::block_ranges::{self, RangesError};
use crate::vocabulary::ids::BlockId;

/// Most pieces that a version takes, of all its contributions together: an order to a shard names them all.
pub const MAX_PIECES: usize = 16 << 10;

/// The written bytes of blocks that were written in part, by block. Any other block that is sent was written
/// as a whole. Ranges are relative to their block.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartlyWritten(Vec<(BlockId, Vec<Range<u32>>)>);

impl PartlyWritten {
    /// The bytes of `block` are these: sorted, with gaps between.
    pub fn insert(&mut self, block: BlockId, written: Vec<Range<u32>>) {
        match self.0.binary_search_by_key(&block, |(block, _)| *block) {
            Ok(at) => self.0[at].1 = written,
            Err(at) => self.0.insert(at, (block, written)),
        }
    }

    /// The written ranges of `block`; `None` if it was not written in part.
    pub fn of(&self, block: BlockId) -> Option<&[Range<u32>]> {
        let at = self.0.binary_search_by_key(&block, |(block, _)| *block).ok()?;
        Some(&self.0[at].1)
    }

    /// The blocks, rising, with their bytes.
    pub fn blocks(&self) -> impl Iterator<Item = (BlockId, &[Range<u32>])> {
        self.0.iter().map(|(block, written)| (*block, &written[..]))
    }

    /// Whether no block was written in part.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// In how many pieces.
    pub fn pieces(&self) -> usize {
        self.0.iter().map(|(_, written)| written.len()).sum()
    }

    /// Checks that this can be of a model with `blocks` blocks, which may be fewer than the block numbers
    /// here.
    ///
    /// # Errors
    /// [`RangesError`] for the first thing that is not.
    pub fn check(&self, blocks: u32) -> Result<(), RangesError> {
        let mut expected = 0;
        for (block, written) in &self.0 {
            if block.0 < expected {
                return Err(RangesError::Order { expected, got: block.0 });
            }
            if block.0 >= blocks {
                return Err(RangesError::Outside { blocks, got: block.0 });
            }
            if written.is_empty() {
                return Err(RangesError::Empty { start: block.0, end: block.0 });
            }
            block_ranges::check(written, u32::MAX)?;
            expected = block.0.saturating_add(1);
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // lists of ranges that happen to have one
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_and_lists_that_are_none_are_refused() {
        let mut partly = PartlyWritten::default();
        partly.insert(BlockId(7), vec![1..2, 4..9]);
        partly.insert(BlockId(3), vec![5..6, 8..9]);
        partly.insert(BlockId(3), vec![5..6]);
        assert_eq!((partly.of(BlockId(3)), partly.of(BlockId(4))), (Some(&[5..6][..]), None));
        assert_eq!((partly.pieces(), partly.check(8)), (3, Ok(())));
        assert_eq!(partly.check(7), Err(RangesError::Outside { blocks: 7, got: 7 }));
        let bad = |blocks: &[(u32, Vec<Range<u32>>)]| {
            let blocks = blocks.iter().map(|(block, written)| (BlockId(*block), written.clone()));
            PartlyWritten(blocks.collect()).check(100).unwrap_err()
        };
        assert_eq!(bad(&[(1, vec![0..1]), (1, vec![0..1])]), RangesError::Order { expected: 2, got: 1 });
        assert_eq!(bad(&[(1, vec![])]), RangesError::Empty { start: 1, end: 1 });
        assert_eq!(bad(&[(1, vec![4..5, 5..6])]), RangesError::Order { expected: 6, got: 5 });
    }
}
