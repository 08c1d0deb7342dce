//! The model moves. When all that there is of the job are a version and the coordinator's core, both are taken to other
//! shards, under another block map. Orders may be late, or lost; shards and coordinators may end in the middle. Clients
//! that are connected hear of it, perhaps late, twice or never; those that greet a shard of the past hear of it then.
//!
//! | module | holds |
//! |---|---|
//! | `mover` | the coordinator's end: the code in production, over an edge that the world serves |
//! | `owners` | the shards' end, and the registry's |

mod mover;
mod owners;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use libmodelio::vocabulary::block_map::BlockMap;
use libmodelio::vocabulary::ids::{PlanId, ShardId, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::{Message, ModelRecord, RegistryRequest, ShardRecord};
use ps_backend::moving::{MovePlan, Order, PutError};

use crate::shard::{InPlace, Shard};
use crate::state::Block;
use crate::world::{Body, Event, Node, Now, World};
use mover::{Mover, Woken};

/// Numbers of shards.
pub const SHARDS: u16 = 9;
/// What a coordinator, or a shard's partition, is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// The block map is in force, but it has not heard of it.
    Coming,
    Live,
    /// The model has moved, and it knows.
    Retired,
    /// Its process has ended, and was restarted.
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
    plan: Arc<MovePlan>,
    /// From this course.
    from: usize,
    version: Version,
    /// Whose optimizer state there is.
    reducer: Reducer,
}

/// What a process keeps of a move in which it takes blocks.
#[derive(Clone, Debug, Default)]
pub struct Incoming {
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
    incoming: BTreeMap<ShardId, Incoming>,
    /// The abandoned attempts that a process knows of.
    void: BTreeMap<ShardId, BTreeSet<u64>>,
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
    /// An order comes to a shard.
    Order(usize, u64, ShardId, Order),
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
                // Its process was restarted before the map came into force.
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
        let incoming = shard.and_then(|shard| self.moves.incoming.get(&shard));
        incoming.is_some_and(|incoming| Some(incoming.of) == *by)
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
            let in_place = InPlace::of(self.seed + self.shards.len() as u64);
            let mine = map.blocks_of(shard).collect();
            let mut shard = Shard::new(mine, Version(0), &[], self.settings.keep, in_place);
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
        let in_place = InPlace::of(self.seed + partition as u64);
        let mine = map.blocks_of(shard).collect();
        let mut begun = Shard::new(mine, version, whole, self.settings.keep, in_place);
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

    // -- what happens

    pub fn moves(&mut self, moving: Moving) {
        match moving {
            Moving::Tick(of) => self.mover_looks(of),
            Moving::Order(of, number, shard, Order { message, payload, .. }) => {
                let what = message.name();
                let answer = self.receives(of, shard, message, &payload);
                self.trace(|| format!("move {of}: shard {shard} gets {what}: {answer:?}"));
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

    // -- processes that end

    /// The process of a shard ends, with all that it has, and is restarted.
    pub fn kill(&mut self) {
        let prepare = self.moves.incoming.keys().copied();
        let owns = self.courses[self.current()].map.shares().into_keys();
        let all: Vec<ShardId> = prepare.chain(owns).collect();
        let shard = all[self.rng.usize(0..all.len())];
        self.trace(|| format!("shard {shard} is killed"));
        self.killed += 1;
        self.moves.incoming.remove(&shard);
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
            client.followed = vec![(0, PlanId(0)); map.shares().len()];
        }
        let taken = self.on_client(index, |core, now, actions| core.moved(&map, now, actions));
        assert_eq!(taken, is_newer, "client {index} is told of course {course}");
        if is_newer {
            self.trace(|| format!("client {index} goes to course {course}"));
            self.client_connects(index);
        }
    }
}
