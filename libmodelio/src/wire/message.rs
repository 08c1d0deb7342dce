//! The messages on a connection. `docs/internals/protocol.md` has the tables, `docs/operate/network.md` the conversations.
//!
//! A message is a frame's body, encoded with postcard (little-endian, varints). Bulk data (bytes of blocks, a
//! model's header, long lists) is the frame's payload, outside of the message. Requests carry a number in the
//! frame's header that the answer repeats; messages that are neither have the number 0.
//!
//! Everything that a peer may have to send twice can be sent twice: the message names its subject, and the
//! second time changes nothing.

use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::MAX_PARTS;
use super::bounded::list;
use crate::vocabulary::block_ranges::{BlockRanges, TensorRanges};
use crate::vocabulary::coding::Form;
use crate::vocabulary::controls::{Controls, MAX_LEARNERS};
use crate::vocabulary::groups::{Contents, Groups};
use crate::vocabulary::ids::{
    BlockId, ClientId, Epoch, Generation, Incarnation, LearnerId, PlanId, ReaderId, ShardId, Step, Version,
};
use crate::vocabulary::members::{Attached, LeaveReason, LifeSign, is_learner_name};
use crate::vocabulary::meta::Meta;
use crate::vocabulary::norm::{Norm, Quantity, Squares, TensorFactors};
use crate::vocabulary::partly::PartlyWritten;
use crate::vocabulary::phase::JobPhase;
use crate::vocabulary::readers::ReaderState;
use crate::vocabulary::reducer::{self, Combine, Reducer};
use crate::vocabulary::shard_error::ShardError;
use crate::vocabulary::strided::Strided;
use crate::vocabulary::tensor_steps::TensorSteps;
use crate::vocabulary::weight::Weight;

/// The purpose of a connection. The first frame names it, and it does not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// A client's requests to a model's coordinator, and the coordinator's notices to it.
    Control,
    /// A client's blocks to and from one shard of a model.
    Data,
    /// A model's coordinator to one of its shards.
    Coordinator,
    /// Creating, deleting, draining, asking for status; the registry.
    Admin,
    /// A client's pulls from another client, its relay.
    Relay,
}

/// How numbers of all learners become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their mean.
    Mean,
    /// The least one.
    Min,
    /// The greatest one.
    Max,
}

// Messages are moved several times between queues, and a list of some must be no large allocation.
const _: () = assert!(size_of::<Message>() <= 144);

/// A message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
pub enum Message {
    // -- the connection
    /// The first frame of the end that connects.
    Hello {
        /// [`super::Protocol`] number.
        protocol: u16,
        /// The purpose of the connection.
        role: Role,
        /// The model; empty for [`Role::Admin`].
        model: String,
        /// The life of the model, as the registry says; 0 for [`Role::Admin`].
        generation: Generation,
        /// The client.
        client: ClientId,
    },
    /// The answer to it.
    Welcome {
        /// [`super::Protocol`] number.
        protocol: u16,
        /// The shard that answers.
        shard: ShardId,
        /// The epoch of the block map.
        epoch: Epoch,
        /// Longest silence on this connection, in milliseconds, before it is taken for dead.
        silence_ms: u32,
    },
    /// A request is refused, and has changed nothing. After a hello the connection ends.
    Refused(Refusal),
    /// A request without a result was carried out.
    Done,
    /// Shows only that the peer lives.
    Ping,
    /// The answer to it.
    Pong,

