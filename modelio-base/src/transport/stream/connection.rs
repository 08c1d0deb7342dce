//! The handle of a served stream for other threads: a [`Connection`] wakes it and closes it.
//!
//! This file knows the serving thread only as a [`ServingThread`], so it does not depend on how a transport moves
//! bytes. A connection has at most one queued wake-up.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::close::Close;
use super::in_use::InUse;
use super::traffic::{Traffic, traffic};

/// A thread that serves connections, as its connections know it.
pub trait ServingThread: Send + Sync {
    /// Has the thread handle the connection soon.
    fn wake(&self, connection: &Arc<ConnectionState>);

    /// Whether the thread sleeps at the moment.
    fn sleeps(&self) -> bool;

    /// A connection of the thread has become busy.
    fn becomes_busy(&self);

    /// A connection of the thread has ended.
    fn lets_go(&self, was_busy: bool);
}

/// Names an entry of a thread's table, at most once in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token {
    /// The place in the table.
    pub slot: u32,
    /// 24 bits are used.
    pub generation: u32,
}

/// A connection, for other threads. It is cheap to clone. Dropping it closes nothing.
#[derive(Clone)]
pub struct Connection(Arc<ConnectionState>);

/// What all handles of a connection and its thread share.
pub struct ConnectionState {
    thread: Arc<dyn ServingThread>,
    /// A wake-up is queued already.
    woken: AtomicBool,
    over: AtomicBool,
    /// The connection is known to be busy.
    busy: AtomicBool,
    in_use: OnceLock<InUse>,
    /// The socket, if the bytes of the stream go through one. The serving thread closes it.
    socket: OnceLock<Weak<OwnedFd>>,
    /// Requests of other threads to the serving thread.
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
    /// A connection that `thread` serves.
    pub fn new(thread: Arc<dyn ServingThread>) -> Connection {
        Connection(Arc::new(ConnectionState {
            thread,
            woken: AtomicBool::new(false),
            over: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            in_use: OnceLock::new(),
            socket: OnceLock::new(),
            asked: Mutex::default(),
        }))
    }

    /// What all its handles share.
    pub fn state(&self) -> &Arc<ConnectionState> {
        &self.0
    }

    /// Whether both are the same connection.
    pub fn is(&self, other: &Connection) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Asks the stream again for its next receive and send, soon and on its own thread. This needs no system call if
    /// that thread is awake, and costs almost nothing if the stream is about to be asked anyway.
    pub fn wake(&self) {
        if !self.0.woken.swap(true, Ordering::AcqRel) {
            self.0.thread.wake(&self.0);
        }
    }

    /// Ends the connection, soon and on its own thread. The first reason counts. Bytes that the kernel does not have
    /// yet are not sent.
    pub fn close(&self, why: Close) {
        self.0.asked.lock().close.get_or_insert(why);
        self.wake();
    }

    /// Announces much traffic, so that other such connections go to other threads. It must be called before the
    /// connection ends.
    pub fn expect_much(&self) {
        if !self.0.busy.swap(true, Ordering::Relaxed) {
            self.0.thread.becomes_busy();
        }
    }

    /// A number that identifies the thread that serves it.
    pub fn thread(&self) -> usize {
        Arc::as_ptr(&self.0.thread).addr()
    }

    /// The settings of its socket. `None` until the stream is opened, and for connections other than TCP.
    pub fn in_use(&self) -> Option<&InUse> {
        self.0.in_use.get()
    }

    /// How its bytes get on, if they go through TCP to another host.
    pub fn traffic(&self) -> Option<Traffic> {
        self.in_use().filter(|in_use| !in_use.same_host)?;
        traffic(&*self.0.socket.get()?.upgrade()?)
    }

    /// The socket that the stream's bytes go through, if the serving thread sleeps. That may end at any moment.
    pub fn resting_socket(&self) -> Option<Arc<OwnedFd>> {
        let socket = self.0.socket.get()?;
        if self.0.thread.sleeps() { socket.upgrade() } else { None }
    }

    /// Whether its stream has been closed.
    pub fn is_closed(&self) -> bool {
        self.0.over.load(Ordering::Acquire)
    }
}

impl ConnectionState {
    /// The requests of other threads. The serving thread calls this; later wake-ups are queued anew.
    pub fn requested(&self) -> (Option<Token>, Option<Close>) {
        // Clearing the flag that a wake-up has set makes everything visible that was written before the wake-up.
        self.woken.swap(false, Ordering::AcqRel);
        let mut asked = self.asked.lock();
        (asked.token, asked.close.take())
    }

    /// The socket is connected, with these settings.
    pub fn describe(&self, in_use: InUse) {
        self.in_use.get_or_init(|| in_use);
    }

    /// The stream's bytes go through this socket.
    pub fn goes_through(&self, socket: &Arc<OwnedFd>) {
        self.socket.get_or_init(|| Arc::downgrade(socket));
    }

    /// The serving thread has it in its table.
    pub fn placed(&self, token: Token) {
        self.asked.lock().token = Some(token);
    }

    /// Its stream has been closed.
    pub fn ended(&self) {
        self.over.store(true, Ordering::Release);
        self.thread.lets_go(self.busy.swap(false, Ordering::Relaxed));
    }
}
