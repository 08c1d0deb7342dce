//! Streams over rings in shared memory: the third way of moving bytes, and the threads that do it.
//!
//! Each connection has a thread of its own, for whoever serves it works on memory that both ends see, and connections
//! are to do that side by side. It runs the loop that serves sockets, with a driver that copies to and from the rings
//! and sleeps until a bell rings. Whether the peer is still there the Unix socket tells.
//!
//! One of the modules that hold `unsafe`: slices that a stream has named are handed to the rings.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use parking_lot::{Condvar, Mutex};

use super::engine::{Driver, Engine};
use super::handle::{Command, Connection, ThreadState};
use super::memory::{ReceiveSlices, SendSlices};
use super::port::{Completion, Op, Phase, Port, Readiness, Table, Token};
use super::stream::{Close, Receive, Stream};
use crate::shm::{Broken, End, Meeting, Wants};

const WAKEUP: u64 = 0;
const BELL: u64 = 1;
const SOCKET: u64 = 2;

/// Moves bytes between one connection and its rings.
struct Rings {
    end: End,
    epoll: Epoll,
    thread: Arc<ThreadState>,
    token: Option<Token>,
    receiving: bool,
    sending: bool,
    /// The peer's socket has hung up: what is in the ring is the last.
    gone: bool,
}

impl Rings {
    fn new(end: End, socket: &OwnedFd, thread: Arc<ThreadState>) -> Result<Rings, Errno> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&thread.wakeup, EpollEvent::new(EpollFlags::EPOLLIN, WAKEUP))?;
        epoll.add(end.bell(), EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, BELL))?;
        // A hang-up is always reported. Descriptors that wait are no news.
        epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET, SOCKET))?;
        let (token, receiving, sending, gone) = (None, false, false, false);
        Ok(Rings { end, epoll, thread, token, receiving, sending, gone })
    }

    /// Whether something can be moved. A peer that breaks the rules is found out when it is.
    fn possible(&self) -> bool {
        let readable = self.receiving && (self.gone || self.end.readable() != Ok(0));
        readable || self.sending && (self.gone || self.end.room() != Ok(0))
    }

    fn receive_now(&mut self, into: &ReceiveSlices) -> Option<Result<usize, Errno>> {
        // SAFETY: the stream has named memory that is writable and the connection's until it hears of it.
        match unsafe { self.end.read(into.each()) } {
            Ok(0) if self.gone => Some(Ok(0)),
            Ok(0) => None,
            Ok(bytes) => Some(Ok(bytes)),
            Err(broken) => Some(Err(named(&broken))),
        }
    }

    fn send_now(&mut self, out: &SendSlices) -> Option<Result<usize, Errno>> {
        if self.gone {
            return Some(Err(Errno::EPIPE));
        }
        // SAFETY: the stream has named memory that stays readable until it hears of it.
        match unsafe { self.end.write(out.each()) } {
            Ok(0) => None,
            Ok(bytes) => Some(Ok(bytes)),
            Err(broken) => Some(Err(named(&broken))),
        }
    }

    fn progress(&mut self, table: &mut Table, done: &mut Vec<Completion>) {
        let Some(token) = self.token else { return };
        let Some(port) = table.get(token).map(|entry| &mut entry.port) else { return };
        if self.receiving
            && let Some(result) = self.receive_now(&port.receive)
        {
            self.receiving = false;
            port.receiving = Phase::Over;
            done.push(Completion { token, op: Op::Receive, result });
            if self.gone {
                // The peer's last words come before the failure to answer them.
                return;
            }
        }
        if self.sending
            && let Some(result) = self.send_now(&port.send)
        {
            self.sending = false;
            port.sending = Phase::Over;
            done.push(Completion { token, op: Op::Send, result });
        }
    }

    fn sleep(&mut self, timeout: Duration) -> Result<(), Errno> {
        // Rounded up, so that a timer is due when it wakes.
        let millis = timeout.as_nanos().div_ceil(1_000_000);
        let timeout = EpollTimeout::from(u16::try_from(millis).unwrap_or(u16::MAX));
        let mut events = [EpollEvent::empty(); 3];
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
                SOCKET => self.gone = true,
                _ => {}
            }
        }
        Ok(())
    }
}

fn named(broken: &Broken) -> Errno {
    tracing::warn!("rings in shared memory: {broken}");
    Errno::EPROTO
}

impl Driver for Rings {
    fn receive(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        (self.token, self.receiving) = (Some(token), true);
        port.receiving = Phase::Outstanding;
        Ok(())
    }

    fn send(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        (self.token, self.sending) = (Some(token), true);
        port.sending = Phase::Outstanding;
        Ok(())
    }

    fn watch(&mut self, _: Token, _: &mut Port, _: Readiness) -> Result<(), Errno> {
        // There is no socket to listen on or to connect.
        Err(Errno::EOPNOTSUPP)
    }