    // -- a client to the coordinator
    /// A learner joins. Answered by `Joined`.
    Join {
        /// The name in `learners/<name>`.
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
        /// The learner.
        learner: LearnerId,
        /// Why.
        reason: LeaveReason,
    },
    /// The first write of a contribution. Answered by `Opened`.
    Open {
        /// The learner.
        learner: LearnerId,
    },
    /// The answer: the step.
    Opened {
        /// The step.
        step: Step,
        /// The last contribution's payload is still needed: keep this one elsewhere.
        staging_lent: bool,
    },
    /// A contribution is complete and waits at the client. Answered by `Done` when its blocks are at the shards.
    Commit {
        /// The learner.
        learner: LearnerId,
        /// The step of the learner.
        step: Step,
        /// Blocks that it holds; others count as zero.
        blocks: BlockRanges,
        /// Tensors of which something was written.
        tensors: TensorRanges,
        /// The written parts of blocks that were written in part; the rest is zero. None if there are too
        /// many pieces.
        partly: Option<PartlyWritten>,
        /// Its contents.
        contents: Contents,
        /// How much the contribution counts beside others. Its payload is multiplied by that.
        weight: Weight,
        /// For how long it may wait to be taken, in milliseconds.
        timeout_ms: u32,
        /// It lies in memory of a program's, which has it back when this is answered: a refusal says that no plan that
        /// read it can count any more.
        lent: bool,
        /// The newest provisional plan for which the client has sent blocks of a contribution that it has dropped
        /// since. Neither that plan nor an earlier one can count.
        given_up: Option<PlanId>,
        /// The version that the learner has last opened. None if it has opened none since it joined.
        base: Option<Version>,
    },
    /// The open contribution is dropped. Answered by `Done`.
    Abort {
        /// The learner.
        learner: LearnerId,
    },
    /// Nobody waits for the commit any more. Answered by `Done`.
    Withdraw {
        /// The learner.
        learner: LearnerId,
    },
    /// Signs of life of learners. Not answered.
    Touch {
        /// The learners.
        learners: Vec<LearnerId>,
        /// What is told of them.
        sign: LifeSign,
    },
    /// Changes one setting. Answered by `Done`.
    SetControl {
        /// The name in `control/<name>`.
        name: String,
        /// The value, as written to the file.
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
        /// The provisional plan for which blocks of them were sent, which have not changed since.
        ahead: Option<PlanId>,
        /// What their publisher says of them.
        meta: Meta,
    },
    /// Nobody waits for them any more. Answered by `Done`.
    WithdrawAssign {
        /// The token of the weights.
        token: u64,
    },
    /// A granted contribution holds NaN or Inf, which the job refuses. The client has found it when it added the
    /// contribution to others. Not answered; repeated when the shard asks for the block again.
    NonFiniteContribution {
        /// The plan.
        plan: PlanId,
        /// The learner who contributed.
        learner: LearnerId,
        /// The block with the number.
        block: BlockId,
    },
    /// The granted payload has gone: its program has given it up. Not answered; repeated with the grant.
    SourceGone {
        /// The plan.
        plan: PlanId,
        /// The learner of the contribution; none for new weights.
        learner: Option<LearnerId>,
    },
    /// Acknowledges answers, and states the numbers of the client's requests. Not answered. It is the first message
    /// over a connection. Requests with other numbers over an earlier connection were somebody else's.
    AckThrough {
        /// The client has every answer up to this number, and will not ask again.
        request: u64,
        /// The newest request that the client has made.
        newest: u64,
    },

    // -- the coordinator to a client, unasked (request 0); each says how things are, so the newest counts
    /// The state of the job, after a welcome and whenever it changes.
    State(Box<JobState>),
    /// Send the sum of these contributions of yours to the shards, under this plan. Sent again until the plan is
    /// over or a shard has it all.
    Grant {
        /// The plan.
        plan: PlanId,
        /// The data to send.
        payload: Granted,
        /// The newest plan with contributions of this client's that counts, or 0. What a form has lost of its blocks is
        /// the client's no more; of another plan's it still is.
        counted: PlanId,
    },
    /// The plan is over; nothing of it need be sent any more.
    Over {
        /// The plan.
        plan: PlanId,
    },
    /// A learner is no longer in the job.
    Left {
        /// The learner.
        learner: LearnerId,
        /// Why.
        reason: LeaveReason,
    },

    // -- a client to a shard
    /// One granted block, as the payload. Not answered.
    Push {
        /// The plan that the block was granted for.
        plan: PlanId,
        /// The block, in the model.
        block: BlockId,
        /// The form of the payload.
        form: Form,
        /// The plan was provisional when the block was sent, so all of the block is written. Otherwise the shard must
        /// know the sealed plan before it takes the block.
        ahead: bool,
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
        /// The blocks.
        blocks: BlockRanges,
    },
    /// Send the blocks of this range that this shard owns. Answered by a `Block` or `Changes` for each, in order, or by
    /// one refusal.
    Pull {
        /// The version of the blocks.
        version: Version,
        /// The blocks.
        blocks: Range<u32>,
        /// An older version that the client has, all of it: the shard may send what has changed since.
        base: Option<Version>,
    },
    /// One of the fetched blocks, as the payload.
    Block {
        /// The version.
        version: Version,
        /// The block.
        block: BlockId,
    },

    // -- the coordinator to a shard
    /// Gather blocks. Answered by `Ready` when all are there and computed, or by `NonFinitePayload`.
    Start(Box<Plan>),
    /// The answer: the plan is ready.
    Ready {
        /// The plan.
        plan: PlanId,
    },
    /// A contribution holds NaN or Inf that is to be refused. The plan ends.
    NonFinitePayload {
        /// The plan.
        plan: PlanId,
        /// The client of the source.
        client: ClientId,
        /// The block.
        block: BlockId,
    },
    /// The plan's results count from now on: they are the newest version, or part of the sum that later plans
    /// add to. Answered by `Done`.
    Conclude {
        /// The plan.
        plan: PlanId,
    },
    /// The plan is given up, and its results are void. Answered by `Done`.
    Drop {
        /// The plan.
        plan: PlanId,
    },

