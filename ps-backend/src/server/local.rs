//! A model in one process: its coordinator, the partition with all of its blocks, and what its client asks of them.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use libmodelio::bytes::mmap::Mapping;
use libmodelio::client::{Client, ClientError};
use libmodelio::transport::local::{HeldVersion, Mailbox, Pushed, Shard, SharedBlock};
use libmodelio::transport::{Region, ShardError};
use libmodelio::vocabulary::block_map::{BlockMap, MapError};
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::{Generation, LearnerId, ShardId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::wire::{JobState, ModelRecord, RecordError, Refusal};

use super::coordinator::Coordinator;
use super::partition::{MakeError, Partition};
use crate::partition::store::PartitionError;

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
}

impl From<Refusal> for LocalError {
    fn from(refusal: Refusal) -> LocalError {
        LocalError::Coordinator(refusal.to_string())
    }
}

/// Threads that work on many blocks, of any number of models.
pub type Pool = Arc<rayon::ThreadPool>;

/// So many threads.
///
/// # Errors
/// When the system has none.
pub fn pool(threads: usize) -> io::Result<Pool> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("reduce-{i}"));
    pool.build().map(Arc::new).map_err(io::Error::other)
}

/// The coordinator and the partition of a model whose client is in this process.
pub struct LocalShard {
    coordinator: Arc<Coordinator>,
    partition: Arc<Partition>,
    pool: Pool,
}

/// Makes a model in this process: `load` fills version 0 by its memory, and work on many blocks runs on `pool`.
///
/// # Errors
/// [`LocalError`].
pub fn start(
    name: &str,
    layout: &Arc<ModelLayout>,
    controls: &Controls,
    pool: &Pool,
    load: impl FnOnce(&Mapping) -> io::Result<()>,
) -> Result<Client, LocalError> {
    const SHARD: ShardId = ShardId(0);
    let map = BlockMap::striped(layout.blocks(), &[SHARD])?;
    let controls = controls.clone();
    let record = ModelRecord::new(name, Generation(1), layout, BTreeMap::new(), &map, SHARD, controls)?;
    let partition = Partition::of_process(&record, layout, pool)?;
    partition.store().load_whole(load)?;
    let coordinator = Coordinator::new(&record, &partition, SHARD, None, None, &[]);
    let coordinator = coordinator.map_err(LocalError::Coordinator)?;
    let shard =
        Arc::new(LocalShard { coordinator, partition: Arc::clone(&partition), pool: Arc::clone(pool) });
    let coordinator = Arc::clone(&shard.coordinator);
    let mut met = Ok(());
    let client = Client::of_shard_here(&record, Arc::clone(layout), shard, |client| {
        met = coordinator.client_here(client);
    });
    met?;
    let client = client?;
    partition.warm_up(record.controls.retain as usize);
    Ok(client)
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

    fn execute(&self, work: Box<dyn FnOnce() + Send>) {
        self.pool.spawn(work);
    }

    fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    fn set_buffers(&self, most: usize) {
        self.partition.set_buffers(most);
    }

    fn find_buffer(&self) -> bool {
        self.partition.find_buffer()
    }

    fn buffers(&self) -> (usize, usize) {
        self.partition.store().buffer_counts()
    }

    fn take_buffer(&self) -> Result<Region, ShardError> {
        self.partition.store().take_buffer().map_err(|error| ShardError::no_memory(&error))
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
