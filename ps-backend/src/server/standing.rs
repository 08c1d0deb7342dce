//! A shard's standing with the registry: whether the registry lists the shard, which models were deleted
//! here, and which models the registry does not know.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::Generation;
use libmodelio::wire::{HeldPartition, ModelRecord};

/// The most deleted models that are remembered for a restarted registry.
const MAX_DELETED: usize = 256;

/// The generation and block map of a partition.
pub(super) fn life(record: &ModelRecord) -> HeldPartition {
    HeldPartition { model: record.name.clone(), generation: record.generation, epoch: record.epoch }
}

/// A shard's standing with the registry.
#[derive(Debug, Default)]
pub(super) struct Standing {
    /// Why the registry has not taken the last announcement.
    pub not_listed: Option<String>,
    /// Whether the registry has said that the shard drains. The shard tells a restarted registry.
    pub draining: bool,
    /// Models that commands have deleted here.
    deleted: VecDeque<(String, Generation)>,
    /// Models that the registry does not know: since when, and why it does not take them.
    unknown: BTreeMap<Generation, Unknown>,
}

#[derive(Debug)]
struct Unknown {
    since: Instant,
    why: Option<String>,
}

impl Standing {
    /// The models that commands have deleted here, the newest ones.
    pub(super) fn deleted(&self) -> Vec<(String, Generation)> {
        self.deleted.iter().cloned().collect()
    }

    /// A model was deleted.
    pub(super) fn was_deleted(&mut self, name: &str, generation: Generation) {
        self.unknown.remove(&generation);
        let life = (name.to_owned(), generation);
        if self.deleted.contains(&life) {
            return;
        }
        if self.deleted.len() >= MAX_DELETED {
            self.deleted.pop_front();
        }
        self.deleted.push_back(life);
    }

    /// Why the registry does not have a model of this shard.
    pub(super) fn why_unknown(&self, generation: Generation) -> Option<String> {
        self.unknown.get(&generation).and_then(|unknown| unknown.why.clone())
    }

    /// How long the registry has not known a model of this shard under this block map.
    pub(super) fn unknown_for(&mut self, generation: Generation) -> Duration {
        self.unknown_since_now(generation).since.elapsed()
    }

    /// The registry refuses to take a model back. True if the reason is new.
    pub(super) fn is_unknown(&mut self, generation: Generation, why: &str) -> bool {
        let unknown = self.unknown_since_now(generation);
        let news = unknown.why.as_deref() != Some(why);
        if news {
            unknown.why = Some(why.to_owned());
        }
        news
    }

    fn unknown_since_now(&mut self, generation: Generation) -> &mut Unknown {
        let since = Instant::now();
        self.unknown.entry(generation).or_insert(Unknown { since, why: None })
    }

    /// The registry knows the model.
    pub(super) fn is_known(&mut self, generation: Generation) {
        self.unknown.remove(&generation);
    }

    /// Forgets all models but these.
    pub(super) fn retain(&mut self, is_here: impl Fn(Generation) -> bool) {
        self.unknown.retain(|generation, _| is_here(*generation));
    }
}
