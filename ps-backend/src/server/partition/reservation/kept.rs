//! Payloads that are kept in memory that other processes lend, until all payloads of their block can be read in one
//! pass.
//!
//! This module holds `unsafe`: it reads memory of other processes.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use libmodelio::transport::frames::Link;
use libmodelio::transport::shm::{BorrowedRange, Descriptors};
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::ids::{BlockId, ClientId, PlanId};
use smallvec::SmallVec;

use super::super::{Partition, PartitionState};
use super::{Push, Reservation};
use crate::partition::core::NotTaken;
use crate::partition::store::{BlockInput, PartitionError, Payload};

/// A payload in memory that is lent to this shard.
#[derive(Clone)]
pub(in crate::server) struct Lent {
    pub piece: BorrowedRange,
    /// The connection whose end is also the end of the loan.
    pub descriptors: Descriptors,
}

impl Lent {
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the kernels only add the bytes and check whether they are finite. Their control flow depends on the
        // length alone.
        unsafe { self.piece.bytes() }
    }

    /// Whether the loan stands.
    pub(super) fn stands(&self) -> bool {
        matches!(self.descriptors.is_hung_up(), Ok(false))
    }
}

/// A payload that is kept until the others of its block have come.
pub(in crate::server::partition) struct KeptPayload {
    pub(super) plan: PlanId,
    pub(super) lent: Lent,
    /// The connection. The payload is gone when the connection has ended.
    pub(super) link: Link,
}

/// All kept payloads, by block and client.
pub(in crate::server::partition) type KeptPayloads = HashMap<(BlockId, ClientId), KeptPayload>;

/// Another client's payload in the same pass.
pub(super) struct Other {
    check: bool,
    pub(super) kept: KeptPayload,
    counts: Option<Vec<Range<u32>>>,
}

pub(super) type Together = SmallVec<[Other; 4]>;

impl Other {
    pub(super) fn input(&self) -> (BlockInput<'_>, Option<&[Range<u32>]>) {
        let payload = Payload::Plain(self.kept.lent.bytes());
        (BlockInput { payload, written: None, check: self.check }, self.counts.as_deref())
    }
}

impl Partition {
    /// Reduces a block whose payloads are all kept.
    pub(in crate::server::partition) fn gather(self: &Arc<Partition>, plan: PlanId, block: BlockId) {
        let mut state = self.state.lock();
        let Some(job) = state.job_of(plan) else { return };
        let Some((client, place)) = state.core.reserve_kept(plan, block.0) else { return };
        let kept = state.kept.remove(&(block, client));
        let (partition, counts) = (Arc::clone(self), self.counts(&state, client, block));
        drop(state);
        let push = Push { plan, block, form: Form::Plain, ahead: false, len: 0 };
        let (job, target, comes, together) = (Some(job), None, false, SmallVec::new());
        let reservation =
            Reservation { partition, client, push, place, counts, job, target, comes, saved: 0, together };
        if let Some(KeptPayload { lent, .. }) = kept
            && let Err(error) = reservation.complete_lent(&lent)
        {
            tracing::error!(model = %self.model, %plan, %block, %error, "cannot be reduced");
        }
    }

    /// Forgets the kept payloads of a connection.
    pub(in crate::server::partition) fn forget_kept(self: &Arc<Partition>, link: &Link) {
        let mut state = self.state.lock();
        if state.kept.is_empty() {
            return;
        }
        let PartitionState { kept, core, .. } = &mut *state;
        for ((block, client), KeptPayload { plan, .. }) in kept.extract_if(|_, kept| kept.link.is(link)) {
            core.is_gone(client, plan, block.0);
        }
        self.act(state, Vec::new());
    }
}

impl Reservation {
    /// Takes the kept payloads for a pass with this one. None if the pass would break the order of addition, because
    /// one of them has gone.
    pub(super) fn take_kept(&mut self) -> Result<Option<Together>, PartitionError> {
        let Push { plan, block, .. } = self.push;
        let mut state = self.partition.state.lock();
        let (all, last) = match state.core.take_kept(self.client, plan, block.0) {
            Ok(taken) => taken,
            Err(NotTaken::OutOfTurn) => return Ok(None),
            Err(NotTaken::Unwanted) => return Err(PartitionError::Over),
        };
        self.place.last = last;
        self.together = all.iter().map(|(client, _)| *client).collect();
        let others = all.into_iter().filter(|(client, _)| *client != self.client);
        let take = |(client, check)| {
            let kept = state.kept.remove(&(block, client))?;
            Some(Other { check, kept, counts: self.partition.counts(&state, client, block) })
        };
        others.map(take).collect::<Option<Together>>().ok_or(PartitionError::Over).map(Some)
    }
}
