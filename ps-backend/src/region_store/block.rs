//! The work on one block of a plan in this process: what its version is put together from, folding, checking.
//!
//! Holds `unsafe`; why it is sound is told in the module above.
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use libmodelio::bytes::block::{is_finite, span};
use libmodelio::bytes::kernels::{self, Wire};
use libmodelio::transport::Region;
use libmodelio::vocabulary::ids::{BlockId, LearnerId};
use libmodelio::vocabulary::layout::{ModelLayout, Segment};
use libmodelio::vocabulary::reducer::{self, Combine};
use smallvec::SmallVec;

use super::accumulator::{Accumulator, Payload};
use super::making::{INLINE, Making, Term, Written, widen};
use crate::core::{Contribution, Plan, Work};

/// Everything that computing blocks of one plan needs; built once a version.
#[derive(Debug)]
pub struct Job {
    pub(super) making: Making,
    pub(super) plan: Arc<Plan<Region>>,
    pub(super) accumulator: Option<Accumulator>,
    /// With `assign`, what was folded into it.
    pub(super) folded: Vec<Arc<Contribution<Region>>>,
}

/// Whether a higher learner than `learner` has folded `block`: with `assign`, that counts.
pub fn is_outranked(folded: &[Arc<Contribution<Region>>], learner: LearnerId, block: BlockId) -> bool {
    folded.iter().any(|of| of.learner > learner && of.deferred.contains(block.index()))
}

/// Learners whose contributions are refused.
pub type Blamed = SmallVec<[LearnerId; 2]>;

impl Job {
    /// These were folded into the accumulator.
    #[must_use]
    pub fn after<'a>(mut self, folded: impl Iterator<Item = &'a Arc<Contribution<Region>>>) -> Job {
        if matches!(&self.plan.work, Work::Reduce { step, .. } if step.reducer.combine() == Combine::Last) {
            self.folded = folded.cloned().collect();
        }
        self
    }

    /// The plan it computes.
    pub fn plan(&self) -> &Arc<Plan<Region>> {
        &self.plan
    }

    /// Computes `block` of the next version, with `own` payload (the whole block) from a request buffer
    /// besides what the plan lists. Gives the learners whose contribution is to be refused because it holds NaN
    /// or Inf and nobody had looked at it before; the block is void then.
    pub fn block(&self, block: BlockId, own: Option<(LearnerId, &[u8])>) -> Blamed {
        let Work::Reduce { step, .. } = &self.plan.work else {
            self.assign_block(block);
            return Blamed::new();
        };
        let (terms, written) = self.terms(block, own, &[]);
        // SAFETY: the core gives the block to one thread at a time; folding is over before a plan that reads the
        // accumulator begins, and what is read from staging is lent until the version is made.
        if unsafe { self.making.block(block, step, &terms, &written) } {
            return Blamed::new();
        }
        let blamed = self.judge(block, step, own);
        if blamed.is_empty() {
            self.making.approve(block);
        }
        blamed
    }

    /// Whose contributions are to be refused for NaN or Inf in `block`. An Inf of a sum, or of others that were
    /// looked at before, is not held against anybody.
    ///
    /// What is mapped may change while it is read. So it is judged by a copy, and if that is good, the block is
    /// computed again from it.
    fn judge(&self, block: BlockId, step: &reducer::Step, own: Option<(LearnerId, &[u8])>) -> Blamed {
        if let Some((learner, payload)) = own {
            return (!is_finite(&self.making.layout, block, payload))
                .then_some(learner)
                .into_iter()
                .collect();
        }
        let Work::Reduce { inputs, .. } = &self.plan.work else { return Blamed::new() };
        let range = span(&self.making.layout.block_bytes(block));
        let copies: Vec<(LearnerId, Vec<u8>)> = inputs
            .iter()
            .filter(|c| c.unchecked && c.deferred.contains(block.index()))
            // SAFETY: its program should wait in fsync; if it stores all the same, a byte is an old or a new one.
            .map(|c| (c.learner, unsafe { c.source.memory().bytes(range.clone()) }.to_vec()))
            .collect();
        let bad = copies.iter().filter(|(_, copy)| !is_finite(&self.making.layout, block, copy));
        let bad: Blamed = bad.map(|(learner, _)| *learner).collect();
        if bad.is_empty() && !copies.is_empty() {
            let (terms, written) = self.terms(block, None, &copies);
            // SAFETY: as in `block`.
            unsafe { self.making.compute(block, step, &terms, &written) };
        }
        bad
    }

    /// What is added up for `block`: the accumulator, then payloads in the order of learners, so that the
    /// sum does not depend on who came last; and what each has written of it. A learner in `copies` has its payload there.
    fn terms<'a>(
        &'a self,
        block: BlockId,
        own: Option<(LearnerId, &'a [u8])>,
        copies: &'a [(LearnerId, Vec<u8>)],
    ) -> (SmallVec<[Term<'a>; INLINE]>, SmallVec<[Written<'a>; INLINE]>) {
        let (mut terms, mut written) = (SmallVec::new(), SmallVec::new());
        let Work::Reduce { inputs, accumulated, .. } = &self.plan.work else { return (terms, written) };
        if let (true, Some(accumulator)) = (accumulated.contains(block.index()), &self.accumulator) {
            // Only what is mapped is added up, and that is whole.
            terms.push(Term::Sum(accumulator));
            written.push(None);
        }
        let range = span(&self.making.layout.block_bytes(block));
        // What does not count is judged all the same.
        let brings = |learner: LearnerId, written: Written<'a>| {
            if is_outranked(&self.folded, learner, block) { Some(&[][..]) } else { written }
        };
        let mut own = own;
        for contribution in inputs.iter().filter(|c| c.deferred.contains(block.index())) {
            if let Some((learner, bytes)) = own.take_if(|(learner, _)| *learner < contribution.learner) {
                terms.push(Term::Sent(Payload::Plain(bytes)));
                written.push(brings(learner, None));
            }
            written.push(brings(contribution.learner, contribution.written(block)));
            let copy = copies.iter().find(|(learner, _)| *learner == contribution.learner);
            terms.push(Term::Sent(Payload::Plain(match copy {
                Some((_, copy)) => copy,
                // SAFETY: the payload is lent until the version is made: nobody writes it.
                None => unsafe { contribution.source.memory().bytes(range.clone()) },
            })));
        }
        if let Some((learner, bytes)) = own {
            terms.push(Term::Sent(Payload::Plain(bytes)));
            written.push(brings(learner, None));
        }
        (terms, written)
    }

    /// A block of a version that was written to `weights`: bytes that were not written keep their
    /// value, and their fp32 masters keep theirs.
    fn assign_block(&self, block: BlockId) {
        let Work::Assign { written, .. } = &self.plan.work else { return };
        let range = self.making.layout.block_bytes(block);
        let first = written.partition_point(|w| w.end <= range.start);
        let written = written[first..].iter().take_while(|w| w.start < range.end);
        let written = written.map(|w| w.start.max(range.start)..w.end.min(range.end));
        let copy = |gap: Range<u64>| {
            // SAFETY: the buffer is sealed, and this thread has the block to itself.
            let output = unsafe { self.making.back.region.memory().bytes_mut(span(&gap)) };
            kernels::stream_copy(self.making.front.bytes(gap), output);
        };
        let mut at = range.start;
        for w in written.clone() {
            copy(at..w.start);
            at = w.end;
        }
        copy(at..range.end);
        // SAFETY: as above.
        unsafe { self.making.carry_state(block, |_| false) };
        for (w, segment) in
            written.flat_map(|w| self.making.layout.segments(block).iter().map(move |s| (w.clone(), s)))
        {
            if let Some(part) = elements_of(segment, &w) {
                widen(&part, &self.making.back, &self.making.state[1]);
            }
        }
        self.making.approve(block);
    }
}

