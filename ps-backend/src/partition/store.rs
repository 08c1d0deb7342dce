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

mod accumulator;
mod ahead;
mod buffer;
mod builder;
pub(crate) mod changes;
mod coded;
mod error;
mod job;
mod kept;
mod loading;
mod making;
mod measuring;
mod merge;
mod newest;
pub(crate) mod pieces;
mod pinned;
mod places;
mod state;
mod sums;
pub mod table;
mod versions;

use std::io;
use std::sync::atomic::{AtomicU8, Ordering, fence};
use std::sync::{Arc, Weak};

use libmodelio::bytes::available::{self, KeepsSpares};
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
use libmodelio::wire::Work;
use parking_lot::Mutex;

pub use accumulator::Payload;
use ahead::Ahead;
pub use ahead::Comparison;
pub use buffer::EarlyBlock;
use builder::{How, VersionBuilder};
use changes::ChangeLog;
pub use changes::Since;
pub use error::PartitionError;
use job::Alive;
pub use job::{BlockInput, PartitionJob, Target};
pub use kept::PinnedState;
pub use making::Making;
use measuring::Measuring;
pub use merge::Merge;
use newest::Newest;
pub use pinned::{PinnedVersion, ShownVersion};
pub use places::kept_range;
pub use state::Home;
use state::State;
use sums::Sums;
use versions::Versions;
pub use versions::{Limits, VersionWatch};

use crate::memory::MemoryUse;

/// The versions whose changes are known, until the coordinator says another number.
const KEPT_CHANGES: usize = 16;

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
            inner.versions.give_back();
        }
    }
}

#[derive(Debug)]
struct Inner {
    versions: Versions,
    state: State,
    /// What has changed in the newest versions.
    changes: ChangeLog,
    /// New weights that are compared with the newest version while they are written.
    ahead: Option<Arc<Ahead>>,
    /// Set until version 0 is complete.
    loading: Option<Arc<Newest>>,
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
    /// Sums of contributions may lie where the version will be: elements have the type and the place of their sums, and
    /// a device has not registered their own memory.
    adds_there: bool,
}

