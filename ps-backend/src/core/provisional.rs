//! Provisional plans: they begin while contributions to them are still written.
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

use super::{Action, Committed, JobCore, Now, OfTensors, PayloadPlace, Pending, PendingKind, Phase};

/// After how many failures in a row the pauses grow no more: 2^5 versions.
const MOST_DOUBLINGS: u32 = 5;

/// A learner that has committed waits at least this long for the others. A plan that is dropped costs as much as was
/// sent.
const WAIT_FOR_OTHERS: Now = Now::from_secs(1);

/// The provisional plan under way.
#[derive(Debug)]
struct Provisional {
    /// The learners whose contributions were still to be committed when it began.
    open: BTreeSet<LearnerId>,
    since: Now,
    /// Whether its blocks are staged, too. Then it gives way to whoever waits for it.
    staged: bool,
}

impl Provisional {
    /// Whether it takes a commit of `learner`.
    fn takes(&self, learner: LearnerId) -> bool {
        self.open.contains(&learner)
    }
}

/// Whether provisional plans may begin, by what became of earlier ones.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Speculation {
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
    fn fails(&mut self, version: Version) {
        let pause = 1 << self.failures.min(MOST_DOUBLINGS);
        self.failures = self.failures.saturating_add(1);
        self.resumes_at = Version(version.0.saturating_add(pause));
    }

    /// A plan counts that others than its learner could have dropped.
    fn succeeds(&mut self) {
        self.failures = 0;
    }
}

/// The provisional plans: whether any may begin, and the one under way.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct ProvisionalPlans {
    #[serde(skip)]
    under_way: Option<Provisional>,
    /// Whether plans begin while contributions to them are still written.
    may_begin: bool,
    /// Whether the blocks of every such plan lie elsewhere, too. That is so on a network.
    are_all_staged: bool,
    speculation: Speculation,
    /// How long a contribution whose memory is needed back waits for the others of its step.
    accumulate_patience: Now,
}

impl ProvisionalPlans {
    pub(super) fn allow(&mut self) {
        self.may_begin = true;
    }

    pub(super) fn stage_all(&mut self) {
        self.are_all_staged = true;
    }

    pub(super) fn set_accumulate_patience(&mut self, patience: Now) {
        self.accumulate_patience = patience;
    }

    pub(super) fn accumulate_patience(&self) -> Now {
        self.accumulate_patience
    }

    pub(super) fn are_all_staged(&self) -> bool {
        self.are_all_staged
    }

    /// Whether one is under way.
    pub(super) fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Whether the blocks of the one under way lie elsewhere, too.
    pub(super) fn is_staged(&self) -> bool {
        self.under_way.as_ref().is_some_and(|plan| plan.staged)
    }

    /// Whether the one under way takes a commit of `learner`.
    pub(super) fn takes(&self, learner: LearnerId) -> bool {
        self.under_way.as_ref().is_some_and(|plan| plan.takes(learner))
    }

    /// The plan for the version after this one is not carried out. Another provisional one would be sent in vain
    /// just as well.
    pub(super) fn fails(&mut self, version: Version) {
        self.speculation.fails(version);
        self.under_way = None;
    }
}

impl JobCore {
    /// Begins the coming version's plan if contributions to it can be sent before all are committed.
    pub(super) fn begin_provisional(&mut self, now: Now, actions: &mut Vec<Action>) {
        if self.is_left_to_one() {
            self.provisional.under_way = None;
            self.put_back();
            self.release_params();
            actions.push(Action::Drop);
        }
        let Some(open) = self.may_begin_provisional() else { return };
        self.fix_params();
        for committed in self.committed.iter_mut().filter(|c| c.place == PayloadPlace::ToAccumulate) {
            committed.place = PayloadPlace::Staged;
        }
        actions.push(Action::Begin(Arc::new(self.reduce_plan(Some(&open)))));
        let staged = self.provisional.are_all_staged || open.len() > 1;
        self.provisional.under_way = Some(Provisional { open, since: now, staged });
        self.be_patient(now);
    }

