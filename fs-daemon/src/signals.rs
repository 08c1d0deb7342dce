//! The events that end a running daemon: a signal, or another cause such as the mount going away (edge
//! module).
//!
//! SIGINT, SIGTERM and SIGHUP are blocked in every thread, and one thread waits for them, so no code of ours
//! ever runs inside a signal handler. A signal more than a second after the first means that somebody finds
//! the orderly way out too slow: the mount is detached and the process exits at once with 130. A signal
//! within that second repeats the same wish: timeout(1) signals its child and then the child's group, and a
//! terminal and a service manager may both signal.

use std::fmt;
use std::io::Write as _;
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};

use crate::error::Error;
use crate::proc::mask_in_status;

/// Exit code when a later signal cuts the orderly shutdown short.
pub const FORCED_EXIT: i32 = 130;

/// How long after the first signal others are taken for the same wish.
const REPEATED_WITHIN: Duration = Duration::from_secs(1);

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

/// Work that even a forced exit does, once there is any.
type Duty = Arc<OnceLock<Box<dyn Fn() + Send + Sync>>>;

/// Receives the first reason to stop.
pub struct Stops {
    sender: mpsc::Sender<Stop>,
    receiver: mpsc::Receiver<Stop>,
    duty: Duty,
}

/// Gives a reason to stop, from any thread.
#[derive(Clone, Debug)]
pub struct Stopper(mpsc::Sender<Stop>);

impl Stopper {
    /// Asks the daemon to stop because of `why`. Harmless when it stops already.
    pub fn stop(&self, why: impl Into<String>) {
        // Sending fails only once the daemon has stopped.
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
    let duty = Duty::default();
    let (from_signals, before_exit) = (sender.clone(), Arc::clone(&duty));
    thread::Builder::new()
        .name("gradfs-signals".into())
        .spawn(move || listen(&signals, &from_signals, &before_exit))
        .map_err(|e| Error::new("cannot start the signal thread").caused_by(e))?;
    Ok(Stops { sender, receiver, duty })
}

impl Stops {
    /// A handle with which other threads can end the wait.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.sender.clone())
    }

    /// Has `duty` done before a forced exit, on the thread of the signals. The first one given counts.
    pub fn before_forced_exit(&self, duty: impl Fn() + Send + Sync + 'static) {
        let _ = self.duty.set(Box::new(duty));
    }

    /// Blocks until there is a reason to stop. Signals later than the one it returned force the exit.
    pub fn wait(&self) -> Stop {
        // It cannot fail: `self` holds a sender.
        self.receiver.recv().unwrap_or_else(|_| Stop::Other("every cause is gone".into()))
    }

    /// Like [`Stops::wait`], for at most `timeout`.
    #[cfg(test)]
    pub fn wait_timeout(&self, timeout: std::time::Duration) -> Option<Stop> {
        self.receiver.recv_timeout(timeout).ok()
    }
}

/// The meaning of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    /// The orderly way out.
    Stop,
    /// The signal repeats the same wish.
    Same,
    /// The end, at once.
    Force,
}

/// The signals so far.
#[derive(Debug, Default)]
struct Signals {
    first: Option<Instant>,
}

impl Signals {
    /// The meaning of one more signal that comes at `now`.
    fn next(&mut self, now: Instant) -> Wish {
        match self.first {
            None => {
                self.first = Some(now);
                Wish::Stop
            }
            Some(first) if now.duration_since(first) < REPEATED_WITHIN => Wish::Same,
            Some(_) => Wish::Force,
        }
    }
}

fn listen(signals: &SigSet, stops: &mpsc::Sender<Stop>, duty: &Duty) {
    let mut so_far = Signals::default();
    loop {
        match signals.wait() {
            Ok(signal) => match so_far.next(Instant::now()) {
                Wish::Stop => {
                    let _ = stops.send(Stop::Signal(signal));
                }
                Wish::Same => tracing::debug!("{signal} again, too soon to mean more than the first"),
                Wish::Force => force(signal, duty),
            },
            Err(nix::Error::EINTR) => {}
            Err(e) => {
                let _ = stops.send(Stop::Other(format!("waiting for signals failed: {e}")));
                return;
            }
        }
    }
}

fn force(signal: Signal, duty: &Duty) -> ! {
    if let Some(duty) = duty.get() {
        duty();
    }
    // This comes last, and its failure is ignored: an unread stderr may be what blocks the others.
    let _ = writeln!(std::io::stderr(), "gradfs: {signal} again: exiting at once");
    std::process::exit(FORCED_EXIT);
}

/// The signals to take over, given `/proc/self/status`: one that is ignored from the start stays so,
/// as `nohup` and shells that start a job in the background expect.
fn wanted(status: &str) -> SigSet {
    let ignored = mask_in_status(status, "SigIgn");
    let ending = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];
    ending.into_iter().filter(|signal| ignored & (1 << (*signal as i32 - 1)) == 0).collect()
}

/// Whether a signal has come. A second signal ends the process at once.
pub struct Interrupt(Arc<OnceLock<String>>);

impl Interrupt {
    /// To be called before there are threads.
    pub fn install() -> Result<Interrupt, Error> {
        let stops = install()?;
        let why = Arc::new(OnceLock::new());
        let cause = Arc::clone(&why);
        let waits = move || drop(cause.set(stops.wait().to_string()));
        let spawned = thread::Builder::new().name("interrupt".into()).spawn(waits);
        spawned.map_err(|error| Error::new("cannot start a thread for signals").caused_by(error))?;
        Ok(Interrupt(why))
    }

    pub fn why(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }
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
    fn only_a_late_repeat_forces_the_exit() {
        let start = Instant::now();
        let mut signals = Signals::default();
        assert_eq!(signals.next(start), Wish::Stop);
        for (millis, wish) in [
            (0, Wish::Same),
            (999, Wish::Same),
            (1000, Wish::Force),
            // The interval counts from the first signal, not from the one before.
            (1001, Wish::Force),
        ] {
            assert_eq!(signals.next(start + Duration::from_millis(millis)), wish, "{millis} ms");
        }
    }

    fn stops() -> Stops {
        let (sender, receiver) = mpsc::channel();
        Stops { sender, receiver, duty: Duty::default() }
    }

    #[test]
    fn other_causes_end_the_wait() {
        let stops = stops();
        let stopper = stops.stopper();
        thread::spawn(move || stopper.stop("the mount is gone"));
        assert_eq!(stops.wait(), Stop::Other("the mount is gone".into()));
        assert_eq!(stops.wait_timeout(std::time::Duration::from_millis(1)), None);
    }

    #[test]
    fn a_signal_to_the_listening_thread_ends_the_wait() {
        // Directed at one thread, so that the other tests' threads never see it.
        let stops = stops();
        let from_signals = stops.sender.clone();
        thread::spawn(move || {
            let mut set = SigSet::empty();
            set.add(Signal::SIGTERM);
            set.thread_block().unwrap();
            nix::sys::pthread::pthread_kill(nix::sys::pthread::pthread_self(), Signal::SIGTERM).unwrap();
            listen(&set, &from_signals, &Duty::default());
        });
        assert_eq!(stops.wait(), Stop::Signal(Signal::SIGTERM));
    }
}
