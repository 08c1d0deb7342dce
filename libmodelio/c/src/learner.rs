//! Learners: one contribution at a time, written at any offset, which counts once and whole when it is committed.

use std::ffi::{c_char, c_int};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use libmodelio::vocabulary::members::{Attached, LifeSign, is_learner_name, wrong_learner_name};
use libmodelio::wire::ReduceOp;
use libmodelio::{ContributeError, Contributor, LeaveReason, ShardError, Share, Wrote, wait_for};
use parking_lot::Mutex;

use crate::handles::{Handle, Open, either, get, open};
use crate::model::{Model, model};
use crate::outcome::{Failure, Outcome, bytes, check_place, done, store, string, timeout};
use crate::publication::Publication;

/// The longest wait for the answer that a learner has left. Its lease ends for one that has none.
const LEAVES: Duration = Duration::from_secs(10);

/// How often an abort looks whether a commit was answered.
const ANSWERED: Duration = Duration::from_millis(10);

/// A learner that this process has joined as.
pub(crate) struct Learner {
    pub model: Arc<Model>,
    pub name: String,
    pub contributor: Arc<Contributor>,
    /// What was written, also by a queue.
    pub share: Arc<Mutex<Share>>,
    /// Why the last call was refused, since the last contribution that was taken.
    pub refusal: Mutex<String>,
}

impl Open for Learner {
    /// It leaves, also where a queue has it: that one's requests then end with ENOTCONN.
    fn closed(&self) {
        self.contributor.abort();
        let id = self.contributor.learner();
        let left = wait_for(LEAVES, |done| self.model.job.leave(id, LeaveReason::Asked, LEAVES, done));
        // It may have been dropped already.
        let _: Result<(), ShardError> = left;
    }
}

impl Learner {
    fn write(&self, offset: u64, data: &[u8], timeout: Duration) -> Outcome<()> {
        let mut share = *self.share.lock();
        let written = loop {
            match self.contributor.write(&mut share, offset, data, timeout) {
                Ok(Wrote::Taken) => break Ok(()),
                Ok(Wrote::Asks) => {
                    let asked = wait_for(timeout, |done| self.contributor.ask_step(timeout, done));
                    if let Err(error) = asked {
                        break Err(error);
                    }
                }
                Err(error) => break Err(error),
            }
        };
        // A refused write has no share, and takes that of no other thread.
        if share != Share::None {
            *self.share.lock() = share;
        }
        self.note(written)
    }

    fn commit(&self, timeout: Duration) -> Outcome<()> {
        let share = *self.share.lock();
        if share == Share::None {
            return Err(Failure::invalid("nothing was written, so there is no contribution"));
        }
        let ended = wait_for(timeout, |done| self.contributor.commit(share, timeout, done));
        if !self.contributor.is_open_for(share) {
            *self.share.lock() = Share::None;
        }
        self.note(ended)?;
        self.refusal.lock().clear();
        Ok(())
    }

    fn abort(&self, timeout: Duration) -> Outcome<()> {
        let end = Instant::now() + timeout;
        loop {
            // A commit of another thread ends soon after this, unless it counts already.
            self.contributor.withdraw();
            let left = end.saturating_duration_since(Instant::now());
            match wait_for(left, |done| self.contributor.take_back(left, done)) {
                Err(ContributeError::Busy) if !left.is_zero() => std::thread::sleep(ANSWERED),
                outcome => {
                    if !matches!(outcome, Err(ContributeError::Busy)) {
                        *self.share.lock() = Share::None;
                    }
                    return self.note(outcome);
                }
            }
        }
    }

    fn note<T>(&self, outcome: Result<T, ContributeError>) -> Outcome<T> {
        let explained = |error| self.model.explained(error);
        outcome.map_err(explained).inspect_err(|failure| self.refusal.lock().clone_from(&failure.text))
    }
}

/// Joins the job as a learner. `name` is NULL for one of the library's choice. `modelio_close` leaves the job.
///
/// -EEXIST if the name is in use, -EDQUOT if the job has as many learners as it may, -EINVAL for a wrong name.
///
/// # Safety
/// `name` is NULL or a string; `learner` points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_join(
    handle: Handle,
    name: *const c_char,
    timeout_ms: u32,
    learner: *mut Handle,
) -> c_int {
    let joined = check_place(learner).and_then(|()| model(handle)).and_then(|model| {
        let name = match name.is_null() {
            true => free_name(),
            // SAFETY: the caller's promise.
            false => unsafe { string(name, "the name") }?.to_owned(),
        };
        if !is_learner_name(&name) {
            return Err(Failure::invalid(wrong_learner_name(&name)));
        }
        let patience = timeout(timeout_ms);
        let (id, incarnation) = wait_for(patience, |done| model.job.join(name.clone(), patience, done))?;
        let contributor = Contributor::new(Arc::clone(&model.job), (id, incarnation), Arc::default());
        let contributor =
            contributor.inspect_err(|_| model.job.leave(id, LeaveReason::Asked, LEAVES, Box::new(|_| {})))?;
        // This process lives. When it ends, its connections do.
        model.job.touch(id, LifeSign::Process(Attached::Yes));
        let (share, refusal) = Default::default();
        open(Learner { model, name, contributor: Arc::new(contributor), share, refusal })
    });
    // SAFETY: the caller's promise.
    done(joined.map(|handle| unsafe { store(learner, handle) }))
}

