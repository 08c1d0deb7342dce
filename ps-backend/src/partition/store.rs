//! The memory of a shard's partition of a model: versions, optimizer state, masters and sums.
//!
//! The core decides about each block, and this store carries it out. Network threads bring blocks under a
//! [`PartitionJob`], which adds them up or computes the next version's block from them. Nothing of this counts before
//! [`PartitionStore::conclude`]: until then the newest version and the sums of earlier plans are unchanged, and a
//! dropped plan leaves nothing behind.
//!
//! With one copy of optimizer state, a version that changes it is made in two steps. Under its job, contributions are
//! added up. Once the coordinator has concluded the plan, [`Making`] computes the blocks, which cannot be undone.
//!
//! A partition has at most two sums of a block, for any number of senders: the *sealed* one, of concluded plans, and
//! the *open* one, of the running plan. Their pages are taken when they are first needed.
//!
//! This module and those below it may hold `unsafe`. The code is sound because blocks are claimed: every operation on
//! a block of a job first takes a mark that only one thread can hold. A block that is computed, or whose job is
//! concluded, cannot be claimed any more. Nothing else can write a buffer while a job exists, because
//! [`PartitionStore::begin`] waits until the last job has gone.

mod job;
mod kept;
mod making;
mod merge;
mod on_device;
mod pinned;
mod sums;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering, fence};
use std::sync::{Arc, Weak};

use libmodelio::bytes::available::{self, KeepsSpares};
use libmodelio::bytes::kernels::coded::Fault;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::{Region, RegionKey};
use libmodelio::transport::local::ShardMemory;
use libmodelio::transport::tally::Tally;
use libmodelio::vocabulary::groups::Groups;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::{ModelLayout, PartitionLayout};
use libmodelio::vocabulary::norm::TensorFactors;
use libmodelio::vocabulary::reducer::{Combine, Reducer};
use libmodelio::vocabulary::tensor_steps::{ByteSteps, TensorSteps};
use libmodelio::wire::{Kept, Work};
use parking_lot::Mutex;

use crate::device::DeviceError;
use crate::memory::MemoryUse;
pub use crate::region_store::Home;
pub use crate::region_store::VersionWatch;
pub use crate::region_store::accumulator::Payload;
use crate::region_store::{How, Loading, MemoryError, RegionStore};
use job::Alive;
pub use job::{BlockInput, EarlyBlock, PartitionJob, Target};
pub use kept::KeptState;
pub use making::Making;
pub use merge::Merge;
pub use pinned::{PinnedVersion, ShownVersion};
use sums::Sums;

