//! The model moves, by the very code that does it in production: at a moment when all that there is of the job are a
//! version and the coordinator's core, both are taken to other shards, under another block map. What is said may be
//! late, or lost; shards and coordinators may end in the middle. Who was connected is told, perhaps late, twice or
//! never; who greets a shard of the past is told then.
//!
//! A mover has the world do something, and goes on when that is done.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use libmodelio::vocabulary::block_map::BlockMap;
use libmodelio::vocabulary::ids::{ClientId, ShardId, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::{Message, ModelRecord, Refusal, RegistryRequest, ShardRecord};
use ps_backend::coordinator::CoordinatorCore;
use ps_backend::moving::{Answers, Edge, Ends, Job, Order, Plan, Progress, PutError, move_model};

use crate::chaos::Fault;
use crate::shard::Shard;
use crate::state::Block;
use crate::world::{Body, Event, Node, Now, World};

/// How long a move may take, at most.
const PATIENCE: u64 = 8_000_000;
/// The pause after which a command asks again whose move another one keeps from beginning, and how many do so.
const TURN: Now = Now::from_millis(300);
const MOST_WAITING: usize = 3;
/// How much longer than a shard may take its answer is waited for.
const GRACE: Duration = Duration::from_secs(1);
/// Numbers of shards.
pub const SHARDS: u16 = 9;
/// The registry may carry out what it was asked this much later, in microseconds.
const LATEST: u64 = 10_000_000;
/// A shard that nobody tells asks the registry after this time, and again.
const ASK_AFTER: Now = Now::from_secs(5);
const ASK_AGAIN: Now = Now::from_secs(2);

/// What a coordinator, or a shard's partition, is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// The block map is in force, but it has not heard of it.
    Coming,
    Live,
    /// The model has moved, and it knows.
    Retired,
    /// Its process has ended, and was started anew.
    Lost,
}

/// Where the model is for some time. Its coordinator is the node of its number.
#[derive(Debug)]
pub struct Course {
    pub record: ModelRecord,
    pub map: BlockMap,
    /// Which of the world's shards are its partitions.
    pub partitions: Vec<usize>,
    pub coordinator: Life,
    /// Which partition is in the coordinator's process.
    local: Option<usize>,
    /// The move by which it came about.
    by: Option<usize>,
    /// Nobody is there any more.
    stopped: bool,
}

/// One attempt to move the model, for those who hear of it. What time it was at the coordinator when it began is its
/// number.
#[derive(Debug)]
struct Attempt {
    plan: Arc<Plan>,
    /// From this course.
    from: usize,
    version: Version,
    /// Whose optimizer state there is.
    reducer: Reducer,
}

/// What wakes a mover.
#[derive(Debug)]
enum Woken {
    Over,
    Answers(Answers),
    Put(Result<(), PutError>),
}

/// The coordinator's process carries it out.
pub struct Mover {
    of: usize,
    process: ShardId,
    /// The move, unless it is being carried on.
    moves: Option<Pin<Box<dyn Future<Output = ()>>>>,
    desk: Rc<Desk>,
    /// The question that is out.
    asked: Option<Asked>,
    /// What time it is there when it waits no longer.
    until: Option<Now>,
    stopped: bool,
    finished: bool,
}

/// A change of the world that an edge asks for.
type WorldOrder = dyn FnOnce(&mut World);

/// Between a mover and the world.
#[derive(Default)]
struct Desk {
    /// What the world is to do.
    orders: RefCell<VecDeque<Box<WorldOrder>>>,
    woken: Cell<Option<Woken>>,
}

#[derive(Debug)]
struct Asked {
    number: u64,
    of: usize,
    is_step: bool,
    answers: Answers,
}

/// The mover's end.
struct Hands {
    of: usize,
    desk: Rc<Desk>,
}

impl Hands {
    /// The world is to do something.
    fn order(&self, f: impl FnOnce(&mut World, usize) + 'static) {
        let of = self.of;
        self.desk.orders.borrow_mut().push_back(Box::new(move |world| f(world, of)));
    }

    /// Has the world find something out.
    async fn has<R: 'static>(&self, f: impl FnOnce(&mut World, usize) -> R + 'static) -> R {
        let answer = Rc::new(Cell::new(None));
        let told = Rc::clone(&answer);
        self.order(move |world, of| told.set(Some(f(world, of))));
        poll_fn(|_| answer.take().map_or(Poll::Pending, Poll::Ready)).await
    }

    /// Has the world begin something, and waits for what comes of it.
    async fn waits(&self, f: impl FnOnce(&mut World, usize) + 'static) -> Woken {
        self.order(f);
        poll_fn(|_| self.desk.woken.take().map_or(Poll::Pending, Poll::Ready)).await
    }
}

impl Edge for Hands {
    async fn now(&mut self) -> Now {
        self.has(|world, of| world.clock(world.mover_node(of))).await
    }

    async fn pause(&mut self, time: Duration) -> Result<(), Ends> {
        self.waits(move |world, of| world.mover_waits(of, time, None)).await;
        Ok(())
    }

