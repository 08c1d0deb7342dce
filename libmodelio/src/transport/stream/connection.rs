//! The handle of a served stream for other threads: a [`Connection`] wakes it and closes it.
//!
//! The thread that serves it is known here as a [`ServingThread`] only, so that nothing of this depends on how a
//! transport moves bytes. A connection has one wake-up queued at most.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::close::Close;
use super::in_use::InUse;

/// The thread that serves connections, as each of them knows it.
pub(in crate::transport) trait ServingThread: Send + Sync {
    /// Has the thread look at the connection, soon.
    fn wake(&self, connection: &Arc<ConnectionState>);

    /// A connection of the thread has become busy.
    fn becomes_busy(&self);

    /// A connection of the thread is over.
    fn lets_go(&self, was_busy: bool);
}

/// Names an entry of a thread's table, at most once in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::transport) struct Token {
    pub slot: u32,
    /// 24 bits are used.
    pub generation: u32,
}

/// One connection, for other threads. Cheap to clone. Dropping it closes nothing.
#[derive(Clone)]
pub struct Connection(Arc<ConnectionState>);

pub(in crate::transport) struct ConnectionState {
    thread: Arc<dyn ServingThread>,
    /// A wake-up is queued already.
    woken: AtomicBool,
    over: AtomicBool,
    /// The connection is known to be busy.
    busy: AtomicBool,
    in_use: OnceLock<InUse>,
    /// The requests of other threads, for the serving thread to take.
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
    pub(in crate::transport) fn new(thread: Arc<dyn ServingThread>) -> Connection {
        Connection(Arc::new(ConnectionState {
            thread,
            woken: AtomicBool::new(false),
            over: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            in_use: OnceLock::new(),
            asked: Mutex::default(),
        }))
    }

    pub(in crate::transport) fn state(&self) -> &Arc<ConnectionState> {
        &self.0
    }

    /// Whether both are the same connection.
    pub(crate) fn is(&self, other: &Connection) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Has the stream asked again for its next receive and send, soon and on its own thread. Costs no system
    /// call if that thread is awake, and almost nothing if the stream is to be asked anyway.
    pub fn wake(&self) {
        if !self.0.woken.swap(true, Ordering::AcqRel) {
            self.0.thread.wake(&self.0);
        }
    }

    /// Ends the connection, soon and on its own thread; the first reason counts. Bytes that are not yet with
    /// the kernel are not sent.
    pub fn close(&self, why: Close) {
        self.0.asked.lock().close.get_or_insert(why);
        self.wake();
    }

    /// Says that much is going to come over it, so that others like it are put on other threads. Before it is over.
    pub fn expect_much(&self) {
        if !self.0.busy.swap(true, Ordering::Relaxed) {
            self.0.thread.becomes_busy();
        }
    }

    /// A number that identifies the thread that serves it.
    pub fn thread(&self) -> usize {
        Arc::as_ptr(&self.0.thread).addr()
    }

    /// The settings of its socket, from when the stream is opened; `None` before, and for connections that
    /// are not TCP.
    pub fn in_use(&self) -> Option<&InUse> {
        self.0.in_use.get()
    }

    /// Whether its stream has been closed.
    pub fn is_closed(&self) -> bool {
        self.0.over.load(Ordering::Acquire)
    }
}

impl ConnectionState {
    /// The serving thread looks: further wake-ups are queued anew.
    pub fn requested(&self) -> (Option<Token>, Option<Close>) {
        // Reading the flag that a wake-up found set makes what was written before it seen from here on.
        self.woken.swap(false, Ordering::AcqRel);
        let mut asked = self.asked.lock();
        (asked.token, asked.close.take())
    }

    /// The socket is connected, and uses this.
    pub fn describe(&self, in_use: InUse) {
        self.in_use.get_or_init(|| in_use);
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
