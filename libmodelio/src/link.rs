//! Frames on a byte stream: what turns a [`Conversation`], which speaks messages, into a [`Stream`], which moves
//! bytes. The same for both ends and for every role.
//!
//! Headers and bodies come through a small buffer; a payload is received straight into where the conversation says,
//! and sent straight from where it lies. Both are checked by CRC32C while they are in cache. Pings are answered here.
//!
//! One of the modules that hold `unsafe`: payload lies in memory that others see, too. [`Target::new`] and
//! [`Piece::new`] say what their callers promise.

mod progress;

use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::ids::Epoch;
use crate::net::{Buffer, Close, Connection, Receive, ReceiveSlices, SendSlices, Stream};
use crate::wire::{
    self, Crc32c, HELLO_DEADLINE, Limits, Message, Payload, Received, Receiver, Refusal, crc32c,
};
use progress::Progress;

/// Whatever keeps memory where it is.
pub type Guard = Arc<dyn Any + Send + Sync>;

/// Bytes that are handed to the kernel at once. Their checksums are made before: what is sent should still be in the
/// core's own cache when the kernel copies it, and the peer should not have to wait.
const SEND_AT_ONCE: usize = 512 << 10;
/// Of a longer payload, bytes that are received before their checksum is made, while they are in the core's own cache.
const SUM_AT_ONCE: usize = 512 << 10;
/// Room for the headers and bodies that are sent at once; longer ones get memory of their own.
const HEADS: usize = 32 << 10;
/// Messages that may wait to be sent, unless the peer is too slow to live.
const MAX_QUEUED: usize = 1 << 16;
/// Bytes of payload that may wait to be sent before the peer's next frame is read.
const MAX_QUEUED_BYTES: usize = 32 << 20;

/// Where a payload is to be received.
pub struct Target {
    start: *mut u8,
    len: usize,
    _guard: Guard,
}

// SAFETY: it is memory that `new`'s caller has promised to whoever holds the target, on any thread.
unsafe impl Send for Target {}

impl Target {
    /// `len` bytes at `start`, which stay there as long as `guard` lives.
    ///
    /// # Safety
    /// From now until [`Conversation::payload`] or [`Conversation::closed`] is called, nobody else reads or writes
    /// them, and they are writable.
    pub unsafe fn new(start: *mut u8, len: usize, guard: Guard) -> Target {
        Target { start, len, _guard: guard }
    }

    /// Fills it from memory that both ends of a connection see.
    ///
    /// # Errors
    /// If that is not as long.
    ///
    /// # Safety
    /// `from` can be read for `len` bytes and does not overlap the target. It may change meanwhile.
    pub unsafe fn copy_from(&mut self, from: *const u8, len: usize) -> Result<(), Close> {
        if len != self.len {
            let why = format!("{len} bytes of payload for {} bytes of memory", self.len);
            return Err(Close::Asked(why.into()));
        }
        // SAFETY: the target is writable and its holder's alone; the rest is the caller's promise.
        unsafe { self.start.copy_from_nonoverlapping(from, len) };
        Ok(())
    }
}

/// A payload that is to be sent from where it lies.
pub struct Piece {
    start: *const u8,
    len: usize,
    crc: u32,
    _guard: Guard,
}

// SAFETY: it is memory that may be read from any thread until the piece is dropped, as `new`'s caller has promised.
unsafe impl Send for Piece {}

impl Piece {
    /// `bytes`, which stay there as long as `guard` lives; `crc` is their CRC32C if it is known.
    ///
    /// # Safety
    /// Nobody writes them until the piece is dropped, which the link does when they are with the kernel, or the
    /// connection is over.
    pub unsafe fn new(bytes: &[u8], crc: Option<u32>, guard: Guard) -> Piece {
        let crc = crc.unwrap_or_else(|| crc32c(bytes));
        Piece { start: bytes.as_ptr(), len: bytes.len(), crc, _guard: guard }
    }

    /// Bytes that belong to the piece alone.
    pub fn owned(bytes: Vec<u8>) -> Piece {
        Piece::owned_with(bytes, ())
    }

    /// The same, together with what is to be dropped when they are with the kernel, or never will be.
    pub fn owned_with(bytes: Vec<u8>, with: impl Send + Sync + 'static) -> Piece {
        let both = Arc::new((bytes, with));
        // SAFETY: nobody else has the vector, and the guard is what owns it.
        unsafe { Piece::new(both.0.as_slice(), None, Arc::clone(&both) as Guard) }
    }

    fn payload(&self) -> Payload {
        Payload { len: self.len as u32, crc: self.crc }
    }
}

/// A message on its way out.
pub struct Outgoing {
    /// What is said.
    pub message: Message,
    /// The request's number, which the answer repeats; 0 for what needs none.
    pub request: u64,
    /// Of the block map.
    pub epoch: Epoch,
    /// What follows it.
    pub payload: Option<Piece>,
}

impl Outgoing {
    /// A message without a payload.
    pub fn new(request: u64, message: Message) -> Outgoing {
        Outgoing { message, request, epoch: Epoch(0), payload: None }
    }
}

