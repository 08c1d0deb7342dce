//! The work on one block: reducing it into the next version, carrying it over, folding, checking.
//!
//! Holds `unsafe`; why it is sound is told in the module above.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libmodelio::ids::{BlockId, LearnerId};
use libmodelio::layout::{ModelLayout, Segment};
use libmodelio::transport::Region;
use smallvec::SmallVec;

use super::{Accumulator, StateBuffer, VOID, VersionBuffer, element_span, span, wire};
use crate::core::{Plan, Work};
use crate::kernels::{self, Input, Output, Source, Wire};
use crate::reducer::{self, Reducer};

/// Everything that computing blocks of one plan needs; built once a version.
#[derive(Debug)]
pub struct Job {
    pub(super) layout: Arc<ModelLayout>,
    pub(super) plan: Arc<Plan<Region>>,
    pub(super) front: Arc<VersionBuffer>,
    pub(super) back: Arc<VersionBuffer>,
    pub(super) state: [Arc<StateBuffer>; 2],
    pub(super) changed: Arc<[AtomicU64]>,
    pub(super) accumulator: Option<Accumulator>,
    pub(super) check: bool,
}

/// What one source holds of a block.
enum Payload<'a> {
    Acc(&'a Accumulator),
    /// The whole block as a learner wrote it.
    Block(&'a [u8]),
}

/// Learners whose contributions are refused.
pub type Blamed = SmallVec<[LearnerId; 2]>;

/// Contributions whose sources are listed on the stack; more of them cost an allocation a block.
const INLINE: usize = 16;

impl Job {
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
        let payloads = self.payloads(block, own, &[]);
        if payloads.is_empty() && is_inert(step) {
            self.carry(block);
            return Blamed::new();
        }
        self.mark(block, VOID);
        let finite = self.compute(block, step, &payloads);
        let blamed = if finite { Blamed::new() } else { self.judge(block, step, own) };
        if blamed.is_empty() {
            self.mark(block, self.plan.version.0);
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
            return (!is_finite(&self.layout, block, payload)).then_some(learner).into_iter().collect();
        }
        let Work::Reduce { inputs, .. } = &self.plan.work else { return Blamed::new() };
        let range = span(&self.layout.block_bytes(block));
        let copies: Vec<(LearnerId, Vec<u8>)> = inputs
            .iter()
            .filter(|c| c.unchecked && c.deferred.contains(block.index()))
            // SAFETY: its program should wait in fsync; if it stores all the same, a byte is an old or a new one.
            .map(|c| (c.learner, unsafe { c.source.memory().bytes(range.clone()) }.to_vec()))
            .collect();
        let bad = copies.iter().filter(|(_, copy)| !is_finite(&self.layout, block, copy));
        let bad: Blamed = bad.map(|(learner, _)| *learner).collect();
        if bad.is_empty() && !copies.is_empty() {
            self.compute(block, step, &self.payloads(block, None, &copies));
        }
        bad
    }

    /// Puts `block` of the next version together; returns whether all payloads were finite.
    fn compute(&self, block: BlockId, step: &reducer::Step, payloads: &[Payload<'_>]) -> bool {
        let start = self.layout.block_bytes(block).start;
        let mut finite = true;
        for segment in self.layout.segments(block) {
            let range = span(&segment.bytes);
            let local = (segment.bytes.start - start) as usize..(segment.bytes.end - start) as usize;
            // SAFETY: this thread has the block of the next version to itself.
            let output = unsafe { self.back.region.memory().bytes_mut(range.clone()) };
            let weights = self.front.bytes(segment.bytes.clone());
            let Some(wire) = wire(segment.dtype) else {
                // Bytes that cannot be reduced stay, or with `assign` become the last contribution's.
                let last = payloads.last().filter(|_| step.reducer == Reducer::Assign);
                let source = match last {
                    None => weights,
                    Some(Payload::Block(bytes)) => &bytes[local],
                    // SAFETY: folding is over before a plan that reads the accumulator begins.
                    Some(Payload::Acc(acc)) => unsafe {
                        acc.raw.as_ref().map_or(weights, |raw| raw.bytes(range))
                    },
                };
                kernels::stream_copy(source, output);
                continue;
            };
            let elements = element_span(segment, wire);
            let sources: SmallVec<[Source<'_>; INLINE]> = payloads
                .iter()
                .map(|payload| match payload {
                    // SAFETY: as above.
                    Payload::Acc(acc) => Source::Acc(unsafe { acc.sum.floats(elements.clone()) }),
                    Payload::Block(bytes) => Source::Wire(&bytes[local.clone()]),
                })
                .collect();
            // SAFETY: states and masters are owned by block like the buffers they belong to.
            finite &= unsafe { self.reduce(wire, step, &sources, elements, weights, output) };
        }
        finite
    }

    /// What is added up for `block`: the accumulator, then payloads in the order of learners, so that the
    /// sum does not depend on who came last. Those of `copies` are taken from there.
    fn payloads<'a>(
        &'a self,
        block: BlockId,
        own: Option<(LearnerId, &'a [u8])>,
        copies: &'a [(LearnerId, Vec<u8>)],
    ) -> SmallVec<[Payload<'a>; INLINE]> {
        let mut payloads = SmallVec::new();
        let Work::Reduce { inputs, accumulated, .. } = &self.plan.work else { return payloads };
        if let (true, Some(accumulator)) = (accumulated.contains(block.index()), &self.accumulator) {
            payloads.push(Payload::Acc(accumulator));
        }
        let range = span(&self.layout.block_bytes(block));
        let mut own = own;
        for contribution in inputs.iter().filter(|c| c.deferred.contains(block.index())) {
            if let Some((_, bytes)) = own.take_if(|(learner, _)| *learner < contribution.learner) {
                payloads.push(Payload::Block(bytes));
            }
            let copy = copies.iter().find(|(learner, _)| *learner == contribution.learner);
            payloads.push(Payload::Block(match copy {
                Some((_, copy)) => copy,
                // SAFETY: the payload is lent until the version is made: nobody writes it.
                None => unsafe { contribution.source.memory().bytes(range.clone()) },
            }));
        }
        if let Some((_, bytes)) = own {
            payloads.push(Payload::Block(bytes));
        }
        payloads
    }

    /// # Safety
    /// The elements' block is this thread's alone in the next version.
    unsafe fn reduce(
        &self,
        wire: Wire,
        step: &reducer::Step,
        sources: &[Source<'_>],
        elements: Range<usize>,
        weights: &[u8],
        output: &mut [u8],
    ) -> bool {
        let [old, new] = &self.state;
        let halves = wire != Wire::F32;
        let none = || -> &mut [f32] { &mut [] };
        // SAFETY: the old state is immutable while its version is the newest; the new one's elements
        // belong to this thread.
        unsafe {
            let slot = |state: &StateBuffer, i: usize| -> Option<&[f32]> {
                let wanted = i < step.reducer.state_slots();
                state.slots[i]
                    .as_ref()
                    .filter(|_| wanted)
                    .map(|m| &*(m.floats(elements.clone()) as *const [f32]))
            };
            let slot_mut = |i: usize| {
                let wanted = i < step.reducer.state_slots();
                new.slots[i].as_ref().filter(|_| wanted).map_or_else(none, |m| m.floats_mut(elements.clone()))
            };
            let input = Input {
                weights,
                master: old.master.as_ref().filter(|_| halves).map(|m| m.floats(elements.clone())),
                slots: [slot(old, 0).unwrap_or_default(), slot(old, 1).unwrap_or_default()],
            };
            let output = Output {
                weights: output,
                master: new.master.as_ref().filter(|_| halves).map(|m| m.floats_mut(elements.clone())),
                slots: [slot_mut(0), slot_mut(1)],
            };
            kernels::apply(wire, step, sources, input, output, self.check)
        }
    }

    /// A block that nothing changes: brought up to date if the buffer's copy is old.
    fn carry(&self, block: BlockId) {
        let i = block.index();
        let changed = self.changed[i].load(Ordering::Relaxed);
        let fresh = |stamp: &AtomicU64| {
            let stamp = stamp.load(Ordering::Relaxed);
            stamp != VOID && stamp >= changed
        };
        if !fresh(&self.back.stamps[i]) {
            let range = self.layout.block_bytes(block);
            // SAFETY: this thread has the block of the next version to itself.
            let output = unsafe { self.back.region.memory().bytes_mut(span(&range)) };
            kernels::stream_copy(self.front.bytes(range), output);
            self.back.stamps[i].store(self.plan.version.0 - 1, Ordering::Relaxed);
        }
        self.carry_state(block, fresh);
    }

    fn carry_state(&self, block: BlockId, fresh: impl Fn(&AtomicU64) -> bool) {
        let [old, new] = &self.state;
        let Some(stamp) = new.stamps.get(block.index()).filter(|stamp| !fresh(stamp)) else { return };
        let parts =
            [(&old.master, &new.master), (&old.slots[0], &new.slots[0]), (&old.slots[1], &new.slots[1])];
        for segment in self.layout.segments(block) {
            let Some(wire) = wire(segment.dtype) else { continue };
            let elements = element_span(segment, wire);
            let bytes = elements.start * 4..elements.end * 4;
            for (from, to) in parts {
                if let (Some(from), Some(to)) = (from, to) {
                    // SAFETY: as in `reduce`.
                    unsafe { kernels::stream_copy(from.bytes(bytes.clone()), to.bytes_mut(bytes.clone())) };
                }
            }
        }
        stamp.store(self.plan.version.0 - 1, Ordering::Relaxed);
    }

    /// A block of a version that was written to `weights`: bytes that were not written keep their
    /// value, and their fp32 masters keep theirs.
    fn assign_block(&self, block: BlockId) {
        let Work::Assign { written, .. } = &self.plan.work else { return };
        let range = self.layout.block_bytes(block);
        let first = written.partition_point(|w| w.end <= range.start);
        let written = written[first..].iter().take_while(|w| w.start < range.end);
        let written = written.map(|w| w.start.max(range.start)..w.end.min(range.end));
        let copy = |gap: Range<u64>| {
            // SAFETY: the buffer is sealed, and this thread has the block to itself.
            let output = unsafe { self.back.region.memory().bytes_mut(span(&gap)) };
            kernels::stream_copy(self.front.bytes(gap), output);
        };
        let mut at = range.start;
        for w in written.clone() {
            copy(at..w.start);
            at = w.end;
        }
        copy(at..range.end);
        self.carry_state(block, |_| false);
        for (w, segment) in
            written.flat_map(|w| self.layout.segments(block).iter().map(move |s| (w.clone(), s)))
        {
            if let Some(part) = elements_of(segment, &w) {
                widen(&part, &self.back, &self.state[1]);
            }
        }
        self.mark(block, self.plan.version.0);
    }

    fn mark(&self, block: BlockId, stamp: u64) {
        self.back.stamps[block.index()].store(stamp, Ordering::Relaxed);
        if let Some(state) = self.state[1].stamps.get(block.index()) {
            state.store(stamp, Ordering::Relaxed);
        }
    }
}

/// Whether a block without any contribution keeps its value.
fn is_inert(step: &reducer::Step) -> bool {
    match step.reducer {
        Reducer::Sum => step.hyper.carry == 1.0,
        Reducer::Sgd => step.hyper.weight_decay == 0.0,
        Reducer::Assign => true,
        _ => false,
    }
}

/// The elements of `segment` that have bytes in `range`.
fn elements_of(segment: &Segment, range: &Range<u64>) -> Option<Segment> {
    let size = wire(segment.dtype)?.size() as u64;
    let bytes = &segment.bytes;
    let first = range.start.saturating_sub(bytes.start) / size;
    let end = bytes.end.min(bytes.start + range.end.saturating_sub(bytes.start).next_multiple_of(size));
    let start = bytes.start + first * size;
    (start < end).then(|| Segment { bytes: start..end, element: segment.element + first, ..segment.clone() })
}

/// Sets the fp32 master of a half-precision segment from its weights.
pub(super) fn widen(segment: &Segment, weights: &VersionBuffer, state: &StateBuffer) {
    let Some(wire) = wire(segment.dtype).filter(|wire| *wire != Wire::F32) else { return };
    if let Some(master) = &state.master {
        // SAFETY: called while the block belongs to this thread, in both buffers.
        unsafe {
            let bytes = weights.region.memory().bytes(span(&segment.bytes));
            kernels::widen(wire, bytes, master.floats_mut(element_span(segment, wire)));
        }
    }
}

/// Adds a deferred block of a contribution into the accumulator; stores it if it is the `first`, or if the
/// reducer is `assign`. Returns whether it held only finite numbers. If it is to `check`, one that does not counts
/// as zero: the bytes that are judged are those that are added, whatever its program stores meanwhile.
pub fn fold_block(
    layout: &ModelLayout,
    block: BlockId,
    source: &Region,
    accumulator: &Accumulator,
    first: bool,
    reducer: Reducer,
    check: bool,
) -> bool {
    thread_local! {
        static COPY: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    let range = span(&layout.block_bytes(block));
    // SAFETY: one contribution is folded at a time, each block of it by one thread; the program that has the
    // source mapped waits in fsync.
    let bytes = unsafe { source.memory().bytes(range) };
    let stores = first || reducer == Reducer::Assign;
    if !check {
        return fold_bytes(layout, block, bytes, accumulator, stores, reducer);
    }
    COPY.with_borrow_mut(|copy| {
        copy.clear();
        copy.extend_from_slice(bytes);
        if is_finite(layout, block, copy) {
            return fold_bytes(layout, block, copy, accumulator, stores, reducer);
        }
        if stores {
            copy.fill(0);
            fold_bytes(layout, block, copy, accumulator, stores, reducer);
        }
        false
    })
}

fn fold_bytes(
    layout: &ModelLayout,
    block: BlockId,
    bytes: &[u8],
    accumulator: &Accumulator,
    stores: bool,
    reducer: Reducer,
) -> bool {
    let start = layout.block_bytes(block).start;
    let mut finite = true;
    for segment in layout.segments(block) {
        let bytes = &bytes[(segment.bytes.start - start) as usize..(segment.bytes.end - start) as usize];
        // SAFETY: each block of the accumulator is one thread's while a contribution is folded.
        unsafe {
            if let Some(wire) = wire(segment.dtype) {
                let sum = accumulator.sum.floats_mut(element_span(segment, wire));
                finite &= kernels::fold(wire, bytes, sum, stores, true);
            } else if let (Reducer::Assign, Some(raw)) = (reducer, &accumulator.raw) {
                kernels::stream_copy(bytes, raw.bytes_mut(span(&segment.bytes)));
            }
        }
    }
    finite
}

/// Whether a whole block, as a program wrote it, holds only finite numbers.
pub fn is_finite(layout: &ModelLayout, block: BlockId, payload: &[u8]) -> bool {
    let start = layout.block_bytes(block).start;
    layout.segments(block).iter().all(|segment| {
        wire(segment.dtype).is_none_or(|wire| {
            kernels::all_finite(
                wire,
                &payload[(segment.bytes.start - start) as usize..(segment.bytes.end - start) as usize],
            )
        })
    })
}

/// Copies a whole block to its place in a staging region, past the caches: the shard reads it when the
/// others' are there too. Looks for NaN and Inf on the way if it is to `check`; false when it found some.
pub fn place(layout: &ModelLayout, block: BlockId, payload: &[u8], room: &Region, check: bool) -> bool {
    let start = layout.block_bytes(block).start;
    let mut finite = true;
    for segment in layout.segments(block) {
        let src = &payload[(segment.bytes.start - start) as usize..(segment.bytes.end - start) as usize];
        // SAFETY: the learner offers the block once, and reads or writes its place only after this.
        let dst = unsafe { room.memory().bytes_mut(span(&segment.bytes)) };
        match wire(segment.dtype) {
            Some(wire) if check => finite &= kernels::copy_checked(wire, src, dst),
            _ => kernels::stream_copy(src, dst),
        }
    }
    finite
}

/// As [`is_finite`], for a block in a region that nobody writes.
pub fn region_is_finite(layout: &ModelLayout, block: BlockId, region: &Region) -> bool {
    // SAFETY: the contribution is sealed: its program waits in fsync or close.
    is_finite(layout, block, unsafe { region.memory().bytes(span(&layout.block_bytes(block))) })
}

/// The first block in which one of the `written` byte ranges holds NaN or Inf.
pub fn written_is_finite(layout: &ModelLayout, region: &Region, written: &[Range<u64>]) -> Option<BlockId> {
    for range in written.iter().filter(|range| !range.is_empty()) {
        for block in (layout.block_of(range.start).0..=layout.block_of(range.end - 1).0).map(BlockId) {
            for segment in layout.segments(block) {
                let Some(wire) = wire(segment.dtype) else { continue };
                let size = wire.size() as u64;
                // Whole elements only; one that is written in part is judged when it is read.
                let start = segment.bytes.start
                    + range.start.saturating_sub(segment.bytes.start).next_multiple_of(size);
                let end = segment.bytes.end.min(range.end);
                let end = end.saturating_sub((end.saturating_sub(segment.bytes.start)) % size);
                if start >= end {
                    continue;
                }
                // SAFETY: the writer is in fsync or close, and nobody else knows the buffer.
                if !kernels::all_finite(wire, unsafe { region.memory().bytes(span(&(start..end))) }) {
                    return Some(block);
                }
            }
        }
    }
    None
}
