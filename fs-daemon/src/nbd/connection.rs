//! One client: its handshake, then its requests, each of which gets one reply. Reads are sent from the memory of the
//! version or disk. Gradients are reduced from the buffer that they were received into, and a disk's bytes are received
//! in its memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::contributor::Wrote;
use libmodelio::disk::Write;
use libmodelio::nbd::numbers::flag;
use libmodelio::nbd::{
    Command, Context, Errno, Handshake, Head, MAX_LEN, Need, Opening, REQUEST_LEN, Replies, Request, Step,
};
use libmodelio::transport::exchange::{Exchange, Reply};
use libmodelio::transport::stream::{Close, Connection, Target};
use parking_lot::Mutex;

use super::exports::ModelExports;
use super::face::{Face, errno_of};
use super::lobby::{Lobby, LobbyPlace};
use crate::own_thread::on_own_thread;
use crate::session::error::{CallError, CallResult};

/// The time for a client to choose an export.
const HANDSHAKE: Duration = Duration::from_secs(30);
/// The time for a client that has said that it goes to take the replies that are left.
const FAREWELL: Duration = Duration::from_secs(600);
/// No more requests are taken while so many replies wait to be sent.
const MAX_WAITING: usize = 64;
/// A payload is taken in pieces of at most this length, which do not reach over the end of a block.
pub const PIECE: usize = 256 << 10;
/// More zeros than these are written by a thread of their own.
const FEW_ZEROS: u32 = 1 << 20;

/// The state of a connection.
enum Phase {
    Handshake(Handshake),
    /// The chosen export is being opened, on a thread of its own.
    Opening(Handshake, Opening),
    /// A request comes next.
    Requests(Open),
    /// The payload of a write.
    Payload(Open, Payload),
    /// A piece of a payload, or zeros, are being written on a thread of their own.
    Writing(Open, Payload),
    /// A step of the learner ends. The reply of this request follows.
    Step(Open, Request),
    /// A version with the learner's last step in it comes. The reply of this request follows.
    Behind(Open, Request),
    /// Nothing more is taken. The connection ends when the client has all replies.
    Over,
}

/// The export that the client has chosen.
struct Open {
    face: Face,
    size: u64,
    replies: Replies,
    contexts: Vec<Context>,
}

/// A payload that is on its way.
struct Payload {
    request: Request,
    /// The bytes that have come.
    done: u32,
    /// Why they are not wanted, if so.
    outcome: CallResult<()>,
    /// The piece that is being received in a disk's memory.
    piece: Option<(Write, u32)>,
}

/// The outcome of another thread's work for a connection.
enum Event {
    Opened(CallResult<Face>),
    Wrote(CallResult<()>),
    Stepped(CallResult<()>),
    /// A disk was flushed, and this is the reply.
    Flushed(Head),
    CaughtUp(CallResult<()>),
}

/// The place where other threads put events.
#[derive(Default)]
struct Inbox {
    events: Mutex<Vec<Event>>,
    link: Mutex<Option<Connection>>,
}

impl Inbox {
    fn put(&self, event: Event) {
        self.events.lock().push(event);
        if let Some(link) = &*self.link.lock() {
            link.wake();
        }
    }
}

/// A client.
pub struct Client {
    exports: Arc<ModelExports>,
    lobby: Lobby,
    /// Until the client is gone.
    place: Option<LobbyPlace>,
    phase: Phase,
    /// When the present phase must be over, if it must.
    until: Option<Instant>,
    waiting: VecDeque<Reply>,
    /// The number of FLUSHes of a disk that are not over.
    flushes: usize,
    inbox: Arc<Inbox>,
}

impl Client {
    /// A client of `exports`, which waits in `lobby` until it has chosen one.
    pub fn new(exports: Arc<ModelExports>, lobby: Lobby) -> Client {
        let waiting = VecDeque::from([(Handshake::greeting().into(), None)]);
        let phase = Phase::Handshake(Handshake::default());
        Client { exports, lobby, place: None, phase, until: None, waiting, flushes: 0, inbox: Arc::default() }
    }

