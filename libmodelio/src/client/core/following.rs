//! The blocks of a version that is still being made. Shards send them as they are computed (iRDMA, section IV-B: pushes
//! and pulls overlap).
//!
//! The client follows the plan that it sends blocks for, or the plan under way of which the coordinator has told it.
//! What comes counts once the state names that plan as the one that has made the version. If the plan makes none, what
//! has come is void, and the version is pulled as any other.

use super::{Action, ClientCore, Now};
use crate::vocabulary::block_map::PartitionIndex;
use crate::vocabulary::ids::{PlanId, Version};
use crate::wire::{MAX_NUMBER, Message};

impl ClientCore {
    /// Others make a version by this plan.
    pub(super) fn begun(&mut self, plan: PlanId, now: Now, actions: &mut Vec<Action>) {
        let known =
            self.outgoing.as_ref().map_or(self.plans.over(), |outgoing| outgoing.plan.max(self.plans.over()));
        if plan > known && plan.0 <= MAX_NUMBER {
            self.plans.others_begin(plan);
            self.start_pull(now, actions);
        }
    }

    /// The state says whether the plan that the client follows has made a version. If it has not, what has come is
    /// void.
    pub(super) fn decide_followed(&mut self, is_anew: bool, now: Now, actions: &mut Vec<Action>) {
        let Some(pull) = self.pull.as_mut().filter(|pull| !pull.decided) else { return };
        let Some(plan) = pull.follows else { return };
        if !is_anew && self.state.version == pull.version && self.state.made_by == plan {
            pull.decided = true;
            pull.partitions.iter_mut().for_each(|receiving| receiving.moved = now);
            // No shard sends blocks by itself where this client reads them from memory: the pull begins now.
            if pull.left == self.owners.blocks()
                && pull.partitions.iter().all(|receiving| !receiving.sends_ahead)
            {
                self.pull_times.began(now);
            }
            if !self.show_if_complete(actions) {
                actions.extend(self.owners.partitions().map(Action::Wake));
            }
        } else if is_anew || self.state.version >= pull.version || self.state.over >= plan {
            self.pull = None;
        }
    }

    /// Whether the client follows another plan than `asked`.
    pub fn follows(&self, asked: PlanId) -> bool {
        let pull = self.pull.as_ref().filter(|pull| !pull.decided);
        pull.and_then(|pull| pull.follows).is_some_and(|plan| plan != asked)
    }

    /// The request to follow the plan that makes the pulled version, for a connection that has last asked for the plan
    /// `asked`.
    pub fn next_follow(&mut self, partition: PartitionIndex, asked: PlanId) -> Option<Message> {
        let pull = self.pull.as_mut().filter(|pull| !pull.decided)?;
        let plan = pull.follows.filter(|plan| *plan != asked)?;
        let receiving = &mut pull.partitions[partition];
        if receiving.has_lost {
            return None;
        }
        receiving.sends_ahead = true;
        Some(Message::Follow { plan, base: pull.base })
    }

    /// The version that this plan makes, if it is being pulled.
    pub fn followed(&self, plan: PlanId) -> Option<Version> {
        self.pull.as_ref().filter(|pull| pull.follows == Some(plan)).map(|pull| pull.version)
    }
}
