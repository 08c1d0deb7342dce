//! The common state of a shard's connections: its models, its connections to other shards, and its standing with the
//! registry.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use libmodelio::registry::{Registry, RegistryError, RemoteRegistry};
use libmodelio::transport::reactor::Handle;
use libmodelio::transport::shm::Threads;
use libmodelio::vocabulary::ids::{Generation, ShardId};
use libmodelio::wire::{Fate, Message, ModelRecord, Refusal, RegistryRequest};
use parking_lot::{Condvar, Mutex};

use super::captures::Captures;
use super::complaints::Log;
use super::coordinator::Coordinator;
use super::errands::Errands;
use super::moving::IncomingPartitions;
use super::options::{NoRdma, ServerOptions};
use super::origins::{Origin, Origins};
use super::partition::{Partition, PartitionOptions};
#[cfg(feature = "rdma")]
use super::rdma_clients::Rdma;
use super::redirect::{Gone, Redirect};
use super::standing::{Standing, life};
use super::status_text::StatusText;
use super::table::{Local, Table};
use super::unsent::AdminAnswer;
use crate::core::JobRecord;
use crate::partition::executor::Executor;

/// The longest wait for the registry.
const REGISTRY_PATIENCE: Duration = Duration::from_secs(5);

/// One model on this shard.
pub(super) struct Model {
    pub generation: Generation,
    pub record: ModelRecord,
    pub partition: Arc<Partition>,
    pub coordinator: Option<Arc<Coordinator>>,
    /// The redirect for peers with an older block map.
    pub redirect: Option<Redirect>,
    /// The record that its job begins with. None once the job has begun.
    pub begins: Option<JobRecord>,
}

/// A partition that is being created.
#[derive(Debug)]
pub(super) struct Creation {
    pub name: String,
    /// The model was deleted meanwhile, so the partition is not wanted.
    pub deleted: bool,
}

/// The limits on what peers may take and say.
pub(super) struct Limits {
    pub complaints: Log,
    pub origins: Arc<Origins>,
    pub errands: Arc<Errands>,
    pub status: StatusText,
}

impl Limits {
    /// Limits for a process that can have so many connections.
    pub(super) fn new(places: usize) -> Limits {
        let (origins, errands) = (Origins::new(places), Errands::new());
        Limits { complaints: Log::new(), origins, errands, status: StatusText::default() }
    }
}

/// The common state of a process's connections.
pub(super) struct Shared {
    pub options: ServerOptions,
    pub address: String,
    pub shard: Mutex<ShardId>,
    pub net: Handle,
    pub executor: Arc<dyn Executor>,
    /// Connections through shared memory.
    pub memory: Arc<Threads>,
    /// Connections by RDMA.
    #[cfg(feature = "rdma")]
    pub rdma: OnceLock<Rdma>,
    /// Why there are no connections by RDMA.
    pub no_rdma: OnceLock<NoRdma>,
    /// Why there are no connections through shared memory.
    pub no_memory: OnceLock<String>,
    pub limits: Limits,
    pub models: Mutex<BTreeMap<String, Model>>,
    /// The models that are being created: their memory is being taken.
    pub creations: Mutex<BTreeMap<Generation, Creation>>,
    /// Partitions for block maps that are not in force yet.
    pub incoming: IncomingPartitions,
    /// Copies of versions, for snapshots.
    pub captures: Captures,
    /// The models that have moved away.
    pub gone: Gone,
    /// The standing with the registry.
    pub standing: Mutex<Standing>,
    pub table: Option<Table>,
    pub elsewhere: Option<RemoteRegistry>,
    pub stopping: AtomicBool,
    pub wake: Condvar,
    pub asleep: Mutex<()>,
    pub this: Weak<Shared>,
}

impl Shared {
    /// The options of its partitions.
    pub fn of_partitions(&self) -> PartitionOptions {
        PartitionOptions { state: self.options.state, checksum: self.options.checksum }
    }

    /// Whether the process ends.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// The name of the RDMA listener, or why there is none.
    pub(super) fn rdma_name(&self) -> Result<String, Option<&NoRdma>> {
        #[cfg(feature = "rdma")]
        if let Some(rdma) = self.rdma.get() {
            return Ok(rdma.name());
        }
        Err(self.no_rdma.get())
    }

    /// RDMA in the status.
    pub(super) fn rdma_status(&self) -> serde_json::Value {
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

    /// The address for RDMA connections. Empty if there is none.
    pub(super) fn rdma_address(&self) -> String {
        #[cfg(feature = "rdma")]
        if let Some(rdma) = self.rdma.get() {
            let host = self.address.rsplit_once(':').map_or(self.address.as_str(), |(host, _)| host);
            return format!("{host}:{}", rdma.address().port());
        }
        String::new()
    }

    /// Asks the registry, in this process or elsewhere.
    pub(super) fn registry<T>(
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

    /// Answers somebody who asks the registry from an address.
    pub(super) fn answer_as_registry(
        &self,
        from: Option<Origin>,
        asked: &RegistryRequest,
        payload: &[u8],
    ) -> AdminAnswer {
        let Some(table) = &self.table else {
            let registry = self.options.registry.as_deref().unwrap_or_default();
            return Err(Refusal::other(format!("the registry is at {registry}, not here")));
        };
        let answer = table.handle_from(from.map(Origin::address), asked, payload)?;
        Ok((Message::Registered(answer.message), answer.payload.map(|bytes| bytes.to_vec())))
    }

    /// The registry's knowledge of a partition that is, or was about to be, here.
    pub(super) fn fate(&self, record: &ModelRecord) -> Result<Fate, RegistryError> {
        let shard = *self.shard.lock();
        let held = [life(record)];
        let (_, fates) = self.registry(|registry, deadline| registry.holding(shard, &held, &[], deadline))?;
        let unexpected = || RegistryError::Refused(Refusal::other("the registry gives an unexpected answer"));
        fates.first().copied().ok_or_else(unexpected)
    }

    /// Why the registry does not list this shard under its number, as far as is known.
    pub(super) fn why_not_listed(&self) -> Option<String> {
        self.standing.lock().not_listed.clone()
    }
}
