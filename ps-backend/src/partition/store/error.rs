//! Why a partition does not do something.

use std::io;

use libmodelio::bytes::kernels::coded::Fault;
use libmodelio::vocabulary::ids::{BlockId, Version};

use crate::device::DeviceError;

/// The reason why an operation failed. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PartitionError {
    /// The partition does not have the block.
    #[error("block {block} is outside of the partition's {blocks} blocks")]
    NoBlock {
        /// The block.
        block: BlockId,
        /// The number of blocks.
        blocks: u32,
    },
    /// The payload's length is not the block's.
    #[error("a payload of block {block} has {got} bytes, not {expected}")]
    Length {
        /// The block.
        block: BlockId,
        /// The expected number of bytes.
        expected: usize,
        /// The received number of bytes.
        got: usize,
    },
    /// The payload is coded, and nobody codes so.
    #[error("the payload of block {block} is wrong: {fault}")]
    Coding {
        /// The block.
        block: BlockId,
        /// What is wrong with it.
        fault: Fault,
    },
    /// The payload is coded, and the plan takes values as they are.
    #[error("the payload of block {0} is coded, and its values replace others")]
    CodedValues(BlockId),
    /// The block has no room for these masters or this optimizer state, or their length is wrong.
    #[error("{got} bytes of masters or optimizer state do not fit block {block}")]
    State {
        /// The block.
        block: BlockId,
        /// The received number of bytes.
        got: usize,
    },
    /// Another thread is working on the block.
    #[error("another thread is at work on block {0}")]
    Claimed(BlockId),
    /// The block is computed, or its plan is concluded.
    #[error("block {0} of the plan is complete")]
    Complete(BlockId),
    /// The plan takes whole new blocks, and adds nothing up.
    #[error("the plan takes new values of blocks: nothing can be added up under it")]
    AssignsOnly,
    /// The plan only adds up.
    #[error("the plan adds up and makes no version")]
    AddsOnly,
    /// Version 0 is not complete, or [`super::PartitionStore::finish_loading`] was not called.
    #[error("version 0 is still being loaded")]
    Loading,
    /// A block of version 0 has not come.
    #[error("block {0} of version 0 is not loaded")]
    NotLoaded(BlockId),
    /// Version 0 is complete.
    #[error("version 0 is loaded already")]
    Loaded,
    /// The plan starts from another version.
    #[error("the plan starts from version {got}; version {expected} is the newest")]
    Base {
        /// The newest.
        expected: Version,
        /// The plan's.
        got: Version,
    },
    /// The plan before is still worked on, or the newest version's state is being read. This passes.
    #[error("the plan before this one is still worked on")]
    Busy,
    /// All buffers hold versions that are being read. This passes.
    #[error("all {max} version buffers are in use")]
    NoBuffer {
        /// The largest number.
        max: usize,
    },
    /// A block of the plan is not computed.
    #[error("block {0} of the plan is not computed yet")]
    Unfinished(BlockId),
    /// The job was concluded, given up or replaced.
    #[error("the plan is over")]
    Over,
    /// There is no memory.
    #[error("no memory: {0}")]
    Memory(#[from] io::Error),
    /// The device that computes the model has too little memory, or has failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl PartitionError {
    /// Whether the same operation may succeed a little later.
    pub fn is_transient(&self) -> bool {
        match self {
            PartitionError::Busy | PartitionError::NoBuffer { .. } | PartitionError::Memory(_) => true,
            PartitionError::Device(error) => matches!(error, DeviceError::Room { .. }),
            _ => false,
        }
    }
}