    // -- administration
    /// Make room for this shard's part of a model. The payload is a [`super::ModelRecord`]. Answered by `Done`.
    Create,
    /// A piece of the model's first version, as the payload: a block of its weights. If the model begins at a
    /// snapshot, the rest that is kept of the block follows; no payload is optimizer state of zero. Not
    /// answered.
    Load {
        /// The life of the model.
        generation: Generation,
        /// The block.
        block: BlockId,
        /// The kind of data.
        what: super::DataKind,
    },
    /// All blocks were sent. Answered by `Done` if they are there.
    Loaded {
        /// The life of the model.
        generation: Generation,
    },
    /// Forget the model. Answered by `Done`.
    Delete {
        /// The model.
        model: String,
        /// The life of the model.
        generation: Generation,
    },
    /// Answered by `Text`: JSON.
    Status,
    /// The answer, as the payload: UTF-8.
    Text,
    /// To the registry.
    Registry(super::RegistryRequest),
    /// The answer of the registry; long records are the payload.
    Registered(super::RegistryAnswer),

    // -- a client and a shard that share memory; a region belongs to the end that has said so, and to the connection
    /// The sender shares memory, whose descriptor it has sent. Not answered.
    Share {
        /// Its number.
        region: u32,
        /// How long it is.
        bytes: u64,
    },
    /// The sender stops sharing the memory. Not answered.
    Unshare {
        /// The region.
        region: u32,
    },
    /// Like `Push`, for bytes that lie in a region of the client's. If it has a request's number, it is
    /// answered by `Done` when the bytes are not needed there any more.
    PushAt {
        /// The plan that the block was granted for.
        plan: PlanId,
        /// The block.
        block: BlockId,
        /// Whether the block is wide ([`Form::Wide`]).
        wide: bool,
        /// Whether the plan was provisional, as in `Push`.
        ahead: bool,
        /// The region.
        region: u32,
        /// The offset in the region.
        offset: u64,
    },
    /// Like `Block`, for bytes that lie in a region of the shard's. It has a request's number, and is
    /// answered by `Done` when the bytes are not needed there any more.
    BlockAt {
        /// The version.
        version: Version,
        /// The block.
        block: BlockId,
        /// The region.
        region: u32,
        /// The offset in the region.
        offset: u64,
    },

    // -- a shard to a peer that uses an older block map
    /// The model has moved: the payload is a [`super::Moved`]. Takes the place of the answer; the connection ends.
    Moved,

    // -- moving a model's blocks off a shard: administration, to the coordinator and between shards
    /// Move the model's blocks off a shard. To its coordinator. Answered by `Done` when all shards know of it.
    Move {
        /// The model.
        model: String,
        /// The life of the model.
        generation: Generation,
        /// Off this shard.
        off: ShardId,
        /// The time by which the new map is in force, or nothing has changed; in milliseconds.
        timeout_ms: u32,
        /// Longest time for which the job may stand still, in milliseconds; 0 for the time that the model's
        /// settings allow.
        hold_ms: u32,
    },
    /// Take the memory of a partition under a new block map, beside what there is. The payload is a [`super::Moved`],
    /// as of `Switch`. Answered by `Done`.
    Prepare {
        /// The number of the attempt: the numbers of a model's attempts rise.
        attempt: u64,
        /// The shard that has the blocks that move.
        off: ShardId,
    },
    /// Fill it with this version, and say how far it is. Answered by `Filled` at
    /// once, or by the refusal that ended it.
    Fill {
        /// The life of the model.
        generation: Generation,
        /// The number of the attempt.
        attempt: u64,
        /// The version; no newer one is made meanwhile.
        version: Version,
        /// The reducer whose optimizer state there is.
        reducer: Reducer,
    },
    /// The answer: the progress so far.
    Filled {
        /// Blocks that are there.
        blocks: u32,
        /// Blocks of the part.
        of: u32,
    },
    /// Send what is kept of a block. Answered by `Fetched`.
    Fetch {
        /// The life of the model.
        generation: Generation,
        /// The epoch of the block map under which the shard owns the block.
        epoch: Epoch,
        /// The version, the newest there.
        version: Version,
        /// The block.
        block: BlockId,
        /// The kind of data.
        what: super::DataKind,
    },
    /// The answer, with the data as the payload; none if the shard has none of that kind.
    Fetched,
    /// The coordinator's state, for the coordinator under the new map: a piece of it, as the payload. Answered by
    /// `Done`.
    HandOver {
        /// The life of the model.
        generation: Generation,
        /// The number of the attempt.
        attempt: u64,
        /// The start of the piece. A piece at 0 begins anew.
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
        /// The life of the model.
        generation: Generation,
        /// The number of the attempt.
        attempt: u64,
    },

    // -- a shard to a client, on a connection for blocks
    /// Parks this connection, or uses it again. The client uses its other connections instead of a parked one, unless
    /// something was lost.
    Park {
        /// Whether this one is parked.
        parked: bool,
    },

