//! The wait for a version that holds a learner's own step.

use std::sync::Arc;

use libmodelio::transport::ShardError;
use libmodelio::vocabulary::ids::{LearnerId, Version};

use super::error::Done;
use super::explained::explained;
use super::model::Model;

impl Model {
    /// Waits for a version that holds the last step of `learner`, at most [`Self::timeout`]. `done` gets that version,
    /// or a newer one.
    pub fn await_step(self: &Arc<Self>, learner: LearnerId, done: Done<Version>) {
        let model = Arc::clone(self);
        let answer = move |result: Result<Version, ShardError>| {
            done(result.map_err(|error| explained(&model, error)));
        };
        self.job.await_step(learner, self.timeout(), Box::new(answer));
    }
}
