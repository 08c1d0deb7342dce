//! What of one contribution has been written, and what has gone to its shard.
//!
//! Pure: it moves no bytes and reads no clock. A program writes at any offset and length, from
//! several threads; the tracker cuts each write into *pieces* of one block, says which pieces are
//! whole blocks that can be offered to the shard straight from the request buffer, and which must
//! be gathered in the staging region until their block is complete (DESIGN: a block is sent as soon
//! as all its bytes are there). A byte of a block that is already sent cannot be written again.

use std::collections::BTreeMap;
use std::ops::Range;

use fixedbitset::FixedBitSet;
use nix::errno::Errno;

use crate::vocabulary::ids::BlockId;
use crate::vocabulary::ranges;

/// Why a write is refused; nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteRefused {
    /// The range leaves the model.
    #[error("bytes {offset}..{end} are outside the model's {size} bytes")]
    PastEnd {
        /// First byte of the write.
        offset: u64,
        /// One past its last byte.
        end: u64,
        /// The model's size.
        size: u64,
    },
    /// The contribution is complete.
    #[error("the version was already committed: open weights again")]
    Sealed,
    /// The write touches a block that was already sent in this contribution.
    #[error("block {0} of this contribution was already sent: a byte is written once a step")]
    Rewrite(BlockId),
}

impl WriteRefused {
    /// What a program sees.
    pub fn errno(self) -> Errno {
        match self {
            WriteRefused::PastEnd { .. } => Errno::EFBIG,
            WriteRefused::Rewrite(_) | WriteRefused::Sealed => Errno::EINVAL,
        }
    }
}

/// One block's share of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockPart {
    /// The block.
    pub block: BlockId,
    /// Bytes in the model's flat range.
    pub bytes: Range<u64>,
    /// Whether these are all the block's bytes, none of which was staged before: it can be offered
    /// from the caller's buffer.
    pub whole: bool,
}

/// Byte ranges of a block that is only partly written.
#[derive(Debug, Default)]
struct Partial {
    /// Sorted, disjoint, non-adjacent; relative to the block.
    ranges: Vec<Range<u32>>,
    /// Pieces that are being copied just now.
    copying: u32,
}

/// The state of one contribution, and reusable for the next.
#[derive(Debug)]
pub struct ContributionTracker {
    size: u64,
    block_size: u32,
    /// Blocks that went to the shard, or are on their way.
    sent: FixedBitSet,
    /// Sent blocks whose payload the shard will read from staging at commit.
    deferred: FixedBitSet,
    partial: BTreeMap<BlockId, Partial>,
    /// Emptied range lists, kept so that a steady stream of small writes allocates nothing.
    spare: Vec<Vec<Range<u32>>>,
    in_flight: u32,
    bytes: u64,
}

/// A block that was written in part when its contribution ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gaps {
    /// The block.
    pub block: BlockId,
    /// Its written bytes, relative to it.
    pub written: Vec<Range<u32>>,
    /// Unwritten bytes in the model's flat range.
    pub missing: Vec<Range<u64>>,
}

impl ContributionTracker {
    /// For a model of `size` bytes in blocks of `block_size`.
    pub fn new(size: u64, block_size: u32) -> ContributionTracker {
        let blocks = size.div_ceil(u64::from(block_size)) as usize;
        ContributionTracker {
            size,
            block_size,
            sent: FixedBitSet::with_capacity(blocks),
            deferred: FixedBitSet::with_capacity(blocks),
            partial: BTreeMap::new(),
            spare: Vec::new(),
            in_flight: 0,
            bytes: 0,
        }
    }

    /// Bytes written so far; overwritten ones count again.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether nothing was written.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether some piece is still being copied or offered.
    pub fn is_busy(&self) -> bool {
        self.in_flight > 0
    }

    fn block_bytes(&self, block: BlockId) -> Range<u64> {
        let start = u64::from(block.0) * u64::from(self.block_size);
        start..(start + u64::from(self.block_size)).min(self.size)
    }

