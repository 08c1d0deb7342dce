//! The loop of a serving thread over its descriptors. It asks the stream for the next operation, has a [`Driver`] do
//! it, and reports the outcome to the stream.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use socket2::SockRef;

use super::driver::Driver;
use super::endings::{farewell, panic_message};
use super::inbox::Arrival;
use super::port::{Completion, Op, Phase, Readiness};
use super::table::{Entry, Table};
use super::timers::Timers;
use super::waiting::{Kind, Ready};
use crate::transport::stream::{Close, ConnectionState, Receive, Token, in_use};

/// The pause after which an operation is tried again that the kernel had no memory for.
const MEMORY_PAUSE: Duration = Duration::from_millis(5);

/// The descriptors of one thread, and the driver that moves their bytes.
pub(super) struct Serving<D> {
    pub driver: D,
    pub table: Table,
    pub timers: Timers,
    /// The time at the start of this turn of the loop.
    pub now: Instant,
}

impl<D: Driver> Serving<D> {
    pub(super) fn new(driver: D) -> Serving<D> {
        Serving { driver, table: Table::default(), timers: Timers::default(), now: Instant::now() }
    }

    // Requests of other threads.

    /// Serves one descriptor more.
    pub(super) fn take(&mut self, arrival: Arrival) {
        let Arrival { fd, mut kind, connection } = arrival;
        let Kind::Waiting(waiting) = &mut kind else {
            let token = self.insert(Entry::new(fd, kind, connection));
            return self.open(token);
        };
        let started = waiting.start(&fd);
        let (readiness, deadline) = (waiting.readiness(), waiting.deadline());
        let token = self.insert(Entry::new(fd, kind, connection));
        match started {
            Ok(()) => {
                self.watch(token, readiness);
                self.set_due(token, deadline.map(|(at, _)| at));
            }
            Err(why) => self.close(token, why),
        }
    }

    /// A connection was woken, perhaps to be closed.
    pub(super) fn wake(&mut self, state: &ConnectionState) {
        let (token, close) = state.requested();
        let Some(token) = token else { return };
        match close {
            Some(why) => self.close(token, why),
            None => {
                self.tick(token);
                self.pump(token);
            }
        }
    }

    fn insert(&mut self, entry: Entry) -> Token {
        let state = Arc::clone(entry.state());
        let token = self.table.insert(entry);
        state.placed(token);
        token
    }

    /// A connection is open: its stream begins.
    fn open(&mut self, token: Token) {
        self.ask(token, |entry, _| {
            let Kind::Stream(stream) = &mut entry.kind else { return Ok(()) };
            if D::IS_BY_SOCKET {
                entry.connection.state().goes_through(&entry.port.fd);
            }
            // Sockets other than TCP have no such settings.
            if let Ok(in_use) = in_use(&SockRef::from(&entry.port.fd)) {
                entry.connection.state().describe(in_use);
            }
            stream.opened(&entry.connection);
            Ok(())
        });
        // The connection may have been closed before it was here.
        let closing = self.table.get(token).and_then(|entry| entry.state().requested().1);
        if let Some(why) = closing {
            self.close(token, why);
            return;
        }
        self.tick(token);
        self.pump(token);
    }

    // Operations that streams want.

    /// Runs `what` for an entry that is not closing; an error closes it, so does a panic.
    fn ask(&mut self, token: Token, what: impl FnOnce(&mut Entry, Instant) -> Result<(), Close>) {
        let Some(entry) = self.table.get(token).filter(|entry| entry.closing.is_none()) else { return };
        let outcome = catch_unwind(AssertUnwindSafe(|| what(entry, self.now)));
        let outcome =
            outcome.unwrap_or_else(|panic| Err(Close::Panicked(panic_message(panic.as_ref()).to_owned())));
        if let Err(why) = outcome {
            self.close(token, why);
        }
    }

