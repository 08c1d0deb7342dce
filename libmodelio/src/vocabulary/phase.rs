//! The phases of a job, and how long a wait lasts before status names its cause.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A shard that has not been reached for this long is away, and named.
pub const AWAY: Duration = Duration::from_secs(2);

/// Learners that others have been waiting for this long are named.
pub const LONG: Duration = Duration::from_secs(5);

/// When a peer was last heard, for a peer that may be stopped while its connection stands. One that is silent is asked
/// for a sign of life, and is out of reach if it does not answer. Time in which this process was stopped itself does not
/// count.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heard {
    at: Duration,
    asked: Option<Duration>,
}

impl Heard {
    /// Half of [`AWAY`] is for silence, the other half for the answer.
    const HALF: Duration = Duration::from_millis(AWAY.as_millis() as u64 / 2);

    /// The peer was heard.
    pub fn heard(&mut self, now: Duration) {
        *self = Heard { at: now, asked: None };
    }

    /// Whether to ask the peer for a sign of life now.
    pub fn asks(&mut self, now: Duration) -> bool {
        let is_due = self.asked.is_none() && now >= self.at + Self::HALF;
        if is_due {
            self.asked = Some(now);
        }
        is_due
    }

    /// When the peer was last heard, if it has not answered.
    pub fn silent_since(&self, now: Duration) -> Option<Duration> {
        self.asked.filter(|asked| now >= *asked + Self::HALF).map(|_| self.at)
    }
}

/// The phase of a job, as far as this end knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobPhase {
    /// It takes contributions.
    #[default]
    Running,
    /// It waits for its first learners.
    Forming,
    /// It makes a version.
    Reducing,
    /// It has fewer learners than `min_learners`.
    Stopped,
    /// It waits for shards that are out of reach.
    Waiting,
    /// A shard has lost its blocks, or nobody coordinates the job any more.
    Failed,
}

impl JobPhase {
    /// All of them.
    pub const ALL: [JobPhase; 6] = [
        JobPhase::Running,
        JobPhase::Forming,
        JobPhase::Reducing,
        JobPhase::Stopped,
        JobPhase::Waiting,
        JobPhase::Failed,
    ];

    /// The name in status.
    pub fn name(self) -> &'static str {
        match self {
            JobPhase::Running => "running",
            JobPhase::Forming => "forming",
            JobPhase::Reducing => "reducing",
            JobPhase::Stopped => "stopped",
            JobPhase::Waiting => "waiting",
            JobPhase::Failed => "failed",
        }
    }
}

impl fmt::Display for JobPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_silent_when_it_does_not_answer_and_not_before_it_was_asked() {
        let at = Duration::from_millis;
        let mut heard = Heard::default();
        heard.heard(at(5000));
        assert!(!heard.asks(at(5999)) && heard.silent_since(at(5999)).is_none());
        // This process was stopped for a while.
        assert!(heard.silent_since(at(60_000)).is_none());
        assert!(heard.asks(at(60_000)) && !heard.asks(at(60_500)), "once");
        assert!(heard.silent_since(at(60_999)).is_none());
        assert_eq!(heard.silent_since(at(61_000)), Some(at(5000)));
        heard.heard(at(61_001));
        assert!(heard.silent_since(at(70_000)).is_none());
    }
}
