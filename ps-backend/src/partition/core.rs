//! The decisions about each block that reaches a shard's partition of a model. Pure: events go in, and placements and
//! actions come out. It has no bytes, no socket and no clock.
//!
//! One plan is under way at a time. Each of its blocks is stored, added to or finished as the payloads of its sources
//! come. The core reserves the block for one payload at a time, and says what to do with it. The edge does that, and
//! reports the outcome ([`PartitionCore::end`]). A refused payload changes nothing, whatever it holds. The plan's
//! number and its record of sent blocks identify late, repeated and reordered payloads.
//!
//! Numbers of plans follow each other, and the coordinator states its number with each connection. So a number that
//! another process has stated over another connection does not last: see [`PartitionCore::coordinated_anew`].
//!
//! In this module, blocks are numbered within the partition.

mod kept;
mod orders;
mod readers;

use std::ops::Range;

use fixedbitset::FixedBitSet;
pub use kept::{NotTaken, Taken};
use libmodelio::vocabulary::ids::{ClientId, PlanId, Version};
use libmodelio::vocabulary::reducer;
use libmodelio::wire::Work;
pub use readers::Ahead;
use readers::Readers;

/// A source of a plan: the blocks that it sends, and those that it has sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// The client.
    pub client: ClientId,
    /// The blocks that it sends.
    pub blocks: FixedBitSet,
    /// Whether NaN and Inf in them are refused.
    pub check: bool,
    /// Whether it may send any block. The sealed plan names the blocks that it does send.
    pub provisional: bool,
}

/// A plan as the core needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct PartitionPlan {
    /// The number, which is above the numbers of all earlier plans.
    pub id: PlanId,
    /// The work on the blocks.
    pub work: Work,
    /// The version that it starts from.
    pub base: Version,
    /// The senders and their blocks.
    pub sources: Vec<Source>,
    /// Whether payloads are added in the order of the sources.
    pub ordered: bool,
    /// Whether the version changes optimizer state in place. It is made once the plan is concluded.
    pub in_place: bool,
}

impl PartitionPlan {
    /// Whether a block is finished when all of it has come: computed, or measured. If not, it is only added up.
    fn finishes(&self) -> bool {
        match self.work {
            Work::Add { .. } => false,
            Work::Reduce { .. } => !self.in_place,
            Work::Measure { .. } | Work::Assign { .. } => true,
        }
    }

    /// The index of the source that sends this block for `client`.
    fn source_of(&self, client: ClientId, block: usize) -> Option<usize> {
        let wants = |source: &Source| source.client == client && source.blocks.contains(block);
        self.sources.iter().position(wants)
    }

    /// Whether the plan is not sealed yet.
    pub fn is_provisional(&self) -> bool {
        self.sources.iter().any(|source| source.provisional)
    }

    /// Whether `sealed` is the sealed form of this plan. Then all blocks that were computed under it stay.
    fn becomes(&self, sealed: &PartitionPlan) -> bool {
        let same_work = match (&self.work, &sealed.work) {
            (
                Work::Reduce { step, groups, fresh_state, .. },
                Work::Reduce { step: other, groups: others, fresh_state: fresh, .. },
            ) => {
                // The highest step of a tensor is known only when the plan is sealed, and so are the factors.
                let alike = |step: &reducer::Step| reducer::Step { t: 0, ..step.clone() };
                alike(step) == alike(other) && groups == others && fresh_state == fresh
            }
            (work, other) => work == other,
        };
        let same_source = |(before, after): (&Source, &Source)| {
            before.client == after.client && (before.provisional || before == after)
        };
        self.is_provisional()
            && !sealed.is_provisional()
            && (self.id, self.base, self.ordered) == (sealed.id, sealed.base, sealed.ordered)
            && same_work
            && self.sources.len() == sealed.sources.len()
            && self.sources.iter().zip(&sealed.sources).all(same_source)
    }
}

/// How a payload comes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// It can be read where it is for as long as the plan takes.
    pub lies: bool,
    /// Its client sent it for the provisional plan. The whole block is written.
    pub ahead: bool,
}

