//! Protection domains, and memory that is registered with a device.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};
use parking_lot::Mutex;
use rdma_sys as sys;

use super::{Context, RemoteMemory, Spare, VerbsError};
use modelio_base::bytes::mmap::Mapping;

/// A protection domain: its queue pairs use its registrations.
pub struct Domain {
    raw: NonNull<sys::ibv_pd>,
    context: Context,
    spare: Mutex<Vec<Weak<dyn Spare>>>,
    reclaiming: Mutex<()>,
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Domain { raw, context, .. } = self;
        f.debug_struct("Domain").field("raw", raw).field("context", context).finish_non_exhaustive()
    }
}

// SAFETY: libibverbs allows calls on a protection domain from all threads.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    /// A new one.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn new(context: Context) -> Result<Arc<Domain>, VerbsError> {
        // SAFETY: the context is open.
        let raw = NonNull::new(unsafe { sys::ibv_alloc_pd(context.raw()) });
        let raw = raw.ok_or_else(|| VerbsError::last("making a protection domain"))?;
        Ok(Arc::new(Domain { raw, context, spare: Mutex::default(), reclaiming: Mutex::default() }))
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_pd {
        self.raw.as_ptr()
    }

    /// The device.
    pub fn context(&self) -> Context {
        self.context
    }

    /// Adds registrations that are given up if no more memory may be pinned.
    pub(crate) fn spare(&self, what: Weak<dyn Spare>) {
        let mut spare = self.spare.lock();
        spare.retain(|one| one.strong_count() > 0);
        spare.push(what);
    }

    /// Frees spare registrations, and then calls `then`. One thread at a time does this, so that no thread takes the
    /// memory that another one has freed.
    fn reclaimed<T>(&self, then: impl FnOnce() -> T) -> T {
        let _alone = self.reclaiming.lock();
        let spare: Vec<_> = self.spare.lock().iter().filter_map(Weak::upgrade).collect();
        // Nobody knows how much memory each of them frees, so all are given up.
        spare.iter().for_each(|one| one.give_up());
        then()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: each object of the domain holds it, so none is left.
        let result = unsafe { sys::ibv_dealloc_pd(self.raw()) };
        if let Err(error) = VerbsError::check_number("destroying a protection domain", result) {
            tracing::error!(%error, "a protection domain is lost");
        }
    }
}

/// The rights of peers to registered memory. This end's device may always write it. Memory that this end's
/// READs fill is `Local`. With iWARP, the peer answers READs by writes, so peers may write that memory, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Peers have no rights.
    Local,
    /// Read it.
    Read,
    /// Write it.
    Write,
}

impl Access {
    fn flags(self, context: Context) -> libc::c_int {
        let local = sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        let flags = match self {
            Access::Local => local,
            Access::Read => local | sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ,
            Access::Write => local | sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE,
        };
        let flags = match self {
            Access::Local if context.is_iwarp() => flags | sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE,
            _ => flags,
        };
        flags.0.cast_signed()
    }
}

/// Memory that a device reads and writes by itself. Its pages are pinned until this is dropped.
#[derive(Debug)]
pub struct Registration {
    raw: NonNull<sys::ibv_mr>,
    /// The start address for the device.
    address: u64,
    len: usize,
    access: Access,
    domain: Arc<Domain>,
}

