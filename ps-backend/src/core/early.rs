//! Plans that begin early, while contributions to them are still written.
//!
//! A synchronous job has one such plan a version for all that take part in it. Elsewhere the plan is for one
//! contribution: the last one that can change the result or, if every contribution makes a version, that of the only
//! learner who writes.
//!
//! On a network all blocks are staged. In one process, blocks of the only contribution that is missing are not: they
//! are reduced where their program has them. So the plan of all gives way to one for the last of them, as long as that
//! learner has no whole block.
//!
//! A plan that is dropped was sent in vain. If others than its learner can make it so, a version has one such plan at
//! most, and if those of several versions in a row are dropped, more and more versions go without.

use std::collections::BTreeSet;
use std::sync::Arc;

use libmodelio::vocabulary::controls::Consistency;
use libmodelio::vocabulary::ids::{LearnerId, Step, Version};
use serde::{Deserialize, Serialize};

use super::{Action, Committed, JobCore, Now, OfTensors, Pending, PendingKind, Phase, Place};

/// After how many failures in a row the pauses grow no more: 2^5 versions.
const MOST_DOUBLINGS: u32 = 5;

/// A learner that has committed waits at least this long for the others. A plan that is dropped costs as much as was
/// sent.
const PATIENCE: Now = Now::from_secs(1);

/// The provisional plan under way.
#[derive(Debug)]
pub(super) struct Early {
    /// The learners whose contributions were still to be committed when it began.
    open: BTreeSet<LearnerId>,
    since: Now,
    /// Whether its blocks are staged, too. Then it gives way to whoever waits for it.
    pub(super) staged: bool,
}

impl Early {
    /// Whether it takes a commit of `learner`.
    pub(super) fn takes(&self, learner: LearnerId) -> bool {
        self.open.contains(&learner)
    }
}

/// Whether plans may begin early, by what became of earlier ones.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Speculation {
    /// The number of plans that were dropped since one counted, of those that others than their learner can drop.
    /// (Others succeed where these fail: when the others have committed, the last one has a plan of its own.)
    failures: u32,
    /// No such plan begins on top of an older version.
    resumes_at: Version,
    /// The contribution whose own plan failed. It is read after its commit.
    failed_alone: Option<(LearnerId, Step)>,
}

impl Speculation {
    fn is_on(&self, version: Version) -> bool {
        version >= self.resumes_at
    }

    /// The plan for the version after this one was dropped.
    pub(super) fn fails(&mut self, version: Version) {
        let pause = 1 << self.failures.min(MOST_DOUBLINGS);
        self.failures = self.failures.saturating_add(1);
        self.resumes_at = Version(version.0.saturating_add(pause));
    }

    /// A plan counts that others than its learner could have dropped.
    pub(super) fn succeeds(&mut self) {
        self.failures = 0;
    }
}

impl<S: Clone> JobCore<S> {
    /// Begins the coming version's plan if contributions to it can be sent before all are committed.
    pub(super) fn begin_early(&mut self, now: Now, actions: &mut Vec<Action<S>>) {
        if self.is_left_to_one() {
            self.early = None;
            self.put_back();
            self.release_params();
            actions.push(Action::Drop);
        }
        let Some(open) = self.may_begin_early() else { return };
        self.fix_params();
        for committed in self.committed.iter_mut().filter(|c| c.place == Place::ToAccumulate) {
            committed.place = Place::Kept;
        }
        actions.push(Action::Reduce(Arc::new(self.reduce_plan(Some(&open)))));
        let staged = self.staged || open.len() > 1;
        self.early = Some(Early { open, since: now, staged });
        self.be_patient(now);
    }

