//! Processes behind FUSE requests, known by pidfd, and how they end (edge module).
//!
//! A number can be reused as soon as its process is reaped; a pidfd cannot. A learner that dies by a
//! signal must not count like one that left, so how it ended matters, and a daemon is not its parent:
//! the status comes from `/proc` while it is a zombie, and from the pidfd itself once it is reaped.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

use crate::proc::{field, flags_in_stat, line_of_status, mask_in_status};
use crate::sys::pidfd;

/// Most processes watched at once: each costs a descriptor, and they must not use up the daemon's.
pub const MAX_WATCHED: usize = 4096;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It exited with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
    /// The process is gone, and the system does not tell how.
    Unknown,
}

impl Exit {
    /// From a status as wait(2) gives it.
    fn from_status(status: i32) -> Exit {
        match status & 0x7f {
            0 => Exit::Code((status >> 8) & 0xff),
            signal => Exit::Signal(signal),
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exit::Code(code) => write!(f, "exited with code {code}"),
            Exit::Signal(signal) => match nix::sys::signal::Signal::try_from(*signal) {
                Ok(name) => write!(f, "killed by {name}"),
                Err(_) => write!(f, "killed by signal {signal}"),
            },
            Exit::Unknown => f.write_str("ended in a way the system does not tell"),
        }
    }
}

/// A process, held by a pidfd: the pidfd names this very process even when its number is used again.
#[derive(Debug)]
pub struct Process {
    tgid: u32,
    pidfd: OwnedFd,
}

impl Process {
    /// The process that thread `tid` belongs to; a FUSE request names the thread. None if it is gone,
    /// or in a PID namespace that is not ours (the kernel then says 0).
    pub fn of_thread(tid: u32) -> Option<Process> {
        let tgid = thread_group(tid)?;
        let pidfd = pidfd::open(tgid).ok()?;
        // Had it ended in between, the numbers could be another's; if they still agree with the pidfd
        // open, the pidfd is of the process we mean.
        (thread_group(tid)? == tgid).then_some(Process { tgid, pidfd })
    }

    /// Its process ID.
    pub fn tgid(&self) -> u32 {
        self.tgid
    }

    /// How it ended. If it is ending just now, and has closed its files for that reason, this waits up to `timeout`.
    pub fn end_of_leaving(&self, timeout: Duration) -> Option<Exit> {
        let statm = fs::read_to_string(format!("/proc/{}/statm", self.tgid)).unwrap_or_default();
        self.wait_exit(if has_memory(&statm) { Duration::ZERO } else { timeout })
    }

    /// How it ended, or None while it runs. Never blocks.
    pub fn exited(&self) -> Option<Exit> {
        self.wait_exit(Duration::ZERO)
    }

