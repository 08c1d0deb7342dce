//! Two rings of bytes in a memfd, one in each direction, and a bell in each direction.
//!
//! A ring has one writer and one reader. Each counts the bytes that it has moved, in a word that the other end reads.
//! The difference is the number of bytes to read; the rest of the ring is free. Counts wrap around. Each end keeps
//! its own count, so the peer can falsify only its own, which is checked every time it is read.
//!
//! An end that finds nothing to do sets a word of its own ([`RingEnd::wait`]), checks once more, and sleeps until its
//! bell rings. The other end moves bytes, then reads that word. Both order their stores before their reads, so one of
//! them notices. Bells are eventfds that are never read, because an edge-triggered epoll reports each ring once.
//!
//! This module holds `unsafe`: the memory is the peer's, too. Bytes are copied by raw pointers, and no Rust reference
//! to them exists. Words are atomics. The peer can only change values, and those are checked.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering, fence};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::bytes::mmap::Mapping;

/// Bytes of a ring: about a thousand frames that name payload.
pub const RING: usize = 64 << 10;
/// Bytes of the words before the rings: a page, a cache line for each.
const CONTROL: usize = 4096;
/// Bytes of all of it.
pub(super) const MEMORY: usize = CONTROL + 2 * RING;

/// Apart so far, words do not share what a CPU fetches at once.
const APART: usize = 128;
const WRITTEN: usize = 0;
const READ: usize = 2 * APART;
const WAITS: usize = 4 * APART;

/// The events that an end waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    /// Bytes to read.
    pub bytes: bool,
    /// Room to write.
    pub room: bool,
}

const BYTES: u32 = 1;
const ROOM: u32 = 2;

/// The peer breaks the rules of the rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// Counts that cannot be.
    #[error("the peer counts {0} bytes in a ring of {RING}")]
    Count(u32),
    /// Its bell cannot be rung.
    #[error("the peer's eventfd cannot be written: {0}")]
    Bell(Errno),
}

/// One of the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Connects = 0,
    Accepts = 1,
}

/// One end of both rings: it writes one and reads the other.
#[derive(Debug)]
pub struct RingEnd {
    memory: Mapping,
    side: usize,
    written: u32,
    read: u32,
    own_bell: OwnedFd,
    peers_bell: OwnedFd,
}

