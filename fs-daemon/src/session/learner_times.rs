//! Where the time of one learner goes: what its program waits for, and how old the weights are that it opens.
//!
//! A step begins when the one before it is committed. The first one begins when the learner joins.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libmodelio::observe::staleness::Staleness;
use libmodelio::observe::stall::{StallAccount, StallReport};
use parking_lot::Mutex;

use super::error::Done;
use super::model_times::ModelTimes;

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
    started: Instant,
    accounts: Mutex<Accounts>,
    /// Nanoseconds inside of write(2) since the last step ended, those of waits included.
    writing: AtomicU64,
    model: Arc<ModelTimes>,
}

struct Accounts {
    /// All waits.
    stall: StallAccount,
    /// Waits of opens.
    open: StallAccount,
    /// Waits of writes.
    write: StallAccount,
    /// The number of contributions that had ended when the last step was counted.
    ended: u64,
    staleness: Option<Staleness>,
}

impl LearnerTimes {
    /// For a learner that joins now.
    pub fn new(model: Arc<ModelTimes>) -> LearnerTimes {
        let account = StallAccount::new(Duration::ZERO);
        LearnerTimes {
            started: Instant::now(),
            accounts: Mutex::new(Accounts {
                stall: account,
                open: account,
                write: account,
                ended: 0,
                staleness: None,
            }),
            writing: AtomicU64::new(0),
            model,
        }
    }

    /// A call begins to wait. [`Self::ends`] must follow.
    pub fn begins(&self, call: Waits) {
        let (mut accounts, now) = (self.accounts.lock(), self.started.elapsed());
        accounts.each(call, |account| account.begin(now));
    }

    /// The call no longer waits.
    pub fn ends(&self, call: Waits) {
        let (mut accounts, now) = (self.accounts.lock(), self.started.elapsed());
        accounts.each(call, |account| account.end(now));
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
        let (stall, open) = (accounts.stall.step(now), accounts.open.step(now));
        let waited = accounts.write.step(now);
        drop(accounts);
        let writing = Duration::from_nanos(self.writing.swap(0, Ordering::Relaxed));
        self.model.stall.took(stall.stall);
        self.model.open.took(open.stall);
        self.model.staging.took(writing.saturating_sub(waited.stall));
    }

    /// A write has taken this long.
    pub fn wrote(&self, took: Duration) {
        self.writing.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    /// The learner has opened weights that are so old.
    pub fn opened(&self, staleness: Staleness) {
        self.accounts.lock().staleness = Some(staleness);
    }

    /// What the program has waited for so far.
    pub fn stall(&self) -> StallReport {
        let (accounts, now) = (self.accounts.lock(), self.started.elapsed());
        accounts.stall.report(now)
    }

    /// How old the weights were that it has opened last. None before that.
    pub fn staleness(&self) -> Option<Staleness> {
        self.accounts.lock().staleness
    }
}

impl Accounts {
    fn each(&mut self, call: Waits, change: impl Fn(&mut StallAccount)) {
        change(&mut self.stall);
        match call {
            Waits::Open => change(&mut self.open),
            Waits::Write => change(&mut self.write),
            Waits::Commit => {}
        }
    }
}
