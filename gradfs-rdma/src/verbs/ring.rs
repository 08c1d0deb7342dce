//! Two rings of bytes between two ends. The writer of each writes it into the reader's memory.
//!
//! Each end has a ring that the peer's device writes, and a copy of the peer's ring, from which its own device sends.
//! Counts of written and read bytes go with the writes, as immediate data or into words that the other end polls.
//! They wrap around. Each end keeps its own counts, so the peer can falsify only its own, which is checked. Bytes of
//! the copy are overwritten only after the peer has read them. The device has sent them by then.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::work::Work;
use super::{Arena, Chunk, Registration, RemoteMemory, VerbsError};
use modelio_base::transport::stream::{ReceiveSlices, SendSlices};

/// Bytes of a ring: about a thousand frames that name payload.
pub const RING: usize = 64 << 10;
/// Bytes of the words behind it.
const WORDS: usize = 4096;
/// Words lie on different cache lines.
const APART: usize = 128;
/// The number of read bytes after which the peer is notified.
const REPORT_EVERY: u32 = (RING / 4) as u32;

/// Counts are sent modulo this. The bits above are the kind of count.
const COUNT: u32 = (1 << 30) - 1;
const KIND: u32 = !COUNT;
const WRITTEN: u32 = 0;
const READ: u32 = 1 << 30;
const END: u32 = 2 << 30;

/// How the peer is notified of written bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// Immediate data, which wakes it.
    Immediate,
    /// A word in its memory, which it polls.
    Flag,
}

/// One end of both rings.
#[derive(Debug)]
pub struct Rings {
    // Dropped before the memory, which others use afterwards.
    opened: Arc<Registration>,
    incoming: Chunk,
    outgoing: Arc<Chunk>,
    notify: Notify,
    /// Counts for the ring that the peer writes: bytes that have arrived, bytes that were read, and bytes of which the
    /// peer knows that they were read.
    arrived: u32,
    consumed: u32,
    reported: u32,
    /// Counts for the ring that the peer reads: bytes that were written, and that it has read.
    written: u32,
    acknowledged: u32,
    ended: bool,
    next_word: usize,
}

/// The peer breaks the rules of the rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer counts {0} bytes in a ring of {RING}")]
pub struct Broken(u32);

impl Rings {
    /// Rings in memory from the arena.
    ///
    /// # Errors
    /// If the arena has no room, or the memory cannot be registered.
    pub fn new(arena: &Arc<Arena>, notify: Notify) -> Result<Rings, VerbsError> {
        let incoming = arena.take(RING + WORDS)?;
        let outgoing = Arc::new(arena.take(RING + WORDS)?);
        let opened = incoming.open()?;
        let rings = Rings {
            incoming,
            opened,
            outgoing,
            notify,
            arrived: 0,
            consumed: 0,
            reported: 0,
            written: 0,
            acknowledged: 0,
            ended: false,
            next_word: 0,
        };
        for kind in [WRITTEN, READ, END] {
            rings.word(kind).store(0, Ordering::Relaxed);
        }
        Ok(rings)
    }

    /// The place where the peer writes.
    pub fn invitation(&self) -> RemoteMemory {
        self.opened.remote()
    }

    fn place(kind: u32) -> usize {
        RING + (kind >> 30) as usize * APART
    }

    fn word(&self, kind: u32) -> &AtomicU32 {
        // SAFETY: the word is within the chunk and aligned, and lives as long as `self`. The peer's device writes it as
        // a whole. If it does not, the word may have any value, and every word of the peer's is checked.
        unsafe { AtomicU32::from_ptr(self.incoming.start().wrapping_add(Rings::place(kind)).cast()) }
    }

