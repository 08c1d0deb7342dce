//! The coordinator of a model: the job's decisions, for clients and shards on a network. Pure: messages and `now` go
//! in, and messages come out.
//!
//! It is built around a [`JobCore`], which decides as it does on one machine. The coordinator keeps the clients, and
//! carries each of their requests out once. It turns the core's accumulating and reducing into plans for the shards,
//! one at a time. A plan is concluded when every shard is ready, and dropped when a client is lost or a contribution
//! refused. `docs/operate/network.md` tells why.

mod clients;
mod health;
mod job_states;
mod local_shard;
mod made_from;
mod moving;
mod open_weights;
mod plan_queue;
mod plans;
mod progress;
mod requests;
mod senders;
mod shape;
mod shares;
mod starts;
#[cfg(test)]
mod tests;
mod tickets;

use std::collections::{BTreeMap, VecDeque};

use libmodelio::vocabulary::block_map::PartitionIndex;
use libmodelio::vocabulary::controls::{ControlError, Controls};
use libmodelio::vocabulary::ids::{ClientId, LearnerId, PlanId, ShardId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
pub use libmodelio::vocabulary::phase::AWAY;
use libmodelio::vocabulary::phase::JobPhase;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{Message, Refusal};
use serde::{Deserialize, Serialize};

use crate::core::{self, JobCore, Now};
use clients::{Client, GivenUp};
use health::Health;
use job_states::SentStates;
use local_shard::LocalShard;
use made_from::MadeFrom;
pub use moving::TakeOverError;
use plan_queue::PlanQueue;
use plans::Run;
use progress::Progress;
use shape::Shape;
use tickets::Tickets;

/// Work for the edge.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Send to a client: the answer to a request, or a notice under number 0.
    ToClient(ClientId, u64, Message),
    /// Send to a shard of the model. An answer repeats the number.
    ToPartition(PartitionIndex, u64, Message),
    /// Close the client's connection: the client breaks the protocol, or is no longer known.
    Close(ClientId, Refusal),
    /// A version is complete.
    Published(Version),
}

/// The interval in which unanswered messages are repeated, and in which the state is compared with the one that
/// clients know. An unchanged state is first repeated after this interval, in case it was lost.
const REPEAT: Now = Now::from_millis(500);
/// The longest interval in which an unchanged state is repeated.
const REPEAT_SELDOM: Now = Now::from_secs(4);

/// The most clients of one model.
pub const MAX_CLIENTS: usize = 4096;

/// The job of one model.
#[derive(Debug, Serialize, Deserialize)]
pub struct CoordinatorCore {
    core: JobCore,
    shape: Shape,
    clients: BTreeMap<ClientId, Client>,
    /// The newest clients that were given up.
    given_up: VecDeque<(ClientId, GivenUp)>,
    owners: BTreeMap<LearnerId, ClientId>,
    tickets: Tickets,
    #[serde(skip)]
    run: Option<Run>,
    /// What shards have lacked since the newest plan that counted.
    #[serde(skip)]
    progress: Progress,
    queue: PlanQueue,
    states: SentStates,
    health: Health,
    #[serde(skip)]
    local_shard: LocalShard,
    /// Clients that send nothing for a plan learn when it begins.
    #[serde(skip)]
    announces: bool,
    /// New weights that a client writes, by its token, while other work is under way.
    #[serde(skip)]
    open_next: Option<(ClientId, u64)>,
    #[serde(skip)]
    made_from: MadeFrom,
}

impl CoordinatorCore {
    /// A job at version 0, for a model of this layout on `partitions` shards.
    ///
    /// # Errors
    /// When the settings do not fit the model.
    pub fn new(
        layout: &ModelLayout,
        partitions: usize,
        controls: Controls,
        patience: Now,
    ) -> Result<CoordinatorCore, ControlError> {
        let shape = Shape::new(layout, partitions);
        let (frozen, groups) = controls.of_tensors(shape.names())?;
        let mut core = JobCore::new(layout.blocks(), layout.tensors().len(), controls);
        core.set_tensors(frozen, groups);
        Ok(CoordinatorCore {
            core: core.with_accumulate_patience(patience),
            shape,
            clients: BTreeMap::new(),
            given_up: VecDeque::new(),
            owners: BTreeMap::new(),
            tickets: Tickets::default(),
            run: None,
            progress: Progress::default(),
            queue: PlanQueue::default(),
            states: SentStates::default(),
            health: Health::default(),
            local_shard: LocalShard::default(),
            announces: false,
            open_next: None,
            made_from: MadeFrom::default(),
        })
    }

    /// Sets the numbers of the shards, for messages.
    pub fn on_shards(mut self, shards: Vec<ShardId>) -> CoordinatorCore {
        self.shape.set_shards(shards);
        self
    }

    /// Plans may begin while their last contribution is written. Its client sends blocks as they become whole, and
    /// keeps them.
    #[must_use]
    pub fn with_provisional_plans(self) -> CoordinatorCore {
        CoordinatorCore { core: self.core.with_provisional_plans().of_staged_blocks(), ..self }
    }

