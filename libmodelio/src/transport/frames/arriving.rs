//! The payload that is being received: where it goes, how much of it is there, and its checksum.
//!
//! One of the modules that hold `unsafe`: bytes are copied to where the payload goes, and looked at there.

use crate::bytes::crc32c::Crc32c;
use crate::transport::stream::{Buffer, Target};
use crate::wire::Received;

/// Where a payload goes.
pub(super) enum Place {
    /// Nobody wants it.
    Skip,
    /// Into memory of the connection.
    Scratch,
    /// Where the conversation wants it.
    Target(Target),
}

struct Incoming {
    received: Received,
    place: Place,
    got: usize,
    /// Of the first `summed` bytes.
    crc: Crc32c,
    summed: usize,
}

impl Incoming {
    fn len(&self) -> usize {
        self.received.header.payload_len() as usize
    }
}

/// A payload that is whole.
pub(super) struct Arrived<'a> {
    /// Its message.
    pub received: Received,
    /// Its checksum.
    pub crc: u32,
    /// What the conversation gets to see of it: nothing of what lies where it wants it. `None` if nobody wants it.
    pub bytes: Option<&'a [u8]>,
    /// Keeps the memory where it is until the conversation has been told.
    _place: Place,
}

/// The payload that is being received, if one is.
#[derive(Default)]
pub(super) struct Arriving {
    incoming: Option<Incoming>,
    scratch: Option<Buffer>,
}

impl Arriving {
    /// The payload of a message is under way.
    pub fn begin(&mut self, received: Received, place: Place) {
        let incoming = Incoming { received, place, got: 0, crc: Crc32c::new(), summed: 0 };
        if !matches!(incoming.place, Place::Target(_)) {
            self.make_room(incoming.len());
        }
        self.incoming = Some(incoming);
    }

    fn make_room(&mut self, len: usize) {
        if self.scratch.as_ref().is_none_or(|scratch| scratch.len() < len) {
            self.scratch = Some(Buffer::zeroed(len));
        }
    }

    /// The message whose payload is under way.
    pub fn message(&self) -> Option<&Received> {
        self.incoming.as_ref().map(|incoming| &incoming.received)
    }

    /// Bytes of the payload that are still to come.
    pub fn left(&self) -> usize {
        self.incoming.as_ref().map_or(0, |incoming| incoming.len() - incoming.got)
    }

    /// Where the payload under way begins.
    fn start(&self) -> Option<(*mut u8, &Incoming)> {
        let incoming = self.incoming.as_ref()?;
        let start = match &incoming.place {
            Place::Target(target) => target.raw().0,
            Place::Skip | Place::Scratch => self.scratch.as_ref()?.start(),
        };
        Some((start, incoming))
    }

    /// Where the rest of it goes: [`left`](Self::left) bytes. It is this connection's until the payload is whole, or
    /// the connection is closed.
    pub fn rest(&self) -> Option<*mut u8> {
        let (start, incoming) = self.start()?;
        Some(start.wrapping_add(incoming.got))
    }

    /// Puts the next bytes, which came with its message, where they belong. False if nobody wants them.
    ///
    /// # Panics
    /// If they are more than are left.
    pub fn store(&mut self, bytes: &[u8]) -> bool {
        assert!(bytes.len() <= self.left(), "{} bytes of {}", bytes.len(), self.left());
        if let Some(rest) = self.rest() {
            // SAFETY: the place is as long as the payload, of which so many bytes are still to come. It is this
            // connection's until the payload is complete, and no operation is outstanding.
            unsafe { rest.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        self.filled(bytes.len());
        self.incoming.as_ref().is_some_and(|incoming| !matches!(incoming.place, Place::Skip))
    }

    /// The next bytes were received straight to where they belong.
    pub fn filled(&mut self, bytes: usize) {
        if let Some(incoming) = &mut self.incoming {
            incoming.got += bytes;
        }
    }

    /// Takes what has come into the checksum.
    pub fn sum_up(&mut self) {
        let Some((start, incoming)) = self.start() else { return };
        let (from, to) = (incoming.summed, incoming.got);
        // SAFETY: these bytes have been received, and nobody writes them before the conversation has seen them.
        let bytes = unsafe { std::slice::from_raw_parts(start.add(from), to - from) };
        if let Some(incoming) = &mut self.incoming {
            incoming.crc.update(bytes);
            incoming.summed = to;
        }
    }

    /// Takes a payload of which nothing is left to come.
    pub fn finish(&mut self) -> Option<Arrived<'_>> {
        self.sum_up();
        let Incoming { received, place, got, crc, .. } = self.incoming.take()?;
        let bytes = match (&place, &self.scratch) {
            (Place::Scratch, Some(scratch)) => Some(&scratch.bytes()[..got]),
            (Place::Target(_), _) => Some(&[][..]),
            _ => None,
        };
        Some(Arrived { received, crc: crc.finish(), bytes, _place: place })
    }

    /// Forgets the payload under way. There is room to pass over `len` bytes at once from now on.
    pub fn give_up(&mut self, len: usize) {
        self.incoming = None;
        self.make_room(len);
    }

    /// Memory that nobody looks into once the payload is given up.
    pub fn scratch(&self) -> Option<&Buffer> {
        self.scratch.as_ref()
    }

    /// The connection is over: nobody writes where the payload goes.
    pub fn closed(&mut self) {
        self.incoming = None;
    }
}
