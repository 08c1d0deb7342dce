//! The measuring of sums, block by block, for a step that must know norms before it can change anything.
//!
//! This module holds `unsafe`; the module above explains why it is sound.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use libmodelio::bytes::kernels::{self, Wire};
use libmodelio::vocabulary::groups::Steps;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::{ModelLayout, PartitionLayout, Segment};
use libmodelio::vocabulary::norm::{ExactSum, Quantity, Squares, TensorSquares};
use libmodelio::vocabulary::reducer::Step;
use libmodelio::vocabulary::tensor_steps::{ByTensor, ByteSteps};
use libmodelio::wire::DataKind;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::accumulator::Accumulator;
use super::newest::Newest;
use super::places::{element_span, reduced};
use crate::device::DeviceError;
use crate::reducers;

/// What is measured for a step, and the outcome for the blocks that are finished. Many threads use it at once.
#[derive(Debug)]
pub(super) struct Measuring {
    layout: Arc<ModelLayout>,
    /// The steps that need the result.
    steps: Steps,
    /// The bytes of each step. Those of step 0 do not count.
    counts: ByteSteps,
    /// For the norms of tensors: their numbers, and the newest version with its state.
    tensors: Option<(ByTensor<u32>, Newest)>,
    /// The sums of the squares of all blocks that were measured.
    pub(super) squares: Mutex<Squares>,
}

impl Measuring {
    /// The measuring of a partition's blocks for these steps.
    pub(super) fn new(
        partition: &PartitionLayout,
        (steps, counts): (Steps, ByteSteps),
        quantity: Quantity,
        newest: Newest,
    ) -> Measuring {
        let tensors = (quantity == Quantity::Tensors).then(|| (ByTensor::numbers(partition), newest));
        let squares = Mutex::new(Squares::new(quantity, partition.tensor_ends().len()));
        Measuring { layout: Arc::clone(partition.layout()), steps, counts, tensors, squares }
    }

    /// Measures a block. Its gradient is the sum of `sums`.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Safety
    /// Nobody writes the block in the accumulators meanwhile.
    pub(super) unsafe fn block(&self, block: BlockId, sums: &[&Accumulator]) -> Result<(), DeviceError> {
        match &self.tensors {
            // SAFETY: passed on to the caller.
            None if !sums.is_empty() => unsafe { self.gradient(block, sums) },
            None => {}
            // SAFETY: as above.
            Some((numbers, newest)) => unsafe { self.of_tensors(block, sums, numbers, newest)? },
        }
        Ok(())
    }

    /// The pieces of a block that are reduced, each with its type and its treatment.
    fn pieces(&self, block: BlockId) -> impl Iterator<Item = (Segment, Wire, Step)> {
        reduced(&self.layout, block).flat_map(move |(segment, wire)| {
            let pieces = self.counts.pieces(segment.bytes.clone()).filter(|(_, of)| of.t > 0);
            pieces.map(move |(bytes, of)| (segment.cut(bytes), wire, of.step(&self.steps)))
        })
    }

    /// # Safety
    /// The conditions of [`Self::block`].
    unsafe fn gradient(&self, block: BlockId, sums: &[&Accumulator]) {
        let mut of_block = ExactSum::default();
        for (piece, wire, _) in self.pieces(block) {
            // SAFETY: passed on to the caller.
            let sums = unsafe { sums_of(sums, element_span(&piece, wire)) };
            of_block.add(kernels::squares(wire, &sums));
        }
        let merged = self.squares.lock().merge(&Squares::Gradient(of_block));
        debug_assert!(merged, "the gradient is measured");
    }

    /// # Safety
    /// The conditions of [`Self::block`].
    unsafe fn of_tensors(
        &self,
        block: BlockId,
        sums: &[&Accumulator],
        numbers: &ByTensor<u32>,
        newest: &Newest,
    ) -> Result<(), DeviceError> {
        let slots_of = |step: &Step| reducers::measured_slots(step.reducer);
        let pieces: Vec<_> = self.pieces(block).filter(|(_, _, step)| slots_of(step).is_some()).collect();
        let Some(count) = pieces.iter().map(|(_, _, step)| slots_of(step).filter(|_| step.t > 1)).max()
        else {
            return Ok(());
        };
        let Some((first, _)) = reduced(&self.layout, block).next() else { return Ok(()) };
        // A tensor's first step begins with state of zero, whatever the slots hold.
        let count = count.unwrap_or(0);
        let none = || Ok(Cow::Borrowed(&[][..]));
        let slot =
            |slot: usize| if slot < count { newest.bytes(block, DataKind::Slot(slot as u8)) } else { none() };
        let slots = [slot(0)?, slot(1)?];
        let weights = newest.bytes(block, DataKind::Weights)?;
        let masters = newest.bytes(block, DataKind::Masters)?;
        let start = self.layout.block_bytes(block).start;
        let mut of_block: Vec<(u32, TensorSquares)> = Vec::new();
        for (piece, wire, step) in &pieces {
            for (bytes, tensor) in numbers.pieces(piece.bytes.clone()) {
                let piece = piece.cut(bytes);
                let elements = element_span(&piece, *wire);
                let local = (piece.bytes.start - start) as usize..(piece.bytes.end - start) as usize;
                let place = 4 * (elements.start - first.element as usize)
                    ..4 * (elements.end - first.element as usize);
                let slots = slots.each_ref().map(|slot| match step.t {
                    1 => &[],
                    _ => slot.get(place.clone()).unwrap_or_default(),
                });
                let weights = match masters.get(place) {
                    Some(masters) if wire.is_narrow() => (Wire::F32, masters),
                    _ => (*wire, &weights[local]),
                };
                // SAFETY: passed on to the caller.
                let sums = unsafe { sums_of(sums, elements) };
                if of_block.last().is_none_or(|(last, _)| *last != tensor) {
                    of_block.push((tensor, TensorSquares::default()));
                }
                if let Some((_, squares)) = of_block.last_mut() {
                    reducers::measure_tensor(step, *wire, &sums, weights, slots, squares);
                }
            }
        }
        if let Squares::Tensors(all) = &mut *self.squares.lock() {
            for (tensor, squares) in &of_block {
                all[*tensor as usize].merge(squares);
            }
        }
        Ok(())
    }
}

/// The elements of each sum.
///
/// # Safety
/// Nobody writes them while the slices live.
unsafe fn sums_of<'a>(sums: &[&'a Accumulator], elements: Range<usize>) -> SmallVec<[&'a [f32]; 2]> {
    // SAFETY: passed on to the caller.
    sums.iter().map(|sum| unsafe { sum.sums(elements.clone()) }).collect()
}
