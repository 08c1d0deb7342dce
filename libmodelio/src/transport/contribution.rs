//! A learner's contribution, for any transport: its memory, its blocks and its commit; and a shard's refusals.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::sync::Arc;

use fixedbitset::FixedBitSet;
use serde::{Deserialize, Serialize};

use crate::bytes::available;
use crate::bytes::mmap::Mapping;
use crate::vocabulary::groups::Contents;
use crate::vocabulary::ids::{BlockId, Incarnation, LearnerId, ShardId, Step};
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::partly::PartlyWritten;
use crate::vocabulary::weight::Weight;

/// The transport that bytes go by. It is named at start, in `status.json` and in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportKind {
    /// Shard and mount share one address space.
    InProcess,
    /// Streams over a network.
    Tcp,
    /// Memory that processes of one host share.
    SharedMemory,
    /// Memory that the devices of both ends reach.
    Rdma,
}

/// The reason when a program without RDMA support does not use RDMA.
pub const NO_RDMA: &str = "this gradfs was built without RDMA (cargo build --release --features rdma)";

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TransportKind::InProcess => "in-process",
            TransportKind::Tcp => "tcp",
            TransportKind::SharedMemory => "shm",
            TransportKind::Rdma => "rdma",
        })
    }
}

/// Names a region to the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionKey(pub u64);

/// Memory registered with a transport, addressable from the other side.
#[derive(Clone, Debug)]
pub struct Region {
    memory: Arc<Mapping>,
    key: RegionKey,
}

impl Region {
    /// `memory` under a key that no other region of this process has.
    pub fn new(memory: Arc<Mapping>, key: RegionKey) -> Region {
        Region { memory, key }
    }

    /// The memory itself.
    pub fn memory(&self) -> &Arc<Mapping> {
        &self.memory
    }

    /// Its name on the wire.
    pub fn key(&self) -> RegionKey {
        self.key
    }

    /// Promises its pages to a caller who is about to touch some of them for a contribution.
    ///
    /// # Errors
    /// [`ShardError::OutOfMemory`] with the reason.
    pub fn promise(&self) -> Result<(), ShardError> {
        available::promise_before_spares(&self.memory)
            .map_err(|error| ShardError::OutOfMemory(format!("no memory for what a learner writes: {error}")))
    }
}

/// Names one block of one contribution: the exactly-once key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSlot {
    /// The learner.
    pub learner: LearnerId,
    /// The learner's incarnation.
    pub incarnation: Incarnation,
    /// The step of the learner.
    pub step: Step,
    /// The block.
    pub block: BlockId,
}

/// What the shard did with an offered block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Reduced on arrival; the payload may be forgotten.
    Reduced,
    /// The shard reads it from the learner's staging region at commit (RPCH §3.3, dynamic
    /// placement): the caller keeps it there.
    Deferred,
    /// Taken before: a resend changes nothing.
    Duplicate,
}

/// The content of a contribution at its end.
#[derive(Clone, Debug)]
pub struct CommitNotice {
    /// The blocks that were sent. Others count as zero.
    pub sent: FixedBitSet,
    /// The sent blocks that are read from `staging`.
    pub deferred: FixedBitSet,
    /// The deferred blocks that were never offered whole. They have not been searched for NaN and Inf.
    pub unchecked: FixedBitSet,
    /// The tensors of which something was written, by number. Others stay as they are, unless another learner has
    /// written them.
    pub tensors: FixedBitSet,
    /// The written ranges of partly written blocks; the rest is zero. `None` if there are more than
    /// [`MAX_PIECES`](crate::vocabulary::partly::MAX_PIECES) pieces. Then the contribution cannot be one of values.
    pub partly: Option<PartlyWritten>,
    /// Its contents.
    pub contents: Contents,
    /// How much it counts beside others: its payload is multiplied by that.
    pub weight: Weight,
    /// The learner's staging region.
    pub staging: Region,
    /// Whether the staging memory stays untouched until the learner opens its next contribution. Then the shard may
    /// read it later. False if a program has it mapped.
    pub lendable: bool,
}

impl CommitNotice {
    /// A contribution of the whole model, in `staging`.
    pub fn whole(layout: &ModelLayout, staging: Region, lendable: bool) -> CommitNotice {
        let all = |len: usize| {
            let mut all = FixedBitSet::with_capacity(len);
            all.insert_range(..);
            all
        };
        let blocks = all(layout.blocks() as usize);
        CommitNotice {
            sent: blocks.clone(),
            deferred: blocks.clone(),
            unchecked: blocks,
            tensors: all(layout.tensors().len()),
            partly: Some(PartlyWritten::default()),
            contents: Contents::default(),
            weight: Weight::ONE,
            staging,
            lendable,
        }
    }