    // -- to the coordinator again
    /// Stops the move of the model's blocks off a shard, unless the new map may be in force already. It goes
    /// to the model's coordinator. `Done` answers when nothing moves them any more, whatever the outcome.
    StopMove {
        /// The model.
        model: String,
        /// The life of the model.
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
        /// The start address.
        address: u64,
        /// The key to it.
        key: u32,
    },
    /// The place of the shard's directory of published versions (see
    /// [`published`](crate::transport::rdma::published)).
    Directory {
        /// The start address.
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
        /// The start address of the slots.
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
        /// Whether the block is a sum: its narrower elements are fp32.
        wide: bool,
        /// Whether the plan was provisional, as in `Push`.
        ahead: bool,
        /// The slot.
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
        /// The life of the model.
        generation: Generation,
        /// Under this block map.
        epoch: Epoch,
    },
    /// All shards have their copies. The payload is JSON: the record of the job, and its settings.
    Captured {
        /// Their name for it.
        snapshot: u64,
    },
    /// Take the memory for a copy; or, once that is there, begin no plan from now on, for 10 s at most. Said again, it
    /// is about the version that is the newest then. Answered by `Pinned`.
    Pin {
        /// The life of the model.
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
    /// The answer: the version is pinned.
    Pinned {
        /// The newest version.
        version: Version,
    },
    /// Copy it, and go on. Answered by `Done` when it is copied.
    Copy {
        /// The life of the model.
        generation: Generation,
        /// The number of the snapshot.
        snapshot: u64,
        /// The version.
        version: Version,
        /// How many kinds of optimizer state are wanted.
        slots: u8,
    },
    /// Like `Fetch`, for a copy.
    FetchCopy {
        /// The life of the model.
        generation: Generation,
        /// The number of the snapshot.
        snapshot: u64,
        /// The block.
        block: BlockId,
        /// The kind of data.
        what: super::DataKind,
    },
    /// Nobody needs the copy any more. Answered by `Done`.
    Release {
        /// The life of the model.
        generation: Generation,
        /// The number of the snapshot.
        snapshot: u64,
    },
    /// The created model begins at a snapshot, and the loaded data is of this version. The payload is JSON:
    /// the record of the job. Answered by `Done`.
    BeginAt {
        /// The life of the model.
        generation: Generation,
    },

    // -- a client and a shard that share memory, again
    /// The client wants a whole version where it lies. The shard must have all blocks of the model. Answered by
    /// `VersionAt`, or by the blocks of the version.
    PullWhole {
        /// The version.
        version: Version,
    },
    /// A version, which is all of a region of the shard's. It has a request's number, and is answered by `Done` when
    /// the client does not show the version any more.
    VersionAt {
        /// The version.
        version: Version,
        /// The region that holds it.
        region: u32,
    },

    // -- a client to the coordinator, again
    /// The contribution that a learner writes has a whole block, its first one: a plan may begin that takes its blocks
    /// as they come. Not answered. Where it is lost, the plan begins with the commit.
    WholeBlock {
        /// The learner.
        learner: LearnerId,
        /// The step of the learner.
        step: Step,
    },

    // -- a shard to the coordinator, again
    /// The plan is ready, and its sums are measured: takes the place of `Ready` under [`Work::Measure`].
    Measured {
        /// The plan.
        plan: PlanId,
        /// The squares of all elements that count, added up.
        squares: Squares,
    },

    // -- a client and a shard, again
    /// Send each block of the version that this plan makes as soon as it is computed. Answered by a `BlockAhead` for
    /// each block, over any of the client's connections that ask for the same plan. Nothing more comes if the plan is
    /// dropped.
    Follow {
        /// The plan.
        plan: PlanId,
        /// As in `Pull`: then a block may come as `ChangesAhead`.
        base: Option<Version>,
    },
    /// A block of the version that this plan makes, as the payload. It counts if the plan makes a version.
    BlockAhead {
        /// The plan.
        plan: PlanId,
        /// The block.
        block: BlockId,
    },

    // -- the coordinator to a client, again
    /// A plan begins that makes a version, and this client sends nothing for it. It may follow the plan.
    Begun {
        /// The plan.
        plan: PlanId,
    },

    // -- a client to the coordinator, once more
    /// New weights that are being written have a whole block, the first one: a plan may begin that takes their blocks
    /// as they come. Not answered. If this is lost, the plan begins with the `Assign`.
    WholeWeights {
        /// The token that the `Assign` will have.
        token: u64,
    },
    // -- a shard to the coordinator, once more
    /// The answer to a repeated `Start`, while payloads are still to come: how many blocks each client has not sent. And
    /// the answer to a first `Drop`: the clients that have sent nothing for the plan. Where the order of clients
    /// counts, only the first of them is named.
    Lacking {
        /// The plan.
        plan: PlanId,
        /// The clients, and the numbers of their blocks.
        clients: Vec<(ClientId, u32)>,
    },

    // -- learners among themselves, by the coordinator
    /// Numbers of a learner, to be reduced with those of all others in the job. Answered by `AllReduced` once all have
    /// given theirs.
    AllReduce {
        /// The learner.
        learner: LearnerId,
        /// How they are reduced.
        op: ReduceOp,
        /// The numbers, at most [`super::MAX_ALL_REDUCE`].
        values: Vec<f64>,
        /// For how long they may wait for the others, in milliseconds.
        timeout_ms: u32,
    },
    /// The answer: the results, in the order of the numbers.
    AllReduced {
        /// The results.
        values: Vec<f64>,
    },

    // -- a shard to a client that has an older version
    /// What has changed in a block, as the payload: a patch of [`crate::bytes::changes`].
    Changes {
        /// The version.
        version: Version,
        /// The block.
        block: BlockId,
        /// The version that it changes.
        base: Version,
        /// The CRC32C of the block afterwards. None if nothing has changed.
        crc: Option<u32>,
    },
    /// The same of the version that this plan makes, if the plan makes a version.
    ChangesAhead {
        /// The plan.
        plan: PlanId,
        /// The block.
        block: BlockId,
        /// The version that it changes.
        base: Version,
        /// The CRC32C of the block afterwards. None if nothing has changed.
        crc: Option<u32>,
    },

    // -- what has changed, for files that show it
    /// Say which elements of the shard's blocks have changed from one version to another. Answered by `ChangedBlocks`.
    ChangedSince {
        /// The life of the model.
        generation: Generation,
        /// The older version.
        base: Version,
        /// The newer one.
        version: Version,
        /// Of the shard's blocks from this one on.
        first: BlockId,
    },
    /// The answer. The payload is the [`crate::bytes::changes::encode_block`] of some blocks.
    ChangedBlocks {
        /// The next one, if these are not all.
        next: Option<BlockId>,
    },
    // -- readers
    /// A reader of this client begins, says what it runs, or ends. Answered by `Done`.
    Reader {
        /// The name in `readers/<name>`.
        name: String,
        /// What it does.
        does: ReaderDoes,
    },
    /// All readers of this client have this version's bytes. Not answered.
    Staged {
        /// The version.
        version: Version,
    },
    /// The client does not know the readers that the newest `State` names, and asks for all of them. Not answered.
    TellReaders,
    /// The readers of the job, or what has changed in them, for a client.
    Readers {
        /// The revision that this changes. None if these are all of them.
        since: Option<u64>,
        /// The revision that it makes.
        revision: u64,
        /// All readers, or those that are new or have changed.
        readers: Vec<ReaderState>,
        /// Those that have gone.
        gone: Vec<ReaderId>,
    },
    // -- relays
    /// The client takes connections for pulls here, and would pull by a relay. Answered by `PullVia`.
    Relay {
        /// Where others reach it, as host:port.
        address: String,
        /// Hosts of one zone are near each other.
        zone: String,
        /// Its host, as in a shard's record.
        host: String,
    },
    /// From where a client that is a relay pulls from now on.
    PullVia {
        /// The address of a relay. None for the shards.
        address: Option<String>,
        /// The number of relays that a version goes through before this client.
        depth: u32,
    },
    /// The relay at this address cannot be pulled from. Answered by `PullVia`.
    RelayFailed {
        /// The address.
        address: String,
    },

    // -- pieces of a version
    /// Send pieces that lie in the shard's blocks. Answered by `PartBytes`.
    ReadParts {
        /// The life of the model.
        generation: Generation,
        /// The version.
        version: Version,
        /// An older version of which the client has the pieces: the shard may send what has changed since.
        base: Option<Version>,
        /// The pieces, of 1 to [`super::MAX_PARTS_BYTES`] bytes together.
        #[serde(deserialize_with = "list::<MAX_PARTS, _, _>")]
        parts: Vec<Strided>,
    },
    /// The answer. The payload is the pieces, one behind the other, or what has changed in them.
    PartBytes {
        /// The payload is a patch, which makes the pieces from those of the base. They have this CRC32C then.
        patched: Option<u32>,
    },

    // -- a client to a shard that has an older version
    /// Like `Push`, for a block of new weights: what has changed in it, as a patch. Not answered.
    PushChanges {
        /// The plan that the block was granted for.
        plan: PlanId,
        /// The block, in the model.
        block: BlockId,
        /// The version that it changes.
        base: Version,
        /// The CRC32C of the block afterwards.
        crc: u32,
        /// As in `Push`.
        ahead: bool,
    },

    // -- new weights in parts
    /// Like `Assign`, for one part of new weights, whose bytes are at the shards. Answered by `Done` when the parts of
    /// its set are a version. `WithdrawAssign` takes it back.
    AssignPart {
        /// The client's name for it.
        token: u64,
        /// Which part of which set it is.
        part: PartOf,
        /// Blocks of which it holds something.
        blocks: BlockRanges,
        /// For how long it may wait for the others and to be begun, in milliseconds.
        timeout_ms: u32,
        /// What its publisher says of the version.
        meta: Meta,
    },
    /// A client to a shard: pieces of a part, which lie in the shard's blocks. The payload has them, one behind the other,
    /// or what has changed in them. Answered by `Done`. The shard keeps them as long as the connection lasts.
    WritePart {
        /// The life of the model.
        generation: Generation,
        /// The block map by which the pieces lie in the shard's blocks.
        epoch: Epoch,
        /// The client.
        client: ClientId,
        /// Its name for the part.
        token: u64,
        /// The payload is a patch, which makes the pieces from those of this version. They have this CRC32C then.
        patched: Option<(Version, u32)>,
        /// The pieces, of 1 to [`super::MAX_PARTS_BYTES`] bytes together.
        #[serde(deserialize_with = "list::<MAX_PARTS, _, _>")]
        parts: Vec<Strided>,
    },
    /// A shard to the coordinator: the parts of the plan's set do not make a version.
    Unmade {
        /// The plan.
        plan: PlanId,
        /// Why.
        why: ShardError,
    },

    // -- a client that reads a shard's memory
    /// Say which of the shard's blocks need not be read. Answered by `Unchanged`, or by one refusal.
    WhichChanged {
        /// The version of the blocks.
        version: Version,
        /// An older version that the client has, all of it.
        base: Version,
    },
    /// The answer.
    Unchanged {
        /// The version.
        version: Version,
        /// The older one.
        base: Version,
        /// Blocks of the shard's that are the same in both, as far as the shard knows.
        blocks: BlockRanges,
    },

    // -- a client to the coordinator, once more
    /// A program has begun to write new weights. Not answered.
    BeginWeights {
        /// The token that the `Assign` will have.
        token: u64,
    },

    // -- snapshots in a store: administration, to the coordinator and to shards
    /// Take a snapshot, and write it into a store. To the coordinator. Said again, it tells how far that is. Answered by
    /// `Saved`.
    TakeSnapshot {
        /// The model.
        model: String,
        /// The life of the model.
        generation: Generation,
        /// Under this block map.
        epoch: Epoch,
        /// The name of the snapshot, which nobody else has.
        snapshot: u64,
        /// The address of the store. Empty for that of the setting `snapshot_to`.
        to: String,
        /// Whether somebody waits for it. Otherwise, it makes room for the steps of the job.
        hurries: bool,
    },
    /// Write this shard's copy into a store. Said again, it tells how far that is. Answered by `Saved`.
    SaveCopy {
        /// The life of the model.
        generation: Generation,
        /// The name of the copy, and of the snapshot.
        snapshot: u64,
        /// The address of the store.
        to: String,
        /// The snapshot there whose pieces need not be written again. Empty if there is none.
        before: String,
        /// Whether somebody waits for it. Otherwise, it makes room for the steps of the job.
        hurries: bool,
    },
    /// How far a snapshot is, or a shard's part of one, or the loading of that.
    Saved {
        /// Its version, once it is known.
        version: Version,
        /// Bytes that are in the store, or need not be written; or that are loaded.
        dealt: u64,
        /// All its bytes, as far as they are known.
        of: u64,
        /// Of those, the bytes that were written.
        written: u64,
        /// All of it is in the store.
        ended: bool,
    },
    /// Load this shard's blocks of a new model from a snapshot in a store. To a shard, behind `BeginAt`. Said again, it tells
    /// how far that is. Answered by `Saved`.
    LoadCopy {
        /// The life of the model.
        generation: Generation,
        /// The address of the store.
        from: String,
        /// The snapshot's name there.
        name: String,
    },
    // -- newer weights of mounts, for a model that is restored
    /// What the job knows of learners, as of a version that the client is about to hear of. Sent to clients of a job that
    /// goes on with their weights when it is restored. Not answered.
    Learners {
        /// The version.
        version: Version,
        /// Contributions that are part of it or of an earlier one.
        contributions: u64,
        /// Learners, as many as fit: those in the job come first.
        #[serde(deserialize_with = "list::<MAX_TOLD_LEARNERS, _, _>")]
        learners: Vec<LearnerRecord>,
        /// The highest incarnation of a name that is not listed.
        unlisted: Incarnation,
    },
    /// The client has the weights of this version. To the shard that restores the model. The payload is what the job knew
    /// of that version. Said again, it tells that the client lives. Answered by `Offered`.
    Offer {
        /// The life that the model is restored to.
        generation: Generation,
        /// The client.
        client: ClientId,
        /// The version.
        version: Version,
        /// How the client gets on.
        brings: Brings,
    },
    /// What becomes of the offer.
    Offered {
        /// The client is to send the weights. Otherwise it may be told so later. The payload says to which shards.
        wanted: bool,
    },
}

/// How a client gets on with the weights that it offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Brings {
    /// It lives: it waits to be told, or sends them.
    Soon,
    /// All shards of the model have them now.
    Sent,
    /// It cannot send them.
    Failed,
}

