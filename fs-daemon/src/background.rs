//! `--background`: the command returns when what it started answers, and that goes on as a daemon.
//!
//! The command forks before it has a second thread. The child does all the work, with the terminal's stdout and
//! stderr, so that it says there what every command says. When it is ready it turns stdout and stderr to the log and
//! tells its parent, which has waited for this alone. A child that ends before that has said why, and its parent ends
//! with the same exit code.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _, pipe};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{
    ForkResult, Pid, chdir, dup2_stderr, dup2_stdin, dup2_stdout, geteuid, getpid, getppid, setsid,
};

use crate::error::Error;
use crate::logging;
use crate::printing;
use crate::sys::fork::fork_single_threaded;

/// The actions to take when the process is ready.
#[derive(Debug)]
pub struct Ready(Option<Daemon>);

#[derive(Debug)]
struct Daemon {
    parent: PipeWriter,
    log: File,
    log_path: PathBuf,
}

impl Ready {
    /// For a process that stays in the foreground: does nothing.
    pub fn in_foreground() -> Ready {
        Ready(None)
    }

    /// The announcement for the user. `by_key` and `by_command` say how to end the process in the foreground
    /// and from elsewhere.
    pub fn announcement(&self, by_key: &str, by_command: &str) -> String {
        match &self.0 {
            None => format!("ready ({by_key} ends it)"),
            Some(daemon) => format!(
                "ready in the background as process {}, log {} ({by_command} ends it)",
                getpid(),
                daemon.log_path.display()
            ),
        }
    }

    /// The process is ready, and has said so on stdout.
    ///
    /// # Errors
    /// When it cannot let go of its terminal.
    pub fn announce(self) -> Result<(), Error> {
        let Some(Daemon { mut parent, log, .. }) = self.0 else { return Ok(()) };
        let failed = |e: Errno| Error::new("cannot go to the background").caused_by(e);
        set_pdeathsig(None).map_err(failed)?;
        // The directory that the daemon was started in can then be unmounted.
        chdir("/").map_err(failed)?;
        dup2_stdout(&log).map_err(failed)?;
        dup2_stderr(&log).map_err(failed)?;
        // A parent that was killed just now waits no more.
        let _ = parent.write_all(&[u8::from(printing::has_failed())]);
        Ok(())
    }
}

/// Makes a daemon of this process. The parent waits until that is ready, and does not return from here.
///
/// # Errors
/// When the log cannot be opened, or there can be no child.
pub fn detach(log_path: PathBuf) -> Result<Ready, Error> {
    let failed = |e: io::Error| Error::new("cannot go to the background").caused_by(e);
    let log_path = std::path::absolute(log_path).map_err(failed)?;
    let log = logging::open(&log_path)?;
    let (reader, parent) = pipe().map_err(failed)?;
    let before = getpid();
    match fork_single_threaded().map_err(failed)? {
        ForkResult::Parent { child } => {
            drop(parent);
            std::process::exit(wait(reader, child));
        }
        ForkResult::Child => {
            drop(reader);
            become_daemon(before).map_err(failed)?;
            Ok(Ready(Some(Daemon { parent, log, log_path })))
        }
    }
}

fn become_daemon(parent: Pid) -> io::Result<()> {
    setsid()?;
    // Until it is ready, the daemon ends with its parent, because Ctrl-C there is meant for both.
    set_pdeathsig(Signal::SIGTERM)?;
    if getppid() != parent {
        return Err(Errno::ESRCH.into());
    }
    dup2_stdin(File::open("/dev/null")?)?;
    Ok(())
}

/// Waits until the child is ready, or has ended; returns the exit code that follows from it. One that is ready sends the
/// code: whether it could say so.
fn wait(mut reader: PipeReader, child: Pid) -> i32 {
    let mut code = [0];
    if reader.read_exact(&mut code).is_ok() {
        return code[0].into();
    }
    loop {
        match waitpid(child, None) {
            Err(Errno::EINTR) => {}
            // It has said why.
            Ok(WaitStatus::Exited(_, code)) if code != 0 => return code,
            Ok(WaitStatus::Signaled(_, signal, _)) => {
                eprintln!("gradfs: error: {signal} has ended the daemon before it was ready");
                return 1;
            }
            Ok(_) | Err(_) => {
                eprintln!("gradfs: error: the daemon has ended before it was ready");
                return 1;
            }
        }
    }
}

/// The default log file of `command` on `what`, a directory or an address. Makes the directory.
///
/// # Errors
/// When there is no place for it.
pub fn default_log(command: &str, what: &OsStr) -> Result<PathBuf, Error> {
    let failed = |message: String| Error::new(message).hint("name a file with --log-file");
    let directory = log_directory(geteuid().is_root(), |name| env::var_os(name).map(PathBuf::from));
    let directory =
        directory.ok_or_else(|| failed("there is no place for the log: HOME is not set".into()))?;
    fs::create_dir_all(&directory)
        .map_err(|e| failed(format!("cannot make {} for the log", directory.display())).caused_by(e))?;
    Ok(directory.join(log_name(command, what)))
}

fn log_directory(root: bool, variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    if root {
        return Some("/var/log/gradfs".into());
    }
    let absolute = |name| variable(name).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")));
    state.map(|state| state.join("gradfs"))
}

/// `up-mnt-job.log` for `/mnt/job`.
fn log_name(command: &str, what: &OsStr) -> String {
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let what = if command == "up" || command == "mount" { absolute(Path::new(what)) } else { what.into() };
    let what = what.to_string_lossy();
    let plain = |c: char| if c.is_alphanumeric() || "._:[]".contains(c) { c } else { '-' };
    // With room for the rest of the name.
    let what: String = what.trim_matches('/').chars().map(plain).take(60).collect();
    format!("{command}-{what}.log")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_lie_where_their_user_finds_them() {
        let place = |root, variables: &[(&str, &str)]| {
            let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into());
            log_directory(root, find)
        };
        assert_eq!(place(true, &[("HOME", "/root")]), Some("/var/log/gradfs".into()));
        assert_eq!(place(false, &[("HOME", "/home/a")]), Some("/home/a/.local/state/gradfs".into()));
        assert_eq!(place(false, &[("HOME", "/h"), ("XDG_STATE_HOME", "/s")]), Some("/s/gradfs".into()));
        assert_eq!(
            place(false, &[("HOME", "/h"), ("XDG_STATE_HOME", "s")]),
            Some("/h/.local/state/gradfs".into())
        );
        assert_eq!(place(false, &[]), None);
    }

    #[test]
    fn logs_are_named_after_what_runs() {
        for (command, what, name) in [
            ("up", "/mnt/job", "up-mnt-job.log"),
            ("mount", "/mnt/my job/", "mount-mnt-my-job.log"),
            ("shard", "0.0.0.0:7070", "shard-0.0.0.0:7070.log"),
            ("registry", "[::1]:7070", "registry-[::1]:7070.log"),
        ] {
            assert_eq!(log_name(command, OsStr::new(what)), name);
        }
        assert!(log_name("up", OsStr::new(&"ü".repeat(300))).len() < 255);
    }
}
