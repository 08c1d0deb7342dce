//! The arena: memory that is taken and registered once, at start, and handed out in pieces (RPCH §3.4, TF-RDMA §3.3).
//!
//! All of it is registered for this end's device alone. A [`Chunk`] that peers are to write has a registration of its
//! own, so that the key that a peer is given opens nothing else.
//!
//! An arena may also be memory of another device. Slots for payload can lie there, which iRDMA measured as
//! best for writes to a shard (§IV-A). Memory that the CPU reads and writes, such as rings, cannot.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use range_alloc::RangeAllocator;

use super::registration::no_memory;
use super::{Access, Domain, Registration, VerbsError};
use crate::DeviceMemory;
use modelio_base::bytes::mmap::Mapping;
use modelio_base::transport::stream::Connection;

/// Pieces begin on pages.
const PAGE: u64 = 4096;

/// Registered memory with an allocator on top.
#[derive(Debug)]
pub struct Arena {
    registration: Arc<Registration>,
    free: Mutex<RangeAllocator<u64>>,
    // Dropped after `registration`, which refers to it.
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    Host(Arc<Mapping>),
    Device(Arc<dyn DeviceMemory>),
}

impl Memory {
    fn bytes(&self) -> usize {
        match self {
            Memory::Host(memory) => memory.len(),
            Memory::Device(memory) => memory.bytes(),
        }
    }
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
        Ok(Arc::new(Arena { registration, free, memory: Memory::Host(Arc::new(memory)) }))
    }

    /// An arena of memory of another device, all of which it takes.
    ///
    /// # Errors
    /// [`VerbsError::Call`] where it cannot be registered.
    pub fn on_device(domain: &Arc<Domain>, memory: Arc<dyn DeviceMemory>) -> Result<Arc<Arena>, VerbsError> {
        let bytes = memory.bytes();
        let registration = Registration::of_device(domain, &*memory, 0, bytes, Access::Local)?;
        let free = Mutex::new(RangeAllocator::new(0..bytes as u64 & !(PAGE - 1)));
        Ok(Arc::new(Arena { registration, free, memory: Memory::Device(memory) }))
    }

    /// Takes a piece of `bytes` bytes or a little more. This is too slow for the data path.
    ///
    /// # Errors
    /// [`VerbsError::Arena`] if no free piece is that large.
    pub fn take(self: &Arc<Arena>, bytes: usize) -> Result<Chunk, VerbsError> {
        let len = (bytes.max(1) as u64).next_multiple_of(PAGE);
        let mut free = self.free.lock();
        let range = free.allocate_range(len).map_err(|_| VerbsError::Arena {
            bytes: len,
            available: free.total_available(),
            all: self.memory.bytes() as u64,
        })?;
        drop(free);
        Ok(Chunk { arena: Arc::clone(self), range, is_opened: AtomicBool::new(false) })
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
    /// Peers may have a key to it.
    is_opened: AtomicBool,
}

impl Chunk {
    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }

    /// The first byte. Peers may access the memory, too, so the holder is responsible for each access.
    ///
    /// # Panics
    /// If the memory is another device's.
    pub(super) fn start(&self) -> *mut u8 {
        match &self.arena.memory {
            Memory::Host(memory) => memory.start().as_ptr().wrapping_add(self.range.start as usize),
            Memory::Device(_) => panic!("memory of a device is not the CPU's"),
        }
    }

    /// The address for this end's network device.
    pub(super) fn address(&self) -> u64 {
        self.arena.registration.remote().address + self.range.start
    }

    /// Registers the piece once more, for peers to write.
    ///
    /// # Errors
    /// The errors of [`Registration::new`].
    pub fn open(&self) -> Result<Arc<Registration>, VerbsError> {
        self.is_opened.store(true, Ordering::Relaxed);
        let range = self.range.start as usize..self.range.end as usize;
        let domain = self.arena.registration.domain();
        match &self.arena.memory {
            Memory::Host(memory) => Registration::new(domain, memory, range, Access::Write),
            Memory::Device(memory) => {
                Registration::of_device(domain, &**memory, range.start, range.len(), Access::Write)
            }
        }
    }

    pub(super) fn local(&self) -> &Arc<Registration> {
        &self.arena.registration
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        self.arena.free.lock().free_range(self.range.clone());
    }
}

/// Slots of one size, cut from a chunk. A waiter for a slot is woken when there is one.
#[derive(Debug)]
pub struct Pool {
    /// Only the slots of this pool use the chunk.
    chunk: Chunk,
    bytes: usize,
    count: usize,
    /// Slots are used in turn, even if a later one is free earlier.
    in_turn: bool,
    state: Mutex<Free>,
}

