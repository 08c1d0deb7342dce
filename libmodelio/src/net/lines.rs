//! Streams over RDMA: the fourth way of moving bytes. A thread for each completion queue serves all lines whose work is
//! reported there, by the loop that serves sockets, with a driver that copies to and from rings.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use parking_lot::{Mutex, RwLock};

use super::engine::{Driver, Engine};
use super::handle::{Refused, ThreadState, place};
use super::port::{Completion, Op, Phase, Port, Readiness, Table, Token};
use super::stream::{Close, Stream};
use super::{Connection, StillRunning};
use crate::rdma::verbs::{Completion as News, Poller, VerbsError};
use crate::rdma::{Line, Polling};

const WAKEUP: u64 = u64::MAX;
const QUEUE: u64 = u64::MAX - 1;
/// How often flags are looked at that nobody rings a bell for, when nothing has happened for a while.
const LOOK: Duration = Duration::from_micros(200);
/// From so long after something has happened.
const RESTLESS: Duration = Duration::from_millis(20);

/// Lines that a thread serves, by the numbers of their queue pairs.
#[derive(Default)]
pub(crate) struct Lines(RwLock<HashMap<u32, Arc<Line>>>);

impl Lines {
    /// Its news are heard from now on.
    pub(crate) fn enter(&self, line: &Arc<Line>) {
        self.0.write().insert(line.number(), Arc::clone(line));
    }

    /// They are passed over.
    pub(crate) fn leave(&self, line: &Line) {
        self.0.write().remove(&line.number());
    }

    fn get(&self, number: u32) -> Option<Arc<Line>> {
        self.0.read().get(&number).cloned()
    }
}

/// What is expected of a thread: a line for each descriptor that stands for one.
type Expected = Mutex<HashMap<RawFd, (Arc<Line>, UnixStream)>>;

struct Thread {
    state: Arc<ThreadState>,
    lines: Arc<Lines>,
    expected: Arc<Expected>,
    running: Mutex<Option<JoinHandle<()>>>,
}

/// The threads of completion queues.
pub(crate) struct Pollers(Vec<Thread>);

/// One line at work.
struct Served {
    line: Arc<Line>,
    token: Token,
    receiving: bool,
    sending: bool,
    /// The peer was gone when the queue was last asked: what it has said before was heard then.
    gone: bool,
    /// The other end of what stands for its socket: closed when all is said.
    said: UnixStream,
    finished: Finished,
}

/// Whether a stream has said all, and its peer knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finished {
    Not,
    /// There was no room to tell.
    Untold,
    Told,
}

struct Moving {
    poller: Arc<Poller>,
    lines: Arc<Lines>,
    expected: Arc<Expected>,
    served: HashMap<u32, Served>,
    by_token: HashMap<Token, u32>,
    epoll: Epoll,
    thread: Arc<ThreadState>,
    polling: Polling,
    /// Peers write flags.
    flags: bool,
    news: Vec<News>,
    /// Something happened then.
    last: Instant,
    /// The queue tells nothing any more.
    lost: bool,
}

