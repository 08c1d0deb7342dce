//! A shard's edge without bytes: it does to symbolic blocks what the core says, takes its time, and fails now and then.

use std::collections::{BTreeMap, VecDeque};

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::groups::TensorReducers;
use libmodelio::vocabulary::ids::{BlockId, ClientId, PlanId, Version};
use libmodelio::vocabulary::norm::Squares;
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use libmodelio::wire::{Message, Plan, Refusal, Work};
use ps_backend::coordinator::NOBODY;
use ps_backend::partition::core::{
    self, Action, NotTaken, PartitionCore, Placement, ReservationOutcome, ReservedPlace, Sent,
};

use crate::client::Keys;
use crate::following::Follower;
use crate::history::{Content, GARBAGE, Uid};
use crate::laying::{Bringing, PartsHere};
use crate::memory::Memory;
use crate::moving::Life;
use crate::settings::first_tensor;
use crate::state::{Block, Step, squares};
use crate::world::{Body, Event, Node, Now, World};

/// Payloads that wait because the core has said later.
const MAX_PARKED: usize = 16;

/// A coordinator that begins a plan so long after it has connected knows of no other one.
const INSISTS: Now = Now::from_secs(3);

/// The sum of some contributions of one client, for one block.
#[derive(Clone, Debug)]
pub struct Sum {
    pub of: Vec<Uid>,
    /// It holds NaN.
    pub bad: bool,
    /// The block of the next version itself, of which these parts are a part.
    pub laid: Option<Content>,
}

/// A payload on its way into the shard's memory.
#[derive(Clone, Debug)]
pub struct Reservation {
    pub client: ClientId,
    pub plan: PlanId,
    pub block: u32,
    pub place: ReservedPlace,
    pub body: Body,
}

/// Work that is done after a while.
#[derive(Clone, Debug)]
pub enum ShardEvent {
    Begun(PlanId),
    Computed(PlanId, FixedBitSet),
    Made(PlanId, FixedBitSet),
    Came(u64),
    /// A client has copied the version that was pinned for it under this number.
    Copied(u64),
    /// A client has been silent for long, if it hangs still and its connection is this one.
    Silent(usize, u64),
    /// A block of new weights in parts is to be made.
    Lays(PlanId, u32),
    /// Of the connections over which parts come.
    Part(Bringing),
}

/// What a version changes in place, once it counts.
#[derive(Clone, Copy, Debug)]
pub enum InPlace {
    /// There are two copies of everything.
    Nothing,
    /// The optimizer's slots.
    Slots,
    /// Masters, too.
    Masters,
}

impl InPlace {
    /// One of them.
    pub fn of(number: u64) -> InPlace {
        [InPlace::Nothing, InPlace::Slots, InPlace::Masters][(number % 3) as usize]
    }

    fn changed_by(self, work: &Work) -> bool {
        match (self, work) {
            (InPlace::Nothing, _) | (_, Work::Add { .. } | Work::Measure { .. }) => false,
            (InPlace::Slots, Work::Reduce { step, .. }) => step.reducer.state_slots() > 0,
            (InPlace::Slots, Work::Assign { .. }) => false,
            (InPlace::Masters, Work::Reduce { .. } | Work::Assign { .. }) => true,
        }
    }
}

