//! The wire protocol: frames, messages, and nothing that touches a socket.
//!
//! A connection carries frames. A frame is a [`Header`] of fixed size, a body (a [`Message`]) and perhaps a payload
//! (bytes of blocks, records). The header says how long both are, so that a receiver that has seen header and body
//! can have the payload delivered straight to where it belongs. Every length has a limit that is checked before
//! anything is allocated. CRC32C covers all bytes, except those of a payload whose sender leaves it out ([`Checksum`]).
//! `docs/internals/protocol.md` has the tables.
//!
//! [`Receiver`] takes bytes as they come and says what to read next; [`frame`] and [`append_frame`] make the other
//! direction.

mod bounded;
mod checksum;
mod codec;
mod error;
mod header;
mod lineage;
mod message;
mod moved;
mod receiver;
mod record;
mod registry;

use std::time::Duration;

pub use checksum::Checksum;
pub use codec::{append_frame, frame};
pub use error::WireError;
pub use header::{HEADER, Header, Payload};
pub use lineage::Lineage;
pub use message::{
    Brings, Granted, JobState, LearnerRecord, LearnerState, MAX_PARTS_OF_SET, MAX_TOLD_LEARNERS, Message,
    PartOf, Plan, PlanPart, PlanSource, ReaderDoes, ReduceOp, Refusal, Role, SetOfParts, Work,
};
pub use moved::{DataKind, Moved};
pub use receiver::{Received, Receiver};
pub use record::{MAX_MODEL_NAME, RecordError, check_model_name};
pub use registry::{
    Fate, HeldPartition, Losses, LostModel, MAX_HELD, MAX_METADATA, ModelRecord, RefusedShard,
    RegistryAnswer, RegistryRequest, ShardRecord,
};

/// The most bytes of a model that is small: a contribution goes with its commit, and a version with the state that
/// announces it.
pub const MAX_SMALL_MODEL: u32 = 256 << 10;

/// The most numbers that a learner gives in one [`Message::AllReduce`].
pub const MAX_ALL_REDUCE: usize = 64;

/// Longest body, in bytes.
pub const MAX_BODY: u32 = 1 << 20;
/// Longest body of a hello, a welcome or a refusal, in bytes.
pub const MAX_GREETING: u32 = 4 << 10;
/// Longest payload, in bytes: four of the largest blocks, or the map of five million blocks.
pub const MAX_PAYLOAD: u32 = 16 << 20;
/// The most pieces that one [`Message::ReadParts`] names, each of which may be strided.
pub const MAX_PARTS: usize = 4096;
/// The most bytes of its pieces together: they are one payload.
pub const MAX_PARTS_BYTES: u32 = 1 << 20;
/// A connection whose hello is not complete by then ends.
pub const HELLO_DEADLINE: Duration = Duration::from_secs(5);

/// Numbers of requests that a client may skip: those that it gave up while it was not connected, and all of them where
/// the coordinator has forgotten it. A number that is further ahead is refused.
pub const MAX_SKIPPED: u64 = 1 << 32;

/// The highest number of a plan, a version or a state of a job that a coordinator is believed: nobody gets so far in
/// years.
pub const MAX_NUMBER: u64 = 1 << 48;

/// How long what a peer sends may be, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest body.
    pub body: u32,
    /// The longest payload.
    pub payload: u32,
}

impl Limits {
    /// The limits until the peers have greeted each other.
    pub const GREETING: Limits = Limits { body: MAX_GREETING, payload: 0 };
    /// Afterwards.
    pub const MAX: Limits = Limits { body: MAX_BODY, payload: MAX_PAYLOAD };
}

