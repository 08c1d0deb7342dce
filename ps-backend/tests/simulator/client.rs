//! A client's edge without bytes: it keeps payload until the core releases it, sums it up, sends it, and receives
//! versions into a back buffer.

use std::collections::BTreeMap;

use libmodelio::client::core::{Action, ClientCore, Push, Token};
use libmodelio::vocabulary::block_map::PartitionIndex;
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::ids::{BlockId, ClientId, LearnerId, PlanId, Step, Version};
use libmodelio::vocabulary::members::{Attached, LifeSign};
use libmodelio::wire::{Granted, Message};

use crate::history::{Content, GARBAGE, Uid};
use crate::moving::Course;
use crate::parts::PartEvent;
use crate::programs::{Asked, Program};
use crate::relaying::{Link, RelayEvent};
use crate::shard::Sum;
use crate::world::{Body, Event, Node, Now, World};

/// Blocks that are being sent to a shard, or asked of it, at once.
pub const WINDOW: usize = 6;

/// Memory that a commit was made from.
#[derive(Clone, Copy, Debug)]
pub struct Payload {
    pub uid: Uid,
    /// Which of its learner's staging regions: two at a time.
    pub slot: u32,
    /// It is mapped by its program, which has it back when the commit is answered.
    pub lent: bool,
    /// It was written over since.
    pub overwritten: bool,
}

/// What a pushed block is the sum of.
#[derive(Clone, Debug)]
pub enum Keys {
    Contributions(Vec<(LearnerId, Step)>, bool),
    Weights(u64),
}

#[derive(Clone, Debug)]
pub enum ClientEvent {
    /// A block has left; this is when its payload is read. What is added up, or was `lent`, is looked after then.
    Pushed { to: Node, epoch: u64, push: Push, keys: Keys, lent: bool },
    /// A block of a version is in the back buffer.
    Completed { version: Version, block: BlockId, body: Body },
    /// The buffers are flipped.
    Flipped(Version),
    /// Signs of life are due.
    Touch,
    /// A program goes on.
    Program(usize, u64),
    /// A program's commit is interrupted.
    Interrupt(usize, Token),
    /// Of the connection to a relay, or of a follower's.
    Relay(RelayEvent),
    /// Of a rank that publishes in parts.
    Part(PartEvent),
}

pub struct Client {
    pub id: ClientId,
    pub core: ClientCore,
    /// Where it takes the model to be.
    pub course: usize,
    pub alive: bool,
    /// It commits and gives signs of life, and sends no block that is granted.
    pub withholds: bool,
    pub payloads: BTreeMap<(LearnerId, Step), Payload>,
    pub weights: BTreeMap<u64, Uid>,
    pub sending: Vec<usize>,
    /// For each partition, the connection and the plan that was last followed over it.
    pub followed: Vec<(u64, PlanId)>,
    /// The plan that it follows, and how many blocks have come for that before the version counted.
    pub early: Option<(PlanId, u64)>,
    front: Vec<Content>,
    back: Vec<Content>,
    pub programs: Vec<Program>,
    pub link: Link,
    pub tokens: BTreeMap<Token, (usize, Asked, Now)>,
    pub next_token: Token,
}

impl Client {
    pub fn new(id: ClientId, core: ClientCore, course: usize, first: Vec<Content>) -> Client {
        let partitions = core.shards().len();
        Client {
            id,
            core,
            course,
            alive: true,
            withholds: false,
            payloads: BTreeMap::new(),
            weights: BTreeMap::new(),
            sending: vec![0; partitions],
            followed: vec![(0, PlanId(0)); partitions],
            early: None,
            front: first.clone(),
            back: first,
            programs: Vec::new(),
            link: Link::default(),
            tokens: BTreeMap::new(),
            next_token: 1,
        }
    }

    /// The version that it shows.
    pub fn front(&self) -> &[Content] {
        &self.front
    }

    /// The version that it pulls, as far as that has come.
    pub fn back(&self) -> &[Content] {
        &self.back
    }

    /// What `node` is to this client: one of its core's partitions, or the coordinator (`Some(None)`). None for what is
    /// of another course.
    pub fn partition_of(&self, courses: &[Course], node: Node) -> Option<Option<PartitionIndex>> {
        match node {
            Node::Coordinator(course) => (course == self.course).then_some(None),
            Node::Partition(partition) => {
                courses[self.course].partitions.iter().position(|&known| known == partition).map(Some)
            }
            Node::Client(_) => None,
        }
    }
}

