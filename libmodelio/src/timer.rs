//! The thread of a process that looks after deadlines: of its clients and coordinators, however many models there are.
//!
//! Whoever has deadlines is [`Timed`] and gives itself to [`watch`]. The thread looks when the pause that the last look
//! named is over, or as soon as an [`Alarm`] rouses it. A look must not block: it would hold up everybody else.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Weak;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Has deadlines.
pub trait Timed: Send + Sync {
    /// Does what is due, and says after which pause to look again. None ends it.
    fn check(&self) -> Option<Duration>;
}

/// Has somebody that is watched looked at before its time.
#[derive(Clone, Copy, Debug)]
pub struct Alarm(u64);

struct Entry {
    what: Weak<dyn Timed>,
    /// The time of the next check; `None` while the thread checks.
    at: Option<Instant>,
    /// The alarm was roused while the thread checked.
    roused: bool,
}

struct TimerState {
    runs: bool,
    next: u64,
    entries: BTreeMap<u64, Entry>,
    due: BTreeSet<(Instant, u64)>,
}

static STATE: Mutex<TimerState> =
    Mutex::new(TimerState { runs: false, next: 0, entries: BTreeMap::new(), due: BTreeSet::new() });
static CHANGED: Condvar = Condvar::new();

/// Checks after `what` from now on, for as long as it lives.
///
/// # Errors
/// When there is no thread to be had.
pub fn watch(what: Weak<dyn Timed>) -> io::Result<Alarm> {
    let mut state = STATE.lock();
    if !state.runs {
        std::thread::Builder::new().name("timer".into()).spawn(run)?;
        state.runs = true;
    }
    let (id, now) = (state.next, Instant::now());
    state.next += 1;
    state.entries.insert(id, Entry { what, at: Some(now), roused: false });
    state.due.insert((now, id));
    CHANGED.notify_one();
    Ok(Alarm(id))
}

impl Alarm {
    /// The thread looks at once.
    pub fn rouse(self) {
        let mut state = STATE.lock();
        let Some(entry) = state.entries.get_mut(&self.0) else { return };
        match entry.at {
            None => entry.roused = true,
            Some(at) => {
                let now = Instant::now();
                if at > now {
                    entry.at = Some(now);
                    state.due.remove(&(at, self.0));
                    state.due.insert((now, self.0));
                    CHANGED.notify_one();
                }
            }
        }
    }
}

fn run() {
    let mut state = STATE.lock();
    loop {
        let Some(&(at, id)) = state.due.first() else {
            CHANGED.wait(&mut state);
            continue;
        };
        if at > Instant::now() {
            CHANGED.wait_until(&mut state, at);
            continue;
        }
        state.due.pop_first();
        let Some(entry) = state.entries.get_mut(&id) else { continue };
        (entry.at, entry.roused) = (None, false);
        let what = entry.what.clone();
        drop(state);
        let pause = what.upgrade().and_then(|what| what.check());
        state = STATE.lock();
        match (pause, state.entries.get_mut(&id)) {
            (Some(pause), Some(entry)) => {
                let at = Instant::now() + if entry.roused { Duration::ZERO } else { pause };
                entry.at = Some(at);
                state.due.insert((at, id));
            }
            _ => _ = state.entries.remove(&id),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    const TEST_DEADLINE: Duration = Duration::from_secs(20);

    struct Checks(Mutex<Vec<Duration>>, Sender<Instant>);

    impl Timed for Checks {
        fn check(&self) -> Option<Duration> {
            self.1.send(Instant::now()).ok()?;
            self.0.lock().pop()
        }
    }

    fn watched(mut pauses: Vec<Duration>) -> (Arc<Checks>, Alarm, std::sync::mpsc::Receiver<Instant>) {
        pauses.reverse();
        let (sender, checks) = channel();
        let what = Arc::new(Checks(Mutex::new(pauses), sender));
        let alarm = watch(Arc::downgrade(&what) as Weak<dyn Timed>).unwrap();
        (what, alarm, checks)
    }

    #[test]
    fn an_object_is_checked_after_each_pause_until_it_returns_none() {
        let pause = Duration::from_millis(30);
        let (_what, _, checks) = watched(vec![pause, Duration::ZERO]);
        let first = checks.recv_timeout(TEST_DEADLINE).unwrap();
        let second = checks.recv_timeout(TEST_DEADLINE).unwrap();
        assert!(second - first >= pause);
        checks.recv_timeout(TEST_DEADLINE).unwrap();
        assert!(checks.recv_timeout(2 * pause).is_err(), "it is over");
    }

    #[test]
    fn a_woken_object_is_checked_at_once_and_others_are_not() {
        let (_other, _, others) = watched(vec![TEST_DEADLINE]);
        others.recv_timeout(TEST_DEADLINE).unwrap();
        let (_what, alarm, checks) = watched(vec![TEST_DEADLINE, TEST_DEADLINE]);
        checks.recv_timeout(TEST_DEADLINE).unwrap();
        alarm.rouse();
        checks.recv_timeout(TEST_DEADLINE / 2).unwrap();
        assert!(others.try_recv().is_err());
    }

    #[test]
    fn a_dropped_object_is_not_checked() {
        let (what, alarm, checks) = watched(vec![TEST_DEADLINE, TEST_DEADLINE]);
        checks.recv_timeout(TEST_DEADLINE).unwrap();
        drop(what);
        alarm.rouse();
        assert!(checks.recv_timeout(TEST_DEADLINE).is_err());
    }
}
