//! Pieces of a model without a mount: a version that is in this process's memory, and a learner that contributes. This
//! module holds `unsafe`.

use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;
use parking_lot::Mutex;

use super::Doorbell;
use super::ring::Work;
use super::table::Op;
use crate::contributor::{ContributeError, Contributor, Share, Wrote};
use crate::reader::Reader;

/// A pinned version.
pub(super) struct VersionFile(Reader);

impl VersionFile {
    pub(super) fn new(version: Reader) -> VersionFile {
        VersionFile(version)
    }

    /// Copies a piece. It is short at the end of the model, as of a file.
    pub(super) fn read(&self, work: &Work) -> Result<usize, Errno> {
        if work.op != Op::Read {
            return Err(Errno::EBADF);
        }
        let size = self.0.region().memory().len() as u64;
        let len = size.saturating_sub(work.offset).min(work.place.len as u64);
        // SAFETY: the piece is in flight, and this thread alone moves its bytes.
        let target = unsafe { work.place.bytes_mut() };
        target[..len as usize].copy_from_slice(self.0.bytes(work.offset..work.offset + len));
        Ok(len as usize)
    }
}

/// A learner's contribution.
pub(super) struct LearnerFile {
    learner: Arc<Contributor>,
    /// What was written, also past the queue.
    share: Arc<Mutex<Share>>,
}

impl LearnerFile {
    pub(super) fn new(learner: Arc<Contributor>, share: Arc<Mutex<Share>>) -> LearnerFile {
        LearnerFile { learner, share }
    }

    /// Begins a piece. Its end is rung.
    pub(super) fn begin(self: &Arc<Self>, slot: usize, work: Work, deadline: Instant, bell: Arc<Doorbell>) {
        let timeout = deadline.saturating_duration_since(Instant::now());
        match work.op {
            Op::Read => bell.ring(slot, Err(Errno::EBADF)),
            Op::Write => match self.write(&work, deadline) {
                Ok(Wrote::Taken) => bell.ring(slot, Ok(work.place.len)),
                Ok(Wrote::Asks) => {
                    let this = Arc::clone(self);
                    self.learner.ask_step(timeout, move |asked| {
                        // Another contribution may have begun and ended meanwhile.
                        let written = asked.and_then(|()| this.write(&work, deadline));
                        bell.ring(
                            slot,
                            match written {
                                Ok(Wrote::Taken) => Ok(work.place.len),
                                Ok(Wrote::Asks) => Err(Errno::EBUSY),
                                Err(error) => Err(error.errno()),
                            },
                        );
                    });
                }
                Err(error) => bell.ring(slot, Err(error.errno())),
            },
            Op::Sync => {
                let share = std::mem::take(&mut *self.share.lock());
                let this = Arc::clone(self);
                self.learner.commit(share, timeout, move |outcome| {
                    // A step that has timed out is still open, and may be committed again.
                    if outcome.is_err() && this.learner.is_open_for(share) {
                        *this.share.lock() = share;
                    }
                    bell.ring(slot, outcome.map(|()| 0).map_err(|error| error.errno()));
                });
            }
        }
    }

    fn write(&self, work: &Work, deadline: Instant) -> Result<Wrote, ContributeError> {
        let mut share = *self.share.lock();
        // SAFETY: the piece is in flight.
        let data = unsafe { work.place.bytes() };
        let timeout = deadline.saturating_duration_since(Instant::now());
        let outcome = self.learner.write(&mut share, work.offset, data, timeout);
        if share != Share::None {
            *self.share.lock() = share;
        }
        outcome
    }

    /// Withdraws the commit under way.
    pub(super) fn withdraw(&self) {
        self.learner.withdraw();
    }
}