    /// Those that have committed to the provisional plan wait for the others as long again as it has lasted,
    /// or longer. If that does not do, their contributions are accumulated. In one process nothing is sent again, so
    /// they need not wait longer than that.
    pub(super) fn be_patient(&mut self, now: Now) {
        let Some(plan) = &self.provisional.under_way else { return };
        let least = if self.provisional.are_all_staged {
            WAIT_FOR_OTHERS
        } else {
            self.provisional.accumulate_patience
        };
        let patience = now.saturating_sub(plan.since).max(least);
        for committed in self.committed.iter_mut().filter(|c| c.place == PayloadPlace::Staged) {
            committed.accumulate_at = (now + patience).min(committed.patient_until);
        }
    }

    /// Whether the plan of all in one process lacks one contribution, which has no block yet.
    fn is_left_to_one(&self) -> bool {
        let staged = |plan: &&Provisional| plan.staged && !self.provisional.are_all_staged;
        let Some(plan) = self.provisional.under_way.as_ref().filter(staged) else {
            return false;
        };
        let mut left = plan.open.iter().filter(|learner| !self.has_committed(**learner));
        matches!((left.next(), left.next()), (Some(&learner), None) if !self.has_block(learner))
    }

    /// Whether `learner` is writing a contribution that has a whole block.
    pub(super) fn has_block(&self, learner: LearnerId) -> bool {
        let phase = self.members.get(&learner).map(|member| &member.phase);
        matches!(phase, Some(Phase::Open { has_block: true, .. }))
    }

