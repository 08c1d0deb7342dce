//! The job's decisions: who is in the job, what a version is made of, when it is complete. Pure: events and `now` go in,
//! [`Action`]s come out; no socket, no clock, no bytes.
//!
//! # How a version is made
//! Every learner has at most one open contribution, whose payload waits at its client. When the contributions of a version
//! are committed, a plan adds them up and computes the version ([`Action::Reduce`]).
//!
//! A plan may begin *early*, while its last contribution is still written: then blocks are added as they are whole. That
//! may happen only when nothing but that learner can still undo the result: where a version waits for several (`sync`,
//! `quorum`) when all other learners have committed, where every contribution makes one (`async`, `ssp`) when the learner
//! is alone. Such a plan is provisional: the commit seals it ([`Action::Seal`]); a learner that dies or aborts drops it
//! ([`Action::Drop`]), and the version is computed again without that contribution. What a learner has committed stays,
//! whatever becomes of it.
//!
//! Memory does not grow with the learners: payloads wait at the clients, and one fp32 accumulator takes what must leave
//! them before the version is made (iRDMA §IV-C).
//!
//! # What a deadline means
//! A commit that was not taken by its deadline can be sent again or aborted. Once it is taken it counts,
//! even if its version is still being computed at the deadline and the answer is a timeout; the same
//! commit sent again then learns the outcome and changes nothing.

mod bits;
mod commit;
mod consistency;
mod early;
mod hold;
mod membership;
mod setback;
mod step;
#[cfg(test)]
mod tests;
mod view;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use fixedbitset::FixedBitSet;
use libmodelio::transport::{LeaveReason, ShardError};
use libmodelio::vocabulary::ids::{BlockId, Incarnation, LearnerId, Step, Version};
pub use libmodelio::vocabulary::members::{MemberView, WaitedFor};
use libmodelio::vocabulary::partly::{MAX_PIECES, PartlyWritten};
use serde::{Deserialize, Serialize};

use libmodelio::vocabulary::controls::{Consistency, ControlError, Controls};
use libmodelio::vocabulary::reducer::{self, Combine, Hyper, Reducer};
use libmodelio::vocabulary::tensor_steps::TensorSteps;

pub use commit::NOT_COMMITTED;

/// Time since the shard started. The core has no clock of its own.
pub type Now = Duration;

/// Names a request whose answer comes later.
pub type Ticket = u64;

/// Writes of new weights that can wait at once.
pub const MAX_ASSIGNS: usize = 64;

/// Learners a job can have at once.
pub const MAX_LEARNERS: usize = libmodelio::vocabulary::controls::MAX_LEARNERS as usize;

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
    /// `source` is memory of a program's, which has it back when the commit is answered: it is answered with an error
    /// only when nothing that has read it can count any more.
    pub lent: bool,
}

