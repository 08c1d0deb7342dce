//! The shard as its clients see it: a device and a channel.
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fixedbitset::FixedBitSet;
use libmodelio::bytes::block;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::transport::{
    BlockSlot, Channel, CommitNotice, Completion, Device, Message, Placement, Region, RegionKey, Reply,
    ShardError, TransportKind,
};
use libmodelio::vocabulary::controls::NonFinite;
use libmodelio::vocabulary::ids::{BlockId, Version};
use rayon::prelude::*;

use super::{EmbeddedShard, Inner};
use crate::core::{Arrival, Contribution, Plan, Ticket};
use crate::region_store::Job;

impl EmbeddedShard {
    fn message(&self, message: Message, deadline: Duration, done: Completion) {
        let now = self.now();
        let mut actions = Vec::new();
        let mut inner = self.inner.lock();
        if self.is_stopping() {
            drop(inner);
            return done(Err(ShardError::Unreachable));
        }
        let core = &mut inner.core;
        let reply = match message {
            Message::Join { name } => core
                .join(&name, now, &mut actions)
                .map(|(learner, incarnation)| Reply::Joined { learner, incarnation }),
            Message::Leave { learner, reason } => {
                core.leave(learner, reason, now, &mut actions).map(|()| Reply::Done)
            }
            Message::Open { learner } => {
                core.open(learner, now).map(|o| Reply::Opened { step: o.step, staging_lent: o.staging_lent })
            }
            Message::Abort { learner } => core.abort(learner, now, &mut actions).map(|()| Reply::Done),
            Message::Withdraw { learner } => core.withdraw(learner, now, &mut actions).map(|()| Reply::Done),
            Message::WithdrawAssign { buffer } => {
                core.withdraw_assign(|of: &Region| of.key() == buffer, now, &mut actions);
                Ok(Reply::Done)
            }
            Message::Allocate => {
                let max = core.controls().max_versions as usize;
                let buffer = inner.store.take_buffer(max);
                buffer.map(Reply::Buffer).map_err(|error| ShardError::no_memory(&error))
            }
            Message::Commit { learner, step, notice } => {
                let ticket = inner.ticket(done);
                let CommitNotice { sent, deferred, staging, lendable, unchecked, tensors, partly } = notice;
                let reject = inner.core.controls().nonfinite == NonFinite::Reject;
                // What is lent is answered at once, and has been looked at.
                let unchecked = reject && !lendable && !unchecked.is_clear();
                let (source, lent) = (staging, !lendable);
                let contribution =
                    Contribution { learner, sent, deferred, tensors, partly, source, unchecked, lent };
                inner.core.commit(ticket, step, contribution, lendable, deadline, now, &mut actions);
                self.wake.notify_all();
                return self.act(inner, actions);
            }
            Message::AwaitStep { learner } => {
                let ticket = inner.ticket(done);
                inner.core.await_step(ticket, learner, deadline, now, &mut actions);
                self.wake.notify_all();
                return self.act(inner, actions);
            }
            Message::Assign { buffer, written } => match self.check_assignment(&mut inner, &buffer, &written)
            {
                Ok(()) => {
                    let ticket = inner.ticket(done);
                    inner.core.assign(ticket, buffer, written, deadline, now, &mut actions);
                    self.wake.notify_all();
                    return self.act(inner, actions);
                }
                Err(error) => Err(error),
            },
        };
        self.act(inner, actions);
        done(reply);
    }

    /// Whether new weights can be taken as they are: a worker must not stumble over them.
    fn check_assignment(
        &self,
        inner: &mut Inner,
        buffer: &Region,
        written: &[Range<u64>],
    ) -> Result<(), ShardError> {
        let mut at = 0;
        for range in written {
            if range.start < at || range.end < range.start || range.end > self.layout.size() {
                return Err(ShardError::OutOfRange);
            }
            at = range.end;
        }
        inner.core.may_assign()?;
        if inner.store.claim(buffer) {
            Ok(())
        } else {
            Err(ShardError::NotAllowed("the buffer was not allocated for new weights, or is used up".into()))
        }
    }

    /// Looks for NaN and Inf where nobody has yet, on the workers, and goes on with `then`. A contribution
    /// that is not lent is answered only after its payload was read, and is looked at then.
    fn check_then(
        &self,
        notice: CommitNotice,
        then: impl FnOnce(Result<CommitNotice, ShardError>) + Send + 'static,
    ) {
        if let Err(error) = notice.check(&self.layout) {
            return then(Err(error));
        }
        let reject = self.inner.lock().core.controls().nonfinite == NonFinite::Reject;
        let checks = reject && notice.lendable && !notice.unchecked.is_clear();
        let Some(this) = self.this.upgrade().filter(|_| checks) else {
            return then(Ok(notice));
        };
        self.pool.spawn(move || {
            then(match this.find_bad(&notice.unchecked, &notice.staging) {
                None => Ok(notice),
                Some(block) => Err(ShardError::NonFinite(block)),
            });
        });
    }

