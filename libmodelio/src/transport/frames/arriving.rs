//! The payload that is being received: where it goes, how much of it is there, and its checksum.
//!
//! One of the modules that hold `unsafe`: payload is copied to its place, and shown from there.

use crate::bytes::crc32c::Crc32c;
use crate::transport::stream::{Buffer, Target};
use crate::wire::Received;

/// The place of a payload.
pub(super) enum Place {
    /// Nobody wants the payload.
    Skip,
    /// Into memory of the connection.
    Scratch,
    /// The place that the conversation has named.
    Target(Target),
}

struct Incoming {
    received: Received,
    place: Place,
    got: usize,
    /// The checksum of the first `summed` bytes.
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
    /// The bytes that the conversation gets to see: none of those that go to its own place. `None` if nobody
    /// wants the payload.
    pub bytes: Option<&'a [u8]>,
    /// Keeps the memory in place until the conversation has been called.
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

    /// The start of the place of the payload under way.
    fn start(&self) -> Option<(*mut u8, &Incoming)> {
        let incoming = self.incoming.as_ref()?;
        let start = match &incoming.place {
            Place::Target(target) => target.raw().0,
            Place::Skip | Place::Scratch => self.scratch.as_ref()?.start(),
        };
        Some((start, incoming))
    }

    /// The place for the rest of the payload: [`left`](Self::left) bytes. It is this connection's until the
    /// payload is complete, or the connection is closed.
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
            // SAFETY: the place is as long as the payload, and at least this many bytes are still to come. It
            // is this connection's until the payload is complete, and no operation is outstanding.
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

    /// Forgets the payload under way. From now on there is room to pass over `len` bytes at once.
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
