//! Where the time of a model's learners goes, all of them together: histograms, and the rates of its payload and steps.

use std::time::Instant;

use libmodelio::client::Job;
use libmodelio::observe::histogram::Histogram;
use libmodelio::observe::rate::{Rate, StepRates};
use libmodelio::vocabulary::members::MemberView;
use parking_lot::Mutex;

/// The times of one model's learners in this process.
pub struct ModelTimes {
    /// The stall of each step.
    pub stall: Histogram,
    /// For each step, the time inside of write(2), all threads together, without waits for others.
    pub staging: Histogram,
    /// For each step, the time that opens of weights waited.
    pub open: Histogram,
    /// How many versions each opened one was behind.
    pub staleness: Histogram,
    started: Instant,
    rates: Mutex<Rates>,
}

#[derive(Default)]
struct Rates {
    push: Rate,
    pull: Rate,
    steps: StepRates,
}

impl Default for ModelTimes {
    fn default() -> ModelTimes {
        ModelTimes {
            stall: Histogram::of_seconds(),
            staging: Histogram::of_seconds(),
            open: Histogram::of_seconds(),
            staleness: Histogram::of_versions(),
            started: Instant::now(),
            rates: Mutex::default(),
        }
    }
}

impl ModelTimes {
    /// Notes how far the learners are, and how much the job has pushed and pulled. To be called every second, or more
    /// often.
    pub fn sample(&self, job: &Job) {
        let (now, mut rates) = (self.started.elapsed(), self.rates.lock());
        rates.steps.sample(now, || job.state().learners.into_iter().map(|one| (one.learner, one.step)));
        let Some(payload) = job.payload() else { return };
        rates.push.sample(now, payload.pushed_bytes);
        rates.pull.sample(now, payload.pulled_bytes);
    }

    /// The steps a second of a learner of the job, also of another mount's, over the last seconds.
    pub fn steps_per_second(&self, member: &MemberView) -> Option<f64> {
        let (now, rates) = (self.started.elapsed(), self.rates.lock());
        rates.steps.per_second(now, member.learner, member.step)
    }

    /// Bytes a second that the job has pushed and pulled over the last seconds. None if its shard is in this process.
    pub fn rates(&self, job: &Job) -> Option<(f64, f64)> {
        let payload = job.payload()?;
        let (now, rates) = (self.started.elapsed(), self.rates.lock());
        Some((
            rates.push.per_second(now, payload.pushed_bytes),
            rates.pull.per_second(now, payload.pulled_bytes),
        ))
    }
}