    async fn ask(&mut self, shards: &[ShardId], order: Order, within: Duration) -> Result<Answers, Ends> {
        let shards = shards.to_vec();
        match self.waits(move |world, of| world.mover_asks(of, &shards, &order, within)).await {
            Woken::Answers(answers) => Ok(answers),
            other => panic!("it asked, and is told {other:?}"),
        }
    }

    fn show(&mut self, progress: Progress) {
        self.order(move |world, of| world.trace(|| format!("move {of}: {progress:?}")));
    }

    async fn unwanted(&mut self) -> Option<Refusal> {
        let stopped = self.has(|world, of| world.mover(of).is_some_and(|mover| mover.stopped)).await;
        stopped.then(|| Refusal::other("stopped"))
    }

    fn hold(&mut self) {
        self.order(|world, _| {
            world.on_coordinator(|coordinator, now, actions| coordinator.hold(now, actions));
        });
    }

    async fn held(&mut self) -> Result<(Version, Reducer), String> {
        self.has(|world, of| {
            let (attempt, job) = (&mut world.moves.attempts[of], world.coordinator.job());
            (attempt.version, attempt.reducer) = (job.version(), job.state_of());
            let held = (attempt.version, attempt.reducer);
            if world.coordinator.is_held() { Ok(held) } else { Err(world.coordinator.held_up_by()) }
        })
        .await
    }

    async fn freeze(&mut self) -> Result<(Vec<u8>, Now), String> {
        self.has(|world, _| {
            world.frozen = true;
            Ok((world.coordinator.hand_over().expect("it is held"), world.clock(world.coordinator_node())))
        })
        .await
    }

    fn release(&mut self) {
        self.order(World::release);
    }

    async fn put(&mut self, _: bool) -> Result<(), PutError> {
        match self.waits(World::asks_to_put).await {
            Woken::Put(put) => put,
            other => panic!("it asked the registry, and is told {other:?}"),
        }
    }

    async fn look(&mut self) -> Result<Option<BTreeSet<ShardId>>, Refusal> {
        let answers = self.has(|world, _| !world.chance(0.2)).await;
        Ok(answers.then(|| (1..=SHARDS).map(ShardId).collect()))
    }

    fn warn(&mut self, what: String) {
        self.order(move |world, of| world.trace(|| format!("move {of}: {what}")));
    }

    fn finish(&mut self, outcome: Result<(), Refusal>) {
        self.order(move |world, of| {
            world.trace(|| format!("move {of}: {outcome:?}"));
            world.mover(of).expect("it acts").finished = true;
        });
    }
}

/// What a process keeps of a move in which it takes blocks.
#[derive(Clone, Debug, Default)]
pub struct Adoption {
    of: usize,
    version: Option<Version>,
    whole: Option<Vec<Block>>,
    failed: bool,
    /// The coordinator's state, and what time it was there.
    handed: Option<(Vec<u8>, Now)>,
}

/// Of all moves.
#[derive(Default)]
pub struct Moves {
    attempts: Vec<Attempt>,
    pub movers: Vec<Mover>,
    adoptions: BTreeMap<ShardId, Adoption>,
    /// Attempts up to this one are abandoned, as far as a process knows.
    void: BTreeMap<ShardId, u64>,
    /// Moves that began while another coordinator was at one still.
    pub competed: u64,
    /// Commands that ask again.
    waiting: usize,
    questions: u64,
    /// Clients whose connections came or went while the coordinator was frozen.
    pub missed: BTreeSet<usize>,
}

/// What happens in a move; the first number says in which.
#[derive(Clone, Debug)]
pub enum Moving {
    Tick(usize),
    /// A shard is told something.
    Tell(usize, u64, ShardId, Order),
    Answered(usize, u64, ShardId, Result<Message, String>),
    /// The registry is asked to replace the record; the flag says whether its answer is not lost.
    PutComes(usize, bool),
    Put(usize, Result<(), PutError>),
    /// A shard has fetched its blocks.
    Filled(usize, ShardId),
    /// A shard that nobody tells looks at the registry.
    Asks(usize, ShardId),
    /// A command asks again.
    Turn,
    /// Somebody wants it no more.
    Halt(usize),
    /// The shards of a course are stopped.
    Stop(usize),
}

pub fn shard_record(number: u16) -> ShardRecord {
    let address = format!("node{number}:7070");
    ShardRecord { shard: ShardId(number), address, host: String::new(), draining: false, rdma: String::new() }
}

impl Moves {
    /// Moves that a coordinator's process carries out.
    pub fn of_coordinator(&self, node: Node) -> Vec<usize> {
        let of = self.movers.iter().map(|mover| mover.of);
        of.filter(|&of| Node::Coordinator(self.attempts[of].from) == node).collect()
    }

    /// Where it happens.
    pub fn node_of(&self, moving: &Moving) -> Option<Node> {
        match moving {
            Moving::Tick(of) | Moving::Answered(of, ..) | Moving::Put(of, _) | Moving::Halt(of) => {
                Some(Node::Coordinator(self.attempts[*of].from))
            }
            _ => None,
        }
    }
}

impl World {
    /// Which course the model is on, as the registry has it.
    pub fn current(&self) -> usize {
        self.courses.len() - 1
    }

