//! How often the log tells of peers that are turned away: whoever sends rubbish decides how often that happens.

use std::fmt::Display;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// So many are told of in each [`SPAN`].
const LOGGED: u32 = 10;
/// The time for which that counts.
const SPAN: Duration = Duration::from_secs(10);

/// The log, as far as it tells of them.
#[derive(Debug)]
pub(super) struct Log {
    complaints: Mutex<Complaints>,
    started: Instant,
}

impl Log {
    /// Nothing was told yet.
    pub(super) fn new() -> Log {
        Log { complaints: Mutex::default(), started: Instant::now() }
    }

    /// Tells that `peer` is turned away, and why, unless that was told of too many.
    pub(super) fn turned_away(&self, peer: &str, why: &dyn Display) {
        match self.complaints.lock().one_more(self.started.elapsed()) {
            Some(0) => tracing::warn!(peer, "turned away: {why}"),
            Some(left_out) => tracing::warn!(peer, left_out, "turned away: {why}"),
            None => tracing::debug!(peer, "turned away: {why}"),
        }
    }
}

/// Counts them. Pure.
#[derive(Debug, Default)]
struct Complaints {
    since: Option<Duration>,
    logged: u32,
    left_out: u64,
}

impl Complaints {
    /// One more, at `now` on any clock that goes forward. `Some` if it is to be told, with how many were not told before
    /// it.
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
    fn many_are_counted_and_few_are_logged() {
        let mut complaints = Complaints::default();
        let mut logged = Vec::new();
        for milli in 0..25_000 {
            logged.extend(complaints.one_more(Duration::from_millis(milli)));
        }
        // Three spans; the first of the second and the third says how many were left out.
        assert_eq!(logged.len(), 30);
        assert_eq!((logged[0], logged[10], logged[20]), (0, 9_990, 9_990));
        assert_eq!(logged.iter().sum::<u64>(), 2 * 9_990);
    }

    #[test]
    fn few_are_all_logged() {
        let mut complaints = Complaints::default();
        assert!((0..1000).all(|second| complaints.one_more(Duration::from_secs(second)) == Some(0)));
    }
}
