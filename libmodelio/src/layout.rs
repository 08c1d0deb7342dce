//! How a model's tensors lie in one flat byte range, and how that range is cut into blocks.
//!
//! The range is what a safetensors file has behind its header: tensors back to back, no padding.
//! Blocks are what moves, is reduced, locked and versioned (iRDMA §IV-C).

use std::ops::Range;

use crate::ids::BlockId;

/// Element type of a tensor, as safetensors names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// bfloat16.
    BF16,
    /// Anything else: carried byte for byte, never reduced.
    Opaque(safetensors::Dtype),
}

/// A tensor and where it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name, unique in the model.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions; empty for a scalar.
    pub shape: Vec<usize>,
    /// Byte range in the model's flat range.
    pub bytes: Range<u64>,
}

/// A maximal run of bytes inside one block with one element type.
///
/// Reducible segments (`F32`, `F16`, `BF16`) begin and end on element boundaries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Byte range in the model's flat range; never crosses a block boundary.
    pub bytes: Range<u64>,
    /// Element type of every byte in it.
    pub dtype: DType,
    /// Index of its first element among all reducible elements of the model (the index into fp32
    /// accumulators and optimizer state). Meaningless for opaque segments.
    pub element: u64,
}

/// The whole layout: tensors in order of offset, and the block grid over them.
#[derive(Clone, Debug)]
pub struct ModelLayout {
    tensors: Vec<Tensor>,
    size: u64,
    block_size: u32,
    segments: Vec<Segment>,
    /// `segments[first_segment[b]..first_segment[b + 1]]` are block `b`'s.
    first_segment: Vec<u32>,
    elements: u64,
}

impl ModelLayout {
    /// Total bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of every block but perhaps the last.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u32 {
        self.size.div_ceil(u64::from(self.block_size)) as u32
    }

    /// Number of reducible elements: the length of an fp32 accumulator for the whole model.
    pub fn elements(&self) -> u64 {
        self.elements
    }

    /// Tensors by rising offset.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The byte range of `block`.
    pub fn block_bytes(&self, block: BlockId) -> Range<u64> {
        let start = u64::from(block.0) * u64::from(self.block_size);
        start..(start + u64::from(self.block_size)).min(self.size)
    }

    /// The block that holds byte `offset`.
    pub fn block_of(&self, offset: u64) -> BlockId {
        BlockId((offset / u64::from(self.block_size)) as u32)
    }

    /// The typed runs of `block`, by rising offset, covering it without gaps.
    pub fn segments(&self, block: BlockId) -> &[Segment] {
        let i = block.index();
        &self.segments[self.first_segment[i] as usize..self.first_segment[i + 1] as usize]
    }
}
