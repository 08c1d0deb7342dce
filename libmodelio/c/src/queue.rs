//! Batched asynchronous I/O: `libmodelio::aio` for C.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use libmodelio::aio::{Buffer, Completion, Engine, FileId, Op, Queue, QueueOptions, Ticket};
use nix::errno::Errno;
use parking_lot::Mutex;

use crate::handles::{Handle, Open, check_process, either, get, open};
use crate::learner::Learner;
use crate::model::Weights;
use crate::outcome::{Failure, Outcome, answer, check_place, done, store, timeout};

/// What a request does.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::enum_variant_names, reason = "in C, names of variants are global")]
pub enum ModelioOp {
    /// Reads into `data`.
    ModelioRead = 0,
    /// Writes `data`.
    ModelioWrite = 1,
    /// Commits what was submitted before for the file, as fsync(2) does. It has no data.
    ModelioSync = 2,
}

/// A function that is called with the context and the outcome of a request, by the thread that waits.
pub type ModelioCallback = Option<unsafe extern "C" fn(context: *mut c_void, result: i64)>;

/// The options of a queue. Fill it with zeros first: a zero is the default.
#[repr(C)]
pub struct ModelioQueueOptions {
    /// The most pieces under way (32).
    pub depth: u32,
    /// The most bytes of a piece, into which requests are cut (1 MiB).
    pub piece: u32,
    /// 0: io_uring where it can be used, else threads. 1: io_uring. 2: threads.
    pub engine: u32,
}

/// A request of a queue.
#[repr(C)]
pub struct ModelioRequest {
    /// The file's number in the queue.
    pub file: i32,
    /// One of `enum modelio_op`.
    pub op: u32,
    /// Where in the file.
    pub offset: u64,
    /// The memory. It belongs to the queue until the request has ended.
    pub data: *mut c_void,
    /// Its bytes.
    pub size: usize,
    /// The request ends with -ETIMEDOUT after so many milliseconds, once the kernel has let go of its memory. A
    /// `modelio_wait` sees to that.
    pub timeout_ms: u32,
    /// Called when it has ended. If it is NULL, `modelio_wait` stores a completion.
    pub callback: ModelioCallback,
    /// Given to the callback, or stored with the completion.
    pub context: *mut c_void,
    /// `modelio_submit` stores a number here, for `modelio_cancel`.
    pub id: u64,
}

/// A request that has ended.
#[repr(C)]
pub struct ModelioCompletion {
    /// The request's number.
    pub id: u64,
    /// The request's context.
    pub context: *mut c_void,
    /// The bytes that were moved, or a negative errno.
    pub result: i64,
}

/// What C is told of a request.
#[derive(Clone, Copy)]
struct Asked {
    callback: ModelioCallback,
    context: *mut c_void,
}

// SAFETY: the library only keeps the pointer, for whoever waits.
unsafe impl Send for Asked {}

struct AioQueue {
    queue: Queue,
    asked: Mutex<HashMap<Ticket, Asked>>,
    /// Keeps what its files stand for.
    kept: Mutex<Vec<(FileId, Arc<Learner>)>>,
}

impl Open for AioQueue {
    fn closed(&self) {
        for ended in self.queue.shut_down() {
            // Nobody takes completions any more.
            let _ = ended_for(self, ended);
        }
        self.kept.lock().clear();
    }
}

fn queue(handle: Handle) -> Outcome<Arc<AioQueue>> {
    get(handle, "queue")
}

/// Opens a queue. `options` is NULL for the defaults.
///
/// # Safety
/// `options` is NULL or points to options; `queue` points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_queue(options: *const ModelioQueueOptions, queue: *mut Handle) -> c_int {
    let mut wanted = QueueOptions::default();
    let opened = (|| {
        check_place(queue)?;
        check_process()?;
        // SAFETY: the caller's promise.
        if let Some(given) = unsafe { options.as_ref() } {
            let or = |given: u32, default: u32| if given == 0 { default } else { given };
            wanted.depth = or(given.depth, wanted.depth);
            wanted.piece = or(given.piece, wanted.piece as u32) as usize;
            wanted.engine = match given.engine {
                0 => Engine::Auto,
                1 => Engine::Uring,
                2 => Engine::Threads,
                other => return Err(Failure::invalid(format!("a queue has no engine {other}"))),
            };
        }
        let (asked, kept) = Default::default();
        open(AioQueue { queue: Queue::new(wanted)?, asked, kept })
    })();
    // SAFETY: as above.
    done(opened.map(|handle| unsafe { store(queue, handle) }))
}