/// The most learners in a `Learners`.
pub const MAX_TOLD_LEARNERS: usize = 2 * MAX_LEARNERS as usize;

/// The facts about a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LearnerRecord {
    /// The name in `learners/<name>`.
    pub name: String,
    /// Its last incarnation.
    pub incarnation: Incarnation,
    /// The last step of that incarnation that is part of the version. None if the learner has left.
    pub step: Option<Step>,
}

/// The most parts of a set.
pub const MAX_PARTS_OF_SET: u32 = 4096;

/// One part of new weights that several clients publish.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartOf {
    /// The name of the set.
    pub set: String,
    /// The part's number.
    pub number: u32,
    /// The number of parts that the set has.
    pub of: u32,
    /// Whether the parts must have each byte of the model.
    pub all: bool,
}

impl PartOf {
    /// Whether it can be.
    pub fn is_sound(&self) -> bool {
        is_learner_name(&self.set) && self.number < self.of && self.of <= MAX_PARTS_OF_SET
    }
}

/// A complete set of parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetOfParts {
    /// Whether they must have each byte of the model.
    pub all: bool,
    /// The parts, by number. Of bytes that several have, those of the lowest count.
    pub parts: Vec<PlanPart>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanPart {
    /// Its client.
    pub client: ClientId,
    /// The client's name for it.
    pub token: u64,
    /// Blocks of which it holds something.
    pub blocks: BlockRanges,
}

