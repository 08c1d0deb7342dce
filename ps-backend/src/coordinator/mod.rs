//! The coordinator of a model: the job's decisions, for clients and shards on a network. Pure: messages and `now` go
//! in, and messages come out.
//!
//! It is built around a [`JobCore`], which decides as it does on one machine. The coordinator keeps the clients, and
//! carries each of their requests out once. It turns the core's accumulating and reducing into plans for the shards,
//! one at a time. A plan is concluded when every shard is ready, and dropped when a client is lost or a contribution
//! refused. `docs/network.md` tells why.

mod clients;
mod job_states;
mod moving;
mod open_weights;
mod plans;
mod progress;
mod requests;
mod senders;
mod shares;
mod starts;
#[cfg(test)]
mod tests;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use libmodelio::vocabulary::block_map::PartitionIndex;
use libmodelio::vocabulary::block_ranges::BlockRanges;
use libmodelio::vocabulary::controls::{ControlError, Controls};
use libmodelio::vocabulary::ids::{ClientId, LearnerId, PlanId, ShardId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
pub use libmodelio::vocabulary::phase::AWAY;
use libmodelio::vocabulary::phase::JobPhase;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{Message, Refusal};
use serde::{Deserialize, Serialize};

use crate::core::{self, JobCore, Now, Ticket};
use clients::{Client, GivenUp};
pub use moving::TakeOverError;
use plans::{Run, is_provisional};
use progress::Progress;
use requests::Asked;

/// The payload of a contribution, or of new weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The client that holds it.
    pub client: ClientId,
    /// The client's name for it: the learner's step, or the token of new weights.
    pub name: u64,
    /// The blocks of new weights.
    pub weights: BlockRanges,
    /// The provisional plan for which blocks of new weights were sent.
    pub ahead: Option<PlanId>,
}

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
    core: JobCore<Source>,
    blocks: u32,
    tensors: u32,
    /// The names and types of the tensors.
    #[serde(skip)]
    names: Arc<[(String, DType)]>,
    /// Whether the model has a tensor that can be reduced.
    #[serde(skip)]
    is_trainable: bool,
    partitions: usize,
    /// Their numbers, for people.
    #[serde(skip)]
    shards: Arc<[ShardId]>,
    clients: BTreeMap<ClientId, Client>,
    /// The newest clients that were given up.
    given_up: VecDeque<(ClientId, GivenUp)>,
    owners: BTreeMap<LearnerId, ClientId>,
    /// Requests that the core answers later.
    tickets: BTreeMap<Ticket, (ClientId, Asked)>,
    next_ticket: Ticket,
    #[serde(skip)]
    run: Option<Run>,
    /// What shards have lacked since the newest plan that counted.
    #[serde(skip)]
    progress: Progress,
    /// The core's next actions, which wait until the present plan has ended.
    #[serde(skip)]
    queue: VecDeque<core::Action<Source>>,
    next_plan: PlanId,
    /// The number of the newest state that was sent to clients.
    sequence: u64,
    /// Whether clients must be sent the state.
    changed: bool,
    states_sent_at: Now,
    /// Why the job has failed.
    failed: Option<Refusal>,
    /// The shards that have been out of reach for long.
    #[serde(skip)]
    away: Vec<ShardId>,
    /// The only client and the only shard are in this process.
    #[serde(skip)]
    in_process: bool,
    /// Clients that send nothing for a plan learn when it begins.
    #[serde(skip)]
    announces: bool,
    /// New weights that a client writes, by its token, while other work is under way.
    #[serde(skip)]
    open_next: Option<(ClientId, u64)>,
    /// The shard in this process has yet to say whether the next version has a buffer.
    #[serde(skip)]
    awaits_buffer: bool,
    /// The newest version was made from these new weights: the client, and its token for them.
    #[serde(skip)]
    weights_of: Option<(ClientId, u64)>,
    /// The plan that has made the newest version. 0 if another coordinator has run it.
    #[serde(skip)]
    made_by: PlanId,
}

