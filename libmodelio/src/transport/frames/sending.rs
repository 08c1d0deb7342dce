//! Frames that are sent: the memory that the driver may be reading, and how much of it is not with the kernel
//! yet.
//!
//! One of the modules that hold `unsafe`: it names heads and payloads to the driver that moves the bytes.

use super::link::Outgoing;
use crate::transport::stream::{Buffer, SendSlices};
use crate::wire::{self, Payload};

/// Bytes that are handed to the kernel at once. Their checksums are made before. The bytes should still be in
/// the core's own cache when the kernel copies them, and the peer should not have to wait.
const SEND_AT_ONCE: usize = 512 << 10;
/// Room for the heads that are sent at once, on a connection where much is sent; longer ones get memory of their own.
const HEADS: usize = 32 << 10;
/// The same at first: most strangers that connect send and receive little.
const FIRST_HEADS: usize = 1 << 10;

/// The frames that are handed out together. The head of a frame is its header and its body.
pub(super) struct Sending {
    heads: Buffer,
    /// Bytes of `heads` that were used when something was last sent.
    used: usize,
    /// The frames that the kernel may be reading.
    frames: Vec<Outgoing>,
    /// Heads that `heads` had no room for.
    long: Vec<Vec<u8>>,
    /// Room to encode a head.
    encoded: Vec<u8>,
    /// Bytes that were handed out, and are not with the kernel yet.
    unsent: usize,
}

impl Sending {
    pub fn new() -> Sending {
        Sending {
            heads: Buffer::zeroed(FIRST_HEADS),
            used: 0,
            frames: Vec::new(),
            long: Vec::new(),
            encoded: Vec::new(),
            unsent: 0,
        }
    }

    /// Hands out what `next` has to say, up to [`SEND_AT_ONCE`]. All that was handed out before is with the kernel.
    pub fn fill(&mut self, out: &mut SendSlices, mut next: impl FnMut() -> Option<Outgoing>) {
        self.frames.clear();
        self.long.clear();
        if self.used > FIRST_HEADS / 2 && self.heads.len() < HEADS {
            self.heads = Buffer::zeroed(HEADS);
        }
        self.used = 0;
        while out.room() >= 2 && out.bytes() < SEND_AT_ONCE && self.heads.len() - self.used >= 256 {
            let Some(outgoing) = next() else { break };
            self.push(outgoing, out);
        }
        self.unsent = out.bytes();
    }

    /// Puts the head into `heads`, or into memory of its own, and all into `out`, which has room for two.
    fn push(&mut self, outgoing: Outgoing, out: &mut SendSlices) {
        self.encoded.clear();
        let payload = outgoing.payload.as_ref();
        let payload =
            payload.map_or(Payload::NONE, |piece| Payload { len: piece.len() as u32, crc: piece.crc() });
        let Outgoing { message, request, epoch, .. } = &outgoing;
        if let Err(error) = wire::append_frame(&mut self.encoded, message, *request, *epoch, payload) {
            // The error is this end's own: it has made a message that cannot be sent.
            tracing::error!(%error, message = message.name(), "not sent");
            return;
        }
        let (start, len) = (self.used, self.encoded.len());
        if self.heads.len() - start >= len {
            self.heads.bytes_mut()[start..start + len].copy_from_slice(&self.encoded);
            // SAFETY: `heads` is left alone until all of this is transmitted.
            unsafe { out.push(self.heads.start().add(start), len) };
            self.used += len;
        } else {
            let long = std::mem::take(&mut self.encoded);
            // SAFETY: the vector's memory is kept, unchanged, until all of this is transmitted.
            unsafe { out.push(long.as_ptr(), len) };
            self.long.push(long);
        }
        if let Some(piece) = &outgoing.payload {
            let (start, len) = piece.raw();
            // SAFETY: the piece is kept until all of this is transmitted, and its maker has promised the rest.
            unsafe { out.push(start, len) };
        }
        self.frames.push(outgoing);
    }

    /// `bytes` of it are with the kernel.
    pub fn transmitted(&mut self, bytes: usize) {
        self.unsent = self.unsent.saturating_sub(bytes);
    }

    /// Whether everything that was handed out is with the kernel.
    pub fn is_sent(&self) -> bool {
        self.unsent == 0
    }

    /// The connection is over: nobody reads any of it.
    pub fn closed(&mut self) {
        self.frames.clear();
    }
}
