//! Writing as a learner: at any offset, in any order, from any thread, until a commit or an abort ends it.
//!
//! A learner has one contribution at a time, and every file that is opened for it writes into that. This type
//! knows for each such file what it has written into, and whether that has ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libmodelio::contributor::{ContributeError, Share, Wrote};
use libmodelio::vocabulary::shard_error::ShardError;
use parking_lot::Mutex;

use super::error::{CallError, CallResult, Done};
use super::explained::explained;
use super::file_headers::refuse_header;
use super::learner::{Learner, LearnerUse};
use super::model::Model;
use super::named::NamedWrites;
use super::times::Waits;
use super::written::Written;
use crate::own_thread::on_own_thread;
use libmodelio::reader::Reader;

/// The longest time that a close waits again after a step has waited in vain.
const SECOND_WAIT: Duration = Duration::from_millis(250);

/// What a close says that is not sure to have dropped the contribution.
const MAY_COUNT: &str =
    "; the contribution may count: it is taken back when the coordinator answers, unless it counts by then";

/// Whether a commit that ended so may have been taken.
fn has_no_answer(error: &ContributeError) -> bool {
    matches!(error, ContributeError::Shard(ShardError::TimedOut(_) | ShardError::Interrupted))
}

/// How what was written ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// A step is done and the next one may follow. After a timeout the written bytes are still there, for
    /// another try.
    Step,
    /// Nothing follows: data that is not taken is dropped.
    Close,
}

/// Brings about an answer to a commit that is on its way: unless the commit is taken by then, it fails. May
/// be called again and again.
pub type Withdraw = Arc<dyn Fn() + Send + Sync>;

/// The part of a learner's contribution that is written from one place.
pub struct Contribution {
    model: Arc<Model>,
    learner: Arc<Learner>,
    /// A step ships the learner's mapping if nothing was written.
    ships_mapping: bool,
    /// The reader of a file with both faces: after each step it shows the newest version.
    reader: Option<Mutex<Arc<Reader>>>,
    /// What is written is a safetensors file, and not bytes at the model's offsets.
    named: Option<NamedWrites>,
    /// The writes here since the last end.
    written: Mutex<Written>,
    /// Into which of the learner's contributions; 0 for none.
    share: AtomicU64,
    /// A step has waited for that as long as it may.
    timed_out: AtomicBool,
    /// Bytes of the mapping were declared final from here.
    declared: AtomicBool,
    /// Nobody writes here any more.
    is_closed: AtomicBool,
}

impl Contribution {
    /// Opens one for `learner`, which is in use until [`Self::closed`].
    pub fn open(
        model: &Arc<Model>,
        learner: Arc<Learner>,
        ships_mapping: bool,
        reader: Option<Reader>,
    ) -> Contribution {
        learner.note(LearnerUse::Opens);
        Contribution {
            model: Arc::clone(model),
            learner,
            ships_mapping,
            reader: reader.map(|reader| Mutex::new(Arc::new(reader))),
            named: None,
            written: Mutex::default(),
            share: AtomicU64::new(0),
            timed_out: AtomicBool::new(false),
            declared: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        }
    }

    /// The same for a file that is written by tensors' names.
    pub fn by_names(self) -> Contribution {
        Contribution { named: Some(NamedWrites::new(&self.model.layout)), ..self }
    }

    /// Nobody writes here any more. The data written so far may still be committed or aborted. Of the mapping, a close
    /// ships nothing.
    pub fn closed(&self) {
        if self.declared.swap(false, Ordering::Relaxed) {
            self.learner.contributor.forget_final();
        }
        self.is_closed.store(true, Ordering::SeqCst);
        self.learner.contributor.forget_unopened();
        self.learner.note(LearnerUse::Closes);
    }

    /// The learner that contributes.
    pub fn learner(&self) -> &Arc<Learner> {
        &self.learner
    }

    /// Whether something was written here since the last end, or refused.
    pub fn wrote(&self) -> bool {
        self.written.lock().is_pending()
    }

    /// Whether something was written here that no close has told of.
    pub fn is_begun(&self) -> bool {
        self.written.lock().is_begun()
    }

