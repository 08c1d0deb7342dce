//! Memory that a stream owns and that bytes are received into and sent from. One of the modules that hold `unsafe`.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Memory of fixed size that does not lie in its owner. Headers are received into it and sent from it. A caller that
/// pushes a slice of it promises not to call [`bytes`](Buffer::bytes) or [`bytes_mut`](Buffer::bytes_mut), nor to
/// drop it, in the meantime.
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
