//! Payload that is lent to a connection where it lies: memory that it receives into, and memory that it sends from.
//!
//! This module holds `unsafe`, because others see that memory, too. [`Target::new`] and [`LentPayload::new`] say what
//! their callers promise.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::Close;
use crate::bytes::crc32c::crc32c;
use crate::bytes::mmap::warm;

/// Keeps memory while it lives.
pub type Guard = Arc<dyn Any + Send + Sync>;

/// The place where a payload is received.
pub struct Target {
    start: *mut u8,
    len: usize,
    _guard: Guard,
}

// SAFETY: `new`'s caller has promised the memory to any holder of the target, on any thread.
unsafe impl Send for Target {}

impl Target {
    /// `len` bytes at `start`, which stay there as long as `guard` lives.
    ///
    /// # Safety
    /// The bytes are writable. Until the conversation has been told that the payload is complete or that the connection
    /// is closed, nobody else makes a reference to them, and nobody reads or writes them who cannot take a mixture.
    pub unsafe fn new(start: *mut u8, len: usize, guard: Guard) -> Target {
        Target { start, len, _guard: guard }
    }

    /// First byte, and length.
    pub fn raw(&self) -> (*mut u8, usize) {
        (self.start, self.len)
    }

    /// The number of bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Fills it with `bytes` from byte `at` on.
    ///
    /// # Panics
    /// When they do not fit.
    ///
    /// # Safety
    /// The holder is still lent the memory.
    pub unsafe fn fill(&mut self, at: usize, bytes: &[u8]) {
        assert!(
            at <= self.len && bytes.len() <= self.len - at,
            "{} bytes at {at} of {}",
            bytes.len(),
            self.len
        );
        // SAFETY: it fits. The target is writable, and not part of `bytes`, which others may not write.
        unsafe { self.start.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// Fills it from memory that both ends of a connection see.
    ///
    /// # Errors
    /// If the lengths differ.
    ///
    /// # Safety
    /// `from` can be read for `len` bytes and does not overlap the target. It may change meanwhile.
    pub unsafe fn copy_from(&mut self, from: *const u8, len: usize) -> Result<(), Close> {
        if len != self.len {
            let why = format!("{len} bytes of payload for {} bytes of memory", self.len);
            return Err(Close::Asked(why.into()));
        }
        // SAFETY: the target is writable and its holder's alone; the rest is the caller's promise.
        unsafe { self.start.copy_from_nonoverlapping(from, len) };
        Ok(())
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}

/// A payload that is sent from where it lies.
pub struct LentPayload {
    start: *const u8,
    len: usize,
    crc: Option<u32>,
    _guard: Guard,
}

// SAFETY: it is memory that may be read from any thread until the piece is dropped, as `new`'s caller has promised.
unsafe impl Send for LentPayload {}

impl fmt::Debug for LentPayload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentPayload")
            .field("start", &self.start)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl LentPayload {
    /// `bytes`, which stay there as long as `guard` lives. `crc` is their CRC32C. `None` sends them without one.
    ///
    /// # Safety
    /// Nobody writes them until the piece is dropped, unless the peer can take a mixture. The connection drops the
    /// piece when the kernel has the bytes, or when the connection ends.
    pub unsafe fn new(bytes: &[u8], crc: Option<u32>, guard: Guard) -> LentPayload {
        LentPayload { start: bytes.as_ptr(), len: bytes.len(), crc, _guard: guard }
    }

    /// Bytes of a version, which `pin` keeps, without a checksum.
    pub fn of_version(bytes: &[u8], pin: Guard) -> LentPayload {
        // SAFETY: a version is not written while it is pinned, and its memory stays.
        unsafe { LentPayload::new(bytes, None, pin) }
    }

    /// Bytes that belong to the piece, with a checksum.
    pub fn owned(bytes: Vec<u8>) -> LentPayload {
        LentPayload::owned_with(bytes, ())
    }

    /// Bytes that several pieces share, with this CRC32C or without one.
    pub fn shared(bytes: &Arc<Vec<u8>>, crc: Option<u32>) -> LentPayload {
        // SAFETY: nobody writes the vector while it is shared, and the guard keeps it.
        unsafe { LentPayload::new(bytes, crc, Arc::clone(bytes) as Guard) }
    }

    /// Like [`Self::owned`], with a value that is dropped when the kernel has the bytes, or will never have them.
    pub fn owned_with(bytes: Vec<u8>, with: impl Send + Sync + 'static) -> LentPayload {
        let both = Arc::new((bytes, with));
        let crc = crc32c(&both.0);
        // SAFETY: nobody else has the vector, and the guard is what owns it.
        unsafe { LentPayload::new(both.0.as_slice(), Some(crc), Arc::clone(&both) as Guard) }
    }

    /// First byte, and length.
    pub fn raw(&self) -> (*const u8, usize) {
        (self.start, self.len)
    }

    /// The number of bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Appends the bytes.
    pub fn append_to(&self, to: &mut Vec<u8>) {
        // SAFETY: they may be read until the piece is dropped, as `new`'s caller has promised.
        to.extend_from_slice(unsafe { std::slice::from_raw_parts(self.start, self.len) });
    }

    /// Brings the bytes into the cache, as a checksum does that is made of them.
    pub fn warm(&self) {
        // SAFETY: they may be read until the piece is dropped, as `new`'s caller has promised.
        warm(unsafe { std::slice::from_raw_parts(self.start, self.len) });
    }

    /// Their CRC32C. `None` if they are sent without one.
    pub fn crc(&self) -> Option<u32> {
        self.crc
    }
}
