//! The end of a contribution: a commit from staging, a commit from the mapping, or an abort.
//!
//! While the message is under way, the state is `committing` and not locked, because the answer may wake callers of
//! this contributor.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fixedbitset::FixedBitSet;
use parking_lot::Mutex;

use super::models::Made;
use super::{ContributeError, Contributor, STUCK, Share};
use crate::bytes::region::Region;
use crate::client::CommitNotice;
use crate::tracker::Gaps;
use crate::vocabulary::groups::{AveragedMark, Contents};
use crate::vocabulary::ids::{BlockId, Step};
use crate::vocabulary::layout::Tensor;
use crate::vocabulary::reducer::Content;
use crate::vocabulary::shard_error::ShardError;
use crate::vocabulary::weight::Weight;

/// For so long the coordinator may answer an abort before that is logged.
const BESIDE: Duration = Duration::from_secs(30);

/// The longest model of whose mapping the thread that takes fsync makes a payload.
const SHORT: u64 = 4 << 20;

/// What a failed commit does to its contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnError {
    StaysOpen,
    Aborts,
}

impl Contributor {
    /// Ends the contribution. `done` gets Ok once every block is taken for good, or at once if nothing was written.
    ///
    /// After a timeout, or after [`Self::withdraw`], the contribution is still open: commit again, or
    /// [`Self::abort`]. If the shard had taken the commit in spite of the timeout, committing again reports that.
    /// After any other error only [`Self::abort`] helps.
    ///
    /// `share` names the contribution that the caller wrote into. If others have ended it, the caller gets its
    /// outcome. If they are ending it, the caller waits with them.
    pub fn commit(
        self: &Arc<Self>,
        share: Share,
        timeout: Duration,
        done: impl FnOnce(Result<(), ContributeError>) + Send + 'static,
    ) {
        let sealed = loop {
            if let Share::Of(number) = share {
                let mut state = self.settled();
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
                // Another program was faster. The same contribution ends.
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

    /// Waits for writes in flight, and fills partly written blocks up with zeros. On success the state is
    /// `committing`.
    fn seal(&self, timeout: Duration) -> Result<Option<(Step, CommitNotice)>, ContributeError> {
        let (step, gaps, sent, staging, made) = {
            let mut state = self.settled();
            if state.committing {
                return Err(ContributeError::Busy);
            }
            let deadline = Instant::now() + timeout;
            while state.coverage.tracker.is_busy() {
                if self.idle.wait_until(&mut state, deadline).timed_out() && state.coverage.tracker.is_busy()
                {
                    return Err(ShardError::TimedOut("writes are still in flight".into()).into());
                }
            }
            // Another program's commit or abort may have come first.
            if state.committing {
                return Err(ContributeError::Busy);
            }
            if let Some(failed) = self.failure(&state) {
                return Err(failed);
            }
            let Some(step) = state.step else { return Ok(None) };
            state.committing = true;
            let gaps = state.coverage.tracker.seal();
            let (sent, staging) =
                (state.coverage.tracker.sent_blocks().clone(), state.staging.region().clone());
            (step, gaps, sent, staging, state.models.made.clone())
        };
        let (averaged, contents) = self.contents();
        let missing = || gaps.iter().flat_map(|gaps| &gaps.missing);
        let mut cuts = missing().flat_map(|range| [range.start, range.end]);
        if let Some(half) = cuts.find(|&cut| self.layout.splits_element(cut)) {
            return Err(self.unseal(ContributeError::HalfElement(half)));
        }
        if let Some(tensor) = self.part_of_averaged(&averaged, &gaps, &sent) {
            return Err(self.unseal(ContributeError::PartOfAveraged(tensor)));
        }
        match &made {
            None => missing().for_each(|missing| {
                let range = missing.start as usize..missing.end as usize;
                // SAFETY: the state is `committing` and nothing is in flight, so no write is in these bytes.
                unsafe { staging.memory().bytes_mut(range) }.fill(0);
            }),
            Some(made) => {
                if let Err(error) = self.make_partly(&gaps, &staging, made) {
                    return Err(self.unseal(error));
                }
            }
        }
        let mut state = self.state.lock();
        state.coverage.fill(gaps);
        state.staging.ship(step, staging.key());
        state.models.commits(step);
        let notice = CommitNotice {
            sent: state.coverage.tracker.sent_blocks().clone(),
            deferred: state.coverage.tracker.deferred_blocks().clone(),
            unchecked: state.coverage.unchecked.clone(),
            tensors: state.coverage.tensors.clone(),
            partly: state.coverage.partly(),
            contents,
            weight: made.map_or(Weight::ONE, |made| made.weight()),
            staging,
            lendable: true,
        };
        Ok(Some((step, notice)))
    }

    /// The tensors of which the open contribution has values, and its contents as a commit names them.
    fn contents(&self) -> (Arc<[usize]>, Contents) {
        let state = self.state.lock();
        let content = state.models.made.as_ref().map_or(Content::Gradient, |made| made.content());
        let averaged = Arc::clone(&state.averaged);
        let mark = AveragedMark::of(averaged.iter().copied());
        (averaged, Contents { content, averaged: mark })
    }

    /// An averaged tensor of which a part was written. Zeros in the rest would be taken for values.
    fn part_of_averaged(&self, averaged: &[usize], gaps: &[Gaps], sent: &FixedBitSet) -> Option<String> {
        let mut averaged = averaged.iter().map(|&tensor| &self.layout.tensors()[tensor]);
        let is_part = |tensor: &&Tensor| {
            let missing = |block: BlockId| {
                let (bytes, of) = (self.layout.block_bytes(block), &tensor.bytes);
                let within =
                    |range: &Range<u64>| range.end.min(of.end).saturating_sub(range.start.max(of.start));
                let gaps = gaps.binary_search_by_key(&block, |gaps| gaps.block).ok().map(|at| &gaps[at]);
                match gaps {
                    _ if !sent.contains(block.index()) => within(&bytes),
                    Some(gaps) => gaps.missing.iter().map(within).sum(),
                    None => 0,
                }
            };
            let missing: u64 = self.layout.blocks_of(tensor.bytes.clone()).map(missing).sum();
            0 < missing && missing < tensor.bytes.end - tensor.bytes.start
        };
        averaged.find(is_part).map(|tensor| tensor.name.clone())
    }

    /// Makes the payload of blocks that were written in part, and completes the next replica.
    fn make_partly(&self, gaps: &[Gaps], staging: &Region, made: &Made) -> Result<(), ContributeError> {
        let failed = |error: ShardError| {
            let error = ContributeError::Shard(error);
            self.state.lock().failed.get_or_insert_with(|| error.clone());
            error
        };
        made.promise(staging).map_err(failed)?;
        for gaps in gaps {
            let bytes = self.layout.block_bytes(gaps.block);
            for missing in &gaps.missing {
                let range = missing.start as usize..missing.end as usize;
                // SAFETY: the state is `committing` and nothing is in flight, so no write is in these bytes.
                let gap = unsafe { made.written.memory().bytes_mut(range) };
                made.fill(missing.clone(), gap);
            }
            // SAFETY: as above.
            let model = unsafe { made.written.memory().bytes(bytes.start as usize..bytes.end as usize) };
            if !made.make(&self.layout, gaps.block, model, staging) {
                return Err(failed(ShardError::NonFinite(gaps.block)));
            }
            gaps.missing.iter().for_each(|missing| made.leave_out(missing.clone(), staging));
        }
        if made.next().is_some() {
            let sent = self.state.lock().coverage.tracker.sent_blocks().clone();
            sent.zeroes().for_each(|block| made.keep(self.layout.block_bytes(BlockId(block as u32))));
        }
        Ok(())
    }

    /// The commit cannot be sent after all. Everyone who waits for it gets the error.
    fn unseal(&self, error: ContributeError) -> ContributeError {
        let joined = {
            let mut state = self.state.lock();
            state.committing = false;
            std::mem::take(&mut state.joined)
        };
        joined.into_iter().for_each(|done| done(Err(error.clone())));
        error
    }

    /// Commits the whole mapped region as one contribution: the values that a program stored through mmap. `done`
    /// gets the outcome as in [`Self::commit`], but a failed commit leaves nothing open.
    pub fn commit_mapped(
        self: &Arc<Self>,
        timeout: Duration,
        done: impl FnOnce(Result<(), ContributeError>) + Send + 'static,
    ) {
        let mut state = self.settled();
        if state.committing || state.step.is_some() {
            drop(state);
            return done(Err(ContributeError::Busy));
        }
        // Blocks that were sent ahead are part of the contribution that was opened for them.
        let opened = match state.finals.clear() {
            Some(step) => Ok(Some(*state.step.insert(step))),
            None => self.open(&mut state, timeout),
        };
        let step = match opened {
            Ok(Some(step)) => step,
            Ok(None) => {
                drop(state);
                let (this, began) = (Arc::clone(self), Instant::now());
                return self.ask_step(timeout, move |outcome| match outcome {
                    Ok(()) => this.commit_mapped(timeout.saturating_sub(began.elapsed()), done),
                    Err(error) => done(Err(error)),
                });
            }
            Err(error) => {
                drop(state);
                return done(Err(error.into()));
            }
        };
        state.committing = true;
        if let Some(made) = state.models.made.clone() {
            let staging = state.staging.region().clone();
            drop(state);
            return self.commit_made(step, staging, made, timeout, done);
        }
        state.staging.ship(step, self.mapped().key());
        drop(state);
        self.traffic.written.fetch_add(self.layout.size(), Ordering::Relaxed);
        self.traffic.reduced_on_arrival.fetch_add(self.layout.size(), Ordering::Relaxed);
        let mut notice = CommitNotice::whole(&self.layout, self.mapped().clone(), false);
        notice.contents = self.contents().1;
        // The program still has the values in its mapping. Nothing of this commit may stay for the next one.
        self.send_commit(step, notice, timeout, OnError::Aborts, done);
    }

    /// Commits a payload that is made of the mapping. Short ones are made by this thread.
    fn commit_made(
        self: &Arc<Self>,
        step: Step,
        staging: Region,
        made: Arc<Made>,
        timeout: Duration,
        done: impl FnOnce(Result<(), ContributeError>) + Send + 'static,
    ) {
        let this = Arc::clone(self);
        let commit = move || {
            if let Err(error) = made.promise(&staging) {
                return this.commit_ended(OnError::Aborts, Err(error), done);
            }
            let whole = |block: BlockId| {
                let bytes = this.layout.block_bytes(block);
                // SAFETY: the program may store meanwhile. Then each byte is old or new, and what was read is sent.
                let model = unsafe { this.mapped().memory().bytes(bytes.start as usize..bytes.end as usize) };
                made.make(&this.layout, block, model, &staging)
            };
            let bad = (0..this.layout.blocks()).map(BlockId).find(|block| !whole(*block));
            this.traffic.written.fetch_add(this.layout.size(), Ordering::Relaxed);
            this.traffic.staged.fetch_add(this.layout.size(), Ordering::Relaxed);
            if let Some(bad) = bad {
                return this.commit_ended(OnError::Aborts, Err(ShardError::NonFinite(bad)), done);
            }
            {
                let mut state = this.state.lock();
                state.staging.ship(step, staging.key());
                state.models.commits(step);
            }
            let mut notice = CommitNotice::whole(&this.layout, staging, true);
            (notice.contents, notice.weight) = (this.contents().1, made.weight());
            notice.unchecked.clear();
            this.send_commit(step, notice, timeout, OnError::Aborts, done);
        };
        if self.layout.size() <= SHORT {
            return commit();
        }
        // Without a thread the payload is made here.
        let commit = Arc::new(Mutex::new(Some(commit)));
        let elsewhere = Arc::clone(&commit);
        let run = move || {
            let commit = elsewhere.lock().take();
            commit.into_iter().for_each(|commit| commit());
        };
        if std::thread::Builder::new().name("makes-payload".into()).spawn(run).is_err() {
            let commit = commit.lock().take();
            commit.into_iter().for_each(|commit| commit());
        }
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
        let completion = move |result: Result<(), ShardError>| this.commit_ended(on_error, result, done);
        self.job.commit(self.learner, step, notice, timeout, Box::new(completion));
    }

    /// A commit has this result.
    fn commit_ended(
        &self,
        on_error: OnError,
        result: Result<(), ShardError>,
        done: impl FnOnce(Result<(), ContributeError>),
    ) {
        if result.is_err() && on_error == OnError::Aborts {
            self.send_abort();
        }
        let mut state = self.state.lock();
        let step = state.step;
        state.asking.ended(step, &result);
        if result.is_ok() || on_error == OnError::Aborts {
            let uses_staging = state.models.made.is_some();
            state.reset(result.is_ok());
            // Only a commit of the mapping leaves nothing open after an error.
            if result.is_ok()
                && on_error == OnError::Aborts
                && !uses_staging
                && state.staging.mapped_one(&self.job)
            {
                self.has_pages.store(false, Ordering::Relaxed);
            }
        }
        state.committing = false;
        let joined = std::mem::take(&mut state.joined);
        let gone = std::mem::take(&mut state.models.gone);
        self.idle.notify_all();
        drop(state);
        drop(gone);
        let outcome = result.map_err(ContributeError::from);
        joined.into_iter().for_each(|done| done(outcome.clone()));
        done(outcome);
    }

    /// Ends the wait for a commit that is under way, unless it is taken. The commit then fails with
    /// [`ShardError::Interrupted`], and the contribution is still open, as after a timeout.
    pub fn withdraw(&self) {
        // A learner that is gone has no commit under way.
        let _ = self.job.withdraw(self.learner);
    }

    /// Drops the open contribution, and the shard's part of it, and what is final of the mapping. Returns whether
    /// something was written. It does nothing while a commit is under way.
    pub fn abort(&self) -> bool {
        self.try_abort().unwrap_or(false)
    }

    /// The same, for callers that need to know.
    ///
    /// # Errors
    /// [`ContributeError::Busy`] while a commit is under way.
    pub fn try_abort(&self) -> Result<bool, ContributeError> {
        self.drop_open(|| self.send_abort())
    }

    /// Whether a commit of the learner's may count that has no answer.
    pub fn is_in_doubt(&self) -> bool {
        self.state.lock().asking.is_in_doubt()
    }

    /// Drops the open contribution as [`Self::abort`] does. If its commit was sent, or an earlier one, and had no answer,
    /// that is taken back, too. `done` hears before `timeout` is over whether nothing of it counts, now or later.
    ///
    /// With the errors but [`ContributeError::Busy`] the contribution is no longer open:
    /// [`ContributeError::Counts`] and [`ContributeError::MayCount`]. In the latter case it is taken back when the
    /// coordinator answers, unless it counts by then. That is told by the write that opens the next contribution.
    pub fn take_back(
        self: &Arc<Self>,
        timeout: Duration,
        done: impl FnOnce(Result<(), ContributeError>) + Send + 'static,
    ) {
        if !self.is_in_doubt() {
            return done(self.try_abort().map(drop));
        }
        let this = Arc::clone(self);
        let mut ask = Some(move |busy: Option<ContributeError>| {
            if let Some(busy) = busy {
                return done(Err(busy));
            }
            let of = Arc::clone(&this);
            let answered = move |result: Result<(), ShardError>| done(of.settle(result));
            this.job.abort(this.learner, timeout, Box::new(answered));
        });
        let dropped = self.drop_open(|| ask.take().into_iter().for_each(|ask| ask(None)));
        // Nothing was open, or it is being committed.
        ask.into_iter().for_each(|ask| ask(dropped.clone().err()));
    }

    /// The coordinator has answered so that the commit in doubt is taken back.
    fn settle(&self, answer: Result<(), ShardError>) -> Result<(), ContributeError> {
        let learner = self.learner;
        let taken = answer
            .and_then(|()| self.job.taken_step(learner).ok_or(ShardError::UnknownLearner(learner)))
            .map_err(ContributeError::MayCount)?;
        match self.state.lock().asking.settle(taken) {
            None => Ok(()),
            Some(step) => Err(ContributeError::Counts(step)),
        }
    }

    /// `send` sends the message, if there is something to drop.
    fn drop_open(&self, send: impl FnOnce()) -> Result<bool, ContributeError> {
        let mut state = self.state.lock();
        // A running copy ends within microseconds. The deadline is for a stuck machine.
        let deadline = Instant::now() + STUCK;
        while state.coverage.tracker.is_busy() && !state.committing {
            if self.idle.wait_until(&mut state, deadline).timed_out() && state.coverage.tracker.is_busy() {
                // Bytes may still come into the region, so it cannot be used again yet.
                let what = "a write of the dropped contribution is stuck";
                state.failed = Some(ShardError::TimedOut(what.into()).into());
                tracing::error!(model = self.job.model(), learner = %self.learner, what);
                return Ok(true);
            }
        }
        if state.committing {
            return if state.aborting { Ok(false) } else { Err(ContributeError::Busy) };
        }
        let was_open = state.step.is_some();
        if was_open || state.finals.step().is_some() {
            (state.committing, state.aborting) = (true, true);
            drop(state);
            send();
            state = self.state.lock();
            (state.committing, state.aborting) = (false, false);
        }
        state.reset(false);
        let (gone, asking) = (std::mem::take(&mut state.models.gone), state.asking.give_up());
        self.idle.notify_all();
        drop(state);
        drop(gone);
        asking.into_iter().for_each(|done| done(Err(ContributeError::Dropped)));
        Ok(was_open)
    }

    /// The lock is not held, but the state is `committing`, so no new contribution opens before the old one is gone.
    pub(super) fn send_abort(&self) {
        let (job, learner) = (Arc::clone(&self.job), self.learner);
        let answered = move |result: Result<(), ShardError>| {
            if let Err(error) = result {
                // A learner that is gone has no contribution open either.
                tracing::debug!(model = job.model(), %learner, %error, "dropping a contribution");
            }
        };
        self.job.abort(self.learner, BESIDE, Box::new(answered));
    }
}