/// What a reader does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReaderDoes {
    /// It begins.
    Begins {
        /// The host of its client.
        host: String,
        /// The newest version whose bytes the client has.
        staged: Version,
    },
    /// It runs this version now.
    Applies(Version),
    /// It ends.
    Ends,
}

/// The state of a job that a client needs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobState {
    /// Rises with every state that the coordinator sends this client, so that an older one that comes late is
    /// recognised.
    pub sequence: u64,
    /// The newest version.
    pub version: Version,
    /// Plans up to this one are over.
    pub over: PlanId,
    /// The last number that the client has acknowledged by `AckThrough`. None if it has not done so over this
    /// connection.
    pub acked_through: Option<u64>,
    /// The settings.
    pub controls: Controls,
    /// The phase of the job.
    pub phase: JobPhase,
    /// The client's own learners.
    pub learners: Vec<LearnerState>,
    /// Learners in the job, everybody's.
    pub members: u32,
    /// The number of active learners whose contribution to the coming version is in.
    pub committed: u32,
    /// Contributions that are part of a version.
    pub contributions: u64,
    /// Learners, everybody's, that others have been waiting for longer than is usual: the names of some of them.
    pub late: Vec<String>,
    /// How many more of them there are. Without any name they are those that have not joined.
    pub late_more: u32,
    /// Shards that the coordinator has not reached for longer than is usual.
    pub away: Vec<ShardId>,
    /// The norm of the gradient behind the newest version, if its step had to know it.
    pub norm: Option<Norm>,
    /// The newest version was made from the client's own new weights, of this token.
    pub own_weights: Option<u64>,
    /// The plan that has made the newest version. 0 if that is not known.
    pub made_by: PlanId,
    /// The number of contributions that the newest version has added. 0 if it is of new weights.
    pub newest_of: u32,
    /// The length of the newest grace window, if there was one.
    pub grace_window: Option<Duration>,
    /// The learning rate of the newest version, if the staleness of its contribution counted.
    pub rate: Option<f32>,
    /// Replicas of the model begin anew with this version.
    pub replicas_since: Version,
    /// What the publisher of the newest version has said of it.
    pub meta: Meta,
    /// The revision of the readers, which `Readers` brings.
    pub readers: u64,
    /// Readers that the next version waits for, by name.
    pub held_by: Vec<String>,
    /// The newest version of which there is a snapshot in the job's store.
    pub durable: Option<Version>,
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
    /// Whether that step waits for its version.
    pub unpublished: bool,
    /// The version that its last published step is part of.
    pub published_in: Version,
    /// Versions that it takes part in begin after this one.
    pub joined_at: Version,
    /// Whether a process uses the learner, as the client has last said by `Touch`.
    pub attached: Attached,
}

