//! Sets of blocks as lists of ranges, the way messages name them.
use std::ops::Range;

use fixedbitset::FixedBitSet;

/// Blocks of the model, as sorted, disjoint, non-adjacent ranges of block numbers.
pub type BlockRanges = Vec<Range<u32>>;

/// Tensors of the model, as sorted, disjoint, non-adjacent ranges of their numbers.
pub type TensorRanges = Vec<Range<u32>>;

/// Most ranges of one list: at ten bytes each they fit a body.
pub const MAX_RANGES: usize = 64 << 10;

/// Why a list names no set of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangesError {
    /// More than [`MAX_RANGES`].
    #[error("{got} ranges, the limit is {MAX_RANGES}")]
    TooMany {
        /// How many.
        got: usize,
    },
    /// A range that holds no block.
    #[error("range {start}..{end} is empty")]
    Empty {
        /// Its first block.
        start: u32,
        /// The one after its last.
        end: u32,
    },
    /// A range that does not begin behind the gap after the one before.
    #[error("a range begins at block {got}, expected {expected} or later")]
    Order {
        /// The first block that it may begin with.
        expected: u32,
        /// The first block.
        got: u32,
    },
    /// A range that leaves the model.
    #[error("a range ends at block {got}, the model ends at {blocks}")]
    Outside {
        /// Blocks of the model.
        blocks: u32,
        /// The end of the range.
        got: u32,
    },
}

/// Checks that `ranges` is a set of blocks of a model of `blocks` blocks: sorted, disjoint, with gaps
/// between, none empty, not too many.
///
/// # Errors
/// [`RangesError`] for the first that is not.
pub fn check(ranges: &BlockRanges, blocks: u32) -> Result<(), RangesError> {
    if ranges.len() > MAX_RANGES {
        return Err(RangesError::TooMany { got: ranges.len() });
    }
    let mut least = 0;
    for range in ranges {
        let (start, end) = (range.start, range.end);
        if start >= end {
            return Err(RangesError::Empty { start, end });
        }
        if start < least {
            return Err(RangesError::Order { expected: least, got: start });
        }
        if end > blocks {
            return Err(RangesError::Outside { blocks, got: end });
        }
        // Behind the last block that can be there is nothing to begin with: that is found by the next range.
        least = end.saturating_add(1);
    }
    Ok(())
}

/// How many blocks `ranges` names; it was [`check`]ed.
pub fn count(ranges: &BlockRanges) -> u32 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// Whether `ranges`, which was [`check`]ed, names `block`.
pub fn contains(ranges: &BlockRanges, block: u32) -> bool {
    let after = ranges.partition_point(|range| range.start <= block);
    after.checked_sub(1).is_some_and(|at| block < ranges[at].end)
}

/// The set of `ranges` in a model of `blocks` blocks.
///
/// # Errors
/// Fails as [`check`] does.
pub fn to_bits(ranges: &BlockRanges, blocks: u32) -> Result<FixedBitSet, RangesError> {
    check(ranges, blocks)?;
    let mut bits = FixedBitSet::with_capacity(blocks as usize);
    for range in ranges {
        bits.insert_range(range.start as usize..range.end as usize);
    }
    Ok(bits)
}

/// `bits` as ranges. A set has at most 2^32-1 blocks.
///
/// # Errors
/// [`RangesError::TooMany`].
pub fn from_bits(bits: &FixedBitSet) -> Result<BlockRanges, RangesError> {
    let mut ranges = BlockRanges::new();
    for block in bits.ones().map(|block| block as u32) {
        let is_full = ranges.len() == MAX_RANGES;
        match ranges.last_mut() {
            Some(last) if last.end == block => last.end = block + 1,
            _ if is_full => return Err(RangesError::TooMany { got: MAX_RANGES + 1 }),
            _ => ranges.push(block..block + 1),
        }
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    #[expect(
        clippy::reversed_empty_ranges,
        clippy::single_range_in_vec_init,
        reason = "what a peer may send"
    )]
    fn lists_that_name_no_set_are_refused() {
        let check = |ranges: &[std::ops::Range<u32>]| check(&ranges.to_vec(), 10);
        assert_eq!(check(&[]), Ok(()));
        assert_eq!(check(&[0..2, 3..10]), Ok(()));
        assert_eq!(check(&[2..2]), Err(RangesError::Empty { start: 2, end: 2 }));
        assert_eq!(check(&[3..2]), Err(RangesError::Empty { start: 3, end: 2 }));
        assert_eq!(check(&[0..2, 2..3]), Err(RangesError::Order { expected: 3, got: 2 }));
        assert_eq!(check(&[4..6, 0..2]), Err(RangesError::Order { expected: 7, got: 0 }));
        assert_eq!(check(&[4..11]), Err(RangesError::Outside { blocks: 10, got: 11 }));
    }

    #[test]
    fn there_is_a_limit_to_their_number() {
        let every_other: BlockRanges = (0..=MAX_RANGES as u32).map(|i| 2 * i..2 * i + 1).collect();
        let too_many = RangesError::TooMany { got: MAX_RANGES + 1 };
        assert_eq!(check(&every_other, u32::MAX), Err(too_many));
        let mut bits = FixedBitSet::with_capacity(2 * MAX_RANGES + 1);
        bits.extend((0..=MAX_RANGES).map(|i| 2 * i));
        assert_eq!(from_bits(&bits), Err(too_many));
        bits.set(2 * MAX_RANGES, false);
        assert_eq!(check(&from_bits(&bits).unwrap(), u32::MAX), Ok(()));
    }

    proptest! {
        #[test]
        fn ranges_are_bits(set in proptest::collection::vec(any::<bool>(), 1..300)) {
            let blocks = set.len() as u32;
            let bits: FixedBitSet = set.iter().zip(0..).filter(|(in_it, _)| **in_it).map(|(_, i)| i).collect();
            let ranges = from_bits(&bits).unwrap();
            prop_assert_eq!(check(&ranges, blocks), Ok(()));
            let again = to_bits(&ranges, blocks).unwrap();
            prop_assert_eq!(again.ones().collect::<Vec<_>>(), bits.ones().collect::<Vec<_>>());
            prop_assert_eq!(count(&ranges) as usize, bits.count_ones(..));
            for (in_it, block) in set.iter().zip(0..) {
                prop_assert_eq!(contains(&ranges, block), *in_it);
            }
        }

        #[test]
        fn whatever_passes_is_a_set(ranges in proptest::collection::vec(0..40u32, 0..6), blocks in 0..40u32) {
            let ranges: BlockRanges = ranges.chunks_exact(2).map(|pair| pair[0]..pair[1]).collect();
            if let Ok(bits) = to_bits(&ranges, blocks) {
                prop_assert_eq!(from_bits(&bits), Ok(ranges));
            }
        }
    }
}