/// The reason why an operation failed. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PartitionError {
    /// The partition does not have the block.
    #[error("block {block} is outside of the partition's {blocks} blocks")]
    NoBlock {
        /// The block.
        block: BlockId,
        /// The number of blocks.
        blocks: u32,
    },
    /// The payload's length is not the block's.
    #[error("a payload of block {block} has {got} bytes, not {expected}")]
    Length {
        /// The block.
        block: BlockId,
        /// The expected number of bytes.
        expected: usize,
        /// The received number of bytes.
        got: usize,
    },
    /// The payload is coded, and nobody codes so.
    #[error("the payload of block {block} is wrong: {fault}")]
    Coding {
        /// The block.
        block: BlockId,
        /// What is wrong with it.
        fault: Fault,
    },
    /// The payload is coded, and the plan takes values as they are.
    #[error("the payload of block {0} is coded, and its values replace others")]
    CodedValues(BlockId),
    /// The block has no room for these masters or this optimizer state, or their length is wrong.
    #[error("{got} bytes of masters or optimizer state do not fit block {block}")]
    State {
        /// The block.
        block: BlockId,
        /// The received number of bytes.
        got: usize,
    },
    /// Another thread is working on the block.
    #[error("another thread is at work on block {0}")]
    Claimed(BlockId),
    /// The block is computed, or its plan is concluded.
    #[error("block {0} of the plan is complete")]
    Complete(BlockId),
    /// The plan takes whole new blocks, and adds nothing up.
    #[error("the plan takes new values of blocks: nothing can be added up under it")]
    AssignsOnly,
    /// The plan only adds up.
    #[error("the plan adds up and makes no version")]
    AddsOnly,
    /// Version 0 is not complete, or [`PartitionStore::finish_loading`] was not called.
    #[error("version 0 is still being loaded")]
    Loading,
    /// A block of version 0 has not come.
    #[error("block {0} of version 0 is not loaded")]
    NotLoaded(BlockId),
    /// Version 0 is complete.
    #[error("version 0 is loaded already")]
    Loaded,
    /// The plan starts from another version.
    #[error("the plan starts from version {got}; version {expected} is the newest")]
    Base {
        /// The newest.
        expected: Version,
        /// The plan's.
        got: Version,
    },
    /// The plan before is still worked on, or the newest version's state is being read. This passes.
    #[error("the plan before this one is still worked on")]
    Busy,
    /// All buffers hold versions that are being read. This passes.
    #[error("all {max} version buffers are in use")]
    NoBuffer {
        /// The largest number.
        max: usize,
    },
    /// A block of the plan is not computed.
    #[error("block {0} of the plan is not computed yet")]
    Unfinished(BlockId),
    /// The job was concluded, given up or replaced.
    #[error("the plan is over")]
    Over,
    /// There is no memory.
    #[error("no memory: {0}")]
    Memory(#[from] io::Error),
    /// The device that computes the model has too little memory, or has failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<MemoryError> for PartitionError {
    fn from(error: MemoryError) -> PartitionError {
        match error {
            MemoryError::Host(error) => PartitionError::Memory(error),
            MemoryError::Device(error) => PartitionError::Device(error),
        }
    }
}

impl PartitionError {
    /// Whether the same operation may succeed a little later.
    pub fn is_transient(&self) -> bool {
        match self {
            PartitionError::Busy | PartitionError::NoBuffer { .. } | PartitionError::Memory(_) => true,
            PartitionError::Device(error) => matches!(error, DeviceError::Room { .. }),
            _ => false,
        }
    }
}

/// How many versions are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The number of versions before the newest that are kept, read or not.
    pub retain: usize,
    /// The most version buffers. The newest, the next and the retained versions always have one.
    pub buffers: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { retain: 0, buffers: 6 }
    }
}

impl Limits {
    fn max(&self) -> usize {
        self.buffers.max(self.retain + 2)
    }
}

/// The memory of one shard's partition of a model. Clones share it. Block numbers are those of the partition.
#[derive(Clone, Debug)]
pub struct PartitionStore {
    shared: Arc<StoreShared>,
}

/// The part that pinned versions keep alive.
#[derive(Debug)]
struct StoreShared {
    partition: PartitionLayout,
    inner: Mutex<Inner>,
    sums: Arc<Sums>,
    tally: Arc<Tally>,
    /// The loaded parts of each block of version 0: none; `COMING` while a thread is loading; or the marks of the
    /// loaded parts.
    loaded: Box<[AtomicU8]>,
}

impl KeepsSpares for StoreShared {
    fn give_back(&self) {
        if let Some(mut inner) = self.inner.try_lock_for(available::LOCKED_FOR_LONG) {
            let retain = inner.limits.retain;
            inner.store.give_back(retain);
        }
    }
}

#[derive(Debug)]
struct Inner {
    store: RegionStore,
    limits: Limits,
    /// Set until version 0 is complete.
    loading: Option<Arc<Loading>>,
    /// Whether masters and optimizer state are loaded, too. Then all of them must come.
    loads_state: bool,
    /// Gone when the last job has gone.
    running: Weak<Alive>,
    /// The number of readers of the newest version's state.
    readers: usize,
    /// The number of threads that are about to be readers.
    coming_readers: usize,
    /// The state of the newest version is about to be changed in place. It gets no more readers.
    making: bool,
    /// Sums of contributions may lie where the version will be. A device has not registered their own memory.
    adds_there: bool,
}

