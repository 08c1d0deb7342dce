//! What ends a running daemon: a signal, or another cause such as the mount going away (edge module).
//!
//! SIGINT, SIGTERM and SIGHUP are blocked in every thread and taken by one that waits for them, so no
//! code of ours ever runs inside a signal handler. A second signal means that the orderly way out takes
//! too long for somebody: the process exits at once with 130.

use std::fmt;
use std::sync::mpsc;
use std::thread;

use nix::sys::signal::{SigSet, Signal};

use crate::error::Error;

/// Exit code when a second signal cuts the orderly shutdown short.
pub const FORCED_EXIT: i32 = 130;

/// Why the daemon should stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Somebody sent this signal.
    Signal(Signal),
    /// Something else ended it, in words: "the mount is gone".
    Other(String),
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stop::Signal(signal) => f.write_str(signal.as_str()),
            Stop::Other(why) => f.write_str(why),
        }
    }
}

/// Receives the first reason to stop.
#[derive(Debug)]
pub struct Stops {
    sender: mpsc::Sender<Stop>,
    receiver: mpsc::Receiver<Stop>,
}

/// Gives a reason to stop, from any thread.
#[derive(Clone, Debug)]
pub struct Stopper(mpsc::Sender<Stop>);

impl Stopper {
    /// Asks the daemon to stop because of `why`. Harmless when it stops already.
    pub fn stop(&self, why: impl Into<String>) {
        // Nobody listens any more only once it has stopped.
        let _ = self.0.send(Stop::Other(why.into()));
    }
}

/// Takes over the signals that end a daemon. Call it before any other thread starts: threads inherit
/// the blocked signals from the one that starts them, and a thread that does not would be killed.
pub fn install() -> Result<Stops, Error> {
    let failed = |e: nix::Error| Error::new("cannot take over signals").caused_by(e);
    let signals = wanted(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
    signals.thread_block().map_err(failed)?;
    let (sender, receiver) = mpsc::channel();
    let from_signals = sender.clone();
    thread::Builder::new()
        .name("gradfs-signals".into())
        .spawn(move || listen(&signals, &from_signals))
        .map_err(|e| Error::new("cannot start the signal thread").caused_by(e))?;
    Ok(Stops { sender, receiver })
}

impl Stops {
    /// A handle with which other threads can end the wait.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.sender.clone())
    }

    /// Blocks until there is a reason to stop. Signals after the one it returned force the exit.
    pub fn wait(&self) -> Stop {
        // It cannot fail: `self` holds a sender.
        self.receiver.recv().unwrap_or_else(|_| Stop::Other("every cause is gone".into()))
    }

    /// As [`Stops::wait`], for at most `timeout`.
    #[cfg(test)]
    pub fn wait_timeout(&self, timeout: std::time::Duration) -> Option<Stop> {
        self.receiver.recv_timeout(timeout).ok()
    }
}

fn listen(signals: &SigSet, stops: &mpsc::Sender<Stop>) {
    let mut seen = false;
    loop {
        match signals.wait() {
            Ok(signal) if seen => {
                eprintln!("gradfs: {signal} again: exiting at once");
                std::process::exit(FORCED_EXIT);
            }
            Ok(signal) => {
                seen = true;
                let _ = stops.send(Stop::Signal(signal));
            }
            Err(nix::Error::EINTR) => {}
            Err(e) => {
                let _ = stops.send(Stop::Other(format!("waiting for signals failed: {e}")));
                return;
            }
        }
    }
}

/// The signals to take over, given `/proc/self/status`: one that is ignored from the start stays so,
/// as `nohup` and shells that start a job in the background expect.
fn wanted(status: &str) -> SigSet {
    let ignored = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0);
    let mut set = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        if ignored & (1 << (signal as i32 - 1)) == 0 {
            set.add(signal);
        }
    }
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_stay_ignored() {
        // SIGHUP is 1: bit 0.
        let set = wanted("Name:\tx\nSigIgn:\t0000000000000001\n");
        assert!(!set.contains(Signal::SIGHUP));
        assert!(set.contains(Signal::SIGINT) && set.contains(Signal::SIGTERM));
        assert!(wanted("").contains(Signal::SIGHUP));
    }

    #[test]
    fn other_causes_end_the_wait() {
        let (sender, receiver) = mpsc::channel();
        let stops = Stops { sender, receiver };
        let stopper = stops.stopper();
        thread::spawn(move || stopper.stop("the mount is gone"));
        assert_eq!(stops.wait(), Stop::Other("the mount is gone".into()));
        assert_eq!(stops.wait_timeout(std::time::Duration::from_millis(1)), None);
    }

    #[test]
    fn a_signal_to_the_listening_thread_ends_the_wait() {
        // Directed at one thread, so that the other tests' threads never see it.
        let (sender, receiver) = mpsc::channel();
        let stops = Stops { sender, receiver };
        let from_signals = stops.sender.clone();
        thread::spawn(move || {
            let mut set = SigSet::empty();
            set.add(Signal::SIGTERM);
            set.thread_block().unwrap();
            nix::sys::pthread::pthread_kill(nix::sys::pthread::pthread_self(), Signal::SIGTERM).unwrap();
            listen(&set, &from_signals);
        });
        assert_eq!(stops.wait(), Stop::Signal(Signal::SIGTERM));
    }
}
