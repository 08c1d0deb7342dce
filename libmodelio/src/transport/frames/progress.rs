//! Detection of a frame that a peer has begun and does not finish. Pure: the caller passes the time and the number of
//! received bytes.
//!
//! Between frames a peer may be silent, and sends pings. In the middle of a frame it has the rest at hand, so the
//! rest comes as fast as the network takes it. A frame that does not move on has lost bytes on the way, for example
//! in a relay, and its rest never comes. Everything that the peer sends later, pings included, is taken for that
//! rest. So such a connection is not silent: small pieces keep coming.

use std::time::{Duration, Instant};

/// Fewer bytes than this do not count as progress. A peer's pings and questions within the longest pause are fewer.
pub(super) const CRUMBS: u64 = 4 << 10;

/// The received bytes of the frame under way, and the time when it last moved on.
#[derive(Clone, Copy)]
struct Mark {
    frame: u64,
    seen: u64,
    at: Instant,
}

/// The frame under way does not move on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stuck;

/// Watches one direction of a connection.
#[derive(Default)]
pub(super) struct Progress {
    mark: Option<Mark>,
    /// The latest time for the next check.
    due: Option<Instant>,
}

impl Progress {
    /// The frame of this number is under way, and `seen` bytes have come on the connection in all. True if the next
    /// check must come sooner than planned.
    pub(super) fn under_way(&mut self, frame: u64, seen: u64, now: Instant, pause: Duration) -> bool {
        if self.mark.is_none_or(|mark| mark.frame != frame) {
            self.mark = Some(Mark { frame, seen, at: now });
        }
        self.due.is_none_or(|due| due > now + often(pause))
    }

    /// No frame is under way, or this end does not read at the moment.
    pub(super) fn clear(&mut self) {
        self.mark = None;
    }

    /// Checks the frame under way, and returns the time of the next check.
    ///
    /// # Errors
    /// The frame has not moved on within `pause`.
    pub(super) fn check(
        &mut self,
        seen: u64,
        now: Instant,
        pause: Duration,
    ) -> Result<Option<Instant>, Stuck> {
        let often = often(pause);
        // A late call means that this thread did not run. Bytes that came meanwhile may not be counted yet.
        let late = self.due.is_some_and(|due| now > due + often);
        let Some(mark) = &mut self.mark else { return Ok(None) };
        if late || seen >= mark.seen + CRUMBS {
            (mark.seen, mark.at) = (seen, now);
        }
        let end = mark.at + pause;
        if now < end { Ok(Some(end.min(now + often))) } else { Err(Stuck) }
    }

    /// Plans the next [`Self::check`] for this time at the latest.
    pub(super) fn promised(&mut self, due: Instant) {
        self.due = Some(due);
    }
}

/// The interval of checks.
fn often(pause: Duration) -> Duration {
    pause / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_secs(3);

    /// The time at which a frame is given up that brings `bytes` in every interval of `every`. `None` if that is not
    /// within `total`.
    fn given_up(bytes: u64, every: Duration, total: Duration) -> Option<Duration> {
        let start = Instant::now();
        let (mut progress, mut seen, mut now, mut comes) = (Progress::default(), 100, start, start + every);
        progress.under_way(1, seen, now, PAUSE);
        while now < start + total {
            let Ok(next) = progress.check(seen, now, PAUSE) else { return Some(now - start) };
            let next = next.unwrap();
            progress.promised(next);
            now = next;
            while comes <= now {
                seen += bytes;
                comes += every;
            }
            progress.under_way(1, seen, now, PAUSE);
        }
        None
    }

    #[test]
    fn a_slow_frame_keeps_its_connection() {
        let hour = Duration::from_secs(3600);
        // 20 KB/s in pieces of all sizes, and 2 KB/s.
        assert_eq!(given_up(1448, Duration::from_millis(72), hour), None);
        assert_eq!(given_up(40_000, Duration::from_secs(2), hour), None);
        assert_eq!(given_up(1448, Duration::from_millis(700), hour), None);
    }

    #[test]
    fn crumbs_and_nothing_at_all_are_given_up_in_time() {
        let long = 10 * PAUSE;
        for every in [Duration::from_millis(1000), long] {
            let after = given_up(45, every, long).unwrap();
            assert!(after >= PAUSE && after <= PAUSE + PAUSE / 8, "{after:?}");
        }
    }

    #[test]
    fn another_frame_begins_anew_and_a_rest_counts_for_nothing() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut progress = Progress::default();
        progress.under_way(1, 10, start, PAUSE);
        progress.promised(at(2));
        progress.under_way(2, 20, at(2), PAUSE);
        assert!(progress.check(20, at(2), PAUSE).is_ok());
        progress.promised(at(4));
        assert!(progress.check(20, at(4), PAUSE).is_ok());
        progress.clear();
        progress.promised(at(9));
        assert_eq!(progress.check(20, at(9), PAUSE), Ok(None));
        progress.under_way(2, 20, at(9), PAUSE);
        progress.promised(at(11));
        assert!(progress.check(20, at(11), PAUSE).is_ok());
        progress.promised(at(12));
        assert!(progress.check(20, at(12), PAUSE).is_err());
    }

    #[test]
    fn a_starved_thread_does_not_judge_its_peer() {
        let start = Instant::now();
        let mut progress = Progress::default();
        progress.under_way(1, 10, start, PAUSE);
        assert!(progress.under_way(1, 10, start, PAUSE), "nothing is promised yet");
        progress.promised(start + PAUSE / 8);
        assert!(!progress.under_way(1, 10, start, PAUSE));
        // After a stop of a minute, the pause begins anew.
        let resumed = start + 20 * PAUSE;
        let next = progress.check(10, resumed, PAUSE).unwrap().unwrap();
        assert!(next > resumed);
        progress.promised(resumed + PAUSE);
        assert!(progress.check(10, resumed + PAUSE, PAUSE).is_err());
    }
}
