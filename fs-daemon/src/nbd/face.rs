//! What a client reads and writes through an export that is open.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libmodelio::nbd::Errno;
use libmodelio::transport::{LeaveReason, TransportKind};
use libmodelio::vocabulary::ids::Version;
use parking_lot::Mutex;

use crate::session::contribution::{Contribution, Ending};
use crate::session::error::{CallError, CallResult, Done};
use crate::session::model::Model;
use crate::session::reader::Reader;

/// An export that is open.
pub enum Face {
    /// A version.
    Version(Arc<Reader>),
    /// A learner, which writes and may read.
    Learner(Arc<LearnerFace>),
}

/// A learner's contribution, and the weights that it reads.
pub struct LearnerFace {
    model: Arc<Model>,
    contribution: Arc<Contribution>,
    /// The version that is read, if any is.
    reader: Option<Mutex<Arc<Reader>>>,
    /// A step has ended since that version came.
    is_behind: AtomicBool,
}

impl Face {
    /// The version to read from; none if the export is there to write only.
    pub fn reader(&self) -> Option<Arc<Reader>> {
        match self {
            Face::Version(reader) => Some(Arc::clone(reader)),
            Face::Learner(learner) => learner.reader.as_ref().map(|reader| Arc::clone(&reader.lock())),
        }
    }

    /// The learner, if this is one.
    pub fn learner(&self) -> Option<&Arc<LearnerFace>> {
        match self {
            Face::Version(_) => None,
            Face::Learner(learner) => Some(learner),
        }
    }
}

impl LearnerFace {
    /// One through which `contribution` is written.
    pub fn new(model: &Arc<Model>, contribution: Contribution, reader: Option<Reader>) -> LearnerFace {
        LearnerFace {
            model: Arc::clone(model),
            contribution: Arc::new(contribution),
            reader: reader.map(|reader| Mutex::new(Arc::new(reader))),
            is_behind: AtomicBool::new(false),
        }
    }

    /// The length of a block, in bytes.
    pub fn block_size(&self) -> u32 {
        self.model.layout.block_size()
    }

    /// The contribution.
    pub fn contribution(&self) -> &Arc<Contribution> {
        &self.contribution
    }

    /// Whether the next write may take long: the first one of a step asks the coordinator.
    pub fn may_wait(&self) -> bool {
        !self.contribution.wrote() && self.model.job.kind() != TransportKind::InProcess
    }

    /// Ends a step; `done` hears whether it counts.
    pub fn end_step(self: &Arc<Self>, done: Done<()>) {
        if !self.contribution.wrote() {
            return done(Ok(()));
        }
        // The client may go meanwhile. It has asked for the step, so nothing is dropped before the answer.
        let this = Arc::clone(self);
        let answered = move |outcome: CallResult<()>| {
            if outcome.is_ok() {
                this.is_behind.store(true, Ordering::Relaxed);
                // A client that never reads must not keep an old version.
                this.show_newest();
            }
            done(outcome);
        };
        self.contribution.commit(Ending::Step, Box::new(answered));
    }

    /// Whether a read must wait for [`Self::catch_up`]: a learner reads versions with its last step in them.
    pub fn is_behind(&self) -> bool {
        self.reader.is_some() && self.is_behind.load(Ordering::Relaxed)
    }

    /// Reads the newest version from now on, as soon as that holds the learner's last step.
    pub fn catch_up(self: &Arc<Self>, done: Done<()>) {
        let this = Arc::clone(self);
        let shown = move |outcome: CallResult<Version>| {
            done(outcome.map(|_| {
                this.is_behind.store(false, Ordering::Relaxed);
                this.show_newest();
            }));
        };
        self.model.await_step(self.contribution.learner().id, Box::new(shown));
    }

    fn show_newest(&self) {
        if let (Some(reader), Some(newest)) = (&self.reader, Reader::newest(&self.model)) {
            *reader.lock() = Arc::new(newest);
        }
    }

    /// The client has gone, in good order: what it has written counts.
    pub fn end(self: Arc<Self>) {
        if !self.contribution.wrote() {
            return;
        }
        let contribution = Arc::clone(&self.contribution);
        let answered = move |outcome: CallResult<()>| {
            if let Err(error) = outcome {
                let learner = &self.contribution.learner().name;
                tracing::warn!(learner, %error, "what a client of a block device had written does not count");
            }
        };
        contribution.commit(Ending::Close, Box::new(answered));
    }
}

/// The client is gone. What it has written since the last step does not count, unless [`LearnerFace::end`] was called.
impl Drop for LearnerFace {
    fn drop(&mut self) {
        if self.contribution.wrote() {
            let why = CallError::new(libc::ECONNABORTED, "the client of the block device is gone");
            self.contribution.abort_own(&why);
        }
        self.contribution.closed();
        if self.contribution.learner().is_unused_guest() {
            self.model.send_leave(self.contribution.learner().id, LeaveReason::Asked);
        }
    }
}

/// The number that the protocol has for an error.
pub fn errno_of(error: &CallError) -> Errno {
    match error.errno {
        libc::EPERM | libc::EACCES => Errno::NotPermitted,
        libc::ENOMEM | libc::ENFILE => Errno::NoMemory,
        libc::EFBIG | libc::ENOSPC | libc::EDQUOT => Errno::NoSpace,
        libc::EINVAL | libc::EBUSY => Errno::Invalid,
        libc::EOPNOTSUPP => Errno::NotSupported,
        _ => Errno::Io,
    }
}
