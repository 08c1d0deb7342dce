//! The core's state of learners and of their contributions.

use std::sync::Arc;

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::ids::{Incarnation, Step, Version};
use serde::{Deserialize, Serialize};

use super::{Contribution, Now, Ticket, bits};

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Phase {
    Idle,
    Open {
        step: Step,
        /// A block of it is whole.
        has_block: bool,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Member {
    pub(super) name: String,
    pub(super) incarnation: Incarnation,
    /// It takes part in versions after this one.
    pub(super) joined_at: Version,
    pub(super) last_seen: Now,
    /// Some process that is known to live uses it.
    pub(super) attached: bool,
    /// The time when its last process exited. None if a process uses it, or none is known.
    pub(super) exited: Option<Now>,
    /// Last committed step.
    pub(super) step: Step,
    /// Whether that step waits for its version.
    pub(super) unpublished: bool,
    /// The version that its last published step is part of.
    pub(super) published_in: Version,
    /// Steps committed, from where the slowest learner was when it joined.
    pub(super) pace: u64,
    pub(super) phase: Phase,
}

impl Member {
    /// A request of its own has come.
    pub(super) fn is_used(&mut self, now: Now) {
        self.last_seen = now;
        self.exited = None;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Place {
    /// The payload stays where it is until the version is made.
    Kept,
    /// Waits for its turn to be accumulated.
    ToAccumulate,
    /// Being accumulated; the commit's ticket waits, if there is one.
    Accumulating,
    /// In the accumulator.
    Accumulated,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Committed<S> {
    pub(super) contribution: Arc<Contribution<S>>,
    pub(super) place: Place,
    /// To answer when the payload is safe, at the latest at the time beside it.
    pub(super) ticket: Option<(Ticket, Now)>,
    /// When it is accumulated unless its version is made before.
    pub(super) accumulate_at: Now,
    /// The learner's phase before: the commit can be taken back until the payload has left its program's
    /// memory and was found to be good.
    pub(super) undo: Option<Phase>,
}

impl<S> Committed<S> {
    /// Whether its payload is being read from memory that is not the shard's own.
    pub(super) fn is_read(&self) -> bool {
        self.place == Place::Accumulating || self.place == Place::Kept && !self.contribution.steady
    }

    /// Whether its payload is being read from lent memory.
    pub(super) fn is_read_on_loan(&self) -> bool {
        self.contribution.lent && self.is_read()
    }
}

/// Some of the model's tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Tensors(#[serde(deserialize_with = "bits::deserialize")] pub(super) FixedBitSet);

/// A commit that cannot be taken yet.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Pending<S> {
    pub(super) ticket: Ticket,
    pub(super) deadline: Now,
    pub(super) kind: PendingKind<S>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum PendingKind<S> {
    Commit { contribution: Contribution<S> },
    Assign { buffer: S },
}

/// A time in which somebody has been waiting for other learners, without a pause as long as a lease: those whose
/// requests time out come again.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Stall {
    pub(super) since: Now,
    /// When somebody was last seen to wait.
    pub(super) until: Now,
    /// How far the slowest learner was, where others wait for it.
    pub(super) slowest: u64,
}

/// A wait for other learners that is not over, but for a moment in which those whose requests have timed out come again.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Wait {
    pub(super) since: Now,
    /// Since when nobody waits, if so.
    pub(super) paused: Option<Now>,
    /// The version before the one that is waited for; where learners wait for slower ones, how far those are; the highest
    /// number before as many have joined as are expected.
    pub(super) at: u64,
}
