//! Whether the job has had all the learners that it waits for.

use serde::{Deserialize, Serialize};

use super::Now;

/// A job is formed once the expected number of learners has been reached. It stays so until all have left.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Formation {
    is_formed: bool,
    /// All learners have left in the middle of a step. Learners are counted again after it.
    counts_anew: bool,
    /// The job was restored: from then on, those that have come back are enough.
    goes_on_at: Option<Now>,
}

impl Formation {
    pub(super) fn is_formed(&self) -> bool {
        self.is_formed
    }

    /// The job was restored. Learners that are lost are waited for until then.
    pub(super) fn goes_on_at(&mut self, at: Now) {
        self.goes_on_at = Some(at);
    }

    /// Whether those that have come back since the job was restored are enough. Only true once.
    pub(super) fn goes_on(&mut self, now: Now) -> bool {
        self.goes_on_at.take_if(|at| *at <= now).is_some() && !self.is_formed
    }

    /// The learners are there, if `has_enough`. Returns whether the job has just been formed.
    pub(super) fn form(&mut self, has_enough: bool) -> bool {
        let is_new = !self.is_formed && has_enough;
        self.is_formed |= has_enough;
        is_new
    }

    /// The last learner has left. `is_in_mid_step`: what was committed still makes a version.
    pub(super) fn all_have_left(&mut self, is_in_mid_step: bool) {
        (self.is_formed, self.counts_anew) = (is_in_mid_step, is_in_mid_step);
    }

    /// No step is under way. If all had left in one, whether there are enough learners counts again.
    pub(super) fn step_is_over(&mut self, has_enough: bool) {
        if std::mem::take(&mut self.counts_anew) {
            self.is_formed = has_enough;
        }
    }
}
