//! Contributions whose program is dying. What comes of them is known only when it is gone; until then nobody else
//! is to write into them or to end them, so the next open of the learner's `gradients` waits, and so does an fsync or
//! close of others who had it open.
//!
//! A parent may reap a program, and its next one open the same file, before the daemon hears of the end. But the
//! dying program closes its files before it can be reaped, and that is when a doubt begins.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::errno::{FsError, FsResult};
use super::model::Learner;

/// How soon after the close the last descriptor must be gone, else others have the file open and may go on.
const RELEASE: Duration = Duration::from_millis(500);

/// What waits. Called once: when the doubts are over, or with an error at its deadline.
pub type Then = Box<dyn FnOnce(FsResult<()>) + Send>;

struct Dying {
    fh: u64,
    since: Instant,
    /// The last descriptor is gone, and somebody is finding out how the program ended.
    released: bool,
}

#[derive(Default)]
struct State {
    dying: Vec<Dying>,
    waiting: Vec<(Instant, Then)>,
}

/// A learner's doubts.
#[derive(Default)]
pub struct Doubts(Mutex<State>);

impl Doubts {
    /// A dying program has closed the open file `fh`, through which it wrote.
    pub fn begin(&self, fh: u64, now: Instant) {
        let mut state = self.0.lock();
        if !state.dying.iter().any(|dying| dying.fh == fh) {
            state.dying.push(Dying { fh, since: now, released: false });
        }
    }

    /// The last descriptor of `fh` is gone.
    fn released(&self, fh: u64) {
        self.0.lock().dying.iter_mut().filter(|dying| dying.fh == fh).for_each(|dying| dying.released = true);
    }

    /// It is settled what comes of what was written through `fh`. Gives what can go on.
    fn end(&self, fh: u64) -> Vec<Then> {
        self.over(|dying| dying.fh == fh)
    }

    fn over(&self, is_over: impl Fn(&Dying) -> bool) -> Vec<Then> {
        let mut state = self.0.lock();
        state.dying.retain(|dying| !is_over(dying));
        if state.dying.is_empty() {
            state.waiting.drain(..).map(|(_, then)| then).collect()
        } else {
            Vec::new()
        }
    }

    /// Calls `then` when there is no doubt any more, at the latest at `deadline`. Gives it back if there is none now
    /// but about `own`, the file of whoever asks: a child that had it has died.
    pub fn wait(&self, own: Option<u64>, deadline: Instant, then: Then) -> Option<Then> {
        let mut state = self.0.lock();
        if state.dying.iter().all(|dying| Some(dying.fh) == own) {
            return Some(then);
        }
        state.waiting.push((deadline, then));
        None
    }

    /// Whether an open would wait.
    pub fn is_any(&self) -> bool {
        !self.0.lock().dying.is_empty()
    }

    /// Time passes. To be called now and then.
    pub fn tick(&self, now: Instant) {
        let is_old = |dying: &Dying| !dying.released && now.duration_since(dying.since) >= RELEASE;
        let freed = self.over(is_old);
        let late: Vec<_> = self.0.lock().waiting.extract_if(.., |(deadline, _)| *deadline <= now).collect();
        freed.into_iter().for_each(|then| then(Ok(())));
        for (_, then) in late {
            let what = "the contribution of a program that has ended is still being settled";
            then(Err(FsError::new(libc::ETIMEDOUT, what)));
        }
    }
}

/// Ends the doubt about an open file when it is dropped, however its settlement goes.
pub struct Settled {
    learner: Arc<Learner>,
    fh: u64,
}

impl Settled {
    /// The last descriptor of `fh` is gone; what was written through it is settled when this is dropped.
    pub fn when_dropped(learner: &Arc<Learner>, fh: u64) -> Settled {
        learner.doubts.released(fh);
        Settled { learner: Arc::clone(learner), fh }
    }
}

impl Drop for Settled {
    fn drop(&mut self) {
        self.learner.doubts.end(self.fh).into_iter().for_each(|then| then(Ok(())));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn who_waits_goes_on_when_all_doubts_are_over() {
        let (doubts, now) = (Doubts::default(), Instant::now());
        let (sender, receiver) = mpsc::channel();
        let then = || -> Then {
            let sender = sender.clone();
            Box::new(move |outcome| sender.send(outcome.map_err(|error| error.errno)).unwrap())
        };
        assert!(doubts.wait(None, now, then()).is_some(), "no doubt");
        let later = now + Duration::from_secs(5);
        (0..2).for_each(|fh| doubts.begin(fh, now));
        (0..2).for_each(|fh| doubts.released(fh));
        assert!(doubts.wait(None, later, then()).is_none());
        assert!(doubts.wait(Some(0), later, then()).is_none(), "of another's");
        assert!(doubts.end(0).is_empty());
        doubts.tick(now + Duration::from_secs(1));
        assert!(receiver.try_recv().is_err(), "one is still being settled");
        doubts.end(1).into_iter().for_each(|then| then(Ok(())));
        assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [Ok(()), Ok(())]);

        // One that others have open is none for long, and nobody waits for ever.
        doubts.begin(2, now);
        assert!(doubts.wait(Some(2), later, then()).is_some(), "its own");
        assert!(doubts.wait(None, later, then()).is_none());
        doubts.tick(now + Duration::from_millis(100));
        assert!(doubts.is_any());
        doubts.tick(now + RELEASE);
        assert_eq!(receiver.try_recv(), Ok(Ok(())));
        doubts.begin(3, now);
        doubts.released(3);
        assert!(doubts.wait(None, later, then()).is_none());
        doubts.tick(later);
        assert_eq!(receiver.try_recv(), Ok(Err(libc::ETIMEDOUT)));
    }
}