#[derive(Debug, Default)]
struct Free {
    /// For each slot, whether it is free.
    free: Vec<bool>,
    next: usize,
    waiting: Vec<Connection>,
}

impl Pool {
    /// A pool of as many slots of `bytes` bytes as a chunk has room for.
    pub fn new(chunk: Chunk, bytes: usize, in_turn: bool) -> Arc<Pool> {
        let count = chunk.len() / bytes.max(1);
        let free = Free { free: vec![true; count], next: 0, waiting: Vec::new() };
        Arc::new(Pool { chunk, bytes, count, in_turn, state: Mutex::new(free) })
    }

    /// The number of slots.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Bytes of a slot.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A free slot. If there is none, `waits` is woken when there is one.
    pub fn take(self: &Arc<Pool>, waits: Option<&Connection>) -> Option<Slot> {
        let mut state = self.state.lock();
        let first = state.next;
        let mut turns = (0..self.count).map(|turn| (first + turn) % self.count);
        let found = match self.in_turn {
            true => Some(first).filter(|&index| state.free.get(index) == Some(&true)),
            false => turns.find(|&index| state.free[index]),
        };
        let Some(index) = found else {
            if let Some(waits) = waits.filter(|waits| !state.waiting.iter().any(|known| known.is(waits))) {
                state.waiting.push(waits.clone());
            }
            return None;
        };
        state.free[index] = false;
        state.next = (index + 1) % self.count;
        Some(Slot { pool: Arc::clone(self), index })
    }
}

/// Room for one payload in an arena. Nobody but the holder uses it. When it is dropped, it returns to its pool.
#[derive(Debug)]
pub struct Slot {
    pool: Arc<Pool>,
    index: usize,
}

impl Slot {
    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.pool.bytes
    }

    /// The index in its pool.
    pub fn index(&self) -> usize {
        self.index
    }

    fn start(&self) -> *mut u8 {
        self.pool.chunk.start().wrapping_add(self.index * self.pool.bytes)
    }

    /// The address for this end's network device.
    pub(super) fn address(&self) -> u64 {
        self.pool.chunk.address() + (self.index * self.pool.bytes) as u64
    }

    pub(super) fn registration(&self) -> &Arc<Registration> {
        self.pool.chunk.local()
    }

    /// Copies the first `len` bytes to `room` if the slot is in memory of another device. `None` if it is the CPU's.
    ///
    /// # Errors
    /// [`VerbsError::CopyOut`].
    ///
    /// # Panics
    /// If the slot is shorter.
    pub fn copied_out<'a>(&self, len: usize, room: &'a mut Vec<u8>) -> Result<Option<&'a [u8]>, VerbsError> {
        assert!(len <= self.len(), "{len} bytes of a slot of {}", self.len());
        let chunk = &self.pool.chunk;
        let Memory::Device(memory) = &chunk.arena.memory else { return Ok(None) };
        if room.len() < len {
            room.resize(self.len(), 0);
        }
        let at = chunk.range.start as usize + self.index * self.pool.bytes;
        memory.copy_out(at, &mut room[..len]).map_err(|error| VerbsError::CopyOut(error.to_string()))?;
        Ok(Some(&room[..len]))
    }

    /// The first `len` bytes of a slot in the CPU's memory.
    ///
    /// # Panics
    /// If the slot is shorter, or is another device's.
    ///
    /// # Safety
    /// If peers may write the slot (see [`Chunk::open`]), a peer that breaks the rules can change it while it is read.
    /// So the caller uses the bytes as numbers to compute with, and never as lengths, positions or conditions on which
    /// the safety of memory depends.
    pub unsafe fn bytes(&self, len: usize) -> &[u8] {
        assert!(len <= self.len(), "{len} bytes of a slot of {}", self.len());
        // SAFETY: the range is within the chunk, whose memory lives as long as the chunk. In this process only the
        // holder writes a slot, and it cannot while `self` is borrowed.
        unsafe { std::slice::from_raw_parts(self.start(), len) }
    }

    /// A copy of the first bytes of a slot to which no peer has a key.
    ///
    /// # Panics
    /// If the slot is shorter, or peers may write it (see [`Chunk::open`]).
    pub fn copy<const N: usize>(&self) -> [u8; N] {
        assert!(!self.pool.chunk.is_opened.load(Ordering::Relaxed), "peers may write this slot");
        // SAFETY: no peer writes the slot, and in this process only work that holds it does.
        unsafe { self.bytes(N) }.try_into().unwrap_or([0; N])
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        state.free[self.index] = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.iter().for_each(Connection::wake);
    }
}
