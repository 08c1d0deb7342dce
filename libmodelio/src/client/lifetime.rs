//! The life of a client: its keeper's alarm, the wait for a first version, and its end.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, MutexGuard};

use crate::timer::Alarm;
use crate::vocabulary::shard_error::ShardError;

#[derive(Default)]
pub(super) struct Lifetime {
    changed: Condvar,
    /// Wakes the keeper.
    alarm: OnceLock<Alarm>,
    /// The job takes no more requests.
    ends: AtomicBool,
    /// Everything stops.
    stopping: AtomicBool,
}

impl Lifetime {
    /// The keeper is woken by `alarm` from now on.
    pub(super) fn keep(&self, alarm: Alarm) {
        let _ = self.alarm.set(alarm);
    }

    /// Wakes the keeper and the thread that waits for the first version.
    pub(super) fn rouse(&self) {
        self.changed.notify_all();
        if let Some(alarm) = self.alarm.get() {
            alarm.rouse();
        }
    }

    /// Waits until something has changed. False at the deadline.
    pub(super) fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> bool {
        !self.changed.wait_until(guard, deadline).timed_out()
    }

    /// The job takes no more requests.
    pub(super) fn ends(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }

    /// # Errors
    /// When the job takes no more requests.
    pub(super) fn refuse_if_ending(&self) -> Result<(), ShardError> {
        if self.ends.load(Ordering::Relaxed) { Err(ShardError::Unreachable) } else { Ok(()) }
    }

    /// Everything stops.
    pub(super) fn stops(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }
}
