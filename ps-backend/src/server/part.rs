//! One shard's part of a model at work: the edge around [`PartCore`] and [`PartStore`].
//!
//! Network threads bring blocks; the core says what each is for, the store does it. The lock is held for decisions
//! and never for a pass over a block. Work on many blocks, and whatever takes memory, runs on the pool.
//!
//! One of the modules that hold `unsafe`: memory of sums and versions is lent to connections.

mod moving;
mod resting;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use libmodelio::ids::{BlockId, ClientId, Epoch, Generation, PlanId, ShardId, Version};
use libmodelio::layout::{DType, ModelLayout};
use libmodelio::link::{Guard, Link, Outgoing, Piece, Take, Target};
use libmodelio::net::Close;
use libmodelio::transport::ShardError;
use libmodelio::wire::{self, Message, ModelRecord, Received, Refusal, Work};
use parking_lot::Mutex;
use rayon::prelude::*;

use super::moving::Whereabouts;
use crate::controls::Controls;
use crate::memory;
use crate::part::core::{Action, Kind, PartCore, Placement, Plan, Source, local_blocks};
use crate::part::store::{self, Limits, PartError, PartJob, PartStore, PartWork, Payload, PinnedVersion};
use crate::part::unheard::Unheard;
use crate::reducer::{self, Reducer};
use resting::Connected;

/// Takes what the part says to the lead.
pub(super) type ToLead = Arc<dyn Fn(u64, Message) + Send + Sync>;

/// When a plan cannot begin yet because old versions are still read, or the plan before is being left.
const BEGIN_AGAIN: Duration = Duration::from_millis(1);
/// When that takes longer, the log says so.
const BEGIN_QUIETLY: Duration = Duration::from_secs(2);

/// Sums of a block that there can be, whatever the number of learners: of concluded plans, and of the running one.
const SUMS: usize = 2;

struct State {
    core: PartCore,
    /// The plan that was started last, for its beginning.
    starting: Option<(PlanId, Version, PartWork, bool)>,
    job: Option<(PlanId, Arc<PartJob>)>,
    /// Connections that are to ask again when something has changed.
    waiting: Vec<Link>,
    /// Payloads that are landing, by their connections.
    landing: Vec<(PlanId, Link)>,
    lead: Option<ToLead>,
    /// What the lead is spoken to by, if it is elsewhere.
    lead_link: Option<Link>,
}

/// One shard's part of a model.
pub struct Part {
    /// The model's name.
    pub model: String,
    /// Which life of it.
    pub generation: Generation,
    /// Of the block map.
    pub epoch: Epoch,
    model_bytes: u64,
    store: PartStore,
    state: Mutex<State>,
    pool: Arc<rayon::ThreadPool>,
    /// Connections of clients, for blocks.
    links: Mutex<Vec<Connected>>,
    /// Where the model is now, once another block map is in force.
    moved: OnceLock<Whereabouts>,
}

/// A payload on its way into the part.
pub(super) struct Landing {
    plan: PlanId,
    client: ClientId,
    /// Within the part.
    block: BlockId,
    wide: bool,
    how: Placement,
    job: Arc<PartJob>,
    target: Option<store::Target>,
}

/// Why a part cannot be made.
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
        "not enough memory: the shard's part takes {:.1} GiB, {:.1} GiB are available: use more shards",
        gib(*.needed), gib(*.available)
    )]
    Room {
        /// Bytes that the part takes.
        needed: u64,
        /// Bytes that there are.
        available: u64,
    },
    /// No memory.
    #[error(transparent)]
    Store(#[from] PartError),
}

