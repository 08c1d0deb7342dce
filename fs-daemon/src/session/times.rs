//! Where the time of one learner goes: what its program waits for, and how old the weights are that it opens.
//!
//! A step begins when the one before it is committed. The first one begins when the learner joins.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libmodelio::client::Job;
use libmodelio::observe::histogram::Histogram;
use libmodelio::observe::rate::{Rate, StepRates};
use libmodelio::observe::staleness::Staleness;
use libmodelio::observe::stall::{StallAccount, StallReport, StepStall};
use libmodelio::observe::trace::{Call, Recorder, What};
use libmodelio::vocabulary::ids::LearnerId;
use libmodelio::vocabulary::members::MemberView;
use parking_lot::Mutex;

use super::error::Done;

/// The call that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// open(2) of a version that it must show, and that is not here yet.
    Open,
    /// fsync(2) or close(2) of a contribution, until it is answered.
    Commit,
    /// write(2), until the coordinator says which step it is.
    Write,
}

/// The times of one learner.
pub struct LearnerTimes {
    learner: LearnerId,
    started: Instant,
    accounts: Mutex<Accounts>,
    /// Nanoseconds inside of write(2) since the last step ended, those of waits included.
    writing: AtomicU64,
    model: Arc<ModelTimes>,
    trace: Arc<Recorder>,
}

struct Accounts {
    /// All waits.
    stall: Waiting,
    open: Waiting,
    commit: Waiting,
    write: Waiting,
    /// The number of contributions that had ended when the last step was counted.
    ended: u64,
    staleness: Option<Staleness>,
}

/// Calls of one kind that wait.
struct Waiting {
    account: StallAccount,
    calls: u32,
    /// Since when at least one of them waits.
    since: Instant,
}

impl Waiting {
    fn new(now: Instant) -> Waiting {
        Waiting { account: StallAccount::new(Duration::ZERO), calls: 0, since: now }
    }

    fn begin(&mut self, now: Instant, passed: Duration) {
        if self.calls == 0 {
            self.since = now;
        }
        self.calls += 1;
        self.account.begin(passed);
    }

    /// Returns since when calls have waited, if none does any more.
    fn end(&mut self, passed: Duration) -> Option<Instant> {
        self.account.end(passed);
        self.calls = self.calls.saturating_sub(1);
        (self.calls == 0).then_some(self.since)
    }
}

impl Accounts {
    fn of(&mut self, call: Waits) -> &mut Waiting {
        match call {
            Waits::Open => &mut self.open,
            Waits::Commit => &mut self.commit,
            Waits::Write => &mut self.write,
        }
    }
}

impl LearnerTimes {
    /// For a learner that joins now.
    pub fn new(learner: LearnerId, model: Arc<ModelTimes>, trace: Arc<Recorder>) -> LearnerTimes {
        let now = Instant::now();
        LearnerTimes {
            learner,
            started: now,
            accounts: Mutex::new(Accounts {
                stall: Waiting::new(now),
                open: Waiting::new(now),
                commit: Waiting::new(now),
                write: Waiting::new(now),
                ended: 0,
                staleness: None,
            }),
            writing: AtomicU64::new(0),
            model,
            trace,
        }
    }

    /// A call begins to wait. [`Self::ends`] must follow.
    pub fn begins(&self, call: Waits) {
        let (mut accounts, now) = (self.accounts.lock(), Instant::now());
        let passed = now.saturating_duration_since(self.started);
        accounts.stall.begin(now, passed);
        accounts.of(call).begin(now, passed);
    }

    /// The call no longer waits.
    pub fn ends(&self, call: Waits) {
        let (mut accounts, now) = (self.accounts.lock(), Instant::now());
        let passed = now.saturating_duration_since(self.started);
        let (stall, calls) = (accounts.stall.end(passed), accounts.of(call).end(passed));
        drop(accounts);
        if let Some(since) = calls {
            self.record(call, since, now);
        }
        if let Some(since) = stall {
            self.trace.record(What::Call(self.learner, Call::Stall), since, now);
        }
    }

    fn record(&self, call: Waits, since: Instant, now: Instant) {
        let call = match call {
            Waits::Open => Call::Open,
            Waits::Commit => Call::Commit,
            // The write around it is recorded.
            Waits::Write => return,
        };
        self.trace.record(What::Call(self.learner, call), since, now);
    }

