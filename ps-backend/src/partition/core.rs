//! What becomes of each block that reaches a shard's partition of a model. Pure: events go in, placements and actions
//! come out; no bytes, no socket, no clock.
//!
//! One plan is under way at a time. Each of its blocks is stored, added to or finished as the payloads of its sources
//! come; the core says which of these a payload is for, the edge does it and says that it [`PartitionCore::landed`]. A
//! payload that is refused here changes nothing, whatever it holds: late, repeated and reordered ones are told apart
//! by the plan's number and its record of who has sent which block.
//!
//! Numbers of plans follow each other, and the coordinator says with each connection where it is, so what somebody else
//! has said over another connection does not last: see [`PartitionCore::coordinated_anew`].
//!
//! Blocks are numbered within the partition here.

use std::ops::Range;

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::ids::{ClientId, PlanId, Version};
use libmodelio::vocabulary::reducer;
use libmodelio::wire::Work;

/// Whether a plan adds up or makes a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Its sum is kept for the coming version.
    Add,
    /// It makes the coming version.
    Reduce,
    /// It makes the coming version from new values; sums that are kept stay for the one after it.
    Assign,
}

impl From<&Work> for Kind {
    fn from(work: &Work) -> Kind {
        match work {
            Work::Add { .. } => Kind::Add,
            Work::Reduce { .. } => Kind::Reduce,
            Work::Assign => Kind::Assign,
        }
    }
}

/// What a source sends, and what it has sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// Who.
    pub client: ClientId,
    /// Which blocks.
    pub blocks: FixedBitSet,
    /// NaN and Inf in them are refused.
    pub check: bool,
    /// It may send any block. Which it does send is said when the plan is sealed.
    pub provisional: bool,
}

/// A plan as the core needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Its number, above those of all plans before it.
    pub id: PlanId,
    /// What becomes of the blocks.
    pub work: Work,
    /// The version that it starts from.
    pub base: Version,
    /// Who sends what.
    pub sources: Vec<Source>,
    /// Add in the order of the sources.
    pub ordered: bool,
}

impl Plan {
    fn kind(&self) -> Kind {
        Kind::from(&self.work)
    }

    /// Whether it is still to be sealed.
    pub fn is_provisional(&self) -> bool {
        self.sources.iter().any(|source| source.provisional)
    }

