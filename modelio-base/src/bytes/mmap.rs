//! Page-aligned memory that lives in a memfd or in anonymous pages, mapped once and pre-faulted.
//!
//! This is one of the modules that may hold `unsafe`. Everything a transport registers, a version
//! is published in, or a learner maps is a [`Mapping`].
//!
//! # The aliasing rule
//! A mapping is shared between threads (and, through its descriptor, between processes), so it
//! cannot hand out Rust references under the borrow checker's rules by itself. [`Mapping::bytes`]
//! and [`Mapping::bytes_mut`] are therefore `unsafe`: their callers promise that for the life of the
//! slice nobody writes what they read, and nobody touches what they write. Block ownership in the
//! shard and byte ranges in the contribution tracker are what keeps that promise.

mod faults;

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use parking_lot::Mutex;

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;

/// Things attached to a mapping, each with the key of its owner.
type Attached = Vec<(usize, Arc<dyn Any + Send + Sync>)>;

/// A run of mapped pages, unmapped when dropped.
pub struct Mapping {
    fd: Option<OwnedFd>,
    address: NonNull<u8>,
    len: usize,
    /// Dropped before the pages go.
    attached: Mutex<Attached>,
    /// All its pages are promised to whoever touches them.
    promised: AtomicBool,
    /// Loans that nobody has given back ([`super::loan::Loan`]).
    pub(super) lent: AtomicU32,
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mapping { fd, address, len, .. } = self;
        f.debug_struct("Mapping")
            .field("fd", fd)
            .field("address", address)
            .field("len", len)
            .finish_non_exhaustive()
    }
}