    fn reply(&mut self, head: impl Into<Head>) {
        let head = head.into();
        if !head.is_empty() {
            self.waiting.push_back((head, None));
        }
    }

    /// Opens the chosen export.
    fn open(&mut self, handshake: Handshake, opening: Opening) -> Result<(), Close> {
        let name = opening.export.name.clone();
        if !self.exports.takes_long(&name) {
            let opened = self.exports.open(&name);
            return self.opened(handshake, opening, opened);
        }
        self.phase = Phase::Opening(handshake, opening);
        let (exports, inbox) = (Arc::clone(&self.exports), Arc::clone(&self.inbox));
        on_own_thread("nbd-opens", move || inbox.put(Event::Opened(exports.open(&name))));
        Ok(())
    }

    /// The export is open, or cannot be: goes on with requests, or with the handshake.
    fn opened(
        &mut self,
        mut handshake: Handshake,
        Opening { export, contexts, structured }: Opening,
        opened: CallResult<Face>,
    ) -> Result<(), Close> {
        match opened {
            Ok(face) => {
                tracing::debug!(export = export.name, "a block device is open");
                self.place.iter().for_each(|place| place.sit(face.is_writable()));
                self.reply(handshake.opened());
                let replies = Replies { structured };
                self.phase = Phase::Requests(Open { face, size: export.size, replies, contexts });
            }
            Err(why) => {
                let (is_policy, why) = (why.errno == libc::EPERM, why.to_string());
                let Some(answer) = handshake.refused(&why, is_policy) else {
                    return Err(Close::Asked(why.into()));
                };
                self.reply(answer);
                self.phase = Phase::Handshake(handshake);
            }
        }
        Ok(())
    }

    /// The client has said that it goes.
    fn end(&mut self) {
        self.phase = Phase::Over;
        self.until = None;
        // The next tick sets the deadline, or ends the connection if nothing is left to send.
        if let Some(link) = &*self.inbox.link.lock() {
            link.wake();
        }
    }

    fn request(&mut self, open: Open, request: Request) {
        self.place.iter().for_each(LobbyPlace::heard);
        match request.command {
            Command::Disconnect => {
                open.face.end();
                self.end();
            }
            Command::Write if request.len > 0 => {
                let outcome = open.may_write(&request);
                self.phase = Phase::Payload(open, Payload { request, done: 0, outcome, piece: None });
            }
            Command::WriteZeroes | Command::Trim if open.face.disk().is_some() && request.len > 0 => {
                self.zeros(open, request);
            }
            Command::Flush if request.is_well_flagged() => self.end_step(open, request),
            Command::Read | Command::BlockStatus if open.face.learner().is_some_and(|it| it.is_behind()) => {
                self.catch_up(open, request);
            }
            _ => self.answer_now(open, request),
        }
    }

    fn answer_now(&mut self, open: Open, request: Request) {
        open.answer(&request, &mut self.waiting);
        self.phase = Phase::Requests(open);
    }

    /// Answers `request` from a version with the learner's last step. Later requests wait for that.
    fn catch_up(&mut self, open: Open, request: Request) {
        let Some(learner) = open.face.learner() else { return self.answer_now(open, request) };
        let inbox = Arc::clone(&self.inbox);
        learner.catch_up(Box::new(move |outcome| inbox.put(Event::CaughtUp(outcome))));
        self.phase = Phase::Behind(open, request);
        self.settle();
    }

    /// Takes a piece of a payload, and writes it.
    fn piece(&mut self, open: Open, mut payload: Payload, bytes: &[u8]) {
        let offset = payload.request.offset + u64::from(payload.done);
        let learner = open.face.learner().filter(|_| payload.outcome.is_ok());
        let Some(learner) = learner else {
            payload.done += bytes.len() as u32;
            return self.next_piece(open, payload);
        };
        let (learner, inbox) = (Arc::clone(learner), Arc::clone(&self.inbox));
        payload.done += bytes.len() as u32;
        let wrote = Box::new(move |outcome| inbox.put(Event::Wrote(outcome)));
        if learner.contribution().is_some() {
            match learner.write(offset, bytes) {
                Ok(Wrote::Asks) => {
                    self.phase = Phase::Writing(open, payload);
                    learner.write_later(offset, bytes.to_vec(), wrote);
                    self.settle();
                }
                outcome => {
                    payload.outcome = outcome.map(drop);
                    self.next_piece(open, payload);
                }
            }
            return;
        }
        // The first write joins, for which the coordinator is asked.
        self.phase = Phase::Writing(open, payload);
        let bytes = bytes.to_vec();
        on_own_thread("nbd-writes", move || match learner.write(offset, &bytes) {
            Ok(Wrote::Asks) => learner.write_later(offset, bytes, wrote),
            outcome => wrote(outcome.map(drop)),
        });
    }

