//! The core's state of learners and of their contributions.

use std::sync::Arc;

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::groups::{AveragedMark, Groups};
use libmodelio::vocabulary::ids::{Incarnation, Step, Version};
use libmodelio::vocabulary::reducer::Reducer;
use serde::{Deserialize, Serialize};

use super::{Contribution, Now, Source, Ticket, bits};

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Phase {
    Idle,
    Open {
        step: Step,
        /// Whether one of its blocks is whole.
        has_block: bool,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Member {
    pub(super) name: String,
    pub(super) incarnation: Incarnation,
    /// It takes part in versions after this one.
    pub(super) joined_at: Version,
    /// The newest version when it joined.
    pub(super) joined_with: Version,
    pub(super) last_seen: Now,
    /// How it gets on with its contributions. Another coordinator has it begin anew.
    #[serde(skip)]
    pub(super) activity: Activity,
    /// Whether a living process is known to use it.
    pub(super) attached: bool,
    /// When its last process exited. None if a process uses it, or none is known.
    pub(super) exited: Option<Now>,
    /// The last committed step.
    pub(super) step: Step,
    /// Whether that step waits for its version.
    pub(super) unpublished: bool,
    /// The version that its last published step is part of.
    pub(super) published_in: Version,
    /// The number of committed steps, counted from the slowest learner's pace when it joined.
    pub(super) pace: u64,
    pub(super) phase: Phase,
}

/// What a learner does that others wait for. Opening and closing files is nothing of that, nor is what it takes back.
#[derive(Debug, Default)]
pub(super) struct Activity {
    /// Its last progress.
    pub(super) at: Now,
    /// It has taken back a contribution to the step that comes: what it writes next is no progress before it counts.
    took_back: bool,
}

impl Activity {
    pub(super) fn since(at: Now) -> Activity {
        Activity { at, took_back: false }
    }

    /// A contribution is part of a version, or the learner has waited for others.
    pub(super) fn counts(&mut self, now: Now) {
        *self = Activity::since(now);
    }

    /// Bytes of a contribution came, or its commit.
    pub(super) fn writes(&mut self, now: Now) {
        if !self.took_back {
            self.at = now;
        }
    }

    /// The program says that it works, whatever it has taken back.
    pub(super) fn works(&mut self, now: Now) {
        self.at = now;
    }

    /// A contribution was taken back, or refused.
    pub(super) fn takes_back(&mut self) {
        self.took_back = true;
    }
}

impl Member {
    /// The learner has made a request.
    pub(super) fn is_used(&mut self, now: Now) {
        self.last_seen = now;
        self.exited = None;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum PayloadPlace {
    /// The payload stays where it is until the version is made.
    Staged,
    /// The payload waits to be accumulated.
    ToAccumulate,
    /// The payload is being accumulated. The commit's ticket may wait for that.
    Accumulating,
    /// The payload is in the accumulator.
    Accumulated,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Committed {
    pub(super) contribution: Arc<Contribution>,
    pub(super) place: PayloadPlace,
    /// The request to answer when the payload is safe, and its deadline.
    pub(super) ticket: Option<(Ticket, Now)>,
    /// When it is accumulated, unless its version is made before.
    pub(super) accumulate_at: Now,
    /// It waits no longer than this for others that write to the same plan.
    pub(super) patient_until: Now,
    /// The learner's phase before the commit. The commit can be taken back until the payload has left its program's
    /// memory and was found to be finite.
    pub(super) undo: Option<Phase>,
}

impl Committed {
    /// Whether its payload is being read from memory that is not the shard's own.
    pub(super) fn is_read(&self) -> bool {
        self.place == PayloadPlace::Accumulating
            || self.place == PayloadPlace::Staged && !self.contribution.steady
    }

    /// Whether its payload is being read from lent memory.
    pub(super) fn is_read_on_loan(&self) -> bool {
        self.contribution.lent && self.is_read()
    }
}

/// A set of the model's tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Tensors(#[serde(deserialize_with = "bits::deserialize")] pub(super) FixedBitSet);

/// What the settings say of single tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct OfTensors {
    /// The tensors that are never reduced.
    pub(super) frozen: Tensors,
    pub(super) groups: Groups,
}

impl OfTensors {
    /// The mark of the tensors whose values are averaged in a model with this reducer.
    pub(super) fn averaged(&self, reducer: Reducer) -> AveragedMark {
        let averaged = self.groups.averaged(reducer).flatten();
        AveragedMark::of(averaged.filter(|tensor| !self.frozen.0.contains(*tensor)))
    }

    /// Whether they can be of a model with so many tensors and this reducer.
    pub(super) fn is_sound(&self, tensors: usize, reducer: Reducer) -> bool {
        self.frozen.0.len() == tensors && self.groups.check(tensors as u64, reducer).is_ok()
    }
}

/// A commit that cannot be taken yet.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Pending {
    pub(super) ticket: Ticket,
    pub(super) deadline: Now,
    pub(super) kind: PendingKind,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum PendingKind {
    Commit { contribution: Contribution },
    Assign { buffer: Source },
}

/// A time in which learners wait for others. Short pauses do not end it, because requests that time out come again.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Stall {
    pub(super) since: Now,
    /// When a learner was last seen to wait.
    pub(super) until: Now,
    /// The pace of the slowest learner, if others wait for it.
    pub(super) slowest: u64,
}

/// A wait for other learners. A short pause does not end it, because requests that time out come again.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Wait {
    pub(super) since: Now,
    /// Since when no learner has waited, if that is so.
    pub(super) paused: Option<Now>,
    /// The version before the awaited one; or the pace of the slower learners, if others wait for those; or the
    /// highest number of learners so far, before all have joined.
    pub(super) at: u64,
}
