//! Requests that wait to be taken, and are refused.

use libmodelio::vocabulary::groups::Contents;
use libmodelio::vocabulary::ids::LearnerId;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::weight::Weight;

use super::{Action, JobCore, Pending, PendingKind};

impl JobCore {
    /// Refuses the commit of `learner` that waits to be taken. False if there is none.
    pub(super) fn drop_pending_commit(
        &mut self,
        learner: LearnerId,
        why: ShardError,
        actions: &mut Vec<Action>,
    ) -> bool {
        let of_learner = |pending: &Pending| matches!(&pending.kind, PendingKind::Commit { contribution, .. } if contribution.learner == learner);
        let pending = self.pending.iter().position(of_learner).and_then(|at| self.pending.remove(at));
        if let Some(pending) = &pending {
            actions.push(Action::Reply(pending.ticket, Err(why)));
        }
        pending.is_some()
    }

    /// Refuses commits that are not taken yet and are not what the reducer takes.
    pub(super) fn drop_pending_contents(&mut self, actions: &mut Vec<Action>) {
        let of = |pending: &Pending| match &pending.kind {
            PendingKind::Commit { contribution } => {
                Some((contribution.learner, contribution.contents, contribution.weight))
            }
            PendingKind::Assign { .. } => None,
        };
        let waiting: Vec<_> = self.pending.iter().filter_map(of).collect();
        for (learner, contents, weight) in waiting {
            if let Err(error) = self.refuse_contents(contents, weight) {
                self.drop_pending_commit(learner, error, actions);
            }
        }
    }

    /// The reducer may have changed while the contribution was written.
    pub(super) fn refuse_contents(&self, contents: Contents, weight: Weight) -> Result<(), ShardError> {
        let (reducer, _, of_tensors) = self.params();
        if weight != Weight::ONE && !reducer.takes_weighted() {
            return Err(ShardError::NotAllowed(format!(
                "the contribution has weight {weight}, and reducer {reducer} takes only 1: write 1 to the learner's weight"
            )));
        }
        if !contents.content.fits(reducer.content()) {
            return Err(ShardError::NotAllowed(format!(
                "the contribution is one of {}, and the reducer is {reducer} now: write it again",
                contents.content.name()
            )));
        }
        if contents.averaged != of_tensors.averaged(reducer) {
            let why = "other tensors are averaged now than when the contribution was begun: write it again";
            return Err(ShardError::NotAllowed(why.into()));
        }
        Ok(())
    }

    /// Refuses the requests of waiting learners if the job has stopped.
    pub(super) fn stop_if_too_few(&mut self, actions: &mut Vec<Action>) {
        if !self.is_stopped() {
            return;
        }
        let error = self.stopped();
        let mut kept = std::collections::VecDeque::new();
        for pending in self.pending.drain(..) {
            match pending.kind {
                PendingKind::Commit { .. } => {
                    actions.push(Action::Reply(pending.ticket, Err(error.clone())));
                }
                PendingKind::Assign { .. } => kept.push_back(pending),
            }
        }
        self.pending = kept;
    }
}
