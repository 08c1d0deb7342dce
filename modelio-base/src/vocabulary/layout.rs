//! How a model's tensors lie in one flat byte range, and how that range is cut into blocks.
//!
//! The range is the data of a safetensors file, behind its header: tensors back to back, no padding. Blocks
//! are the unit of moving, reducing, locking and versioning (iRDMA §IV-C).

use std::cmp::Reverse;
use std::collections::{BTreeMap, TryReserveError};
use std::ops::Range;

pub use crate::vocabulary::dtype::{DType, UnknownDType};
use crate::vocabulary::ids::BlockId;

pub mod header;
mod names;
mod partition;

use header::{MAX_HEADER_BYTES, header_bytes};
pub use names::MAX_DIRECTORIES;
use names::index_names;
pub use names::{check_name, shown};
pub use partition::PartitionLayout;

/// Smallest block, in bytes.
pub const MIN_BLOCK_SIZE: u32 = 64 << 10;
/// Block size where nobody asked for another, in bytes.
pub const DEFAULT_BLOCK_SIZE: u32 = 256 << 10;
/// Largest block, in bytes.
pub const MAX_BLOCK_SIZE: u32 = 4 << 20;
/// Most tensors a model may have.
pub const MAX_TENSORS: usize = 1 << 20;
/// Most blocks of a model: 16 TiB in blocks of the default size. Its tables take some gigabytes then.
pub const MAX_BLOCKS: u32 = 1 << 26;
/// Longest tensor name in bytes: `tensors/<name>.npy` is a path, and those end at 4,096 with that of the mount.
pub const MAX_NAME_LEN: usize = 2048;

/// The part of the header size that is left to `__metadata__`, which the layout does not know.
const METADATA_ROOM: usize = 1 << 20;

/// The reason why no layout can be made, and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// No tensor at all.
    #[error("the model has no tensors: give it at least one")]
    NoTensors,
    /// Tensors, but not one byte in them.
    #[error("the model's tensors hold no bytes: give at least one of them a shape without zeros")]
    Empty,
    /// A name that cannot be a path or a safetensors key.
    #[error("tensor name {name:?} {reason}: rename the tensor")]
    BadName {
        /// The name.
        name: String,
        /// The fault.
        reason: &'static str,
    },
    /// Two tensors of one name.
    #[error("two tensors are named {0:?}: rename one of them")]
    DuplicateName(String),
    /// The file of one tensor would be the directory of another.
    #[error(
        "tensor {file:?} is the file \"{file}.npy\", which is a directory of tensor {other:?}: rename one of them"
    )]
    FileAndDirectory {
        /// The tensor whose file it is.
        file: String,
        /// The tensor whose directory it is.
        other: String,
    },
    /// More than [`MAX_DIRECTORIES`].
    #[error("the tensor names make {0} directories, more than {MAX_DIRECTORIES}: use fewer '/' in them")]
    TooManyDirectories(usize),
    /// The block size is not a power of two in the allowed range.
    #[error(
        "block size {0} is not a power of two from {MIN_BLOCK_SIZE} (64 KiB) to {MAX_BLOCK_SIZE} (4 MiB): \
         choose one that is; {DEFAULT_BLOCK_SIZE} (256 KiB) suits most models"
    )]
    BlockSize(u32),
    /// Byte counts beyond 64 bits.
    #[error("tensor {0:?} takes the model beyond 2^64 bits: check its shape")]
    TooLarge(String),
    /// Elements of less than a byte that do not fill the last byte.
    #[error(
        "tensor {name:?} of {dtype} does not end on a whole byte: pad its shape so that elements times {bits} \
         bits is a multiple of 8"
    )]
    NotWholeBytes {
        /// The tensor.
        name: String,
        /// Its element type.
        dtype: DType,
        /// Bits of one element.
        bits: usize,
    },
    /// A byte size that is no multiple of the element size.
    #[error("{size} bytes are no whole number of {dtype} elements: choose a multiple of {bits} bits")]
    NotWholeElements {
        /// The size asked for, in bytes.
        size: u64,
        /// The element type asked for.
        dtype: DType,
        /// Bits of one element.
        bits: usize,
    },
    /// More than [`MAX_TENSORS`].
    #[error("the model has {0} tensors, more than {MAX_TENSORS}: merge small ones or split the model")]
    TooManyTensors(usize),
    /// More than [`MAX_BLOCKS`].
    #[error("{size} bytes in blocks of {block_size} are more than {MAX_BLOCKS} blocks: use larger blocks")]
    TooManyBlocks {
        /// Total bytes of the model.
        size: u64,
        /// The block size asked for.
        block_size: u32,
    },
    /// The safetensors header of this model would be refused by every reader.
    #[error(
        "the names and shapes need a safetensors header of {0} bytes, and readers stop at {MAX_HEADER_BYTES}: \
         shorten tensor names or merge small tensors"
    )]
    HeaderTooLarge(usize),
    /// A partition without blocks.
    #[error("a partition of a model needs at least one block")]
    NoBlocks,
    /// A partition with a block that the model does not have.
    #[error("block {block} is outside of the model's {blocks} blocks")]
    NoSuchBlock {
        /// The requested block.
        block: BlockId,
        /// How many there are.
        blocks: u32,
    },
    /// A partition whose blocks do not rise.
    #[error("block {after} is listed after block {before}: list the blocks of a partition once each, rising")]
    BlockOrder {
        /// The one of the two that is listed first.
        before: BlockId,
        /// The other.
        after: BlockId,
    },
    /// The tables of the layout do not fit into memory.
    #[error("no memory for the tables of the layout ({0}): use larger blocks")]
    OutOfMemory(#[from] TryReserveError),
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
/// Reducible segments (all but opaque ones) begin and end on element boundaries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Byte range in the model's flat range; never crosses a block boundary.
    pub bytes: Range<u64>,
    /// Element type of every byte in it.
    pub dtype: DType,
    /// Index of its first element among all reducible elements of the model (the index into
    /// accumulators and optimizer state, in values of 32 bits: an `F64` element counts as two).
    /// Meaningless for opaque segments.
    pub element: u64,
}

