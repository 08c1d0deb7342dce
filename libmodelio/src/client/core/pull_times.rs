//! When to pull the next version, so that the pull ends just before a program opens it (iRDMA, section IV-B).
//!
//! A pull that begins as soon as a version is out ends long before the program opens it, and newer versions come out
//! meanwhile. This module learns how much time passes between two opens, and how long a pull takes. It predicts the
//! next open from these moving averages, and says when to begin. The time from the end of a pull to the open is the
//! *bubble*.
//!
//! A prediction may be wrong, and programs that nobody predicts read, too. So a newer version is put off for a bounded
//! time.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Now;
use crate::vocabulary::controls::PullPolicy;
use crate::vocabulary::ids::LearnerId;

/// A learner that opens versions, or all programs that read without being one.
pub(super) type Opener = Option<LearnerId>;

/// The weight of a new value in a moving average.
const GAIN: f64 = 0.25;
/// A value that is so many times the average counts as this many times, because programs pause now and then.
const OUTLIER: f64 = 4.0;
/// The next open is not expected earlier than this many mean deviations before the average.
const EARLY: f64 = 2.0;
/// An open is late after this many mean deviations, and this share of the average.
const LATE: f64 = 4.0;
const LATE_SHARE: f64 = 0.25;
/// An opener that is later than this many averages is forgotten.
const GONE: f64 = 4.0;
/// An opener whose second open does not come by then is forgotten.
const GONE_FIRST: Duration = Duration::from_secs(60);
/// A newer version is put off for so long, or for as long as a pull takes if that is longer. Where the predicted open
/// comes less than a pull later, the pull begins for that.
pub(super) const PUT_OFF: Duration = Duration::from_secs(1);
/// Where a pull takes less, each version is pulled at once. So it is where a shard's memory is shown.
const NOTHING: f64 = 0.001;

/// A moving average of durations, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Average {
    mean: f64,
    /// The mean distance of a value from the average.
    deviation: f64,
}

impl Average {
    fn first(value: f64) -> Average {
        Average { mean: value, deviation: value / 4.0 }
    }

    /// The average with one more value.
    fn add(average: &mut Option<Average>, value: Duration) {
        let value = value.as_secs_f64();
        let Some(Average { mean, deviation }) = average else {
            *average = Some(Average::first(value));
            return;
        };
        let value = value.min(*mean * OUTLIER + NOTHING);
        *deviation += GAIN * ((value - *mean).abs() - *deviation);
        *mean += GAIN * (value - *mean);
    }
}

/// The opens of one opener.
#[derive(Debug)]
struct Opens {
    last: Now,
    /// The opener's progress at that open; see [`PullTimes::opened`].
    mark: u64,
    interval: Option<Average>,
}

impl Opens {
    /// When the opener is gone.
    fn gone_at(&self) -> Now {
        self.last
            + self.interval.map_or(GONE_FIRST, |of| seconds(of.mean * GONE + of.deviation * LATE + NOTHING))
    }
}

/// The rhythm of opens and pulls.
#[derive(Debug, Default)]
pub(super) struct PullTimes {
    /// When to pull, if the job's settings do not say that.
    policy: Option<PullPolicy>,
    openers: BTreeMap<Opener, Opens>,
    took: Option<Average>,
    /// When the newest pull began.
    began: Option<Now>,
    /// The version did not exist when that pull began, so the pull also waits for the version.
    waits_for_version: bool,
    /// When the newest pull ended, until a program opens what it brought.
    ended: Option<Now>,
    /// Since when a version that is newer than the one that is shown could have been pulled.
    behind: Option<Now>,
    bubble: Option<Average>,
    pulls: u64,
}

/// The averages, for people and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PullReport {
    /// The number of pulls that are over.
    pub pulls: u64,
    /// How long one takes.
    pub pull: Option<Duration>,
    /// The time between two opens of the learner that opens most often.
    pub interval: Option<Duration>,
    /// The time from the end of a pull to the next open.
    pub bubble: Option<Duration>,
}

impl PullTimes {
    /// Pulls by this policy, whatever the job's settings say.
    pub(super) fn set_policy(&mut self, policy: PullPolicy) {
        self.policy = Some(policy);
    }

    /// The policy that stands before the job's.
    pub(super) fn policy(&self) -> Option<PullPolicy> {
        self.policy
    }

