//! The job's decisions: who is in the job, what a version is made of, when it is complete. Pure: events and `now` go in,
//! [`Action`]s come out; no socket, no clock, no bytes.
//!
//! # How a version is made
//! Every learner has at most one open contribution, whose payload waits at its client. When the contributions of a version
//! are committed, a plan adds them up and computes the version ([`Action::Reduce`]).
//!
//! A plan may begin *early*, while its last contribution is still written: blocks are then added as soon as
//! they are whole. The plan may begin only when no other learner can undo the result. Where a version waits
//! for several (`sync`, `quorum`), all other learners must have committed; where every contribution makes one
//! (`async`, `ssp`), the learner must be alone. Such a plan is provisional: the commit seals it
//! ([`Action::Seal`]); a learner that dies or aborts drops it ([`Action::Drop`]), and the version is computed
//! again without that contribution. Commits of a learner stay, whatever becomes of it.
//!
//! Memory does not grow with the learners: payloads wait at the clients, and one fp32 accumulator takes those
//! that must leave them before the version is made (iRDMA §IV-C).
//!
//! # What a deadline means
//! A commit that was not taken by its deadline can be sent again or aborted. Once it is taken it counts,
//! even if its version is still being computed at the deadline and the answer is a timeout; the same
//! commit sent again then learns the outcome and changes nothing.

mod actions;
mod bits;
mod commit;
mod consistency;
mod deadlines;
mod early;
mod hold;
mod membership;
mod record;
mod setback;
mod settings;
mod state;
mod step;
#[cfg(test)]
mod tests;
mod view;
mod waits;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::controls::{Consistency, Controls};
use libmodelio::vocabulary::ids::{Incarnation, LearnerId, Step, Version};
pub use libmodelio::vocabulary::members::{MemberView, WaitedFor};
use libmodelio::vocabulary::reducer::{Hyper, Reducer};
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use serde::{Deserialize, Serialize};

pub use actions::{Action, Contribution, Now, Opening, Plan, Ticket, Work};
pub use commit::NOT_COMMITTED;
pub use record::{JobRecord, LearnerRecord};
use state::{Committed, Member, Pending, PendingKind, Phase, Place, Stall, Tensors, Wait};

/// Writes of new weights that can wait at once.
pub const MAX_ASSIGNS: usize = 64;

/// Learners a job can have at once.
pub const MAX_LEARNERS: usize = libmodelio::vocabulary::controls::MAX_LEARNERS as usize;

/// The decisions of one job.
#[derive(Debug, Serialize, Deserialize)]
#[serde(bound(serialize = "S: Serialize", deserialize = "S: Deserialize<'de>"))]
pub struct JobCore<S> {
    blocks: usize,
    tensors: usize,
    controls: Controls,
    /// Follows `controls` when no block of the coming version depends on it.
    consistency: Consistency,
    version: Version,
    members: BTreeMap<LearnerId, Member>,
    /// Last incarnation of each name that is in the job, or among `left`.
    lives: BTreeMap<String, Incarnation>,
    /// Names that have left, the newest last.
    left: VecDeque<String>,
    /// The highest incarnation of a name that is known no more.
    forgotten: Incarnation,
    next_learner: u32,
    /// Whether as many learners as expected have been here.
    formed: bool,
    committed: Vec<Committed<S>>,
    pending: VecDeque<Pending<S>>,
    /// The learner whose contribution is still written to the provisional plan under way.
    #[serde(skip)]
    early: Option<LearnerId>,
    #[serde(skip)]
    running: Option<Arc<Plan<S>>>,
    /// How long a contribution whose memory is needed back waits for the others of its step.
    accumulate_patience: Now,
    /// Plans begin while their last contribution is still written.
    provisional: bool,
    /// Whether early plans wait for a whole block.
    #[serde(skip)]
    of_whole_blocks: bool,
    /// The plan that had begun early for this step could not take it: it is read when it is committed.
    failed_early: Option<(LearnerId, Step)>,
    /// The write of `weights` that the running plan publishes.
    running_ticket: Option<(Ticket, Now)>,
    /// Reducer and constants of the coming version, and its frozen tensors; fixed once part of it was
    /// computed.
    params: Option<(Reducer, Hyper, Tensors)>,
    /// Tensors that are never reduced, as the settings have them.
    frozen: Tensors,
    /// The reducer whose optimizer state there is.
    state_of: Reducer,
    /// `learners` was raised, or all have left, in mid-step: count again after it.
    reform: bool,
    /// The next version has a buffer.
    buffer_ready: bool,
    /// Whether no new work begins once earlier work is done.
    #[serde(skip)]
    holds: bool,
    /// Somebody waits for other learners.
    stall: Option<Stall>,
    wait: Option<Wait>,
    /// Optimizer steps of each tensor since its state was zero.
    optimizer_steps: TensorSteps,
    contributions_taken: u64,
}

impl<S: Clone> JobCore<S> {
    /// A job at version 0 without learners, for a model of `blocks` blocks and `tensors` tensors. The next version's
    /// buffer is taken to be ready.
    pub fn new(blocks: u32, tensors: usize, controls: Controls) -> JobCore<S> {
        let blocks = blocks as usize;
        JobCore {
            blocks,
            tensors,
            consistency: controls.consistency,
            state_of: controls.reducer,
            params: None,
            frozen: Tensors(FixedBitSet::with_capacity(tensors)),
            controls,
            version: Version(0),
            members: BTreeMap::new(),
            lives: BTreeMap::new(),
            left: VecDeque::new(),
            forgotten: Incarnation(0),
            next_learner: 1,
            formed: false,
            committed: Vec::new(),
            pending: VecDeque::new(),
            early: None,
            running: None,
            accumulate_patience: Now::ZERO,
            provisional: false,
            of_whole_blocks: false,
            failed_early: None,
            running_ticket: None,
            reform: false,
            buffer_ready: true,
            holds: false,
            stall: None,
            wait: None,
            optimizer_steps: TensorSteps::uniform(tensors, 0),
            contributions_taken: 0,
        }
    }

    /// Waits up to `patience` for the rest of a step before it accumulates a contribution whose memory is
    /// needed back: contributions that are summed in one pass need no accumulation. The time that
    /// accumulating takes is a good choice: waiting in vain then at most doubles the cost.
    #[must_use]
    pub fn with_accumulate_patience(mut self, patience: Now) -> JobCore<S> {
        self.accumulate_patience = patience;
        self
    }

    /// Begins a plan when the last learner that it waits for begins to write.
    #[must_use]
    pub fn with_provisional_plans(mut self) -> JobCore<S> {
        self.provisional = true;
        self
    }

    /// Such a plan begins only when its learner has written a whole block: [`Self::is_whole`].
    #[must_use]
    pub fn of_whole_blocks(mut self) -> JobCore<S> {
        self.of_whole_blocks = true;
        self
    }
}