    pub fn coordinator_node(&self) -> Node {
        Node::Coordinator(self.coordinated)
    }

    /// Whether somebody coordinates, and hears what is said.
    pub fn is_coordinated(&self) -> bool {
        !self.frozen && self.courses[self.coordinated].coordinator == Life::Live
    }

    pub fn life(&self, node: Node) -> Life {
        match node {
            Node::Client(_) => Life::Live,
            Node::Coordinator(course) => self.courses[course].coordinator,
            Node::Partition(partition) => match self.shards[partition].life {
                // Its process was started anew before the map came into force.
                Life::Coming if !self.comes(partition) => Life::Lost,
                life => life,
            },
        }
    }

    /// Whether a process has what a partition that is to be is made of.
    fn comes(&self, partition: usize) -> bool {
        let Course { map, partitions, by, .. } = &self.courses[self.shards[partition].course];
        let at = partitions.iter().position(|&known| known == partition);
        let shard = at.and_then(|at| map.shares().into_keys().nth(at));
        let adoption = shard.and_then(|shard| self.moves.adoptions.get(&shard));
        adoption.is_some_and(|adoption| Some(adoption.of) == *by)
    }

    /// Nothing comes of the job any more, and that is known, or will be at everybody's deadline.
    pub fn is_dead(&self) -> bool {
        !self.is_coordinated() || self.coordinator.failed().is_some()
    }

    /// Whether `opener` keeps up a connection to `acceptor`.
    pub fn is_wanted(&self, opener: Node, acceptor: Node) -> bool {
        match opener {
            Node::Client(index) => self.clients[index].partition_of(&self.courses, acceptor).is_some(),
            opener => self.life(opener) == Life::Live,
        }
    }

    /// The first course: its coordinator and its partitions begin at once.
    pub fn begin(&mut self, record: ModelRecord, map: BlockMap, local: Option<usize>) {
        for number in 1..=SHARDS {
            let announce =
                RegistryRequest::Announce { record: shard_record(number), lease_ms: 3_600_000, bound: false };
            self.registry.handle(&announce, &[], Now::ZERO).expect("there is room");
        }
        let bytes = record.encode().expect("a record");
        self.registry.handle(&RegistryRequest::Put { replaces: None }, &bytes, Now::ZERO).expect("it is new");
        self.add_course(record, map, local, None);
        let owners: Vec<ShardId> = self.courses[0].map.shares().into_keys().collect();
        owners.into_iter().for_each(|owner| self.activate(0, owner, Version(0), &[]));
        let shown = self.some_time(1_000_000_000);
        self.starts_clock(Node::Coordinator(0), shown);
        self.courses[0].coordinator = Life::Live;
        self.coordinator_connects(0);
    }

    fn add_course(&mut self, record: ModelRecord, map: BlockMap, local: Option<usize>, by: Option<usize>) {
        let course = self.courses.len();
        let mut partitions = Vec::new();
        for shard in map.shares().into_keys() {
            let mut shard = Shard::new(map.blocks_of(shard).collect(), Version(0), &[], self.settings.keep);
            (shard.course, shard.life) = (course, Life::Coming);
            let partition = self.shards.len();
            partitions.push(partition);
            self.shards.push(shard);
            let shown = self.some_time(1_000_000_000);
            self.starts_clock(Node::Partition(partition), shown);
        }
        self.courses.push(Course {
            record,
            map,
            partitions,
            coordinator: Life::Coming,
            local,
            by,
            stopped: false,
        });
    }

    /// A shard's partition of a course begins.
    fn activate(&mut self, course: usize, shard: ShardId, version: Version, whole: &[Block]) {
        let coordinator = Node::Coordinator(course);
        let Course { map, partitions, local, .. } = &self.courses[course];
        let at = map.shares().into_keys().position(|owner| owner == shard).expect("an owner");
        let (partition, is_local) = (partitions[at], *local == Some(at));
        let mut begun = Shard::new(map.blocks_of(shard).collect(), version, whole, self.settings.keep);
        (begun.course, begun.life) = (course, Life::Live);
        if is_local {
            begun.process = Some(coordinator);
            self.network.local.push((coordinator, Node::Partition(partition)));
        }
        self.shards[partition] = begun;
    }

    fn coordinator_connects(&mut self, course: usize) {
        for partition in self.courses[course].partitions.clone() {
            self.connects(Node::Coordinator(course), Node::Partition(partition), Now::ZERO);
        }
    }

    pub fn client_connects(&mut self, index: usize) {
        let course = self.clients[index].course;
        let partitions = self.courses[course].partitions.clone();
        for node in [Node::Coordinator(course)].into_iter().chain(partitions.into_iter().map(Node::Partition))
        {
            self.connects(Node::Client(index), node, Now::ZERO);
        }
    }

    /// A shard's partition of a course.
    fn partition_of(&self, course: usize, shard: ShardId) -> Option<usize> {
        let Course { map, partitions, .. } = &self.courses[course];
        map.shares().into_keys().position(|owner| owner == shard).map(|at| partitions[at])
    }

