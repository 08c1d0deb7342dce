//! What is said on a connection. `docs/protocol.md` has the tables, `docs/network.md` the conversations.
//!
//! A message is a frame's body, encoded with postcard (little-endian, varints). What is bulk (bytes of blocks, a
//! model's header, long lists) is the frame's payload and not in here. Requests carry a number in the frame's header
//! that the answer repeats; what nobody asked for has the number 0.
//!
//! Everything that a peer may have to send twice can be sent twice: it names what it is about, and the second time
//! changes nothing.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::transport::{Attached, LeaveReason, ShardError};
use crate::vocabulary::block_ranges::{BlockRanges, TensorRanges};
use crate::vocabulary::controls::Controls;
use crate::vocabulary::ids::{
    BlockId, ClientId, Epoch, Generation, Incarnation, LearnerId, PlanId, ShardId, Step, Version,
};
use crate::vocabulary::partly::PartlyWritten;
use crate::vocabulary::phase::JobPhase;
use crate::vocabulary::reducer::{self, Reducer};
use crate::vocabulary::tensor_steps::TensorSteps;

/// What a connection is for. The first frame says so and it does not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    /// A client's requests to a model's coordinator, and the coordinator's notices to it.
    Control,
    /// A client's blocks to and from one shard of a model.
    Data,
    /// A model's lead to one of its shards.
    Coordinator,
    /// Creating, deleting, draining, asking for status; the registry.
    Admin,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
pub enum Message {
    // -- the connection
    /// The first frame of whoever connects.
    Hello {
        /// [`super::Protocol`] number.
        protocol: u16,
        /// What the connection is for.
        role: Role,
        /// The model; empty for [`Role::Admin`].
        model: String,
        /// Which life of the model, as the registry says; 0 for [`Role::Admin`].
        generation: Generation,
        /// Who.
        client: ClientId,
    },
    /// The answer to it.
    Welcome {
        /// [`super::Protocol`] number.
        protocol: u16,
        /// Which shard answers.
        shard: ShardId,
        /// Of the block map.
        epoch: Epoch,
        /// Longest silence on this connection, in milliseconds, before it is taken for dead.
        silence_ms: u32,
    },
    /// A request is refused, and has changed nothing. After a hello the connection ends.
    Refused(Refusal),
    /// A request without a result was carried out.
    Done,
    /// Nothing to say but that the peer lives.
    Ping,
    /// The answer to it.
    Pong,