    /// Those that have committed to the plan which has begun early wait for the others as long again as it has lasted,
    /// or longer. If that does not do, their contributions are accumulated. In one process nothing is sent again, so
    /// they need not wait longer than that.
    pub(super) fn be_patient(&mut self, now: Now) {
        let Some(early) = &self.early else { return };
        let least = if self.staged { PATIENCE } else { self.accumulate_patience };
        let patience = now.saturating_sub(early.since).max(least);
        for committed in self.committed.iter_mut().filter(|c| c.place == Place::Kept) {
            committed.accumulate_at = (now + patience).min(committed.patient_until);
        }
    }

    /// Whether the plan of all in one process lacks one contribution, which has no block yet.
    fn is_left_to_one(&self) -> bool {
        let Some(early) = self.early.as_ref().filter(|early| early.staged && !self.staged) else {
            return false;
        };
        let mut left = early.open.iter().filter(|learner| !self.has_committed(**learner));
        matches!((left.next(), left.next()), (Some(&learner), None) if !self.has_block(learner))
    }

    /// Whether `learner` is writing a contribution that has a whole block.
    pub(super) fn has_block(&self, learner: LearnerId) -> bool {
        let phase = self.members.get(&learner).map(|member| &member.phase);
        matches!(phase, Some(Phase::Open { has_block: true, .. }))
    }

    /// The learners for whose contributions a plan may begin now.
    fn may_begin_early(&self) -> Option<BTreeSet<LearnerId>> {
        let is_idle =
            self.running.is_none() && self.early.is_none() && !self.is_accumulating() && !self.holds;
        if !self.provisional || !is_idle || !self.buffer_ready || !self.formed {
            return None;
        }
        // On a network blocks come in any order, and would wait at the shard for those that go before.
        if self.staged && self.controls.deterministic {
            return None;
        }
        // The version may be made without what is still written. Elsewhere, the rate depends on what comes first.
        if self.has_enough_for_grace() || self.divides_by_staleness() {
            return None;
        }
        // New weights come first. Otherwise they would wait for as long as the contributions are written.
        if self.pending.iter().any(|pending| matches!(pending.kind, PendingKind::Assign { .. })) {
            return None;
        }
        let (reducer, hyper, OfTensors { groups, .. }) = self.params();
        if reducer.measures(&hyper) || groups.are_layerwise(reducer) {
            return None;
        }
        // Values of several learners replace each other byte by byte, so a later commit may change a block that is
        // computed already.
        let replaces = reducer.combine().replaces();
        if !self.gathers() && self.members.len() > 1 && !self.speculation.is_on(self.version) {
            return None;
        }
        if replaces && !self.committed.is_empty() {
            return None;
        }
        let open: BTreeSet<LearnerId> = match self.takes_all_at_once() && !replaces {
            true => self.missing().collect(),
            false => self.last_outstanding().into_iter().collect(),
        };
        if self
            .speculation
            .failed_alone
            .is_some_and(|failed| open.iter().eq([&failed.0]) && self.is_open(failed))
        {
            return None;
        }
        open.iter().any(|learner| self.has_block(*learner)).then_some(open)
    }

    /// Whether a plan that begins early takes the contributions of all learners. They can be sent again if it is
    /// dropped, and the version needs all of them.
    fn takes_all_at_once(&self) -> bool {
        (self.staged || self.missing().nth(1).is_some())
            && self.consistency == Consistency::Sync
            && self.speculation.is_on(self.version)
    }

    fn is_open(&self, (learner, step): (LearnerId, Step)) -> bool {
        let phase = self.members.get(&learner).map(|member| &member.phase);
        matches!(phase, Some(Phase::Open { step: open, .. }) if *open == step)
    }

    /// The contribution that `learner` writes to `step` has a whole block. A plan may begin that takes its blocks as
    /// they come.
    pub fn is_whole(&mut self, learner: LearnerId, step: Step, now: Now, actions: &mut Vec<Action<S>>) {
        let phase = self.members.get_mut(&learner).map(|member| &mut member.phase);
        if let Some(Phase::Open { step: open, has_block }) = phase
            && *open == step
            && !std::mem::replace(has_block, true)
        {
            self.advance(now, actions);
        }
    }

