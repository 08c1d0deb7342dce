//! Detects a frame that a peer has begun and does not finish. Pure: the caller passes the time and the number
//! of bytes received.
//!
//! Between frames a peer may be silent, and sends pings. In the middle of a frame the peer has all the rest
//! at hand, so it comes as fast as the network takes it; on a slow network, little by little. A frame that
//! does not move on has lost bytes on the way (a relay dropped them), and the rest never comes. Everything
//! that the peer sends afterwards, pings included, is taken for that rest, so such a connection is not
//! silent: small pieces keep coming.

use std::time::{Duration, Instant};

/// Bytes that are crumbs: more than the pings and questions that a peer sends within the longest pause.
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
    /// When it is to be looked at again at the latest.
    due: Option<Instant>,
}

impl Progress {
    /// The frame of this number is under way, and in all `seen` bytes have come on the connection. True if it is to be
    /// looked at sooner than was promised.
    pub(super) fn under_way(&mut self, frame: u64, seen: u64, now: Instant, pause: Duration) -> bool {
        if self.mark.is_none_or(|mark| mark.frame != frame) {
            self.mark = Some(Mark { frame, seen, at: now });
        }
        self.due.is_none_or(|due| due > now + often(pause))
    }

    /// No frame is under way, or this end does not read just now.
    pub(super) fn clear(&mut self) {
        self.mark = None;
    }

    /// Looks at the frame that is under way, if one is, and says when to look again.
    ///
    /// # Errors
    /// It has not moved on within `pause`.
    pub(super) fn check(
        &mut self,
        seen: u64,
        now: Instant,
        pause: Duration,
    ) -> Result<Option<Instant>, Stuck> {
        let often = often(pause);
        // A late call means that this thread did not run: bytes that came meanwhile may not have been counted
        // yet.
        let late = self.due.is_some_and(|due| now > due + often);
        let Some(mark) = &mut self.mark else { return Ok(None) };
        if late || seen >= mark.seen + CRUMBS {
            (mark.seen, mark.at) = (seen, now);
        }
        let end = mark.at + pause;
        if now < end { Ok(Some(end.min(now + often))) } else { Err(Stuck) }
    }

    /// [`Self::check`] is called at this time at the latest.
    pub(super) fn promised(&mut self, due: Instant) {
        self.due = Some(due);
    }
}

/// Pauses between looks.
fn often(pause: Duration) -> Duration {
    pause / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_secs(3);

    /// Brings `bytes` every `every` of one frame; when it is given up, if it is within `total`.
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
    fn what_comes_slowly_lives() {
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
    fn who_has_not_run_does_not_judge() {
        let start = Instant::now();
        let mut progress = Progress::default();
        progress.under_way(1, 10, start, PAUSE);
        assert!(progress.under_way(1, 10, start, PAUSE), "nothing is promised yet");
        progress.promised(start + PAUSE / 8);
        assert!(!progress.under_way(1, 10, start, PAUSE));
        // Stopped for a minute; then it counts from there.
        let resumed = start + 20 * PAUSE;
        let next = progress.check(10, resumed, PAUSE).unwrap().unwrap();
        assert!(next > resumed);
        progress.promised(resumed + PAUSE);
        assert!(progress.check(10, resumed + PAUSE, PAUSE).is_err());
    }
}
