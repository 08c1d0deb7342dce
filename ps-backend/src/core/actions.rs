//! The core's actions: requests to its edge.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::block_ranges::BlockRanges;
use libmodelio::vocabulary::groups::Contents;
use libmodelio::vocabulary::ids::{ClientId, LearnerId, PlanId, Step, Version};
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::meta::Meta;
use libmodelio::vocabulary::partly::PartlyWritten;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::weight::Weight;
use libmodelio::wire::SetOfParts;
pub use libmodelio::wire::Work;
use serde::{Deserialize, Serialize};

use super::bits;

/// Time since the job started. The core has no clock of its own.
pub type Now = Duration;

/// Names a request whose answer comes later.
pub type Ticket = u64;

/// The payload of a contribution, or of new weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The client that holds it.
    pub client: ClientId,
    /// The client's name for it: the learner's step, or the token of new weights.
    pub name: u64,
    /// The blocks of new weights.
    pub weights: BlockRanges,
    /// The provisional plan for which blocks of new weights were sent.
    pub ahead: Option<PlanId>,
    /// What the publisher of new weights says of them.
    pub meta: Meta,
    /// The parts that new weights consist of, if shards have them already. Then nobody sends any.
    pub parts: Option<SetOfParts>,
}

impl Source {
    /// What `client` holds of a learner's step.
    pub fn of_contribution(client: ClientId, step: Step) -> Source {
        let (weights, meta) = (BlockRanges::new(), Meta::default());
        Source { client, name: step.0, weights, ahead: None, meta, parts: None }
    }
}

/// One learner's committed contribution.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Contribution {
    /// The learner.
    pub learner: LearnerId,
    /// The blocks that it holds. Others count as zero.
    #[serde(deserialize_with = "bits::deserialize")]
    pub sent: FixedBitSet,
    /// The tensors of which it holds something.
    #[serde(deserialize_with = "bits::deserialize")]
    pub tensors: FixedBitSet,
    /// The written ranges of partly written blocks. `None` if there are too many pieces for values.
    pub partly: Option<PartlyWritten>,
    /// Its contents.
    pub contents: Contents,
    /// How much it counts beside others. Its payload is multiplied by that.
    pub weight: Weight,
    /// The version that its learner had last opened when it was committed. `None` if it has opened none since it
    /// joined.
    pub base: Option<Version>,
    /// The place of its payload.
    pub source: Source,
    /// The payload is in this process, and stays unchanged until its version is made. So it is safe as soon as it is
    /// taken.
    pub steady: bool,
    /// `source` is memory of a program, which has it back when the commit is answered. An error is the answer only
    /// when no work can count any more that has read the memory.
    pub lent: bool,
}

/// The computation of a sum, or of the next version.
#[derive(Clone, Debug)]
pub struct JobPlan {
    /// The work of shards. The `t` of a step is the highest of its tensors'.
    pub work: Work,
    /// The contributions that are not in the accumulator, by learner. The last one may replace the earlier ones.
    pub inputs: Vec<Arc<Contribution>>,
    /// The place of new weights, if the plan publishes some.
    pub weights: Option<Source>,
    /// The plan is provisional: these learners have not committed their contributions, which `inputs` does not have.
    /// [`Action::Seal`] or [`Action::Drop`] follows.
    pub provisional: Option<BTreeSet<LearnerId>>,
}

impl JobPlan {
    /// Publishes new weights.
    pub fn of_weights(weights: Source, provisional: Option<BTreeSet<LearnerId>>) -> JobPlan {
        JobPlan {
            work: Work::Assign { token: weights.name },
            inputs: Vec::new(),
            weights: Some(weights),
            provisional,
        }
    }

    /// Whether contributions to it are still written.
    pub fn is_provisional(&self) -> bool {
        self.provisional.is_some() && self.weights.is_none()
    }
}

/// Work for the edge.
#[derive(Clone, Debug)]
pub enum Action {
    /// Carry out a plan. If it makes a version, call `JobCore::reduced`; if it is provisional, that must wait until it
    /// is sealed. Otherwise call `JobCore::accumulated`, or `JobCore::accumulate_failed` if nothing was added.
    Begin(Arc<JobPlan>),
    /// Seal the provisional plan under way with this one. All its contributions are committed.
    Seal(Arc<JobPlan>),
    /// Drop the provisional plan under way. Its results never count.
    Drop,
    /// Answer a request for good.
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

/// The answer to the first write of a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The step of the learner.
    pub step: Step,
    /// The learner's last contribution will still be read from its staging region, so this one must be staged
    /// elsewhere.
    pub staging_lent: bool,
}
