//! What other threads hold of a reactor: [`Handle`] to add connections, [`Connection`] to wake or close one.
//! Wake-ups are coalesced twice: once a connection, and once a thread, by an eventfd that is written only when the
//! thread sleeps.

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

use super::backend::Backend;
use super::connect::Connecting;
use super::listen::Accept;
use super::port::Token;
use super::sockets::{InUse, SocketOptions};
use super::stream::{Close, Stream};

/// Which thread of a reactor serves a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thread {
    /// The one with the fewest busy ones, and of those the one with the fewest.
    Any,
    /// This one, modulo their number: connections that belong together can be on one thread, or apart.
    Number(usize),
}

/// Why a reactor does not take a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It has been shut down.
    #[error("the reactor is shut down")]
    ShutDown,
    /// Its thread has as many as it may.
    #[error("a thread of the reactor has {0} connections already, its limit")]
    TooMany(usize),
    /// The socket cannot be made non-blocking, or none can be made.
    #[error("the socket cannot be used: {0}")]
    Socket(Errno),
}

/// One connection of a reactor, for other threads. Cheap to clone. Dropping it closes nothing.
#[derive(Clone)]
pub struct Connection(Arc<ConnectionState>);

pub(super) struct ConnectionState {
    thread: Arc<ThreadState>,
    /// Set when its wake-up is queued already.
    woken: AtomicBool,
    over: AtomicBool,
    /// It is known to be busy.
    busy: AtomicBool,
    in_use: OnceLock<InUse>,
    /// What other threads ask for, and where the reactor's thread finds it.
    asked: Mutex<Asked>,
}

#[derive(Default)]
struct Asked {
    token: Option<Token>,
    close: Option<Close>,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("thread", &self.thread()).finish_non_exhaustive()
    }
}

impl Connection {
    /// Whether it is the same one.
    #[cfg(feature = "rdma")]
    pub(crate) fn is(&self, other: &Connection) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(super) fn new(thread: &Arc<ThreadState>) -> Connection {
        Connection(Arc::new(ConnectionState {
            thread: Arc::clone(thread),
            woken: AtomicBool::new(false),
            over: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            in_use: OnceLock::new(),
            asked: Mutex::default(),
        }))
    }

    pub(super) fn state(&self) -> &Arc<ConnectionState> {
        &self.0
    }

    /// Has the stream asked again for what it receives and transmits, soon and on its own thread. Costs no system
    /// call if that thread is awake, and almost nothing if the stream is to be asked anyway.
    pub fn wake(&self) {
        if !self.0.woken.swap(true, Ordering::AcqRel) {
            self.0.thread.post(|inbox| inbox.woken.push(Arc::clone(&self.0)));
        }
    }

    /// Ends the connection, soon and on its own thread; the first reason counts. What is not yet with the kernel is
    /// not sent.
    pub fn close(&self, why: Close) {
        self.0.asked.lock().close.get_or_insert(why);
        self.wake();
    }

