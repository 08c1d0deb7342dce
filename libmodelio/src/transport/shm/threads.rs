//! The threads of connections over shared memory. Each connection has its own.
//!
//! Serving a connection means working on memory that both ends see, and connections should do that in parallel. A
//! thread runs the loop of a reactor with a driver that copies to and from the rings and sleeps until a bell rings.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::pump::Pump;
use super::setup::Meeting;
use crate::transport::reactor::{Arrival, Engine, Kind, StillRunning, ThreadState};
use crate::transport::stream::{Close, Connection, Receive, ReceiveSlices, SendSlices, Stream, errno};

/// A stream whose end also ends its thread.
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
    /// No threads yet, and never more than `limit`.
    pub fn new(limit: usize) -> Arc<Threads> {
        Arc::new(Threads { limit, ..Threads::default() })
    }

    /// The number of connections that are served.
    pub fn connections(&self) -> usize {
        self.inner.lock().connections.len()
    }

    /// Runs `work`, which finds a peer and then calls [`Self::serve`], on a thread of its own.
    ///
    /// # Errors
    /// When there are as many threads as there may be, after a shutdown, or when the system has no thread.
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
        let running = RunningThreads(Arc::clone(self));
        // Without a thread the closure is dropped, and no longer counts as running.
        let spawned = std::thread::Builder::new().name("shm".into()).spawn(move || {
            let running = running;
            work(&running.0);
        });
        spawned.map(drop)
    }

    /// Serves a connection until it ends. This thread makes all calls of its stream.
    pub fn serve(&self, meeting: Meeting, mut stream: Box<dyn Stream>) {
        let Meeting { end, socket } = meeting;
        let begun = ThreadState::new(1).and_then(|state| {
            let state = Arc::new(state);
            let pump = Pump::new(end, &socket, Arc::clone(&state))?;
            let of_port = socket.try_clone().map_err(|error| errno(&error))?;
            Ok((state, pump, of_port))
        });
        drop(socket);
        let (state, pump, fd) = match begun {
            Ok(begun) => begun,
            Err(errno) => return stream.closed(&Close::Socket { doing: "setting up rings", errno }),
        };
        let connection = state.connection();
        {
            let mut inner = self.inner.lock();
            if inner.over {
                drop(inner);
                return stream.closed(&Close::ShutDown);
            }
            inner.connections.push(connection.clone());
        }
        // The connection is the only one of its thread.
        let _ = state.reserve();
        let stream = Box::new(Last { stream, thread: Arc::clone(&state) });
        let arrival = Arrival { fd, kind: Kind::Stream(stream), connection: connection.clone() };
        state.post(|inbox| inbox.arrivals.push(arrival));
        if let Err(errno) = Engine::new(pump, state).run() {
            tracing::error!(%errno, "a connection over shared memory failed");
        }
        self.inner.lock().connections.retain(|other| !other.is(&connection));
    }

    /// Ends all connections, and waits for their threads, up to `patience`. Later connections are refused.
    ///
    /// # Errors
    /// The number of threads that did not end in time.
    pub fn shut_down(&self, patience: Duration) -> Result<(), StillRunning> {
        let deadline = Instant::now() + patience;
        let mut inner = self.inner.lock();
        inner.over = true;
        inner.connections.iter().for_each(|connection| connection.close(Close::ShutDown));
        while inner.running > 0 {
            if self.ended.wait_until(&mut inner, deadline).timed_out() {
                return Err(StillRunning(inner.running));
            }
        }
        Ok(())
    }
}

/// A thread that counts.
struct RunningThreads(Arc<Threads>);

impl Drop for RunningThreads {
    fn drop(&mut self) {
        self.0.inner.lock().running -= 1;
        self.0.ended.notify_all();
    }
}
