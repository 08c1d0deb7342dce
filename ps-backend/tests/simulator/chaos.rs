//! What goes wrong, how it is mended, and what must be true then.

use libmodelio::vocabulary::ids::Version;
use libmodelio::wire::{JobState, Message};

use crate::client::Client;
use crate::moving::Life;
use crate::world::{Event, Node, Now, World};

/// Steps that every learner makes when the network is well again.
const STEPS: u32 = 3;

/// How long they may take, besides what leases and deadlines take.
const PROGRESS: Now = Now::from_secs(60);

/// A step that is written bit by bit takes about so many times what others take.
const LONG_STEP: u32 = 4;

/// How long a move takes at most, once nothing goes wrong any more.
const SETTLED: Now = Now::from_secs(120);

/// A client puts a version off for so long, or for as long as a pull takes.
const PUT_OFF: Now = Now::from_secs(1);

/// How long a client takes to hear of the newest version and to ask again for what was lost.
const HEARD: Now = Now::from_secs(3);

#[derive(Clone, Debug)]
pub enum Fault {
    /// Some connection is lost.
    Reset,
    /// Nothing passes between two nodes for so long.
    Cut(Now),
    /// Nothing passes between one node and all others for so long.
    Isolate(Now),
    /// Messages between two nodes take up to so much longer, for so long.
    Slow(Now, Now),
    /// A process stops and goes on after so long.
    Hang(Now),
    /// The clock of a process jumps.
    Jump(Now),
    /// A client is killed; another one may come in its place.
    Crash { again: Option<Now> },
    /// A client sends none of its blocks from now on, and goes on otherwise.
    Withhold,
    /// A stranger sends false messages.
    Stranger,
    /// A client starts.
    Starts(usize),
    /// The model's blocks go elsewhere.
    Move,
    /// A shard's process ends, and is restarted.
    Kill,
}

impl World {
    /// Draws what will go wrong.
    pub fn draw_faults(&mut self) {
        let chaos = self.settings.chaos.as_micros() as u64;
        for _ in 0..self.settings.faults {
            let at = Now::from_micros(self.rng.u64(0..chaos));
            let long = self.settings.lease.as_micros() as u64 * 2;
            let most = if self.rng.bool() { long } else { 500_000 };
            let time = self.some_time(most);
            let fault = match self.rng.u32(0..10) {
                0..3 => Fault::Reset,
                3 => Fault::Cut(time),
                4 => Fault::Isolate(time),
                5 => Fault::Slow(time, self.some_time(2_000_000)),
                6..8 => Fault::Hang(time),
                8 => Fault::Crash { again: self.rng.bool().then_some(time) },
                _ => Fault::Starts(self.rng.usize(0..=2)),
            };
            self.at(at, Event::Fault(fault));
        }
        if self.settings.kills && self.rng.u8(0..4) == 0 {
            let at = Now::from_micros(self.rng.u64(0..chaos));
            self.at(at, Event::Fault(Fault::Kill));
        }
        if self.settings.withholds {
            let at = Now::from_micros(self.rng.u64(0..chaos));
            self.at(at, Event::Fault(Fault::Withhold));
        }
        for _ in 0..self.settings.strangers {
            let at = Now::from_micros(self.rng.u64(0..chaos));
            self.at(at, Event::Fault(Fault::Stranger));
        }
        for _ in 0..self.settings.moves {
            let at = Now::from_micros(self.rng.u64(0..chaos));
            self.at(at, Event::Fault(Fault::Move));
            if self.settings.competes {
                let after = self.some_time(2_000_000);
                self.at(at + after, Event::Fault(Fault::Move));
            }
        }
        for _ in 0..self.settings.jumps {
            let at = Now::from_micros(self.rng.u64(0..chaos));
            let by = self.some_time(self.settings.lease.as_micros() as u64 * 3 / 2);
            self.at(at, Event::Fault(Fault::Jump(by)));
        }
    }

    fn nodes(&self) -> Vec<Node> {
        let clients = (0..self.clients.len()).filter(|&index| self.clients[index].alive).map(Node::Client);
        let partitions = self.courses[self.coordinated].partitions.iter().copied().map(Node::Partition);
        clients.chain([self.coordinator_node()]).chain(partitions).collect()
    }

