//! Blocks on their way: into sums and versions, and from versions to clients.
//!
//! One of the modules that hold `unsafe`: memory of sums and versions is lent to connections.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use libmodelio::transport::frames::{Link, Outgoing, Take};
use libmodelio::transport::stream::{Guard, Piece, Target};
use libmodelio::transport::tally::Flow;
use libmodelio::vocabulary::block_ranges;
use libmodelio::vocabulary::ids::{BlockId, ClientId, PlanId, Version};
use libmodelio::wire::{Message, Received, Refusal};

use super::Partition;
use crate::partition::core::Placement;
#[cfg(feature = "rdma")]
use crate::partition::fetches::Turn;
use crate::partition::store::{self, Part, PartitionJob, PartitionWork, Payload, PinnedVersion};
use crate::partition::unheard::Unheard;
#[cfg(feature = "rdma")]
use crate::region_store::accumulator::is_direct;

/// A payload on its way into the partition.
pub(in crate::server) struct Landing {
    plan: PlanId,
    client: ClientId,
    /// Within the partition.
    block: BlockId,
    wide: bool,
    how: Placement,
    /// What of it counts where values are replaced, if that is not all.
    written: Option<Vec<Range<u32>>>,
    job: Arc<PartitionJob>,
    target: Option<store::Target>,
}

/// A payload that is being fetched straight into its sum. Who fetches it holds its memory, too.
#[cfg(feature = "rdma")]
pub(in crate::server) struct Fetching {
    landing: Landing,
    target: Arc<store::Target>,
}

/// The plan of which payloads are being fetched straight into sums, and by which connections.
#[cfg(feature = "rdma")]
#[derive(Default)]
pub(super) struct FetchingPlan {
    plan: PlanId,
    links: Vec<Link>,
    given_up: Option<Instant>,
}

#[cfg(feature = "rdma")]
impl FetchingPlan {
    pub(super) fn wait_for(&mut self, plan: PlanId, link: &Link) {
        if self.plan != plan {
            *self = FetchingPlan { plan, ..FetchingPlan::default() };
        }
        if !self.links.iter().any(|known| known.is(link)) {
            self.links.push(link.clone());
        }
    }

    /// It was: they see to it that it need not be waited for long.
    pub(super) fn give_up(&mut self, plan: PlanId, now: Instant) {
        if self.plan == plan {
            self.given_up.get_or_insert(now);
            self.links.iter().for_each(Link::wake);
        }
    }

    fn given_up(&self, plan: PlanId) -> Option<Instant> {
        self.given_up.filter(|_| self.plan == plan)
    }
}