    /// The file was opened with O_TRUNC.
    pub fn truncated(&self) {
        if self.named.is_none() {
            self.written.lock().truncate();
        }
    }

    /// The file was truncated to the model's size: what nobody writes is zeros that were written.
    pub fn extended(&self) {
        if !self.ships_mapping && self.named.is_none() {
            self.written.lock().extend();
        }
    }

    /// The program takes back what was written here: it truncates the file to nothing. The learner's open contribution
    /// is dropped, whoever has written into it. `done` hears whether nothing of it counts, now or later.
    ///
    /// EBUSY while a commit runs, with nothing changed. EIO where a commit had no answer, and the contribution counts,
    /// or may count.
    pub fn take_back(self: &Arc<Self>, done: Done<()>) {
        let contributor = &self.learner.contributor;
        if self.declared.swap(false, Ordering::Relaxed) {
            contributor.forget_final();
        }
        let has_doubt = self.ships_mapping || self.timed_out.load(Ordering::Relaxed);
        if !(self.is_begun() || has_doubt && contributor.is_in_doubt()) {
            self.written.lock().begin_anew();
            self.named.iter().for_each(NamedWrites::begin_anew);
            return done(Ok(()));
        }
        // What others have begun since is theirs.
        if contributor.is_open() && !contributor.is_open_for(self.share()) {
            self.taken_back();
            return done(Ok(()));
        }
        let this = Arc::clone(self);
        contributor.take_back(self.model.timeout(), move |outcome| {
            if outcome != Err(ContributeError::Busy) {
                this.taken_back();
                // Asked again, it is in doubt as before.
                this.timed_out.store(matches!(outcome, Err(ContributeError::MayCount(_))), Ordering::Relaxed);
            }
            done(outcome.map_err(|error| {
                let error = explained(&this.model, error);
                this.learner.refusal.note(&error, false);
                error
            }));
        });
    }

    fn taken_back(&self) {
        self.ended();
        self.learner.refusal.ended(false);
    }

    /// The version it reads, if it has both faces.
    pub fn reader(&self) -> Option<Arc<Reader>> {
        self.reader.as_ref().map(|reader| Arc::clone(&reader.lock()))
    }

    /// Reads the bytes in the learner's mapping.
    pub fn load_mapped(&self, offset: u64, bytes: &mut [u8]) {
        self.learner.contributor.load_mapped(offset, bytes);
    }

    /// Stores into the learner's mapping the bytes that a program has stored into its own copy of it.
    ///
    /// # Errors
    /// EIO where the mapping is not shipped, EFBIG past its end.
    pub fn store_mapped(&self, offset: u64, data: &[u8]) -> CallResult<()> {
        if !self.ships_mapping {
            return Err(CallError::new(libc::EIO, "device cannot be mapped to write: map gradients"));
        }
        Ok(self.learner.contributor.store_mapped(offset, data)?)
    }

    /// Takes the word of the program that these bytes of its mapping are final, and sends them at once where the path
    /// allows. `is_stored_here`: what the program stores is in the learner's memory already, and not in the kernel's
    /// page cache. There it stays until fsync or msync.
    ///
    /// # Errors
    /// With nothing changed: EINVAL where the mapping is not shipped, or when the next fsync ships what was written;
    /// EFBIG past the end, EBUSY while a commit runs. If the learner cannot contribute, the errors are those of
    /// [`Self::write`].
    pub fn declare_final(&self, offset: u64, len: u64, is_stored_here: bool) -> CallResult<()> {
        let contributor = &self.learner.contributor;
        let outcome = match self.ships_mapping {
            false => Err(CallError::new(
                libc::EINVAL,
                "no mapping is shipped from here: open gradients to read and write, and map it",
            )),
            true => {
                self.declared.store(true, Ordering::Relaxed);
                let outcome = contributor.declare_final(offset, len, is_stored_here);
                outcome.map_err(|error| explained(&self.model, error))
            }
        };
        outcome.inspect_err(|error| self.learner.refusal.note(error, true))
    }

