//! Whole new weights, which become a version at once.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use libmodelio::{Publisher, ShardError, wait_for};
use nix::errno::Errno;
use parking_lot::Mutex;

use crate::handles::{Handle, Open, open};
use crate::model::{Model, model};
use crate::outcome::{Failure, Outcome, done, store};

/// New weights that are being written.
pub(crate) struct Publication {
    model: Arc<Model>,
    publisher: Mutex<Option<Arc<Publisher>>>,
}

impl Open for Publication {}

impl Publication {
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> Outcome<()> {
        self.publisher()?.write(offset, data).map_err(|error| self.model.explained(error))
    }

    fn publisher(&self) -> Outcome<Arc<Publisher>> {
        let ended = || Failure::invalid("the publication has ended: begin another one");
        self.publisher.lock().clone().ok_or_else(ended)
    }

    pub(crate) fn commit(&self, timeout: Duration) -> Outcome<()> {
        let publisher = self.publisher()?;
        if let Some(refused) = publisher.failed() {
            return Err(self.model.explained(refused));
        }
        if !publisher.is_open() {
            return Err(Failure::invalid("nothing was written, so there is nothing to publish"));
        }
        publisher.check_finite().map_err(|error| self.model.explained(error))?;
        self.abort();
        let shown = wait_for(timeout, |done| publisher.commit(timeout, done));
        if matches!(shown, Err(ShardError::TimedOut(_))) {
            publisher.withdraw();
        }
        shown.map_err(|error| self.model.explained(error))
    }

    pub(crate) fn abort(&self) {
        self.publisher.lock().take();
    }
}

/// Begins new weights, to be written by `modelio_write` and published by `modelio_commit`.
///
/// -EACCES where the job takes none: with another reducer than `assign`, after version 0.
///
/// # Safety
/// `publication` points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_publish(handle: Handle, publication: *mut Handle) -> c_int {
    let begun = model(handle).and_then(|model| {
        model.job.may_assign()?;
        let publisher = Publisher::new(Arc::clone(&model.job));
        let publisher = publisher.map_err(|error| Failure::new(Errno::ENOMEM, error.to_string()))?;
        open(Publication { model, publisher: Mutex::new(Some(Arc::new(publisher))) })
    });
    // SAFETY: the caller's promise.
    done(begun.map(|handle| unsafe { store(publication, handle) }))
}