impl Pollers {
    /// Starts a thread for each queue.
    ///
    /// # Errors
    /// When the system has none.
    pub(crate) fn start(pollers: &[Arc<Poller>], polling: Polling, flags: bool) -> Result<Pollers, Errno> {
        let mut threads = Vec::with_capacity(pollers.len());
        for (number, poller) in pollers.iter().enumerate() {
            const LIMIT: usize = 16 << 10;
            let state = Arc::new(ThreadState::new(LIMIT)?);
            let (lines, expected) = (Arc::<Lines>::default(), Arc::<Expected>::default());
            let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
            epoll.add(&state.wakeup, EpollEvent::new(EpollFlags::EPOLLIN, WAKEUP))?;
            epoll.add(poller.as_ref().as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, QUEUE))?;
            let driver = Moving {
                poller: Arc::clone(poller),
                lines: Arc::clone(&lines),
                expected: Arc::clone(&expected),
                served: HashMap::new(),
                by_token: HashMap::new(),
                epoll,
                thread: Arc::clone(&state),
                polling,
                flags,
                news: Vec::with_capacity(64),
                last: Instant::now(),
                lost: false,
            };
            let of_thread = Arc::clone(&state);
            let thread = std::thread::Builder::new().name(format!("rdma-{number}")).spawn(move || {
                if let Err(errno) = Engine::new(driver, of_thread).run() {
                    tracing::error!(%errno, "a thread of RDMA ended");
                }
            });
            let running = thread.map_err(|error| super::sockets::errno(&error))?;
            threads.push(Thread { state, lines, expected, running: Mutex::new(Some(running)) });
        }
        Ok(Pollers(threads))
    }

    /// Where news of a queue's lines are heard.
    pub(crate) fn lines(&self, number: usize) -> &Arc<Lines> {
        &self.0[number % self.0.len()].lines
    }

    /// Serves a line, which was entered before.
    ///
    /// # Errors
    /// [`Refused`]; then the stream's only call was [`Stream::closed`].
    pub(crate) fn serve(
        &self,
        number: usize,
        line: &Arc<Line>,
        stream: Box<dyn Stream>,
    ) -> Result<Connection, Refused> {
        let thread = &self.0[number % self.0.len()];
        let pair =
            UnixStream::pair().and_then(|(ours, said)| said.set_nonblocking(true).map(|()| (ours, said)));
        let (refused, mut stream) = match pair {
            Err(error) => (Refused::Socket(super::sockets::errno(&error)), stream),
            Ok((ours, said)) => {
                let fd = OwnedFd::from(ours);
                let known_by = fd.as_raw_fd();
                thread.expected.lock().insert(known_by, (Arc::clone(line), said));
                match place(&thread.state, fd, stream, |connection| line.attach(connection)) {
                    Ok(connection) => return Ok(connection),
                    Err(unserved) => {
                        thread.expected.lock().remove(&known_by);
                        unserved
                    }
                }
            }
        };
        thread.lines.leave(line);
        line.end();
        stream.closed(&Close::Asked(format!("RDMA: {refused}").into()));
        Err(refused)
    }

    /// Ends all connections and the threads, up to `patience`.
    ///
    /// # Errors
    /// As many as did not end.
    pub(crate) fn shut_down(&self, patience: Duration) -> Result<(), StillRunning> {
        let deadline = Instant::now() + patience;
        for thread in &self.0 {
            thread.state.post(|inbox| inbox.shut_down = Some(deadline));
        }
        let mut left = 0;
        for thread in &self.0 {
            let Some(running) = thread.running.lock().take() else { continue };
            if running.thread().id() == std::thread::current().id() {
                // It ends when it is asked next.
                continue;
            }
            while !running.is_finished() && Instant::now() < deadline + Duration::from_millis(50) {
                std::thread::sleep(Duration::from_millis(1));
            }
            // A panic was caught and logged in the thread.
            if running.is_finished() { drop(running.join()) } else { left += 1 }
        }
        if left == 0 { Ok(()) } else { Err(StillRunning(left)) }
    }
}

impl Drop for Pollers {
    fn drop(&mut self) {
        const PATIENCE: Duration = Duration::from_secs(2);
        if let Err(error) = self.shut_down(PATIENCE) {
            tracing::error!(%error, "RDMA does not shut down");
        }
    }
}

impl Moving {
    /// The line of a connection, which is known from when it is first used.
    fn bind(&mut self, token: Token, port: &Port) -> Result<u32, Errno> {
        if self.lost {
            return Err(Errno::EIO);
        }
        if let Some(&number) = self.by_token.get(&token) {
            return Ok(number);
        }
        let (line, said) = self.expected.lock().remove(&port.fd.as_raw_fd()).ok_or(Errno::ENOTCONN)?;
        let number = line.number();
        self.epoll.add(&said, EpollEvent::new(EpollFlags::EPOLLRDHUP, u64::from(number)))?;
        self.by_token.insert(token, number);
        let [receiving, sending, gone] = [false; 3];
        let served = Served { line, token, receiving, sending, gone, said, finished: Finished::Not };
        self.served.insert(number, served);
        Ok(number)
    }