impl<S> Contribution<S> {
    /// What of `block`, which it holds, was written, if that is not all.
    pub fn written(&self, block: BlockId) -> Option<&[Range<u32>]> {
        self.partly.as_ref().and_then(|partly| partly.of(block))
    }
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

#[derive(Debug, Serialize, Deserialize)]
enum Phase {
    Idle,
    Open {
        step: Step,
        /// A block of it is whole.
        has_block: bool,
    },
}

#[derive(Debug, Serialize, Deserialize)]
struct Member {
    name: String,
    incarnation: Incarnation,
    /// It takes part in versions after this one.
    joined_at: Version,
    last_seen: Now,
    /// Some process that is known to live uses it.
    attached: bool,
    /// When its last process had exited. None if it has one, or nothing is known of any.
    exited: Option<Now>,
    /// Last committed step.
    step: Step,
    /// That step waits for its version.
    unpublished: bool,
    /// The version that its last published step is part of.
    published_in: Version,
    /// Steps committed, from where the slowest learner was when it joined.
    pace: u64,
    phase: Phase,
}

impl Member {
    /// A request of its own has come.
    fn is_used(&mut self, now: Now) {
        self.last_seen = now;
        self.exited = None;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Place {
    /// The payload stays where it is until the version is made.
    Lent,
    /// Waits for its turn to be accumulated.
    ToAccumulate,
    /// Being accumulated; the commit's ticket waits, if there is one.
    Accumulating,
    /// In the accumulator.
    Accumulated,
}

#[derive(Debug, Serialize, Deserialize)]
struct Committed<S> {
    contribution: Arc<Contribution<S>>,
    place: Place,
    lendable: bool,
    /// To answer when the payload is safe, at the latest at the time beside it.
    ticket: Option<(Ticket, Now)>,
    /// When it is accumulated unless its version is made before.
    accumulate_at: Now,
    /// What its learner's phase was: until the payload has left its program's memory and was found to be
    /// good, the commit can be taken back.
    undo: Option<Phase>,
}

impl<S> Committed<S> {
    /// Whether its payload is being read where it is not the shard's own.
    fn is_read(&self) -> bool {
        self.place == Place::Accumulating || self.place == Place::Lent && !self.lendable
    }

    /// Whether it is being read in memory that is lent.
    fn is_read_on_loan(&self) -> bool {
        self.contribution.lent && self.is_read()
    }
}

/// Some of the model's tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Tensors(#[serde(deserialize_with = "bits::deserialize")] FixedBitSet);

/// A commit that cannot be taken yet.
#[derive(Debug, Serialize, Deserialize)]
struct Pending<S> {
    ticket: Ticket,
    deadline: Now,
    kind: PendingKind<S>,
}

#[derive(Debug, Serialize, Deserialize)]
enum PendingKind<S> {
    Commit { contribution: Contribution<S>, lendable: bool },
    Assign { buffer: S },
}

/// A time in which somebody has been waiting for other learners, without a pause as long as a lease: those whose
/// requests time out come again.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Stall {
    since: Now,
    /// When somebody was last seen to wait.
    until: Now,
    /// How far the slowest learner was, where others wait for it.
    slowest: u64,
}

/// A wait for other learners that is not over, but for a moment in which those whose requests have timed out come again.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Wait {
    since: Now,
    /// Since when nobody waits, if so.
    paused: Option<Now>,
    /// The version before the one that is waited for; where learners wait for slower ones, how far those are; the highest
    /// number before as many have joined as are expected.
    at: u64,
}

/// The shard, without its memory and its sockets.
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
    /// As many learners as expected have been here.
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
    /// Of a whole block.
    #[serde(skip)]
    of_whole_blocks: bool,
    /// The plan that had begun early for this step could not take it: it is read when it is committed.
    failed_early: Option<(LearnerId, Step)>,
    /// The write of `weights` that the running plan publishes.
    running_ticket: Option<(Ticket, Now)>,
    /// Reducer and constants of the coming version, and what is frozen in it, fixed once something of it was computed.
    params: Option<(Reducer, Hyper, Tensors)>,
    /// Tensors that are never reduced, as the settings have them.
    frozen: Tensors,
    /// Whose optimizer state there is.
    state_of: Reducer,
    /// `learners` was raised, or all have left, in mid-step: count again after it.
    reform: bool,
    /// The next version has a buffer.
    buffer_ready: bool,
    /// Nothing is begun any more once nothing that was begun is left.
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

    /// Waits up to `patience` for the rest of a step before a contribution whose memory is needed back is
    /// accumulated: what is summed in one pass with the others need not be accumulated at all. As long as accumulating
    /// takes is a good choice: then waiting in vain at most doubles the cost.
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

    /// Never reduces these tensors, from the next version of which nothing has been computed.
    ///
    /// # Panics
    /// If it is not a set of the model's tensors.
    pub fn freeze(&mut self, tensors: FixedBitSet) {
        assert_eq!(tensors.len(), self.tensors, "tensors of the model");
        self.frozen = Tensors(tensors);
    }

    /// New settings take effect at the next version.
    pub fn set_controls(&mut self, controls: Controls, now: Now, actions: &mut Vec<Action<S>>) {
        let recount = controls.learners != self.controls.learners;
        self.controls = controls;
        if recount {
            let enough = self.members.len() >= self.controls.learners as usize;
            self.formed |= enough;
            self.reform = self.formed && !enough;
        }
        self.stop_if_too_few(actions);
        self.advance(now, actions);
    }

