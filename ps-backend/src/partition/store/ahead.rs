//! What changes with new weights, found block by block while they are being written.
//!
//! Holds `unsafe` for reading memory that a program may write again. Whoever does that has the store forget these
//! comparisons first, so what they find in such memory counts nowhere.

use std::sync::Arc;

use libmodelio::bytes::block::span;
use libmodelio::bytes::changes::Changed;
use libmodelio::bytes::crc32c::crc32c;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::RegionKey;
use libmodelio::vocabulary::ids::{BlockId, Version};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::pinned::PinnedVersion;

/// What has changed in a block, and the checksum of its bytes, if it is wanted.
pub(super) type Compared = (Changed, Option<u32>);

/// What is known of a block.
#[derive(Debug, Default)]
enum Found {
    #[default]
    Nothing,
    Changed(Compared),
    /// Whoever makes the version compares the block, or has taken what was found.
    Taken,
}

/// New weights, compared with a version.
#[derive(Debug)]
pub(super) struct Ahead {
    buffer: RegionKey,
    base: Version,
    blocks: Box<[Mutex<Found>]>,
}

impl Ahead {
    pub(super) fn new(buffer: RegionKey, base: Version, blocks: u32) -> Arc<Ahead> {
        Arc::new(Ahead { buffer, base, blocks: (0..blocks).map(|_| Mutex::default()).collect() })
    }

    pub(super) fn buffer(&self) -> RegionKey {
        self.buffer
    }

    /// Whether these are comparisons of a buffer with this version.
    pub(super) fn is_of(&self, buffer: RegionKey, base: Version) -> bool {
        (self.buffer, self.base) == (buffer, base)
    }

    /// What was found of a block, if anything was. What is found later does not count.
    pub(super) fn take(&self, block: BlockId) -> Option<Compared> {
        match std::mem::replace(&mut *self.blocks[block.index()].lock(), Found::Taken) {
            Found::Changed(compared) => Some(compared),
            Found::Nothing | Found::Taken => None,
        }
    }
}

/// Blocks of new weights that are to be compared with the newest version.
pub struct Comparison {
    pub(super) ahead: Arc<Ahead>,
    pub(super) base: PinnedVersion,
    pub(super) memory: Arc<Mapping>,
    /// Whether their checksums are wanted.
    pub(super) makes_checksums: bool,
    pub(super) blocks: SmallVec<[BlockId; 8]>,
}

impl Comparison {
    /// Compares them, in this thread.
    pub fn run(self) {
        let layout = Arc::clone(self.base.shared.partition.layout());
        for &block in &self.blocks {
            let found = &self.ahead.blocks[block.index()];
            if !matches!(*found.lock(), Found::Nothing) {
                continue;
            }
            // SAFETY: nobody writes these bytes, or what is found is forgotten.
            let new = unsafe { self.memory.bytes(span(&layout.block_bytes(block))) };
            let changed = Changed::between(self.base.block(block), new, layout.unit(block));
            // The block is in the cache now.
            let crc = self.makes_checksums.then(|| crc32c(new));
            let mut found = found.lock();
            if matches!(*found, Found::Nothing) {
                *found = Found::Changed((changed, crc));
            }
        }
    }
}
