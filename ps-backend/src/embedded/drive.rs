//! Carrying out what the core decides: work on the pool, answers, events, the timer.
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use fixedbitset::FixedBitSet;
use libmodelio::transport::{Completion, Region, Reply, ShardError};
use libmodelio::vocabulary::ids::{BlockId, LearnerId};
use libmodelio::vocabulary::reducer::Combine;
use parking_lot::{Mutex, MutexGuard};
use rayon::prelude::*;

use super::{EmbeddedShard, Event, Inner};
use crate::core::{Action, Answer, Contribution, Plan};
use crate::region_store::{self, Accumulator, Job};

/// A version that could not be made for want of memory, and when to try again.
pub(super) struct Retry {
    at: Duration,
    plan: Arc<Plan<Region>>,
}

const RETRY_AFTER: Duration = Duration::from_millis(500);

/// What has to happen once the lock is released.
#[derive(Default)]
struct After {
    replies: Vec<(Completion, Result<Reply, ShardError>)>,
    events: Vec<Event>,
    jobs: Vec<Box<dyn FnOnce() + Send>>,
}

impl EmbeddedShard {
    /// Recycles, and tells the core whether the next version has a buffer.
    pub(super) fn find_buffer(&self, inner: &mut Inner, actions: &mut Vec<Action<Region>>) {
        let controls = inner.core.controls();
        let (retain, max) = (controls.retain as usize, controls.max_versions as usize);
        let ready = inner.store.recycle(retain, max);
        inner.core.set_buffer_ready(ready, self.now(), actions);
    }

    /// Allocates and pre-faults buffers on a worker, one after the other, until `count` are free.
    pub(super) fn add_spares(&self, count: usize) {
        let Some(this) = self.this.upgrade() else { return };
        self.pool.spawn(move || {
            for _ in 0..count {
                let spare = {
                    let mut inner = this.inner.lock();
                    let max = inner.core.controls().max_versions as usize;
                    // Several may have been asked for the same while the workers were busy.
                    if !inner.store.wants_spares(count, max) {
                        return;
                    }
                    inner.store.new_spare()
                };
                let buffer = match spare {
                    Ok(buffer) => buffer,
                    Err(error) => {
                        tracing::warn!(%error, "no memory for a spare version buffer");
                        return;
                    }
                };
                if let Err(error) = buffer.region().memory().prefault() {
                    tracing::warn!(%error, "pre-faulting a version buffer");
                }
                let mut inner = this.inner.lock();
                inner.store.add_spare(buffer);
                let mut actions = Vec::new();
                this.find_buffer(&mut inner, &mut actions);
                this.act(inner, actions);
            }
        });
    }

    /// Carries out actions, releases the lock, then starts work, tells and answers.
    pub(super) fn act(&self, mut inner: MutexGuard<'_, Inner>, actions: Vec<Action<Region>>) {
        let mut after = After::default();
        let mut queue: VecDeque<_> = actions.into();
        let mut more = Vec::new();
        while let Some(action) = queue.pop_front() {
            self.perform(&mut inner, action, &mut after, &mut more);
            queue.extend(more.drain(..));
        }
        drop(inner);
        for job in after.jobs {
            self.pool.spawn(job);
        }
        for event in after.events {
            let listener = self.listener.lock().clone();
            if let Some(listener) = listener {
                listener(event);
            }
        }
        for (done, result) in after.replies {
            done(result);
        }
    }

