//! When a shard restores a model whose blocks are lost, and how it learns that another shard is dead. Pure: what the
//! registry and the probes say goes in, and what to do comes out.
//!
//! Each shard looks after the next ones that models need. Where nobody listens any more, it tells the registry, so that
//! nobody waits for the end of a lease. A shard that lives all the same announces itself again: only epochs decide
//! whether what it says counts. Every living shard can restore a model. The first one begins at once, the others when that
//! has not helped.

use std::collections::BTreeMap;
use std::time::Duration;

use libmodelio::vocabulary::ids::ShardId;
use libmodelio::wire::{Losses, LostModel, ShardRecord};

use crate::core::Now;

/// So many shards are looked after by each.
const WATCHED: usize = 2;
/// So many probes in a row find nobody before a shard counts as dead.
const REFUSED: u32 = 2;
/// The pause before the next shard restores a model, too.
const TURN: Duration = Duration::from_secs(3);
/// A loss must still be there after this time: what was asked for may be made meanwhile.
const SURE: Duration = Duration::from_millis(300);
/// The first pause after a failure. It doubles with each,
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// so often.
const DOUBLED: u32 = 5;

/// A loss that is known.
#[derive(Debug)]
struct Known {
    since: Now,
    failures: u32,
    /// Not before then.
    next: Now,
    is_under_way: bool,
}

/// What a shard knows of losses.
#[derive(Debug, Default)]
pub struct LossWatch {
    needed: Vec<ShardRecord>,
    refused: BTreeMap<ShardId, u32>,
    /// By the names of models: what is restored has another life at each try.
    known: BTreeMap<String, Known>,
}

impl LossWatch {
    /// The shards that `me` probes now.
    pub fn watched(&self, me: ShardId) -> Vec<ShardRecord> {
        let after = self.needed.iter().filter(|of| of.shard > me);
        let before = self.needed.iter().filter(|of| of.shard < me);
        after.chain(before).take(WATCHED).cloned().collect()
    }

    /// A probe of a shard has found that somebody, or nobody, listens at its address. Returns whether it counts as dead.
    pub fn probed(&mut self, shard: ShardId, is_refused: bool) -> bool {
        if !is_refused {
            self.refused.remove(&shard);
            return false;
        }
        let refused = self.refused.entry(shard).or_default();
        *refused += 1;
        *refused >= REFUSED
    }

    /// The registry's answer. Returns the models to be restored now; [`Self::ended`] follows for each.
    pub fn lost(&mut self, me: ShardId, Losses { models, needed, rank }: Losses, now: Now) -> Vec<LostModel> {
        self.refused.retain(|shard, _| needed.iter().any(|of| of.shard == *shard));
        self.needed = needed;
        let is_lost = |name: &str| models.iter().any(|of| of.model == name);
        self.known.retain(|name, known| known.is_under_way || is_lost(name));
        let mut due = Vec::new();
        for lost in models {
            // That this shard was started anew it alone knows.
            let turn = if lost.shards == [me] { SURE } else { TURN * rank + SURE };
            let new = || Known { since: now, failures: 0, next: now, is_under_way: false };
            let known = self.known.entry(lost.model.clone()).or_insert_with(new);
            if !known.is_under_way && known.since + turn <= now && known.next <= now {
                known.is_under_way = true;
                due.push(lost);
            }
        }
        due
    }

    /// A restoration has ended. Returns whether it is the first one of this model that has failed.
    pub fn ended(&mut self, model: &str, is_restored: bool, now: Now) -> bool {
        let Some(known) = self.known.get_mut(model) else { return false };
        known.is_under_way = false;
        known.next = now + FIRST_PAUSE * (1 << known.failures.min(DOUBLED));
        known.failures += u32::from(!is_restored);
        !is_restored && known.failures == 1
    }