    // -- the one who moves it

    /// Whether somebody waits for a move.
    pub fn is_moving(&self) -> bool {
        self.moves.waiting > 0 || self.moves.movers.iter().any(|mover| !mover.finished)
    }

    fn mover_node(&self, of: usize) -> Node {
        Node::Coordinator(self.moves.attempts[of].from)
    }

    fn mover(&mut self, of: usize) -> Option<&mut Mover> {
        self.moves.movers.iter_mut().find(|mover| mover.of == of)
    }

    /// A coordinator moves its model once at a time; other commands ask again. One that was frozen may still be at it
    /// when the next one begins.
    pub fn begin_move(&mut self) {
        let goes_on =
            |mover: &Mover| !mover.finished && self.moves.attempts[mover.of].from == self.coordinated;
        if !self.moves.movers.iter().any(goes_on) {
            self.begins_move();
        } else if self.moves.waiting < MOST_WAITING {
            self.moves.waiting += 1;
            self.after(TURN, Event::Moves(Moving::Turn));
        }
    }

    fn begins_move(&mut self) {
        let from = self.coordinated;
        if !self.is_coordinated() || self.coordinator.failed().is_some() {
            return;
        }
        let before = self.courses[self.current()].record.clone();
        let epoch = self.courses[from].record.epoch;
        let owners: Vec<ShardId> = self.courses[from].map.shares().into_keys().collect();
        let off = owners[self.rng.usize(0..owners.len())];
        // Of the others some take blocks.
        let mut shards: Vec<ShardRecord> = (1..=SHARDS).map(shard_record).collect();
        for record in &mut shards {
            record.draining = record.shard == off || self.rng.u8(0..3) == 0;
        }
        let controls = self.coordinator.job().controls().clone();
        let job = Job { generation: before.generation, epoch, controls: &controls };
        let of = self.moves.attempts.len();
        let number = u64::try_from(self.clock(self.coordinator_node()).as_nanos()).expect("a short run");
        let numbers = self.moves.attempts.iter().map(|attempt| attempt.plan.attempt).max();
        assert!(numbers < Some(number), "attempt {number} to move the model comes after {numbers:?}");
        let process = before.coordinator;
        let plan = match Plan::new(off, before, &shards, &job, number) {
            Ok(plan) => Arc::new(plan.expect("it has blocks")),
            Err(why) => return self.trace(|| format!("no move: {why}")),
        };
        let (version, reducer) = (Version(0), controls.reducer);
        let attempt = Attempt { plan: Arc::clone(&plan), from, version, reducer };
        self.moves.attempts.push(attempt);
        let now = self.clock(self.coordinator_node());
        let deadline = now + Now::from_secs(3) + self.some_time(PATIENCE);
        let hold = Duration::from_secs(1) + self.some_time(PATIENCE);
        self.trace(|| format!("move {of} off shard {off} to {:?}", plan.after.owners));
        self.moves.competed += u64::from(self.moves.movers.iter().any(|mover| !mover.finished));
        let desk = Rc::<Desk>::default();
        let mut hands = Hands { of, desk: Rc::clone(&desk) };
        let moves = async move { move_model(&mut hands, &plan, deadline, Some(hold)).await };
        let (moves, asked, until) = (Some(Box::pin(moves) as Pin<Box<dyn Future<Output = ()>>>), None, None);
        let (stopped, finished) = (false, false);
        self.moves.movers.push(Mover { of, process, moves, desk, asked, until, stopped, finished });
        self.mover_goes_on(of);
        if self.chance(0.1) {
            let after = self.some_time(PATIENCE / 4);
            self.after(after, Event::Moves(Moving::Halt(of)));
        }
        if self.settings.kills && self.rng.bool() {
            let after = self.some_time(1_500_000);
            self.after(after, Event::Fault(Fault::Kill));
        }
    }

    /// Does what the mover wants until it waits for something, or ends.
    fn mover_goes_on(&mut self, of: usize) {
        while let Some(mover) = self.mover(of)
            && let Some(mut moves) = mover.moves.take()
        {
            let ended = moves.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
            mover.moves = (!ended).then_some(moves);
            let orders = mover.desk.orders.take();
            if orders.is_empty() && !ended {
                return;
            }
            orders.into_iter().for_each(|order| order(self));
            if ended {
                self.moves.movers.retain(|mover| mover.of != of);
            }
        }
    }

    fn wake(&mut self, of: usize, what: Woken) {
        let Some(mover) = self.mover(of) else { return };
        mover.until = None;
        mover.desk.woken.set(Some(what));
        self.mover_goes_on(of);
    }

    fn mover_waits(&mut self, of: usize, time: Duration, asked: Option<Asked>) {
        let node = self.mover_node(of);
        let until = self.clock(node) + time;
        let mover = self.mover(of).expect("it waits");
        (mover.asked, mover.until) = (asked, Some(until));
        self.at(self.when(node, until), Event::Moves(Moving::Tick(of)));
    }

