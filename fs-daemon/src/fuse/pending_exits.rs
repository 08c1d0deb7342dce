//! Programs that are dying with something written. The fate of their contribution is known only when they are
//! gone. Until then nobody else may write into it or end it. So the next open of the learner's `gradients`
//! waits, and so does an fsync or close by others who had it open.
//!
//! A parent may reap a program, and its next program may open the same file, before the daemon hears of the
//! end. But the dying program closes its files before it can be reaped, and that is when its exit begins to
//! be pending.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::LearnerId;
use parking_lot::Mutex;

use super::open_files::ProgramFile;
use super::process::Exit;
use crate::fs::OpenFile;
use crate::session::contribution::Ending;
use crate::session::error::{CallError, CallResult, Done};

/// How long a process that closes its files by ending may take to be gone.
const DEATH_PATIENCE: Duration = Duration::from_millis(500);
/// How soon after the close the last descriptor must be gone, else others have the file open and may go on.
const RELEASE: Duration = Duration::from_millis(500);

/// A learner of the mount: the index of its model, and its number.
pub type OfLearner = (u8, LearnerId);

struct PendingExit {
    learner: OfLearner,
    fh: u64,
    since: Instant,
    /// The last descriptor is gone, and somebody is finding out how the program ended.
    released: bool,
}

struct Waiting {
    learner: OfLearner,
    deadline: Instant,
    then: Done<()>,
}

#[derive(Default)]
struct ExitsState {
    exits: Vec<PendingExit>,
    waiting: Vec<Waiting>,
}

/// The pending exits of all learners' programs.
#[derive(Default)]
pub struct PendingExits(Mutex<ExitsState>);

impl PendingExits {
    /// A dying program has closed the open file `fh`, through which it wrote as `learner`.
    pub fn begin(&self, learner: OfLearner, fh: u64, now: Instant) {
        let mut state = self.0.lock();
        if !state.exits.iter().any(|exit| exit.fh == fh) {
            state.exits.push(PendingExit { learner, fh, since: now, released: false });
        }
    }

    /// The last descriptor of `fh` is gone.
    fn released(&self, fh: u64) {
        self.0.lock().exits.iter_mut().filter(|exit| exit.fh == fh).for_each(|exit| exit.released = true);
    }

    /// The fate of the writes through `fh` is settled.
    fn end(&self, fh: u64) {
        self.over(|exit| exit.fh == fh);
    }

    /// Ends pending exits. Waiters that can go on do so, with nothing locked.
    fn over(&self, is_over: impl Fn(&PendingExit) -> bool) {
        let freed: Vec<_> = {
            let mut state = self.0.lock();
            let ExitsState { exits, waiting } = &mut *state;
            exits.retain(|exit| !is_over(exit));
            let is_free = |one: &mut Waiting| exits.iter().all(|exit| exit.learner != one.learner);
            waiting.extract_if(.., is_free).collect()
        };
        freed.into_iter().for_each(|one| (one.then)(Ok(())));
    }

    /// Calls `then` when no exit is pending for `learner`, at the latest, with an error, at `deadline`. Gives
    /// `then` back if no exit is pending now except that of `own`, the caller's file: a child that had it has
    /// died.
    pub fn wait(
        &self,
        learner: OfLearner,
        own: Option<u64>,
        deadline: Instant,
        then: Done<()>,
    ) -> Option<Done<()>> {
        let mut state = self.0.lock();
        if state.exits.iter().all(|exit| exit.learner != learner || Some(exit.fh) == own) {
            return Some(then);
        }
        state.waiting.push(Waiting { learner, deadline, then });
        None
    }

    /// Whether an open of the learner's `gradients` would wait.
    pub fn is_any(&self, learner: OfLearner) -> bool {
        self.0.lock().exits.iter().any(|exit| exit.learner == learner)
    }

    /// Time passes. To be called now and then.
    pub fn tick(&self, now: Instant) {
        self.over(|exit| !exit.released && now.duration_since(exit.since) >= RELEASE);
        let late: Vec<_> = self.0.lock().waiting.extract_if(.., |one| one.deadline <= now).collect();
        for one in late {
            let what = "the contribution of a program that has ended is still being settled";
            (one.then)(Err(CallError::new(libc::ETIMEDOUT, what)));
        }
    }
}

/// Ends the pending exit of an open file when it is dropped, however its settlement goes.
pub struct Settling {
    exits: Arc<PendingExits>,
    fh: u64,
}

impl Settling {
    /// The last descriptor of `fh` is gone. Dropping this settles the writes through it.
    pub fn new(exits: &Arc<PendingExits>, fh: u64) -> Settling {
        exits.released(fh);
        Settling { exits: Arc::clone(exits), fh }
    }
}

