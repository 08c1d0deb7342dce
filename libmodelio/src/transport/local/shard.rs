//! The interface of a partition for a client in its own process: blocks are reduced where they lie, and
//! versions are shown where they were made.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::Mailbox;
use crate::transport::{Region, ShardError};
use crate::vocabulary::ids::{BlockId, ClientId, LearnerId, PlanId, Version};
use crate::wire::JobState;

/// One contribution to a block, or its new values, where they lie.
#[derive(Clone, Copy, Debug)]
pub struct SharedPayload<'a> {
    /// The whole block.
    pub bytes: &'a [u8],
    /// With `assign`, the written ranges of it, if not all was written; relative to the block.
    pub written: Option<&'a [Range<u32>]>,
    /// Whether the shard has to look for NaN and Inf in it.
    pub check: bool,
}

/// All that a client has of one block for one plan.
#[derive(Clone, Copy, Debug)]
pub struct SharedBlock<'a> {
    /// The client.
    pub client: ClientId,
    /// For which plan.
    pub plan: PlanId,
    /// The block of the model.
    pub block: BlockId,
    /// In the order in which they are added.
    pub payloads: &'a [SharedPayload<'a>],
    /// Only the caller has the payload: if it holds NaN or Inf, the caller hears of it, and the plan goes on without
    /// this block, which may come again.
    pub is_own: bool,
}

/// What the shard did with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// The block is part of the plan.
    Taken,
    /// The payload of this index holds NaN or Inf, which is refused. The block was not taken.
    NonFinite(usize),
    /// The partition cannot take it yet, and tells the client when it may ([`super::Mail::Retry`]).
    Later,
    /// The plan is over, or has the block.
    Unwanted,
}

/// A version whose memory stays unchanged until this is dropped.
#[derive(Clone)]
pub struct HeldVersion {
    /// Its bytes.
    pub region: Region,
    /// When it was published.
    pub published: SystemTime,
    /// Keeps the memory.
    pub hold: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for HeldVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldVersion").field("region", &self.region).finish_non_exhaustive()
    }
}

/// A shard in this process that holds all blocks of a model, and coordinates it.
pub trait Shard: Send + Sync {
    /// The mailbox for the client's messages.
    fn mailbox(&self) -> &Mailbox;

    /// Adds a block to the plan under way, in this thread. `stands` says, once the payload was read, whether it was
    /// lent until then; if not, the plan is not made. No lock may be held.
    fn push(&self, block: SharedBlock<'_>, stands: &dyn Fn() -> bool) -> Pushed;

    /// A version.
    ///
    /// # Errors
    /// The newest one, if this one is gone.
    fn version(&self, version: Version) -> Result<HeldVersion, Version>;

    /// Runs work on many blocks beside the caller.
    fn execute(&self, work: Box<dyn FnOnce() + Send>);

    /// How many threads that has.
    fn threads(&self) -> usize;

    /// Somebody is about to contribute: the memory of the versions after the next one is taken, beside the caller.
    fn warm_up(&self);

    /// Sets the most version buffers that there may be from now on.
    fn set_buffers(&self, most: usize);

    /// Looks whether the next version has a buffer, now that one may have been given back, and tells the coordinator if
    /// that has changed. Returns whether it has one. No lock may be held.
    fn find_buffer(&self) -> bool;

    /// Version buffers in existence, and those that nobody needs.
    fn buffers(&self) -> (usize, usize);

    /// A buffer for new weights. It counts as existing until it is published or dropped.
    ///
    /// # Errors
    /// When too many are in use, or there is no memory.
    fn take_buffer(&self) -> Result<Region, ShardError>;

    /// The state of the job at this moment.
    fn state(&self) -> JobState;

    /// The time for which a learner has been silent.
    fn silence(&self, learner: LearnerId) -> Duration;
}