    /// Waits up to `timeout` for its end.
    pub fn wait_exit(&self, timeout: Duration) -> Option<Exit> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            // Rounded up, so that the last wait does not spin, and cut to what poll(2) can take.
            let ms = left
                .map_or(i32::MAX, |left| i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX));
            let timeout = PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)], timeout) {
                Ok(0) if left.is_some_and(|left| left.is_zero()) => return None,
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Some(self.status()),
                Err(_) => return Some(Exit::Unknown),
            }
        }
    }

    /// How it ended; it has.
    fn status(&self) -> Exit {
        if let Some(status) = pidfd::exit_status(self.pidfd.as_fd()) {
            return Exit::from_status(status);
        }
        let seen = zombie_status(self.tgid);
        if !pidfd::reaped(self.pidfd.as_fd()) {
            // The process is not reaped even now, so the exit status was its own.
            return seen.map_or(Exit::Unknown, Exit::from_status);
        }
        pidfd::exit_status(self.pidfd.as_fd()).map_or(Exit::Unknown, Exit::from_status)
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// Whether thread `tid` is being killed just now, or is one of the kernel's: its program did not ask for a
/// close that comes from it. Depending on its release, the kernel closes the files of a killed process from
/// the dying thread or from a worker of its own.
///
/// A thread in execve(2) closes files, too, and waits for the answer under a lock that `/proc/<tid>/stat` takes on newer
/// kernels. Unlike a dying or a kernel's thread, it has memory, which `/proc/<tid>/statm` shows without that lock, and in
/// much less time than `/proc/<tid>/status`.
pub fn is_killed_or_kernel(tid: u32) -> bool {
    if !is_ending_or_kernel(tid) {
        return false;
    }
    let stat = fs::read_to_string(format!("/proc/{tid}/stat")).unwrap_or_default();
    closes_by_death(&stat, || status_is_hidden(tid))
}

/// Whether thread `tid` ends just now, by a signal or by itself, or is one of the kernel's.
pub(super) fn is_ending_or_kernel(tid: u32) -> bool {
    !has_memory(&fs::read_to_string(format!("/proc/{tid}/statm")).unwrap_or_default())
}

/// Whether `/proc/<tid>/statm` names pages of memory.
fn has_memory(statm: &str) -> bool {
    statm.split_ascii_whitespace().next().is_some_and(|pages| pages != "0")
}

/// Does [`is_killed_or_kernel`] on the text of `/proc/<tid>/stat`. `hidden` says whether the last field but
/// one, the exit status, is withheld from us, and reads 0.
fn closes_by_death(stat: &str, hidden: impl FnOnce() -> bool) -> bool {
    // From the kernel's include/linux/sched.h.
    const PF_SIGNALED: u64 = 0x400;
    const PF_KTHREAD: u64 = 0x20_0000;
    let flags = flags_in_stat(stat);
    if flags & PF_KTHREAD != 0 {
        return true;
    }
    // A signal also ends the threads of a program that exits; the program's exit status tells the difference.
    flags & PF_SIGNALED != 0
        && match field(stat, 52).and_then(|status| status.parse().ok()) {
            Some(0) => hidden(),
            Some(status) => matches!(Exit::from_status(status), Exit::Signal(_)),
            None => true,
        }
}

/// A signal under way to a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// SIGKILL.
    Killed,
    /// One of the signals by which people and supervisors ask programs to end, neither blocked nor ignored.
    Asked,
}

/// Whether thread `tid` has been sent a signal that will end it, and has not taken it yet.
pub fn ending_signal(tid: u32) -> Option<Ending> {
    ending_in_status(&fs::read_to_string(format!("/proc/{tid}/status")).unwrap_or_default())
}

fn ending_in_status(status: &str) -> Option<Ending> {
    let mask = |name: &str| mask_in_status(status, name);
    let bit = |signal: i32| 1u64 << (signal - 1);
    let pending = mask("SigPnd") | mask("ShdPnd");
    let asking = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT].map(bit).iter().sum::<u64>();
    if pending & bit(libc::SIGKILL) != 0 {
        Some(Ending::Killed)
    } else if pending & asking & !mask("SigBlk") & !mask("SigIgn") != 0 {
        Some(Ending::Asked)
    } else {
        None
    }
}

/// Whether thread `tid` is in mkdir(2) just now. The kernel looks a name up before it asks to make the directory, and that
/// look-up is told apart from others by nothing else. True if it cannot be seen: then a name can be made again.
pub(super) fn is_making_directory(tid: u32) -> bool {
    let Ok(call) = fs::read_to_string(format!("/proc/{tid}/syscall")) else { return true };
    let number = call.split_whitespace().next().and_then(|number| number.parse().ok());
    #[cfg(target_arch = "x86_64")]
    if number == Some(libc::SYS_mkdir) {
        return true;
    }
    number == Some(libc::SYS_mkdirat)
}

/// The process of thread `tid`. None if it is gone, or cannot be seen.
pub(super) fn thread_group(tid: u32) -> Option<u32> {
    if tid == 0 {
        return None;
    }
    let status = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    line_of_status(&status, "Tgid")?.parse().ok()
}

/// The wait status in `/proc/<pid>/stat` of a zombie, or None if it is none or we may not see it.
fn zombie_status(pid: u32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    status_in_stat(&stat).filter(|&status| status != 0 || !status_is_hidden(pid))
}

/// Whether we may not see how a process ends: the field then reads 0, like a good end. Links under ns/ need
/// the same permission. A zombie has no namespace any more, and that gives another error than a lack of
/// permission.
fn status_is_hidden(pid: u32) -> bool {
    fs::read_link(format!("/proc/{pid}/ns/user")).is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied)
}

/// Field 52 of a `/proc/<pid>/stat` whose field 3 says zombie.
fn status_in_stat(stat: &str) -> Option<i32> {
    let state = field(stat, 3)?;
    if state != "Z" && state != "X" {
        return None;
    }
    field(stat, 52)?.parse().ok()
}