    /// Writes zeros to a disk, for which TRIM is a wish, too.
    fn zeros(&mut self, open: Open, request: Request) {
        let outcome = open.may_write(&request);
        let bytes = request.offset..request.offset.saturating_add(request.len.into());
        let payload = Payload { request, done: request.len, outcome, piece: None };
        let disk = open.face.disk().filter(|_| payload.outcome.is_ok()).cloned();
        match disk {
            Some(disk) if request.len > FEW_ZEROS => {
                let inbox = Arc::clone(&self.inbox);
                self.phase = Phase::Writing(open, payload);
                on_own_thread("nbd-zeros", move || {
                    disk.write_zeros(&bytes);
                    inbox.put(Event::Wrote(Ok(())));
                });
                return;
            }
            Some(disk) => disk.write_zeros(&bytes),
            None => {}
        }
        self.next_piece(open, payload);
    }

    fn next_piece(&mut self, open: Open, payload: Payload) {
        if payload.done < payload.request.len {
            self.phase = Phase::Payload(open, payload);
            return;
        }
        let request = payload.request;
        if let Some(learner) = open.face.learner() {
            learner.write_ended(request.offset, payload.outcome.is_ok());
        }
        match payload.outcome {
            Ok(()) if request.has(flag::FUA) => self.end_step(open, request),
            outcome => self.answer(open, request, outcome),
        }
    }

    /// Ends a step, and then answers `request`. Later requests of a learner wait for that.
    fn end_step(&mut self, open: Open, request: Request) {
        let inbox = Arc::clone(&self.inbox);
        if let Some(disk) = open.face.disk() {
            self.flushes += 1;
            let (replies, cookie) = (open.replies, request.cookie);
            disk.publish(Box::new(move |outcome| {
                inbox.put(Event::Flushed(replies.outcome(cookie, outcome)))
            }));
            self.phase = Phase::Requests(open);
            return self.settle();
        }
        open.face.flush(Box::new(move |outcome| inbox.put(Event::Stepped(outcome))));
        self.phase = Phase::Step(open, request);
        self.settle();
    }

    fn answer(&mut self, open: Open, request: Request, outcome: CallResult<()>) {
        self.reply(open.replies.outcome(request.cookie, outcome));
        self.phase = Phase::Requests(open);
    }

    /// Goes on with what other threads have done meanwhile.
    fn settle(&mut self) {
        let events = std::mem::take(&mut *self.inbox.events.lock());
        for event in events {
            if let Event::Flushed(head) = event {
                self.flushes -= 1;
                self.reply(head);
                continue;
            }
            match (std::mem::replace(&mut self.phase, Phase::Over), event) {
                (Phase::Writing(open, mut payload), Event::Wrote(outcome)) => {
                    payload.outcome = outcome;
                    self.next_piece(open, payload);
                }
                (Phase::Step(open, request), Event::Stepped(outcome)) => self.answer(open, request, outcome),
                (Phase::Behind(open, request), Event::CaughtUp(Ok(()))) => self.answer_now(open, request),
                (Phase::Behind(open, request), Event::CaughtUp(error)) => self.answer(open, request, error),
                (phase, event) => {
                    self.phase = phase;
                    self.inbox.events.lock().push(event);
                }
            }
        }
    }
}

/// The replies to what was asked of a session.
trait Outcome {
    /// The reply to a request that has nothing else to tell.
    fn outcome(self, cookie: u64, outcome: CallResult<()>) -> Head;
}

