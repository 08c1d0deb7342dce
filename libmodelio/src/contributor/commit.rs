//! How a contribution ends: committed, shipped from the mapping, or dropped.
//!
//! While a message about it is on its way the state is `committing`, and not locked: whoever the answer
//! wakes may use this contributor.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{ContributeError, Contributor, Share};
use crate::transport::{CommitNotice, ShardError};
use crate::vocabulary::ids::Step;
use crate::vocabulary::partly::MAX_PIECES;

/// For what ends by itself at once unless the machine is stuck.
const STUCK: Duration = Duration::from_secs(10);

/// What becomes of a contribution whose commit fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnError {
    StaysOpen,
    Aborts,
}

impl Contributor {
    /// Ends the contribution. `done` gets Ok once every block is taken for good; without anything
    /// written it gets Ok at once.
    ///
    /// After a timeout, or [`Self::withdraw`], the contribution is still open: commit again, or
    /// [`Self::abort`]. A commit that the shard had taken in spite of the timeout counts; committing again says
    /// so. After any other error only [`Self::abort`] helps.
    ///
    /// `share` says what the caller wrote into. If others have ended that, it gets its outcome; if they are
    /// about to, it waits with them.
    pub fn commit(
        self: &Arc<Self>,
        share: Share,
        timeout: Duration,
        done: impl FnOnce(Result<(), ContributeError>) + Send + 'static,
    ) {
        let sealed = loop {
            if let Share::Of(number) = share {
                let mut state = self.state.lock();
                let deadline = Instant::now() + STUCK;
                while state.aborting && !self.idle.wait_until(&mut state, deadline).timed_out() {}
                if state.has_dropped(share) {
                    drop(state);
                    return done(Err(ContributeError::Dropped));
                }
                if number < state.number {
                    drop(state);
                    return done(Ok(()));
                }
                if state.committing && !state.aborting {
                    return state.joined.push(Box::new(done));
                }
            }
            match self.seal(timeout) {
                // Somebody else was faster: it is the same contribution that ends.
                Err(ContributeError::Busy) if share != Share::None && !self.state.lock().aborting => {}
                sealed => break sealed,
            }
        };
        match sealed {
            Ok(Some((step, notice))) => self.send_commit(step, notice, timeout, OnError::StaysOpen, done),
            Ok(None) => done(Ok(())),
            Err(error) => done(Err(error)),
        }
    }

    /// Waits for writes in flight and completes blocks that were written in part. On success the state is
    /// `committing`.
    fn seal(&self, timeout: Duration) -> Result<Option<(Step, CommitNotice)>, ContributeError> {
        let (step, gaps, staging) = {
            let mut state = self.state.lock();
            if state.committing {
                return Err(ContributeError::Busy);
            }
            let deadline = Instant::now() + timeout;
            while state.tracker.is_busy() {
                if self.idle.wait_until(&mut state, deadline).timed_out() && state.tracker.is_busy() {
                    return Err(ShardError::TimedOut("writes are still in flight".into()).into());
                }
            }
            // Somebody else's commit or abort may have come first.
            if state.committing {
                return Err(ContributeError::Busy);
            }
            if let Some(failed) = state.failed.clone() {
                return Err(failed);
            }
            let Some(step) = state.step else { return Ok(None) };
            state.committing = true;
            (step, state.tracker.seal(), state.staging.clone())
        };
        let missing = || gaps.iter().flat_map(|gaps| &gaps.missing);
        let mut cuts = missing().flat_map(|range| [range.start, range.end]);
        if let Some(half) = cuts.find(|&cut| self.layout.splits_element(cut)) {
            return Err(self.unseal(ContributeError::HalfElement(half)));
        }
        for missing in missing() {
            let range = missing.start as usize..missing.end as usize;
            // SAFETY: this is `committing`, and nothing is in flight: no write is in these bytes.
            unsafe { staging.memory().bytes_mut(range) }.fill(0);
        }
        let mut state = self.state.lock();
        for gaps in gaps {
            state.unchecked.insert(gaps.block.index());
            state.partly.insert(gaps.block, gaps.written);
        }
        state.ship(step, staging.key());
        let notice = CommitNotice {
            sent: state.tracker.sent_blocks().clone(),
            deferred: state.tracker.deferred_blocks().clone(),
            unchecked: state.unchecked.clone(),
            tensors: state.tensors.clone(),
            partly: Some(&state.partly).filter(|partly| partly.pieces() <= MAX_PIECES).cloned(),
            staging,
            lendable: true,
        };
        Ok(Some((step, notice)))
    }

