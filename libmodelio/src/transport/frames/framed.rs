//! Frames, to and from a stream of bytes.
//!
//! One of the modules that hold `unsafe`: buffers and payloads are named to whoever moves the bytes.

mod progress;
mod watch;

use std::time::{Duration, Instant};

use super::conversation::{Conversation, Take};
use super::link::{Link, Outgoing};
use crate::bytes::crc32c::Crc32c;
use crate::transport::stream::{
    Buffer, Close, Connection, Receive, ReceiveSlices, SendSlices, Stream, Target,
};
use crate::wire::{self, Message, Payload, Received, Receiver, Refusal};
use progress::Progress;

/// Bytes that are handed to the kernel at once. Their checksums are made before: what is sent should still be in the
/// core's own cache when the kernel copies it, and the peer should not have to wait.
const SEND_AT_ONCE: usize = 512 << 10;
/// Of a longer payload, bytes that are received before their checksum is made, while they are in the core's own cache.
const SUM_AT_ONCE: usize = 512 << 10;
/// Room for the headers and bodies that are sent at once, on a connection where much is; longer ones get memory of their own.
const HEADS: usize = 32 << 10;
/// The same at first: most of those who connect and are nobody say little, and hear little.
const FIRST_HEADS: usize = 1 << 10;

/// Last words are being said.
struct Farewell {
    why: Close,
    deadline: Instant,
    /// What the peer still sends is received and passed over. A connection that is closed with bytes unread is reset,
    /// and that may overtake the last words.
    drains: bool,
    said: bool,
}

/// Where the payload under way goes.
enum Place {
    Skip,
    Scratch,
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

/// A [`Conversation`] as a [`Stream`].
pub struct Framed<C> {
    conversation: C,
    link: Link,
    receiver: Receiver,
    /// Headers and bodies, with what of the next payload came along.
    ahead: Buffer,
    start: usize,
    end: usize,
    incoming: Option<Incoming>,
    /// A message that is to be handed over again.
    waiting: Option<Received>,
    scratch: Option<Buffer>,
    heads: Buffer,
    /// Of it, at the last time that something was sent.
    used: usize,
    /// What the kernel may be reading.
    sending: Vec<Outgoing>,
    long: Vec<Vec<u8>>,
    encoded: Vec<u8>,
    /// Bytes that were handed out, and are not with the kernel yet.
    unsent: usize,
    /// The connection ends with this when all is said.
    farewell: Option<Farewell>,
    opened: Instant,
    heard: Instant,
    /// Bytes that were received, and those that have come.
    taken: u64,
    seen: u64,
    /// Frames whose message was handed over.
    frames: u64,
    /// Of the frame under way.
    progress: Progress,
    /// When the conversation was last told so.
    reported: Instant,
    spoke: Instant,
}

/// Longest time for the last words, and for the peer to hear them.
const FAREWELL: Duration = Duration::from_secs(2);
/// Bytes that are passed over at once.
const DRAIN: usize = 2 << 10;

impl<C: Conversation> Framed<C> {
    /// `ahead` is how many bytes are read besides a payload: few where blocks come one after the other, many where
    /// short messages do.
    pub fn new(conversation: C, link: Link, ahead: usize) -> Framed<C> {
        let now = Instant::now();
        let receiver = Receiver::new(conversation.limits());
        Framed {
            conversation,
            link,
            receiver,
            ahead: Buffer::zeroed(ahead),
            start: 0,
            end: 0,
            incoming: None,
            waiting: None,
            scratch: None,
            heads: Buffer::zeroed(FIRST_HEADS),
            used: 0,
            sending: Vec::new(),
            long: Vec::new(),
            encoded: Vec::new(),
            unsent: 0,
            farewell: None,
            opened: now,
            heard: now,
            taken: 0,
            seen: 0,
            frames: 0,
            progress: Progress::default(),
            reported: now,
            spoke: now,
        }
    }

