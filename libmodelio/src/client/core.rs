//! The decisions of a client: requests to the coordinator, pushes, pulls and repetitions. Pure: events and `now` go in,
//! and actions come out. It has no bytes, no socket and no clock.
//!
//! Blocks move when the edge asks for work ([`ClientCore::next_push`], [`ClientCore::next_pull`]), as fast as its
//! connections take it. Nothing relies on a connection: the client finds lost blocks missing, and repeats them.
//!
//! | module | holds |
//! |---|---|
//! | `requests` | requests to the coordinator, and its answers |
//! | `coordination` | the connection to the coordinator |
//! | `plans_seen` | plans of which the client has heard |
//! | `learners` | this client's learners and their steps |
//! | `state` | the job's state, from the coordinator |
//! | `held` | payload that shards may still need |
//! | `owners` | the block map in force |
//! | `buffers` | the version that is shown, and the buffer behind it |
//! | `moving` | a change of the block map |
//! | `pushing`, `pulling` | blocks to and from shards |
//! | `following` | blocks of a version that is still being made |
//! | `open_weights` | new weights that are still being written |
//! | `pull_times` | when to pull |
//! | `reach` | shards that are out of reach |
//! | `waits` | requests that wait for a version |

mod buffers;
mod coordination;
mod following;
mod held;
mod learners;
mod moving;
mod open_weights;
mod owners;
mod plans_seen;
mod pull_times;
mod pulling;
mod pushing;
mod reach;
mod requests;
mod state;
mod waits;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::vocabulary::block_map::{BlockMap, PartitionIndex};
use crate::vocabulary::controls::PullPolicy;
use crate::vocabulary::ids::{ClientId, LearnerId, PlanId, ShardId, Step, Version};
use crate::vocabulary::members::LeaveReason;
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{JobState, MAX_NUMBER, Message, Refusal};
use buffers::Buffers;
use coordination::Coordination;
use held::KeptContribution;
pub use learners::LastCommit;
use learners::Learner;
use open_weights::NewWeights;
use owners::Owners;
use plans_seen::PlansSeen;
pub use pull_times::PullReport;
use pull_times::PullTimes;
use pulling::Pull;
pub use pulling::{PULL_BLOCKS, Whole};
use pushing::{Delivery, Outgoing, SendMode};
pub use pushing::{Offered, Own, Push};
use reach::Reach;
pub use reach::{Gone, NO_TOKEN, OUT_OF_REACH};
use requests::Requests;
use waits::Waits;
pub use waits::{BUFFERS_HELD, NOT_HERE};

/// Time since the client started.
pub type Now = Duration;

/// The edge's name for a request. [`Token::MAX`] marks requests that the core makes itself.
pub type Token = u64;

/// After this silence the client repeats a request, checks a push and repeats a pull.
const REPEAT_AFTER: Duration = Duration::from_millis(1000);

/// A shard may not have a version yet that the coordinator has announced. The client asks it again after this pause.
const RETRY: Duration = Duration::from_millis(10);

/// What the edge has to do.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// Send to the coordinator, under this request number.
    ToCoordinator(u64, Message),
    /// Send to a shard.
    ToShard(PartitionIndex, Message),
    /// There may be something to push to this shard, or to pull from it.
    Wake(PartitionIndex),
    /// The outcome of a request: its answer, or a refusal.
    Answer(Token, Result<Message, Refusal>),
    /// The outcome of [`ClientCore::await_step`].
    Awaited(Token, Result<Version, ShardError>),
    /// The client may send blocks for this plan from now on, and for none before it. Of the plans that had
    /// contributions of the client's, `counted` is the newest that counts.
    Begins {
        /// The plan.
        plan: PlanId,
        /// The newest plan that counts.
        counted: PlanId,
    },
    /// The payload of this contribution is no longer needed.
    Release(LearnerId, Step),
    /// The new weights of this token are no longer needed.
    ReleaseWeights(u64),
    /// The shards must stop reading lent memory before the edge carries out the actions after this one.
    EndLoans,
    /// The state of the job has changed.
    State,
    /// Programs may open this version, which is pulled when one does.
    Offered(Version),
    /// A learner of this client is no longer in the job.
    Left(LearnerId, LeaveReason),
    /// All blocks of this version are in the buffer: show it, then call [`ClientCore::shown`].
    Pulled(Version),
    /// This version is the new weights of this token: show their memory, then call [`ClientCore::shown`].
    Own(Version, u64),
}

