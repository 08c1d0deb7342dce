//! Work that was begun and cannot be finished: its remains, and the work that is begun anew.
//!
//! Until it is accumulated or part of a version, a commit that is not steady can be taken out again, and with
//! it the plan or the accumulation that has it. The contributions of all others go back to where they can be
//! read again; the earlier contents of the accumulator stay.

use std::sync::Arc;

use libmodelio::transport::{LeaveReason, ShardError};
use libmodelio::vocabulary::ids::{LearnerId, Step};

use super::{Action, Committed, JobCore, Member, Now, Phase, Place, Plan, Work};

impl<S: Clone> JobCore<S> {
    /// The contributions of a [`Action::Accumulate`] could not be added up, and nothing of any of them was. The
    /// commits named fail with the error beside them and are open again; the rest are accumulated anew.
    pub fn accumulate_failed(
        &mut self,
        failed: Vec<(LearnerId, ShardError)>,
        now: Now,
        actions: &mut Vec<Action<S>>,
    ) {
        self.stop_accumulation();
        self.fail(failed, actions);
        self.release_params();
        self.advance(now, actions);
    }

    /// The running plan found NaN or Inf in contributions that nobody had looked at. Their commits fail with
    /// the error beside them and are taken back; the version is not made.
    pub fn refused(&mut self, bad: Vec<(LearnerId, ShardError)>, now: Now, actions: &mut Vec<Action<S>>) {
        self.stop_plan();
        self.fail(bad, actions);
        self.release_params();
        self.advance(now, actions);
    }

    /// The payload of these learners' commits is lost. Commits that are neither steady (their payload is the
    /// shard's own) nor accumulated are not part of the job: they fail. Learners still in the job leave it
    /// with [`LeaveReason::Died`].
    ///
    /// Returns whether the plan or the accumulation under way needed one of these payloads. If it did, that
    /// work is void, and must not be reported as done; `actions` may begin another.
    pub fn lost(&mut self, learners: &[LearnerId], now: Now, actions: &mut Vec<Action<S>>) -> bool {
        let is_gone = |committed: &Committed<S>| {
            !committed.contribution.steady
                && committed.place != Place::Accumulated
                && learners.contains(&committed.contribution.learner)
        };
        let gone: Vec<_> = self.committed.extract_if(.., |committed| is_gone(committed)).collect();
        let mut void = false;
        if gone.iter().any(|committed| committed.place == Place::Accumulating) {
            self.stop_accumulation();
            void = true;
        }
        if gone.iter().any(|committed| self.reads(&committed.contribution.learner)) {
            self.stop_plan();
            void = true;
        }
        for committed in gone {
            let learner = committed.contribution.learner;
            if let Some((ticket, _)) = committed.ticket {
                actions.push(Action::Reply(ticket, Err(ShardError::UnknownLearner(learner))));
            }
            self.drop_early(learner, actions);
        }
        self.release_params();
        for &learner in learners {
            // A learner that has left before only has to be forgotten.
            let _ = self.depart(learner, LeaveReason::Died, actions);
        }
        self.after_departure(now, actions);
        void
    }

    /// The program of `learner` has the memory back that it has lent for its last commit. Unless that is accumulated, it
    /// fails with `why` and is open again.
    ///
    /// Returns whether the plan or the accumulation under way reads it, which is void then, as with [`Self::lost`].
    pub fn reclaim(
        &mut self,
        learner: LearnerId,
        why: ShardError,
        now: Now,
        actions: &mut Vec<Action<S>>,
    ) -> bool {
        let is_it = |c: &&Committed<S>| {
            c.contribution.lent && c.contribution.learner == learner && c.place != Place::Accumulated
        };
        let Some(committed) = self.committed.iter().find(is_it) else { return false };
        let (place, is_read) = (committed.place, committed.is_read());
        match place {
            Place::Accumulating => self.stop_accumulation(),
            Place::Kept => self.stop_plan(),
            Place::ToAccumulate | Place::Accumulated => {}
        }
        self.fail(vec![(learner, why)], actions);
        self.release_params();
        self.advance(now, actions);
        is_read
    }

    /// The write of `weights` that the running plan publishes has failed: there is no new version.
    pub fn assign_failed(&mut self, error: ShardError, now: Now, actions: &mut Vec<Action<S>>) {
        let is_assign = |plan: &mut Arc<Plan<S>>| matches!(plan.work, Work::Assign { .. });
        if self.running.take_if(is_assign).is_some()
            && let Some((ticket, _)) = self.running_ticket.take()
        {
            actions.push(Action::Reply(ticket, Err(error)));
        }
        self.advance(now, actions);
    }

    /// Whether the running plan reads a contribution of `learner`.
    fn reads(&self, learner: &LearnerId) -> bool {
        self.running.as_ref().is_some_and(|plan| match &plan.work {
            Work::Reduce { inputs, .. } => inputs.iter().any(|input| input.learner == *learner),
            Work::Assign { .. } => false,
        })
    }

    /// The version that was being made is not.
    fn stop_plan(&mut self) {
        self.running = None;
        for committed in
            self.committed.iter_mut().filter(|c| !c.contribution.steady && c.place == Place::Kept)
        {
            committed.place = Place::ToAccumulate;
        }
    }

    /// The contributions that were being accumulated are not in the accumulator.
    fn stop_accumulation(&mut self) {
        for committed in self.committed.iter_mut().filter(|c| c.place == Place::Accumulating) {
            committed.place = Place::ToAccumulate;
        }
    }

    fn fail(&mut self, failed: Vec<(LearnerId, ShardError)>, actions: &mut Vec<Action<S>>) {
        for (learner, error) in failed {
            let of_learner = |c: &&mut Committed<S>| c.contribution.learner == learner;
            let Some(committed) =
                self.committed.iter_mut().filter(|c| c.place == Place::ToAccumulate).find(of_learner)
            else {
                continue;
            };
            if let Some((ticket, _)) = committed.ticket.take() {
                actions.push(Action::Reply(ticket, Err(error)));
            }
            self.take_back(learner, actions);
        }
    }

    /// Settings are fixed only as long as something was computed with them.
    pub(super) fn release_params(&mut self) {
        if !self.is_under_way() {
            self.params = None;
        }
    }

    /// Undoes a commit of which nothing has been read yet: the contribution is open again. Blocks that came
    /// after it are dropped.
    pub(super) fn take_back(&mut self, learner: LearnerId, actions: &mut Vec<Action<S>>) {
        let Some(at) = self.committed.iter().position(|c| c.contribution.learner == learner) else { return };
        let committed = self.committed.remove(at);
        let step = self.members.get(&learner).map_or(Step(0), |member| member.step);
        let early = ShardError::StepOutOfOrder { got: step.next(), expected: step };
        self.drop_pending_commit(learner, early, actions);
        if let Some(member) = self.members.get_mut(&learner)
            && let Some(phase) = committed.undo
        {
            member.step = Step(member.step.0.saturating_sub(1));
            member.pace = member.pace.saturating_sub(1);
            member.unpublished = false;
            member.phase = phase;
        }
        let is_open = |member: &Member| matches!(member.phase, Phase::Open { .. });
        if !self.members.get(&learner).is_some_and(is_open) {
            self.drop_early(learner, actions);
        }
    }
}
