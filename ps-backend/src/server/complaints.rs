//! A limit on the log's messages about refused peers. A peer that sends garbage could fill the log.

use std::fmt::Display;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The most messages in each [`SPAN`].
const LOGGED: u32 = 10;
/// The time for which the limit counts.
const SPAN: Duration = Duration::from_secs(10);

/// The log of refused peers.
#[derive(Debug)]
pub(super) struct Log {
    complaints: Mutex<Complaints>,
    started: Instant,
}

impl Log {
    /// A log without messages.
    pub(super) fn new() -> Log {
        Log { complaints: Mutex::default(), started: Instant::now() }
    }

    /// Logs that `peer` was refused, and why, unless there were too many messages.
    pub(super) fn turned_away(&self, peer: &str, why: &dyn Display) {
        match self.complaints.lock().one_more(self.started.elapsed()) {
            Some(0) => tracing::warn!(peer, "turned away: {why}"),
            Some(left_out) => tracing::warn!(peer, left_out, "turned away: {why}"),
            None => tracing::debug!(peer, "turned away: {why}"),
        }
    }
}

/// Counts messages. Pure.
#[derive(Debug, Default)]
struct Complaints {
    since: Option<Duration>,
    logged: u32,
    left_out: u64,
}

impl Complaints {
    /// Counts a message at `now`, on any clock that goes forward. `Some` if it must be logged, with the number of
    /// messages that were left out before it.
    fn one_more(&mut self, now: Duration) -> Option<u64> {
        if self.since.is_none_or(|since| now >= since + SPAN) {
            (self.since, self.logged) = (Some(now), 0);
        }
        if self.logged >= LOGGED {
            self.left_out += 1;
            return None;
        }
        self.logged += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_messages_are_counted_and_few_are_logged() {
        let mut complaints = Complaints::default();
        let mut logged = Vec::new();
        for milli in 0..25_000 {
            logged.extend(complaints.one_more(Duration::from_millis(milli)));
        }
        // There are three spans. The first message of the second and third span says how many were left out.
        assert_eq!(logged.len(), 30);
        assert_eq!((logged[0], logged[10], logged[20]), (0, 9_990, 9_990));
        assert_eq!(logged.iter().sum::<u64>(), 2 * 9_990);
    }

    #[test]
    fn few_messages_are_all_logged() {
        let mut complaints = Complaints::default();
        assert!((0..1000).all(|second| complaints.one_more(Duration::from_secs(second)) == Some(0)));
    }
}