    /// Writes. Blocks that become whole go off at once. If the coordinator must name the step first, nothing is taken:
    /// see [`Self::write_later`].
    ///
    /// # Errors
    /// With nothing changed: EFBIG past the end, EINVAL for bytes already sent, EBUSY while a commit runs, ECANCELED
    /// below `min_learners`, EIO when others have dropped what was written here.
    pub fn write(&self, offset: u64, data: &[u8]) -> CallResult<Wrote> {
        let began = Instant::now();
        let outcome = match &self.named {
            None => refuse_header(offset, data).and_then(|()| self.place(offset, data)),
            Some(_) if !self.can_write() => Ok(Wrote::Asks),
            Some(named) => {
                named.write(offset, data, |at, bytes| self.place_now(at, bytes)).map(|()| Wrote::Taken)
            }
        };
        self.learner.times.wrote(began);
        if !matches!(outcome, Ok(Wrote::Asks)) {
            self.written.lock().note(offset, data.len(), &outcome);
        }
        outcome.inspect_err(|error| self.learner.refusal.note(error, true))
    }

    /// Writes bytes of the model.
    fn place(&self, offset: u64, data: &[u8]) -> CallResult<Wrote> {
        let mut share = self.share();
        let outcome = self.learner.contributor.write(&mut share, offset, data, self.model.timeout());
        if let Share::Of(number) = share {
            self.share.store(number, Ordering::Relaxed);
        }
        outcome.map_err(|error| explained(&self.model, error))
    }

    /// Whether a write would be taken without a question for the step.
    pub fn can_write(&self) -> bool {
        self.learner.contributor.can_write()
    }

    /// `done` hears when a write can be taken, within the job's timeout.
    pub fn name_step(&self, done: Done<()>) {
        let model = Arc::clone(&self.model);
        self.learner.contributor.ask_step(self.model.timeout(), move |outcome| {
            done(outcome.map_err(|error| explained(&model, error)));
        });
    }

    /// [`Self::write`] where a write is taken.
    ///
    /// # Errors
    /// As that has them, and EBUSY.
    pub fn write_now(&self, offset: u64, data: &[u8]) -> CallResult<()> {
        match self.write(offset, data)? {
            Wrote::Taken => Ok(()),
            Wrote::Asks => Err(self.refused(offset, data.len(), ContributeError::Busy)),
        }
    }

    /// The same where the step is known.
    fn place_now(&self, offset: u64, data: &[u8]) -> CallResult<()> {
        match self.place(offset, data)? {
            Wrote::Taken => Ok(()),
            // Another program's contribution has begun and ended meanwhile.
            Wrote::Asks => Err(explained(&self.model, ContributeError::Busy)),
        }
    }

    /// Why what was written here must not count.
    fn check(&self, ending: Ending) -> CallResult<()> {
        let written = self.written.lock();
        written.check_refused(ending == Ending::Close)?;
        if let Some(named) = &self.named {
            return named.check_end();
        }
        // What others have written into the contribution is part of it, and one that others have ended is judged.
        let contributor = &self.learner.contributor;
        let is_in = self.model.job.has_learner(self.learner.id);
        if !is_in || !contributor.is_open_for(self.share()) || written.run() != Some(contributor.open_bytes())
        {
            return Ok(());
        }
        if let Some(hint) = written.check_narrow(&self.model.layout)? {
            self.learner.hints(&hint);
        }
        written.check_cut(&self.model.layout)
    }

    /// Writes the holes of a file that has some. The program writes no more. If nothing was written, this may wait for
    /// the coordinator to name the step.
    fn write_holes(&self) -> CallResult<()> {
        let (contributor, timeout) = (&self.learner.contributor, self.model.timeout());
        let (sender, named) = std::sync::mpsc::channel();
        contributor.ask_step(timeout, move |outcome| sender.send(outcome).unwrap_or_default());
        let mut share = self.share();
        let named = named.recv().unwrap_or(Err(ContributeError::Dropped));
        let outcome = named.and_then(|()| contributor.write_zeros(&mut share, timeout));
        if let Share::Of(number) = share {
            self.share.store(number, Ordering::Relaxed);
        }
        outcome.map_err(|error| explained(&self.model, error))
    }