    /// Whether this plan, sealed, is `sealed`: what has been computed under it stays.
    fn becomes(&self, sealed: &Plan) -> bool {
        let same_work = match (&self.work, &sealed.work) {
            (
                Work::Reduce { step, fresh_state, .. },
                Work::Reduce { step: other, fresh_state: fresh, .. },
            ) => {
                // The highest step of a tensor is known when all is.
                let alike = |step: &reducer::Step| reducer::Step { t: 0, ..step.clone() };
                alike(step) == alike(other) && fresh_state == fresh
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

/// What to do with a payload that is about to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// It is the first of its block: store it in the running plan's accumulator, then call [`PartitionCore::landed`],
    /// or [`PartitionCore::failed`] if it does not come.
    Store {
        /// Refuse NaN and Inf.
        check: bool,
    },
    /// Add it there; then as above.
    Add {
        /// Refuse NaN and Inf.
        check: bool,
    },
    /// It is the last: compute the block of the next version with it; then as above.
    Finish {
        /// The running plan's accumulator holds others' payloads of this block.
        with_sum: bool,
        /// Refuse NaN and Inf.
        check: bool,
    },
    /// It has been taken before: pass it over.
    Duplicate,
    /// The plan is over, or does not want this block of this client: pass it over.
    Unwanted,
    /// Not now: another payload of the block is landing, it is not its turn, or the plan has not begun here. Ask
    /// again when something has landed or begun.
    Later,
}

/// What the edge has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Take the memory for the plan; then call [`PartitionCore::begun`].
    Begin(PlanId),
    /// All is known of the running plan, which was provisional: what is computed from now on is computed with that.
    Sealed(PlanId),
    /// Compute these blocks, for which nobody sends anything (more); then call [`PartitionCore::computed`].
    Compute(PlanId, FixedBitSet),
    /// Tell the coordinator that all blocks are there and computed.
    Ready(PlanId),
    /// Tell the coordinator whose contribution is refused.
    NonFinite {
        /// The plan.
        plan: PlanId,
        /// Whose.
        client: ClientId,
        /// Where.
        block: u32,
    },
    /// Tell the coordinator that the plan cannot be completed here: a payload may have changed while it was read.
    Torn(PlanId),
    /// What the plan has made counts: publish the version, or keep the sum.
    Conclude(PlanId, Kind),
    /// What the plan has made is void. Nothing of it is landing any more.
    Void(PlanId),
    /// Give up the payloads that are landing for this plan (close their connections), and call
    /// [`PartitionCore::failed`] for each.
    Abandon(PlanId),
    /// Tell the coordinator that its order to conclude or to drop this plan is carried out.
    Done(PlanId),
}

/// An order that contradicts what the partition knows: the coordinator and the partition are not of one job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartitionError {
    /// A plan for another version than the partition holds.
    #[error("plan {plan} starts from version {base}, but this partition holds version {version}")]
    Base {
        /// The plan.
        plan: PlanId,
        /// Its base.
        base: Version,
        /// The partition's version.
        version: Version,
    },
    /// A plan that is not complete here is to count.
    #[error("plan {0} is to be concluded, but is not complete here")]
    NotReady(PlanId),
    /// A plan begins while another one is under way.
    #[error("plan {new} begins while plan {running} is under way")]
    Overlap {
        /// What begins.
        new: PlanId,
        /// What is under way.
        running: PlanId,
    },
    /// The plan is over, or is not the one that follows the newest; or another one is ready here, which its coordinator
    /// may still conclude, and this connection has not named it.
    #[error("plan {plan} is past, or not the next one: the newest here is {newest}")]
    Order {
        /// The plan.
        plan: PlanId,
        /// The newest one here.
        newest: PlanId,
    },
    /// A plan that does not fit the partition.
    #[error("plan {0} is not of this partition's blocks")]
    Shape(PlanId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The edge takes its memory.
    Beginning,
    Gathering,
    Ready,
    /// A payload was refused; the coordinator has yet to drop the plan.
    NonFinite {
        client: ClientId,
        block: u32,
    },
    /// A payload may have changed while it was read; the coordinator has yet to drop the plan.
    Torn,
    /// Dropped while payloads were landing.
    Dropped,
    /// The coordinator knows nothing of it: somebody else has started it. Payloads are landing.
    Disowned,
}

#[derive(Debug)]
struct Running {
    plan: Plan,
    stage: Stage,
    /// Whoever coordinates by the newest connection has started it, or its start was repeated there.
    vouched: bool,
    /// By source: blocks that have landed.
    got: Vec<FixedBitSet>,
    /// By block: payloads that have landed, and that will.
    landed: Vec<u32>,
    wanted: Vec<u32>,
    /// By block: one is landing, or the block is being computed.
    busy: FixedBitSet,
    /// Of those, and of all: blocks whose last payload is landing, or has landed.
    last: FixedBitSet,
    /// Blocks that are being computed without a payload.
    computing: FixedBitSet,
    in_flight: u32,
    /// Payloads and computations that are still to come.
    left: u64,
}

/// One shard's partition of a model, without its memory.
#[derive(Debug)]
pub struct PartitionCore {
    blocks: u32,
    version: Version,
    running: Option<Running>,
    /// The newest plan that was begun or dropped here.
    newest: PlanId,
    /// The newest one that was concluded here, if one was.
    concluded: Option<PlanId>,
}

impl PartitionCore {
    /// A partition of `blocks` blocks at `version`.
    pub fn new(blocks: u32, version: Version) -> PartitionCore {
        PartitionCore { blocks, version, running: None, newest: PlanId(0), concluded: None }
    }

    /// The newest version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Whether the plan under way is still to be sealed.
    pub fn is_provisional(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.plan.is_provisional())
    }

    /// The plan under way, and how much of it is still to come.
    pub fn running(&self) -> Option<(PlanId, u64)> {
        self.running.as_ref().map(|running| (running.plan.id, running.left))
    }

    /// Whether the partition has heard of this plan, or of one after it.
    pub fn has_heard_of(&self, plan: PlanId) -> bool {
        plan <= self.newest
    }

    /// The coordinator has a new connection, and says over it that its plans up to `over` are over: the next one
    /// follows that. Whatever was said of numbers over other connections is void. What is under way goes on if the
    /// coordinator names it again.
    pub fn coordinated_anew(&mut self, over: PlanId) {
        let mut newest = over;
        if let Some(running) = &mut self.running {
            running.vouched = false;
            if !running.is_void() && running.plan.id.0 <= over.0.saturating_add(1) {
                newest = newest.max(running.plan.id);
            }
        }
        self.newest = newest;
    }

    /// A plan begins. A repeated one is answered again. A plan that was started over another connection and is ready here is
    /// replaced only if the coordinator `insists`: it has been asking for so long that it cannot know of the ready one.
    ///
    /// # Errors
    /// [`PartitionError`]; nothing has changed then.
    pub fn start(
        &mut self,
        plan: Plan,
        insists: bool,
        actions: &mut Vec<Action>,
    ) -> Result<(), PartitionError> {
        if let Some(running) = self.running.as_mut().filter(|running| running.plan == plan) {
            running.vouched = true;
            match running.stage {
                Stage::Ready => actions.push(Action::Ready(plan.id)),
                Stage::NonFinite { client, block } => {
                    actions.push(Action::NonFinite { plan: plan.id, client, block });
                }
                Stage::Torn => actions.push(Action::Torn(plan.id)),
                Stage::Beginning | Stage::Gathering | Stage::Dropped | Stage::Disowned => {}
            }
            return Ok(());
        }
        if self.running.as_ref().is_some_and(|running| running.plan.becomes(&plan)) {
            self.fits(&plan)?;
            self.seal(plan, actions);
            return Ok(());
        }
        if self.running.as_ref().is_some_and(|running| plan.becomes(&running.plan)) {
            // It comes late: the plan has been sealed since.
            return Ok(());
        }
        let is_running = self.running.as_ref().is_some_and(|running| running.plan.id == plan.id);
        let is_next = Some(plan.id.0) == self.newest.0.checked_add(1);
        if !is_next && !is_running {
            return Err(PartitionError::Order { plan: plan.id, newest: self.newest });
        }
        self.fits(&plan)?;
        if let Some(running) = &mut self.running {
            match running.stage {
                // It is said again when that has come to its end.
                Stage::Dropped | Stage::Disowned => return Ok(()),
                _ if running.vouched => {
                    return Err(PartitionError::Overlap { new: plan.id, running: running.plan.id });
                }
                Stage::Ready if !insists => {
                    return Err(PartitionError::Order { plan: plan.id, newest: self.newest });
                }
                _ => {}
            }
            running.stage = Stage::Disowned;
            if running.in_flight > 0 {
                actions.push(Action::Abandon(running.plan.id));
            }
            self.newest = PlanId(plan.id.0.saturating_sub(1));
            self.settle(actions);
            if self.running.is_some() {
                return Ok(());
            }
        }
        let blocks = self.blocks as usize;
        let wanted = wanted(&plan, blocks);
        let payloads: u64 = wanted.iter().map(|&count| u64::from(count)).sum();
        self.newest = plan.id;
        actions.push(Action::Begin(plan.id));
        self.running = Some(Running {
            stage: Stage::Beginning,
            vouched: true,
            got: vec![FixedBitSet::with_capacity(blocks); plan.sources.len()],
            landed: vec![0; blocks],
            wanted,
            busy: FixedBitSet::with_capacity(blocks),
            last: FixedBitSet::with_capacity(blocks),
            computing: FixedBitSet::with_capacity(blocks),
            // The edge is at work on its memory.
            in_flight: 1,
            left: payloads,
            plan,
        });
        Ok(())
    }

    fn fits(&self, plan: &Plan) -> Result<(), PartitionError> {
        if plan.base != self.version {
            return Err(PartitionError::Base { plan: plan.id, base: plan.base, version: self.version });
        }
        if plan.sources.iter().any(|source| source.blocks.len() != self.blocks as usize) {
            return Err(PartitionError::Shape(plan.id));
        }
        Ok(())
    }

    /// Whether the plan is to go on: an edge that waits for memory need not when it is not.
    pub fn wants(&self, plan: PlanId) -> bool {
        let live = |running: &Running| running.plan.id == plan && !running.is_void();
        self.running.as_ref().is_some_and(live)
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

    /// All is known of the running plan: sources have said which blocks they send.
    fn seal(&mut self, plan: Plan, actions: &mut Vec<Action>) {
        let Some(running) = &mut self.running else { return };
        let id = plan.id;
        running.vouched = true;
        // What was not to come has come: somebody else has sent it.
        let strays =
            running.got.iter().zip(&plan.sources).any(|(got, source)| !got.is_subset(&source.blocks));
        running.wanted = wanted(&plan, running.wanted.len());
        let (landed, wanted) = (running.landed.iter(), running.wanted.iter());
        let lacks = landed.zip(wanted).map(|(&landed, &wanted)| u64::from(wanted.saturating_sub(landed)));
        running.left = lacks.sum();
        running.plan = plan;
        actions.push(Action::Sealed(id));
        match running.stage {
            Stage::Gathering if strays => {
                running.stage = Stage::Torn;
                actions.push(Action::Torn(id));
            }
            Stage::Gathering => running.compute_rest(actions),
            Stage::NonFinite { client, block } => actions.push(Action::NonFinite { plan: id, client, block }),
            Stage::Torn => actions.push(Action::Torn(id)),
            Stage::Beginning | Stage::Ready | Stage::Dropped | Stage::Disowned => {}
        }
        self.check_ready(actions);
    }

    /// The blocks of [`Action::Compute`] are computed.
    pub fn computed(&mut self, plan: PlanId, actions: &mut Vec<Action>) {
        let Some(running) = self.running_if(plan) else { return };
        running.in_flight -= 1;
        let computed = std::mem::take(&mut running.computing);
        running.busy.difference_with(&computed);
        running.left = running.left.saturating_sub(computed.count_ones(..) as u64);
        running.compute_rest(actions);
        self.check_ready(actions);
        self.settle(actions);
    }

    /// A block of `client` is about to come. Hot path: allocates nothing.
    pub fn arrive(&mut self, client: ClientId, plan: PlanId, block: u32) -> Placement {
        let placement = self.look(client, plan, block);
        if let (Placement::Store { .. } | Placement::Add { .. } | Placement::Finish { .. }, Some(running)) =
            (placement, &mut self.running)
        {
            running.busy.insert(block as usize);
            running.in_flight += 1;
            if matches!(placement, Placement::Finish { .. }) {
                running.last.insert(block as usize);
            }
        }
        placement
    }

    /// What [`Self::arrive`] would say just now; nothing comes yet.
    pub fn look(&self, client: ClientId, plan: PlanId, block: u32) -> Placement {
        if plan > self.newest {
            return Placement::Later;
        }
        let Some(running) = self.running.as_ref().filter(|running| running.plan.id == plan) else {
            return Placement::Unwanted;
        };
        match running.stage {
            Stage::Beginning => return Placement::Later,
            Stage::Gathering => {}
            Stage::Ready => return Placement::Duplicate,
            Stage::NonFinite { .. } | Stage::Torn | Stage::Dropped | Stage::Disowned => {
                return Placement::Unwanted;
            }
        }
        let b = block as usize;
        let wants = |source: &Source| source.client == client && source.blocks.contains(b);
        let Some(at) = running.plan.sources.iter().position(wants) else { return Placement::Unwanted };
        if running.got[at].contains(b) {
            return Placement::Duplicate;
        }
        if running.busy.contains(b) {
            return Placement::Later;
        }
        if running.plan.ordered {
            let before = running.plan.sources[..at].iter().filter(|source| source.blocks.contains(b)).count();
            if (running.landed[b] as usize) < before {
                return Placement::Later;
            }
        }
        let check = running.plan.sources[at].check;
        let first = running.landed[b] == 0;
        let last = running.plan.kind() != Kind::Add && running.landed[b] + 1 == running.wanted[b];
        match (first, last) {
            (_, true) => Placement::Finish { with_sum: !first, check },
            (true, false) => Placement::Store { check },
            (false, false) => Placement::Add { check },
        }
    }

    /// A payload is where [`Self::arrive`] said. `fit` is false if it held NaN or Inf and was to be checked.
    pub fn landed(
        &mut self,
        client: ClientId,
        plan: PlanId,
        block: u32,
        fit: bool,
        actions: &mut Vec<Action>,
    ) {
        let Some(running) = self.running_if(plan) else { return };
        let b = block as usize;
        running.busy.set(b, false);
        running.in_flight -= 1;
        let wants = |source: &Source| source.client == client && source.blocks.contains(b);
        if running.stage == Stage::Gathering
            && let Some(at) = running.plan.sources.iter().position(wants)
        {
            if fit {
                running.got[at].insert(b);
                running.landed[b] += 1;
                running.left = running.left.saturating_sub(1);
                // Another payload of it was expected when this one came.
                if running.landed[b] == running.wanted[b] && !running.last.contains(b) {
                    running.compute_rest(actions);
                }
            } else {
                running.stage = Stage::NonFinite { client, block };
                actions.push(Action::NonFinite { plan, client, block });
            }
        }
        self.check_ready(actions);
        self.settle(actions);
    }

    /// A payload is where [`Self::arrive`] said, but it was read in memory that may not have been lent any more when it
    /// was: nothing of the plan can count.
    pub fn torn(&mut self, plan: PlanId, block: u32, actions: &mut Vec<Action>) {
        let Some(running) = self.running_if(plan) else { return };
        running.busy.set(block as usize, false);
        running.in_flight -= 1;
        if running.stage == Stage::Gathering {
            running.stage = Stage::Torn;
            actions.push(Action::Torn(plan));
        }
        self.settle(actions);
    }

    /// A payload that was to land did not come, or not as it was sent: it can come again.
    pub fn failed(&mut self, plan: PlanId, block: u32, actions: &mut Vec<Action>) {
        let Some(running) = self.running_if(plan) else { return };
        running.busy.set(block as usize, false);
        running.last.set(block as usize, false);
        running.in_flight -= 1;
        let is_whole = |running: &Running, b: usize| running.landed[b] == running.wanted[b];
        if running.stage == Stage::Gathering && is_whole(running, block as usize) {
            running.compute_rest(actions);
        }
        self.settle(actions);
    }

    /// Blocks that are still to come from `client`, those that are landing included; `None` if that cannot be said
    /// because the plan has not begun here.
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
            // Nobody knows yet.
            Stage::Gathering if running.plan.is_provisional() => return None,
            Stage::Gathering => {}
            Stage::Ready | Stage::NonFinite { .. } | Stage::Torn | Stage::Dropped | Stage::Disowned => {
                return Some(missing);
            }
        }
        for (source, got) in running.plan.sources.iter().zip(&running.got) {
            if source.client == client {
                missing.union_with(&source.blocks);
                missing.difference_with(got);
            }
        }
        Some(missing)
    }

