//! The sleep of a serving thread on epoll, which another thread can end.

use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::inbox::ThreadState;

/// The descriptors that a serving thread sleeps on, besides that by which others wake it.
pub struct Sleeper {
    /// What the thread sleeps on.
    pub epoll: Epoll,
    thread: Arc<ThreadState>,
}

impl Sleeper {
    /// The data of the event that the thread was woken.
    pub const WOKEN: u64 = u64::MAX;

    /// Of `thread` alone; its driver adds descriptors.
    pub fn new(thread: Arc<ThreadState>) -> Result<Sleeper, Errno> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&thread.wakeup, EpollEvent::new(EpollFlags::EPOLLIN, Sleeper::WOKEN))?;
        Ok(Sleeper { epoll, thread })
    }

    /// Sleeps until something happens, `timeout` long at most. The result is how many events there are.
    pub fn sleep(&self, events: &mut [EpollEvent], timeout: Duration) -> Result<usize, Errno> {
        // The timeout is rounded up, so that a timer is due when the thread wakes.
        let millis = timeout.as_nanos().div_ceil(1_000_000);
        let timeout = EpollTimeout::from(u16::try_from(millis).unwrap_or(u16::MAX));
        let count = match self.epoll.wait(events, timeout) {
            Err(Errno::EINTR) => 0,
            outcome => outcome?,
        };
        if events[..count].iter().any(|event| event.data() == Sleeper::WOKEN) {
            match self.thread.wakeup.read() {
                Ok(_) | Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(count)
    }
}