impl Outcome for Replies {
    fn outcome(self, cookie: u64, outcome: CallResult<()>) -> Head {
        match outcome {
            Ok(()) => self.ok(cookie),
            Err(error) => self.error(cookie, errno_of(&error), &error.to_string()),
        }
    }
}

impl Open {
    /// Whether the payload of a write is wanted.
    fn may_write(&self, request: &Request) -> CallResult<()> {
        let refused = |errno, why: &str| Err(CallError::new(errno, why));
        if !self.face.is_writable() {
            return refused(libc::EPERM, "the export is read-only");
        }
        if !request.is_well_flagged() {
            return refused(libc::EINVAL, "the request has a flag that its command does not have");
        }
        if !request.fits(self.size) {
            let errno = if request.command == Command::Trim { libc::EINVAL } else { libc::ENOSPC };
            return refused(errno, &self.outside(request));
        }
        self.face.disk().map_or(Ok(()), |disk| disk.promise())
    }

    fn outside(&self, Request { offset, len, .. }: &Request) -> String {
        format!("{len} bytes at {offset} are not in the export's {}", self.size)
    }

    /// Puts the reply to a request that needs nothing else into `out`.
    fn answer(&self, request: &Request, out: &mut VecDeque<Reply>) {
        if let (Command::Read, Some(disk)) = (request.command, self.face.disk())
            && request.is_well_flagged()
            && request.fits(self.size)
            && request.len <= MAX_LEN
        {
            let Request { cookie, offset, len, .. } = *request;
            let mut head = self.replies.read(cookie, offset, len);
            let pieces = |piece| out.push_back((std::mem::take(&mut head), Some(piece)));
            disk.read(offset..offset + u64::from(len), pieces);
            return;
        }
        out.push_back(self.reply_to(request));
    }

    fn reply_to(&self, request: &Request) -> Reply {
        let Request { cookie, offset, len, .. } = *request;
        let error = |errno, why: &str| (self.replies.error(cookie, errno, why), None);
        if !request.is_well_flagged() {
            return error(Errno::Invalid, "the request has a flag that its command does not have");
        }
        match request.command {
            Command::Write | Command::WriteZeroes | Command::Trim if !self.face.is_writable() => {
                error(Errno::NotPermitted, "the export is read-only")
            }
            Command::WriteZeroes | Command::Trim if self.face.disk().is_some() => {
                error(Errno::Invalid, &self.outside(request))
            }
            Command::WriteZeroes | Command::Trim | Command::Unknown(_) => {
                error(Errno::Invalid, "the server does not have this command")
            }
            Command::Flush | Command::Disconnect => (self.replies.ok(cookie), None),
            _ if !request.fits(self.size) => error(Errno::Invalid, &self.outside(request)),
            Command::Cache | Command::Write => (self.replies.ok(cookie), None),
            Command::Read if len > MAX_LEN => {
                error(Errno::Invalid, &format!("a request reads {MAX_LEN} bytes at most"))
            }
            Command::Read => match self.face.reader() {
                None => error(Errno::NotPermitted, "gradients are write-only (read weights instead)"),
                Some(reader) => {
                    let bytes = offset..offset + u64::from(len);
                    (self.replies.read(cookie, offset, len), Some(reader.piece(bytes)))
                }
            },
            Command::BlockStatus if self.contexts.is_empty() => {
                error(Errno::Invalid, "no context was chosen in the handshake")
            }
            Command::BlockStatus => {
                // The specification has 32 bits for a status.
                let version = self.face.version().map_or(0, |version| version.0 as u32);
                let status = |context: &Context| match context {
                    Context::Allocation => (*context, 0),
                    Context::Version => (*context, version),
                };
                let all: Vec<(Context, u32)> = self.contexts.iter().map(status).collect();
                (self.replies.status(cookie, len, &all), None)
            }
        }
    }
}

impl Payload {
    /// The length of the next piece.
    fn next(&self, open: &Open) -> usize {
        let left = (self.request.len - self.done) as usize;
        let Some(learner) = open.face.learner().filter(|_| self.outcome.is_ok()) else {
            return left.min(PIECE);
        };
        let block = u64::from(learner.block_size());
        let in_block = (self.request.offset + u64::from(self.done)) % block;
        left.min((block - in_block) as usize).min(PIECE)
    }
}

