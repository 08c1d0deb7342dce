//! One shard's partition of a model at work: the edge around [`PartitionCore`] and [`PartitionStore`].
//!
//! Network threads bring blocks. The core decides what each of them is for, and the store does the work. The lock is
//! held for decisions, and never for a pass over a block. Work on many blocks goes to the executor in batches. Work
//! that takes memory runs on its threads, too.
//!
//! | module | holds |
//! |---|---|
//! | `plans` | orders of the coordinator |
//! | `reservation` | places for blocks that come (`unsafe`) |
//! | `blocks` | sending blocks of versions (`unsafe`) |
//! | `here` | a client in this process |
//! | `laid` | new weights in parts |
//! | `parking` | which connections are in use |
//! | `moving` | a change of the block map |
//! | `shown` | versions for RDMA clients |
//! | `sum_memory` | registered memory of sums |

mod blocks;
mod here;
mod laid;
mod moving;
mod parking;
mod plans;
mod reservation;
mod shown;
mod steps;
mod sum_memory;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use libmodelio::observe::histogram::Histogram;
use libmodelio::transport::frames::{Link, Outgoing};
use libmodelio::transport::local::{Granted, Mail, Mailbox, MailboxEnd};
use libmodelio::transport::stream::Close;
use libmodelio::vocabulary::ids::{BlockId, ClientId, Epoch, Generation, PlanId, ShardId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::wire::{Checksum, MAX_SMALL_MODEL, Message, ModelRecord, PlanSource, Refusal, Work};
use parking_lot::{Mutex, MutexGuard};

use super::redirect::Redirect;
use crate::memory::{self, MemoryUse, gib};
use crate::partition::brought::Brought;
use crate::partition::core::PartitionCore;
use crate::partition::executor::Executor;
use crate::partition::store::{Home, Limits, PartitionError, PartitionJob, PartitionStore};
use crate::snapshot::Piece;
use crate::state_copies::StateCopies;
use blocks::Follower;
pub(super) use blocks::{Followed, Sending};
use here::HereState;
use parking::Connected;
use reservation::{Coming, KeptPayloads};
pub(super) use reservation::{Lent, Push, Reservation, Reserved, Room, Sender};
pub(super) use shown::Shown;
pub(super) use steps::StepWatch;
pub(super) use sum_memory::SumMemory;

/// The coordinator that a partition answers to.
#[derive(Clone)]
pub(super) enum ToCoordinator {
    /// The coordinator in this process.
    Here(Arc<Mailbox>),
    /// A coordinator in another process, over this connection.
    There(Link),
}

/// The most version buffers for clients that retain many. Each takes a region of their connections.
const MOST_BUFFERS: usize = 32;

/// The most blocks that a device makes at once. Between two batches it has nothing to do for a moment.
const MADE_BY_DEVICE: usize = 512;

struct PartitionState {
    core: PartitionCore,
    /// The plan that was started last, until it has begun.
    starting: Option<(PlanId, Version, Work, bool)>,
    job: Option<(PlanId, Arc<PartitionJob>)>,
    /// The plan that makes a version and is complete but for its blocks, and since when.
    sealed: Option<(PlanId, Instant)>,
    /// The sources of that plan that send blocks in part.
    partly: Vec<PlanSource>,
    /// Connections that are woken when something has changed.
    waiting: Vec<Link>,
    /// Connections of clients that follow a plan. They are woken when there may be a block to send.
    following: Vec<Link>,
    /// Payloads that are being received into their place.
    coming: Vec<Coming>,
    /// Payloads that stay where they lie until the others of their blocks have come.
    kept: KeptPayloads,
    /// Blocks that came with commits, for a plan that does not have its memory yet.
    granted: Vec<Granted>,
    /// The clients that get blocks as they are computed.
    followers: BTreeMap<ClientId, Follower>,
    coordinator: Option<ToCoordinator>,
    /// When that coordinator connected.
    coordinated_since: Instant,
    /// The client in this process.
    here: HereState,
}

impl PartitionState {
    /// The written ranges of a block that `client` sends for the plan under way, if not all of it was written.
    fn written(&self, client: ClientId, block: BlockId) -> Option<Vec<Range<u32>>> {
        let source = self.partly.iter().find(|source| source.client == client)?;
        source.partly.of(block).map(<[_]>::to_vec)
    }
}

/// One shard's partition of a model.
pub struct Partition {
    /// The model's name.
    pub model: String,
    /// The model's generation.
    pub generation: Generation,
    /// The epoch of the block map.
    pub epoch: Epoch,
    model_bytes: u64,
    /// Whether its only client is in this process.
    has_client_here: bool,
    /// Whether blocks are sent with a checksum.
    checksum: Checksum,
    store: PartitionStore,
    /// When the log last said that there is no memory for another version.
    said_short: Mutex<Option<Instant>>,
    /// For each plan that makes a version, the time from when it was sealed until all its blocks were computed here.
    reduce: Histogram,
    state: Mutex<PartitionState>,
    executor: Arc<dyn Executor>,
    /// Connections of clients, for blocks.
    links: Mutex<Vec<Connected>>,
    /// Where the model is now, once another block map is in force.
    moved: OnceLock<Redirect>,
    /// Its versions, for clients that fetch them by RDMA.
    shown: Mutex<Option<Arc<Shown>>>,
    /// Parts of new weights that clients have brought.
    brought: Mutex<Brought>,
}

/// What the operator of a shard chooses for its partitions.
#[derive(Clone, Copy, Debug, Default)]
pub struct PartitionOptions {
    /// How many copies of optimizer state there are.
    pub state: StateCopies,
    /// Whether blocks that are sent have checksums.
    pub checksum: Checksum,
}

/// Why a partition cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum MakeError {
    /// The record of the model cannot be used.
    #[error("the record of the model: {0}")]
    Record(String),
    /// This shard owns none of its blocks.
    #[error("shard {0} owns no block of the model")]
    NotMine(ShardId),
    /// Not enough memory.
    #[error(
        "not enough memory: the shard's partition takes {:.1} GiB, {:.1} GiB are available for models: use more shards",
        gib(*.needed), gib(*.available)
    )]
    Room {
        /// The bytes that the partition takes.
        needed: u64,
        /// The bytes that are available.
        available: u64,
    },
    /// Memory cannot be taken.
    #[error(transparent)]
    Store(#[from] PartitionError),
}

