//! The memory of requests. This module holds `unsafe`.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::bytes::mmap::Mapping;

/// Memory that a request reads into or writes. A queue has it from the submission to the completion.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
    /// Keeps it, unless somebody has lent it.
    kept: Option<Arc<Mapping>>,
}

// SAFETY: it is the only one that reads or writes its bytes.
unsafe impl Send for Buffer {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` zero bytes (> 0) that begin with a page, as O_DIRECT wants them.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(len: usize) -> io::Result<Buffer> {
        let memory = Mapping::anonymous(len)?;
        Ok(Buffer { start: memory.start(), len, kept: Some(Arc::new(memory)) })
    }

    /// Memory of the caller's.
    ///
    /// # Safety
    /// Until the buffer is dropped, the memory stays mapped, and nobody else writes it. If it is read into, nobody else
    /// reads it.
    pub unsafe fn lent(start: NonNull<u8>, len: usize) -> Buffer {
        Buffer { start, len, kept: None }
    }

    /// No memory, for a request without bytes.
    pub fn none() -> Buffer {
        Buffer { start: NonNull::dangling(), len: 0, kept: None }
    }

    /// What keeps the memory.
    pub(super) fn kept(&self) -> Option<Arc<Mapping>> {
        self.kept.clone()
    }

    pub(super) fn span(&self) -> (usize, usize) {
        (self.start.as_ptr().addr(), self.len)
    }

    /// The first address, for whoever registers it.
    pub(super) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// A part of it, for the piece that moves its bytes.
    pub(super) fn place(&self, at: usize, len: usize, registered: Option<u16>) -> Place {
        assert!(at + len <= self.len, "a piece of the buffer");
        // SAFETY: it is within the buffer, as was just checked.
        Place { start: unsafe { self.start.add(at) }, len, registered }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: whoever made the buffer has promised that the memory is there and changes by this buffer alone.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this is the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

/// The memory of a piece in flight. The table keeps the buffer until the piece has ended.
#[derive(Clone, Copy)]
pub(super) struct Place {
    start: NonNull<u8>,
    pub len: usize,
    /// Under which number the ring knows the memory.
    pub registered: Option<u16>,
}

// SAFETY: a piece is worked on by one thread at a time.
unsafe impl Send for Place {}

impl Place {
    pub(super) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The bytes.
    ///
    /// # Safety
    /// The piece is in flight.
    pub(super) unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: a buffer in flight belongs to its pieces.
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }

    /// The bytes, to be read into.
    ///
    /// # Safety
    /// The piece is in flight, and this is the only reference.
    pub(super) unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        // SAFETY: as above. Pieces do not overlap.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }
}
