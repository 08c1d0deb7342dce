//! Memory that a stream owns and that bytes are received into and sent from. One of the modules that hold `unsafe`.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use nix::unistd::{SysconfVar, sysconf};

/// Memory of fixed size that does not lie in its owner. Headers are received into it and sent from it. A caller that
/// pushes a slice of it promises not to call [`bytes`](Buffer::bytes), [`bytes_mut`](Buffer::bytes_mut) or
/// [`give_back`](Buffer::give_back), nor to drop it, in the meantime.
pub struct Buffer {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory, as a boxed slice does.
unsafe impl Send for Buffer {}
// SAFETY: through a shared reference it can only be read.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` zeros, aligned to 64 bytes.
    ///
    /// # Panics
    /// If `len` is zero or more than the address space.
    pub fn zeroed(len: usize) -> Buffer {
        assert!(len > 0, "an empty buffer");
        let layout = Layout::from_size_align(len, 64).expect("a length within the address space");
        // SAFETY: the length is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Buffer { start, layout }
    }

    /// Gives its whole pages back to the system, which gives zeros when they are touched again.
    pub fn give_back(&mut self) {
        let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|size| usize::try_from(size).ok());
        let Some(page) = page.filter(|&page| page > 0) else { return };
        let skipped = self.start.as_ptr().align_offset(page);
        let whole = self.len().saturating_sub(skipped) / page * page;
        if whole > 0 {
            // SAFETY: the pages lie in the allocation, which is private memory of this process, and nobody uses them
            // meanwhile: see the type. Zeros are bytes as any others. If it fails, nothing has changed.
            let _ =
                unsafe { libc::madvise(self.start.as_ptr().add(skipped).cast(), whole, libc::MADV_DONTNEED) };
        }
    }

    /// Its start.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// In bytes.
    #[allow(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// Its contents.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is allocated and initialised, and nobody writes it meanwhile: see the type.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len()) }
    }

    /// Its contents, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_are_given_back_and_no_byte_beside_them() {
        let len = (1 << 20) + 100;
        let mut buffers = [Buffer::zeroed(len), Buffer::zeroed(len), Buffer::zeroed(100)];
        buffers.iter_mut().for_each(|buffer| buffer.bytes_mut().fill(7));
        buffers[1].give_back();
        buffers[2].give_back();
        let left = buffers[1].bytes().iter().filter(|byte| **byte != 0).count();
        assert!(left < 2 * (64 << 10), "{left} of {len} bytes are left");
        assert!(buffers[0].bytes().iter().chain(buffers[2].bytes()).all(|byte| *byte == 7));
        buffers[1].bytes_mut().fill(8);
        assert!(buffers[1].bytes().iter().all(|byte| *byte == 8));
    }
}
