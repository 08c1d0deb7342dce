//! The shards that are out of reach, and the calls that end for that.
//!
//! Joining and leaving end as soon as the coordinator is known to be away: the kernel locks a directory for as long as
//! they last. Other calls that need a shard wait for it for the setting `shard_patience`.

use super::{ClientCore, Now, Token};
use crate::vocabulary::ids::ShardId;
use crate::vocabulary::phase::AWAY;
use crate::vocabulary::shard_error::ShardError;
use crate::wire::Message;

/// The token of no new weights. Who takes these back asks for nothing but an answer, which comes behind the settings
/// that were in force by then.
pub const NO_TOKEN: u64 = u64::MAX;

/// How reasons of [`ShardError::TimedOut`] begin that name a shard which is out of reach.
pub const OUT_OF_REACH: &str = "out of reach";

/// A shard that is out of reach, and since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone {
    /// The shard.
    pub shard: ShardId,
    /// When it was last in reach.
    pub since: Now,
}

/// Those of one client.
#[derive(Debug, Default)]
pub(super) struct Reach {
    coordinator: Option<Gone>,
    shards: Vec<Gone>,
}

impl Reach {
    /// The coordinator is in reach again: requests that need nobody else no longer end for its absence.
    pub(super) fn coordinator_answers(&mut self) {
        self.coordinator = None;
    }

    /// Whether a shard is out of reach, for however short a time.
    pub(super) fn misses_a_shard(&self) -> bool {
        self.coordinator.is_some() || !self.shards.is_empty()
    }
}

impl ClientCore {
    /// Sets the shards that are out of reach, until the next call: the coordinator, if it is, and those with blocks. A
    /// move clears them, as the new map's shards were not sought yet.
    pub fn out_of_reach(&mut self, coordinator: Option<Gone>, shards: Vec<Gone>) {
        self.reach = Reach { coordinator, shards };
    }

    /// Why calls end that need all shards, if one has been out of reach for as long as the settings allow.
    pub fn lost_patience(&self, now: Now) -> Option<ShardError> {
        self.longest_gone(self.reach.coordinator.iter().chain(&self.reach.shards), now)
    }

    /// Why a request ends whose time is over: if the coordinator is out of reach, that names it.
    pub(super) fn unanswered(&self, now: Now) -> ShardError {
        let unnamed = || ShardError::TimedOut("the shard that coordinates this model does not answer".into());
        self.reach.coordinator.map_or_else(unnamed, |gone| gone.error(now))
    }

    fn longest_gone<'a>(&self, gone: impl Iterator<Item = &'a Gone>, now: Now) -> Option<ShardError> {
        // What lasts for less is no outage yet: a connection that was lost comes back.
        let patience = self.state.controls.shard_patience.max(AWAY);
        // A job that has failed does not come back, and its calls say so.
        let longest = gone.min_by_key(|gone| gone.since).filter(|_| self.lost().is_none())?;
        (longest.since + patience <= now).then(|| longest.error(now))
    }

    /// Why a request does not wait for its answer any more.
    pub(super) fn ends(&self, message: &Message, now: Now) -> Option<ShardError> {
        let coordinator = self.reach.coordinator.filter(|_| self.lost().is_none());
        match message {
            Message::Join { .. } | Message::Leave { .. } => {
                coordinator.filter(|gone| gone.since + AWAY <= now).map(|gone| gone.error(now))
            }
            Message::Open { .. } | Message::Abort { .. } | Message::SetControl { .. } => {
                self.longest_gone(coordinator.iter(), now)
            }
            Message::WithdrawAssign { token: NO_TOKEN } => self.longest_gone(coordinator.iter(), now),
            Message::Commit { .. } | Message::Assign { .. } | Message::AssignPart { .. } => {
                self.lost_patience(now)
            }
            // Nobody waits for the others.
            _ => None,
        }
    }

    /// Why this request fails at once. A learner that is to leave does so when the coordinator is back, and what is
    /// taken back is so then.
    pub(super) fn refuses(&self, token: Token, message: &Message, now: Now) -> Option<ShardError> {
        let is_beside =
            token == Token::MAX || matches!(message, Message::Leave { .. } | Message::Abort { .. });
        if is_beside { None } else { self.ends(message, now) }
    }
}

impl Gone {
    fn error(&self, now: Now) -> ShardError {
        let seconds = now.saturating_sub(self.since).as_secs_f64();
        ShardError::TimedOut(
            format!("{OUT_OF_REACH}: shard {}, which has not answered for {seconds:.1} s", self.shard).into(),
        )
    }
}