pub struct Shard {
    pub core: PartitionCore,
    /// When its coordinator, or a stranger in its name, has connected.
    pub coordinated_since: Now,
    /// Which of the world's.
    pub course: usize,
    pub life: Life,
    /// The process of its coordinator, if it is in that.
    pub process: Option<Node>,
    /// Its blocks, in order.
    mine: Vec<BlockId>,
    pub memory: Memory,
    /// The newest one with its optimizer state.
    front: Vec<Block>,
    keep: usize,
    /// What it changes in place.
    in_place: InPlace,
    /// Sums are values, the last of which counts.
    pub values: bool,
    /// What concluded plans have added up, and what the running one has.
    sealed: Vec<Option<Vec<Uid>>>,
    open: Vec<Option<Vec<Uid>>>,
    /// The next version.
    back: Vec<Option<Block>>,
    plan: Option<Plan>,
    /// The blocks that the plan has measured, and their squares.
    measured: BTreeMap<usize, f64>,
    /// What the plan does with the sum in the end.
    step: Option<(TensorReducers, bool, TensorSteps)>,
    /// The one that begins, which may be in the place of another one.
    starting: Option<Plan>,
    reservations: BTreeMap<u64, Reservation>,
    next_reservation: u64,
    /// Payloads that are kept where they lie, by block and client.
    kept: BTreeMap<(u32, ClientId), (PlanId, Body)>,
    parked: VecDeque<(ClientId, PlanId, u32, bool, Body)>,
    /// Clients that get blocks as they are computed.
    pub followers: Vec<Follower>,
    pub parts: PartsHere,
}

impl Shard {
    /// With its blocks of the whole of a version.
    pub fn new(
        mine: Vec<BlockId>,
        version: Version,
        whole: &[Block],
        keep: usize,
        in_place: InPlace,
    ) -> Shard {
        let front: Vec<Block> =
            mine.iter().map(|block| whole.get(block.index()).cloned().unwrap_or_default()).collect();
        Shard {
            core: PartitionCore::new(mine.len() as u32, version),
            coordinated_since: Now::ZERO,
            course: 0,
            life: Life::Live,
            process: None,
            memory: Memory::new(version, weights(&front), keep - 1),
            front,
            keep,
            in_place,
            values: false,
            sealed: vec![None; mine.len()],
            open: vec![None; mine.len()],
            back: vec![None; mine.len()],
            mine,
            plan: None,
            measured: BTreeMap::new(),
            step: None,
            starting: None,
            reservations: BTreeMap::new(),
            next_reservation: 0,
            kept: BTreeMap::new(),
            parked: VecDeque::new(),
            followers: Vec::new(),
            parts: PartsHere::default(),
        }
    }

    /// Whether nothing is going on here.
    pub fn is_quiet(&self) -> bool {
        self.core.running().is_none() && self.reservations.is_empty()
    }

    /// Its blocks.
    pub fn mine(&self) -> &[BlockId] {
        &self.mine
    }

    /// A computed block of the next version.
    pub fn computed(&self, block: usize) -> Content {
        self.back[block].as_ref().expect("a computed block").weights.clone()
    }

    /// Its process has ended: nothing of it is left.
    pub fn lose(&mut self) {
        let blank = Shard::new(self.mine.clone(), Version(0), &[], self.keep, self.in_place);
        *self = Shard { course: self.course, life: Life::Lost, ..blank };
    }

    /// The newest version with all that is kept of it, block by block; nothing while there is more than that: a plan,
    /// or sums that wait for the next one.
    pub fn front(&self) -> Option<(Version, impl Iterator<Item = (BlockId, Block)>)> {
        if self.core.running().is_some() || self.sealed.iter().any(Option::is_some) {
            return None;
        }
        Some((self.newest(), self.mine.iter().copied().zip(self.front.iter().cloned())))
    }

    /// The newest version.
    pub fn newest(&self) -> Version {
        self.memory.newest()
    }

    /// Its blocks, each with its state in the newest version and in the sums for the next one.
    pub fn known(&self) -> impl Iterator<Item = (BlockId, &Block, Known<'_>)> {
        let sums = self.sealed.iter().zip(&self.open).zip(&self.back);
        let sums = sums.map(|((sealed, open), back)| Known {
            sums: [sealed.as_deref(), open.as_deref()],
            replaces: self.values,
            back: back.as_ref(),
        });
        self.mine
            .iter()
            .copied()
            .zip(&self.front)
            .zip(sums)
            .map(|((block, front), known)| (block, front, known))
    }

    fn replaces(&self) -> bool {
        match self.plan.as_ref().map(|plan| &plan.work) {
            Some(Work::Add { combine }) => combine.replaces(),
            Some(Work::Reduce { .. }) => {
                self.step.as_ref().is_some_and(|(reducers, ..)| reducers.of(0) == Some(Reducer::Assign))
            }
            Some(Work::Measure { .. }) => false,
            Some(Work::Assign { .. }) | None => true,
        }
    }