impl World {
    /// Something happens at a client's core.
    pub fn on_client<R>(
        &mut self,
        index: usize,
        f: impl FnOnce(&mut ClientCore, Now, &mut Vec<Action>) -> R,
    ) -> R {
        let mut actions = Vec::new();
        let now = self.clock(Node::Client(index));
        let result = f(&mut self.clients[index].core, now, &mut actions);
        for action in actions {
            self.client_acts(index, action);
        }
        let client = &mut self.clients[index];
        let Client { core, early, .. } = client;
        let void = early.take_if(|(plan, _)| core.followed(*plan).is_none());
        self.ahead.void += void.map_or(0, |(_, blocks)| blocks);
        result
    }

    fn client_acts(&mut self, index: usize, action: Action) {
        self.trace(|| format!("client {index}: {action:?}"));
        let id = self.clients[index].id;
        match action {
            Action::ToCoordinator(request, message) => {
                let coordinator = Node::Coordinator(self.clients[index].course);
                self.send(Node::Client(index), coordinator, request, message, Body::None);
            }
            Action::ToShard(partition, message) => {
                let shard = self.shard_of(index, partition);
                self.send(Node::Client(index), shard, 0, message, Body::None);
            }
            // Everything is looked through after each event.
            Action::Relay => self.relay_changes(index),
            Action::Wake(_) | Action::State | Action::Offered(_) | Action::Readers | Action::Durable => {}
            Action::Answer(token, result) => {
                // What the core asks for by itself has no program.
                if let Some((program, asked, _)) = self.clients[index].tokens.remove(&token) {
                    self.answered(index, program, asked, result);
                }
            }
            Action::Awaited(token, result) => {
                let known = self.clients[index].tokens.remove(&token);
                let (program, asked, _) = known.expect("a wait is answered once");
                if let Ok(version) = &result {
                    assert_eq!(*version, self.clients[index].core.version());
                }
                let result = result.map_err(|error| error.to_string());
                match asked {
                    Asked::Part(uid) => self.part_awaited(uid, result),
                    _ => self.awaited(index, program, result),
                }
            }
            Action::Begins { plan, counted } => self.history.begins_plan(id, plan, counted),
            Action::Release(learner, step) => {
                let known = self.clients[index].payloads.remove(&(learner, step));
                assert!(known.is_some(), "client {id}: {learner} step {step} is released, but not held");
            }
            Action::ReleaseWeights(token) => {
                let known = self.clients[index].weights.remove(&token);
                assert!(known.is_some(), "client {id}: weights {token} are released, but not held");
            }
            Action::EndLoans => {
                for partition in 0..self.clients[index].sending.len() {
                    let to = self.shard_of(index, partition);
                    self.reset(Node::Client(index), to);
                }
            }
            Action::Left(learner, _) => self.program_left(index, learner),
            Action::Own(version, token) => {
                self.history.knows(id, version, self.clients[index].core.state());
                let uid = self.clients[index].weights.get(&token).copied();
                let uid = uid.expect("own weights are shown while they are held");
                self.clients[index].back = self.history.shows_own(id, version, uid);
                let after = self.some_time(200);
                self.after(after, Event::Client(index, ClientEvent::Flipped(version)));
            }
            Action::Pulled(version) => {
                self.history.knows(id, version, self.clients[index].core.state());
                self.clients[index].early = None;
                self.history.shows(id, version, &self.clients[index].back);
                let after = self.some_time(200);
                self.after(after, Event::Client(index, ClientEvent::Flipped(version)));
            }
        }
    }