    /// Writes as [`Self::write`] does, once the coordinator has named the step. `guarded` may end the wait for that;
    /// then nothing is written.
    pub fn write_later(
        self: &Arc<Self>,
        offset: u64,
        data: Vec<u8>,
        guarded: impl FnOnce(Done<()>) -> Done<()>,
        done: Done<()>,
    ) {
        let (timeout, len) = (self.model.timeout(), data.len());
        let this = Arc::clone(self);
        let named = guarded(Box::new(move |outcome| {
            done(outcome.and_then(|()| match this.write(offset, &data)? {
                Wrote::Taken => Ok(()),
                // Another program's contribution has begun and ended meanwhile.
                Wrote::Asks => Err(this.refused(offset, len, ContributeError::Busy)),
            }));
        }));
        let this = Arc::clone(self);
        self.learner.contributor.ask_step(timeout, move |outcome| {
            let outcome = outcome.map_err(|error| {
                this.learner.contributor.fail_unopened(&error);
                if this.is_closed.load(Ordering::SeqCst) {
                    this.learner.contributor.forget_unopened();
                }
                this.refused(offset, len, error)
            });
            named(outcome);
        });
    }

    /// Notes that a write which had to ask for its step was refused. The next end says so, too.
    fn refused(&self, offset: u64, len: usize, error: ContributeError) -> CallError {
        let error = explained(&self.model, error);
        self.learner.refusal.note(&error, true);
        self.written.lock().note::<()>(offset, len, &Err(error.clone()));
        error
    }

    /// Writes that were refused are no reason against the step: whoever made them has heard of each, and goes on.
    pub fn forget_refused(&self) {
        self.written.lock().forget_refused();
        // A first write that found no shard has left nothing open, and its reason is told.
        if !self.learner.contributor.is_open() {
            self.learner.contributor.abort();
        }
    }

    /// Ends what was written; `done` hears whether it counts.
    pub fn commit(self: &Arc<Self>, ending: Ending, done: Done<()>) {
        let is_dropped = self.learner.contributor.has_dropped(self.share());
        // If others have dropped it, that is what there is to say.
        if !is_dropped && let Err(error) = self.check(ending) {
            return done(Err(self.drop_own(error, ending)));
        }
        if is_dropped || !self.written.lock().has_holes() {
            return self.commit_written(ending, done);
        }
        let this = Arc::clone(self);
        on_own_thread("gradfs-holes", move || match this.write_holes() {
            Ok(()) => this.commit_written(ending, done),
            Err(error) => done(Err(this.drop_own(error, ending))),
        });
    }

    /// What was written here must not count, for this reason.
    fn drop_own(&self, error: CallError, ending: Ending) -> CallError {
        let contributor = &self.learner.contributor;
        // What others write into stays. If nothing is open, a contribution may have failed to open. What a close tells
        // again has been dropped already.
        if self.is_begun() && (!contributor.is_open() || contributor.is_open_for(self.share())) {
            contributor.abort();
        }
        self.ended();
        self.written.lock().refuse_rest(&error, ending == Ending::Close);
        self.learner.refusal.note(&error, false);
        error
    }

    fn commit_written(self: &Arc<Self>, ending: Ending, done: Done<()>) {
        let contributor = &self.learner.contributor;
        let is_open = contributor.is_open();
        let mapped = ending == Ending::Step && self.ships_mapping && !is_open;
        let timeout = match self.model.timeout() {
            timeout if ending == Ending::Close && self.timed_out.load(Ordering::Relaxed) => {
                timeout.min(SECOND_WAIT)
            }
            timeout => timeout,
        };
        let done = match mapped || is_open {
            true => self.waits_for(done),
            false => done,
        };
        let this = Arc::clone(self);
        let finished = move |result| match result {
            Ok(()) => {
                this.ended();
                this.learner.refusal.ended(mapped || is_open);
                this.show_newest(done);
            }
            Err(error) if ending == Ending::Close && has_no_answer(&error) => {
                this.closed_in_doubt(error, done)
            }
            Err(error) => {
                let stays_open = this.failed(&error, ending, mapped);
                let error = explained(&this.model, error);
                this.learner.refusal.note(&error, stays_open);
                done(Err(error));
            }
        };
        if mapped {
            contributor.commit_mapped(timeout, finished);
        } else {
            contributor.commit(self.share(), timeout, finished);
        }
    }