    /// Whether the registry is to be asked again soon: something is lost, or was about to be.
    pub fn is_anxious(&self) -> bool {
        !self.known.is_empty() || !self.refused.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use libmodelio::vocabulary::ids::Generation;

    use super::*;

    const ME: ShardId = ShardId(1);

    fn shard(number: u16) -> ShardRecord {
        let (address, host, rdma) = (format!("node{number}:7070"), String::new(), String::new());
        ShardRecord { shard: ShardId(number), address, host, draining: false, rdma }
    }

    fn losses(generation: u64, rank: u32) -> Losses {
        let (model, shards) = ("m".to_owned(), vec![ShardId(9)]);
        let models = vec![LostModel { model, generation: Generation(generation), shards }];
        Losses { models, needed: (1..=4).map(shard).collect(), rank }
    }

    const fn at(millis: u64) -> Now {
        Duration::from_millis(millis)
    }

    #[test]
    fn each_shard_looks_after_the_next_ones() {
        let mut watch = LossWatch::default();
        let watched = |watch: &LossWatch, me| {
            watch.watched(ShardId(me)).into_iter().map(|of| of.shard.0).collect::<Vec<_>>()
        };
        assert!(watched(&watch, 1).is_empty());
        watch.lost(ME, Losses { models: Vec::new(), ..losses(1, 0) }, at(0));
        assert_eq!(watched(&watch, 1), [2, 3]);
        assert_eq!(watched(&watch, 3), [4, 1]);
        assert_eq!(watched(&watch, 7), [1, 2]);
        watch.lost(ME, Losses { needed: vec![shard(1)], models: Vec::new(), rank: 0 }, at(1));
        assert!(watched(&watch, 1).is_empty(), "itself");
    }

    #[test]
    fn a_shard_is_dead_when_nobody_listens_twice_in_a_row() {
        let mut watch = LossWatch::default();
        watch.lost(ME, losses(1, 0), at(0));
        assert!(!watch.probed(ShardId(2), true) && watch.is_anxious());
        assert!(!watch.probed(ShardId(2), false) && !watch.probed(ShardId(2), true));
        assert!(watch.probed(ShardId(2), true));
    }

    #[test]
    fn the_first_living_shard_restores_and_the_others_when_it_does_not() {
        for (rank, begins) in [(0, 300), (1, 3_300), (2, 6_300)] {
            let mut watch = LossWatch::default();
            for now in (0..begins).step_by(100) {
                assert!(watch.lost(ME, losses(7, rank), at(now)).is_empty(), "{rank} at {now}");
            }
            assert_eq!(watch.lost(ME, losses(7, rank), at(begins)).len(), 1, "{rank}");
            assert!(watch.lost(ME, losses(7, rank), at(begins + 100)).is_empty(), "it is under way");
        }
    }

    #[test]
    fn a_shard_that_was_started_anew_restores_what_it_has_lost_at_once() {
        let mut watch = LossWatch::default();
        let mut own = losses(7, 5);
        own.models[0].shards = vec![ME];
        assert!(watch.lost(ME, own.clone(), at(0)).is_empty());
        assert_eq!(watch.lost(ME, own, at(300)).len(), 1);
    }

    #[test]
    fn a_loss_that_is_made_good_is_forgotten() {
        let mut watch = LossWatch::default();
        assert!(watch.lost(ME, losses(7, 0), at(0)).is_empty());
        assert!(watch.lost(ME, Losses::default(), at(200)).is_empty() && !watch.is_anxious());
        assert!(watch.lost(ME, losses(7, 0), at(400)).is_empty(), "it begins anew");
    }

    #[test]
    fn what_fails_is_tried_again_later_and_later() {
        let (mut watch, mut now) = (LossWatch::default(), 300);
        watch.lost(ME, losses(7, 0), at(0));
        for pause in [1, 2, 4, 8, 16, 32, 32] {
            // Each try has made another life.
            assert_eq!(watch.lost(ME, losses(now, 0), at(now)).len(), 1);
            assert_eq!(watch.ended("m", false, at(now)), pause == 1, "said once");
            now += pause * 1_000;
            assert!(watch.lost(ME, losses(now, 0), at(now - 1)).is_empty());
        }
    }
}
