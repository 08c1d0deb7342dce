//! Queue pairs: work is posted in chains, with one doorbell each, and reported when it is done.
//!
//! The device does the work of one queue pair in order, and reports only some of it: when a piece is reported, all
//! earlier ones are done, too. With iWARP, a write may be done before an earlier READ, so the device reports each
//! piece.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rdma_sys as sys;

use super::join::mtu_of;
use super::posted::Posted;
use super::queue::Outcome;
use super::receives::{Receives, nothing};
use super::work::{Done, Work};
use super::{CmId, Completion, Poller, Reserved, VerbsError};
use crate::Mtu;

/// The limits of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairLimits {
    /// The most pieces of work outstanding.
    pub depth: u32,
    /// The most bytes that the work itself contains, so that the device does not fetch them from memory. 0 for none.
    /// The device may support fewer.
    pub inline: u32,
    /// One in so many pieces of work is reported. The last of a chain always is.
    pub report_every: u32,
    /// The number of receives, if each queue pair has its own.
    pub receives: u32,
}

struct PairState {
    posted: Posted,
    /// The number of pieces since the last one that is to be reported.
    since_report: u32,
    requests: Vec<sys::ibv_send_wr>,
    pieces: Vec<sys::ibv_sge>,
    broken: Option<String>,
    /// The queue pair is destroyed, and another one may have its number.
    ended: bool,
}

// SAFETY: the pointers in `requests` are written under the lock just before they are posted, and not used afterwards.
unsafe impl Send for PairState {}

/// One queue pair.
#[derive(Debug)]
pub struct Pair {
    // Dropped first: then the device no longer uses the memory of any work.
    cm_id: CmId,
    reserved: Reserved,
    raw: *mut sys::ibv_qp,
    number: u32,
    limits: PairLimits,
    state: Mutex<PairState>,
    /// The number of posted chains.
    doorbells: AtomicU64,
    posted: AtomicU64,
}

// SAFETY: libibverbs allows calls on a queue pair from all threads, and the pair lives as long as its identifier.
unsafe impl Send for Pair {}
// SAFETY: as above.
unsafe impl Sync for Pair {}

impl std::fmt::Debug for PairState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PairState")
            .field("outstanding", &self.posted.len())
            .field("broken", &self.broken)
            .finish()
    }
}

impl Pair {
    /// Reserves the room of `poller` that [`Self::new`] needs.
    ///
    /// # Errors
    /// [`VerbsError::QueueFull`].
    pub fn reserve(poller: &Arc<Poller>, limits: PairLimits) -> Result<Reserved, VerbsError> {
        let own = matches!(poller.receives(), Receives::Own);
        poller.reserve(limits.depth.saturating_add(if own { limits.receives } else { 0 }))
    }

    /// A queue pair for a connection whose route is known. Its completions go to the queue in which room was reserved,
    /// for the same limits.
    ///
    /// # Errors
    /// [`VerbsError::Call`], with the identifier, so that the caller can refuse the peer.
    #[allow(clippy::result_large_err)] // Seldom.
    pub fn new(cm_id: CmId, reserved: Reserved, limits: PairLimits) -> Result<Arc<Pair>, (VerbsError, CmId)> {
        match Pair::begin(&cm_id, reserved.poller(), limits) {
            Ok((raw, limits)) => Ok(Arc::new(Pair::with(cm_id, reserved, raw, limits))),
            Err(error) => Err((error, cm_id)),
        }
    }

    /// The queue pair, with its own receives posted if it has any, and the limits that the device has granted.
    fn begin(
        cm_id: &CmId,
        poller: &Arc<Poller>,
        limits: PairLimits,
    ) -> Result<(*mut sys::ibv_qp, PairLimits), VerbsError> {
        let (most, _, _) = poller.context().depths()?;
        let depth = limits.depth.min(most).max(1);
        let own = matches!(poller.receives(), Receives::Own);
        let receives = if own { limits.receives.min(most) } else { 0 };
        let mut init = sys::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: poller.raw(),
            recv_cq: poller.raw(),
            srq: poller.receives().raw(),
            cap: sys::ibv_qp_cap {
                max_send_wr: depth,
                max_recv_wr: receives.max(1),
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: limits.inline,
            },
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let mut inline = limits.inline;
        let raw = loop {
            match cm_id.make_pair(poller.domain(), &mut init) {
                Err(VerbsError::Call { .. }) if inline > 0 => {
                    // A device that supports less refuses the request, and does not say how much it supports.
                    inline /= 2;
                    init.cap.max_inline_data = inline;
                }
                made => break made?,
            }
        };
        for _ in 0..receives {
            // SAFETY: the pair was just made, and the identifier that will destroy it lives.
            unsafe { post_receive(raw)? };
        }
        let inline = init.cap.max_inline_data.min(inline);
        Ok((raw, PairLimits { depth, inline, receives, ..limits }))
    }

