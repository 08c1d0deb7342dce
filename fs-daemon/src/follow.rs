//! `gradfs follow`: for each new version of a model, runs a command or tells a server.
//!
//! One version at a time: it is held while the command or request runs, and those that come and go meanwhile are skipped.
//! This thread waits for versions, commands and answers. Another one waits for signals, so that a mount or a server that
//! hangs does not keep them.

pub mod args;
mod held;
mod hook;

use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;

use self::args::FollowArgs;
use self::held::{Held, Model};
use self::hook::{Child, Hook};
use crate::error::{self, Error};
use crate::signals::{self, Stop};
use crate::sys;

/// The pause before the first retry, which doubles, and the longest one.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(60);

/// Follows a model, until something fails.
///
/// # Errors
/// There is no such model, its mount ends, or a command or request fails.
pub fn run(args: &FollowArgs) -> Result<ExitCode, Error> {
    let child = Arc::new(Child::default());
    end_by_signals(&child)?;
    let mut model = Model::find(&args.path)?;
    let hook = Hook::of(args, child)?;
    let mut seen = args.from;
    if seen.is_none() && !args.now {
        seen = Some(model.version().map_err(|error| model.gone(error))?);
    }
    loop {
        let held = model.newer_than(seen).map_err(|error| model.gone(error))?;
        seen = Some(held.version);
        done(&hook, &held, args.retries)?;
        if args.once {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Does what is to be done for a version, again if it fails.
fn done(hook: &Hook, held: &Held, retries: u32) -> Result<(), Error> {
    let (mut pause, mut retry) = (RETRY_PAUSE, 0);
    while let Err(failure) = hook.of_version(held) {
        let failure = failure.of(&format!("version {} of {}", held.version, held.model.display()));
        if retry == retries {
            return Err(failure);
        }
        retry += 1;
        let text = error::chain(&failure);
        eprintln!("gradfs: warning: {text}; retry {retry} of {retries} in {} s", pause.as_secs());
        thread::sleep(pause);
        pause = (pause * 2).min(MAX_RETRY_PAUSE);
    }
    Ok(())
}

/// Has a signal end the command that runs, and then this process. To be called before there are threads.
fn end_by_signals(child: &Arc<Child>) -> Result<(), Error> {
    let failed = |error| Error::new("cannot take over signals").caused_by(error);
    // Whoever ignores it gets no status of a command.
    sys::signals::default_action(Signal::SIGCHLD).map_err(failed)?;
    let stops = signals::install()?;
    let (of_force, of_stop) = (Arc::clone(child), Arc::clone(child));
    stops.before_forced_exit(move || of_force.send(Signal::SIGKILL));
    let ends = move || match stops.wait() {
        Stop::Signal(signal) => of_stop.end(signal),
        Stop::Other(_) => std::process::exit(1),
    };
    thread::Builder::new().name("gradfs-ends".into()).spawn(ends).map(drop).map_err(failed)
}
