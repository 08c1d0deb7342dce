//! Requests that wait, for callers that may not live to see the answer, and second looks at moved names.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::ids::{LearnerId, Version};
use parking_lot::Mutex;

use super::errno::FsError;
use super::{Caller, Done};
use crate::process::has_kill_pending;

/// How often it is looked whether waiting callers have been killed.
pub const LOOK: Duration = Duration::from_millis(200);

/// How long a second look at a name may take to come.
const SECOND_LOOK: Duration = Duration::from_secs(1);
/// Second looks that are expected at once.
const MAX_LOOKS: usize = 4096;

struct Waiting {
    tid: u32,
    since: Instant,
    cancel: Box<dyn FnOnce() + Send>,
}

/// Requests whose answers are still out.
#[derive(Default)]
pub struct Waits {
    next: Mutex<u64>,
    waiting: Mutex<HashMap<u64, Waiting>>,
}

impl Waits {
    /// Makes `done` give up with EINTR when `caller` is killed before the answer is there. An answer that
    /// comes later goes to `late`.
    pub fn guard<T: Send + 'static>(
        self: &Arc<Self>,
        caller: Caller,
        done: Done<T>,
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
                done(Err(FsError::new(libc::EINTR, "killed while it waited")));
            }
        });
        self.waiting.lock().insert(id, Waiting { tid: caller.tid, since: Instant::now(), cancel });
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

    /// Answers those whose callers are about to die: the kernel keeps them until then.
    pub fn release_killed(&self) {
        let old: Vec<(u64, u32)> = self
            .waiting
            .lock()
            .iter()
            .filter(|(_, waiting)| waiting.tid != 0 && waiting.since.elapsed() >= LOOK)
            .map(|(&id, waiting)| (id, waiting.tid))
            .collect();
        for (id, tid) in old {
            if !has_kill_pending(tid) {
                continue;
            }
            let killed = self.waiting.lock().remove(&id);
            if let Some(killed) = killed {
                (killed.cancel)();
            }
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
    newest: Version,
    at: Instant,
}

impl SecondLooks {
    /// `tid` is sent to look again for a version of `model` that is at least `newest`.
    pub fn expect(&self, tid: u32, model: u8, learner: LearnerId, newest: Version) {
        if tid == 0 {
            return;
        }
        let mut looks = self.0.lock();
        if looks.len() >= MAX_LOOKS {
            looks.retain(|_, look| look.at.elapsed() < SECOND_LOOK);
        }
        if looks.len() < MAX_LOOKS {
            looks.insert((tid, model), Look { learner, newest, at: Instant::now() });
        }
    }

    /// Whether `tid` comes back from that with `version`.
    pub fn is_expected(&self, tid: u32, model: u8, learner: LearnerId, version: Version) -> bool {
        let Some(look) = self.0.lock().remove(&(tid, model)) else { return false };
        look.learner == learner && version >= look.newest && look.at.elapsed() < SECOND_LOOK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_look_is_expected_once_and_for_its_version() {
        let looks = SecondLooks::default();
        looks.expect(7, 0, LearnerId(1), Version(5));
        assert!(!looks.is_expected(8, 0, LearnerId(1), Version(5)));
        assert!(looks.is_expected(7, 0, LearnerId(1), Version(6)));
        assert!(!looks.is_expected(7, 0, LearnerId(1), Version(6)), "once");
        looks.expect(7, 0, LearnerId(1), Version(5));
        assert!(!looks.is_expected(7, 0, LearnerId(1), Version(4)), "too old");
    }

    #[test]
    fn an_answer_reaches_its_caller_and_leaves_nothing() {
        let waits = Arc::new(Waits::default());
        let (sender, receiver) = std::sync::mpsc::channel();
        let caller = Caller { tid: std::process::id() };
        let done = waits.guard(caller, Box::new(move |outcome| sender.send(outcome).unwrap()), |_: u32| {});
        waits.release_killed();
        done(Ok(3));
        assert_eq!(receiver.recv().unwrap(), Ok(3));
        assert!(waits.waiting.lock().is_empty());
    }
}