    /// Whether these settings can be had now.
    ///
    /// # Errors
    /// Why not: contributions that were taken as gradients are written in too many pieces to be values.
    pub fn may_set(&self, controls: &Controls) -> Result<(), ControlError> {
        let replaces = |controls: &Controls| controls.reducer.combine() == Combine::Last;
        let assigns = replaces(controls) && !replaces(&self.controls);
        if !assigns || self.pieces(None).is_some_and(|pieces| pieces <= MAX_PIECES) {
            return Ok(());
        }
        let why = "contributions of the coming version are written in too many pieces to be values: set it once that version is out";
        Err(ControlError::Conflict(why.into()))
    }

    /// In how many pieces partly written blocks of contributions to the coming version are, and of those that wait to be
    /// taken, but for the one of `sender`. None if of one of them that is not known.
    fn pieces(&self, sender: Option<LearnerId>) -> Option<usize> {
        let waiting = self.pending.iter().filter_map(|pending| match &pending.kind {
            PendingKind::Commit { contribution, .. } => {
                Some(contribution).filter(|of| sender != Some(of.learner))
            }
            PendingKind::Assign { .. } => None,
        });
        let committed = self.committed.iter().map(|committed| &*committed.contribution);
        committed.chain(waiting).map(|of| of.partly.as_ref().map(PartlyWritten::pieces)).sum()
    }

    /// Contributions to the coming version that are added up already.
    pub(crate) fn accumulated_contributions(&self) -> impl Iterator<Item = &Arc<Contribution<S>>> {
        let accumulated = self.committed.iter().filter(|committed| committed.place == Place::Accumulated);
        accumulated.map(|committed| &committed.contribution)
    }

    /// Lets new settings and new learners in where nothing that has begun depends on the old ones.
    fn settle(&mut self) {
        if self.running.is_some() || self.early.is_some() {
            return;
        }
        self.follow_consistency();
        if self.params.is_none() && self.state_of != self.controls.reducer {
            self.state_of = self.controls.reducer;
            self.optimizer_steps = TensorSteps::uniform(self.tensors, 0);
        }
        if !self.committed.is_empty() {
            return;
        }
        if std::mem::take(&mut self.reform) {
            self.formed = self.members.len() >= self.controls.learners as usize;
        }
        let version = self.version;
        let is_open = |member: &Member| matches!(member.phase, Phase::Open { .. });
        // No step has begun, so those who came in one that was dropped need not wait for the next.
        if !self.members.values().any(|member| self.takes_part(member) && is_open(member)) {
            for member in self.members.values_mut() {
                member.joined_at = member.joined_at.min(version);
            }
        }
    }

    /// The plan for the coming version from what is committed, and, if it is provisional, what a learner still writes, which
    /// may hold any tensor.
    fn reduce_plan(&self, provisional: Option<LearnerId>) -> Plan<S> {
        let lent = self.committed.iter().filter(|committed| committed.place == Place::Lent);
        let mut inputs: Vec<_> = lent.map(|committed| Arc::clone(&committed.contribution)).collect();
        inputs.sort_by_key(|contribution| contribution.learner);
        let (reducer, hyper, frozen) = self.params();
        let mut written = FixedBitSet::with_capacity(self.tensors);
        if provisional.is_some() {
            written.insert_range(..);
        }
        self.committed.iter().for_each(|committed| written.union_with(&committed.contribution.tensors));
        written.difference_with(&frozen.0);
        let tensors = self.optimizer_steps.next(&written);
        let contributions = self.committed.len() as u32 + u32::from(provisional.is_some());
        let step = reducer::Step { reducer, hyper, contributions, t: tensors.highest() };
        let fresh_state = self.optimizer_steps.highest() == 0;
        Plan { work: Work::Reduce { step, tensors, fresh_state, inputs }, provisional }
    }

    /// What the coming version is computed with.
    fn params(&self) -> (Reducer, Hyper, Tensors) {
        let set = || (self.controls.reducer, self.controls.hyper.clone(), self.frozen.clone());
        self.params.clone().unwrap_or_else(set)
    }
}