    fn with(cm_id: CmId, reserved: Reserved, raw: *mut sys::ibv_qp, limits: PairLimits) -> Pair {
        let depth = limits.depth;
        // SAFETY: the pair was just made.
        let number = unsafe { (*raw).qp_num };
        let state = PairState {
            posted: Posted::new(depth as usize),
            since_report: 0,
            requests: Vec::with_capacity(depth as usize),
            pieces: Vec::with_capacity(depth as usize),
            broken: None,
            ended: false,
        };
        let [doorbells, posted] = [(); 2].map(|()| AtomicU64::new(0));
        Pair { cm_id, reserved, raw, number, limits, state: Mutex::new(state), doorbells, posted }
    }

    /// The number, unique on the device.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The connection.
    pub fn cm_id(&self) -> &CmId {
        &self.cm_id
    }

    /// The completion queue that reports its work.
    pub fn poller(&self) -> &Arc<Poller> {
        self.reserved.poller()
    }

    /// The limits that the device has granted.
    pub fn limits(&self) -> PairLimits {
        self.limits
    }

    /// The most bytes of payload in a packet. `None` with iWARP.
    ///
    /// # Errors
    /// [`VerbsError::Broken`] if the queue pair has ended.
    pub fn mtu(&self) -> Result<Option<Mtu>, VerbsError> {
        let state = self.state.lock();
        match &state.broken {
            Some(why) => Err(VerbsError::Broken(why.clone())),
            // SAFETY: the pair lives: under the lock it has not ended.
            None => unsafe { mtu_of(self.raw, self.poller().context()) },
        }
    }

    /// The number of posted chains, and of pieces of work in them.
    pub fn counts(&self) -> (u64, u64) {
        (self.doorbells.load(Ordering::Relaxed), self.posted.load(Ordering::Relaxed))
    }

    /// The number of pieces of work that fit now.
    pub fn room(&self) -> usize {
        self.limits.depth as usize - self.state.lock().posted.len()
    }

    /// Why the queue pair does no more work.
    pub fn broken(&self) -> Option<String> {
        self.state.lock().broken.clone()
    }

