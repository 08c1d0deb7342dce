//! A shard as a process. It listens, announces itself, holds partitions of models and coordinates some of them. It can
//! also be the registry, or only that.
//!
//! The table goes from low to high: a module uses only modules above it.
//!
//! | module | holds |
//! |---|---|
//! | `options` | options |
//! | `redirect` | the new places of models that have moved away |
//! | `standing` | a shard's standing with the registry |
//! | `table` | the registry in this process |
//! | `complaints` | a limit on log messages about refused peers |
//! | `unsent` | a limit on answers that a peer does not take |
//! | `origins` | limits on the connections of one address |
//! | `errands` | requests that take time, and limits on those of one address |
//! | `partition` | one partition of a model at work (`unsafe`) |
//! | `shm_clients` | clients on the same host, through shared memory (`unsafe`) |
//! | `rdma_clients` | clients elsewhere, by RDMA (`unsafe`) |
//! | `coordinator` | the coordinator of a model at work |
//! | `moving::incoming` | partitions for block maps that are not in force yet |
//! | `captures` | copies of versions, for snapshots |
//! | `saves` | how far what is being written into a store is |
//! | `schedules` | when snapshots are taken |
//! | `shared` | the common state of connections |
//! | `keeping` | what the registry must know if blocks are lost |
//! | `models` | finding, coordinating and deleting models |
//! | `peer_shard` | requests to another shard |
//! | `capturing` | snapshots of running models |
//! | `snapshots` | snapshots that shards write into a store |
//! | `moving` | moving a model's blocks to other shards |
//! | `admin` | creating and loading models, status |
//! | `conversation` | the shard's end of every connection |
//! | `listeners` | listeners for clients |
//! | `local` | a model whose client is in this process |
//! | `view` | a model whose versions are made of those of another one (`unsafe`) |
//! | `announcer` | announcements to the registry, and its answers |
//! | `restorer` | restoring models whose blocks are lost |
//!
//! A partition and the coordinator in its process never call each other. Their messages wait in a mailbox until the
//! sender has released its locks. Then the sender's thread delivers them.

mod admin;
mod announcer;
mod captures;
mod capturing;
mod complaints;
mod conversation;
pub mod coordinator;
mod directory;
mod errands;
mod fast_paths;
mod identity;
mod keeping;
mod listeners;
pub mod local;
mod models;
mod moving;
mod offers;
mod options;
mod origins;
pub mod partition;
mod parts;
mod peer_shard;
mod rdma_clients;
mod redirect;
mod restorer;
mod saves;
mod schedules;
mod shared;
mod shm_clients;
mod snapshots;
mod standing;
mod state_file;
mod status_text;
mod table;
mod unsent;
pub mod view;

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::transport::reactor::{Reactor, ReactorOptions};
use libmodelio::transport::tcp::{self, SocketOptions};
use libmodelio::vocabulary::ids::ShardId;
use libmodelio::wire::Refusal;
use parking_lot::Mutex;

pub use crate::moving::Progress;
use crate::partition::executor::Pool;
pub use options::{RdmaUse, ServerError, ServerOptions};
pub use snapshots::last::LastSnapshot;

use directory::Directory;
use fast_paths::FastPaths;
use identity::{Ending, Identity};
use shared::{Limits, Shared, Snapshots};
use shm_clients::Listening;

/// A shard, a registry, or both. Dropping it ends it.
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    reactor: Mutex<Option<Reactor>>,
    /// The listener for connections through shared memory.
    listening: Mutex<Option<Listening>>,
}

