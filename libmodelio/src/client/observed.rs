//! What the client notes of its own course, for the status, metrics and traces. It is noted under the lock that is held
//! anyway.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use crate::client::core::{ClientCore, Now};
use crate::observe::histogram::Histogram;
use crate::observe::plans::{PlanPhases, PlanTimes};
use crate::observe::staleness::{Staleness, VersionTimes};
use crate::observe::trace::{PlanOutcome, Recorder, What};
use crate::vocabulary::ids::{BlockId, LearnerId, PlanId, ShardId, Step, Version};

/// How long the phases of steps take that only the client sees.
#[derive(Debug)]
pub struct Phases {
    /// For each commit, the wait for those of others.
    pub others: Histogram,
    /// For each plan that has made a version, the sending of blocks. If the shard is in this process, their reduction.
    pub wire: Histogram,
    /// For each plan that has made a version, the rest until the client knows of it.
    pub conclude: Histogram,
    /// For each version that was pulled, the pull from when the version counted.
    pub pull: Histogram,
}

impl Default for Phases {
    fn default() -> Phases {
        let new = Histogram::of_seconds;
        Phases { others: new(), wire: new(), conclude: new(), pull: new() }
    }
}

/// A client's time, and the events of a trace while one runs.
#[derive(Clone)]
pub(super) struct Timeline {
    started: Instant,
    pub(super) trace: Arc<Recorder>,
}

impl Timeline {
    fn begin() -> Timeline {
        Timeline { started: Instant::now(), trace: Arc::default() }
    }

    pub(super) fn now(&self) -> Now {
        self.started.elapsed()
    }

    /// The moment of an event that a trace may record. None while no trace runs.
    pub(super) fn moment(&self) -> Option<Instant> {
        self.trace.is_on().then(Instant::now)
    }

    /// A block was sent to its shard, from this moment on.
    pub(super) fn sent(&self, from: Option<Instant>, plan: PlanId, block: BlockId, shard: ShardId) {
        if let Some(from) = from {
            self.trace.record(What::Sent(plan, block, shard), from, Instant::now());
        }
    }

    fn record(&self, what: What, from: Now, to: Now) {
        self.trace.record(what, self.started + from, self.started + to);
    }
}

/// The notes of one client.
pub(super) struct Observed {
    pub(super) timeline: Timeline,
    versions: VersionTimes,
    plans: PlanTimes,
    /// The version that is being pulled, and since when.
    pull: Option<(Version, Now)>,
    /// The version that was shown last, and when, until a program opens it.
    unopened: Option<(Version, Now)>,
    /// The blocks that are being received, and since when. Only while a trace runs.
    coming: HashMap<BlockId, (ShardId, Now)>,
    pub(super) phases: Arc<Phases>,
}

impl Observed {
    /// For a client whose time begins now.
    pub(super) fn new() -> Observed {
        Observed {
            timeline: Timeline::begin(),
            versions: VersionTimes::default(),
            plans: PlanTimes::default(),
            pull: None,
            unopened: None,
            coming: HashMap::new(),
            phases: Arc::default(),
        }
    }

    fn record(&self, what: What, from: Now, to: Now) {
        self.timeline.record(what, from, to);
    }

    /// The core may have changed. `now` is asked for only if it has.
    pub(super) fn look(&mut self, core: &ClientCore, now: impl Fn() -> Now) {
        let newest = core.state().version;
        if self.versions.newest() != Some(newest) {
            let now = now();
            self.versions.known(newest, now);
            let is_published = |learner, step| {
                let known = core.state().learners.iter().find(|known| known.learner == learner);
                known.is_some_and(|known| known.step > step || known.step == step && !known.unpublished)
            };
            let phases = &self.phases;
            let others = |_, from, to: Now| phases.others.took(to.saturating_sub(from));
            if let Some(plan) = self.plans.version(newest, now, is_published, others) {
                self.over(&plan);
            }
        }
        self.look_at_plan(core, &now);
        let pulled = core.pulling();
        if let Some(version) = pulled.filter(|version| self.pull.is_none_or(|(of, _)| of != *version)) {
            self.pull = Some((version, now()));
        }
    }

