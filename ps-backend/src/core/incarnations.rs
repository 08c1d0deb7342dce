//! The names and incarnations of learners: a name that joins again is another learner.

use std::collections::{BTreeMap, VecDeque};

use libmodelio::vocabulary::ids::{Incarnation, LearnerId};
use libmodelio::vocabulary::shard_error::ShardError;
use serde::{Deserialize, Serialize};

use super::MAX_LEARNERS;

/// The longest name of a learner, in bytes.
const MAX_NAME: usize = 64;

/// Checks a learner's name, which is also the name of a directory. Mounts check it before they ask, but other clients
/// may not.
pub(super) fn check_name(name: &str) -> Result<(), ShardError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if !name.is_empty() && name.len() <= MAX_NAME && !name.starts_with('.') && name.chars().all(fits) {
        return Ok(());
    }
    let start: String = name.chars().take(MAX_NAME).collect();
    let why = format!("learner name {start:?}: use up to {MAX_NAME} letters, digits, '-', '_' and '.'");
    Err(ShardError::NotAllowed(why))
}

/// The names in the job, and those that have left. The newest that have left are remembered one by one; of all others,
/// the highest incarnation of any is.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Incarnations {
    /// The last incarnation of each name in the job or in `left`.
    lives: BTreeMap<String, Incarnation>,
    /// The names that have left, the newest last.
    left: VecDeque<String>,
    /// The highest incarnation of a forgotten name.
    forgotten: Incarnation,
    next_learner: u32,
}

impl Default for Incarnations {
    fn default() -> Incarnations {
        let (lives, left) = (BTreeMap::new(), VecDeque::new());
        Incarnations { lives, left, forgotten: Incarnation(0), next_learner: 1 }
    }
}

impl Incarnations {
    /// A learner of this name joins. None if no number is left for it.
    pub(super) fn begin(&mut self, name: &str) -> Option<(LearnerId, Incarnation)> {
        let learner = LearnerId(self.next_learner);
        self.next_learner = self.next_learner.checked_add(1)?;
        let incarnation = self.lives.entry(name.to_owned()).or_insert(self.forgotten);
        incarnation.0 = incarnation.0.saturating_add(1);
        Some((learner, *incarnation))
    }

    /// The learner of this name has left. `is_member` says whether one of a name is in the job.
    pub(super) fn end(&mut self, name: String, is_member: impl Fn(&str) -> bool) {
        self.left.push_back(name);
        if self.left.len() > MAX_LEARNERS
            && let Some(oldest) = self.left.pop_front()
            && !is_member(&oldest)
            && let Some(incarnation) = self.lives.remove(&oldest)
        {
            self.forgotten = self.forgotten.max(incarnation);
        }
    }

    /// The names that are remembered, with their last incarnations.
    pub(super) fn names(&self) -> impl Iterator<Item = (&str, Incarnation)> {
        self.lives.iter().map(|(name, &incarnation)| (name.as_str(), incarnation))
    }

    /// The highest incarnation of a name that is not remembered.
    pub(super) fn forgotten(&self) -> Incarnation {
        self.forgotten
    }

    /// Begins with names that have left, the newest first.
    pub(super) fn restore(&mut self, names: Vec<(String, Incarnation)>, forgotten: Incarnation) {
        debug_assert!(self.next_learner == 1, "it has begun");
        self.forgotten = forgotten;
        for (name, incarnation) in names.into_iter().rev() {
            self.lives.insert(name.clone(), incarnation);
            self.left.push_back(name);
        }
    }
}
