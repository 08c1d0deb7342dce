//! Reservations: a payload's place in a plan, taken before the payload comes. The connection that brings the payload
//! has the block to itself until it completes or drops the reservation. If the payload needs memory, the reservation
//! has it.
//!
//! This module holds `unsafe`: it lends memory of sums to connections.

mod kept;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use libmodelio::bytes::changes::Changed;
use libmodelio::bytes::crc32c::crc32c;
use libmodelio::transport::frames::{Link, Outgoing};
use libmodelio::transport::local::Pushed;
use libmodelio::transport::stream::{Close, Guard, Target};
use libmodelio::transport::tally::Flow;
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::ids::{BlockId, ClientId, PlanId, Version};
use libmodelio::vocabulary::ranges;
use libmodelio::wire::{Message, Received, Refusal, Work};
use smallvec::SmallVec;

use super::{Partition, PartitionState};
use crate::partition::core::{Placement, ReservationOutcome, ReservedPlace, Sent};
use crate::partition::fetches::Turn;
use crate::partition::store::{self, BlockInput, PartitionError, PartitionJob, Payload};
use crate::partition::unknown_plan::UnknownPlan;
pub(super) use kept::KeptPayloads;
pub(in crate::server) use kept::Lent;
use kept::{KeptPayload, Other, Together};

/// As many payloads of a block fit into a list without an allocation.
pub(super) const INLINE: usize = 16;

/// A client that sends blocks, over one of its connections. It is woken when a block that had to wait may come.
pub(in crate::server) struct Sender {
    pub client: ClientId,
    /// The connection. None for the client in this process.
    link: Option<Link>,
    /// The unknown plan that its blocks wait for.
    unknown_plan: UnknownPlan,
}

impl Sender {
    /// A client, over one of its connections.
    pub(in crate::server) fn over(link: &Link, client: ClientId) -> Sender {
        Sender { client, link: Some(link.clone()), unknown_plan: UnknownPlan::default() }
    }

    /// The client in this process.
    pub(super) fn here(client: ClientId) -> Sender {
        Sender { client, link: None, unknown_plan: UnknownPlan::default() }
    }

    /// When to check again whether the coordinator has announced the awaited plan.
    pub(in crate::server) fn until(&self, now: Instant) -> Option<Instant> {
        self.unknown_plan.until(now)
    }

    /// Ends the connection.
    pub(in crate::server) fn close(&self, why: &'static str) {
        if let Some(link) = &self.link {
            link.close(Close::Asked(why.into()));
        }
    }

    /// Answers that the partition is done with a block, if the client has asked for that.
    pub(in crate::server) fn is_done(&self, partition: &Partition, request: u64) {
        if let (Some(link), 1..) = (&self.link, request) {
            link.send(Outgoing { epoch: partition.epoch, ..Outgoing::new(request, Message::Done) });
        }
    }
}

/// A block that a client sends for a plan.
#[derive(Clone, Copy, Debug)]
pub(in crate::server) struct Push {
    pub plan: PlanId,
    /// The block's index in the partition.
    pub block: BlockId,
    pub form: Form,
    /// Whether it was sent for the provisional plan.
    pub ahead: bool,
    /// The length of its payload.
    pub len: usize,
}

impl Push {
    /// How a payload comes that does not stay where it lies.
    fn sent(&self) -> Sent {
        Sent { lies: false, ahead: self.ahead }
    }
}

