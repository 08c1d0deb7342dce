//! A shard in the same process as its clients: the edge around [`ShardCore`].
//!
//! It owns the lock, the clock, the memory and the worker threads; the core decides. A pushed block is
//! reduced by the thread that brings it, from the buffer it came in; passes over many blocks run on the
//! worker pool, so that no request thread waits for another learner's work.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use libmodelio::ids::{BlockId, LearnerId, Version};
use libmodelio::layout::ModelLayout;
use libmodelio::mmap::Mapping;
use libmodelio::transport::{
    BlockSlot, Channel, CommitNotice, Completion, Device, LeaveReason, Message, Placement, Region, RegionKey,
    Reply, ShardError, TransportKind,
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rayon::prelude::*;

use crate::controls::{Controls, NonFinite};
use crate::core::{Action, Answer, Arrival, Contribution, MemberView, Plan, ShardCore, Ticket};
use crate::reducer::Reducer;
use crate::region_store::{self, Job, RegionStore, VersionBuffer};

/// What happens in a shard, for whoever shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A version is complete; opens from now on see it.
    Published(Version),
    /// A learner is no longer in the job.
    Left(LearnerId, LeaveReason),
}

/// Called for every [`Event`], with no lock held.
pub type Listener = Box<dyn Fn(Event) + Send + Sync>;

/// What a shard has done since its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardStatus {
    /// `forming`, `running`, `reducing` or `stopped`.
    pub state: &'static str,
    /// The newest version.
    pub version: Version,
    /// Learners in the job.
    pub members: Vec<MemberView>,
    /// Of them, those whose contribution to the coming version is in.
    pub committed: usize,
    /// Contributions that are part of a version.
    pub contributions: u64,
    /// Blocks reduced straight from the request buffer.
    pub blocks_on_arrival: u64,
    /// Version buffers in existence, and those free.
    pub buffers: (usize, usize),
    /// Versions in memory.
    pub versions: Vec<Version>,
}

struct Inner {
    core: ShardCore<Region>,
    store: RegionStore,
    completions: HashMap<Ticket, Completion>,
    next_ticket: Ticket,
    /// The job behind the blocks that are reduced on arrival.
    arrivals: Option<Arc<Job>>,
}

/// A model's shard in this process.
pub struct EmbeddedShard {
    layout: Arc<ModelLayout>,
    started: Instant,
    inner: Mutex<Inner>,
    pool: rayon::ThreadPool,
    listener: Mutex<Option<Arc<Listener>>>,
    wake: Condvar,
    stopping: AtomicBool,
    this: Weak<EmbeddedShard>,
}

/// What has to happen once the lock is released.
#[derive(Default)]
struct After {
    replies: Vec<(Completion, Result<Reply, ShardError>)>,
    events: Vec<Event>,
    jobs: Vec<Box<dyn FnOnce() + Send>>,
}