fn free_name() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let host = nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned();
    let host: String =
        host.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(32).collect();
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    format!("{}-{}-{number}", if host.is_empty() { "learner" } else { &host }, std::process::id())
}

pub(crate) fn learner(handle: Handle) -> Outcome<Arc<Learner>> {
    get(handle, "learner")
}

type Written = Result<Arc<Learner>, Arc<Publication>>;

fn written(handle: Handle) -> Outcome<Written> {
    either(handle, "learner or publication")
}

/// Writes `size` bytes at `offset` of the model: into the learner's contribution, or of new weights. Blocks that become
/// whole are sent while the program goes on. What is not written counts as zero in a contribution, and keeps its value
/// in new weights. A byte is written once in a contribution.
///
/// -EFBIG past the model's end, -EINVAL for a byte that was sent already, -EBUSY while a commit runs, -ENOTCONN if the
/// learner is no longer in the job, -EIO if the contribution was dropped.
///
/// # Safety
/// `data` points to `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_write(
    handle: Handle,
    data: *const u8,
    size: usize,
    offset: u64,
    timeout_ms: u32,
) -> c_int {
    done(written(handle).and_then(|of| {
        // SAFETY: the caller's promise.
        let data = unsafe { bytes(data, size) }?;
        match of {
            Ok(learner) => learner.write(offset, data, timeout(timeout_ms)),
            Err(publication) => publication.write(offset, data),
        }
    }))
}

/// Ends a contribution, or publishes new weights. When it returns 0, the contribution is taken and counts, or the
/// version is out.
///
/// -ETIMEDOUT: the contribution is still open, and may be committed again or aborted. After another error only an abort
/// helps. -EINVAL if nothing was written. New weights end in any case.
#[unsafe(no_mangle)]
pub extern "C" fn modelio_commit(handle: Handle, timeout_ms: u32) -> c_int {
    done(written(handle).and_then(|of| match of {
        Ok(learner) => learner.commit(timeout(timeout_ms)),
        Err(publication) => publication.commit(timeout(timeout_ms)),
    }))
}

/// Takes back what was written and not committed. Nothing of it counts when this has returned 0. A commit that another
/// thread waits for ends with -EINTR then, unless it counts already.
///
/// -EBUSY if that commit does not end in time.
///
/// -EIO if a commit that had no answer counts, or may count; `modelio_error` says which.
#[unsafe(no_mangle)]
pub extern "C" fn modelio_abort(handle: Handle, timeout_ms: u32) -> c_int {
    done(written(handle).and_then(|of| match of {
        Ok(learner) => learner.abort(timeout(timeout_ms)),
        Err(publication) => {
            publication.abort();
            Ok(())
        }
    }))
}

/// Says that the learner works on something else, such as an evaluation, so that others wait for it longer than
/// `control/patience`. To be called more often than that.
///
/// -ENOTCONN if it is no longer in the job.
#[unsafe(no_mangle)]
pub extern "C" fn modelio_touch(handle: Handle) -> c_int {
    done(learner(handle).and_then(|learner| {
        let (job, id) = (&learner.model.job, learner.contributor.learner());
        if !job.has_learner(id) {
            return Err(ShardError::UnknownLearner(id).into());
        }
        job.touch(id, LifeSign::Works);
        Ok(())
    }))
}

/// Reduces `count` numbers (64 at most) with those of all learners of the job: `op` is "mean", "sum", "min" or
/// "max". Waits for the others, and stores the results in place of the numbers.
///
/// -ETIMEDOUT if one of them does not come in time: the numbers do not count then.
///
/// # Safety
/// `op` is a string; `values` points to `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_all_reduce(
    handle: Handle,
    op: *const c_char,
    values: *mut f64,
    count: usize,
    timeout_ms: u32,
) -> c_int {
    done(learner(handle).and_then(|learner| {
        // SAFETY: the caller's promises.
        let op = unsafe { string(op, "the operation") }?;
        let wrong = |_| Failure::invalid(format!("all_reduce has no operation {op:?}"));
        let op: ReduceOp = op.parse().map_err(wrong)?;
        let most = libmodelio::wire::MAX_ALL_REDUCE;
        if values.is_null() || !(1..=most).contains(&count) {
            return Err(Failure::invalid(format!("all_reduce takes 1 to {most} numbers")));
        }
        // SAFETY: as above.
        let values = unsafe { std::slice::from_raw_parts_mut(values, count) };
        let (id, patience) = (learner.contributor.learner(), timeout(timeout_ms));
        let ask = |done| learner.model.job.all_reduce(id, op, values.to_vec(), patience, done);
        let reduced: Vec<f64> =
            wait_for(patience, ask).map_err(|error: ShardError| learner.model.explained(error))?;
        values.iter_mut().zip(reduced).for_each(|(value, reduced)| *value = reduced);
        Ok(())
    }))
}
