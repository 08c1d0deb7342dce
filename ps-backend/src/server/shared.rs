//! The common state of a shard's connections: its models, its connections to other shards, and its standing with the
//! registry.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use libmodelio::registry::RegistryError;
use libmodelio::transport::reactor::Handle;
use libmodelio::vocabulary::ids::{Generation, Version};
use libmodelio::vocabulary::snapshots::Every;
use libmodelio::wire::{Fate, ModelRecord, Refusal};
use parking_lot::Mutex;

use super::captures::Captures;
use super::complaints::Log;
use super::coordinator::Coordinator;
use super::directory::Directory;
use super::errands::Errands;
use super::fast_paths::FastPaths;
use super::identity::{Ending, Identity};
use super::moving::IncomingPartitions;
use super::offers::HeardOffers;
use super::options::ServerOptions;
use super::origins::Origins;
use super::partition::{Partition, PartitionOptions};
use super::redirect::{Gone, Redirect};
use super::saves::Saves;
use super::schedules::Schedules;
use super::standing::{Standing, life};
use super::status_text::StatusText;
use crate::core::JobRecord;
use crate::partition::executor::Executor;
use crate::snapshot::Pace;

/// One model on this shard.
pub(super) struct HostedModel {
    pub generation: Generation,
    pub record: ModelRecord,
    pub partition: Arc<Partition>,
    pub coordinator: Option<Arc<Coordinator>>,
    /// The redirect for peers with an older block map.
    pub redirect: Option<Redirect>,
    /// The last snapshot that a part was written of here, and its store.
    pub copied: Option<(u64, String)>,
    /// The version of the newest snapshot in the job's own store, and that store, if the job has taken one here.
    pub saved: Option<(Version, String)>,
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

/// Copies of versions for snapshots, what is being written of them, and when they are taken; and what mounts offer when a
/// model is restored from one.
#[derive(Default)]
pub(super) struct Snapshots {
    pub pace: Pace,
    pub captures: Captures,
    pub saves: Saves,
    pub schedules: Schedules,
    pub offers: HeardOffers,
}

impl Snapshots {
    /// Those of a shard that writes so many bytes a second at most.
    pub(super) fn at(rate: Option<u64>) -> Snapshots {
        Snapshots { pace: Pace::new(rate), ..Snapshots::default() }
    }

    /// Whether a snapshot of a model is to be begun: one is due, and none is being written.
    pub(super) fn begins(&self, model: Generation, every: Every, version: Version) -> bool {
        let now = self.schedules.now();
        let is_due = self.schedules.with(model, |schedule| schedule.is_due(every, version, now));
        is_due && !self.saves.is_running(model)
    }
}

/// The common state of a process's connections.
pub(super) struct Shared {
    pub options: ServerOptions,
    pub identity: Identity,
    pub net: Handle,
    pub executor: Arc<dyn Executor>,
    pub fast: FastPaths,
    pub limits: Limits,
    pub models: Mutex<BTreeMap<String, HostedModel>>,
    /// The models that are being created: their memory is being taken.
    pub creations: Mutex<BTreeMap<Generation, Creation>>,
    /// Partitions for block maps that are not in force yet.
    pub incoming: IncomingPartitions,
    pub snapshots: Snapshots,
    /// The models that have moved away.
    pub gone: Gone,
    /// The standing with the registry.
    pub standing: Mutex<Standing>,
    pub directory: Directory,
    pub ending: Ending,
    pub this: Weak<Shared>,
}

impl Shared {
    /// The options of its partitions.
    pub(super) fn of_partitions(&self) -> PartitionOptions {
        PartitionOptions { state: self.options.state, checksum: self.options.checksum }
    }

    /// The registry's knowledge of a partition that is, or was about to be, here.
    pub(super) fn fate(&self, record: &ModelRecord) -> Result<Fate, RegistryError> {
        let shard = self.identity.number();
        let held = [life(record)];
        let (_, fates) =
            self.directory.ask(|registry, deadline| registry.holding(shard, &held, &[], deadline))?;
        let unexpected = || RegistryError::Refused(Refusal::other("the registry gives an unexpected answer"));
        fates.first().copied().ok_or_else(unexpected)
    }

    /// Why the registry does not list this shard under its number, as far as is known.
    pub(super) fn why_not_listed(&self) -> Option<String> {
        self.standing.lock().not_listed.clone()
    }
}