impl EmbeddedShard {
    /// A shard for a model of this layout with `threads` workers. Fill [`Self::initial`] and call
    /// [`Self::initialised`] before use.
    ///
    /// # Errors
    /// When memory or threads cannot be had.
    pub fn new(
        layout: Arc<ModelLayout>,
        controls: Controls,
        threads: usize,
    ) -> io::Result<Arc<EmbeddedShard>> {
        let store = RegionStore::new(Arc::clone(&layout))?;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("reduce-{i}"))
            .build()
            .map_err(io::Error::other)?;
        let inner = Inner {
            core: ShardCore::new(layout.blocks(), controls),
            store,
            completions: HashMap::new(),
            next_ticket: 1,
            arrivals: None,
        };
        let shard = Arc::new_cyclic(|this| EmbeddedShard {
            layout,
            started: Instant::now(),
            inner: Mutex::new(inner),
            pool,
            listener: Mutex::new(None),
            wake: Condvar::new(),
            stopping: AtomicBool::new(false),
            this: this.clone(),
        });
        let timer = Arc::downgrade(&shard);
        std::thread::Builder::new().name("shard-timer".into()).spawn(move || run_timer(&timer))?;
        Ok(shard)
    }

    /// Version 0's memory, to load the model into.
    pub fn initial(&self) -> Option<Arc<Mapping>> {
        self.inner.lock().store.initial()
    }

    /// The model is loaded.
    ///
    /// # Errors
    /// When optimizer state cannot be had.
    pub fn initialised(&self) -> io::Result<()> {
        let mut inner = self.inner.lock();
        let reducer = inner.core.controls().reducer;
        inner.store.initialised()?;
        inner.store.prepare(reducer, false)
    }

    /// Takes the memory of the buffers that the first versions will need, in the background.
    pub fn warm_up(&self) {
        let retain = self.inner.lock().core.controls().retain as usize;
        for _ in 0..retain + 2 {
            self.add_spare();
        }
    }

    /// Who is told of events.
    pub fn subscribe(&self, listener: Listener) {
        *self.listener.lock() = Some(Arc::new(listener));
    }

    /// The layout.
    pub fn layout(&self) -> &Arc<ModelLayout> {
        &self.layout
    }

    /// The newest version.
    pub fn version(&self) -> Version {
        self.inner.lock().core.version()
    }

    /// The newest version, pinned: it is not recycled before [`Self::unpin`].
    pub fn pin_newest(&self) -> Version {
        let mut inner = self.inner.lock();
        let version = inner.core.version();
        inner.store.pin(version);
        version
    }

    /// Pins `version`. False when it is gone.
    pub fn pin(&self, version: Version) -> bool {
        self.inner.lock().store.pin(version)
    }

    /// Takes `count` pins of `version` back.
    pub fn unpin(&self, version: Version, count: u64) {
        let mut inner = self.inner.lock();
        inner.store.unpin(version, count);
        if version < inner.core.version() {
            let mut actions = Vec::new();
            self.find_buffer(&mut inner, &mut actions);
            self.act(inner, actions);
        }
    }

    /// A version's memory and when it was published.
    pub fn get(&self, version: Version) -> Option<(Arc<VersionBuffer>, SystemTime)> {
        self.inner.lock().store.get(version)
    }

    /// Versions under `versions/`: the newest and the retained.
    pub fn retained(&self) -> Vec<Version> {
        let inner = self.inner.lock();
        let count = inner.core.controls().retain as usize + 1;
        inner.store.versions().rev().take(count).collect()
    }

    /// The settings.
    pub fn controls(&self) -> Controls {
        self.inner.lock().core.controls().clone()
    }

    /// Changes one setting; it takes effect at the next version.
    ///
    /// # Errors
    /// [`crate::controls::ControlError`]; then nothing has changed.
    pub fn set_control(&self, name: &str, value: &str) -> Result<(), crate::controls::ControlError> {
        let mut inner = self.inner.lock();
        let controls = inner.core.controls().with(name, value)?;
        let mut actions = Vec::new();
        inner.core.set_controls(controls, self.now(), &mut actions);
        if !inner.core.is_fusing() {
            // Take the state's memory now rather than under the first contribution. If it cannot be had, the
            // first version under this reducer says so.
            inner.arrivals = None;
            let (reducer, fresh) = (inner.core.controls().reducer, inner.core.optimizer_steps() == 0);
            if let Err(error) = inner.store.prepare(reducer, fresh) {
                tracing::error!(%error, %reducer, "optimizer state");
            }
        }
        self.find_buffer(&mut inner, &mut actions);
        self.act(inner, actions);
        Ok(())
    }

    /// Whether `weights` may be written now.
    ///
    /// # Errors
    /// [`ShardError::NotAllowed`].
    pub fn may_assign(&self) -> Result<(), ShardError> {
        self.inner.lock().core.may_assign()
    }

    /// Whether a committed contribution of `learner` is not yet part of a version.
    pub fn has_unpublished(&self, learner: LearnerId) -> bool {
        self.inner.lock().core.has_unpublished(learner)
    }

    /// Looks for NaN and Inf in the `written` ranges of new weights, if they are to be refused.
    ///
    /// # Errors
    /// [`ShardError::NonFinite`].
    pub fn check_finite(&self, buffer: &Region, written: &[std::ops::Range<u64>]) -> Result<(), ShardError> {
        if self.inner.lock().core.controls().nonfinite != NonFinite::Reject {
            return Ok(());
        }
        match region_store::written_is_finite(&self.layout, buffer, written) {
            None => Ok(()),
            Some(block) => Err(ShardError::NonFinite(block)),
        }
    }

    /// Sign of life from `learner`.
    pub fn touch(&self, learner: LearnerId, attached: Option<bool>) {
        self.inner.lock().core.touch(learner, attached, self.now());
    }

    /// What it is doing.
    pub fn status(&self) -> ShardStatus {
        let inner = self.inner.lock();
        ShardStatus {
            state: inner.core.state(),
            version: inner.core.version(),
            members: inner.core.members(self.now()),
            committed: inner.core.committed(),
            contributions: inner.core.contributions_taken(),
            blocks_on_arrival: inner.core.blocks_on_arrival(),
            buffers: inner.store.buffers(),
            versions: inner.store.versions().collect(),
        }
    }

    /// Fails what waits and takes nothing more.
    pub fn shut_down(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        let waiting: Vec<Completion> = self.inner.lock().completions.drain().map(|(_, done)| done).collect();
        for done in waiting {
            done(Err(ShardError::Unreachable));
        }
        self.wake.notify_all();
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Recycles, and tells the core whether the next version has a buffer.
    fn find_buffer(&self, inner: &mut Inner, actions: &mut Vec<Action<Region>>) {
        let controls = inner.core.controls();
        let (retain, max) = (controls.retain as usize, controls.max_versions as usize);
        let ready = inner.store.recycle(retain, max);
        inner.core.set_buffer_ready(ready, self.now(), actions);
    }

    /// Allocates and pre-faults one more buffer on a worker.
    fn add_spare(&self) {
        let Some(this) = self.this.upgrade() else { return };
        self.pool.spawn(move || {
            let spare = {
                let mut inner = this.inner.lock();
                let max = inner.core.controls().max_versions as usize;
                if inner.store.buffers().0 >= max {
                    return;
                }
                inner.store.new_spare()
            };
            match spare {
                Ok(buffer) => {
                    if let Err(error) = buffer.region().memory().prefault() {
                        tracing::warn!(%error, "pre-faulting a version buffer");
                    }
                    let mut inner = this.inner.lock();
                    inner.store.add_spare(buffer);
                    let mut actions = Vec::new();
                    this.find_buffer(&mut inner, &mut actions);
                    this.act(inner, actions);
                }
                Err(error) => tracing::warn!(%error, "no memory for a spare version buffer"),
            }
        });
    }

    /// Carries out actions, releases the lock, then answers and tells.
    fn act(&self, mut inner: MutexGuard<'_, Inner>, actions: Vec<Action<Region>>) {
        let mut after = After::default();
        let mut queue: std::collections::VecDeque<_> = actions.into();
        while let Some(action) = queue.pop_front() {
            let mut more = Vec::new();
            self.perform(&mut inner, action, &mut after, &mut more);
            queue.extend(more);
        }
        drop(inner);
        for event in after.events {
            let listener = self.listener.lock().clone();
            if let Some(listener) = listener {
                listener(event);
            }
        }
        for (done, result) in after.replies {
            done(result);
        }
        for job in after.jobs {
            self.pool.spawn(job);
        }
    }

    fn perform(
        &self,
        inner: &mut Inner,
        action: Action<Region>,
        after: &mut After,
        more: &mut Vec<Action<Region>>,
    ) {
        match action {
            Action::Reply(ticket, result) => {
                if let Some(done) = inner.completions.remove(&ticket) {
                    let reply = result.map(|answer| match answer {
                        Answer::Committed => Reply::Done,
                        Answer::Version(version) => Reply::Version(version),
                    });
                    after.replies.push((done, reply));
                }
            }
            Action::Published(version) => after.events.push(Event::Published(version)),
            Action::Left { learner, reason } => after.events.push(Event::Left(learner, reason)),
            Action::Fold { contribution, accumulated } => {
                match inner.store.accumulator() {
                    Ok(accumulator) => {
                        let Some(this) = self.this.upgrade() else { return };
                        let replace = inner.core.controls().reducer == Reducer::Assign;
                        after.jobs.push(Box::new(move || {
                            contribution.deferred.ones().collect::<Vec<_>>().into_par_iter().for_each(
                                |block| {
                                    let id = BlockId(block as u32);
                                    let first = !accumulated.contains(block);
                                    region_store::fold_block(
                                        &this.layout,
                                        id,
                                        &contribution.source,
                                        &accumulator,
                                        first,
                                        replace,
                                    );
                                },
                            );
                            let mut inner = this.inner.lock();
                            let mut actions = Vec::new();
                            inner.core.folded(contribution.learner, this.now(), &mut actions);
                            this.act(inner, actions);
                        }));
                    }
                    // The commit keeps its deadline; there is nothing to fold into yet.
                    Err(error) => tracing::error!(%error, "no memory for the accumulator"),
                }
            }
            Action::Reduce(plan) => {
                let resume = plan.todo.count_ones(..) < self.layout.blocks() as usize;
                let job = match inner.arrivals.take().filter(|_| resume) {
                    // Blocks reduced on arrival are in its buffers.
                    Some(_) => inner.store.job(Arc::clone(&plan), true, false),
                    None => inner.store.job(Arc::clone(&plan), false, false),
                };
                let Some(this) = self.this.upgrade() else { return };
                match job {
                    Ok(job) if plan.todo.is_clear() => self.finish(inner, &job, more),
                    Ok(job) => after.jobs.push(Box::new(move || {
                        let blocks: Vec<usize> = plan.todo.ones().collect();
                        blocks.into_par_iter().for_each(|block| {
                            job.block(BlockId(block as u32), None);
                        });
                        let mut inner = this.inner.lock();
                        let mut actions = Vec::new();
                        this.finish(&mut inner, &job, &mut actions);
                        drop(job);
                        this.act(inner, actions);
                    })),
                    Err(error) => {
                        tracing::error!(%error, version = %plan.version, "cannot make the version; trying again");
                        after.jobs.push(Box::new(move || {
                            std::thread::sleep(Duration::from_millis(500));
                            if !this.stopping.load(Ordering::Relaxed) {
                                let inner = this.inner.lock();
                                this.act(inner, vec![Action::Reduce(plan)]);
                            }
                        }));
                    }
                }
            }
        }
    }

    /// Publishes a computed version.
    fn finish(&self, inner: &mut Inner, job: &Job, actions: &mut Vec<Action<Region>>) {
        inner.arrivals = None;
        inner.store.publish(job);
        let controls = inner.core.controls();
        let (retain, max) = (controls.retain as usize, controls.max_versions as usize);
        let ready = inner.store.recycle(retain, max);
        if inner.store.wants_spare(max) {
            self.add_spare();
        }
        inner.core.reduced(ready, self.now(), actions);
    }

    fn message(&self, message: Message, timeout: Duration, done: Completion) {
        let now = self.now();
        let deadline = now + timeout;
        let mut actions = Vec::new();
        let mut inner = self.inner.lock();
        if self.stopping.load(Ordering::Relaxed) {
            drop(inner);
            return done(Err(ShardError::Unreachable));
        }
        let core = &mut inner.core;
        let reply = match message {
            Message::Join { name } => core
                .join(&name, now, &mut actions)
                .map(|(learner, incarnation)| Reply::Joined { learner, incarnation }),
            Message::Leave { learner, reason } => {
                core.leave(learner, reason, now, &mut actions).map(|()| Reply::Done)
            }
            Message::Open { learner } => {
                core.open(learner, now).map(|o| Reply::Opened { step: o.step, staging_lent: o.staging_lent })
            }
            Message::Abort { learner } => core.abort(learner, now, &mut actions).map(|()| Reply::Done),
            Message::Allocate => {
                let max = core.controls().max_versions as usize;
                inner
                    .store
                    .take_buffer(max)
                    .map(Reply::Buffer)
                    .map_err(|error| ShardError::OutOfMemory(error.to_string()))
            }
            Message::Commit { learner, step, notice } => {
                let ticket = inner.ticket(done);
                let CommitNotice { sent, deferred, staging, lendable, .. } = notice;
                let contribution = Contribution { learner, sent, deferred, source: staging };
                inner.core.commit(ticket, step, contribution, lendable, deadline, now, &mut actions);
                self.wake.notify_all();
                return self.act(inner, actions);
            }
            Message::AwaitStep { learner } => {
                let ticket = inner.ticket(done);
                inner.core.await_step(ticket, learner, deadline, now, &mut actions);
                self.wake.notify_all();
                return self.act(inner, actions);
            }
            Message::Assign { buffer, written } => {
                let ticket = inner.ticket(done);
                inner.core.assign(ticket, buffer, written, deadline, now, &mut actions);
                self.wake.notify_all();
                return self.act(inner, actions);
            }
        };
        self.wake.notify_all();
        self.act(inner, actions);
        done(reply);
    }

    /// Looks for NaN and Inf where nobody has yet, on the workers, and goes on with `then`.
    fn check_then(&self, notice: &CommitNotice, then: impl FnOnce(Result<(), ShardError>) + Send + 'static) {
        let reject = self.inner.lock().core.controls().nonfinite == NonFinite::Reject;
        let Some(this) = self.this.upgrade().filter(|_| reject && !notice.unchecked.is_clear()) else {
            return then(Ok(()));
        };
        let (unchecked, staging) = (notice.unchecked.clone(), notice.staging.clone());
        self.pool.spawn(move || {
            let bad = unchecked
                .ones()
                .collect::<Vec<_>>()
                .into_par_iter()
                .map(|block| BlockId(block as u32))
                .find_any(|&block| !region_store::region_is_finite(&this.layout, block, &staging));
            then(bad.map_or(Ok(()), |block| Err(ShardError::NonFinite(block))));
        });
    }
}

