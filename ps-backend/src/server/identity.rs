//! Who a shard is: its number, its address, and whether its process ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use libmodelio::vocabulary::ids::ShardId;
use parking_lot::{Condvar, Mutex};

/// The number and the address of a shard.
pub(super) struct Identity {
    /// 0 until the registry has given one.
    number: Mutex<ShardId>,
    pub address: String,
}

impl Identity {
    pub(super) fn new(address: String) -> Identity {
        Identity { number: Mutex::new(ShardId(0)), address }
    }

    pub(super) fn number(&self) -> ShardId {
        *self.number.lock()
    }

    /// Takes the number that the registry has given, and returns whether the shard has it now. A shard that is `bound` by
    /// partitions keeps the one that it has.
    pub(super) fn take(&self, number: ShardId, bound: bool) -> bool {
        let mut known = self.number.lock();
        if *known != number && bound {
            return false;
        }
        if known.0 != 0 && *known != number {
            tracing::info!(was = %*known, %number, "the registry was restarted: this shard has another number");
        }
        *known = number;
        true
    }
}

/// Whether a process ends.
#[derive(Default)]
pub(super) struct Ending {
    stopping: AtomicBool,
    wake: Condvar,
    asleep: Mutex<()>,
}

impl Ending {
    pub(super) fn begin(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.wake.notify_all();
    }

    pub(super) fn has_begun(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Waits for so long, or until the process ends.
    pub(super) fn pause(&self, pause: Duration) {
        self.wake.wait_for(&mut self.asleep.lock(), pause);
    }
}
