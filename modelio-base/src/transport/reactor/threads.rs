//! A reactor: its threads, their start and their end.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use parking_lot::Mutex;

use super::backend::{Backend, Choice, NotUring};
use super::driver::Driver;
use super::engine::Engine;
use super::epoll::Poll;
use super::handle::Handle;
use super::inbox::ThreadState;
use super::uring::{self, Uring};

/// The longest time for a thread to set itself up.
const START: Duration = Duration::from_secs(10);
/// How long a dropped reactor waits for its threads.
const DROP: Duration = Duration::from_secs(5);

/// The options of a reactor.
#[derive(Clone, Debug)]
pub struct ReactorOptions {
    /// Threads are called `<name>-<number>`.
    pub name: String,
    /// The number of threads, at least one.
    pub threads: usize,
    /// The choice of a backend.
    pub choice: Choice,
    /// The most connections (and listeners) of one thread.
    pub connections_a_thread: usize,
}

impl Default for ReactorOptions {
    fn default() -> ReactorOptions {
        ReactorOptions {
            name: "net".to_owned(),
            threads: 1,
            choice: Choice::Auto,
            connections_a_thread: 4096,
        }
    }
}

/// Why a reactor does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// io_uring is required, and cannot be used.
    #[error("{0}; \"auto\" or \"poll\" would use plain sockets")]
    Backend(#[from] NotUring),
    /// Zero threads.
    #[error("a reactor needs 1 thread or more, not {0}")]
    Threads(usize),
    /// The system has no thread.
    #[error("cannot start a thread for the network: {0}")]
    Thread(#[source] io::Error),
}

/// The number of threads that did not end before the deadline. Their memory is leaked, because the kernel may still
/// use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} threads of the network did not end in time")]
pub struct StillRunning(pub usize);

impl Backend {
    /// Chooses a backend.
    ///
    /// # Errors
    /// Why io_uring cannot be used, if it is required.
    pub fn choose(choice: Choice) -> Result<Backend, NotUring> {
        match choice {
            Choice::Poll => Ok(Backend::Poll { because: NotUring::Configured }),
            Choice::Uring => uring::probe().map(|()| Backend::Uring),
            Choice::Auto => Ok(match uring::probe() {
                Ok(()) => Backend::Uring,
                Err(because) => Backend::Poll { because },
            }),
        }
    }
}

/// Threads that each drive many connections. Dropping it shuts it down.
pub struct Reactor {
    handle: Handle,
    threads: Mutex<Vec<RunningThreads>>,
}

struct RunningThreads {
    thread: JoinHandle<()>,
    /// Closed when the thread is about to end.
    alive: Receiver<()>,
}

impl Reactor {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`StartError`]; then none runs.
    pub fn start(options: &ReactorOptions) -> Result<Reactor, StartError> {
        if options.threads == 0 {
            return Err(StartError::Threads(0));
        }
        let backend = Backend::choose(options.choice)?;
        let may_poll = backend == Backend::Uring && options.choice == Choice::Auto;
        match Reactor::with(options, backend) {
            // The system may have a short ring for the test, and no long one.
            Err(StartError::Thread(error)) if may_poll => {
                let errno = Errno::from_raw(error.raw_os_error().unwrap_or(0));
                Reactor::with(options, Backend::Poll { because: NotUring::Failed(errno) })
            }
            outcome => outcome,
        }
    }

    fn with(options: &ReactorOptions, backend: Backend) -> Result<Reactor, StartError> {
        let backend = Arc::new(backend);
        let states =
            (0..options.threads).map(|_| ThreadState::new(options.connections_a_thread).map(Arc::new));
        let states: Vec<_> =
            states.collect::<Result<_, Errno>>().map_err(|errno| StartError::Thread(errno.into()))?;
        let handle = Handle { threads: states.into(), backend };
        let mut reactor = Reactor { handle: handle.clone(), threads: Mutex::default() };
        for (number, state) in handle.threads.iter().enumerate() {
            let name = format!("{}-{number}", options.name);
            // Dropping the unfinished reactor ends the threads before it.
            let running = start(name, &handle.backend, Arc::clone(state)).map_err(StartError::Thread)?;
            reactor.threads.get_mut().push(running);
        }
        Ok(reactor)
    }

    /// A handle that adds connections, from any thread.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// The backend. If it is not io_uring, the caller should log the reason.
    pub fn backend(&self) -> &Backend {
        self.handle.backend()
    }

    /// Closes all connections with [`Close::ShutDown`](crate::transport::stream::Close::ShutDown), waits until the
    /// kernel holds none of their memory, and joins the threads, for `patience` at most.
    ///
    /// # Errors
    /// [`StillRunning`] if a stream's callback does not return, for instance.
    pub fn shut_down(mut self, patience: Duration) -> Result<(), StillRunning> {
        self.end(patience)
    }

    fn end(&mut self, patience: Duration) -> Result<(), StillRunning> {
        let deadline = Instant::now() + patience;
        for state in self.handle.threads.iter() {
            state.post(|inbox| inbox.shut_down = Some(deadline));
        }
        let mut running = 0;
        for RunningThreads { thread, alive } in self.threads.get_mut().drain(..) {
            // The thread itself waits for a little less, so that it can report what is wrong.
            let left = deadline.saturating_duration_since(Instant::now()) + Duration::from_millis(50);
            match alive.recv_timeout(left) {
                Ok(()) | Err(RecvTimeoutError::Timeout) => running += 1,
                // The thread itself has caught and logged its panic.
                Err(RecvTimeoutError::Disconnected) => drop(thread.join()),
            }
        }
        if running == 0 { Ok(()) } else { Err(StillRunning(running)) }
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        if let Err(err) = self.end(DROP) {
            tracing::error!(%err, "the network does not shut down");
        }
    }
}

fn start(name: String, backend: &Backend, state: Arc<ThreadState>) -> io::Result<RunningThreads> {
    let (alive_sender, alive) = sync_channel(1);
    let (started_sender, started) = sync_channel(1);
    let uring = *backend == Backend::Uring;
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        // A ring belongs to the thread that has made it.
        let outcome = if uring {
            Uring::new(Arc::clone(&state))
                .and_then(|driver| ready(&started_sender, Engine::new(driver, state)))
        } else {
            Poll::new(Arc::clone(&state))
                .and_then(|driver| ready(&started_sender, Engine::new(driver, state)))
        };
        if let Err(errno) = outcome
            && started_sender.try_send(Err(errno)).is_err()
        {
            tracing::error!(%errno, "a thread of the network ended");
        }
        drop(alive_sender);
    })?;
    match started.recv_timeout(START) {
        Ok(Ok(())) => Ok(RunningThreads { thread, alive }),
        Ok(Err(errno)) => Err(errno.into()),
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Err(Errno::ETIMEDOUT.into()),
    }
}

fn ready<D: Driver>(started: &SyncSender<Result<(), Errno>>, engine: Engine<D>) -> Result<(), Errno> {
    // `start` waits for this, unless it has given up. Then the reactor is shut down.
    let _ = started.send(Ok(()));
    engine.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poll_needs_no_probe() {
        assert_eq!(Backend::choose(Choice::Poll), Ok(Backend::Poll { because: NotUring::Configured }));
    }
}
