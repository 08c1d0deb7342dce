//! How many learners `gradfs run -n auto` has: one more for as long as that makes contributions faster.
//!
//! A pure core: what the job has counted and the time go in, steps come out.

use std::time::{Duration, Instant};

/// What is to change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// Start one more. With so many contributions a second there are more to gain.
    Add(f64),
    /// End the last one. It did not bring enough: so many contributions a second with it.
    Remove(f64),
    /// There may be no more.
    Stay(f64),
}

impl Step {
    /// The contributions a second.
    pub fn rate(self) -> f64 {
        match self {
            Step::Add(rate) | Step::Remove(rate) | Step::Stay(rate) => rate,
        }
    }
}

/// Looks for the number of learners.
#[derive(Debug)]
pub struct Tuner {
    gain: f64,
    window: Duration,
    most: u32,
    learners: u32,
    /// Contributions a second with one learner fewer.
    before: Option<f64>,
    /// The count at the last sample.
    last: Option<u64>,
    /// The contribution that begins the measurement: when it was seen, and the count then.
    began: Option<(Instant, u64)>,
    settled: bool,
}

impl Tuner {
    /// Begins with one learner. `gain` is the share by which contributions must become faster for one more.
    pub fn new(gain: f64, window: Duration, most: u32) -> Tuner {
        Tuner { gain, window, most, learners: 1, before: None, last: None, began: None, settled: false }
    }

    /// The number stays as it is from now on.
    pub fn settle(&mut self) {
        self.settled = true;
    }

    /// The job has taken `contributions` by `now`. It is measured only while all learners are `at_work`: until one that
    /// is new has contributed for the first time, others may wait for it.
    pub fn sample(&mut self, now: Instant, contributions: u64, at_work: bool) -> Option<Step> {
        let last = self.last.replace(contributions);
        if self.settled {
            return None;
        }
        if !at_work || last.is_some_and(|last| contributions < last) {
            self.began = None;
            return None;
        }
        // From contribution to contribution, so that the time between a sample and the next one does not count.
        if last.is_none_or(|last| contributions == last) {
            return None;
        }
        let Some((since, count)) = self.began else {
            self.began = Some((now, contributions));
            return None;
        };
        let took = now.saturating_duration_since(since);
        if took < self.window || took.is_zero() {
            return None;
        }
        self.began = None;
        Some(self.decide((contributions - count) as f64 / took.as_secs_f64()))
    }

    fn decide(&mut self, rate: f64) -> Step {
        if self.before.is_some_and(|before| rate <= before * (1.0 + self.gain)) {
            self.settled = true;
            self.learners -= 1;
            return Step::Remove(rate);
        }
        if self.learners >= self.most {
            self.settled = true;
            return Step::Stay(rate);
        }
        self.before = Some(rate);
        self.learners += 1;
        Step::Add(rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WINDOW: Duration = Duration::from_secs(5);

    /// The number of learners in the end, of a job that takes `rates[n - 1]` contributions a second with n, and whose
    /// learners need `startup` to begin.
    fn tuned(rates: &[f64], gain: f64, startup: Duration) -> usize {
        let mut tuner = Tuner::new(gain, WINDOW, rates.len() as u32);
        let (start, mut now, mut learners, mut count) = (Instant::now(), Duration::ZERO, 1, 0.0);
        let mut newest = Duration::ZERO;
        for _ in 0..1_000_000 {
            now += Duration::from_millis(50);
            let at_work = now >= newest + startup;
            // Nobody gets on while a new one is not at work yet, as with `sync`.
            count += if at_work { rates[learners - 1] * 0.05 } else { 0.0 };
            match tuner.sample(start + now, count as u64, at_work) {
                Some(Step::Add(_)) => (learners, newest) = (learners + 1, now),
                Some(Step::Remove(_)) => return learners - 1,
                Some(Step::Stay(_)) => return learners,
                None => {}
            }
        }
        panic!("it does not settle");
    }

    #[test]
    fn one_more_is_added_while_it_is_faster() {
        let startup = Duration::from_secs(3);
        assert_eq!(tuned(&[100.0, 190.0, 270.0, 275.0, 500.0], 0.05, startup), 3);
        assert_eq!(tuned(&[100.0, 90.0], 0.05, startup), 1);
        assert_eq!(tuned(&[100.0, 190.0], 0.05, startup), 2);
        assert_eq!(tuned(&[100.0, 190.0], 1.0, startup), 1, "it must double");
        assert_eq!(tuned(&[100.0], 0.05, startup), 1);
    }

    #[test]
    fn slow_steps_prolong_the_window() {
        let (mut tuner, start) = (Tuner::new(0.05, Duration::from_secs(1), 4), Instant::now());
        let mut at = |seconds, count| tuner.sample(start + Duration::from_secs(seconds), count, true);
        assert_eq!((at(0, 0), at(2, 1), at(5, 1)), (None, None, None));
        assert_eq!(at(12, 2), Some(Step::Add(0.1)));
    }

    #[test]
    fn nothing_is_measured_while_one_is_not_at_work_or_once_settled() {
        let (mut tuner, start) = (Tuner::new(0.05, WINDOW, 4), Instant::now());
        for second in 0..100 {
            assert_eq!(tuner.sample(start + Duration::from_secs(second), second, false), None);
        }
        tuner.settle();
        for second in 100..200 {
            assert_eq!(tuner.sample(start + Duration::from_secs(second), second, true), None);
        }
    }

    proptest! {
        /// It stops at the first number from which one more does not bring enough.
        #[test]
        fn it_climbs_to_the_first_number_that_is_enough(
            steps in prop::collection::vec(prop_oneof![1.15f64..1.9, 0.5f64..1.04], 0..8),
            first in 200.0f64..1000.0,
            startup in 0u64..10,
        ) {
            let mut rates = vec![first];
            for step in &steps {
                rates.push(rates[rates.len() - 1] * step);
            }
            // Rates so low that a contribution more or less decides are no subject here.
            prop_assume!(rates.iter().all(|rate| *rate > 50.0));
            let expected = 1 + steps.iter().take_while(|step| **step > 1.1).count();
            prop_assert_eq!(tuned(&rates, 0.1, Duration::from_secs(startup)), expected);
        }
    }
}