    /// Takes a word of the peer, received or polled.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn notified(&mut self, word: u32) -> Result<(), Broken> {
        let count = word & COUNT;
        match word & KIND {
            WRITTEN => {
                let fresh = count.wrapping_sub(self.arrived) & COUNT;
                let there = self.arrived.wrapping_sub(self.consumed) + fresh;
                if there as usize > RING {
                    return Err(Broken(there));
                }
                self.arrived = self.arrived.wrapping_add(fresh);
            }
            READ => {
                let fresh = count.wrapping_sub(self.acknowledged) & COUNT;
                let outstanding = self.written.wrapping_sub(self.acknowledged);
                if fresh > outstanding {
                    return Err(Broken(fresh));
                }
                self.acknowledged = self.acknowledged.wrapping_add(fresh);
            }
            _ => self.ended = true,
        }
        Ok(())
    }

    /// Reads the words that the peer writes into this end's memory, if it notifies in that way.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn check(&mut self) -> Result<(), Broken> {
        if self.notify == Notify::Flag {
            // The peer writes this word last, so everything before it has come, too.
            let ended = self.word(END).load(Ordering::Acquire) != 0;
            for kind in [WRITTEN, READ] {
                let word = self.word(kind).load(Ordering::Acquire);
                self.notified(kind | (word & COUNT))?;
            }
            self.ended |= ended;
        }
        Ok(())
    }

    /// The number of bytes to read.
    pub fn readable(&self) -> usize {
        self.arrived.wrapping_sub(self.consumed) as usize
    }

    /// The number of bytes that fit.
    pub fn room(&self) -> usize {
        RING - self.written.wrapping_sub(self.acknowledged) as usize
    }

    /// Whether the peer sends no more.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Copies the received bytes into a stream's slices.
    pub fn read(&mut self, into: &ReceiveSlices) -> usize {
        let mut left = self.readable();
        let before = self.consumed;
        for (into, len) in into.each() {
            let mut done = 0;
            while done < len.min(left) {
                let at = self.consumed as usize % RING;
                let count = (len.min(left) - done).min(RING - at);
                // SAFETY: the range is within the chunk and within the stream's slice. The slice is writable, and the
                // connection's until the bytes are reported. A peer that breaks the rules may be writing there. Any
                // bytes will do, and they are read only after they are copied.
                unsafe {
                    let from = self.incoming.start().wrapping_add(at);
                    into.add(done).copy_from_nonoverlapping(from, count);
                }
                done += count;
                self.consumed = self.consumed.wrapping_add(count as u32);
            }
            left -= done;
            if left == 0 {
                break;
            }
        }
        self.consumed.wrapping_sub(before) as usize
    }

    /// Copies a stream's bytes, as many as fit. Returns their number, and adds the work that brings them to `peer`.
    pub fn write(&mut self, out: &SendSlices, peer: RemoteMemory, work: &mut Vec<Work>) -> usize {
        let mut left = self.room();
        let before = self.written;
        for (from, len) in out.each() {
            let mut done = 0;
            while done < len.min(left) {
                let at = self.written as usize % RING;
                let count = (len.min(left) - done).min(RING - at);
                // SAFETY: the range is within the chunk and within the stream's slice, which does not change
                // until it is sent. The peer has read the earlier bytes there.
                unsafe {
                    let into = self.outgoing.start().wrapping_add(at);
                    into.copy_from_nonoverlapping(from.add(done), count);
                }
                done += count;
                self.written = self.written.wrapping_add(count as u32);
            }
            left -= done;
            if left == 0 {
                break;
            }
        }
        let bytes = self.written.wrapping_sub(before) as usize;
        let start = before as usize % RING;
        let first = bytes.min(RING - start);
        let parts = [(start, first), (0, bytes - first)];
        let last = if parts[1].1 > 0 { 1 } else { 0 };
        for (index, (start, len)) in
            parts.into_iter().enumerate().take(last + 1).filter(|(_, (_, len))| *len > 0)
        {
            let notifies = index == last && self.notify == Notify::Immediate;
            let word = notifies.then_some(WRITTEN | (self.written & COUNT));
            let (chunk, to) = (Arc::clone(&self.outgoing), peer.at(start as u64));
            work.push(Work::Ring { chunk, start, len, to, word });
        }
        if bytes > 0 && self.notify == Notify::Flag {
            work.push(self.flag(WRITTEN, self.written & COUNT, peer));
        }
        bytes
    }

    /// Notifies the peer of the bytes read, when they are enough.
    pub fn acknowledge(&mut self, peer: RemoteMemory, work: &mut Vec<Work>) {
        if self.consumed.wrapping_sub(self.reported) >= REPORT_EVERY {
            self.reported = self.consumed;
            let report = self.counter(READ, self.consumed & COUNT, peer);
            work.push(report);
        }
    }

    /// Tells the peer that nothing more comes.
    pub fn end(&mut self, peer: RemoteMemory, work: &mut Vec<Work>) {
        let end = self.counter(END, 1, peer);
        work.push(end);
    }

    fn counter(&mut self, kind: u32, count: u32, peer: RemoteMemory) -> Work {
        match self.notify {
            Notify::Flag => self.flag(kind, count, peer),
            Notify::Immediate => {
                let chunk = Arc::clone(&self.outgoing);
                Work::Ring { chunk, start: 0, len: 0, to: peer, word: Some(kind | count) }
            }
        }
    }

    /// Writes a word into the peer's memory. There are more places for words than pieces of work can be outstanding, so
    /// no place is used again before its word is written.
    fn flag(&mut self, kind: u32, count: u32, peer: RemoteMemory) -> Work {
        let start = RING + self.next_word * size_of::<u32>();
        self.next_word = (self.next_word + 1) % (WORDS / size_of::<u32>());
        // SAFETY: the word is within the chunk and aligned. Earlier work with this place is done, so the device has
        // read it.
        let word = unsafe { AtomicU32::from_ptr(self.outgoing.start().wrapping_add(start).cast()) };
        word.store(count, Ordering::Release);
        let (chunk, to) = (Arc::clone(&self.outgoing), peer.at(Rings::place(kind) as u64));
        Work::Ring { chunk, start, len: size_of::<u32>(), to, word: None }
    }
}
