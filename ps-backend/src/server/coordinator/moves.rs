//! The move of one model that is under way: its progress, and whether it must stop.

use std::sync::Arc;
use std::time::Instant;

use libmodelio::vocabulary::ids::ShardId;
use libmodelio::wire::Refusal;
use parking_lot::{Condvar, Mutex};

use crate::moving::Progress;

/// The move of one model, at its coordinator.
#[derive(Default)]
pub(in crate::server) struct Moves {
    /// Held during a move, and while a snapshot is taken.
    pub(in crate::server) alone: Mutex<()>,
    current: Mutex<Option<Current>>,
    over: Condvar,
}

struct Current {
    off: ShardId,
    stopped: bool,
    progress: Option<Progress>,
}

/// A move, as long as somebody waits for it.
pub(in crate::server) struct Moving(Arc<Moves>);

impl Moves {
    /// A move off this shard begins.
    ///
    /// # Errors
    /// [`Refusal::Moving`] if another one is under way.
    pub(in crate::server) fn begin(self: &Arc<Moves>, off: ShardId) -> Result<Moving, Refusal> {
        let mut current = self.current.lock();
        match &*current {
            Some(other) => Err(Refusal::Moving { off: other.off }),
            None => {
                *current = Some(Current { off, stopped: false, progress: None });
                Ok(Moving(Arc::clone(self)))
            }
        }
    }

    /// Stops the move off this shard. True once no such move is under way.
    pub(in crate::server) fn stop(&self, off: ShardId, deadline: Instant) -> bool {
        let mut current = self.current.lock();
        while let Some(moving) = current.as_mut().filter(|moving| moving.off == off) {
            moving.stopped = true;
            if self.over.wait_until(&mut current, deadline).timed_out() {
                return false;
            }
        }
        true
    }

    /// The progress of the move under way.
    pub(in crate::server) fn progress(&self) -> Option<Progress> {
        self.current.lock().as_ref().and_then(|moving| moving.progress.clone())
    }
}

impl Moving {
    pub(in crate::server) fn show(&self, progress: Progress) {
        self.0.current.lock().iter_mut().for_each(|moving| moving.progress = Some(progress.clone()));
    }

    pub(in crate::server) fn is_stopped(&self) -> bool {
        self.0.current.lock().as_ref().is_some_and(|moving| moving.stopped)
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        *self.0.current.lock() = None;
        self.0.over.notify_all();
    }
}
