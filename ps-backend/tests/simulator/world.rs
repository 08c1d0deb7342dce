//! The world of a run: its nodes, its clock, and the messages under way. Everything that happens is an event at a time,
//! and all that is left to chance comes from one generator, so that a run is a function of its seed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fastrand::Rng;
use libmodelio::client::core::ClientCore;
use libmodelio::registry::table::RegistryCore;
use libmodelio::vocabulary::block_map::BlockMap;
use libmodelio::vocabulary::ids::{ClientId, Generation, ShardId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::vocabulary::tensor_rules::TensorRules;
use libmodelio::wire::{Message, ModelRecord};
use ps_backend::coordinator::{self, CoordinatorCore};
use ps_backend::core::MemberView;
use ps_backend::relays::Relays;

use crate::chaos::Fault;
use crate::client::{Client, ClientEvent, Keys};
use crate::clock::Clock;
use crate::following::Early;
use crate::history::{Content, History};
use crate::memory::{Lent, Loans, Patches};
use crate::moving::{Course, Life, Moves, Moving};
use crate::network::Network;
use crate::parts::Parts;
use crate::programs::Program;
use crate::relaying::Relayed;
use crate::settings::Settings;
use crate::shard::{Shard, ShardEvent, Sum};

/// Of a block, in bytes that nobody has.
const BLOCK: u32 = 64 << 10;

/// More than any run has, also one of a job that trains on for minutes while it is waited for a move to end.
const MOST_EVENTS: u64 = 20_000_000;

/// A coordinator looks at its clock at least so often, whatever its core has asked for.
const IDLE: Now = Now::from_millis(200);

/// Time since the beginning of the world.
pub type Now = Duration;

/// A process, or a shard's partition in the coordinator's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Node {
    Client(usize),
    /// The coordinator of this course.
    Coordinator(usize),
    /// One of the world's shards.
    Partition(usize),
}

/// A message's payload.
#[derive(Clone, Debug)]
pub enum Body {
    None,
    Sum(Sum),
    /// It lies in the memory of this client, which is lent as long as the connection is this one.
    Named {
        index: usize,
        keys: Keys,
        epoch: u64,
    },
    Content(Content),
    /// It makes one content from another one.
    Patch(Content, Content),
    /// It lies in the memory of a shard.
    Lent(Lent),
    /// Where the model is now: on this course.
    Course(usize),
}

/// Something that happens at a node.
#[derive(Clone, Debug)]
pub enum Event {
    Client(usize, ClientEvent),
    Shard(usize, ShardEvent),
    /// A message comes.
    Message {
        from: Node,
        to: Node,
        epoch: u64,
        request: u64,
        message: Box<Message>,
        body: Body,
    },
    /// Somebody connects; the acceptor hears of it first.
    Connects {
        opener: Node,
        acceptor: Node,
    },
    Accepted {
        opener: Node,
        acceptor: Node,
        epoch: u64,
    },
    /// One end hears that the connection is gone.
    Gone {
        opener: Node,
        acceptor: Node,
        epoch: u64,
        at_opener: bool,
    },
    /// A core has asked for its time.
    Timer(Node, u64),
    /// A client has found out that the model is on this course, at the registry.
    Found(usize, usize),
    /// The model is being moved.
    Moves(Moving),
    /// Not at a node.
    Fault(Fault),
}

pub struct World {
    pub rng: Rng,
    pub now: Now,
    pub settings: Settings,
    pub network: Network,
    pub history: History,
    /// The model's reducer, and the rules of tensors, that the history knows of.
    known_rules: (Reducer, TensorRules),
    pub coordinator: CoordinatorCore,
    /// Of all courses.
    pub shards: Vec<Shard>,
    pub clients: Vec<Client>,
    /// Where the model is, the last one, and where it was.
    pub courses: Vec<Course>,
    /// Which course the coordinator is of: the last one that somebody has coordinated.
    pub coordinated: usize,
    /// The coordinator has been handed over, and nobody has taken it yet.
    pub frozen: bool,
    /// When it has last looked at its clock, by that.
    pub checked_at: Now,
    pub registry: RegistryCore,
    pub moves: Moves,
    pub loans: Loans,
    pub patches: Patches,
    /// The relays that the coordinator knows of.
    pub relays: Relays,
    pub relayed: Relayed,
    pub ahead: Early,
    pub parts: Parts,
    /// Blocks of plans that were not sealed yet.
    pub early: u64,
    /// Payloads that came before the plan was sealed, and had to wait for that.
    pub before_the_seal: u64,
    /// Passes over what several clients have of a block.
    pub together: u64,
    /// How often a stranger has spoken.
    pub strangers: u64,
    /// Its messages under numbers of requests that the coordinator accepts.
    pub believed: u64,
    /// How often the clock of a shard alone has jumped.
    pub jumped: u64,
    /// Processes that were killed.
    pub killed: u64,
    /// That has ended the job.
    pub ended: bool,
    /// The network is well again, and stays so.
    pub healed: bool,
    /// Programs end.
    pub ending: bool,
    queue: BTreeMap<(Now, u64), Event>,
    next_event: u64,
    /// Of each process.
    pub clocks: BTreeMap<Node, Clock>,
    /// Nodes that do nothing until then.
    pub hung: BTreeMap<Node, Now>,
    /// Events that wait for one of these.
    put_off: BTreeSet<u64>,
    /// For each node, the timer that counts and when it rings.
    timers: BTreeMap<Node, (u64, Now)>,
    pub printing: bool,
    pub events: u64,
    pub seed: u64,
}

