//! The name `tensors`, which the kernel keeps until there is another version.
//!
//! `ls -l tensors/` walks from the model's directory to each tensor, so the kernel would ask for `tensors`
//! once for each of them. Instead the kernel keeps the name, and drops it before a newer version is
//! announced: a program that knows of a version finds that one, or a newer one, below `tensors`.
//!
//! The kernel drops a name under the lock of its directory, and it also holds that lock while it looks a name
//! up there. So no lookup that is under way brings an old name back, and no thread that answers lookups may
//! wait for the drop.
//!
//! An `fsync` holds the lock of its file while it waits here. A program that removes or renames that file
//! holds the lock of the directory and waits for the file's lock, and the drop waits for the directory's
//! lock. So no wait is longer than [`ANSWER_TIMEOUT`].

use std::mem::take;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::Version;
use parking_lot::Mutex;

/// Answers that have waited for this long are given. The name may lead to an older version for a moment then.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The kernel's knowledge of one model's `tensors`.
#[derive(Default)]
pub struct TensorsName(Mutex<NameState>);

#[derive(Default)]
struct NameState {
    /// The oldest version to which the name may lead.
    in_kernel: Option<Version>,
    /// The same of a name that the kernel is just dropping.
    dropping: Option<Version>,
    /// Answers that wait until the name leads to no version before theirs.
    waiting: Vec<Waiting>,
}

type Answer = Box<dyn FnOnce() + Send>;

struct Waiting {
    of: Version,
    since: Instant,
    answer: Answer,
}

impl NameState {
    fn oldest(&self) -> Option<Version> {
        [self.in_kernel, self.dropping].into_iter().flatten().min()
    }

    fn leads_before(&self, version: Version) -> bool {
        self.oldest().is_some_and(|oldest| oldest < version)
    }
}

impl TensorsName {
    /// The kernel is about to be told that the name leads to `newest`, or to a version after it.
    pub fn keep(&self, newest: impl FnOnce() -> Version) {
        let mut state = self.0.lock();
        if state.in_kernel.is_none() {
            state.in_kernel = Some(newest());
        }
    }

    /// Has the kernel drop the name, by `forget`, and gives the answers that have waited for that. One thread
    /// calls this, after each new version.
    pub fn drop_name(&self, forget: impl FnOnce()) {
        {
            let mut state = self.0.lock();
            state.dropping = state.in_kernel.take();
        }
        forget();
        let ready: Vec<_> = {
            let mut state = self.0.lock();
            state.dropping = None;
            let (wait, ready) =
                take(&mut state.waiting).into_iter().partition(|waiting| state.leads_before(waiting.of));
            state.waiting = wait;
            ready
        };
        ready.into_iter().for_each(|waiting: Waiting| (waiting.answer)());
    }

    /// Gives the answers that have waited for too long. Must not run on the thread that has the name dropped.
    pub fn give_up(&self, now: Instant) {
        let is_late = |waiting: &mut Waiting| now.saturating_duration_since(waiting.since) >= ANSWER_TIMEOUT;
        let late: Vec<_> = self.0.lock().waiting.extract_if(.., is_late).collect();
        late.into_iter().for_each(|waiting| (waiting.answer)());
    }

    /// Whether the name may lead to an older version than the newest one.
    pub fn is_known(&self) -> bool {
        self.0.lock().oldest().is_some()
    }

    /// The newest version that may be announced, when `newest` exists.
    pub fn shown(&self, newest: Version) -> Version {
        self.0.lock().oldest().map_or(newest, |oldest| oldest.min(newest))
    }

    /// Calls `answer` once the name leads to no version before `newest`, which is there already: at once if it can.
    pub fn when_shown(&self, newest: Version, answer: impl FnOnce() + Send + 'static) {
        let mut state = self.0.lock();
        if state.leads_before(newest) {
            state.waiting.push(Waiting { of: newest, since: Instant::now(), answer: Box::new(answer) });
        } else {
            drop(state);
            answer();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// A name, and how many answers were given.
    fn name() -> (TensorsName, Arc<AtomicU32>) {
        (TensorsName::default(), Arc::default())
    }

    fn answer(given: &Arc<AtomicU32>) -> impl FnOnce() + Send + 'static {
        let given = Arc::clone(given);
        move || {
            given.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_version_is_announced_once_the_name_of_an_older_one_is_dropped() {
        let (name, given) = name();
        name.keep(|| Version(3));
        name.when_shown(Version(4), answer(&given));
        assert_eq!(name.shown(Version(4)), Version(3));
        name.drop_name(|| {
            assert_eq!((given.load(Ordering::Relaxed), name.shown(Version(4))), (0, Version(3)));
            name.when_shown(Version(4), answer(&given));
            assert_eq!(given.load(Ordering::Relaxed), 0, "the kernel is still dropping it");
        });
        assert_eq!((given.load(Ordering::Relaxed), name.shown(Version(4))), (2, Version(4)));
    }

    #[test]
    fn a_drop_that_does_not_end_holds_no_answer_for_long() {
        let (name, given) = name();
        name.keep(|| Version(3));
        name.drop_name(|| {
            name.when_shown(Version(4), answer(&given));
            name.give_up(Instant::now());
            assert_eq!(given.load(Ordering::Relaxed), 0);
            name.give_up(Instant::now() + ANSWER_TIMEOUT);
            assert_eq!(given.load(Ordering::Relaxed), 1);
        });
        assert_eq!(given.load(Ordering::Relaxed), 1, "it is given once");
    }

    #[test]
    fn nothing_waits_for_a_name_that_leads_to_the_version_itself() {
        let (name, given) = name();
        name.when_shown(Version(4), answer(&given));
        name.keep(|| Version(4));
        name.keep(|| Version(5));
        name.when_shown(Version(4), answer(&given));
        assert_eq!((given.load(Ordering::Relaxed), name.shown(Version(4))), (2, Version(4)));
    }

    #[test]
    fn a_name_that_is_kept_again_meanwhile_holds_later_versions_back() {
        let (name, given) = name();
        name.keep(|| Version(3));
        name.when_shown(Version(4), answer(&given));
        name.drop_name(|| name.keep(|| Version(4)));
        assert_eq!((given.load(Ordering::Relaxed), name.shown(Version(5))), (1, Version(4)));
        name.when_shown(Version(5), answer(&given));
        assert_eq!(given.load(Ordering::Relaxed), 1);
        name.drop_name(|| {});
        assert_eq!((given.load(Ordering::Relaxed), name.shown(Version(5))), (2, Version(5)));
    }
}