    /// Says that much is going to come over it, so that others like it are put on other threads. Before it is over.
    pub fn expect_much(&self) {
        if !self.0.busy.swap(true, Ordering::Relaxed) {
            self.0.thread.busy.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A number for the thread that serves it, other than those of others.
    pub fn thread(&self) -> usize {
        Arc::as_ptr(&self.0.thread).addr()
    }

    /// What its socket uses, from when the stream is opened; `None` before, and for what is not TCP.
    pub fn in_use(&self) -> Option<&InUse> {
        self.0.in_use.get()
    }

    /// Whether its stream was told that it is closed.
    pub fn is_closed(&self) -> bool {
        self.0.over.load(Ordering::Acquire)
    }
}

impl ConnectionState {
    /// The reactor's thread looks: further wake-ups are queued anew.
    pub fn heard(&self) -> (Option<Token>, Option<Close>) {
        // Reading the flag that a wake-up found set makes what was written before it seen from here on.
        self.woken.swap(false, Ordering::AcqRel);
        let mut asked = self.asked.lock();
        (asked.token, asked.close.take())
    }

    pub fn describe(&self, in_use: InUse) {
        self.in_use.get_or_init(|| in_use);
    }

    pub fn placed(&self, token: Token) {
        self.asked.lock().token = Some(token);
    }

    pub fn ended(&self) {
        self.over.store(true, Ordering::Release);
        if self.busy.swap(false, Ordering::Relaxed) {
            self.thread.busy.fetch_sub(1, Ordering::Relaxed);
        }
        self.thread.load.fetch_sub(1, Ordering::Relaxed);
    }
}

const AWAKE: u8 = 0;
const ASLEEP: u8 = 1;
const NOTIFIED: u8 = 2;

/// What a reactor's thread shares with others.
pub(super) struct ThreadState {
    inbox: Mutex<Inbox>,
    sleep: AtomicU8,
    pub wakeup: EventFd,
    /// Connections, with those on their way here.
    load: AtomicUsize,
    /// Of them, those that are known to be busy.
    busy: AtomicUsize,
    limit: usize,
}

/// What waits for a reactor's thread.
#[derive(Default)]
pub(super) struct Inbox {
    pub commands: Vec<Command>,
    pub woken: Vec<Arc<ConnectionState>>,
    pub shut_down: Option<Instant>,
    /// Nobody looks any more.
    over: bool,
}

pub(super) enum Command {
    Add { fd: OwnedFd, stream: Box<dyn Stream>, connection: Connection },
    Connect { connecting: Connecting, fd: OwnedFd, connection: Connection },
    Listen { listener: TcpListener, accept: Accept, connection: Connection },
}

impl ThreadState {
    pub fn new(limit: usize) -> Result<ThreadState, Errno> {
        Ok(ThreadState {
            inbox: Mutex::default(),
            sleep: AtomicU8::new(AWAKE),
            wakeup: EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            load: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            limit,
        })
    }

    /// Changes the inbox and sees to it that the thread looks. False when nobody will.
    pub fn post(&self, put: impl FnOnce(&mut Inbox)) -> bool {
        {
            let mut inbox = self.inbox.lock();
            if inbox.over {
                return false;
            }
            put(&mut inbox);
        }
        if self.sleep.swap(NOTIFIED, Ordering::SeqCst) == ASLEEP {
            // It cannot fail: the counter is far from full, as each sleep is ended once.
            let _ = self.wakeup.write(1);
        }
        true
    }

    /// Takes what waits; `empty` is what the inbox is filled into next, so that nothing is allocated.
    pub fn take(&self, empty: &mut Inbox) {
        let mut inbox = self.inbox.lock();
        std::mem::swap(&mut inbox.commands, &mut empty.commands);
        std::mem::swap(&mut inbox.woken, &mut empty.woken);
        empty.shut_down = inbox.shut_down.take();
    }

    /// The thread is going to sleep: true if it may, as nothing was posted since the last [`take`](Self::take).
    /// What is posted later writes the eventfd.
    pub fn fall_asleep(&self) -> bool {
        self.sleep.store(ASLEEP, Ordering::SeqCst);
        let inbox = self.inbox.lock();
        inbox.commands.is_empty() && inbox.woken.is_empty() && inbox.shut_down.is_none()
    }

    pub fn wake_up(&self) {
        self.sleep.store(AWAKE, Ordering::SeqCst);
    }

    /// The thread ends: what came too late.
    pub fn end(&self) -> Inbox {
        std::mem::replace(&mut *self.inbox.lock(), Inbox { over: true, ..Inbox::default() })
    }

    /// Whether something was posted since the thread has said that it sleeps.
    #[cfg(feature = "rdma")]
    pub fn is_notified(&self) -> bool {
        self.sleep.load(Ordering::SeqCst) == NOTIFIED
    }

    /// Takes one of the places that there are.
    pub fn reserve(&self) -> Result<(), Refused> {
        let reserved = self.load.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |load| {
            (load < self.limit).then_some(load + 1)
        });
        reserved.map(drop).map_err(|_| Refused::TooMany(self.limit))
    }

    /// Busy connections, and all of them.
    pub fn load(&self) -> (usize, usize) {
        (self.busy.load(Ordering::Relaxed), self.load.load(Ordering::Relaxed))
    }

    fn place(
        self: &Arc<ThreadState>,
        command: impl FnOnce(Connection) -> Command,
    ) -> Result<Connection, Refused> {
        self.reserve()?;
        let connection = Connection::new(self);
        let command = command(connection.clone());
        if self.post(|inbox| inbox.commands.push(command)) {
            Ok(connection)
        } else {
            connection.state().ended();
            Err(Refused::ShutDown)
        }
    }
}

/// The threads of a reactor.
pub(super) type Threads = Arc<[Arc<ThreadState>]>;

pub(super) fn pick(threads: &Threads, at: Thread) -> &Arc<ThreadState> {
    match at {
        Thread::Number(number) => &threads[number % threads.len()],
        Thread::Any => threads.iter().min_by_key(|thread| thread.load()).expect("a reactor has a thread"),
    }
}

pub(super) fn add(
    threads: &Threads,
    fd: OwnedFd,
    stream: Box<dyn Stream>,
    at: Thread,
) -> Result<Connection, Refused> {
    pick(threads, at).place(|connection| Command::Add { fd, stream, connection })
}

/// Serves a connection on a thread of another kind than a reactor's. `known` hears of it before the thread does. If it
/// is refused, the stream comes back.
#[cfg(feature = "rdma")]
pub(super) fn place(
    thread: &Arc<ThreadState>,
    fd: OwnedFd,
    stream: Box<dyn Stream>,
    known: impl FnOnce(&Connection),
) -> Result<Connection, (Refused, Box<dyn Stream>)> {
    if let Err(refused) = thread.reserve() {
        return Err((refused, stream));
    }
    let connection = Connection::new(thread);
    known(&connection);
    let mut whole = Some((fd, stream));
    thread.post(|inbox| {
        let added = whole.take();
        inbox.commands.extend(added.map(|(fd, stream)| {
            let connection = connection.clone();
            Command::Add { fd, stream, connection }
        }));
    });
    match whole {
        None => Ok(connection),
        Some((_, stream)) => {
            connection.state().ended();
            Err((Refused::ShutDown, stream))
        }
    }
}

/// Adds connections to a reactor, from any thread. Cheap to clone; it does not keep the reactor going.
#[derive(Clone)]
pub struct Handle {
    pub(super) threads: Threads,
    pub(super) backend: Arc<Backend>,
}

impl Handle {
    /// What moves the bytes.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// How many threads there are.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Connections that there are, those on their way here and listeners included.
    pub fn connections(&self) -> usize {
        self.threads.iter().map(|thread| thread.load().1).sum()
    }