    // -- a client to the coordinator
    /// A learner joins. Answered by `Joined`.
    Join {
        /// As in `learners/<name>`.
        name: String,
    },
    /// It has.
    Joined {
        /// Its number.
        learner: LearnerId,
        /// Its life.
        incarnation: Incarnation,
        /// States from this number on name it.
        since: u64,
    },
    /// A learner leaves. Answered by `Done`.
    Leave {
        /// Who.
        learner: LearnerId,
        /// Why.
        reason: LeaveReason,
    },
    /// The first write of a contribution. Answered by `Opened`.
    Open {
        /// Who.
        learner: LearnerId,
    },
    /// Which step it is.
    Opened {
        /// The step.
        step: Step,
        /// The last contribution's payload is still needed: keep this one elsewhere.
        staging_lent: bool,
    },
    /// A contribution is complete and waits at the client. Answered by `Done` when its blocks are at the shards.
    Commit {
        /// Who.
        learner: LearnerId,
        /// Which of its steps.
        step: Step,
        /// Blocks that it holds; others count as zero.
        blocks: BlockRanges,
        /// Tensors of which something was written.
        tensors: TensorRanges,
        /// What of its blocks was written, where that is not all; the rest is zero. None if that is in too many pieces.
        partly: Option<PartlyWritten>,
        /// For how long it may wait to be taken, in milliseconds.
        timeout_ms: u32,
        /// It lies in memory of a program's, which has it back when this is answered: a refusal says that no plan that
        /// read it can count any more.
        lent: bool,
        /// The provisional plan for which blocks of it were sent. No block of any other contribution to the step was
        /// sent for that.
        under: Option<PlanId>,
    },
    /// The open contribution is dropped. Answered by `Done`.
    Abort {
        /// Who.
        learner: LearnerId,
    },
    /// Nobody waits for the commit any more. Answered by `Done`.
    Withdraw {
        /// Who.
        learner: LearnerId,
    },
    /// Signs of life of learners. Not answered.
    Touch {
        /// Who.
        learners: Vec<LearnerId>,
        /// Whether living processes are known to use them, where that is known anew.
        attached: Option<Attached>,
    },
    /// Changes one setting. Answered by `Done`.
    SetControl {
        /// As in `control/<name>`.
        name: String,
        /// As written to it.
        value: String,
    },
    /// New weights wait at the client: publish them. Answered by `Done` when they are a version.
    Assign {
        /// The client's name for them.
        token: u64,
        /// Blocks that hold them, complete.
        blocks: BlockRanges,
        /// For how long it may wait to be begun, in milliseconds.
        timeout_ms: u32,
    },
    /// Nobody waits for them any more. Answered by `Done`.
    WithdrawAssign {
        /// Which.
        token: u64,
    },
    /// A contribution that was granted holds NaN or Inf that is to be refused, as the client has found when it
    /// added it to others. Not answered; said again when the shard asks for the block again.
    NonFiniteContribution {
        /// The plan.
        plan: PlanId,
        /// Whose.
        learner: LearnerId,
        /// Where.
        block: BlockId,
    },
    /// What was granted is no longer here: whoever waited for it has given it up. Not answered; said again with the
    /// grant.
    Lacks {
        /// The plan.
        plan: PlanId,
        /// Whose contribution; none for new weights.
        learner: Option<LearnerId>,
    },
    /// Which numbers the client's requests have. Not answered. It is the first message over a connection: what came under
    /// other numbers over an earlier one was somebody else's.
    Heard {
        /// The client has every answer up to this number, and will not ask again.
        request: u64,
        /// The newest request that the client has made.
        newest: u64,
    },

    // -- the lead to a client, unasked (request 0); each says how things are, so the newest counts
    /// The state of the job, after a welcome and whenever it changes.
    State(JobState),
    /// Send the sum of these contributions of yours to the shards, under this plan. Sent again until the plan is
    /// over or a shard has it all.
    Grant {
        /// The plan.
        plan: PlanId,
        /// What is to be sent.
        payload: Granted,
    },
    /// The plan is over; nothing of it need be sent any more.
    Over {
        /// The plan.
        plan: PlanId,
    },
    /// A learner is no longer in the job.
    Left {
        /// Who.
        learner: LearnerId,
        /// Why.
        reason: LeaveReason,
    },

    // -- a client to a shard
    /// One block of what was granted. The payload is the block as it lies in the model or, if it is `wide`, with its
    /// reducible elements as fp32: sums of several half-precision contributions. Not answered.
    Push {
        /// Under which plan.
        plan: PlanId,
        /// Which block of the model.
        block: BlockId,
        /// See above.
        wide: bool,
    },
    /// The client has sent all that it has for this plan. Answered by `Missing`.
    Probe {
        /// The plan.
        plan: PlanId,
    },
    /// Blocks of the client that the shard still wants; none when it has them all, or the plan is over.
    Missing {
        /// The plan.
        plan: PlanId,
        /// Which.
        blocks: BlockRanges,
    },
    /// Send the blocks of this range that this shard owns. Answered by a `Block` for each, in order, or by one
    /// refusal.
    Pull {
        /// Of which version.
        version: Version,
        /// Which.
        blocks: Range<u32>,
    },
    /// One of them, as the payload.
    Block {
        /// Which version's.
        version: Version,
        /// Which.
        block: BlockId,
    },

