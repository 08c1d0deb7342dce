//! Frames that are received: bytes become messages, which a conversation takes, and payload, which goes where it says.
//!
//! One of the modules that hold `unsafe`: it names buffers and payloads to the driver that moves the bytes.

use super::arriving::{Arriving, Place};
use super::conversation::{Conversation, Take};
use super::link::Link;
use crate::transport::stream::{Buffer, Close, Receive, ReceiveSlices};
use crate::wire::{Message, Received, Receiver, Refusal, WireError};

/// The number of bytes of a longer payload that are received before their checksum is made, while they are in
/// the core's own cache.
const SUM_AT_ONCE: usize = 512 << 10;
/// Bytes that are passed over at once.
const DRAIN: usize = 2 << 10;

/// The receiving side of a connection.
pub(super) struct Reading {
    receiver: Receiver,
    /// Headers and bodies, with what of the next payload came along.
    pub(super) ahead: Buffer,
    start: usize,
    end: usize,
    arriving: Arriving,
    /// A message that is to be handed over again.
    waiting: Option<Received>,
    /// Bytes that were received, and those that have come.
    taken: u64,
    seen: u64,
    /// Frames whose message was handed over.
    frames: u64,
}

impl Reading {
    /// `ahead` is how many bytes are read besides a payload.
    pub fn new(conversation: &impl Conversation, ahead: usize) -> Reading {
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

    /// Whether the conversation does not take the received message.
    pub fn is_held_up(&self) -> bool {
        self.waiting.is_some()
    }

    /// The frame under way, by a number of its own, if there is one. Its message comes before its payload.
    pub fn under_way(&self) -> Option<u64> {
        let payload = self.arriving.message().is_some();
        (payload || self.receiver.is_within_frame()).then(|| 2 * self.frames + u64::from(payload))
    }

    /// Bytes that have come so far.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// `bytes` of what [`name`](Self::name) asked for have come, though not enough yet. True if some are new.
    pub fn arriving(&mut self, bytes: usize) -> bool {
        let seen = self.taken + bytes as u64;
        let is_news = seen > self.seen;
        self.seen = self.seen.max(seen);
        is_news
    }

    /// `bytes` were received.
    pub fn received(&mut self, bytes: usize) {
        self.taken += bytes as u64;
        self.seen = self.seen.max(self.taken);
    }

    /// They are to be read, and lie where [`name`](Self::name) said.
    pub fn filled(&mut self, bytes: usize) {
        let of_payload = bytes.min(self.arriving.left());
        self.arriving.filled(of_payload);
        self.end += bytes - of_payload;
        if self.arriving.left() > 0 {
            self.arriving.sum_up();
        }
    }

    /// Names the place of the next bytes: the rest of the payload under way, and what comes after it.
    pub fn name(&mut self, into: &mut ReceiveSlices) -> Receive {
        let left = self.arriving.left();
        if left > 0
            && let Some(rest) = self.arriving.rest()
        {
            // SAFETY: the rest of a place, which is this connection's until the payload is whole or it is closed; the
            // scratch is a buffer that is left alone meanwhile.
            unsafe { into.push(rest, left) };
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        // SAFETY: a buffer that is left alone until the bytes are reported.
        unsafe { into.push(self.ahead.start().add(self.end), self.ahead.len() - self.end) };
        Receive::Into { least: left.clamp(1, SUM_AT_ONCE) }
    }

    /// Takes the bytes in `ahead`, as far as possible. No receive is outstanding meanwhile.
    pub fn digest(&mut self, conversation: &mut impl Conversation, link: &Link) -> Result<(), Close> {
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
            Take::Nothing => Place::Skip,
            Take::Buffered => Place::Scratch,
            Take::Into(target) => {
                let room = target.raw().1;
                if room != len {
                    let why = format!("{len} bytes of payload for {room} bytes of memory");
                    return Err(Close::Asked(why.into()));
                }
                Place::Target(target)
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

    /// The message under way, its length, and the number of received bytes, for the refusal of a frame that
    /// does not move on.
    pub fn describe(&self) -> (String, String, String) {
        match self.arriving.message() {
            Some(received) => {
                let len = received.header.payload_len() as usize;
                let got = len - self.arriving.left() + (self.seen - self.taken) as usize;
                (format!("payload of {}", received.message.name()), format!("{len} bytes"), format!("{got}"))
            }
            None => ("header or body".to_owned(), "the rest of it".to_owned(), "a part".to_owned()),
        }
    }

    /// Nothing is taken any more: further bytes are passed over.
    pub fn give_up(&mut self) {
        self.waiting = None;
        self.arriving.give_up(DRAIN);
    }

    /// Names where bytes go that are passed over.
    pub fn drain(&self, into: &mut ReceiveSlices) -> Receive {
        let Some(scratch) = self.arriving.scratch() else { return Receive::Paused };
        // SAFETY: a buffer that nobody looks into from here on.
        unsafe { into.push(scratch.start(), scratch.len()) };
        Receive::Into { least: 1 }
    }

    /// The connection is over: nobody writes where payload goes.
    pub fn closed(&mut self) {
        self.arriving.closed();
    }
}

/// Refuses received bytes, and gives the reason. The peer hears of it if this end may speak.
fn refuse(conversation: &mut impl Conversation, link: &Link, error: &WireError) -> Close {
    send_farewell(conversation, link, error.to_refusal());
    Close::Asked(error.to_string().into())
}

/// Says why the connection ends, if the conversation wants that.
pub(super) fn send_farewell(conversation: &mut impl Conversation, link: &Link, refusal: Refusal) {
    if let Some(words) = conversation.farewell(refusal) {
        link.send_last(words);
    }
}