impl Segment {
    /// The part of it that is `bytes`, which are within it and begin with an element.
    #[must_use]
    pub fn cut(&self, bytes: Range<u64>) -> Segment {
        let skipped = match self.dtype.size_bytes() {
            Some(size) => (bytes.start - self.bytes.start) / size as u64 * self.dtype.words() as u64,
            None => 0,
        };
        Segment { bytes, dtype: self.dtype, element: self.element + skipped }
    }

    /// Number of reducible elements in it, an `F64` element counting as two; 0 for an opaque segment.
    pub fn elements(&self) -> u64 {
        match self.dtype.size_bytes() {
            Some(bytes) if self.dtype.is_reducible() => {
                (self.bytes.end - self.bytes.start) / bytes as u64 * self.dtype.words() as u64
            }
            _ => 0,
        }
    }
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
    widening: usize,
    /// Indices into `tensors`, by rising name.
    by_name: Vec<u32>,
}

impl ModelLayout {
    /// Lays `tensors` back to back and cuts them into blocks of `block_size` bytes.
    ///
    /// Tensors keep the given order unless one would start off a multiple of its element size; then
    /// all are sorted by falling element size, those of one size in the given order. Sizes are 8, 4, 2
    /// and 1 bytes (packed types count as 1), so after the sort every tensor is aligned. Empty tensors
    /// take part: typed views want an aligned start even of nothing.
    ///
    /// # Errors
    /// [`LayoutError`], for each of the limits it names.
    pub fn new(
        tensors: Vec<(String, DType, Vec<usize>)>,
        block_size: u32,
    ) -> Result<ModelLayout, LayoutError> {
        let (mut layout, runs) = ModelLayout::uncut(tensors, block_size)?;
        (layout.segments, layout.first_segment) = cut(&runs, layout.size, block_size)?;
        Ok(layout)
    }

    /// The order that a layout of these tensors would have, if there is one. Makes no table of blocks, of
    /// which there may be millions.
    ///
    /// # Errors
    /// Fails as [`ModelLayout::new`] does, but for a lack of memory.
    pub fn order(
        tensors: Vec<(String, DType, Vec<usize>)>,
        block_size: u32,
    ) -> Result<Vec<Tensor>, LayoutError> {
        ModelLayout::uncut(tensors, block_size).map(|(layout, _)| layout.tensors)
    }