    // -- the lead to a shard
    /// Gather blocks. Answered by `Ready` when all are there and computed, or by `NonFinitePayload`.
    Start(Plan),
    /// It is.
    Ready {
        /// The plan.
        plan: PlanId,
    },
    /// A contribution holds NaN or Inf that is to be refused. The plan ends.
    NonFinitePayload {
        /// The plan.
        plan: PlanId,
        /// Whose.
        client: ClientId,
        /// Where.
        block: BlockId,
    },
    /// What the plan has computed counts from now on: it is the newest version, or part of what later plans add
    /// to. Answered by `Done`.
    Conclude {
        /// The plan.
        plan: PlanId,
    },
    /// The plan is given up; what it has computed is void. Answered by `Done`.
    Drop {
        /// The plan.
        plan: PlanId,
    },

    // -- administration
    /// Make room for this shard's part of a model. The payload is a [`super::ModelRecord`]. Answered by `Done`.
    Create,
    /// A piece of what the model begins with, as the payload: a block of its weights, and after that, if it begins at a
    /// snapshot, what else is kept of the block; no payload is optimizer state of zero. Not answered.
    Load {
        /// Of which life of the model.
        generation: Generation,
        /// Which block.
        block: BlockId,
        /// What of it.
        what: super::Kept,
    },
    /// All blocks were sent. Answered by `Done` if they are there.
    Loaded {
        /// Of which life of the model.
        generation: Generation,
    },
    /// Forget the model. Answered by `Done`.
    Delete {
        /// The model.
        model: String,
        /// Which life of it.
        generation: Generation,
    },
    /// Answered by `Text`: JSON.
    Status,
    /// The answer, as the payload: UTF-8.
    Text,
    /// To the registry.
    Registry(super::RegistryRequest),
    /// From it; long records are the payload.
    Registered(super::RegistryAnswer),

    // -- a client and a shard that share memory; a region belongs to the end that has said so, and to the connection
    /// The sender shares memory, whose descriptor it has sent. Not answered.
    Share {
        /// Its number.
        region: u32,
        /// How long it is.
        bytes: u64,
    },
    /// It does so no longer. Not answered.
    Unshare {
        /// Which.
        region: u32,
    },
    /// As `Push`, of bytes that lie in a region of the client's. If it has a request's number it is answered by `Done`
    /// when they are not needed there any more.
    PushAt {
        /// Under which plan.
        plan: PlanId,
        /// Which block of the model.
        block: BlockId,
        /// As in `Push`.
        wide: bool,
        /// Which region.
        region: u32,
        /// Where it begins there.
        offset: u64,
    },
    /// As `Block`, of bytes that lie in a region of the shard's. It has a request's number, and is answered by `Done`
    /// when they are not needed there any more.
    BlockAt {
        /// Which version's.
        version: Version,
        /// Which.
        block: BlockId,
        /// Which region.
        region: u32,
        /// Where it begins there.
        offset: u64,
    },

    // -- a shard to whoever speaks of an older block map
    /// The model has moved: the payload is a [`super::Moved`]. Takes the place of the answer; the connection ends.
    Moved,

