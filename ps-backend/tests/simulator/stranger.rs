//! Somebody who is not of the job and says so: it greets shards as their coordinator, the coordinator as one of its
//! clients and clients as their coordinator, and names numbers of plans, requests, steps, versions and states that
//! nobody has reached. Each connection of its own takes the place of the true one, which its owner then opens anew.
//! Some numbers of requests are such that the coordinator believes them. No number here is close to the true one: such
//! a lie is a matter of identity.

use libmodelio::vocabulary::ids::{ClientId, LearnerId, PlanId, Step, Version};
use libmodelio::vocabulary::reducer::Combine;
use libmodelio::wire::{Granted, JobState, MAX_NUMBER, MAX_SKIPPED, Message, Plan, PlanSource, Work};

use crate::client::Client;
use crate::moving::Life;
use crate::world::{Node, World};

/// Learners that there are not.
const NOBODY: LearnerId = LearnerId(u32::MAX);

impl World {
    /// It speaks to somebody.
    pub fn stranger(&mut self) {
        self.strangers += 1;
        match self.rng.u8(0..3) {
            0 => self.false_coordinator_of_a_partition(),
            1 => self.false_client(),
            _ => self.false_coordinator_of_a_client(),
        }
    }

    /// A number far beyond what anybody has reached, or can be believed to have reached.
    fn number(&mut self) -> u64 {
        match self.rng.u8(0..6) {
            0 => MAX_NUMBER + 1,
            1 => 1 << 63,
            2 => u64::MAX - 1,
            3 => u64::MAX,
            _ => self.rng.u64(MAX_NUMBER + 1..),
        }
    }

    /// The true connection is lost, which its ends hear in their time. Nothing that is said to the stranger comes to the
    /// true peer.
    fn intrude(&mut self, opener: Node, acceptor: Node) {
        self.reset(opener, acceptor);
        let connection = self.network.connection(opener, acceptor);
        (connection.opener_up, connection.acceptor_up) = (false, false);
    }

    fn false_coordinator_of_a_partition(&mut self) {
        let coordinator = self.coordinator_node();
        let partitions = self.courses[self.coordinated].partitions.clone();
        let partition = partitions[self.rng.usize(0..partitions.len())];
        // The coordinator's own partition listens to nobody else.
        if self.life(Node::Partition(partition)) != Life::Live
            || self.network.is_local(coordinator, Node::Partition(partition))
        {
            return;
        }
        self.intrude(coordinator, Node::Partition(partition));
        let over = self.number();
        self.trace(|| {
            format!("a stranger coordinates partition {partition}, says that plans up to {over} are over")
        });
        self.coordinated_anew(partition, PlanId(over));
        for _ in 0..self.rng.usize(0..4) {
            let base = self.shards[partition].core.version().0;
            // What follows from its own word is begun, and void with its connection. Whoever concludes that, too, says all that
            // a coordinator says.
            let next = over.saturating_add(1);
            let plan = PlanId(if self.rng.bool() { next } else { self.number() });
            let message = match self.rng.u8(0..3) {
                0 => Message::Drop { plan },
                1 if plan.0 != next => Message::Conclude { plan },
                _ => Message::Start(Box::new(self.false_plan(partition, plan, Version(base)))),
            };
            self.trace(|| format!("a stranger to partition {partition}: {message:?}"));
            self.shard_from_coordinator(partition, plan.0, message);
        }
    }

    fn false_plan(&mut self, partition: usize, plan: PlanId, base: Version) -> Plan {
        let blocks = self.settings.blocks;
        let client = match self.rng.bool() {
            true => ClientId(self.rng.u64(..)),
            false => self.clients[self.rng.usize(0..self.clients.len())].id,
        };
        let source = PlanSource {
            client,
            blocks: std::iter::once(0..blocks).collect(),
            check: false,
            partly: Default::default(),
            provisional: self.rng.u8(0..4) == 0,
        };
        let base = if self.rng.u8(0..4) > 0 { base } else { Version(self.number()) };
        let sources = if self.rng.bool() { vec![source] } else { Vec::new() };
        let combine = if self.shards[partition].values { Combine::Last } else { Combine::Sum };
        Plan { plan, base, work: Work::Add { combine }, sources, ordered: false, changes: 0, parts: None }
    }

    /// Some client that lives and is connected to the coordinator.
    fn a_client(&mut self) -> Option<usize> {
        let index = self.rng.usize(0..self.clients.len());
        let client = &self.clients[index];
        let is_coordinated = self.is_coordinated() && client.alive && client.course == self.coordinated;
        (is_coordinated && self.coordinator.failed().is_none()).then_some(index)
    }