const COMING: u8 = 1;
const THERE: u8 = 2;

/// The mark of a kind of data other than weights.
fn mark_of(what: Kept) -> u8 {
    match what {
        Kept::Weights => THERE,
        Kept::Masters => 4,
        Kept::Slot(0) => 8,
        Kept::Slot(_) => 16,
    }
}

impl PartitionStore {
    /// Memory for `partition`, to be trained by `reducer`: version 0, which must be loaded, the versions after it,
    /// and optimizer state. All of it is taken from the system now.
    ///
    /// # Errors
    /// [`PartitionError::Memory`].
    pub fn new(
        partition: PartitionLayout,
        reducer: Reducer,
        limits: Limits,
    ) -> Result<PartitionStore, PartitionError> {
        PartitionStore::with_state(partition, reducer, limits, Home::default())
    }

    /// Like [`Self::new`], with so many copies of optimizer state, or with the state on a device.
    ///
    /// # Errors
    /// [`PartitionError::Memory`], [`PartitionError::Device`].
    pub fn with_state(
        partition: PartitionLayout,
        reducer: Reducer,
        limits: Limits,
        home: impl Into<Home>,
    ) -> Result<PartitionStore, PartitionError> {
        let layout = partition.layout();
        let mut store = RegionStore::new(Arc::clone(layout), &home.into(), reducer)?;
        store.prepare(reducer, false)?;
        let loading = store.loading().map(Arc::new);
        // Together with the retained ones, every version has a buffer then, unless a reader holds an old one.
        for _ in 0..limits.retain {
            let spare = store.new_spare()?;
            spare.region().memory().prefault()?;
            store.add_spare(spare);
        }
        let loaded = (0..layout.blocks()).map(|_| AtomicU8::new(0)).collect();
        let sums = Arc::new(Sums::new(Arc::clone(layout))?);
        let inner = Mutex::new(Inner {
            store,
            limits,
            loading,
            loads_state: false,
            running: Weak::new(),
            readers: 0,
            coming_readers: 0,
            making: false,
            adds_there: true,
        });
        let tally = Arc::default();
        let shared = Arc::new(StoreShared { partition, inner, sums, tally, loaded });
        let keeper = Arc::downgrade(&shared);
        available::asks_for_spares(keeper);
        Ok(PartitionStore { shared })
    }

    /// The blocks of the partition.
    pub fn partition(&self) -> &PartitionLayout {
        &self.shared.partition
    }

    /// The count of payload.
    pub fn tally(&self) -> &Tally {
        &self.shared.tally
    }

    fn layout(&self) -> &Arc<ModelLayout> {
        self.shared.partition.layout()
    }

    /// Loads a block of version 0. False, without effect, if it was loaded before or is being loaded.
    ///
    /// # Errors
    /// [`PartitionError::NoBlock`], [`PartitionError::Length`], [`PartitionError::Loaded`].
    pub fn load(&self, block: BlockId, bytes: &[u8]) -> Result<bool, PartitionError> {
        check_payload(self.layout(), block, Payload::Plain(bytes))?;
        let loading = self.shared.inner.lock().loading.clone().ok_or(PartitionError::Loaded)?;
        let mark = &self.shared.loaded[block.index()];
        if mark.compare_exchange(0, COMING, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Ok(false);
        }
        // SAFETY: the mark makes the block this thread's, and version 0 is shown only when all blocks are loaded.
        let loaded = unsafe { loading.load(block, bytes) };
        // The handle is dropped before the block counts: a thread that sees all blocks loaded finds no other thread
        // at the memory.
        drop(loading);
        mark.store(if loaded.is_ok() { THERE } else { 0 }, Ordering::Release);
        Ok(loaded.map(|()| true)?)
    }

