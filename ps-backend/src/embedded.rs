//! A shard in the same process as its clients: the edge around [`ShardCore`].
//!
//! It owns the lock, the clock, the memory and the worker threads; the core decides. A pushed block is
//! reduced by the thread that brings it, from the buffer it came in; passes over many blocks run on the
//! worker pool, so that no request thread waits for another learner's work.
//!
//! There is one lock, held for decisions and never for a pass over a block; only a change of reducer takes
//! its optimizer state's memory under it. Completions and the
//! listener are called after it is released, so they may call the shard again; they run on whatever
//! thread brought the news, the timer's and the workers' included, so they must not block.

mod channel;
mod drive;
mod job;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use libmodelio::bytes::block;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::transport::{Attached, Completion, Region, ShardError, TransportKind};
use libmodelio::vocabulary::controls::{Controls, NonFinite};
use libmodelio::vocabulary::ids::{LearnerId, ShardId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use parking_lot::{Condvar, Mutex};

use crate::core::{LastCommit, ShardCore, Ticket};
pub use crate::job::{Event, Listener};
use crate::job::{JobStatus, ShardView};
use crate::region_store::{Job, RegionStore, VersionBuffer};
pub use channel::InProcess;
use drive::Retry;

struct Inner {
    core: ShardCore<Region>,
    store: RegionStore,
    completions: HashMap<Ticket, Completion>,
    next_ticket: Ticket,
    /// The job behind the blocks that are reduced on arrival.
    arrivals: Option<Arc<Job>>,
    /// Versions for which there was no memory.
    retries: Vec<Retry>,
}

/// A model's shard in this process: [`Channel`](libmodelio::transport::Channel) for learners, and what the
/// mount wants to know besides.
///
/// Every request is answered once: by the core, at its deadline (which the timer looks at to within some
/// 20 ms), or with [`ShardError::Unreachable`] by [`Self::shut_down`] or when the shard is dropped.
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
        let frozen = controls.frozen.tensors(names(&layout)).map_err(io::Error::other)?;
        let mut core = ShardCore::new(layout.blocks(), layout.tensors().len(), controls)
            .with_fold_patience(fold_patience(&layout));
        core.freeze(frozen);
        let inner = Inner {
            core,
            store,
            completions: HashMap::new(),
            next_ticket: 1,
            arrivals: None,
            retries: Vec::new(),
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
        std::thread::Builder::new().name("shard-timer".into()).spawn(move || drive::run_timer(&timer))?;
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
        // Besides the newest and the next one: what is retained, and one for readers that hold a version.
        let retain = self.inner.lock().core.controls().retain as usize;
        self.add_spares(retain + 1);
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

    /// Takes `count` pins of `version` back. A commit that waits for a buffer may go on then.
    pub fn unpin(&self, version: Version, count: u64) {
        let mut inner = self.inner.lock();
        inner.store.unpin(version, count);
        if version < inner.core.version() {
            let mut actions = Vec::new();
            self.find_buffer(&mut inner, &mut actions);
            self.act(inner, actions);
        }
    }

    /// A version's memory and when it was published. Its bytes stay what they are only while it is the
    /// newest or pinned.
    pub fn get(&self, version: Version) -> Option<(Arc<VersionBuffer>, SystemTime)> {
        self.inner.lock().store.get(version)
    }

    /// Versions in memory, the merely pinned ones included.
    pub fn versions(&self) -> Vec<Version> {
        self.inner.lock().store.versions().collect()
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
    /// [`libmodelio::vocabulary::controls::ControlError`]; then nothing has changed.
    pub fn set_control(
        &self,
        name: &str,
        value: &str,
    ) -> Result<(), libmodelio::vocabulary::controls::ControlError> {
        let mut inner = self.inner.lock();
        let controls = inner.core.controls().with(name, value)?;
        inner.core.may_set(&controls)?;
        controls.check_trainable(self.layout.is_trainable())?;
        inner.core.freeze(controls.frozen.tensors(names(&self.layout))?);
        let mut actions = Vec::new();
        inner.core.set_controls(controls, self.now(), &mut actions);
        if !inner.core.is_under_way() {
            // Take the state's memory now rather than under the first contribution. If it cannot be had, the
            // first version under this reducer says so.
            inner.arrivals = None;
            let (reducer, fresh) =
                (inner.core.controls().reducer, inner.core.optimizer_steps().highest() == 0);
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

    /// Whether `learner` is in the job.
    pub fn has_learner(&self, learner: LearnerId) -> bool {
        self.inner.lock().core.has_learner(learner)
    }

    /// Where the last commit of `learner` is.
    pub fn last_commit(&self, learner: LearnerId) -> LastCommit {
        self.inner.lock().core.last_commit(learner)
    }

    /// Looks for NaN and Inf in the `written` ranges of new weights, if they are to be refused.
    ///
    /// # Errors
    /// [`ShardError::NonFinite`].
    pub fn check_finite(&self, buffer: &Region, written: &[std::ops::Range<u64>]) -> Result<(), ShardError> {
        if self.inner.lock().core.controls().nonfinite != NonFinite::Reject {
            return Ok(());
        }
        match block::written_is_finite(&self.layout, buffer, written) {
            None => Ok(()),
            Some(block) => Err(ShardError::NonFinite(block)),
        }
    }

    /// Sign of life from `learner`.
    pub fn touch(&self, learner: LearnerId, attached: Option<Attached>) {
        self.inner.lock().core.touch(learner, attached, self.now());
    }

    /// What it is doing.
    pub fn status(&self) -> JobStatus {
        let only = ShardView {
            shard: ShardId(0),
            address: None,
            transport: TransportKind::InProcess,
            blocks: self.layout.blocks(),
            no_memory: None,
            no_rdma: None,
            lost: None,
            connected: true,
            away: None,
        };
        let inner = self.inner.lock();
        let now = self.now();
        JobStatus {
            state: inner.core.state(),
            late: inner.core.late(now).map(|(since, late)| (late, now.saturating_sub(since))),
            version: inner.core.version(),
            members: inner.core.members(now),
            committed: inner.core.committed(),
            contributions: inner.core.contributions_taken(),
            blocks_on_arrival: inner.core.blocks_on_arrival(),
            buffers: inner.store.buffers(),
            versions: inner.store.versions().collect(),
            shards: vec![only],
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

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }
}

fn names(layout: &ModelLayout) -> impl ExactSizeIterator<Item = &str> + Clone {
    layout.tensors().iter().map(|tensor| tensor.name.as_str())
}

/// As long as folding a contribution takes, about.
fn fold_patience(layout: &ModelLayout) -> Duration {
    const BYTES_PER_SECOND: f64 = 8e9;
    const MOST: Duration = Duration::from_millis(50);
    Duration::from_secs_f64(layout.size() as f64 / BYTES_PER_SECOND).min(MOST)
}

impl Drop for EmbeddedShard {
    fn drop(&mut self) {
        self.shut_down();
    }
}
