//! The end of a move: the new map is in force, and shards are told, round by round, until they know.
//!
//! New owners come first, so that a client that hears of the map finds them. The present coordinator comes
//! last.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use libmodelio::vocabulary::ids::ShardId;

use super::{Now, PROMPT, Plan};

/// The shards that do not know yet.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Switching {
    /// The remaining shards, each with its place in the order.
    left: BTreeMap<ShardId, u8>,
    /// The place in the order whose turn is next in this round.
    turn: u8,
    /// Why the last one who did not answer did not.
    trouble: Option<String>,
    /// When the next round begins.
    again_at: Option<Now>,
    warned_at: Now,
    addresses: BTreeMap<ShardId, String>,
}

/// The shard that coordinates now comes last, and before it the one that is left.
const TURNS: u8 = 4;

impl Switching {
    pub(super) fn new(plan: &Plan, now: Now) -> Switching {
        let turn = |shard: ShardId| match shard {
            shard if shard == plan.before.coordinator => 3,
            shard if shard == plan.off => 2,
            shard if shard == plan.after.coordinator => 1,
            _ => 0,
        };
        let all = || plan.owners.iter().chain([&plan.leaving]);
        Switching {
            left: all().map(|record| (record.shard, turn(record.shard))).collect(),
            turn: 0,
            trouble: None,
            again_at: None,
            warned_at: now,
            addresses: all().map(|record| (record.shard, record.address.clone())).collect(),
        }
    }

    /// When the next round begins, once one is over.
    pub(super) fn again_at(&self) -> Option<Now> {
        self.again_at
    }

    /// The shards to tell now. None if all that are left had their turn: then the round is over.
    pub(super) fn next(&mut self) -> Vec<ShardId> {
        if self.again_at.take().is_some() {
            (self.turn, self.trouble) = (0, None);
        }
        while self.turn < TURNS {
            let turn = self.turn;
            self.turn += 1;
            let next: Vec<ShardId> =
                self.left.iter().filter(|(_, its)| **its == turn).map(|(&shard, _)| shard).collect();
            if !next.is_empty() {
                return next;
            }
        }
        Vec::new()
    }

    pub(super) fn answered(&mut self, shard: ShardId, answer: Result<(), String>) {
        match answer {
            Ok(()) => drop(self.left.remove(&shard)),
            Err(why) => {
                let address = self.addresses.get(&shard).map(String::as_str).unwrap_or_default();
                self.trouble = Some(format!("shard {shard} at {address}: {why}"));
            }
        }
    }

    /// Removes shards that need not be told: one that only has to forget, and that nobody can reach any more;
    /// and, once nobody waits for the answer, any that the registry no longer lists. Such a shard comes back
    /// without blocks.
    pub(super) fn forgo(&mut self, listed: &BTreeSet<ShardId>, off: ShardId, all: bool) {
        let only_off = self.left.keys().all(|&shard| shard == off);
        self.left.retain(|shard, _| listed.contains(shard) || !(all || only_off));
    }

    /// Why somebody does not know yet; nothing if all do.
    pub(super) fn trouble(&self) -> Option<&str> {
        if self.left.is_empty() {
            return None;
        }
        Some(self.trouble.as_deref().unwrap_or("somebody was not told"))
    }

    /// The next round comes after a pause. Returns a line for the log now and then.
    pub(super) fn rests(&mut self, now: Now, pause: Duration) -> Option<String> {
        self.again_at = Some(now + pause);
        if now < self.warned_at + PROMPT {
            return None;
        }
        self.warned_at = now;
        let trouble = self.trouble.as_ref()?;
        Some(format!("not all shards know yet that the model has moved: {trouble}"))
    }
}