    /// Whether `learner` still writes to the plan that has begun early.
    pub(super) fn is_early(&self, learner: LearnerId) -> bool {
        self.early.as_ref().is_some_and(|early| early.takes(learner)) && !self.has_committed(learner)
    }

    fn has_committed(&self, learner: LearnerId) -> bool {
        self.committed.iter().any(|committed| committed.contribution.learner == learner)
    }

    /// Whether contributions to the plan that has begun early are still written.
    pub(super) fn waits_for_early(&self) -> bool {
        let waits = |early: &Early| early.open.iter().any(|learner| !self.has_committed(*learner));
        self.early.as_ref().is_some_and(waits)
    }

    /// Drops the plan that has early blocks of `learner`, unless they are committed. The other contributions are sent
    /// again.
    pub fn drop_early(&mut self, learner: LearnerId, actions: &mut Vec<Action<S>>) {
        if self.is_early(learner) && self.end_early() {
            // Another contribution takes its place.
            self.speculation.failed_alone = None;
            actions.push(Action::Drop);
        }
    }

    /// The provisional plan under way could not take a block, so it is void. All contributions are read when they are
    /// committed.
    pub fn early_failed(&mut self, now: Now, actions: &mut Vec<Action<S>>) {
        if self.end_early() {
            self.advance(now, actions);
        }
    }

    /// The provisional plan under way will not count. False if there is none.
    pub(super) fn end_early(&mut self) -> bool {
        let Some(Early { open, .. }) = self.early.take() else { return false };
        if let (Some(&learner), 1) = (open.first(), open.len()) {
            let step = self.members.get(&learner).map(|member| member.step.next());
            self.speculation.failed_alone = step.map(|step| (learner, step));
        }
        if self.is_of_others(&open) {
            self.speculation.fails(self.version);
        }
        self.put_back();
        self.release_params();
        true
    }

    /// The provisional plan under way, if there is one, is sealed.
    pub(super) fn seal_early(&mut self) -> bool {
        let Some(Early { open, .. }) = self.early.take() else { return false };
        if self.is_of_others(&open) {
            self.speculation.succeeds();
        }
        true
    }

    /// Whether others than its learner can have a plan for these dropped, or have to send again then.
    fn is_of_others(&self, open: &BTreeSet<LearnerId>) -> bool {
        let is_other = |c: &Committed<S>| {
            c.place == Place::Kept && !c.contribution.steady && !open.contains(&c.contribution.learner)
        };
        open.len() > 1 || self.committed.iter().any(is_other) || !self.gathers() && self.members.len() > 1
    }

    /// A committed contribution whose memory is read for the provisional plan: it can be taken out with that.
    pub(super) fn is_read_early(&self, committed: &Committed<S>) -> bool {
        self.early.is_some() && committed.place == Place::Kept && !committed.contribution.steady
    }

    /// A learner may write for as long as it likes. So nobody waits for the provisional plan under way, nor does
    /// another consistency that may free who waits. A learner that has committed waits for the others, but only for so
    /// long.
    pub(super) fn give_way(&mut self, now: Now, actions: &mut Vec<Action<S>>) {
        let Some(early) = self.early.as_ref().filter(|early| early.staged) else { return };
        let waits = |pending: &Pending<S>| match &pending.kind {
            PendingKind::Commit { contribution } => {
                !early.takes(contribution.learner) && self.would_take_commit(contribution.learner)
            }
            PendingKind::Assign { .. } => true,
        };
        // In the order of learners, nothing is accumulated.
        let is_due = |committed: &Committed<S>| {
            self.is_read_early(committed) && committed.accumulate_at <= now && !self.controls.deterministic
        };
        let is_in_the_way = self.holds
            || self.consistency != self.controls.consistency
            || self.waits_for_early() && self.committed.iter().any(is_due);
        if (is_in_the_way || self.pending.iter().any(waits)) && self.end_early() {
            actions.push(Action::Drop);
        }
    }
}