impl Part {
    /// The part of `shard` in the model of `record`, to be loaded. Takes its memory now, which takes time.
    ///
    /// # Errors
    /// [`MakeError`].
    pub fn new(
        record: &ModelRecord,
        shard: ShardId,
        pool: &Arc<rayon::ThreadPool>,
    ) -> Result<Arc<Part>, MakeError> {
        let bad = |error: &dyn std::fmt::Display| MakeError::Record(error.to_string());
        let layout = record.layout().map_err(|error| bad(&error))?;
        let map = record.block_map().map_err(|error| bad(&error))?;
        let blocks: Vec<BlockId> = map.blocks_of(shard).collect();
        if blocks.is_empty() {
            return Err(MakeError::NotMine(shard));
        }
        let part = layout.part(&blocks).map_err(|error| bad(&error))?;
        let controls = controls(record).map_err(|error| bad(&error))?;
        let (needed, available) = (memory_needed(part.layout(), &controls), memory::available());
        if let Some(available) = available.filter(|&available| available < needed) {
            return Err(MakeError::Room { needed, available });
        }
        let store = PartStore::new(part, controls.reducer, Limits::default())?;
        // All that it can ever need, so that a job that begins with one learner has room for the others.
        store.prefault_sums(SUMS).map_err(PartError::from)?;
        Ok(Part::of(record, layout.size(), store, pool))
    }

    fn of(
        record: &ModelRecord,
        model_bytes: u64,
        store: PartStore,
        pool: &Arc<rayon::ThreadPool>,
    ) -> Arc<Part> {
        let state = State {
            core: PartCore::new(store.part().blocks().len() as u32, Version(0)),
            starting: None,
            job: None,
            waiting: Vec::new(),
            landing: Vec::new(),
            lead: None,
            lead_link: None,
        };
        Arc::new(Part {
            model: record.name.clone(),
            generation: record.generation,
            epoch: record.epoch,
            model_bytes,
            store,
            state: Mutex::new(state),
            pool: Arc::clone(pool),
            links: Mutex::default(),
            moved: OnceLock::new(),
        })
    }

    /// The part's own layout.
    pub fn layout(&self) -> &Arc<ModelLayout> {
        self.store.part().layout()
    }

    /// Bytes of all of the model.
    pub fn model_bytes(&self) -> u64 {
        self.model_bytes
    }

    /// Its memory.
    pub fn store(&self) -> &PartStore {
        &self.store
    }

    /// The newest version, and the plan under way with the payloads that it waits for.
    pub fn progress(&self) -> (Version, Option<(PlanId, u64)>) {
        let state = self.state.lock();
        (state.core.version(), state.core.running())
    }

    /// A block of version 0.
    pub(super) fn load(&self, block: BlockId, bytes: &[u8]) -> Result<(), Refusal> {
        let local = self.store.part().local(block).ok_or(Refusal::NotMine { block })?;
        self.store.load(local, bytes).map(drop).map_err(Refusal::other)
    }

    // -- the lead

    /// Says who the lead is from now on, and over which connection. One from before is closed: if it was the true
    /// lead's after all, that one connects again and has the last word.
    pub(super) fn follow(&self, lead: ToLead, link: Option<Link>) {
        let mut state = self.state.lock();
        if self.moved.get().is_some() {
            // It was its lead.
            return;
        }
        state.lead = Some(lead);
        if let Some(before) = std::mem::replace(&mut state.lead_link, link) {
            before.close(Close::Asked("the lead has connected anew".into()));
        }
    }

    /// An order of the lead.
    pub(super) fn from_lead(self: &Arc<Part>, request: u64, message: Message) {
        let mut actions = Vec::new();
        let mut state = self.state.lock();
        if self.moved.get().is_some() {
            return;
        }
        let outcome = match message {
            Message::Start(plan) => self.start(&mut state, plan, &mut actions),
            Message::Conclude { plan } => state.core.conclude(plan, &mut actions).map_err(Refusal::other),
            Message::Drop { plan } => {
                state.core.drop_plan(plan, &mut actions);
                Ok(())
            }
            other => Err(Refusal::Role { what: other.name().to_owned() }),
        };
        let lead = state.lead.clone();
        self.act(state, actions);
        if let (Err(refusal), Some(lead)) = (outcome, lead) {
            lead(request, Message::Refused(refusal));
        }
    }

