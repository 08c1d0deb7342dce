//! Why a shard refuses a request.

use std::borrow::Cow;
use std::io;

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::ids::{BlockId, LearnerId, ShardId, Step, Version};

/// The beginning of a timeout's message. The names of the awaited learners follow.
pub const NOT_COMMITTED: &str = "not committed: ";
/// A reason of [`ShardError::TimedOut`]: readers hold all buffers.
pub const ALL_BUFFERS_HELD: &str =
    "every version buffer is held open (close old handles or raise control/max_versions)";

/// The text of a [`ShardError::RolledBack`].
pub const ROLLED_BACK: &str = "a shard has lost its blocks, and the model goes on from its newest snapshot; read weights anew, and go on from there";

/// The reason of a [`ShardError::TimedOut`] where readers hold the job up.
pub const HELD_BY_READERS: &str = "readers have not applied the newest versions (control/hold_for_readers)";

/// How the reason of a [`ShardError::TimedOut`] begins that names the parts which have not come.
pub const SET_LACKS: &str = "set ";

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
    /// The name belongs to a reader.
    #[error("the job has a reader {0:?} already")]
    ReaderTaken(String),
    /// The job, or one client of it, has as many readers as it may.
    #[error("there are {0} readers already, the most that {1} may have")]
    TooManyReaders(usize, String),
    /// There is no such version yet, so no reader can run it.
    #[error("version {got} cannot be applied: the newest is {newest}")]
    NoVersionYet {
        /// The version.
        got: Version,
        /// The newest one.
        newest: Version,
    },
    /// The reader is not in the job.
    #[error("the job has no reader {0:?}")]
    NoReader(String),
    /// Somebody else publishes parts, or has sent this one.
    #[error("{0}")]
    Busy(String),
    /// No part of a set has this byte of the model, and all is demanded.
    #[error("no part of the set has byte {0} of the model, and \"all\" is demanded; nothing has changed")]
    Uncovered(u64),
    /// A part of a set is no more on its shards.
    #[error(
        "part {0} is not on its shards any more: its mount has ended, or they were moved; nothing has changed, so publish all parts again"
    )]
    PartGone(u32),
    /// Blocks were lost, and the job goes on from a snapshot, without this learner.
    #[error("the job was restored: {0}")]
    RolledBack(String),
}

impl ShardError {
    /// What a program sees that calls by files, or by the C library.
    pub fn errno(&self) -> Errno {
        match self {
            ShardError::UnknownLearner(_) | ShardError::RolledBack(_) => Errno::ENOTCONN,
            ShardError::NameTaken(_) | ShardError::ReaderTaken(_) => Errno::EEXIST,
            ShardError::TooManyLearners(_) | ShardError::TooManyReaders(..) => Errno::EDQUOT,
            ShardError::NoReader(_) => Errno::ENOENT,
            ShardError::StepOutOfOrder { .. }
            | ShardError::BadBlock { .. }
            | ShardError::OutOfRange
            | ShardError::Scattered(_)
            | ShardError::NoVersionYet { .. }
            | ShardError::Uncovered(_)
            | ShardError::NonFinite(_) => Errno::EINVAL,
            ShardError::Busy(_) => Errno::EBUSY,
            ShardError::Stopped { .. } => Errno::ECANCELED,
            ShardError::TimedOut(_) => Errno::ETIMEDOUT,
            ShardError::Interrupted => Errno::EINTR,
            ShardError::Unreachable | ShardError::Lost(_) | ShardError::PartGone(_) => Errno::EIO,
            ShardError::OutOfMemory(_) => Errno::ENOMEM,
            ShardError::OutOfFiles(_) => Errno::ENFILE,
            ShardError::NotAllowed(_) => Errno::EACCES,
        }
    }

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

    /// The error for missing memory. Each piece of memory takes a file descriptor, and those may be used up instead.
    pub fn no_memory(error: &io::Error) -> ShardError {
        match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => ShardError::OutOfFiles(error.to_string()),
            _ => ShardError::OutOfMemory(error.to_string()),
        }
    }
}