impl Exchange for Client {
    fn opened(&mut self, connection: &Connection) {
        *self.inbox.link.lock() = Some(connection.clone());
        self.place = Some(self.lobby.enter(connection));
    }

    fn need(&self) -> usize {
        match &self.phase {
            _ if self.waiting.len() + self.flushes >= MAX_WAITING => 0,
            // The answer to an option may be long.
            Phase::Handshake(_) if !self.waiting.is_empty() => 0,
            Phase::Handshake(handshake) => match handshake.need() {
                Need::Bytes(bytes) => bytes,
                Need::Nothing => 0,
            },
            Phase::Opening(..) | Phase::Writing(..) | Phase::Step(..) | Phase::Behind(..) | Phase::Over => 0,
            Phase::Requests(_) => REQUEST_LEN,
            Phase::Payload(open, payload) => payload.next(open),
        }
    }

    fn place(&mut self) -> Option<Target> {
        let Phase::Payload(open, payload) = &mut self.phase else { return None };
        let disk = open.face.disk().filter(|_| payload.outcome.is_ok())?;
        let len = payload.next(open) as u32;
        let start = payload.request.offset + u64::from(payload.done);
        let write = disk.write(start..start + u64::from(len));
        let target = write.target();
        payload.piece = Some((write, len));
        Some(target)
    }

    fn placed(&mut self) -> Result<(), Close> {
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Payload(open, mut payload) => {
                // The write is over before it is answered.
                payload.done += payload.piece.take().map_or(0, |(_, len)| len);
                self.next_piece(open, payload);
            }
            phase => self.phase = phase,
        }
        Ok(())
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), Close> {
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Handshake(mut handshake) => {
                let step = handshake.take(bytes, &*self.exports);
                match step.map_err(|why| Close::Asked(why.into()))? {
                    Step::Answer(answer) => {
                        self.reply(answer);
                        self.phase = Phase::Handshake(handshake);
                    }
                    Step::Open(opening) => self.open(handshake, opening)?,
                    Step::End(answer) => {
                        self.reply(answer);
                        self.end();
                    }
                }
            }
            Phase::Requests(open) => match bytes.first_chunk().and_then(Request::decode) {
                Some(request) => self.request(open, request),
                None => {
                    self.phase = Phase::Requests(open);
                    return Err(Close::Asked("a request does not begin as one".into()));
                }
            },
            Phase::Payload(open, payload) => self.piece(open, payload, bytes),
            // Nothing is needed then.
            phase @ (Phase::Opening(..)
            | Phase::Writing(..)
            | Phase::Step(..)
            | Phase::Behind(..)
            | Phase::Over) => self.phase = phase,
        }
        Ok(())
    }

    fn next(&mut self) -> Option<Reply> {
        self.waiting.pop_front()
    }

    fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Over) && self.waiting.is_empty() && self.flushes == 0
    }

    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        if matches!(self.phase, Phase::Opening(..)) {
            let opened = self.inbox.events.lock().pop();
            if let Some(Event::Opened(opened)) = opened
                && let Phase::Opening(handshake, opening) = std::mem::replace(&mut self.phase, Phase::Over)
            {
                self.opened(handshake, opening, opened)?;
            }
        } else {
            self.settle();
        }
        let (time, why) = match self.phase {
            Phase::Handshake(_) => (HANDSHAKE, "the client has chosen no export in time"),
            Phase::Over => (FAREWELL, "the client does not take its replies"),
            _ => return Ok(None),
        };
        let until = *self.until.get_or_insert(now + time);
        if until <= now {
            return Err(Close::Asked(why.into()));
        }
        Ok(Some(until))
    }

    fn closed(&mut self, why: &Close) {
        if *why != Close::Ended && *why != Close::ShutDown {
            tracing::debug!(%why, "a client of block devices is gone");
        }
        self.place = None;
        // A write to a disk is over before the disk is let go of, and published.
        if let Phase::Payload(_, payload) = &mut self.phase {
            payload.piece = None;
        }
        // The export goes, and drops the bytes that were not committed.
        self.phase = Phase::Over;
    }
}