    pub fn fault(&mut self, fault: Fault) {
        if self.healed {
            return;
        }
        let (nodes, mut pairs) = (self.nodes(), self.network.pairs());
        pairs.retain(|(_, acceptor)| self.life(*acceptor) == Life::Live);
        if pairs.is_empty() {
            return;
        }
        let node = nodes[self.rng.usize(0..nodes.len())];
        let (a, b) = pairs[self.rng.usize(0..pairs.len())];
        self.trace(|| format!("fault: {fault:?} (of {node:?}, or {a:?} and {b:?})"));
        match fault {
            Fault::Reset => self.reset(a, b),
            Fault::Cut(time) => self.cut(a, b, time),
            Fault::Isolate(time) => {
                for (a, b) in pairs {
                    if (a == node) != (b == node) {
                        self.cut(a, b, time);
                    }
                }
            }
            Fault::Slow(time, by) => self.network.slow_down(a, b, self.now + time, by),
            Fault::Hang(time) => self.hangs(node, time),
            Fault::Crash { again } => {
                let Node::Client(index) = node else { return };
                self.crash(index);
                if let Some(time) = again {
                    self.after(time, Event::Fault(Fault::Starts(1)));
                }
            }
            Fault::Withhold => {
                let Node::Client(index) = node else { return };
                self.clients[index].withholds = true;
            }
            Fault::Jump(time) => self.jump(node, time),
            Fault::Stranger => self.stranger(),
            Fault::Move => self.begin_move(),
            Fault::Kill => self.kill(),
            Fault::Starts(learners) => {
                if self.nodes().len() < 12 {
                    self.add_client(learners);
                }
            }
        }
    }

    fn cut(&mut self, a: Node, b: Node, time: Now) {
        if self.network.is_local(a, b) {
            return;
        }
        self.network.cut(a, b, self.now + time);
        // Longer ones are noticed.
        if self.rng.bool() {
            self.reset(a, b);
        }
    }

    pub fn crash(&mut self, index: usize) {
        let node = Node::Client(index);
        self.clients[index].alive = false;
        self.relay_ends(index);
        let accepted: Vec<_> =
            self.network.pairs().into_iter().filter(|(opener, _)| *opener == node).collect();
        for (opener, acceptor) in accepted {
            self.reset(opener, acceptor);
        }
    }

    /// From here on nothing goes wrong.
    fn heal(&mut self) {
        self.trace(|| "the network is well again".into());
        self.healed = true;
        self.network.heal();
        self.wake_hung();
        let is_honest = |client: &&Client| client.alive && !client.withholds;
        let trains = |client: &Client| client.programs.iter().any(|program| !program.is_operator());
        if !self.clients.iter().filter(is_honest).any(trains) {
            self.add_client(1);
        }
        // What operators have asked for before comes to its end, also what is slow; then those who are left are made to be
        // enough.
        let until = self.now + 2 * self.settings.timeout + self.settings.grace;
        self.run_until(self.last_message().map_or(until, |last| last.max(until)), |_| false);
        let operator = self.clients.len();
        self.add_client(0);
        self.complete_ranks(operator);
        let one = || "1".to_owned();
        let mut enough = vec![("min_learners", one()), ("learners", one())];
        // Learners that are said to have exited, and that take long for a step, would be given up again and again.
        if self.settings.exits && self.coordinator.job().controls().linger < LONG_STEP * self.settings.compute
        {
            enough.extend(self.coordinator.job().controls().get("lease").map(|lease| ("linger", lease)));
        }
        for (name, value) in enough {
            let message = Message::SetControl { name: name.to_owned(), value: value.clone() };
            let deadline = self.clock(Node::Client(operator)) + PROGRESS;
            self.on_client(operator, |core, now, actions| {
                core.request(u64::MAX, message, deadline, now, actions);
            });
            // One after the other: they contradict each other the other way round.
            let until = self.now + if self.killed > 0 { Now::from_secs(2) } else { PROGRESS };
            self.run_until(until, |world| {
                world.coordinator.job().controls().get(name).as_ref() == Some(&value)
            });
        }
    }