    /// Serves a connected stream socket. Its options are left as they are (see [`SocketOptions::apply`]), but for
    /// O_NONBLOCK, which is set.
    ///
    /// # Errors
    /// [`Refused`]; then the socket is closed and the stream dropped, without a call.
    pub fn add(
        &self,
        socket: impl Into<OwnedFd>,
        stream: Box<dyn Stream>,
        at: Thread,
    ) -> Result<Connection, Refused> {
        let fd = socket.into();
        nonblocking(&fd)?;
        add(&self.threads, fd, stream, at)
    }

    /// Connects, and then serves the connection. If none comes about before `deadline`, the stream's only call is
    /// [`Stream::closed`] with [`Close::Connect`].
    ///
    /// # Errors
    /// [`Refused`]; then the stream is dropped, without a call.
    pub fn connect(
        &self,
        address: SocketAddr,
        options: SocketOptions,
        deadline: Instant,
        stream: Box<dyn Stream>,
        at: Thread,
    ) -> Result<Connection, Refused> {
        let (connecting, fd) =
            Connecting::new(address, options, deadline, stream).map_err(Refused::Socket)?;
        pick(&self.threads, at).place(|connection| Command::Connect { connecting, fd, connection })
    }

    /// Accepts connections, with `options`, and serves what `factory` makes of them, each on a thread
    /// as of [`Thread::Any`]. `factory` is called on a thread of the reactor, with the peer's address; `None` hangs up.
    /// Closing the returned handle stops it.
    ///
    /// # Errors
    /// [`Refused`]; then the listener is closed.
    pub fn listen(
        &self,
        listener: TcpListener,
        options: SocketOptions,
        factory: impl FnMut(SocketAddr) -> Option<Box<dyn Stream>> + Send + 'static,
    ) -> Result<Connection, Refused> {
        listener.set_nonblocking(true).map_err(|err| Refused::Socket(super::sockets::errno(&err)))?;
        let accept = Accept { options, factory: Box::new(factory), threads: Arc::clone(&self.threads) };
        pick(&self.threads, Thread::Any).place(|connection| Command::Listen { listener, accept, connection })
    }
}

fn nonblocking(fd: &OwnedFd) -> Result<(), Refused> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = fcntl(fd, FcntlArg::F_GETFL).map_err(Refused::Socket)?;
    let flags = OFlag::from_bits_retain(flags) | OFlag::O_NONBLOCK;
    fcntl(fd, FcntlArg::F_SETFL(flags)).map(drop).map_err(Refused::Socket)
}