impl Partition {
    /// A block is about to come over `link`, which has waited for `unheard`. A block in memory that both ends see is there
    /// already: its bytes go to [`Self::landed`] at once.
    pub(in crate::server) fn arrive(
        self: &Arc<Partition>,
        client: ClientId,
        received: &Received,
        unheard: &mut Unheard,
        link: &Link,
    ) -> Result<(Take, Option<Landing>), Refusal> {
        let Some((plan, global, wide)) = named(received) else { return Ok((Take::Nothing, None)) };
        let comes = matches!(received.message, Message::Push { .. });
        let block = self.store.partition().local(global).ok_or(Refusal::NotMine { block: global })?;
        let payload = if wide { Payload::Wide(&[]) } else { Payload::Plain(&[]) };
        let wanted = payload.wanted_len(self.layout(), block) as u32;
        let fits = received.expect_payload(if comes { wanted } else { 0 });
        fits.map_err(|error| error.to_refusal())?;
        let mut state = self.state.lock();
        let how = state.core.arrive(client, plan, block.0);
        match how {
            Placement::Duplicate | Placement::Unwanted => return Ok((Take::Nothing, None)),
            Placement::Later if !state.core.has_heard_of(plan) && !unheard.waits(plan, Instant::now()) => {
                tracing::debug!(model = %self.model, %plan, block = global.0, "passed over: no word of its plan");
                return Ok((Take::Nothing, None));
            }
            Placement::Later => {
                state.wait(link);
                return Ok((Take::Later, None));
            }
            Placement::Store { .. } | Placement::Add { .. } | Placement::Finish { .. } => {}
        }
        let Some((_, job)) = state.job.clone().filter(|(of, _)| *of == plan) else {
            // The core lets nothing arrive before its plan has its memory.
            let mut actions = Vec::new();
            state.core.failed(plan, block.0, &mut actions);
            self.act(state, actions);
            return Ok((Take::Nothing, None));
        };
        if comes {
            state.landing.push((plan, link.clone()));
        }
        let written = state.written(client, global);
        drop(state);
        let mut landing = Landing { plan, client, block, wide, how, written, job, target: None };
        if comes && matches!(how, Placement::Store { .. }) {
            match landing.job.destination(block, wide) {
                Ok(target) => landing.target = target,
                Err(error) => {
                    self.lost(landing, link);
                    return Err(Refusal::other(error));
                }
            }
        }
        let Some(target) = &mut landing.target else { return Ok((Take::Buffered, Some(landing))) };
        let bytes = target.bytes();
        // SAFETY: the target has the block claimed until `landed` or `lost` is called, which is when the payload is
        // there or the connection over; the memory is the partition's, which the guard keeps.
        let into = unsafe { Target::new(bytes.as_mut_ptr(), bytes.len(), Arc::clone(self) as Guard) };
        Ok((Take::Into(into), Some(landing)))
    }

    /// What [`Self::arrive`] would do with a block that nothing comes of yet: so that nothing need. One that has to wait
    /// waits as there.
    #[cfg(feature = "rdma")]
    pub(in crate::server) fn turn(
        &self,
        client: ClientId,
        received: &Received,
        unheard: &mut Unheard,
        link: &Link,
    ) -> Result<Turn, Refusal> {
        let Some((plan, global, _)) = named(received) else { return Ok(Turn::Never) };
        let block = self.store.partition().local(global).ok_or(Refusal::NotMine { block: global })?;
        let mut state = self.state.lock();
        match state.core.look(client, plan, block.0) {
            Placement::Duplicate | Placement::Unwanted => Ok(Turn::Never),
            Placement::Later if !state.core.has_heard_of(plan) && !unheard.waits(plan, Instant::now()) => {
                tracing::debug!(model = %self.model, %plan, block = global.0, "passed over: no word of its plan");
                Ok(Turn::Never)
            }
            Placement::Later => {
                state.wait(link);
                Ok(Turn::Later)
            }
            Placement::Store { .. } | Placement::Add { .. } | Placement::Finish { .. } => Ok(Turn::Now),
        }
    }

    /// Whether a block would be taken at once.
    #[cfg(feature = "rdma")]
    pub(in crate::server) fn is_due(&self, client: ClientId, received: &Received) -> bool {
        let Some((plan, global, _)) = named(received) else { return false };
        let Some(block) = self.store.partition().local(global) else { return false };
        let placement = self.state.lock().core.look(client, plan, block.0);
        matches!(placement, Placement::Store { .. } | Placement::Add { .. } | Placement::Finish { .. })
    }

