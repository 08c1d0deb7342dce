//! Whether the job has had all the learners that it waits for.

use serde::{Deserialize, Serialize};

use super::Now;

/// A job is formed once the expected number of learners has been reached. It stays so until all have left.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Formation {
    is_formed: bool,
    /// All learners have left in the middle of a step. Learners are counted again after it.
    counts_anew: bool,
    /// The job was restored: those that have come back until then are enough.
    comes_back_by: Option<Now>,
    /// If too few had come back, those that have come back later are enough from then on.
    goes_on_at: Option<Now>,
}

impl Formation {
    pub(super) fn is_formed(&self) -> bool {
        self.is_formed
    }

    /// The job was restored. Learners that are lost are waited for until `soon` if enough others have come back, else until
    /// `at`.
    pub(super) fn goes_on_at(&mut self, soon: Now, at: Now) {
        (self.comes_back_by, self.goes_on_at) = (Some(soon), Some(at));
    }

    /// Whether those that have come back since the job was restored are enough. Only true once.
    pub(super) fn goes_on(&mut self, now: Now, has_enough: bool) -> bool {
        let is_soon = self.comes_back_by.take_if(|at| *at <= now).is_some();
        let goes_on = has_enough && (is_soon || self.goes_on_at.is_some_and(|at| at <= now));
        if goes_on {
            (self.comes_back_by, self.goes_on_at) = (None, None);
        }
        goes_on && !self.is_formed
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