impl Inner {
    fn ticket(&mut self, done: Completion) -> Ticket {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.completions.insert(ticket, done);
        ticket
    }

    /// The job behind blocks that are reduced on arrival under `plan`.
    fn arrival_job(&mut self, plan: &Arc<Plan<Region>>) -> io::Result<Arc<Job>> {
        if let Some(job) = self.arrivals.as_ref().filter(|job| Arc::ptr_eq(job.plan(), plan)) {
            return Ok(Arc::clone(job));
        }
        self.arrivals = None;
        let check = self.core.controls().nonfinite == NonFinite::Reject;
        let job = Arc::new(self.store.job(Arc::clone(plan), false, check)?);
        self.arrivals = Some(Arc::clone(&job));
        Ok(job)
    }
}

impl Channel for EmbeddedShard {
    fn write(&self, payload: &[u8], slot: BlockSlot) -> Result<Placement, ShardError> {
        let extent = self.layout.block_bytes(slot.block);
        if payload.len() as u64 != extent.end.saturating_sub(extent.start) {
            return Err(ShardError::BadBlock { block: slot.block, bytes: payload.len() });
        }
        let mut inner = self.inner.lock();
        let plan = match inner.core.arrive(slot, self.now())? {
            Arrival::Duplicate => return Ok(Placement::Duplicate),
            Arrival::Fuse(plan) => plan,
            Arrival::Defer => {
                if inner.core.controls().nonfinite == NonFinite::Reject {
                    drop(inner);
                    if !region_store::is_finite(&self.layout, slot.block, payload) {
                        self.inner.lock().core.refuse(slot);
                        return Err(ShardError::NonFinite(slot.block));
                    }
                }
                return Ok(Placement::Deferred);
            }
        };
        let job = inner.arrival_job(&plan);
        drop(plan);
        drop(inner);
        let outcome = match &job {
            Ok(job) if job.block(slot.block, Some((slot.learner, payload))) => Ok(Placement::Reduced),
            Ok(_) => Err(ShardError::NonFinite(slot.block)),
            Err(error) => Err(ShardError::OutOfMemory(error.to_string())),
        };
        drop(job);
        let mut inner = self.inner.lock();
        let mut actions = Vec::new();
        inner.core.fused(slot, outcome.is_ok(), self.now(), &mut actions);
        if actions.is_empty() {
            drop(inner);
        } else {
            self.act(inner, actions);
        }
        outcome
    }

