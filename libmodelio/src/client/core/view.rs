//! The client's state, for reading. Nothing here decides.

use super::learners::Learner;
use super::pushing::Outgoing;
use super::{ClientCore, LastCommit};
use crate::vocabulary::block_map::PartitionIndex;
use crate::vocabulary::coding::Coding;
use crate::vocabulary::controls::PullPolicy;
use crate::vocabulary::ids::{BlockId, Incarnation, LearnerId, PlanId, ShardId, Step, Version};
use crate::vocabulary::phase::JobPhase;
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{Granted, JobState, Message};

impl ClientCore {
    /// The shards, by [`PartitionIndex`].
    pub fn shards(&self) -> &[ShardId] {
        self.owners.shards()
    }

    /// The shard that has a block.
    pub fn owner(&self, block: BlockId) -> Option<ShardId> {
        self.owners.of(block).map(|partition| self.owners.shards()[partition])
    }

    /// The newest state from the coordinator.
    pub fn state(&self) -> &JobState {
        &self.state
    }

    /// The version that the client shows. 0 if it shows none yet.
    pub fn version(&self) -> Version {
        self.buffers.shown().unwrap_or_default()
    }

    /// Whether the client shows a version.
    pub fn shows_any(&self) -> bool {
        self.buffers.shown().is_some()
    }

    /// The number of unanswered requests, and of contributions and new weights whose payload is still needed.
    pub fn kept(&self) -> (usize, usize) {
        (self.requests.len(), self.held.len() + self.weights.len())
    }

    /// Whether `learner` belongs to this client and is in the job.
    pub fn has_learner(&self, learner: LearnerId) -> bool {
        self.learners.contains_key(&learner)
    }

    /// Whether the learner has asked to leave and has no answer yet.
    pub fn is_leaving(&self, learner: LearnerId) -> bool {
        self.requests.has(|message| matches!(*message, Message::Leave { learner: of, .. } if of == learner))
    }

    /// Whether the learner has dropped a contribution and the coordinator has not answered that yet.
    pub(super) fn is_aborting(&self, learner: LearnerId) -> bool {
        self.requests.has(|message| matches!(*message, Message::Abort { learner: of } if of == learner))
    }

    /// The name and incarnation of a learner that has joined through this client.
    pub fn identity(&self, learner: LearnerId) -> Option<(&str, Incarnation)> {
        let known = self.learners.get(&learner)?;
        Some((known.name.as_deref()?, known.state.incarnation))
    }

    /// Whether the learner has a contribution open.
    pub fn is_writing(&self, learner: LearnerId) -> bool {
        let open = self.learners.get(&learner).and_then(|known| known.open.as_ref());
        open.is_some_and(|open| !self.is_committing(learner, open.step))
    }

    /// The next step of `learner`, and whether the last step's payload may still be needed. None if this client does
    /// not know it: the last commit has no outcome yet, or the learner is not its own.
    pub fn next_step(&self, learner: LearnerId) -> Option<(Step, bool)> {
        let step = self.learners.get(&learner)?.next.1?;
        let lent = self.held.range((learner, Step(0))..=(learner, Step(u64::MAX))).next().is_some();
        Some((step, lent))
    }

    /// Whether the last commit of `learner` is part of a version, here or not yet here.
    pub(super) fn is_published(&self, learner: LearnerId) -> bool {
        let known = self.learners.get(&learner);
        known.is_some_and(|known| known.state.step >= known.committed && !known.state.unpublished)
    }

    /// A version here with this step of `learner`: the step's own, or that of a later step.
    pub fn published_in(&self, learner: LearnerId, step: Step) -> Option<Version> {
        let state = &self.learners.get(&learner)?.state;
        let is_published = state.step > step || state.step == step && !state.unpublished;
        Some(state.published_in).filter(|version| is_published && *version <= self.version())
    }

    /// Where the last commit of `learner` is. If the job's settings are that learners do not wait for their own steps,
    /// it is as if there was none.
    pub fn last_commit(&self, learner: LearnerId) -> LastCommit {
        let known = self.learners.get(&learner).filter(|_| self.state.controls.reads_own_step());
        let Some(Learner { state, .. }) = known else { return LastCommit::In(Version(0)) };
        match self.is_published(learner) && state.published_in <= self.version() {
            true => LastCommit::In(state.published_in),
            false => LastCommit::Waits,
        }
    }

    /// The last step of `learner` that the coordinator has taken, as far as this client knows.
    pub fn taken_step(&self, learner: LearnerId) -> Option<Step> {
        self.learners.get(&learner).map(|known| known.state.step)
    }

    /// The version that the program of `learner` has last opened.
    pub fn last_opened(&self, learner: LearnerId) -> Option<Version> {
        self.learners.get(&learner)?.opened
    }

    /// Why requests fail, if the job has lost a shard's blocks.
    pub fn lost(&self) -> Option<ShardError> {
        let failed = || ShardError::Lost("a shard does not have its blocks any more".into());
        self.coordination.lost().cloned().or_else(|| (self.state.phase == JobPhase::Failed).then(failed))
    }