    /// Ends the queue pair. When this returns, the device touches none of its memory any more.
    pub fn end(&self) {
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.ended, true) {
            return;
        }
        state.broken.get_or_insert_with(|| "the connection is over".to_owned());
        // Nothing more comes in, and received completions are reported. SAFETY: the pair is destroyed only here, under
        // the lock.
        unsafe { self.cm_id.fail_pair() };
        self.poller().take_early(self.number);
        // SAFETY: every user of the pair takes the lock and checks that it is not broken.
        unsafe { self.cm_id.end_pair() };
        let sent = state.posted.end();
        drop(state);
        // Slots among them wake those who wait for one.
        drop(sent);
    }

    fn post_receive(&self) -> Result<(), VerbsError> {
        let state = self.state.lock();
        if state.broken.is_some() {
            return Ok(());
        }
        // SAFETY: the queue pair lives: under the lock it has not ended.
        unsafe { post_receive(self.raw) }
    }

    /// Adds to the chain that [`Self::post`] posts.
    ///
    /// # Errors
    /// [`VerbsError::Full`], [`VerbsError::OutOfRange`] and [`VerbsError::Broken`], with the work.
    #[allow(clippy::result_large_err)] // The work comes back seldom, and is moved either way.
    pub fn add(&self, token: u64, work: Work) -> Result<(), (VerbsError, Work)> {
        let mut state = self.state.lock();
        if let Some(why) = &state.broken {
            return Err((VerbsError::Broken(why.clone()), work));
        }
        if state.posted.len() >= self.limits.depth as usize {
            return Err((VerbsError::Full(self.limits.depth as usize), work));
        }
        if let Err(error) = work.check() {
            return Err((error, work));
        }
        state.posted.add(token, work);
        Ok(())
    }

    /// Posts all added work, with one doorbell.
    ///
    /// # Errors
    /// [`VerbsError::Broken`]. The queue pair then does no more work.
    pub fn post(&self) -> Result<(), VerbsError> {
        let mut state = self.state.lock();
        let state = &mut *state;
        if let Some(why) = &state.broken {
            return Err(VerbsError::Broken(why.clone()));
        }
        let PairState { posted, since_report, requests, pieces, .. } = state;
        let chain = posted.chain();
        let count = chain.len();
        if count == 0 {
            return Ok(());
        }
        requests.clear();
        pieces.clear();
        let iwarp = self.poller().context().is_iwarp();
        for (index, (number, work)) in chain.enumerate() {
            *since_report += 1;
            let every = if iwarp { 1 } else { self.limits.report_every };
            let report = index + 1 == count || *since_report >= every;
            if report {
                *since_report = 0;
            }
            let (piece, request) = work.request(number, report, self.limits.inline);
            pieces.push(piece);
            requests.push(request);
        }
        // Neither list grows any more, so the pointers into them stay valid.
        let (requests, pieces) = (requests.as_mut_ptr(), pieces.as_mut_ptr());
        for index in 0..count {
            // SAFETY: both lists have `count` entries.
            unsafe {
                let request = requests.add(index);
                if (*pieces.add(index)).length > 0 {
                    (*request).sg_list = pieces.add(index);
                    (*request).num_sge = 1;
                }
                if index + 1 < count {
                    (*request).next = requests.add(index + 1);
                }
            }
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the chain is well formed, and read during the call only. `Work::check` has seen that all memory of
        // the work is within a registration. `posted` holds both until the work is reported, or the queue pair is gone.
        // Inline bytes are copied during the call.
        let result = unsafe { sys::ibv_post_send(self.raw, requests, &raw mut bad) };
        if let Err(error) = VerbsError::check_number("posting work", result) {
            // Work that was posted before the bad piece may still be done: everything is held until the queue
            // pair is gone.
            state.broken = Some(error.to_string());
            return Err(VerbsError::Broken(error.to_string()));
        }
        self.doorbells.fetch_add(1, Ordering::Relaxed);
        self.posted.fetch_add(count as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Takes a completion. Returns the peer's word if the completion is a notification.
    ///
    /// # Errors
    /// [`VerbsError::Broken`] if it is a failure. Earlier pieces were reported before.
    pub fn complete(&self, news: Completion) -> Result<Option<u32>, VerbsError> {
        match news.outcome {
            Outcome::Sent(number) => {
                let each = self.poller().context().is_iwarp();
                self.state.lock().posted.reported(number, each);
                Ok(None)
            }
            Outcome::Notified(word) => {
                if matches!(self.poller().receives(), Receives::Own) {
                    self.post_receive()?;
                }
                Ok(Some(word))
            }
            Outcome::Strange => Err(VerbsError::Broken("the peer has sent a message without a word".into())),
            Outcome::Failed { work, why } => {
                let mut state = self.state.lock();
                if work.is_some_and(|number| !state.posted.has(number)) {
                    return Ok(None);
                }
                // The first failure says why. Later ones only say that work was flushed.
                let why = state.broken.get_or_insert(why).clone();
                Err(VerbsError::Broken(why))
            }
        }
    }

    /// Moves the finished work, in order, to the end of `done`.
    pub fn take(&self, done: &mut Done) {
        self.state.lock().posted.take(done);
    }

    /// Whether there are finished pieces to take.
    pub fn has_finished(&self) -> bool {
        self.state.lock().posted.has_finished()
    }
}

/// Posts one more receive.
///
/// # Safety
/// The queue pair lives.
unsafe fn post_receive(pair: *mut sys::ibv_qp) -> Result<(), VerbsError> {
    let mut work = nothing();
    let mut bad = ptr::null_mut();
    // SAFETY: the caller promises that the pair lives. The work names no memory.
    let result = unsafe { sys::ibv_post_recv(pair, &raw mut work, &raw mut bad) };
    VerbsError::check_number("waiting for messages", result)
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.end();
    }
}