impl World {
    pub fn new(seed: u64, printing: bool) -> World {
        let mut rng = Rng::with_seed(seed);
        let settings = Settings::draw(&mut rng);
        let shards: Vec<ShardId> = (0..settings.partitions).map(|i| ShardId(i * 2 + 1)).collect();
        let map = BlockMap::striped(settings.blocks, &shards).expect("a map");
        let partitions = map.shares().len();
        let history = History::new(partitions, &settings);
        let network = Network::new(settings.weather);
        let coordinator = CoordinatorCore::new(
            &settings.layout(),
            partitions,
            settings.controls.clone(),
            settings.patience,
        )
        .expect("settings of this model");
        let coordinator = match settings.provisional {
            true => coordinator.with_provisional_plans().announces_plans(),
            false => coordinator,
        };
        let mut world = World {
            now: Now::ZERO,
            network,
            coordinator,
            known_rules: (settings.controls.reducer, settings.controls.tensors.clone()),
            shards: Vec::new(),
            clients: Vec::new(),
            history,
            courses: Vec::new(),
            coordinated: 0,
            frozen: false,
            checked_at: Now::ZERO,
            registry: RegistryCore::new(),
            moves: Moves::default(),
            loans: Loans::default(),
            patches: Patches::default(),
            relays: Relays::default(),
            relayed: Relayed::default(),
            ahead: Early::default(),
            parts: Parts::default(),
            early: 0,
            before_the_seal: 0,
            together: 0,
            strangers: 0,
            believed: 0,
            jumped: 0,
            killed: 0,
            ended: false,
            healed: false,
            ending: false,
            queue: BTreeMap::new(),
            next_event: 0,
            clocks: BTreeMap::new(),
            hung: BTreeMap::new(),
            put_off: BTreeSet::new(),
            timers: BTreeMap::new(),
            printing,
            events: 0,
            seed,
            settings,
            rng,
        };
        world.trace(|| format!("{:#?}", world.settings));
        let local = world.settings.colocated.then_some(0);
        let (bytes, block) = (u64::from(world.settings.blocks) * u64::from(BLOCK), DType::F32);
        let layout = ModelLayout::blank(bytes, block, BLOCK).expect("a layout");
        let coordinator_at = *map.shares().keys().next().expect("a shard");
        let record = ModelRecord::new(
            "m",
            Generation(1),
            &layout,
            BTreeMap::new(),
            &map,
            coordinator_at,
            Default::default(),
        );
        let record = ModelRecord { ready: true, ..record.expect("a record") };
        world.begin(record, map, local);
        for learners in world.settings.clients.clone() {
            world.add_client(learners);
        }
        world.complete_ranks(0);
        world.arm(Node::Coordinator(0));
        world
    }