// SAFETY: libibverbs allows all threads to use and to end a registration.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers `range` of `memory`. Memory that is [`Spare`] gives way to it, except to memory that this
    /// end's READs fill. A caller that has work done on it holds the memory, too: see
    /// [`Mapping::attached`](modelio_base::bytes::mmap::Mapping::attached). A caller that lets peers write it makes sure
    /// that nobody here relies on its contents staying unchanged.
    ///
    /// # Errors
    /// [`VerbsError::Memlock`], [`VerbsError::OutOfRange`], [`VerbsError::Call`].
    pub(crate) fn new(
        domain: &Arc<Domain>,
        memory: &Mapping,
        range: Range<usize>,
        access: Access,
    ) -> Result<Arc<Registration>, VerbsError> {
        let all = memory.len();
        if range.start >= range.end || range.end > all {
            let (offset, len) = (range.start as u64, range.len());
            return Err(VerbsError::OutOfRange { offset, len, of: "memory", all: all as u64 });
        }
        let (address, len) = (memory.start().as_ptr().wrapping_add(range.start), range.len());
        let register = || {
            let flags = access.flags(domain.context);
            // SAFETY: the range is mapped and writable. The kernel pins its pages. If the mapping ends first, the
            // device works on pages that nobody else has, until the registration ends.
            let raw = unsafe { sys::ibv_reg_mr(domain.raw(), address.cast(), len, flags) };
            NonNull::new(raw).ok_or_else(|| refused(Errno::last(), len))
        };
        let raw = match register() {
            Err(VerbsError::Memlock { .. }) if access != Access::Local => domain.reclaimed(register)?,
            outcome => outcome?,
        };
        Ok(Arc::new(Registration { raw, address: address as u64, len, access, domain: Arc::clone(domain) }))
    }

    /// Registers `len` bytes at `offset` of the memory that another device has exported. The network's device
    /// addresses them from `at` on.
    pub(super) fn of_dma_buf(
        domain: &Arc<Domain>,
        exported: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        at: u64,
        access: Access,
    ) -> Result<Arc<Registration>, VerbsError> {
        let flags = access.flags(domain.context);
        // SAFETY: the kernel holds the buffer itself, and no memory of this process is involved.
        let raw =
            unsafe { sys::ibv_reg_dmabuf_mr(domain.raw(), offset, len, at, exported.as_raw_fd(), flags) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("registering memory of a device"))?;
        Ok(Arc::new(Registration { raw, address: at, len, access, domain: Arc::clone(domain) }))
    }

    /// Registers `len` bytes at an address that the kernel knows to be another device's.
    pub(super) fn of_address(
        domain: &Arc<Domain>,
        address: u64,
        len: usize,
        access: Access,
    ) -> Result<Arc<Registration>, VerbsError> {
        let start = address as *mut libc::c_void;
        // SAFETY: the kernel checks the address. If it is memory of this process, its maker has promised that Rust has
        // no references to it (see `DeviceMemory`). It stays pinned as long as the registration lives.
        let raw = unsafe { sys::ibv_reg_mr(domain.raw(), start, len, access.flags(domain.context)) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("registering memory of a device"))?;
        Ok(Arc::new(Registration { raw, address, len, access, domain: Arc::clone(domain) }))
    }

    /// The key for this end's own work.
    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: the registration lives as long as `self`.
        unsafe { self.raw.as_ref().lkey }
    }

    /// The start address and the key for peers.
    pub fn remote(&self) -> RemoteMemory {
        // SAFETY: the registration lives as long as `self`.
        let key = unsafe { self.raw.as_ref().rkey };
        RemoteMemory { address: self.address, key }
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// The rights of peers.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Its domain.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Whether the `len` bytes at the device's address `start` are within the registration.
    pub(super) fn holds(&self, start: u64, len: usize) -> bool {
        let end = start.checked_add(len as u64);
        start >= self.address && end.is_some_and(|end| end <= self.address + self.len as u64)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: work on the memory holds the registration, so none is left.
        let result = unsafe { sys::ibv_dereg_mr(self.raw.as_ptr()) };
        if let Err(error) = VerbsError::check_number("ending a registration", result) {
            tracing::error!(%error, "pages stay pinned");
        }
    }
}

fn refused(errno: Errno, bytes: usize) -> VerbsError {
    let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map(|(soft, _)| soft).unwrap_or(u64::MAX);
    match errno {
        Errno::ENOMEM | Errno::EPERM | Errno::EAGAIN if limit != u64::MAX => {
            VerbsError::Memlock { bytes, limit }
        }
        errno => VerbsError::Call { doing: "registering memory", errno },
    }
}

/// Turns an `io::Error` into the error for missing memory.
pub(super) fn no_memory(error: &io::Error) -> VerbsError {
    let errno = error.raw_os_error().map_or(Errno::ENOMEM, Errno::from_raw);
    VerbsError::Call { doing: "taking memory", errno }
}
