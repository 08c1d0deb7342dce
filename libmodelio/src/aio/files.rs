//! The files of a queue, and the memory that the kernel knows ahead. This module holds `unsafe`.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::statfs::{FUSE_SUPER_MAGIC, fstatfs};
use parking_lot::Mutex;

use super::memory::Buffer;
use super::network::{LearnerFile, VersionFile};
use super::ring::{MAX_BUFFER, MAX_REGISTERED};
use super::{FileId, Kernel, Queue};
use crate::bytes::mmap::Mapping;
use crate::contributor::{Contributor, Share};
use crate::reader::Reader;

/// What a file of a queue is.
pub(super) enum Target {
    /// A file of the kernel's, and whether it is of a mount by FUSE.
    File(Arc<OwnedFd>, bool),
    Learner(Arc<LearnerFile>),
    Version(VersionFile),
}

/// Registered memory: its address and length by its number, and what keeps it.
pub(super) type Registered = Vec<(usize, usize, Option<Arc<Mapping>>)>;

impl Queue {
    /// Takes a file: of a mount, of a disk, or a block device.
    ///
    /// # Errors
    /// EMFILE if it has as many as it can.
    pub fn file(&self, file: OwnedFd) -> io::Result<FileId> {
        let raw = file.as_raw_fd();
        let is_fuse = fstatfs(&file).is_ok_and(|found| found.filesystem_type() == FUSE_SUPER_MAGIC);
        let id = self.add(Target::File(Arc::new(file), is_fuse))?;
        if let Kernel::Ring(ring) = &self.kernel
            && let Err(error) = ring.register_file(id.0, raw)
        {
            self.files.lock()[id.0] = None;
            return Err(error);
        }
        Ok(id)
    }

    /// A learner without a mount: its writes contribute, and [`Op::Sync`](super::Op::Sync) commits. `share` is what was
    /// written, also past the queue.
    ///
    /// # Errors
    /// EMFILE if the queue has as many files as it can.
    pub fn learner(&self, learner: Arc<Contributor>, share: Arc<Mutex<Share>>) -> io::Result<FileId> {
        self.add(Target::Learner(Arc::new(LearnerFile::new(learner, share))))
    }

    /// A version without a mount. The queue holds it until [`Self::close`].
    ///
    /// # Errors
    /// EMFILE if the queue has as many files as it can.
    pub fn version(&self, version: Reader) -> io::Result<FileId> {
        self.add(Target::Version(VersionFile::new(version)))
    }

    fn add(&self, target: Target) -> io::Result<FileId> {
        let mut files = self.files.lock();
        let free = files.iter().position(Option::is_none).unwrap_or(files.len());
        if free >= MAX_REGISTERED as usize {
            return Err(Errno::EMFILE.into());
        }
        if free == files.len() {
            files.push(None);
        }
        files[free] = Some(Arc::new(target));
        Ok(FileId(free))
    }

    /// Gives a file up.
    ///
    /// # Errors
    /// EBADF if there is none, EBUSY while a request uses it.
    pub fn close(&self, file: FileId) -> Result<(), Errno> {
        let mut files = self.files.lock();
        let place = files.get_mut(file.0).filter(|place| place.is_some()).ok_or(Errno::EBADF)?;
        if self.table.lock().uses(file.0) {
            return Err(Errno::EBUSY);
        }
        if let (Kernel::Ring(ring), Some(Target::File(..))) = (&self.kernel, place.as_deref()) {
            let _ = ring.register_file(file.0, -1);
        }
        self.table.lock().forget(file.0);
        *place = None;
        Ok(())
    }

    /// Memory for requests, which the kernel knows ahead where it can. Ask for it at the start, and use it again: the queue
    /// keeps what is registered.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn buffer(&self, len: usize) -> io::Result<Buffer> {
        let buffer = Buffer::new(len)?;
        // Without a registration it is slower, and nothing else.
        // SAFETY: the queue keeps the mapping.
        let _ = unsafe { self.register(&buffer) };
        Ok(buffer)
    }

    /// Registers memory: requests in it take less of the kernel's time.
    ///
    /// # Errors
    /// ENOSPC if as much is registered as can be, EINVAL for more than 1 GiB, ENOMEM above `ulimit -l`.
    ///
    /// # Safety
    /// Memory that was lent stays mapped as long as the queue.
    pub unsafe fn register(&self, memory: &Buffer) -> io::Result<()> {
        let (start, len) = memory.span();
        let mut registered = self.registered.lock();
        if registered.len() >= MAX_REGISTERED as usize {
            return Err(Errno::ENOSPC.into());
        }
        if len == 0 || len > MAX_BUFFER {
            return Err(Errno::EINVAL.into());
        }
        if let Kernel::Ring(ring) = &self.kernel {
            // SAFETY: the caller's promise, and what the queue keeps itself.
            unsafe { ring.register_buffer(registered.len(), memory.start(), len)? };
        }
        registered.push((start, len, memory.kept()));
        Ok(())
    }
}