    fn measures(&self) -> bool {
        matches!(self.plan.as_ref().map(|plan| &plan.work), Some(Work::Measure { .. }))
    }

    /// The squares of all blocks that are measured. A tensor has the weight 1 in each block that begins with it, and
    /// the block's squares.
    fn squares(&self) -> Option<Squares> {
        let Work::Measure { tensors, quantity, .. } = &self.plan.as_ref()?.work else { return None };
        let mut squares = Squares::new(*quantity, tensors.tensors() as usize);
        for (block, of_block) in &self.measured {
            match &mut squares {
                Squares::Gradient(sum) => sum.add(*of_block),
                Squares::Tensors(all) => {
                    let tensor = &mut all[first_tensor(self.mine[*block].0)];
                    tensor.weights.add(1.0);
                    tensor.direction.add(*of_block);
                }
            }
        }
        Some(squares)
    }

    /// Nothing is added to the sums of a block any more.
    fn measure(&mut self, block: usize) {
        let sums = [&self.sealed[block], &self.open[block]].into_iter().flatten().flatten();
        let sum: Vec<Uid> = sums.copied().collect();
        let before = self.measured.insert(block, squares(self.mine[block].0, &sum));
        assert_eq!(before, None, "block {block} is measured twice");
    }

    /// A block of the next version is computed.
    fn finish(&mut self, block: usize, made: Block) {
        self.memory.write(block, made.weights.clone());
        self.back[block] = Some(made);
    }

    /// The block of the next version, from the sums and `last`.
    fn compute(&self, block: usize, with_sum: bool, last: Option<&[Uid]>) -> Block {
        let front = &self.front[block];
        let mut sums: Vec<&[Uid]> = Vec::new();
        if self.step.is_some() {
            sums.extend(self.sealed[block].as_deref());
        }
        if with_sum {
            sums.extend(self.open[block].as_deref());
        }
        sums.extend(last);
        let last = sums.last().copied();
        let Some((reducers, fresh, tensors)) = &self.step else { return front.assigned(last) };
        let of = |tensor| (reducers.of(tensor).expect("a tensor"), tensors.of(tensor));
        let step = Step::of(self.mine[block].0, *fresh, of);
        match self.replaces() {
            true => front.replaced(&step, last),
            false => front.stepped(&step, &sums.concat()),
        }
    }
}

/// What a shard has of a block besides the newest version.
pub struct Known<'a> {
    sums: [Option<&'a [Uid]>; 2],
    replaces: bool,
    back: Option<&'a Block>,
}

impl Known<'_> {
    /// Whether a contribution is in it.
    pub fn holds(&self, uid: Uid) -> bool {
        self.sums.iter().flatten().any(|sum| sum.contains(&uid))
            || self.back.is_some_and(|block| block.weights.adds(uid))
    }

    /// Whether it has values that have taken the place of earlier ones.
    pub fn replaces(&self) -> bool {
        self.replaces && (self.back.is_some() || self.sums.iter().any(Option::is_some))
    }
}

fn weights(blocks: &[Block]) -> Vec<Content> {
    blocks.iter().map(|block| block.weights.clone()).collect()
}

/// The step that a plan makes of each tensor, if it makes one.
fn step(plan: &Plan) -> Option<(TensorReducers, bool, TensorSteps)> {
    let Work::Reduce { step, tensors, groups, fresh_state, .. } = &plan.work else { return None };
    let reducers = TensorReducers::new(tensors.tensors() as usize, step.reducer, groups);
    Some((reducers, *fresh_state, tensors.clone()))
}

/// The plan as the core wants it.
fn local(plan: &Plan, mine: &[BlockId], in_place: InPlace) -> core::PartitionPlan {
    let source = |source: &libmodelio::wire::PlanSource| core::Source {
        client: source.client,
        blocks: core::local_blocks(&source.blocks, mine),
        check: source.check,
        provisional: source.provisional,
    };
    core::PartitionPlan {
        id: plan.plan,
        work: plan.work.clone(),
        base: plan.base,
        sources: plan.sources.iter().map(source).collect(),
        ordered: plan.ordered,
        in_place: in_place.changed_by(&plan.work),
    }
}