    /// Fills all of version 0, whose blocks lie one behind the other in memory. Then it is complete.
    ///
    /// # Errors
    /// The errors of `fill`; [`PartitionError::Loaded`], [`PartitionError::Busy`] while a block is being loaded,
    /// [`PartitionError::Device`].
    pub fn load_whole(&self, fill: impl FnOnce(&Mapping) -> io::Result<()>) -> Result<(), PartitionError> {
        let loading = self.shared.inner.lock().loading.clone().ok_or(PartitionError::Loaded)?;
        let mark = |from: u8, to: u8| {
            let set = |mark: &AtomicU8| {
                mark.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            };
            self.shared.loaded.iter().all(set)
        };
        if !mark(0, COMING) {
            return Err(PartitionError::Busy);
        }
        fill(loading.memory())?;
        // SAFETY: the marks make all blocks this thread's, and version 0 is shown only when they are loaded.
        (0..self.layout().blocks()).try_for_each(|block| unsafe { loading.filled(BlockId(block)) })?;
        drop(loading);
        mark(COMING, THERE);
        self.finish_loading()
    }

    /// Whether version 0 is complete.
    pub fn is_loaded(&self) -> bool {
        self.shared.inner.lock().loading.is_none()
    }

    /// Version 0 is complete: it can be read, and plans can begin. A second call does nothing.
    ///
    /// # Errors
    /// [`PartitionError::NotLoaded`] names the first block that has not come. [`PartitionError::Busy`] while a block
    /// that came twice is being handled.
    pub fn finish_loading(&self) -> Result<(), PartitionError> {
        let mut inner = self.shared.inner.lock();
        let Some(loading) = inner.loading.take() else { return Ok(()) };
        let loads_state = inner.loads_state;
        let wanted = |block: BlockId| {
            let state = if loads_state { loading.wants(block) } else { Vec::new() };
            state.into_iter().fold(THERE, |marks, what| marks | mark_of(what))
        };
        let marks = (0..).map(BlockId).zip(&self.shared.loaded);
        let is_missing = |(block, mark): &(BlockId, &AtomicU8)| {
            let mark = mark.load(Ordering::Acquire);
            mark & COMING != 0 || mark & wanted(*block) != wanted(*block)
        };
        if let Some((missing, _)) = marks.into_iter().find(is_missing) {
            inner.loading = Some(loading);
            return Err(PartitionError::NotLoaded(missing));
        }
        match Arc::try_unwrap(loading) {
            Ok(_) => {
                inner.store.loaded();
                Ok(())
            }
            Err(loading) => {
                inner.loading = Some(loading);
                Err(PartitionError::Busy)
            }
        }
    }

