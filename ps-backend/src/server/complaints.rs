//! How often the log tells of peers that are turned away: whoever sends rubbish decides how often that happens.

use std::fmt::Display;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// So many are told of in each [`SPAN`].
const TOLD: u32 = 10;
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
            Some(untold) => tracing::warn!(peer, untold, "turned away: {why}"),
            None => tracing::debug!(peer, "turned away: {why}"),
        }
    }
}

/// Counts them. Pure.
#[derive(Debug, Default)]
struct Complaints {
    since: Option<Duration>,
    told: u32,
    untold: u64,
}

impl Complaints {
    /// One more, at `now` on any clock that goes forward. `Some` if it is to be told, with how many were not told before
    /// it.
    fn one_more(&mut self, now: Duration) -> Option<u64> {
        if self.since.is_none_or(|since| now >= since + SPAN) {
            (self.since, self.told) = (Some(now), 0);
        }
        if self.told >= TOLD {
            self.untold += 1;
            return None;
        }
        self.told += 1;
        Some(std::mem::take(&mut self.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_are_counted_and_few_are_told() {
        let mut complaints = Complaints::default();
        let mut told = Vec::new();
        for milli in 0..25_000 {
            told.extend(complaints.one_more(Duration::from_millis(milli)));
        }
        // Three spans; the first of the second and the third says how many were left out.
        assert_eq!(told.len(), 30);
        assert_eq!((told[0], told[10], told[20]), (0, 9_990, 9_990));
        assert_eq!(told.iter().sum::<u64>(), 2 * 9_990);
    }

    #[test]
    fn few_are_all_told() {
        let mut complaints = Complaints::default();
        assert!((0..1000).all(|second| complaints.one_more(Duration::from_secs(second)) == Some(0)));
    }
}
