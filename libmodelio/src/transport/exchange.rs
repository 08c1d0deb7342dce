//! Streams of protocols that are not gradfs's own: an [`Exchange`] takes bytes and makes replies, and this module has
//! the memory that the driver fills and reads.
//!
//! This module holds `unsafe`: it names that memory to the driver.

use std::time::Instant;

use smallvec::SmallVec;

use super::stream::{
    Buffer, Close, Connection, LentPayload, Receive, ReceiveSlices, SLICES_MAX, SendSlices, Stream, Target,
};

/// The number of bytes that are handed to the kernel at once.
const SEND_AT_ONCE: usize = 1 << 20;
/// The room for bytes that come, until an exchange needs more at once.
const FIRST_ROOM: usize = 16 << 10;

/// A reply, or a part of one: its head, which may be empty, and payload that is sent from where it lies.
pub type Reply = (SmallVec<[u8; 32]>, Option<LentPayload>);

/// One end of a connection, as a state machine. One thread at a time makes all calls. None may block.
pub trait Exchange: Send {
    /// Bytes can flow. Other threads wake or close the exchange by `connection`.
    fn opened(&mut self, connection: &Connection);

    /// The number of bytes that [`Self::take`] must get next, from 1 to the most that [`Exchanging::new`] was told. 0
    /// while it takes none; it is asked again after a wake-up, and when replies were sent.
    fn need(&self) -> usize;

    /// Takes that many bytes.
    ///
    /// # Errors
    /// Closes the connection: the peer broke the protocol.
    fn take(&mut self, bytes: &[u8]) -> Result<(), Close>;

    /// The memory that the next bytes belong in, if [`Self::take`] is not to get them. [`Self::placed`] is called when
    /// it is full; it is not asked for again before. The exchange is asked before [`Self::need`].
    fn place(&mut self) -> Option<Target> {
        None
    }

    /// The memory of [`Self::place`] is full.
    ///
    /// # Errors
    /// Closes the connection: the peer broke the protocol.
    fn placed(&mut self) -> Result<(), Close> {
        Ok(())
    }

    /// The next reply.
    fn next(&mut self) -> Option<Reply>;

    /// Whether nothing follows the replies that were taken. The connection ends when they are sent.
    fn is_finished(&self) -> bool;

    /// Time passes, as in [`Stream::tick`].
    ///
    /// # Errors
    /// Closes the connection: a deadline has passed.
    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close>;

    /// The connection has ended.
    fn closed(&mut self, why: &Close);
}

/// An exchange as a [`Stream`].
pub struct Exchanging<E> {
    exchange: E,
    most: usize,
    /// No more bytes than these are received together with a long payload: more would be in the way of the next one.
    head: usize,
    /// The memory that the next bytes belong in, and how many have come.
    placing: Option<(Target, usize)>,
    /// What has come and was not taken is in `start..end`.
    buffer: Buffer,
    start: usize,
    end: usize,
    /// The driver fills the buffer behind `end`.
    is_receiving: bool,
    /// What the driver may be reading. It has room for all that is sent at once, so that a head stays where it is.
    sending: Vec<Reply>,
    unsent: usize,
}

impl<E: Exchange> Exchanging<E> {
    /// An exchange that needs at most `most` bytes at once, and `head` bytes between those that have a
    /// [place](Exchange::place).
    pub fn new(exchange: E, most: usize, head: usize) -> Exchanging<E> {
        Exchanging {
            exchange,
            most,
            head,
            placing: None,
            buffer: Buffer::zeroed(most.min(FIRST_ROOM)),
            start: 0,
            end: 0,
            is_receiving: false,
            sending: Vec::with_capacity(SLICES_MAX / 2),
            unsent: 0,
        }
    }

    /// Ends the connection when the last reply is sent.
    fn ends_if_finished(&self) -> Result<(), Close> {
        match self.unsent == 0 && self.exchange.is_finished() {
            true => Err(Close::Ended),
            false => Ok(()),
        }
    }

