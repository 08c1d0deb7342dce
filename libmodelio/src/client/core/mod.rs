//! The decisions of a client: requests to the coordinator, pushes, pulls and repetitions. Pure: events and `now` go in,
//! and actions come out. It has no bytes, no socket and no clock.
//!
//! Blocks move when the edge asks for work ([`ClientCore::next_push`], [`ClientCore::next_pull`]), as fast as its
//! connections take it. Nothing relies on a connection: the client finds lost blocks missing, and repeats them.
//!
//! | module | holds |
//! |---|---|
//! | `requests` | requests to the coordinator, and its answers |
//! | `learners` | this client's learners and their steps |
//! | `state` | the job's state, from the coordinator |
//! | `held` | payload that shards may still need |
//! | `moving` | a change of the block map |
//! | `pushing`, `pulling` | blocks to and from shards |
//! | `following` | blocks of a version that is still being made |
//! | `open_weights` | new weights that are still being written |
//! | `pull_times` | when to pull |
//! | `reach` | shards that are out of reach |
//! | `waits` | requests that wait for a version |

mod following;
mod held;
mod learners;
mod moving;
mod open_weights;
mod pull_times;
mod pulling;
mod pushing;
mod reach;
mod requests;
mod state;
mod waits;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fixedbitset::FixedBitSet;

use crate::vocabulary::block_map::{BlockMap, PartitionIndex};
use crate::vocabulary::controls::PullPolicy;
use crate::vocabulary::ids::{ClientId, Epoch, LearnerId, PlanId, ShardId, Step, Version};
use crate::vocabulary::members::LeaveReason;
use crate::vocabulary::phase::JobPhase;
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{JobState, MAX_NUMBER, Message, Refusal};
use held::Held;
pub use learners::LastCommit;
use learners::Learner;
use open_weights::OpenWeights;
pub use pull_times::PullReport;
use pull_times::PullTimes;
use pulling::Pull;
pub use pulling::{PULL_BLOCKS, Whole};
use pushing::Outgoing;
pub use pushing::{Offered, Own, Push};
use reach::Reach;
pub use reach::{Gone, NO_TOKEN, OUT_OF_REACH};
use requests::Request;
pub use waits::{BUFFERS_HELD, NOT_HERE};
use waits::{Shortage, Wait};

/// Time since the client started.
pub type Now = Duration;

/// The edge's name for a request. [`Token::MAX`] marks requests that the core makes itself.
pub type Token = u64;

/// After this silence the client repeats a request, checks a push and repeats a pull.
const PATIENCE: Duration = Duration::from_millis(1000);

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
    /// The epoch of the block map in force.
    epoch: Epoch,
    blocks: usize,
    shards: Vec<ShardId>,
    /// For each partition, its blocks.
    owned: Vec<FixedBitSet>,
    coordinator_up: bool,
    shard_up: Vec<bool>,
    reach: Reach,
    requests: BTreeMap<u64, Request>,
    next_request: u64,
    /// The number that the client last sent in an `AckThrough`.
    acked_through: u64,
    /// Why the job has no coordinator any more, and the job's phase before that.
    lost: Option<(ShardError, JobPhase)>,
    /// When the coordinator first reported that the job has failed.
    failed_at: Option<Now>,
    state: JobState,
    /// The coordinator's newest connection has not brought a state yet.
    is_anew: bool,
    learners: BTreeMap<LearnerId, Learner>,
    /// The contributions that may have to be sent.
    held: BTreeMap<(LearnerId, Step), Held>,
    /// New weights that may have to be sent.
    weights: BTreeMap<u64, FixedBitSet>,
    /// New weights that are still being written.
    open_weights: BTreeMap<u64, OpenWeights>,
    outgoing: Option<Outgoing>,
    /// The plan under way that makes a version, if this client sends nothing for it.
    of_others: Option<PlanId>,
    /// The newest plan that is over.
    over: PlanId,
    /// A dropped provisional plan for which blocks were sent. No more blocks go to it.
    given_up: Option<PlanId>,
    /// The version that the client shows. None before the first one.
    shown: Option<Version>,
    pull: Option<Pull>,
    /// There is no memory for the version that is to be pulled.
    shortage: Option<Shortage>,
    /// When the log was last told so.
    said_shortage: Option<Now>,
    /// A version is whole in the buffer, and not shown yet.
    whole: bool,
    /// The version that has come with the state which announces it.
    brought: Option<Version>,
    /// The version in `whole` was not pulled.
    is_own: bool,
    /// New weights whose memory can be shown.
    showable: BTreeSet<u64>,
    /// The number of blocks that connections are receiving.
    reserved: u32,
    waits: Vec<Wait>,
    /// When to pull, if the job's settings do not say that.
    pulls: Option<PullPolicy>,
    pull_times: PullTimes,
    /// The block to begin sending at.
    first: usize,
    /// The shard is in this process. It reads contributions where they lie until they are part of a version, even
    /// after their commits are answered.
    in_process: bool,
    /// Contributions go with their commits.
    sends_with_commits: bool,
    /// The blocks of tensors whose values are averaged.
    averaged: FixedBitSet,
}