    /// Begins a plan from version `base`. `check` asks to search for NaN and Inf.
    ///
    /// # Errors
    /// [`PartitionError::Busy`] as long as anything of the last job is left (jobs, targets and merges hold
    /// it), somebody reads what is kept, or too many slow readers read blocks of dropped plans, and
    /// [`PartitionError::NoBuffer`], pass. [`PartitionError::Base`], [`PartitionError::Loading`],
    /// [`PartitionError::Memory`], [`PartitionError::Device`].
    pub fn begin(&self, base: Version, work: Work, check: bool) -> Result<Arc<PartitionJob>, PartitionError> {
        let mut inner = self.shared.inner.lock();
        let newest = inner.ready()?;
        inner.store.arrays().map_or(Ok(()), |arrays| arrays.check())?;
        if base != newest {
            return Err(PartitionError::Base { expected: newest, got: base });
        }
        let (retain, max) = (inner.limits.retain, inner.limits.max());
        if !inner.store.leave_to_readers(max) {
            return Err(PartitionError::Busy);
        }
        if !matches!(work, Work::Add { .. } | Work::Measure { .. }) && !inner.store.recycle(retain, max) {
            return Err(PartitionError::NoBuffer { max });
        }
        let (partition, next) = (&self.shared.partition, newest.next());
        let in_place = inner.changes_in_place(&work);
        let builder = match &work {
            Work::Add { .. } | Work::Measure { .. } => None,
            Work::Reduce { step, tensors, groups, factors, fresh_state } => {
                inner.store.prepare(groups.widest(step.reducer), *fresh_state)?;
                let steps = ByteSteps::of_partition(partition, tensors, groups, factors);
                let adds_up = !step.reducer.combine().replaces();
                let adds_there = in_place && adds_up && inner.adds_there && inner.store.versions_hold_sums();
                let how = How { check, adds_there, leaves_masters: false, fresh_state: *fresh_state };
                Some(inner.store.next_version(next, None, steps, how)?)
            }
            // New weights that lie in a buffer of this store stay where they are.
            Work::Assign { token } => {
                let written = inner.store.lent(RegionKey(*token));
                let all = TensorSteps::uniform(partition.tensor_ends().len(), 1);
                let steps =
                    ByteSteps::of_partition(partition, &all, &Groups::default(), &TensorFactors::default());
                let how = How { check, leaves_masters: in_place, ..How::default() };
                Some(inner.store.next_version(next, written, steps, how)?)
            }
        };
        if work.combine().is_some_and(Combine::replaces) {
            self.shared.sums.keep_raw();
        }
        let measure = match &work {
            Work::Measure { step, tensors, groups, quantity } => {
                let counts = ByteSteps::of_partition(partition, tensors, groups, &TensorFactors::default());
                let steps = (groups.steps(step), counts);
                Some(inner.store.measuring(partition, steps, *quantity).ok_or(PartitionError::Loading)?)
            }
            _ => None,
        };
        let StoreShared { sums, tally, .. } = &*self.shared;
        let shared = (Arc::clone(sums), Arc::clone(tally));
        let job =
            PartitionJob::new(Arc::clone(self.layout()), shared, work, builder, measure, (check, in_place));
        inner.running = Arc::downgrade(job.alive());
        Ok(Arc::new(job))
    }

    /// Sets the final steps and factors of tensors, for a job that has begun before they were known. Blocks that are
    /// computed already do not change.
    pub fn seal(&self, job: &PartitionJob, tensors: &TensorSteps, factors: &TensorFactors) {
        if let (Some(builder), Work::Reduce { groups, .. }) = (job.builder(), job.work()) {
            builder.seal(ByteSteps::of_partition(&self.shared.partition, tensors, groups, factors));
        }
    }

    /// Whether there is a buffer for the next version, or may be one more. Buffers that nobody needs any more are found
    /// first.
    pub fn find_buffer(&self) -> bool {
        let mut inner = self.shared.inner.lock();
        let max = inner.limits.max();
        inner.reuse();
        inner.store.may_go_on(max)
    }

    /// The number of version buffers, and of those that nobody needs.
    pub fn buffer_counts(&self) -> (usize, usize) {
        self.shared.inner.lock().store.buffers()
    }

    /// Why there is no memory for the next version, if there is none and readers hold all buffers that exist.
    pub fn shortage(&self) -> Option<String> {
        let mut inner = self.shared.inner.lock();
        // A reader may have let go of one meanwhile.
        inner.reuse();
        inner.store.shortage().map(str::to_owned)
    }

    /// A buffer of the partition's size for new weights. It counts as existing until it is dropped.
    ///
    /// # Errors
    /// When the most buffers exist, or there is no memory.
    pub fn take_buffer(&self) -> io::Result<Region> {
        let mut inner = self.shared.inner.lock();
        let max = inner.limits.max();
        // A reader may have let go of one meanwhile.
        inner.reuse();
        inner.store.take_buffer(max)
    }

    /// Whether a plan of this work changes state in place. Its version is made by [`Self::make`], once it counts.
    pub fn changes_in_place(&self, work: &Work) -> bool {
        self.shared.inner.lock().changes_in_place(work)
    }

    /// Whether [`Self::begin`] would find all the memory that it needs, and so take no time.
    pub fn is_prepared(&self, work: &Work) -> bool {
        let mut inner = self.shared.inner.lock();
        inner.reuse();
        match work {
            Work::Add { .. } | Work::Measure { .. } => true,
            Work::Reduce { step, groups, fresh_state, .. } => {
                inner.store.is_prepared(groups.widest(step.reducer), *fresh_state)
            }
            Work::Assign { .. } => inner.store.has_buffer(),
        }
    }