    pub fn client_event(&mut self, index: usize, event: ClientEvent) {
        match event {
            ClientEvent::Pushed { to, epoch, push: Push { plan, block, ahead, .. }, keys, lent } => {
                // Nobody listens any more where the model was.
                let Some(Some(partition)) = self.clients[index].partition_of(&self.courses, to) else {
                    return;
                };
                self.clients[index].sending[partition] -= 1;
                let way = (Node::Client(index), to);
                let is_sum = matches!(&keys, Keys::Contributions(holders, _) if holders.len() > 1);
                let (form, body) = match self.settings.shared && !is_sum {
                    true => (Form::Plain, Body::Named { index, keys, epoch }),
                    false => {
                        let sum = self.read_payload(index, block, &keys);
                        let sends = self.clients[index].core.outgoing().is_some_and(|(of, _)| of == plan);
                        if (is_sum || lent) && !sends {
                            return;
                        }
                        (Form::full(sum.of.len() > 1), Body::Sum(sum))
                    }
                };
                if self.network.connection(way.0, way.1).epoch == epoch {
                    self.send(way.0, way.1, 0, Message::Push { plan, block, form, ahead }, body);
                }
            }
            ClientEvent::Completed { version, block, body } => {
                let is_patch = matches!(body, Body::Patch(..));
                let content = self.copies(index, version, body);
                let whole = !self.chance(self.settings.broken);
                if is_patch && !whole {
                    self.patches.broken += 1;
                    self.on_client(index, |core, _, actions| core.pulls_whole(version, actions));
                }
                let client = &mut self.clients[index];
                client.back[block.index()] = if whole { content } else { Content::replaced(&[GARBAGE]) };
                self.on_client(index, |core, now, actions| {
                    core.end_reservation(version, block, whole, now, actions)
                });
            }
            ClientEvent::Flipped(version) => {
                let client = &mut self.clients[index];
                assert!(version > client.core.version(), "client {index} goes back to version {version}");
                self.history.shows(client.id, version, &client.back);
                std::mem::swap(&mut client.front, &mut client.back);
                self.on_client(index, |core, now, actions| core.shown(version, now, actions));
            }
            ClientEvent::Touch => {
                let learners =
                    self.clients[index].programs.iter().filter_map(|program| program.learner).collect();
                let attached = match (self.settings.exits, self.settings.attached) {
                    (true, _) => Attached::Exited,
                    (false, true) => Attached::Yes,
                    (false, false) => Attached::No,
                };
                let sign = LifeSign::Process(attached);
                self.on_client(index, |core, _, actions| core.touch(learners, sign, actions));
                self.after(self.settings.lease / 4, Event::Client(index, ClientEvent::Touch));
            }
            ClientEvent::Program(program, turn) => self.program_goes_on(index, program, turn),
            ClientEvent::Interrupt(program, token) => self.interrupt(index, program, token),
            ClientEvent::Relay(event) => self.relay_event(index, event),
            ClientEvent::Part(event) => self.part_event(index, event),
        }
    }

    /// A message of the coordinator.
    pub fn client_from_coordinator(&mut self, index: usize, request: u64, message: Message) {
        self.on_client(index, |core, now, actions| core.from_coordinator(request, message, now, actions));
    }

    /// A message of a shard.
    pub fn client_from_shard(&mut self, index: usize, partition: usize, message: Message, body: Body) {
        let (version, block, base) = match message {
            Message::BlockAhead { plan, block } => {
                return self.gets_block_ahead(index, plan, (block, None), body);
            }
            Message::ChangesAhead { plan, block, base, .. } => {
                return self.gets_block_ahead(index, plan, (block, Some(base)), body);
            }
            Message::Block { version, block } => (version, block, None),
            Message::Changes { version, block, base, .. } => (version, block, Some(base)),
            message => {
                return self.on_client(index, |core, now, actions| {
                    core.from_shard(partition, message, now, actions);
                });
            }
        };
        match self.reserves(index, version, (block, base), &body) {
            true => self.begins_to_copy(index, version, block, body),
            false => self.not_copied(index, &body),
        }
    }

    /// Whether a client wants a block that has come. What has changed since `base` makes it of what the client shows.
    pub fn reserves(
        &mut self,
        index: usize,
        version: Version,
        (block, base): (BlockId, Option<Version>),
        body: &Body,
    ) -> bool {
        let client = &mut self.clients[index];
        if base.is_some() && base != client.core.base_of(version) || !client.core.reserve(version, block) {
            return false;
        }
        if let Body::Patch(before, _) = body {
            let shown = &client.front[block.index()];
            assert_eq!(shown, before, "client {index}: block {block} of {version} is patched since {base:?}");
            self.patches.taken += 1;
        }
        true
    }

    /// Time has passed, or something has happened: says what is due, sends and asks for what there is.
    pub fn pump(&mut self, index: usize) {
        if !self.clients[index].alive {
            return;
        }
        self.on_client(index, |core, now, actions| core.tick(now, actions));
        let now = self.clock(Node::Client(index));
        for (token, (_, asked, deadline)) in &self.clients[index].tokens {
            assert!(
                *deadline > now,
                "client {index}: {asked:?} ({token}) was due at {deadline:?}, now it is {now:?}"
            );
        }
        self.relays_and_follows(index);
        for partition in 0..self.clients[index].sending.len() {
            let to = self.shard_of(index, partition);
            let connection = self.network.connection(Node::Client(index), to);
            if !connection.opener_up {
                continue;
            }
            let epoch = connection.epoch;
            self.follows(index, partition, to, epoch);
            while !self.clients[index].withholds && self.clients[index].sending[partition] < WINDOW {
                let next = |core: &mut ClientCore, now, _: &mut _| core.next_push(partition, now);
                let Some(push) = self.on_client(index, next) else { break };
                self.push(index, (partition, to), epoch, push);
            }
            while let Some(message) = self.clients[index].core.next_pull(partition, WINDOW, now) {
                self.send(Node::Client(index), to, 0, message, Body::None);
            }
        }
    }

