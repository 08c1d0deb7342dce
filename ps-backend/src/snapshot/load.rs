//! The memory of a partition that begins at a snapshot.

use super::{Piece, Sink, SnapshotError};
use crate::partition::store::{PartitionError, PartitionStore};

/// A partition as a sink. Weights of a block come before its other data.
pub struct Load(PartitionStore);

impl Load {
    /// The memory of a partition that is being loaded.
    pub fn of(store: &PartitionStore) -> Load {
        Load(store.clone())
    }

    /// All of it has come.
    ///
    /// # Errors
    /// [`SnapshotError::Partition`] names a block of which something is missing.
    pub fn finish(self) -> Result<(), SnapshotError> {
        Ok(self.0.finish_loading()?)
    }
}

impl Sink for Load {
    fn take(&mut self, (block, what): Piece, bytes: &[u8]) -> Result<(), SnapshotError> {
        let blocks = self.0.partition().layout().blocks();
        let local = self.0.partition().local(block).ok_or(PartitionError::NoBlock { block, blocks })?;
        self.0.load_piece(local, what, bytes)?;
        Ok(())
    }
}