    fn mover_asks(&mut self, of: usize, shards: &[ShardId], order: &Order, within: Duration) {
        self.moves.questions += 1;
        let (number, is_step) = (self.moves.questions, order.is_step);
        self.trace(|| format!("move {of}: {shards:?} are told {:?}", order.message));
        for &shard in shards {
            if !self.chance(0.01) {
                let after = self.some_delay();
                self.after(after, Event::Moves(Moving::Tell(of, number, shard, order.clone())));
            }
        }
        let asked = Asked { number, of: shards.len(), is_step, answers: Answers::new() };
        self.mover_waits(of, within + GRACE, Some(asked));
    }

    /// Something has happened that a mover may wait for.
    fn mover_looks(&mut self, of: usize) {
        let now = self.clock(self.mover_node(of));
        let Some(mover) = self.mover(of) else { return };
        let Some(until) = mover.until else { return };
        let ends = |asked: &Asked| {
            let fails = mover.stopped || asked.answers.iter().any(|(_, answer)| answer.is_err());
            asked.answers.len() == asked.of || asked.is_step && fails
        };
        if until <= now || mover.asked.as_ref().is_some_and(ends) {
            let asked = mover.asked.take();
            self.wake(of, asked.map_or(Woken::Over, |asked| Woken::Answers(asked.answers)));
        }
    }

    /// The coordinator goes on where it was: the old map is in force, and stays so.
    fn release(&mut self, of: usize) {
        let from = self.moves.attempts[of].from;
        assert_eq!(self.current(), from, "a coordinator goes on though another block map is in force");
        if std::mem::take(&mut self.frozen) {
            for index in std::mem::take(&mut self.moves.missed) {
                let up = self.network.connection(Node::Client(index), self.coordinator_node()).acceptor_up;
                let id = self.clients[index].id;
                self.on_coordinator(|coordinator, now, actions| match up {
                    true => coordinator.client_up(id, now, actions).expect("room for a client"),
                    false => coordinator.client_down(id, now, actions),
                });
            }
            self.forgive_silence();
        }
        self.on_coordinator(|coordinator, now, actions| coordinator.release(now, actions));
        self.arm(self.coordinator_node());
    }

    /// What was said while nobody listened counts as a sign of life.
    fn forgive_silence(&mut self) {
        let learners: Vec<_> = self.members().iter().map(|m| m.learner).collect();
        let coordinator = self.coordinator_node();
        let up = |world: &mut World, index: usize| {
            world.network.connection(Node::Client(index), coordinator).acceptor_up
        };
        let clients: Vec<usize> = (0..self.clients.len()).filter(|&index| up(self, index)).collect();
        let ids: Vec<ClientId> = clients.into_iter().map(|index| self.clients[index].id).collect();
        for id in ids {
            let touch = Message::Touch { learners: learners.clone(), attached: None };
            self.on_coordinator(|coordinator, now, actions| {
                coordinator.from_client(id, 0, touch, now, actions)
            });
        }
    }

    /// How long something takes on its way: now and then longer than anybody waits.
    fn some_delay(&mut self) -> Now {
        let most = if self.chance(0.02) { 15_000_000 } else { 50_000 };
        self.some_time(most)
    }

    /// The request may be lost, come late, or be carried out without an answer.
    fn asks_to_put(&mut self, of: usize) {
        let comes = |after, is_answered| (after, Event::Moves(Moving::PutComes(of, is_answered)));
        let answered = |after, answer| (after, Event::Moves(Moving::Put(of, answer)));
        let lost = || Err(PutError::Unknown("no answer".into()));
        let after = self.some_delay();
        let kind = if self.healed { 9 } else { self.rng.u8(0..20) };
        let events = match kind {
            0 => vec![answered(after, Err(PutError::NotSent("nobody listens".into())))],
            1 => vec![answered(after, lost())],
            2 => vec![comes(after, false), answered(after + after, lost())],
            // It is carried out long after it was asked again.
            3..5 => vec![answered(after, lost()), comes(after + self.some_time(LATEST), false)],
            _ => vec![comes(after, true)],
        };
        events.into_iter().for_each(|(after, event)| self.after(after, event));
    }

    // -- what happens

    pub fn moves(&mut self, moving: Moving) {
        match moving {
            Moving::Tick(of) => self.mover_looks(of),
            Moving::Tell(of, number, shard, Order { message, payload, .. }) => {
                let what = message.name();
                let answer = self.told(of, shard, message, &payload);
                self.trace(|| format!("move {of}: shard {shard} is told {what}: {answer:?}"));
                if !self.chance(0.01) {
                    let after = self.some_delay();
                    self.after(after, Event::Moves(Moving::Answered(of, number, shard, answer)));
                }
            }
            Moving::Answered(of, number, shard, answer) => {
                let asked = self.mover(of).and_then(|mover| mover.asked.as_mut());
                // An answer to an earlier question means nothing any more.
                if let Some(asked) = asked.filter(|asked| asked.number == number) {
                    asked.answers.push((shard, answer));
                    self.mover_looks(of);
                }
            }
            Moving::PutComes(of, is_answered) => {
                let answer = self.puts(of).map_err(PutError::Refused);
                // Whoever hangs hears later what was answered now.
                if is_answered {
                    self.after(Now::ZERO, Event::Moves(Moving::Put(of, answer)));
                }
            }
            Moving::Put(of, answer) => self.wake(of, Woken::Put(answer)),
            Moving::Filled(of, shard) => self.filled(of, shard),
            Moving::Asks(of, shard) => self.asks(of, shard),
            Moving::Turn => {
                self.moves.waiting -= 1;
                self.begin_move();
            }
            Moving::Halt(of) => {
                if let Some(mover) = self.mover(of) {
                    mover.stopped = true;
                    self.mover_looks(of);
                }
            }
            Moving::Stop(course) => self.stop_course(course),
        }
    }

