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
use libmodelio::vocabulary::ids::{LearnerId, Step};

use super::Provisional;
use crate::core::{Action, Committed, JobCore, Now, OfTensors, PayloadPlace, Pending, PendingKind, Phase};

/// A learner that has committed waits at least this long for the others. A plan that is dropped costs as much as was
/// sent.
const WAIT_FOR_OTHERS: Now = Now::from_secs(1);

impl JobCore {
    /// Begins the coming version's plan if contributions to it can be sent before all are committed.
    pub(in crate::core) fn begin_provisional(&mut self, now: Now, actions: &mut Vec<Action>) {
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
    pub(in crate::core) fn be_patient(&mut self, now: Now) {
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

    /// The learners for whose contributions a plan may begin now.
    fn may_begin_provisional(&self) -> Option<BTreeSet<LearnerId>> {
        let is_idle = !self.making.is_under_way()
            && !self.provisional.is_under_way()
            && !self.is_accumulating()
            && !self.making.holds();
        if !self.provisional.may_begin || !is_idle || !self.has_room() || !self.formation.is_formed() {
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

    /// Drops the provisional plan that has blocks of `learner`, unless they are committed. The other contributions are
    /// sent again.
    pub fn drop_provisional(&mut self, learner: LearnerId, actions: &mut Vec<Action>) {
        if self.writes_provisionally(learner) && self.end_provisional() {
            // Another contribution takes its place.
            self.provisional.speculation.failed_alone = None;
            actions.push(Action::Drop);
        }
    }

    /// The provisional plan under way will not count. False if there is none.
    pub(in crate::core) fn end_provisional(&mut self) -> bool {
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
    pub(in crate::core) fn seal_provisional(&mut self) -> bool {
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

    /// A learner may write for as long as it likes. So nobody waits for the provisional plan under way, nor does
    /// another consistency that may free who waits. A learner that has committed waits for the others, but only for so
    /// long.
    pub(in crate::core) fn give_way(&mut self, now: Now, actions: &mut Vec<Action>) {
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

    /// Contributions that a plan was to read wait again.
    pub(in crate::core) fn put_back(&mut self) {
        for committed in
            self.committed.iter_mut().filter(|c| !c.contribution.steady && c.place == PayloadPlace::Staged)
        {
            committed.place = PayloadPlace::ToAccumulate;
        }
    }

    /// Fixed settings are released when nothing depends on them any more.
    pub(in crate::core) fn release_params(&mut self) {
        if !self.is_under_way() {
            self.recipe.release();
        }
    }

    /// Part of the coming version is computed with its parameters.
    pub(in crate::core) fn fix_params(&mut self) {
        self.recipe.fix(&self.controls, self.version);
    }
}