    /// The queue fails: all that is served by it ends, and what is to be, at once. Others of the process go on.
    fn lose(&mut self, error: &VerbsError) {
        if std::mem::replace(&mut self.lost, true) {
            return;
        }
        tracing::error!(%error, "a completion queue is lost: its connections end, and new ones on it until a restart");
        // What it has to tell nobody asks for any more.
        let _ = self.epoll.delete(self.poller.as_ref().as_fd());
        for served in self.served.values() {
            served.line.break_off(format!("a completion queue is lost: {error}"));
        }
    }

    /// Takes what the queue has. True if there was something.
    fn hear(&mut self) -> bool {
        let mut any = false;
        self.served.values_mut().for_each(|served| served.gone = served.line.is_gone());
        if self.lost {
            return any;
        }
        loop {
            let more = match self.poller.poll(&mut self.news) {
                Ok(more) => more,
                Err(error) => {
                    self.lose(&error);
                    return true;
                }
            };
            any |= !self.news.is_empty();
            for news in self.news.drain(..) {
                if news.is_receive()
                    && let Err(error) = self.poller.wait_for_another()
                {
                    tracing::error!(%error, "a message less is waited for by RDMA");
                }
                let Some(line) = news.pair().and_then(|pair| self.lines.get(pair)) else { continue };
                match line.hear(news) {
                    Ok(true) => {
                        if let Some(connection) = line.connection() {
                            connection.wake();
                        }
                    }
                    Ok(false) => {}
                    Err(why) => line.break_off(why),
                }
            }
            if !more {
                break;
            }
        }
        if self.flags {
            let looked: Vec<(Arc<Line>, String)> = self
                .served
                .values()
                .filter_map(|served| Some((Arc::clone(&served.line), served.line.look().err()?)))
                .collect();
            for (line, why) in looked {
                line.break_off(why);
            }
        }
        if any {
            self.last = Instant::now();
        }
        any
    }

    fn progress(&mut self, table: &mut Table, done: &mut Vec<Completion>) {
        for served in self.served.values_mut() {
            let token = served.token;
            let Some(port) = table.get(token).map(|entry| &mut entry.port) else { continue };
            let failed = |error: &dyn std::fmt::Display| {
                tracing::debug!(%error, "an RDMA connection is over");
                Errno::ECONNRESET
            };
            if served.line.owes()
                && let Err(error) = served.line.acknowledge()
            {
                tracing::debug!(%error, "an RDMA connection is over");
            }
            if served.finished == Finished::Untold {
                served.finish();
            }
            if served.receiving {
                let result = match served.line.receive(&port.receive, served.gone) {
                    Ok(None) => None,
                    Ok(Some(bytes)) => Some(Ok(bytes)),
                    Err(error) => Some(Err(failed(&error))),
                };
                if let Some(result) = result {
                    served.receiving = false;
                    port.receiving = Phase::Over;
                    done.push(Completion { token, op: Op::Receive, result });
                }
            }
            if served.sending {
                let result = match served.line.send(&port.send, served.receiving, served.gone) {
                    Ok(None) => None,
                    Ok(Some(bytes)) => Some(Ok(bytes)),
                    Err(error) => Some(Err(failed(&error))),
                };
                if let Some(result) = result {
                    served.sending = false;
                    port.sending = Phase::Over;
                    done.push(Completion { token, op: Op::Send, result });
                }
            }
        }
        if !done.is_empty() {
            self.last = Instant::now();
        }
    }

    fn possible(&self) -> bool {
        self.served.values().any(|served| served.line.possible(served.receiving, served.sending, served.gone))
    }

    fn sleep(&mut self, timeout: Duration) -> Result<(), Errno> {
        let millis = timeout.as_nanos().div_ceil(1_000_000);
        let timeout = EpollTimeout::from(u16::try_from(millis).unwrap_or(u16::MAX));
        self.rest(timeout)
    }

    fn rest(&mut self, timeout: EpollTimeout) -> Result<(), Errno> {
        let mut events = [EpollEvent::empty(); 16];
        let count = match self.epoll.wait(&mut events, timeout) {
            Ok(count) => count,
            Err(Errno::EINTR) => 0,
            Err(errno) => return Err(errno),
        };
        for event in &events[..count] {
            match event.data() {
                WAKEUP => match self.thread.wakeup.read() {
                    Ok(_) | Err(Errno::EAGAIN | Errno::EINTR) => {}
                    Err(errno) => return Err(errno),
                },
                QUEUE if event.events().intersects(EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP) => {
                    self.lose(&VerbsError::Broken("its device is gone".into()));
                }
                QUEUE => self.poller.disarm(),
                number => self.said(number as u32),
            }
        }
        Ok(())
    }

