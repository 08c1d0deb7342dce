//! The memory of versions and optimizer state, and the place of a segment in it.
//!
//! This module holds `unsafe`; the module above explains why it is sound.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use libmodelio::bytes::block::span;
use libmodelio::bytes::kernels::{self, Wire};
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::{Region, RegionKey};
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::reducer::Step;

use super::elements::element_span;
use crate::device::{Array, Arrays, DeviceError};

/// A block whose bytes belong to no version.
pub(super) const VOID: u64 = u64::MAX;

/// A buffer of the model's size for a version.
#[derive(Debug)]
pub struct VersionBuffer {
    pub(super) region: Region,
    /// The version whose value each block holds, or `VOID`.
    pub(super) stamps: Vec<AtomicU64>,
    /// The checksum of each block's bytes, or `UNKNOWN`.
    checksums: Vec<AtomicU64>,
    /// The number of readers of blocks of a version that may not count yet.
    early_readers: AtomicUsize,
}

/// A checksum that was not computed: more than 32 bits.
const UNKNOWN: u64 = u64::MAX;

impl VersionBuffer {
    /// New memory, whose blocks all have `stamp`. Its pages are taken when they are touched.
    ///
    /// # Errors
    /// When there is no memory.
    pub(super) fn allocate(
        layout: &ModelLayout,
        key: RegionKey,
        stamp: u64,
    ) -> io::Result<Arc<VersionBuffer>> {
        let memory = Mapping::memfd("gradfs-version", layout.size() as usize)?;
        // Programs get this memory through passthrough, and no program may ever change it.
        memory.seal()?;
        let region = Region::new(Arc::new(memory), key);
        Ok(Arc::new(VersionBuffer::new(region, layout.blocks(), stamp)))
    }

    pub(super) fn new(region: Region, blocks: u32, stamp: u64) -> VersionBuffer {
        let each = |value| (0..blocks).map(|_| AtomicU64::new(value)).collect();
        VersionBuffer {
            region,
            stamps: each(stamp),
            checksums: each(UNKNOWN),
            early_readers: AtomicUsize::new(0),
        }
    }

    /// Sets the version whose value `block` holds. Its bytes have changed, or are about to.
    pub(super) fn stamp(&self, block: BlockId, stamp: u64) {
        self.checksums[block.index()].store(UNKNOWN, Ordering::Relaxed);
        self.stamps[block.index()].store(stamp, Ordering::Relaxed);
    }

    /// Whether somebody reads blocks that were computed here, without a pin on a version.
    pub(super) fn is_read_early(&self) -> bool {
        // A reader ends after it has read.
        self.early_readers.load(Ordering::Acquire) > 0
    }

    /// The checksum of a block of a *published* version, or of one with an [`EarlyReader`]. `compute` makes it from the
    /// bytes at `range`, once as long as the bytes stay the same, also across versions. The caller holds a pin.
    pub(crate) fn checksum(
        &self,
        block: BlockId,
        range: Range<u64>,
        compute: impl FnOnce(&[u8]) -> u32,
    ) -> u32 {
        let known = &self.checksums[block.index()];
        // Relaxed suffices: the checksum is complete by itself, and no other read depends on it.
        if let Ok(sum) = u32::try_from(known.load(Ordering::Relaxed)) {
            return sum;
        }
        let sum = compute(self.bytes(range));
        known.store(u64::from(sum), Ordering::Relaxed);
        sum
    }

    /// The memory, for transports and for passthrough.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Bytes of a *published* version, on which the caller holds a pin, or of a block with an [`EarlyReader`].
    pub fn bytes(&self, range: Range<u64>) -> &[u8] {
        // SAFETY: a published version is immutable, and a pinned one is not recycled. Neither is a buffer with an early
        // reader, whose block is computed.
        unsafe { self.region.memory().bytes(range.start as usize..range.end as usize) }
    }
}

/// A reader of computed blocks of a version that may not count yet. Nobody writes those blocks while this lives: the
/// buffer is neither recycled nor used for another version, also if the plan that has computed them is dropped.
#[derive(Debug)]
pub(crate) struct EarlyReader(Arc<VersionBuffer>);