    /// The learners for whose contributions a plan may begin now.
    fn may_begin_provisional(&self) -> Option<BTreeSet<LearnerId>> {
        let is_idle = !self.making.is_under_way()
            && !self.provisional.is_under_way()
            && !self.is_accumulating()
            && !self.making.holds();
        if !self.provisional.may_begin || !is_idle || !self.making.has_buffer() || !self.formation.is_formed()
        {
            return None;
        }
        // On a network blocks come in any order, and would wait at the shard for those that go before.
        if self.provisional.are_all_staged && self.controls.deterministic {
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
        if !self.gathers() && self.members.len() > 1 && !self.provisional.speculation.is_on(self.version) {
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
            .provisional
            .speculation
            .failed_alone
            .is_some_and(|failed| open.iter().eq([&failed.0]) && self.is_open(failed))
        {
            return None;
        }
        open.iter().any(|learner| self.has_block(*learner)).then_some(open)
    }

    /// Whether a provisional plan takes the contributions of all learners. They can be sent again if it is
    /// dropped, and the version needs all of them.
    fn takes_all_at_once(&self) -> bool {
        (self.provisional.are_all_staged || self.missing().nth(1).is_some())
            && self.consistency == Consistency::Sync
            && self.provisional.speculation.is_on(self.version)
    }

    fn is_open(&self, (learner, step): (LearnerId, Step)) -> bool {
        let phase = self.members.get(&learner).map(|member| &member.phase);
        matches!(phase, Some(Phase::Open { step: open, .. }) if *open == step)
    }

    /// The contribution that `learner` writes to `step` has a whole block. A plan may begin that takes its blocks as
    /// they come.
    pub fn is_whole(&mut self, learner: LearnerId, step: Step, now: Now, actions: &mut Vec<Action>) {
        let phase = self.members.get_mut(&learner).map(|member| &mut member.phase);
        if let Some(Phase::Open { step: open, has_block }) = phase
            && *open == step
            && !std::mem::replace(has_block, true)
        {
            self.advance(now, actions);
        }
    }

    /// Whether `learner` still writes to the provisional plan.
    pub(super) fn writes_provisionally(&self, learner: LearnerId) -> bool {
        self.provisional.takes(learner) && !self.has_committed(learner)
    }

    fn has_committed(&self, learner: LearnerId) -> bool {
        self.committed.iter().any(|committed| committed.contribution.learner == learner)
    }

    /// Whether contributions to the provisional plan are still written.
    pub(super) fn waits_for_provisional(&self) -> bool {
        let waits = |plan: &Provisional| plan.open.iter().any(|learner| !self.has_committed(*learner));
        self.provisional.under_way.as_ref().is_some_and(waits)
    }

    /// Drops the provisional plan that has blocks of `learner`, unless they are committed. The other contributions are sent
    /// again.
    pub fn drop_provisional(&mut self, learner: LearnerId, actions: &mut Vec<Action>) {
        if self.writes_provisionally(learner) && self.end_provisional() {
            // Another contribution takes its place.
            self.provisional.speculation.failed_alone = None;
            actions.push(Action::Drop);
        }
    }

    /// The provisional plan under way could not take a block, so it is void. All contributions are read when they are
    /// committed.
    pub fn provisional_failed(&mut self, now: Now, actions: &mut Vec<Action>) {
        if self.end_provisional() {
            self.advance(now, actions);
        }
    }

    /// The provisional plan under way will not count. False if there is none.
    pub(super) fn end_provisional(&mut self) -> bool {
        let Some(Provisional { open, .. }) = self.provisional.under_way.take() else { return false };
        if let (Some(&learner), 1) = (open.first(), open.len()) {
            let step = self.members.get(&learner).map(|member| member.step.next());
            self.provisional.speculation.failed_alone = step.map(|step| (learner, step));
        }
        if self.is_of_others(&open) {
            self.provisional.speculation.fails(self.version);
        }
        self.put_back();
        self.release_params();
        true
    }

    /// The provisional plan under way, if there is one, is sealed.
    pub(super) fn seal_provisional(&mut self) -> bool {
        let Some(Provisional { open, .. }) = self.provisional.under_way.take() else { return false };
        if self.is_of_others(&open) {
            self.provisional.speculation.succeeds();
        }
        true
    }

    /// Whether others than its learner can have a plan for these dropped, or have to send again then.
    fn is_of_others(&self, open: &BTreeSet<LearnerId>) -> bool {
        let is_other = |c: &Committed| {
            c.place == PayloadPlace::Staged
                && !c.contribution.steady
                && !open.contains(&c.contribution.learner)
        };
        open.len() > 1 || self.committed.iter().any(is_other) || !self.gathers() && self.members.len() > 1
    }

    /// A committed contribution whose memory is read for the provisional plan: it can be taken out with that.
    pub(super) fn is_read_provisionally(&self, committed: &Committed) -> bool {
        self.provisional.is_under_way()
            && committed.place == PayloadPlace::Staged
            && !committed.contribution.steady
    }

    /// A learner may write for as long as it likes. So nobody waits for the provisional plan under way, nor does
    /// another consistency that may free who waits. A learner that has committed waits for the others, but only for so
    /// long.
    pub(super) fn give_way(&mut self, now: Now, actions: &mut Vec<Action>) {
        let Some(plan) = self.provisional.under_way.as_ref().filter(|plan| plan.staged) else { return };
        let waits = |pending: &Pending| match &pending.kind {
            PendingKind::Commit { contribution } => {
                !plan.takes(contribution.learner) && self.would_take_commit(contribution.learner)
            }
            PendingKind::Assign { .. } => true,
        };
        // In the order of learners, nothing is accumulated.
        let is_due = |committed: &Committed| {
            self.is_read_provisionally(committed)
                && committed.accumulate_at <= now
                && !self.controls.deterministic
        };
        let is_in_the_way = self.making.holds()
            || self.consistency != self.controls.consistency
            || self.waits_for_provisional() && self.committed.iter().any(is_due);
        if (is_in_the_way || self.pending.iter().any(waits)) && self.end_provisional() {
            actions.push(Action::Drop);
        }
    }
}
