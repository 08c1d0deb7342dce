//! One plan's work on the blocks that come.
//!
//! This module holds `unsafe`; the module above explains why it is sound.
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use libmodelio::transport::tally::{Flow, Tally};
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::groups::Steps;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::norm::Squares;
use libmodelio::vocabulary::reducer::{Combine, Reducer, Step};
use libmodelio::wire::Work;
use smallvec::SmallVec;

use super::accumulator::{Accumulator, INLINE, is_direct};
use super::buffer::EarlyBlock;
use super::builder::{Term, VersionBuilder, Written};
use super::measuring::Measuring;
use super::sums::Sums;
use super::{PartitionError, Payload, check_block, check_payload};
use crate::device::DeviceError;

/// A thread is working on the block.
const CLAIMED: u8 = 1;
/// The block has an open sum.
const HELD: u8 = 2;
/// The block of the next version is computed, or the block is measured.
pub(super) const FINISHED: u8 = 4;
/// The plan is concluded.
const SEALED: u8 = 8;
/// The state of the block is that of the next version.
pub(super) const MADE: u8 = 16;

/// The work of one plan. Many threads use it at once, but each block belongs to one thread at a time. A second one is
/// refused.
#[derive(Debug)]
pub struct PartitionJob {
    pub(super) layout: Arc<ModelLayout>,
    pub(super) sums: Arc<Sums>,
    tally: Arc<Tally>,
    pub(super) work: Work,
    /// The steps of all groups, if a version is made.
    pub(super) steps: Steps,
    /// The old and the new version, if one is made.
    pub(super) builder: Option<VersionBuilder>,
    /// The measurement of the sums, if the plan measures.
    measure: Option<Measuring>,
    check: bool,
    /// Whether the version changes state in place, by [`super::Making`].
    in_place: bool,
    blocks: Box<[AtomicU8]>,
    over: AtomicBool,
    /// Why the device has not made the version.
    pub(super) failed: OnceLock<DeviceError>,
    /// This is the last field: when it is dropped, nothing else is in use any more.
    pub(super) alive: Arc<Alive>,
}

/// Tells the store that a job exists.
#[derive(Debug)]
pub(super) struct Alive;

/// One payload of a block.
#[derive(Clone, Copy, Debug)]
pub struct BlockInput<'a> {
    /// The whole block.
    pub payload: Payload<'a>,
    /// With `assign`, the written ranges of the block, if not all of it was written.
    pub written: Option<&'a [Range<u32>]>,
    /// Whether NaN and Inf in it are its sender's fault. They are nobody's fault in a sum of contributions that were
    /// checked before.
    pub check: bool,
}

/// The sums of a block, the sealed one first, each with the ranges that it holds if that is not all.
pub(super) type BlockSums<'a> = SmallVec<[(&'a Accumulator, Option<Vec<Range<u32>>>); 2]>;

/// The right to work on a block.
pub(super) struct Claim<'a>(&'a AtomicU8);

impl Claim<'_> {
    fn holds(&self) -> bool {
        self.0.load(Ordering::Relaxed) & HELD != 0
    }

    pub(super) fn set(&self, what: u8) {
        self.0.fetch_or(what, Ordering::Relaxed);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.0.fetch_and(!CLAIMED, Ordering::Release);
    }
}

impl PartitionJob {
    pub(super) fn new(
        layout: Arc<ModelLayout>,
        (sums, tally): (Arc<Sums>, Arc<Tally>),
        work: Work,
        builder: Option<VersionBuilder>,
        measure: Option<Measuring>,
        (check, in_place): (bool, bool),
    ) -> PartitionJob {
        let blocks = (0..layout.blocks()).map(|_| AtomicU8::new(0)).collect();
        let steps = match &work {
            Work::Reduce { step, groups, .. } => groups.steps(step),
            Work::Assign { .. } => Steps::from(Step { reducer: Reducer::Assign, t: 1, ..Step::default() }),
            Work::Add { .. } | Work::Measure { .. } => Steps::default(),
        };
        PartitionJob {
            layout,
            sums,
            tally,
            work,
            steps,
            builder,
            measure,
            check,
            in_place,
            blocks,
            over: AtomicBool::new(false),
            failed: OnceLock::new(),
            alive: Arc::new(Alive),
        }
    }