    fn read(&self, offset: u64, local: &mut [u8]) -> Result<Version, ShardError> {
        let end = offset.checked_add(local.len() as u64).filter(|&end| end <= self.layout.size());
        let end = end.ok_or(ShardError::OutOfRange)?;
        let version = self.pin_newest();
        let found = self.get(version);
        if let Some((buffer, _)) = &found {
            local.copy_from_slice(buffer.bytes(offset..end));
        }
        self.unpin(version, 1);
        found.map(|_| version).ok_or(ShardError::Unreachable)
    }

    fn send(&self, message: Message, timeout: Duration, done: Completion) {
        let Message::Commit { learner, step, notice } = message else {
            return self.message(message, timeout, done);
        };
        let this = self.this.clone();
        let copy = notice.clone();
        self.check_then(&copy, move |checked| match (checked, this.upgrade()) {
            (Ok(()), Some(this)) => this.message(Message::Commit { learner, step, notice }, timeout, done),
            (Ok(()), None) => done(Err(ShardError::Unreachable)),
            (Err(error), _) => done(Err(error)),
        });
    }
}

/// Wakes the core for deadlines and leases until the shard is gone.
fn run_timer(shard: &Weak<EmbeddedShard>) {
    loop {
        let Some(shard) = shard.upgrade() else { return };
        if shard.stopping.load(Ordering::Relaxed) {
            return;
        }
        let mut inner = shard.inner.lock();
        // Long enough to be idle when idle, short enough for deadlines of milliseconds.
        let pause = Duration::from_millis(if inner.core.has_deadlines() { 20 } else { 250 });
        shard.wake.wait_for(&mut inner, pause);
        let mut actions = Vec::new();
        inner.core.tick(shard.now(), &mut actions);
        shard.act(inner, actions);
    }
}

/// The device of this process: memory is addressable as it is.
pub struct InProcess {
    shard: Arc<EmbeddedShard>,
    next_key: AtomicU64,
}

impl InProcess {
    /// For clients of `shard`.
    pub fn new(shard: Arc<EmbeddedShard>) -> InProcess {
        InProcess { shard, next_key: AtomicU64::new(1 << 32) }
    }
}

impl Device for InProcess {
    fn kind(&self) -> TransportKind {
        TransportKind::InProcess
    }

    fn register(&self, memory: Arc<Mapping>) -> Result<Region, ShardError> {
        Ok(Region::new(memory, RegionKey(self.next_key.fetch_add(1, Ordering::Relaxed))))
    }

    fn connect(&self) -> Result<Arc<dyn Channel>, ShardError> {
        Ok(Arc::clone(&self.shard) as Arc<dyn Channel>)
    }
}
