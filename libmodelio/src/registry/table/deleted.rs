//! Deleted models: the record keeps a late message from bringing one back, and lets shards drop the rest of
//! one. The newest are remembered.

use std::collections::{BTreeSet, VecDeque};

use crate::vocabulary::ids::Generation;

/// The number of deleted models that are remembered.
const REMEMBERED: usize = 4096;

/// Deleted models, each in one life of its name.
#[derive(Debug, Default)]
pub(super) struct Deleted {
    order: VecDeque<(String, Generation)>,
    known: BTreeSet<(String, Generation)>,
}

impl Deleted {
    /// Adds a model. A second call does nothing.
    pub(super) fn add(&mut self, name: &str, generation: Generation) {
        let life = (name.to_owned(), generation);
        if !self.known.insert(life.clone()) {
            return;
        }
        self.order.push_back(life);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    /// All, the oldest first.
    pub(super) fn all(&self) -> Vec<(String, Generation)> {
        self.order.iter().cloned().collect()
    }

    /// Whether the model is one of them.
    pub(super) fn contains(&self, name: &str, generation: Generation) -> bool {
        self.known.contains(&(name.to_owned(), generation))
    }
}
