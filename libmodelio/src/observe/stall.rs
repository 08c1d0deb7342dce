//! The stall account of a learner: how long its program has waited inside calls, and which share of its steps that was.
//!
//! Several threads of one program may wait at once. The account counts the time during which at least one waits.

use std::time::Duration;

use super::Now;

/// The weight of a new step in a moving average.
const GAIN: f64 = 0.25;

/// The stall of one learner.
#[derive(Clone, Copy, Debug)]
pub struct StallAccount {
    joined: Now,
    /// Everything until then is counted.
    counted: Now,
    /// The number of calls that wait now.
    waiting: u32,
    total: Duration,
    step_began: Now,
    in_step: Duration,
    averages: Option<Averages>,
}

/// Moving averages over steps, in seconds.
#[derive(Clone, Copy, Debug)]
struct Averages {
    stall: f64,
    step: f64,
}

/// A step that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepStall {
    /// How long the program has waited in it.
    pub stall: Duration,
    /// How long it took.
    pub took: Duration,
}

/// The account, for people and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StallReport {
    /// How long the program has waited since the learner joined.
    pub stall: Duration,
    /// The share of the last steps that it has waited, as a moving average: 0 to 1.
    pub share: f64,
    /// The share of its time since it joined.
    pub share_since_join: f64,
}

impl Averages {
    /// With one more step.
    fn with(averages: Option<Averages>, step: StepStall) -> Averages {
        let new = Averages { stall: step.stall.as_secs_f64(), step: step.took.as_secs_f64() };
        let Some(Averages { stall, step }) = averages else { return new };
        Averages { stall: stall + GAIN * (new.stall - stall), step: step + GAIN * (new.step - step) }
    }

    fn share(self) -> f64 {
        share(self.stall, self.step)
    }
}

fn share(stall: f64, of: f64) -> f64 {
    if of > 0.0 { (stall / of).clamp(0.0, 1.0) } else { 0.0 }
}

impl StallAccount {
    /// For a learner that joins. Its first step begins.
    pub fn new(now: Now) -> StallAccount {
        StallAccount {
            joined: now,
            counted: now,
            waiting: 0,
            total: Duration::ZERO,
            step_began: now,
            in_step: Duration::ZERO,
            averages: None,
        }
    }

    /// Counts the time until `now`.
    fn count(&mut self, now: Now) {
        let passed = now.saturating_sub(self.counted);
        if self.waiting > 0 {
            self.total += passed;
            self.in_step += passed;
        }
        self.counted += passed;
    }

    /// A call begins to wait. [`Self::end`] must follow.
    pub fn begin(&mut self, now: Now) {
        self.count(now);
        self.waiting += 1;
    }

    /// A call no longer waits.
    pub fn end(&mut self, now: Now) {
        self.count(now);
        self.waiting = self.waiting.saturating_sub(1);
    }

    /// A step is over, and the next one begins. A call that waits now goes on in that one.
    pub fn step(&mut self, now: Now) -> StepStall {
        self.count(now);
        let step = self.step_so_far();
        self.averages = Some(Averages::with(self.averages, step));
        (self.step_began, self.in_step) = (self.counted, Duration::ZERO);
        step
    }

    fn step_so_far(&self) -> StepStall {
        StepStall { stall: self.in_step, took: self.counted.saturating_sub(self.step_began) }
    }