    /// Concludes the job. Its result counts from now on: as the newest version, or as part of the sum that later
    /// plans add to. If a [`Merge`] is returned, sums must be added to each other first, on any threads.
    ///
    /// # Errors
    /// [`PartitionError::Over`] if the job was concluded or given up. [`PartitionError::Unfinished`] names a block of
    /// the version that is not computed, and [`PartitionError::Claimed`] one that a thread is working on.
    pub fn conclude(&self, job: &Arc<PartitionJob>) -> Result<Option<Merge>, PartitionError> {
        let mut inner = self.shared.inner.lock();
        if !std::ptr::eq(inner.running.as_ptr(), Arc::as_ptr(job.alive())) || job.is_over() {
            return Err(PartitionError::Over);
        }
        let Some(builder) = job.builder() else {
            let both = job.seal()?;
            return Ok((!both.is_empty()).then(|| Merge::new(Arc::clone(job), both)));
        };
        if let Some(failure) = job.failure() {
            // Nothing changes the state any more, and whoever waits for it hears why it is lost.
            inner.making = false;
            return Err(failure.into());
        }
        job.check_finished()?;
        inner.store.publish_next(builder);
        if let Work::Reduce { step, groups, .. } = job.work() {
            inner.store.has_used(groups.widest(step.reducer));
            self.shared.sums.clear();
        }
        job.give_up();
        inner.making = false;
        inner.reuse();
        Ok(None)
    }

    /// Takes the memory that `reducer` needs now, and not when the next plan begins. `fresh` starts its state from
    /// zero.
    ///
    /// # Errors
    /// [`PartitionError::Busy`] while a job exists, [`PartitionError::Loading`], [`PartitionError::Memory`],
    /// [`PartitionError::Device`].
    pub fn prepare(&self, reducer: Reducer, fresh: bool) -> Result<(), PartitionError> {
        let mut inner = self.shared.inner.lock();
        inner.ready()?;
        Ok(inner.store.prepare(reducer, fresh)?)
    }

    /// Sets the limits on versions.
    pub fn set_limits(&self, limits: Limits) {
        let mut inner = self.shared.inner.lock();
        inner.limits = limits;
        inner.reuse();
    }