impl World {
    fn shard_acts(&mut self, partition: usize, actions: Vec<Action>) {
        for action in actions {
            self.trace(|| format!("partition {partition}: {action:?}"));
            match action {
                Action::Begin(plan) => {
                    let shard = &mut self.shards[partition];
                    if let Some(plan) = shard.starting.take() {
                        let writes = matches!(plan.work, Work::Assign { .. });
                        (shard.step, shard.plan) = (step(&plan), Some(plan));
                        if !writes {
                            shard.values = shard.replaces();
                        }
                    }
                    let clean =
                        shard.open.iter().all(Option::is_none) && shard.back.iter().all(Option::is_none);
                    assert!(
                        clean,
                        "partition {partition}: plan {plan} begins with what another one has left"
                    );
                    shard.measured.clear();
                    let work = shard.plan.as_ref().map(|plan| &plan.work);
                    let adds = matches!(work, Some(Work::Add { .. } | Work::Measure { .. }));
                    if !adds {
                        let shard = &mut self.shards[partition];
                        shard.memory.begin(shard.mine.len());
                    }
                    let after = self.some_time(3000);
                    self.after(after, Event::Shard(partition, ShardEvent::Begun(plan)));
                }
                Action::Compute(plan, blocks) => {
                    let after = self.some_time(3000);
                    self.after(after, Event::Shard(partition, ShardEvent::Computed(plan, blocks)));
                }
                Action::Make(plan, blocks) => {
                    let after = self.some_time(3000);
                    self.after(after, Event::Shard(partition, ShardEvent::Made(plan, blocks)));
                }
                Action::Sealed(_) => self.ask_again(partition),
                Action::Gather(plan, blocks) => {
                    for block in blocks.ones() {
                        let shard = &mut self.shards[partition];
                        let Some((client, place)) = shard.core.reserve_kept(plan, block as u32) else {
                            continue;
                        };
                        let (_, body) = shard.kept.remove(&(block as u32, client)).expect("what is kept");
                        self.is_reserved(
                            partition,
                            Reservation { client, plan, block: block as u32, place, body },
                        );
                    }
                }
                Action::Ready(plan) => {
                    let shard = &self.shards[partition];
                    let ready = match shard.squares() {
                        Some(squares) => Message::Measured { plan, squares },
                        None => Message::Ready { plan },
                    };
                    let all = if shard.measures() { shard.mine.len() } else { 0 };
                    assert_eq!(shard.measured.len(), all, "partition {partition}: plan {plan} is ready");
                    self.say_to_coordinator(partition, 0, ready);
                }
                Action::Torn(plan) => self.say_to_coordinator(partition, 0, Message::Torn { plan }),
                Action::NonFinite { plan, client, block } => {
                    let block = self.shards[partition].mine[block as usize];
                    self.say_to_coordinator(partition, 0, Message::NonFinitePayload { plan, client, block });
                }
                Action::Done(plan) => self.say_to_coordinator(partition, plan.0, Message::Done),
                Action::Conclude(plan) => self.shard_concludes(partition, plan),
                Action::Void(plan) => {
                    let shard = &mut self.shards[partition];
                    assert!(
                        shard.reservations.values().all(|reservation| reservation.plan != plan),
                        "{plan} is void, but blocks are reserved for it"
                    );
                    shard.open.fill(None);
                    shard.back.fill(None);
                    shard.kept.clear();
                    shard.parts.brought.lets_go(plan);
                    (shard.plan, shard.step) = (None, None);
                }
                Action::Abandon(plan) => {
                    let all = self.shards[partition].reservations.iter();
                    let of_plan = all.filter(|(_, reservation)| reservation.plan == plan);
                    let of_plan: Vec<u64> = of_plan.map(|(&id, _)| id).collect();
                    for id in of_plan {
                        self.reservation_ends(partition, id, false);
                    }
                }
            }
        }
    }

