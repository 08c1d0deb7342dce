//! Received frames. Their messages go to the conversation, and their payload goes to the place that the conversation
//! names.
//!
//! This module holds `unsafe`: it hands buffers and payloads to the driver that moves the bytes.

use super::arriving::{Arriving, Destination};
use super::conversation::{Conversation, Take};
use super::link::Link;
use crate::transport::stream::{Buffer, Close, Receive, ReceiveSlices};
use crate::wire::{Message, Received, Receiver, Refusal, WireError};

/// The number of bytes of a long payload that are received before they are added to the checksum. They are still in
/// the core's cache then.
const SUM_AT_ONCE: usize = 512 << 10;
/// The number of bytes that are discarded at once.
const DRAIN: usize = 2 << 10;

/// The receiving side of a connection.
pub(super) struct Reading {
    receiver: Receiver,
    /// Headers, bodies, and the part of a payload that came with them.
    pub(super) ahead: Buffer,
    start: usize,
    end: usize,
    pub(super) arriving: Arriving,
    /// A message that the conversation takes later.
    waiting: Option<Received>,
    /// The number of bytes that were received, and of those that have come.
    taken: u64,
    seen: u64,
    /// The number of frames whose message was handed over.
    frames: u64,
}

impl Reading {
    /// `ahead` is the number of bytes that are read in addition to a payload.
    pub(super) fn new(conversation: &impl Conversation, ahead: usize) -> Reading {
        Reading {
            receiver: Receiver::new(conversation.limits()),
            ahead: Buffer::zeroed(ahead),
            start: 0,
            end: 0,
            arriving: Arriving::default(),
            waiting: None,
            taken: 0,
            seen: 0,
            frames: 0,
        }
    }

    /// Whether the conversation has put the received message off.
    pub(super) fn is_held_up(&self) -> bool {
        self.waiting.is_some()
    }

    /// The number of the frame under way, if there is one. A frame's message comes before its payload.
    pub(super) fn under_way(&self) -> Option<u64> {
        let payload = self.arriving.message().is_some();
        (payload || self.receiver.is_within_frame()).then(|| 2 * self.frames + u64::from(payload))
    }

    /// The number of bytes that have come so far.
    pub(super) fn seen(&self) -> u64 {
        self.seen
    }

    /// `bytes` of what [`name`](Self::name) asked for have come, which is not enough yet. True if some are new.
    pub(super) fn arriving(&mut self, bytes: usize) -> bool {
        let seen = self.taken + bytes as u64;
        let is_news = seen > self.seen;
        self.seen = self.seen.max(seen);
        is_news
    }

    /// `bytes` were received.
    pub(super) fn received(&mut self, bytes: usize) {
        self.taken += bytes as u64;
        self.seen = self.seen.max(self.taken);
    }

    /// `bytes` lie where [`name`](Self::name) said, and can be read.
    pub(super) fn filled(&mut self, bytes: usize) {
        let of_payload = bytes.min(self.arriving.left());
        self.arriving.filled(of_payload);
        self.end += bytes - of_payload;
        if self.arriving.left() > 0 {
            self.arriving.sum_up();
        }
    }