/// Adds a file to a queue: one of a mount, of a disk, or a block device. The queue has a descriptor of its own then.
///
/// Returns the file's number in the queue.
#[unsafe(no_mangle)]
pub extern "C" fn modelio_add_file(handle: Handle, descriptor: c_int) -> c_int {
    let added = queue(handle).and_then(|queue| {
        if descriptor < 0 {
            return Err(Failure::new(Errno::EBADF, format!("descriptor {descriptor} is not open")));
        }
        // SAFETY: it is used for this call alone, and a wrong one is refused by the kernel.
        let file = unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned()?;
        Ok(queue.queue.file(file)?.0)
    });
    answer(added) as c_int
}

/// Adds a learner or weights to a queue, without a mount: writes go into the learner's contribution, and
/// `MODELIO_SYNC` commits it; reads are of the weights.
///
/// Returns the file's number in the queue.
#[unsafe(no_mangle)]
pub extern "C" fn modelio_add(handle: Handle, learner_or_weights: Handle) -> c_int {
    let added = queue(handle).and_then(|queue| {
        let file = match either::<Learner, Weights>(learner_or_weights, "learner or weights")? {
            Ok(learner) => {
                let file =
                    queue.queue.learner(Arc::clone(&learner.contributor), Arc::clone(&learner.share))?;
                queue.kept.lock().push((file, learner));
                file
            }
            Err(weights) => queue.queue.version(weights.reader.again().ok_or(Errno::ENOENT)?)?,
        };
        Ok(file.0)
    });
    answer(added) as c_int
}

/// Takes a file out of a queue. -EBUSY while a request uses it.
#[unsafe(no_mangle)]
pub extern "C" fn modelio_remove(handle: Handle, file: c_int) -> c_int {
    done(queue(handle).and_then(|queue| {
        let file = FileId(usize::try_from(file).map_err(|_| Errno::EBADF)?);
        queue.queue.close(file)?;
        queue.kept.lock().retain(|(of, _)| *of != file);
        Ok(())
    }))
}

/// Registers memory, so that requests in it take less of the kernel's time: once for each, at the start. It stays
/// registered, and must stay mapped, until the queue is closed.
///
/// -ENOSPC after 64, -EINVAL for more than 1 GiB, -ENOMEM above `ulimit -l`. Requests work without.
///
/// # Safety
/// `data` points to `size` bytes that stay mapped as long as the queue is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_register(handle: Handle, data: *mut c_void, size: usize) -> c_int {
    done(queue(handle).and_then(|queue| {
        // SAFETY: it is registered, and not touched.
        let memory = unsafe { lent(data, size) }?;
        // SAFETY: the caller's promise.
        Ok(unsafe { queue.queue.register(&memory) }?)
    }))
}

/// # Safety
/// As for [`Buffer::lent`].
unsafe fn lent(data: *mut c_void, size: usize) -> Outcome<Buffer> {
    if size == 0 {
        return Ok(Buffer::none());
    }
    let start = NonNull::new(data.cast()).ok_or_else(|| Failure::invalid("the data is NULL"))?;
    if size > isize::MAX as usize {
        return Err(Failure::invalid("the data is longer than memory can be"));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { Buffer::lent(start, size) })
}

/// Submits `count` requests. Their memory belongs to the queue until each has ended.
///
/// Returns how many were taken, in their order; the first of the others is wrong, and `modelio_error` says why. If it is
/// the first of all, returns its error: -EBADF for no such file, -EINVAL, or -EAGAIN if the queue has 16,384 requests.
///
/// # Safety
/// `requests` points to `count` requests, and each one's data to `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_submit(
    handle: Handle,
    requests: *mut ModelioRequest,
    count: usize,
) -> isize {
    answer(queue(handle).and_then(|queue| {
        if requests.is_null() && count > 0 {
            return Err(Failure::invalid("the requests are NULL"));
        }
        for at in 0..count {
            // SAFETY: the caller's promise.
            let request = unsafe { &mut *requests.add(at) };
            // SAFETY: as above.
            match unsafe { submit(&queue, request) } {
                Ok(()) => {}
                Err(failure) if at > 0 => {
                    answer(Err(failure));
                    return Ok(at);
                }
                Err(failure) => return Err(failure),
            }
        }
        Ok(count)
    }))
}