    fn shard_concludes(&mut self, partition: usize, plan: PlanId) {
        let shard = &mut self.shards[partition];
        let work = shard.plan.as_ref().expect("it has begun").work.clone();
        shard.parts.brought.lets_go(plan);
        assert!(shard.kept.is_empty(), "partition {partition}: plan {plan} counts without what is kept");
        if !work.makes_version() {
            let replaces = shard.replaces();
            for (sealed, open) in shard.sealed.iter_mut().zip(&mut shard.open) {
                let Some(open) = open.take() else { continue };
                match sealed {
                    Some(sealed) if !replaces => sealed.extend(open),
                    sealed => *sealed = Some(open),
                }
            }
            (shard.plan, shard.step) = (None, None);
            return self.history.sealed(partition, plan);
        }
        let version = shard.newest().next();
        assert_eq!(version, shard.core.version());
        let missing = |block: usize| {
            panic!("partition {partition}: plan {plan} counts, but block {block} is not computed")
        };
        let back = shard.back.iter_mut().enumerate();
        let blocks: Vec<Block> =
            back.map(|(at, content)| content.take().unwrap_or_else(|| missing(at))).collect();
        shard.open.fill(None);
        if matches!(work, Work::Reduce { .. }) {
            shard.sealed.fill(None);
        }
        (shard.plan, shard.step) = (None, None);
        shard.memory.publish(version);
        shard.front.clone_from(&blocks);
        let of_model = shard.mine.iter().map(|block| block.0).zip(blocks).collect();
        self.history.published(partition, version, plan, of_model);
    }

    pub fn shard_event(&mut self, partition: usize, event: ShardEvent) {
        // What a process has begun ends with it.
        if self.shards[partition].life == Life::Lost {
            return;
        }
        match event {
            ShardEvent::Begun(plan) => {
                self.on_shard(partition, |core, actions| core.begun(plan, actions));
                self.lays(partition, plan);
                self.ask_again(partition);
            }
            ShardEvent::Computed(plan, blocks) => {
                let shard = &mut self.shards[partition];
                if shard.core.wants(plan) {
                    for block in blocks.ones() {
                        match shard.measures() {
                            true => shard.measure(block),
                            false => shard.finish(block, shard.compute(block, true, None)),
                        }
                    }
                }
                self.on_shard(partition, |core, actions| core.computed(plan, actions));
            }
            ShardEvent::Made(plan, blocks) => {
                let shard = &mut self.shards[partition];
                assert!(
                    shard.core.wants(plan),
                    "partition {partition}: plan {plan} counts, and was given up"
                );
                for block in blocks.ones() {
                    if shard.step.is_some() {
                        assert!(shard.back[block].is_none(), "block {block} is made twice");
                        shard.finish(block, shard.compute(block, true, None));
                    }
                    let made = shard.back[block].as_ref().expect("a computed block");
                    // What was there before is gone.
                    shard.front[block].state = made.state;
                }
                self.on_shard(partition, |core, actions| core.computed(plan, actions));
            }
            ShardEvent::Copied(pin) => self.has_copied(partition, pin),
            ShardEvent::Silent(client, epoch) => self.is_silent(partition, client, epoch),
            ShardEvent::Lays(plan, block) => self.lays_block(partition, plan, block),
            ShardEvent::Part(bringing) => self.part_comes(partition, bringing),
            ShardEvent::Came(id) => {
                // What is made here does not break.
                let made = self.shards[partition].reservations.get(&id).is_some_and(|of| of.client == NOBODY);
                let whole = made || !self.chance(self.settings.broken);
                self.reservation_ends(partition, id, whole);
            }
        }
        self.serves_followers(partition);
    }

    pub fn on_shard(&mut self, partition: usize, f: impl FnOnce(&mut PartitionCore, &mut Vec<Action>)) {
        let mut actions = Vec::new();
        f(&mut self.shards[partition].core, &mut actions);
        self.shard_acts(partition, actions);
    }