    /// A program opens the version that is shown. `mark` says how far it is, its step for example: while it is the
    /// same, further opens belong to the first one.
    pub(super) fn opened(&mut self, opener: Opener, mark: u64, now: Now) {
        if let Some(ended) = self.ended.take() {
            Average::add(&mut self.bubble, now.saturating_sub(ended));
        }
        let first = Opens { last: now, mark, interval: None };
        let opens = self.openers.entry(opener).or_insert(first);
        if opens.mark == mark {
            return;
        }
        if now < opens.gone_at() {
            Average::add(&mut opens.interval, now.saturating_sub(opens.last));
        } else {
            opens.interval = None;
        }
        (opens.last, opens.mark) = (now, mark);
    }

    /// A learner has left, or its program has ended. Its last version may be the last one, so nothing is predicted
    /// before others have opened again.
    pub(super) fn begin_anew(&mut self) {
        self.openers.clear();
    }

    /// Whether versions are pulled in time for the opens of this opener.
    pub(super) fn serves(&self, opener: Opener) -> bool {
        let interval = self.openers.get(&opener).and_then(|opens| opens.interval);
        interval.is_some_and(|interval| seconds(interval.mean) <= PUT_OFF)
    }

    /// A newer version than the one that is shown can be pulled.
    pub(super) fn is_behind(&mut self, now: Now) {
        self.behind = Some(self.behind.filter(|since| *since <= now).unwrap_or(now));
    }

    /// A newer version is shown.
    pub(super) fn caught_up(&mut self) {
        self.behind = None;
    }

    /// A pull begins.
    pub(super) fn began(&mut self, now: Now) {
        (self.began, self.waits_for_version) = (Some(now), false);
    }

    /// A pull begins whose version is still being made.
    pub(super) fn began_ahead(&mut self, now: Now) {
        (self.began, self.waits_for_version) = (Some(now), true);
    }

    /// The pull that has begun is over: its version can be opened.
    pub(super) fn ended(&mut self, now: Now) {
        let Some(began) = self.began else { return };
        if !self.waits_for_version {
            Average::add(&mut self.took, now.saturating_sub(began));
        }
        self.ended = Some(now);
        self.pulls += 1;
    }

    /// Forgets openers that have not opened anything for long, and those that opened later than now: the clock has
    /// jumped.
    pub(super) fn forget_gone(&mut self, now: Now) {
        self.openers.retain(|_, opens| opens.last <= now && now < opens.gone_at());
    }

    /// When to begin to pull a newer version than the one that is shown. A time that is over means: at once.
    pub(super) fn due(&self) -> Now {
        let took = self.took.map_or(0.0, |took| took.mean);
        // A pull may take longer than usual, too.
        let lead = took + self.took.map_or(0.0, |took| took.deviation);
        let known = self.openers.values().filter_map(|opens| Some((opens.last, opens.interval?)));
        let of_opener = |(last, Average { mean, deviation }): (Now, Average)| {
            let start = last + seconds(mean - EARLY * deviation - lead);
            // The pull for this open may have taken half as long as the one before, which shortens the average.
            let is_served = self.began.is_some_and(|began| began >= last && began + seconds(lead) >= start);
            if is_served { last + seconds(mean * (1.0 + LATE_SHARE) + LATE * deviation) } else { start }
        };
        let predicted = match took >= NOTHING {
            true => known.map(of_opener).min().unwrap_or(Now::ZERO),
            false => Now::ZERO,
        };
        let latest = self.behind.map(|since| since + PUT_OFF.max(seconds(took)));
        latest.filter(|latest| predicted > *latest + seconds(lead)).unwrap_or(predicted)
    }

