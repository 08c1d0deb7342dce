//! Streams that the tests of the reactor run. This file holds `unsafe`: they name memory to the reactor, always of
//! buffers that they own, that are dropped with them, and that they look into only between operations.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use libmodelio::transport::stream::{Buffer, Close, Connection, Receive, ReceiveSlices, SendSlices, Stream};

/// The byte at a position of a test's stream. No stretch of the stream looks like another.
pub fn pattern(seed: u64, position: u64) -> u8 {
    let word = (position ^ seed.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word ^ (word >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_be_bytes()[0]
}

/// A small generator: the same numbers for the same seed.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }
}

/// What a test sees and sets of a [`Chatter`].
#[derive(Default)]
pub struct Watch {
    pub received: AtomicU64,
    /// Calls of `received`.
    pub calls: AtomicUsize,
    pub paused: AtomicBool,
}

/// Sends `total` bytes of the pattern and expects `expected`, in slices of random sizes.
pub struct Chatter {
    pub seed: u64,
    pub total: u64,
    pub expected: u64,
    /// Asks for so much at once; at random where `None`.
    pub least: Option<usize>,
    pub watch: Arc<Watch>,
    /// Gets a message when all bytes have come and gone, and the reason when the stream is closed.
    pub events: Sender<Event>,
    /// Closes at this time.
    pub deadline: Option<Instant>,
    state: State,
}

struct State {
    dice: Dice,
    sending: Buffer,
    receiving: Buffer,
    /// Of the current receive: offset and length of each slice.
    into: Vec<(usize, usize)>,
    prepared: u64,
    sent: u64,
    received: u64,
    reported: bool,
    /// It has said that it is paused, and was not asked again.
    is_paused: bool,
}

#[derive(Debug)]
pub enum Event {
    Opened(Connection0),
    Complete,
    Closed(Close),
}

/// A [`Connection`] that can be printed.
pub struct Connection0(pub Connection);

impl std::fmt::Debug for Connection0 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a connection")
    }
}

const BUFFER: usize = 300 << 10;

impl Chatter {
    pub fn new(seed: u64, total: u64, expected: u64, events: Sender<Event>) -> Chatter {
        Chatter {
            seed,
            total,
            expected,
            least: None,
            watch: Arc::default(),
            events,
            deadline: None,
            state: State {
                dice: Dice(seed),
                sending: Buffer::zeroed(BUFFER),
                receiving: Buffer::zeroed(BUFFER),
                into: Vec::new(),
                prepared: 0,
                sent: 0,
                received: 0,
                reported: false,
                is_paused: false,
            },
        }
    }

    fn tell_when_complete(&mut self) {
        let state = &mut self.state;
        if !state.reported && state.sent == self.total && state.received == self.expected {
            state.reported = true;
            let _ = self.events.send(Event::Complete);
        }
    }
}

impl Stream for Chatter {
    fn opened(&mut self, connection: &Connection) {
        let _ = self.events.send(Event::Opened(Connection0(connection.clone())));
    }

    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive {
        assert_eq!((into.bytes(), into.room()), (0, libmodelio::transport::stream::SLICES_MAX));
        let state = &mut self.state;
        state.is_paused = self.watch.paused.load(Ordering::SeqCst);
        if state.is_paused {
            return Receive::Paused;
        }
        state.into.clear();
        let left = usize::try_from(self.expected - state.received).unwrap();
        let room = if left == 0 { 1 } else { left.min(BUFFER) };
        let most = 1 + state.dice.roll(room);
        let least = self.least.unwrap_or(1 + state.dice.roll(most)).min(room);
        let most = most.max(least);
        let (slices, mut at) = (1 + state.dice.roll(7), 0);
        for slice in 0..slices {
            let len = if slice + 1 == slices { most - at } else { state.dice.roll(most - at + 1) };
            // SAFETY: see the module; within the buffer, as `most` is.
            unsafe { into.push(state.receiving.start().add(at), len) };
            state.into.push((at, len));
            at += len;
        }
        Receive::Into { least }
    }

    fn received(&mut self, bytes: usize) -> Result<(), Close> {
        self.watch.calls.fetch_add(1, Ordering::SeqCst);
        let state = &mut self.state;
        if state.is_paused {
            return Err(Close::Asked("bytes came in a pause".into()));
        }
        // The slices of one receive follow each other in the buffer.
        for (at, &byte) in state.receiving.bytes()[..bytes].iter().enumerate() {
            let position = state.received + at as u64;
            if byte != pattern(self.seed, position) || position >= self.expected {
                return Err(Close::Asked(format!("a wrong byte at {position}").into()));
            }
        }
        state.received += bytes as u64;
        self.watch.received.store(state.received, Ordering::SeqCst);
        self.tell_when_complete();
        Ok(())
    }

    fn transmit(&mut self, out: &mut SendSlices) {
        assert_eq!((out.bytes(), self.state.prepared), (0, self.state.sent));
        let state = &mut self.state;
        let left = usize::try_from(self.total - state.sent).unwrap().min(BUFFER);
        if left == 0 {
            return;
        }
        let len = 1 + state.dice.roll(left);
        for (at, byte) in state.sending.bytes_mut()[..len].iter_mut().enumerate() {
            *byte = pattern(self.seed, state.sent + at as u64);
        }
        let mut at = 0;
        while at < len {
            let here = if out.room() == 1 { len - at } else { 1 + state.dice.roll(len - at) };
            // SAFETY: see the module; within the buffer.
            unsafe { out.push(state.sending.start().add(at), here) };
            at += here;
        }
        state.prepared += len as u64;
    }