    /// What the plan has made counts. Repeated, it is answered again.
    ///
    /// # Errors
    /// [`PartitionError::NotReady`], or [`PartitionError::Order`] if the start is to be repeated before.
    pub fn conclude(&mut self, plan: PlanId, actions: &mut Vec<Action>) -> Result<(), PartitionError> {
        if self.running.as_ref().is_some_and(|running| running.plan.id == plan && !running.vouched) {
            return Err(PartitionError::Order { plan, newest: self.newest });
        }
        let is_ready = |running: &mut Running| running.plan.id == plan && running.stage == Stage::Ready;
        if let Some(running) = self.running.take_if(is_ready) {
            let kind = running.plan.kind();
            if kind != Kind::Add {
                self.version = self.version.next();
            }
            self.concluded = Some(plan);
            actions.push(Action::Conclude(plan, kind));
        } else if self.concluded != Some(plan) {
            return Err(PartitionError::NotReady(plan));
        }
        actions.push(Action::Done(plan));
        Ok(())
    }

    /// The plan is given up, and if it has not begun here it never will. Repeated, it is answered again.
    ///
    /// # Errors
    /// [`PartitionError::Order`] for one that cannot have begun anywhere yet, or if its start is to be repeated before.
    pub fn drop_plan(&mut self, plan: PlanId, actions: &mut Vec<Action>) -> Result<(), PartitionError> {
        let newest = self.newest;
        let Some(running) = self.running_if(plan) else {
            if plan.0 > newest.0.saturating_add(1) {
                return Err(PartitionError::Order { plan, newest });
            }
            self.newest = newest.max(plan);
            actions.push(Action::Done(plan));
            return Ok(());
        };
        if running.stage == Stage::Ready && !running.vouched {
            return Err(PartitionError::Order { plan, newest });
        }
        running.stage = Stage::Dropped;
        if running.in_flight > 0 {
            actions.push(Action::Abandon(plan));
        }
        self.newest = newest.max(plan);
        self.settle(actions);
        Ok(())
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

    /// Ends a void plan when nothing of it is landing any more.
    fn settle(&mut self, actions: &mut Vec<Action>) {
        let over = |running: &mut Running| running.is_void() && running.in_flight == 0;
        if let Some(running) = self.running.take_if(over) {
            actions.push(Action::Void(running.plan.id));
            if running.stage == Stage::Dropped {
                actions.push(Action::Done(running.plan.id));
            }
        }
    }
}

impl Running {
    /// Computes the blocks of a version of which nothing more comes, and whose last payload has not computed them.
    fn compute_rest(&mut self, actions: &mut Vec<Action>) {
        if self.plan.kind() == Kind::Add || self.plan.is_provisional() || !self.computing.is_clear() {
            return;
        }
        let whole = |block: &usize| self.landed[*block] == self.wanted[*block];
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

    /// Nothing more comes of it.
    fn is_void(&self) -> bool {
        matches!(self.stage, Stage::Dropped | Stage::Disowned)
    }
}

/// By block: how many payloads come.
fn wanted(plan: &Plan, blocks: usize) -> Vec<u32> {
    let mut wanted = vec![0; blocks];
    for block in plan.sources.iter().flat_map(|source| source.blocks.ones()) {
        wanted[block] += 1;
    }
    wanted
}

/// The blocks of `ranges` (of the whole model) that are among `mine`, by their place in it.
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