    /// A payload is there, or is lost in the middle.
    fn reservation_ends(&mut self, partition: usize, id: u64, whole: bool) {
        let shard = &mut self.shards[partition];
        let Some(Reservation { client, plan, block, mut place, body }) = shard.reservations.remove(&id)
        else {
            return;
        };
        let b = block as usize;
        let is_sum = |open: &Option<Vec<Uid>>| open.as_ref().is_some_and(|open| !open.is_empty());
        if !whole {
            if place.first && !place.last && !place.kept {
                // It was being written there.
                shard.open[b] = Some(Vec::new());
            }
            self.on_shard(partition, |core, actions| {
                core.end(client, plan, block, ReservationOutcome::Released, actions)
            });
            return self.ask_again(partition);
        }
        let mut all = vec![(client, place.check, body)];
        if place.kept {
            let (taken, last) = match shard.core.take_kept(client, plan, block) {
                Ok(taken) => taken,
                Err(NotTaken::OutOfTurn) => {
                    let torn = |core: &mut PartitionCore, actions: &mut _| {
                        core.end(client, plan, block, ReservationOutcome::Torn, actions);
                    };
                    return self.on_shard(partition, torn);
                }
                Err(NotTaken::Unwanted) => panic!("a block that the client was not to send"),
            };
            place.last = last;
            let mut own = all.pop().map(|(.., body)| body);
            for (of, check) in taken {
                let body = match of == client {
                    true => own.take(),
                    false => shard.kept.remove(&(block, of)).map(|(_, body)| body),
                };
                all.push((of, check, body.expect("what is kept")));
            }
            self.together += u64::from(all.len() > 1);
        }
        let (mut sum, mut culprit, mut stands, mut laid) = (Vec::new(), None, true, None);
        let replaces = self.shards[partition].replaces();
        let clients: Vec<ClientId> = all.iter().map(|(client, ..)| *client).collect();
        for (of, check, body) in all {
            let (part, lent) = self.read(partition, block, body);
            stands &= lent;
            if check && part.bad {
                culprit.get_or_insert(of);
            }
            if replaces {
                sum.clear();
            }
            sum.extend(part.of);
            laid = laid.or(part.laid);
        }
        self.early += u64::from(self.shards[partition].core.is_provisional());
        let shard = &mut self.shards[partition];
        match place {
            ReservedPlace { last: true, first, .. } => {
                assert_eq!(!first, is_sum(&shard.open[b]), "plan {plan} finishes block {block}");
                assert_eq!(shard.back[b], None, "plan {plan} finishes block {block} twice");
                match culprit {
                    None if shard.measures() => {
                        shard.open[b].get_or_insert_default().extend(sum);
                        shard.measure(b);
                    }
                    None => match laid {
                        Some(laid) => shard.finish(b, shard.front[b].written(laid)),
                        None => shard.finish(b, shard.compute(b, !first, Some(&sum))),
                    },
                    Some(_) => {}
                }
            }
            ReservedPlace { first: true, .. } => {
                assert!(!is_sum(&shard.open[b]), "plan {plan} stores block {block} over a sum");
                shard.open[b] = Some(sum);
            }
            ReservedPlace { first: false, .. } => {
                assert!(is_sum(&shard.open[b]), "plan {plan} adds block {block} to nothing");
                let open = shard.open[b].get_or_insert_default();
                if replaces {
                    open.clear();
                }
                open.extend(sum);
            }
        }
        for client in clients {
            let outcome = match culprit {
                _ if !stands => ReservationOutcome::Torn,
                None => ReservationOutcome::Complete,
                Some(culprit) if culprit == client => ReservationOutcome::NonFinite,
                Some(_) => ReservationOutcome::Released,
            };
            self.on_shard(partition, |core, actions| core.end(client, plan, block, outcome, actions));
        }
        self.ask_again(partition);
    }

