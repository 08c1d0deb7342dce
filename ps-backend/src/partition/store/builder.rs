//! Building the next version block by block: each block is reduced from payloads and sums, or carried over.
//!
//! This module holds `unsafe`; the module above explains why it is sound.
mod on_device;

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::{Range, RangeFrom};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use libmodelio::bytes::block::span;
use libmodelio::bytes::changes::Changed;
use libmodelio::bytes::crc32c::crc32c;
use libmodelio::bytes::kernels::{self, Input, Operands, Output, Source, Wire};
use libmodelio::bytes::mmap::Mapping;
use libmodelio::vocabulary::groups::Steps;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::{ModelLayout, Segment};
use libmodelio::vocabulary::reducer;
use libmodelio::vocabulary::tensor_steps::{ByteSteps, Treatment};
use smallvec::SmallVec;

use super::accumulator::{Accumulator, INLINE, Payload, within};
use super::ahead::{Ahead, Compared};
use super::buffer::{VOID, VersionBuffer};
use super::changes::VersionChanges;
use super::coded::CodedBlock;
use super::places::{element_span, narrow, reduced};
use super::state::{State, StateBuffer};
use super::versions::Versions;
use crate::device::Arrays;
use crate::reducers;

/// A term that a block is made from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Term<'a> {
    /// The accumulator's sum of the block.
    Sum(&'a Accumulator),
    /// A payload.
    Sent(Payload<'a>),
}

/// The written ranges of a block, if a contribution has not written all of it. Only `assign` needs them: each byte
/// gets the value of the last contribution that has written it, and an unwritten byte stays as it is.
pub(super) type Written<'a> = Option<&'a [Range<u32>]>;

/// The terms that a piece of a block is made from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Brings {
    All,
    /// One of the terms, with `assign`.
    Only(usize),
    Nobody,
}

/// The builder of a version: the buffers that it is computed from and into.
#[derive(Debug)]
pub(super) struct VersionBuilder {
    layout: Arc<ModelLayout>,
    /// The version that is built.
    pub(super) version: Version,
    /// For each byte, whether it is reduced, the optimizer's step for it, and its group.
    steps: ByteSteps,
    /// The final steps, once they are known. Blocks that were computed before have the same steps.
    pub(super) sealed: OnceLock<ByteSteps>,
    front: Arc<VersionBuffer>,
    pub(super) back: Arc<VersionBuffer>,
    /// The state of the newest version.
    old_state: Arc<StateBuffer>,
    /// The state of the next version. It is the same if there is one copy.
    new_state: Arc<StateBuffer>,
    /// The sum of contributions to the version, if it lies where the version will be.
    sum: Option<Accumulator>,
    /// The state on a device, if it is there.
    pub(super) arrays: Option<Arc<Arrays>>,
    changed: Arc<[AtomicU64]>,
    /// What the version changes, if that is recorded.
    pub(super) changes: Option<Arc<VersionChanges>>,
    /// What is known of that already.
    ahead: Option<Arc<Ahead>>,
    how: How,
}

/// The record of what a version changes, and what is known of that already.
type Recorded = (Arc<VersionChanges>, Option<Arc<Ahead>>);

/// How a version is built.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct How {
    /// Whether to check for NaN and Inf.
    pub(super) check: bool,
    /// Whether contributions are added up where the version will be.
    pub(super) adds_there: bool,
    /// Whether contributions are new weights.
    pub(super) assigns: bool,
    /// Whether masters stay as they are until [`VersionBuilder::keep_masters`].
    pub(super) leaves_masters: bool,
    /// Whether all slots are zero. If not, those of a tensor at its first step may hold what another reducer has left.
    pub(super) fresh_state: bool,
}

impl How {
    /// Whether elements that take their step `t` begin with state of zero, whatever the slots hold.
    fn begins_anew(&self, step: &reducer::Step, t: u64) -> bool {
        t == 1 && !self.fresh_state && step.reducer.state_slots() > 0
    }
}

