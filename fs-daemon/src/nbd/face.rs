//! An export that is open: a version, a learner, or a disk.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libmodelio::contributor::Wrote;
use libmodelio::nbd::Errno;
use libmodelio::vocabulary::ids::Version;
use parking_lot::Mutex;

use crate::session::contribution::{Contribution, Ending};
use crate::session::disk::OpenDisk;
use crate::session::error::{CallError, CallResult, Done};
use crate::session::learner::LearnerUse;
use crate::session::model::Model;
use libmodelio::reader::Reader;

/// An export that is open.
pub enum Face {
    /// A version.
    Version(Arc<Reader>),
    /// The newest version, as of the last FLUSH.
    Following(Arc<Following>),
    /// A learner, which writes and may read.
    Learner(Arc<LearnerFace>),
    /// A model as a disk.
    Disk(Arc<OpenDisk>),
}

/// The version that was newest at the last FLUSH.
pub struct Following {
    model: Arc<Model>,
    reader: Mutex<Arc<Reader>>,
}

impl Following {
    /// Begins with `reader`.
    pub fn new(model: &Arc<Model>, reader: Reader) -> Following {
        Following { model: Arc::clone(model), reader: Mutex::new(Arc::new(reader)) }
    }

    fn follow(self: &Arc<Self>, done: Done<()>) {
        let this = Arc::clone(self);
        let shown = move |outcome: CallResult<Version>| {
            if let (Ok(_), Some(newest)) = (&outcome, Reader::newest(&this.model.job)) {
                *this.reader.lock() = Arc::new(newest);
                this.model.job.version_opened(None);
            }
            done(outcome.map(drop));
        };
        self.model.await_fresh(None, Box::new(shown));
    }
}

/// A learner's contribution, and the weights that it reads.
pub struct LearnerFace {
    model: Arc<Model>,
    /// The learner.
    name: String,
    state: Mutex<FaceState>,
    /// A step has ended since the version came that is read.
    is_behind: AtomicBool,
    /// Writes of this step that were refused, by offset, and not repeated with success.
    refused: Mutex<BTreeSet<u64>>,
}

/// The learner joins with the first write.
enum FaceState {
    /// Nothing was written: the version to read, if the export reads one.
    Looks(Option<Arc<Reader>>),
    Writes(Arc<Contribution>),
}

impl Face {
    /// The version to read from; none if the export is there to write only.
    pub fn reader(&self) -> Option<Arc<Reader>> {
        match self {
            Face::Version(reader) => Some(Arc::clone(reader)),
            Face::Following(following) => Some(Arc::clone(&following.reader.lock())),
            Face::Learner(learner) => learner.reader(),
            Face::Disk(_) => None,
        }
    }

    /// The version that it reads, if it reads one.
    pub fn version(&self) -> Option<Version> {
        match self {
            Face::Disk(disk) => Some(disk.version()),
            _ => self.reader().map(|reader| reader.version()),
        }
    }

    /// Whether it can be written.
    pub fn is_writable(&self) -> bool {
        matches!(self, Face::Learner(_) | Face::Disk(_))
    }

    /// The disk, if this is one.
    pub fn disk(&self) -> Option<&Arc<OpenDisk>> {
        match self {
            Face::Disk(disk) => Some(disk),
            _ => None,
        }
    }

    /// Ends a step, or reads the newest version from now on; `done` hears of it.
    pub fn flush(&self, done: Done<()>) {
        match self {
            Face::Version(_) => done(Ok(())),
            Face::Following(following) => following.follow(done),
            Face::Learner(learner) => learner.end_step(done),
            Face::Disk(disk) => disk.publish(done),
        }
    }

    /// The client has gone, in good order: what it has written counts.
    pub fn end(self) {
        match self {
            Face::Version(_) | Face::Following(_) => {}
            Face::Learner(learner) => learner.end(),
            Face::Disk(disk) => disk.publish_unasked(),
        }
    }

    /// The learner, if this is one.
    pub fn learner(&self) -> Option<&Arc<LearnerFace>> {
        match self {
            Face::Learner(learner) => Some(learner),
            _ => None,
        }
    }
}

impl LearnerFace {
    /// One of the learner of this name, which reads what `reader` shows.
    pub fn new(model: &Arc<Model>, name: &str, reader: Option<Reader>) -> LearnerFace {
        LearnerFace {
            model: Arc::clone(model),
            name: name.to_owned(),
            state: Mutex::new(FaceState::Looks(reader.map(Arc::new))),
            is_behind: AtomicBool::new(false),
            refused: Mutex::default(),
        }
    }

    /// The length of a block, in bytes.
    pub fn block_size(&self) -> u32 {
        self.model.layout.block_size()
    }

    /// The version to read, if the export reads one.
    fn reader(&self) -> Option<Arc<Reader>> {
        match &*self.state.lock() {
            FaceState::Looks(reader) => reader.clone(),
            FaceState::Writes(contribution) => contribution.reader(),
        }
    }

    /// The contribution, if the learner has joined.
    pub fn contribution(&self) -> Option<Arc<Contribution>> {
        match &*self.state.lock() {
            FaceState::Looks(_) => None,
            FaceState::Writes(contribution) => Some(Arc::clone(contribution)),
        }
    }

