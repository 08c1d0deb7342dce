//! The contribution tracker against a map with one entry a byte.

use std::ops::Range;

use libmodelio::tracker::{BlockPart, ContributionTracker, Gaps, WriteRefused};
use libmodelio::vocabulary::ids::BlockId;
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

/// Tiny, because the model looks at every byte.
const BLOCK: u64 = 8;

/// What a byte of the model has been through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Byte {
    Unwritten,
    Staged,
    /// Its block went to the shard, or was sealed.
    Sent,
}

#[derive(Debug)]
struct Model {
    bytes: Vec<Byte>,
    deferred: Vec<bool>,
    /// Reserved pieces that have not been answered.
    copying: Vec<BlockPart>,
    offered: Vec<BlockId>,
    written: u64,
}

impl Model {
    fn new(size: u64) -> Model {
        let blocks = size.div_ceil(BLOCK) as usize;
        Model {
            bytes: vec![Byte::Unwritten; size as usize],
            deferred: vec![false; blocks],
            copying: Vec::new(),
            offered: Vec::new(),
            written: 0,
        }
    }

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn range(&self, block: usize) -> Range<usize> {
        let start = block * BLOCK as usize;
        start..(start + BLOCK as usize).min(self.bytes.len())
    }

    fn block(&self, block: usize) -> &[Byte] {
        &self.bytes[self.range(block)]
    }

    fn blocks(&self) -> Range<usize> {
        0..self.deferred.len()
    }

    /// What a write of this range has to become.
    fn pieces(&self, offset: u64, len: u64) -> Result<Vec<BlockPart>, WriteRefused> {
        let end = offset.saturating_add(len);
        if end > self.size() {
            return Err(WriteRefused::PastEnd { offset, end, size: self.size() });
        }
        let mut pieces = Vec::new();
        for block in self.blocks() {
            let extent = self.range(block);
            let bytes = (offset as usize).max(extent.start)..(end as usize).min(extent.end);
            if bytes.start >= bytes.end {
                continue;
            }
            if self.block(block)[0] == Byte::Sent {
                return Err(WriteRefused::Rewrite(BlockId(block as u32)));
            }
            let whole = bytes == extent && self.block(block).iter().all(|byte| *byte == Byte::Unwritten);
            let block = BlockId(block as u32);
            pieces.push(BlockPart { block, bytes: bytes.start as u64..bytes.end as u64, whole });
        }
        Ok(pieces)
    }

    /// Unwritten bytes of blocks that were written in part.
    fn gaps(&self) -> Vec<Gaps> {
        let touched = |block: &usize| self.block(*block).contains(&Byte::Staged);
        self.blocks().filter(touched).map(|block| self.gaps_of(block)).collect()
    }

    fn gaps_of(&self, block: usize) -> Gaps {
        let mut missing: Vec<Range<u64>> = Vec::new();
        for at in self.range(block).filter(|&at| self.bytes[at] == Byte::Unwritten) {
            let at = at as u64;
            match missing.last_mut().filter(|last| last.end == at) {
                Some(last) => last.end += 1,
                None => missing.push(at..at + 1),
            }
        }
        let extent = self.range(block);
        let (start, end) = (extent.start as u64, extent.end as u64);
        let mut written = Vec::new();
        let mut at = start;
        for gap in missing.iter().cloned().chain(std::iter::once(end..end)) {
            if at < gap.start {
                written.push((at - start) as u32..(gap.start - start) as u32);
            }
            at = gap.end;
        }
        Gaps { block: BlockId(block as u32), written, missing }
    }

    fn mark(&mut self, range: Range<usize>, as_what: Byte) {
        self.bytes[range].fill(as_what);
    }
}