impl Drop for Settling {
    fn drop(&mut self) {
        self.exits.end(self.fh);
    }
}

/// Ends or drops what was left unfinished in a file whose last descriptor is gone; `settling` is dropped after it.
pub(super) fn settle(open: Arc<ProgramFile>, settling: Settling) {
    let Some((users, saw_death)) = open.users.as_ref().map(|users| (users.processes(), users.saw_death()))
    else {
        return;
    };
    let model = open.file.written_model().map(str::to_owned);
    let settle = move || {
        let violent = users
            .iter()
            .filter_map(|process| {
                let exit = match saw_death {
                    true => process.wait_exit(DEATH_PATIENCE),
                    false => process.end_of_leaving(DEATH_PATIENCE),
                };
                exit.map(|exit| (process.tgid(), exit))
            })
            .find(|(_, exit)| matches!(exit, Exit::Signal(_) | Exit::Unknown));
        match violent {
            Some((pid, exit)) => drop_unfinished(&open.file, pid, exit),
            None => end_unfinished(open, settling),
        }
    };
    // Rare, short, and not to hold up the other chores.
    if let Err(error) = std::thread::Builder::new().name("gradfs-settle".into()).spawn(settle) {
        tracing::error!(model, %error, "cannot settle a contribution left open; its lease will");
    }
}

/// A violent end has left it: nothing of it counts.
fn drop_unfinished(file: &OpenFile, pid: u32, exit: Exit) {
    let model = file.written_model();
    let OpenFile::Contribution { contribution, .. } = file else {
        return tracing::warn!(model, pid, "{exit} while it wrote weights or a setting: nothing has changed");
    };
    let learner = contribution.learner();
    let what = format!("process {pid} {exit} in mid-write: its contribution is dropped");
    // The first file of the program that is settled drops the contribution.
    if contribution.abort(&CallError::new(libc::EIO, what)) {
        tracing::warn!(
            model,
            learner = learner.name,
            pid,
            "{exit} in mid-write: its contribution is dropped"
        );
    }
    learner.report_use();
}

/// A program that exits has meant it.
fn end_unfinished(open: Arc<ProgramFile>, settling: Settling) {
    let of_report = Arc::clone(&open);
    let report = move |outcome: CallResult<()>| {
        let model = of_report.file.written_model();
        match (&of_report.file, outcome) {
            (OpenFile::Contribution { contribution, .. }, outcome) => {
                let learner = contribution.learner();
                learner.report_use();
                if let Err(error) = outcome {
                    let what = "its contribution is dropped";
                    tracing::warn!(model, learner = learner.name, "closed at exit: {error}; {what}");
                }
            }
            (_, Err(error)) => tracing::warn!(model, "closed at exit: {error}; nothing has changed"),
            (_, Ok(())) => {}
        }
        drop(settling);
    };
    open.file.end(Ending::Close, Box::new(report));
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn waiting_opens_go_on_when_no_exit_is_pending() {
        let (exits, now) = (PendingExits::default(), Instant::now());
        let (sender, receiver) = mpsc::channel();
        let (one, other) = ((0, LearnerId(1)), (1, LearnerId(1)));
        let then = || -> Done<()> {
            let sender = sender.clone();
            Box::new(move |outcome| sender.send(outcome.map_err(|error| error.errno)).unwrap())
        };
        assert!(exits.wait(one, None, now, then()).is_some(), "none is pending");
        let later = now + Duration::from_secs(5);
        (0..2).for_each(|fh| exits.begin(one, fh, now));
        (0..2).for_each(|fh| exits.released(fh));
        assert!(exits.wait(one, None, later, then()).is_none());
        assert!(exits.wait(other, None, later, then()).is_some(), "of another learner's");
        assert!(exits.wait(one, Some(0), later, then()).is_none(), "of another's");
        exits.end(0);
        exits.tick(now + Duration::from_secs(1));
        assert!(receiver.try_recv().is_err(), "one is still being settled");
        exits.end(1);
        assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [Ok(()), Ok(())]);

        // An exit of a file that others have open is not pending for long, and nobody waits for ever.
        exits.begin(one, 2, now);
        assert!(exits.wait(one, Some(2), later, then()).is_some(), "its own");
        assert!(exits.wait(one, None, later, then()).is_none());
        exits.tick(now + Duration::from_millis(100));
        assert!(exits.is_any(one));
        exits.tick(now + RELEASE);
        assert_eq!(receiver.try_recv(), Ok(Ok(())));
        exits.begin(one, 3, now);
        exits.released(3);
        assert!(exits.wait(one, None, later, then()).is_none());
        exits.tick(later);
        assert_eq!(receiver.try_recv(), Ok(Err(libc::ETIMEDOUT)));
    }
}