    /// What a payload is, and whether it was lent until it was read.
    fn read(&mut self, partition: usize, block: u32, body: Body) -> (Sum, bool) {
        match body {
            Body::Sum(sum) => (sum, true),
            Body::Named { index, keys, epoch } => {
                let of_model = self.shards[partition].mine[block as usize];
                let sum = self.read_payload(index, of_model, &keys);
                let now = self.network.connection(Node::Client(index), Node::Partition(partition)).epoch;
                // New weights are not written again.
                let stands = now == epoch || matches!(keys, Keys::Weights(_));
                self.loans.late_reads += u64::from(!stands);
                self.loans.changed += u64::from(!stands && sum.of.contains(&GARBAGE));
                (sum, stands)
            }
            other => panic!("{other:?} arrives"),
        }
    }

    /// Earlier connections of a client have ended, and with them their kept payloads.
    pub fn loses_kept(&mut self, partition: usize, client: usize, before: u64) {
        let Shard { kept, core, .. } = &mut self.shards[partition];
        let is_lost = |body: &Body| matches!(*body, Body::Named { index, epoch, .. } if index == client && epoch < before);
        let lost: Vec<_> = kept.extract_if(.., |_, (_, body)| is_lost(body)).collect();
        for ((block, client), (plan, _)) in &lost {
            core.is_gone(*client, *plan, *block);
        }
        if !lost.is_empty() {
            self.ask_again(partition);
        }
    }

    /// What waits may be wanted now.
    pub fn ask_again(&mut self, partition: usize) {
        for (client, plan, block, ahead, body) in std::mem::take(&mut self.shards[partition].parked) {
            self.payload_comes(partition, client, (plan, block, ahead), body);
        }
    }

    fn payload_comes(
        &mut self,
        partition: usize,
        client: ClientId,
        (plan, block, ahead): (PlanId, u32, bool),
        body: Body,
    ) {
        let sent = Sent { lies: matches!(body, Body::Named { .. }), ahead };
        let core = &mut self.shards[partition].core;
        let may_come = core.peek(client, plan, block, Sent { ahead: true, ..sent });
        let placement = core.reserve(client, plan, block, sent);
        self.before_the_seal += u64::from(placement != may_come);
        self.trace(|| format!("partition {partition}: block {block} of {client} for {plan}: {placement:?}"));
        match placement {
            Placement::Later => {
                let drop = self.chance(self.settings.broken);
                // Real connections wait; here some give up while the network is bad.
                let room = self.healed || self.shards[partition].parked.len() < MAX_PARKED;
                let parked = &mut self.shards[partition].parked;
                if room && !drop {
                    parked.push_back((client, plan, block, ahead, body));
                }
            }
            Placement::Duplicate | Placement::Unwanted => {}
            Placement::Keep => {
                let before = self.shards[partition].kept.insert((block, client), (plan, body));
                assert!(before.is_none(), "block {block} of {client} is kept twice");
            }
            Placement::Ready(place) => {
                self.is_reserved(partition, Reservation { client, plan, block, place, body })
            }
        }
    }

    pub fn is_reserved(&mut self, partition: usize, reservation: Reservation) {
        let after = self.some_time(self.settings.arrival);
        let shard = &mut self.shards[partition];
        let id = shard.next_reservation;
        shard.next_reservation += 1;
        shard.reservations.insert(id, reservation);
        self.after(after, Event::Shard(partition, ShardEvent::Came(id)));
    }

    /// Somebody connects as its coordinator, whose plans up to `over` are over.
    pub fn coordinated_anew(&mut self, partition: usize, over: PlanId) {
        let now = self.clock(Node::Partition(partition));
        let shard = &mut self.shards[partition];
        shard.coordinated_since = now;
        shard.core.coordinated_anew(over);
    }

