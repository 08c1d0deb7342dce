//! Plans that begin early, while their last contribution is still written.

use std::sync::Arc;

use libmodelio::vocabulary::ids::{LearnerId, Step};

use super::{Action, JobCore, Now, Pending, PendingKind, Phase};

impl<S: Clone> JobCore<S> {
    /// Begins the coming version's plan if the last learner that it waits for is writing.
    pub(super) fn begin_early(&mut self, actions: &mut Vec<Action<S>>) {
        let Some(learner) = self.may_begin_early() else { return };
        self.params = Some(self.params());
        self.early = Some(learner);
        actions.push(Action::Reduce(Arc::new(self.reduce_plan(Some(learner)))));
    }

    /// The learner for whose contribution a plan may begin now. No other learner can change the sum that its blocks
    /// are added to.
    fn may_begin_early(&self) -> Option<LearnerId> {
        let is_idle = self.running.is_none() && self.early.is_none() && !self.holds;
        if !self.provisional || !is_idle || !self.buffer_ready || !self.formed {
            return None;
        }
        // New weights come first. Otherwise they would wait for as long as the contribution is written.
        if self.pending.iter().any(|pending| matches!(pending.kind, PendingKind::Assign { .. })) {
            return None;
        }
        let (reducer, hyper, _) = self.params();
        if reducer.measures(&hyper) {
            return None;
        }
        // Values of several learners replace each other byte by byte, so a later commit may change a block that is
        // computed already.
        if reducer.combine().replaces() && !self.committed.is_empty() {
            return None;
        }
        let learner = self.last_outstanding()?;
        let Phase::Open { step, has_block } = self.members.get(&learner)?.phase else { return None };
        (has_block && self.failed_early != Some((learner, step))).then_some(learner)
    }

    /// The contribution that `learner` writes to `step` has a whole block. A plan may begin that takes its blocks as they
    /// come.
    pub fn is_whole(&mut self, learner: LearnerId, step: Step, now: Now, actions: &mut Vec<Action<S>>) {
        let phase = self.members.get_mut(&learner).map(|member| &mut member.phase);
        if let Some(Phase::Open { step: open, has_block }) = phase
            && *open == step
            && !std::mem::replace(has_block, true)
        {
            self.advance(now, actions);
        }
    }

    /// Drops the early blocks of `learner`, and the plan that has them. Committed contributions are read instead.
    pub fn drop_early(&mut self, learner: LearnerId, actions: &mut Vec<Action<S>>) {
        if self.early.take_if(|early| *early == learner).is_some() {
            self.release_params();
            actions.push(Action::Drop);
        }
    }

    /// The provisional plan under way could not take its learner's blocks, so it is void. The contribution is read
    /// after its commit.
    pub fn early_failed(&mut self, now: Now, actions: &mut Vec<Action<S>>) {
        if self.end_early() {
            self.advance(now, actions);
        }
    }

    /// No plan begins early any more for the contribution for which there is one. False if there is none.
    fn end_early(&mut self) -> bool {
        let Some(learner) = self.early.take() else { return false };
        let open = self.members.get(&learner).map(|member| member.step.next());
        self.failed_early = open.map(|step| (learner, step));
        self.release_params();
        true
    }

    /// A learner may write for as long as it likes. So nobody waits for the provisional plan under way, nor does another
    /// consistency that may free who waits.
    pub(super) fn give_way(&mut self, actions: &mut Vec<Action<S>>) {
        let Some(learner) = self.early.filter(|_| self.staged) else { return };
        let waits = |pending: &Pending<S>| match &pending.kind {
            PendingKind::Commit { contribution } => {
                contribution.learner != learner && self.would_take_commit(contribution.learner)
            }
            PendingKind::Assign { .. } => true,
        };
        let is_in_the_way = self.holds || self.consistency != self.controls.consistency;
        if (is_in_the_way || self.pending.iter().any(waits)) && self.end_early() {
            actions.push(Action::Drop);
        }
    }
}
