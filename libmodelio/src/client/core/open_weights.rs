//! New weights that are still being written: their whole blocks are sent for a provisional plan, if nothing else is
//! under way.
//!
//! Blocks that were sent count if the request to publish names that plan. A program may write a block again before it
//! publishes. Then the blocks that were sent do not count, and all of them are sent once they are published.

use std::collections::{BTreeMap, BTreeSet};

use fixedbitset::FixedBitSet;

use super::pushing::Outgoing;
use super::{Action, ClientCore, Now};
use crate::vocabulary::block_map::PartitionIndex;
use crate::vocabulary::ids::{BlockId, PlanId};
use crate::wire::{Granted, Message};

/// New weights that no request publishes yet.
#[derive(Debug)]
struct OpenWeights {
    /// The blocks that are whole.
    whole: FixedBitSet,
    /// The plan that has taken some of them.
    sent_under: Option<PlanId>,
}

/// New weights, by their tokens.
#[derive(Debug, Default)]
pub(super) struct NewWeights {
    /// Those that may have to be sent, with their blocks.
    published: BTreeMap<u64, FixedBitSet>,
    /// Those that are still being written.
    open: BTreeMap<u64, OpenWeights>,
    /// Those whose memory can be shown.
    showable: BTreeSet<u64>,
}

impl NewWeights {
    /// A block is whole, of a model with so many. Returns whether it is the first one.
    fn write(&mut self, token: u64, block: BlockId, blocks: usize) -> bool {
        let is_first = !self.open.contains_key(&token);
        let new = || OpenWeights { whole: FixedBitSet::with_capacity(blocks), sent_under: None };
        self.open.entry(token).or_insert_with(new).whole.insert(block.index());
        is_first
    }

    /// They stay unchanged in memory that can be shown.
    pub(super) fn can_show(&mut self, token: u64) {
        self.showable.insert(token);
    }

    /// A request publishes these blocks.
    pub(super) fn publish(&mut self, token: u64, blocks: FixedBitSet) {
        self.published.insert(token, blocks);
    }

    /// The blocks that a request publishes.
    pub(super) fn published(&self, token: u64) -> Option<&FixedBitSet> {
        self.published.get(&token)
    }

    /// Whether they are published, and their memory can be shown.
    pub(super) fn is_showable(&self, token: u64) -> bool {
        self.showable.contains(&token)
    }

    /// The number that may have to be sent.
    pub(super) fn len(&self) -> usize {
        self.published.len()
    }

    /// Those that may have to be sent, but are neither written any more nor needed.
    pub(super) fn unneeded(&self, is_needed: impl Fn(u64) -> bool) -> Vec<u64> {
        let unneeded = |token: &u64| !self.open.contains_key(token) && !is_needed(*token);
        self.published.keys().copied().filter(unneeded).collect()
    }

    /// Their memory is needed no more.
    pub(super) fn forget(&mut self, token: u64) {
        self.published.remove(&token);
        self.showable.remove(&token);
    }
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
        let is_first = self.weights.write(token, block, self.owners.blocks());
        let is_it = |payload: &Granted| *payload == Granted::OpenWeights(token);
        let Some(outgoing) = self.outgoing.as_mut().filter(|outgoing| is_it(&outgoing.payload)) else {
            if is_first {
                self.notify(Message::WholeWeights { token }, actions);
            }
            return None;
        };
        outgoing.blocks.insert(block.index());
        let partition = self.owners.of(block)?;
        let sending = &mut outgoing.partitions[partition];
        sending.todo.insert(block.index());
        (sending.at, sending.round) = (sending.at.min(block.index()), false);
        sending.wakes(now).then_some(partition)
    }

    /// New weights will not be published as they were written so far: a block is written again, or they are given up. That
    /// may be because the request to publish them has failed before its plan was sealed.
    pub fn rewrites_weights(&mut self, token: u64, actions: &mut Vec<Action>) {
        let was_open = self.weights.open.remove(&token).is_some();
        let outgoing = self.outgoing.take_if(|of| of.payload == Granted::OpenWeights(token));
        if let Some(Outgoing { plan, .. }) = outgoing {
            self.plans.give_up(Some(plan));
            self.notify(Message::SourceGone { plan, learner: None }, actions);
        } else if !was_open {
            return;
        }
        self.weights.forget(token);
        actions.push(Action::ReleaseWeights(token));
    }

    /// The blocks of new weights that can be sent while others are written. A plan takes them from now on.
    pub(super) fn take_open_weights(&mut self, token: u64, plan: PlanId) -> Option<FixedBitSet> {
        let open = self.weights.open.get_mut(&token)?;
        open.sent_under = Some(plan);
        Some(open.whole.clone())
    }

    /// A request publishes new weights, which are complete. Returns the plan for which blocks of them were sent.
    pub(super) fn publishes(&mut self, token: u64) -> Option<PlanId> {
        let plan = self.weights.open.remove(&token)?.sent_under?;
        let takes = |of: &Outgoing| of.plan == plan && of.payload == Granted::OpenWeights(token);
        self.outgoing.as_ref().is_some_and(takes).then_some(plan)
    }
}
