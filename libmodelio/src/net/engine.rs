//! The loop of a reactor's thread: it asks streams what they want, has a [`Driver`] do it, and tells them what came
//! of it. All that is common to the ways of moving bytes is here.

use std::any::Any;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::handle::{Command, Connection, Inbox, ThreadState};
use super::listen::{Listener, PAUSE};
use super::port::{Completion, Entry, Kind, Op, Phase, Port, Readiness, Table, Token};
use super::sockets;
use super::stream::{Close, Receive};

/// The longest sleep without a timer.
const NAP: Duration = Duration::from_secs(60);
/// When the kernel lacks memory for an operation, it is tried again after this time.
const MEMORY_PAUSE: Duration = Duration::from_millis(5);

/// Moves bytes for one thread. An operation that is begun is reported by [`wait`](Driver::wait), once.
pub(super) trait Driver {
    /// Begins to fill `port.receive`, up to all of it; `port.receiving` is outstanding until it is reported.
    fn receive(&mut self, token: Token, port: &mut Port) -> Result<(), Errno>;

    /// Begins to send `port.send`; `port.sending` is outstanding until it is reported.
    fn send(&mut self, token: Token, port: &mut Port) -> Result<(), Errno>;

    /// Begins to wait until the descriptor is ready; `port.readiness` is set until it is reported.
    fn watch(&mut self, token: Token, port: &mut Port, readiness: Readiness) -> Result<(), Errno>;

    /// Ends what is outstanding, soon; what cannot be ended on the spot is reported as ever.
    fn cancel(&mut self, token: Token, port: &mut Port) -> Result<(), Errno>;

    /// Whether `wait` has something to report without waiting.
    fn ready(&self) -> bool;

    /// Reports what is over, to the end of `done`; waits for it, or for a wake-up, up to `timeout`.
    fn wait(&mut self, table: &mut Table, done: &mut Vec<Completion>, timeout: Duration)
    -> Result<(), Errno>;
}

/// One thread of a reactor.
pub(super) struct Engine<D> {
    driver: D,
    table: Table,
    timers: BinaryHeap<Reverse<(Instant, Token)>>,
    thread: Arc<ThreadState>,
    now: Instant,
    stop_at: Option<Instant>,
}

impl<D: Driver> Engine<D> {
    pub fn new(driver: D, thread: Arc<ThreadState>) -> Engine<D> {
        Engine {
            driver,
            table: Table::default(),
            timers: BinaryHeap::new(),
            thread,
            now: Instant::now(),
            stop_at: None,
        }
    }