    fn perform(
        &self,
        inner: &mut Inner,
        action: Action<Region>,
        after: &mut After,
        more: &mut Vec<Action<Region>>,
    ) {
        match action {
            Action::Reply(ticket, result) => {
                if let Some(done) = inner.completions.remove(&ticket) {
                    let reply = result.map(|answer| match answer {
                        Answer::Committed => Reply::Done,
                        Answer::Version(version) => Reply::Version(version),
                    });
                    after.replies.push((done, reply));
                }
            }
            Action::Published(version) => after.events.push(Event::Published(version)),
            Action::Left { learner, reason } => after.events.push(Event::Left(learner, reason)),
            Action::Fold { contributions, accumulated, combine } => match inner.store.accumulator(combine) {
                Ok(accumulator) => {
                    let Some(this) = self.this.upgrade() else { return };
                    let replaces = combine == Combine::Last;
                    let folded =
                        inner.core.folded_contributions().filter(|_| replaces).cloned().collect::<Vec<_>>();
                    after.jobs.push(Box::new(move || {
                        let held = (accumulated, &folded[..]);
                        let outcome = this.fold(&contributions, held, &accumulator, combine);
                        this.folded(&contributions, outcome);
                    }));
                }
                Err(error) => {
                    tracing::error!(%error, "no memory for the accumulator");
                    let error = ShardError::no_memory(&error);
                    let failed = contributions.iter().map(|c| (c.learner, error.clone())).collect();
                    inner.core.fold_failed(failed, self.now(), more);
                }
            },
            Action::Reduce(plan) => self.reduce(inner, plan, after, more),
            Action::Seal(_) | Action::Drop => {
                debug_assert!(false, "this core was not asked for provisional plans")
            }
        }
    }

    fn for_each_block(&self, blocks: impl Iterator<Item = usize>, work: impl Fn(BlockId) + Send + Sync) {
        let blocks: Vec<usize> = blocks.collect();
        blocks.into_par_iter().for_each(|block| work(BlockId(block as u32)));
    }

    /// Adds contributions into the accumulator, or changes nothing of it and says whose are why.
    fn fold(
        &self,
        contributions: &[Arc<Contribution<Region>>],
        (mut accumulated, folded): (FixedBitSet, &[Arc<Contribution<Region>>]),
        accumulator: &Accumulator,
        combine: Combine,
    ) -> Result<(), Vec<(LearnerId, ShardError)>> {
        // What is stored where nothing was can be given up when it turns out to be bad; what is added cannot.
        let reversible = match contributions {
            [only] => accumulated.is_disjoint(&only.deferred),
            _ => false,
        };
        let unchecked = || contributions.iter().filter(|contribution| contribution.unchecked);
        let blame =
            |contribution: &Contribution<Region>, block| (contribution.learner, ShardError::NonFinite(block));
        if !reversible {
            let bad: Vec<_> = unchecked()
                .filter_map(|c| self.find_bad(&c.deferred, &c.source).map(|block| blame(c, block)))
                .collect();
            if !bad.is_empty() {
                return Err(bad);
            }
        }
        for contribution in contributions {
            let Contribution { learner, deferred, source, unchecked, .. } = &**contribution;
            let check = *unchecked && !reversible;
            let bad = Mutex::new(None);
            let outranked = |block| region_store::is_outranked(folded, *learner, BlockId(block as u32));
            self.for_each_block(deferred.ones().filter(|&block| !outranked(block)), |block| {
                let first = !accumulated.contains(block.index());
                let layout = &self.layout;
                if !region_store::fold_block(layout, block, source, accumulator, first, combine, check) {
                    *bad.lock() = Some(block);
                }
            });
            match bad.into_inner().filter(|_| *unchecked) {
                Some(block) if reversible => return Err(vec![blame(contribution, block)]),
                Some(block) => {
                    let what = "NaN or Inf was stored into the mapping while its fsync ran: the block counts as zero";
                    tracing::warn!(%learner, %block, what);
                }
                None => {}
            }
            accumulated.union_with(deferred);
        }
        Ok(())
    }

    fn folded(
        &self,
        contributions: &[Arc<Contribution<Region>>],
        outcome: Result<(), Vec<(LearnerId, ShardError)>>,
    ) {
        let mut inner = self.inner.lock();
        let mut actions = Vec::new();
        match outcome {
            Ok(()) => {
                let learners: Vec<_> = contributions.iter().map(|c| c.learner).collect();
                inner.core.folded(&learners, self.now(), &mut actions);
            }
            Err(failed) => inner.core.fold_failed(failed, self.now(), &mut actions),
        }
        self.act(inner, actions);
    }