/// What other threads, and the conversation itself, say something by. Cheap to clone.
#[derive(Clone, Default)]
pub struct Link(Arc<LinkState>);

#[derive(Default)]
struct LinkState {
    queue: Mutex<VecDeque<Outgoing>>,
    /// Of payload that is queued.
    queued_bytes: AtomicUsize,
    connection: OnceLock<Connection>,
    /// The connection ends when all is said.
    ending: AtomicBool,
}

impl Link {
    /// Says something, soon. On a connection that is over it is lost.
    pub fn send(&self, outgoing: Outgoing) {
        self.queue(outgoing);
        self.wake();
    }

    fn queue(&self, outgoing: Outgoing) {
        if self.0.ending.load(Ordering::Relaxed) {
            return;
        }
        let bytes = outgoing.payload.as_ref().map_or(0, |piece| piece.len);
        let mut queue = self.0.queue.lock();
        self.0.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        queue.push_back(outgoing);
    }

    fn is_full(&self) -> bool {
        self.0.queued_bytes.load(Ordering::Relaxed) > MAX_QUEUED_BYTES
    }

    fn pop(&self) -> Option<Outgoing> {
        let mut queue = self.0.queue.lock();
        let outgoing = queue.pop_front()?;
        let bytes = outgoing.payload.as_ref().map_or(0, |piece| piece.len);
        self.0.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
        Some(outgoing)
    }

    /// A message without a payload.
    pub fn say(&self, request: u64, message: Message) {
        self.send(Outgoing::new(request, message));
    }

    /// Says something; when it is with the kernel, the connection ends. What is said afterwards is lost.
    pub fn say_last(&self, outgoing: Outgoing) {
        self.queue(outgoing);
        self.0.ending.store(true, Ordering::Relaxed);
        self.wake();
    }

    /// Has the conversation asked again for what it takes and sends.
    pub fn wake(&self) {
        if let Some(connection) = self.0.connection.get() {
            connection.wake();
        }
    }

    /// Says that the connection is for blocks: others like it are put on other threads.
    pub fn expect_much(&self) {
        if let Some(connection) = self.0.connection.get() {
            connection.expect_much();
        }
    }

    /// A number for the thread that serves the connection, other than those of others; 0 before it is opened.
    pub fn thread(&self) -> usize {
        self.0.connection.get().map_or(0, Connection::thread)
    }

    /// Ends the connection.
    pub fn close(&self, why: Close) {
        if let Some(connection) = self.0.connection.get() {
            connection.close(why);
        }
    }

    /// Whether two links are of one connection.
    pub fn is(&self, other: &Link) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// What becomes of the payload of a message.
pub enum Take {
    /// There is none, or it is passed over.
    Nothing,
    /// Received into memory of the link, and lent to [`Conversation::payload`].
    Buffered,
    /// Received straight there.
    Into(Target),
    /// Not now: the message is handed over again after a wake-up, and until then nothing is received.
    Later,
}

/// One end of a conversation. All calls come from one thread at a time; none may block.
pub trait Conversation: Send {
    /// The connection is there, with what it is spoken to by.
    fn opened(&mut self, link: &Link) -> Result<(), Close>;

    /// A message has come; says what becomes of its payload, if it has one.
    ///
    /// # Errors
    /// The connection ends.
    fn message(&mut self, received: &Received) -> Result<Take, Close>;

    /// The payload of that message is there, whole and undamaged: `bytes` if it was buffered, otherwise where it was
    /// to go.
    ///
    /// # Errors
    /// The connection ends.
    fn payload(&mut self, received: &Received, bytes: &[u8]) -> Result<(), Close>;

    /// The next message to send besides those that were said by the link. Asked after a wake-up and when what was
    /// sent before is with the kernel.
    fn next(&mut self) -> Option<Outgoing> {
        None
    }

    /// How long what the peer sends may be from now on. Asked at the beginning and after each message.
    fn limits(&self) -> Limits;

    /// Longest silence before the peer is taken for dead; `None` until the greeting is over.
    fn silence(&self) -> Option<Duration>;

    /// Bytes have come, of whatever. Told now and then.
    fn heard(&mut self) {}

    /// Time passes, or the connection was woken; when to call again at the latest.
    ///
    /// # Errors
    /// The connection ends.
    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        let _ = now;
        Ok(None)
    }

    /// What is said to a peer before the connection is closed, as what it sends is no frame, or does not fit. Nothing by
    /// default, unless the peer can know better by it: a refusal of its protocol.
    fn last_words(&mut self, refusal: Refusal) -> Option<Outgoing> {
        let protocol = matches!(refusal, Refusal::Protocol { .. });
        protocol.then(|| Outgoing::new(0, Message::Refused(refusal)))
    }

    /// Nothing is taken any more, and the last words are being said: the payload under way does not come.
    fn given_up(&mut self) {}

