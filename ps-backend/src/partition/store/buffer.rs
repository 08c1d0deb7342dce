//! The memory of a version, and readers of its blocks.
//!
//! This module holds `unsafe`; the module above explains why it is sound.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use libmodelio::bytes::crc32c::crc32c;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::{Region, RegionKey};
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::ModelLayout;

/// A block whose bytes belong to no version.
pub(super) const VOID: u64 = u64::MAX;

/// A buffer of the model's size for a version.
#[derive(Debug)]
pub(super) struct VersionBuffer {
    /// The memory, for transports and for passthrough.
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

    /// `crc` is the CRC32C of the block's bytes, as they are since [`Self::stamp`].
    pub(super) fn know(&self, block: BlockId, crc: u32) {
        self.checksums[block.index()].store(u64::from(crc), Ordering::Relaxed);
    }

    /// The CRC32C of a block of a *published* version, or of an [`EarlyBlock`]. It is computed once as long as the bytes
    /// at `range` stay the same, also across versions. The caller holds a pin.
    pub(super) fn checksum(&self, block: BlockId, range: Range<u64>) -> u32 {
        let known = &self.checksums[block.index()];
        // Relaxed suffices: the checksum is complete by itself, and no other read depends on it.
        if let Ok(sum) = u32::try_from(known.load(Ordering::Relaxed)) {
            return sum;
        }
        let sum = crc32c(self.bytes(range));
        known.store(u64::from(sum), Ordering::Relaxed);
        sum
    }

    /// Bytes of a *published* version, on which the caller holds a pin, or of a block with an [`EarlyBlock`].
    pub(super) fn bytes(&self, range: Range<u64>) -> &[u8] {
        // SAFETY: a published version is immutable, and a pinned one is not recycled. Neither is a buffer with an early
        // block, whose block is computed.
        unsafe { self.region.memory().bytes(range.start as usize..range.end as usize) }
    }
}

/// A computed block of a version that may not count yet. Nobody writes it while this lives: the buffer is neither recycled
/// nor used for another version, also if the plan that has computed it is dropped.
#[derive(Debug)]
pub struct EarlyBlock {
    buffer: Arc<VersionBuffer>,
    block: BlockId,
    range: Range<u64>,
}

impl EarlyBlock {
    /// A block of the next version. The caller holds that version's builder.
    pub(super) fn new(buffer: &Arc<VersionBuffer>, block: BlockId, range: Range<u64>) -> EarlyBlock {
        // The builder is dropped after this, which the store sees before it uses the buffer for anything else.
        buffer.early_readers.fetch_add(1, Ordering::Relaxed);
        EarlyBlock { buffer: Arc::clone(buffer), block, range }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.bytes(self.range.clone())
    }

    /// The CRC32C of [`Self::bytes`], computed once for all readers.
    pub fn checksum(&self) -> u32 {
        self.buffer.checksum(self.block, self.range.clone())
    }
}

impl Drop for EarlyBlock {
    fn drop(&mut self) {
        self.buffer.early_readers.fetch_sub(1, Ordering::Release);
    }
}