    /// Reserves `offset..offset + len` and calls `each` for its pieces, in order.
    ///
    /// Every piece must be answered with [`Self::copied`] (staged) or [`Self::sent`] (offered whole).
    ///
    /// # Errors
    /// [`WriteRefused`]; then nothing is reserved and `each` was not called.
    pub fn begin(
        &mut self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(BlockPart),
    ) -> Result<(), WriteRefused> {
        let end = offset.checked_add(len).filter(|&end| end <= self.size).ok_or(WriteRefused::PastEnd {
            offset,
            end: offset.saturating_add(len),
            size: self.size,
        })?;
        if len == 0 {
            return Ok(());
        }
        let first = (offset / u64::from(self.block_size)) as u32;
        let last = ((end - 1) / u64::from(self.block_size)) as u32;
        if let Some(block) = (first..=last).find(|&block| self.sent.contains(block as usize)) {
            return Err(WriteRefused::Rewrite(BlockId(block)));
        }
        for block in (first..=last).map(BlockId) {
            let extent = self.block_bytes(block);
            let bytes = offset.max(extent.start)..end.min(extent.end);
            let whole = bytes == extent && !self.partial.contains_key(&block);
            if whole {
                self.sent.insert(block.index());
            } else {
                let spare = &mut self.spare;
                let partial = self
                    .partial
                    .entry(block)
                    .or_insert_with(|| Partial { ranges: spare.pop().unwrap_or_default(), copying: 0 });
                let relative = (bytes.start - extent.start) as u32..(bytes.end - extent.start) as u32;
                ranges::insert(&mut partial.ranges, relative);
                partial.copying += 1;
            }
            self.in_flight += 1;
            each(BlockPart { block, bytes, whole });
        }
        self.bytes += len;
        Ok(())
    }

    /// The staged piece of `block` has been copied. True when that completes the block: the caller
    /// now offers it from staging and then calls [`Self::sent`].
    pub fn copied(&mut self, block: BlockId) -> bool {
        let extent = self.block_bytes(block);
        let whole = 0..(extent.end - extent.start) as u32;
        let Some(partial) = self.partial.get_mut(&block) else {
            // Only after `reset` under a running copy, which the owner excludes.
            debug_assert!(false, "{block:?} was not being staged");
            return false;
        };
        partial.copying -= 1;
        if partial.copying == 0 && partial.ranges.len() == 1 && partial.ranges[0] == whole {
            self.retire(block);
            self.sent.insert(block.index());
            return true;
        }
        self.answered();
        false
    }

    /// The shard took `block`, or refused it for good; `deferred` when it will read the payload from staging at commit.
    pub fn sent(&mut self, block: BlockId, deferred: bool) {
        debug_assert!(self.sent.contains(block.index()));
        self.answered();
        if deferred {
            self.deferred.insert(block.index());
        }
    }