/// What to do with a reserved payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservedPlace {
    /// The payload is the first of its block. It is stored in the running plan's accumulator, and others are added to
    /// it.
    pub first: bool,
    /// The payload is the last of its block. The next version's block is computed from it and the accumulator, or the
    /// block's sum is measured with it.
    pub last: bool,
    /// Whether NaN and Inf in it are refused.
    pub check: bool,
    /// Whether kept payloads are added in the same pass. [`PartitionCore::take_kept`] names them.
    pub kept: bool,
}

/// The decision about a payload that is about to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The payload may come. The edge reports the end of its reservation by [`PartitionCore::end`].
    Ready(ReservedPlace),
    /// The payload can be read where it lies, and others of its block are still to come. It is kept, and read with
    /// the last of them. If it does not stay there, the edge reports that by [`PartitionCore::is_gone`].
    Keep,
    /// The payload was taken before, and has no effect.
    Duplicate,
    /// The plan is over, or does not want this block of this client. The payload has no effect.
    Unwanted,
    /// The payload must wait: the block is reserved for another payload, this one's turn has not come, or the plan
    /// has not begun here or is not sealed. Ask again when a reservation has ended, or a plan has begun or is sealed.
    Later,
}

/// How a reservation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationOutcome {
    /// The payload is in its place.
    Complete,
    /// The payload holds NaN or Inf, which are refused. Nothing of the plan can count.
    NonFinite,
    /// The payload was read from memory whose loan may have ended before. Nothing of the plan can count.
    Torn,
    /// The payload did not come, or was damaged. It can come again.
    Released,
}

/// Work for the edge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Take the memory for the plan; then call [`PartitionCore::begun`].
    Begin(PlanId),
    /// The running plan is sealed. Blocks are computed with its final form from now on.
    Sealed(PlanId),
    /// Compute these blocks, for which no more payload comes. Then call [`PartitionCore::computed`].
    Compute(PlanId, FixedBitSet),
    /// The plan counts. Compute these blocks, or what is left to do of them, and change their state in place. Then call
    /// [`PartitionCore::computed`].
    Make(PlanId, FixedBitSet),
    /// All payloads of these blocks have come or are kept. Reserve the kept ones by [`PartitionCore::reserve_kept`].
    Gather(PlanId, FixedBitSet),
    /// Tell the coordinator that all blocks have come and are computed.
    Ready(PlanId),
    /// Tell the coordinator which client's contribution is refused.
    NonFinite {
        /// The plan.
        plan: PlanId,
        /// The client.
        client: ClientId,
        /// The block.
        block: u32,
    },
    /// Tell the coordinator that the plan cannot be completed here: a payload may have changed while it was read.
    Torn(PlanId),
    /// The plan's result counts. Publish the version, or keep the sum.
    Conclude(PlanId),
    /// The plan's result is void. None of its reservations is left.
    Void(PlanId),
    /// End the reservations of this plan soon.
    Abandon(PlanId),
    /// Tell the coordinator that this plan is concluded or dropped.
    Done(PlanId),
}

/// An order that contradicts the partition's state. The coordinator and the partition do not belong to the same job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartitionError {
    /// The plan starts from another version than the partition holds.
    #[error("plan {plan} starts from version {base}, but this partition holds version {version}")]
    Base {
        /// The plan.
        plan: PlanId,
        /// Its base.
        base: Version,
        /// The partition's version.
        version: Version,
    },
    /// The plan cannot be concluded, because it is not complete here.
    #[error("plan {0} is to be concluded, but is not complete here")]
    NotReady(PlanId),
    /// A plan begins while another one is under way.
    #[error("plan {new} begins while plan {running} is under way")]
    Overlap {
        /// The plan that begins.
        new: PlanId,
        /// The plan under way.
        running: PlanId,
    },
    /// The plan is over, or does not follow the newest one. Or another plan is ready here that its coordinator may
    /// still conclude, and this connection has not named it.
    #[error("plan {plan} is past, or not the next one: the newest here is {newest}")]
    Order {
        /// The plan.
        plan: PlanId,
        /// The newest one here.
        newest: PlanId,
    },
    /// The plan does not fit the partition.
    #[error("plan {0} is not of this partition's blocks")]
    Shape(PlanId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The edge is taking the plan's memory.
    Beginning,
    Gathering,
    Ready,
    /// The plan is concluded, and its version is being made in place. This stage always ends with the version.
    Making,
    /// A payload was refused. The coordinator must drop the plan.
    NonFinite {
        client: ClientId,
        block: u32,
    },
    /// A payload may have changed while it was read. The coordinator must drop the plan.
    Torn,
    /// The plan was dropped while blocks were reserved.
    Dropped,
    /// The coordinator does not know the plan: another process has started it. Blocks are reserved.
    Disowned,
}

