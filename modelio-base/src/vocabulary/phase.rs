//! The phases of a job, and how long a wait lasts before status names its cause.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A shard that has not been reached for this long is away, and named.
pub const AWAY: Duration = Duration::from_secs(2);

/// Learners that others have been waiting for this long are named.
pub const NAMED_AFTER: Duration = Duration::from_secs(5);

/// When a peer was last heard, for a peer that may be stopped while its connection stands. One that is silent is asked
/// for a sign of life, and is out of reach if it does not answer. Time in which this process was stopped itself does not
/// count.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heard {
    at: Duration,
    asked: Option<Duration>,
    looked: Duration,
}

impl Heard {
    /// Half of [`AWAY`] is for silence, the other half for the answer.
    const HALF: Duration = Duration::from_millis(AWAY.as_millis() as u64 / 2);

    /// The peer was heard.
    pub fn heard(&mut self, now: Duration) {
        (self.at, self.asked) = (now, None);
    }

    /// Whether to ask the peer for a sign of life now. Whoever has not called this for half of [`AWAY`] was stopped, and
    /// answers from that time may still have to be read: the silence goes on from before, and the peer is asked anew.
    pub fn asks(&mut self, now: Duration) -> bool {
        let pause = now.saturating_sub(std::mem::replace(&mut self.looked, now));
        if pause >= Self::HALF {
            (self.at, self.asked) = ((self.at + pause).min(now), None);
        }
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
    /// Blocks were lost, and the job's newest snapshot is loaded.
    Restoring,
}

impl JobPhase {
    /// All of them.
    pub const ALL: [JobPhase; 7] = [
        JobPhase::Running,
        JobPhase::Forming,
        JobPhase::Reducing,
        JobPhase::Stopped,
        JobPhase::Waiting,
        JobPhase::Failed,
        JobPhase::Restoring,
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
            JobPhase::Restoring => "restoring",
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
        for now in (5000..6000).step_by(200) {
            assert!(!heard.asks(at(now)) && heard.silent_since(at(now)).is_none());
        }
        assert!(heard.asks(at(6000)) && !heard.asks(at(6500)), "once");
        assert!(heard.silent_since(at(6999)).is_none());
        assert_eq!(heard.silent_since(at(7000)), Some(at(5000)));
        heard.heard(at(7001));
        assert!(heard.silent_since(at(7001)).is_none());
    }

    #[test]
    fn whoever_was_stopped_blames_nobody_for_that_time() {
        let at = Duration::from_millis;
        let mut heard = Heard::default();
        assert!(!heard.asks(at(4900)));
        heard.heard(at(5000));
        assert!(!heard.asks(at(5800)) && heard.asks(at(6000)));
        // It was stopped after the question, and the answer is still to be read.
        assert!(heard.asks(at(60_000)), "the question may be lost");
        assert!(heard.silent_since(at(60_000)).is_none() && heard.silent_since(at(60_999)).is_none());
        assert!(!heard.asks(at(60_500)) && !heard.asks(at(60_900)));
        assert_eq!(heard.silent_since(at(61_000)), Some(at(59_000)), "a second before, and one since");
        // It was stopped before the question.
        heard.heard(at(61_000));
        assert!(!heard.asks(at(61_200)) && !heard.asks(at(90_000)) && heard.asks(at(90_800)));
    }
}
