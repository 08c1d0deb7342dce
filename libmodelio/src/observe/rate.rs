//! Bytes and steps a second over the last seconds, from totals that only grow.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::Now;
use crate::vocabulary::ids::{LearnerId, Step};

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

    /// The growth a second from the oldest sample in the window to `total`. 0 before any time has passed.
    pub fn per_second(&self, now: Now, total: u64) -> f64 {
        let old = self.0.iter().rfind(|(at, _)| now.saturating_sub(*at) >= WINDOW);
        let Some((at, before)) = old.or(self.0.front()) else { return 0.0 };
        let passed = now.saturating_sub(*at).as_secs_f64();
        if passed > 0.0 { total.saturating_sub(*before) as f64 / passed } else { 0.0 }
    }
}

/// How fast the learners of a job are.
#[derive(Debug, Default)]
pub struct StepRates {
    sampled: Option<Now>,
    of: BTreeMap<LearnerId, Rate>,
}

impl StepRates {
    /// The learners in the job and their last steps at this moment; `steps` is called when a sample is due. Learners that
    /// have left are forgotten.
    pub fn sample<I: IntoIterator<Item = (LearnerId, Step)>>(&mut self, now: Now, steps: impl FnOnce() -> I) {
        if self.sampled.is_some_and(|last| now.saturating_sub(last) < BETWEEN) {
            return;
        }
        self.sampled = Some(now);
        let mut before = std::mem::take(&mut self.of);
        for (learner, step) in steps() {
            let mut rate = before.remove(&learner).unwrap_or_default();
            rate.sample(now, step.0);
            self.of.insert(learner, rate);
        }
    }

    /// The steps a second of a learner whose last step is this one; `None` if it has only just joined.
    pub fn per_second(&self, now: Now, learner: LearnerId, step: Step) -> Option<f64> {
        Some(self.of.get(&learner)?.per_second(now, step.0))
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
    fn each_learner_has_its_pace_until_it_leaves() {
        let mut rates = StepRates::default();
        let (a, b) = (LearnerId(1), LearnerId(2));
        assert_eq!(rates.per_second(TENTH, a, Step(5)), None);
        for at in 0..100_u32 {
            rates.sample(TENTH * at, || [(a, Step(u64::from(at))), (b, Step(7))]);
        }
        let now = TENTH * 100;
        assert!((rates.per_second(now, a, Step(100)).unwrap() - 10.0).abs() < 1e-6);
        assert_eq!(rates.per_second(now, b, Step(7)), Some(0.0));
        rates.sample(now, || [(a, Step(100))]);
        assert_eq!(rates.per_second(now, b, Step(7)), None);
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
