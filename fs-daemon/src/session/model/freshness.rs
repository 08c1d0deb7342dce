//! The wait for a version that an open must show.

use std::sync::Arc;
use std::time::Duration;

use libmodelio::client::{LastCommit, wait_for};
use libmodelio::reader::Reader;
use libmodelio::vocabulary::ids::{LearnerId, Version};
use libmodelio::vocabulary::shard_error::ShardError;

use super::Model;
use crate::session::error::{CallError, CallResult, Done};
use crate::session::explained::explained;

/// The longest wait of a small contribution's answer for the version that it is part of. The keeper of the job looks
/// at its deadlines more often than this, so it need not be woken for one.
const SHOWN_SOON: Duration = Duration::from_millis(250);

impl Model {
    /// Wraps the answer to a commit of `learner`. If its version is on its way here already, and small, a success is
    /// told when that is shown. Otherwise the program's next open would have to be sent back for it, which takes
    /// longer.
    pub fn done_with_version(self: &Arc<Self>, learner: LearnerId, done: Done<()>) -> Done<()> {
        let model = Arc::clone(self);
        Box::new(move |outcome| match outcome {
            Ok(()) if model.is_small() && model.job.is_pulled_for(learner) => {
                // The contribution counts, whatever becomes of this wait.
                model.job.await_step(learner, SHOWN_SOON, Box::new(move |_| done(Ok(()))));
            }
            outcome => done(outcome),
        })
    }

    /// Waits for a version that an open as `learner`, or as none, must show, at most [`Self::timeout`]. `done` gets
    /// that version, or a newer one.
    pub fn await_fresh(self: &Arc<Self>, learner: Option<LearnerId>, done: Done<Version>) {
        let model = Arc::clone(self);
        let answer = move |result: Result<Version, ShardError>| {
            done(result.map_err(|error| explained(&model, error)));
        };
        self.job.await_fresh(learner, self.timeout(), Box::new(answer));
    }

    /// Whether a reader that is opened now has to wait.
    pub fn is_behind(&self) -> bool {
        self.job.freshness(None) == LastCommit::Waits
    }

    /// Opens the newest version, for a reader that is no learner. Waits if [it must](Self::is_behind).
    ///
    /// # Errors
    /// ETIMEDOUT, ENOENT while no version is here, ENOMEM if programs hold as many others as they may.
    pub fn open_newest(self: &Arc<Self>) -> CallResult<Reader> {
        if self.is_behind() {
            wait_for(self.timeout(), |done| self.job.await_fresh(None, self.timeout(), done))
                .map_err(|error| explained(self, error))?;
        }
        self.refuse_reader(self.job.version())?;
        let none = || CallError::new(libc::ENOENT, "no version is here yet: try again");
        Reader::newest(&self.job).ok_or_else(none)
    }
}
