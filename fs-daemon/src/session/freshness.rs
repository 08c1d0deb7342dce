//! The wait for a version that an open must show.

use std::sync::Arc;

use libmodelio::client::{LastCommit, wait_for};
use libmodelio::reader::Reader;
use libmodelio::transport::ShardError;
use libmodelio::vocabulary::ids::{LearnerId, Version};

use super::error::{CallError, CallResult, Done};
use super::explained::explained;
use super::model::Model;

impl Model {
    /// Waits for a version that an open as `learner`, or as none, must show, at most [`Self::timeout`]. `done` gets that
    /// version, or a newer one.
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
    /// ETIMEDOUT, ENOENT while no version is here.
    pub fn open_newest(self: &Arc<Self>) -> CallResult<Reader> {
        if self.is_behind() {
            wait_for(self.timeout(), |done| self.job.await_fresh(None, self.timeout(), done))
                .map_err(|error| explained(self, error))?;
        }
        let none = || CallError::new(libc::ENOENT, "no version is here yet: try again");
        Reader::newest(&self.job).ok_or_else(none)
    }
}
