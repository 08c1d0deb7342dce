//! How much payload goes between learners and shards, and how much of it CPUs copy. Each block is counted once, where it
//! moves.
//!
//! A copy counts if it lies between the learner's staging memory and the sum that it is added to, or between
//! the shard's version and the buffer that it is pulled into. Adding up is no copy. The kernel's copies into
//! and out of its sockets do not count, nor does a program's write into staging memory before it contributes.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// The direction of payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// From a learner to a shard.
    Push,
    /// From a shard to a learner.
    Pull,
}

/// Bytes of payload so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Payloads {
    /// Bytes that have gone to shards, or come from learners. Bytes that were sent again count again.
    pub pushed_bytes: u64,
    /// Bytes of pushes that were copied here.
    pub push_copied_bytes: u64,
    /// Bytes of pushes that came straight into a sum, as the first contribution to a block can.
    #[serde(default)]
    pub push_stored_bytes: u64,
    /// Bytes that have come from shards, or gone to learners. A shard does not count bytes that are read by
    /// RDMA.
    pub pulled_bytes: u64,
    /// Bytes of pulls that were copied here.
    pub pull_copied_bytes: u64,
    /// Bytes of blocks of which only what had changed was pulled.
    #[serde(default)]
    pub pull_patched_bytes: u64,
    /// Bytes that came in frames whose sender had left the checksum out.
    #[serde(default)]
    pub unchecked_bytes: u64,
}

#[derive(Debug, Default)]
struct Count {
    moved: AtomicU64,
    copied: AtomicU64,
}

/// Counts payload of one model.
#[derive(Debug, Default)]
pub struct Tally {
    push: Count,
    pull: Count,
    stored: AtomicU64,
    patched: AtomicU64,
    unchecked: AtomicU64,
}

impl Tally {
    fn of(&self, flow: Flow) -> &Count {
        match flow {
            Flow::Push => &self.push,
            Flow::Pull => &self.pull,
        }
    }

    /// A block was moved.
    pub fn moved(&self, flow: Flow, bytes: usize) {
        self.of(flow).moved.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes of a block were copied, or will be before it has moved.
    pub fn copied(&self, flow: Flow, bytes: usize) {
        if bytes > 0 {
            self.of(flow).copied.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// A pushed block has come straight into a sum.
    pub fn stored(&self, bytes: usize) {
        self.stored.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// A block of so many bytes was brought up to date by what has changed in it.
    pub fn patched(&self, bytes: usize) {
        self.patched.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// A payload has come in a frame whose sender had left the checksum out.
    pub fn unchecked(&self, bytes: usize) {
        self.unchecked.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// All counts.
    pub fn read(&self) -> Payloads {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Payloads {
            pushed_bytes: read(&self.push.moved),
            push_copied_bytes: read(&self.push.copied),
            push_stored_bytes: read(&self.stored),
            pulled_bytes: read(&self.pull.moved),
            pull_copied_bytes: read(&self.pull.copied),
            pull_patched_bytes: read(&self.patched),
            unchecked_bytes: read(&self.unchecked),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_counted_apart() {
        let tally = Tally::default();
        tally.moved(Flow::Push, 3);
        tally.copied(Flow::Push, 2);
        tally.stored(1);
        tally.moved(Flow::Pull, 7);
        tally.copied(Flow::Pull, 5);
        tally.copied(Flow::Pull, 1);
        tally.patched(8);
        tally.unchecked(4);
        let expected = Payloads {
            pushed_bytes: 3,
            push_copied_bytes: 2,
            push_stored_bytes: 1,
            pulled_bytes: 7,
            pull_copied_bytes: 6,
            pull_patched_bytes: 8,
            unchecked_bytes: 4,
        };
        assert_eq!(tally.read(), expected);
    }
}
