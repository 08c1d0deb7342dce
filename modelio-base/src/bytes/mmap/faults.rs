//! Taking the pages of a mapping from the system before anybody needs them.
//!
//! This is one of the modules that may hold `unsafe`; the module above explains why it is sound.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::{HUGE, Mapping};

/// The most bytes that are taken in one call.
const CHUNK: usize = 64 << 20;
/// The most threads that take pages of one mapping. With more, they wait for each other.
const MAX_FAULTING: usize = 4;
/// Bytes of a small page.
const PAGE: usize = 4096;

impl Mapping {
    /// Takes every page now, so that no request pays for a first touch.
    ///
    /// # Errors
    /// ENOMEM when the memory is not there.
    pub fn prefault(&self) -> io::Result<()> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = cores.min(MAX_FAULTING).min(self.len.div_ceil(CHUNK));
        let (next, has_huge) = (AtomicUsize::new(0), AtomicBool::new(self.fd.is_some()));
        let take = || -> io::Result<()> {
            loop {
                let start = next.fetch_add(CHUNK, Ordering::Relaxed);
                if start >= self.len {
                    return Ok(());
                }
                self.take(start..self.len.min(start + CHUNK), &has_huge)?;
            }
        };
        std::thread::scope(|scope| {
            let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, take).ok();
            // Without another thread, this one takes all.
            let others: Vec<_> = (1..threads).filter_map(spawn).collect();
            let here = take();
            let there = others.into_iter().map(|other| other.join().unwrap_or(Ok(())));
            there.fold(here, |before, outcome| before.and(outcome))
        })
    }

    fn take(&self, range: Range<usize>, has_huge: &AtomicBool) -> io::Result<()> {
        if has_huge.load(Ordering::Relaxed) && !self.collapse(range.clone()) {
            has_huge.store(false, Ordering::Relaxed);
        }
        self.populate(range)
    }

    /// Advises the kernel about a range. False if it takes no such advice.
    fn advise(&self, range: Range<usize>, advice: libc::c_int) -> bool {
        // SAFETY: the range lies inside the mapping; neither populating nor gathering changes contents.
        unsafe { libc::madvise(self.address.as_ptr().add(range.start).cast(), range.len(), advice) == 0 }
    }

    fn populate(&self, range: Range<usize>) -> io::Result<()> {
        if self.advise(range.clone(), libc::MADV_POPULATE_WRITE) {
            return Ok(());
        }
        match io::Error::last_os_error() {
            // Kernels before 5.14 do not know the advice: touch the pages by hand.
            error if error.raw_os_error() == Some(libc::EINVAL) => {
                self.touch(range);
                Ok(())
            }
            error => Err(error),
        }
    }

    /// Gathers a part of a memfd in huge pages: reading it through the kernel then takes half the time. The advice works
    /// whatever `shmem_enabled` says. False if it is refused: without huge pages, or before Linux 6.1. Small pages will do.
    fn collapse(&self, range: Range<usize>) -> bool {
        const MADV_COLLAPSE: libc::c_int = 25;
        let range = range.start..range.end / HUGE * HUGE;
        if range.is_empty() {
            return true;
        }
        // One page of each has to exist to begin with.
        let mut starts = range.clone().step_by(HUGE);
        // A call waits until each core has run a task of the kernel's. Meanwhile the process maps no memory.
        starts.all(|start| self.advise(start..start + PAGE, libc::MADV_POPULATE_WRITE))
            && self.advise(range, MADV_COLLAPSE)
    }

    pub(super) fn touch(&self, range: Range<usize>) {
        use std::sync::atomic::AtomicU8;
        for offset in range.step_by(PAGE) {
            // SAFETY: in bounds; exchanging zero for zero takes the page for writing and changes no byte,
            // whatever other threads do with it. (Adding zero would be optimised into a load.)
            unsafe {
                let byte = self.address.as_ptr().add(offset).cast::<AtomicU8>();
                let _ = (*byte).compare_exchange(0, 0, Ordering::SeqCst, Ordering::Relaxed);
            }
        }
    }
}
