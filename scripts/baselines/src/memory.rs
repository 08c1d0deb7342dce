//! A model's memory: a memfd on huge pages, mapped and touched before anything is measured.
//!
//! This module holds `unsafe` code: mapping, and slices of memory that threads share by agreement.

use std::fs::File;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use anyhow::{Context, Result, ensure};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous};

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;

/// Bytes that several threads read and write, each in places that are its own at the time.
pub struct Memory {
    file: File,
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping lasts until the process ends, and access is up to the callers of the unsafe methods.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeros, `length` bytes of them.
    pub fn new(name: &str, length: usize) -> Result<Self> {
        let file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC).context("memfd_create")?);
        file.set_len(length as u64)?;
        Self::of(file)
    }

    /// All of `file`, whose pages are made here where it has none yet.
    pub fn of(file: File) -> Result<Self> {
        let length = usize::try_from(file.metadata()?.len())?;
        ensure!(length > 0 && length.is_multiple_of(4), "{length} bytes are no fp32 values");
        let size = NonZeroUsize::new(length).context("no bytes")?;
        // A huge page is mapped as one only at a multiple of its size.
        let room = size.checked_add(HUGE).context("too many bytes")?;
        // SAFETY: a new mapping at an address that the kernel chooses; nobody touches it.
        let room = unsafe { mmap_anonymous(None, room, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE) };
        let place = NonZeroUsize::new(room.context("mmap")?.addr().get().next_multiple_of(HUGE));
        let (protection, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED);
        // SAFETY: within the room above, which nobody else has; the file is kept open.
        let start = unsafe { mmap(place, size, protection, flags | MapFlags::MAP_FIXED, &file, 0) }
            .context("mmap")?;
        // SAFETY: the whole of the mapping just made. That it is refused where there are no huge pages for
        // shared memory costs speed only.
        let _ = unsafe { madvise(start, length, MmapAdvise::MADV_HUGEPAGE) };
        // SAFETY: as above; every page becomes present and writable.
        unsafe { madvise(start, length, MmapAdvise::MADV_POPULATE_WRITE) }.context("touching the pages")?;
        Ok(Self { file, start: start.cast(), length })
    }

    /// Gathers the pages in huge ones, whatever `shmem_enabled` says, as a shard and its clients do. Where there are none,
    /// small ones have to do.
    pub fn gather(&self) {
        // SAFETY: whole huge pages of the mapping; the advice changes no contents.
        unsafe { libc::madvise(self.start.as_ptr().cast(), self.length & !(HUGE - 1), libc::MADV_COLLAPSE) };
    }

    /// The memfd.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// In bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Never: a model has bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Some of the bytes.
    ///
    /// # Safety
    /// Nobody writes there for as long as the slice is used.
    pub unsafe fn bytes(&self, offset: usize, length: usize) -> &[u8] {
        assert!(offset <= self.length && length <= self.length - offset, "beyond the memory");
        // SAFETY: within the mapping, which is never unmapped; the caller answers for writers.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(offset), length) }
    }

    /// Some of the bytes, to write.
    ///
    /// # Safety
    /// Nobody else reads or writes there for as long as the slice is used.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, offset: usize, length: usize) -> &mut [u8] {
        assert!(offset <= self.length && length <= self.length - offset, "beyond the memory");
        // SAFETY: within the mapping, which is never unmapped; the caller answers for others.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(offset), length) }
    }

    /// As fp32; `offset` and `length` in bytes, multiples of four.
    ///
    /// # Safety
    /// As for `bytes_mut`.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn values_mut(&self, offset: usize, length: usize) -> &mut [f32] {
        assert!(offset.is_multiple_of(4) && length.is_multiple_of(4), "not whole fp32 values");
        // SAFETY: passed on to the caller.
        let bytes = unsafe { self.bytes_mut(offset, length) };
        // SAFETY: the mapping and the offset are aligned, the length is whole, and any bits are an fp32.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), length / 4) }
    }
}