    /// A trace is about to end. Waits that go on are recorded as far as they have come.
    pub fn trace_rest(&self) {
        let (mut accounts, now) = (self.accounts.lock(), Instant::now());
        for call in [Waits::Open, Waits::Commit] {
            let Waiting { calls, since, .. } = *accounts.of(call);
            if calls > 0 {
                self.record(call, since, now);
            }
        }
        if accounts.stall.calls > 0 {
            self.trace.record(What::Call(self.learner, Call::Stall), accounts.stall.since, now);
        }
    }

    /// Wraps `done`: the call waits until that is called.
    pub fn until<T: Send + 'static>(self: &Arc<Self>, call: Waits, done: Done<T>) -> Done<T> {
        self.begins(call);
        let this = Arc::clone(self);
        Box::new(move |outcome| {
            this.ends(call);
            done(outcome);
        })
    }

    /// A contribution is committed, the one of this number. Several programs may report the same one.
    pub fn committed(&self, ended: u64) {
        let (mut accounts, now) = (self.accounts.lock(), self.started.elapsed());
        if accounts.ended == ended {
            return;
        }
        accounts.ended = ended;
        let mut step = |call| -> StepStall { accounts.of(call).account.step(now) };
        let (open, write) = (step(Waits::Open), step(Waits::Write));
        let stall = accounts.stall.account.step(now);
        drop(accounts);
        let writing = Duration::from_nanos(self.writing.swap(0, Ordering::Relaxed));
        self.model.stall.took(stall.stall);
        self.model.open.took(open.stall);
        self.model.staging.took(writing.saturating_sub(write.stall));
    }

    /// A write that began then is over.
    pub fn wrote(&self, began: Instant) {
        let now = Instant::now();
        let took = now.saturating_duration_since(began);
        self.writing.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
        self.trace.record(What::Call(self.learner, Call::Write), began, now);
    }

    /// The learner has opened weights that are so old.
    pub fn opened(&self, staleness: Staleness) {
        self.accounts.lock().staleness = Some(staleness);
    }

    /// The waits of the program so far.
    pub fn stall(&self) -> StallReport {
        let (accounts, now) = (self.accounts.lock(), self.started.elapsed());
        accounts.stall.account.report(now)
    }

    /// How old the weights were that it has opened last. None before that.
    pub fn staleness(&self) -> Option<Staleness> {
        self.accounts.lock().staleness
    }
}

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

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn times() -> (Arc<LearnerTimes>, Arc<ModelTimes>, Arc<Recorder>) {
        let (model, trace) = (Arc::<ModelTimes>::default(), Arc::<Recorder>::default());
        let times = LearnerTimes::new(LearnerId(1), Arc::clone(&model), Arc::clone(&trace));
        (Arc::new(times), model, trace)
    }

    #[test]
    fn a_commit_that_several_programs_report_ends_one_step() {
        let (times, model, _) = times();
        let (first, second): (Done<()>, Done<()>) = (Box::new(drop), Box::new(drop));
        let first = times.until(Waits::Commit, first);
        let second = times.until(Waits::Commit, second);
        sleep(5 * MS);
        first(Ok(()));
        times.committed(1);
        second(Ok(()));
        times.committed(1);
        assert_eq!((model.stall.read().count, model.open.read().count), (1, 1));
        assert!(model.stall.read().sum >= 0.005 && model.open.read().sum == 0.0);
        times.committed(3);
        assert_eq!(model.stall.read().count, 2);
    }

    #[test]
    fn the_wait_of_a_write_is_stall_and_not_staging() {
        let (times, model, _) = times();
        let began = Instant::now();
        times.begins(Waits::Write);
        sleep(50 * MS);
        times.ends(Waits::Write);
        times.wrote(began);
        times.committed(1);
        assert!(model.stall.read().sum >= 0.05);
        assert!(model.staging.read().sum < 0.05, "{:?}", model.staging.read());
    }

    #[test]
    fn a_trace_has_each_kind_of_call_once_and_what_still_waits() {
        let (times, _, trace) = times();
        trace.begin(Instant::now(), 100);
        times.begins(Waits::Open);
        times.begins(Waits::Open);
        times.ends(Waits::Open);
        times.ends(Waits::Open);
        times.begins(Waits::Commit);
        times.trace_rest();
        let calls: Vec<_> = trace.end().unwrap().events.iter().map(|event| event.what).collect();
        let call = |call| What::Call(LearnerId(1), call);
        assert_eq!(calls, [Call::Open, Call::Stall, Call::Commit, Call::Stall].map(call));
        times.ends(Waits::Commit);
        assert!(times.stall().stall > Duration::ZERO);
    }
}