impl ClientCore {
    /// A client that shows no version yet, for a model with this block map.
    pub fn new(map: &BlockMap) -> ClientCore {
        let (shards, owned) = moving::partitions(map);
        ClientCore {
            epoch: map.epoch(),
            blocks: map.blocks() as usize,
            coordinator_up: false,
            shard_up: vec![false; shards.len()],
            reach: Reach::default(),
            owned,
            shards,
            requests: BTreeMap::new(),
            next_request: 1,
            acked_through: 0,
            lost: None,
            failed_at: None,
            state: JobState::default(),
            is_anew: false,
            learners: BTreeMap::new(),
            held: BTreeMap::new(),
            weights: BTreeMap::new(),
            open_weights: BTreeMap::new(),
            outgoing: None,
            of_others: None,
            over: PlanId(0),
            given_up: None,
            averaged: FixedBitSet::new(),
            shown: None,
            pull: None,
            shortage: None,
            said_shortage: None,
            whole: false,
            brought: None,
            is_own: false,
            showable: BTreeSet::new(),
            reserved: 0,
            waits: Vec::new(),
            pulls: None,
            pull_times: PullTimes::default(),
            first: 0,
            in_process: false,
            sends_with_commits: false,
        }
    }

    /// The shard is in this process, and payload for it stays where it is.
    pub fn in_process(self) -> ClientCore {
        ClientCore { in_process: true, ..self }
    }

    /// Begins sending at a block that depends on `client`. A shard adds the clients' payloads of a block one by one,
    /// so clients that begin at the same block would wait for each other.
    pub fn apart(self, client: ClientId) -> ClientCore {
        // Consecutive client numbers must begin far apart.
        let mixed = client.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        ClientCore { first: ((mixed * self.blocks as u64) >> 32) as usize, ..self }
    }

    /// Contributions go with their commits, so none of their blocks goes before.
    pub fn sends_with_commits(self) -> ClientCore {
        ClientCore { sends_with_commits: true, ..self }
    }

    /// Pulls by this policy, whatever the job's settings say.
    pub fn pulls(self, policy: PullPolicy) -> ClientCore {
        ClientCore { pulls: Some(policy), ..self }
    }

    /// The shards, by [`PartitionIndex`].
    pub fn shards(&self) -> &[ShardId] {
        &self.shards
    }

    /// The newest state from the coordinator.
    pub fn state(&self) -> &JobState {
        &self.state
    }

    /// The version that the client shows. 0 if it shows none yet.
    pub fn version(&self) -> Version {
        self.shown.unwrap_or_default()
    }

    /// Whether the client shows a version.
    pub fn shows_any(&self) -> bool {
        self.shown.is_some()
    }

    /// The number of unanswered requests, and of contributions and new weights whose payload is still needed.
    pub fn kept(&self) -> (usize, usize) {
        (self.requests.len(), self.held.len() + self.weights.len())
    }

    // -- what comes from shards

    /// A connection to a shard is open. If there was no other one, whatever was on its way before may be lost.
    pub fn shard_up(&mut self, partition: PartitionIndex, now: Now, actions: &mut Vec<Action>) {
        if !std::mem::replace(&mut self.shard_up[partition], true) {
            self.check_partition(partition, now, actions);
        }
        actions.push(Action::Wake(partition));
    }

    /// No connection to the shard is open.
    pub fn shard_down(&mut self, partition: PartitionIndex) {
        self.shard_up[partition] = false;
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
                let mut bits = self.bits(&blocks);
                let of_plan = |outgoing: &&mut Outgoing| outgoing.plan == plan && !outgoing.is_provisional();
                let Some(outgoing) = self.outgoing.as_mut().filter(of_plan) else { return };
                // Another coordinator may have begun a plan with that number there.
                bits.intersect_with(&outgoing.blocks);
                let sending = &mut outgoing.partitions[partition];
                sending.done = bits.is_clear();
                sending.struggles |= !sending.done;
                sending.todo = &bits & &self.owned[partition];
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
        let requests = self.requests.values().flat_map(|request| {
            let again = request.sent.filter(|_| self.coordinator_up).map(|sent| sent + PATIENCE);
            [Some(request.deadline), again].into_iter().flatten()
        });
        let waits = self.waits.iter().map(|wait| wait.deadline);
        let sending = self.outgoing.iter().flat_map(|outgoing| &outgoing.partitions);
        let sending = sending.filter(|partition| !partition.done).map(|partition| partition.moved + PATIENCE);
        let pulling = self.pull.iter().filter(|pull| pull.decided).flat_map(|pull| &pull.partitions);
        let pulling = pulling.filter(|partition| !partition.missing.is_clear());
        let pulling = pulling.map(|partition| partition.retry.unwrap_or(partition.moved + PATIENCE));
        let fails = self.shortage_deadline();
        requests.chain(waits).chain(fails).chain(sending).chain(pulling).chain(self.pull_due()).min()
    }

    /// Time passes. The client handles deadlines and repeats messages.
    pub fn tick(&mut self, now: Now, actions: &mut Vec<Action>) {
        // A request that is given up here may leave another one, which the next call sends.
        self.tick_reach(now, actions);
        self.tick_requests(now, actions);
        for partition in 0..self.shards.len() {
            self.tick_partition(partition, now, actions);
        }
        self.answer_waits(now, actions);
        self.start_pull(now, actions);
    }

    fn tick_partition(&mut self, partition: PartitionIndex, now: Now, actions: &mut Vec<Action>) {
        if let Some(outgoing) = &mut self.outgoing {
            let sending = &mut outgoing.partitions[partition];
            if !sending.done && sending.moved + PATIENCE <= now {
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
            if !receiving.missing.is_clear() && receiving.moved + PATIENCE <= now {
                receiving.moved = now;
                receiving.struggles = true;
                receiving.loses_ahead();
                receiving.asked.clear();
                actions.push(Action::Wake(partition));
            }
        }
    }
}