    /// Takes what lies in `ahead`, as far as it goes. If that ends the connection, last words are said first. Nothing is
    /// being received meanwhile.
    fn go_on(&mut self) -> Result<(), Close> {
        match self.digest() {
            Err(why) if self.link.is_ending() => {
                // Others may have what was to be received, and there is no need for it to be in memory.
                (self.incoming, self.waiting) = (None, None);
                self.conversation.given_up();
                if self.scratch.as_ref().is_none_or(|scratch| scratch.len() < DRAIN) {
                    self.scratch = Some(Buffer::zeroed(DRAIN));
                }
                let deadline = Instant::now() + FAREWELL;
                self.farewell = Some(Farewell { why, deadline, drains: true, said: false });
                Ok(())
            }
            outcome => outcome,
        }
    }

    /// What is wrong with what came, which the peer hears if that is this end's to say.
    fn refuse(&mut self, error: &wire::WireError) -> Close {
        self.last_words(error.to_refusal());
        Close::Asked(error.to_string().into())
    }

    fn last_words(&mut self, refusal: Refusal) {
        if let Some(words) = self.conversation.last_words(refusal) {
            self.link.say_last(words);
        }
    }

    fn digest(&mut self) -> Result<(), Close> {
        loop {
            if let Some(received) = self.waiting.take() {
                self.hand_over(received)?;
                if self.waiting.is_some() {
                    return Ok(());
                }
            }
            if self.incoming.is_some() {
                let count = self.left().min(self.end - self.start);
                if count > 0 {
                    let from = self.start;
                    self.start += count;
                    self.store(from, count);
                }
                if self.left() > 0 {
                    return Ok(());
                }
                self.complete()?;
                continue;
            }
            if self.start == self.end {
                return Ok(());
            }
            let bytes = &self.ahead.bytes()[self.start..self.end];
            let pushed = self.receiver.push(bytes);
            let (used, received) = pushed.map_err(|error| self.refuse(&error))?;
            self.start += used;
            let Some(received) = received else { return Ok(()) };
            self.frames += 1;
            match received.message {
                Message::Ping => self.link.say(0, Message::Pong),
                Message::Pong => {}
                _ => self.hand_over(received)?,
            }
            if self.waiting.is_some() {
                return Ok(());
            }
        }
    }

    fn hand_over(&mut self, received: Received) -> Result<(), Close> {
        let len = received.header.payload_len() as usize;
        let take = self.conversation.message(&received)?;
        self.receiver.set_limits(self.conversation.limits());
        let place = match take {
            Take::Later => {
                self.waiting = Some(received);
                return Ok(());
            }
            _ if len == 0 => return Ok(()),
            Take::Nothing => Place::Skip,
            Take::Buffered => Place::Scratch,
            Take::Into(target) if target.raw().1 == len => Place::Target(target),
            Take::Into(target) => {
                let why = format!("{} bytes of payload for {} bytes of memory", len, target.raw().1);
                return Err(Close::Asked(why.into()));
            }
        };
        if !matches!(place, Place::Target(_))
            && self.scratch.as_ref().is_none_or(|scratch| scratch.len() < len)
        {
            self.scratch = Some(Buffer::zeroed(len));
        }
        self.incoming = Some(Incoming { received, place, got: 0, crc: Crc32c::new(), summed: 0 });
        Ok(())
    }

    /// Bytes of the payload that are still to come.
    fn left(&self) -> usize {
        let left = |incoming: &Incoming| incoming.received.header.payload_len() as usize - incoming.got;
        self.incoming.as_ref().map_or(0, left)
    }

    /// Where the payload under way begins.
    fn place(&self) -> Option<(*mut u8, &Incoming)> {
        let incoming = self.incoming.as_ref()?;
        let start = match &incoming.place {
            Place::Target(target) => target.raw().0,
            Place::Skip | Place::Scratch => self.scratch.as_ref()?.start(),
        };
        Some((start, incoming))
    }