    fn stop_course(&mut self, course: usize) {
        self.courses[course].stopped = true;
        for (opener, acceptor) in self.network.pairs() {
            let is_of = match acceptor {
                Node::Partition(partition) => self.shards[partition].course == course,
                node => node == Node::Coordinator(course),
            };
            if is_of && matches!(opener, Node::Client(_)) {
                self.reset(opener, acceptor);
            }
        }
    }

    /// The registry replaces the record, if it is still the one that was to be replaced. From then on the new map is in
    /// force.
    fn puts(&mut self, of: usize) -> Result<(), Refusal> {
        let plan = Arc::clone(&self.moves.attempts[of].plan);
        let put = RegistryRequest::Put { replaces: Some(plan.before.epoch) };
        self.registry.handle(&put, &plan.after.encode().expect("a record"), self.now)?;
        if self.courses[self.current()].by == Some(of) {
            return Ok(());
        }
        let stored = self.courses[self.current()].record.epoch;
        assert_eq!(stored, plan.before.epoch, "the registry replaces a record of another epoch");
        assert!(self.frozen || self.courses[self.coordinated].coordinator != Life::Live, "two coordinators");
        self.trace(|| format!("move {of} is in force: {:?}", plan.after.owners));
        let map = plan.after.block_map().expect("a map");
        let partitions = map.shares().len();
        let at = map.shares().into_keys().position(|owner| owner == plan.after.coordinator);
        let local = at.filter(|_| self.rng.bool());
        self.history.moved(partitions, self.moves.attempts[of].reducer);
        self.add_course(plan.after.clone(), map, local, Some(of));
        Ok(())
    }

    /// A shard hears what it is to do.
    fn told(
        &mut self,
        of: usize,
        shard: ShardId,
        message: Message,
        payload: &[u8],
    ) -> Result<Message, String> {
        let Attempt { plan, from, .. } = &self.moves.attempts[of];
        let (plan, from, number) = (Arc::clone(plan), *from, plan.attempt);
        let known = self.moves.adoptions.get(&shard).map(|adoption| adoption.of);
        let takes_part = || "it does not take part".to_owned();
        match message {
            Message::Adopt if known == Some(of) => Ok(Message::Done),
            Message::Adopt => {
                let own = self.partition_of(from, shard);
                let earlier = known.map(|known| &self.moves.attempts[known]);
                let is_void = self.moves.void.get(&shard).is_some_and(|&void| number <= void);
                if is_void || earlier.is_some_and(|earlier| earlier.plan.attempt > number) {
                    return Err("a later attempt, or none".into());
                }
                let in_force = |earlier: &Attempt| earlier.plan.after.epoch <= plan.before.epoch;
                if earlier.is_some_and(in_force) {
                    return Err("it has not switched yet".into());
                }
                self.moves.adoptions.remove(&shard);
                if own.is_some_and(|partition| self.shards[partition].life != Life::Live) {
                    return Err("no such model".into());
                }
                self.moves.adoptions.insert(shard, Adoption { of, ..Adoption::default() });
                Ok(Message::Done)
            }
            Message::Abandon { .. } => {
                let void = self.moves.void.entry(shard).or_default();
                *void = number.max(*void);
                // One that is whole may be of the map in force.
                let whole = self.moves.adoptions.get(&shard).is_some_and(|adoption| adoption.whole.is_some());
                let earlier = known.is_some_and(|known| self.moves.attempts[known].plan.attempt < number);
                if known == Some(of) || earlier && !whole {
                    self.moves.adoptions.remove(&shard);
                }
                Ok(Message::Done)
            }
            Message::Switch => self.switches(of, shard).map(|()| Message::Done),
            Message::Fill { .. } | Message::HandOver { .. } if known != Some(of) => Err(takes_part()),
            Message::Fill { version, .. } => {
                let adoption = self.moves.adoptions.get_mut(&shard).ok_or_else(takes_part)?;
                if adoption.version.replace(version).is_none() {
                    let after = self.some_time(200_000);
                    self.after(after, Event::Moves(Moving::Filled(of, shard)));
                }
                let blocks = plan.after.owners.iter().filter(|(owner, _)| *owner == shard);
                let blocks = blocks.map(|(_, run)| run).sum();
                match self.moves.adoptions.get(&shard) {
                    Some(adoption) if adoption.failed => Err("blocks cannot be fetched".into()),
                    Some(adoption) if adoption.whole.is_some() => Ok(Message::Adopted { blocks, of: blocks }),
                    _ => Ok(Message::Adopted { blocks: 0, of: blocks }),
                }
            }
            Message::HandOver { at, now, .. } => {
                assert_eq!(at, 0, "a state of one piece");
                let (layout, partitions) = (self.settings.layout(), self.courses[from].partitions.len());
                let (state, now) = (payload.to_vec(), Now::from_nanos(now));
                CoordinatorCore::taken_over(&state, &layout, partitions, now).expect("what was handed over");
                let adoption = self.moves.adoptions.get_mut(&shard).ok_or_else(takes_part)?;
                adoption.handed = Some((state, now));
                Ok(Message::Done)
            }
            other => unreachable!("nobody says {}", other.name()),
        }
    }

