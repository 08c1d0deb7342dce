//! What is done for a version: a command, a request, or a line (edge module).

use std::ffi::OsString;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use parking_lot::Mutex;
use serde_json::json;
use ureq::Agent;

use super::args::FollowArgs;
use super::held::Held;
use crate::error::Error;
use crate::run::process::{self, End, Program};
use crate::sys::pidfd;

/// How long a command that is asked to end may take, before it is killed.
const GRACE: Duration = Duration::from_secs(5);
/// Bytes of an answer that an error shows.
const SHOWN_OF_ANSWER: u64 = 300;

/// What is done for each version.
pub enum Hook {
    /// This runs, for so long at most.
    Exec(Program, Arc<Child>, Duration),
    /// A request to this address.
    Post(Agent, String),
    /// A line.
    Print,
}

impl Hook {
    /// # Errors
    /// The command has a NUL byte.
    pub fn of(args: &FollowArgs, child: Arc<Child>) -> Result<Hook, Error> {
        if let Some(command) = &args.exec {
            let words = [OsString::from("/bin/sh"), "-c".into(), command.clone()];
            return Ok(Hook::Exec(Program::new(&words).map_err(not_run)?, child, args.timeout));
        }
        let Some(url) = &args.post else { return Ok(Hook::Print) };
        // A POST that is redirected becomes a GET.
        let agent = Agent::config_builder().timeout_global(Some(args.timeout)).http_status_as_error(false);
        let agent = agent.max_redirects(0).max_redirects_will_error(false).proxy(None);
        Ok(Hook::Post(agent.build().into(), url.clone()))
    }

    /// # Errors
    /// It has failed, or took too long.
    pub fn of_version(&self, held: &Held) -> Result<(), Error> {
        match self {
            Hook::Exec(program, child, timeout) => exec(held, program, child, *timeout),
            Hook::Post(agent, url) => {
                post(held, agent, url).map_err(|error| error.of(&format!("POST {url}")))
            }
            Hook::Print => writeln!(io::stdout(), "{}", held.version)
                .map_err(|error| Error::new("it cannot be printed").caused_by(error)),
        }
    }
}

fn exec(held: &Held, program: &Program, child: &Child, timeout: Duration) -> Result<(), Error> {
    let variables = [
        ("GRADFS_MODEL", held.model.clone().into()),
        ("GRADFS_VERSION", held.version.to_string().into()),
        ("GRADFS_VERSION_PATH", held.path.clone().into()),
        ("GRADFS_HELD_PATH", held.held_path().into()),
    ];
    let failure = match child.run(program, &variables, timeout).map_err(not_run)? {
        Some(End::Exited(0)) => return Ok(()),
        Some(end) => format!("the command {}", end.in_words()),
        None => format!("the command took more than {} s, and was ended (--timeout)", timeout.as_secs_f64()),
    };
    Err(Error::new(failure))
}

fn not_run(error: io::Error) -> Error {
    Error::new("the command cannot be run").caused_by(error)
}

fn post(held: &Held, agent: &Agent, url: &str) -> Result<(), Error> {
    let body = json!({
        "model": held.model.to_string_lossy(),
        "version": held.version,
        "path": held.path.to_string_lossy(),
        "held": held.held_path().to_string_lossy(),
        "meta": held.meta,
    });
    let sent = agent.post(url).content_type("application/json").send(body.to_string());
    let mut answer = sent.map_err(|error| Error::new("no answer").caused_by(error))?;
    if answer.status().is_success() {
        return Ok(());
    }
    let mut said = Vec::new();
    // Whatever comes of it is of use.
    let _ = answer.body_mut().as_reader().take(SHOWN_OF_ANSWER).read_to_end(&mut said);
    Err(Error::new(format!("{}: {}", answer.status(), String::from_utf8_lossy(&said).trim())))
}

/// The command that runs, if any, in a process group of its own.
#[derive(Default)]
pub struct Child {
    /// Whoever has this starts it, or takes its status: until then, its number is no other process's.
    turn: Mutex<()>,
    /// Its number, or 0.
    pid: AtomicI32,
}

impl Child {
    /// Runs a program to its end. Returns None if it took longer than `at_most`, and was ended.
    fn run(
        &self,
        program: &Program,
        variables: &[(&str, OsString)],
        at_most: Duration,
    ) -> io::Result<Option<End>> {
        let turn = self.turn.lock();
        let pid = program.start(variables, None)?;
        self.pid.store(pid.as_raw(), Ordering::SeqCst);
        drop(turn);
        let pidfd = pidfd::open(pid.as_raw() as u32)?;
        let in_time = ends_within(&pidfd, at_most)?;
        if !in_time {
            self.send(Signal::SIGTERM);
            ends_within(&pidfd, GRACE)?;
            self.send(Signal::SIGKILL);
        }
        while !ends_within(&pidfd, GRACE)? {}
        let _turn = self.turn.lock();
        self.pid.store(0, Ordering::SeqCst);
        let end = std::iter::repeat_with(|| process::end_of(pid)).flatten().next();
        Ok(end.filter(|_| in_time))
    }

    /// Ends it by `signal`, or kills it if that takes long, and then ends this process.
    pub fn end(&self, signal: Signal) -> ! {
        let _turn = self.turn.lock();
        let pidfd = u32::try_from(self.pid.load(Ordering::SeqCst)).map(pidfd::open);
        self.send(signal);
        if let Ok(Ok(pidfd)) = pidfd {
            // Whether it has ended or not, what is left of it is killed.
            let _ = ends_within(&pidfd, GRACE);
        }
        self.send(Signal::SIGKILL);
        std::process::exit(128 + signal as i32)
    }

    /// Sends it a signal.
    pub fn send(&self, signal: Signal) {
        let pid = self.pid.load(Ordering::SeqCst);
        if pid != 0
            && let Err(error) = process::send(Pid::from_raw(pid), signal)
        {
            eprintln!("gradfs: warning: {signal} cannot be sent to the command: {error}");
        }
    }
}

/// Waits for the end of a process, without taking its status.
fn ends_within(pidfd: &OwnedFd, at_most: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + at_most;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}