impl RingEnd {
    /// An end of rings in `memory`, of which nothing was used before.
    ///
    /// # Errors
    /// When the memory is not as long as it must be.
    pub(super) fn new(
        memory: Mapping,
        side: Side,
        own_bell: OwnedFd,
        peers_bell: OwnedFd,
    ) -> io::Result<RingEnd> {
        if memory.len() != MEMORY {
            let why = format!("{} bytes for rings of {MEMORY}", memory.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(RingEnd { memory, side: side as usize, written: 0, read: 0, own_bell, peers_bell })
    }

    /// Becomes ready when the peer rings. To be watched edge-triggered, and not read.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.own_bell.as_fd()
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        debug_assert!(at.is_multiple_of(APART) && at < CONTROL);
        // SAFETY: within the mapping's first page and aligned; it lives as long as `self`. Both ends access it as an
        // atomic; if the peer does not, its value may be any, as with every word of the peer's.
        unsafe { AtomicU32::from_ptr(self.memory.start().as_ptr().add(at).cast()) }
    }

    fn ring(&self, writer: usize) -> *mut u8 {
        // SAFETY: within the mapping, whose length `new` has checked.
        unsafe { self.memory.start().as_ptr().add(CONTROL + writer * RING) }
    }

    /// Bytes that are there to be read.
    ///
    /// # Errors
    /// [`Broken::Count`].
    pub fn readable(&self) -> Result<usize, Broken> {
        let peer = 1 - self.side;
        let count = self.word(WRITTEN + peer * APART).load(Ordering::Acquire).wrapping_sub(self.read);
        if count as usize > RING { Err(Broken::Count(count)) } else { Ok(count as usize) }
    }

    /// Room for bytes to be written.
    ///
    /// # Errors
    /// [`Broken::Count`].
    pub fn room(&self) -> Result<usize, Broken> {
        let count = self.written.wrapping_sub(self.word(READ + self.side * APART).load(Ordering::Acquire));
        if count as usize > RING { Err(Broken::Count(count)) } else { Ok(RING - count as usize) }
    }

    /// Copies what is there into `slices`, as far as both go. Zero if nothing is there.
    ///
    /// # Errors
    /// [`Broken`].
    ///
    /// # Safety
    /// The slices are writable, and nobody else touches them meanwhile.
    pub unsafe fn read(&mut self, slices: impl Iterator<Item = (*mut u8, usize)>) -> Result<usize, Broken> {
        let mut left = self.readable()?;
        let ring = self.ring(1 - self.side);
        let before = self.read;
        for (into, len) in slices {
            let mut done = 0;
            while done < len.min(left) {
                let at = self.read as usize % RING;
                let count = (len.min(left) - done).min(RING - at);
                // SAFETY: `at + count` is within the ring, `done + count` within the slice. The peer may be writing
                // there, if it breaks the rules: any bytes will do, and they are looked at only when they are copied.
                unsafe { into.add(done).copy_from_nonoverlapping(ring.add(at), count) };
                done += count;
                self.read = self.read.wrapping_add(count as u32);
            }
            left -= done;
            if left == 0 {
                break;
            }
        }
        if self.read != before {
            self.word(READ + (1 - self.side) * APART).store(self.read, Ordering::Release);
            self.ring_bell(ROOM)?;
        }
        Ok(self.read.wrapping_sub(before) as usize)
    }

    /// Copies from `slices` as far as there is room. Zero if there is none.
    ///
    /// # Errors
    /// [`Broken`].
    ///
    /// # Safety
    /// The slices are readable, and nobody writes them meanwhile.
    pub unsafe fn write(&mut self, slices: impl Iterator<Item = (*mut u8, usize)>) -> Result<usize, Broken> {
        let mut left = self.room()?;
        let ring = self.ring(self.side);
        let before = self.written;
        for (from, len) in slices {
            let mut done = 0;
            while done < len.min(left) {
                let at = self.written as usize % RING;
                let count = (len.min(left) - done).min(RING - at);
                // SAFETY: as above. The bytes that lay there were read, or the peer says so.
                unsafe { ring.add(at).copy_from_nonoverlapping(from.add(done), count) };
                done += count;
                self.written = self.written.wrapping_add(count as u32);
            }
            left -= done;
            if left == 0 {
                break;
            }
        }
        if self.written != before {
            self.word(WRITTEN + self.side * APART).store(self.written, Ordering::Release);
            self.ring_bell(BYTES)?;
        }
        Ok(self.written.wrapping_sub(before) as usize)
    }

    /// Has the peer ring on the events that this end wants. Look once more before sleeping.
    pub fn wait(&self, wants: Wants) {
        let bits = if wants.bytes { BYTES } else { 0 } | if wants.room { ROOM } else { 0 };
        self.word(WAITS + self.side * APART).store(bits, Ordering::Relaxed);
        // The announcement is visible before anything is looked at from here on. `ring_bell` has the other
        // half.
        fence(Ordering::SeqCst);
    }

    /// This end is awake and needs no bell.
    pub fn awake(&self) {
        self.word(WAITS + self.side * APART).store(0, Ordering::Relaxed);
    }

    fn ring_bell(&self, what: u32) -> Result<(), Broken> {
        fence(Ordering::SeqCst);
        let waits = self.word(WAITS + (1 - self.side) * APART);
        if waits.load(Ordering::Relaxed) & what == 0 {
            return Ok(());
        }
        // It wakes up for this: once is enough.
        waits.fetch_and(!what, Ordering::Relaxed);
        // A bell whose count is full would hold this thread up, if the peer has made its descriptor blocking. An
        // honest peer's is never full, as it takes 2^64 rings.
        let mut ready = [PollFd::new(self.peers_bell.as_fd(), PollFlags::POLLOUT)];
        poll(&mut ready, PollTimeout::ZERO).map_err(Broken::Bell)?;
        if !ready[0].revents().is_some_and(|bits| bits.contains(PollFlags::POLLOUT)) {
            return Err(Broken::Bell(Errno::EAGAIN));
        }
        match nix::unistd::write(&self.peers_bell, &1u64.to_ne_bytes()) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(Broken::Bell(errno)),
        }
    }
}

#[cfg(test)]
mod tests;