    fn start(&self, state: &mut State, plan: wire::Plan, actions: &mut Vec<Action>) -> Result<(), Refusal> {
        let (kind, work) = match &plan.work {
            Work::Add { replaces } => {
                let reducer = if *replaces { Reducer::Assign } else { Reducer::Sum };
                (Kind::Add, PartWork::Add { reducer })
            }
            Work::Reduce { step, fresh_state } => {
                let step: reducer::Step = serde_json::from_str(step).map_err(Refusal::other)?;
                (Kind::Reduce, PartWork::Reduce { step, fresh_state: *fresh_state })
            }
            Work::Assign => (Kind::Assign, PartWork::Assign),
        };
        let mine = self.store.part().blocks();
        let source = |source: &wire::PlanSource| Source {
            client: source.client,
            blocks: local_blocks(&source.blocks, mine),
            check: source.check,
        };
        let sources: Vec<Source> = plan.sources.iter().map(source).collect();
        let check = sources.iter().any(|source| source.check);
        let (id, base) = (plan.plan, plan.base);
        let started = Plan { id, kind, base, sources, ordered: plan.ordered };
        let before = actions.len();
        state.core.start(started, actions).map_err(Refusal::other)?;
        if actions[before..].contains(&Action::Begin(id)) {
            state.starting = Some((id, base, work, check));
        }
        Ok(())
    }

    /// Carries out actions; the lock is released where they leave it.
    fn act(self: &Arc<Part>, mut state: parking_lot::MutexGuard<'_, State>, actions: Vec<Action>) {
        if actions.is_empty() {
            return;
        }
        let mut said = Vec::new();
        let mut jobs: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
        let mut begins = None;
        for action in actions {
            match action {
                // Where the memory is there, it is done before anybody is told to send.
                Action::Begin(plan) => match &state.starting {
                    Some((of, _, work, _)) if *of == plan && self.store.is_prepared(work) => {
                        begins = Some(plan)
                    }
                    _ => {
                        let part = Arc::clone(self);
                        jobs.push(Box::new(move || part.begin(plan)));
                    }
                },
                Action::Compute(plan, blocks) => {
                    let part = Arc::clone(self);
                    jobs.push(Box::new(move || part.compute(plan, &blocks)));
                }
                Action::Ready(plan) => said.push((0, Message::Ready { plan })),
                Action::Spoilt { plan, client, block } => {
                    let block = self.store.part().global(BlockId(block)).unwrap_or_default();
                    said.push((0, Message::Spoilt { plan, client, block }));
                }
                Action::Done(plan) => said.push((plan.0, Message::Done)),
                Action::Conclude(plan, _) => {
                    if let Err(error) = self.conclude(&mut state, plan, &mut jobs) {
                        tracing::error!(model = %self.model, %plan, %error, "cannot be concluded");
                        let lost = ShardError::Lost(format!("plan {plan}: {error}"));
                        said.push((plan.0, Message::Refused(lost.into())));
                    }
                }
                Action::Void(plan) => {
                    if let Some((_, job)) = state.job.take_if(|(of, _)| *of == plan) {
                        job.give_up();
                    }
                }
                Action::Abandon(plan) => {
                    for (_, link) in state.landing.iter().filter(|(of, _)| *of == plan) {
                        link.close(Close::Asked(format!("plan {plan} was given up in mid-block").into()));
                    }
                }
            }
        }
        state.wake();
        let lead = state.lead.clone();
        drop(state);
        if let Some(plan) = begins {
            self.begin(plan);
        }
        for job in jobs {
            self.pool.spawn(job);
        }
        if let Some(lead) = lead {
            said.into_iter().for_each(|(request, message)| lead(request, message));
        }
    }