/// The most blocks that are made at once in place, if there may be readers who wait for the first ones.
const MADE_AT_ONCE: usize = 64;

#[derive(Debug)]
struct Running {
    plan: PartitionPlan,
    stage: Stage,
    /// Whether the coordinator of the newest connection has started the plan, or has repeated its start.
    vouched: bool,
    /// For each source, the blocks that have come.
    got: Vec<FixedBitSet>,
    /// For each source, the blocks that are kept.
    kept: Vec<FixedBitSet>,
    /// For each block, the number of payloads that have come, and of all that will.
    came: Vec<u32>,
    wanted: Vec<u32>,
    /// For each block, whether it is reserved or being computed.
    busy: FixedBitSet,
    /// For each block, busy or not, whether its last payload computes it or has done so.
    last: FixedBitSet,
    /// The blocks that are being computed without a payload.
    computing: FixedBitSet,
    in_flight: u32,
    /// The number of payloads and computations that are still to come.
    left: u64,
}

/// One shard's partition of a model, without its memory.
#[derive(Debug)]
pub struct PartitionCore {
    blocks: u32,
    version: Version,
    running: Option<Running>,
    /// The newest plan that began or was dropped here.
    newest: PlanId,
    /// The newest plan that was concluded here.
    concluded: Option<PlanId>,
    /// The most blocks that are made at once in place.
    made_at_once: usize,
    readers: Readers,
}

impl PartitionCore {
    /// A partition of `blocks` blocks at `version`.
    pub fn new(blocks: u32, version: Version) -> PartitionCore {
        PartitionCore {
            blocks,
            version,
            running: None,
            newest: PlanId(0),
            concluded: None,
            made_at_once: MADE_AT_ONCE,
            readers: Readers::default(),
        }
    }

    /// Nobody reads blocks before all are computed, so that all are made at once.
    pub fn without_early_readers(self) -> PartitionCore {
        let all = self.blocks as usize;
        self.making(all)
    }

    /// A version that changes state in place is made by so many blocks at once.
    pub fn making(self, at_once: usize) -> PartitionCore {
        PartitionCore { made_at_once: at_once, ..self }
    }