    /// Everything that waits, for a check at the end.
    fn left_over(&self) -> Option<String> {
        if self.is_moving() {
            return Some("the model is being moved".into());
        }
        if let Some((plan, partitions)) = self.coordinator.running() {
            return Some(format!("plan {plan} waits for partitions {partitions:?}"));
        }
        if self.coordinator.job().committed() > 0 {
            return Some("contributions are in no version".into());
        }
        let (requests, answers) = self.coordinator.kept();
        if requests > 0 || answers > 0 {
            return Some(format!("the coordinator keeps {requests} requests and {answers} answers"));
        }
        let partitions = &self.courses[self.current()].partitions;
        if let Some(partition) = partitions.iter().find(|&&partition| !self.shards[partition].is_quiet()) {
            return Some(format!("partition {partition} is busy"));
        }
        for (index, client) in self.clients.iter().enumerate().filter(|(_, client)| client.alive) {
            let (requests, held) = client.core.kept();
            if requests > 0 || held > 0 || client.core.outgoing().is_some() {
                let outgoing = client.core.outgoing();
                return Some(format!(
                    "client {index} has {requests} requests, {held} payloads, {outgoing:?}"
                ));
            }
            if !client.core.reaches_all() {
                return Some(format!("client {index} is not connected to all"));
            }
            if !client.payloads.is_empty() || !client.weights.is_empty() {
                return Some(format!("client {index} holds {:?}, {:?}", client.payloads, client.weights));
            }
        }
        None
    }

    /// The clients that do not show the newest version. One that pulls on demand need not have it.
    fn behind(&self) -> Vec<String> {
        let version = self.coordinator.job().version();
        let clients = self.clients.iter().enumerate().filter(|(_, client)| client.alive);
        let offered = clients.map(|(index, client)| (index, client.core.offered_version()));
        let behind = offered.filter(|(_, offered)| *offered != version);
        behind
            .map(|(index, offered)| format!("client {index} offers version {offered}, not {version}"))
            .collect()
    }

    /// The whole run.
    pub fn run(&mut self) {
        self.draw_faults();
        self.run_until(self.settings.chaos, |_| false);
        self.heal();
        if self.killed > 0 && self.settles() {
            self.ended = true;
            return self.check_ended();
        }
        let mut longest = 3 * self.settings.lease + 4 * self.settings.timeout + PROGRESS;
        if self.settings.withholds {
            // A client that withholds joins again, and may hold each step up until its lease has ended.
            longest += STEPS * (self.settings.lease + PROGRESS);
        }
        let all = |world: &World, f: &dyn Fn(&crate::programs::Program) -> bool| {
            let mut honest = world.clients.iter().filter(|client| client.alive && !client.withholds);
            honest.all(|client| client.programs.iter().all(f))
        };
        let end = self.now + longest;
        let done = self.run_until(end, |world| {
            all(world, &|program| program.has_done(STEPS)) && world.ranks_have_done()
        });
        assert!(done, "no progress when the network is well: {:?} {:?}", self.programs(), self.parts);
        self.trace(|| "programs end".into());
        self.ending = true;
        for index in 0..self.clients.len() {
            if self.clients[index].withholds {
                self.crash(index);
            }
        }
        let end = self.now + longest;
        let done = self
            .run_until(end, |world| all(world, &|program| program.has_ended()) && world.ranks_have_ended());
        assert!(done, "programs do not come to an end: {:?}", self.programs());
        let end = self.now + longest;
        let done = self.run_until(end, |world| world.left_over().is_none());
        assert!(done, "what is left at the end: {}", self.left_over().unwrap_or_default());
        // Nobody opens anything any more, and each client shows the newest version soon.
        let pulls = self.clients.iter().filter_map(|client| client.core.pull_report().1.pull);
        let pull = pulls.max().unwrap_or_default();
        let end = self.now + PUT_OFF.max(pull) + pull + HEARD;
        let done = self.run_until(end, |world| world.behind().is_empty());
        assert!(done, "after the last contribution: {:?}", self.behind());
        self.history.check_end();
    }

    /// After processes have ended: whatever still moves comes to an end, and everybody hears. Whether the job is dead.
    fn settles(&mut self) -> bool {
        let until = self.now + SETTLED;
        self.run_until(until, |_| false);
        assert!(!self.is_moving(), "somebody waits for a move for ever");
        // All programs are answered by their deadlines, which each event checks.
        self.is_dead()
    }

    fn programs(&self) -> Vec<String> {
        let clients = self.clients.iter().filter(|client| client.alive);
        let programs = clients.map(|client| {
            let JobState { phase, version: Version(version), .. } = client.core.state();
            format!("{:?} ({phase}, {version}) {:?}", client.programs, client.tokens)
        });
        programs
            .chain([format!("{:?}", self.coordinator.running()), self.coordinator.job().state().to_string()])
            .collect()
    }
}
