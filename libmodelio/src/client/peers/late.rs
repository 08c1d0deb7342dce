//! The learners and shards that the job waits for, and since when.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::vocabulary::ids::ShardId;
use crate::vocabulary::phase::{AWAY, NAMED_AFTER};
use crate::wire::JobState;

/// The learners and shards that the job waits for.
#[derive(Default)]
pub(in crate::client) struct WaitedFor {
    pub(in crate::client) learners: Option<Instant>,
    pub(in crate::client) shards: BTreeMap<ShardId, Instant>,
}

impl WaitedFor {
    /// Takes the names from the coordinator's state, which has them once the wait is long.
    pub(in crate::client) fn update(&mut self, state: &JobState) {
        let ago = |waited| Instant::now().checked_sub(waited).unwrap_or_else(Instant::now);
        if state.late.is_empty() && state.late_more == 0 {
            self.learners = None;
        } else {
            self.learners.get_or_insert_with(|| ago(NAMED_AFTER));
        }
        self.shards.retain(|shard, _| state.away.contains(shard));
        for &shard in &state.away {
            self.shards.entry(shard).or_insert_with(|| ago(AWAY));
        }
    }
}