fn names(layout: &ModelLayout) -> Arc<[(String, DType)]> {
    layout.tensors().iter().map(|tensor| (tensor.name.clone(), tensor.dtype)).collect()
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
        let (blocks, tensors, names) = (layout.blocks(), layout.tensors().len(), names(layout));
        let (frozen, groups) =
            controls.of_tensors(names.iter().map(|(name, dtype)| (name.as_str(), *dtype)))?;
        let mut core = JobCore::new(blocks, tensors, controls);
        core.set_tensors(frozen, groups);
        Ok(CoordinatorCore {
            core: core.with_accumulate_patience(patience),
            blocks,
            tensors: tensors as u32,
            names,
            is_trainable: layout.is_trainable(),
            partitions,
            shards: Arc::default(),
            clients: BTreeMap::new(),
            given_up: VecDeque::new(),
            owners: BTreeMap::new(),
            tickets: BTreeMap::new(),
            next_ticket: 1,
            run: None,
            progress: Progress::default(),
            queue: VecDeque::new(),
            next_plan: PlanId(1),
            sequence: 0,
            changed: false,
            states_sent_at: Now::ZERO,
            failed: None,
            away: Vec::new(),
            in_process: false,
            announces: false,
            open_next: None,
            awaits_buffer: false,
            weights_of: None,
            made_by: PlanId(0),
        })
    }

    /// Sets the numbers of the shards, for messages.
    pub fn on_shards(self, shards: Vec<ShardId>) -> CoordinatorCore {
        CoordinatorCore { shards: shards.into(), ..self }
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
    pub fn in_process(self) -> CoordinatorCore {
        CoordinatorCore { in_process: true, core: self.core.with_provisional_plans(), ..self }
    }

    /// Reports whether the next version has a buffer.
    pub fn buffer(&mut self, ready: bool, now: Now, actions: &mut Vec<Action>) {
        let mut wanted = Vec::new();
        self.awaits_buffer = false;
        self.core.set_buffer_ready(ready, now, &mut wanted);
        self.perform(wanted, now, actions);
    }

    /// The job, for reading.
    pub fn job(&self) -> &JobCore<Source> {
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
        self.failed.as_ref()
    }

    /// These shards have been out of reach for long, so waiting requests may wait for them.
    pub fn are_away(&mut self, shards: Vec<ShardId>, now: Now, actions: &mut Vec<Action>) {
        if self.away != shards {
            self.away = shards;
            self.send_state_to_all(now, actions);
        }
    }

    /// The shards of [`Self::are_away`].
    pub fn away(&self) -> &[ShardId] {
        &self.away
    }

    /// The phase of the job.
    pub fn doing(&self) -> JobPhase {
        match (&self.failed, self.away.is_empty()) {
            (Some(_), _) => JobPhase::Failed,
            (None, false) => JobPhase::Waiting,
            (None, true) => self.core.state(),
        }
    }

    /// Carries out the core's actions until none is left.
    fn perform(&mut self, wanted: Vec<core::Action<Source>>, now: Now, actions: &mut Vec<Action>) {
        let mut wanted = VecDeque::from(wanted);
        let mut answers = Vec::new();
        while let Some(action) = wanted.pop_front() {
            match action {
                core::Action::Reply(ticket, result) => {
                    if let Some((client, asked)) = self.tickets.remove(&ticket) {
                        let answer = match result {
                            Ok(()) => Message::Done,
                            Err(error) => Message::Refused(error.with_away(&self.away).into()),
                        };
                        answers.push((client, asked, answer));
                    }
                }
                core::Action::Published(version) => {
                    self.changed = true;
                    self.weights_of = self.run.as_ref().and_then(Run::new_weights);
                    self.made_by = self.run.as_ref().map_or(PlanId(0), Run::id);
                    actions.push(Action::Published(version));
                }
                core::Action::Left { learner, reason } => {
                    self.changed = true;
                    let owner = self.owners.remove(&learner);
                    if let Some(owner) = owner
                        && let Some(client) = self.clients.get_mut(&owner)
                    {
                        client.forget(learner);
                        actions.push(Action::ToClient(owner, 0, Message::Left { learner, reason }));
                    }
                }
                core::Action::Seal(plan) => self.seal(plan, now, actions),
                core::Action::Drop => self.drop_work(is_provisional, now, actions),
                work @ (core::Action::Accumulate { .. }
                | core::Action::Measure { .. }
                | core::Action::Reduce(_)) => self.want(work, now, actions),
            }
        }
        if std::mem::take(&mut self.changed) {
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
        let deadlines = [Some(self.states_sent_at + REPEAT), repeat].into_iter().chain(core);
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
        if now >= self.states_sent_at + REPEAT {
            self.resend_states(now, actions);
        }
    }

    /// The blocks as a set. None if the model does not have them.
    fn block_set(&self, ranges: &BlockRanges) -> Option<fixedbitset::FixedBitSet> {
        let mut set = fixedbitset::FixedBitSet::with_capacity(self.blocks as usize);
        for range in ranges {
            if range.start >= range.end || range.end > self.blocks {
                return None;
            }
            set.insert_range(range.start as usize..range.end as usize);
        }
        Some(set)
    }
}
