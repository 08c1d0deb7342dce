//! The part of building a version that a device does: which elements it computes, of which sums.
//!
//! This module holds `unsafe`; the module above explains why it is sound.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use libmodelio::bytes::block::span;
use libmodelio::bytes::kernels::{self, Wire};
use libmodelio::vocabulary::groups::Steps;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::Segment;
use libmodelio::vocabulary::tensor_steps::Treatment;
use smallvec::SmallVec;

use super::super::accumulator::Accumulator;
use super::super::buffer::VOID;
use super::super::places::{element_span, reduced};
use super::{Brings, VersionBuilder, Written};
use crate::device::{DeviceError, Does, Runs};
use crate::reducers;

impl VersionBuilder {
    /// Adds to `runs` what a device computes of `block`: all elements that change. What stays, and what is no number, is
    /// put together here. `written` has for each of `sums` what it brings, or is empty if each brings all. The block is
    /// void until it is [`Self::approve`]d; the result says whether that is needed.
    ///
    /// # Safety
    /// The block belongs to this thread alone in the next version. Nobody writes the memory of `sums`.
    pub(in super::super) unsafe fn lay_out(
        &self,
        block: BlockId,
        steps: &Steps,
        sums: &[&Accumulator],
        written: &[Written<'_>],
        runs: &mut Runs,
    ) -> bool {
        if sums.is_empty() && self.stays(block, steps) {
            // SAFETY: passed on to the caller.
            unsafe { self.carry(block) };
            return false;
        }
        self.mark(block, VOID);
        let make = |piece: &Segment, of: Treatment, brings: Brings| {
            let step = steps.of_group(of.group);
            let counts: SmallVec<[&Accumulator; 2]> = match brings {
                // Of values that replace each other, the last counts.
                Brings::All if step.reducer.combine().replaces() => {
                    sums.last().copied().into_iter().collect()
                }
                Brings::All => sums.iter().copied().collect(),
                Brings::Only(sum) => [sums[sum]].into_iter().collect(),
                Brings::Nobody => SmallVec::new(),
            };
            // Beside others in the block that change without contributions.
            let is_inert = sums.is_empty() && reducers::is_inert(step);
            let changes = of.t > 0 && brings != Brings::Nobody && !is_inert;
            match Wire::of(piece.dtype) {
                Some(wire) if changes => {
                    let anew = self.how.begins_anew(step, of.t);
                    let sums = counts.iter().map(|sum| Arc::clone(sum.memory())).collect();
                    let does = Does::Reduce { of, anew, sums };
                    runs.push(wire, &does, element_span(piece, wire), span(&piece.bytes).start);
                }
                Some(_) => {
                    // SAFETY: passed on to the caller.
                    unsafe { self.keep(piece.bytes.clone()) };
                }
                None => {
                    let last = counts.last().filter(|_| changes && step.reducer.takes_all_types());
                    let range = span(&piece.bytes);
                    // SAFETY: nobody writes the sum.
                    let raw = last.and_then(|sum| unsafe { sum.raw(range.clone()) });
                    // SAFETY: the block of the next version belongs to this thread alone; passed on to the caller.
                    unsafe {
                        match raw {
                            Some(raw) => {
                                kernels::stream_copy(raw, self.back.region.memory().bytes_mut(range))
                            }
                            None => self.keep(piece.bytes.clone()),
                        }
                    }
                }
            }
        };
        self.each_piece(block, written, make);
        true
    }

    /// Adds to `runs` what a device takes over of `block`, whose weights were written whole.
    pub(in super::super) fn take_over(&self, block: BlockId, runs: &mut Runs) {
        // Of a block that was carried over, the device has the weights.
        if self.back.stamps[block.index()].load(Ordering::Relaxed) != self.version.0 {
            return;
        }
        for (segment, wire) in reduced(&self.layout, block) {
            runs.push(wire, &Does::Adopt, element_span(segment, wire), span(&segment.bytes).start);
        }
    }

    /// Has the device compute `runs`, and waits for the weights.
    ///
    /// # Errors
    /// [`DeviceError`]. Then the model is lost.
    ///
    /// # Safety
    /// The blocks of the runs belong to this thread alone in the next version and its state, and nobody writes their
    /// sums. The version counts.
    pub(in super::super) unsafe fn run(&self, steps: &Steps, runs: &Runs) -> Result<(), DeviceError> {
        let Some(arrays) = &self.arrays else { return Ok(()) };
        let (front, back) = (self.front.region.memory(), self.back.region.memory());
        // SAFETY: the blocks are this thread's, and no two runs have an element in common: each is of one block and piece.
        // The newest version is immutable.
        unsafe { arrays.run(steps, front, back, runs) }
    }

    /// These bytes are as in the newest version.
    ///
    /// # Safety
    /// Their block belongs to this thread alone in the next version.
    unsafe fn keep(&self, bytes: Range<u64>) {
        // SAFETY: passed on to the caller.
        let output = unsafe { self.back.region.memory().bytes_mut(span(&bytes)) };
        kernels::stream_copy(self.front.bytes(bytes), output);
    }
}