    /// A message of the coordinator.
    pub fn shard_from_coordinator(&mut self, partition: usize, request: u64, message: Message) {
        let mut actions = Vec::new();
        let now = self.clock(Node::Partition(partition));
        let shard = &mut self.shards[partition];
        let (mut lacking, mut unmade) = (None, None);
        let result = match message {
            Message::Start(plan) => {
                let insists = now >= shard.coordinated_since + INSISTS;
                let (id, before) = (plan.plan, shard.core.running());
                let repeats = before.is_some_and(|(of, _)| of == id);
                unmade = shard.parts.brought.why_not(id).filter(|_| repeats).map(|why| (id, why));
                let result =
                    shard.core.start(local(&plan, &shard.mine, shard.in_place), insists, &mut actions);
                if actions.iter().any(|action| matches!(action, Action::Begin(_))) {
                    shard.parts.brought.takes(id, plan.parts.clone(), plan.base, &shard.mine);
                    shard.starting = Some(*plan);
                } else if actions.iter().any(|action| matches!(action, Action::Sealed(_))) {
                    // From here on it computes with the steps that are known now.
                    (shard.step, shard.plan) = (step(&plan), Some(*plan));
                } else if repeats {
                    lacking = Some((id, shard.core.lacking(id))).filter(|(_, clients)| !clients.is_empty());
                }
                result
            }
            Message::Conclude { plan } => shard.core.conclude(plan, &mut actions),
            Message::Drop { plan } => {
                lacking = shard.core.silent(plan).map(|clients| (plan, clients));
                shard.core.drop_plan(plan, &mut actions)
            }
            other => panic!("the coordinator sends {} to a shard", other.name()),
        };
        if let Err(error) = result {
            self.say_to_coordinator(partition, request, Message::Refused(error.into()));
        }
        if let Some((plan, why)) = unmade {
            self.say_to_coordinator(partition, 0, Message::Unmade { plan, why });
        }
        if let Some((plan, clients)) = lacking {
            self.say_to_coordinator(partition, 0, Message::Lacking { plan, clients });
        }
        self.shard_acts(partition, actions);
        self.serves_followers(partition);
    }

    /// A message of a client.
    pub fn shard_from_client(&mut self, partition: usize, index: usize, message: Message, body: Body) {
        let client = self.clients[index].id;
        match message {
            Message::Push { plan, block, ahead, .. } => {
                let mine = &self.shards[partition].mine;
                let block = mine.binary_search(&block).expect("a block of this shard") as u32;
                self.payload_comes(partition, client, (plan, block, ahead), body);
            }
            Message::Probe { plan } => {
                let Some(missing) = self.shards[partition].core.missing(client, plan) else { return };
                let blocks =
                    missing.ones().map(|at| self.shards[partition].mine[at].0).map(|b| b..b + 1).collect();
                self.say_to_client(partition, index, Message::Missing { plan, blocks }, Body::None);
            }
            Message::Pull { version, blocks, base } => {
                let shard = &self.shards[partition];
                let newest = shard.core.version();
                if shard.memory.version(version).is_none() {
                    let refusal = Refusal::NoVersion { wanted: version, newest };
                    return self.say_to_client(partition, index, Message::Refused(refusal), Body::None);
                }
                let asked = shard.mine.iter().copied().enumerate();
                let asked: Vec<_> = asked.filter(|(_, block)| blocks.contains(&block.0)).collect();
                self.lends(partition, index, (version, base), &asked);
            }
            Message::Follow { plan, base } => self.begins_to_be_followed(partition, index, plan, base),
            other => panic!("a client sends {} to a shard", other.name()),
        }
        self.serves_followers(partition);
    }

    pub fn say_to_coordinator(&mut self, partition: usize, request: u64, message: Message) {
        let coordinator = Node::Coordinator(self.shards[partition].course);
        self.send(Node::Partition(partition), coordinator, request, message, Body::None);
    }

    pub fn say_block(
        &mut self,
        partition: usize,
        index: usize,
        version: Version,
        block: BlockId,
        body: Body,
    ) {
        self.say_to_client(partition, index, Message::Block { version, block }, body);
    }

    pub fn say_to_client(&mut self, partition: usize, index: usize, message: Message, body: Body) {
        self.send(Node::Partition(partition), Node::Client(index), 0, message, body);
    }

    pub fn some_time(&mut self, most_micros: u64) -> Now {
        Now::from_micros(self.rng.u64(0..=most_micros))
    }
}