/// One client of one model.
#[derive(Debug)]
pub struct ClientCore {
    owners: Owners,
    coordination: Coordination,
    reach: Reach,
    requests: Requests,
    state: JobState,
    learners: BTreeMap<LearnerId, Learner>,
    /// The contributions that may have to be sent.
    held: BTreeMap<(LearnerId, Step), KeptContribution>,
    weights: NewWeights,
    outgoing: Option<Outgoing>,
    plans: PlansSeen,
    buffers: Buffers,
    pull: Option<Pull>,
    waits: Waits,
    pull_times: PullTimes,
    way: Delivery,
}

impl ClientCore {
    /// A client that shows no version yet, for a model with this block map.
    pub fn new(map: &BlockMap) -> ClientCore {
        ClientCore {
            owners: Owners::new(map),
            coordination: Coordination::default(),
            reach: Reach::default(),
            requests: Requests::default(),
            state: JobState::default(),
            learners: BTreeMap::new(),
            held: BTreeMap::new(),
            weights: NewWeights::default(),
            outgoing: None,
            plans: PlansSeen::default(),
            buffers: Buffers::default(),
            pull: None,
            waits: Waits::default(),
            pull_times: PullTimes::default(),
            way: Delivery::new(),
        }
    }

    /// The shard is in this process, and payload for it stays where it is.
    pub fn reads_in_place(mut self) -> ClientCore {
        self.way.kind = SendMode::InPlace;
        self
    }

    /// Begins sending at a block that depends on `client`. A shard adds the clients' payloads of a block one by one,
    /// so clients that begin at the same block would wait for each other.
    pub fn apart(mut self, client: ClientId) -> ClientCore {
        self.owners.begin_apart(client);
        self
    }

    /// Contributions go with their commits, so none of their blocks goes before.
    pub fn sends_with_commits(mut self) -> ClientCore {
        self.way.kind = SendMode::WithCommits;
        self
    }

    /// Pulls by this policy, whatever the job's settings say.
    pub fn pulls(mut self, policy: PullPolicy) -> ClientCore {
        self.pull_times.set_policy(policy);
        self
    }

    /// The shards, by [`PartitionIndex`].
    pub fn shards(&self) -> &[ShardId] {
        self.owners.shards()
    }

    /// The newest state from the coordinator.
    pub fn state(&self) -> &JobState {
        &self.state
    }

    /// The version that the client shows. 0 if it shows none yet.
    pub fn version(&self) -> Version {
        self.buffers.shown().unwrap_or_default()
    }

    /// Whether the client shows a version.
    pub fn shows_any(&self) -> bool {
        self.buffers.shown().is_some()
    }

    /// The number of unanswered requests, and of contributions and new weights whose payload is still needed.
    pub fn kept(&self) -> (usize, usize) {
        (self.requests.len(), self.held.len() + self.weights.len())
    }

    // -- what comes from shards

    /// A connection to a shard is open. If there was no other one, whatever was on its way before may be lost.
    pub fn shard_up(&mut self, partition: PartitionIndex, now: Now, actions: &mut Vec<Action>) {
        if !self.owners.set_up(partition, true) {
            self.check_partition(partition, now, actions);
        }
        actions.push(Action::Wake(partition));
    }

    /// No connection to the shard is open.
    pub fn shard_down(&mut self, partition: PartitionIndex) {
        self.owners.set_up(partition, false);
    }

    /// One of several connections to a shard has ended. The client finds and repeats what was on it.
    pub fn check_partition(&mut self, partition: PartitionIndex, now: Now, actions: &mut Vec<Action>) {
        if let Some(outgoing) = &mut self.outgoing
            && outgoing.is_provisional()
        {
            // A provisional plan is checked when the coordinator has sealed it.
            outgoing.partitions[partition].struggles = true;
        } else if let Some(outgoing) = &mut self.outgoing
            && !outgoing.partitions[partition].done
        {
            outgoing.partitions[partition].moved = now;
            outgoing.partitions[partition].struggles = true;
            actions.push(Action::ToShard(partition, Message::Probe { plan: outgoing.plan }));
        }
        if let Some(pull) = &mut self.pull {
            pull.partitions[partition].asked.clear();
            pull.partitions[partition].struggles = pull.decided;
            pull.partitions[partition].loses_ahead();
            actions.push(Action::Wake(partition));
        }
    }