impl PartitionStore {
    /// Memory for `partition`, to be trained by `reducer`: version 0, which must be loaded, the versions after it,
    /// and optimizer state, which `home` has. All of it is promised by the system now. Its pages are taken by the time
    /// that version 0 is complete.
    ///
    /// # Errors
    /// [`PartitionError::Memory`], [`PartitionError::Device`].
    pub fn new(
        partition: PartitionLayout,
        reducer: Reducer,
        limits: Limits,
        home: Home,
    ) -> Result<PartitionStore, PartitionError> {
        let layout = partition.layout();
        let mut state = State::new(layout, &home, reducer)?;
        let versions = Versions::new(layout, limits)?;
        if let Some(arrays) = &state.arrays {
            versions.memory().for_each(|memory| arrays.pin(memory));
        }
        state.prepare(reducer, false)?;
        let mut inner = Inner {
            versions,
            state,
            changes: ChangeLog::new(layout.size(), KEPT_CHANGES),
            ahead: None,
            loading: None,
            loads_state: false,
            running: Weak::new(),
            readers: 0,
            coming_readers: 0,
            making: false,
            adds_there: places::are_those_of_sums(layout),
        };
        inner.loading = inner.newest(layout).map(Arc::new);
        let loaded = (0..layout.blocks()).map(|_| AtomicU8::new(0)).collect();
        let sums = Arc::new(Sums::new(Arc::clone(layout))?);
        let (inner, tally) = (Mutex::new(inner), Arc::default());
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
        inner.state.arrays.as_ref().map_or(Ok(()), |arrays| arrays.check())?;
        if base != newest {
            return Err(PartitionError::Base { expected: newest, got: base });
        }
        if !inner.versions.leave_to_readers() {
            return Err(PartitionError::Busy);
        }
        if work.makes_version() && !inner.versions.recycle() {
            return Err(PartitionError::NoBuffer { max: inner.versions.limits.max() });
        }
        let StoreShared { partition, sums, tally, .. } = &*self.shared;
        let (layout, none) = (self.layout(), TensorFactors::default());
        let in_place = inner.state.changes_in_place(&work);
        let made = match &work {
            Work::Add { .. } | Work::Measure { .. } => None,
            Work::Reduce { step, tensors, groups, factors, fresh_state } => {
                let is_prepared = inner.state.is_prepared(groups.widest(step.reducer), *fresh_state);
                let has_new_masters = inner.state.prepare(groups.widest(step.reducer), *fresh_state)?;
                // First of all they get their values: another plan takes them as they are.
                if has_new_masters {
                    let newest = inner.newest(layout).ok_or(PartitionError::Loading)?;
                    newest.make_masters()?;
                }
                if !is_prepared {
                    inner.state.memory().try_for_each(|memory| memory.prefault())?;
                }
                let steps = ByteSteps::of_partition(partition, tensors, groups, factors);
                let adds_up = !step.reducer.combine().replaces();
                let adds_there = in_place && adds_up && inner.adds_there;
                let (assigns, fresh_state) = (!adds_up, *fresh_state);
                let how = How { check, adds_there, assigns, leaves_masters: false, fresh_state };
                Some((None, steps, how))
            }
            // New weights that lie in a buffer of this store stay where they are.
            Work::Assign { token } => {
                let written = inner.versions.lent(RegionKey(*token));
                let all = TensorSteps::uniform(partition.tensor_ends().len(), 1);
                let steps = ByteSteps::of_partition(partition, &all, &Groups::default(), &none);
                Some((
                    written,
                    steps,
                    How { check, assigns: true, leaves_masters: in_place, ..How::default() },
                ))
            }
        };
        let ahead = match &work {
            Work::Assign { token } => inner.ahead.take_if(|ahead| ahead.is_of(RegionKey(*token), newest)),
            _ => None,
        };
        let build = |(written, steps, how)| {
            let changes = inner.changes.next(layout.blocks()).map(|changes| (changes, ahead));
            VersionBuilder::new(layout, (&inner.versions, &inner.state), (written, changes), steps, how)
        };
        let builder = made.map(build).transpose()?;
        if work.combine().is_some_and(Combine::replaces) {
            sums.keep_raw();
        }
        let measure = match &work {
            Work::Measure { step, tensors, groups, quantity } => {
                let counts = ByteSteps::of_partition(partition, tensors, groups, &none);
                let newest = inner.newest(layout).ok_or(PartitionError::Loading)?;
                Some(Measuring::new(partition, (groups.steps(step), counts), *quantity, newest))
            }
            _ => None,
        };
        let shared = (Arc::clone(sums), Arc::clone(tally));
        let job = PartitionJob::new(Arc::clone(layout), shared, work, builder, measure, (check, in_place));
        inner.running = Arc::downgrade(&job.alive);
        Ok(Arc::new(job))
    }

    /// Sets the final steps and factors of tensors, for a job that has begun before they were known. Blocks that are
    /// computed already do not change.
    pub fn seal(&self, job: &PartitionJob, tensors: &TensorSteps, factors: &TensorFactors) {
        if let (Some(builder), Work::Reduce { groups, .. }) = (&job.builder, &job.work) {
            let steps = ByteSteps::of_partition(&self.shared.partition, tensors, groups, factors);
            let _ = builder.sealed.set(steps);
        }
    }

    /// Whether there is a buffer for the next version, or may be one more. Buffers that nobody needs any more are found
    /// first.
    pub fn find_buffer(&self) -> bool {
        let mut inner = self.shared.inner.lock();
        inner.versions.reuse();
        inner.versions.may_go_on()
    }

    /// The number of version buffers, and of those that nobody needs.
    pub fn buffer_counts(&self) -> (usize, usize) {
        self.shared.inner.lock().versions.counts()
    }

    /// Why there is no memory for the next version, if there is none and readers hold all buffers that exist.
    pub fn shortage(&self) -> Option<String> {
        let mut inner = self.shared.inner.lock();
        // A reader may have let go of one meanwhile.
        inner.versions.reuse();
        inner.versions.shortage()
    }

    /// A buffer of the partition's size for new weights. It counts as existing until it is dropped.
    ///
    /// # Errors
    /// When the most buffers exist, or there is no memory.
    pub fn take_buffer(&self) -> io::Result<Region> {
        let mut inner = self.shared.inner.lock();
        // A reader may have let go of one meanwhile.
        inner.versions.reuse();
        inner.versions.take_buffer()
    }

