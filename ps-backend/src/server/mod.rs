//! A shard as a process: it listens, announces itself, holds partitions of models and coordinates some of them; it can
//! be the registry, too, or that alone.
//!
//! | module | holds |
//! |---|---|
//! | `partition` | one partition of a model at work (`unsafe`) |
//! | `coordinator` | the coordinator of a model at work |
//! | `mailbox` | what the two say to each other in one process |
//! | `conversation` | the shard's end of every connection |
//! | `unsent` | requests whose answers were not taken |
//! | `complaints` | how often the log tells of peers that are turned away |
//! | `fabric` | clients elsewhere, by RDMA (`unsafe`) |
//! | `memory` | clients on the same host, through shared memory (`unsafe`) |
//! | `moving` | a model's blocks on their way to other shards |
//! | `admin` | creating, loading and deleting models, status |
//! | `announcer` | what the registry is told again and again, and what it says to that |
//! | `table` | the registry in this process |

mod admin;
mod announcer;
mod complaints;
mod conversation;
pub mod coordinator;
#[cfg(feature = "rdma")]
mod fabric;
mod mailbox;
mod memory;
mod moving;
pub mod partition;
mod table;
mod unsent;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use libmodelio::registry::{Registry, RegistryError, RemoteRegistry};
use libmodelio::transport::frames::{Framed, Link};
use libmodelio::transport::rdma::{DeviceMemory, RdmaOptions};
use libmodelio::transport::reactor::{Choice, Handle, Reactor, ReactorOptions};
use libmodelio::transport::shm::Threads;
use libmodelio::transport::stream::Stream;
use libmodelio::transport::tcp::{self, SocketOptions};
use libmodelio::vocabulary::ids::{Generation, ShardId};
use libmodelio::wire::{Message, ModelRecord, Refusal};
use parking_lot::{Condvar, Mutex};

use announcer::Standing;
use conversation::Peer;
use coordinator::Coordinator;
pub use moving::Progress;
use moving::{Adoptions, Whereabouts};
use partition::Partition;
use table::{Local, Table};

/// What a process is to be.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Where it listens.
    pub listen: SocketAddr,
    /// The address by which others find it; `None` for the one that it listens on.
    pub advertise: Option<String>,
    /// The registry's address; `None` if this process is the registry.
    pub registry: Option<String>,
    /// It holds blocks; otherwise it is only the registry.
    pub holds_blocks: bool,
    /// Threads that move bytes, and as many that compute.
    pub threads: usize,
    /// By which way bytes are moved.
    pub io: Choice,
    /// Whether connections by RDMA are taken.
    pub rdma: RdmaUse,
    /// The port for them; `None` for the same number as the other one (with iWARP, any).
    pub rdma_port: Option<u16>,
    /// How RDMA is used.
    pub rdma_options: RdmaOptions,
    /// Memory of another device, such as a GPU, for payload that comes by RDMA; `None` for the host's. Versions, which
    /// are read, are in the host's in any case (iRDMA §IV-A).
    pub device_memory: Option<Arc<dyn DeviceMemory>>,
}

/// Whether a shard takes connections by RDMA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RdmaUse {
    /// No.
    Off,
    /// If there is a device. Why not, the log says: loudly only if there is one that cannot be used.
    #[default]
    Auto,
    /// Yes, or the shard does not start.
    On,
}

/// Why a process does not come about.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// The system's word.
        error: io::Error,
    },
    /// RDMA must be, and cannot.
    #[error("RDMA: {0}")]
    Rdma(String),
    /// No threads.
    #[error("cannot start threads: {0}")]
    Threads(String),
    /// The registry does not know this shard.
    #[error("the registry does not take this shard: {0}")]
    Registry(#[from] RegistryError),
}

/// Why a shard takes no connections by RDMA.
#[derive(Clone, Debug)]
struct NoRdma {
    why: String,
    /// It is to be expected that it does: there is a device.
    hindered: bool,
}

impl NoRdma {
    fn off() -> NoRdma {
        NoRdma { why: "it is switched off (--rdma off)".to_owned(), hindered: false }
    }
}