/// Tells when processes end: one thread for all of them.
#[derive(Debug)]
pub struct Watcher {
    shared: Arc<WatcherShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct WatcherShared {
    epoll: Epoll,
    /// Written to once, to end the thread.
    stop: EventFd,
    watched: Mutex<Watched>,
}

#[derive(Debug, Default)]
struct Watched {
    /// By the token that epoll returns: never reused, so that an event can not be taken for another's.
    processes: HashMap<u64, (Arc<Process>, u64)>,
    last_token: u64,
}

impl WatcherShared {
    /// Takes a process out of the epoll set before its pidfd closes: closing alone does not while a
    /// forked child that has not called exec yet holds a copy.
    fn unregister(&self, process: &Process) {
        // It can only fail if it is not in the set, and then all is well.
        let _ = self.epoll.delete(process);
    }
}

/// The token of `WatcherShared::stop`; processes count from 1.
const STOP: u64 = 0;

impl Watcher {
    /// Starts the thread. It calls `ended` with the key and the end of each watched process, one at a
    /// time, holding no lock: `ended` may call [`Watcher::watch`] and [`Watcher::forget`].
    pub fn start(ended: impl FnMut(u64, Exit) + Send + 'static) -> io::Result<Watcher> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let stop = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        epoll.add(&stop, EpollEvent::new(EpollFlags::EPOLLIN, STOP))?;
        let shared = Arc::new(WatcherShared { epoll, stop, watched: Mutex::default() });
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("gradfs-watcher".into())
            .spawn(move || run_watcher(&of_thread, ended))?;
        Ok(Watcher { shared, thread: Some(thread) })
    }

    /// Watches `process` until it ends; one that has ended already is reported like the others. A key
    /// may stand for several processes. Fails when [`MAX_WATCHED`] are watched.
    pub fn watch(&self, process: Arc<Process>, key: u64) -> io::Result<()> {
        let mut watched = self.shared.watched.lock();
        if watched.processes.len() >= MAX_WATCHED {
            return Err(io::Error::other(format!("{MAX_WATCHED} processes are watched already")));
        }
        watched.last_token += 1;
        let token = watched.last_token;
        // Under the lock: the thread finds the entry even if the event comes at once.
        self.shared.epoll.add(&*process, EpollEvent::new(EpollFlags::EPOLLIN, token))?;
        watched.processes.insert(token, (process, key));
        Ok(())
    }

    /// Stops watching the processes of `key`. An end that is being reported already still is.
    pub fn forget(&self, key: u64) {
        let mut watched = self.shared.watched.lock();
        for (_, (process, _)) in watched.processes.extract_if(|_, (_, of)| *of == key) {
            self.shared.unregister(&process);
        }
    }

    /// How many processes are watched.
    pub fn watched(&self) -> usize {
        self.shared.watched.lock().processes.len()
    }

    /// Ends the thread; no report comes after this returns (unless called from within one).
    #[cfg(test)]
    pub fn shutdown(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        // It fails only when the counter is full, and then the thread is awake anyway.
        let _ = self.shared.stop.write(1);
        if thread.thread().id() != thread::current().id() {
            // A callback that panicked has printed so.
            let _ = thread.join();
        }
        self.shared.watched.lock().processes.clear();
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop();
    }
}

fn run_watcher(shared: &WatcherShared, mut ended: impl FnMut(u64, Exit)) {
    let mut events = [EpollEvent::empty(); 64];
    loop {
        let count = match shared.epoll.wait(&mut events, EpollTimeout::NONE) {
            Ok(count) => count,
            Err(Errno::EINTR) => continue,
            Err(e) => {
                tracing::error!("watching processes failed, their ends go unnoticed from now on: {e}");
                return;
            }
        };
        for event in &events[..count] {
            if event.data() == STOP {
                return;
            }
            let found = shared.watched.lock().processes.remove(&event.data());
            // Forgotten in the meantime: not to be reported.
            let Some((process, key)) = found else { continue };
            let exit = process.exited().unwrap_or(Exit::Unknown);
            // Closed before the callback, which may take its time.
            shared.unregister(&process);
            drop(process);
            ended(key, exit);
        }
    }
}

#[cfg(test)]
mod tests;