    /// A message without payload from a shard.
    pub fn from_shard(
        &mut self,
        partition: PartitionIndex,
        message: Message,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        match message {
            Message::Missing { plan, blocks } => {
                let mut bits = self.owners.bits(&blocks);
                let of_plan = |outgoing: &&mut Outgoing| outgoing.plan == plan && !outgoing.is_provisional();
                let Some(outgoing) = self.outgoing.as_mut().filter(of_plan) else { return };
                // Another coordinator may have begun a plan with that number there.
                bits.intersect_with(&outgoing.blocks);
                let sending = &mut outgoing.partitions[partition];
                sending.done = bits.is_clear();
                sending.struggles |= !sending.done;
                sending.todo = &bits & &self.owners.owned()[partition];
                (sending.at, sending.round) = (0, true);
                sending.moved = now;
                actions.push(Action::Wake(partition));
            }
            Message::Refused(Refusal::NoVersion { wanted, newest }) => {
                let of_version = |pull: &&mut Pull| pull.version == wanted && pull.decided;
                let Some(pull) = self.pull.as_mut().filter(of_version) else { return };
                if newest > wanted && newest.0 <= MAX_NUMBER {
                    // A version that one shard shows is decided, even if the coordinator has not said so here yet.
                    if newest > self.state.version {
                        (self.state.version, self.state.own_weights) = (newest, None);
                        self.state.made_by = PlanId(0);
                    }
                    self.pull = None;
                    self.start_pull(now, actions);
                } else {
                    pull.partitions[partition].asked.clear();
                    pull.partitions[partition].retry = Some(now + RETRY);
                }
            }
            _ => {}
        }
    }

    // -- time

    /// The latest moment for the next [`Self::tick`].
    pub fn next_deadline(&self) -> Option<Now> {
        let requests = self.requests.iter().flat_map(|(_, request)| {
            let again = request.sent.filter(|_| self.coordination.is_up()).map(|sent| sent + REPEAT_AFTER);
            [Some(request.deadline), again].into_iter().flatten()
        });
        let waits = self.waits.waiting().map(|wait| wait.deadline);
        let sending = self.outgoing.iter().flat_map(|outgoing| &outgoing.partitions);
        let sending =
            sending.filter(|partition| !partition.done).map(|partition| partition.moved + REPEAT_AFTER);
        let pulling = self.pull.iter().filter(|pull| pull.decided).flat_map(|pull| &pull.partitions);
        let pulling = pulling.filter(|partition| !partition.missing.is_clear());
        let pulling = pulling.map(|partition| partition.retry.unwrap_or(partition.moved + REPEAT_AFTER));
        let fails = self.shortage_deadline();
        requests.chain(waits).chain(fails).chain(sending).chain(pulling).chain(self.pull_due()).min()
    }

    /// Time passes. The client handles deadlines and repeats messages.
    pub fn tick(&mut self, now: Now, actions: &mut Vec<Action>) {
        // A request that is given up here may leave another one, which the next call sends.
        self.tick_reach(now, actions);
        self.tick_requests(now, actions);
        for partition in self.owners.partitions() {
            self.tick_partition(partition, now, actions);
        }
        self.answer_waits(now, actions);
        self.start_pull(now, actions);
    }

    fn tick_partition(&mut self, partition: PartitionIndex, now: Now, actions: &mut Vec<Action>) {
        if let Some(outgoing) = &mut self.outgoing {
            let sending = &mut outgoing.partitions[partition];
            if !sending.done && sending.moved + REPEAT_AFTER <= now {
                sending.moved = now;
                sending.struggles = true;
                // Only a block that was sent can be missing.
                if sending.todo.is_clear() {
                    actions.push(Action::ToShard(partition, Message::Probe { plan: outgoing.plan }));
                } else {
                    actions.push(Action::Wake(partition));
                }
            }
        }
        if let Some(pull) = self.pull.as_mut().filter(|pull| pull.decided) {
            let receiving = &mut pull.partitions[partition];
            if receiving.retry.take_if(|at| *at <= now).is_some() {
                actions.push(Action::Wake(partition));
            }
            if !receiving.missing.is_clear() && receiving.moved + REPEAT_AFTER <= now {
                receiving.moved = now;
                receiving.struggles = true;
                receiving.loses_ahead();
                receiving.asked.clear();
                actions.push(Action::Wake(partition));
            }
        }
    }
}
