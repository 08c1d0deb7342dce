//! Memory that a shard's device may be reading for a plan that is dropped meanwhile. Pure.
//!
//! A plan's end says nothing of reads that are under way. But the shard reads the blocks of a connection in the order in
//! which they were named. So once it has answered a block, it reads nothing that was named before it.

use std::collections::VecDeque;
use std::sync::Arc;

/// Blocks of a contribution that is still written are not named while the shard may still read more regions than this.
const MOST: usize = 1;

/// The memory, with the request whose answer lets go of it, oldest first.
#[derive(Debug)]
pub(super) struct DeviceReads<T>(VecDeque<(u64, Arc<T>)>);

impl<T> Default for DeviceReads<T> {
    fn default() -> DeviceReads<T> {
        DeviceReads(VecDeque::new())
    }
}

impl<T> DeviceReads<T> {
    /// A block in `memory` was named. The answer to request `until`, or to a later one, comes after the last read of it.
    pub(super) fn keep(&mut self, memory: &Arc<T>, until: u64) {
        match self.0.back_mut() {
            Some((known, of)) if Arc::ptr_eq(of, memory) => *known = until,
            _ => self.0.push_back((until, Arc::clone(memory))),
        }
    }

    /// The shard has answered `request`.
    pub(super) fn answered(&mut self, request: u64) {
        while self.0.pop_front_if(|(until, _)| *until <= request).is_some() {}
    }

    /// Whether other memory than this waits for an answer.
    pub(super) fn has_other(&self, memory: &Arc<T>) -> bool {
        self.0.iter().any(|(_, other)| !Arc::ptr_eq(other, memory))
    }

    /// Whether one more region may be read for a contribution that is still written.
    pub(super) fn has_room(&self) -> bool {
        self.0.len() <= MOST
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::DeviceReads;

    #[test]
    fn memory_is_kept_until_a_later_answer() {
        let mut reads = DeviceReads::default();
        let memory = Arc::new(());
        reads.keep(&memory, 3);
        reads.keep(&memory, 4);
        reads.answered(3);
        assert_eq!(Arc::strong_count(&memory), 2, "a block that was named after request 3 may still be read");
        assert!(!reads.has_other(&memory));
        reads.answered(4);
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[test]
    fn dropped_contributions_keep_two_regions_at_most() {
        let mut reads = DeviceReads::default();
        let [first, second] = [(); 2].map(Arc::new);
        reads.keep(&first, 1);
        assert!(reads.has_room() && reads.has_other(&second));
        reads.keep(&second, 2);
        assert!(!reads.has_room());
        reads.answered(1);
        assert!(reads.has_room() && !reads.has_other(&second));
        assert_eq!((Arc::strong_count(&first), Arc::strong_count(&second)), (1, 2));
    }
}
