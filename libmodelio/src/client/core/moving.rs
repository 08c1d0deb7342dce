//! A change of the block map: the model's blocks have new owners, and perhaps a new coordinator.

use super::{Action, ClientCore, Now};
use crate::vocabulary::block_map::BlockMap;

impl ClientCore {
    /// Puts `map` in force after a move. It numbers the partitions from now on.
    ///
    /// Shards have forgotten all that was sent under the old map. So the plan under way ends here, and the
    /// coordinator grants its contributions again in another plan. A pull begins again once no connection is
    /// receiving for it. The client keeps its learners, unanswered requests, held payload and versions with their
    /// numbers. It is connected to no shard: [`Self::coordinator_up`] and [`Self::shard_up`] follow.
    ///
    /// Returns false, and changes nothing, if the map is not newer or is another model's.
    pub fn moved(&mut self, map: &BlockMap, now: Now, actions: &mut Vec<Action>) -> bool {
        if map.epoch() <= self.owners.epoch() || map.blocks() as usize != self.owners.blocks() {
            return false;
        }
        self.goes_to(map, now, actions);
        true
    }

    /// Like [`Self::moved`], in place of a map that never was in force. So `map` may have an older epoch. States from
    /// a coordinator under the wrong map no longer count.
    ///
    /// Returns false, and changes nothing, if the map is another model's.
    pub fn corrected(&mut self, map: &BlockMap, now: Now, actions: &mut Vec<Action>) -> bool {
        if map.blocks() as usize != self.owners.blocks() {
            return false;
        }
        self.state.sequence = 0;
        self.learners.values_mut().for_each(|known| known.since = 0);
        self.goes_to(map, now, actions);
        true
    }

    fn goes_to(&mut self, map: &BlockMap, now: Now, actions: &mut Vec<Action>) {
        self.owners.go_to(map);
        self.coordination.down();
        self.found();
        self.out_of_reach(None, Vec::new());
        if let Some(plan) = self.outgoing.as_ref().map(|outgoing| outgoing.plan) {
            self.plan_over(plan, actions);
        }
        // Blocks on their way to shards of the old map are part of no plan any more.
        self.held.values_mut().for_each(|held| held.strays_of = None);
        self.release_left(actions);
        self.pull = None;
        self.start_pull(now, actions);
    }
}
