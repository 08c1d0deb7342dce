//! A model as a disk: what is written is read at once by all users of the disk, and becomes a version when one of them
//! publishes it.

use std::ops::Range;
use std::sync::Arc;

use libmodelio::bytes::kernels::Wire;
use libmodelio::disk::{Disk, Write};
use libmodelio::transport::stream::LentPayload;
use libmodelio::vocabulary::controls::NonFinite;
use libmodelio::vocabulary::ids::Version;

use super::error::{CallError, CallResult, Done};
use super::explained::explained;
use super::model::Model;
use crate::own_thread::on_own_thread;

/// If more preparations of a publication are needed, a thread of its own makes them.
const PREPARED_HERE: usize = 4;

/// A disk in use. When the last user goes, all that was written is published.
pub struct OpenDisk {
    model: Arc<Model>,
    disk: Arc<Disk>,
}

impl OpenDisk {
    /// Uses the disk of `model`.
    ///
    /// # Errors
    /// EPERM where bytes of any value cannot be kept, ENOMEM.
    pub fn open(model: &Arc<Model>) -> CallResult<OpenDisk> {
        let is_number = || model.layout.tensors().iter().any(|tensor| Wire::of(tensor.dtype).is_some());
        if model.job.controls().nonfinite == NonFinite::Reject && is_number() {
            let why = "the model has floats, of which NaN and Inf are refused: write \"accept\" to control/nonfinite, \
                       or make a disk with --dtype u8";
            return Err(CallError::new(libc::EPERM, why));
        }
        let mut shared = model.disk.lock();
        let disk = match &shared.disk {
            Some(disk) => Arc::clone(disk),
            None => {
                let disk = Disk::new(Arc::clone(&model.job)).map_err(|error| explained(model, error))?;
                Arc::clone(shared.disk.insert(Arc::new(disk)))
            }
        };
        shared.users += 1;
        Ok(OpenDisk { model: Arc::clone(model), disk })
    }

    /// The version that unwritten bytes are read from.
    pub fn version(&self) -> Version {
        self.disk.version()
    }

    /// The bytes of `range`, from where they lie.
    ///
    /// # Panics
    /// When `range` leaves the model.
    pub fn read(&self, range: Range<u64>, piece: impl FnMut(LentPayload)) {
        self.disk.read(range, piece);
    }

    /// Checks that there is memory for what is written, before the first byte is.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn promise(&self) -> CallResult<()> {
        self.disk.promise().map_err(|error| explained(&self.model, error))
    }

    /// Begins to write `range`.
    ///
    /// # Panics
    /// When `range` leaves the model.
    pub fn write(&self, range: Range<u64>) -> Write {
        self.disk.write(range)
    }

    /// Writes zeros to `range`.
    ///
    /// # Panics
    /// When `range` leaves the model.
    pub fn write_zeros(&self, range: &Range<u64>) {
        self.disk.write_zeros(range);
    }

    /// Publishes all that was written, by any user; `done` hears whether it is in a version.
    pub fn publish(&self, done: Done<()>) {
        let model = Arc::clone(&self.model);
        let published = move |outcome: Result<(), _>| {
            let outcome = outcome.map_err(|error| explained(&model, error));
            if let Err(error) = &outcome {
                model.own_refusal.note(error, true);
            }
            done(outcome);
        };
        let (disk, timeout) = (Arc::clone(&self.disk), self.model.timeout());
        if (0..PREPARED_HERE).any(|_| disk.prepare()) {
            return disk.publish(timeout, Box::new(published));
        }
        let most = PREPARED_HERE + usize::try_from(self.model.layout.size() >> 20).unwrap_or(usize::MAX);
        on_own_thread("disk-publishes", move || {
            // It ends even if others publish all the time.
            let _ = (0..most).any(|_| disk.prepare());
            disk.publish(timeout, Box::new(published));
        });
    }

    /// Publishes all that was written, and logs if that fails: nobody waits for it. If the model is no disk any more
    /// and nobody uses it as one, the bytes are dropped. Later they would undo what others have learned meanwhile.
    pub fn publish_unasked(&self) {
        if !self.disk.is_changed() {
            return;
        }
        let model = Arc::clone(&self.model);
        self.publish(Box::new(move |outcome| {
            let Err(error) = outcome else { return };
            let mut shared = model.disk.lock();
            let dropped = if shared.users == 0 && !model.is_disk() { shared.disk.take() } else { None };
            drop(shared);
            let became = if dropped.is_some() { "is dropped" } else { "is in no version yet" };
            tracing::warn!(model = model.name, %error, "what was written to the disk {became}");
        }));
    }
}

impl Drop for OpenDisk {
    fn drop(&mut self) {
        let mut shared = self.model.disk.lock();
        shared.users -= 1;
        let is_last = shared.users == 0;
        drop(shared);
        if is_last {
            self.publish_unasked();
        }
    }
}