    /// A client starts.
    pub fn add_client(&mut self, learners: usize) {
        let index = self.clients.len();
        let id = ClientId(1000 + self.rng.u64(0..1 << 40) * 64 + index as u64);
        // Its knowledge of the model's place may be out of date.
        let course = if self.chance(0.3) { self.rng.usize(0..self.courses.len()) } else { self.current() };
        let core = ClientCore::new(&self.courses[course].map).apart(id);
        let host = format!("h{}", index % 2);
        let offer = Message::Relay { address: index.to_string(), zone: String::new(), host };
        let mut core = core.by_relays(self.settings.relays.then_some(offer), None);
        let shown = self.some_time(1_000_000_000);
        self.starts_clock(Node::Client(index), shown);
        core.shown(Version(0), self.clock(Node::Client(index)), &mut Vec::new());
        let mut client = Client::new(id, core, course, self.history.first());
        client.programs.extend((0..learners).map(|at| Program::learner(format!("c{index}-{at}"))));
        if self.settings.operators {
            let operators = self.rng.usize(1..=2);
            client.programs.extend((0..operators).map(|at| Program::operator(format!("c{index}-op{at}"))));
        }
        let programs = client.programs.len();
        self.clients.push(client);
        self.add_rank(index);
        self.client_connects(index);
        self.after(self.settings.lease / 4, Event::Client(index, ClientEvent::Touch));
        for program in 0..programs {
            // Some join when others are in the middle of a step.
            let is_late = self.rng.u8(0..4) == 0;
            let about = if is_late { self.settings.chaos / 2 } else { self.settings.compute };
            self.program_pauses(index, program, about);
        }
    }

    // -- chance and time

    pub fn chance(&mut self, share: f64) -> bool {
        !self.healed && self.rng.f64() < share
    }

    pub fn after(&mut self, after: Now, event: Event) {
        self.at(self.now + after, event);
    }

    pub fn at(&mut self, at: Now, event: Event) {
        self.next_event += 1;
        self.queue.insert((at, self.next_event), event);
    }

    pub fn trace(&self, what: impl FnOnce() -> String) {
        if self.printing {
            println!("{:12.6} {}", self.now.as_secs_f64(), what());
        }
    }

    /// The process that a node runs in.
    pub fn process(&self, node: Node) -> Node {
        match node {
            Node::Partition(partition) => self.shards[partition].process.unwrap_or(node),
            _ => node,
        }
    }

    fn node_of(&self, event: &Event) -> Option<Node> {
        Some(match event {
            Event::Client(index, _) => Node::Client(*index),
            Event::Shard(partition, _) => Node::Partition(*partition),
            Event::Message { to, .. } => *to,
            Event::Connects { acceptor, .. } => *acceptor,
            Event::Accepted { opener, .. } => *opener,
            Event::Gone { opener, acceptor, at_opener, .. } => {
                if *at_opener {
                    *opener
                } else {
                    *acceptor
                }
            }
            Event::Timer(node, _) => *node,
            Event::Found(index, _) => Node::Client(*index),
            Event::Moves(moving) => return self.moves.node_of(moving),
            Event::Fault(_) => return None,
        })
    }

    /// Runs what happens up to `until`, or until `done`.
    pub fn run_until(&mut self, until: Now, done: impl Fn(&World) -> bool) -> bool {
        while let Some(entry) = self.queue.first_entry() {
            let (at, number) = *entry.key();
            if at > until {
                break;
            }
            let event = entry.remove();
            self.now = self.now.max(at);
            self.events += 1;
            assert!(self.events < MOST_EVENTS, "the run does not end");
            let node = self.node_of(&event);
            if let Some(node) = node {
                let hung = self.hung.get(&self.process(node)).copied().filter(|&until| until > self.now);
                if let Some(until) = hung {
                    // It keeps its place among what waits.
                    self.queue.insert((until, number), event);
                    self.put_off.insert(number);
                    continue;
                }
                if matches!(node, Node::Client(index) if !self.clients[index].alive) {
                    continue;
                }
            }
            self.happens(event);
            if let Some(node) = node {
                self.arm(node);
            }
            if done(self) {
                return true;
            }
        }
        self.now = self.now.max(until);
        done(self)
    }

    /// When the last of the messages under way comes.
    pub fn last_message(&self) -> Option<Now> {
        let is_message = |event: &Event| matches!(event, Event::Message { .. });
        self.queue.iter().filter(|(_, event)| is_message(event)).map(|((at, _), _)| *at).max()
    }