    /// Checks that the shard can use it without harm.
    ///
    /// # Errors
    /// [`ShardError::OutOfRange`] when it names blocks or tensors that `layout` does not have, when a set exceeds the
    /// set that should contain it, or when the staging region is shorter than the model.
    pub fn check(&self, layout: &ModelLayout) -> Result<(), ShardError> {
        let blocks = layout.blocks() as usize;
        let fits = [&self.sent, &self.deferred, &self.unchecked].iter().all(|set| set.len() == blocks)
            && self.deferred.is_subset(&self.sent)
            && self.unchecked.is_subset(&self.deferred)
            && self.tensors.len() == layout.tensors().len()
            && self.partly.as_ref().is_none_or(|partly| partly.check(layout.blocks()).is_ok())
            && self.staging.memory().len() as u64 >= layout.size();
        if fits { Ok(()) } else { Err(ShardError::OutOfRange) }
    }
}

/// A shard's refusal of a request. A refused request changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum ShardError {
    /// The learner is not in the job, or has another incarnation.
    #[error("learner {0} is no longer in the job: join again (mkdir learners/<id>)")]
    UnknownLearner(LearnerId),
    /// The name belongs to a live learner.
    #[error("learner {0:?} is already in the job")]
    NameTaken(String),
    /// A learner table is full.
    #[error("the job already has {0} learners, its limit (control/max_learners)")]
    TooManyLearners(usize),
    /// A step that is neither the learner's next nor an earlier one.
    #[error("step {got} is out of order: step {expected} is next")]
    StepOutOfOrder {
        /// The received value.
        got: Step,
        /// The next step.
        expected: Step,
    },
    /// A block the model does not have, or a payload of another length than the block.
    #[error("block {block} with {bytes} bytes does not fit the model's layout")]
    BadBlock {
        /// The block.
        block: BlockId,
        /// The payload.
        bytes: usize,
    },
    /// Offset and length leave the model.
    #[error("the range leaves the model")]
    OutOfRange,
    /// NaN or Inf under `nonfinite=reject`.
    #[error("block {0} holds NaN or Inf (control/nonfinite is \"reject\"); the contribution is dropped")]
    NonFinite(BlockId),
    /// The job has fewer active learners than `min_learners`.
    #[error("the job is stopped: {active} active learners, control/min_learners is {needed}")]
    Stopped {
        /// Active now.
        active: u32,
        /// Needed.
        needed: u32,
    },
    /// The deadline passed.
    #[error("no answer before the deadline: {0}")]
    TimedOut(Cow<'static, str>),
    /// The commit was withdrawn: before it was taken, or nobody answered whether it was.
    #[error("interrupted before the contribution was known to be taken")]
    Interrupted,
    /// No peer answers, or the shard is shutting down.
    #[error("the shard is not reachable")]
    Unreachable,
    /// There is no memory for the request.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// The request is not allowed in this state.
    #[error("{0}")]
    NotAllowed(String),
    /// A shard has lost its blocks, or contradicts the others. The job cannot go on.
    #[error("the job has failed: {0}")]
    Lost(String),
    /// No file descriptor is left for the request.
    #[error(
        "out of open files: {0}; start gradfs with a higher limit (ulimit -Hn), or have fewer learners and versions"
    )]
    OutOfFiles(String),
    /// The values are written in too many pieces.
    #[error(
        "written in too many pieces: with reducer assign, a version takes {0} pieces of partly written blocks at most, of all learners"
    )]
    Scattered(usize),
}

impl ShardError {
    /// Adds the shards that are out of reach to the reason of a timeout.
    #[must_use]
    pub fn with_away(self, away: &[ShardId]) -> ShardError {
        match self {
            ShardError::TimedOut(why) if !away.is_empty() => {
                let shards: Vec<String> = away.iter().map(|shard| format!("shard {shard}")).collect();
                ShardError::TimedOut(format!("{why}; out of reach: {}", shards.join(", ")).into())
            }
            error => error,
        }
    }
}

impl ShardError {
    /// The error for missing memory. Each piece of memory takes a file descriptor, and those may be used up instead.
    pub fn no_memory(error: &io::Error) -> ShardError {
        match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => ShardError::OutOfFiles(error.to_string()),
            _ => ShardError::OutOfMemory(error.to_string()),
        }
    }
}
