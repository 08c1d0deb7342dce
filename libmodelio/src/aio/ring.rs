//! Pieces by io_uring, with registered files and buffers. This module holds `unsafe`.
//!
//! Submissions and completions each have a lock, and nothing is locked while a thread waits in the kernel. An event that
//! others ring is polled by the ring itself, so one wait sees both.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use io_uring::types::{CancelBuilder, Fd, Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, cqueue, opcode, squeue};
use nix::errno::Errno;
use nix::sys::eventfd::EventFd;
use parking_lot::Mutex;

use super::MAX_DEPTH;
use super::memory::Place;
use super::table::Op;

/// Registered files, and registered buffers.
pub(super) const MAX_REGISTERED: u32 = 64;
/// The bytes of a registered buffer: the kernel's limit.
pub(super) const MAX_BUFFER: usize = 1 << 30;
/// Bits of a piece's number that are its slot's. The others are its request's, so no number is used twice while another
/// one of the slot is cancelled.
const SLOT_BITS: u32 = MAX_DEPTH.trailing_zeros();
/// What completes with these numbers is no piece.
const EVENT: u64 = u64::MAX;
const CANCEL: u64 = u64::MAX - 1;

/// What a piece does.
pub(super) struct Work {
    pub file: usize,
    pub op: Op,
    pub offset: u64,
    pub place: Place,
    /// A worker of the kernel's does it, and not the caller's thread.
    pub is_slow: bool,
}

pub(super) struct Ring {
    ring: IoUring,
    submitting: Mutex<()>,
    reaping: Mutex<()>,
    event: Arc<EventFd>,
    is_listening: AtomicBool,
}

impl Ring {
    /// # Errors
    /// Where the kernel has no io_uring, or denies it.
    pub(super) fn new(depth: u32, event: Arc<EventFd>) -> io::Result<Ring> {
        // Each piece may be cancelled once.
        let ring = IoUring::builder().dontfork().setup_clamp().setup_submit_all().build(2 * depth + 1)?;
        let mut known = Probe::new();
        ring.submitter().register_probe(&mut known)?;
        let needed = [opcode::ReadFixed::CODE, opcode::Fsync::CODE, opcode::AsyncCancel::CODE];
        if !ring.params().is_feature_ext_arg() || needed.iter().any(|code| !known.is_supported(*code)) {
            return Err(Errno::EOPNOTSUPP.into());
        }
        ring.submitter().register_files_sparse(MAX_REGISTERED)?;
        ring.submitter().register_buffers_sparse(MAX_REGISTERED)?;
        let (submitting, reaping) = Default::default();
        Ok(Ring { ring, submitting, reaping, event, is_listening: AtomicBool::new(false) })
    }

    /// Registers a file under this number, or takes it away (-1).
    pub(super) fn register_file(&self, number: usize, file: RawFd) -> io::Result<()> {
        self.ring.submitter().register_files_update(number as u32, &[file]).map(drop)
    }

    /// Registers memory under this number.
    ///
    /// # Safety
    /// The memory stays mapped as long as this ring.
    pub(super) unsafe fn register_buffer(&self, number: usize, start: *mut u8, len: usize) -> io::Result<()> {
        let memory = [libc::iovec { iov_base: start.cast(), iov_len: len }];
        // SAFETY: the caller's promise.
        unsafe { self.ring.submitter().register_buffers_update(number as u32, &memory, None) }
    }

    /// Has the kernel write this descriptor with each completion.
    pub(super) fn notify(&self, event: &EventFd) -> io::Result<()> {
        self.ring.submitter().register_eventfd(event.as_raw_fd())
    }