    fn transmitted(&mut self, bytes: usize) -> Result<(), Close> {
        self.state.sent += bytes as u64;
        assert!(self.state.sent <= self.state.prepared, "more is sent than there was");
        self.tell_when_complete();
        Ok(())
    }

    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        match self.deadline {
            Some(deadline) if now >= deadline => Err(Close::Asked("past its deadline".into())),
            deadline => Ok(deadline),
        }
    }

    fn closed(&mut self, why: &Close) {
        let _ = self.events.send(Event::Closed(why.clone()));
    }
}

/// Sends received bytes back.
pub struct Echo {
    buffer: Buffer,
    held: usize,
    sent: usize,
}

impl Echo {
    pub fn new() -> Echo {
        Echo { buffer: Buffer::zeroed(100_000), held: 0, sent: 0 }
    }
}

impl Stream for Echo {
    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive {
        if self.held > 0 {
            return Receive::Paused;
        }
        // SAFETY: see the module.
        unsafe { into.push(self.buffer.start(), self.buffer.len()) };
        Receive::Into { least: 1 }
    }

    fn received(&mut self, bytes: usize) -> Result<(), Close> {
        (self.held, self.sent) = (bytes, 0);
        Ok(())
    }

    fn transmit(&mut self, out: &mut SendSlices) {
        // SAFETY: see the module; within the buffer.
        unsafe { out.push(self.buffer.start().add(self.sent), self.held - self.sent) };
    }

    fn transmitted(&mut self, bytes: usize) -> Result<(), Close> {
        self.sent += bytes;
        if self.sent == self.held {
            (self.held, self.sent) = (0, 0);
        }
        Ok(())
    }

    fn closed(&mut self, _: &Close) {}
}

/// Sends one byte for each that is wanted, and ends with a farewell once `all` are sent.
pub struct Counter {
    pub wanted: Arc<AtomicU64>,
    pub all: u64,
    pub sent: u64,
    pub events: Sender<Event>,
}

pub const FAREWELL: &[u8] = b"that was all";
static ONES: [u8; 1000] = [1; 1000];

impl Stream for Counter {
    fn receive(&mut self, _: &mut ReceiveSlices) -> Receive {
        Receive::Paused
    }

    fn received(&mut self, _: usize) -> Result<(), Close> {
        unreachable!("it is paused")
    }

    fn transmit(&mut self, out: &mut SendSlices) {
        let now = usize::try_from(self.wanted.load(Ordering::SeqCst) - self.sent.min(self.all)).unwrap();
        let bytes = if self.sent < self.all { &ONES[..now.min(ONES.len())] } else { FAREWELL };
        // SAFETY: both are constants, which nobody changes.
        unsafe { out.push(bytes.as_ptr(), bytes.len()) };
    }

    fn transmitted(&mut self, bytes: usize) -> Result<(), Close> {
        self.sent += bytes as u64;
        if self.sent == self.all + FAREWELL.len() as u64 { Err(Close::Asked("said".into())) } else { Ok(()) }
    }

    fn closed(&mut self, why: &Close) {
        let _ = self.events.send(Event::Closed(why.clone()));
    }
}

/// Does a wrong thing when it is opened.
pub struct Wrong {
    pub panics: bool,
    pub events: Sender<Event>,
    pub buffer: Buffer,
}

impl Stream for Wrong {
    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive {
        assert!(!self.panics, "as the test wants");
        // SAFETY: see the module.
        unsafe { into.push(self.buffer.start(), 10) };
        Receive::Into { least: 11 }
    }

    fn received(&mut self, _: usize) -> Result<(), Close> {
        Ok(())
    }

    fn transmit(&mut self, _: &mut SendSlices) {}

    fn transmitted(&mut self, _: usize) -> Result<(), Close> {
        Ok(())
    }

    fn closed(&mut self, why: &Close) {
        let _ = self.events.send(Event::Closed(why.clone()));
    }
}

/// The longest a test waits for anything.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// Asks for more bytes at once than come, and reports how many it gets.
pub struct Patient {
    buffer: Buffer,
    sender: Sender<usize>,
}

impl Patient {
    pub fn new(least: usize, sender: Sender<usize>) -> Patient {
        Patient { buffer: Buffer::zeroed(least), sender }
    }
}

impl Stream for Patient {
    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive {
        // SAFETY: the buffer is left alone until the stream is dropped.
        unsafe { into.push(self.buffer.start(), self.buffer.len()) };
        Receive::Into { least: self.buffer.len() }
    }

    fn received(&mut self, bytes: usize) -> Result<(), Close> {
        Err(Close::Asked(format!("{bytes} bytes").into()))
    }

    fn arriving(&mut self, bytes: usize) {
        self.sender.send(bytes).expect("the test listens");
    }

    fn transmit(&mut self, _: &mut SendSlices) {}

    fn transmitted(&mut self, _: usize) -> Result<(), Close> {
        Ok(())
    }

    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        Ok(Some(now + Duration::from_millis(20)))
    }

    fn closed(&mut self, _: &Close) {}
}