    /// Puts bytes that came ahead where they belong.
    fn store(&mut self, from: usize, count: usize) {
        if let Some((start, incoming)) = self.place() {
            let bytes = &self.ahead.bytes()[from..from + count];
            // SAFETY: the place is as long as the payload, of which `count` bytes are still to come; it is this
            // connection's until the payload is complete, and no operation is outstanding.
            unsafe { start.add(incoming.got).copy_from_nonoverlapping(bytes.as_ptr(), count) };
        }
        if self.incoming.as_ref().is_some_and(|incoming| !matches!(incoming.place, Place::Skip)) {
            self.conversation.copied(count);
        }
        if let Some(incoming) = &mut self.incoming {
            incoming.got += count;
        }
    }

    /// Takes what has come into the checksum.
    fn sum_up(&mut self) {
        let Some((start, incoming)) = self.place() else { return };
        let (from, to) = (incoming.summed, incoming.got);
        // SAFETY: these bytes have been received, and nobody writes them before the conversation has seen them.
        let bytes = unsafe { std::slice::from_raw_parts(start.add(from), to - from) };
        if let Some(incoming) = &mut self.incoming {
            incoming.crc.update(bytes);
            incoming.summed = to;
        }
    }

    fn complete(&mut self) -> Result<(), Close> {
        self.sum_up();
        let Some(incoming) = self.incoming.take() else { return Ok(()) };
        if let Err(error) = self.receiver.payload_done(incoming.crc.finish()) {
            return Err(self.refuse(&error));
        }
        let len = incoming.got;
        match (&incoming.place, &self.scratch) {
            (Place::Scratch, Some(scratch)) => {
                self.conversation.payload(&incoming.received, &scratch.bytes()[..len])
            }
            (Place::Target(_), _) => self.conversation.payload(&incoming.received, &[]),
            _ => Ok(()),
        }
    }

