//! Making a version that changes optimizer state in place.

use std::sync::Arc;

use libmodelio::vocabulary::ids::BlockId;

use super::{PartitionError, PartitionJob, PartitionStore};

/// A version that counts, and is being made: its blocks are computed, and the state of each is changed in place.
#[derive(Debug)]
pub struct Making(Arc<PartitionJob>);

impl Making {
    /// Makes a block. Blocks are made in any order, each of them once.
    ///
    /// # Errors
    /// [`PartitionError::NoBlock`]; [`PartitionError::Claimed`] or [`PartitionError::Unfinished`] if another thread is
    /// at work on the block, or has made it.
    pub fn block(&self, block: BlockId) -> Result<(), PartitionError> {
        if self.is_on_device() {
            return self.blocks(&[block]).map_err(|(_, error)| error);
        }
        self.0.make(block)
    }

    /// Whether a device makes the version. It takes many blocks at once, and the more, the faster.
    pub fn is_on_device(&self) -> bool {
        self.0.is_on_device()
    }

    /// Makes blocks on the device, and returns when their weights are in the host's memory.
    ///
    /// # Errors
    /// The errors of [`Self::block`], and [`PartitionError::Device`]: then the model is lost.
    pub fn blocks(&self, blocks: &[BlockId]) -> Result<(), (BlockId, PartitionError)> {
        self.0.make_on_device(blocks)
    }
}

impl PartitionStore {
    /// The plan of this job counts, and its version is to be made. From now on the newest version's state gets no more
    /// readers.
    ///
    /// # Errors
    /// [`PartitionError::Over`] if the job was concluded or given up. [`PartitionError::Busy`] as long as the state is
    /// being read.
    pub fn make(&self, job: &Arc<PartitionJob>) -> Result<Making, PartitionError> {
        let mut inner = self.shared.inner.lock();
        if !std::ptr::eq(inner.running.as_ptr(), Arc::as_ptr(job.alive())) || job.is_over() {
            return Err(PartitionError::Over);
        }
        inner.making = job.is_in_place();
        if inner.making && inner.readers > 0 {
            return Err(PartitionError::Busy);
        }
        Ok(Making(Arc::clone(job)))
    }
}