    /// The newest version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Whether the plan under way is not sealed yet.
    pub fn is_provisional(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.plan.is_provisional())
    }

    /// The plan under way, and the number of payloads and computations that are still to come.
    pub fn running(&self) -> Option<(PlanId, u64)> {
        self.running.as_ref().map(|running| (running.plan.id, running.left))
    }

    /// Whether the partition knows this plan, or a later one.
    pub fn knows_plan(&self, plan: PlanId) -> bool {
        plan <= self.newest
    }

    /// Whether the plan goes on. If not, an edge that waits for memory can stop.
    pub fn wants(&self, plan: PlanId) -> bool {
        let live = |running: &Running| running.plan.id == plan && !running.is_void();
        self.running.as_ref().is_some_and(live)
    }

    /// Whether the plan has begun, and does not have its memory yet.
    pub fn begins(&self, plan: PlanId) -> bool {
        self.running
            .as_ref()
            .is_some_and(|running| running.plan.id == plan && running.stage == Stage::Beginning)
    }

    /// The plan has its memory, or is no longer wanted.
    pub fn begun(&mut self, plan: PlanId, actions: &mut Vec<Action>) {
        let Some(running) = self.running_if(plan) else { return };
        running.in_flight -= 1;
        if running.stage != Stage::Beginning {
            return self.settle(actions);
        }
        running.stage = Stage::Gathering;
        running.compute_rest(actions);
        self.check_ready(actions);
    }

    /// The blocks of [`Action::Compute`] are computed, or those of [`Action::Make`] are made.
    pub fn computed(&mut self, plan: PlanId, actions: &mut Vec<Action>) {
        let at_once = self.made_at_once;
        let Some(running) = self.running_if(plan) else { return };
        running.in_flight -= 1;
        let computed = std::mem::take(&mut running.computing);
        running.busy.difference_with(&computed);
        running.left = running.left.saturating_sub(computed.count_ones(..) as u64);
        let is_made = running.stage == Stage::Making && running.left == 0;
        match running.stage {
            Stage::Making => running.make_more(at_once, actions),
            _ => running.compute_rest(actions),
        }
        self.readers.notify();
        if is_made && let Some(made) = self.running.take() {
            return self.is_concluded(&made.plan, actions);
        }
        self.check_ready(actions);
        self.settle(actions);
    }

    /// A block of `client` is about to come. If it may come, no other payload of the block is taken until
    /// [`Self::end`]. This is a hot path, and allocates nothing.
    pub fn reserve(&mut self, client: ClientId, plan: PlanId, block: u32, sent: Sent) -> Placement {
        let placement = self.peek(client, plan, block, sent);
        let Some(running) = &mut self.running else { return placement };
        match placement {
            Placement::Ready(place) => {
                running.busy.insert(block as usize);
                running.in_flight += 1;
                if place.last {
                    running.last.insert(block as usize);
                }
            }
            Placement::Keep => {
                if let Some(at) = running.plan.source_of(client, block as usize) {
                    running.kept[at].insert(block as usize);
                }
            }
            Placement::Duplicate | Placement::Unwanted | Placement::Later => {}
        }
        placement
    }

    /// The answer that [`Self::reserve`] would give. It reserves nothing.
    pub fn peek(&self, client: ClientId, plan: PlanId, block: u32, sent: Sent) -> Placement {
        if plan > self.newest {
            return Placement::Later;
        }
        let Some(running) = self.running.as_ref().filter(|running| running.plan.id == plan) else {
            return Placement::Unwanted;
        };
        match running.stage {
            Stage::Beginning => return Placement::Later,
            Stage::Gathering => {}
            Stage::Ready | Stage::Making => return Placement::Duplicate,
            Stage::NonFinite { .. } | Stage::Torn | Stage::Dropped | Stage::Disowned => {
                return Placement::Unwanted;
            }
        }
        let b = block as usize;
        let Some(at) = running.plan.source_of(client, b) else { return Placement::Unwanted };
        if running.got[at].contains(b) || running.kept[at].contains(b) {
            return Placement::Duplicate;
        }
        // Of a block that is not whole, the sealed plan alone says what is written.
        let is_early = running.plan.sources[at].provisional && !sent.ahead;
        if is_early || running.busy.contains(b) {
            return Placement::Later;
        }
        let is_last = running.came[b] + running.count_kept(b) + 1 == running.wanted[b];
        if sent.lies && !is_last {
            return Placement::Keep;
        }
        if running.plan.ordered && !is_last && !running.has_turn(at, b) {
            return Placement::Later;
        }
        let kept = running.goes_with(at, b, is_last).next().is_some();
        Placement::Ready(ReservedPlace {
            first: running.came[b] == 0,
            last: running.plan.finishes() && is_last,
            check: running.plan.sources[at].check,
            kept,
        })
    }

    /// The reservation of a block has ended.
    pub fn end(
        &mut self,
        client: ClientId,
        plan: PlanId,
        block: u32,
        outcome: ReservationOutcome,
        actions: &mut Vec<Action>,
    ) {
        let Some(running) = self.running_if(plan) else { return };
        let b = block as usize;
        running.busy.set(b, false);
        running.in_flight -= 1;
        if outcome == ReservationOutcome::Released {
            running.last.set(b, false);
        }
        if running.stage == Stage::Gathering {
            match (outcome, running.plan.source_of(client, b)) {
                (ReservationOutcome::Complete, Some(at)) => {
                    running.got[at].insert(b);
                    running.came[b] += 1;
                    running.left = running.left.saturating_sub(1);
                }
                (ReservationOutcome::NonFinite, Some(_)) => {
                    running.stage = Stage::NonFinite { client, block };
                    actions.push(Action::NonFinite { plan, client, block });
                }
                (ReservationOutcome::Torn, _) => {
                    running.stage = Stage::Torn;
                    actions.push(Action::Torn(plan));
                }
                (ReservationOutcome::Released, _) | (_, None) => {}
            }
        }
        // When this payload was reserved for, another one of the block was expected.
        if running.stage == Stage::Gathering
            && running.came[b] == running.wanted[b]
            && !running.last.contains(b)
        {
            running.compute_rest(actions);
        }
        let has_news = running.stage != Stage::Gathering || running.last.contains(b);
        if running.stage == Stage::Gathering && running.is_gathered(b) {
            let mut one = FixedBitSet::with_capacity(running.wanted.len());
            one.insert(b);
            actions.push(Action::Gather(plan, one));
        }
        if has_news {
            self.readers.notify();
        }
        self.check_ready(actions);
        self.settle(actions);
    }

    /// The blocks that are still to come from `client`, including those with a reservation. `None` if this is
    /// unknown, because the plan has not begun here.
    pub fn missing(&self, client: ClientId, plan: PlanId) -> Option<FixedBitSet> {
        let mut missing = FixedBitSet::with_capacity(self.blocks as usize);
        if plan > self.newest {
            return None;
        }
        let Some(running) = self.running.as_ref().filter(|running| running.plan.id == plan) else {
            return Some(missing);
        };
        match running.stage {
            Stage::Beginning => return None,
            // The sources are not known before the plan is sealed.
            Stage::Gathering if running.plan.is_provisional() => return None,
            Stage::Gathering => {}
            Stage::Ready
            | Stage::Making
            | Stage::NonFinite { .. }
            | Stage::Torn
            | Stage::Dropped
            | Stage::Disowned => return Some(missing),
        }
        for (at, source) in running.plan.sources.iter().enumerate() {
            if source.client == client {
                missing.union_with(&source.blocks);
                missing.difference_with(&running.got[at]);
                missing.difference_with(&running.kept[at]);
            }
        }
        Some(missing)
    }

    /// The clients that a sealed plan waits for, each with the number of blocks that are still to come from it. Where
    /// the order of clients counts, it is the first of them: the others may wait for it.
    pub fn lacking(&self, plan: PlanId) -> Vec<(ClientId, u32)> {
        let Some(running) = &self.running else { return Vec::new() };
        let mut lacking = Vec::new();
        for source in &running.plan.sources {
            let blocks = self.missing(source.client, plan).map_or(0, |missing| missing.count_ones(..) as u32);
            let is_new = lacking.iter().all(|(client, _)| *client != source.client);
            if blocks > 0 && is_new {
                lacking.push((source.client, blocks));
            }
        }
        if running.plan.ordered {
            lacking.truncate(1);
        }
        lacking
    }

    /// Of a sealed plan that is about to be dropped: the clients whose blocks it wants, each with the number of these
    /// if none has come, and with 0 if one has. Where their order counts, the others may wait for the first one that
    /// has sent nothing, and are left out. `None` for a plan that has not begun here, or has ended.
    pub fn silent(&self, plan: PlanId) -> Option<Vec<(ClientId, u32)>> {
        let running = self.running.as_ref().filter(|running| running.plan.id == plan)?;
        let failed = match running.stage {
            _ if running.plan.is_provisional() => return None,
            Stage::Gathering | Stage::Ready | Stage::Torn => None,
            Stage::NonFinite { client, .. } => Some(client),
            Stage::Beginning | Stage::Making | Stage::Dropped | Stage::Disowned => return None,
        };
        let mut clients: Vec<(ClientId, u32)> = Vec::new();
        for source in running.plan.sources.iter().filter(|source| !source.blocks.is_clear()) {
            let client = source.client;
            if clients.iter().any(|(known, _)| *known == client) {
                continue;
            }
            let of_it =
                || (0..running.plan.sources.len()).filter(|&at| running.plan.sources[at].client == client);
            let has_come = |at: usize| !running.got[at].is_clear() || !running.kept[at].is_clear();
            let wanted = of_it().map(|at| running.plan.sources[at].blocks.count_ones(..) as u32).sum();
            let has_sent = failed == Some(client) || of_it().any(has_come);
            clients.push((client, if has_sent { 0 } else { wanted }));
        }
        if running.plan.ordered {
            let mut may_wait = false;
            clients.retain(|(_, wanted)| *wanted == 0 || !std::mem::replace(&mut may_wait, true));
        }
        Some(clients)
    }

    fn running_if(&mut self, plan: PlanId) -> Option<&mut Running> {
        self.running.as_mut().filter(|running| running.plan.id == plan)
    }

    fn check_ready(&mut self, actions: &mut Vec<Action>) {
        if let Some(running) = &mut self.running
            && running.stage == Stage::Gathering
            && running.left == 0
            && !running.plan.is_provisional()
        {
            running.stage = Stage::Ready;
            actions.push(Action::Ready(running.plan.id));
        }
    }

    /// Ends a void plan when no reservation of it is left.
    fn settle(&mut self, actions: &mut Vec<Action>) {
        let over = |running: &mut Running| running.is_void() && running.in_flight == 0;
        if let Some(running) = self.running.take_if(over) {
            actions.push(Action::Void(running.plan.id));
            if running.stage == Stage::Dropped {
                actions.push(Action::Done(running.plan.id));
            }
        }
    }

    /// Nothing is left to do for a plan that counts.
    pub(super) fn is_concluded(&mut self, plan: &PartitionPlan, actions: &mut Vec<Action>) {
        let id = plan.id;
        if plan.work.makes_version() {
            self.version = self.version.next();
            self.readers.made(id, self.version);
        }
        self.concluded = Some(id);
        self.readers.concluded(id);
        actions.extend([Action::Conclude(id), Action::Done(id)]);
    }
}