    /// A stream has said all.
    fn said(&mut self, number: u32) {
        let Some(served) = self.served.get_mut(&number) else { return };
        if served.finished == Finished::Not {
            // It is reported as long as it is watched.
            let _ = self.epoll.delete(&served.said);
            served.finish();
        }
    }
}

impl Served {
    /// Tells the peer that all is said.
    fn finish(&mut self) {
        self.finished = match self.line.finish() {
            Ok(true) => Finished::Told,
            Ok(false) => Finished::Untold,
            Err(error) => {
                tracing::debug!(%error, "an RDMA connection ended before its end was said");
                Finished::Told
            }
        };
    }
}

impl Driver for Moving {
    fn receive(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        let number = self.bind(token, port)?;
        if let Some(served) = self.served.get_mut(&number) {
            served.receiving = true;
        }
        port.receiving = Phase::Outstanding;
        Ok(())
    }

    fn send(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        let number = self.bind(token, port)?;
        if let Some(served) = self.served.get_mut(&number) {
            served.sending = true;
        }
        port.sending = Phase::Outstanding;
        Ok(())
    }

    fn watch(&mut self, _: Token, _: &mut Port, _: Readiness) -> Result<(), Errno> {
        // There is no socket to listen on or to connect.
        Err(Errno::EOPNOTSUPP)
    }

    fn cancel(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        (port.receiving, port.sending) = (Phase::Idle, Phase::Idle);
        // It may not have got as far as to be bound.
        if let Some((line, _)) = self.expected.lock().remove(&port.fd.as_raw_fd()) {
            self.lines.leave(&line);
            line.end();
        }
        if let Some(served) = self.by_token.remove(&token).and_then(|number| self.served.remove(&number)) {
            let _ = self.epoll.delete(&served.said);
            self.lines.leave(&served.line);
            served.line.end();
        }
        Ok(())
    }

    fn ready(&self) -> bool {
        self.possible()
    }

    fn wait(
        &mut self,
        table: &mut Table,
        done: &mut Vec<Completion>,
        timeout: Duration,
    ) -> Result<(), Errno> {
        self.hear();
        self.progress(table, done);
        if !done.is_empty() || timeout.is_zero() {
            // What was said is looked for now and then, even if there is always something to do.
            return if self.served.is_empty() { Ok(()) } else { self.rest(EpollTimeout::ZERO) };
        }
        let until = Instant::now() + timeout;
        let spins = match self.polling {
            Polling::Busy => timeout,
            Polling::Adaptive(time) => {
                (self.last + time).saturating_duration_since(Instant::now()).min(timeout)
            }
            Polling::Event => Duration::ZERO,
        };
        let spun = Instant::now() + spins;
        let mut rested = Instant::now();
        loop {
            let now = Instant::now();
            if now >= spun || self.hear() || self.possible() || self.thread.is_notified() {
                break;
            }
            if now.duration_since(rested) >= LOOK {
                // What streams have said is told by nobody else.
                self.rest(EpollTimeout::ZERO)?;
                rested = now;
            }
            std::hint::spin_loop();
        }
        if !self.possible()
            && !self.thread.is_notified()
            && Instant::now() < until
            && self.polling != Polling::Busy
        {
            if !self.lost
                && let Err(error) = self.poller.arm()
            {
                self.lose(&error);
            }
            // What was done before it was armed rings no bell.
            if !self.hear() && !self.possible() {
                let left = until.saturating_duration_since(Instant::now());
                if self.flags && !self.served.is_empty() {
                    // Nobody rings a bell for a flag.
                    let pause = if self.last.elapsed() < RESTLESS { LOOK } else { 5 * LOOK };
                    std::thread::sleep(pause.min(left));
                    self.rest(EpollTimeout::ZERO)?;
                } else {
                    self.sleep(left)?;
                }
                self.hear();
            }
        } else {
            self.rest(EpollTimeout::ZERO)?;
        }
        self.progress(table, done);
        Ok(())
    }
}
