//! Memory that the other end of a transport can name.

use std::sync::Arc;

use super::available;
use super::mmap::Mapping;
use crate::vocabulary::shard_error::ShardError;

/// Names a region to the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionKey(pub u64);

/// Memory registered with a transport, addressable from the other side.
#[derive(Clone, Debug)]
pub struct Region {
    memory: Arc<Mapping>,
    key: RegionKey,
}

impl Region {
    /// `memory` under a key that no other region of this process has.
    pub fn new(memory: Arc<Mapping>, key: RegionKey) -> Region {
        Region { memory, key }
    }

    /// The memory itself.
    pub fn memory(&self) -> &Arc<Mapping> {
        &self.memory
    }

    /// Its name on the wire.
    pub fn key(&self) -> RegionKey {
        self.key
    }

    /// Promises its pages to a caller who is about to touch some of them for a contribution.
    ///
    /// # Errors
    /// [`ShardError::OutOfMemory`] with the reason.
    pub fn promise(&self) -> Result<(), ShardError> {
        available::promise_before_spares(&self.memory)
            .map_err(|error| ShardError::OutOfMemory(format!("no memory for what a learner writes: {error}")))
    }
}
