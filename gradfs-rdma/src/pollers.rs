//! The threads of completion queues. Each runs a reactor's loop, and serves all queue pairs of its queue.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use parking_lot::Mutex;

use super::assigned::{Assigned, Expected};
use super::options::Polling;
use super::pump::Pump;
use super::queue_pair::QueuePair;
use super::verbs::Poller;
use modelio_base::transport::reactor::{Engine, Refused, StillRunning, ThreadState};
use modelio_base::transport::stream::{Close, Connection, Stream, errno};

struct Thread {
    state: Arc<ThreadState>,
    assigned: Arc<Assigned>,
    expected: Arc<Expected>,
    running: Mutex<Option<JoinHandle<()>>>,
}

/// The threads of completion queues.
pub(super) struct Pollers(Vec<Thread>);

impl Pollers {
    /// Starts a thread for each queue.
    ///
    /// # Errors
    /// When the system has none.
    pub(super) fn start(pollers: &[Arc<Poller>], polling: Polling, flags: bool) -> Result<Pollers, Errno> {
        let mut threads = Vec::with_capacity(pollers.len());
        for (number, poller) in pollers.iter().enumerate() {
            const LIMIT: usize = 16 << 10;
            let state = Arc::new(ThreadState::new(LIMIT)?);
            let (assigned, expected) = (Arc::<Assigned>::default(), Arc::<Expected>::default());
            let expecting = (Arc::clone(&assigned), Arc::clone(&expected));
            let driver = Pump::new(poller, expecting, Arc::clone(&state), polling, flags)?;
            let of_thread = Arc::clone(&state);
            let thread = std::thread::Builder::new().name(format!("rdma-{number}")).spawn(move || {
                if let Err(errno) = Engine::new(driver, of_thread).run() {
                    tracing::error!(%errno, "a thread of RDMA ended");
                }
            });
            let running = thread.map_err(|error| errno(&error))?;
            threads.push(Thread { state, assigned, expected, running: Mutex::new(Some(running)) });
        }
        Ok(Pollers(threads))
    }

    /// The queue pairs that the thread of a completion queue serves.
    pub(super) fn assigned(&self, number: usize) -> &Arc<Assigned> {
        &self.0[number % self.0.len()].assigned
    }

    /// Serves a queue pair that was entered before.
    ///
    /// # Errors
    /// [`Refused`]. Then only [`Stream::closed`] was called.
    pub(super) fn serve(
        &self,
        number: usize,
        queue_pair: &Arc<QueuePair>,
        stream: Box<dyn Stream>,
    ) -> Result<Connection, Refused> {
        let thread = &self.0[number % self.0.len()];
        let pair =
            UnixStream::pair().and_then(|(ours, said)| said.set_nonblocking(true).map(|()| (ours, said)));
        let (refused, mut stream) = match pair {
            Err(error) => (Refused::Socket(errno(&error)), stream),
            Ok((ours, said)) => {
                let fd = OwnedFd::from(ours);
                let known_by = fd.as_raw_fd();
                thread.expected.lock().insert(known_by, (Arc::clone(queue_pair), said));
                match thread.state.place_known(fd, stream, |connection| queue_pair.attach(connection)) {
                    Ok(connection) => return Ok(connection),
                    Err(unserved) => {
                        thread.expected.lock().remove(&known_by);
                        unserved
                    }
                }
            }
        };
        thread.assigned.leave(queue_pair);
        queue_pair.end();
        stream.closed(&Close::Asked(format!("RDMA: {refused}").into()));
        Err(refused)
    }

    /// Ends all connections and threads, within `patience`.
    ///
    /// # Errors
    /// The number of threads that did not end.
    pub(super) fn shut_down(&self, patience: Duration) -> Result<(), StillRunning> {
        let deadline = Instant::now() + patience;
        for thread in &self.0 {
            thread.state.post(|inbox| inbox.shut_down = Some(deadline));
        }
        let mut left = 0;
        for thread in &self.0 {
            let Some(running) = thread.running.lock().take() else { continue };
            if running.thread().id() == std::thread::current().id() {
                // The thread ends when it asks next.
                continue;
            }
            while !running.is_finished() && Instant::now() < deadline + Duration::from_millis(50) {
                std::thread::sleep(Duration::from_millis(1));
            }
            // The thread itself has caught and logged its panic.
            if running.is_finished() { drop(running.join()) } else { left += 1 }
        }
        if left == 0 { Ok(()) } else { Err(StillRunning(left)) }
    }
}

impl Drop for Pollers {
    fn drop(&mut self) {
        const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
        if let Err(error) = self.shut_down(SHUTDOWN_TIMEOUT) {
            tracing::error!(%error, "RDMA does not shut down");
        }
    }
}
