//! Shards that are not listed though they announce themselves. The record makes them visible.

use std::collections::BTreeMap;

use crate::wire::{Refusal, RefusedShard, ShardRecord};

use super::Now;

/// The most refused shards that are listed; if there are more, those that were refused first.
pub(super) const MAX_REFUSED: usize = 64;

/// By address, with the reason and the time until which the entry counts.
#[derive(Debug, Default)]
pub(super) struct Refused(BTreeMap<String, (RefusedShard, Now)>);

impl Refused {
    /// A shard was refused, and would have been listed for some time.
    pub(super) fn add(&mut self, record: &ShardRecord, refusal: &Refusal, now: Now, until: Now) {
        self.0.retain(|_, (_, until)| *until > now);
        if self.0.len() < MAX_REFUSED || self.0.contains_key(&record.address) {
            let refused = RefusedShard { record: record.clone(), why: refusal.to_string() };
            self.0.insert(record.address.clone(), (refused, until));
        }
    }

    /// A shard that is known to be refused.
    pub(super) fn insert(&mut self, refused: RefusedShard, until: Now) {
        self.0.insert(refused.record.address.clone(), (refused, until));
    }

    /// The shard is listed now.
    pub(super) fn remove(&mut self, address: &str) {
        self.0.remove(address);
    }

    /// The refused shards that go on asking.
    pub(super) fn until_now(&self, now: Now) -> Vec<RefusedShard> {
        self.0.values().filter(|(_, until)| *until > now).map(|(shard, _)| shard.clone()).collect()
    }
}