    /// All but the blocks, and the runs of elements that they are cut from.
    fn uncut(
        tensors: Vec<(String, DType, Vec<usize>)>,
        block_size: u32,
    ) -> Result<(ModelLayout, Vec<Segment>), LayoutError> {
        if !block_size.is_power_of_two() || !(MIN_BLOCK_SIZE..=MAX_BLOCK_SIZE).contains(&block_size) {
            return Err(LayoutError::BlockSize(block_size));
        }
        if tensors.is_empty() {
            return Err(LayoutError::NoTensors);
        }
        if tensors.len() > MAX_TENSORS {
            return Err(LayoutError::TooManyTensors(tensors.len()));
        }
        let (tensors, size) = place(tensors)?;
        if size == 0 {
            return Err(LayoutError::Empty);
        }
        if size.div_ceil(block_size.into()) > u64::from(MAX_BLOCKS) {
            return Err(LayoutError::TooManyBlocks { size, block_size });
        }
        let by_name = index_names(&tensors)?;
        let runs = typed_runs(&tensors);
        let elements = runs.iter().map(Segment::elements).sum();
        let (segments, first_segment) = (Vec::new(), Vec::new());
        let widening = tensors.iter().map(|tensor| tensor.dtype.widening()).max().unwrap_or(1);
        let layout =
            ModelLayout { tensors, size, block_size, segments, first_segment, elements, widening, by_name };
        let header = header_bytes(layout.tensors(), &BTreeMap::new()).len();
        if header > MAX_HEADER_BYTES - METADATA_ROOM {
            return Err(LayoutError::HeaderTooLarge(header));
        }
        Ok((layout, runs))
    }

    /// A model that is one tensor, `weights`, of `size_bytes` bytes: for jobs that bring no file.
    ///
    /// # Errors
    /// [`LayoutError::NotWholeElements`], and the errors of [`ModelLayout::new`].
    pub fn blank(size_bytes: u64, dtype: DType, block_size: u32) -> Result<ModelLayout, LayoutError> {
        let bits = dtype.size_bits();
        let total = u128::from(size_bytes) * 8;
        if !total.is_multiple_of(bits as u128) {
            return Err(LayoutError::NotWholeElements { size: size_bytes, dtype, bits });
        }
        let name = "weights".to_owned();
        match usize::try_from(total / bits as u128) {
            Ok(elements) => ModelLayout::new(vec![(name, dtype, vec![elements])], block_size),
            Err(_) => Err(LayoutError::TooLarge(name)),
        }
    }

    /// The index in [`ModelLayout::tensors`] of the tensor called `name`.
    pub fn tensor_index(&self, name: &str) -> Option<usize> {
        let tensor = |index: &u32| self.tensors[*index as usize].name.as_str();
        let found = self.by_name.binary_search_by(|index| tensor(index).cmp(name)).ok()?;
        Some(self.by_name[found] as usize)
    }

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

    /// Number of reducible elements, `F64` elements counting as two: the length of an accumulator for the whole
    /// model, in values of 32 bits.
    pub fn elements(&self) -> u64 {
        self.elements
    }

    /// The most that [`DType::widening`] says of the model's tensors.
    pub fn widening(&self) -> usize {
        self.widening
    }

    /// Whether the model has a tensor that reducers other than `assign` take.
    pub fn is_trainable(&self) -> bool {
        self.tensors.iter().any(|tensor| tensor.dtype.is_reducible())
    }

    /// Tensors by rising offset.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The numbers of the tensors that have bytes in `bytes`; empty tensors between them are named, too.
    pub fn tensors_in(&self, bytes: &Range<u64>) -> Range<usize> {
        let first = self.tensors.partition_point(|tensor| tensor.bytes.end <= bytes.start);
        let end = self.tensors.partition_point(|tensor| tensor.bytes.start < bytes.end);
        first..end.max(first)
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

    /// The blocks that these bytes lie in.
    pub fn blocks_of(&self, bytes: Range<u64>) -> impl Iterator<Item = BlockId> + use<> {
        let end = if bytes.is_empty() { 0 } else { self.block_of(bytes.end - 1).0 + 1 };
        (self.block_of(bytes.start).0..end).map(BlockId)
    }

    /// Whether a cut before byte `offset` would go through the middle of a reducible element.
    pub fn splits_element(&self, offset: u64) -> bool {
        if offset == 0 || offset >= self.size {
            return false;
        }
        let segments = self.segments(self.block_of(offset));
        let Some(segment) = segments.iter().find(|segment| segment.bytes.contains(&offset)) else {
            return false;
        };
        let size = segment.dtype.size_bytes().unwrap_or(1) as u64;
        segment.dtype.is_reducible() && !(offset - segment.bytes.start).is_multiple_of(size)
    }

    /// The bytes of a block. None if the model has no such block.
    pub fn block_len(&self, block: BlockId) -> Option<u32> {
        let extent = (block.0 < self.blocks()).then(|| self.block_bytes(block))?;
        Some((extent.end - extent.start) as u32)
    }

    /// The unit by which versions of a block are compared: the bytes of its narrowest element, 8 at most.
    pub fn unit(&self, block: BlockId) -> usize {
        let units = self.segments(block).iter().map(|segment| segment.dtype.alignment());
        units.min().unwrap_or(1).min(8)
    }

    /// The typed runs of `block`, by rising offset, covering it without gaps.
    pub fn segments(&self, block: BlockId) -> &[Segment] {
        let i = block.index();
        &self.segments[self.first_segment[i] as usize..self.first_segment[i + 1] as usize]
    }
}

/// Bytes of a tensor.
///
/// # Errors
/// [`LayoutError::TooLarge`], [`LayoutError::NotWholeBytes`].
pub fn tensor_bytes(name: &str, dtype: DType, shape: &[usize]) -> Result<u64, LayoutError> {
    let bits = dtype.size_bits();
    // The bits must fit too, because that is how readers of safetensors count.
    let total = shape
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim as u64))
        .and_then(|elements| elements.checked_mul(bits as u64))
        .ok_or_else(|| LayoutError::TooLarge(name.to_owned()))?;
    if total.is_multiple_of(8) {
        Ok(total / 8)
    } else {
        Err(LayoutError::NotWholeBytes { name: name.to_owned(), dtype, bits })
    }
}