    fn cancel(&mut self, _: Token, port: &mut Port) -> Result<(), Errno> {
        (self.receiving, self.sending) = (false, false);
        (port.receiving, port.sending) = (Phase::Idle, Phase::Idle);
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
        self.progress(table, done);
        if !done.is_empty() || timeout.is_zero() {
            return Ok(());
        }
        self.end.wait(Wants { bytes: self.receiving, room: self.sending });
        let outcome = if self.possible() { Ok(()) } else { self.sleep(timeout) };
        self.end.awake();
        self.progress(table, done);
        outcome
    }
}

/// A stream that ends its thread when it is over.
struct Last {
    stream: Box<dyn Stream>,
    thread: Arc<ThreadState>,
}

impl Stream for Last {
    fn opened(&mut self, connection: &Connection) {
        self.stream.opened(connection);
    }

    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive {
        self.stream.receive(into)
    }

    fn arriving(&mut self, bytes: usize) {
        self.stream.arriving(bytes);
    }

    fn received(&mut self, bytes: usize) -> Result<(), Close> {
        self.stream.received(bytes)
    }

    fn transmit(&mut self, out: &mut SendSlices) {
        self.stream.transmit(out);
    }

    fn transmitted(&mut self, bytes: usize) -> Result<(), Close> {
        self.stream.transmitted(bytes)
    }

    fn is_finished(&self) -> bool {
        self.stream.is_finished()
    }

    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        self.stream.tick(now)
    }

    fn closed(&mut self, why: &Close) {
        self.thread.post(|inbox| inbox.shut_down = Some(Instant::now()));
        self.stream.closed(why);
    }
}

#[derive(Default)]
struct Inner {
    connections: Vec<Connection>,
    running: usize,
    over: bool,
}

/// The threads of connections over shared memory, each with one, up to a limit.
#[derive(Default)]
pub struct Threads {
    inner: Mutex<Inner>,
    ended: Condvar,
    limit: usize,
}

impl Threads {
    /// None yet, and never more than `limit`.
    pub fn new(limit: usize) -> Arc<Threads> {
        Arc::new(Threads { limit, ..Threads::default() })
    }

    /// Connections that are served just now.
    pub fn connections(&self) -> usize {
        self.inner.lock().connections.len()
    }

    /// Runs `work`, which finds a peer and then calls [`Self::serve`], on a thread of its own.
    ///
    /// # Errors
    /// When there are as many as there may be, or no more are wanted, or the system has none.
    pub fn spawn(self: &Arc<Self>, work: impl FnOnce(&Threads) + Send + 'static) -> io::Result<()> {
        {
            let mut inner = self.inner.lock();
            if inner.over {
                return Err(io::Error::other("the program shuts down"));
            }
            if inner.running >= self.limit {
                return Err(io::Error::other(format!("there are {} connections, the limit", self.limit)));
            }
            inner.running += 1;
        }
        let running = Running(Arc::clone(self));
        // If there is no thread, what would have run on it is dropped, and is not running any more.
        let spawned = std::thread::Builder::new().name("shm".into()).spawn(move || {
            let running = running;
            work(&running.0);
        });
        spawned.map(drop)
    }

    /// Serves a connection until it is over. Its stream is told of everything that happens to it, on this thread.
    pub fn serve(&self, meeting: Meeting, mut stream: Box<dyn Stream>) {
        let Meeting { end, socket } = meeting;
        let begun = ThreadState::new(1).and_then(|state| {
            let state = Arc::new(state);
            let rings = Rings::new(end, &socket, Arc::clone(&state))?;
            let of_port = socket.try_clone().map_err(|error| super::sockets::errno(&error))?;
            Ok((state, rings, of_port))
        });
        drop(socket);
        let (state, rings, fd) = match begun {
            Ok(begun) => begun,
            Err(errno) => return stream.closed(&Close::Socket { doing: "setting up rings", errno }),
        };
        let connection = Connection::new(&state);
        {
            let mut inner = self.inner.lock();
            if inner.over {
                drop(inner);
                return stream.closed(&Close::ShutDown);
            }
            inner.connections.push(connection.clone());
        }
        // It is the only one of its thread.
        let _ = state.reserve();
        let stream = Box::new(Last { stream, thread: Arc::clone(&state) });
        let of_command = connection.clone();
        state.post(|inbox| inbox.commands.push(Command::Add { fd, stream, connection: of_command }));
        if let Err(errno) = Engine::new(rings, state).run() {
            tracing::error!(%errno, "a connection over shared memory failed");
        }
        self.inner.lock().connections.retain(|other| !Arc::ptr_eq(other.state(), connection.state()));
    }

    /// Ends all connections, and waits for their threads, up to `patience`. There are no new ones.
    ///
    /// # Errors
    /// As many threads as did not end in time.
    pub fn shut_down(&self, patience: Duration) -> Result<(), super::StillRunning> {
        let deadline = Instant::now() + patience;
        let mut inner = self.inner.lock();
        inner.over = true;
        inner.connections.iter().for_each(|connection| connection.close(Close::ShutDown));
        while inner.running > 0 {
            if self.ended.wait_until(&mut inner, deadline).timed_out() {
                return Err(super::StillRunning(inner.running));
            }
        }
        Ok(())
    }
}

/// A thread that counts.
struct Running(Arc<Threads>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.inner.lock().running -= 1;
        self.0.ended.notify_all();
    }
}