    /// The work that it does.
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// The plan is dropped, and nothing of it will count. Threads that receive into a [`Target`] should check
    /// [`Self::is_over`] now and then: no other plan begins before they drop it.
    pub fn give_up(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Whether the job was given up or concluded.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    pub(super) fn claim(&self, block: BlockId) -> Result<Claim<'_>, PartitionError> {
        check_block(&self.layout, block)?;
        let mark = &self.blocks[block.index()];
        let free = |mark| (mark & (CLAIMED | FINISHED | SEALED) == 0).then_some(mark | CLAIMED);
        match mark.fetch_update(Ordering::Acquire, Ordering::Relaxed, free) {
            Ok(_) => Ok(Claim(mark)),
            Err(mark) if mark & CLAIMED != 0 => Err(PartitionError::Claimed(block)),
            Err(_) => Err(PartitionError::Complete(block)),
        }
    }

    /// The memory of the sum, if a payload of `block` can be received straight into it. The payload must be the
    /// first, and equal to the sum byte for byte (all fp32, or wide and all reduced).
    ///
    /// # Errors
    /// [`PartitionError::NoBlock`], [`PartitionError::Claimed`], [`PartitionError::Complete`].
    pub fn destination(
        self: &Arc<Self>,
        block: BlockId,
        form: Form,
    ) -> Result<Option<Target>, PartitionError> {
        self.work.combine().ok_or(PartitionError::AssignsOnly)?;
        let claim = self.claim(block)?;
        if claim.holds() || !is_direct(&self.layout, block, form) {
            return Ok(None);
        }
        // The target takes the claim over.
        std::mem::forget(claim);
        Ok(Some(Target { job: Arc::clone(self), block }))
    }