    fn false_client(&mut self) {
        let Some(index) = self.a_client() else { return };
        let (id, coordinator) = (self.clients[index].id, self.coordinator_node());
        self.intrude(Node::Client(index), coordinator);
        self.trace(|| format!("a stranger is client {index}"));
        self.on_coordinator(|coordinator, now, actions| {
            coordinator.client_up(id, now, actions).expect("it is known")
        });
        for _ in 0..self.rng.usize(1..4) {
            // The coordinator believes that a client has skipped so many, and takes the request.
            let is_believed = self.rng.bool();
            let request = match is_believed {
                true => self.rng.u64(MAX_SKIPPED >> 12..MAX_SKIPPED),
                false => self.number().max(MAX_SKIPPED << 1),
            };
            let (plan, step) = (PlanId(self.number()), Step(self.number()));
            let blocks = std::iter::once(0..self.settings.blocks).collect();
            let (request, message) = match self.rng.u8(0..8) {
                0..3 => (0, Message::AckThrough { request: request.min(self.number()), newest: request }),
                3 => (0, Message::SourceGone { plan, learner: None }),
                4 => (request, Message::Open { learner: NOBODY }),
                5 => (request, Message::WithdrawAssign { token: u64::MAX - step.0 }),
                6 => (
                    request,
                    Message::Commit {
                        learner: NOBODY,
                        step,
                        blocks,
                        tensors: Vec::new(),
                        timeout_ms: u32::MAX,
                        lent: self.rng.bool(),
                        given_up: Some(PlanId(self.number())),
                        base: Some(Version(self.number())),
                        partly: None,
                        contents: Default::default(),
                        weight: Default::default(),
                    },
                ),
                // Its own, were it not for the numbers.
                _ => {
                    let view = self.members();
                    let learner = view.first().map_or(NOBODY, |view| view.learner);
                    let (tensors, timeout_ms, lent) = (Vec::new(), u32::MAX, self.rng.bool());
                    (
                        request,
                        Message::Commit {
                            learner,
                            step,
                            blocks,
                            tensors,
                            timeout_ms,
                            lent,
                            partly: None,
                            contents: Default::default(),
                            weight: Default::default(),
                            given_up: None,
                            base: None,
                        },
                    )
                }
            };
            self.believed += u64::from(is_believed && !matches!(message, Message::SourceGone { .. }));
            self.trace(|| format!("a stranger as client {index}: {request}: {message:?}"));
            self.on_coordinator(|coordinator, now, actions| {
                coordinator.from_client(id, request, message, now, actions)
            });
        }
    }

    /// Whether the state that a client knows names all of its learners: it believes whoever coordinates that the others
    /// have left.
    fn names_all(&self, index: usize) -> bool {
        let Client { core, programs, .. } = &self.clients[index];
        let is_named = |learner| core.state().learners.iter().any(|known| known.learner == learner);
        programs.iter().filter_map(|program| program.learner).all(is_named)
    }

    /// A client takes somebody for the coordinator, as it may while the registry cannot be asked.
    fn false_coordinator_of_a_client(&mut self) {
        let Some(index) = self.a_client() else { return };
        self.intrude(Node::Client(index), self.coordinator_node());
        self.trace(|| format!("a stranger coordinates client {index}"));
        self.on_client(index, |core, now, actions| core.coordinator_up(now, actions));
        for _ in 0..self.rng.usize(1..4) {
            let number = self.number();
            let message = match self.rng.u8(0..3) {
                0 => Message::Over { plan: PlanId(number) },
                1 => {
                    let of = vec![(NOBODY, Step(number))];
                    let payload = Granted::Contributions { of, replaces: false, open: None };
                    Message::Grant { plan: PlanId(number), payload, counted: PlanId(0) }
                }
                _ if !self.names_all(index) => continue,
                _ => {
                    let state = self.clients[index].core.state().clone();
                    let [sequence, version, over, acked_through] = [(); 4].map(|()| self.number());
                    let (version, over) = (Version(version), PlanId(over));
                    Message::State(Box::new(JobState {
                        sequence,
                        version,
                        over,
                        acked_through: Some(acked_through),
                        ..state
                    }))
                }
            };
            self.trace(|| format!("a stranger to client {index}: {message:?}"));
            self.on_client(index, |core, now, actions| core.from_coordinator(0, message, now, actions));
        }
        self.on_client(index, |core, now, actions| core.coordinator_down(now, actions));
    }
}
