//! The moves of one model that are under way or wait for each other.

use std::sync::Arc;
use std::time::Instant;

use libmodelio::vocabulary::ids::ShardId;
use parking_lot::{Condvar, Mutex};

use crate::moving::Progress;

/// The most moves of one model that may be under way or wait.
pub(in crate::server) const MAX_MOVES: usize = 4;

#[derive(Default)]
struct Known {
    next: u64,
    /// Each move's number, the shard that it empties, and whether it must stop.
    moves: Vec<(u64, ShardId, bool)>,
    progress: Option<Progress>,
}

/// The moves of one model, at its coordinator.
#[derive(Default)]
pub(in crate::server) struct Moves {
    /// Held by the thread that moves the model.
    pub(in crate::server) alone: Mutex<()>,
    known: Mutex<Known>,
    over: Condvar,
}

/// A move that is under way or waits. It is registered until this is dropped.
pub(in crate::server) struct Moving {
    of: Arc<Moves>,
    number: u64,
    off: ShardId,
}

impl Moves {
    /// Registers a move, unless there are too many.
    pub(in crate::server) fn begin(self: &Arc<Moves>, off: ShardId) -> Option<Moving> {
        let mut known = self.known.lock();
        if known.moves.len() >= MAX_MOVES {
            return None;
        }
        let number = known.next;
        known.next += 1;
        known.moves.push((number, off, false));
        Some(Moving { of: Arc::clone(self), number, off })
    }

    /// Stops all moves off this shard. True once there are none.
    pub(in crate::server) fn stop(&self, off: ShardId, deadline: Instant) -> bool {
        let mut known = self.known.lock();
        loop {
            let mut left = false;
            for (_, from, stopped) in &mut known.moves {
                if *from == off {
                    (*stopped, left) = (true, true);
                }
            }
            if !left {
                return true;
            }
            if self.over.wait_until(&mut known, deadline).timed_out() {
                return false;
            }
        }
    }

    /// The progress of the move under way.
    pub(in crate::server) fn progress(&self) -> Option<Progress> {
        self.known.lock().progress.clone()
    }

    pub(in crate::server) fn report(&self, progress: Option<Progress>) {
        self.known.lock().progress = progress;
    }
}

impl Moving {
    pub(in crate::server) fn off(&self) -> ShardId {
        self.off
    }

    pub(in crate::server) fn is_stopped(&self) -> bool {
        self.of.known.lock().moves.iter().any(|(number, _, stopped)| *number == self.number && *stopped)
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        self.of.known.lock().moves.retain(|(number, ..)| *number != self.number);
        self.of.over.notify_all();
    }
}