    /// A block of `blocks` in which `region` holds NaN or Inf. On a worker.
    pub(super) fn find_bad(&self, blocks: &FixedBitSet, region: &Region) -> Option<BlockId> {
        let blocks: Vec<usize> = blocks.ones().collect();
        blocks
            .into_par_iter()
            .map(|block| BlockId(block as u32))
            .find_any(|&block| !block::region_is_finite(&self.layout, block, region))
    }
}

impl Inner {
    fn ticket(&mut self, done: Completion) -> Ticket {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.completions.insert(ticket, done);
        ticket
    }

    /// The job behind blocks that are reduced on arrival under `plan`.
    fn arrival_job(&mut self, plan: &Arc<Plan<Region>>) -> io::Result<Arc<Job>> {
        if let Some(job) = self.arrivals.as_ref().filter(|job| Arc::ptr_eq(job.plan(), plan)) {
            return Ok(Arc::clone(job));
        }
        // The old one goes first: the state that it holds may have to change.
        self.arrivals = None;
        let check = self.core.controls().nonfinite == NonFinite::Reject;
        let job = self.store.job(Arc::clone(plan), false, check)?;
        let job = Arc::new(job.after(self.core.folded_contributions()));
        self.arrivals = Some(Arc::clone(&job));
        Ok(job)
    }
}

impl Channel for EmbeddedShard {
    fn write(&self, payload: &[u8], slot: BlockSlot, room: Option<&Region>) -> Result<Placement, ShardError> {
        let extent = self.layout.block_bytes(slot.block);
        if payload.len() as u64 != extent.end.saturating_sub(extent.start) {
            return Err(ShardError::BadBlock { block: slot.block, bytes: payload.len() });
        }
        if room.is_some_and(|room| (room.memory().len() as u64) < extent.end) {
            return Err(ShardError::OutOfRange);
        }
        if self.is_stopping() {
            return Err(ShardError::Unreachable);
        }
        let mut inner = self.inner.lock();
        let plan = match inner.core.arrive(slot, self.now())? {
            Arrival::Duplicate => return Ok(Placement::Duplicate),
            Arrival::Fuse(plan) => plan,
            Arrival::Defer => {
                let check = inner.core.controls().nonfinite == NonFinite::Reject;
                drop(inner);
                let finite = match room {
                    Some(room) => block::place(&self.layout, slot.block, payload, room, check),
                    None => !check || block::is_finite(&self.layout, slot.block, payload),
                };
                if !finite {
                    self.inner.lock().core.refuse(slot);
                    return Err(ShardError::NonFinite(slot.block));
                }
                return Ok(Placement::Deferred);
            }
        };
        let job = inner.arrival_job(&plan);
        drop(plan);
        drop(inner);
        let outcome = match &job {
            Ok(job) if job.block(slot.block, Some((slot.learner, payload))).is_empty() => {
                Ok(Placement::Reduced)
            }
            Ok(_) => Err(ShardError::NonFinite(slot.block)),
            Err(error) => Err(ShardError::no_memory(error)),
        };
        // Before the core hears of it: from then on the memory that the job holds may be wanted.
        drop(job);
        let mut inner = self.inner.lock();
        let mut actions = Vec::new();
        inner.core.fused(slot, outcome.is_ok(), self.now(), &mut actions);
        if !actions.is_empty() {
            self.act(inner, actions);
        }
        outcome
    }

    fn read(&self, offset: u64, local: &mut [u8]) -> Result<Version, ShardError> {
        let end = offset.checked_add(local.len() as u64).filter(|&end| end <= self.layout.size());
        let end = end.ok_or(ShardError::OutOfRange)?;
        let version = self.pin_newest();
        let found = self.get(version);
        if let Some((buffer, _)) = &found {
            local.copy_from_slice(buffer.bytes(offset..end));
        }
        self.unpin(version, 1);
        found.map(|_| version).ok_or(ShardError::Unreachable)
    }

    fn send(&self, message: Message, timeout: Duration, done: Completion) {
        let deadline = self.now().saturating_add(timeout);
        let Message::Commit { learner, step, notice } = message else {
            return self.message(message, deadline, done);
        };
        let this = self.this.clone();
        self.check_then(notice, move |checked| match (checked, this.upgrade()) {
            (Ok(notice), Some(this)) => {
                this.message(Message::Commit { learner, step, notice }, deadline, done);
            }
            (Ok(_), None) => done(Err(ShardError::Unreachable)),
            (Err(error), _) => done(Err(error)),
        });
    }
}

/// The device of this process: memory is addressable as it is.
pub struct InProcess {
    shard: Arc<EmbeddedShard>,
    next_key: AtomicU64,
}

impl InProcess {
    /// For clients of `shard`.
    pub fn new(shard: Arc<EmbeddedShard>) -> InProcess {
        InProcess { shard, next_key: AtomicU64::new(1 << 32) }
    }
}

impl Device for InProcess {
    fn kind(&self) -> TransportKind {
        TransportKind::InProcess
    }

    fn register(&self, memory: Arc<Mapping>) -> Result<Region, ShardError> {
        Ok(Region::new(memory, RegionKey(self.next_key.fetch_add(1, Ordering::Relaxed))))
    }

    fn connect(&self) -> Result<Arc<dyn Channel>, ShardError> {
        Ok(Arc::clone(&self.shard) as Arc<dyn Channel>)
    }
}