    /// The contribution cannot be committed after all; those who wait with the caller hear why.
    fn unseal(&self, error: ContributeError) -> ContributeError {
        let joined = {
            let mut state = self.state.lock();
            state.committing = false;
            std::mem::take(&mut state.joined)
        };
        joined.into_iter().for_each(|done| done(Err(error.clone())));
        error
    }

    /// Ships the whole mapped region as one contribution: what a program stored through mmap. `done`
    /// gets the outcome as for [`Self::commit`], but a failed one leaves nothing open.
    pub fn commit_mapped(
        self: &Arc<Self>,
        timeout: Duration,
        done: impl FnOnce(Result<(), ContributeError>) + Send + 'static,
    ) {
        let mut state = self.state.lock();
        if state.committing || state.step.is_some() {
            drop(state);
            return done(Err(ContributeError::Busy));
        }
        let step = match self.open(&mut state, timeout) {
            Ok(step) => step,
            Err(error) => {
                drop(state);
                return done(Err(error.into()));
            }
        };
        state.committing = true;
        state.ship(step, self.mapped.key());
        drop(state);
        self.traffic.written.fetch_add(self.layout.size(), Ordering::Relaxed);
        self.traffic.reduced_on_arrival.fetch_add(self.layout.size(), Ordering::Relaxed);
        let notice = CommitNotice::whole(&self.layout, self.mapped.clone(), false);
        // On an error the program still has the values in its mapping; nothing must linger for its next one.
        self.send_commit(step, notice, timeout, OnError::Aborts, done);
    }

    fn send_commit(
        self: &Arc<Self>,
        step: Step,
        notice: CommitNotice,
        timeout: Duration,
        on_error: OnError,
        done: impl FnOnce(Result<(), ContributeError>) + Send + 'static,
    ) {
        let this = Arc::clone(self);
        let completion = move |result: Result<(), ShardError>| {
            if result.is_err() && on_error == OnError::Aborts {
                this.send_abort();
            }
            let mut state = this.state.lock();
            if result.is_ok() || on_error == OnError::Aborts {
                state.reset(result.is_ok());
            }
            state.committing = false;
            let joined = std::mem::take(&mut state.joined);
            this.idle.notify_all();
            drop(state);
            let outcome = result.map_err(ContributeError::from);
            joined.into_iter().for_each(|done| done(outcome.clone()));
            done(outcome);
        };
        self.job.commit(self.learner, step, notice, timeout, Box::new(completion));
    }

    /// Ends the wait for a commit that is on its way, unless it is taken: it then fails with
    /// [`ShardError::Interrupted`], and the contribution is still open as after a timeout.
    pub fn withdraw(&self) {
        // A learner that is gone has nothing under way.
        let _ = self.job.withdraw(self.learner);
    }

    /// Drops the open contribution, if there is one; the shard forgets what it took of it. Returns whether there was
    /// one. While a commit is on its way this does nothing.
    pub fn abort(&self) -> bool {
        let mut state = self.state.lock();
        // A copy that still runs ends within microseconds; the deadline is for a stuck machine.
        let deadline = Instant::now() + STUCK;
        while state.tracker.is_busy() && !state.committing {
            if self.idle.wait_until(&mut state, deadline).timed_out() && state.tracker.is_busy() {
                // Its bytes may still come: the region cannot be used again before.
                let what = "a write of the dropped contribution is stuck";
                state.failed = Some(ShardError::TimedOut(what.into()).into());
                tracing::error!(learner = %self.learner, what);
                return true;
            }
        }
        if state.committing {
            return false;
        }
        let was_open = state.step.is_some();
        if state.step.is_some() {
            (state.committing, state.aborting) = (true, true);
            drop(state);
            self.send_abort();
            state = self.state.lock();
            (state.committing, state.aborting) = (false, false);
        }
        state.reset(false);
        self.idle.notify_all();
        was_open
    }

    /// Without the lock, but `committing`, so that no new contribution opens before the old one is gone.
    fn send_abort(&self) {
        if let Err(error) = self.job.abort(self.learner) {
            // A learner that is gone has nothing open either.
            tracing::debug!(learner = %self.learner, %error, "dropping a contribution");
        }
    }
}