    /// The averages.
    pub(super) fn report(&self) -> PullReport {
        let mean = |of: Option<Average>| of.map(|of| seconds(of.mean));
        let intervals = self.openers.values().filter_map(|opens| mean(opens.interval));
        PullReport {
            pulls: self.pulls,
            pull: mean(self.took),
            interval: intervals.min(),
            bubble: mean(self.bubble),
        }
    }
}

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value.max(0.0)).unwrap_or(Duration::MAX / 4)
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;
    use proptest::prelude::*;

    use super::*;

    const LEARNER: Opener = Some(LearnerId(1));
    const SECOND: Now = Now::from_secs(1);

    /// A learner that opens once a second, and pulls that take a tenth of that.
    fn known() -> (PullTimes, Now) {
        let (mut times, mut now) = (PullTimes::default(), SECOND);
        for step in 0..50 {
            times.opened(LEARNER, step, now);
            times.began(now);
            times.ended(now + SECOND / 10);
            now += SECOND;
        }
        (times, now - SECOND)
    }

    #[test]
    fn a_pull_begins_so_that_it_ends_just_before_the_next_open() {
        let (times, last) = known();
        let due = times.due();
        assert!(
            due > last + SECOND * 8 / 10 && due <= last + SECOND * 9 / 10,
            "{:?} after the last open",
            due - last
        );
        let report = times.report();
        assert_eq!(report.pulls, 50);
        assert!(report.interval.unwrap().abs_diff(SECOND) < SECOND / 1000);
        assert!(report.pull.unwrap().abs_diff(SECOND / 10) < SECOND / 1000);
        assert!(report.bubble.unwrap().abs_diff(SECOND * 9 / 10) < SECOND / 1000);
    }

    #[test]
    fn a_version_is_pulled_once_for_an_open_and_again_when_that_is_late() {
        let (mut times, last) = known();
        let begins = times.due();
        times.began(begins);
        times.ended(begins + SECOND / 10);
        let again = times.due();
        assert!(
            again > last + SECOND && again < last + SECOND * 3 / 2,
            "{:?} after the last open",
            again - last
        );
    }

    #[test]
    fn versions_are_pulled_at_once_when_nothing_is_known_of_opens() {
        let mut times = PullTimes::default();
        assert_eq!(times.due(), Now::ZERO);
        times.began(SECOND);
        times.ended(2 * SECOND);
        times.opened(LEARNER, 1, 3 * SECOND);
        assert_eq!(times.due(), Now::ZERO, "one open tells nothing");
    }

    #[test]
    fn an_opener_that_opens_no_more_is_forgotten() {
        let (mut times, last) = known();
        times.forget_gone(last + 10 * SECOND);
        assert_eq!(times.due(), Now::ZERO);
    }

    #[test]
    fn when_a_learner_leaves_each_version_is_pulled_at_once_until_others_open_again() {
        let (mut times, last) = known();
        times.begin_anew();
        assert_eq!(times.due(), Now::ZERO);
        let last = goes_on(&mut times, last, 40);
        assert!(times.due() > last);
    }

    #[test]
    fn a_newer_version_is_put_off_for_a_second_or_for_as_long_as_a_pull_takes() {
        for (pull, put_off) in [(SECOND / 10, SECOND), (5 * SECOND, 5 * SECOND)] {
            let (mut times, mut now) = (PullTimes::default(), SECOND);
            for step in 0..50 {
                times.opened(LEARNER, step, now);
                times.began(now);
                times.ended(now + pull);
                now += 40 * SECOND;
            }
            let last = now - 40 * SECOND;
            assert!(times.due() > last + 30 * SECOND);
            times.is_behind(last + 10 * SECOND);
            times.is_behind(last + 10 * SECOND + put_off / 2);
            assert!(times.due().abs_diff(last + 10 * SECOND + put_off) < SECOND / 100, "{:?}", times.due());
            // The pull of a version that came out meanwhile is put off anew.
            times.caught_up();
            times.is_behind(last + 20 * SECOND);
            assert!(times.due().abs_diff(last + 20 * SECOND + put_off) < SECOND / 100);
            // A clock that jumps back delays it no longer.
            times.is_behind(last);
            assert!(times.due() <= last + put_off + SECOND / 100);
        }
    }

    #[test]
    fn a_pull_for_an_open_that_is_near_waits_for_it() {
        let (mut times, last) = known();
        let due = times.due();
        times.is_behind(due - SECOND - SECOND / 20);
        assert_eq!(times.due(), due, "and not a twentieth of a second less, for nobody");
        assert!(times.due() > last);
    }

    #[test]
    fn whoever_opens_less_than_once_a_second_is_not_served_in_time() {
        for (interval, is_served) in [(SECOND / 2, true), (8 * SECOND, false)] {
            let mut times = PullTimes::default();
            for step in 0..3 {
                assert_eq!(times.serves(None), step > 1 && is_served, "one interval is needed");
                times.opened(None, u64::from(step), SECOND + interval * step);
            }
            assert_eq!(times.serves(None), is_served);
            assert!(!times.serves(LEARNER));
        }
    }

    #[test]
    fn a_learner_that_opens_every_tensor_opens_once_a_step() {
        let (mut times, last) = known();
        let due = times.due();
        for file in 1..100 {
            times.opened(LEARNER, 49, last + file * SECOND / 1000);
        }
        assert_eq!(times.due(), due);
    }

    #[test]
    fn pulls_that_cost_nothing_begin_at_once() {
        let mut times = PullTimes::default();
        for step in 0..10 {
            let now = step * SECOND;
            times.opened(LEARNER, step.into(), now);
            times.began(now);
            times.ended(now + Duration::from_micros(100));
        }
        assert_eq!(times.due(), Now::ZERO);
    }

    #[test]
    fn a_pull_that_waits_for_its_version_says_nothing_about_the_time_of_a_pull() {
        let (mut times, last) = known();
        let (due, pull) = (times.due(), times.report().pull);
        times.began_ahead(due);
        times.ended(last + SECOND);
        assert_eq!(times.report().pull, pull);
        times.opened(LEARNER, 1000, last + SECOND);
        assert!(
            times.due().abs_diff(due + SECOND) < SECOND / 1000,
            "the next one begins as long before its open"
        );
    }

    #[test]
    fn a_pause_does_not_spoil_the_average() {
        let (mut times, last) = known();
        times.opened(LEARNER, 1000, last + 3 * SECOND);
        assert!(times.report().interval.unwrap() < 2 * SECOND);
        let (mut times, last) = known();
        times.opened(LEARNER, 1000, last + 3600 * SECOND);
        assert_eq!(times.due(), Now::ZERO, "that is a new beginning");
    }

    /// Goes on with the rhythm of [`known`] from `now`: a pull at `due`, and an open after a second.
    fn goes_on(times: &mut PullTimes, mut now: Now, steps: u64) -> Now {
        for step in 0..steps {
            times.opened(LEARNER, 2000 + step, now);
            let begins = times.due().clamp(now, now + SECOND);
            times.began(begins);
            times.ended(begins + SECOND / 10);
            now += SECOND;
        }
        now - SECOND
    }

    #[test]
    fn a_clock_that_jumps_delays_no_pull_and_the_rhythm_is_found_again() {
        for jump in [SECOND * 2, SECOND * 3600, SECOND * 24 * 3600] {
            for forward in [true, false] {
                let (mut times, last) = known();
                // As if the job had run for two days before.
                let base = 48 * 3600 * SECOND;
                for opens in times.openers.values_mut() {
                    opens.last += base;
                }
                let now = if forward { base + last + jump } else { base + last - jump };
                times.forget_gone(now);
                assert!(times.due() <= now + 2 * SECOND, "{jump:?}, forward: {forward}");
                let last = goes_on(&mut times, now, 40);
                let due = times.due();
                // The pull for the next open is over, so this is the one for an open that is late.
                assert!(
                    due > last + SECOND && due < last + 2 * SECOND,
                    "{jump:?}, forward: {forward}: {:?}",
                    due - last
                );
                let report = times.report();
                assert!(report.interval.unwrap().abs_diff(SECOND) < SECOND / 20, "{report:?}");
                assert!(report.pull.unwrap().abs_diff(SECOND / 10) < SECOND / 100, "{report:?}");
            }
        }
    }

    #[test]
    fn a_clock_that_jumps_amid_a_pull_makes_no_time_negative() {
        let (mut times, last) = known();
        times.began(last);
        times.ended(last - 10 * SECOND);
        times.opened(LEARNER, 1000, last - 20 * SECOND);
        times.began(last - 20 * SECOND);
        times.ended(last + 3600 * SECOND);
        let report = times.report();
        // One value that is out of the ordinary counts as four times the average at most.
        assert!(report.pull.unwrap() < SECOND / 4, "{report:?}");
        assert!(report.interval.unwrap() < SECOND && report.bubble.unwrap() < SECOND, "{report:?}");
    }

    #[test]
    fn a_learner_that_computes_in_no_time_has_each_version_pulled_at_once() {
        let (mut times, now) = (PullTimes::default(), SECOND);
        for step in 0..100 {
            times.opened(LEARNER, step, now);
            times.began(now);
            times.ended(now + SECOND / 10);
            assert!(times.due() <= now + SECOND / 10, "step {step}");
        }
        assert_eq!(times.report().interval, Some(Now::ZERO));
        times.forget_gone(now);
        assert!(times.due() <= now);
    }

    #[test]
    fn a_learner_that_never_opens_weights_delays_no_pull() {
        let mut times = PullTimes::default();
        for step in 0..100 {
            times.began(step * SECOND);
            times.ended(step * SECOND + SECOND / 10);
            assert_eq!(times.due(), Now::ZERO);
        }
    }

    #[test]
    fn a_learner_that_holds_a_version_for_hours_changes_no_rhythm_of_others() {
        let (mut times, mut now) = (PullTimes::default(), SECOND);
        let holder = Some(LearnerId(2));
        for step in 0..20 {
            times.opened(holder, step, now + SECOND / 2);
            times.opened(LEARNER, step, now);
            now += SECOND;
        }
        for step in 20..4 * 3600 {
            times.opened(LEARNER, step, now);
            times.began(now + SECOND / 2);
            times.ended(now + SECOND * 6 / 10);
            times.forget_gone(now + SECOND * 6 / 10);
            now += SECOND;
        }
        let last = now - SECOND;
        assert!(times.due() > last && times.due() < now, "{:?} after the last open", times.due() - last);
        // When it opens again, that is a new beginning: the hours are no step.
        times.opened(holder, 20, last + SECOND / 2);
        assert!(times.due() > last && times.due() < now);
        assert!(times.report().interval.unwrap().abs_diff(SECOND) < SECOND / 100);
    }

    /// The mean age of the version that a learner opens, in shares of its compute time, if a new version comes out 20
    /// times in that, and a pull takes a tenth of it. Compute times jitter by 20%, and drift from one second to two and
    /// back.
    fn staleness(seed: u64, is_adaptive: bool) -> f64 {
        const PULL: f64 = 0.1;
        let mut rng = Rng::with_seed(seed);
        let (mut times, mut now, mut ages, mut computes) = (PullTimes::default(), 0.0, 0.0, 0.0);
        let mut shown = 0.0;
        for step in 0..400_u32 {
            let drift = 1.5 - 0.5 * (f64::from(step) / 100.0 * std::f64::consts::TAU).cos();
            let compute = drift * (0.8 + 0.4 * rng.f64());
            times.opened(LEARNER, step.into(), seconds(now));
            let next = now + compute;
            let mut pulled_until = now;
            loop {
                let begins = if is_adaptive { times.due().as_secs_f64().max(pulled_until) } else { now };
                let ends = begins + PULL * drift;
                if ends > next || !is_adaptive && pulled_until > now {
                    break;
                }
                times.began(seconds(begins));
                times.ended(seconds(ends));
                times.caught_up();
                // The next version is out by then.
                times.is_behind(seconds(ends));
                (shown, pulled_until) = ((begins * 20.0 / drift).floor() * drift / 20.0, ends);
            }
            if step >= 20 {
                ages += next - shown;
                computes += compute;
            }
            now = next;
        }
        ages / computes
    }

    #[test]
    fn versions_are_at_most_half_as_old_as_with_a_pull_after_each_push() {
        for seed in 0..20 {
            let (adaptive, at_once) = (staleness(seed, true), staleness(seed, false));
            assert!(adaptive <= 0.5 * at_once, "seed {seed}: {adaptive:.2} of a step, {at_once:.2} at once");
        }
    }

    proptest! {
        #[test]
        fn a_pull_is_put_off_for_a_bounded_time(
            events in proptest::collection::vec((0_u8..5, 0_u64..5, 0_u64..10_000_000), 1..200),
        ) {
            let (mut times, mut now, mut longest) = (PullTimes::default(), Now::ZERO, Duration::ZERO);
            for (what, who, passes) in events {
                let passes = Duration::from_micros(passes * passes);
                now += passes;
                longest = longest.max(passes);
                let opener = (who > 0).then_some(LearnerId(who as u32));
                match what {
                    0 | 1 => times.opened(opener, now.as_micros() as u64, now),
                    2 => times.began(now),
                    3 => times.ended(now),
                    4 if who == 0 => times.began_ahead(now),
                    _ => times.forget_gone(now),
                }
                let whole = now + Duration::from_secs(1);
                prop_assert!(times.due() <= now + 10 * whole);
                times.forget_gone(Now::MAX);
                prop_assert_eq!(times.due(), Now::ZERO);
            }
        }
    }
}