    /// Whether a plan of this work changes state in place. Its version is made by [`Self::make`], once it counts.
    pub fn changes_in_place(&self, work: &Work) -> bool {
        self.shared.inner.lock().state.changes_in_place(work)
    }

    /// Whether [`Self::begin`] would find all the memory that it needs, and so take no time.
    pub fn is_prepared(&self, work: &Work) -> bool {
        let mut inner = self.shared.inner.lock();
        inner.versions.reuse();
        match work {
            Work::Add { .. } | Work::Measure { .. } => true,
            Work::Reduce { step, groups, fresh_state, .. } => {
                let reducer = groups.widest(step.reducer);
                inner.versions.has_buffer() && inner.state.is_prepared(reducer, *fresh_state)
            }
            Work::Assign { .. } => inner.versions.has_buffer(),
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
        inner.check_running(job)?;
        let Some(builder) = &job.builder else {
            let both = job.seal()?;
            return Ok((!both.is_empty()).then(|| Merge::new(Arc::clone(job), both)));
        };
        if let Some(failure) = job.failed.get() {
            // Nothing changes the state any more, and whoever waits for it hears why it is lost.
            inner.making = false;
            return Err(failure.clone().into());
        }
        job.check_finished()?;
        inner.versions.publish(builder.version, &builder.back);
        inner.changes.publish(builder.version, builder.changes.clone());
        inner.state.copies.reverse();
        if let Work::Reduce { step, groups, .. } = &job.work {
            inner.state.slots_used |= groups.widest(step.reducer).state_slots() > 0;
            self.shared.sums.clear();
        }
        job.give_up();
        inner.making = false;
        inner.versions.reuse();
        Ok(None)
    }

    /// Sets the limits on versions.
    pub fn set_limits(&self, limits: Limits) {
        let mut inner = self.shared.inner.lock();
        inner.versions.limits = limits;
        inner.versions.reuse();
    }

    /// From now on, it is known of so many versions what has changed in them.
    pub fn keep_changes(&self, versions: usize) {
        self.shared.inner.lock().changes.keep(versions);
    }

    /// These blocks of new weights are whole, in a buffer of [`Self::take_buffer`]. Returns how they are compared with the
    /// newest version, if its changes are recorded. One buffer at a time is compared so.
    pub fn compare_ahead(&self, buffer: RegionKey, blocks: &[BlockId]) -> Option<Comparison> {
        let inner = &mut *self.shared.inner.lock();
        let base = inner.ready().ok().filter(|_| inner.changes.are_kept())?;
        let memory = inner.versions.lent_memory_of(buffer)?;
        // Another buffer has the room as long as it is written for the same version.
        let is_over = |ahead: &mut Arc<Ahead>| {
            let other = ahead.buffer();
            !ahead.is_of(other, base) || other != buffer && inner.versions.lent_memory_of(other).is_none()
        };
        inner.ahead.take_if(is_over);
        let new = || Ahead::new(buffer, base, self.layout().blocks());
        let ahead = Arc::clone(inner.ahead.get_or_insert_with(new));
        if !ahead.is_of(buffer, base) {
            return None;
        }
        let makes_checksums = inner.changes.makes_checksums();
        let base = PinnedVersion::of(&self.shared, inner, Some(base))?;
        Some(Comparison { ahead, base, memory, makes_checksums, blocks: blocks.into() })
    }

    /// New weights in this buffer are written again: nothing that was found of them counts.
    pub fn forget_ahead(&self, buffer: RegionKey) {
        self.shared.inner.lock().ahead.take_if(|ahead| ahead.buffer() == buffer);
    }

    /// What has changed after `base` until `version`, if that is known.
    pub fn since(&self, base: Version, version: Version) -> Option<Since> {
        self.shared.inner.lock().changes.since(base, version)
    }

    /// From now on, so many versions before the newest are kept, whether they are pinned or not.
    pub fn retain(&self, count: usize) {
        let limits = &mut self.shared.inner.lock().versions.limits;
        limits.retain = limits.retain.max(count);
    }

    /// Makes a buffer with its pages, if fewer than `count` are there for the next version and later ones. False if
    /// none was needed.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn add_spare(&self, count: usize) -> io::Result<bool> {
        let buffer = {
            let mut inner = self.shared.inner.lock();
            inner.versions.reuse();
            inner.versions.new_spare(count)?
        };
        let Some(buffer) = buffer else { return Ok(false) };
        let outcome = buffer.region.memory().prefault();
        // It is a buffer even if its pages could not be taken.
        self.shared.inner.lock().versions.add_spare(buffer);
        outcome.map(|()| true)
    }