/// Longest silence on a connection.
const SILENCE: Duration = Duration::from_secs(10);
/// Longest wait for the registry.
const REGISTRY_PATIENCE: Duration = Duration::from_secs(5);

/// One model on this shard.
pub(super) struct Model {
    generation: Generation,
    record: ModelRecord,
    partition: Arc<Partition>,
    coordinator: Option<Arc<Coordinator>>,
    /// What is told to whoever speaks of an older block map, if there was one.
    whereabouts: Option<Whereabouts>,
}

/// What all connections of a process share.
pub(super) struct Shared {
    options: ServerOptions,
    address: String,
    shard: Mutex<ShardId>,
    net: Handle,
    pool: Arc<rayon::ThreadPool>,
    /// Connections through shared memory.
    memory: Arc<Threads>,
    /// Connections by RDMA.
    #[cfg(feature = "rdma")]
    rdma: OnceLock<fabric::Rdma>,
    /// Why there are none.
    no_rdma: OnceLock<NoRdma>,
    /// Where they come about.
    listening: Mutex<Option<memory::Listening>>,
    /// Why there are none.
    no_memory: OnceLock<String>,
    complaints: complaints::Log,
    models: Mutex<BTreeMap<String, Model>>,
    /// Models that are being made: their memory is being taken.
    making: Mutex<BTreeMap<Generation, admin::Making>>,
    /// Partitions under block maps that are to be.
    adopting: Adoptions,
    /// Models that were here, and where they are: the newest ones.
    gone: Mutex<VecDeque<(String, Whereabouts)>>,
    /// What is between this shard and the registry.
    standing: Mutex<Standing>,
    table: Option<Table>,
    elsewhere: Option<RemoteRegistry>,
    stopping: AtomicBool,
    wake: Condvar,
    asleep: Mutex<()>,
    this: Weak<Shared>,
}

/// A shard, or a registry, or both, as long as it lives.
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    reactor: Mutex<Option<Reactor>>,
}

impl Server {
    /// Listens and announces itself.
    ///
    /// # Errors
    /// [`ServerError`], within some seconds.
    pub fn start(options: ServerOptions) -> Result<Server, ServerError> {
        let threads = |error: &dyn std::fmt::Display| ServerError::Threads(error.to_string());
        let of_net =
            ReactorOptions { threads: options.threads, choice: options.io, ..ReactorOptions::default() };
        let reactor = Reactor::start(&of_net).map_err(|error| threads(&error))?;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(options.threads.max(2))
            .thread_name(|i| format!("reduce-{i}"))
            .build()
            .map_err(|error| threads(&error))?;
        let listen = options.listen;
        let listener = bind(listen).map_err(|error| ServerError::Listen { address: listen, error })?;
        let address =
            listener.local_addr().map_err(|error| ServerError::Listen { address: listen, error })?;
        let table = options.registry.is_none();
        let shared = Arc::new_cyclic(|this| Shared {
            shard: Mutex::new(ShardId(0)),
            net: reactor.handle(),
            pool: Arc::new(pool),
            memory: Threads::new(memory::MAX_CONNECTIONS),
            #[cfg(feature = "rdma")]
            rdma: OnceLock::new(),
            no_rdma: OnceLock::new(),
            listening: Mutex::new(None),
            no_memory: OnceLock::new(),
            complaints: complaints::Log::new(),
            models: Mutex::default(),
            making: Mutex::default(),
            adopting: Adoptions::default(),
            gone: Mutex::default(),
            standing: Mutex::default(),
            table: table.then(Table::new),
            elsewhere: options.registry.clone().map(RemoteRegistry::new),
            stopping: AtomicBool::new(false),
            wake: Condvar::new(),
            asleep: Mutex::new(()),
            this: this.clone(),
            address: options.advertise.clone().unwrap_or_else(|| address.to_string()),
            options,
        });
        if shared.options.holds_blocks {
            // Before anybody can know of it.
            match memory::Listening::start(&shared) {
                Ok(listening) => *shared.listening.lock() = Some(listening),
                Err(why) => {
                    tracing::warn!("clients on this host cannot share memory with this shard: {why}");
                    let _ = shared.no_memory.set(why);
                }
            }
            if let Err(no_rdma) = shared.start_rdma(address) {
                let NoRdma { why, hindered } = &no_rdma;
                match (shared.options.rdma, hindered) {
                    (RdmaUse::On, _) => return Err(ServerError::Rdma(why.clone())),
                    (_, true) => tracing::warn!("clients elsewhere cannot reach this shard by RDMA: {why}"),
                    (_, false) => tracing::debug!("no RDMA: {why}"),
                }
                let _ = shared.no_rdma.set(no_rdma);
            }
            shared.announce()?;
        }
        let of_factory = Arc::clone(&shared);
        let accept = move |peer: SocketAddr| -> Option<Box<dyn Stream>> {
            let link = Link::default();
            Some(Box::new(Framed::new(Peer::new(Arc::clone(&of_factory), peer), link, 128)))
        };
        let handle = reactor.handle();
        handle.listen(listener, SocketOptions::default(), accept).map_err(|error| threads(&error))?;
        if shared.options.holds_blocks {
            let keeper = Arc::downgrade(&shared);
            std::thread::Builder::new()
                .name("announcer".into())
                .spawn(move || announcer::run(&keeper))
                .map_err(|error| threads(&error))?;
        }
        Ok(Server { shared, address, reactor: Mutex::new(Some(reactor)) })
    }

