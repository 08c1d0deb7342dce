//! Bytes a second over the last seconds, from totals that only grow.

use std::collections::VecDeque;
use std::time::Duration;

use super::Now;

/// The time over which a rate is taken.
pub const WINDOW: Duration = Duration::from_secs(10);
/// The time between two samples.
const BETWEEN: Duration = Duration::from_secs(1);

/// Samples of a total.
#[derive(Debug, Default)]
pub struct Rate(VecDeque<(Now, u64)>);

impl Rate {
    /// The total at this moment. Samples that come too soon after another are left out, so call it as often as you
    /// like.
    pub fn sample(&mut self, now: Now, total: u64) {
        if self.0.back().is_some_and(|(last, _)| now.saturating_sub(*last) < BETWEEN) {
            return;
        }
        // One sample stays that is older than the window: the rate is taken from there.
        while self.0.get(1).is_some_and(|(at, _)| now.saturating_sub(*at) >= WINDOW) {
            self.0.pop_front();
        }
        self.0.push_back((now, total));
    }

    /// The bytes a second from the oldest sample in the window to `total`. 0 before any time has passed.
    pub fn per_second(&self, now: Now, total: u64) -> f64 {
        let old = self.0.iter().rfind(|(at, _)| now.saturating_sub(*at) >= WINDOW);
        let Some((at, before)) = old.or(self.0.front()) else { return 0.0 };
        let passed = now.saturating_sub(*at).as_secs_f64();
        if passed > 0.0 { total.saturating_sub(*before) as f64 / passed } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENTH: Duration = Duration::from_millis(100);

    #[test]
    fn a_steady_flow_has_its_rate_and_one_that_stops_has_none_after_the_window() {
        let mut rate = Rate::default();
        assert_eq!(rate.per_second(TENTH, 5), 0.0);
        for at in 0..600 {
            rate.sample(TENTH * at, u64::from(at) * 10);
            assert!(rate.0.len() <= 13, "{}", rate.0.len());
        }
        assert!((rate.per_second(TENTH * 600, 6000) - 100.0).abs() < 1e-6);
        for at in 600..720 {
            rate.sample(TENTH * at, 6000);
        }
        assert_eq!(rate.per_second(TENTH * 720, 6000), 0.0);
    }

    #[test]
    fn a_clock_that_jumps_back_or_stands_still_divides_by_nothing() {
        let mut rate = Rate::default();
        rate.sample(TENTH * 50, 100);
        rate.sample(TENTH * 20, 200);
        assert_eq!(rate.per_second(TENTH * 50, 300), 0.0);
        assert_eq!(rate.per_second(TENTH * 10, 300), 0.0);
        assert_eq!(rate.per_second(TENTH * 60, 50), 0.0, "a total that has shrunk");
    }
}
