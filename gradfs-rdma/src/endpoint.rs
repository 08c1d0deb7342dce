//! An RDMA endpoint: a device in use. One thread makes its connections, accepts them, and notices their ends. The
//! callers name the streams that are served on them.
//!
//! | module | holds |
//! |---|---|
//! | `requests` | requests to the thread |
//! | `state` | the stages of making a connection |
//! | `maker` | making a connection; `offer` has the data of both ends |
//! | `manager` | the thread |

mod maker;
mod manager;
mod requests;
mod state;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

use super::device::Device;
use super::options::RdmaOptions;
use super::pollers::Pollers;
use super::queue_pair::QueuePair;
use super::verbs::{CmChannel, Notify, VerbsError};
use maker::{Maker, PORTS};
use manager::Manager;
use modelio_base::transport::stream::Stream;
use requests::{Command, Shared, Wish};

/// A device with all of its connections.
pub struct Endpoint {
    device: Arc<Device>,
    pollers: Arc<Pollers>,
    shared: Shared,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Endpoint {
    /// Opens the device and starts its threads. Peers must speak the same `protocol` in their frames.
    ///
    /// # Errors
    /// [`VerbsError`], which says what is missing.
    pub fn open(options: &RdmaOptions, protocol: u16) -> Result<Arc<Endpoint>, VerbsError> {
        Endpoint::over(Device::open(options)?, protocol)
    }

    /// Like [`Self::open`], over an open device.
    ///
    /// # Errors
    /// [`VerbsError`], which says what is missing.
    pub fn over(device: Arc<Device>, protocol: u16) -> Result<Arc<Endpoint>, VerbsError> {
        let start = |errno| VerbsError::Call { doing: "starting threads for RDMA", errno };
        let flags = device.notify() == Notify::Flag;
        let pollers =
            Arc::new(Pollers::start(device.pollers(), device.options().polling, flags).map_err(start)?);
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let (sender, commands) = channel();
        let shared = Shared {
            commands: Arc::new(Mutex::new(Some(sender))),
            wake: Arc::new(wake.map_err(start)?),
            over: Arc::new(AtomicBool::new(false)),
            connections: Arc::new(AtomicUsize::new(0)),
        };
        let maker = Maker::new(Arc::clone(&device), Arc::clone(&pollers), CmChannel::new()?, protocol);
        let manager = Manager::new(maker, &shared, commands);
        let thread = std::thread::Builder::new().name("rdma-cm".into()).spawn(move || manager.run());
        let thread =
            thread.map_err(|error| start(Errno::from_raw(error.raw_os_error().unwrap_or(libc::EAGAIN))))?;
        Ok(Arc::new(Endpoint { device, pollers, shared, thread: Mutex::new(Some(thread)) }))
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The number of connections.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    fn command(&self, command: Command) {
        let refused = match &*self.shared.commands.lock() {
            Some(sender) => sender.send(command).err().map(|unsent| unsent.0),
            None => Some(command),
        };
        match refused {
            Some(command) => command.refuse(),
            None => drop(self.shared.wake.write(1)),
        }
    }

    /// Listens for connections. `accept` returns the stream to serve on each, or `None` to hang up. Returns the
    /// address, with the port that was chosen.
    ///
    /// # Errors
    /// [`VerbsError`].
    pub fn listen(
        &self,
        at: SocketAddr,
        accept: impl FnMut(&Arc<QueuePair>, Option<SocketAddr>) -> Option<Box<dyn Stream>> + Send + 'static,
    ) -> Result<SocketAddr, VerbsError> {
        const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
        let (answer, answered) = channel();
        self.command(Command::Listen { at, accept: Box::new(accept), answer });
        answered
            .recv_timeout(ANSWER_TIMEOUT)
            .map_err(|_| VerbsError::Broken("RDMA does not answer".into()))?
    }

    /// Connects to a peer. `then` is called once, on a thread that must not be blocked. It gets the queue pair and
    /// returns the stream to serve on it, or gets the error, soon after `deadline` at the latest. `number` selects
    /// the completion queue whose thread serves the connection.
    pub fn connect(
        &self,
        to: SocketAddr,
        deadline: Instant,
        number: usize,
        then: impl FnOnce(Result<&Arc<QueuePair>, String>) -> Option<Box<dyn Stream>> + Send + 'static,
    ) {
        self.command(Command::Connect(Wish { to, deadline, number, ports: PORTS, then: Box::new(then) }));
    }

    /// Ends all connections and threads. A call on one of these threads does not wait for that thread.
    pub fn shut_down(&self, patience: Duration) {
        self.shared.over.store(true, Ordering::Release);
        let _ = self.shared.wake.write(1);
        if let Err(error) = self.pollers.shut_down(patience) {
            tracing::warn!(%error, "RDMA");
        }
        let Some(thread) = self.thread.lock().take() else { return };
        if thread.thread().id() == std::thread::current().id() {
            return;
        }
        let deadline = Instant::now() + patience;
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        if !thread.is_finished() {
            tracing::error!("the thread of RDMA connections does not end");
        } else if thread.join().is_err() {
            tracing::error!("the thread of RDMA connections panicked");
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
        self.shut_down(SHUTDOWN_TIMEOUT);
    }
}
