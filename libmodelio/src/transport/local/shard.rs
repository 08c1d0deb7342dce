//! The interface of a shard to a client in its own process. Blocks are reduced where they lie, and versions are shown
//! where they were made.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::Mailbox;
use crate::bytes::changes::Changed;
use crate::bytes::region::{Region, RegionKey};
use crate::vocabulary::ids::{BlockId, ClientId, LearnerId, PlanId, Version};
use crate::vocabulary::shard_error::ShardError;
use crate::wire::JobState;

/// One contribution to a block, or its new values.
#[derive(Clone, Copy, Debug)]
pub struct SharedPayload<'a> {
    /// The bytes of the whole block.
    pub bytes: &'a [u8],
    /// With `assign`, the written ranges, relative to the block, if not all of it was written.
    pub written: Option<&'a [Range<u32>]>,
    /// The shard must check it for NaN and Inf.
    pub check: bool,
}

/// A client's part of one block for one plan.
#[derive(Clone, Copy, Debug)]
pub struct SharedBlock<'a> {
    /// The client.
    pub client: ClientId,
    /// The plan.
    pub plan: PlanId,
    /// The block of the model.
    pub block: BlockId,
    /// The payloads, in the order of addition.
    pub payloads: &'a [SharedPayload<'a>],
    /// The plan is provisional, and the payloads are whole.
    pub ahead: bool,
    /// The payload is new weights, so no learner is to blame. If it holds NaN or Inf, the shard tells the coordinator.
    /// Otherwise the client gets [`Pushed::NonFinite`], and the block may come again.
    pub is_weights: bool,
}

/// What the shard did with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// The block is part of the plan.
    Taken,
    /// The payload of this index holds NaN or Inf, which the job refuses. The block was not taken.
    NonFinite(usize),
    /// The partition cannot take the block yet. It sends [`super::Mail::Retry`] when it can.
    Later,
    /// The plan is over, or has the block already.
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

/// Bytes of memory that a shard has taken from the system, by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardMemory {
    /// Versions: shown, being made, and free.
    pub versions: u64,
    /// Optimizer state and fp32 masters.
    pub state: u64,
    /// Sums of contributions.
    pub sums: u64,
}

/// A shard in this process that holds all blocks of a model, and coordinates it.
pub trait Shard: Send + Sync {
    /// The mailbox for the client's messages.
    fn mailbox(&self) -> &Mailbox;

    /// Adds a block to the plan under way, in this thread. After the payload was read, `stands` tells whether its
    /// loan still stood. If not, the plan is not made. No lock may be held.
    fn push(&self, block: SharedBlock<'_>, stands: &dyn Fn() -> bool) -> Pushed;

    /// A version.
    ///
    /// # Errors
    /// The newest one, if this one is gone. An older one, if this one is still being made: then [`super::Mail::Retry`]
    /// says when to ask again.
    fn version(&self, version: Version) -> Result<HeldVersion, Version>;

    /// What has changed in each block after `base` until `version`. None if that is not known any more.
    fn changed_since(&self, base: Version, version: Version) -> Option<Vec<Changed>>;

    /// Runs work on many blocks on another thread.
    fn execute(&self, work: Box<dyn FnOnce() + Send>);

    /// The number of threads for such work.
    fn threads(&self) -> usize;

    /// Sets the most version buffers that may exist from now on.
    fn set_buffers(&self, most: usize);

    /// Checks whether the next version has a buffer, after one may have been given back. The coordinator is told if
    /// that has changed. Returns whether it has one. No lock may be held.
    fn find_buffer(&self) -> bool;

    /// The memory that it has taken.
    fn memory(&self) -> ShardMemory;

    /// The number of version buffers, and of those that nobody needs.
    fn buffers(&self) -> (usize, usize);

    /// Why there is no memory for the next version, if there is none and readers hold all buffers that exist.
    fn shortage(&self) -> Option<String>;

    /// A buffer for new weights. It counts as existing until it is published or dropped.
    ///
    /// # Errors
    /// When too many are in use, or there is no memory.
    fn take_buffer(&self) -> Result<Region, ShardError>;

    /// These blocks of new weights in such a buffer are whole. Their work for the version may begin, unless they are
    /// [written again](Self::rewrites).
    fn wrote(&self, buffer: RegionKey, blocks: &[BlockId]);

    /// New weights in the buffer are about to be written again, or are given up.
    fn rewrites(&self, buffer: RegionKey);

    /// The state of the job at this moment.
    fn state(&self) -> JobState;

    /// How long a learner has been silent.
    fn silence(&self, learner: LearnerId) -> Duration;
}