    /// Adds payloads to the open sum of `block`, in their order, or stores the first one if it is empty. Bytes that are
    /// not reduced are kept only with `assign`. Returns the index of a payload that is not finite, if that matters.
    /// Then the sum is void, and with it the plan if it held something before.
    ///
    /// # Errors
    /// [`PartitionError::NoBlock`], [`PartitionError::Length`], [`PartitionError::Claimed`],
    /// [`PartitionError::Complete`].
    pub fn add_all(
        &self,
        block: BlockId,
        inputs: &[BlockInput<'_>],
    ) -> Result<Option<usize>, PartitionError> {
        if inputs.is_empty() {
            return Ok(None);
        }
        let combine = self.work.combine().ok_or(PartitionError::AssignsOnly)?;
        for input in inputs {
            self.check(block, input.payload)?;
        }
        let claim = self.claim(block)?;
        let open = self.open(block);
        if inputs.len() > 1 && !combine.replaces() {
            // They are added in one pass.
            let payloads: SmallVec<[_; INLINE]> =
                inputs.iter().map(|input| (input.payload, input.check && self.check)).collect();
            // SAFETY: the block is claimed, and the payloads' lengths were checked.
            let bad = unsafe { open.accumulate_all(&self.layout, block, &payloads, !claim.holds()) };
            if bad.is_none() {
                self.sums.holds_too(block, claim.holds(), None);
                claim.set(HELD);
            }
            return Ok(bad);
        }
        for (index, &BlockInput { payload, written, check }) in inputs.iter().enumerate() {
            // SAFETY: the block is claimed, and the payload's length was checked.
            let finite = unsafe {
                match (combine, payload, written) {
                    (Combine::Last, Payload::Plain(bytes), Some(written)) => {
                        open.overlay(&self.layout, block, bytes, written)
                    }
                    _ => open.accumulate(&self.layout, block, payload, !claim.holds(), combine),
                }
            };
            if !finite && self.check && check {
                return Ok(Some(index));
            }
            self.sums.holds_too(block, claim.holds(), written);
            claim.set(HELD);
        }
        Ok(None)
    }

    /// Refuses a payload that does not fit `block`, or a coded one of values that are not added up.
    fn check(&self, block: BlockId, payload: Payload<'_>) -> Result<(), PartitionError> {
        if matches!(payload, Payload::Coded(..)) && self.work.combine().is_none_or(Combine::replaces) {
            return Err(PartitionError::CodedValues(block));
        }
        check_payload(&self.layout, block, payload)
    }

    /// The open sum of `block`, which is about to be written.
    fn open(&self, block: BlockId) -> &Accumulator {
        self.builder.as_ref().and_then(|builder| builder.sum(block)).unwrap_or_else(|| self.sums.open(block))
    }

    /// The sums of a claimed block.
    pub(super) fn sums_of(&self, block: BlockId, claim: &Claim<'_>) -> BlockSums<'_> {
        let sealed = self.sums.sealed(block).map(|sum| (sum, self.sums.sealed_written(block)));
        let open = claim.holds().then(|| (self.open(block), self.sums.open_written(block)));
        sealed.into_iter().chain(open).collect()
    }

    /// Computes `block` of the next version from the sealed sum, the open sum and these payloads, in their order and in
    /// one pass. Without any of them the block is carried over, or decays, as the reducer requires. A job that measures
    /// adds them up instead, and measures the sum. Returns the index of a payload that is not finite, if that matters.
    /// Then the block is not computed. An Inf that results from adding up is nobody's fault.
    ///
    /// # Errors
    /// [`PartitionError::AddsOnly`], and the errors of [`Self::add_all`].
    pub fn finish_all(
        &self,
        block: BlockId,
        inputs: &[BlockInput<'_>],
    ) -> Result<Option<usize>, PartitionError> {
        if let Some(measure) = &self.measure {
            let bad = self.add_all(block, inputs)?;
            if bad.is_none() {
                self.measure(block, measure)?;
            }
            return Ok(bad);
        }
        if self.sums_first() {
            return self.add_all(block, inputs);
        }
        self.compute(block, inputs)
    }

    /// Computes a block of the next version.
    pub(super) fn compute(
        &self,
        block: BlockId,
        inputs: &[BlockInput<'_>],
    ) -> Result<Option<usize>, PartitionError> {
        let builder = self.builder.as_ref().ok_or(PartitionError::AddsOnly)?;
        for input in inputs {
            self.check(block, input.payload)?;
        }
        // New weights do not take the sums, which are of the version after them.
        let is_new = matches!(self.work, Work::Assign { .. });
        let claim = self.claim(block)?;
        let held = if is_new { SmallVec::new() } else { self.sums_of(block, &claim) };
        let mut written = SmallVec::<[Written<'_>; INLINE]>::new();
        if held.iter().any(|(_, written)| written.is_some())
            || inputs.iter().any(|input| input.written.is_some())
        {
            written.extend(held.iter().map(|(_, written)| written.as_deref()));
            written.extend(inputs.iter().map(|input| input.written));
        }
        let sent = inputs.iter().map(|input| Term::Sent(input.payload));
        let terms: SmallVec<[Term<'_>; INLINE]> =
            held.iter().map(|(sum, _)| Term::Sum(sum)).chain(sent).collect();
        let checked = !inputs.iter().any(|input| input.check);
        // SAFETY: the block is claimed, and with it its sums. The payloads' lengths were checked.
        if !unsafe { builder.block(block, &self.steps, &terms, &written, checked) } {
            if self.check && inputs.iter().any(|input| input.check) {
                // Memory that others can write may change while it is read. So a copy is checked, and if it is
                // finite, the copy counts.
                let copies: Vec<Vec<u8>> =
                    inputs.iter().map(|input| input.payload.bytes().to_vec()).collect();
                self.tally.copied(Flow::Push, copies.iter().map(Vec::len).sum());
                let copied = |index: usize| Payload::of(inputs[index].payload.form(), &copies[index]);
                let is_bad =
                    |&index: &usize| inputs[index].check && !copied(index).is_finite(&self.layout, block);
                if let Some(bad) = (0..inputs.len()).find(is_bad) {
                    return Ok(Some(bad));
                }
                let sent = (0..inputs.len()).map(|index| Term::Sent(copied(index)));
                let terms: SmallVec<[Term<'_>; INLINE]> =
                    held.iter().map(|(sum, _)| Term::Sum(sum)).chain(sent).collect();
                // SAFETY: as above. The copies belong to this thread.
                unsafe { builder.block(block, &self.steps, &terms, &written, false) };
            }
            builder.approve(block);
        }
        if is_new && !inputs.is_empty() && !self.in_place {
            // SAFETY: as above.
            unsafe { builder.keep_masters(block) };
        }
        claim.set(FINISHED);
        Ok(None)
    }

    /// Whether contributions are added up until the version counts, and its blocks are computed then.
    pub(super) fn sums_first(&self) -> bool {
        self.in_place && matches!(self.work, Work::Reduce { .. })
    }

    /// Whether the version changes state in place. Its blocks are complete only when [`super::Making`] has made them.
    pub fn is_in_place(&self) -> bool {
        self.in_place
    }

    /// The right to make a block that is computed.
    pub(super) fn claim_computed(&self, block: BlockId) -> Result<Claim<'_>, PartitionError> {
        check_block(&self.layout, block)?;
        let mark = &self.blocks[block.index()];
        let computed = |mark| (mark & (CLAIMED | FINISHED | MADE) == FINISHED).then_some(mark | CLAIMED);
        match mark.fetch_update(Ordering::Acquire, Ordering::Relaxed, computed) {
            Ok(_) => Ok(Claim(mark)),
            Err(_) => Err(PartitionError::Unfinished(block)),
        }
    }

    /// Measures a block, to which nothing is added any more.
    fn measure(&self, block: BlockId, to: &Measuring) -> Result<(), PartitionError> {
        let claim = self.claim(block)?;
        let sums: SmallVec<[_; 2]> = self.sums_of(block, &claim).into_iter().map(|(sum, _)| sum).collect();
        // SAFETY: the block is claimed, and with it its sums.
        unsafe { to.block(block, &sums)? };
        claim.set(FINISHED);
        Ok(())
    }

    /// The sums of the squares of all blocks, if the job measures them.
    pub fn squares(&self) -> Option<Squares> {
        self.measure.as_ref().map(|measure| measure.squares.lock().clone())
    }

    /// Whether the open sum of `block` holds something.
    pub fn holds(&self, block: BlockId) -> bool {
        self.blocks.get(block.index()).is_some_and(|mark| mark.load(Ordering::Relaxed) & HELD != 0)
    }

    /// A block of the next version, if it is computed. It counts once the job is concluded.
    pub fn early(&self, block: BlockId) -> Option<EarlyBlock> {
        let builder = self.builder.as_ref()?;
        // The computing thread has released the mark. A computed block is never claimed again.
        let mark = self.blocks.get(block.index())?.load(Ordering::Acquire);
        if mark & FINISHED == 0 || mark & CLAIMED != 0 {
            return None;
        }
        Some(EarlyBlock::new(&builder.back, block, self.layout.block_bytes(block)))
    }

    /// The patch that makes a computed block of the next version from the newest one's, if there is one.
    pub fn early_patch(&self, block: BlockId, early: &EarlyBlock) -> Option<Vec<u8>> {
        let changes = self.builder.as_ref()?.changes.as_ref()?;
        let mut patch = Vec::new();
        changes.patch(block, early.bytes(), &mut patch).then_some(patch)
    }

    /// # Errors
    /// [`PartitionError::Unfinished`] names a block that is not computed.
    pub(super) fn check_finished(&self) -> Result<(), PartitionError> {
        // The computing thread has released the mark, and this acquires it. A computed block is never claimed again.
        let wanted = if self.in_place { FINISHED | MADE } else { FINISHED };
        let open = self.blocks.iter().position(|mark| {
            let mark = mark.load(Ordering::Acquire);
            mark & (wanted | CLAIMED) != wanted
        });
        open.map_or(Ok(()), |block| Err(PartitionError::Unfinished(BlockId(block as u32))))
    }

    /// Turns the open sums into sealed ones, and ends the job. Returns the blocks whose two sums must be added to
    /// each other.
    ///
    /// # Errors
    /// [`PartitionError::Claimed`].
    pub(super) fn seal(&self) -> Result<Vec<BlockId>, PartitionError> {
        let idle = |mark| (mark & CLAIMED == 0).then_some(mark | SEALED);
        for (i, mark) in self.blocks.iter().enumerate() {
            if mark.fetch_update(Ordering::Acquire, Ordering::Relaxed, idle).is_err() {
                for mark in &self.blocks[..i] {
                    mark.fetch_and(!SEALED, Ordering::Release);
                }
                return Err(PartitionError::Claimed(BlockId(i as u32)));
            }
        }
        let replaces = self.work.combine().is_some_and(Combine::replaces);
        let mut both = Vec::new();
        for block in (0..self.layout.blocks()).map(BlockId).filter(|&block| self.holds(block)) {
            let adds = !replaces || self.sums.open_written(block).is_some();
            if adds && self.sums.sealed(block).is_some() {
                both.push(block);
            } else {
                self.sums.seal(block);
            }
        }
        self.give_up();
        Ok(both)
    }
}

/// The memory of a block's open sum, to receive its first payload in. The block is claimed as long as this exists.
#[derive(Debug)]
pub struct Target {
    job: Arc<PartitionJob>,
    block: BlockId,
}

impl Target {
    /// The memory for the payload. Its first contents have no meaning.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the block is claimed until `self` is dropped, and the slice does not outlive that.
        unsafe { self.job.open(self.block).room(&self.job.layout, self.block) }
    }

    /// The payload has come, and is part of the sum. With `assign`, only the `written` ranges of it count. Returns
    /// whether it is finite, or true if that does not matter. If this is not called, nothing has come.
    pub fn complete(mut self, written: Option<&[Range<u32>]>) -> bool {
        let (job, block) = (Arc::clone(&self.job), self.block);
        let finite = !job.check || Payload::Wide(self.bytes()).is_finite(&job.layout, block);
        job.sums.holds_too(block, false, written);
        self.mark().fetch_or(HELD, Ordering::Relaxed);
        finite
    }

    fn mark(&self) -> &AtomicU8 {
        &self.job.blocks[self.block.index()]
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        drop(Claim(self.mark()));
    }
}
