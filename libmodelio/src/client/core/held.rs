//! Payload that may have to be sent yet: who holds it, and when it is released.

use std::ops::Range;

use fixedbitset::FixedBitSet;

use super::learners::Early;
use super::pushing::Outgoing;
use super::{Action, ClientCore};
use crate::vocabulary::ids::{LearnerId, PlanId, Step};
use crate::wire::{Granted, Message};

/// A contribution whose payload is kept.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) blocks: FixedBitSet,
    /// The newest commit of it. What was answered to an earlier request says nothing of this one.
    pub(super) request: u64,
    /// The newest provisional plan for which blocks of it may have been sent.
    pub(super) sent_under: Option<PlanId>,
    /// Blocks of it that are nowhere but in a plan.
    pub(super) early: Option<Early>,
    /// The shard reads it where it is: how many contributions were in versions when its learner left.
    pub(super) left_at: Option<u64>,
}

impl ClientCore {
    pub(super) fn bits(&self, ranges: &[Range<u32>]) -> FixedBitSet {
        let mut bits = FixedBitSet::with_capacity(self.blocks);
        for range in ranges {
            bits.insert_range((range.start as usize).min(self.blocks)..(range.end as usize).min(self.blocks));
        }
        bits
    }

    pub(super) fn release(&mut self, learner: LearnerId, step: Step, actions: &mut Vec<Action>) {
        if self.held.remove(&(learner, step)).is_some() {
            // A plan that has it is over, though word of that may be late.
            if self.sends(learner, step) {
                self.outgoing = None;
            }
            actions.push(Action::Release(learner, step));
        }
    }

    /// Releases what learners have left behind that nobody answers for any more. Should the coordinator ask for it yet,
    /// it is told that it is gone.
    pub(super) fn release_left(&mut self, actions: &mut Vec<Action>) {
        let is_left = |&(learner, step): &(LearnerId, Step)| {
            !self.learners.contains_key(&learner)
                && !self.is_committing(learner, step)
                && !self.sends(learner, step)
        };
        // Those that are committed are all in the next version that is made of contributions.
        let contributions = self.state.contributions;
        let is_over =
            |held: &Held| !self.in_process || held.left_at.is_some_and(|left_at| contributions > left_at);
        let left: Vec<_> = self
            .held
            .iter()
            .filter(|(key, held)| is_over(held) && is_left(key))
            .map(|(&key, _)| key)
            .collect();
        for (learner, step) in left {
            self.release(learner, step, actions);
        }
    }

    /// The answer to a request says that this contribution is not part of the job. It is released unless it was committed
    /// after that request was made.
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

    pub(super) fn is_committing(&self, learner: LearnerId, step: Step) -> bool {
        self.requests.values().any(|request| {
            matches!(request.message, Message::Commit { learner: l, step: s, .. } if (l, s) == (learner, step))
        })
    }

    /// Whether the plan under way has this contribution.
    pub(super) fn sends(&self, learner: LearnerId, step: Step) -> bool {
        let of = |outgoing: &Outgoing| matches!(&outgoing.payload, Granted::Contributions { of, .. } if of.contains(&(learner, step)));
        self.outgoing.as_ref().is_some_and(of)
    }

    /// Releases new weights that nobody waits for any more, unless they are being sent.
    pub(super) fn release_weights(&mut self, actions: &mut Vec<Action>) {
        let is_needed = |token: u64| {
            self.requests
                .values()
                .any(|r| matches!(r.message, Message::Assign { token: t, .. } if t == token))
                || self.outgoing.as_ref().is_some_and(|outgoing| outgoing.payload == Granted::Weights(token))
        };
        let over: Vec<u64> = self.weights.keys().copied().filter(|&token| !is_needed(token)).collect();
        for token in over {
            self.weights.remove(&token);
            actions.push(Action::ReleaseWeights(token));
        }
    }

    /// Payload of steps before `step` is no longer needed: the coordinator has moved on.
    pub(super) fn release_older(&mut self, learner: LearnerId, step: Step, actions: &mut Vec<Action>) {
        let old: Vec<Step> =
            self.held.range((learner, Step(0))..(learner, step)).map(|(&(_, step), _)| step).collect();
        for step in old {
            self.release(learner, step, actions);
        }
    }
}