/// The kind of data that is granted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Granted {
    /// The sum of these learners' committed steps, added in this order.
    Contributions {
        /// The learners and their steps.
        of: Vec<(LearnerId, Step)>,
        /// The contributions are not added up: of each block, the last contribution that holds it counts.
        replaces: bool,
        /// The plan is provisional: contributions to it are still being written, and those of these learners are
        /// among them. A block is sent once each of these has committed, or has written it as a whole. The grant is
        /// repeated without this when all contributions are committed, and then covers all blocks.
        open: Option<Vec<LearnerId>>,
    },
    /// The new weights of this token.
    Weights(u64),
    /// The new weights of this token, which are still being written: the plan is provisional. A block is sent once it
    /// is whole. The grant is repeated as `Weights` when all are written.
    OpenWeights(u64),
}

impl Granted {
    /// Whether the plan is not sealed yet.
    pub fn is_provisional(&self) -> bool {
        matches!(self, Granted::Contributions { open: Some(_), .. } | Granted::OpenWeights(_))
    }
}

/// Work for a shard: the blocks to gather and the computation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The number of the plan.
    pub plan: PlanId,
    /// The version that the plan starts from. If the plan before it makes that version, the shard concludes
    /// that plan first.
    pub base: Version,
    /// The work on the blocks.
    pub work: Work,
    /// The blocks that each client sends. If the order of addition is to be kept, the list is in that order.
    pub sources: Vec<PlanSource>,
    /// Blocks are added in the order of `sources`, and not as they come.
    pub ordered: bool,
    /// The number of versions of which shards know what has changed in them.
    pub changes: u32,
    /// The parts that the shards have, if the plan publishes such. They are over the blocks of its only source, which
    /// sends nothing.
    pub parts: Option<SetOfParts>,
}

