//! The moves of one model that are under way or wait for each other: how many, how far, and which are to be stopped.

use std::sync::Arc;
use std::time::Instant;

use libmodelio::vocabulary::ids::ShardId;
use parking_lot::{Condvar, Mutex};

use crate::moving::Progress;

/// Moves of one model that may be under way or wait.
pub(in crate::server) const MAX_MOVES: usize = 4;

#[derive(Default)]
struct Known {
    next: u64,
    /// By number: off which shard, and whether it is to be stopped.
    moves: Vec<(u64, ShardId, bool)>,
    progress: Option<Progress>,
}

/// Of one model, at its coordinator.
#[derive(Default)]
pub(in crate::server) struct Moves {
    /// Held by whoever moves the model.
    pub(in crate::server) alone: Mutex<()>,
    known: Mutex<Known>,
    over: Condvar,
}

/// One of them, as long as somebody waits for it.
pub(in crate::server) struct Moving {
    of: Arc<Moves>,
    number: u64,
    off: ShardId,
}

impl Moves {
    /// One more, unless there are too many.
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

    /// All that move the model off this shard are to stop. True once there is none any more.
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

    /// How far the one that is under way is.
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