    /// What waits for hung nodes is no longer kept from them.
    pub fn wake_hung(&mut self) {
        self.hung.clear();
        let now = self.now;
        // Postponed events lie at the time at which their node would have gone on.
        let late: Vec<(Now, u64)> =
            self.queue.keys().copied().filter(|(_, number)| self.put_off.contains(number)).collect();
        for key in late {
            if let Some(event) = self.queue.remove(&key) {
                self.queue.insert((now, key.1), event);
            }
        }
        self.put_off.clear();
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Client(index, event) => self.client_event(index, event),
            Event::Shard(partition, event) => self.shard_event(partition, event),
            Event::Message { from, to, epoch, request, message, body } => {
                self.message_comes(from, to, epoch, request, *message, body);
            }
            Event::Connects { opener, acceptor } => self.accepts(opener, acceptor),
            Event::Accepted { opener, acceptor, epoch } => self.accepted(opener, acceptor, epoch),
            Event::Gone { opener, acceptor, epoch, at_opener } => {
                self.gone(opener, acceptor, epoch, at_opener)
            }
            Event::Timer(node, number) => {
                if self.timers.get(&node).is_some_and(|(counts, _)| *counts == number) {
                    self.timers.remove(&node);
                    if node == self.coordinator_node() && self.is_coordinated() {
                        self.checked_at = self.clock(node);
                        self.on_coordinator(|coordinator, now, actions| coordinator.tick(now, actions));
                        let (due, now) = (self.coordinator.job().next_deadline(), self.clock(node));
                        assert!(
                            due.is_none_or(|due| due > now) && self.coordinator.next_deadline() > now,
                            "the coordinator leaves a request unanswered"
                        );
                    }
                }
            }
            Event::Found(index, course) => self.client_told(index, course),
            Event::Moves(moving) => self.moves(moving),
            Event::Fault(fault) => self.fault(fault),
        }
    }

    /// After an event: what its node does next by itself.
    pub fn arm(&mut self, node: Node) {
        let due = match node {
            Node::Client(index) => {
                self.pump(index);
                self.clients[index].core.next_deadline()
            }
            node if node == self.coordinator_node() && self.is_coordinated() => {
                self.tells_relays();
                Some(self.coordinator.next_deadline().min(self.checked_at + IDLE))
            }
            Node::Coordinator(_) | Node::Partition(_) => None,
        };
        let Some(due) = due.map(|due| self.when(node, due)) else { return };
        if self.timers.get(&node).is_some_and(|(_, at)| *at == due) {
            return;
        }
        let number = self.next_event + 1;
        self.timers.insert(node, (number, due));
        self.at(due.max(self.now), Event::Timer(node, number));
    }

    // -- messages

    pub fn send(&mut self, from: Node, to: Node, request: u64, message: Message, body: Body) {
        let (opener, acceptor) = World::roles(from, to);
        let connection = self.network.connection(opener, acceptor).clone();
        let is_up = if from == opener { connection.opener_up } else { connection.acceptor_up };
        if !is_up {
            return;
        }
        let mut deliveries = self.network.deliveries(from, to, self.now, &mut self.rng);
        // This comes, though late: a connection that loses it has ended.
        if deliveries.is_empty() && matches!(message, Message::AckThrough { .. }) {
            deliveries.push(self.now + self.some_time(3000));
        }
        // Rings repeat nothing, and a second copy of lent memory would end the loan of the first.
        if matches!(body, Body::Lent(_)) {
            deliveries.truncate(1);
        }
        self.trace(|| format!("{from:?} to {to:?}: {request} {message:?} comes {deliveries:?}"));
        let message = Box::new(message);
        for at in deliveries {
            let (message, body) = (message.clone(), body.clone());
            self.at(at, Event::Message { from, to, epoch: connection.epoch, request, message, body });
        }
    }

    fn message_comes(
        &mut self,
        from: Node,
        to: Node,
        epoch: u64,
        request: u64,
        message: Message,
        body: Body,
    ) {
        let (opener, acceptor) = World::roles(from, to);
        let connection = self.network.connection(opener, acceptor).clone();
        // Only what a connection says of the numbers depends on the connection.
        let depends = self.network.weather.streams || matches!(message, Message::AckThrough { .. });
        if depends && connection.epoch != epoch {
            return;
        }
        match (from, to) {
            (Node::Client(index), Node::Coordinator(_) | Node::Partition(_))
                if self.life(to) != Life::Live =>
            {
                self.say_moved(to, index);
            }
            (Node::Client(index), Node::Coordinator(_)) => {
                if to != self.coordinator_node() || !self.is_coordinated() || !connection.acceptor_up {
                    return;
                }
                match message {
                    Message::AckThrough { .. } => self.network.connection(from, to).numbered = epoch,
                    _ if request > 0 && connection.numbered != connection.epoch => return,
                    _ => {}
                }
                if self.relays_hear(index, &message) {
                    return;
                }
                let id = self.clients[index].id;
                self.part_is_asked(id, request, &message);
                if matches!(message, Message::Join { .. }) {
                    self.history.joins(&self.members());
                }
                self.on_coordinator(|coordinator, now, actions| {
                    coordinator.from_client(id, request, message, now, actions)
                });
            }
            (Node::Partition(partition), Node::Coordinator(coordinator)) => {
                // Messages to an earlier coordinator are refused.
                let known = self.courses[coordinator].partitions.iter().position(|&known| known == partition);
                if let Some(partition) =
                    known.filter(|_| coordinator == self.coordinated && self.is_coordinated())
                {
                    self.on_coordinator(|coordinator, now, actions| {
                        coordinator.from_partition(partition, request, message, now, actions)
                    });
                }
            }
            // One that was restarted knows nothing of it.
            (Node::Coordinator(_), Node::Partition(partition))
                if self.shards[partition].life != Life::Live => {}
            (Node::Coordinator(coordinator), Node::Partition(partition)) => {
                assert_eq!(coordinator, self.shards[partition].course);
                self.shard_from_coordinator(partition, request, message);
            }
            (Node::Client(index), Node::Partition(partition)) => {
                self.shard_from_client(partition, index, message, body)
            }
            (_, Node::Client(index)) => {
                if let Body::Course(course) = body {
                    return self.client_told(index, course);
                }
                // Connections know which map they were opened under.
                let Some(partition) = self.clients[index].partition_of(&self.courses, from) else { return };
                match partition {
                    None => self.client_from_coordinator(index, request, message),
                    Some(partition) => self.client_from_shard(index, partition, message, body),
                }
            }
            _ => unreachable!("nobody else talks"),
        }
    }

    // -- the coordinator

    pub fn on_coordinator<R>(
        &mut self,
        f: impl FnOnce(&mut CoordinatorCore, Now, &mut Vec<coordinator::Action>) -> R,
    ) -> R {
        let mut actions = Vec::new();
        assert!(self.is_coordinated(), "a coordinator that was handed over, or has ended, goes on");
        let now = self.clock(self.coordinator_node());
        let result = f(&mut self.coordinator, now, &mut actions);
        let controls = self.coordinator.job().controls();
        if (controls.reducer, &controls.tensors) != (self.known_rules.0, &self.known_rules.1) {
            self.history.optimizer.sets(&self.settings.reducers(controls));
            self.known_rules = (controls.reducer, controls.tensors.clone());
        }
        assert!(
            self.killed > 0 || self.coordinator.failed().is_none(),
            "the job has failed: {:?}",
            self.coordinator.failed()
        );
        for action in actions {
            self.coordinator_acts(action);
        }
        result
    }

    /// The learners of the job.
    pub fn members(&self) -> Vec<MemberView> {
        self.coordinator.job().members(self.clock(self.coordinator_node()))
    }

    fn client_index(&self, id: ClientId) -> Option<usize> {
        self.clients.iter().position(|client| client.id == id)
    }

    fn coordinator_acts(&mut self, action: coordinator::Action) {
        match action {
            coordinator::Action::ToClient(id, request, message) => {
                if let Message::Grant { plan, payload, .. } = &message {
                    self.history.granted(id, *plan, payload);
                }
                if let Message::Joined { learner, incarnation, .. } = &message {
                    self.history.joined((*learner, *incarnation));
                }
                self.part_is_answered(id, request, &message);
                let index = self.client_index(id).expect("a client");
                self.send(self.coordinator_node(), Node::Client(index), request, message, Body::None);
            }
            coordinator::Action::ToPartition(partition, request, message) => {
                if let Message::Start(plan) = &message {
                    let is_missing =
                        |member: &&MemberView| member.joined_at <= plan.base && !member.unpublished;
                    let missing = self.members().iter().filter(is_missing).count();
                    self.history.started(plan, missing);
                }
                match message {
                    Message::Drop { plan } => self.history.dropped(plan),
                    Message::Conclude { plan } => self.history.counts(plan),
                    _ => {}
                }
                let partition = self.courses[self.coordinated].partitions[partition];
                self.send(self.coordinator_node(), Node::Partition(partition), request, message, Body::None);
            }
            coordinator::Action::Close(id, why) => {
                self.trace(|| format!("the coordinator closes the connection of client {id}: {why}"));
                let index = self.client_index(id).expect("a client");
                if self.clients[index].alive {
                    self.reset(Node::Client(index), self.coordinator_node());
                }
            }
            coordinator::Action::Published(version) => {
                self.trace(|| format!("version {version} is published"));
                let (plan, _) = self.coordinator.running().expect("the shards have to hear of it");
                let meta = self.coordinator.state(ClientId(0), self.now).meta;
                self.history.announced(version, meta);
                self.history.decided(version, plan, &self.members());
            }
        }
    }
}
