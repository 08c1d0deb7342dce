//! What the core asks of whoever runs it.

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

/// One learner's committed contribution. `S` is where its payload lies.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Contribution<S> {
    /// Whose.
    pub learner: LearnerId,
    /// Blocks it holds; the others count as zero.
    #[serde(deserialize_with = "bits::deserialize")]
    pub sent: FixedBitSet,
    /// Tensors of which it holds something.
    #[serde(deserialize_with = "bits::deserialize")]
    pub tensors: FixedBitSet,
    /// What of its blocks was written, where that is not all. `None` if that is in too many pieces to be of values.
    pub partly: Option<PartlyWritten>,
    /// Where its payload lies.
    pub source: S,
    /// Its payload is in this process, and stays as it is until its version is made: it is safe as soon as it is taken.
    pub steady: bool,
    /// `source` is memory of a program's, which has it back when the commit is answered: it is answered with an error
    /// only when nothing that has read it can count any more.
    pub lent: bool,
}

/// What to compute for the next version.
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
        /// Where they lie.
        buffer: S,
    },
}

/// What the edge has to do.
#[derive(Clone, Debug)]
pub enum Action<S> {
    /// Add all of these into the accumulator, then call [`JobCore::accumulated`], or [`JobCore::accumulate_failed`] if
    /// nothing was added.
    Accumulate {
        /// What to add, by learner; at least one.
        contributions: Vec<Arc<Contribution<S>>>,
        /// Or the last one replaces what is there.
        combine: Combine,
    },
    /// Compute a version, then call [`JobCore::reduced`]; not before it is sealed, if the plan is provisional.
    Reduce(Arc<Plan<S>>),
    /// The provisional plan under way is this one: its last contribution is committed.
    Seal(Arc<Plan<S>>),
    /// The provisional plan under way is void: what it has computed never counts.
    Drop,
    /// Answer a request: it is done, for good.
    Reply(Ticket, Result<(), ShardError>),
    /// A version is complete.
    Published(Version),
    /// A learner is no longer in the job.
    Left {
        /// Who.
        learner: LearnerId,
        /// Why.
        reason: LeaveReason,
    },
}

/// Answer to the first write of a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// Which step of the learner it is.
    pub step: Step,
    /// The learner's last contribution is still to be read from its staging region: this one must be
    /// staged elsewhere.
    pub staging_lent: bool,
}