impl EarlyReader {
    /// A reader of the next version. The caller holds its [`super::VersionBuilder`].
    pub(super) fn new(buffer: &Arc<VersionBuffer>) -> EarlyReader {
        // The builder is dropped after this, which the store sees before it uses the buffer for anything else.
        buffer.early_readers.fetch_add(1, Ordering::Relaxed);
        EarlyReader(Arc::clone(buffer))
    }

    /// The buffer.
    pub(crate) fn buffer(&self) -> &VersionBuffer {
        &self.0
    }
}

impl Drop for EarlyReader {
    fn drop(&mut self) {
        self.0.early_readers.fetch_sub(1, Ordering::Release);
    }
}

/// Optimizer state and fp32 masters of one version, in the order of reducible elements.
#[derive(Debug, Default)]
pub struct StateBuffer {
    pub(super) master: Option<Mapping>,
    pub(super) slots: [Option<Mapping>; 2],
    /// The stamps, as in [`VersionBuffer`].
    pub(super) stamps: Vec<AtomicU64>,
}

impl StateBuffer {
    /// A slot, if the reducer of `step` has it.
    pub(super) fn slot(&self, slot: usize, step: &Step) -> Option<&Mapping> {
        self.slots[slot].as_ref().filter(|_| slot < step.reducer.state_slots())
    }
}

/// Version 0 while it is loaded.
#[derive(Debug)]
pub(crate) struct Loading {
    pub(super) layout: Arc<ModelLayout>,
    pub(super) front: Arc<VersionBuffer>,
    pub(super) state: Arc<StateBuffer>,
    pub(super) arrays: Option<Arc<Arrays>>,
}

impl Loading {
    /// The memory to fill.
    pub(crate) fn memory(&self) -> &Mapping {
        self.front.region.memory()
    }

    /// A block was filled.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Safety
    /// The block belongs to this thread alone, and nobody reads version 0 yet.
    pub(crate) unsafe fn filled(&self, block: BlockId) -> Result<(), DeviceError> {
        if let Some(arrays) = &self.arrays {
            // SAFETY: passed on to the caller.
            return unsafe { self.copy_to(arrays, block) };
        }
        let Some(master) = &self.state.master else { return Ok(()) };
        for segment in self.layout.segments(block) {
            let Some(wire) = Wire::of(segment.dtype).filter(|wire| wire.is_narrow()) else { continue };
            // SAFETY: passed on to the caller.
            unsafe {
                let weights = self.front.region.memory().bytes(span(&segment.bytes));
                kernels::widen(wire, weights, master.floats_mut(element_span(segment, wire)));
            }
        }
        Ok(())
    }

    /// Copies a block's weights to the device, as masters if their type is narrow.
    ///
    /// # Safety
    /// The conditions of [`Self::filled`].
    unsafe fn copy_to(&self, arrays: &Arrays, block: BlockId) -> Result<(), DeviceError> {
        let mut wide = Vec::new();
        for segment in self.layout.segments(block) {
            let Some(wire) = Wire::of(segment.dtype) else { continue };
            let elements = element_span(segment, wire);
            // SAFETY: passed on to the caller.
            let weights = unsafe { self.front.region.memory().bytes(span(&segment.bytes)) };
            if wire.is_narrow() {
                wide.resize(elements.len(), 0.0);
                kernels::widen(wire, weights, &mut wide);
                arrays.write(Array::Values, elements.start * 4, kernels::bytes(&wide))?;
            } else {
                arrays.write(Array::Values, elements.start * 4, weights)?;
            }
        }
        Ok(())
    }

    /// Loads a block.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Panics
    /// If `bytes` are not as long as the block.
    ///
    /// # Safety
    /// The block belongs to this thread alone, and nobody reads version 0 yet.
    pub(crate) unsafe fn load(&self, block: BlockId, bytes: &[u8]) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller.
        let room = unsafe { self.front.region.memory().bytes_mut(span(&self.layout.block_bytes(block))) };
        kernels::stream_copy(bytes, room);
        // SAFETY: passed on to the caller.
        unsafe { self.filled(block) }
    }
}