// SAFETY: the pages stay mapped until drop, and the pointer is only turned into references by
// functions whose callers uphold the aliasing rule above.
unsafe impl Send for Mapping {}
// SAFETY: as for Send; `&Mapping` gives no access to the bytes without that promise.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `len` zero bytes (> 0) in a new memfd called `name` (as seen in /proc/*/maps).
    ///
    /// # Errors
    /// ENOMEM, EMFILE or what else the kernel says.
    pub fn memfd(name: &str, len: usize) -> io::Result<Mapping> {
        let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        nix::unistd::ftruncate(&fd, i64::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?)?;
        // SAFETY: the file has this length, and nobody else has it. Whoever gives it away seals its length before.
        unsafe { Mapping::of(fd, len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE) }
    }

    /// The first `len` bytes (> 0) of the file `fd`.
    ///
    /// # Errors
    /// ENOMEM, EACCES or what else the kernel says.
    ///
    /// # Safety
    /// The file has that many bytes, and nobody can shorten it: an access to memory that is no longer there ends the
    /// process.
    pub unsafe fn of(fd: OwnedFd, len: usize, protection: ProtFlags) -> io::Result<Mapping> {
        let size = len.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
        let Some(start) = aligned_room(len)? else {
            // SAFETY: a fresh mapping at an address of the kernel's choice overlays nothing.
            let address = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, &fd, 0)? };
            return Ok(Mapping::new(Some(fd), address.cast(), len));
        };
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
        // SAFETY: it replaces pages that `aligned_room` has reserved for this.
        let address = unsafe { mmap(Some(start), size, protection, flags, &fd, 0)? };
        Ok(Mapping::new(Some(fd), address.cast(), len))
    }

    fn new(fd: Option<OwnedFd>, address: NonNull<u8>, len: usize) -> Mapping {
        let (promised, lent) = (AtomicBool::new(false), AtomicU32::new(0));
        Mapping { fd, address, len, attached: Mutex::default(), promised, lent }
    }

    /// `len` zero bytes (> 0) of private memory, in huge pages where the kernel has them.
    ///
    /// # Errors
    /// ENOMEM or what else the kernel says.
    pub fn anonymous(len: usize) -> io::Result<Mapping> {
        let size = len.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlays nothing.
        let address = unsafe { mmap_anonymous(None, size, protection, flags)? };
        let mapping = Mapping::new(None, address.cast(), len);
        // SAFETY: advice on our own pages. A kernel without huge pages says EINVAL, which is no loss.
        let _ = unsafe { madvise(address, len, MmapAdvise::MADV_HUGEPAGE) };
        Ok(mapping)
    }

    /// The thing attached under `key`. If there is none, `make` makes it of the mapping, and it is attached
    /// from now on: it is dropped with the mapping, before its pages go. An example is a registration with a
    /// device, which is made once for each buffer, and found again by the buffer.
    ///
    /// # Errors
    /// The errors of `make`.
    pub fn attached<T: Any + Send + Sync, E>(
        &self,
        key: usize,
        make: impl FnOnce() -> Result<Arc<T>, E>,
    ) -> Result<Arc<T>, E> {
        let mut attached = self.attached.lock();
        let known = attached.iter().filter(|(of, _)| *of == key);
        if let Some(known) = known.filter_map(|(_, what)| Arc::clone(what).downcast::<T>().ok()).next() {
            return Ok(known);
        }
        let made = make()?;
        attached.push((key, Arc::clone(&made) as Arc<dyn Any + Send + Sync>));
        Ok(made)
    }

    /// Detaches the thing under `key`, which is dropped when nobody else has it.
    pub fn detach(&self, key: usize) {
        self.attached.lock().retain(|(of, _)| *of != key);
    }

    /// From now on nobody can make the memfd shorter or longer: others can map it without fear of its end.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn fix_size(&self) -> io::Result<()> {
        self.add_seals(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW)
    }

    /// From now on nobody can write the memfd or map it writable through its descriptor; this mapping
    /// stays writable.
    ///
    /// # Errors
    /// The kernel's error (before Linux 5.1: EINVAL).
    pub fn seal(&self) -> io::Result<()> {
        self.add_seals(SealFlag::F_SEAL_FUTURE_WRITE | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW)
    }

    /// Others who have the memfd may have sealed its seals. Those that it has are not asked for again.
    fn add_seals(&self, seals: SealFlag) -> io::Result<()> {
        if let Some(fd) = &self.fd
            && !SealFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GET_SEALS)?).contains(seals)
        {
            fcntl(fd, FcntlArg::F_ADD_SEALS(seals))?;
        }
        Ok(())
    }

    /// Whether a program outside may have the memory ([`super::loan::Loan`]): then it is never written again.
    pub fn is_lent(&self) -> bool {
        self.lent.load(Ordering::Acquire) > 0
    }

    /// Whether all its pages are promised ([`super::available::promise`]).
    pub fn is_promised(&self) -> bool {
        self.promised.load(Ordering::Relaxed)
    }

    pub(super) fn set_promised(&self) {
        self.promised.store(true, Ordering::Relaxed);
    }

    /// Gives the pages of anonymous memory back to the system, which gives zeros when they are touched again.
    ///
    /// # Errors
    /// The kernel's error; `InvalidInput` for a memfd, whose pages others may have mapped.
    pub fn give_back(&self) -> io::Result<()> {
        if self.fd.is_some() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the pages are the mapping's own, and stay mapped. Whoever reads them gets zeros.
        unsafe { madvise(self.address.cast(), self.len, MmapAdvise::MADV_DONTNEED)? };
        Ok(())
    }

    /// The bytes that are taken from the system: the pages that somebody has touched, and nobody has given back. This
    /// asks the kernel, which looks at each page of anonymous memory.
    pub fn taken(&self) -> u64 {
        const PAGE: usize = 4096;
        if let Some(fd) = &self.fd {
            return nix::sys::stat::fstat(fd).map_or(0, |stat| stat.st_blocks.cast_unsigned() * 512);
        }
        let mut pages = vec![0u8; self.len.div_ceil(PAGE)];
        // SAFETY: the range is the mapping, and `pages` has a byte for each page of it.
        let rc = unsafe { libc::mincore(self.address.as_ptr().cast(), self.len, pages.as_mut_ptr()) };
        if rc != 0 {
            return self.len as u64;
        }
        pages.iter().filter(|page| **page & 1 != 0).count() as u64 * PAGE as u64
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// The start address, for accesses that make no reference.
    pub fn start(&self) -> NonNull<u8> {
        self.address
    }

    /// The descriptor behind it; `None` for anonymous memory.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(|fd| fd.as_fd())
    }

    /// Copies `data` in at `offset`.
    ///
    /// # Panics
    /// When the range is out of bounds.
    ///
    /// # Safety
    /// Nobody reads or writes that range meanwhile (see the module's rule).
    pub unsafe fn write(&self, offset: usize, data: &[u8]) {
        // SAFETY: passed on to the caller.
        unsafe { self.bytes_mut(offset..offset + data.len()) }.copy_from_slice(data);
    }

    /// Reads `len` bytes of `file` at `offset` straight into the mapping at `at`.
    ///
    /// # Errors
    /// The error of reading; `UnexpectedEof` when the file ends early, `InvalidInput` out of bounds.
    pub fn fill_from(&self, file: &File, offset: u64, at: usize, len: usize) -> io::Result<()> {
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut done = 0;
        while done < len {
            let from = i64::try_from(offset + done as u64).map_err(|_| io::ErrorKind::InvalidInput)?;
            // SAFETY: in bounds; the kernel writes through the pointer, no reference is made. A reader of the
            // range sees old or new bytes meanwhile, as with any shared mapping.
            let got = unsafe {
                let target = self.address.as_ptr().add(at + done).cast();
                libc::pread(file.as_raw_fd(), target, len - done, from)
            };
            match got {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                1.. => done += got as usize,
                _ => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// The bytes of `range`.
    ///
    /// # Panics
    /// When the range is out of bounds.
    ///
    /// # Safety
    /// Nobody writes that range while the slice lives.
    pub unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        // SAFETY: in bounds of live pages; aliasing is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr().add(range.start), range.len()) }
    }

    /// The bytes of `range`, to write.
    ///
    /// # Panics
    /// When the range is out of bounds.
    ///
    /// # Safety
    /// Nobody else reads or writes that range while the slice lives.
    #[allow(clippy::mut_from_ref)] // that is what the safety contract is about
    pub unsafe fn bytes_mut(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        // SAFETY: in bounds of live pages; aliasing is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr().add(range.start), range.len()) }
    }

    /// `range` (in elements) as fp32.
    ///
    /// # Panics
    /// When the range is out of bounds.
    ///
    /// # Safety
    /// The conditions of [`Mapping::bytes`].
    pub unsafe fn floats(&self, range: Range<usize>) -> &[f32] {
        assert!(range.start <= range.end && range.end <= self.len / 4, "{range:?} of {} bytes", self.len);
        // SAFETY: page-aligned start plus a multiple of four; any bits are an f32.
        unsafe {
            std::slice::from_raw_parts(self.address.as_ptr().cast::<f32>().add(range.start), range.len())
        }
    }

    /// `range` (in elements) as fp32, to write.
    ///
    /// # Panics
    /// When the range is out of bounds.
    ///
    /// # Safety
    /// The conditions of [`Mapping::bytes_mut`].
    #[allow(clippy::mut_from_ref)] // as for bytes_mut
    pub unsafe fn floats_mut(&self, range: Range<usize>) -> &mut [f32] {
        assert!(range.start <= range.end && range.end <= self.len / 4, "{range:?} of {} bytes", self.len);
        // SAFETY: page-aligned start plus a multiple of four; any bits are an f32.
        unsafe {
            std::slice::from_raw_parts_mut(self.address.as_ptr().cast::<f32>().add(range.start), range.len())
        }
    }
}

/// Has threads share as many heaps as there are cores, in place of eight times as many: each heap keeps what was freed at
/// its end. To be called before there are threads.
pub fn limit_heaps() {
    #[cfg(target_env = "gnu")]
    {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // SAFETY: it takes no memory of ours.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, cores.try_into().unwrap_or(i32::MAX)) };
    }
}

/// Gives the heap's free memory back to the system, of all threads. Between times, each keeps what it has freed.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no memory of ours, and any thread may call it.
    unsafe {
        libc::malloc_trim(0)
    };
}

