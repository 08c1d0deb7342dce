//! New weights that are still being written: their whole blocks are sent for a provisional plan, if nothing else is
//! under way.
//!
//! Blocks that were sent count if the request to publish names that plan. A program may write a block again before it
//! publishes. Then the blocks that were sent do not count, and all of them are sent once they are published.

use fixedbitset::FixedBitSet;

use super::pushing::Outgoing;
use super::{Action, ClientCore, Now};
use crate::vocabulary::block_map::PartitionIndex;
use crate::vocabulary::ids::{BlockId, PlanId};
use crate::wire::{Granted, Message};

/// New weights that no request publishes yet.
#[derive(Debug)]
pub(super) struct OpenWeights {
    /// The blocks that are whole.
    pub(super) whole: FixedBitSet,
    /// The plan that has taken some of them.
    sent_under: Option<PlanId>,
}

impl ClientCore {
    /// A block of new weights is whole. It lies where it can be sent from until [`Action::ReleaseWeights`]. Returns the
    /// shard to which this and earlier blocks may be sent now.
    pub fn wrote_weights(
        &mut self,
        token: u64,
        block: BlockId,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> Option<PartitionIndex> {
        let blocks = self.blocks;
        let is_first = !self.open_weights.contains_key(&token);
        let new = || OpenWeights { whole: FixedBitSet::with_capacity(blocks), sent_under: None };
        let open = self.open_weights.entry(token).or_insert_with(new);
        open.whole.insert(block.index());
        let is_it = |payload: &Granted| *payload == Granted::OpenWeights(token);
        let Some(outgoing) = self.outgoing.as_mut().filter(|outgoing| is_it(&outgoing.payload)) else {
            if is_first {
                self.notify(Message::WholeWeights { token }, actions);
            }
            return None;
        };
        outgoing.blocks.insert(block.index());
        let partition = self.owned.iter().position(|owned| owned.contains(block.index()))?;
        let sending = &mut outgoing.partitions[partition];
        sending.todo.insert(block.index());
        (sending.at, sending.round) = (sending.at.min(block.index()), false);
        sending.wakes(now).then_some(partition)
    }

    /// New weights will not be published as they were written so far: a block is written again, or they are given up. That
    /// may be because the request to publish them has failed before its plan was sealed.
    pub fn rewrites_weights(&mut self, token: u64, actions: &mut Vec<Action>) {
        let was_open = self.open_weights.remove(&token).is_some();
        let outgoing = self.outgoing.take_if(|of| of.payload == Granted::OpenWeights(token));
        if let Some(Outgoing { plan, .. }) = outgoing {
            self.given_up = self.given_up.max(Some(plan));
            self.notify(Message::SourceGone { plan, learner: None }, actions);
        } else if !was_open {
            return;
        }
        self.weights.remove(&token);
        self.showable.remove(&token);
        actions.push(Action::ReleaseWeights(token));
    }

    /// The blocks of new weights that can be sent while others are written. A plan takes them from now on.
    pub(super) fn take_open_weights(&mut self, token: u64, plan: PlanId) -> Option<FixedBitSet> {
        let open = self.open_weights.get_mut(&token)?;
        open.sent_under = Some(plan);
        Some(open.whole.clone())
    }

    /// A request publishes new weights, which are complete. Returns the plan for which blocks of them were sent.
    pub(super) fn publishes(&mut self, token: u64) -> Option<PlanId> {
        let plan = self.open_weights.remove(&token)?.sent_under?;
        let takes = |of: &Outgoing| of.plan == plan && of.payload == Granted::OpenWeights(token);
        self.outgoing.as_ref().is_some_and(takes).then_some(plan)
    }
}
