//! Requests that wait, for callers that may not live to see the answer, and second looks at moved names.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{LearnerId, Version};
use parking_lot::Mutex;

use super::errno::FsError;
use super::{Caller, Done};
use crate::fuse::process::{Ending, ending_signal};

/// How often it is looked whether waiting callers have been sent signals.
pub const LOOK: Duration = Duration::from_millis(200);

/// How long a second look at a name may take to come.
const SECOND_LOOK: Duration = Duration::from_secs(1);
/// Second looks that are expected at once.
const MAX_LOOKS: usize = 4096;

struct Waiting {
    tid: u32,
    since: Instant,
    /// Answers at once.
    cancel: Box<dyn FnOnce() + Send>,
    /// Sees to an answer soon.
    withdraw: Option<Withdraw>,
}

/// Sees to an answer soon. Called again and again until it comes: what it withdraws may not have been sent yet.
pub type Withdraw = Arc<dyn Fn() + Send + Sync>;

/// How a wait ends when its caller is asked to end, with Ctrl-C for instance.
pub enum Asked {
    /// At once.
    Answer,
    /// This sees to an answer, which says whether it came in time.
    Call(Withdraw),
}

/// Requests whose answers are still out.
#[derive(Default)]
pub struct Waits {
    next: Mutex<u64>,
    waiting: Mutex<HashMap<u64, Waiting>>,
}

impl Waits {
    /// Makes `done` give up with EINTR when `caller` is killed before the answer is there, or as `asked`
    /// says when a signal asks it to end. An answer that comes later goes to `late`.
    pub fn guard<T: Send + 'static>(
        self: &Arc<Self>,
        caller: Caller,
        done: Done<T>,
        asked: Asked,
        late: impl FnOnce(T) + Send + 'static,
    ) -> Done<T> {
        let cell = Arc::new(Mutex::new(Some(done)));
        let id = {
            let mut next = self.next.lock();
            *next += 1;
            *next
        };
        let of_cancel = Arc::clone(&cell);
        let cancel = Box::new(move || {
            let done = of_cancel.lock().take();
            if let Some(done) = done {
                done(Err(FsError::new(libc::EINTR, "a signal ended its wait")));
            }
        });
        let withdraw = match asked {
            Asked::Answer => None,
            Asked::Call(withdraw) => Some(withdraw),
        };
        let waiting = Waiting { tid: caller.tid, since: Instant::now(), cancel, withdraw };
        self.waiting.lock().insert(id, waiting);
        let this = Arc::clone(self);
        Box::new(move |outcome| {
            this.waiting.lock().remove(&id);
            let done = cell.lock().take();
            match (done, outcome) {
                (Some(done), outcome) => done(outcome),
                (None, Ok(value)) => late(value),
                (None, Err(_)) => {}
            }
        })
    }

    /// Answers those whose callers have been sent a signal that ends them or asks them to: the kernel keeps
    /// them until then.
    pub fn release_signalled(&self) {
        let old: Vec<(u64, u32)> = self
            .waiting
            .lock()
            .iter()
            .filter(|(_, waiting)| waiting.tid != 0 && waiting.since.elapsed() >= LOOK)
            .map(|(&id, waiting)| (id, waiting.tid))
            .collect();
        for (id, tid) in old {
            match ending_signal(tid) {
                None => {}
                Some(Ending::Killed) => self.cancel(id, true),
                Some(Ending::Asked) => self.cancel(id, false),
            }
        }
    }

    /// What a wait ends with is called with nothing locked: it may answer others.
    fn cancel(&self, id: u64, at_once: bool) {
        let mut waiting = self.waiting.lock();
        let Some(withdraw) = waiting.get(&id).map(|waiting| waiting.withdraw.clone()) else { return };
        let cancelled = if at_once || withdraw.is_none() { waiting.remove(&id) } else { None };
        drop(waiting);
        if let Some(withdraw) = withdraw {
            withdraw();
        }
        if let Some(cancelled) = cancelled {
            (cancelled.cancel)();
        }
    }
}

/// Threads that were told to look a name up again, and what they may then be shown.
///
/// The kernel looks again only once. Versions may come faster than that; a version that was the newest
/// when the thread was sent back holds all that it had committed before its open.
#[derive(Default)]
pub struct SecondLooks(Mutex<HashMap<(u32, u8), Look>>);

