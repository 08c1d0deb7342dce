//! The payload that a connection receives: its place, the received length and its checksum.
//!
//! This module holds `unsafe`: it copies payload to its place, and shows it from there.

use crate::bytes::crc32c::Crc32c;
use crate::transport::stream::{Buffer, Target};
use crate::wire::Received;

/// The place of a payload.
pub(super) enum Destination {
    /// The payload is not wanted.
    Skip,
    /// The payload goes to memory of the connection.
    Scratch,
    /// The payload goes where the conversation wants it.
    Target(Target),
}

struct Incoming {
    received: Received,
    place: Destination,
    got: usize,
    /// The checksum of the first `summed` bytes, if the frame has one.
    crc: Option<Crc32c>,
    summed: usize,
}

impl Incoming {
    fn len(&self) -> usize {
        self.received.header.payload_len() as usize
    }
}

/// A complete payload.
pub(super) struct Arrived<'a> {
    /// Its message.
    pub received: Received,
    /// The payload's checksum; 0 if the frame has none.
    pub crc: u32,
    /// The bytes for the conversation, unless they went to the place that it named. `None` if the payload is not
    /// wanted.
    pub bytes: Option<&'a [u8]>,
    /// Keeps the memory until the conversation has been called.
    _place: Destination,
}

/// The payload that is being received, if one is.
#[derive(Default)]
pub(super) struct Arriving {
    incoming: Option<Incoming>,
    scratch: Option<Buffer>,
    /// The scratch memory was used since somebody asked.
    used: bool,
}

impl Arriving {
    /// Begins to receive the payload of a message.
    pub(super) fn begin(&mut self, received: Received, place: Destination) {
        let crc = received.header.payload_crc().map(|_| Crc32c::new());
        let incoming = Incoming { received, place, got: 0, crc, summed: 0 };
        if !matches!(incoming.place, Destination::Target(_)) {
            self.make_room(incoming.len());
            self.used = true;
        }
        self.incoming = Some(incoming);
    }

    fn make_room(&mut self, len: usize) {
        if self.scratch.as_ref().is_none_or(|scratch| scratch.len() < len) {
            self.scratch = Some(Buffer::zeroed(len));
        }
    }

    /// Whether the memory of the connection was used since the last call.
    pub(super) fn take_used(&mut self) -> bool {
        std::mem::take(&mut self.used)
    }

    /// Gives the pages of the connection's memory back, unless a payload is under way.
    pub(super) fn give_back(&mut self) {
        if self.incoming.is_none() {
            self.scratch.iter_mut().for_each(Buffer::give_back);
        }
    }

    /// The message whose payload is under way.
    pub(super) fn message(&self) -> Option<&Received> {
        self.incoming.as_ref().map(|incoming| &incoming.received)
    }

    /// The number of bytes that have not come yet.
    pub(super) fn left(&self) -> usize {
        self.incoming.as_ref().map_or(0, |incoming| incoming.len() - incoming.got)
    }

    /// The start of the place of the payload under way.
    fn start(&self) -> Option<(*mut u8, &Incoming)> {
        let incoming = self.incoming.as_ref()?;
        let start = match &incoming.place {
            Destination::Target(target) => target.raw().0,
            Destination::Skip | Destination::Scratch => self.scratch.as_ref()?.start(),
        };
        Some((start, incoming))
    }

    /// The place for the rest of the payload: [`left`](Self::left) bytes. It belongs to this connection until the
    /// payload is complete or the connection is closed.
    pub(super) fn rest(&self) -> Option<*mut u8> {
        let (start, incoming) = self.start()?;
        Some(start.wrapping_add(incoming.got))
    }

    /// Stores the next bytes of the payload, which came together with its message. False if the payload is not
    /// wanted.
    ///
    /// # Panics
    /// If there are more bytes than are left.
    pub(super) fn store(&mut self, bytes: &[u8]) -> bool {
        assert!(bytes.len() <= self.left(), "{} bytes of {}", bytes.len(), self.left());
        if let Some(rest) = self.rest() {
            // SAFETY: the place is as long as the payload, and at least this many bytes are still to come. It belongs
            // to this connection until the payload is complete, and no operation is outstanding.
            unsafe { rest.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        self.filled(bytes.len());
        self.incoming.as_ref().is_some_and(|incoming| !matches!(incoming.place, Destination::Skip))
    }

    /// The next bytes were received straight into their place.
    pub(super) fn filled(&mut self, bytes: usize) {
        if let Some(incoming) = &mut self.incoming {
            incoming.got += bytes;
        }
    }

    /// Adds the received bytes to the checksum, if there is one.
    pub(super) fn sum_up(&mut self) {
        let Some((start, incoming)) = self.start().filter(|(_, incoming)| incoming.crc.is_some()) else {
            return;
        };
        let (from, to) = (incoming.summed, incoming.got);
        // SAFETY: these bytes were received, and nobody writes them before the conversation has seen them.
        let bytes = unsafe { std::slice::from_raw_parts(start.add(from), to - from) };
        if let Some(Incoming { crc: Some(crc), summed, .. }) = &mut self.incoming {
            crc.update(bytes);
            *summed = to;
        }
    }

    /// Takes the payload once it is complete.
    pub(super) fn finish(&mut self) -> Option<Arrived<'_>> {
        self.sum_up();
        let Incoming { received, place, got, crc, .. } = self.incoming.take()?;
        let bytes = match (&place, &self.scratch) {
            (Destination::Scratch, Some(scratch)) => Some(&scratch.bytes()[..got]),
            (Destination::Target(_), _) => Some(&[][..]),
            _ => None,
        };
        let crc = crc.map_or(0, |crc| crc.finish());
        Some(Arrived { received, crc, bytes, _place: place })
    }

    /// Gives the payload under way up. Further bytes are discarded, up to `len` at once.
    pub(super) fn give_up(&mut self, len: usize) {
        self.incoming = None;
        self.make_room(len);
    }

    /// Memory for discarded bytes, once the payload is given up.
    pub(super) fn scratch(&self) -> Option<&Buffer> {
        self.scratch.as_ref()
    }

    /// The connection has ended: nobody writes the payload's place any more.
    pub(super) fn closed(&mut self) {
        self.incoming = None;
    }
}