    /// A shard fetches its blocks from those that have them.
    fn filled(&mut self, of: usize, shard: ShardId) {
        let whole = self.whole(of);
        let fails = self.chance(0.01);
        let Some(adoption) = self.moves.adoptions.get_mut(&shard).filter(|adoption| adoption.of == of) else {
            return;
        };
        match whole.filter(|_| !fails) {
            Some(whole) => {
                adoption.whole = Some(whole);
                self.after(ASK_AFTER, Event::Moves(Moving::Asks(of, shard)));
            }
            None => adoption.failed = true,
        }
    }

    /// The version at which the job is held, of all shards, if they have it.
    fn whole(&self, of: usize) -> Option<Vec<Block>> {
        let Attempt { from, version: expected, reducer, .. } = self.moves.attempts[of];
        let mut whole = vec![Block::default(); self.settings.blocks as usize];
        for &partition in &self.courses[from].partitions {
            if self.shards[partition].life != Life::Live {
                return None;
            }
            let (version, blocks) = self.shards[partition].front()?;
            if version != expected {
                return None;
            }
            blocks.for_each(|(block, kept)| whole[block.index()] = kept.kept_for(reducer));
        }
        Some(whole)
    }

    /// Another block map is in force. Nothing happens the second time.
    fn switches(&mut self, of: usize, shard: ShardId) -> Result<(), String> {
        let found = self.courses.iter().position(|course| course.by == Some(of));
        let course = found.expect("it is in force");
        let from = self.moves.attempts[of].from;
        let old =
            self.partition_of(from, shard).filter(|&partition| self.shards[partition].life == Life::Live);
        let Some(partition) = self.partition_of(course, shard) else {
            self.retire(from, shard, old);
            return Ok(());
        };
        match self.shards[partition].life {
            Life::Coming => {}
            Life::Lost => return Err("this shard has no blocks of the model".into()),
            Life::Live | Life::Retired => return Ok(()),
        }
        let record = self.courses[course].record.clone();
        let adoption = self.moves.adoptions.get(&shard).filter(|adoption| adoption.of == of).cloned();
        let Some(Adoption { version: Some(version), whole: Some(whole), handed, .. }) = adoption else {
            return Err("this shard has no blocks of the model under that block map".into());
        };
        if record.coordinator == shard && handed.is_none() {
            return Err("the coordinator's state was not handed over".into());
        }
        self.activate(course, shard, version, &whole);
        self.moves.adoptions.remove(&shard);
        self.retire(from, shard, old);
        if let Some(handed) = handed.filter(|_| record.coordinator == shard) {
            self.takes_over(course, &handed);
        }
        Ok(())
    }

    fn takes_over(&mut self, course: usize, (handed, frozen_at): &(Vec<u8>, Now)) {
        let before = self.courses[self.coordinated].coordinator;
        assert!(
            self.frozen || before == Life::Lost,
            "a coordinator begins while another one ({before:?}) goes on"
        );
        let partitions = self.courses[course].partitions.len();
        // Its clock goes on from when the other one was frozen.
        self.starts_clock(Node::Coordinator(course), *frozen_at);
        let taken = CoordinatorCore::taken_over(handed, &self.settings.layout(), partitions, *frozen_at);
        self.coordinator = taken.expect("what was handed over");
        // Whoever coordinated is frozen, and never hears anything again.
        (self.coordinated, self.frozen) = (course, false);
        self.moves.missed.clear();
        self.courses[course].coordinator = Life::Live;
        self.coordinator_connects(course);
        self.on_coordinator(|coordinator, now, actions| coordinator.go_on(now, actions));
        self.arm(self.coordinator_node());
    }

    /// Whoever is connected to a shard, or to the coordinator in its process, is told where the model is now, perhaps.
    fn retire(&mut self, from: usize, shard: ShardId, old: Option<usize>) {
        let mut nodes: Vec<Node> = Vec::new();
        if let Some(partition) = old {
            self.shards[partition].life = Life::Retired;
            nodes.push(Node::Partition(partition));
        }
        if self.courses[from].record.coordinator == shard && self.courses[from].coordinator == Life::Live {
            self.courses[from].coordinator = Life::Retired;
            nodes.push(Node::Coordinator(from));
        }
        for node in nodes {
            for index in 0..self.clients.len() {
                if self.clients[index].alive && self.network.connection(Node::Client(index), node).acceptor_up
                {
                    // One in four is cut off by the connection's end before it hears.
                    if self.rng.u32(0..4) > 0 {
                        self.say_moved(node, index);
                    }
                    if self.rng.bool() {
                        self.reset(Node::Client(index), node);
                    }
                }
            }
        }
        let all_know =
            self.courses[from].partitions.iter().all(|&partition| self.shards[partition].life != Life::Live);
        if all_know && self.rng.bool() {
            let after = self.some_time(3_000_000);
            self.after(after, Event::Moves(Moving::Stop(from)));
        }
    }

