//! An end of a job that its program reaches by the C library alone.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ops::Range;
use std::ptr::null;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libmodelio::bytes::region::Region;
use libmodelio::client::{CommitNotice, Done, SetError};
use libmodelio::vocabulary::block_slot::Placement;
use libmodelio::vocabulary::controls::ControlError;
use libmodelio::vocabulary::ids::{BlockId, Incarnation, LearnerId, Step, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::shard_error::ShardError;
// This crate has the symbols below.
use modelio as _;

use crate::site::{LONG, Message, Reply};

type Handle = i64;

/// `struct modelio_version_info`.
#[repr(C)]
struct Info {
    data: *const u8,
    size: u64,
    version: u64,
    epoch: u64,
}

// As modelio.h declares them.
unsafe extern "C" {
    fn modelio_connect(url: *const c_char, options: *const c_void, model: *mut Handle) -> c_int;
    fn modelio_close(handle: Handle) -> c_int;
    fn modelio_join(model: Handle, name: *const c_char, timeout_ms: u32, learner: *mut Handle) -> c_int;
    fn modelio_publish(model: Handle, publication: *mut Handle) -> c_int;
    fn modelio_write(handle: Handle, data: *const u8, size: usize, offset: u64, timeout_ms: u32) -> c_int;
    fn modelio_commit(handle: Handle, timeout_ms: u32) -> c_int;
    fn modelio_abort(learner: Handle, timeout_ms: u32) -> c_int;
    fn modelio_open_weights(handle: Handle, timeout_ms: u32, weights: *mut Handle) -> c_int;
    fn modelio_open_version(model: Handle, version: u64, timeout_ms: u32, weights: *mut Handle) -> c_int;
    fn modelio_weights(weights: Handle, info: *mut Info) -> c_int;
    fn modelio_wait_version(model: Handle, newer_than: u64, timeout_ms: u32, version: *mut u64) -> c_int;
    fn modelio_set(handle: Handle, file: *const c_char, value: *const c_char, timeout_ms: u32) -> c_int;
    fn modelio_get(handle: Handle, file: *const c_char, buffer: *mut c_char, size: usize) -> isize;
    fn modelio_error() -> *const c_char;
}

/// What a call says that was refused.
#[derive(Debug)]
struct Refused {
    errno: c_int,
    text: String,
}

impl Refused {
    /// The numbers in its text.
    fn numbers(&self) -> Vec<u32> {
        self.text.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
    }

    /// It is about a byte that was written before.
    fn is_rewrite(&self) -> bool {
        self.errno == libc::EINVAL && self.text.contains("already")
    }

    /// The error of the job that C tells of.
    fn of(self, learner: LearnerId) -> ShardError {
        match (self.errno, &self.numbers()[..]) {
            (libc::ETIMEDOUT, _) => ShardError::TimedOut(self.text.into()),
            (libc::EINTR, _) => ShardError::Interrupted,
            (libc::ENOTCONN, _) => ShardError::UnknownLearner(learner),
            (libc::EDQUOT, [limit, ..]) => ShardError::TooManyLearners(*limit as usize),
            (libc::EINVAL, [block, ..]) if self.text.contains("NaN") => {
                ShardError::NonFinite(BlockId(*block))
            }
            _ => ShardError::NotAllowed(format!("{self:?}")),
        }
    }
}

fn checked(answer: c_int) -> Result<(), Refused> {
    if answer >= 0 {
        return Ok(());
    }
    // SAFETY: a string that stays until this thread's next call that fails.
    let text = unsafe { CStr::from_ptr(modelio_error()) }.to_string_lossy().into_owned();
    Err(Refused { errno: -answer, text })
}

fn milliseconds(timeout: Duration) -> u32 {
    timeout.as_millis().try_into().unwrap()
}

/// Calls that make a handle.
fn opened(call: impl FnOnce(*mut Handle) -> c_int) -> Result<Handle, Refused> {
    let mut handle = 0;
    checked(call(&mut handle))?;
    Ok(handle)
}

fn close(handle: Handle) {
    // SAFETY: it takes any number.
    checked(unsafe { modelio_close(handle) }).unwrap();
}

fn write(handle: Handle, at: u64, bytes: &[u8]) -> Result<(), Refused> {
    // SAFETY: the bytes are there until the call returns.
    checked(unsafe { modelio_write(handle, bytes.as_ptr(), bytes.len(), at, milliseconds(LONG)) })
}

fn commit(handle: Handle, timeout: Duration) -> Result<(), Refused> {
    // SAFETY: it takes any number.
    checked(unsafe { modelio_commit(handle, milliseconds(timeout)) })
}

fn taken_from(memory: &Region, range: &Range<u64>) -> Vec<u8> {
    // SAFETY: it is the test's, which stores nothing there while a call is under way.
    unsafe { memory.memory().bytes(range.start as usize..range.end as usize) }.to_vec()
}

/// The version of open weights, and their bytes. Closes them.
fn taken(weights: Handle) -> (Version, Vec<u8>) {
    let mut info = Info { data: null(), size: 0, version: 0, epoch: 0 };
    // SAFETY: the place is there.
    checked(unsafe { modelio_weights(weights, &mut info) }).unwrap();
    // SAFETY: so many bytes stay until the handle is closed.
    let bytes = unsafe { std::slice::from_raw_parts(info.data, info.size as usize) }.to_vec();
    close(weights);
    (Version(info.version), bytes)
}

/// The text of a file.
fn text(handle: Handle, file: &str) -> String {
    let (file, mut text) = (CString::new(file).unwrap(), vec![0u8; 4096]);
    // SAFETY: a handle, a string, and so many bytes.
    let length = unsafe { modelio_get(handle, file.as_ptr(), text.as_mut_ptr().cast(), text.len()) };
    String::from_utf8(text[..usize::try_from(length).unwrap()].to_vec()).unwrap()
}

/// What `status` of a learner says.
fn incarnation(learner: Handle) -> Incarnation {
    let text = text(learner, "status");
    let number = text.lines().find_map(|line| line.strip_prefix("incarnation: ")).expect("an incarnation");
    Incarnation(number.parse().unwrap())
}

/// A learner that was joined by C.
#[derive(Clone, Copy)]
struct Joined {
    handle: Handle,
    /// The contributions that were taken.
    taken: u64,
}

/// A model that C is connected to.
pub struct Model {
    handle: Handle,
    layout: Arc<ModelLayout>,
    learners: Mutex<BTreeMap<LearnerId, Joined>>,
}

impl Model {
    pub fn connect(url: &str, layout: &Arc<ModelLayout>) -> Arc<Model> {
        let url = CString::new(url).unwrap();
        // SAFETY: a string, no options, and a place.
        let handle = opened(|place| unsafe { modelio_connect(url.as_ptr(), null(), place) }).unwrap();
        Arc::new(Model { handle, layout: Arc::clone(layout), learners: Mutex::default() })
    }

    fn joined(&self, learner: LearnerId) -> Result<Joined, ShardError> {
        self.learners.lock().unwrap().get(&learner).copied().ok_or(ShardError::UnknownLearner(learner))
    }

    pub fn has(&self, learner: LearnerId) -> bool {
        self.joined(learner).is_ok()
    }

    /// Answers a message from a thread of its own.
    pub fn ask(self: &Arc<Self>, message: Message, timeout: Duration, done: Done<Reply>) {
        let model = Arc::clone(self);
        std::thread::spawn(move || done(model.answer(message, timeout)));
    }

    fn answer(&self, message: Message, timeout: Duration) -> Result<Reply, ShardError> {
        match message {
            Message::Join { name } => self.join(name, timeout),
            Message::Leave { learner, .. } => {
                close(self.joined(learner)?.handle);
                self.learners.lock().unwrap().remove(&learner);
                Ok(Reply::Done)
            }
            // The first write asks for it.
            Message::Open { learner } => {
                Ok(Reply::Opened { step: Step(self.joined(learner)?.taken + 1), staging_lent: false })
            }
            Message::Commit { learner, step, notice } => self.commit(learner, step, &notice, timeout),
            Message::Abort { learner } => {
                // SAFETY: it takes any number.
                let aborted = unsafe { modelio_abort(self.joined(learner)?.handle, milliseconds(timeout)) };
                checked(aborted).map(|()| Reply::Done).map_err(|refused| refused.of(learner))
            }
            // Commits of C are taken back with the contribution, or not at all.
            Message::Withdraw { .. } | Message::WithdrawAssign { .. } => Ok(Reply::Done),
            Message::AwaitStep { learner } => {
                let handle = self.joined(learner)?.handle;
                // SAFETY: a handle, and a place.
                let weights =
                    opened(|place| unsafe { modelio_open_weights(handle, milliseconds(timeout), place) });
                Ok(Reply::Version(taken(weights.map_err(|refused| refused.of(learner))?).0))
            }
            Message::Allocate => Err(ShardError::NotAllowed("C writes from its own memory".to_owned())),
            Message::Assign { buffer, written } => self.publish(&buffer, &written, timeout),
        }
    }

    fn join(&self, name: String, timeout: Duration) -> Result<Reply, ShardError> {
        let text = CString::new(name.clone()).unwrap();
        let join = |place| {
            // SAFETY: a handle, a string, and a place.
            unsafe { modelio_join(self.handle, text.as_ptr(), milliseconds(timeout), place) }
        };
        let handle = match opened(join) {
            Err(refused) if refused.errno == libc::EEXIST => return Err(ShardError::NameTaken(name)),
            handle => handle.map_err(|refused| refused.of(LearnerId(0)))?,
        };
        // C tells no numbers of learners.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let learner = LearnerId(NEXT.fetch_add(1, Ordering::Relaxed));
        self.learners.lock().unwrap().insert(learner, Joined { handle, taken: 0 });
        Ok(Reply::Joined { learner, incarnation: incarnation(handle) })
    }

    /// Writes what was left to the commit, and commits. One that was taken is not sent again.
    fn commit(
        &self,
        learner: LearnerId,
        step: Step,
        notice: &CommitNotice,
        timeout: Duration,
    ) -> Result<Reply, ShardError> {
        let joined = self.joined(learner)?;
        if step.0 <= joined.taken {
            return Ok(Reply::Done);
        }
        for block in notice.unchecked.ones() {
            let range = self.layout.block_bytes(BlockId(block as u32));
            self.write(learner, range.start, &taken_from(&notice.staging, &range))?;
        }
        commit(joined.handle, timeout).map_err(|refused| refused.of(learner))?;
        self.learners.lock().unwrap().get_mut(&learner).unwrap().taken = step.0;
        Ok(Reply::Done)
    }

    pub fn write(&self, learner: LearnerId, at: u64, bytes: &[u8]) -> Result<Placement, ShardError> {
        match write(self.joined(learner)?.handle, at, bytes) {
            Ok(()) => Ok(Placement::Reduced),
            Err(refused) if refused.is_rewrite() => Ok(Placement::Duplicate),
            Err(refused) => Err(refused.of(learner)),
        }
    }

    fn publish(
        &self,
        buffer: &Region,
        written: &[Range<u64>],
        timeout: Duration,
    ) -> Result<Reply, ShardError> {
        // SAFETY: a handle, and a place.
        let publication = opened(|place| unsafe { modelio_publish(self.handle, place) });
        let publish = |publication| {
            for range in written {
                write(publication, range.start, &taken_from(buffer, range))?;
            }
            commit(publication, timeout)?;
            close(publication);
            Ok(Reply::Done)
        };
        publication.and_then(publish).map_err(|refused: Refused| refused.of(LearnerId(0)))
    }

    pub fn newest(&self) -> (Version, Vec<u8>) {
        // SAFETY: a handle, and a place.
        let weights = opened(|place| unsafe { modelio_open_weights(self.handle, milliseconds(LONG), place) });
        taken(weights.unwrap())
    }

    /// A version that is held or retained, if it is.
    pub fn version(&self, version: Version) -> Option<Vec<u8>> {
        // SAFETY: a handle, and a place.
        match opened(|place| unsafe {
            modelio_open_version(self.handle, version.0, milliseconds(LONG), place)
        }) {
            Ok(weights) => {
                let (found, bytes) = taken(weights);
                assert_eq!(found, version);
                Some(bytes)
            }
            Err(refused) => {
                assert_eq!(refused.errno, libc::ENOENT, "{refused:?}");
                None
            }
        }
    }

    pub fn sees(&self, version: u64) {
        let Some(before) = version.checked_sub(1) else { return };
        // SAFETY: a handle, and a place.
        checked(unsafe { modelio_wait_version(self.handle, before, milliseconds(LONG), &mut 0) }).unwrap();
    }

    pub fn setting(&self, name: &str) -> String {
        text(self.handle, &format!("control/{name}")).trim_end().to_owned()
    }

    pub fn set(&self, name: &str, value: &str) -> Result<(), SetError> {
        let [file, text] =
            [format!("control/{name}"), value.to_owned()].map(|text| CString::new(text).unwrap());
        // SAFETY: a handle, and strings.
        let set = unsafe { modelio_set(self.handle, file.as_ptr(), text.as_ptr(), milliseconds(LONG)) };
        checked(set).map_err(|refused| match refused.errno {
            libc::ENOENT => ControlError::Unknown(name.to_owned()).into(),
            libc::EINVAL if refused.text.contains(" needs ") => ControlError::Conflict(refused.text).into(),
            libc::EINVAL => {
                ControlError::Invalid { name: "", value: value.to_owned(), expected: refused.text }.into()
            }
            _ => SetError::Unanswered(refused.of(LearnerId(0))),
        })
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.learners.get_mut().unwrap().values().for_each(|learner| close(learner.handle));
        close(self.handle);
    }
}