impl Server {
    /// Listens, and announces the shard.
    ///
    /// # Errors
    /// [`ServerError`], within some seconds.
    pub fn start(options: ServerOptions) -> Result<Server, ServerError> {
        let threads = |error: &dyn std::fmt::Display| ServerError::Threads(error.to_string());
        let of_net =
            ReactorOptions { threads: options.threads, choice: options.io, ..ReactorOptions::default() };
        let reactor = Reactor::start(&of_net).map_err(|error| threads(&error))?;
        let executor = Pool::start(options.threads.max(2), options.device.clone());
        let executor = executor.map_err(|error| threads(&error))?;
        let listen = options.listen;
        let listener = bind(listen).map_err(|error| ServerError::Listen { address: listen, error })?;
        let address =
            listener.local_addr().map_err(|error| ServerError::Listen { address: listen, error })?;
        let directory = Directory::of(&options)?;
        let shared = Arc::new_cyclic(|this| Shared {
            identity: Identity::new(options.advertise.clone().unwrap_or_else(|| address.to_string())),
            net: reactor.handle(),
            executor,
            fast: FastPaths::new(),
            limits: Limits::new(options.threads * of_net.connections_a_thread),
            models: Mutex::default(),
            creations: Mutex::default(),
            incoming: Default::default(),
            snapshots: Snapshots::at(options.snapshot_rate),
            gone: Default::default(),
            standing: Mutex::default(),
            directory,
            ending: Ending::default(),
            this: this.clone(),
            options,
        });
        let mut listening = None;
        if shared.options.holds_blocks {
            // The listener must exist before the shard is announced.
            listening = listeners::through_memory(&shared);
            listeners::by_rdma(&shared, address)?;
            announcer::announce(&shared)?;
        }
        listeners::over_tcp(&shared, listener)?;
        if shared.options.holds_blocks {
            let keeper = Arc::downgrade(&shared);
            std::thread::Builder::new()
                .name("announcer".into())
                .spawn(move || announcer::run(&keeper))
                .map_err(|error| threads(&error))?;
            let saver = Arc::downgrade(&shared);
            std::thread::Builder::new()
                .name("snapshots".into())
                .spawn(move || snapshots::periodic::run(&saver, moving::between_shards))
                .map_err(|error| threads(&error))?;
            let restorer = Arc::downgrade(&shared);
            std::thread::Builder::new()
                .name("restorer".into())
                .spawn(move || restorer::run(&restorer))
                .map_err(|error| threads(&error))?;
        }
        Ok(Server { shared, address, reactor: Mutex::new(Some(reactor)), listening: Mutex::new(listening) })
    }

    /// The listening address, with the port that was chosen.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The shard's number. 0 if it holds no blocks.
    pub fn shard(&self) -> ShardId {
        self.shared.identity.number()
    }

    /// Whether it has blocks of a model.
    pub fn holds_models(&self) -> bool {
        !self.shared.models.lock().is_empty()
    }

    /// Marks the shard in the registry, so that it takes no more models. Other shards that end as well move nothing here then.
    pub fn take_no_more(&self) {
        let shard = self.shard();
        let marked = self.shared.directory.ask(|registry, deadline| registry.drain(shard, deadline));
        if let Err(error) = marked {
            tracing::warn!(%error, "the registry does not hear that this shard takes no more models");
        }
    }

    /// Has the last snapshots of all models taken whose jobs have a store, before the shard ends.
    pub fn save_all(&self, within: Duration) -> Vec<LastSnapshot> {
        snapshots::last::save_all(&self.shared, moving::between_shards, within)
    }

    /// The status, as in `gradfs status`.
    pub fn status(&self) -> serde_json::Value {
        admin::status(&self.shared)
    }

    /// The backend that moves the bytes, with the reasons for doing without io_uring, shared memory or an existing
    /// device. The caller logs it.
    pub fn backend(&self) -> String {
        let backend = self.shared.net.backend();
        if !self.shared.options.holds_blocks {
            return backend.to_string();
        }
        format!("{backend}; {}", self.shared.fast.describe())
    }

    /// Shuts down. Clients get a message about that.
    pub fn shut_down(&self) {
        let shared = &self.shared;
        shared.ending.begin();
        let models = std::mem::take(&mut *shared.models.lock());
        for model in models.into_values() {
            if let Some(coordinator) = model.coordinator {
                coordinator.stop(&Refusal::other("the shard shuts down"));
            }
        }
        // A shard without a number has no place in the registry to give up.
        if shared.options.holds_blocks && shared.why_not_listed().is_none() {
            let shard = shared.identity.number();
            if let Err(error) = shared.directory.ask(|registry, deadline| registry.withdraw(shard, deadline))
            {
                tracing::warn!(%error, "the shard could not withdraw from the registry");
            }
        }
        if let Some(listening) = self.listening.lock().take() {
            listening.end();
        }
        shared.fast.shut_down(Duration::from_secs(2));
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

/// Listens. The port of a process that was just killed may be in use for some moments more.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    const BIND_TIMEOUT: Duration = Duration::from_secs(1);
    const BIND_PAUSE: Duration = Duration::from_millis(10);
    let until = Instant::now() + BIND_TIMEOUT;
    loop {
        match tcp::bind(address, &SocketOptions::default()) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < until => {
                std::thread::sleep(BIND_PAUSE);
            }
            outcome => return outcome,
        }
    }
}

/// The first address of `text` (`host:port`).
///
/// # Errors
/// One line that says why there is none.
pub fn resolve(text: &str) -> Result<SocketAddr, String> {
    let mut found = text.to_socket_addrs().map_err(|error| format!("{text}: {error}"))?;
    found.next().ok_or_else(|| format!("{text} leads nowhere"))
}