    /// The memory of a block's sum, for a payload that is fetched straight into it over `link`, and what `registered` says
    /// of that memory; the block is `client`'s until [`Self::fetched`] or [`Self::not_fetched`]. `None` if the payload
    /// has to be elsewhere first, or to wait, or is not wanted: nothing has changed then.
    #[cfg(feature = "rdma")]
    pub(in crate::server) fn fetch_direct<R>(
        self: &Arc<Partition>,
        client: ClientId,
        received: &Received,
        link: &Link,
        registered: impl FnOnce(*const u8, usize) -> Option<R>,
    ) -> Option<(Target, R, Fetching)> {
        let (plan, global, wide) = named(received)?;
        let block = self.store.partition().local(global)?;
        if !is_direct(self.layout(), block, wide) {
            return None;
        }
        let mut state = self.state.lock();
        let how = state.core.look(client, plan, block.0);
        let job = state.job.as_ref().filter(|(of, _)| *of == plan).map(|(_, job)| Arc::clone(job));
        let (Placement::Store { .. }, Some(job)) = (how, job) else { return None };
        let mut target = job.destination(block, wide).ok()??;
        let bytes = target.bytes();
        let (start, len) = (bytes.as_mut_ptr(), bytes.len());
        let registration = registered(start, len)?;
        state.core.arrive(client, plan, block.0);
        state.fetching.wait_for(plan, link);
        let written = state.written(client, global);
        drop(state);
        let target = Arc::new(target);
        // SAFETY: the block is claimed, and its memory there, as long as the guard lives, and nobody else asks for its
        // bytes: `fetched` does only once the guard is gone.
        let into = unsafe { Target::new(start, len, Arc::clone(&target) as Guard) };
        let landing = Landing { plan, client, block, wide, how, written, job, target: None };
        Some((into, registration, Fetching { landing, target }))
    }

    /// All of it is there. Whoever has put it there has let go of the memory.
    #[cfg(feature = "rdma")]
    pub(in crate::server) fn fetched(
        self: &Arc<Partition>,
        fetching: Fetching,
        link: &Link,
    ) -> Result<(), Refusal> {
        let Fetching { landing, target } = fetching;
        match Arc::into_inner(target) {
            Some(target) => self.landed(Landing { target: Some(target), ..landing }, &[], link),
            None => {
                self.lost(landing, link);
                Err(Refusal::other("a block that has come is still being fetched"))
            }
        }
    }

    /// When its plan was given up, if it was: what is still on its way a while later need not be waited for.
    #[cfg(feature = "rdma")]
    pub(in crate::server) fn given_up(&self, fetching: &Fetching) -> Option<Instant> {
        self.state.lock().fetching.given_up(fetching.landing.plan)
    }

    /// It does not come, and whoever was to put it there has let go of the memory.
    #[cfg(feature = "rdma")]
    pub(in crate::server) fn not_fetched(self: &Arc<Partition>, fetching: Fetching, link: &Link) {
        let Fetching { landing, target } = fetching;
        drop(target);
        self.lost(landing, link);
    }

    /// Its payload is there; `bytes` unless it was received where it belongs.
    pub(in crate::server) fn landed(
        self: &Arc<Partition>,
        landing: Landing,
        bytes: &[u8],
        link: &Link,
    ) -> Result<(), Refusal> {
        self.landed_on_loan(landing, bytes, || true, link)
    }

    /// The same of `bytes` in memory of the client's: `stands` says, once they are read, whether that was lent until then.
    /// If not, they may be those of another contribution, and the plan is not made.
    pub(in crate::server) fn landed_on_loan(
        self: &Arc<Partition>,
        landing: Landing,
        bytes: &[u8],
        stands: impl FnOnce() -> bool,
        link: &Link,
    ) -> Result<(), Refusal> {
        let Landing { plan, client, block, wide, how, written, job, target } = landing;
        let written = written.as_deref();
        let payload = if wide { Payload::Wide(bytes) } else { Payload::Plain(bytes) };
        let len = payload.wanted_len(self.layout(), block);
        self.store.tally().moved(Flow::Push, len);
        if target.is_some() {
            self.store.tally().stored(len);
        }
        let (fine, check) = match (how, target) {
            (Placement::Store { check }, Some(target)) => (Ok(target.complete_written(written)), check),
            (Placement::Store { check } | Placement::Add { check }, None) => {
                (job.add_written(block, payload, written), check)
            }
            (Placement::Finish { check, .. }, _) => {
                let part = Part { payload, written, check };
                (job.finish_all(block, &[part]).map(|bad| bad.is_none()), check)
            }
            _ => (Ok(true), false),
        };
        // New weights lie in memory that is not written again.
        let stands = *job.work() == PartitionWork::Assign || stands();
        // Before the core hears of it: from then on its memory may be wanted.
        drop(job);
        let mut state = self.state.lock();
        state.landing.retain(|(_, of)| !of.is(link));
        let mut actions = Vec::new();
        let outcome = match fine {
            Ok(_) if !stands => {
                tracing::debug!(model = %self.model, %plan, %block, "its client is gone: it may have changed while it was read");
                state.core.torn(plan, block.0, &mut actions);
                Ok(())
            }
            Ok(fit) => {
                state.core.landed(client, plan, block.0, fit || !check, &mut actions);
                Ok(())
            }
            Err(error) => {
                state.core.failed(plan, block.0, &mut actions);
                Err(Refusal::other(error))
            }
        };
        state.wake();
        self.act(state, actions);
        outcome
    }

