//! A model in one process: its coordinator, the partition with all of its blocks, and their interface for the client.

mod saving;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use libmodelio::bytes::changes::Changed;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::{Region, RegionKey};
use libmodelio::client::{ClientError, Job};
use libmodelio::transport::local::{HeldVersion, Mailbox, Pushed, Shard, ShardMemory, SharedBlock};
use libmodelio::vocabulary::block_map::{BlockMap, MapError};
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::{BlockId, LearnerId, ShardId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{JobState, ModelRecord, RecordError, Refusal};

use super::coordinator::{Begins, Coordinator};
use super::partition::{MakeError, Partition};
use crate::core::JobRecord;
use crate::create::new_generation;
use crate::partition::executor::Executor;
use crate::partition::store::PartitionError;
use crate::snapshot::{self, Copied, SnapshotError, Stored};
use crate::state_copies::StateCopies;
pub use saving::Saver;

/// Longest wait for a moment at which the coordinator and the partition are at the same version.
const CAPTURING: Duration = Duration::from_secs(10);

/// Why a model in one process does not come about.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// It cannot be striped over one shard.
    #[error(transparent)]
    Map(#[from] MapError),
    /// It does not fit a record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// It has no partition.
    #[error(transparent)]
    Make(#[from] MakeError),
    /// It cannot be loaded.
    #[error(transparent)]
    Load(#[from] PartitionError),
    /// Nobody coordinates it.
    #[error("{0}")]
    Coordinator(String),
    /// It has no client.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// It has no number for its life.
    #[error("no random number for the model: {0}")]
    Random(#[from] getrandom::Error),
    /// It cannot go on from a snapshot.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
}

impl From<Refusal> for LocalError {
    fn from(refusal: Refusal) -> LocalError {
        LocalError::Coordinator(refusal.to_string())
    }
}

/// The coordinator and the partition of a model whose client is in this process.
pub struct LocalShard {
    coordinator: Arc<Coordinator>,
    partition: Arc<Partition>,
    executor: Arc<dyn Executor>,
    saver: OnceLock<Weak<Saver>>,
}

/// Fills the memory of version 0, in which blocks lie one behind the other.
pub type Fill<'a> = Box<dyn FnOnce(&Mapping) -> io::Result<()> + 'a>;

/// The beginning of a model in this process.
pub enum Beginning<'a> {
    /// Version 0.
    Weights(Fill<'a>),
    /// A snapshot.
    Snapshot(&'a Stored),
}

/// Makes a model in this process: `load` fills version 0 by its memory, and `executor` does the work on many blocks.
///
/// # Errors
/// [`LocalError`].
pub fn start(
    name: &str,
    layout: &Arc<ModelLayout>,
    controls: &Controls,
    executor: &Arc<dyn Executor>,
    load: impl FnOnce(&Mapping) -> io::Result<()>,
) -> Result<Job, LocalError> {
    let beginning = Beginning::Weights(Box::new(load));
    start_from(name, layout, controls, (executor, StateCopies::default()), beginning).map(|(job, _)| job)
}

/// Makes a model in this process that begins with `beginning`, with so many copies of optimizer state. Snapshots can be
/// taken of the returned shard.
///
/// # Errors
/// [`LocalError`].
pub fn start_from(
    name: &str,
    layout: &Arc<ModelLayout>,
    controls: &Controls,
    (executor, copies): (&Arc<dyn Executor>, StateCopies),
    beginning: Beginning<'_>,
) -> Result<(Job, Weak<LocalShard>), LocalError> {
    const SHARD: ShardId = ShardId(0);
    let map = BlockMap::striped(layout.blocks(), &[SHARD])?;
    let controls = controls.clone();
    let record = ModelRecord::new(name, new_generation()?, layout, BTreeMap::new(), &map, SHARD, controls)?;
    let partition = Partition::of_process(&record, layout, executor, copies)?;
    let job = match beginning {
        Beginning::Weights(load) => {
            partition.store().load_whole(load)?;
            Begins::Anew
        }
        Beginning::Snapshot(stored) => {
            let of = stored.head().record.clone();
            partition.store().begin_at(of.version, of.optimizer)?;
            stored.fill(partition.store())?;
            partition.begin_at(of.version);
            Begins::AtRecord(of)
        }
    };
    let coordinator = Coordinator::new(&record, &partition, SHARD, None, job, &[]);
    let coordinator = coordinator.map_err(LocalError::Coordinator)?;
    let (executor, saver) = (Arc::clone(executor), OnceLock::new());
    let shard = Arc::new(LocalShard { coordinator, partition, executor, saver });
    let coordinator = Arc::clone(&shard.coordinator);
    let captured = Arc::downgrade(&shard);
    let mut met = Ok(());
    let job = Job::of_shard_here(&record, Arc::clone(layout), shard, |client| {
        met = coordinator.client_here(client);
    });
    met?;
    let job = job?;
    Ok((job, captured))
}

impl LocalShard {
    /// What takes the snapshots of the model, if something does.
    pub fn saver(&self) -> Option<Arc<Saver>> {
        self.saver.get()?.upgrade()
    }

    /// Takes a snapshot of the newest version. The job stands still for as long as it takes to copy it.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn capture(&self) -> Result<(JobRecord, Controls, Copied), SnapshotError> {
        let store = self.partition.store();
        let (record, _) = self.coordinator.record();
        // The optimizer may take its first step before the version is pinned, so there is room for its state.
        let kinds = snapshot::all_kinds(record.optimizer);
        let mut copied = Copied::reserve(self.partition.layout(), kinds)?;
        let deadline = Instant::now() + CAPTURING;
        loop {
            let kept = store.keep()?;
            let (record, controls) = self.coordinator.record();
            // The coordinator counts a version before the partition gets the message.
            if record.version == kept.version() {
                copied.fill(&kept, snapshot::kinds(&record), &*self.executor)?;
                return Ok((record, controls, copied));
            }
            drop(kept);
            if Instant::now() >= deadline {
                return Err(SnapshotError::Invalid("the job makes versions too fast to be captured".into()));
            }
            std::thread::yield_now();
        }
    }
}

impl Shard for LocalShard {
    fn mailbox(&self) -> &Mailbox {
        self.coordinator.mailbox()
    }

    fn push(&self, block: SharedBlock<'_>, stands: &dyn Fn() -> bool) -> Pushed {
        self.partition.push_here(block, stands)
    }

    fn version(&self, version: Version) -> Result<HeldVersion, Version> {
        let pinned = Arc::new(self.partition.version_here(version)?);
        let (region, published) = pinned.region();
        Ok(HeldVersion { region: region.clone(), published, hold: pinned })
    }

    fn changed_since(&self, base: Version, version: Version) -> Option<Vec<Changed>> {
        let since = self.partition.store().since(base, version)?;
        let layout = self.partition.layout();
        Some((0..layout.blocks()).map(|block| since.changed(layout, BlockId(block))).collect())
    }

    fn execute(&self, work: Box<dyn FnOnce() + Send>) {
        self.executor.spawn(work);
    }

    fn threads(&self) -> usize {
        self.executor.threads()
    }

    fn set_buffers(&self, most: usize) {
        self.partition.set_buffers(most);
    }

    fn find_buffer(&self) -> bool {
        self.partition.find_buffer()
    }

    fn memory(&self) -> ShardMemory {
        self.partition.store().taken()
    }

    fn buffers(&self) -> (usize, usize) {
        self.partition.store().buffer_counts()
    }

    fn shortage(&self) -> Option<String> {
        self.partition.store().shortage()
    }

    fn take_buffer(&self) -> Result<Region, ShardError> {
        self.partition.store().take_buffer().map_err(|error| ShardError::no_memory(&error))
    }

    fn wrote(&self, buffer: RegionKey, blocks: &[BlockId]) {
        if let Some(comparison) = self.partition.store().compare_ahead(buffer, blocks) {
            self.executor.spawn(Box::new(|| comparison.run()));
        }
    }

    fn rewrites(&self, buffer: RegionKey) {
        self.partition.store().forget_ahead(buffer);
    }

    fn state(&self) -> JobState {
        self.coordinator.state_here()
    }

    fn silence(&self, learner: LearnerId) -> Duration {
        self.coordinator.silence(learner)
    }
}

impl Drop for LocalShard {
    fn drop(&mut self) {
        self.coordinator.stop(&Refusal::other("the process ends"));
    }
}

#[cfg(test)]
mod tests;