/// # Safety
/// The request's data is memory that belongs to the queue.
unsafe fn submit(queue: &AioQueue, request: &mut ModelioRequest) -> Outcome<()> {
    let (op, size) = match request.op {
        op if op == ModelioOp::ModelioRead as u32 => (Op::Read, request.size),
        op if op == ModelioOp::ModelioWrite as u32 => (Op::Write, request.size),
        op if op == ModelioOp::ModelioSync as u32 => (Op::Sync, 0),
        other => return Err(Failure::invalid(format!("there is no operation {other}"))),
    };
    let no_file = || Failure::new(Errno::EBADF, format!("the queue has no file {}", request.file));
    let file = FileId(usize::try_from(request.file).map_err(|_| no_file())?);
    // SAFETY: the caller's promise.
    let data = unsafe { lent(request.data, size) }?;
    // Who waits finds the ticket in the table.
    let mut asked = queue.asked.lock();
    let submitted = queue.queue.submit(file, op, request.offset, data, timeout(request.timeout_ms));
    let ticket = submitted.map_err(|errno| match errno {
        Errno::EBADF => no_file(),
        Errno::EAGAIN => Failure::new(errno, "the queue has as many requests as it can: wait for some"),
        other => other.into(),
    })?;
    asked.insert(ticket, Asked { callback: request.callback, context: request.context });
    request.id = ticket.0;
    Ok(())
}

/// Waits until `min` requests have ended, or all that there are, or the time is over. Of those that have ended it takes
/// `max` at most: it calls callbacks, and stores the completions of the others. Callbacks may call the library, and must
/// not throw.
///
/// Returns the number of completions stored. -ECANCELED if the queue was closed.
///
/// # Safety
/// `completions` has room for `max`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_wait(
    handle: Handle,
    min: usize,
    completions: *mut ModelioCompletion,
    max: usize,
    timeout_ms: u32,
) -> isize {
    answer(queue(handle).and_then(|queue| {
        if completions.is_null() || max == 0 {
            return Err(Failure::invalid("there is no room for a completion"));
        }
        let mut stored = 0;
        for ended in queue.queue.wait_for(min, max, timeout(timeout_ms))? {
            if let Some(completion) = ended_for(&queue, ended) {
                // SAFETY: the caller's promise, and no more than `max` have ended.
                unsafe { completions.add(stored).write(completion) };
                stored += 1;
            }
        }
        Ok(stored)
    }))
}

/// Calls the request's callback, or returns its completion.
fn ended_for(queue: &AioQueue, ended: Completion) -> Option<ModelioCompletion> {
    let asked = queue.asked.lock().remove(&ended.ticket)?;
    let result = ended.result.map_or_else(|errno| -(errno as i64), |bytes| bytes as i64);
    match asked.callback {
        None => Some(ModelioCompletion { id: ended.ticket.0, context: asked.context, result }),
        Some(callback) => {
            // SAFETY: C has given both together, for this call.
            unsafe { callback(asked.context, result) };
            None
        }
    }
}

/// Cancels a request. It ends with -ECANCELED, unless it is over by then.
#[unsafe(no_mangle)]
pub extern "C" fn modelio_cancel(handle: Handle, id: u64) -> c_int {
    done(queue(handle).map(|queue| queue.queue.cancel(Ticket(id))))
}

/// A descriptor that poll(2) finds readable when something may have ended. `modelio_wait` makes it silent again; with a
/// timeout of 0 it does not wait. The descriptor is the caller's to close.
#[unsafe(no_mangle)]
pub extern "C" fn modelio_queue_event(handle: Handle) -> c_int {
    let event = queue(handle).and_then(|queue| Ok(queue.queue.event()?.into_raw_fd() as usize));
    answer(event) as c_int
}