    /// Takes the pages of as many sums (at most 2) as plans are going to need: one if several clients send the same
    /// block or if plans add up, two if both. A plan may run meanwhile.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn prefault_sums(&self, count: usize) -> io::Result<()> {
        self.shared.sums.prefault(count)
    }

    /// From now on, so many versions before the newest are kept, whether they are pinned or not.
    pub fn retain(&self, count: usize) {
        let mut inner = self.shared.inner.lock();
        inner.limits.retain = inner.limits.retain.max(count);
    }

    /// Makes a buffer with its pages, if fewer than `count` are there for the next version and later ones. False if
    /// none was needed.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn add_spare(&self, count: usize) -> io::Result<bool> {
        let buffer = {
            let mut inner = self.shared.inner.lock();
            let max = inner.limits.max();
            inner.reuse();
            if !inner.store.wants_spares(count, max) {
                return Ok(false);
            }
            inner.store.new_spare()?
        };
        let outcome = buffer.region().memory().prefault();
        // It is a buffer even if its pages could not be taken.
        self.shared.inner.lock().store.add_spare(buffer);
        outcome.map(|()| true)
    }

    /// The newest version. None until it is loaded.
    pub fn newest(&self) -> Option<PinnedVersion> {
        PinnedVersion::new(&self.shared, None)
    }

    /// A version, if it still exists.
    pub fn version(&self, version: Version) -> Option<PinnedVersion> {
        PinnedVersion::new(&self.shared, Some(version))
    }

    /// The versions in memory, in rising order.
    pub fn versions(&self) -> Vec<Version> {
        self.shared.inner.lock().store.versions().collect()
    }

    /// The memory of versions, including the next one and later ones.
    pub fn buffers(&self) -> Vec<Arc<Mapping>> {
        self.shared.inner.lock().store.memory().map(Arc::clone).collect()
    }

    /// Promises the partition the memory of one sum, whose pages are taken by the first contributions.
    ///
    /// # Errors
    /// [`PartitionError::Memory`].
    pub fn promise_sums(&self) -> Result<(), PartitionError> {
        Ok(available::promise(self.shared.sums.memory()[0])?)
    }

    /// The memory of sums, into which payloads can come (see [`PartitionJob::destination`]). From the next plan on,
    /// they come nowhere else.
    pub fn sum_memory(&self) -> [Arc<Mapping>; 2] {
        self.shared.inner.lock().adds_there = false;
        self.shared.sums.memory().map(Arc::clone)
    }

    /// Notifies `watch` of all versions from now on, beginning with those that exist. There are none while version 0
    /// is being loaded.
    pub fn watch(&self, watch: Arc<dyn VersionWatch>) {
        self.shared.inner.lock().store.watch(watch);
    }

    /// The memory that is taken from the system.
    pub fn taken(&self) -> ShardMemory {
        let inner = self.shared.inner.lock();
        let versions: Vec<_> =
            inner.store.memory().map(Arc::clone).chain(inner.store.lent_memory()).collect();
        let state = inner.store.state_taken();
        drop(inner);
        ShardMemory {
            versions: versions.iter().map(|memory| memory.taken()).sum(),
            state,
            sums: self.shared.sums.taken(),
        }
    }

    /// Whether a device has the optimizer state, and makes versions.
    pub fn is_on_device(&self) -> bool {
        self.shared.inner.lock().store.arrays().is_some()
    }

    /// The memory of a device in use: of weights and masters, and of optimizer state. `None` if the model is not on
    /// one.
    pub fn device_bytes(&self) -> Option<(u64, u64)> {
        self.shared.inner.lock().store.arrays().map(|arrays| arrays.bytes())
    }

    /// The memory in use, of the host.
    pub fn bytes(&self) -> MemoryUse {
        let inner = self.shared.inner.lock();
        let (masters, state) = inner.store.state_bytes();
        let versions = inner.store.buffers().0 as u64 * self.layout().size();
        MemoryUse { versions, masters, state, sums: self.shared.sums.bytes(), staging: 0 }
    }
}

impl Inner {
    /// The newest version, if a plan can start from it.
    fn ready(&self) -> Result<Version, PartitionError> {
        if self.loading.is_some() {
            return Err(PartitionError::Loading);
        }
        if self.running.strong_count() > 0 || self.readers > 0 || self.coming_readers > 0 {
            return Err(PartitionError::Busy);
        }
        // The last holder has dropped the job with release, so everything that the holders have written is visible
        // from here on.
        fence(Ordering::Acquire);
        self.store.versions().next_back().ok_or(PartitionError::Busy)
    }

    /// Whether work of a plan changes state that cannot be restored.
    fn changes_in_place(&self, work: &Work) -> bool {
        match work {
            Work::Reduce { step, groups, .. } => self.store.changes_in_place(groups.widest(step.reducer)),
            Work::Assign { .. } => self.store.changes_in_place(Reducer::Assign),
            Work::Add { .. } | Work::Measure { .. } => false,
        }
    }

    /// Finds buffers that nobody needs any more.
    fn reuse(&mut self) {
        let max = self.limits.max();
        self.store.reuse(self.limits.retain, max);
    }
}

/// Refuses a payload that does not fit `block`.
fn check_payload(layout: &ModelLayout, block: BlockId, payload: Payload<'_>) -> Result<(), PartitionError> {
    if block.0 >= layout.blocks() {
        return Err(PartitionError::NoBlock { block, blocks: layout.blocks() });
    }
    let (expected, got) = (payload.wanted_len(layout, block), payload.bytes().len());
    if expected != got {
        return Err(PartitionError::Length { block, expected, got });
    }
    payload.check(layout, block).map_err(|fault| PartitionError::Coding { block, fault })
}
