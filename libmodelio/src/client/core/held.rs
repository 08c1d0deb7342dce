//! Payload that shards may still need: which contribution holds it, and when it is released.

use fixedbitset::FixedBitSet;

use super::learners::OnlyInPlan;
use super::{Action, ClientCore};
use crate::vocabulary::ids::{LearnerId, PlanId, Step};
use crate::wire::{Granted, Message};

/// A contribution whose payload is kept.
#[derive(Debug)]
pub(super) struct KeptContribution {
    pub(super) blocks: FixedBitSet,
    /// Those of the blocks that are known to be written as a whole.
    pub(super) whole: FixedBitSet,
    /// The number of its newest commit. The answer to an earlier commit does not end the wait of this one.
    pub(super) request: u64,
    /// The newest provisional plan for which its blocks may have been sent.
    pub(super) sent_under: Option<PlanId>,
    /// Its blocks that exist nowhere but in a plan.
    pub(super) only_in_plan: Option<OnlyInPlan>,
    /// Set when its learner has left and the shard still reads the payload where it lies: the number of contributions
    /// in versions at that moment.
    pub(super) left_at: Option<u64>,
    /// The program has taken the contribution back: the client sends nothing of it from then on.
    pub(super) is_taken_back: bool,
    /// The plan for which its blocks may still be on their way, though the client sends no more of them. The plan may
    /// count, so they stay as they are until it is over.
    pub(super) strays_of: Option<PlanId>,
}

impl KeptContribution {
    /// The blocks among these that are not known to be written as a whole.
    pub(super) fn lacks(&self, blocks: &FixedBitSet) -> FixedBitSet {
        let mut lacks = blocks.clone();
        lacks.difference_with(&self.whole);
        lacks
    }
}

impl ClientCore {
    pub(super) fn release(&mut self, learner: LearnerId, step: Step, actions: &mut Vec<Action>) {
        if let Some(held) = self.held.remove(&(learner, step)) {
            // If the commit was refused, that plan has blocks which the next contribution to the step must not join.
            self.plans.give_up(held.sent_under);
            // A plan that reads it may already be over, but the client has not been told.
            if self.sends(learner, step) {
                self.outgoing = None;
            }
            actions.push(Action::Release(learner, step));
        }
    }

    /// Releases the payload of learners that have left, once no version needs it. If the coordinator still grants it,
    /// the client answers `SourceGone`.
    pub(super) fn release_left(&mut self, actions: &mut Vec<Action>) {
        let over = self.plans.over();
        let is_left = |&(learner, step): &(LearnerId, Step), held: &KeptContribution| {
            !self.learners.contains_key(&learner)
                && held.strays_of.is_none_or(|plan| plan <= over)
                && !self.is_committing(learner, step)
                && !self.sends(learner, step)
        };
        // Every committed contribution is part of the next version that is made of contributions.
        let contributions = self.state.contributions;
        let is_over = |held: &KeptContribution| {
            !self.way.is_in_place() || held.left_at.is_some_and(|left_at| contributions > left_at)
        };
        let left: Vec<_> = self
            .held
            .iter()
            .filter(|(key, held)| is_over(held) && is_left(key, held))
            .map(|(&key, _)| key)
            .collect();
        for (learner, step) in left {
            self.release(learner, step, actions);
        }
    }

    /// The answer to a request shows that this contribution is not part of the job. It is released, unless it was
    /// committed again after that request.
    pub(super) fn release_refused(
        &mut self,
        request: u64,
        (learner, step): (LearnerId, Step),
        actions: &mut Vec<Action>,
    ) {
        let newer = self.held.get(&(learner, step)).is_some_and(|held| held.request > request);
        if !newer && !self.is_committing(learner, step) {
            self.release(learner, step, actions);
        }
    }

    /// Sends nothing more for the plan under way. Blocks on their way to it may be part of a version all the same.
    pub(super) fn stop_sending(&mut self) {
        let Some(outgoing) = self.outgoing.take() else { return };
        for key in outgoing.contributions() {
            if let Some(held) = self.held.get_mut(key) {
                held.strays_of = Some(outgoing.plan);
            }
        }
    }

    /// Releases new weights that no request waits for, unless they are being sent.
    pub(super) fn release_weights(&mut self, actions: &mut Vec<Action>) {
        let is_needed = |token: u64| {
            self.requests.has(|message| matches!(*message, Message::Assign { token: t, .. } if t == token))
                || self.outgoing.as_ref().is_some_and(|outgoing| {
                    [Granted::Weights(token), Granted::OpenWeights(token)].contains(&outgoing.payload)
                })
        };
        for token in self.weights.unneeded(is_needed) {
            self.weights.forget(token);
            actions.push(Action::ReleaseWeights(token));
        }
    }

    /// Releases payload of steps before `step`: the coordinator has moved on.
    pub(super) fn release_older(&mut self, learner: LearnerId, step: Step, actions: &mut Vec<Action>) {
        let old: Vec<Step> =
            self.held.range((learner, Step(0))..(learner, step)).map(|(&(_, step), _)| step).collect();
        for step in old {
            self.release(learner, step, actions);
        }
    }
}
