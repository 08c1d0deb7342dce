//! Processes of learners: starting them, signalling them, and learning of their ends (edge module).

use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use nix::errno::Errno;
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawnp};
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;

pub use super::supervisor::End;

/// A command and the environment of this process.
pub struct Program {
    words: Vec<CString>,
    variables: Vec<(OsString, OsString)>,
    null: File,
}

impl Program {
    /// # Errors
    /// A word with a NUL byte, or no /dev/null.
    pub fn new(words: &[OsString]) -> io::Result<Program> {
        let words = words.iter().map(|word| Ok(CString::new(word.as_bytes())?));
        Ok(Program {
            words: words.collect::<io::Result<_>>()?,
            variables: std::env::vars_os().collect(),
            null: File::open("/dev/null")?,
        })
    }

    /// Starts it in a process group of its own, with `variables` besides those of this process, and with `streams` as
    /// stdout and stderr; without them it has those of this process.
    ///
    /// `std::process` would hand the blocked signals of this thread down, and to unblock them for a moment would let a
    /// signal through that is to be forwarded.
    pub fn start(
        &self,
        variables: &[(&str, OsString)],
        streams: Option<(BorrowedFd<'_>, BorrowedFd<'_>)>,
    ) -> io::Result<Pid> {
        let inherited =
            self.variables.iter().filter(|(name, _)| variables.iter().all(|(own, _)| name != own));
        let inherited = inherited.map(|(name, value)| (name.as_os_str(), value));
        let all = inherited.chain(variables.iter().map(|(name, value)| (OsStr::new(*name), value)));
        let environment: Vec<CString> = all
            .map(|(name, value)| Ok(CString::new([name.as_bytes(), value.as_bytes()].join(&b'='))?))
            .collect::<io::Result<_>>()?;
        let mut files = PosixSpawnFileActions::init()?;
        files.add_dup2(self.null.as_raw_fd(), libc::STDIN_FILENO)?;
        if let Some((out, err)) = streams {
            files.add_dup2(out.as_raw_fd(), libc::STDOUT_FILENO)?;
            files.add_dup2(err.as_raw_fd(), libc::STDERR_FILENO)?;
        }
        let mut how = PosixSpawnAttr::init()?;
        let flags = [
            PosixSpawnFlags::POSIX_SPAWN_SETPGROUP,
            PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK,
            PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF,
        ];
        how.set_flags(flags.into_iter().collect())?;
        how.set_pgroup(Pid::from_raw(0))?;
        how.set_sigmask(&SigSet::empty())?;
        // Programs in Rust ignore it, and other programs expect to be ended by it.
        how.set_sigdefault(&[Signal::SIGPIPE, Signal::SIGCHLD].into_iter().collect())?;
        let words: Vec<&CStr> = self.words.iter().map(CString::as_c_str).collect();
        let environment: Vec<&CStr> = environment.iter().map(CString::as_c_str).collect();
        Ok(posix_spawnp(words[0], &files, &how, &words, &environment)?)
    }
}

/// Whether there is a file for the command, as execvp(3) looks for it.
pub fn is_there(command: &OsStr) -> bool {
    if command.is_empty() || command.as_bytes().contains(&b'/') {
        return Path::new(command).exists();
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    std::env::split_paths(&path).any(|directory| directory.join(command).is_file())
}

/// Sends a signal to the process group of `process`. One that has ended meanwhile needs none.
pub fn send(process: Pid, signal: Signal) -> io::Result<()> {
    match killpg(process, signal) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// How a process of ours has ended, if it has. To be asked until it has, and not again. If it has failed, what is left of
/// its group is killed: a program that goes on there would contribute as a learner that has left, or is another's by now.
pub fn end_of(process: Pid) -> Option<End> {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG;
    match waitid(Id::Pid(process), flags | WaitPidFlag::WNOWAIT) {
        Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => return None,
        Ok(WaitStatus::Exited(_, 0)) => {}
        Err(Errno::ECHILD) => {}
        // Until the status is taken below, its number is no other group's.
        _ => drop(send(process, Signal::SIGKILL)),
    }
    match waitpid(process, Some(WaitPidFlag::WNOHANG)) {
        Ok(WaitStatus::Exited(_, status)) => Some(End::Exited(status)),
        Ok(WaitStatus::Signaled(_, signal, _)) => Some(End::Killed(signal as i32)),
        // By a real-time signal: those have no names, and which one it was is not told.
        Err(Errno::EINVAL) => Some(End::Killed(libc::SIGRTMIN())),
        // The status is lost. No other code of this process takes it, so this is not expected.
        Err(Errno::ECHILD) => Some(End::Exited(1)),
        Ok(_) | Err(_) => None,
    }
}
