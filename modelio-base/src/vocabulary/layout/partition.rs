//! The layout of a partition: the blocks that one shard holds, back to back.
//!
//! Memory that is laid out by it is as large as the partition and no larger: bytes, fp32 accumulators and optimizer
//! state alike. Blocks keep their size and what is in them; only their numbers change.

use std::sync::Arc;

use super::{LayoutError, ModelLayout, Segment};
use crate::vocabulary::ids::BlockId;

/// Some blocks of a model in a layout of their own.
#[derive(Clone, Debug)]
pub struct PartitionLayout {
    layout: Arc<ModelLayout>,
    blocks: Vec<BlockId>,
    /// The end of each tensor of the model there.
    tensor_ends: Arc<[u64]>,
}

impl PartitionLayout {
    /// The layout of the partition. Its block `i` is block `blocks()[i]` of the model, and elements are counted within
    /// the partition. It has no tensors: those are the model's, and may be cut by any block.
    pub fn layout(&self) -> &Arc<ModelLayout> {
        &self.layout
    }

    /// The blocks of the model, rising.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The end of each tensor, in the model's bytes.
    pub fn tensor_ends(&self) -> &[u64] {
        &self.tensor_ends
    }

    /// The number in the partition of the model's `block`; none if it is not of the partition.
    pub fn local(&self, block: BlockId) -> Option<BlockId> {
        self.blocks.binary_search(&block).ok().map(|local| BlockId(local as u32))
    }

    /// The number in the model of the partition's block `local`; none if the partition has no such block.
    pub fn global(&self, local: BlockId) -> Option<BlockId> {
        self.blocks.get(local.index()).copied()
    }
}

impl ModelLayout {
    /// The layout of a partition that consists of `blocks`, which rise.
    ///
    /// # Errors
    /// [`LayoutError::NoBlocks`], [`LayoutError::NoSuchBlock`], [`LayoutError::BlockOrder`], and
    /// [`LayoutError::OutOfMemory`].
    pub fn partition(&self, blocks: &[BlockId]) -> Result<PartitionLayout, LayoutError> {
        let last = *blocks.last().ok_or(LayoutError::NoBlocks)?;
        if let Some(pair) = blocks.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(LayoutError::BlockOrder { before: pair[0], after: pair[1] });
        }
        if last.0 >= self.blocks() {
            return Err(LayoutError::NoSuchBlock { block: last, blocks: self.blocks() });
        }
        let (mut segments, mut first_segment) = (Vec::new(), Vec::new());
        first_segment.try_reserve_exact(blocks.len() + 1)?;
        segments.try_reserve_exact(blocks.iter().map(|&block| self.segments(block).len()).sum())?;
        let (mut size, mut elements) = (0, 0);
        for &block in blocks {
            first_segment.push(segments.len() as u32);
            for segment in self.segments(block) {
                let bytes = size..size + (segment.bytes.end - segment.bytes.start);
                size = bytes.end;
                segments.push(Segment { bytes, dtype: segment.dtype, element: elements });
                elements += segment.elements();
            }
        }
        first_segment.push(segments.len() as u32);
        let layout = ModelLayout {
            tensors: Vec::new(),
            size,
            block_size: self.block_size,
            segments,
            first_segment,
            elements,
            widening: self.widening,
            by_name: Vec::new(),
        };
        let tensor_ends = self.tensors.iter().map(|tensor| tensor.bytes.end).collect();
        Ok(PartitionLayout { layout: Arc::new(layout), blocks: blocks.to_vec(), tensor_ends })
    }
}