    fn look_at_plan(&mut self, core: &ClientCore, now: impl Fn() -> Now) {
        let Some((plan, granted)) = core.outgoing() else {
            if self.plans.is_running() {
                self.plans.plan(None, now());
            }
            return;
        };
        if !self.plans.is_running_as(plan)
            && let Some(before) = self.plans.plan(Some(plan), now())
        {
            self.over(&before);
        }
        let is_open = granted.is_provisional();
        if !is_open && !self.plans.is_sealed() {
            let now = now();
            self.plans.sealed(now);
            self.record(What::Sealed(plan), now, now);
        }
    }

    fn over(&self, plan: &PlanPhases) {
        if plan.version.is_some() {
            plan.wire().inspect(|took| self.phases.wire.took(*took));
            plan.conclude().inspect(|took| self.phases.conclude.took(*took));
        }
        self.trace_plan(plan, plan.version.map_or(PlanOutcome::None, PlanOutcome::Made));
    }

    fn trace_plan(&self, of: &PlanPhases, outcome: PlanOutcome) {
        if !self.timeline.trace.is_on() {
            return;
        }
        self.record(What::Plan(of.plan, outcome), of.granted, of.over);
        if let Some((first, last)) = of.sent {
            // The plan may be known to be over before the last pass over a block is.
            let last = last.min(of.over);
            self.record(What::Blocks(of.plan), first.min(last), last);
            if let (PlanOutcome::Made(_), Some(sealed)) = (outcome, of.sealed) {
                self.record(What::Conclude(of.plan), last.max(sealed).min(of.over), of.over);
            }
        }
    }

    /// The trace is about to end. What is under way is recorded as far as it is.
    pub(super) fn trace_rest(&mut self, now: Now) {
        if let Some(plan) = self.plans.so_far(now) {
            self.trace_plan(
                &plan,
                if self.plans.is_running() { PlanOutcome::Runs } else { PlanOutcome::None },
            );
        }
        if let Some((version, began)) = self.pull {
            self.record(What::Pull(version), began, now);
        }
        self.coming.clear();
    }

    /// A learner commits a step.
    pub(super) fn committed(&mut self, learner: LearnerId, step: Step, now: Now) {
        self.plans.committed(learner, step, now);
    }

    /// A learner is no longer in the job.
    pub(super) fn left(&mut self, learner: LearnerId) {
        self.plans.forget(learner);
    }

    /// A block of the plan was taken to be sent, or has been read where it lies.
    pub(super) fn sent(&mut self, plan: PlanId, now: Now) {
        self.plans.sent(plan, now);
    }

    /// A block begins to be received.
    pub(super) fn receives(&mut self, block: BlockId, shard: ShardId, now: impl FnOnce() -> Now) {
        if self.timeline.trace.is_on() {
            self.coming.insert(block, (shard, now()));
        }
    }

    /// A block of a version is here.
    pub(super) fn received(&mut self, version: Version, block: BlockId, now: Now) {
        if self.timeline.trace.is_on()
            && let Some((shard, from)) = self.coming.remove(&block)
        {
            self.record(What::Pulled(version, block, shard), from, now);
        }
    }

    /// The client shows a version from now on.
    pub(super) fn shown(&mut self, version: Version, is_pulled: bool, now: Now) {
        let began = self.pull.take_if(|(of, _)| *of <= version);
        if is_pulled {
            // If it came before it counted, nothing was left to pull.
            let began = began.map_or(now, |(_, began)| began);
            self.phases.pull.took(now.saturating_sub(began));
            self.record(What::Pull(version), began, now);
        }
        self.unopened = Some((version, now));
        self.record(What::Shown(version), now, now);
    }

    /// A program opens the version that is shown.
    pub(super) fn opened(&mut self, now: Now) {
        if let Some((version, shown)) = self.unopened.take() {
            self.record(What::Bubble(version), shown, now);
        }
    }

    /// How far a version is behind the newest one that the coordinator has announced.
    pub(super) fn staleness(&self, of: Version, now: Now) -> Staleness {
        self.versions.of(of, now)
    }
}
