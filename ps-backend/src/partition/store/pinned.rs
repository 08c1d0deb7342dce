//! Pinned versions: they stay unchanged as long as a reader holds them.

use std::sync::Arc;
use std::time::SystemTime;

use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::Region;
use libmodelio::vocabulary::ids::{BlockId, Version};

use super::buffer::VersionBuffer;
use super::{Inner, StoreShared};

/// A complete version. Its memory is not used again while this lives.
#[derive(Debug)]
pub struct PinnedVersion {
    pub(super) shared: Arc<StoreShared>,
    buffer: Arc<VersionBuffer>,
    published: SystemTime,
    version: Version,
}

impl PinnedVersion {
    /// `version`, or the newest one.
    pub(super) fn of(
        shared: &Arc<StoreShared>,
        inner: &mut Inner,
        version: Option<Version>,
    ) -> Option<PinnedVersion> {
        if inner.loading.is_some() {
            return None;
        }
        let table = &mut inner.versions.table;
        let version = version.or_else(|| table.keys().next_back().copied())?;
        let (buffer, published) = table.get(&version).map(|of| (Arc::clone(&of.buffer), of.at))?;
        table.pin(version);
        Some(PinnedVersion { shared: Arc::clone(shared), buffer, published, version })
    }

    /// The version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Another process may read the memory for longer than this lives. So the memory is never written again.
    pub fn give_up(&self) {
        self.shared.inner.lock().versions.table.give_up(self.version);
    }

    /// Another process shows the version from now on.
    pub fn show(&self) -> ShownVersion {
        self.shared.inner.lock().versions.table.show(self.version);
        ShownVersion { shared: Arc::clone(&self.shared), version: self.version }
    }

    /// The bytes of a block of the partition.
    ///
    /// # Panics
    /// If the partition has no such block.
    pub fn block(&self, block: BlockId) -> &[u8] {
        self.buffer.bytes(self.shared.partition.layout().block_bytes(block))
    }

    /// The memory of the version, and the offset of a block of the partition in it, in bytes.
    ///
    /// # Panics
    /// If the partition has no such block.
    pub fn place(&self, block: BlockId) -> (&Arc<Mapping>, u64) {
        (self.buffer.region.memory(), self.shared.partition.layout().block_bytes(block).start)
    }

    /// The memory, in which blocks lie one behind the other, and the time of its publication.
    pub fn region(&self) -> (&Region, SystemTime) {
        (&self.buffer.region, self.published)
    }

    /// The CRC32C of [`Self::block`]. It is computed once: while the block was compared, if patches were sent lately, or
    /// at the first request. That pass brings the block into the cache, from which it is then sent. (The block was stored
    /// past the caches when it was made.)
    ///
    /// # Panics
    /// If the partition has no such block.
    pub fn checksum(&self, block: BlockId) -> u32 {
        let range = self.shared.partition.layout().block_bytes(block);
        self.buffer.checksum(block, range)
    }
}

impl Drop for PinnedVersion {
    fn drop(&mut self) {
        self.shared.inner.lock().versions.table.unpin(self.version, 1);
    }
}

/// A version that another process shows from memory which both map. The memory is not written again while this lives.
/// If the store needs a buffer, it takes a new one in its place, and leaves this one to that process.
#[derive(Debug)]
pub struct ShownVersion {
    shared: Arc<StoreShared>,
    version: Version,
}

impl ShownVersion {
    /// It is unknown for how long the other process will show the version, so its memory is never written again.
    pub fn give_up(&self) {
        self.shared.inner.lock().versions.table.give_up(self.version);
    }
}

impl Drop for ShownVersion {
    fn drop(&mut self) {
        self.shared.inner.lock().versions.table.unshow(self.version);
    }
}