    /// Begins a piece.
    ///
    /// # Safety
    /// Its memory stays, and belongs to the piece alone, until its completion was reaped.
    pub(super) unsafe fn begin(&self, slot: usize, ticket: u64, work: &Work) -> Result<(), Errno> {
        let (file, len, offset) = (Fixed(work.file as u32), work.place.len as u32, work.offset);
        let entry = match (work.op, work.place.registered) {
            (Op::Sync, _) => opcode::Fsync::new(file).build(),
            (Op::Read, Some(buffer)) => {
                opcode::ReadFixed::new(file, work.place.start(), len, buffer).offset(offset).build()
            }
            (Op::Write, Some(buffer)) => {
                opcode::WriteFixed::new(file, work.place.start(), len, buffer).offset(offset).build()
            }
            (Op::Read, None) => opcode::Read::new(file, work.place.start(), len).offset(offset).build(),
            (Op::Write, None) => opcode::Write::new(file, work.place.start(), len).offset(offset).build(),
        };
        // The kernel would poll the file first, which asks the daemon of a mount and waits for it.
        let flags = if work.is_slow { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        // SAFETY: the caller's promise.
        unsafe { self.push(&entry.flags(flags).user_data(number(slot, ticket))) }
    }

    /// Cancels a piece. Its completion comes all the same.
    pub(super) fn cancel(&self, slot: usize, ticket: u64) {
        let one = CancelBuilder::user_data(number(slot, ticket));
        let entry = opcode::AsyncCancel2::new(one).build().user_data(CANCEL);
        // A piece that cannot be cancelled ends by itself.
        // SAFETY: no memory is named.
        let _ = unsafe { self.push(&entry) };
    }

    /// # Safety
    /// The memory that the entry names stays until its completion.
    unsafe fn push(&self, entry: &squeue::Entry) -> Result<(), Errno> {
        let _alone = self.submitting.lock();
        // SAFETY: only the holder of the lock uses the queue, and the caller promises for the memory.
        while unsafe { self.ring.submission_shared().push(entry) }.is_err() {
            self.enter(0, None)?;
        }
        Ok(())
    }

    /// Gives the kernel what has begun.
    pub(super) fn submit(&self) -> Result<(), Errno> {
        let _alone = self.submitting.lock();
        // SAFETY: only the holder of the lock uses the queue.
        if unsafe { self.ring.submission_shared() }.is_empty() {
            return Ok(());
        }
        self.enter(0, None)
    }

    /// Has the next wait see the event, too.
    pub(super) fn listen(&self) {
        if !self.is_listening.swap(true, Ordering::Relaxed) {
            let event = Fd(self.event.as_raw_fd());
            let poll = opcode::PollAdd::new(event, libc::POLLIN as u32).multi(true).build().user_data(EVENT);
            // SAFETY: no memory is named, and the event lives as long as this.
            let pushed = unsafe { self.push(&poll) };
            self.is_listening.store(pushed.is_ok(), Ordering::Relaxed);
        }
    }

    /// Gives the kernel what has begun, and waits until something has completed, or the event was rung, or the time is over.
    pub(super) fn wait(&self, timeout: Duration) -> Result<(), Errno> {
        self.enter(1, Some(timeout))
    }

    fn enter(&self, want: usize, timeout: Option<Duration>) -> Result<(), Errno> {
        let time = Timespec::from(timeout.unwrap_or_default());
        let arguments = match timeout {
            Some(_) => SubmitArgs::new().timespec(&time),
            None => SubmitArgs::new(),
        };
        match self.ring.submitter().submit_with_args(want, &arguments) {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error().map(Errno::from_raw) {
                // The caller reaps, and comes again.
                Some(Errno::ETIME | Errno::EINTR | Errno::EBUSY | Errno::EAGAIN) => Ok(()),
                other => Err(other.unwrap_or(Errno::EIO)),
            },
        }
    }

    /// Takes what has completed: slots with their results.
    pub(super) fn reap(&self, done: &mut Vec<(usize, Result<usize, Errno>)>) {
        let _alone = self.reaping.lock();
        // SAFETY: only the holder of the lock uses the queue.
        for entry in unsafe { self.ring.completion_shared() } {
            match entry.user_data() {
                CANCEL => {}
                EVENT => self.is_listening.store(cqueue::more(entry.flags()), Ordering::Relaxed),
                number => {
                    let slot = number & u64::from(MAX_DEPTH - 1);
                    let failed = || Errno::from_raw(-entry.result());
                    done.push((slot as usize, usize::try_from(entry.result()).map_err(|_| failed())));
                }
            }
        }
    }
}

fn number(slot: usize, ticket: u64) -> u64 {
    ticket << SLOT_BITS | slot as u64
}
