//! The coordinator of a model: the job's decisions, for clients and shards on a network. Pure: messages and `now` go
//! in, and messages come out.
//!
//! It is built around a [`JobCore`], which decides as it does on one machine. The coordinator keeps the clients, and
//! carries each of their requests out once. It turns the core's accumulating and reducing into plans for the shards,
//! one at a time. A plan is concluded when every shard is ready, and dropped when a client is lost or a contribution
//! refused. `docs/operate/network.md` tells why.
//!
//! A file calls only methods of files above it in this table:
//!
//! | module, from low to high | holds |
//! |---|---|
//! | `shape`, `requests`, `tickets`, `health`, `local_shard`, `plan_queue`, `progress`, `sets`, `shares` | parts of the state, with their own decisions |
//! | `clients` | the clients, and answers to them |
//! | `senders`, `starts` | who sends what for a plan |
//! | `plans`, `open_weights`, `made_from`, `weight_writers` | the plan under way, and what the newest version was made from |
//! | `job_states` | the state of the job, for clients |
//! | `perform` | the actions of the job's core, carried out |
//! | `plans::setbacks`, `clients::requests`, `plans::answers` | the events: work that cannot go on, requests, answers of shards |
//! | `moving`, `deadlines` | a model that moves, and the passing of time |

mod all_reduce;
mod clients;
mod deadlines;
mod health;
mod job_states;
mod local_shard;
mod made_from;
mod moving;
mod open_weights;
mod perform;
mod plan_queue;
mod plans;
mod progress;
mod requests;
mod senders;
mod sets;
mod shape;
mod shares;
mod starts;
#[cfg(test)]
mod tests;
mod tickets;
mod weight_writers;

use std::collections::{BTreeMap, VecDeque};

use libmodelio::vocabulary::block_map::PartitionIndex;
use libmodelio::vocabulary::controls::{ControlError, Controls};
use libmodelio::vocabulary::ids::{ClientId, LearnerId, PlanId, ShardId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
pub use libmodelio::vocabulary::phase::AWAY;
use libmodelio::vocabulary::phase::JobPhase;
use libmodelio::wire::{Message, Refusal};
use serde::{Deserialize, Serialize};

use crate::core::{JobCore, Now};
use all_reduce::AllReduce;
use clients::{Client, GivenUp};
use health::Health;
use job_states::SentStates;
use local_shard::LocalShard;
use made_from::MadeFrom;
pub use moving::TakeOverError;
use plan_queue::PlanQueue;
use plans::Run;
use progress::Progress;
use sets::Sets;
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

/// The client of plans for which nobody sends anything: the shards have the parts that they publish.
pub const NOBODY: ClientId = ClientId(0);

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
    all_reduce: AllReduce,
    sets: Sets,
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
            all_reduce: AllReduce::default(),
            sets: Sets::default(),
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
        let mut announcing = self;
        announcing.states.announce_plans();
        announcing
    }

    /// The only client and the only shard are in this process. So staging memory is not lost while the job lives, the
    /// client is never given up, and plans may begin while contributions to them are written. The edge must report that
    /// the next version has no buffer ([`Self::buffer`]) before the shard has concluded the plan of a version. It must
    /// also report each later change.
    #[must_use]
    pub fn with_local_shard(self) -> CoordinatorCore {
        CoordinatorCore { local_shard: LocalShard::new(), core: self.core.with_provisional_plans(), ..self }
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

    /// The shards of [`Self::are_away`].
    pub fn away(&self) -> &[ShardId] {
        self.health.away()
    }

    /// The phase of the job.
    pub fn doing(&self) -> JobPhase {
        self.health.phase(self.core.state())
    }
}
