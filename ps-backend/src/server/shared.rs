//! What all connections of a shard share: its models, its ways to others, and what is between it and the registry.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use libmodelio::registry::{Registry, RegistryError, RemoteRegistry};
use libmodelio::transport::reactor::Handle;
use libmodelio::transport::shm::Threads;
use libmodelio::vocabulary::ids::{Generation, ShardId};
use libmodelio::wire::{Fate, ModelRecord, Refusal};
use parking_lot::{Condvar, Mutex};

use super::captures::Captures;
use super::complaints::Log;
use super::coordinator::Coordinator;
use super::moving::Adoptions;
use super::options::{NoRdma, ServerOptions};
use super::partition::Partition;
#[cfg(feature = "rdma")]
use super::rdma_clients::Rdma;
use super::redirect::{Gone, Redirect};
use super::standing::{Standing, life};
use super::table::{Local, Table};
use crate::core::JobRecord;
use crate::partition::executor::Executor;

/// Longest wait for the registry.
const REGISTRY_PATIENCE: Duration = Duration::from_secs(5);

/// One model on this shard.
pub(super) struct Model {
    pub generation: Generation,
    pub record: ModelRecord,
    pub partition: Arc<Partition>,
    pub coordinator: Option<Arc<Coordinator>>,
    /// What is told to whoever speaks of an older block map, if there was one.
    pub redirect: Option<Redirect>,
    /// What its job goes on from, until it begins.
    pub begins: Option<JobRecord>,
}

/// A partition whose memory is being taken.
#[derive(Debug)]
pub(super) struct Creation {
    pub name: String,
    /// Its model was deleted meanwhile: the partition is not wanted.
    pub deleted: bool,
}

/// What all connections of a process share.
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
    /// Why there are none.
    pub no_rdma: OnceLock<NoRdma>,
    /// Why there are none.
    pub no_memory: OnceLock<String>,
    pub complaints: Log,
    pub models: Mutex<BTreeMap<String, Model>>,
    /// Models that are being made: their memory is being taken.
    pub creations: Mutex<BTreeMap<Generation, Creation>>,
    /// Partitions under block maps that are to be.
    pub adopting: Adoptions,
    /// Copies of versions, for snapshots.
    pub captures: Captures,
    /// Models that were here.
    pub gone: Gone,
    /// What is between this shard and the registry.
    pub standing: Mutex<Standing>,
    pub table: Option<Table>,
    pub elsewhere: Option<RemoteRegistry>,
    pub stopping: AtomicBool,
    pub wake: Condvar,
    pub asleep: Mutex<()>,
    pub this: Weak<Shared>,
}

impl Shared {
    /// Whether the process ends.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// What takes connections by RDMA, for people; or why nothing does.
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

    /// Where connections by RDMA are taken, for others; empty if they are not.
    pub(super) fn rdma_address(&self) -> String {
        #[cfg(feature = "rdma")]
        if let Some(rdma) = self.rdma.get() {
            let host = self.address.rsplit_once(':').map_or(self.address.as_str(), |(host, _)| host);
            return format!("{host}:{}", rdma.address().port());
        }
        String::new()
    }

    /// Asks the registry, wherever it is.
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

    /// What the registry knows of a partition that is, or was to be, here.
    pub(super) fn fate(&self, record: &ModelRecord) -> Result<Fate, RegistryError> {
        let shard = *self.shard.lock();
        let held = [life(record)];
        let (_, fates) = self.registry(|registry, deadline| registry.holding(shard, &held, &[], deadline))?;
        let unexpected = || RegistryError::Refused(Refusal::other("the registry answers something else"));
        fates.first().copied().ok_or_else(unexpected)
    }

    /// Why the registry does not list this shard under its number, as far as is known.
    pub(super) fn why_not_listed(&self) -> Option<String> {
        self.standing.lock().not_listed.clone()
    }
}