    /// Where it listens; the port that was found, if 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its number; 0 if it holds no blocks.
    pub fn shard(&self) -> ShardId {
        *self.shared.shard.lock()
    }

    /// What it holds and does, as `gradfs status` shows it.
    pub fn status(&self) -> serde_json::Value {
        self.shared.status()
    }

    /// What moves the bytes, and why not io_uring, shared memory or a device that there is, to be named loudly.
    pub fn backend(&self) -> String {
        let backend = self.shared.net.backend();
        if !self.shared.options.holds_blocks {
            return backend.to_string();
        }
        let memory = match self.shared.no_memory.get() {
            None => "shm on this host".to_owned(),
            Some(why) => format!("no shm on this host: {why}"),
        };
        let rdma = match self.shared.rdma_name() {
            Ok(name) => format!("; {name}"),
            Err(Some(NoRdma { why, hindered: true })) => format!("; no rdma: {why}"),
            Err(_) => String::new(),
        };
        format!("{backend}; {memory}{rdma}")
    }

    /// Ends everything: clients hear that the shard goes.
    pub fn shut_down(&self) {
        let shared = &self.shared;
        shared.stopping.store(true, Ordering::Relaxed);
        shared.wake.notify_all();
        let models = std::mem::take(&mut *shared.models.lock());
        for model in models.into_values() {
            if let Some(coordinator) = model.coordinator {
                coordinator.stop(&Refusal::other("the shard shuts down"));
            }
        }
        // What was refused a number has no place there to be given up.
        if shared.options.holds_blocks && shared.why_not_listed().is_none() {
            let shard = *shared.shard.lock();
            if let Err(error) = shared.registry(|registry, deadline| registry.withdraw(shard, deadline)) {
                tracing::warn!(%error, "the registry was not told that the shard goes");
            }
        }
        if let Some(listening) = shared.listening.lock().take() {
            listening.end();
        }
        #[cfg(feature = "rdma")]
        if let Some(rdma) = shared.rdma.get() {
            rdma.shut_down(Duration::from_secs(2));
        }
        if let Err(error) = shared.memory.shut_down(Duration::from_secs(2)) {
            tracing::warn!(%error, "connections through shared memory");
        }
        if let Some(reactor) = self.reactor.lock().take()
            && let Err(error) = reactor.shut_down(Duration::from_secs(2))
        {
            tracing::warn!(%error, "connections");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.reactor.lock().is_some() {
            self.shut_down();
        }
    }
}

impl Shared {
    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Takes connections by RDMA, if that is wanted.
    #[cfg(feature = "rdma")]
    fn start_rdma(self: &Arc<Shared>, address: SocketAddr) -> Result<(), NoRdma> {
        use libmodelio::transport::rdma::verbs::VerbsError;
        if self.options.rdma == RdmaUse::Off {
            return Err(NoRdma::off());
        }
        let options = &self.options.rdma_options;
        let port = self.options.rdma_port;
        let started = fabric::Rdma::start(self, address, port, options, self.options.device_memory.clone())
            .map_err(|error| {
            // Whoever names a device expects one.
            let hindered = error != VerbsError::NoDevice || options.device.is_some();
            NoRdma { why: error.to_string(), hindered }
        })?;
        let _ = self.rdma.set(started);
        Ok(())
    }