    /// The newest version. None until it is loaded.
    pub fn newest(&self) -> Option<PinnedVersion> {
        PinnedVersion::of(&self.shared, &mut self.shared.inner.lock(), None)
    }

    /// A version, if it still exists.
    pub fn version(&self, version: Version) -> Option<PinnedVersion> {
        PinnedVersion::of(&self.shared, &mut self.shared.inner.lock(), Some(version))
    }

    /// The versions in memory, in rising order.
    pub fn versions(&self) -> Vec<Version> {
        self.shared.inner.lock().versions.table.keys().copied().collect()
    }

    /// The memory of versions, including the next one and later ones.
    pub fn buffers(&self) -> Vec<Arc<Mapping>> {
        self.shared.inner.lock().versions.memory().map(Arc::clone).collect()
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
        self.shared.inner.lock().versions.watch(watch);
    }

    /// The memory that is taken from the system.
    pub fn taken(&self) -> ShardMemory {
        let inner = self.shared.inner.lock();
        let versions: Vec<_> =
            inner.versions.memory().map(Arc::clone).chain(inner.versions.lent_memory()).collect();
        let (state, changes) = (inner.state.taken(), inner.changes.taken());
        drop(inner);
        ShardMemory {
            versions: versions.iter().map(|memory| memory.taken()).sum::<u64>() + changes,
            state,
            sums: self.shared.sums.taken(),
        }
    }

    /// Whether a device has the optimizer state, and makes versions.
    pub fn is_on_device(&self) -> bool {
        self.shared.inner.lock().state.arrays.is_some()
    }

    /// The memory of a device in use: of weights and masters, and of optimizer state. `None` if the model is not on
    /// one.
    pub fn device_bytes(&self) -> Option<(u64, u64)> {
        self.shared.inner.lock().state.arrays.as_ref().map(|arrays| arrays.bytes())
    }

    /// The memory in use, of the host.
    pub fn bytes(&self) -> MemoryUse {
        let inner = self.shared.inner.lock();
        let (masters, state) = inner.state.bytes();
        let versions = inner.versions.counts().0 as u64 * self.layout().size();
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
        self.versions.newest().map(|(version, _)| version).ok_or(PartitionError::Busy)
    }

    /// A handle on the data of the newest version.
    fn newest(&self, layout: &Arc<ModelLayout>) -> Option<Newest> {
        let (_, weights) = self.versions.newest()?;
        Some(Newest::new(layout, Arc::clone(weights), &self.state))
    }

    /// Refuses a job that was concluded, given up or replaced.
    fn check_running(&self, job: &PartitionJob) -> Result<(), PartitionError> {
        let is_this = std::ptr::eq(self.running.as_ptr(), Arc::as_ptr(&job.alive));
        if is_this && !job.is_over() { Ok(()) } else { Err(PartitionError::Over) }
    }
}

fn check_block(layout: &ModelLayout, block: BlockId) -> Result<(), PartitionError> {
    let blocks = layout.blocks();
    if block.0 < blocks { Ok(()) } else { Err(PartitionError::NoBlock { block, blocks }) }
}

/// Refuses a payload that does not fit `block`.
fn check_payload(layout: &ModelLayout, block: BlockId, payload: Payload<'_>) -> Result<(), PartitionError> {
    check_block(layout, block)?;
    let (expected, got) = (payload.wanted_len(layout, block), payload.bytes().len());
    if expected != got {
        return Err(PartitionError::Length { block, expected, got });
    }
    payload.check(layout, block).map_err(|fault| PartitionError::Coding { block, fault })
}