    // -- moving a model's blocks off a shard: administration, to the coordinator and between shards
    /// Move the model's blocks off a shard. To its coordinator. Answered by `Done` when all shards know of it.
    Move {
        /// The model.
        model: String,
        /// Which life of it.
        generation: Generation,
        /// Off this shard.
        off: ShardId,
        /// Until then the new map is in force, or nothing has changed; in milliseconds.
        timeout_ms: u32,
        /// Longest time for which the job may stand still, in milliseconds; 0 for what the model's settings allow.
        hold_ms: u32,
    },
    /// Take the memory of a part under a new block map, beside what there is. The payload is a [`super::Adoption`].
    /// Answered by `Done`.
    Adopt,
    /// Fill it with this version, from the shards that own the blocks. Answered by `Done` at once.
    Fill {
        /// Of which life of the model.
        generation: Generation,
        /// Which attempt.
        attempt: u64,
        /// Which version; none newer is made meanwhile.
        version: Version,
        /// Whose optimizer state there is.
        reducer: Reducer,
    },
    /// How far is it? Answered by `Adopted`, or by the refusal that ended it.
    Adopting {
        /// Of which life of the model.
        generation: Generation,
        /// Which attempt.
        attempt: u64,
    },
    /// So far.
    Adopted {
        /// Blocks that are there.
        blocks: u32,
        /// Blocks of the part.
        of: u32,
    },
    /// Send what is kept of a block. Answered by `Fetched`.
    Fetch {
        /// Of which life of the model.
        generation: Generation,
        /// Of the block map under which the shard owns it.
        epoch: Epoch,
        /// Which version, the newest there.
        version: Version,
        /// Which block.
        block: BlockId,
        /// What of it.
        what: super::Kept,
    },
    /// It, as the payload; none if nothing of the kind is kept.
    Fetched,
    /// The coordinator's state, for the coordinator under the new map: a piece of it, as the payload. Answered by
    /// `Done`.
    HandOver {
        /// Of which life of the model.
        generation: Generation,
        /// Which attempt.
        attempt: u64,
        /// Where the piece begins. One at 0 begins anew.
        at: u64,
        /// Bytes of all pieces.
        of: u64,
        /// The coordinator's clock, in nanoseconds.
        now: u64,
    },
    /// The new map, a [`super::Moved`] as the payload, is in force. Answered by `Done`.
    Switch,
    /// The new map never will be. Answered by `Done`.
    Abandon {
        /// Of which life of the model.
        generation: Generation,
        /// Which attempt.
        attempt: u64,
    },

    // -- a shard to a client, on a connection for blocks
    /// Whether other connections of the client's are to be used instead of this one, unless something was lost.
    Rest {
        /// They are.
        rests: bool,
    },

    // -- to the coordinator again
    /// Stop what moves the model's blocks off a shard, unless the new map may be in force already. To its coordinator.
    /// Answered by `Done` when nothing does any more, whatever has come of it.
    StopMove {
        /// The model.
        model: String,
        /// Which life of it.
        generation: Generation,
        /// Off this shard.
        off: ShardId,
    },

    // -- a client and a shard by RDMA
    /// Memory of the client's that the shard may read, until it is unshared.
    ShareAt {
        /// Its number, by which [`Message::PushAt`] names it.
        region: u32,
        /// Its length.
        bytes: u64,
        /// Where it begins.
        address: u64,
        /// The key to it.
        key: u32,
    },
    /// Where the shard's directory of published versions is (see [`published`](crate::transport::rdma::published)).
    Directory {
        /// Where it begins.
        address: u64,
        /// The key to it.
        key: u32,
    },
    /// Slots of the shard's that the client may write payload into.
    Slots {
        /// How many, one behind the other.
        count: u32,
        /// Bytes of each.
        bytes: u32,
        /// Where they begin.
        address: u64,
        /// The key to them.
        key: u32,
    },
    /// A block of a plan, which lies in a slot. Answered by `Done` when the slot may be written again.
    PushIn {
        /// The plan.
        plan: PlanId,
        /// The block.
        block: BlockId,
        /// It is a sum: its half-precision elements are fp32.
        wide: bool,
        /// Which slot.
        slot: u32,
    },

    // -- a shard to the coordinator again
    /// The plan has read memory of a client's that may not have been lent any more: nothing of it may count here.
    Torn {
        /// The plan.
        plan: PlanId,
    },