impl Running {
    /// Computes or measures the blocks that get no more payload and that no last payload has computed.
    fn compute_rest(&mut self, actions: &mut Vec<Action>) {
        if !self.plan.finishes() || self.plan.is_provisional() || !self.computing.is_clear() {
            return;
        }
        let whole = |block: &usize| self.came[*block] == self.wanted[*block];
        let rest = |block: &usize| whole(block) && !self.last.contains(*block) && !self.busy.contains(*block);
        let mut alone = FixedBitSet::with_capacity(self.wanted.len());
        alone.extend((0..self.wanted.len()).filter(rest));
        if alone.is_clear() {
            return;
        }
        self.left += alone.count_ones(..) as u64;
        self.last.union_with(&alone);
        self.busy.union_with(&alone);
        self.computing.clone_from(&alone);
        self.in_flight += 1;
        actions.push(Action::Compute(self.plan.id, alone));
    }

    /// Makes the next blocks of a version that counts. Readers want them in this order.
    fn make_more(&mut self, at_once: usize, actions: &mut Vec<Action>) {
        let blocks = self.wanted.len();
        let next = blocks - self.left as usize;
        let mut some = FixedBitSet::with_capacity(blocks);
        some.insert_range(next..blocks.min(next + at_once));
        if some.is_clear() {
            return;
        }
        if !self.plan.finishes() {
            self.last.union_with(&some);
            self.busy.union_with(&some);
        }
        self.computing.clone_from(&some);
        self.in_flight += 1;
        actions.push(Action::Make(self.plan.id, some));
    }

    /// Whether nothing of this plan can count any more.
    fn is_void(&self) -> bool {
        matches!(self.stage, Stage::Dropped | Stage::Disowned)
    }
}

/// The blocks in `ranges` (of the whole model) that are among `mine`, by their index there.
pub fn local_blocks(ranges: &[Range<u32>], mine: &[libmodelio::vocabulary::ids::BlockId]) -> FixedBitSet {
    let mut local = FixedBitSet::with_capacity(mine.len());
    for range in ranges {
        let from = mine.partition_point(|block| block.0 < range.start);
        let to = mine.partition_point(|block| block.0 < range.end);
        local.insert_range(from..to);
    }
    local
}

#[cfg(test)]
mod tests;