    /// Puts header and body into `heads`, or memory of their own, and all into `out`, which has room for two.
    fn push(&mut self, outgoing: Outgoing, used: &mut usize, out: &mut SendSlices) {
        self.encoded.clear();
        let payload = outgoing.payload.as_ref();
        let payload =
            payload.map_or(Payload::NONE, |piece| Payload { len: piece.len() as u32, crc: piece.crc() });
        let Outgoing { message, request, epoch, .. } = &outgoing;
        if let Err(error) = wire::append_frame(&mut self.encoded, message, *request, *epoch, payload) {
            // It is this end that says what cannot be said.
            tracing::error!(%error, message = message.name(), "not sent");
            return;
        }
        let len = self.encoded.len();
        if self.heads.len() - *used >= len {
            self.heads.bytes_mut()[*used..*used + len].copy_from_slice(&self.encoded);
            // SAFETY: `heads` is left alone until all of this is transmitted.
            unsafe { out.push(self.heads.start().add(*used), len) };
            *used += len;
        } else {
            let long = std::mem::take(&mut self.encoded);
            // SAFETY: the vector's memory is kept, unchanged, until all of this is transmitted.
            unsafe { out.push(long.as_ptr(), len) };
            self.long.push(long);
        }
        if let Some(piece) = &outgoing.payload {
            // SAFETY: the piece is kept until all of this is transmitted, and its maker has promised the rest.
            unsafe { out.push(piece.raw().0, piece.len()) };
        }
        self.sending.push(outgoing);
    }
}

impl<C: Conversation> Stream for Framed<C> {
    fn opened(&mut self, connection: &Connection) {
        let now = Instant::now();
        (self.opened, self.heard, self.spoke) = (now, now, now);
        self.link.attach(connection);
        if let Err(why) = self.conversation.opened(&self.link) {
            connection.close(why);
        }
    }

    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive {
        if self.waiting.is_some() {
            // It was woken: perhaps it can go on.
            if let Err(why) = self.go_on() {
                self.link.close(why);
                return Receive::Paused;
            }
            // From here on the rest of its frame is to come; perhaps nothing ever does.
            if self.mark(Instant::now()) {
                self.link.wake();
            }
        }
        if let Some(farewell) = &self.farewell {
            let Some(scratch) = self.scratch.as_ref().filter(|_| farewell.drains) else {
                return Receive::Paused;
            };
            // SAFETY: a buffer that nobody looks into from here on.
            unsafe { into.push(scratch.start(), scratch.len()) };
            return Receive::Into { least: 1 };
        }
        // Who asks for more than it takes is not heard until it has taken it.
        if !self.reads() {
            return Receive::Paused;
        }
        let left = self.left();
        if left > 0
            && let Some((start, incoming)) = self.place()
        {
            // SAFETY: within the place, which is this connection's until the payload is complete or it is closed;
            // the scratch is a buffer that is left alone meanwhile.
            unsafe { into.push(start.add(incoming.got), left) };
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        // SAFETY: a buffer that is left alone until the bytes are reported.
        unsafe { into.push(self.ahead.start().add(self.end), self.ahead.len() - self.end) };
        Receive::Into { least: left.clamp(1, SUM_AT_ONCE) }
    }

    fn arriving(&mut self, bytes: usize) {
        let seen = self.taken + bytes as u64;
        if seen > self.seen {
            self.seen = seen;
            self.heard = Instant::now();
        }
    }

    fn received(&mut self, bytes: usize) -> Result<(), Close> {
        let now = Instant::now();
        self.taken += bytes as u64;
        self.seen = self.seen.max(self.taken);
        if self.farewell.is_some() {
            return Ok(());
        }
        if now.duration_since(self.reported) > Duration::from_millis(50) {
            self.reported = now;
            self.conversation.heard();
        }
        self.heard = now;
        let of_payload = bytes.min(self.left());
        if let Some(incoming) = &mut self.incoming {
            incoming.got += of_payload;
        }
        self.end += bytes - of_payload;
        if self.left() > 0 {
            self.sum_up();
        }
        let outcome = self.go_on();
        if self.mark(now) {
            self.link.wake();
        }
        outcome
    }

    fn transmit(&mut self, out: &mut SendSlices) {
        // All that was handed out before is with the kernel.
        self.sending.clear();
        self.long.clear();
        if self.used > FIRST_HEADS / 2 && self.heads.len() < HEADS {
            self.heads = Buffer::zeroed(HEADS);
        }
        let mut used = 0;
        while out.room() >= 2 && out.bytes() < SEND_AT_ONCE && self.heads.len() - used >= 256 {
            let queued = self.link.pop();
            let next = || if self.farewell.is_none() { self.conversation.next() } else { None };
            let Some(outgoing) = queued.or_else(next) else { break };
            self.push(outgoing, &mut used, out);
        }
        self.used = used;
        self.unsent = out.bytes();
    }

    fn transmitted(&mut self, bytes: usize) -> Result<(), Close> {
        self.spoke = Instant::now();
        self.unsent = self.unsent.saturating_sub(bytes);
        match &mut self.farewell {
            Some(farewell) if self.unsent == 0 && self.link.is_said() => {
                farewell.said = true;
                if farewell.drains { Ok(()) } else { Err(farewell.why.clone()) }
            }
            _ => Ok(()),
        }
    }

    fn is_finished(&self) -> bool {
        self.farewell.as_ref().is_some_and(|farewell| farewell.said)
    }

    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        if let Some(Farewell { why, deadline, .. }) = &self.farewell {
            return if now >= *deadline { Err(why.clone()) } else { Ok(Some(*deadline)) };
        }
        match self.watch(now) {
            // Here something may be being received: it is not taken away before the connection is closed.
            Err(why) if self.link.is_ending() => {
                let deadline = now + FAREWELL;
                self.farewell = Some(Farewell { why, deadline, drains: false, said: false });
                Ok(Some(deadline))
            }
            outcome => outcome,
        }
    }

    fn closed(&mut self, why: &Close) {
        self.sending.clear();
        self.link.clear();
        self.incoming = None;
        let why = self.farewell.as_ref().map_or(why, |farewell| &farewell.why);
        self.conversation.closed(why);
    }
}

#[cfg(test)]
mod tests;