    /// It is over.
    fn closed(&mut self, why: &Close);
}

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
const DRAIN: usize = 16 << 10;

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
            heads: Buffer::zeroed(HEADS),
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
            Err(why) if self.link.0.ending.load(Ordering::Relaxed) => {
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
            Take::Into(target) if target.len == len => Place::Target(target),
            Take::Into(target) => {
                let why = format!("{} bytes of payload for {} bytes of memory", len, target.len);
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

    /// Whether this end takes what comes; while it does not, it cannot tell what the peer does.
    fn reads(&self) -> bool {
        self.waiting.is_none() && !self.link.is_full()
    }

    /// Keeps in mind that a frame is under way, or none is. True if [`Stream::tick`] is to look at it soon.
    fn mark(&mut self, now: Instant) -> bool {
        let within = self.incoming.is_some() || self.receiver.is_within_frame();
        let Some(silence) = self.conversation.silence().filter(|_| within && self.reads()) else {
            self.progress.rests();
            return false;
        };
        // Its message comes before its payload.
        let frame = 2 * self.frames + u64::from(self.incoming.is_some());
        self.progress.under_way(frame, self.seen, now, pause(silence))
    }

    /// What is under way and does not move on.
    fn stuck(&self, pause: Duration) -> String {
        let what = match &self.incoming {
            Some(incoming) => {
                let header = &incoming.received.header;
                let (name, len) = (incoming.received.message.name(), header.payload_len() as usize);
                let got = len - self.left() + (self.seen - self.taken) as usize;
                format!("{got} of {len} bytes of a {name}")
            }
            None => "a part of a header or body".to_owned(),
        };
        format!("{what} came, and then not {} bytes in {pause:.1?}", progress::CRUMBS)
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
            Place::Target(target) => target.start,
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
        let payload = outgoing.payload.as_ref().map_or(Payload::NONE, Piece::payload);
        let Outgoing { message, request, epoch, .. } = &outgoing;
        if let Err(error) = wire::append_frame(&mut self.encoded, message, *request, *epoch, payload) {
            // It is this end that says what cannot be said.
            tracing::error!(%error, message = message.name(), "not sent");
            return;
        }
        let len = self.encoded.len();
        if HEADS - *used >= len {
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
            unsafe { out.push(piece.start, piece.len) };
        }
        self.sending.push(outgoing);
    }
}

/// The longest one of a peer that lives.
fn pause(silence: Duration) -> Duration {
    wire::ping_after(silence.as_millis() as u32)
}

impl<C: Conversation> Stream for Framed<C> {
    fn opened(&mut self, connection: &Connection) {
        let now = Instant::now();
        (self.opened, self.heard, self.spoke) = (now, now, now);
        let _ = self.link.0.connection.set(connection.clone());
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
        let mut used = 0;
        while out.room() >= 2 && out.bytes() < SEND_AT_ONCE && HEADS - used >= 256 {
            let queued = self.link.pop();
            let next = || if self.farewell.is_none() { self.conversation.next() } else { None };
            let Some(outgoing) = queued.or_else(next) else { break };
            self.push(outgoing, &mut used, out);
        }
        self.unsent = out.bytes();
    }

    fn transmitted(&mut self, bytes: usize) -> Result<(), Close> {
        self.spoke = Instant::now();
        self.unsent = self.unsent.saturating_sub(bytes);
        match &mut self.farewell {
            Some(farewell) if self.unsent == 0 && self.link.0.queue.lock().is_empty() => {
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
            Err(why) if self.link.0.ending.load(Ordering::Relaxed) => {
                let deadline = now + FAREWELL;
                self.farewell = Some(Farewell { why, deadline, drains: false, said: false });
                Ok(Some(deadline))
            }
            outcome => outcome,
        }
    }

    fn closed(&mut self, why: &Close) {
        self.sending.clear();
        self.link.0.queue.lock().clear();
        self.incoming = None;
        let why = self.farewell.as_ref().map_or(why, |farewell| &farewell.why);
        self.conversation.closed(why);
    }
}

impl<C: Conversation> Framed<C> {
    /// What time brings.
    fn watch(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        let wanted = self.conversation.tick(now)?;
        let Some(silence) = self.conversation.silence() else {
            let deadline = self.opened + HELLO_DEADLINE;
            if now >= deadline {
                let why = format!("no greeting within {HELLO_DEADLINE:?}");
                self.last_words(Refusal::Other(why.clone()));
                return Err(Close::Asked(why.into()));
            }
            return Ok(Some(wanted.map_or(deadline, |wanted| wanted.min(deadline))));
        };
        if self.reads() && now >= self.heard + silence {
            return Err(Close::Asked(format!("silent for {silence:?}").into()));
        }
        let pause = pause(silence);
        self.mark(now);
        let Ok(look) = self.progress.look(self.seen, now, pause) else {
            let why = self.stuck(pause);
            self.last_words(Refusal::Other(why.clone()));
            return Err(Close::Asked(why.into()));
        };
        if self.link.0.queue.lock().len() > MAX_QUEUED {
            return Err(Close::Asked("the peer does not take what it is told".into()));
        }
        if now >= self.spoke + pause {
            self.spoke = now;
            self.link.say(0, Message::Ping);
        }
        let next = (self.spoke + pause).min(self.heard + silence).max(now + Duration::from_millis(10));
        let next = [look, wanted].into_iter().flatten().fold(next, Instant::min);
        self.progress.promised(next);
        Ok(Some(next))
    }
}