/// The work on a plan's blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Work {
    /// Payloads are added up, together with the sums of earlier plans of this version.
    Add {
        /// Whether payloads are added up, or the last one replaces the others.
        combine: Combine,
    },
    /// The next version is made of the sum of the payloads, together with the sums of earlier plans of this version.
    Reduce {
        /// Reducer, hyper-parameters and counts.
        step: reducer::Step,
        /// The optimizer step of each tensor. Tensors of step 0 stay as they are.
        tensors: TensorSteps,
        /// What groups of tensors have in place of the step's reducer and hyper-parameters.
        groups: Groups,
        /// The factors on the steps of single tensors.
        factors: TensorFactors,
        /// Optimizer state starts from zero.
        fresh_state: bool,
    },
    /// The next version is the newest one with the payloads in place of its own blocks. The sums of earlier plans
    /// stay for the version after it, and so does optimizer state.
    Assign {
        /// The name of the client's buffer with the new values.
        token: u64,
    },
    /// Payloads are added up as with `Add`. Then the shard measures what it holds of the coming version.
    Measure {
        /// The step of that version, which needs the result.
        step: reducer::Step,
        /// As in `Reduce`: tensors of step 0 do not count.
        tensors: TensorSteps,
        /// As in `Reduce`.
        groups: Groups,
        /// What is measured.
        quantity: Quantity,
    },
}

impl Work {
    /// How payloads become one; `None` where nothing is added up.
    pub fn combine(&self) -> Option<Combine> {
        match self {
            Work::Add { combine } => Some(*combine),
            Work::Reduce { step, .. } | Work::Measure { step, .. } => Some(step.reducer.combine()),
            Work::Assign { .. } => None,
        }
    }

    /// Whether it makes the next version. If not, it changes a sum.
    pub fn makes_version(&self) -> bool {
        matches!(self, Work::Reduce { .. } | Work::Assign { .. })
    }
}

/// One client's part of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanSource {
    /// The client.
    pub client: ClientId,
    /// The blocks that it sends.
    pub blocks: BlockRanges,
    /// Whether NaN and Inf in them are refused. Sums of several learners are not checked here: their parts
    /// were checked one by one.
    pub check: bool,
    /// The written parts of those blocks that it sends in part. It is used only for replacing values. Blocks
    /// that others send are not meant.
    pub partly: PartlyWritten,
    /// Whether it may send any block: `blocks` are all. Then the plan is provisional, and is ready only after
    /// its start is repeated with the blocks that the client does send.
    pub provisional: bool,
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The refusal that an in-process shard would give.
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
        /// The model.
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
        /// The block.
        block: BlockId,
    },
    /// The version is no longer, or not yet, here.
    #[error("version {wanted} is not here; version {newest} is the newest")]
    NoVersion {
        /// Asked for.
        wanted: Version,
        /// The newest version there.
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
        /// The part of the frame.
        what: String,
        /// The values that the protocol allows.
        expected: String,
        /// The received value.
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
        /// The shard.
        shard: ShardId,
        /// Its address.
        address: String,
    },
    /// The shard cannot serve the connection by RDMA; by TCP it may.
    #[error("{0}")]
    NoRdma(String),
    /// A plan that cannot begin, or end, here: it is over, or its turn has not come.
    #[error("plan {plan} is past, or not the next one: the newest here is {newest}")]
    Plan {
        /// The plan.
        plan: PlanId,
        /// The newest one here.
        newest: PlanId,
    },
    /// Another move of the model is under way.
    #[error("the model is being moved off shard {off}: when that is over, run the command again")]
    Moving {
        /// Off this shard.
        off: ShardId,
    },
}