#[derive(Clone, Debug)]
enum Op {
    Write(u64, u64),
    /// A copy or an offer that is under way ends; true: the shard reads the block at commit.
    End(usize, bool),
    Seal,
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..70u64, 0..30u64).prop_map(|(offset, len)| Op::Write(offset, len)),
        2 => (0..9u64, 0..4u64).prop_map(|(block, blocks)| Op::Write(block * BLOCK, blocks * BLOCK)),
        1 => (prop::num::u64::ANY, prop::num::u64::ANY).prop_map(|(offset, len)| Op::Write(offset, len)),
        12 => (0..8usize, any::<bool>()).prop_map(|(which, deferred)| Op::End(which, deferred)),
        1 => Just(Op::Seal),
        1 => Just(Op::Reset),
    ]
}

fn write(tracker: &mut ContributionTracker, model: &mut Model, offset: u64, len: u64) -> TestCaseResult {
    let mut pieces = Vec::new();
    let result = tracker.begin(offset, len, |piece| pieces.push(piece));
    let expected = model.pieces(offset, len);
    prop_assert_eq!(result.map(|()| pieces.clone()), expected);
    if result.is_err() {
        prop_assert!(pieces.is_empty(), "a refused write reserves nothing");
        return Ok(());
    }
    model.written += len;
    for piece in pieces {
        let bytes = piece.bytes.start as usize..piece.bytes.end as usize;
        if piece.whole {
            model.mark(bytes, Byte::Sent);
            model.offered.push(piece.block);
        } else {
            model.mark(bytes, Byte::Staged);
            model.copying.push(piece);
        }
    }
    Ok(())
}

fn end(tracker: &mut ContributionTracker, model: &mut Model, which: usize, deferred: bool) -> TestCaseResult {
    let under_way = model.copying.len() + model.offered.len();
    let Some(which) = which.checked_rem(under_way) else { return Ok(()) };
    if which >= model.copying.len() {
        let block = model.offered.remove(which - model.copying.len());
        tracker.sent(block, deferred);
        model.deferred[block.index()] = deferred;
        return Ok(());
    }
    let block = model.copying.remove(which).block;
    let still_copied = model.copying.iter().any(|piece| piece.block == block);
    let complete = !still_copied && model.block(block.index()).iter().all(|byte| *byte == Byte::Staged);
    prop_assert_eq!(tracker.copied(block), complete, "block {} complete", block);
    if complete {
        let range = model.range(block.index());
        model.mark(range, Byte::Sent);
        model.offered.push(block);
    }
    Ok(())
}

fn check(tracker: &ContributionTracker, model: &Model) -> TestCaseResult {
    prop_assert_eq!(tracker.bytes(), model.written);
    prop_assert_eq!(tracker.is_empty(), model.written == 0);
    prop_assert_eq!(tracker.is_busy(), !model.copying.is_empty() || !model.offered.is_empty());
    for block in model.blocks() {
        prop_assert_eq!(tracker.sent_blocks().contains(block), model.block(block)[0] == Byte::Sent);
        prop_assert_eq!(tracker.deferred_blocks().contains(block), model.deferred[block]);
    }
    prop_assert_eq!(tracker.sent_blocks().len(), model.deferred.len());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_tracker_knows_what_a_map_of_bytes_knows(
        size in 1..60u64,
        ops in prop::collection::vec(op(), 0..80),
    ) {
        let mut tracker = ContributionTracker::new(size, BLOCK as u32);
        let mut model = Model::new(size);
        for op in ops {
            match op {
                Op::Write(offset, len) => write(&mut tracker, &mut model, offset, len)?,
                Op::End(which, deferred) => end(&mut tracker, &mut model, which, deferred)?,
                Op::Seal | Op::Reset if tracker.is_busy() => {}
                Op::Seal => {
                    let gaps = model.gaps();
                    prop_assert_eq!(tracker.seal(), gaps.clone());
                    for Gaps { block, .. } in gaps {
                        let range = model.range(block.index());
                        model.mark(range, Byte::Sent);
                        model.deferred[block.index()] = true;
                    }
                    prop_assert_eq!(tracker.seal(), vec![]);
                }
                Op::Reset => {
                    tracker.reset();
                    model = Model::new(size);
                }
            }
            check(&tracker, &model)?;
        }
    }
}