    fn answered(&mut self) {
        debug_assert!(self.in_flight > 0, "a piece was answered twice");
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Ends the contribution's writing: incomplete blocks count as sent from staging. Their gaps are
    /// for the caller to fill with zeros.
    pub fn seal(&mut self) -> Vec<Gaps> {
        let mut gaps = Vec::new();
        while let Some((&block, _)) = self.partial.first_key_value() {
            let extent = self.block_bytes(block);
            let mut missing = Vec::new();
            let mut at = extent.start;
            let written = self.partial[&block].ranges.clone();
            for range in &written {
                let start = extent.start + u64::from(range.start);
                if start > at {
                    missing.push(at..start);
                }
                at = extent.start + u64::from(range.end);
            }
            if at < extent.end {
                missing.push(at..extent.end);
            }
            gaps.push(Gaps { block, written, missing });
            self.retire(block);
            self.sent.insert(block.index());
            self.deferred.insert(block.index());
        }
        gaps
    }

    /// The bytes that nobody has written, sorted and disjoint.
    pub fn missing(&self) -> Vec<Range<u64>> {
        let mut missing = Vec::new();
        let unsent = (0..self.sent.len()).filter(|&block| !self.sent.contains(block));
        for block in unsent.map(|block| BlockId(block as u32)) {
            let extent = self.block_bytes(block);
            let mut at = extent.start;
            for range in self.partial.get(&block).into_iter().flat_map(|partial| &partial.ranges) {
                ranges::insert(&mut missing, at..extent.start + u64::from(range.start));
                at = extent.start + u64::from(range.end);
            }
            ranges::insert(&mut missing, at..extent.end);
        }
        missing
    }

    /// Blocks that were sent.
    pub fn sent_blocks(&self) -> &FixedBitSet {
        &self.sent
    }

    /// Sent blocks whose payload is in staging.
    pub fn deferred_blocks(&self) -> &FixedBitSet {
        &self.deferred
    }

    /// Forgets everything, for the next contribution. The caller makes sure that no piece is in flight.
    pub fn reset(&mut self) {
        self.sent.clear();
        self.deferred.clear();
        while let Some((&block, _)) = self.partial.first_key_value() {
            self.retire(block);
        }
        self.in_flight = 0;
        self.bytes = 0;
    }

    fn retire(&mut self, block: BlockId) {
        if let Some(mut partial) = self.partial.remove(&block)
            && self.spare.len() < 64
        {
            partial.ranges.clear();
            self.spare.push(partial.ranges);
        }
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // lists of ranges that happen to have one
mod tests {
    use super::*;

    const BLOCK: u32 = 64 << 10;

    fn tracker() -> ContributionTracker {
        ContributionTracker::new(3 * u64::from(BLOCK) + 100, BLOCK)
    }

    fn begin(tracker: &mut ContributionTracker, offset: u64, len: u64) -> Vec<BlockPart> {
        let mut pieces = Vec::new();
        tracker.begin(offset, len, |piece| pieces.push(piece)).unwrap();
        pieces
    }

    #[test]
    fn a_write_over_everything_is_whole_blocks_and_a_short_last_one() {
        let mut t = tracker();
        let pieces = begin(&mut t, 0, 3 * u64::from(BLOCK) + 100);
        assert_eq!(pieces.len(), 4);
        assert!(pieces.iter().all(|piece| piece.whole));
        assert_eq!(pieces[3].bytes, 196_608..196_708);
        assert!(t.is_busy());
        for piece in pieces {
            t.sent(piece.block, false);
        }
        assert!(!t.is_busy());
        assert_eq!(t.seal(), vec![]);
    }

    #[test]
    fn unaligned_writes_gather_until_the_block_is_there() {
        let mut t = tracker();
        let block = u64::from(BLOCK);
        let pieces = begin(&mut t, 10, block - 5);
        assert_eq!(pieces.iter().map(|p| p.whole).collect::<Vec<_>>(), [false, false]);
        assert!(!t.copied(BlockId(0)));
        assert!(!t.copied(BlockId(1)));
        begin(&mut t, 0, 10);
        assert!(t.copied(BlockId(0)), "the block is complete");
        t.sent(BlockId(0), true);
        assert_eq!(t.begin(5, 1, |_| panic!()), Err(WriteRefused::Rewrite(BlockId(0))));
        let gaps = t.seal();
        assert_eq!(
            gaps,
            vec![Gaps { block: BlockId(1), written: vec![0..5], missing: vec![block + 5..2 * block] }]
        );
        assert_eq!(t.deferred_blocks().count_ones(..), 2);
        assert_eq!(t.missing(), vec![2 * block..3 * block + 100]);
    }

    #[test]
    fn what_nobody_has_written_is_missing() {
        let (mut t, block) = (tracker(), u64::from(BLOCK));
        let all = 3 * block + 100;
        assert_eq!(t.missing(), vec![0..all]);
        begin(&mut t, 0, 10);
        begin(&mut t, 20, block);
        assert_eq!(t.missing(), vec![10..20, block + 20..all]);
        begin(&mut t, 2 * block, block);
        assert_eq!(t.missing(), vec![10..20, block + 20..2 * block, 3 * block..all]);
        t.reset();
        assert_eq!(t.missing(), vec![0..all]);
    }

    #[test]
    fn refused_writes_change_nothing() {
        let mut t = tracker();
        let size = 3 * u64::from(BLOCK) + 100;
        assert!(matches!(t.begin(size - 1, 2, |_| panic!()), Err(WriteRefused::PastEnd { .. })));
        assert!(matches!(t.begin(u64::MAX, 2, |_| panic!()), Err(WriteRefused::PastEnd { .. })));
        begin(&mut t, u64::from(BLOCK), u64::from(BLOCK));
        t.sent(BlockId(1), false);
        assert_eq!(t.begin(0, size, |_| panic!()), Err(WriteRefused::Rewrite(BlockId(1))));
        assert_eq!(begin(&mut t, 0, u64::from(BLOCK)).len(), 1, "block 0 was not reserved");
    }

    #[test]
    fn a_block_completes_only_when_the_slowest_copy_is_in() {
        let mut t = tracker();
        let half = u64::from(BLOCK) / 2;
        begin(&mut t, 0, half);
        begin(&mut t, half, half);
        assert!(!t.copied(BlockId(0)), "the other half is still being copied");
        assert!(t.copied(BlockId(0)));
    }

    #[test]
    fn staged_bytes_may_be_written_again_until_sent() {
        let mut t = tracker();
        begin(&mut t, 0, 100);
        assert!(!t.copied(BlockId(0)));
        begin(&mut t, 50, 100);
        assert!(!t.copied(BlockId(0)));
        assert_eq!(t.seal()[0].missing, vec![150..u64::from(BLOCK)]);
    }
}
