//! The state that a serving thread shares with other threads: its inbox, and the number of its connections. Other
//! threads fill the inbox, and wake the serving thread by an eventfd, which is written only while that thread sleeps.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

use super::waiting::Kind;
use crate::transport::stream::{Connection, ConnectionState, ServingThread, Stream};

/// Why a thread does not take a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It has been shut down.
    #[error("the reactor is shut down")]
    ShutDown,
    /// It has as many connections as it may.
    #[error("a thread of the reactor has {0} connections already, its limit")]
    TooMany(usize),
    /// The socket cannot be made, or cannot be made non-blocking.
    #[error("the socket cannot be used: {0}")]
    Socket(Errno),
}

const AWAKE: u8 = 0;
const ASLEEP: u8 = 1;
const NOTIFIED: u8 = 2;

/// The state that a serving thread shares with other threads.
pub struct ThreadState {
    inbox: Mutex<Inbox>,
    sleep: AtomicU8,
    pub(super) wakeup: EventFd,
    /// The number of connections, with those that are being added.
    load: AtomicUsize,
    /// The number of busy connections.
    busy: AtomicUsize,
    limit: usize,
}

/// Requests that wait for the thread.
#[derive(Default)]
pub struct Inbox {
    pub arrivals: Vec<Arrival>,
    pub woken: Vec<Arc<ConnectionState>>,
    pub shut_down: Option<Instant>,
    /// The thread no longer reads the inbox.
    over: bool,
}

/// A descriptor for the thread to serve.
pub struct Arrival {
    /// The descriptor.
    pub fd: OwnedFd,
    /// Its use.
    pub kind: Kind,
    /// What other threads have of it.
    pub connection: Connection,
}

impl ThreadState {
    /// The state of a thread that serves up to `limit` connections.
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

    /// Changes the inbox, and wakes the thread. False if the thread has ended.
    pub fn post(&self, put: impl FnOnce(&mut Inbox)) -> bool {
        {
            let mut inbox = self.inbox.lock();
            if inbox.over {
                return false;
            }
            put(&mut inbox);
        }
        if self.sleep.swap(NOTIFIED, Ordering::SeqCst) == ASLEEP {
            // This cannot fail: the counter is far from full, as each sleep is ended once.
            let _ = self.wakeup.write(1);
        }
        true
    }

    /// Takes the waiting requests. `empty` becomes the new inbox, so nothing is allocated.
    pub fn take(&self, empty: &mut Inbox) {
        let mut inbox = self.inbox.lock();
        std::mem::swap(&mut inbox.arrivals, &mut empty.arrivals);
        std::mem::swap(&mut inbox.woken, &mut empty.woken);
        empty.shut_down = inbox.shut_down.take();
    }

    /// Announces that the thread sleeps. True if it may sleep, because nothing was posted since the last
    /// [`take`](Self::take). Later posts write the eventfd.
    pub fn fall_asleep(&self) -> bool {
        self.sleep.store(ASLEEP, Ordering::SeqCst);
        let inbox = self.inbox.lock();
        inbox.arrivals.is_empty() && inbox.woken.is_empty() && inbox.shut_down.is_none()
    }

    /// The thread is awake.
    pub fn wake_up(&self) {
        self.sleep.store(AWAKE, Ordering::SeqCst);
    }

    /// The thread ends. Returns the requests that came too late.
    pub fn end(&self) -> Inbox {
        std::mem::replace(&mut *self.inbox.lock(), Inbox { over: true, ..Inbox::default() })
    }

    /// Whether something was posted since the thread announced its sleep.
    pub fn is_notified(&self) -> bool {
        self.sleep.load(Ordering::SeqCst) == NOTIFIED
    }

    /// Reserves a place for a connection.
    pub fn reserve(&self) -> Result<(), Refused> {
        let reserved = self.load.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |load| {
            (load < self.limit).then_some(load + 1)
        });
        reserved.map(drop).map_err(|_| Refused::TooMany(self.limit))
    }

    /// The number of busy connections, and of all.
    pub fn load(&self) -> (usize, usize) {
        (self.busy.load(Ordering::Relaxed), self.load.load(Ordering::Relaxed))
    }

    /// A connection for the thread to serve. It has no place in the thread's table yet.
    pub fn connection(self: &Arc<ThreadState>) -> Connection {
        Connection::new(Arc::clone(self) as Arc<dyn ServingThread>)
    }

    /// Adds a descriptor for the thread to serve. A refused descriptor is dropped without a call.
    pub fn place(self: &Arc<ThreadState>, fd: OwnedFd, kind: Kind) -> Result<Connection, Refused> {
        self.reserve()?;
        let connection = self.connection();
        let arrival = Arrival { fd, kind, connection: connection.clone() };
        if self.post(|inbox| inbox.arrivals.push(arrival)) {
            Ok(connection)
        } else {
            connection.state().ended();
            Err(Refused::ShutDown)
        }
    }

    /// Adds a stream. `known` gets its connection before the thread has it. A refused stream is returned.
    pub fn place_known(
        self: &Arc<ThreadState>,
        fd: OwnedFd,
        stream: Box<dyn Stream>,
        known: impl FnOnce(&Connection),
    ) -> Result<Connection, (Refused, Box<dyn Stream>)> {
        if let Err(refused) = self.reserve() {
            return Err((refused, stream));
        }
        let connection = self.connection();
        known(&connection);
        let mut whole = Some((fd, stream));
        self.post(|inbox| {
            let added = whole.take();
            inbox.arrivals.extend(added.map(|(fd, stream)| {
                let connection = connection.clone();
                Arrival { fd, kind: Kind::Stream(stream), connection }
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
}

impl ServingThread for ThreadState {
    fn wake(&self, connection: &Arc<ConnectionState>) {
        self.post(|inbox| inbox.woken.push(Arc::clone(connection)));
    }

    fn sleeps(&self) -> bool {
        self.sleep.load(Ordering::Relaxed) == ASLEEP
    }

    fn becomes_busy(&self) {
        self.busy.fetch_add(1, Ordering::Relaxed);
    }

    fn lets_go(&self, was_busy: bool) {
        if was_busy {
            self.busy.fetch_sub(1, Ordering::Relaxed);
        }
        self.load.fetch_sub(1, Ordering::Relaxed);
    }
}
