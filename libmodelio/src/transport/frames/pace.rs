//! When patches are compressed: on a link that is much slower than that, and on any other one as long as the kernel has
//! enough to send meanwhile, so that the link never waits for it. Pure.

use std::time::Duration;

use crate::transport::stream::Traffic;

/// Bytes must have been on the link for so long before the peer is judged again.
const JUDGED: Duration = Duration::from_millis(10);
/// Patches of fewer bytes go as they are.
const SHORTEST: usize = 512;
/// A link is slow if a byte takes so many times as long as compressing it. About a third is saved.
const SLOWER: f64 = 8.0;
/// Bytes that are compressed in a second, until that is measured.
const SPEED: f64 = 200e6;
/// After a patch that was hardly any shorter, so many go as they are.
const PASSED_OVER: u32 = 64;

/// How a connection's link keeps up with what is sent.
#[derive(Debug)]
pub(super) struct Pace {
    judged: Traffic,
    /// The peer takes less than the link could bring.
    by_peer: bool,
    /// What the link brings, in bytes a second. None if that is not known.
    rate: Option<f64>,
    /// How long the kernel will send what it has.
    time: Duration,
    /// Bytes that are compressed in a second.
    speed: f64,
    passed_over: u32,
}

impl Default for Pace {
    fn default() -> Pace {
        let (judged, time) = (Traffic::default(), Duration::ZERO);
        Pace { judged, by_peer: false, rate: None, time, speed: SPEED, passed_over: 0 }
    }
}

impl Pace {
    /// The kernel has taken all that was handed out, and this is how that gets on.
    pub(super) fn sees(&mut self, traffic: Traffic) {
        let busy = traffic.busy.saturating_sub(self.judged.busy);
        if busy >= JUDGED {
            self.by_peer = traffic.by_peer.saturating_sub(self.judged.by_peer) * 2 > busy;
            self.judged = traffic;
        }
        if traffic.rate > 0 && !traffic.too_few {
            self.rate = Some(traffic.rate as f64);
        }
        let time = |rate| Duration::from_secs_f64(f64::from(traffic.not_sent) / rate);
        self.time = self.rate.map_or(Duration::ZERO, time);
    }

    /// Whether a patch of so many bytes is to be compressed. [`Self::took`] follows then.
    pub(super) fn compresses(&mut self, bytes: usize) -> bool {
        let is_slow = self.rate.is_some_and(|rate| rate * SLOWER < self.speed);
        if bytes < SHORTEST || self.by_peer || !(is_slow || self.time > Duration::ZERO) {
            return false;
        }
        let passes = self.passed_over > 0;
        self.passed_over = self.passed_over.saturating_sub(1);
        !passes
    }

    /// So many bytes have become so many in this time.
    pub(super) fn took(&mut self, (before, after): (usize, usize), time: Duration) {
        self.time = self.time.saturating_sub(time);
        let speed = before as f64 / time.as_secs_f64().max(1e-9);
        self.speed += (speed - self.speed) / 8.0;
        if after > before / 10 * 9 {
            self.passed_over = PASSED_OVER;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn traffic(not_sent: u32, busy: Duration, by_peer: Duration) -> Traffic {
        Traffic { not_sent, rate: 100_000_000, too_few: false, busy, by_peer }
    }

    #[test]
    fn patches_are_compressed_while_the_kernel_has_enough_to_send() {
        let mut pace = Pace::default();
        assert!(!pace.compresses(1 << 16), "nothing is known");
        pace.sees(traffic(300_000, 20 * MS, Duration::ZERO));
        assert!(pace.compresses(1 << 16) && !pace.compresses(SHORTEST - 1));
        pace.took((1000, 600), 2 * MS);
        assert!(pace.compresses(1 << 16));
        pace.took((1000, 600), MS);
        assert!(!pace.compresses(1 << 16), "the link would wait");
        pace.sees(traffic(0, 40 * MS, Duration::ZERO));
        assert!(!pace.compresses(1 << 16), "the link is faster");
    }

    #[test]
    fn all_patches_are_compressed_for_a_slow_link() {
        let (mut pace, idle) = (Pace::default(), traffic(0, 20 * MS, Duration::ZERO));
        pace.sees(Traffic { rate: 12_000_000, ..idle });
        assert!(pace.compresses(1 << 16));
        // 100 MB/s.
        (0..100).for_each(|_| pace.took((1_000_000, 600_000), 10 * MS));
        pace.sees(Traffic { rate: 13_000_000, ..idle });
        assert!(!pace.compresses(1 << 16), "compressing is too slow for that");
        pace.sees(Traffic { rate: 12_000_000, ..idle });
        assert!(pace.compresses(1 << 16));
        pace.sees(Traffic { rate: 99_000_000, too_few: true, ..idle });
        assert!(pace.compresses(1 << 16), "what few bytes say does not count");
        let mut other = Pace::default();
        other.sees(Traffic { rate: 1_000_000, too_few: true, ..idle });
        assert!(!other.compresses(1 << 16), "the link may be faster");
    }

    #[test]
    fn a_peer_that_is_slower_than_the_link_gets_patches_as_they_are() {
        let mut pace = Pace::default();
        pace.sees(traffic(300_000, 20 * MS, 11 * MS));
        assert!(!pace.compresses(1 << 16));
        pace.sees(traffic(300_000, 29 * MS, 11 * MS));
        assert!(!pace.compresses(1 << 16), "too early to judge");
        pace.sees(traffic(300_000, 30 * MS, 16 * MS));
        assert!(pace.compresses(1 << 16));
    }

    #[test]
    fn patches_that_become_no_shorter_are_left_for_a_while() {
        let mut pace = Pace::default();
        pace.sees(traffic(300_000, 20 * MS, Duration::ZERO));
        assert!(pace.compresses(1 << 16));
        pace.took((1000, 950), Duration::ZERO);
        assert_eq!((0..100).position(|_| pace.compresses(1 << 16)), Some(PASSED_OVER as usize));
    }
}
