//! Work of a plan with one payload at a time.

use std::ops::Range;

use libmodelio::vocabulary::ids::BlockId;
use ps_backend::partition::store::{BlockInput, PartitionError, PartitionJob, Payload};

/// Work with one payload at a time. It tells whether the payload is finite, or true if that does not matter.
pub trait OneByOne {
    /// Adds it to the sum.
    ///
    /// # Errors
    /// As of [`PartitionJob::add_all`].
    fn add(&self, block: BlockId, payload: Payload<'_>) -> Result<bool, PartitionError> {
        self.add_written(block, payload, None)
    }

    /// Like [`Self::add`]. With `assign`, only the `written` ranges count.
    ///
    /// # Errors
    /// As of [`PartitionJob::add_all`].
    fn add_written(
        &self,
        block: BlockId,
        payload: Payload<'_>,
        written: Option<&[Range<u32>]>,
    ) -> Result<bool, PartitionError>;

    /// Computes the block from it, and from the sums.
    ///
    /// # Errors
    /// As of [`PartitionJob::finish_all`].
    fn finish(&self, block: BlockId, last: Option<Payload<'_>>) -> Result<bool, PartitionError>;
}

impl OneByOne for PartitionJob {
    fn add_written(
        &self,
        block: BlockId,
        payload: Payload<'_>,
        written: Option<&[Range<u32>]>,
    ) -> Result<bool, PartitionError> {
        Ok(self.add_all(block, &[BlockInput { payload, written, check: true }])?.is_none())
    }

    fn finish(&self, block: BlockId, last: Option<Payload<'_>>) -> Result<bool, PartitionError> {
        let input = last.map(|payload| BlockInput { payload, written: None, check: true });
        Ok(self.finish_all(block, input.as_slice())?.is_none())
    }
}