    /// Begins the operations that the stream wants and that are not outstanding.
    fn pump(&mut self, token: Token) {
        let driver = &mut self.driver;
        let Some(entry) = self.table.get(token) else { return };
        let Entry { port, kind: Kind::Stream(stream), closing: None, retry: None, .. } = entry else {
            return;
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            if port.receiving == Phase::Idle {
                port.receive.clear();
                if let Receive::Into { least } = stream.receive(&mut port.receive) {
                    let room = port.receive.bytes();
                    if least == 0 || least > room {
                        let text = format!("at least {least} bytes into room for {room}");
                        return Err(Close::Misused(text.into()));
                    }
                    (port.least, port.got) = (least, 0);
                    driver.receive(token, port).map_err(|errno| socket("receive", errno))?;
                }
            }
            if port.sending == Phase::Idle {
                port.send.clear();
                stream.transmit(&mut port.send);
                if port.send.bytes() > 0 {
                    driver.send(token, port).map_err(|errno| socket("send", errno))?;
                }
            }
            Ok(())
        }));
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(why)) => self.close(token, why),
            Err(panic) => self.close(token, Close::Panicked(panic_message(panic.as_ref()).to_owned())),
        }
    }

    fn tick(&mut self, token: Token) {
        let mut due = None;
        self.ask(token, |entry, now| {
            match &mut entry.kind {
                Kind::Stream(stream) => {
                    if let Some(bytes) = entry.port.check(now) {
                        stream.arriving(bytes);
                    }
                    due = stream.tick(now)?;
                }
                Kind::Waiting(waiting) => match waiting.deadline() {
                    Some((at, late)) if now >= at => return Err(late),
                    deadline => due = deadline.map(|(at, _)| at),
                },
            }
            Ok(())
        });
        self.set_due(token, due);
    }

    // Time.

    fn set_due(&mut self, token: Token, due: Option<Instant>) {
        let Some(entry) = self.table.get(token) else { return };
        entry.due = due;
        self.timers.queue(token, entry);
    }

    /// Handles what is due.
    pub(super) fn run_timers(&mut self) {
        while let Some((at, token)) = self.timers.take_due(self.now) {
            let now = self.now;
            let Some(entry) = self.table.get(token) else { continue };
            if entry.queued != Some(at) {
                continue;
            }
            entry.queued = None;
            if entry.retry.take_if(|retry| *retry <= now).is_some() {
                self.resume(token);
            }
            let Some(entry) = self.table.get(token) else { continue };
            if entry.due.take_if(|due| *due <= now).is_some() {
                self.tick(token);
            }
            if let Some(entry) = self.table.get(token) {
                self.timers.queue(token, entry);
            }
        }
    }

    /// Tries operations again that could not begin.
    fn resume(&mut self, token: Token) {
        let driver = &mut self.driver;
        let Some(entry) = self.table.get(token) else { return };
        let port = &mut entry.port;
        let outcome = match &entry.kind {
            _ if entry.closing.is_some() => Ok(()),
            Kind::Waiting(waiting) => driver.watch(token, port, waiting.readiness()),
            Kind::Stream(_) => {
                let receive = port.receiving == Phase::Idle && port.got < port.least;
                let received = if receive { driver.receive(token, port) } else { Ok(()) };
                let send = port.sending == Phase::Idle && port.send.bytes() > 0;
                received.and_then(|()| if send { driver.send(token, port) } else { Ok(()) })
            }
        };
        match outcome {
            Ok(()) => self.pump(token),
            Err(errno) => self.close(token, socket("trying again", errno)),
        }
    }

    fn retry_after(&mut self, token: Token, pause: Duration) {
        let at = self.now + pause;
        if let Some(entry) = self.table.get(token) {
            entry.retry.get_or_insert(at);
            self.timers.queue(token, entry);
        }
    }

    fn watch(&mut self, token: Token, readiness: Readiness) {
        let Some(entry) = self.table.get(token) else { return };
        if let Err(errno) = self.driver.watch(token, &mut entry.port, readiness) {
            self.close(token, socket("waiting for a socket", errno));
        }
    }

    // Outcomes of operations.

    /// An operation is over.
    pub(super) fn complete(&mut self, done: Completion) {
        let token = done.token;
        let Some(entry) = self.table.get(token) else { return };
        match done.op {
            Op::Receive => entry.port.receiving = Phase::Idle,
            Op::Send => entry.port.sending = Phase::Idle,
            Op::Readiness => {}
        }
        if entry.closing.is_some() {
            self.finish(token);
            return;
        }
        match (done.op, done.result) {
            (Op::Readiness, _) => self.became_ready(token),
            (Op::Receive, Ok(bytes)) => self.received(token, bytes),
            (Op::Send, Ok(bytes)) => self.sent(token, bytes),
            (_, Err(Errno::ENOBUFS | Errno::ENOMEM)) => self.retry_after(token, MEMORY_PAUSE),
            (_, Err(Errno::EINTR | Errno::EAGAIN)) => self.retry_after(token, Duration::ZERO),
            (Op::Receive, Err(errno)) => self.close(token, socket("receive", errno)),
            (Op::Send, Err(errno)) => self.close(token, socket("send", errno)),
        }
    }

    fn received(&mut self, token: Token, bytes: usize) {
        let Some(entry) = self.table.get(token) else { return };
        let port = &mut entry.port;
        let ended = bytes == 0;
        if ended && port.got == 0 {
            self.close(token, Close::Ended);
            return;
        }
        port.receive.advance(bytes);
        port.got += bytes;
        if port.got < port.least && !ended {
            if let Kind::Stream(stream) = &mut entry.kind {
                stream.arriving(port.got);
            }
            if let Err(errno) = self.driver.receive(token, port) {
                self.close(token, socket("receive", errno));
            }
            return;
        }
        self.ask(token, |entry, _| {
            let got = std::mem::take(&mut entry.port.got);
            entry.port.least = 0;
            if let Kind::Stream(stream) = &mut entry.kind { stream.received(got) } else { Ok(()) }
        });
        self.pump(token);
    }

    fn sent(&mut self, token: Token, bytes: usize) {
        self.ask(token, |entry, _| {
            entry.port.send.advance(bytes);
            let Kind::Stream(stream) = &mut entry.kind else { return Ok(()) };
            stream.transmitted(bytes)?;
            if entry.port.send.bytes() == 0 && stream.is_finished() {
                // If the peer is gone already, the next receive notices it.
                let _ = SockRef::from(&entry.port.fd).shutdown(std::net::Shutdown::Write);
            }
            Ok(())
        });
        let Some(entry) = self.table.get(token).filter(|entry| entry.closing.is_none()) else { return };
        if entry.port.send.bytes() == 0 {
            self.pump(token);
        } else if let Err(errno) = self.driver.send(token, &mut entry.port) {
            self.close(token, socket("send", errno));
        }
    }

    fn became_ready(&mut self, token: Token) {
        let mut outcome = None;
        self.ask(token, |entry, _| {
            if let Kind::Waiting(waiting) = &mut entry.kind {
                let ready = waiting.ready(&entry.port.fd)?;
                outcome = Some((ready, waiting.readiness()));
            }
            Ok(())
        });
        match outcome {
            Some((Ready::Again, readiness)) => self.watch(token, readiness),
            Some((Ready::After(pause), _)) => self.retry_after(token, pause),
            Some((Ready::Stream(stream), _)) => {
                let Some(entry) = self.table.get(token) else { return };
                entry.due = None;
                entry.kind = Kind::Stream(stream);
                self.open(token);
            }
            None => {}
        }
    }

    // The end.

    /// Closes an entry. The first reason counts.
    pub(super) fn close(&mut self, token: Token, why: Close) {
        let Some(entry) = self.table.get(token).filter(|entry| entry.closing.is_none()) else { return };
        entry.closing = Some(why);
        entry.due = None;
        entry.retry = None;
        if let Err(errno) = self.driver.cancel(token, &mut entry.port) {
            // Outstanding operations end with the socket, and the socket with the peer at the latest.
            tracing::error!(%errno, "an operation cannot be cancelled");
            let _ = SockRef::from(&entry.port.fd).shutdown(std::net::Shutdown::Both);
        }
        self.finish(token);
    }

    /// Drops a closing entry when nothing is outstanding.
    fn finish(&mut self, token: Token) {
        if self.table.get(token).is_none_or(|entry| entry.port.busy()) {
            return;
        }
        let Some(entry) = self.table.remove(token) else { return };
        let Entry { port, kind, connection, closing, .. } = entry;
        drop(port);
        let why = closing.unwrap_or(Close::ShutDown);
        farewell(kind, &why);
        connection.state().ended();
    }
}

fn socket(doing: &'static str, errno: Errno) -> Close {
    Close::Socket { doing, errno }
}