thread_local! {
    /// The buffer for wide payloads that are not aligned to four bytes.
    static ALIGNED: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    /// The buffer for what is about to be changed in place: a piece of the sum, of the master and of each slot.
    static BEFORE: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    /// The buffer for a piece of each coded payload.
    static DECODED: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// The most values of an array that are changed in place or decoded at once. What they were before, or what was sent,
/// stays in the cache meanwhile.
const IN_PLACE: usize = 2 << 10;

impl VersionBuilder {
    /// The builder of the next version, whose steps are these. Its state is prepared, if its reducer keeps some. The
    /// version lies in the `written` buffer, which holds new values, or else in the next one. `changes` is the record of
    /// what the version changes, and what is known of that already.
    ///
    /// # Errors
    /// When there is no buffer for the version.
    pub(super) fn new(
        layout: &Arc<ModelLayout>,
        (versions, state): (&Versions, &State),
        (written, changes): (Option<Arc<VersionBuffer>>, Option<Recorded>),
        steps: ByteSteps,
        how: How,
    ) -> io::Result<VersionBuilder> {
        let (changes, ahead) = changes.unzip();
        let buffers = written.or_else(|| versions.back.clone()).zip(versions.newest());
        let Some((back, (newest, front))) = buffers else {
            return Err(io::Error::other("no buffer for the next version"));
        };
        let mut shown = versions.table.values().map(|published| published.buffer.region.key());
        debug_assert!(shown.all(|key| key != back.region.key()), "a version is to be written");
        // Blocks that a dropped contribution left behind belong to no version. Their stamp may equal the new
        // version's number, also for an assignment.
        let next = versions.back.iter().flat_map(|next| &next.stamps);
        let of_state = state.copies.iter().skip(1).flat_map(|state| &state.stamps);
        for stamp in back.stamps.iter().chain(next).chain(of_state) {
            if stamp.load(Ordering::Relaxed) > newest.0 {
                stamp.store(VOID, Ordering::Relaxed);
            }
        }
        Ok(VersionBuilder {
            layout: Arc::clone(layout),
            version: newest.next(),
            steps,
            sealed: OnceLock::new(),
            sum: how.adds_there.then(|| Accumulator::over(back.region.memory())),
            front: Arc::clone(front),
            back,
            arrays: state.arrays.clone(),
            old_state: Arc::clone(&state.copies[0]),
            new_state: Arc::clone(&state.copies[state.copies.len() - 1]),
            changed: Arc::clone(&versions.changed),
            changes,
            ahead: ahead.flatten(),
            how,
        })
    }

    /// Puts `block` together, or carries it over if nothing changes it. `written` has for each of `terms` what it
    /// brings, or is empty if each brings all. Returns whether all `terms` were finite; the block is void if not,
    /// unless it is [`Self::approve`]d. Others may be storing into payloads meanwhile. `checked` terms are known to be
    /// finite, and need no search of their own.
    ///
    /// # Safety
    /// The block belongs to this thread alone in the next version. Nobody writes the memory of `terms`, and their
    /// payloads have the right length.
    pub(super) unsafe fn block(
        &self,
        block: BlockId,
        steps: &Steps,
        terms: &[Term<'_>],
        written: &[Written<'_>],
        checked: bool,
    ) -> bool {
        // SAFETY: passed on to the caller.
        unsafe {
            if terms.is_empty() && self.stays(block, steps) {
                self.carry(block);
                return true;
            }
            self.mark(block, VOID);
            let (finite, known) = match terms {
                [Term::Sent(payload)] if self.lies_here(block, *payload) => {
                    self.carry_state(block, |_| false);
                    let finite = checked || !self.how.check || payload.is_finite(&self.layout, block);
                    (finite, self.ahead.as_ref().and_then(|ahead| ahead.take(block)))
                }
                _ => (self.compute(block, steps, terms, written), None),
            };
            if finite {
                self.approve_as(block, known);
            }
            finite
        }
    }

    /// Whether the payload is the memory of the next version.
    fn lies_here(&self, block: BlockId, payload: Payload<'_>) -> bool {
        let Payload::Plain(bytes) = payload else { return false };
        let range = span(&self.layout.block_bytes(block));
        // SAFETY: the memory is not read, only its address is taken.
        std::ptr::eq(bytes, unsafe { self.back.region.memory().bytes(range) })
    }

    fn steps(&self) -> &ByteSteps {
        self.sealed.get().unwrap_or(&self.steps)
    }

    /// Whether `block`, which has no contribution, stays as it is: no learner has written its tensors, or their
    /// reducers keep their values without contributions.
    fn stays(&self, block: BlockId, steps: &Steps) -> bool {
        let stays = |of: Treatment| of.t == 0 || reducers::is_inert(steps.of_group(of.group));
        self.steps().pieces(self.layout.block_bytes(block)).all(|(_, of)| stays(of))
    }

    /// Whether there is one copy of the state.
    fn has_one_copy(&self) -> bool {
        Arc::ptr_eq(&self.old_state, &self.new_state)
    }

    /// Whether `step` changes state of such elements in place.
    fn changes_in_place(&self, step: &reducer::Step, wire: Wire) -> bool {
        self.has_one_copy()
            && (step.reducer.state_slots() > 0 || wire.is_narrow() && !self.how.leaves_masters)
    }

    /// Whether what elements are computed of lies elsewhere meanwhile, and so is cut to what there is room for.
    fn needs_room(&self, step: &reducer::Step, t: u64, wire: Wire) -> bool {
        self.sum.is_some() || self.changes_in_place(step, wire) || self.how.begins_anew(step, t)
    }

    /// The sum of contributions to `block`, if it lies where the version will be. From now on, the block holds no
    /// version.
    pub(super) fn sum(&self, block: BlockId) -> Option<&Accumulator> {
        let sum = self.sum.as_ref()?;
        self.back.stamp(block, VOID);
        Some(sum)
    }

    /// After [`Self::approve`]: where the weight is still that of the newest version, so is the master, with the
    /// precision that the weight does not show.
    ///
    /// # Safety
    /// The block is this thread's alone in the next version. With one copy of the state, the version counts.
    pub(super) unsafe fn keep_masters(&self, block: BlockId) {
        thread_local! {
            static NUMBERS: RefCell<Vec<u32>> = RefCell::default();
        }
        let (Some(old), Some(new)) = (&self.old_state.master, &self.new_state.master) else { return };
        let changed = self.changes.as_ref().map(|changes| changes.of(block));
        let start = self.layout.block_bytes(block).start;
        NUMBERS.with_borrow_mut(|numbers| {
            numbers.clear();
            let unit = match changed.as_deref() {
                Some(Changed::Nothing) => Some(1),
                Some(Changed::Some(units)) => {
                    units.numbers(numbers);
                    Some(units.unit())
                }
                Some(Changed::Whole) | None => None,
            };
            for (segment, wire) in narrow(&self.layout, block) {
                let elements = element_span(segment, wire);
                // SAFETY: passed on to the caller; the old state is immutable while its version is the newest.
                let (weights, master) = unsafe {
                    if !self.has_one_copy() {
                        let new = new.floats_mut(elements.clone());
                        kernels::stream_copy(
                            kernels::bytes(old.floats(elements.clone())),
                            kernels::bytes_mut(new),
                        );
                    }
                    (self.back.region.memory().bytes(span(&segment.bytes)), new.floats_mut(elements))
                };
                match unit {
                    Some(_) if numbers.is_empty() => {}
                    Some(unit)
                        if unit == wire.size()
                            && (segment.bytes.start - start).is_multiple_of(unit as u64) =>
                    {
                        let unit_of = |at: u64| ((at - start) / unit as u64) as u32;
                        let (first, end) = (unit_of(segment.bytes.start), unit_of(segment.bytes.end));
                        let from = numbers.partition_point(|&number| number < first);
                        let to = numbers.partition_point(|&number| number < end);
                        let places = &mut numbers[from..to];
                        places.iter_mut().for_each(|place| *place -= first);
                        kernels::widen_at(wire, weights, places, master);
                        places.iter_mut().for_each(|place| *place += first);
                    }
                    _ => {
                        kernels::widen_changed(wire, self.front.bytes(segment.bytes.clone()), weights, master)
                    }
                }
            }
        });
    }

    /// The block counts as it was built, finite or not. It belongs to this thread.
    pub(super) fn approve(&self, block: BlockId) {
        self.approve_as(block, None);
    }

    /// The same of a block of which it may be known what has changed.
    fn approve_as(&self, block: BlockId, known: Option<Compared>) {
        self.mark(block, self.version.0);
        if let Some(changes) = &self.changes {
            let (changed, crc) = known.unwrap_or_else(|| self.compare(block, changes.makes_checksums));
            crc.into_iter().for_each(|crc| self.back.know(block, crc));
            changes.set(block, changed);
        }
    }

    /// What has changed in a block that is built, and its checksum, if it is wanted. An optimizer changes all fp32
    /// elements, so they are not compared.
    fn compare(&self, block: BlockId, makes_checksum: bool) -> Compared {
        let mut types = self.layout.segments(block).iter().map(|segment| segment.dtype);
        if !self.how.assigns && !types.any(|dtype| dtype.is_narrow()) {
            return (Changed::Whole, None);
        }
        let range = self.layout.block_bytes(block);
        // SAFETY: the block belongs to this thread, which does not write it meanwhile.
        let new = unsafe { self.back.region.memory().bytes(span(&range)) };
        let changed = Changed::between(self.front.bytes(range), new, self.layout.unit(block));
        // The block is in the cache now.
        (changed, makes_checksum.then(|| crc32c(new)))
    }

    /// Computes `block`. Returns whether all `terms` were finite.
    ///
    /// # Safety
    /// The conditions of [`Self::block`].
    unsafe fn compute(
        &self,
        block: BlockId,
        steps: &Steps,
        terms: &[Term<'_>],
        written: &[Written<'_>],
    ) -> bool {
        let start = self.layout.block_bytes(block).start;
        let mut finite = true;
        let mut wide_at = 0;
        let coded: SmallVec<[CodedBlock<'_>; 1]> = terms
            .iter()
            .filter_map(|term| match term {
                Term::Sent(Payload::Coded(coding, bytes)) => {
                    Some(CodedBlock::new(&self.layout, block, *coding, bytes))
                }
                _ => None,
            })
            .collect();
        let mut make = |piece: &Segment, of: Treatment, brings: Brings| {
            let (step, t) = (steps.of_group(of.group), of.t);
            let range = span(&piece.bytes);
            let local = (piece.bytes.start - start) as usize..(piece.bytes.end - start) as usize;
            let weights = self.front.bytes(piece.bytes.clone());
            let memory = self.back.region.memory();
            let Some(wire) = Wire::of(piece.dtype) else {
                // SAFETY: the block of the next version belongs to this thread alone.
                let output = unsafe { memory.bytes_mut(range.clone()) };
                let wide = wide_at..wide_at + range.len();
                wide_at = wide.end;
                // Bytes that cannot be reduced stay, or with `assign` become the last contribution's.
                let last = match brings {
                    Brings::All => terms.last(),
                    Brings::Only(term) => terms.get(term),
                    Brings::Nobody => None,
                };
                let source = match last.filter(|_| step.reducer.takes_all_types() && t > 0) {
                    None => weights,
                    Some(Term::Sent(Payload::Plain(bytes))) => &bytes[local],
                    Some(Term::Sent(Payload::Wide(bytes))) => &bytes[wide],
                    // Values that replace others are not coded.
                    Some(Term::Sent(Payload::Coded(..))) => weights,
                    // SAFETY: nobody writes the terms' memory.
                    Some(Term::Sum(sum)) => unsafe { sum.raw(range) }.unwrap_or(weights),
                };
                kernels::stream_copy(source, output);
                return;
            };
            let elements = element_span(piece, wire);
            let wide = wide_at..wide_at + elements.len() * 4;
            wide_at = wide.end;
            let mut aligned = ALIGNED.take();
            // At most one of the terms is wide and of a narrow type: earlier payloads are in a sum.
            let sent = terms.iter().find_map(|term| match term {
                Term::Sent(Payload::Wide(bytes)) if wire.is_narrow() => Some(&bytes[wide.clone()]),
                _ => None,
            });
            let sent = sent.map(|bytes| floats(bytes, &mut aligned));
            let mut before = BEFORE.take();
            before.resize(if self.needs_room(step, t, wire) { 4 * IN_PLACE } else { 0 }, 0.0);
            let at = before.len() / 4;
            let (sum_before, state_before) = before.split_at_mut(at);
            if let Some(sum) = &self.sum {
                // SAFETY: the block belongs to this thread alone, and the version is written only after this.
                sum_before[..elements.len()].copy_from_slice(unsafe { sum.sums(elements.clone()) });
            }
            let mut decoded = DECODED.take();
            decoded.resize(coded.len() * IN_PLACE, 0.0);
            for (coded, room) in coded.iter().zip(decoded.chunks_mut(IN_PLACE)).filter(|_| wire != Wire::F64)
            {
                coded.decode(piece, &mut room[..elements.len()]);
            }
            let mut rooms = coded.iter().zip(decoded.chunks(IN_PLACE));
            let lies_here = |sum: &Accumulator| self.sum.as_ref().is_some_and(|here| std::ptr::eq(here, sum));
            // SAFETY: the block of the next version belongs to this thread alone, and nobody has its sum.
            let output = unsafe { memory.bytes_mut(range.clone()) };
            let sources: SmallVec<[Source<'_>; INLINE]> = terms
                .iter()
                .map(|term| match (term, sent) {
                    (Term::Sum(sum), _) if lies_here(sum) => Source::Acc(&sum_before[..elements.len()]),
                    // SAFETY: nobody writes the terms' memory.
                    (Term::Sum(sum), _) => Source::Acc(unsafe { sum.sums(elements.clone()) }),
                    (Term::Sent(Payload::Plain(bytes)), _) => Source::Wire(&bytes[local.clone()]),
                    (Term::Sent(Payload::Wide(_)), Some(sent)) => Source::Acc(sent),
                    (Term::Sent(Payload::Wide(bytes)), None) => Source::Wire(&bytes[wide.clone()]),
                    (Term::Sent(Payload::Coded(..)), _) => match rooms.next() {
                        Some((coded, _)) if wire == Wire::F64 => Source::Wire(coded.plain(piece)),
                        Some((_, room)) => Source::Acc(&room[..elements.len()]),
                        None => Source::Acc(&[]),
                    },
                })
                .collect();
            let counts = match brings {
                Brings::All => &sources[..],
                Brings::Only(term) => &sources[term..=term],
                Brings::Nobody => &[],
            };
            if brings != Brings::All && self.how.check {
                // Sums that bring nothing here have meaningless contents. The payload was not checked before, so it
                // is.
                let sent = terms.iter().zip(&sources).filter(|(term, _)| matches!(term, Term::Sent(_)));
                finite &= sent
                    .into_iter()
                    .all(|(_, source)| kernels::sources_are_finite(wire, std::slice::from_ref(source)));
            }
            // Beside others in the block that change without contributions.
            let is_inert = terms.is_empty() && reducers::is_inert(step);
            if t > 0 && brings != Brings::Nobody && !is_inert {
                let step = of.step(steps);
                // SAFETY: states and masters are owned by block, like the buffers they belong to.
                finite &=
                    unsafe { self.reduce(wire, &step, counts, elements, (weights, output), state_before) };
            } else {
                // Elements that are not reduced are checked all the same, as on every path.
                finite &= !self.how.check || kernels::sources_are_finite(wire, counts);
                kernels::stream_copy(weights, output);
                // SAFETY: as above.
                unsafe { self.copy_state(elements) };
            }
            drop(sources);
            ALIGNED.set(aligned);
            BEFORE.set(before);
            DECODED.set(decoded);
        };
        let make = |piece: &Segment, of: Treatment, brings: Brings| {
            let step = match Wire::of(piece.dtype) {
                Some(wire) if self.needs_room(steps.of_group(of.group), of.t, wire) || !coded.is_empty() => {
                    (IN_PLACE / wire.words() * wire.size()) as u64
                }
                _ => return make(piece, of, brings),
            };
            let Range { start, end } = piece.bytes;
            (start..end).step_by(step as usize).for_each(|at| {
                make(&piece.cut(at..end.min(at + step)), of, brings);
            });
        };
        self.each_piece(block, written, make);
        finite
    }

    /// Calls `each` for the pieces of `block` that have one element type, one treatment and one set of contributions.
    fn each_piece(
        &self,
        block: BlockId,
        written: &[Written<'_>],
        mut each: impl FnMut(&Segment, Treatment, Brings),
    ) {
        let start = self.layout.block_bytes(block).start;
        let in_part = written.iter().any(Option::is_some);
        for (piece, of) in self.pieces(block) {
            if in_part {
                brought(&piece, start, written, |piece, brings| each(&piece, of, brings));
            } else {
                each(&piece, of, Brings::All);
            }
        }
    }

    /// The pieces of `block` that have one element type and one treatment each.
    fn pieces(&self, block: BlockId) -> impl Iterator<Item = (Segment, Treatment)> {
        let segments = self.layout.segments(block).iter();
        segments.flat_map(|segment| {
            self.steps().pieces(segment.bytes.clone()).map(move |(bytes, of)| (segment.cut(bytes), of))
        })
    }

    /// Computes elements. With one copy of the state, and where it begins anew, `before` has room for what it was: a
    /// master and two slots.
    ///
    /// # Safety
    /// The elements' block belongs to this thread alone in the next version.
    unsafe fn reduce(
        &self,
        wire: Wire,
        step: &reducer::Step,
        sources: &[Source<'_>],
        elements: Range<usize>,
        (weights, output): (&[u8], &mut [u8]),
        before: &mut [f32],
    ) -> bool {
        let (old, new) = (&self.old_state, &self.new_state);
        let wants_master = wire.is_narrow() && !self.how.leaves_masters;
        let none = || -> &mut [f32] { &mut [] };
        let at = before.len().max(3) / 3;
        let mut before = before.chunks_mut(at);
        let anew = self.how.begins_anew(step, step.t);
        // SAFETY: the old state is immutable while its version is the newest, and is copied before if it is the new
        // one. The new elements belong to this thread.
        unsafe {
            let input = Input {
                weights,
                master: old
                    .master
                    .as_ref()
                    .filter(|_| wants_master)
                    .map(|m| read(m, elements.clone(), before.next())),
                slots: [0, 1].map(|i| {
                    let slot = old.slot(i, step).map(|m| match before.next() {
                        Some(room) if anew => zeros(&mut room[..elements.len()]),
                        room => read(m, elements.clone(), room),
                    });
                    slot.unwrap_or_default()
                }),
            };
            let output = Output {
                weights: output,
                master: new.master.as_ref().filter(|_| wants_master).map(|m| m.floats_mut(elements.clone())),
                slots: [0, 1]
                    .map(|i| new.slot(i, step).map_or_else(none, |m| m.floats_mut(elements.clone()))),
            };
            let finite = reducers::apply(step, Operands { wire, sources, input, output }, self.how.check);
            self.copy_slots(step.reducer.state_slots().., elements);
            finite
        }
    }

    /// Carries an unchanged block over: it is copied if the next buffer's copy is old.
    ///
    /// # Safety
    /// The block belongs to this thread alone in the next version.
    unsafe fn carry(&self, block: BlockId) {
        let i = block.index();
        let changed = self.changed[i].load(Ordering::Relaxed);
        let fresh = |stamp: &AtomicU64| {
            let stamp = stamp.load(Ordering::Relaxed);
            stamp != VOID && stamp >= changed
        };
        if !fresh(&self.back.stamps[i]) {
            let range = self.layout.block_bytes(block);
            // SAFETY: the block of the next version belongs to this thread alone.
            let output = unsafe { self.back.region.memory().bytes_mut(span(&range)) };
            kernels::stream_copy(self.front.bytes(range), output);
            self.back.stamp(block, self.version.0 - 1);
        }
        if let Some(changes) = &self.changes {
            changes.set(block, Changed::Nothing);
        }
        // SAFETY: passed on to the caller.
        unsafe { self.carry_state(block, fresh) };
    }

    /// Brings the block's optimizer state and masters up to date, unless they are `fresh`.
    ///
    /// # Safety
    /// The conditions of [`Self::carry`].
    unsafe fn carry_state(&self, block: BlockId, fresh: impl Fn(&AtomicU64) -> bool) {
        let stamp = self.new_state.stamps.get(block.index());
        let Some(stamp) = stamp.filter(|stamp| !self.has_one_copy() && !fresh(stamp)) else { return };
        for (segment, wire) in reduced(&self.layout, block) {
            // SAFETY: passed on to the caller.
            unsafe { self.copy_state(element_span(segment, wire)) };
        }
        stamp.store(self.version.0 - 1, Ordering::Relaxed);
    }

    /// Copies optimizer state and masters of elements from the newest version to the next.
    ///
    /// # Safety
    /// The conditions of [`Self::carry`], for the elements' block.
    unsafe fn copy_state(&self, elements: Range<usize>) {
        if self.has_one_copy() {
            return;
        }
        let (old, new) = (&self.old_state, &self.new_state);
        let bytes = elements.start * 4..elements.end * 4;
        if let (Some(from), Some(to)) = (&old.master, &new.master) {
            // SAFETY: as in `reduce`.
            unsafe { kernels::stream_copy(from.bytes(bytes.clone()), to.bytes_mut(bytes)) };
        }
        // SAFETY: passed on to the caller.
        unsafe { self.copy_slots(0.., elements) };
    }

    /// The same of these slots alone.
    ///
    /// # Safety
    /// The conditions of [`Self::carry`], for the elements' block.
    unsafe fn copy_slots(&self, slots: RangeFrom<usize>, elements: Range<usize>) {
        if self.has_one_copy() {
            return;
        }
        let (old, new) = (&self.old_state, &self.new_state);
        let bytes = elements.start * 4..elements.end * 4;
        for (from, to) in old.slots.iter().zip(&new.slots).skip(slots.start) {
            if let (Some(from), Some(to)) = (from, to) {
                // SAFETY: as in `reduce`.
                unsafe { kernels::stream_copy(from.bytes(bytes.clone()), to.bytes_mut(bytes.clone())) };
            }
        }
    }

    /// Sets the version whose value the next buffers hold of `block`.
    fn mark(&self, block: BlockId, stamp: u64) {
        self.back.stamp(block, stamp);
        if let Some(state) = self.new_state.stamps.get(block.index()).filter(|_| !self.has_one_copy()) {
            state.store(stamp, Ordering::Relaxed);
        }
    }
}

/// The room, which is all zero.
fn zeros(room: &mut [f32]) -> &[f32] {
    room.fill(0.0);
    room
}

/// The elements of `from`, or a copy of them in `room`, if there is some.
///
/// # Safety
/// Nobody writes the elements while the slice lives, unless they are copied.
unsafe fn read<'a>(from: &'a Mapping, elements: Range<usize>, room: Option<&'a mut [f32]>) -> &'a [f32] {
    // SAFETY: passed on to the caller.
    let floats = unsafe { from.floats(elements) };
    match room {
        Some(room) => {
            let room = &mut room[..floats.len()];
            room.copy_from_slice(floats);
            room
        }
        None => floats,
    }
}

/// Cuts `piece`, of a block that begins at `start`, where the set of contributions changes that have written it. A
/// half-written element counts as not written.
fn brought(piece: &Segment, start: u64, written: &[Written<'_>], mut each: impl FnMut(Segment, Brings)) {
    let bytes = &piece.bytes;
    let within = |range: &Range<u32>| within(piece, start, range);
    let inputs: SmallVec<[Option<Vec<Range<u64>>>; INLINE]> =
        written.iter().map(|input| input.map(|input| input.iter().filter_map(within).collect())).collect();
    let cuts = inputs.iter().flatten().flatten().flat_map(|range| [range.start, range.end]);
    let mut cuts: Vec<u64> = cuts.chain([bytes.end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut pending: Option<(Range<u64>, Brings)> = None;
    let mut at = bytes.start;
    for cut in cuts.into_iter().filter(|&cut| cut > bytes.start) {
        let brings = |input: &Option<Vec<Range<u64>>>| match input {
            None => true,
            Some(ranges) => {
                let next = ranges.partition_point(|range| range.end <= at);
                ranges.get(next).is_some_and(|range| range.start <= at)
            }
        };
        let who = inputs.iter().rposition(brings).map_or(Brings::Nobody, Brings::Only);
        match &mut pending {
            Some((range, of)) if *of == who => range.end = cut,
            pending => {
                if let Some((range, of)) = pending.replace((at..cut, who)) {
                    each(piece.cut(range), of);
                }
            }
        }
        at = cut;
    }
    if let Some((range, of)) = pending {
        each(piece.cut(range), of);
    }
}

/// The bytes as fp32 values, or a copy of them if they are not aligned to four bytes.
fn floats<'a>(bytes: &'a [u8], aligned: &'a mut Vec<f32>) -> &'a [f32] {
    // SAFETY: any four bytes are an f32.
    match unsafe { bytes.align_to::<f32>() } {
        ([], floats, []) => floats,
        _ => {
            aligned.clear();
            aligned.extend(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
            aligned
        }
    }
}
