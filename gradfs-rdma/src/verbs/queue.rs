//! Completion queues. One thread polls each of them.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use parking_lot::Mutex;
use rdma_sys as sys;

use super::receives::{RECEIVE, Receives};
use super::{Context, Domain, VerbsError};

/// The most completions that are taken from the queue at once.
const BATCH: usize = 32;
/// A message came with immediate data.
const WITH_IMMEDIATE: u32 = sys::ibv_wc_flags::IBV_WC_WITH_IMM.0;

/// The outcome of a piece of work.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All work of the queue pair up to this one is done.
    Sent(u64),
    /// A peer has written, and notifies this end by this word.
    Notified(u32),
    /// The work has failed, and with it the queue pair.
    Failed {
        /// The number of the work. `None` for a receive.
        work: Option<u64>,
        /// The name in libibverbs.
        why: String,
    },
    /// A peer has sent a message without a word, which gradfs never does.
    Strange,
}

/// The completion of a piece of work or of a receive. Only the device makes completions: memory is freed because of
/// them.
#[derive(Debug, PartialEq, Eq)]
pub struct Completion {
    pair: Option<u32>,
    pub(super) outcome: Outcome,
    is_receive: bool,
}

impl Completion {
    /// The number of the queue pair. `None` if the pair has ended meanwhile: a later one may have its number.
    pub fn pair(&self) -> Option<u32> {
        self.pair
    }

    /// Whether the completion took one of the posted receives.
    pub fn is_receive(&self) -> bool {
        self.is_receive
    }
}

#[derive(Debug)]
struct Channel(NonNull<sys::ibv_comp_channel>);

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: the queue that used the channel is gone.
        unsafe { sys::ibv_destroy_comp_channel(self.0.as_ptr()) };
    }
}

/// A completion queue. One thread polls it.
#[derive(Debug)]
pub struct Poller {
    queue: NonNull<sys::ibv_cq>,
    // Destroyed after the queue.
    channel: Channel,
    receives: Receives,
    domain: Arc<Domain>,
    /// Completions that were taken from the queue before a queue pair was destroyed, and not reported yet. The lock is
    /// held while the queue is polled, so that completions stay in order.
    early: Mutex<Vec<Completion>>,
    room: Mutex<Room>,
}

/// The room of a queue: all of it, and the reserved part.
#[derive(Debug)]
struct Room {
    all: u32,
    reserved: u32,
}

/// A part of a queue's room, for the completions of one queue pair.
#[derive(Debug)]
pub struct Reserved {
    poller: Arc<Poller>,
    count: u32,
}

impl Reserved {
    /// The queue.
    pub fn poller(&self) -> &Arc<Poller> {
        &self.poller
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.poller.room.lock().reserved -= self.count;
    }
}

// SAFETY: libibverbs allows calls on a queue and its channel from all threads.
unsafe impl Send for Poller {}
// SAFETY: as above.
unsafe impl Sync for Poller {}