    /// Writes. For the first write the learner joins, if it is not in the job. That waits for the job's answer.
    ///
    /// # Errors
    /// As those of [`Contribution::write`] and [`Model::join`].
    pub fn write(&self, offset: u64, bytes: &[u8]) -> CallResult<Wrote> {
        let mut state = self.state.lock();
        let contribution = match &*state {
            FaceState::Writes(contribution) => Arc::clone(contribution),
            FaceState::Looks(reader) => {
                let shown = reader.as_ref().map(|reader| reader.version());
                let contribution = Arc::new(self.join(shown)?);
                *state = FaceState::Writes(Arc::clone(&contribution));
                contribution
            }
        };
        drop(state);
        contribution.write(offset, bytes)
    }

    /// Joins, if the learner is not in the job; reads the version that was `shown`.
    fn join(&self, shown: Option<Version>) -> CallResult<Contribution> {
        let model = &self.model;
        // If there is no version to read, nobody has joined.
        let reader = shown.map(|version| match Reader::open(&model.job, version) {
            Some(reader) => Ok(reader),
            None => model.open_newest(),
        });
        let reader = reader.transpose()?;
        // One that is just leaving is no longer in the job.
        let known = model.learner_named(&self.name).filter(|it| model.job.has_learner(it.id));
        let is_own = self.name == model.own_name;
        let (learner, joined) = match known {
            Some(learner) => (learner, false),
            None if is_own => (model.join_own()?, false),
            None => (model.join(&self.name, None)?, true),
        };
        learner.make_staging_ready();
        let contribution = Contribution::open(model, learner, false, reader);
        contribution.learner().note(LearnerUse::Comes);
        if joined {
            // It leaves when nobody uses it any more.
            contribution.learner().make_guest();
        }
        Ok(contribution)
    }

    /// Writes once the coordinator has named the step.
    pub fn write_later(&self, offset: u64, bytes: Vec<u8>, done: Done<()>) {
        match self.contribution() {
            Some(contribution) => contribution.write_later(offset, bytes, |named| named, done),
            None => done(Err(CallError::not_found())),
        }
    }

    /// A write at `offset` was taken or refused. If the client goes with refused ones, the step does not count.
    pub fn write_ended(&self, offset: u64, is_taken: bool) {
        const MANY: usize = 1024;
        let mut refused = self.refused.lock();
        // Beyond so many, none is forgotten before the step ends.
        match is_taken {
            _ if refused.len() >= MANY => {}
            true => drop(refused.remove(&offset)),
            false => drop(refused.insert(offset)),
        }
    }

    /// Ends a step; `done` hears whether it counts.
    pub fn end_step(self: &Arc<Self>, done: Done<()>) {
        self.refused.lock().clear();
        let Some(contribution) = self.contribution().filter(|it| it.wrote()) else { return done(Ok(())) };
        // The client may go meanwhile. It has asked for the step, so nothing is dropped before the answer.
        let this = Arc::clone(self);
        let answered = move |outcome: CallResult<()>| {
            if outcome.is_ok() {
                this.is_behind.store(true, Ordering::Relaxed);
            }
            done(outcome);
        };
        // A client hears of each WRITE that is refused.
        contribution.forget_refused();
        contribution.commit(Ending::Step, Box::new(answered));
    }

    /// Whether a read must wait for [`Self::catch_up`]: a learner reads versions with its last step in them.
    pub fn is_behind(&self) -> bool {
        self.is_behind.load(Ordering::Relaxed)
    }

    /// Reads the newest version from now on, as soon as that holds the learner's last step.
    pub fn catch_up(self: &Arc<Self>, done: Done<()>) {
        let Some(contribution) = self.contribution() else { return done(Ok(())) };
        let (this, learner) = (Arc::clone(self), contribution.learner().id);
        let shown = move |outcome: CallResult<Version>| {
            done(outcome.map(|_| {
                this.is_behind.store(false, Ordering::Relaxed);
                contribution.refresh();
            }));
        };
        self.model.await_fresh(Some(learner), Box::new(shown));
    }

    /// The client has gone, in good order: what it has written counts, unless a part of it was refused.
    pub fn end(self: Arc<Self>) {
        let Some(contribution) = self.contribution().filter(|it| it.wrote()) else { return };
        if !self.refused.lock().is_empty() {
            return;
        }
        let answered = move |outcome: CallResult<()>| {
            if let Err(error) = outcome {
                let learner = &self.name;
                let model = &self.model.name;
                tracing::warn!(model, learner, %error, "what a client of a block device had written does not count");
            }
        };
        contribution.forget_refused();
        contribution.commit(Ending::Close, Box::new(answered));
    }
}

/// The client is gone. What it has written since the last step does not count, unless [`LearnerFace::end`] was called.
impl Drop for LearnerFace {
    fn drop(&mut self) {
        let Some(contribution) = self.contribution() else { return };
        if contribution.wrote() {
            let why = CallError::new(libc::ECONNABORTED, "the client of the block device is gone");
            contribution.abort_own(&why);
        }
        contribution.learner().note(LearnerUse::Ends);
        contribution.closed();
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