    /// Names the place of the next bytes: the rest of the payload under way, and the bytes after it.
    pub(super) fn name(&mut self, into: &mut ReceiveSlices) -> Receive {
        let left = self.arriving.left();
        if left > 0
            && let Some(rest) = self.arriving.rest()
        {
            // SAFETY: the rest of the place belongs to this connection until the payload is whole or the connection
            // is closed. The scratch buffer is not used otherwise meanwhile.
            unsafe { into.push(rest, left) };
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        // SAFETY: the buffer is not used otherwise until the bytes are reported.
        unsafe { into.push(self.ahead.start().add(self.end), self.ahead.len() - self.end) };
        Receive::Into { least: left.clamp(1, SUM_AT_ONCE) }
    }

    /// Handles the bytes in `ahead`, as far as possible. No receive is outstanding meanwhile.
    pub(super) fn digest(&mut self, conversation: &mut impl Conversation, link: &Link) -> Result<(), Close> {
        loop {
            if let Some(received) = self.waiting.take() {
                self.hand_over(received, conversation)?;
                if self.waiting.is_some() {
                    return Ok(());
                }
            }
            if self.arriving.message().is_some() {
                let count = self.arriving.left().min(self.end - self.start);
                if count > 0 {
                    let from = self.start;
                    self.start += count;
                    if self.arriving.store(&self.ahead.bytes()[from..from + count]) {
                        conversation.copied(count);
                    }
                }
                if self.arriving.left() > 0 {
                    return Ok(());
                }
                self.complete(conversation, link)?;
                continue;
            }
            if self.start == self.end {
                return Ok(());
            }
            let bytes = &self.ahead.bytes()[self.start..self.end];
            let pushed = self.receiver.push(bytes);
            let (used, received) = pushed.map_err(|error| refuse(conversation, link, &error))?;
            self.start += used;
            let Some(received) = received else { return Ok(()) };
            self.frames += 1;
            match received.message {
                Message::Ping => link.send_message(0, Message::Pong),
                Message::Pong => {}
                _ => self.hand_over(received, conversation)?,
            }
            if self.waiting.is_some() {
                return Ok(());
            }
        }
    }

    fn hand_over(&mut self, received: Received, conversation: &mut impl Conversation) -> Result<(), Close> {
        let len = received.header.payload_len() as usize;
        let take = conversation.message(&received)?;
        self.receiver.set_limits(conversation.limits());
        let place = match take {
            Take::Later => {
                self.waiting = Some(received);
                return Ok(());
            }
            _ if len == 0 => return Ok(()),
            Take::Nothing => Destination::Skip,
            Take::Buffered => Destination::Scratch,
            Take::Into(target) => {
                let room = target.raw().1;
                if room != len {
                    let why = format!("{len} bytes of payload for {room} bytes of memory");
                    return Err(Close::Asked(why.into()));
                }
                Destination::Target(target)
            }
        };
        self.arriving.begin(received, place);
        Ok(())
    }

    fn complete(&mut self, conversation: &mut impl Conversation, link: &Link) -> Result<(), Close> {
        let Some(arrived) = self.arriving.finish() else { return Ok(()) };
        if let Err(error) = self.receiver.payload_done(arrived.crc) {
            return Err(refuse(conversation, link, &error));
        }
        match arrived.bytes {
            Some(bytes) => conversation.payload(&arrived.received, bytes),
            None => Ok(()),
        }
    }

    /// The message under way, its length, and the number of received bytes. The refusal of a frame that does not move
    /// on quotes them.
    pub(super) fn describe(&self) -> (String, String, String) {
        match self.arriving.message() {
            Some(received) => {
                let len = received.header.payload_len() as usize;
                let got = len - self.arriving.left() + (self.seen - self.taken) as usize;
                (format!("payload of {}", received.message.name()), format!("{len} bytes"), format!("{got}"))
            }
            None => ("header or body".to_owned(), "the rest of it".to_owned(), "a part".to_owned()),
        }
    }

    /// Nothing is received any more: further bytes are discarded.
    pub(super) fn give_up(&mut self) {
        self.waiting = None;
        self.arriving.give_up(DRAIN);
    }

    /// Names memory for bytes that are discarded.
    pub(super) fn drain(&self, into: &mut ReceiveSlices) -> Receive {
        let Some(scratch) = self.arriving.scratch() else { return Receive::Paused };
        // SAFETY: nobody reads this buffer from here on.
        unsafe { into.push(scratch.start(), scratch.len()) };
        Receive::Into { least: 1 }
    }

    /// The connection has ended: nobody writes the payload's place any more.
    pub(super) fn closed(&mut self) {
        self.arriving.closed();
    }
}

/// Refuses received bytes, and returns the reason. The peer gets it in the last message, if the conversation sends
/// one.
fn refuse(conversation: &mut impl Conversation, link: &Link, error: &WireError) -> Close {
    send_farewell(conversation, link, error.to_refusal());
    Close::Asked(error.to_string().into())
}

/// Sends the conversation's last message, if it has one.
pub(super) fn send_farewell(conversation: &mut impl Conversation, link: &Link, refusal: Refusal) {
    if let Some(words) = conversation.farewell(refusal) {
        link.send_last(words);
    }
}
