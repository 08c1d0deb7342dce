//! Accounts of the memory that a model takes in this process.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::bytes::mmap::Mapping;
use crate::transport::frames::CONNECTION_BYTES;
use crate::transport::tally::Tally;

/// Bytes of memory that are taken from the system, by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobMemory {
    /// Versions that lie in this process's memory: shown, being made or pulled, and free.
    pub versions: u64,
    /// Optimizer state and fp32 masters.
    pub state: u64,
    /// Sums of contributions.
    pub sums: u64,
    /// What coded blocks of contributions have lost.
    pub residuals: u64,
    /// Memory that learners write or map, and new weights that are mapped.
    pub staging: u64,
    /// Buffers of connections.
    pub connections: u64,
}

/// What a client counts: payload, and memory.
#[derive(Default)]
pub(super) struct Accounts {
    pub(super) tally: Tally,
    /// Memory that programs write into.
    pub(super) staging: Counted,
    pub(super) of_connections: Counted,
    /// Payload that was sent to followers.
    pub(super) relayed: AtomicU64,
}

impl Accounts {
    /// What this many connections take.
    pub(super) fn connections(&self, links: usize) -> u64 {
        links as u64 * CONNECTION_BYTES + self.of_connections.taken()
    }
}

/// Memory that is counted as long as it exists.
#[derive(Debug, Default)]
pub(super) struct Counted(Mutex<Vec<Weak<Mapping>>>);

impl Counted {
    /// Counts `memory` from now on.
    pub(super) fn add(&self, memory: &Arc<Mapping>) {
        let mut all = self.0.lock();
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(memory));
    }

    /// The bytes of it that are taken from the system.
    pub(super) fn taken(&self) -> u64 {
        let all: Vec<_> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        all.iter().map(|memory| memory.taken()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_counts_once_it_is_touched_and_until_it_goes() {
        const PAGE: usize = 4096;
        let counted = Counted::default();
        let memory = Arc::new(Mapping::memfd("test", 4 * PAGE).unwrap());
        let private = Arc::new(Mapping::anonymous(4 * PAGE).unwrap());
        counted.add(&memory);
        counted.add(&private);
        assert_eq!(counted.taken(), 0);
        // SAFETY: this thread alone knows the memory.
        unsafe { memory.write(PAGE, &[1]) };
        assert_eq!(counted.taken(), PAGE as u64);
        private.prefault().unwrap();
        assert_eq!(counted.taken(), 5 * PAGE as u64);
        drop(memory);
        assert_eq!(counted.taken(), 4 * PAGE as u64);
    }
}