struct Look {
    learner: LearnerId,
    named: Version,
    newest: Version,
    at: Instant,
}

impl SecondLooks {
    /// `tid` is sent away from `named`, and to look again for a version of `model` that is at least `newest`.
    pub fn expect(&self, tid: u32, model: u8, learner: LearnerId, named: Version, newest: Version) {
        if tid == 0 {
            return;
        }
        let mut looks = self.0.lock();
        if looks.len() >= MAX_LOOKS {
            looks.retain(|_, look| look.at.elapsed() < SECOND_LOOK);
        }
        if looks.len() < MAX_LOOKS {
            looks.insert((tid, model), Look { learner, named, newest, at: Instant::now() });
        }
    }

    /// Whether `tid` comes back from that with `version`: with a newer one, or with the same, since it looks from a
    /// directory of that version.
    pub fn is_expected(&self, tid: u32, model: u8, learner: LearnerId, version: Version) -> bool {
        let Some(look) = self.0.lock().remove(&(tid, model)) else { return false };
        let is_one = version >= look.newest || version == look.named;
        look.learner == learner && is_one && look.at.elapsed() < SECOND_LOOK
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::errno::FsResult;

    #[test]
    fn a_second_look_is_expected_once_and_for_its_version() {
        let looks = SecondLooks::default();
        looks.expect(7, 0, LearnerId(1), Version(3), Version(5));
        assert!(!looks.is_expected(8, 0, LearnerId(1), Version(5)));
        assert!(looks.is_expected(7, 0, LearnerId(1), Version(6)));
        assert!(!looks.is_expected(7, 0, LearnerId(1), Version(6)), "once");
        looks.expect(7, 0, LearnerId(1), Version(3), Version(5));
        assert!(!looks.is_expected(7, 0, LearnerId(1), Version(4)), "too old");
        looks.expect(7, 0, LearnerId(1), Version(3), Version(5));
        assert!(looks.is_expected(7, 0, LearnerId(1), Version(3)), "from a directory of its own");
    }

    #[test]
    fn an_answer_reaches_its_caller_and_leaves_nothing() {
        let waits = Arc::new(Waits::default());
        let (sender, receiver) = std::sync::mpsc::channel();
        let caller = Caller { tid: std::process::id() };
        let done = Box::new(move |outcome| sender.send(outcome).unwrap());
        let done = waits.guard(caller, done, Asked::Answer, |_: u32| {});
        waits.release_signalled();
        done(Ok(3));
        assert_eq!(receiver.recv().unwrap(), Ok(3));
        assert!(waits.waiting.lock().is_empty());
    }

    #[test]
    fn a_cancelled_wait_is_answered_once_and_its_answer_is_late() {
        let waits = Arc::new(Waits::default());
        let (sender, receiver) = std::sync::mpsc::channel();
        let late = sender.clone();
        let done = waits.guard(
            Caller { tid: 1 },
            Box::new(move |outcome: FsResult<u32>| sender.send(outcome.map_err(|e| e.errno)).unwrap()),
            Asked::Answer,
            move |value| late.send(Ok(value + 100)).unwrap(),
        );
        waits.cancel(1, false);
        waits.cancel(1, true);
        done(Ok(3));
        assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [Err(libc::EINTR), Ok(103)]);
    }

    #[test]
    fn a_withdrawn_wait_ends_with_its_own_answer_and_a_killed_one_at_once() {
        for killed in [false, true] {
            let waits = Arc::new(Waits::default());
            let (sender, receiver) = std::sync::mpsc::channel();
            let of_withdraw = sender.clone();
            let done = waits.guard(
                Caller { tid: 1 },
                Box::new(move |outcome: FsResult<u32>| sender.send(outcome.map_err(|e| e.errno)).unwrap()),
                Asked::Call(Arc::new(move || of_withdraw.send(Ok(0)).unwrap())),
                |_| {},
            );
            waits.cancel(1, killed);
            waits.cancel(1, false);
            done(Ok(3));
            let answers = receiver.try_iter().collect::<Vec<_>>();
            assert_eq!(
                answers,
                if killed { vec![Ok(0), Err(libc::EINTR)] } else { vec![Ok(0), Ok(0), Ok(3)] }
            );
        }
    }
}