    /// Its payload did not come.
    pub(in crate::server) fn lost(self: &Arc<Partition>, landing: Landing, link: &Link) {
        let Landing { plan, block, job, target, .. } = landing;
        drop(target);
        drop(job);
        let mut state = self.state.lock();
        state.landing.retain(|(_, of)| !of.is(link));
        let mut actions = Vec::new();
        state.core.failed(plan, block.0, &mut actions);
        state.wake();
        self.act(state, actions);
    }

    /// What is still to come from `client`; nothing where that cannot be said yet.
    pub(in crate::server) fn missing(&self, client: ClientId, plan: PlanId) -> Option<Message> {
        let missing = self.state.lock().core.missing(client, plan)?;
        let mine = self.store.partition().blocks();
        let mut blocks = block_ranges::BlockRanges::new();
        for block in missing.ones().map(|block| mine[block].0).take(block_ranges::MAX_RANGES) {
            match blocks.last_mut() {
                Some(last) if last.end == block => last.end += 1,
                _ => blocks.push(block..block + 1),
            }
        }
        Some(Message::Missing { plan, blocks })
    }

    /// A version to read from; `None` when it is not here yet, and the connection is woken when it may be.
    pub(in crate::server) fn version(
        &self,
        wanted: Version,
        link: &Link,
    ) -> Result<Option<Arc<PinnedVersion>>, Refusal> {
        if let Some(version) = self.store.version(wanted) {
            return Ok(Some(Arc::new(version)));
        }
        let mut state = self.state.lock();
        let newest = state.core.version();
        if wanted > newest {
            state.wait(link);
            return Ok(None);
        }
        drop(state);
        // It may have come in between.
        match self.store.version(wanted) {
            Some(version) => Ok(Some(Arc::new(version))),
            None => Err(Refusal::NoVersion { wanted, newest }),
        }
    }

    /// A block of a version, to be sent.
    pub(in crate::server) fn block(&self, version: &Arc<PinnedVersion>, block: BlockId) -> Option<Outgoing> {
        let local = self.store.partition().local(block)?;
        let crc = version.checksum(local);
        let guard = Arc::clone(version) as Guard;
        // SAFETY: a version's bytes do not change while it is pinned, which the guard does.
        let piece = unsafe { Piece::new(version.block(local), Some(crc), guard) };
        self.store.tally().moved(Flow::Pull, version.block(local).len());
        let message = Message::Block { version: version.version(), block };
        Some(Outgoing { message, request: 0, epoch: self.epoch, payload: Some(piece) })
    }
}

/// The plan and the block of a push, and whether it is wide.
fn named(received: &Received) -> Option<(PlanId, BlockId, bool)> {
    match received.message {
        Message::Push { plan, block, wide }
        | Message::PushAt { plan, block, wide, .. }
        | Message::PushIn { plan, block, wide, .. } => Some((plan, block, wide)),
        _ => None,
    }
}

#[cfg(all(test, feature = "rdma"))]
mod tests;