/// The length of a line of the CPU's caches.
const LINE: usize = 64;

/// Brings `bytes` into the CPU's caches, by a look at each line. Loads wait for each other less than the stores of a
/// copy do, so what copies the bytes next takes less time, this included.
pub fn warm(bytes: &[u8]) {
    std::hint::black_box(bytes.iter().step_by(LINE).fold(0, |all, byte| all ^ byte));
}

/// Asks the CPU to bring `bytes` into its caches, and does not wait for it.
pub fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..bytes.len()).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: within the slice; and a prefetch neither changes nor faults.
        unsafe { _mm_prefetch::<{ _MM_HINT_T0 }>(bytes.as_ptr().add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (bytes, LINE);
}

/// Reserves room for `len` bytes that begins on a huge page; `None` where no huge page fits.
fn aligned_room(len: usize) -> io::Result<Option<NonZeroUsize>> {
    if len < HUGE {
        return Ok(None);
    }
    let roomy = NonZeroUsize::new(len.next_multiple_of(4096) + HUGE).ok_or(io::ErrorKind::InvalidInput)?;
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
    // SAFETY: a fresh mapping at an address of the kernel's choice overlays nothing.
    let reserved = unsafe { mmap_anonymous(None, roomy, ProtFlags::PROT_NONE, flags)? };
    let (low, high) = (reserved.addr().get(), reserved.addr().get() + roomy.get());
    let start = low.next_multiple_of(HUGE);
    let end = start + len.next_multiple_of(4096);
    for (from, to) in [(low, start), (end, high)] {
        if from < to {
            // SAFETY: these pages were reserved just now and nobody knows them.
            unsafe { munmap(reserved.byte_add(from - low), to - from)? };
        }
    }
    Ok(NonZeroUsize::new(start))
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.attached.get_mut().clear();
        // SAFETY: the mapping is ours, and no reference outlives `self` by the borrow rules above.
        if let Err(error) = unsafe { munmap(self.address.cast(), self.len) } {
            tracing::error!(%error, "munmap of {} bytes failed", self.len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memfd_and_mapping_are_the_same_bytes() {
        let mapping = Mapping::memfd("test", 10_000).unwrap();
        mapping.prefault().unwrap();
        // SAFETY: single thread.
        unsafe { mapping.write(9_990, b"0123456789") };
        let mut file = vec![0; 10];
        nix::sys::uio::pread(mapping.fd().unwrap(), &mut file, 9_990).unwrap();
        assert_eq!(file, b"0123456789");
        mapping.touch(0..mapping.len());
        // SAFETY: single thread.
        assert_eq!(unsafe { mapping.bytes(9_990..10_000) }, b"0123456789");
    }

    #[test]
    fn an_attachment_is_made_once_and_ends_with_the_mapping() {
        let mapping = Mapping::anonymous(100).unwrap();
        let make = |text: &str| -> Result<Arc<String>, ()> { Ok(Arc::new(text.to_owned())) };
        let first = mapping.attached(1, || make("first")).unwrap();
        assert!(Arc::ptr_eq(&first, &mapping.attached(1, || make("again")).unwrap()));
        assert_eq!(*mapping.attached(2, || make("other")).unwrap(), "other");
        assert_eq!(mapping.attached::<String, _>(3, || Err("refused")), Err("refused"));
        mapping.detach(1);
        assert_eq!(Arc::strong_count(&first), 1);
        let last = Arc::downgrade(&mapping.attached(1, || make("last")).unwrap());
        drop(mapping);
        assert!(last.upgrade().is_none());
    }

    #[test]
    #[should_panic(expected = "of 100 bytes")]
    fn out_of_bounds_panics() {
        let mapping = Mapping::anonymous(100).unwrap();
        // SAFETY: single thread.
        unsafe { mapping.bytes(90..101) };
    }
}
