//! Calls that wait, made by threads that may not live to see the answer.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::process::{Ending, ending_signal};
use crate::session::contribution::Withdraw;
use crate::session::error::{CallError, Done};

/// How often it is looked whether waiting threads have been sent signals.
pub const CHECK_INTERVAL: Duration = Duration::from_millis(200);

struct Waiting {
    tid: u32,
    since: Instant,
    /// Answers at once.
    cancel: Box<dyn FnOnce() + Send>,
    /// Brings an answer about soon. It is called repeatedly until the answer comes, because the request to
    /// withdraw may not have been sent yet.
    withdraw: Option<Withdraw>,
}

/// Requests whose answers are still out.
#[derive(Default)]
pub struct Waits {
    next: Mutex<u64>,
    waiting: Mutex<HashMap<u64, Waiting>>,
}

impl Waits {
    /// Makes `done` give up with EINTR when thread `tid` is killed before the answer is there, or when a signal asks it
    /// to end. With `withdraw`, the latter ends the wait by that, so that the answer says whether it came in time. An
    /// answer that comes after all goes to `late`.
    pub fn guard<T: Send + 'static>(
        self: &Arc<Self>,
        tid: u32,
        done: Done<T>,
        withdraw: Option<Withdraw>,
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
                done(Err(CallError::new(libc::EINTR, "a signal ended its wait")));
            }
        });
        let waiting = Waiting { tid, since: Instant::now(), cancel, withdraw };
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

    /// Answers those whose threads have been sent a signal that ends them or asks them to: the kernel keeps
    /// them until then.
    pub fn release_signalled(&self) {
        let old: Vec<(u64, u32)> = self
            .waiting
            .lock()
            .iter()
            .filter(|(_, waiting)| waiting.tid != 0 && waiting.since.elapsed() >= CHECK_INTERVAL)
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

    /// The end of a wait is called with nothing locked: it may answer others.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::error::CallResult;

    #[test]
    fn an_answer_reaches_its_caller_and_leaves_nothing() {
        let waits = Arc::new(Waits::default());
        let (sender, receiver) = std::sync::mpsc::channel();
        let done = Box::new(move |outcome| sender.send(outcome).unwrap());
        let done = waits.guard(std::process::id(), done, None, |_: u32| {});
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
            1,
            Box::new(move |outcome: CallResult<u32>| sender.send(outcome.map_err(|e| e.errno)).unwrap()),
            None,
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
                1,
                Box::new(move |outcome: CallResult<u32>| sender.send(outcome.map_err(|e| e.errno)).unwrap()),
                Some(Arc::new(move || of_withdraw.send(Ok(0)).unwrap())),
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
