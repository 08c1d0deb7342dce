//! The event channel of rdma_cm, through which the kernel reports changes of connections.

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use rdma_sys as sys;

use super::VerbsError;

/// An event channel. It does not block.
#[derive(Debug)]
pub struct CmChannel(NonNull<sys::rdma_event_channel>);

// SAFETY: librdmacm allows calls on a channel from all threads.
unsafe impl Send for CmChannel {}
// SAFETY: as above.
unsafe impl Sync for CmChannel {}

impl CmChannel {
    /// A new one.
    ///
    /// # Errors
    /// [`VerbsError::NoCm`].
    pub fn new() -> Result<Arc<CmChannel>, VerbsError> {
        // SAFETY: the call has no arguments.
        let raw = NonNull::new(unsafe { sys::rdma_create_event_channel() });
        let channel = CmChannel(raw.ok_or_else(|| VerbsError::NoCm(Errno::last()))?);
        let fd = channel.as_fd();
        let flags = fcntl(fd, FcntlArg::F_GETFL).map(OFlag::from_bits_retain);
        let set = flags.and_then(|flags| fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)));
        set.map_err(VerbsError::NoCm)?;
        Ok(Arc::new(channel))
    }

    pub(super) fn raw(&self) -> *mut sys::rdma_event_channel {
        self.0.as_ptr()
    }
}

/// Becomes readable when there is an event.
impl AsFd for CmChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel and its descriptor live as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.0.as_ref().fd) }
    }
}

impl Drop for CmChannel {
    fn drop(&mut self) {
        // SAFETY: each identifier that uses the channel holds it, so none is left.
        unsafe { sys::rdma_destroy_event_channel(self.0.as_ptr()) };
    }
}