    // -- snapshots: administration, to the coordinator and to shards
    /// Take a snapshot: a copy of the newest version, of one for all shards, while the job runs. To the coordinator.
    /// Answered by `Captured`.
    Capture {
        /// The model.
        model: String,
        /// Which life of it.
        generation: Generation,
        /// Under this block map.
        epoch: Epoch,
    },
    /// All shards have their copies. The payload is JSON: the record of the job, and its settings.
    Captured {
        /// Their name for it.
        snapshot: u64,
    },
    /// Take the memory for a copy; or, once that is there, begin no plan from now on, for 10 s at most. Said again, it is about
    /// the version that is the newest then. Answered by `Pinned`.
    Pin {
        /// Of which life of the model.
        generation: Generation,
        /// Under this block map.
        epoch: Epoch,
        /// The coordinator's name for it.
        snapshot: u64,
        /// How many kinds of optimizer state are wanted.
        slots: u8,
        /// No plan begins.
        holds: bool,
    },
    /// It is so.
    Pinned {
        /// The newest version.
        version: Version,
    },
    /// Copy it, and go on. Answered by `Done` when it is copied.
    Copy {
        /// Of which life of the model.
        generation: Generation,
        /// Which snapshot.
        snapshot: u64,
        /// Which version.
        version: Version,
        /// How many kinds of optimizer state are wanted.
        slots: u8,
    },
    /// As `Fetch`, of a copy.
    FetchCopy {
        /// Of which life of the model.
        generation: Generation,
        /// Which snapshot.
        snapshot: u64,
        /// Which block.
        block: BlockId,
        /// What of it.
        what: super::Kept,
    },
    /// Nobody needs the copy any more. Answered by `Done`.
    Release {
        /// Of which life of the model.
        generation: Generation,
        /// Which snapshot.
        snapshot: u64,
    },
    /// The model that was created begins at a snapshot: what is loaded is of this version. The payload is JSON: the record
    /// of the job. Answered by `Done`.
    BeginAt {
        /// Of which life of the model.
        generation: Generation,
    },
}

/// What a client needs to know of a job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobState {
    /// Rises with every state that the coordinator tells this client: an older one that comes late is told apart.
    pub sequence: u64,
    /// The newest version.
    pub version: Version,
    /// Plans up to this one are over.
    pub over: PlanId,
    /// As the client has last said by `Heard`; none if it has not yet over this connection.
    pub heard: Option<u64>,
    /// The settings.
    pub controls: Controls,
    /// What the job is doing.
    pub phase: JobPhase,
    /// The client's own learners.
    pub learners: Vec<LearnerState>,
    /// Learners in the job, everybody's.
    pub members: u32,
    /// Of them, those whose contribution to the coming version is in.
    pub committed: u32,
    /// Contributions that are part of a version.
    pub contributions: u64,
    /// Learners, everybody's, that others have been waiting for longer than is usual: the names of some of them.
    pub late: Vec<String>,
    /// How many more of them there are. Without any name they are those that have not joined.
    pub late_more: u32,
    /// Shards that the coordinator has not reached for longer than is usual.
    pub away: Vec<ShardId>,
}

/// One learner of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LearnerState {
    /// Its number.
    pub learner: LearnerId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Its last committed step.
    pub step: Step,
    /// That step waits for its version.
    pub unpublished: bool,
    /// The version that its last published step is part of.
    pub published_in: Version,
    /// Versions that it takes part in begin after this one.
    pub joined_at: Version,
    /// Whether a process uses it, as the client has last said by `Touch`.
    pub attached: Attached,
}

/// What a grant is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Granted {
    /// The sum of these learners' committed steps, added in this order.
    Contributions {
        /// Which.
        of: Vec<(LearnerId, Step)>,
        /// They are not added: of each block, the last one that holds it counts.
        replaces: bool,
        /// The plan is provisional: this learner is still writing the step that `of` names. Blocks that it has written
        /// as a whole are sent. The grant is repeated without this when the step is committed, and then covers all of it.
        open: Option<LearnerId>,
    },
    /// The new weights of this token.
    Weights(u64),
}

/// What a shard is to gather and compute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Its name.
    pub plan: PlanId,
    /// The version that it starts from: what the shard has computed for the plan before this one is concluded
    /// first, if that makes it.
    pub base: Version,
    /// What becomes of the blocks.
    pub work: Work,
    /// Who sends which blocks, in the order in which they are added where that is to be kept.
    pub sources: Vec<PlanSource>,
    /// Blocks are added in the order of `sources`, and not as they come.
    pub ordered: bool,
}