/// The memory that a payload needs.
pub(in crate::server) enum Room<'a> {
    /// None. The payload can be read where it lies, now.
    None,
    /// None. The payload stays where it lies for as long as the plan takes.
    Lent(&'a Lent),
    /// The sum's memory, or the connection's if the sum's is not available.
    Stream,
    /// The sum's memory, if its first byte and length suit. The payload has another way, so it does not wait.
    Sum(&'a mut dyn FnMut(*const u8, usize) -> bool),
}

/// The outcome of asking for a reservation.
pub(in crate::server) enum Reserved {
    /// The payload may come.
    Ready(Reservation),
    /// The payload is read where it lies, together with the last one of its block or with one whose turn it is.
    Kept,
    /// The payload must wait. Its sender is woken when it may come.
    Later,
    /// The payload is not wanted.
    Skip,
}

/// A payload's place in a plan. If it is dropped before it is complete, the payload can come again.
pub(in crate::server) struct Reservation {
    partition: Arc<Partition>,
    client: ClientId,
    push: Push,
    place: ReservedPlace,
    /// The ranges that count, if values are replaced and not all of the block was written.
    counts: Option<Vec<Range<u32>>>,
    /// None once the reservation has ended.
    job: Option<Arc<PartitionJob>>,
    target: Option<store::Target>,
    /// Whether a connection waits for the payload.
    comes: bool,
    /// The bytes that have not come, because only what has changed has.
    saved: usize,
    /// The clients whose payloads are reduced in one pass, if some were kept.
    together: SmallVec<[ClientId; 4]>,
}

/// A payload that takes a while to come. If its plan is given up, its connection is closed or woken.
pub(super) struct Coming {
    plan: PlanId,
    block: BlockId,
    link: Link,
    closes: bool,
}

impl Coming {
    /// The plan is given up.
    pub(super) fn abandon(&self, plan: PlanId) {
        match self.closes {
            _ if self.plan != plan => {}
            true => self.link.close(Close::Asked(format!("plan {plan} was given up in mid-block").into())),
            false => self.link.wake(),
        }
    }
}

impl Partition {
    /// The block that `received` sends or names.
    pub(in crate::server) fn push(&self, received: &Received) -> Result<Push, Refusal> {
        let (plan, block, form, ahead) = match received.message {
            Message::Push { plan, block, form, ahead } => (plan, block, form, ahead),
            Message::PushChanges { plan, block, ahead, .. } => (plan, block, Form::Plain, ahead),
            Message::PushAt { plan, block, wide, ahead, .. }
            | Message::PushIn { plan, block, wide, ahead, .. } => (plan, block, Form::full(wide), ahead),
            _ => return Err(Refusal::Role { what: received.message.name().to_owned() }),
        };
        let push = self.push_of(plan, block, form, ahead)?;
        let wanted = match received.message {
            Message::Push { .. } => push.len as u32,
            // Patches that are no shorter than the block are not sent.
            Message::PushChanges { .. } => received.header.payload_len().min(push.len as u32),
            _ => 0,
        };
        received.expect_payload(wanted).map_err(|error| error.to_refusal())?;
        Ok(push)
    }

    /// A block of the model that a client sends for `plan`.
    pub(super) fn push_of(
        &self,
        plan: PlanId,
        block: BlockId,
        form: Form,
        ahead: bool,
    ) -> Result<Push, Refusal> {
        let block = self.store.partition().local(block).ok_or(Refusal::NotMine { block })?;
        let len = Payload::of(form, &[]).wanted_len(self.layout(), block);
        Ok(Push { plan, block, form, ahead, len })
    }

    /// Reserves the block for a payload.
    pub(in crate::server) fn reserve(
        self: &Arc<Partition>,
        sender: &mut Sender,
        push: Push,
        room: Room<'_>,
    ) -> Result<Reserved, Refusal> {
        let Push { plan, block, form, .. } = push;
        let client = sender.client;
        let mut state = self.state.lock();
        // A pass takes at most one payload that is not plain.
        let sent = Sent { lies: matches!(room, Room::Lent(_)) && form == Form::Plain, ahead: push.ahead };
        let place = match state.core.peek(client, plan, block.0, sent) {
            Placement::Ready(place) => place,
            Placement::Keep => {
                if let (Room::Lent(lent), Some(link)) = (room, sender.link.clone()) {
                    state.core.reserve(client, plan, block.0, sent);
                    state.kept.insert((block, client), KeptPayload { plan, lent: lent.clone(), link });
                }
                return Ok(Reserved::Kept);
            }
            placement
                if !matches!(room, Room::Sum(_)) && self.waits(&mut state, sender, &push, placement) =>
            {
                return Ok(Reserved::Later);
            }
            _ => return Ok(Reserved::Skip),
        };
        // The core lets nothing come before its plan has its memory.
        let Some(job) = state.job_of(plan) else { return Ok(Reserved::Skip) };
        let mut target = None;
        let closes = matches!(room, Room::Stream);
        if place.first && !place.last && !place.kept && (closes || matches!(room, Room::Sum(_))) {
            target = job.destination(block, form).map_err(Refusal::other)?;
        }
        if let Room::Sum(suits) = room {
            let bytes = target.as_mut().map(store::Target::bytes);
            if !bytes.is_some_and(|bytes| suits(bytes.as_ptr(), bytes.len())) {
                return Ok(Reserved::Skip);
            }
        }
        state.core.reserve(client, plan, block.0, sent);
        let comes = closes || target.is_some();
        if let (true, Some(link)) = (comes, &sender.link) {
            state.coming.push(Coming { plan, block, link: link.clone(), closes });
        }
        let counts = self.counts(&state, client, block);
        let (partition, job, together) = (Arc::clone(self), Some(job), SmallVec::new());
        let reservation =
            Reservation { partition, client, push, place, counts, job, target, comes, saved: 0, together };
        Ok(Reserved::Ready(reservation))
    }

    /// Takes a block that came with a commit from the front of `bytes`. False if it does not go to its place at once.
    ///
    /// # Errors
    /// If it is no block of the model.
    pub(in crate::server) fn push_with_commit(
        self: &Arc<Partition>,
        client: ClientId,
        plan: PlanId,
        block: BlockId,
        bytes: &mut &[u8],
    ) -> Result<bool, Refusal> {
        let push = self.push_of(plan, block, Form::Plain, false)?;
        let Some((payload, rest)) = bytes.split_at_checked(push.len) else { return Ok(false) };
        *bytes = rest;
        match self.reserve(&mut Sender::here(client), push, Room::None)? {
            Reserved::Ready(reservation) => reservation.complete(payload, || true).map(|()| true),
            Reserved::Kept | Reserved::Later | Reserved::Skip => Ok(false),
        }
    }

    /// The ranges of a client's block that count, if values are replaced and not all of it was written.
    fn counts(&self, state: &PartitionState, client: ClientId, block: BlockId) -> Option<Vec<Range<u32>>> {
        state.written(client, self.store.partition().global(block).unwrap_or_default())
    }

    /// Whether a payload without a reservation must wait. Its sender is woken later.
    fn waits(
        &self,
        state: &mut PartitionState,
        sender: &mut Sender,
        push: &Push,
        placement: Placement,
    ) -> bool {
        if placement != Placement::Later {
            return false;
        }
        let Some(link) = &sender.link else {
            state.here.waits = true;
            return true;
        };
        if !state.core.knows_plan(push.plan) && !sender.unknown_plan.waits(push.plan, Instant::now()) {
            let Push { plan, block, .. } = push;
            tracing::debug!(model = %self.model, %plan, %block, "skipped: its plan is not known");
            return false;
        }
        state.wait(link);
        true
    }

    /// The answer that [`Self::reserve`] would give, for a payload that is worth fetching only if it is taken. If it
    /// has to wait, its sender is woken later.
    pub(in crate::server) fn turn(&self, sender: &mut Sender, push: &Push) -> Turn {
        let mut state = self.state.lock();
        match state.core.peek(sender.client, push.plan, push.block.0, push.sent()) {
            Placement::Ready(_) => Turn::Now,
            placement if self.waits(&mut state, sender, push, placement) => Turn::Later,
            _ => Turn::Never,
        }
    }

    /// Whether a payload would be taken at once.
    pub(in crate::server) fn is_due(&self, sender: &Sender, push: &Push) -> bool {
        let placement = self.state.lock().core.peek(sender.client, push.plan, push.block.0, push.sent());
        matches!(placement, Placement::Ready(_))
    }
}

impl Reservation {
    /// The place to receive the payload into, if it has one. The reservation must be kept until the payload has come
    /// or the connection has ended.
    pub(in crate::server) fn target(&mut self) -> Option<Target> {
        let guard = Arc::clone(&self.partition) as Guard;
        let bytes = self.target.as_mut()?.bytes();
        // SAFETY: the block is claimed until the reservation ends, which is when the payload has come or the
        // connection has ended. The memory is the partition's, and the guard keeps it.
        Some(unsafe { Target::new(bytes.as_mut_ptr(), bytes.len(), guard) })
    }

    /// Like [`Self::target`], for a device that may use the memory for longer. The reservation does not end before
    /// the target is dropped. [`Self::complete_fetched`] completes it.
    pub(in crate::server) fn fetch(mut self) -> (Option<Target>, Arc<Reservation>) {
        let bytes = self.target.as_mut().map(|target| {
            let bytes = target.bytes();
            (bytes.as_mut_ptr(), bytes.len())
        });
        let this = Arc::new(self);
        // SAFETY: the block is claimed and its memory exists as long as the guard lives, and nobody asks for its
        // bytes before.
        let target = bytes.map(|(start, len)| unsafe { Target::new(start, len, Arc::clone(&this) as Guard) });
        (target, this)
    }

    /// Completes a reservation whose payload was fetched. The target must have been dropped.
    pub(in crate::server) fn complete_fetched(self: Arc<Reservation>) -> Result<(), Refusal> {
        let still = || Refusal::other("a block that has come is still being fetched");
        Arc::into_inner(self).ok_or_else(still)?.complete(&[], || true)
    }

    /// Whether the plan is given up. Then nobody waits for a late fetch.
    pub(in crate::server) fn is_abandoned(&self) -> bool {
        !self.partition.state.lock().core.wants(self.push.plan)
    }

    /// Completes the reservation. `bytes` is the payload, unless it was received into its place.
    ///
    /// If the bytes are in a client's memory, `stands` says after they were read whether the loan still stands. If not,
    /// they may belong to another contribution, and the plan is given up. If they hold NaN or Inf, the partition
    /// reports their client to the coordinator.
    pub(in crate::server) fn complete(
        self,
        bytes: &[u8],
        stands: impl FnOnce() -> bool,
    ) -> Result<(), Refusal> {
        let payload = Payload::of(self.push.form, bytes);
        let input = BlockInput { payload, written: None, check: self.place.check };
        self.complete_with(&[input], true, stands).map(drop).map_err(Refusal::other)
    }

    /// Whether the payload is of new weights. Only they can come as what they change.
    pub(in crate::server) fn is_of_weights(&self) -> bool {
        self.job.as_ref().is_some_and(|job| matches!(job.work(), Work::Assign { .. }))
    }

    /// Like [`Self::complete`], for what new weights change in the block of version `base`: all of the block has the
    /// checksum `crc` then. A block that cannot be made here can come again.
    pub(in crate::server) fn complete_changes(
        mut self,
        (base, crc): (Version, u32),
        patch: &[u8],
    ) -> Result<(), Refusal> {
        thread_local!(static MADE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) });
        let Push { block, plan, .. } = self.push;
        let Some(old) = self.partition.store.version(base) else {
            tracing::debug!(model = %self.partition.model, %plan, %block, %base, "changes of a version that is not here");
            return Ok(());
        };
        MADE.with_borrow_mut(|made| {
            made.clear();
            made.extend_from_slice(old.block(block));
            drop(old);
            if let Err(why) = Changed::apply(patch, made) {
                return Err(Refusal::other(why));
            }
            if crc32c(made) != crc {
                tracing::warn!(model = %self.partition.model, %plan, %block, %base, "changes have not made the client's block, so it comes on the whole");
                return Ok(());
            }
            self.saved = made.len() - patch.len().min(made.len());
            self.complete(made, || true)
        })
    }

    /// Like [`Self::complete`], for several payloads, which are added in their order. If one holds NaN or Inf and
    /// that is not reported to the coordinator (`is_reported`), the block can come again.
    pub(super) fn complete_with(
        mut self,
        inputs: &[BlockInput<'_>],
        is_reported: bool,
        stands: impl FnOnce() -> bool,
    ) -> Result<Pushed, PartitionError> {
        let Some(job) = self.job.clone() else { return Ok(Pushed::Unwanted) };
        let partition = Arc::clone(&self.partition);
        let mut all_stand = true;
        let bad = match self.target.take() {
            Some(target) => {
                partition.store.tally().stored(self.push.len);
                partition.store.tally().moved(Flow::Push, self.push.len);
                (!target.complete(self.counts.as_deref()) && self.place.check).then_some(0)
            }
            None => match if self.place.kept { self.take_kept()? } else { Some(Together::new()) } {
                Some(with) => {
                    let bad = self.reduce(&job, inputs, &with)?;
                    all_stand = with.iter().all(|other| other.kept.lent.stands());
                    bad
                }
                None => {
                    all_stand = false;
                    None
                }
            },
        };
        // New weights lie in memory that is not written again.
        let stands = matches!(job.work(), Work::Assign { .. }) || (stands() && all_stand);
        drop(job);
        let Push { plan, block, .. } = self.push;
        let (pushed, outcome) = match bad {
            _ if !stands => {
                tracing::debug!(model = %partition.model, %plan, %block, "a payload may have changed while it was read, or has gone");
                (Pushed::Unwanted, ReservationOutcome::Torn)
            }
            None => (Pushed::Taken, ReservationOutcome::Complete),
            Some(_) if is_reported => (Pushed::Taken, ReservationOutcome::NonFinite),
            // It was added to others.
            Some(_) if !self.place.first && !self.place.last => (Pushed::Unwanted, ReservationOutcome::Torn),
            Some(bad) => (Pushed::NonFinite(bad), ReservationOutcome::Released),
        };
        // Together with others, each client has one payload.
        let whose = bad.and_then(|bad| self.together.get(bad)).copied().unwrap_or(self.client);
        self.end(outcome, whose);
        Ok(pushed)
    }

    /// Adds payloads to the plan, together with kept ones, and computes the block if these are the last. Returns the
    /// index of a payload that holds NaN or Inf.
    fn reduce(
        &self,
        job: &PartitionJob,
        own: &[BlockInput<'_>],
        with: &[Other],
    ) -> Result<Option<usize>, PartitionError> {
        let before = self.together.iter().position(|client| *client == self.client).unwrap_or(0);
        let (before, after) = with.split_at(before);
        let counts = self.counts.as_deref();
        let own = own.iter().map(|input| (*input, counts));
        let all = before.iter().map(Other::input).chain(own).chain(after.iter().map(Other::input));
        let all = all.collect::<SmallVec<[_; INLINE]>>();
        let counted: SmallVec<[Option<Vec<Range<u32>>>; INLINE]> =
            all.iter().map(|(input, counts)| Some(counted(input.written, (*counts)?))).collect();
        let inputs = all.iter().zip(&counted);
        let inputs = inputs.map(|((input, _), counted)| BlockInput {
            written: counted.as_deref().or(input.written),
            ..*input
        });
        let inputs: SmallVec<[BlockInput<'_>; INLINE]> = inputs.collect();
        let moved: usize = inputs.iter().map(|input| input.payload.bytes().len()).sum();
        self.partition.store.tally().moved(Flow::Push, moved - self.saved);
        match self.place.last {
            true => job.finish_all(self.push.block, &inputs),
            false => job.add_all(self.push.block, &inputs),
        }
    }

    /// Ends the reservation, and those of the payloads in the same pass. If NaN or Inf was found, `whose` is its
    /// client.
    fn end(&mut self, outcome: ReservationOutcome, whose: ClientId) {
        // The target is dropped first: once the core knows of the end, others may use the memory.
        self.target = None;
        if self.job.take().is_none() {
            return;
        }
        let Push { plan, block, .. } = self.push;
        let mut state = self.partition.state.lock();
        if self.comes {
            let is_this = |coming: &Coming| coming.plan == plan && coming.block == block;
            if let Some(at) = state.coming.iter().position(is_this) {
                state.coming.swap_remove(at);
            }
        }
        if self.together.is_empty() {
            self.together.push(self.client);
        }
        let mut actions = Vec::new();
        for &client in &self.together {
            let outcome = match outcome {
                ReservationOutcome::NonFinite if client != whose => ReservationOutcome::Released,
                outcome => outcome,
            };
            state.core.end(client, plan, block.0, outcome, &mut actions);
        }
        self.partition.act(state, actions);
    }

    /// Like [`Reservation::complete`], for a lent payload.
    pub(in crate::server) fn complete_lent(self, lent: &Lent) -> Result<(), Refusal> {
        self.complete(lent.bytes(), || lent.stands())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.end(ReservationOutcome::Released, self.client);
    }
}

/// The ranges of a block that count, if only `written` was written.
fn counted(written: Option<&[Range<u32>]>, counts: &[Range<u32>]) -> Vec<Range<u32>> {
    match written {
        None => counts.to_vec(),
        Some(written) => ranges::without(written, &ranges::without(written, counts)),
    }
}

#[cfg(test)]
mod tests;
