//! The decisions of a job: who is in it, what a version is made of, and when it is complete. Pure: events and `now`
//! go in, and [`Action`]s come out. It has no socket, no clock and no bytes.
//!
//! # How a version is made
//! Every learner has at most one open contribution, whose payload waits at its client. When the contributions to a
//! version are committed, a plan adds them up and computes the version ([`Action::Begin`]).
//!
//! A plan may begin before the commits, when a contribution has a whole block: blocks are then added as soon as they
//! are whole. In `sync` it takes the contributions of all learners, as they are written. Elsewhere it may begin only
//! when no other learner can change the result: if a version waits for several learners, all others must have
//! committed; if every contribution makes a version (`async`, `ssp`), no other learner may be writing. Such a plan is
//! provisional. The last commit seals it ([`Action::Seal`]). If a learner dies or aborts before its commit, it is
//! dropped ([`Action::Drop`]), and the version is computed again without that contribution. If the blocks that it has
//! taken are staged, too, it gives way: a commit that would have to wait for it, new weights, another consistency and a
//! hold drop it, and contributions are read when they are committed. So does a commit that has waited for other
//! learners about as long as it took to write it: it is accumulated instead. A learner's commits stay, whatever becomes
//! of the learner.
//!
//! A step that must know the norm of its whole gradient (`clip_norm`) has two plans, and none is provisional. The first
//! one adds up all contributions and measures the sums ([`Work::Measure`]); the second one computes the version from
//! them.
//!
//! Memory does not grow with the learners. Payloads wait at the clients, and one fp32 accumulator takes those whose
//! memory is needed before the version is made (iRDMA §IV-C).
//!
//! # Modules, from low to high
//!
//! A file calls only methods of files above it.
//!
//! | module | holds |
//! |---|---|
//! | `actions`, `state`, `bits` | what comes out, learners and their contributions |
//! | `formation`, `incarnations`, `readers`, `making`, `measured`, `newest`, `recipe`, `provisional` | parts of the state, with their own decisions |
//! | `view` | the state, for reading |
//! | `grace`, `consistency`, `staleness`, `waits`, `record` | rules that depend on more than one part |
//! | `contents`, `pending`, `provisional::speculation` | the contents of plans, refused requests, plans before the commits |
//! | `step` | from commits to versions |
//! | `membership`, `reading`, `commit`, `setback`, `hold`, `settings`, `deadlines` | the events |
//!
//! # What a deadline means
//! A commit that was not taken by its deadline can be repeated or aborted. Once it is taken it counts, even if its
//! version is still being computed at the deadline and the answer is a timeout. Repeating the commit then returns the
//! outcome and changes nothing.

mod actions;
mod bits;
mod commit;
mod consistency;
mod contents;
mod deadlines;
mod formation;
mod grace;
mod hold;
mod incarnations;
mod making;
mod measured;
mod membership;
mod newest;
mod pending;
mod provisional;
mod readers;
mod reading;
mod recipe;
mod record;
mod setback;
mod settings;
mod staleness;
mod state;
mod step;
#[cfg(test)]
mod tests;
mod view;
mod waits;

use std::collections::{BTreeMap, VecDeque};

use libmodelio::vocabulary::controls::{Consistency, Controls};
use libmodelio::vocabulary::ids::{LearnerId, Version};
pub use libmodelio::vocabulary::members::{MemberView, WaitedFor};
use serde::{Deserialize, Serialize};

pub use actions::{Action, Contribution, JobPlan, Now, Opening, Source, Ticket, Work};
use formation::Formation;
use grace::Grace;
use incarnations::Incarnations;
use making::Making;
use measured::Measured;
use newest::Newest;
use provisional::ProvisionalPlans;
use recipe::Recipe;
pub use record::JobRecord;
use state::{Committed, Member, OfTensors, PayloadPlace, Pending, PendingKind, Phase, Tensors};
use waits::Waits;

/// The most writes of new weights that may wait at once.
pub const MAX_ASSIGNS: usize = 64;

/// The most learners in a job.
pub const MAX_LEARNERS: usize = libmodelio::vocabulary::controls::MAX_LEARNERS as usize;

/// The decisions of one job.
#[derive(Debug, Serialize, Deserialize)]
pub struct JobCore {
    controls: Controls,
    /// The consistency in force. It follows `controls` when no block of the coming version depends on it.
    consistency: Consistency,
    version: Version,
    members: BTreeMap<LearnerId, Member>,
    incarnations: Incarnations,
    formation: Formation,
    committed: Vec<Committed>,
    pending: VecDeque<Pending>,
    provisional: ProvisionalPlans,
    making: Making,
    grace: Grace,
    measured: Measured,
    recipe: Recipe,
    waits: Waits,
    newest: Newest,
}

impl JobCore {
    /// A job at version 0 without learners, for a model with `blocks` blocks and `tensors` tensors. The next version
    /// is assumed to have a buffer.
    pub fn new(blocks: u32, tensors: usize, controls: Controls) -> JobCore {
        JobCore {
            consistency: controls.consistency,
            recipe: Recipe::new(blocks as usize, tensors, controls.reducer),
            controls,
            version: Version(0),
            members: BTreeMap::new(),
            incarnations: Incarnations::default(),
            formation: Formation::default(),
            committed: Vec::new(),
            pending: VecDeque::new(),
            provisional: ProvisionalPlans::default(),
            making: Making::new(),
            grace: Grace::default(),
            measured: Measured::default(),
            waits: Waits::default(),
            newest: Newest::default(),
        }
    }

    /// Sets how long a contribution whose memory is needed back waits for the rest of its step. Contributions that
    /// are summed in one pass need no accumulation. The time of an accumulation is a good choice: a wait in vain then
    /// at most doubles the cost.
    #[must_use]
    pub fn with_accumulate_patience(mut self, patience: Now) -> JobCore {
        self.provisional.set_accumulate_patience(patience);
        self
    }

    /// Begins plans when there are whole blocks of contributions that are still written: [`Self::is_whole`].
    #[must_use]
    pub fn with_provisional_plans(mut self) -> JobCore {
        self.provisional.allow();
        self
    }

    /// What comes of a contribution before its commit is staged, too: such a plan gives way to whoever waits for it.
    #[must_use]
    pub fn of_staged_blocks(mut self) -> JobCore {
        self.provisional.stage_all();
        self
    }
}
