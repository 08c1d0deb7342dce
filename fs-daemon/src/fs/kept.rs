//! The name `tensors`, which the kernel keeps until there is another version.
//!
//! `ls -l tensors/` walks from the model's directory to each tensor, so the kernel would ask where `tensors` leads once
//! for each of them. It keeps the name instead, and drops it before anybody is told of a newer version: whoever knows
//! of a version finds that one, or a newer one, below `tensors`.
//!
//! The kernel drops a name under the lock of its directory. That lock is also held while a name is looked up there, so
//! an answer that is under way is not missed, and the thread that drops the name must not be one that answers lookups.

use std::time::Duration;

use libmodelio::ids::Version;
use parking_lot::{Condvar, Mutex};

/// How long telling of a version waits for the kernel, which drops a name within microseconds unless all threads that
/// answer it are busy.
const PATIENCE: Duration = Duration::from_millis(20);

/// What the kernel knows of one model's `tensors`.
#[derive(Default)]
pub(super) struct KeptName {
    state: Mutex<State>,
    dropped: Condvar,
}

/// The oldest version to which the name may lead.
#[derive(Default)]
struct State {
    kept: Option<Version>,
    dropping: Option<Version>,
}

impl KeptName {
    /// The kernel is about to be told that the name leads to `newest`, or to a version after it.
    pub(super) fn keep(&self, newest: impl FnOnce() -> Version) {
        let mut state = self.state.lock();
        if state.kept.is_none() {
            state.kept = Some(newest());
        }
    }

    /// Has the kernel drop the name, by `forget`. Only one thread calls this.
    pub(super) fn drop_name(&self, forget: impl FnOnce()) {
        {
            let mut state = self.state.lock();
            state.dropping = state.kept.take();
        }
        forget();
        self.state.lock().dropping = None;
        self.dropped.notify_all();
    }

    /// Waits until the name leads to no version before `version`, which is there already, and whose coming will have
    /// [`Self::drop_name`] called.
    pub(super) fn wait_until_at(&self, version: Version) {
        let leads_back = |state: &mut State| {
            [state.kept, state.dropping].into_iter().flatten().any(|oldest| oldest < version)
        };
        self.dropped.wait_while_for(&mut self.state.lock(), leads_back, PATIENCE);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_version_is_told_of_once_the_name_of_an_older_one_is_dropped() {
        let (name, forgotten) = (KeptName::default(), AtomicBool::new(false));
        name.keep(|| Version(3));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(2));
                name.drop_name(|| {
                    std::thread::sleep(Duration::from_millis(2));
                    forgotten.store(true, Ordering::Relaxed);
                });
            });
            name.wait_until_at(Version(4));
            assert!(forgotten.load(Ordering::Relaxed));
        });
    }

    #[test]
    fn nothing_waits_for_a_name_that_leads_to_the_version_itself() {
        let name = KeptName::default();
        let begun = Instant::now();
        name.wait_until_at(Version(4));
        name.keep(|| Version(4));
        name.keep(|| Version(5));
        name.wait_until_at(Version(4));
        name.drop_name(|| name.keep(|| Version(5)));
        name.wait_until_at(Version(5));
        assert!(begun.elapsed() < PATIENCE);
    }

    #[test]
    fn a_kernel_that_does_not_answer_holds_a_version_up_for_a_moment_only() {
        let name = KeptName::default();
        name.keep(|| Version(3));
        let begun = Instant::now();
        name.wait_until_at(Version(4));
        assert!(begun.elapsed() >= PATIENCE);
    }
}