/// What becomes of the blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Work {
    /// They are added up, together with what earlier plans of this version have added up.
    Add {
        /// They are not added: the last one counts.
        replaces: bool,
    },
    /// The next version is made from their sum, and what earlier plans of this version have added up.
    Reduce {
        /// Reducer, hyper-parameters and counts.
        step: reducer::Step,
        /// The optimizer step of each tensor. Tensors of step 0 stay as they are.
        tensors: TensorSteps,
        /// Optimizer state starts from zero.
        fresh_state: bool,
    },
    /// The next version is this one with these blocks in place of its own. What earlier plans have added up stays for
    /// the version after it, and so does optimizer state.
    Assign,
}

/// One client's part of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanSource {
    /// Who.
    pub client: ClientId,
    /// The blocks that it sends.
    pub blocks: BlockRanges,
    /// NaN and Inf in them are refused. Not for sums of several learners: those have been looked at one by one.
    pub check: bool,
    /// What counts of those of them that it sends in part. Only where values are replaced; what others send of them is
    /// something else.
    pub partly: PartlyWritten,
    /// It may send any block: `blocks` are all. The plan is provisional, and is not ready before its start is repeated
    /// with the blocks that it does send.
    pub provisional: bool,
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// As an in-process shard would.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// Another protocol.
    #[error(
        "the peer speaks protocol {got}, this is protocol {expected}: use the same release on both sides"
    )]
    Protocol {
        /// This end's.
        expected: u16,
        /// The peer's.
        got: u16,
    },
    /// No such model here.
    #[error("there is no model {0:?} on this shard")]
    NoModel(String),
    /// The model was deleted and created again.
    #[error("model {model:?} is of generation {expected}, not {got}: it was created again")]
    Generation {
        /// Which.
        model: String,
        /// This end's.
        expected: Generation,
        /// The peer's.
        got: Generation,
    },
    /// The model exists.
    #[error("there is already a model {0:?}: delete it first")]
    Exists(String),
    /// Another block map.
    #[error("the request is of block map {got}, the shard's is {expected}: fetch the new map")]
    Epoch {
        /// This end's.
        expected: Epoch,
        /// The peer's.
        got: Epoch,
    },
    /// A block that the shard does not own.
    #[error("block {block} is not one of this shard's")]
    NotMine {
        /// Which.
        block: BlockId,
    },
    /// The version is no longer, or not yet, here.
    #[error("version {wanted} is not here; version {newest} is the newest")]
    NoVersion {
        /// Asked for.
        wanted: Version,
        /// There is.
        newest: Version,
    },
    /// The message does not belong on this connection.
    #[error("{what} does not belong on this connection")]
    Role {
        /// The message's name.
        what: String,
    },
    /// Another setting.
    #[error("{0}")]
    Control(String),
    /// Anything else.
    #[error("{0}")]
    Other(String),
    /// Bytes that are no frame, or do not fit: nothing of it was taken.
    #[error("{what}: expected {expected}, got {got}")]
    Frame {
        /// Of the frame.
        what: String,
        /// What the protocol allows.
        expected: String,
        /// What came.
        got: String,
    },
    /// The model is no more, and does not come back in this life.
    #[error("model {0:?} was deleted: create it with another generation")]
    Deleted(String),
    /// Another shard has the number, and blocks under it.
    #[error(
        "number {shard} is that of the shard at {address}, which has blocks of models: one of the two has to go"
    )]
    NumberTaken {
        /// Which.
        shard: ShardId,
        /// Whose.
        address: String,
    },
    /// The shard cannot serve the connection by RDMA; by TCP it may.
    #[error("{0}")]
    NoRdma(String),
    /// A plan that cannot begin, or end, here: it is over, or its turn has not come.
    #[error("plan {plan} is past, or not the next one: the newest here is {newest}")]
    Plan {
        /// Which.
        plan: PlanId,
        /// The newest one here.
        newest: PlanId,
    },
}
