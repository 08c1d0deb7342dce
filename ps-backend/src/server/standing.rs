//! What is between a shard and the registry.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::Generation;
use libmodelio::wire::{Held, ModelRecord};

/// Deleted models that are remembered, for a registry that is started anew.
const MAX_DELETED: usize = 256;

/// Of which life and block map of a model a partition is.
pub(super) fn life(record: &ModelRecord) -> Held {
    Held { model: record.name.clone(), generation: record.generation, epoch: record.epoch }
}

/// What is between a shard and the registry.
#[derive(Debug, Default)]
pub(super) struct Standing {
    /// The registry has not taken its last announcement: why.
    pub not_listed: Option<String>,
    /// It is to take no new models, as the registry has last said: one that is started anew is told so.
    pub draining: bool,
    /// Models that it was told to forget.
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
    /// Models that it was told to forget: the newest ones.
    pub(super) fn deleted(&self) -> Vec<(String, Generation)> {
        self.deleted.iter().cloned().collect()
    }

    /// A model is no more.
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

    /// Why the registry does not have a model that is here.
    pub(super) fn why_unknown(&self, generation: Generation) -> Option<String> {
        self.unknown.get(&generation).and_then(|unknown| unknown.why.clone())
    }

    /// For how long a partition has not been what the registry has.
    pub(super) fn unknown_for(&mut self, generation: Generation) -> Duration {
        self.unknown_since_now(generation).since.elapsed()
    }

    /// The registry does not take a model back. True if that is news.
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

    /// The registry has it.
    pub(super) fn is_known(&mut self, generation: Generation) {
        self.unknown.remove(&generation);
    }

    /// Only these are here.
    pub(super) fn retain(&mut self, is_here: impl Fn(Generation) -> bool) {
        self.unknown.retain(|generation, _| is_here(*generation));
    }
}