    /// Computes what is left to do of a version.
    fn reduce(
        &self,
        inner: &mut Inner,
        plan: Arc<Plan<Region>>,
        after: &mut After,
        more: &mut Vec<Action<Region>>,
    ) {
        // The job of blocks reduced on arrival has done its part; what it wrote is found in the store.
        inner.arrivals = None;
        let resume = !plan.todo.is_full();
        let job = match inner.store.job(Arc::clone(&plan), resume, plan.has_unchecked()) {
            Ok(job) => job.after(inner.core.folded_contributions()),
            Err(error) => {
                tracing::error!(%error, version = %plan.version, "cannot make the version; trying again");
                inner.retries.push(Retry { at: self.now() + RETRY_AFTER, plan });
                return;
            }
        };
        if plan.todo.is_clear() {
            return self.finish(inner, &job, more);
        }
        let Some(this) = self.this.upgrade() else { return };
        after.jobs.push(Box::new(move || {
            let bad = Mutex::new(BTreeMap::new());
            this.for_each_block(plan.todo.ones(), |block| {
                let blamed = job.block(block, None);
                if !blamed.is_empty() {
                    bad.lock().extend(blamed.into_iter().map(|learner| (learner, block)));
                }
            });
            let bad = bad.into_inner();
            let mut inner = this.inner.lock();
            let mut actions = Vec::new();
            if bad.is_empty() {
                this.finish(&mut inner, &job, &mut actions);
            } else {
                let bad = bad.into_iter().map(|(learner, block)| (learner, ShardError::NonFinite(block)));
                inner.core.refused(bad.collect(), this.now(), &mut actions);
            }
            // The state it holds is needed by what `actions` may start.
            drop(job);
            this.act(inner, actions);
        }));
    }

    /// Publishes a computed version.
    fn finish(&self, inner: &mut Inner, job: &Job, actions: &mut Vec<Action<Region>>) {
        inner.store.publish(job);
        let controls = inner.core.controls();
        let (retain, max) = (controls.retain as usize, controls.max_versions as usize);
        let ready = inner.store.recycle(retain, max);
        if inner.store.wants_spares(1, max) {
            self.add_spares(1);
        }
        inner.core.reduced(ready, self.now(), actions);
    }
}

/// Wakes the core for deadlines and leases until the shard is gone.
pub(super) fn run_timer(shard: &Weak<EmbeddedShard>) {
    /// For leases.
    const IDLE: Duration = Duration::from_millis(250);
    /// While memory is short, and as the finest a deadline is looked at.
    const BUSY: Duration = Duration::from_millis(20);
    loop {
        let Some(shard) = shard.upgrade() else { return };
        if shard.is_stopping() {
            return;
        }
        let mut inner = shard.inner.lock();
        let pause = if inner.core.buffer_ready() { IDLE } else { BUSY };
        let until = inner.core.next_deadline().map(|deadline| deadline.saturating_sub(shard.now()));
        let pause = until.map_or(pause, |until| pause.min(until + Duration::from_millis(1)));
        shard.wake.wait_for(&mut inner, pause);
        let now = shard.now();
        let mut actions = Vec::new();
        if !inner.retries.is_empty() {
            // Nobody reads memory that is lent for a version that is not being made: those commits are answered here.
            // Reading takes a moment only, and whoever reads answers after it.
            for learner in inner.core.overdue(now) {
                let late = ShardError::TimedOut("there is no memory for the next version".into());
                if inner.core.reclaim(learner, late, now, &mut actions) {
                    inner.retries.clear();
                }
            }
        }
        for retry in inner.retries.extract_if(.., |retry| retry.at <= now).collect::<Vec<_>>() {
            actions.push(Action::Reduce(retry.plan));
        }
        if !inner.core.buffer_ready() {
            // A buffer that was lent for new weights may have been dropped.
            shard.find_buffer(&mut inner, &mut actions);
        }
        inner.core.tick(now, &mut actions);
        shard.act(inner, actions);
    }
}
