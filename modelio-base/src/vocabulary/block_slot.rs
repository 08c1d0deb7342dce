//! A block of a contribution, and what a shard did with it.

use super::ids::{BlockId, Incarnation, LearnerId, Step};

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