/// Gives every tensor its bytes; returns them with their sum.
fn place(mut specs: Vec<(String, DType, Vec<usize>)>) -> Result<(Vec<Tensor>, u64), LayoutError> {
    let (mut end, mut aligned) = (0u64, true);
    for (name, dtype, shape) in &mut specs {
        check_name(name)?;
        *dtype = dtype.canonical();
        aligned &= end.is_multiple_of(dtype.alignment() as u64);
        end = end
            .checked_add(tensor_bytes(name, *dtype, shape)?)
            .ok_or_else(|| LayoutError::TooLarge(name.clone()))?;
    }
    if !aligned {
        specs.sort_by_key(|(_, dtype, _)| Reverse(dtype.alignment()));
    }
    let mut tensors = Vec::with_capacity(specs.len());
    let mut start = 0;
    for (name, dtype, shape) in specs {
        let bytes = start..start + tensor_bytes(&name, dtype, &shape)?;
        start = bytes.end;
        tensors.push(Tensor { name, dtype, shape, bytes });
    }
    Ok((tensors, start))
}

/// Maximal runs of one type, across tensors and blocks.
fn typed_runs(tensors: &[Tensor]) -> Vec<Segment> {
    let mut runs: Vec<Segment> = Vec::new();
    let mut element = 0;
    for tensor in tensors.iter().filter(|tensor| !tensor.bytes.is_empty()) {
        match runs.last_mut() {
            Some(run) if run.dtype == tensor.dtype => run.bytes.end = tensor.bytes.end,
            last => {
                element += last.map_or(0, |run| run.elements());
                runs.push(Segment { bytes: tensor.bytes.clone(), dtype: tensor.dtype, element });
            }
        }
    }
    runs
}

/// Cuts gapless `runs` at block boundaries; returns the pieces and where each block's begin.
fn cut(runs: &[Segment], size: u64, block_size: u32) -> Result<(Vec<Segment>, Vec<u32>), LayoutError> {
    let too_many = || LayoutError::TooManyBlocks { size, block_size };
    let step = u64::from(block_size);
    let blocks = size.div_ceil(step) as usize;
    let (mut segments, mut first_segment) = (Vec::new(), Vec::new());
    segments.try_reserve_exact(blocks + runs.len())?;
    first_segment.try_reserve_exact(blocks + 1)?;
    for run in runs {
        let mut rest = run.clone();
        while !rest.bytes.is_empty() {
            if rest.bytes.start.is_multiple_of(step) {
                first_segment.push(u32::try_from(segments.len()).map_err(|_| too_many())?);
            }
            let end = (rest.bytes.start / step + 1).saturating_mul(step).min(rest.bytes.end);
            let piece = Segment { bytes: rest.bytes.start..end, ..rest };
            rest = Segment { bytes: end..rest.bytes.end, element: rest.element + piece.elements(), ..rest };
            segments.push(piece);
        }
    }
    first_segment.push(u32::try_from(segments.len()).map_err(|_| too_many())?);
    Ok((segments, first_segment))
}

#[cfg(test)]
mod tests;