    /// The account at this moment. A wait that has not ended counts.
    pub fn report(&self, now: Now) -> StallReport {
        let mut at = *self;
        at.count(now);
        let step = at.step_so_far();
        let averages = match at.averages {
            // The step under way says something new once it takes longer than usual.
            Some(averages) if step.took.as_secs_f64() <= averages.step => averages,
            averages => Averages::with(averages, step),
        };
        let lived = at.counted.saturating_sub(at.joined);
        StallReport {
            stall: at.total,
            share: averages.share(),
            share_since_join: share(at.total.as_secs_f64(), lived.as_secs_f64()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn a_step_is_what_its_calls_have_waited_of_it() {
        let mut account = StallAccount::new(ms(1000));
        for step in 0..10 {
            let began = ms(1000 + step * 100);
            account.begin(began + ms(10));
            account.end(began + ms(30));
            account.begin(began + ms(95));
            account.end(began + ms(100));
            let StepStall { stall, took } = account.step(began + ms(100));
            assert_eq!((stall, took), (ms(25), ms(100)));
        }
        let StallReport { stall, share, share_since_join } = account.report(ms(2000));
        assert_eq!(stall, ms(250));
        assert!((share - 0.25).abs() < 1e-9 && (share_since_join - 0.25).abs() < 1e-9, "{share}");
    }

    #[test]
    fn waits_of_several_threads_at_once_count_once() {
        let mut account = StallAccount::new(ms(0));
        account.begin(ms(10));
        account.begin(ms(15));
        account.end(ms(20));
        account.end(ms(40));
        account.begin(ms(50));
        account.end(ms(60));
        assert_eq!(account.step(ms(100)), StepStall { stall: ms(40), took: ms(100) });
    }

    #[test]
    fn a_wait_across_the_end_of_a_step_is_part_of_both() {
        let mut account = StallAccount::new(ms(0));
        account.begin(ms(80));
        assert_eq!(account.step(ms(100)).stall, ms(20));
        account.end(ms(130));
        assert_eq!(account.step(ms(200)).stall, ms(30));
        assert_eq!(account.report(ms(200)).stall, ms(50));
    }

    #[test]
    fn a_clock_that_jumps_back_takes_nothing_away_and_counts_nothing_twice() {
        let mut account = StallAccount::new(ms(100));
        account.begin(ms(200));
        account.end(ms(150));
        assert_eq!(account.report(ms(50)).stall, ms(0));
        account.begin(ms(180));
        account.end(ms(210));
        assert_eq!(account.report(ms(210)).stall, ms(10), "the time until 200 was counted before");
        assert_eq!(account.step(ms(120)), StepStall { stall: ms(10), took: ms(110) });
        assert_eq!(account.step(ms(110)), StepStall { stall: ms(0), took: ms(0) });
    }

    #[test]
    fn steps_of_no_time_have_no_share() {
        let mut account = StallAccount::new(ms(5));
        account.begin(ms(5));
        account.end(ms(5));
        assert_eq!(account.report(ms(5)), StallReport::default());
        for _ in 0..3 {
            account.step(ms(5));
            assert_eq!(account.report(ms(5)), StallReport::default());
        }
    }

    #[test]
    fn a_learner_that_never_waits_and_never_ends_a_step_has_none() {
        let account = StallAccount::new(ms(0));
        assert_eq!(account.report(ms(100_000)), StallReport::default());
    }

    #[test]
    fn a_wait_that_goes_on_shows_before_it_ends() {
        let mut account = StallAccount::new(ms(0));
        for step in 1..=5 {
            account.step(ms(100 * step));
        }
        account.begin(ms(500));
        let at = account.report(ms(590));
        assert_eq!((at.stall, at.share), (ms(90), 0.0), "the step is not longer than usual yet");
        let at = account.report(ms(10_500));
        assert_eq!(at.stall, ms(10_000));
        assert!(at.share > 0.9, "{}", at.share);
    }

    #[test]
    fn an_end_without_a_beginning_is_harmless() {
        let mut account = StallAccount::new(ms(0));
        account.end(ms(10));
        account.begin(ms(10));
        account.end(ms(15));
        assert_eq!(account.report(ms(20)).stall, ms(5));
    }

    proptest! {
        /// Whatever happens in whatever order, and wherever the clock jumps.
        #[test]
        fn no_stall_is_longer_than_its_time(
            events in prop::collection::vec((0..4u8, 0..1000u64), 0..60)
        ) {
            let mut account = StallAccount::new(ms(500));
            let mut before = Duration::ZERO;
            let mut latest = ms(500);
            for (event, at) in events {
                let now = ms(at);
                latest = latest.max(now);
                match event {
                    0 => account.begin(now),
                    1 => account.end(now),
                    2 => {
                        let step = account.step(now);
                        prop_assert!(step.stall <= step.took);
                    }
                    _ => {}
                }
                let StallReport { stall, share, share_since_join } = account.report(now);
                prop_assert!(account.total >= before && stall <= latest - ms(500));
                prop_assert!((0.0..=1.0).contains(&share) && (0.0..=1.0).contains(&share_since_join));
                before = account.total;
            }
        }
    }
}
