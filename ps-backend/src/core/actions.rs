//! The core's requests to its edge.

use std::sync::Arc;
use std::time::Duration;

use fixedbitset::FixedBitSet;
use libmodelio::transport::{LeaveReason, ShardError};
use libmodelio::vocabulary::ids::{LearnerId, Step, Version};
use libmodelio::vocabulary::partly::PartlyWritten;
use libmodelio::vocabulary::reducer::{self, Combine};
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use serde::{Deserialize, Serialize};

use super::bits;

/// Time since the job started. The core has no clock of its own.
pub type Now = Duration;

/// Names a request whose answer comes later.
pub type Ticket = u64;

/// One learner's committed contribution. `S` is the place of its payload.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Contribution<S> {
    /// The learner.
    pub learner: LearnerId,
    /// Blocks it holds; the others count as zero.
    #[serde(deserialize_with = "bits::deserialize")]
    pub sent: FixedBitSet,
    /// Tensors of which it holds something.
    #[serde(deserialize_with = "bits::deserialize")]
    pub tensors: FixedBitSet,
    /// The written parts of blocks that were written in part. `None` if there are too many pieces for values.
    pub partly: Option<PartlyWritten>,
    /// The place of its payload.
    pub source: S,
    /// Its payload is in this process, and stays as it is until its version is made: it is safe as soon as it is taken.
    pub steady: bool,
    /// `source` is memory of a program's, which has it back when the commit is answered: it is answered with an error
    /// only when nothing that has read it can count any more.
    pub lent: bool,
}

/// The computation of the next version.
#[derive(Clone, Debug)]
pub struct Plan<S> {
    /// How.
    pub work: Work<S>,
    /// The plan is provisional: this learner is still writing its contribution to it, which `inputs` lacks. Either
    /// [`Action::Seal`] follows, or [`Action::Drop`].
    pub provisional: Option<LearnerId>,
}

/// The kinds of plan.
#[derive(Clone, Debug)]
pub enum Work<S> {
    /// Reduce contributions.
    Reduce {
        /// Reducer, hyper-parameters and counts, fixed for all blocks of the version. Its `t` is the highest of
        /// `tensors`.
        step: reducer::Step,
        /// The optimizer step of each tensor; 0 for those that stay as they are.
        tensors: TensorSteps,
        /// Optimizer state starts from zero.
        fresh_state: bool,
        /// Contributions that are not in the accumulator, by learner.
        inputs: Vec<Arc<Contribution<S>>>,
    },
    /// Publish new values that were written to `weights`.
    Assign {
        /// The place of the new weights.
        buffer: S,
    },
}

/// Work for the edge.
#[derive(Clone, Debug)]
pub enum Action<S> {
    /// Add all of these into the accumulator, then call [`JobCore::accumulated`], or [`JobCore::accumulate_failed`] if
    /// nothing was added.
    Accumulate {
        /// The contributions to add, by learner; at least one.
        contributions: Vec<Arc<Contribution<S>>>,
        /// Or the last one replaces what is there.
        combine: Combine,
    },
    /// Compute a version, then call [`JobCore::reduced`]; not before it is sealed, if the plan is provisional.
    Reduce(Arc<Plan<S>>),
    /// The provisional plan under way is this one: its last contribution is committed.
    Seal(Arc<Plan<S>>),
    /// The provisional plan under way is void: its results never count.
    Drop,
    /// Answer a request: it is done, for good.
    Reply(Ticket, Result<(), ShardError>),
    /// A version is complete.
    Published(Version),
    /// A learner is no longer in the job.
    Left {
        /// The learner.
        learner: LearnerId,
        /// Why.
        reason: LeaveReason,
    },
}

/// Answer to the first write of a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The step of the learner.
    pub step: Step,
    /// The learner's last contribution is still to be read from its staging region: this one must be
    /// staged elsewhere.
    pub staging_lent: bool,
}
