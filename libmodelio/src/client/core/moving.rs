//! Another block map: the model's blocks have new owners, and perhaps a new coordinator.

use fixedbitset::FixedBitSet;

use super::{Action, ClientCore, Now};
use crate::vocabulary::block_map::BlockMap;
use crate::vocabulary::ids::ShardId;

/// The shards of a map in the order of [`super::Part`]s, and which blocks each owns.
pub(super) fn parts(map: &BlockMap) -> (Vec<ShardId>, Vec<FixedBitSet>) {
    let shards: Vec<ShardId> = map.shares().into_keys().collect();
    let mut owned = vec![FixedBitSet::with_capacity(map.blocks() as usize); shards.len()];
    for (block, owner) in map.owners().iter().enumerate() {
        // All owners are among the shards.
        if let Ok(part) = shards.binary_search(owner) {
            owned[part].insert(block);
        }
    }
    (shards, owned)
}

impl ClientCore {
    /// The model has moved: `map` is in force from now on, and parts are numbered by it. What was said under the one
    /// before is void at the shards, so the plan being sent ends here (what of it does not count yet is granted
    /// anew, by another plan), and a version that was being pulled is pulled from its beginning, once nothing of it
    /// is landing any more. What the job knows stays: learners, requests without an answer, payload that may be
    /// asked for, versions and their numbers. Nobody is connected: [`Self::coordinator_up`] and [`Self::shard_up`]
    /// follow.
    ///
    /// False, and nothing has changed, if the map is not newer, or of another model.
    pub fn moved(&mut self, map: &BlockMap, now: Now, actions: &mut Vec<Action>) -> bool {
        if map.epoch() <= self.epoch || map.blocks() as usize != self.blocks {
            return false;
        }
        self.goes_to(map, now, actions);
        true
    }

    /// As [`Self::moved`], for a map that takes the place of one that never was in force: it may be older. What whoever
    /// coordinates by that one has said of the job counts no more.
    ///
    /// False, and nothing has changed, if the map is of another model.
    pub fn corrected(&mut self, map: &BlockMap, now: Now, actions: &mut Vec<Action>) -> bool {
        if map.blocks() as usize != self.blocks {
            return false;
        }
        self.state.sequence = 0;
        self.learners.values_mut().for_each(|known| known.since = 0);
        self.goes_to(map, now, actions);
        true
    }

    fn goes_to(&mut self, map: &BlockMap, now: Now, actions: &mut Vec<Action>) {
        self.epoch = map.epoch();
        (self.shards, self.owned) = parts(map);
        self.coordinator_up = false;
        self.found();
        self.shard_up = vec![false; self.shards.len()];
        if let Some(plan) = self.outgoing.as_ref().map(|outgoing| outgoing.plan) {
            self.plan_over(plan, actions);
        }
        self.pull = None;
        self.start_pull(now, actions);
    }
}