    /// Runs until it is shut down.
    ///
    /// # Errors
    /// When the kernel fails it as a whole.
    pub fn run(mut self) -> Result<(), Errno> {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.turn_until_done()));
        for late in self.thread.end().commands {
            refuse(late);
        }
        if self.table.len() > 0 {
            // The kernel may still write to memory that these connections named: it is never freed.
            tracing::error!(connections = self.table.len(), "given up with operations outstanding");
            std::mem::forget(self);
        }
        match outcome {
            Ok(result) => result,
            Err(panic) => {
                tracing::error!(panic = message(panic.as_ref()), "the thread of a reactor panicked");
                Err(Errno::ENOTRECOVERABLE)
            }
        }
    }

    fn turn_until_done(&mut self) -> Result<(), Errno> {
        let mut inbox = Inbox::default();
        let mut done = Vec::with_capacity(256);
        loop {
            self.now = Instant::now();
            self.thread.take(&mut inbox);
            self.hear(&mut inbox);
            self.run_timers();
            if let Some(deadline) = self.stop_at
                && (self.table.len() == 0 || self.now >= deadline)
            {
                return Ok(());
            }
            let sleepy = !self.driver.ready() && self.thread.fall_asleep();
            let timeout = if sleepy { self.time_to_sleep() } else { Duration::ZERO };
            self.driver.wait(&mut self.table, &mut done, timeout)?;
            self.thread.wake_up();
            self.now = Instant::now();
            for completion in done.drain(..) {
                self.complete(completion);
            }
        }
    }

    fn time_to_sleep(&self) -> Duration {
        let timer = self.timers.peek().map(|Reverse((at, _))| *at);
        let until = timer.into_iter().chain(self.stop_at).min();
        until.map_or(NAP, |at| at.saturating_duration_since(Instant::now()).min(NAP))
    }

    // What other threads want.

    fn hear(&mut self, inbox: &mut Inbox) {
        for command in inbox.commands.drain(..) {
            self.obey(command);
        }
        for state in inbox.woken.drain(..) {
            let (token, close) = state.heard();
            let Some(token) = token else { continue };
            match close {
                Some(why) => self.close(token, why),
                None => {
                    self.tick(token);
                    self.pump(token);
                }
            }
        }
        if let Some(deadline) = inbox.shut_down.take() {
            self.stop_at = Some(deadline);
            for token in self.table.tokens() {
                self.close(token, Close::ShutDown);
            }
        }
    }

    fn obey(&mut self, command: Command) {
        if self.stop_at.is_some() {
            refuse(command);
            return;
        }
        match command {
            Command::Add { fd, stream, connection } => {
                let token = self.insert(fd, Kind::Stream(stream), connection);
                self.open(token);
            }
            Command::Connect { connecting, fd, connection } => {
                let deadline = connecting.deadline;
                let started = connecting.start(&fd);
                let token = self.insert(fd, Kind::Connecting(connecting), connection);
                match started {
                    Ok(()) => {
                        self.watch(token, Readiness::Writable);
                        self.set_due(token, Some(deadline));
                    }
                    Err(why) => self.close(token, why),
                }
            }
            Command::Listen { listener, accept, connection } => {
                let token = self.insert(listener.into(), Kind::Listener(Listener { accept }), connection);
                self.watch(token, Readiness::Readable);
            }
        }
    }

    fn insert(&mut self, fd: OwnedFd, kind: Kind, connection: Connection) -> Token {
        let state = Arc::clone(connection.state());
        let entry = Entry {
            port: Port::new(fd),
            kind,
            connection,
            closing: None,
            due: None,
            queued: None,
            retry: None,
        };
        let token = self.table.insert(entry);
        state.placed(token);
        token
    }

    /// A connection is there: its stream begins.
    fn open(&mut self, token: Token) {
        self.ask(token, |entry, _| {
            let Kind::Stream(stream) = &mut entry.kind else { return Ok(()) };
            // A socket of another kind than TCP has nothing to say.
            if let Ok(in_use) = sockets::in_use(&socket2::SockRef::from(&entry.port.fd)) {
                entry.connection.state().describe(in_use);
            }
            stream.opened(&entry.connection);
            Ok(())
        });
        // It may have been closed before it was here.
        let closing = self.table.get(token).and_then(|entry| entry.state().heard().1);
        if let Some(why) = closing {
            self.close(token, why);
            return;
        }
        self.tick(token);
        self.pump(token);
    }

    // What streams want.

    /// Runs `what` for an entry that is not closing; an error closes it, so does a panic.
    fn ask(&mut self, token: Token, what: impl FnOnce(&mut Entry, Instant) -> Result<(), Close>) {
        let Some(entry) = self.table.get(token).filter(|entry| entry.closing.is_none()) else { return };
        let outcome = catch_unwind(AssertUnwindSafe(|| what(entry, self.now)));
        let outcome =
            outcome.unwrap_or_else(|panic| Err(Close::Panicked(message(panic.as_ref()).to_owned())));
        if let Err(why) = outcome {
            self.close(token, why);
        }
    }

    /// Begins what the stream wants and is not outstanding.
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
            Err(panic) => self.close(token, Close::Panicked(message(panic.as_ref()).to_owned())),
        }
    }

    fn tick(&mut self, token: Token) {
        let mut due = None;
        self.ask(token, |entry, now| {
            match &mut entry.kind {
                Kind::Stream(stream) => {
                    if let Some(bytes) = entry.port.look(now) {
                        stream.arriving(bytes);
                    }
                    due = stream.tick(now)?;
                }
                Kind::Connecting(connecting) if now >= connecting.deadline => {
                    return Err(connecting.failed(Errno::ETIMEDOUT));
                }
                Kind::Connecting(connecting) => due = Some(connecting.deadline),
                Kind::Listener(_) => {}
            }
            Ok(())
        });
        self.set_due(token, due);
    }

    // Time.

    fn set_due(&mut self, token: Token, due: Option<Instant>) {
        let Some(entry) = self.table.get(token) else { return };
        entry.due = due;
        self.queue_timer(token);
    }

    /// Sees to it that a timer is queued for what the entry waits for next.
    fn queue_timer(&mut self, token: Token) {
        let Some(entry) = self.table.get(token) else { return };
        let Some(next) = entry.due.into_iter().chain(entry.retry).min() else { return };
        if entry.queued.is_none_or(|queued| next < queued) {
            entry.queued = Some(next);
            self.timers.push(Reverse((next, token)));
        }
    }

    fn run_timers(&mut self) {
        while let Some(&Reverse((at, token))) = self.timers.peek()
            && at <= self.now
        {
            self.timers.pop();
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
            self.queue_timer(token);
        }
    }

    /// Tries again after [`MEMORY_PAUSE`] or [`PAUSE`].
    fn resume(&mut self, token: Token) {
        let driver = &mut self.driver;
        let Some(entry) = self.table.get(token) else { return };
        let port = &mut entry.port;
        let outcome = match &entry.kind {
            _ if entry.closing.is_some() => Ok(()),
            Kind::Listener(_) => driver.watch(token, port, Readiness::Readable),
            Kind::Connecting(_) => Ok(()),
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
            self.queue_timer(token);
        }
    }

    fn watch(&mut self, token: Token, readiness: Readiness) {
        let Some(entry) = self.table.get(token) else { return };
        if let Err(errno) = self.driver.watch(token, &mut entry.port, readiness) {
            self.close(token, socket("waiting for a socket", errno));
        }
    }

    // What came of it.

    fn complete(&mut self, done: Completion) {
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
                // If the peer is gone already, that is noticed when it is heard.
                let _ = socket2::SockRef::from(&entry.port.fd).shutdown(std::net::Shutdown::Write);
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
        let mut accepted = None;
        let mut connected = false;
        self.ask(token, |entry, _| {
            match &mut entry.kind {
                Kind::Listener(listener) => accepted = Some(listener.ready(&entry.port.fd)),
                Kind::Connecting(connecting) => {
                    connecting.outcome(&entry.port.fd)?;
                    connected = true;
                }
                Kind::Stream(_) => {}
            }
            Ok(())
        });
        match accepted {
            Some(Ok(())) => self.watch(token, Readiness::Readable),
            Some(Err(errno)) => {
                tracing::warn!(%errno, "no connection can be accepted for now");
                self.retry_after(token, PAUSE);
            }
            None => {}
        }
        if connected {
            self.connected(token);
        }
    }

    fn connected(&mut self, token: Token) {
        let Some(entry) = self.table.get(token) else { return };
        entry.due = None;
        // The entry is taken apart for a moment, as its stream changes place.
        let nobody = Kind::Stream(Box::new(super::stream::Nobody));
        if let Kind::Connecting(connecting) = std::mem::replace(&mut entry.kind, nobody) {
            entry.kind = Kind::Stream(connecting.stream);
        }
        self.open(token);
    }

    // The end.

    /// Ends an entry; the first reason counts.
    fn close(&mut self, token: Token, why: Close) {
        let Some(entry) = self.table.get(token).filter(|entry| entry.closing.is_none()) else { return };
        entry.closing = Some(why);
        entry.due = None;
        entry.retry = None;
        if let Err(errno) = self.driver.cancel(token, &mut entry.port) {
            // What is outstanding ends when the socket does, which is no later than the peer.
            tracing::error!(%errno, "an operation cannot be cancelled");
            let _ = socket2::SockRef::from(&entry.port.fd).shutdown(std::net::Shutdown::Both);
        }
        self.finish(token);
    }

    /// Lets go of a closing entry when nothing is outstanding.
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

fn farewell(kind: Kind, why: &Close) {
    let (Kind::Stream(mut stream) | Kind::Connecting(super::connect::Connecting { mut stream, .. })) = kind
    else {
        return;
    };
    let outcome = catch_unwind(AssertUnwindSafe(move || stream.closed(why)));
    if let Err(panic) = outcome {
        tracing::error!(panic = message(panic.as_ref()), "a stream panicked when it was closed");
    }
}

/// What comes when the thread ends: it is over before it began.
fn refuse(command: Command) {
    let (kind, connection) = match command {
        Command::Add { fd, stream, connection } => {
            drop(fd);
            (Kind::Stream(stream), connection)
        }
        Command::Connect { connecting, fd, connection } => {
            drop(fd);
            (Kind::Connecting(connecting), connection)
        }
        Command::Listen { accept, connection, .. } => (Kind::Listener(Listener { accept }), connection),
    };
    farewell(kind, &Close::ShutDown);
    connection.state().ended();
}

fn socket(doing: &'static str, errno: Errno) -> Close {
    Close::Socket { doing, errno }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