    /// Takes the memory for a plan, or has somebody wait until there is some. Not here: a thread of the pool that waits
    /// may have the very work below it on its stack that it waits for.
    fn begin(self: &Arc<Part>, plan: PlanId) {
        let error = match self.try_begin(plan) {
            Ok(()) => return,
            Err(error) => error,
        };
        if !error.is_transient() {
            return self.cannot_begin(plan, &error);
        }
        let part = Arc::clone(self);
        let waits = move || part.begin_later(plan, error);
        if let Err(error) = std::thread::Builder::new().name("begin".into()).spawn(waits) {
            self.cannot_begin(plan, &error);
        }
    }

    fn begin_later(self: &Arc<Part>, plan: PlanId, mut error: PartError) {
        let started = Instant::now();
        let mut said = false;
        loop {
            if !said && started.elapsed() > BEGIN_QUIETLY {
                tracing::warn!(model = %self.model, %plan, "cannot begin yet: {error}");
                said = true;
            }
            std::thread::sleep(BEGIN_AGAIN);
            error = match self.try_begin(plan) {
                Ok(()) => return,
                Err(error) if error.is_transient() => error,
                Err(error) => return self.cannot_begin(plan, &error),
            }
        }
    }

    /// The lead hears that it never will.
    fn cannot_begin(&self, plan: PlanId, error: &dyn std::fmt::Display) {
        tracing::error!(model = %self.model, %plan, %error, "cannot begin");
        let lead = self.state.lock().lead.clone();
        if let Some(lead) = lead {
            let lost = ShardError::Lost(format!("plan {plan} cannot begin: {error}"));
            lead(plan.0, Message::Refused(lost.into()));
        }
    }

    fn try_begin(self: &Arc<Part>, plan: PlanId) -> Result<(), PartError> {
        let mut actions = Vec::new();
        let mut state = self.state.lock();
        let wanted = state.core.wants(plan);
        if let Some((_, base, work, check)) = state.starting.clone().filter(|(of, ..)| wanted && *of == plan)
        {
            drop(state);
            let job = self.store.begin(base, work, check)?;
            state = self.state.lock();
            if state.core.wants(plan) {
                state.job = Some((plan, job));
            } else {
                job.give_up();
            }
            state.starting = None;
        }
        state.core.begun(plan, &mut actions);
        state.wake();
        self.act(state, actions);
        Ok(())
    }

    /// Computes blocks that nobody sends.
    fn compute(self: &Arc<Part>, plan: PlanId, blocks: &fixedbitset::FixedBitSet) {
        let job = self.state.lock().job.clone().filter(|(of, _)| *of == plan);
        if let Some((_, job)) = job {
            let blocks: Vec<u32> = blocks.ones().map(|block| block as u32).collect();
            blocks.into_par_iter().for_each(|block| {
                if let Err(error) = job.finish(BlockId(block), None) {
                    tracing::error!(model = %self.model, %plan, block, %error, "cannot be computed");
                }
            });
        }
        let mut state = self.state.lock();
        let mut actions = Vec::new();
        state.core.computed(plan, &mut actions);
        self.act(state, actions);
    }

    fn conclude(
        self: &Arc<Part>,
        state: &mut State,
        plan: PlanId,
        jobs: &mut Vec<Box<dyn FnOnce() + Send>>,
    ) -> Result<(), PartError> {
        let Some((_, job)) = state.job.take_if(|(of, _)| *of == plan) else { return Ok(()) };
        if let Some(merge) = self.store.conclude(&job)? {
            const AT_ONCE: usize = 16;
            jobs.push(Box::new(move || {
                let starts: Vec<usize> = (0..merge.len()).step_by(AT_ONCE).collect();
                let all = merge.len();
                starts.into_par_iter().for_each(|start| merge.run(start..(start + AT_ONCE).min(all)));
            }));
        }
        if self.store.wants_spare() {
            let part = Arc::clone(self);
            jobs.push(Box::new(move || {
                if let Err(error) = part.store.add_spare() {
                    tracing::warn!(model = %part.model, %error, "no memory for a spare version buffer");
                }
            }));
        }
        Ok(())
    }