    /// Whether the job has lost its coordinator ([`Self::fail`]). The coordinator may have reported a failed job
    /// before that.
    pub fn is_abandoned(&self) -> bool {
        self.coordination.lost().is_some()
    }

    /// Why requests fail at the moment, if the job is stopped.
    pub fn stopped(&self) -> Option<ShardError> {
        let needed = self.state.controls.min_learners;
        (self.state.phase == JobPhase::Stopped)
            .then_some(ShardError::Stopped { active: self.state.members, needed })
    }

    /// The policy in force.
    pub(super) fn pull_policy(&self) -> PullPolicy {
        match self.way.is_in_place() {
            // Nothing is transferred.
            true => PullPolicy::Eager,
            false => self.pull_times.policy().unwrap_or_else(|| self.state.controls.pull_policy()),
        }
    }

    /// The version that an open as `learner`, or as none, must show beside the learner's own step: the newest one that
    /// is known if versions are pulled on demand, or if nobody pulls in time for a program that is no learner.
    pub(super) fn must_show(&self, learner: Option<LearnerId>) -> Option<Version> {
        let must = match self.pull_policy() {
            PullPolicy::Eager => false,
            PullPolicy::OnDemand => true,
            PullPolicy::Adaptive => learner.is_none() && !self.pull_times.serves(None) && self.reaches_all(),
        };
        must.then(|| self.state.version.max(self.version()))
    }

    /// Whether an open as `learner`, or as none, shows what it must: the learner's own step, and [`Self::must_show`].
    pub fn freshness(&self, learner: Option<LearnerId>) -> LastCommit {
        let newest = self.must_show(learner);
        match learner.map_or(LastCommit::In(Version(0)), |learner| self.last_commit(learner)) {
            LastCommit::In(_) if newest > Some(self.version()) => LastCommit::Waits,
            // The version that was newest when its name was looked up may be an older one.
            LastCommit::In(_) if newest.is_some() => LastCommit::In(self.version()),
            own => own,
        }
    }

    /// Whether the coordinator and all shards are connected.
    pub fn reaches_all(&self) -> bool {
        self.coordination.is_up() && self.owners.are_all_up()
    }

    /// The version that a program gets if it opens the newest one now. An open may have to wait for it.
    pub fn offered_version(&self) -> Version {
        match self.pull_policy() {
            // A version that cannot come now is not offered.
            PullPolicy::OnDemand if !self.reach.misses_a_shard() => self.state.version.max(self.version()),
            PullPolicy::OnDemand | PullPolicy::Eager | PullPolicy::Adaptive => self.version(),
        }
    }

    /// The plan under way, and what it is made of.
    pub fn outgoing(&self) -> Option<(PlanId, &Granted)> {
        self.outgoing.as_ref().map(|outgoing| (outgoing.plan, &outgoing.payload))
    }

    /// The form in which blocks of the plan under way cross a network by TCP, if not in full.
    pub fn coding(&self) -> Option<Coding> {
        self.outgoing.as_ref()?.coding
    }

    /// Whether something on its way to or from a shard was lost, or does not progress. Then all working connections
    /// are used.
    pub fn struggles(&self, partition: PartitionIndex) -> bool {
        self.outgoing.as_ref().is_some_and(|outgoing| outgoing.partitions[partition].struggles)
            || self.pull.as_ref().is_some_and(|pull| pull.partitions[partition].struggles)
    }

    pub(super) fn is_committing(&self, learner: LearnerId, step: Step) -> bool {
        self.requests.has(|message| matches!(*message, Message::Commit { learner: l, step: s, .. } if (l, s) == (learner, step)))
    }

    /// Whether the plan under way includes this contribution.
    pub(super) fn sends(&self, learner: LearnerId, step: Step) -> bool {
        let of = |outgoing: &Outgoing| matches!(&outgoing.payload, Granted::Contributions { of, .. } if of.contains(&(learner, step)));
        self.outgoing.as_ref().is_some_and(of)
    }

    /// The plan under way that makes the next version, unless it makes that of this client's new weights.
    pub(super) fn followable(&self) -> Option<PlanId> {
        match self.outgoing() {
            Some((_, Granted::Weights(_) | Granted::OpenWeights(_))) => None,
            Some((plan, Granted::Contributions { .. })) => Some(plan),
            None => self.plans.of_others(),
        }
    }

    /// Whether the newest version is shown, and the next one may be pulled while it is made.
    pub(super) fn can_follow(&self) -> bool {
        let is_idle = self.pull.is_none() && self.buffers.is_idle();
        let is_newest = self.state.sequence != 0 && self.buffers.shown() == Some(self.state.version);
        let may = !self.way.is_in_place() && !self.owners.relay.is_up && !self.buffers.are_none();
        may && is_idle && is_newest && self.followable().is_some()
    }
}
