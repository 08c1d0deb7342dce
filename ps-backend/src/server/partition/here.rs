//! A client in this process: its blocks are reduced where they lie, and versions are shown to it as they lie here.

use std::ops::Range;
use std::sync::Arc;

use libmodelio::transport::local::{End, Pushed, SharedBlock, SharedPayload, Word};
use libmodelio::transport::tally::Flow;
use libmodelio::vocabulary::ids::{BlockId, ClientId, PlanId, Version};
use libmodelio::vocabulary::ranges;
use smallvec::SmallVec;

use super::Partition;
use crate::partition::core::Placement;
use crate::partition::store::{Limits, Part, PartitionJob, PartitionWork, Payload, PinnedVersion};

/// Payloads that are listed on the stack.
const INLINE: usize = 16;

/// A client in this process, as its partition sees it.
#[derive(Debug, Default)]
pub(super) struct Here {
    /// A block of it had to wait.
    waits: bool,
    /// What the coordinator was told of the next version's buffer.
    has_buffer: Option<bool>,
}

/// What was pushed, and where it goes.
struct Place {
    client: ClientId,
    plan: PlanId,
    /// Of the partition.
    block: BlockId,
    how: Placement,
    is_own: bool,
}

impl Partition {
    /// Takes a block of a client in this process. See [`libmodelio::transport::local::Shard::push`].
    pub(in crate::server) fn push_here(
        self: &Arc<Partition>,
        shared: SharedBlock<'_>,
        stands: &dyn Fn() -> bool,
    ) -> Pushed {
        let SharedBlock { client, plan, block: global, payloads, is_own } = shared;
        let Some(block) = self.store.partition().local(global) else { return Pushed::Unwanted };
        let mut state = self.state.lock();
        let how = state.core.arrive(client, plan, block.0);
        match how {
            Placement::Duplicate | Placement::Unwanted => return Pushed::Unwanted,
            Placement::Later => {
                state.here.waits = true;
                return Pushed::Later;
            }
            Placement::Store { .. } | Placement::Add { .. } | Placement::Finish { .. } => {}
        }
        let Some((_, job)) = state.job.clone().filter(|(of, _)| *of == plan) else {
            // The core lets nothing arrive before its plan has its memory.
            let mut actions = Vec::new();
            state.core.failed(plan, block.0, &mut actions);
            self.act(state, actions);
            return Pushed::Unwanted;
        };
        let counts = state.written(client, global);
        drop(state);
        let place = Place { client, plan, block, how, is_own };
        let outcome = reduce(&job, &place, payloads, counts.as_deref());
        let moved: usize = payloads.iter().map(|payload| payload.bytes.len()).sum();
        self.store.tally().moved(Flow::Push, moved);
        // New weights lie in memory that is not written again.
        let stands = *job.work() == PartitionWork::Assign || stands();
        // Before the core hears of it: from then on its memory may be wanted.
        drop(job);
        self.pushed_here(&place, outcome, payloads.len(), stands)
    }

    fn pushed_here(
        self: &Arc<Partition>,
        place: &Place,
        outcome: Option<Result<(), usize>>,
        payloads: usize,
        stands: bool,
    ) -> Pushed {
        let &Place { client, plan, block, is_own, .. } = place;
        let mut actions = Vec::new();
        let mut state = self.state.lock();
        let pushed = match outcome {
            Some(_) if !stands => {
                tracing::debug!(model = %self.model, %plan, %block, "it may have changed while it was read");
                state.core.torn(plan, block.0, &mut actions);
                Pushed::Unwanted
            }
            Some(Ok(())) => {
                state.core.landed(client, plan, block.0, true, &mut actions);
                Pushed::Taken
            }
            // The coordinator hears whose it is.
            Some(Err(_)) if payloads == 1 && !is_own => {
                state.core.landed(client, plan, block.0, false, &mut actions);
                Pushed::Taken
            }
            Some(Err(bad)) => {
                state.core.failed(plan, block.0, &mut actions);
                Pushed::NonFinite(bad)
            }
            None => {
                state.core.failed(plan, block.0, &mut actions);
                Pushed::Unwanted
            }
        };
        state.wake();
        self.act(state, actions);
        pushed
    }

    /// A version for the client in this process; the newest one's number, if it is gone.
    pub(in crate::server) fn version_here(&self, version: Version) -> Result<PinnedVersion, Version> {
        self.store
            .version(version)
            .ok_or_else(|| self.store.newest().map_or(version, |newest| newest.version()))
    }

    /// There may be so many version buffers. Which versions are retained, the client in this process says: it holds them.
    pub(in crate::server) fn set_buffers(&self, most: usize) {
        self.store.set_limits(Limits { retain: 0, buffers: most });
    }

    /// Tells the coordinator whether the next version has a buffer, if it does not know. Returns whether it has one.
    pub(in crate::server) fn find_buffer(&self) -> bool {
        let mut state = self.state.lock();
        let ready = state.say_buffer(&self.store);
        let mailbox = state.mailbox();
        drop(state);
        if let Some(mailbox) = mailbox {
            mailbox.drain();
        }
        ready
    }
}

impl super::State {
    /// As [`Partition::find_buffer`]; the mailbox is to be drained.
    pub(super) fn say_buffer(&mut self, store: &crate::partition::store::PartitionStore) -> bool {
        let ready = store.find_buffer();
        if self.here.has_buffer.replace(ready) != Some(ready)
            && let Some(mailbox) = self.mailbox()
        {
            mailbox.put(End::Partition, End::Coordinator, Word::Buffer(ready));
        }
        ready
    }

    /// A version was published: whether the next one has a buffer is not known any more.
    pub(super) fn has_published(&mut self) {
        self.here.has_buffer = None;
    }

    /// What had to wait may be taken.
    pub(super) fn wake_here(&mut self) {
        if std::mem::take(&mut self.here.waits)
            && let Some(mailbox) = self.mailbox()
        {
            mailbox.put(End::Partition, End::Client, Word::GoOn);
        }
    }
}

/// Adds payloads to the plan: `Err` names one that holds NaN or Inf. Nothing if it cannot be done, which is logged.
fn reduce(
    job: &PartitionJob,
    place: &Place,
    payloads: &[SharedPayload<'_>],
    counts: Option<&[Range<u32>]>,
) -> Option<Result<(), usize>> {
    let left: SmallVec<[Option<Vec<Range<u32>>>; INLINE]> = match counts {
        Some(counts) => payloads.iter().map(|of| Some(counted(of.written, counts))).collect(),
        None => SmallVec::new(),
    };
    let parts: SmallVec<[Part<'_>; INLINE]> = payloads
        .iter()
        .enumerate()
        .map(|(at, of)| {
            let written = left.get(at).map_or(of.written, |left| left.as_deref());
            Part { payload: Payload::Plain(of.bytes), written, check: of.check }
        })
        .collect();
    let outcome = match place.how {
        Placement::Finish { .. } => job.finish_all(place.block, &parts),
        _ => job.add_all(place.block, &parts),
    };
    match outcome {
        Ok(bad) => Some(bad.map_or(Ok(()), Err)),
        Err(error) => {
            tracing::error!(plan = %place.plan, block = %place.block, %error, "cannot be reduced");
            None
        }
    }
}

/// What counts of a block of which this was `written`.
fn counted(written: Option<&[Range<u32>]>, counts: &[Range<u32>]) -> Vec<Range<u32>> {
    match written {
        None => counts.to_vec(),
        Some(written) => ranges::without(written, &ranges::without(written, counts)),
    }
}
