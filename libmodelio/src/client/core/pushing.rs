//! What is sent for the plan under way.

use fixedbitset::FixedBitSet;

use super::{Action, ClientCore, Now, PATIENCE, Part};
use crate::vocabulary::ids::{BlockId, LearnerId, PlanId, Step};
use crate::wire::{Granted, MAX_NUMBER, Message};

/// What is being sent for a plan.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) plan: PlanId,
    pub(super) payload: Granted,
    pub(super) blocks: FixedBitSet,
    pub(super) parts: Vec<Sending>,
}

#[derive(Debug)]
pub(super) struct Sending {
    /// Blocks that are to be sent.
    pub(super) todo: FixedBitSet,
    /// From here on, round the end once.
    pub(super) at: usize,
    pub(super) round: bool,
    /// There is something to send.
    pub(super) any: bool,
    /// The shard has all of it.
    pub(super) done: bool,
    /// When something was last sent or asked.
    pub(super) moved: Now,
    /// Something of it was lost, or did not get on.
    pub(super) struggles: bool,
}

impl ClientCore {
    pub(super) fn granted(&mut self, plan: PlanId, payload: Granted, now: Now, actions: &mut Vec<Action>) {
        if plan.0 > MAX_NUMBER {
            return;
        }
        let known = self.outgoing.as_ref().map_or(self.over, |outgoing| outgoing.plan.max(self.over));
        if plan <= known {
            return self.look_again(plan, now, actions);
        }
        // The coordinator has one plan at a time.
        self.plan_over(PlanId(plan.0 - 1), actions);
        let mut blocks = FixedBitSet::with_capacity(self.blocks);
        let lacks = match &payload {
            Granted::Contributions { of, .. } => {
                of.iter()
                    .filter_map(|key| self.held.get(key))
                    .for_each(|held| blocks.union_with(&held.blocks));
                of.iter().find(|key| !self.held.contains_key(key)).map(|(learner, _)| Some(*learner))
            }
            Granted::Weights(token) => {
                self.weights.get(token).inspect(|held| blocks.union_with(held)).is_none().then_some(None)
            }
        };
        if let Some(learner) = lacks {
            return self.notify(Message::Lacks { plan, learner }, actions);
        }
        // What is added in order is sent in order, by all: who is ahead would only wait.
        let first = if self.state.controls.deterministic { 0 } else { self.first };
        let parts = self.owned.iter().map(|owned| {
            let todo = owned & &blocks;
            let any = !todo.is_clear();
            Sending { any, done: !any, todo, at: first, round: false, moved: now, struggles: false }
        });
        let parts = parts.collect();
        self.outgoing = Some(Outgoing { plan, payload, blocks, parts });
        actions.extend((0..self.shards.len()).map(Action::Wake));
    }

    /// The coordinator still waits for the plan that is being sent. A shard that has had all of it may have begun it
    /// again.
    fn look_again(&mut self, plan: PlanId, now: Now, actions: &mut Vec<Action>) {
        let Some(outgoing) = self.outgoing.as_mut().filter(|outgoing| outgoing.plan == plan) else { return };
        for (part, sending) in outgoing.parts.iter_mut().enumerate() {
            if sending.any && sending.done && sending.moved + PATIENCE <= now {
                sending.moved = now;
                actions.push(Action::ToShard(part, Message::Probe { plan }));
            }
        }
    }

    pub(super) fn plan_over(&mut self, plan: PlanId, actions: &mut Vec<Action>) {
        if plan.0 > MAX_NUMBER {
            return;
        }
        self.over = self.over.max(plan);
        if self.outgoing.take_if(|outgoing| outgoing.plan <= plan).is_some() {
            self.release_left(actions);
            self.release_weights(actions);
        }
    }

    /// Whether something on its way to or from a shard was lost, or did not get on: then whatever connection there is
    /// is used.
    pub fn struggles(&self, part: Part) -> bool {
        self.outgoing.as_ref().is_some_and(|outgoing| outgoing.parts[part].struggles)
            || self.pull.as_ref().is_some_and(|pull| pull.parts[part].struggles)
    }

    /// What the plan under way is made of.
    pub fn outgoing(&self) -> Option<(PlanId, &Granted)> {
        self.outgoing.as_ref().map(|outgoing| (outgoing.plan, &outgoing.payload))
    }

    /// Which of the plan's contributions hold `block`, in the order in which they are to be added; all of them for
    /// new weights.
    pub fn holds(&self, learner: LearnerId, step: Step, block: BlockId) -> bool {
        self.held.get(&(learner, step)).is_some_and(|held| held.blocks.contains(block.index()))
    }

    /// The next block to send to a shard. It counts as sent: call [`Self::shard_down`] if it may not have been.
    pub fn next_push(&mut self, part: Part, now: Now) -> Option<(PlanId, BlockId)> {
        let outgoing = self.outgoing.as_mut()?;
        let sending = &mut outgoing.parts[part];
        // The rest of the set begins at `at`: a step costs a step.
        let block = loop {
            if let Some(block) = (sending.at..sending.todo.len()).find(|&block| sending.todo.contains(block))
            {
                break block;
            }
            sending.at = sending.todo.len();
            if std::mem::replace(&mut sending.round, true) {
                return None;
            }
            sending.at = 0;
        };
        sending.todo.set(block, false);
        sending.at = block + 1;
        sending.moved = now;
        Some((outgoing.plan, BlockId(block as u32)))
    }

    /// The plan's sum holds NaN or Inf of `learner`, which is to be refused: tells the coordinator.
    pub fn unfit(&mut self, plan: PlanId, learner: LearnerId, block: BlockId, actions: &mut Vec<Action>) {
        self.notify(Message::Unfit { plan, learner, block }, actions);
    }
}