impl Partition {
    /// The partition of `shard` in the model of `record`. It must be loaded next. Its memory is taken now, which
    /// takes a while.
    ///
    /// # Errors
    /// [`MakeError`].
    pub fn new(
        record: &ModelRecord,
        shard: ShardId,
        executor: &Arc<dyn Executor>,
        options: PartitionOptions,
    ) -> Result<Arc<Partition>, MakeError> {
        let bad = |error: &dyn std::fmt::Display| MakeError::Record(error.to_string());
        let layout = record.layout().map_err(|error| bad(&error))?;
        let map = record.block_map().map_err(|error| bad(&error))?;
        let blocks: Vec<BlockId> = map.blocks_of(shard).collect();
        if blocks.is_empty() {
            return Err(MakeError::NotMine(shard));
        }
        let partition = layout.partition(&blocks).map_err(|error| bad(&error))?;
        let controls = &record.controls;
        // The version of a small model goes with the message that it counts, so it is computed before, and by the CPU.
        let is_small = layout.size() <= u64::from(MAX_SMALL_MODEL);
        let home = match executor.device() {
            _ if is_small => Home::Host(StateCopies::Double),
            Some(device) => Home::Device(Arc::clone(device)),
            None => Home::Host(options.state),
        };
        let takes = MemoryUse::of_partition(partition.layout(), controls, home.copies());
        // Mounts on this host may show as many versions as they retain, from this shard's memory.
        let limits = Limits::default();
        let buffers = limits.buffers.max((controls.retain as usize + 5).min(MOST_BUFFERS));
        let limits = Limits { buffers, ..limits };
        let make = || {
            let store = PartitionStore::new(partition, controls.widest_reducer(), limits, home)?;
            if takes.sums > 0 {
                store.promise_sums()?;
            }
            Ok::<_, PartitionError>(store)
        };
        let needed = takes.total();
        let made = memory::take(needed, memory::for_models, make);
        let store = made.map_err(|available| MakeError::Room { needed, available })??;
        Ok(Partition::of(record, (layout.size(), false), store, executor, options.checksum))
    }

    /// The partition of a model whose only client is in this process. It has all blocks. Memory beyond that of the
    /// newest and the next version is taken when it is needed.
    ///
    /// # Errors
    /// [`MakeError`].
    pub fn of_process(
        record: &ModelRecord,
        layout: &ModelLayout,
        executor: &Arc<dyn Executor>,
        copies: StateCopies,
    ) -> Result<Arc<Partition>, MakeError> {
        let all: Vec<BlockId> = (0..layout.blocks()).map(BlockId).collect();
        let partition = layout.partition(&all).map_err(|error| MakeError::Record(error.to_string()))?;
        let limits = Limits { retain: 0, buffers: record.controls.most_buffers() };
        let home = executor.device().map_or(Home::Host(copies), |device| Home::Device(Arc::clone(device)));
        let sums = MemoryUse::of_one_process(layout, &record.controls, home.copies()).sums;
        let store = PartitionStore::new(partition, record.controls.widest_reducer(), limits, home)?;
        if sums > 0 {
            store.promise_sums()?;
        }
        Ok(Partition::of(record, (layout.size(), true), store, executor, Checksum::Off))
    }