    /// A shard whose blocks are all there, and that nobody tells what becomes of them, asks the registry.
    fn asks(&mut self, of: usize, shard: ShardId) {
        if self.moves.adoptions.get(&shard).is_none_or(|adoption| adoption.of != of) {
            return;
        }
        match self.courses.iter().any(|course| course.by == Some(of)) {
            true => drop(self.switches(of, shard)),
            // Another map is in force: it never will be.
            false if self.current() != self.moves.attempts[of].from => {
                self.moves.adoptions.remove(&shard);
            }
            false => {}
        }
        self.after(ASK_AGAIN, Event::Moves(Moving::Asks(of, shard)));
    }

    // -- processes that end

    /// The process of a shard ends, with all that it has, and is started anew.
    pub fn kill(&mut self) {
        let adopts = self.moves.adoptions.keys().copied();
        let owns = self.courses[self.current()].map.shares().into_keys();
        let all: Vec<ShardId> = adopts.chain(owns).collect();
        let shard = all[self.rng.usize(0..all.len())];
        self.trace(|| format!("shard {shard} is killed"));
        self.killed += 1;
        self.moves.adoptions.remove(&shard);
        self.moves.movers.retain(|mover| mover.process != shard);
        let mut nodes = Vec::new();
        for course in 0..self.courses.len() {
            let partition = self.partition_of(course, shard);
            // What is to come into being is lost, too.
            let there = |life: Life| matches!(life, Life::Live | Life::Coming);
            if let Some(partition) = partition.filter(|&partition| there(self.shards[partition].life)) {
                nodes.push(Node::Partition(partition));
            }
            if self.courses[course].record.coordinator == shard && there(self.courses[course].coordinator) {
                nodes.push(Node::Coordinator(course));
            }
        }
        for node in nodes {
            match node {
                Node::Partition(partition) => self.shards[partition].lose(),
                Node::Coordinator(course) => self.courses[course].coordinator = Life::Lost,
                Node::Client(_) => unreachable!("a shard"),
            }
            for (opener, acceptor) in self.network.pairs() {
                if opener == node || acceptor == node {
                    self.network.local.retain(|&pair| pair != (opener, acceptor));
                    self.reset(opener, acceptor);
                }
            }
        }
    }

    // -- clients

    /// A node of the past tells a client where the model went from there.
    pub fn say_moved(&mut self, node: Node, index: usize) {
        let course = match node {
            Node::Coordinator(course) => course,
            Node::Partition(partition) => self.shards[partition].course,
            Node::Client(_) => unreachable!("a client has no model"),
        };
        if self.courses[course].stopped || self.life(node) != Life::Retired {
            return;
        }
        self.send(node, Node::Client(index), 0, Message::Moved, Body::Course(course + 1));
    }

    /// A client greets a node that is not there any more, or not yet.
    pub fn greeted_in_vain(&mut self, index: usize, node: Node) {
        let known = self.clients[index].course;
        let again = Now::from_millis(50) + self.some_time(300_000);
        if self.courses[known].stopped || self.life(node) == Life::Lost {
            // It finds nobody, and asks the registry after a while.
            let after = Now::from_secs(2) + self.some_time(1_000_000);
            self.after(after, Event::Found(index, self.current()));
            if !self.courses[known].stopped {
                self.connects(Node::Client(index), node, after + again);
            }
            return;
        }
        // The answer may be lost with its connection; then it greets again.
        if self.life(node) == Life::Retired && !self.chance(0.2) {
            let after = self.some_time(20_000);
            self.after(after, Event::Found(index, known + 1));
        }
        self.connects(Node::Client(index), node, again);
    }

    /// A client is told where the model is, or was.
    pub fn client_told(&mut self, index: usize, course: usize) {
        if !self.clients[index].alive {
            return;
        }
        let map = self.courses[course].map.clone();
        let is_newer = course > self.clients[index].course;
        // Its connections end, whatever becomes of what it was told.
        let before = self.clients[index].course;
        if is_newer {
            let partitions = self.courses[before].partitions.clone();
            for node in
                [Node::Coordinator(before)].into_iter().chain(partitions.into_iter().map(Node::Partition))
            {
                self.reset(Node::Client(index), node);
            }
            // From here on partitions are those of the new map.
            let client = &mut self.clients[index];
            client.course = course;
            client.sending = vec![0; map.shares().len()];
        }
        let taken = self.on_client(index, |core, now, actions| core.moved(&map, now, actions));
        assert_eq!(taken, is_newer, "client {index} is told of course {course}");
        if is_newer {
            self.trace(|| format!("client {index} goes to course {course}"));
            self.client_connects(index);
        }
    }
}
