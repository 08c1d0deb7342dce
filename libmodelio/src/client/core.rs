//! The decisions of a client: requests to the coordinator, pushes, pulls and repetitions. Pure: events and `now` go in,
//! and actions come out. It has no bytes, no socket and no clock.
//!
//! Blocks move when the edge asks for work ([`ClientCore::next_push`], [`ClientCore::next_pull`]), as fast as its
//! connections take it. Nothing relies on a connection: the client finds lost blocks missing, and repeats them.
//!
//! A file calls only methods of files above it in this table:
//!
//! | module, from low to high | holds |
//! |---|---|
//! | `owners`, `buffers`, `plans_seen`, `pull_times` | the block map in force, the version that is shown and the buffer behind it, known plans, when to pull |
//! | `view` | the state, for reading |
//! | `coordination`, `reach`, `readers` | the connection to the coordinator, shards that are out of reach, and the readers of the job |
//! | `held`, `open_weights` | payload that shards may still need, and new weights that are still being written |
//! | `pulling`, `following`, `relay` | blocks from shards, also of a version that is still being made, or from a relay |
//! | `waits` | requests that wait for a version |
//! | `learners`, `pushing` | this client's learners and their steps, and blocks to shards |
//! | `state` | the job's state, from the coordinator |
//! | `requests` | requests to the coordinator, and its answers |
//! | `moving`, `shards`, `deadlines` | a change of the block map, what comes from shards, and the passing of time |

mod buffers;
mod coordination;
mod deadlines;
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
mod readers;
mod relay;
mod requests;
mod shards;
mod state;
mod view;
mod waits;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::vocabulary::block_map::{BlockMap, PartitionIndex};
use crate::vocabulary::controls::PullPolicy;
use crate::vocabulary::ids::{ClientId, LearnerId, PlanId, Step, Version};
use crate::vocabulary::members::LeaveReason;
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{JobState, Message, Refusal};
use buffers::Buffers;
use coordination::Coordination;
pub use coordination::ToldLearners;
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

/// Work for the edge.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// Send to the coordinator, under this request number.
    ToCoordinator(u64, Message),
    /// Send to a shard.
    ToShard(PartitionIndex, Message),
    /// There may be something to push to this shard, or to pull from it.
    Wake(PartitionIndex),
    /// There may be another relay ([`ClientCore::relay_address`]), or something to pull from it.
    Relay,
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
    /// The readers of the job have changed.
    Readers,
    /// There is a snapshot of a newer version.
    Durable,
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

    /// No versions are pulled, nor shown: the client knows which one is the newest.
    pub fn holds_nothing(mut self) -> ClientCore {
        self.buffers.hold_nothing();
        self
    }

    /// Pulls by this policy, whatever the job's settings say.
    pub fn pulls(mut self, policy: PullPolicy) -> ClientCore {
        self.pull_times.set_policy(policy);
        self
    }
}