    fn shard_of(&self, index: usize, partition: PartitionIndex) -> Node {
        Node::Partition(self.courses[self.clients[index].course].partitions[partition])
    }

    fn push(&mut self, index: usize, (partition, to): (PartitionIndex, Node), epoch: u64, push: Push) {
        let Push { plan, block, .. } = push;
        let client = &self.clients[index];
        let (_, granted) = client.core.outgoing().expect("there is something to push");
        let keys = match granted {
            Granted::Contributions { of, replaces, .. } => {
                let holders = of.iter().filter(|(learner, step)| client.core.holds(*learner, *step, block));
                Keys::Contributions(holders.copied().collect(), *replaces)
            }
            Granted::Weights(token) | Granted::OpenWeights(token) => Keys::Weights(*token),
        };
        self.trace(|| format!("client {index}: pushes block {block} of plan {plan}: {keys:?}"));
        let client = &self.clients[index];
        match &keys {
            Keys::Contributions(holders, _) => {
                assert!(
                    !holders.is_empty(),
                    "client {index}: block {block} is to be sent, but nobody holds it"
                );
                for key in holders {
                    let payload = client.payloads.get(key);
                    let payload =
                        payload.unwrap_or_else(|| panic!("client {index}: {key:?} is needed after release"));
                    assert!(!payload.overwritten, "client {index}: {key:?} is needed, but was written over");
                }
                if push.ahead {
                    let is_declared = |key: &&(LearnerId, Step)| {
                        let Payload { uid, lent, .. } = client.payloads[*key];
                        lent && !self.history.records[&uid].offered
                    };
                    self.loans.declared += holders.iter().filter(is_declared).count() as u64;
                    holders.iter().for_each(|key| self.history.sent_ahead(plan, client.payloads[key].uid));
                }
            }
            Keys::Weights(token) => {
                self.ahead.weights += u64::from(push.ahead);
                assert!(
                    client.weights.contains_key(token),
                    "client {index}: weights {token} are needed after release"
                );
            }
        }
        // A sum is looked through by who makes it.
        if let Keys::Contributions(holders, _) = &keys
            && let Granted::Contributions { of, .. } =
                self.clients[index].core.outgoing().expect("as above").1
            && of.len() > 1
            && self.history.reject
        {
            let is_bad = |key: &&(LearnerId, Step)| {
                let uid = self.clients[index].payloads[*key].uid;
                self.history.records[&uid].bad == Some(block.0)
            };
            if let Some(&(learner, _)) = holders.iter().find(is_bad) {
                return self
                    .on_client(index, |core, _, actions| core.non_finite(plan, learner, block, actions));
            }
        }
        let is_lent = |key: &(LearnerId, Step)| self.clients[index].payloads[key].lent;
        let lent = matches!(&keys, Keys::Contributions(holders, _) if holders.iter().any(is_lent));
        self.clients[index].sending[partition] += 1;
        let after = self.some_time(self.settings.arrival);
        self.after(after, Event::Client(index, ClientEvent::Pushed { to, epoch, push, keys, lent }));
    }

    /// Reads the payload of a block that is being sent. If it was given back meanwhile, the plan is over, and
    /// nobody uses what is read.
    pub fn read_payload(&self, index: usize, block: BlockId, keys: &Keys) -> Sum {
        let client = &self.clients[index];
        let mut of: Vec<Uid> = match keys {
            Keys::Contributions(holders, _) => {
                let read = |key: &(LearnerId, Step)| match client.payloads.get(key) {
                    Some(payload) if !payload.overwritten => payload.uid,
                    _ => GARBAGE,
                };
                holders.iter().map(read).collect()
            }
            Keys::Weights(token) => vec![client.weights.get(token).copied().unwrap_or(GARBAGE)],
        };
        let bad = of.iter().any(|uid| self.history.records.get(uid).is_some_and(|r| r.bad == Some(block.0)));
        if let Keys::Contributions(_, true) = keys {
            of = of.split_off(of.len() - 1);
        }
        Sum { of, bad, laid: None }
    }
}
