//! The memory that the sink keeps a file in, and the two ways to copy into it.
//!
//! This is one of the modules that may hold `unsafe`. Requests are served in parallel and any two may name
//! the same bytes, so nothing here locks: that would cost what this program exists to leave out.
//!
//! # The aliasing rule
//! The memory is mapped once and stays for as long as its [`Buffer`]. It is written through raw pointers only,
//! never through a reference. The one reference there is, [`Buffer::read`]'s, goes to the kernel and nowhere
//! else: no code of this program looks at the bytes. Requests that overlap in time and place leave some of
//! each, as on any device.

use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

/// Anonymous memory, all pages present.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the pages belong to the process, not to a thread, and stay mapped until drop.
unsafe impl Send for Buffer {}
// SAFETY: as for Send; what `&Buffer` lets threads do at once is under the aliasing rule above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` bytes (> 0), on huge pages where there are any, touched so that no write has to wait for a page.
    pub fn new(len: usize) -> io::Result<Buffer> {
        let size = NonZeroUsize::new(len).ok_or(io::ErrorKind::InvalidInput)?;
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlays nothing that exists.
        let pages = unsafe { mmap_anonymous(None, size, access, MapFlags::MAP_PRIVATE) }?;
        let buffer = Buffer { start: pages.cast(), len };
        // SAFETY: advice on the pages just mapped, which changes no contents. A kernel without huge pages
        // refuses it, which is no loss.
        let _ = unsafe { madvise(pages, len, MmapAdvise::MADV_HUGEPAGE) };
        // SAFETY: `len` bytes from `start` were mapped for writing above and nobody else knows of them yet.
        unsafe { buffer.start.write_bytes(1, len) };
        Ok(buffer)
    }

    /// Copies `data` to `offset` with memcpy(3). False, and nothing done, where it does not fit.
    pub fn copy(&self, offset: usize, data: &[u8]) -> bool {
        let Some(to) = self.room(offset, data.len()) else { return false };
        // SAFETY: `room` gave `data.len()` bytes of the mapping. `data` is a request buffer, which is other
        // memory: `read` is the only way to a slice of the mapping, and its slices go to the kernel.
        unsafe { to.copy_from_nonoverlapping(NonNull::from(data).cast(), data.len()) };
        true
    }

    /// Copies `data` to `offset` past the caches, where the processor has a way; otherwise as [`Buffer::copy`].
    pub fn stream(&self, offset: usize, data: &[u8]) -> bool {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx") {
            let Some(to) = self.room(offset, data.len()) else { return false };
            // SAFETY: the processor has the instructions; the bytes are as in `copy`.
            unsafe { stream(to, data) };
            return true;
        }
        self.copy(offset, data)
    }

    /// The bytes at `offset`, fewer at the end; for the kernel only.
    pub fn read(&self, offset: usize, len: usize) -> &[u8] {
        let offset = offset.min(self.len);
        let len = len.min(self.len - offset);
        // SAFETY: within the mapping, which `new` initialised as a whole and which outlives `&self`. Writes
        // that come meanwhile are under the aliasing rule above.
        unsafe { std::slice::from_raw_parts(self.start.add(offset).as_ptr(), len) }
    }

    /// Where `len` bytes at `offset` begin, if all of them lie within the mapping.
    fn room(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: `offset` is at most `self.len`, as just checked.
        Some(unsafe { self.start.add(offset) })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours as `new` made it, and no slice of it outlives `self`.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}

/// Copies `data` to `to` with streaming stores, which spare a read of what they overwrite.
///
/// # Safety
/// The processor must have AVX, and `data.len()` bytes from `to` must be mapped for writing and not `data`'s.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream(to: NonNull<u8>, data: &[u8]) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    const LINES: usize = 128;
    // Streaming stores want an aligned target; what is before and after goes the usual way.
    let head = to.as_ptr().align_offset(LINES).min(data.len());
    let lines = (data.len() - head) / LINES;
    let tail = head + lines * LINES;
    let from = data.as_ptr();
    // SAFETY: `head <= offset`, `offset + LINES <= tail <= data.len()`, and both sides have `data.len()`
    // bytes. `to + head` is aligned wherever the loop runs at all, and so is every further target.
    unsafe {
        to.as_ptr().copy_from_nonoverlapping(from, head);
        for offset in (head..tail).step_by(LINES) {
            let source = from.add(offset).cast::<__m256i>();
            let target = to.as_ptr().add(offset).cast::<__m256i>();
            let line = [0, 1, 2, 3].map(|i| _mm256_loadu_si256(source.add(i)));
            for (i, part) in line.into_iter().enumerate() {
                _mm256_stream_si256(target.add(i), part);
            }
        }
        to.as_ptr().add(tail).copy_from_nonoverlapping(from.add(tail), data.len() - tail);
        _mm_sfence();
    }
}