    /// Wraps `done`: until it is called, the learner's program waits. With its success, a step is over.
    fn waits_for(&self, done: Done<()>) -> Done<()> {
        let learner = Arc::clone(&self.learner);
        learner.times.clone().until(
            Waits::Commit,
            Box::new(move |outcome: CallResult<()>| {
                if outcome.is_ok() {
                    learner.times.committed(learner.contributor.ended());
                }
                done(outcome);
            }),
        )
    }

    /// A close has waited in vain, and drops what was written. If that counts all the same, the close has succeeded.
    fn closed_in_doubt(self: Arc<Self>, error: ContributeError, done: Done<()>) {
        let contributor = Arc::clone(&self.learner.contributor);
        contributor.take_back(SECOND_WAIT, move |outcome| {
            self.ended();
            let error = match outcome {
                Err(ContributeError::Counts(_)) => {
                    self.learner.refusal.ended(true);
                    return self.show_newest(done);
                }
                Err(ContributeError::MayCount(_)) => {
                    let mut error = explained(&self.model, error);
                    error.message += MAY_COUNT;
                    error
                }
                _ => explained(&self.model, error),
            };
            self.learner.refusal.note(&error, false);
            done(Err(error));
        });
    }

    /// A commit has failed. Returns whether what was written can be committed again; else it is dropped.
    fn failed(&self, error: &ContributeError, ending: Ending, mapped: bool) -> bool {
        let has_no_answer = has_no_answer(error);
        if ending == Ending::Step && (has_no_answer || *error == ContributeError::Busy) {
            if has_no_answer && !mapped {
                self.timed_out.store(true, Ordering::Relaxed);
            }
            return true;
        }
        self.ended();
        // If others have dropped this contribution, the open one is somebody else's.
        if *error != ContributeError::Dropped {
            self.learner.contributor.abort();
        }
        false
    }

    /// Drops the learner's open contribution, whoever has written into it, and keeps `why`. Returns false
    /// when none was open.
    pub fn abort(&self, why: &CallError) -> bool {
        let was_open = self.learner.contributor.abort();
        if was_open {
            self.learner.refusal.note(why, false);
        }
        was_open
    }

    /// Drops the learner's open contribution if something was written into it from here, and keeps `why`.
    pub fn abort_own(&self, why: &CallError) {
        if self.learner.contributor.is_open_for(self.share()) {
            self.abort(why);
        }
    }

    /// Ends the wait for a commit.
    pub fn withdrawal(&self) -> Withdraw {
        let contributor = Arc::clone(&self.learner.contributor);
        Arc::new(move || contributor.withdraw())
    }

    /// The share that writes here are part of.
    fn share(&self) -> Share {
        match self.share.load(Ordering::Relaxed) {
            0 => Share::None,
            number => Share::Of(number),
        }
    }

    /// The contribution has ended, as far as writes here are concerned.
    fn ended(&self) {
        self.share.store(0, Ordering::Relaxed);
        self.timed_out.store(false, Ordering::Relaxed);
        // What a truncated file is written with next is to be whole, too.
        self.written.lock().begin_anew();
        self.named.iter().for_each(NamedWrites::begin_anew);
    }

    /// Reads the newest version from now on, if it reads.
    pub fn refresh(&self) {
        if let (Some(reader), Some(newest)) = (&self.reader, Reader::newest(&self.model.job)) {
            self.model.opened(newest.version(), Some(&self.learner));
            *reader.lock() = Arc::new(newest);
            self.model.job.version_opened(Some(self.learner.id));
        }
    }

    /// After a commit, both faces are at the newest version, the one with the commit included if that is complete.
    fn show_newest(self: &Arc<Self>, done: Done<()>) {
        let this = Arc::clone(self);
        let show = move || {
            this.refresh();
            // The commit counts, whether or not the new version can be shown.
            done(Ok(()));
        };
        let (job, learner) = (&self.model.job, self.learner.id);
        if self.reader.is_none() || !job.is_coming(learner) || !job.controls().reads_own_step() {
            return show();
        }
        self.model.await_fresh(Some(learner), Box::new(move |_| show()));
    }
}