/// The elements of `segment` that have bytes in `range`.
fn elements_of(segment: &Segment, range: &Range<u64>) -> Option<Segment> {
    let size = Wire::of(segment.dtype)?.size() as u64;
    let bytes = &segment.bytes;
    let first = range.start.saturating_sub(bytes.start) / size;
    let end = bytes.end.min(bytes.start + range.end.saturating_sub(bytes.start).next_multiple_of(size));
    let start = bytes.start + first * size;
    (start < end).then(|| segment.cut(start..end))
}

/// Adds a deferred block of a contribution into the accumulator; stores it if it is the `first`, or if the
/// last one counts. Returns whether it held only finite numbers. If it is to `check`, one that does not counts
/// as zero: the bytes that are judged are those that are added, whatever its program stores meanwhile.
pub fn fold_block(
    layout: &ModelLayout,
    block: BlockId,
    source: &Region,
    accumulator: &Accumulator,
    first: bool,
    combine: Combine,
    check: bool,
) -> bool {
    thread_local! {
        static COPY: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    let range = span(&layout.block_bytes(block));
    // SAFETY: one contribution is folded at a time, each block of it by one thread; the program that has the
    // source mapped waits in fsync.
    let bytes = unsafe { source.memory().bytes(range) };
    // SAFETY: as above; the payload is the whole block.
    let fold =
        |bytes: &[u8]| unsafe { accumulator.fold(layout, block, Payload::Plain(bytes), first, combine) };
    if !check {
        return fold(bytes);
    }
    COPY.with_borrow_mut(|copy| {
        copy.clear();
        copy.extend_from_slice(bytes);
        if is_finite(layout, block, copy) {
            return fold(copy);
        }
        if first || combine == Combine::Last {
            copy.fill(0);
            fold(copy);
        }
        false
    })
}
