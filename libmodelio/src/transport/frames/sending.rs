//! Frames that are being sent: memory that the driver may be reading, and the bytes that the kernel does not have
//! yet.
//!
//! This module holds `unsafe`: it hands heads and payloads to the driver that moves the bytes.

use std::time::Instant;

use super::link::Outgoing;
use super::pace::Pace;
use crate::bytes::changes::packed;
use crate::transport::stream::{Buffer, LentPayload, SendSlices, Traffic};
use crate::wire;

/// The number of bytes that are handed to the kernel at once. Their checksums are made before. The bytes should still
/// be in the core's cache when the kernel copies them, and the peer should not have to wait.
const SEND_AT_ONCE: usize = 512 << 10;
/// Memory for the heads that are sent at once, on a connection that sends much. A longer head gets memory of its own.
pub(super) const HEADS: usize = 32 << 10;
/// The same at first. Most strangers that connect send and receive little.
const FIRST_HEADS: usize = 1 << 10;

/// The frames that are handed out together. The head of a frame is its header and its body.
pub(super) struct Sending {
    heads: Buffer,
    /// The bytes of `heads` that are in use.
    used: usize,
    /// Much of `heads` was used since somebody asked.
    much: bool,
    /// The frames that the kernel may be reading.
    frames: Vec<Outgoing>,
    /// Heads that did not fit into `heads`.
    long: Vec<Vec<u8>>,
    /// The buffer for encoding a head.
    encoded: Vec<u8>,
    /// The number of bytes that were handed out and that the kernel does not have yet.
    unsent: usize,
    /// The number of bytes that were last handed out together.
    handed: usize,
    pace: Pace,
}

impl Sending {
    pub(super) fn new() -> Sending {
        Sending {
            heads: Buffer::zeroed(FIRST_HEADS),
            used: 0,
            much: false,
            frames: Vec::new(),
            long: Vec::new(),
            encoded: Vec::new(),
            unsent: 0,
            handed: 0,
            pace: Pace::default(),
        }
    }

    /// Hands out `rest`, if it is not empty, and the messages of `next`, up to [`SEND_AT_ONCE`] bytes. The kernel has
    /// everything that was handed out before; `traffic` says how that gets on.
    pub(super) fn fill(
        &mut self,
        out: &mut SendSlices,
        rest: Vec<u8>,
        mut next: impl FnMut() -> Option<Outgoing>,
        traffic: impl Fn() -> Option<Traffic>,
    ) {
        let mut is_asked = self.handed >= SEND_AT_ONCE / 2;
        if is_asked {
            self.pace.sees(traffic().unwrap_or_default());
        }
        self.frames.clear();
        self.long.clear();
        if self.used > FIRST_HEADS / 2 && self.heads.len() < HEADS {
            self.heads = Buffer::zeroed(HEADS);
        }
        self.used = 0;
        if !rest.is_empty() {
            self.push_long(rest, out);
        }
        while out.room() >= 2 && out.bytes() < SEND_AT_ONCE && self.heads.len() - self.used >= 256 {
            let Some(mut outgoing) = next() else { break };
            if let Some(patch) = outgoing.patch() {
                if !std::mem::replace(&mut is_asked, true) {
                    self.pace.sees(traffic().unwrap_or_default());
                }
                self.pack(patch);
            }
            self.push(outgoing, out);
        }
        (self.unsent, self.handed) = (out.bytes(), out.bytes());
        self.much |= self.used > FIRST_HEADS;
    }

    /// Compresses a patch, if there is time for that.
    fn pack(&mut self, patch: &mut LentPayload) {
        if !self.pace.compresses(patch.len()) {
            return;
        }
        let (began, mut plain) = (Instant::now(), Vec::with_capacity(patch.len()));
        patch.append_to(&mut plain);
        let packed = packed(&plain);
        let after = packed.as_ref().map_or(plain.len(), Vec::len);
        packed.into_iter().for_each(|packed| *patch = LentPayload::owned(packed));
        self.pace.took((plain.len(), after), began.elapsed());
    }

    /// Whether much of the memory was used since the last call.
    pub(super) fn take_used(&mut self) -> bool {
        std::mem::take(&mut self.much)
    }

    /// Gives the pages of the memory for heads back, unless the kernel may be reading them.
    pub(super) fn give_back(&mut self) {
        if self.is_sent() {
            self.heads.give_back();
        }
    }

    /// Puts the head into `heads`, or into memory of its own, and names head and payload in `out`, which has room for
    /// two.
    fn push(&mut self, outgoing: Outgoing, out: &mut SendSlices) {
        self.encoded.clear();
        let payload = outgoing.described();
        let Outgoing { message, request, epoch, .. } = &outgoing;
        if let Err(error) = wire::append_frame(&mut self.encoded, message, *request, *epoch, payload) {
            // This end has made a message that cannot be sent.
            tracing::error!(%error, message = message.name(), "not sent");
            return;
        }
        let (start, len) = (self.used, self.encoded.len());
        if self.heads.len() - start >= len {
            self.heads.bytes_mut()[start..start + len].copy_from_slice(&self.encoded);
            // SAFETY: `heads` is not changed until all of this is transmitted.
            unsafe { out.push(self.heads.start().add(start), len) };
            self.used += len;
        } else {
            let long = std::mem::take(&mut self.encoded);
            self.push_long(long, out);
        }
        if let Some(piece) = &outgoing.payload {
            if payload.crc.is_none() {
                piece.warm();
            }
            let (start, len) = piece.raw();
            // SAFETY: the piece is kept until all of this is transmitted. Its maker has promised the rest.
            unsafe { out.push(start, len) };
        }
        self.frames.push(outgoing);
    }

    fn push_long(&mut self, long: Vec<u8>, out: &mut SendSlices) {
        // SAFETY: the vector is kept unchanged until all of this is transmitted.
        unsafe { out.push(long.as_ptr(), long.len()) };
        self.long.push(long);
    }

    /// The kernel has taken `bytes`.
    pub(super) fn transmitted(&mut self, bytes: usize) {
        self.unsent = self.unsent.saturating_sub(bytes);
    }

    /// Whether the kernel has taken everything that was handed out.
    pub(super) fn is_sent(&self) -> bool {
        self.unsent == 0
    }

    /// The connection has ended: nobody reads the memory any more.
    pub(super) fn closed(&mut self) {
        self.frames.clear();
    }
}
