//! Pieces by threads, where the kernel has no io_uring or denies it. This module holds `unsafe`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;
use nix::sys::uio::{pread, pwrite};
use parking_lot::Mutex;

use super::Doorbell;
use super::ring::Work;
use super::table::Op;

/// A piece with its slot and its file.
type Job = (usize, Arc<OwnedFd>, Work);

pub(super) struct Threads {
    depth: usize,
    started: AtomicUsize,
    /// Pieces that have begun and not ended.
    under_way: Arc<AtomicUsize>,
    jobs: Sender<Job>,
    pending: Arc<Mutex<Receiver<Job>>>,
    bell: Arc<Doorbell>,
}

impl Threads {
    /// Threads start when they are needed, `depth` at most. They end with this.
    pub(super) fn new(depth: u32, bell: Arc<Doorbell>) -> Threads {
        let (jobs, pending) = channel();
        let (started, under_way) = (AtomicUsize::new(0), Arc::default());
        Threads {
            depth: depth as usize,
            started,
            under_way,
            jobs,
            pending: Arc::new(Mutex::new(pending)),
            bell,
        }
    }

    /// Begins a piece.
    pub(super) fn begin(&self, slot: usize, file: Arc<OwnedFd>, work: Work) -> Result<(), Errno> {
        let needed = self.under_way.fetch_add(1, Ordering::SeqCst) + 1;
        let started = self.started.load(Ordering::SeqCst);
        if started < needed.min(self.depth) {
            match self.start() {
                Ok(()) => _ = self.started.fetch_add(1, Ordering::SeqCst),
                // Those that there are take it in turn.
                Err(_) if started > 0 => {}
                Err(error) => {
                    self.under_way.fetch_sub(1, Ordering::SeqCst);
                    return Err(errno(&error));
                }
            }
        }
        self.jobs.send((slot, file, work)).map_err(|_| Errno::EIO)
    }

    fn start(&self) -> io::Result<()> {
        let (pending, bell) = (Arc::clone(&self.pending), Arc::clone(&self.bell));
        let under_way = Arc::clone(&self.under_way);
        let serve = move || {
            loop {
                // Nobody else waits for a piece meanwhile.
                let next = pending.lock().recv();
                let Ok((slot, file, work)) = next else { return };
                let result = serve(file.as_fd(), &work);
                under_way.fetch_sub(1, Ordering::SeqCst);
                bell.ring(slot, result);
            }
        };
        std::thread::Builder::new().name("modelio-aio".into()).spawn(serve).map(drop)
    }
}

fn serve(file: BorrowedFd<'_>, work: &Work) -> Result<usize, Errno> {
    match work.op {
        // SAFETY: the piece is in flight, and this thread alone moves its bytes.
        Op::Read => pread(file, unsafe { work.place.bytes_mut() }, work.offset.cast_signed()),
        // SAFETY: the piece is in flight.
        Op::Write => pwrite(file, unsafe { work.place.bytes() }, work.offset.cast_signed()),
        Op::Sync => nix::unistd::fsync(file).map(|()| 0),
    }
}

/// Waits until the event was rung, or the time is over.
pub(super) fn wait(event: &EventFd, longest: Duration) -> Result<(), Errno> {
    // A millisecond more, so that what is due has come.
    let timeout = PollTimeout::try_from(longest.as_millis() + 1).unwrap_or(PollTimeout::MAX);
    match poll(&mut [PollFd::new(event.as_fd(), PollFlags::POLLIN)], timeout) {
        Ok(_) | Err(Errno::EINTR) => {
            let _ = event.read();
            Ok(())
        }
        Err(errno) => Err(errno),
    }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))
}