    #[cfg(not(feature = "rdma"))]
    fn start_rdma(&self, _: SocketAddr) -> Result<(), NoRdma> {
        Err(match self.options.rdma {
            RdmaUse::Off => NoRdma::off(),
            RdmaUse::Auto | RdmaUse::On => {
                NoRdma { why: libmodelio::transport::NO_RDMA.to_owned(), hindered: false }
            }
        })
    }

    /// What takes connections by RDMA, for people; or why nothing does.
    fn rdma_name(&self) -> Result<String, Option<&NoRdma>> {
        #[cfg(feature = "rdma")]
        if let Some(rdma) = self.rdma.get() {
            return Ok(rdma.name());
        }
        Err(self.no_rdma.get())
    }

    /// RDMA in the status.
    fn rdma_status(&self) -> serde_json::Value {
        #[cfg(feature = "rdma")]
        if let Some(rdma) = self.rdma.get() {
            return serde_json::json!({
                "address": self.rdma_address(),
                "device": rdma.device(),
                "connections": rdma.connections(),
                "unavailable": null,
                "hindered": false,
            });
        }
        let no_rdma = self.no_rdma.get();
        serde_json::json!({
            "address": null,
            "device": null,
            "connections": 0,
            "unavailable": no_rdma.map(|no_rdma| &no_rdma.why),
            "hindered": no_rdma.is_some_and(|no_rdma| no_rdma.hindered),
        })
    }

    /// Where connections by RDMA are taken, for others; empty if they are not.
    fn rdma_address(&self) -> String {
        #[cfg(feature = "rdma")]
        if let Some(rdma) = self.rdma.get() {
            let host = self.address.rsplit_once(':').map_or(self.address.as_str(), |(host, _)| host);
            return format!("{host}:{}", rdma.address().port());
        }
        String::new()
    }

    /// Asks the registry, wherever it is.
    fn registry<T>(
        &self,
        ask: impl FnOnce(&dyn Registry, Instant) -> Result<T, RegistryError>,
    ) -> Result<T, RegistryError> {
        let deadline = Instant::now() + REGISTRY_PATIENCE;
        match (&self.table, &self.elsewhere) {
            (Some(table), _) => ask(&Local(table), deadline),
            (None, Some(remote)) => ask(remote, deadline),
            (None, None) => Err(RegistryError::Refused(Refusal::other("there is no registry"))),
        }
    }
}

/// Listens. The port of a process that was just killed may be taken for some moments more.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    const PATIENCE: Duration = Duration::from_secs(1);
    const PAUSE: Duration = Duration::from_millis(10);
    let until = Instant::now() + PATIENCE;
    loop {
        match tcp::bind(address, &SocketOptions::default()) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < until => {
                std::thread::sleep(PAUSE);
            }
            outcome => return outcome,
        }
    }
}

/// The first address that `text` (`host:port`) leads to.
///
/// # Errors
/// One line that says why there is none.
pub fn resolve(text: &str) -> Result<SocketAddr, String> {
    let mut found = text.to_socket_addrs().map_err(|error| format!("{text}: {error}"))?;
    found.next().ok_or_else(|| format!("{text} leads nowhere"))
}

/// What a request for administration is answered with.
pub(super) type AdminAnswer = Result<(Message, Option<Vec<u8>>), Refusal>;