impl Poller {
    /// A queue for `depth` completions. All its queue pairs share `shared` receives for messages of peers;
    /// with 0, each has its own.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn new(domain: &Arc<Domain>, depth: u32, shared: u32) -> Result<Arc<Poller>, VerbsError> {
        let context = domain.context();
        let (_, most_done, most_shared) = context.depths()?;
        // SAFETY: the context is open.
        let channel = NonNull::new(unsafe { sys::ibv_create_comp_channel(context.raw()) });
        let channel = Channel(channel.ok_or_else(|| VerbsError::last("making a completion channel"))?);
        // SAFETY: the channel was just made.
        let fd = unsafe { BorrowedFd::borrow_raw(channel.0.as_ref().fd) };
        let flags = fcntl(fd, FcntlArg::F_GETFL).map(OFlag::from_bits_retain);
        let set = flags.and_then(|flags| fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)));
        set.map_err(|errno| VerbsError::Call { doing: "making a completion channel", errno })?;
        let depth = libc::c_int::try_from(depth.min(most_done)).unwrap_or(libc::c_int::MAX);
        // SAFETY: context and channel live longer than the queue.
        let queue =
            unsafe { sys::ibv_create_cq(context.raw(), depth, ptr::null_mut(), channel.0.as_ptr(), 0) };
        let queue = NonNull::new(queue).ok_or_else(|| VerbsError::last("making a completion queue"))?;
        // SAFETY: the queue was just made.
        let all = unsafe { queue.as_ref().cqe }.max(0).cast_unsigned();
        // Queue pairs need room, too.
        let shared = shared.min(most_shared).min(all / 2);
        let receives = match shared {
            0 => Ok(Receives::Own),
            count => Receives::shared(domain, count),
        };
        let domain = Arc::clone(domain);
        let room = Mutex::new(Room { all, reserved: shared });
        let early = Mutex::default();
        match receives {
            Ok(receives) => Ok(Arc::new(Poller { queue, channel, receives, domain, early, room })),
            Err(error) => {
                // SAFETY: nothing uses the queue yet.
                unsafe { sys::ibv_destroy_cq(queue.as_ptr()) };
                Err(error)
            }
        }
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_cq {
        self.queue.as_ptr()
    }

    /// Reserves room for `count` more completions, because a queue that overflows is lost. The queue grows if the
    /// device supports that.
    ///
    /// # Errors
    /// [`VerbsError::QueueFull`].
    pub fn reserve(self: &Arc<Poller>, count: u32) -> Result<Reserved, VerbsError> {
        let mut room = self.room.lock();
        let wanted = room.reserved.saturating_add(count);
        if wanted > room.all {
            let most = self.context().depths()?.1;
            let larger = room.all.saturating_mul(2).max(wanted).min(most);
            let grown = wanted <= larger
                && libc::c_int::try_from(larger).is_ok_and(|larger| {
                    // SAFETY: the queue lives, and libibverbs allows this call while the queue is polled.
                    unsafe { sys::ibv_resize_cq(self.raw(), larger) == 0 }
                });
            // SAFETY: as above.
            room.all = unsafe { self.queue.as_ref().cqe }.max(0).cast_unsigned();
            if !grown || wanted > room.all {
                return Err(VerbsError::QueueFull { all: room.all, wanted });
            }
        }
        room.reserved = wanted;
        drop(room);
        Ok(Reserved { poller: Arc::clone(self), count })
    }

    /// The receives of its queue pairs.
    pub fn receives(&self) -> &Receives {
        &self.receives
    }

    /// Posts one more receive if all queue pairs share them, after one was taken. The pair that took it may be gone.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn wait_for_another(&self) -> Result<(), VerbsError> {
        match &self.receives {
            Receives::Own => Ok(()),
            Receives::Shared(shared) => shared.post(),
        }
    }

    /// Its device.
    pub fn context(&self) -> Context {
        self.domain.context()
    }

    /// Its domain.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Has the descriptor become readable at the next completion. Earlier completions do not count, so the caller polls
    /// once more after this.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn arm(&self) -> Result<(), VerbsError> {
        // SAFETY: the queue lives as long as `self`.
        let result = unsafe { sys::ibv_req_notify_cq(self.raw(), 0) };
        VerbsError::check_number("arming a completion queue", result)
    }

    /// Takes the events for which the descriptor has become readable.
    pub fn disarm(&self) {
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel does not block. Each event is acknowledged, as the destruction of the queue requires.
        unsafe {
            while sys::ibv_get_cq_event(self.channel.0.as_ptr(), &raw mut queue, &raw mut context) == 0 {
                sys::ibv_ack_cq_events(queue, 1);
            }
        }
    }

    /// Adds completions to `done`, up to a limit. True if there may be more.
    ///
    /// # Errors
    /// [`VerbsError::Call`]: the queue is lost.
    pub fn poll(&self, done: &mut Vec<Completion>) -> Result<bool, VerbsError> {
        let mut early = self.early.lock();
        done.append(&mut early);
        self.take(done)
    }

    /// Takes the present completions, so that [`Self::poll`] reports them. The destruction of the queue pair `ended`
    /// may discard its completions, and then taken receives would not be counted. From now on they belong to no pair.
    pub(super) fn take_early(&self, ended: u32) {
        let mut early = self.early.lock();
        // The next call of `poll` returns the error.
        while let Ok(true) = self.take(&mut early) {}
        for news in early.iter_mut().filter(|news| news.pair == Some(ended)) {
            news.pair = None;
        }
    }

    fn take(&self, done: &mut Vec<Completion>) -> Result<bool, VerbsError> {
        let mut news: [MaybeUninit<sys::ibv_wc>; BATCH] = [const { MaybeUninit::uninit() }; BATCH];
        // SAFETY: the queue lives. The call fills as many entries as it returns, and no more than the array has.
        let count = unsafe { sys::ibv_poll_cq(self.raw(), BATCH as i32, news.as_mut_ptr().cast()) };
        let Ok(count) = usize::try_from(count) else {
            return Err(VerbsError::last("polling a completion queue"));
        };
        for entry in &news[..count] {
            // SAFETY: the call has filled the entry.
            let entry = unsafe { entry.assume_init_ref() };
            let is_receive = entry.wr_id & RECEIVE != 0;
            let outcome = if entry.status != sys::ibv_wc_status::IBV_WC_SUCCESS {
                // SAFETY: the call returns a constant string for any number.
                let text = unsafe { CStr::from_ptr(sys::ibv_wc_status_str(entry.status)) };
                let work = (!is_receive).then_some(entry.wr_id);
                Outcome::Failed { work, why: text.to_string_lossy().into_owned() }
            } else if is_receive && entry.wc_flags & WITH_IMMEDIATE != 0 {
                // SAFETY: the entry has immediate data.
                let word = unsafe { entry.imm_data_invalidated_rkey_union.imm_data };
                Outcome::Notified(u32::from_be(word))
            } else if is_receive {
                Outcome::Strange
            } else {
                Outcome::Sent(entry.wr_id)
            };
            done.push(Completion { pair: Some(entry.qp_num), outcome, is_receive });
        }
        Ok(count == BATCH)
    }
}

/// Becomes readable at a completion, once after each [`Poller::arm`].
impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel and its descriptor live as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.channel.0.as_ref().fd) }
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        // SAFETY: each queue pair holds the queue, so none is left.
        let result = unsafe { sys::ibv_destroy_cq(self.raw()) };
        if let Err(error) = VerbsError::check_number("destroying a completion queue", result) {
            tracing::error!(%error, "a completion queue is lost");
        }
    }
}
