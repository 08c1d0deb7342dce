//! Whole new weights, which become a version at once.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use libmodelio::vocabulary::meta::Meta;
use libmodelio::{Publisher, ShardError, wait_for};
use nix::errno::Errno;
use parking_lot::Mutex;

use crate::handles::{Handle, Open, open};
use crate::model::{Model, model};
use crate::outcome::{Failure, Outcome, check_place, done, store};

/// How names of attributes begin.
const USER: &str = "user.";

/// New weights that are being written.
pub(crate) struct Publication {
    model: Arc<Model>,
    publisher: Mutex<Option<Arc<Publisher>>>,
    meta: Mutex<Meta>,
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
        let meta = std::mem::take(&mut *self.meta.lock());
        self.abort();
        let shown = wait_for(timeout, |done| publisher.commit(meta, timeout, done));
        if matches!(shown, Err(ShardError::TimedOut(_))) {
            publisher.withdraw();
        }
        shown.map_err(|error| self.model.explained(error))
    }

    /// Says something of the version, under a name of a mount's attribute.
    pub(crate) fn describe(&self, name: &str, text: &str) -> Outcome<()> {
        self.publisher()?;
        let no_name = || Failure::invalid(format!("{name:?} is no name: it begins with {USER:?}"));
        let name = name.strip_prefix(USER).ok_or_else(no_name)?;
        self.meta.lock().add([(name, text)]).map_err(|error| Failure::invalid(error.to_string()))
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
    let begun = check_place(publication).and_then(|()| model(handle)).and_then(|model| {
        model.job.may_assign()?;
        let publisher = Publisher::new(Arc::clone(&model.job));
        let publisher = publisher.map_err(|error| Failure::new(Errno::ENOMEM, error.to_string()))?;
        let publisher = Mutex::new(Some(Arc::new(publisher)));
        open(Publication { model, publisher, meta: Mutex::default() })
    });
    // SAFETY: the caller's promise.
    done(begun.map(|handle| unsafe { store(publication, handle) }))
}