    // -- clients

    /// A block is about to come over `link`, which has waited for `unheard`. One that lies in memory which both ends see is there already: its bytes
    /// go to [`Self::landed`] at once.
    pub(super) fn arrive(
        self: &Arc<Part>,
        client: ClientId,
        received: &Received,
        unheard: &mut Unheard,
        link: &Link,
    ) -> Result<(Take, Option<Landing>), Refusal> {
        let (plan, global, wide, comes) = match received.message {
            Message::Push { plan, block, wide } => (plan, block, wide, true),
            Message::PushAt { plan, block, wide, .. } => (plan, block, wide, false),
            _ => return Ok((Take::Nothing, None)),
        };
        let block = self.store.part().local(global).ok_or(Refusal::NotMine { block: global })?;
        let payload = if wide { Payload::Wide(&[]) } else { Payload::Plain(&[]) };
        let wanted = payload.wanted_len(self.layout(), block) as u32;
        let fits = received.expect_payload(if comes { wanted } else { 0 });
        fits.map_err(|error| error.to_refusal())?;
        let mut state = self.state.lock();
        let how = state.core.arrive(client, plan, block.0);
        match how {
            Placement::Duplicate | Placement::Unwanted => return Ok((Take::Nothing, None)),
            Placement::Later if !state.core.has_heard_of(plan) && !unheard.waits(plan, Instant::now()) => {
                tracing::debug!(model = %self.model, %plan, block = global.0, "passed over: no word of its plan");
                return Ok((Take::Nothing, None));
            }
            Placement::Later => {
                state.wait(link);
                return Ok((Take::Later, None));
            }
            Placement::Store { .. } | Placement::Add { .. } | Placement::Finish { .. } => {}
        }
        let Some((_, job)) = state.job.clone().filter(|(of, _)| *of == plan) else {
            // The core lets nothing arrive before its plan has its memory.
            let mut actions = Vec::new();
            state.core.failed(plan, block.0, &mut actions);
            self.act(state, actions);
            return Ok((Take::Nothing, None));
        };
        if comes {
            state.landing.push((plan, link.clone()));
        }
        drop(state);
        let mut landing = Landing { plan, client, block, wide, how, job, target: None };
        if comes && matches!(how, Placement::Store { .. }) {
            match landing.job.destination(block, wide) {
                Ok(target) => landing.target = target,
                Err(error) => {
                    self.lost(landing, link);
                    return Err(Refusal::other(error));
                }
            }
        }
        let Some(target) = &mut landing.target else { return Ok((Take::Buffered, Some(landing))) };
        let bytes = target.bytes();
        // SAFETY: the target has the block claimed until `landed` or `lost` is called, which is when the payload is
        // there or the connection over; the memory is the part's, which the guard keeps.
        let into = unsafe { Target::new(bytes.as_mut_ptr(), bytes.len(), Arc::clone(self) as Guard) };
        Ok((Take::Into(into), Some(landing)))
    }

    /// Its payload is there; `bytes` unless it was received where it belongs.
    pub(super) fn landed(
        self: &Arc<Part>,
        landing: Landing,
        bytes: &[u8],
        link: &Link,
    ) -> Result<(), Refusal> {
        let Landing { plan, client, block, wide, how, job, target } = landing;
        let payload = if wide { Payload::Wide(bytes) } else { Payload::Plain(bytes) };
        let (fine, check) = match (how, target) {
            (Placement::Store { check }, Some(target)) => (Ok(target.complete()), check),
            (Placement::Store { check } | Placement::Add { check }, None) => (job.add(block, payload), check),
            (Placement::Finish { check: true, .. }, _) => (job.finish(block, Some(payload)), true),
            (Placement::Finish { check: false, .. }, _) => {
                (job.finish_unjudged(block, payload).map(|()| true), false)
            }
            _ => (Ok(true), false),
        };
        // Before the core hears of it: from then on its memory may be wanted.
        drop(job);
        let mut state = self.state.lock();
        state.landing.retain(|(_, of)| !of.is(link));
        let mut actions = Vec::new();
        let outcome = match fine {
            Ok(fit) => {
                state.core.landed(client, plan, block.0, fit || !check, &mut actions);
                Ok(())
            }
            Err(error) => {
                state.core.failed(plan, block.0, &mut actions);
                Err(Refusal::other(error))
            }
        };
        state.wake();
        self.act(state, actions);
        outcome
    }

