//! Receives for messages that need no memory: their word is immediate data.

use std::ptr::{self, NonNull};
use std::sync::Arc;

use rdma_sys as sys;

use super::{Domain, VerbsError};

/// Set in the numbers of receives.
pub(super) const RECEIVE: u64 = 1 << 63;

/// The receives of a completion queue.
#[derive(Debug)]
pub enum Receives {
    /// Each queue pair has its own.
    Own,
    /// All queue pairs of a poller share this.
    Shared(SharedReceives),
}

/// A shared receive queue.
#[derive(Debug)]
pub struct SharedReceives {
    raw: NonNull<sys::ibv_srq>,
    _domain: Arc<Domain>,
}

// SAFETY: libibverbs allows calls on a shared receive queue from all threads.
unsafe impl Send for SharedReceives {}
// SAFETY: as above.
unsafe impl Sync for SharedReceives {}

impl Receives {
    pub(super) fn shared(domain: &Arc<Domain>, count: u32) -> Result<Receives, VerbsError> {
        let attr = sys::ibv_srq_attr { max_wr: count, max_sge: 1, srq_limit: 0 };
        let mut init = sys::ibv_srq_init_attr { srq_context: ptr::null_mut(), attr };
        // SAFETY: the domain lives longer than the queue.
        let raw = NonNull::new(unsafe { sys::ibv_create_srq(domain.raw(), &raw mut init) });
        let raw = raw.ok_or_else(|| VerbsError::last("making a shared receive queue"))?;
        let shared = SharedReceives { raw, _domain: Arc::clone(domain) };
        (0..count).try_for_each(|_| shared.post())?;
        Ok(Receives::Shared(shared))
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_srq {
        match self {
            Receives::Own => ptr::null_mut(),
            Receives::Shared(shared) => shared.raw.as_ptr(),
        }
    }
}

impl SharedReceives {
    /// Posts one more receive.
    pub(super) fn post(&self) -> Result<(), VerbsError> {
        let mut work = nothing();
        let mut bad = ptr::null_mut();
        // SAFETY: the queue lives as long as `self`, and the work names no memory.
        let result = unsafe {
            let post = (*(*self.raw.as_ptr()).context).ops.post_srq_recv;
            post.map_or(libc::ENOSYS, |post| post(self.raw.as_ptr(), &raw mut work, &raw mut bad))
        };
        VerbsError::check_number("waiting for messages", result)
    }
}

/// A receive without memory.
pub(super) fn nothing() -> sys::ibv_recv_wr {
    sys::ibv_recv_wr { wr_id: RECEIVE, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0 }
}

impl Drop for SharedReceives {
    fn drop(&mut self) {
        // SAFETY: the queue pairs that used the queue held their poller, and are gone.
        let result = unsafe { sys::ibv_destroy_srq(self.raw.as_ptr()) };
        if let Err(error) = VerbsError::check_number("destroying a shared receive queue", result) {
            tracing::error!(%error, "a shared receive queue is lost");
        }
    }
}