/// Versions of the protocol. All share the header, the place and `protocol` of `Hello` and `Welcome`, and
/// `Refused` with `Refusal::Protocol`. A variant says what it changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u16)]
pub enum Protocol {
    /// The second one. New in it: `Commit` names tensors, and `Work::Reduce` gives the optimizer step of each tensor.
    /// `Touch` tells of learners whose last process has exited, and a learner can leave for that reason; a `State`
    /// names learners that are late and shards that are away. `Commit` says whether its memory is lent, and a shard
    /// says `Torn` of a plan that has read memory for too long. `Commit` and the sources of a plan name the written
    /// bytes of blocks that were written in part. The greeting of a coordinator says which of its plans are over, and a
    /// shard refuses plans by their numbers. `OutOfFiles` is among the errors of a shard.
    ///
    /// This program does not speak it any more.
    V2 = 2,
    /// Settings, phases of jobs, reducers and their steps are values instead of text. A plan may be provisional: it is
    /// granted for one contribution that is still being written, `Commit` seals it and names the plan under which its
    /// blocks were sent. `WholeBlock` says that there is a block to begin such a plan with. `PullWhole` asks a shard on
    /// the same host for a whole version, which `VersionAt` names where it lies.
    ///
    /// This program does not speak it any more.
    V3 = 3,
    /// Settings say when versions are pulled, and whether an open waits for the learner's own step.
    ///
    /// This program does not speak it any more.
    V4 = 4,
    /// Several contributions may be open in a provisional plan. `Commit` names the plan that its client has given up.
    ///
    /// This program does not speak it any more.
    V5 = 5,
    /// A shard sends blocks before their version counts. `State` names the plan that has made the newest version.
    ///
    /// This program does not speak it any more.
    V6 = 6,
    /// A flag in the header says that the payload has no checksum.
    ///
    /// This program does not speak it any more.
    V7 = 7,
    /// Clients take turns where the order of addition counts and blocks are sent before the commits.
    ///
    /// This program does not speak it any more.
    V8 = 8,
    /// A contribution says what its learner has written: gradients, a model, or a replica, how much it counts, and
    /// which version the learner had opened. There is the consistency `grace`. Settings have rules for tensors, and the
    /// work of a plan has groups of tensors. `Push` says in which form its payload is, and `Grant` which plan of the
    /// client's was the last to count.
    ///
    /// This program does not speak it any more.
    V9 = 9,
    /// Shards measure tensors, and a plan has factors for them. A contribution says of which tensors it has values.
    /// There are the reducers `lars` and `lamb`.
    ///
    /// This program does not speak it any more.
    V10 = 10,
    /// Settings have `max_learners`, `patience` and `shard_patience`, and a learner may leave because `patience` is
    /// over. A shard says how many blocks it lacks of each client.
    ///
    /// This program does not speak it any more.
    V11 = 11,
    /// Clients take no turns before the commits.
    ///
    /// This program does not speak it any more.
    V12 = 12,
    /// Learners reduce numbers among themselves.
    ///
    /// This program does not speak it any more.
    V13 = 13,
    /// Publishers say something of their versions.
    ///
    /// This program does not speak it any more.
    V14 = 14,
    /// Shards send what has changed in a block since a version that the client has.
    ///
    /// This program does not speak it any more.
    V15 = 15,
    /// Shards say what has changed from one version to another. Jobs have readers, which say what they run.
    ///
    /// This program does not speak it any more.
    V16 = 16,
    /// Clients pull versions from each other, as the coordinator says, and read pieces of versions. New weights go to the
    /// shards as what they change.
    V17 = 17,
}

impl Protocol {
    /// The version that this program speaks.
    pub const NEWEST: Protocol = Protocol::V17;

    /// The number in a greeting.
    pub fn number(self) -> u16 {
        self as u16
    }

    /// The version of this number.
    ///
    /// # Errors
    /// [`WireError::Protocol`] for one that this program does not speak.
    pub fn from_number(number: u16) -> Result<Protocol, WireError> {
        match number {
            17 => Ok(Protocol::V17),
            got => Err(WireError::Protocol { expected: Protocol::NEWEST.number(), got }),
        }
    }
}

/// After how long without having sent anything a peer sends `Ping`, on a connection whose welcome said `silence_ms`.
pub fn ping_after(silence_ms: u32) -> Duration {
    Duration::from_millis(silence_ms.into()) / 3
}

#[cfg(test)]
mod strategies;
#[cfg(test)]
mod tests;