    /// Its payload did not come.
    pub(super) fn lost(self: &Arc<Part>, landing: Landing, link: &Link) {
        let Landing { plan, block, job, target, .. } = landing;
        drop(target);
        drop(job);
        let mut state = self.state.lock();
        state.landing.retain(|(_, of)| !of.is(link));
        let mut actions = Vec::new();
        state.core.failed(plan, block.0, &mut actions);
        state.wake();
        self.act(state, actions);
    }

    /// What is still to come from `client`; nothing where that cannot be said yet.
    pub(super) fn missing(&self, client: ClientId, plan: PlanId) -> Option<Message> {
        let missing = self.state.lock().core.missing(client, plan)?;
        let mine = self.store.part().blocks();
        let mut blocks = wire::BlockRanges::new();
        for block in missing.ones().map(|block| mine[block].0).take(wire::MAX_RANGES) {
            match blocks.last_mut() {
                Some(last) if last.end == block => last.end += 1,
                _ => blocks.push(block..block + 1),
            }
        }
        Some(Message::Missing { plan, blocks })
    }

    /// A version to read from; `None` when it is not here yet, and the connection is woken when it may be.
    pub(super) fn version(
        &self,
        wanted: Version,
        link: &Link,
    ) -> Result<Option<Arc<PinnedVersion>>, Refusal> {
        if let Some(version) = self.store.version(wanted) {
            return Ok(Some(Arc::new(version)));
        }
        let mut state = self.state.lock();
        let newest = state.core.version();
        if wanted > newest {
            state.wait(link);
            return Ok(None);
        }
        drop(state);
        // It may have come in between.
        match self.store.version(wanted) {
            Some(version) => Ok(Some(Arc::new(version))),
            None => Err(Refusal::NoVersion { wanted, newest }),
        }
    }

    /// A block of a version, to be sent.
    pub(super) fn block(&self, version: &Arc<PinnedVersion>, block: BlockId) -> Option<Outgoing> {
        let local = self.store.part().local(block)?;
        let crc = version.checksum(local);
        let guard = Arc::clone(version) as Guard;
        // SAFETY: a version's bytes do not change while it is pinned, which the guard does.
        let piece = unsafe { Piece::new(version.block(local), Some(crc), guard) };
        let message = Message::Block { version: version.version(), block };
        Some(Outgoing { message, request: 0, epoch: self.epoch, payload: Some(piece) })
    }
}

impl State {
    fn wait(&mut self, link: &Link) {
        if !self.waiting.iter().any(|waiting| waiting.is(link)) {
            self.waiting.push(link.clone());
        }
    }

    fn wake(&mut self) {
        self.waiting.drain(..).for_each(|link| link.wake());
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// Bytes that a part takes once it makes versions: the newest, the next, a retained and a spare one; masters and
/// optimizer state, each twice; two sums.
fn memory_needed(layout: &ModelLayout, controls: &Controls) -> u64 {
    let halves = layout.tensors().iter().any(|t| matches!(t.dtype, DType::F16 | DType::BF16));
    let arrays = 2 * (controls.reducer.state_slots() + usize::from(halves)) as u64 + 2;
    layout.size().saturating_mul(4).saturating_add(layout.elements().saturating_mul(4 * arrays))
}

/// The settings that a model was created with.
pub(super) fn controls(record: &ModelRecord) -> Result<Controls, crate::controls::ControlError> {
    let settings = record.controls.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    Controls::default().with_all(settings)
}
