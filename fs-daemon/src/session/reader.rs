//! Reading versions: a version is held open, so that its bytes do not change, and a later version can be
//! waited for.

use std::ops::Range;
use std::sync::Arc;

use libmodelio::client::VersionView;
use libmodelio::transport::stream::{Guard, Piece};
use libmodelio::transport::{Region, ShardError};
use libmodelio::vocabulary::ids::{LearnerId, Version};

use super::error::Done;
use super::explained::explained;
use super::model::Model;

/// A pinned version. The pin is given back when the reader is dropped.
pub struct Reader {
    model: Arc<Model>,
    version: Version,
    view: VersionView,
}

impl Reader {
    /// Opens `version`; `None` when it is gone.
    pub fn open(model: &Arc<Model>, version: Version) -> Option<Reader> {
        if !model.job.pin(version) {
            return None;
        }
        let Some(view) = model.job.get(version) else {
            model.job.unpin(version, 1);
            return None;
        };
        Some(Reader { model: Arc::clone(model), version, view })
    }

    /// Opens the newest version.
    pub fn newest(model: &Arc<Model>) -> Option<Reader> {
        Reader::open(model, model.job.version())
    }

    /// A range of its bytes.
    ///
    /// # Panics
    /// When `range` leaves the model.
    pub fn bytes(&self, range: Range<u64>) -> &[u8] {
        self.view.bytes(range)
    }

    /// A range of its bytes, to be sent from where they lie. The version is pinned until they are.
    ///
    /// # Panics
    /// When `range` leaves the model.
    pub fn piece(self: &Arc<Self>, range: Range<u64>) -> Piece {
        self.view.piece(range, Arc::clone(self) as Guard)
    }

    /// The version's number.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The memory that holds them.
    pub fn region(&self) -> &Region {
        &self.view.region
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.model.job.unpin(self.version, 1);
    }
}

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
