//! The arena: memory that is taken and registered once, at start, and handed out in pieces (RPCH §3.4, TF-RDMA §3.3).
//!
//! All of it is registered for this end's device alone. A [`Chunk`] that peers are to write has a registration of its
//! own, so that the key that a peer is given opens nothing else.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use range_alloc::RangeAllocator;

use super::memory::no_memory;
use super::{Access, Domain, Registration, VerbsError};
use crate::mmap::Mapping;

/// Pieces begin on pages.
const PAGE: u64 = 4096;

/// Registered memory with an allocator on top.
#[derive(Debug)]
pub struct Arena {
    registration: Arc<Registration>,
    free: Mutex<RangeAllocator<u64>>,
    // After the registration, which is of it.
    memory: Arc<Mapping>,
}

impl Arena {
    /// Takes `bytes` of memory, in huge pages where the kernel has them, and registers them.
    ///
    /// # Errors
    /// [`VerbsError::Memlock`], [`VerbsError::Call`].
    pub fn new(domain: &Arc<Domain>, bytes: usize) -> Result<Arc<Arena>, VerbsError> {
        let bytes = bytes.next_multiple_of(PAGE as usize);
        let memory = Mapping::memfd("gradfs-arena", bytes).map_err(|error| no_memory(&error))?;
        memory.prefault().map_err(|error| no_memory(&error))?;
        let registration = Registration::new(domain, &memory, 0..bytes, Access::Local)?;
        let free = Mutex::new(RangeAllocator::new(0..bytes as u64));
        Ok(Arc::new(Arena { registration, free, memory: Arc::new(memory) }))
    }

    /// Takes a piece of `bytes` bytes or a little more. Not for the data path.
    ///
    /// # Errors
    /// When there is none that large: [`VerbsError::OutOfRange`].
    pub fn take(self: &Arc<Arena>, bytes: usize) -> Result<Arc<Chunk>, VerbsError> {
        let len = (bytes.max(1) as u64).next_multiple_of(PAGE);
        let range = self.free.lock().allocate_range(len).map_err(|_| {
            let all = self.memory.len() as u64;
            VerbsError::OutOfRange {
                offset: all - self.free.lock().total_available(),
                len: bytes,
                of: "the arena",
                all,
            }
        })?;
        Ok(Arc::new(Chunk { arena: Arc::clone(self), range }))
    }

    /// Bytes that are not handed out.
    pub fn available(&self) -> u64 {
        self.free.lock().total_available()
    }
}

/// A piece of an arena, given back when it is dropped.
#[derive(Debug)]
pub struct Chunk {
    arena: Arc<Arena>,
    range: Range<u64>,
}

impl Chunk {
    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }

    /// Its first byte. What may be done with it is its holder's business: the memory is peers', too.
    pub(super) fn start(&self) -> *mut u8 {
        self.arena.memory.start().as_ptr().wrapping_add(self.range.start as usize)
    }

    /// Registers it once more, for peers to write.
    ///
    /// # Errors
    /// As of [`Registration::new`].
    pub fn open(&self) -> Result<Arc<Registration>, VerbsError> {
        let range = self.range.start as usize..self.range.end as usize;
        Registration::new(self.arena.registration.domain(), &self.arena.memory, range, Access::Write)
    }

    pub(super) fn local(&self) -> &Arc<Registration> {
        &self.arena.registration
    }

    /// Cuts it in slots of `bytes` bytes each.
    pub fn slots(self: &Arc<Chunk>, bytes: usize) -> Vec<Slot> {
        let starts = (0..self.len() / bytes.max(1)).map(|index| index * bytes);
        starts.map(|start| Slot { chunk: Arc::clone(self), start, len: bytes }).collect()
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        self.arena.free.lock().free_range(self.range.clone());
    }
}

/// Room for one payload in an arena. Whoever has it has that room.
#[derive(Debug)]
pub struct Slot {
    chunk: Arc<Chunk>,
    start: usize,
    len: usize,
}

impl Slot {
    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// Where it begins in its chunk.
    pub fn offset(&self) -> usize {
        self.start
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.chunk.start().wrapping_add(self.start)
    }

    pub(super) fn registration(&self) -> &Arc<Registration> {
        self.chunk.local()
    }

    /// The first `len` bytes.
    ///
    /// # Panics
    /// If it is not as long.
    ///
    /// # Safety
    /// A slot that peers may write (see [`Chunk::open`]) can change while it is read, if the peer breaks the rules. So
    /// whoever reads it makes of it numbers only: no lengths, no positions, no branches that memory depends on. All that
    /// comes of a lie is other numbers.
    pub unsafe fn bytes(&self, len: usize) -> &[u8] {
        assert!(len <= self.len, "{len} bytes of a slot of {}", self.len);
        // SAFETY: within the chunk, whose memory lives as long as it does; nobody here writes a slot but its holder,
        // which a shared reference keeps from it.
        unsafe { std::slice::from_raw_parts(self.start(), len) }
    }

    /// All of it, to write.
    ///
    /// # Safety
    /// No peer has been given the key to it.
    pub unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the reference is exclusive, as the slot is.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }
}