    /// Gives the exchange what has come.
    fn take(&mut self) -> Result<(), Close> {
        while !self.is_receiving {
            if self.placing.is_none() {
                self.placing = self.exchange.place().map(|target| (target, 0));
            }
            if let Some((target, filled)) = &mut self.placing {
                let here = &self.buffer.bytes()[self.start..self.end];
                let here = &here[..here.len().min(target.len() - *filled)];
                // SAFETY: the exchange has lent the memory until `placed`.
                unsafe { target.fill(*filled, here) };
                *filled += here.len();
                self.start += here.len();
                if *filled < target.len() {
                    break;
                }
                self.placing = None;
                self.exchange.placed()?;
                continue;
            }
            let need = self.exchange.need();
            if need > self.most {
                return Err(Close::Misused(format!("{need} bytes are needed, {} at most", self.most).into()));
            }
            if need == 0 || self.end - self.start < need {
                break;
            }
            let from = self.start;
            self.start += need;
            self.exchange.take(&self.buffer.bytes()[from..from + need])?;
        }
        Ok(())
    }
}

impl<E: Exchange> Stream for Exchanging<E> {
    fn opened(&mut self, connection: &Connection) {
        self.exchange.opened(connection);
    }

    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive {
        if let Some((target, filled)) = &self.placing {
            // All that has come is in its place.
            (self.start, self.end) = (0, 0);
            self.is_receiving = true;
            let (start, len) = target.raw();
            // SAFETY: the exchange has lent the memory until `placed`. Nobody looks at the buffer until `received` is
            // called, and it is dropped with the stream.
            unsafe {
                into.push(start.add(*filled), len - filled);
                into.push(self.buffer.start(), self.head.min(self.buffer.len()));
            }
            return Receive::Into { least: len - filled };
        }
        let (need, here) = (self.exchange.need(), self.end - self.start);
        if need <= here {
            return Receive::Paused;
        }
        if need > self.buffer.len() {
            let mut longer = Buffer::zeroed(self.most + self.head);
            longer.bytes_mut()[..here].copy_from_slice(&self.buffer.bytes()[self.start..self.end]);
            self.buffer = longer;
            (self.start, self.end) = (0, here);
        } else if here == 0 || self.buffer.len() - self.start < need {
            self.buffer.bytes_mut().copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, here);
        }
        self.is_receiving = true;
        let room = (self.buffer.len() - self.end).min((need - here + self.head).max(FIRST_ROOM));
        // SAFETY: behind `end`, nobody looks at the buffer until `received` is called, and it is dropped with the
        // stream.
        unsafe { into.push(self.buffer.start().add(self.end), room) };
        Receive::Into { least: need - here }
    }

    fn received(&mut self, bytes: usize) -> Result<(), Close> {
        self.is_receiving = false;
        let placed = match &mut self.placing {
            None => 0,
            Some((target, filled)) => {
                let placed = bytes.min(target.len() - *filled);
                *filled += placed;
                placed
            }
        };
        self.end += bytes - placed;
        self.take()
    }

    fn transmit(&mut self, out: &mut SendSlices) {
        self.sending.clear();
        let mut bytes = 0;
        while self.sending.len() < self.sending.capacity().min(out.room() / 2) && bytes < SEND_AT_ONCE {
            let Some((head, piece)) = self.exchange.next() else { break };
            bytes += head.len() + piece.as_ref().map_or(0, LentPayload::len);
            self.sending.push((head, piece));
        }
        for (head, piece) in &self.sending {
            // SAFETY: the reply stays where it is, and unchanged, until all of it is transmitted. The piece's maker has
            // promised the rest.
            unsafe {
                if !head.is_empty() {
                    out.push(head.as_ptr(), head.len());
                }
                if let Some((start, len)) = piece.as_ref().map(LentPayload::raw) {
                    out.push(start, len);
                }
            }
        }
        self.unsent = out.bytes();
    }

    fn transmitted(&mut self, bytes: usize) -> Result<(), Close> {
        self.unsent = self.unsent.saturating_sub(bytes);
        if self.unsent == 0 {
            self.sending.clear();
            self.ends_if_finished()?;
        }
        self.take()
    }

    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        let next = self.exchange.tick(now)?;
        // It may need bytes now that have come before.
        self.take()?;
        self.ends_if_finished()?;
        Ok(next)
    }

    fn closed(&mut self, why: &Close) {
        self.sending.clear();
        self.exchange.closed(why);
    }
}