    /// Clients that send nothing for a plan that makes a version learn when it begins. They may follow it.
    #[must_use]
    pub fn announces_plans(self) -> CoordinatorCore {
        CoordinatorCore { announces: true, ..self }
    }

    /// The only client and the only shard are in this process. So staging memory is not lost while the job lives, the
    /// client is never given up, and plans may begin while contributions to them are written. The edge must report that
    /// the next version has no buffer ([`Self::buffer`]) before the shard has concluded the plan of a version. It must
    /// also report each later change.
    #[must_use]
    pub fn with_local_shard(self) -> CoordinatorCore {
        CoordinatorCore { local_shard: LocalShard::new(), core: self.core.with_provisional_plans(), ..self }
    }

    /// Reports whether the next version has a buffer.
    pub fn buffer(&mut self, ready: bool, now: Now, actions: &mut Vec<Action>) {
        let mut wanted = Vec::new();
        self.local_shard.has_said();
        self.core.set_buffer_ready(ready, now, &mut wanted);
        self.perform(wanted, now, actions);
    }

    /// The job, for reading.
    pub fn job(&self) -> &JobCore {
        &self.core
    }

    /// The plan under way, and the shards that it waits for.
    pub fn running(&self) -> Option<(PlanId, Vec<PartitionIndex>)> {
        self.run.as_ref().map(|run| (run.id(), run.waiting().collect()))
    }

    /// The number of unanswered requests, and of answers that are kept because their clients may not have them.
    pub fn kept(&self) -> (usize, usize) {
        (self.tickets.len(), self.clients.values().map(Client::answers).sum())
    }

    /// Why the job has failed, if it has.
    pub fn failed(&self) -> Option<&Refusal> {
        self.health.failed()
    }

    /// These shards have been out of reach for long, so waiting requests may wait for them.
    pub fn are_away(&mut self, shards: Vec<ShardId>, now: Now, actions: &mut Vec<Action>) {
        if self.health.are_away(shards) {
            self.send_state_to_all(now, actions);
        }
    }

    /// The shards of [`Self::are_away`].
    pub fn away(&self) -> &[ShardId] {
        self.health.away()
    }

    /// The phase of the job.
    pub fn doing(&self) -> JobPhase {
        self.health.phase(self.core.state())
    }

    /// Carries out the core's actions until none is left.
    fn perform(&mut self, wanted: Vec<core::Action>, now: Now, actions: &mut Vec<Action>) {
        let mut wanted = VecDeque::from(wanted);
        let mut answers = Vec::new();
        while let Some(action) = wanted.pop_front() {
            match action {
                core::Action::Reply(ticket, result) => {
                    if let Some((client, asked)) = self.tickets.take(ticket) {
                        let answer = match result {
                            Ok(()) => Message::Done,
                            Err(error) => Message::Refused(error.with_away(self.health.away()).into()),
                        };
                        answers.push((client, asked, answer));
                    }
                }
                core::Action::Published(version) => {
                    self.states.outdated();
                    self.made_from = MadeFrom::of(self.run.as_ref());
                    actions.push(Action::Published(version));
                }
                core::Action::Left { learner, reason } => {
                    self.states.outdated();
                    let owner = self.owners.remove(&learner);
                    if let Some(owner) = owner
                        && let Some(client) = self.clients.get_mut(&owner)
                    {
                        client.forget(learner);
                        actions.push(Action::ToClient(owner, 0, Message::Left { learner, reason }));
                    }
                }
                core::Action::Seal(plan) => self.seal(plan, now, actions),
                core::Action::Drop => self.drop_work(core::JobPlan::is_provisional, now, actions),
                core::Action::Begin(plan) => self.want(plan, now, actions),
            }
        }
        if self.states.take_outdated() {
            self.send_state_to_all(now, actions);
        }
        // Answers go after the state: a client that has its answer must know the outcome.
        for (client, asked, answer) in answers {
            self.answer(client, asked, answer, actions);
        }
    }

    /// The latest moment for the next [`Self::tick`].
    pub fn next_deadline(&self) -> Now {
        let repeat = self.run.as_ref().map(Run::repeat_at);
        let core = [self.core.next_deadline(), self.core.next_overdue()];
        let deadlines = [Some(self.states.sent_at() + REPEAT), repeat].into_iter().chain(core);
        deadlines.flatten().min().unwrap_or(Now::MAX)
    }

    /// Time passes. Handles deadlines and leases, and repeats messages.
    pub fn tick(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.expire_clients(now, actions);
        let mut wanted = Vec::new();
        self.core.tick(now, &mut wanted);
        self.perform(wanted, now, actions);
        for learner in self.core.overdue(now) {
            let late = "a shard has not read the contribution in time: it is dropped";
            self.reclaim(learner, ShardError::TimedOut(late.into()), now, actions);
        }
        self.repeat(now, actions);
        if now >= self.states.sent_at() + REPEAT {
            self.resend_states(now, actions);
        }
    }
}