    fn of(
        record: &ModelRecord,
        (model_bytes, has_client_here): (u64, bool),
        store: PartitionStore,
        executor: &Arc<dyn Executor>,
        checksum: Checksum,
    ) -> Arc<Partition> {
        let state = PartitionState {
            core: core_at(Version(0), &store, has_client_here),
            starting: None,
            partly: Vec::new(),
            sealed: None,
            job: None,
            waiting: Vec::new(),
            following: Vec::new(),
            coming: Vec::new(),
            kept: KeptPayloads::new(),
            granted: Vec::new(),
            followers: BTreeMap::new(),
            coordinator: None,
            coordinated_since: Instant::now(),
            here: HereState { waits: false, has_buffer: true },
        };
        Arc::new(Partition {
            model: record.name.clone(),
            generation: record.generation,
            epoch: record.epoch,
            model_bytes,
            has_client_here,
            checksum,
            store,
            said_short: Mutex::default(),
            reduce: Histogram::of_seconds(),
            state: Mutex::new(state),
            executor: Arc::clone(executor),
            links: Mutex::default(),
            moved: OnceLock::new(),
            shown: Mutex::default(),
            brought: Mutex::default(),
        })
    }

    /// A core that begins at `version`.
    fn core_at(&self, version: Version) -> PartitionCore {
        core_at(version, &self.store, self.has_client_here)
    }

    /// The partition's own layout.
    pub fn layout(&self) -> &Arc<ModelLayout> {
        self.store.partition().layout()
    }

    /// Whether blocks are sent with a checksum.
    pub(super) fn checksum(&self) -> Checksum {
        self.checksum
    }

    /// The size of the whole model.
    pub fn model_bytes(&self) -> u64 {
        self.model_bytes
    }

    /// Its versions for clients that fetch them by RDMA. They are published from the first such client on.
    pub(super) fn shown(
        &self,
        device: &Arc<libmodelio::transport::rdma::Device>,
    ) -> Result<Arc<Shown>, Refusal> {
        let mut shown = self.shown.lock();
        if let Some(shown) = &*shown {
            return Ok(Arc::clone(shown));
        }
        // Such a client pins nothing. A version that it reads while the next one comes stays whole.
        self.store.retain(1);
        let made = Shown::of(&self.model, &self.store, device)?;
        *shown = Some(Arc::clone(&made));
        Ok(made)
    }

    /// Its memory.
    pub fn store(&self) -> &PartitionStore {
        &self.store
    }

    /// For each plan that makes a version, the time from when it was sealed until all its blocks were computed here.
    pub fn reduce(&self) -> &Histogram {
        &self.reduce
    }

    /// The newest version, and the plan under way with the number of payloads that it waits for.
    pub fn progress(&self) -> (Version, Option<(PlanId, u64)>) {
        let state = self.state.lock();
        (state.core.version(), state.core.running())
    }

    /// Loads a piece of the first version.
    pub(super) fn load(&self, (block, what): Piece, bytes: &[u8]) -> Result<(), Refusal> {
        let local = self.store.partition().local(block).ok_or(Refusal::NotMine { block })?;
        self.store.load_piece(local, what, bytes).map(drop).map_err(Refusal::other)
    }
}

fn core_at(version: Version, store: &PartitionStore, has_client_here: bool) -> PartitionCore {
    let core = PartitionCore::new(store.partition().layout().blocks(), version);
    match store.is_on_device() {
        _ if has_client_here => core.without_early_readers(),
        true => core.making(MADE_BY_DEVICE),
        false => core,
    }
}

impl PartitionState {
    /// Sends the coordinator a message, if there is a coordinator. If it is in this process, the caller must
    /// [`Self::deliver`] the message.
    fn send(&self, epoch: Epoch, request: u64, message: Message) {
        match &self.coordinator {
            None => {}
            Some(ToCoordinator::Here(mailbox)) => {
                mailbox.put(MailboxEnd::Partition, MailboxEnd::Coordinator, Mail::Message(request, message));
            }
            Some(ToCoordinator::There(link)) => {
                link.send(Outgoing { epoch, ..Outgoing::new(request, message) });
            }
        }
    }

    /// Releases the lock, and then delivers the messages to a coordinator in this process.
    fn deliver(state: MutexGuard<'_, PartitionState>) {
        let mailbox = state.mailbox();
        drop(state);
        if let Some(mailbox) = mailbox {
            mailbox.drain();
        }
    }

    /// The job of this plan, if it has begun.
    fn job_of(&self, plan: PlanId) -> Option<Arc<PartitionJob>> {
        self.job.as_ref().filter(|(of, _)| *of == plan).map(|(_, job)| Arc::clone(job))
    }

    /// Forgets the coordinator.
    fn leave_coordinator(&mut self, why: Close) {
        if let Some(ToCoordinator::There(link)) = self.coordinator.take() {
            link.close(why);
        }
    }

    fn wait(&mut self, link: &Link) {
        if !self.waiting.iter().any(|waiting| waiting.is(link)) {
            self.waiting.push(link.clone());
        }
    }

    /// Like [`Self::wait`], for blocks of the plan that the client follows. With many clients, most payloads that come
    /// are no news for those.
    fn wait_for_blocks(&mut self, link: &Link) {
        if !self.following.iter().any(|following| following.is(link)) {
            self.following.push(link.clone());
        }
    }

    fn wake(&mut self) {
        self.waiting.drain(..).for_each(|link| link.wake());
        if self.core.has_news_for_readers() {
            self.following.drain(..).for_each(|link| link.wake());
        }
        self.wake_here();
    }
}
