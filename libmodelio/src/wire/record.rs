//! A model's record: made from a layout and a block map, and turned back into them; its limits.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::MAX_PAYLOAD;
use super::lineage::Lineage;
use super::registry::{MAX_METADATA, ModelRecord};
use crate::vocabulary::block_map::{BlockMap, MAX_SHARDS, MapError};
use crate::vocabulary::controls::ControlError;
use crate::vocabulary::controls::Controls;
use crate::vocabulary::dtype::DType;
use crate::vocabulary::ids::{Generation, ShardId, Version};
use crate::vocabulary::layout::{LayoutError, MAX_BLOCKS, ModelLayout, Tensor, tensor_bytes};

/// Longest name of a model, in bytes: it is a file name.
pub const MAX_MODEL_NAME: usize = 255;

/// Why a record is none.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// Longer than a payload.
    #[error("a record of {got} bytes, the limit is {MAX_PAYLOAD}: use larger blocks or fewer tensors")]
    TooLong {
        /// Its length in bytes.
        got: usize,
    },
    /// The bytes are no record, or a list in it is too long.
    #[error("not a model's record: {0}")]
    Encoding(#[from] postcard::Error),
    /// Bytes behind its end.
    #[error("not a model's record: it goes on {0} bytes after its end")]
    Trailing(usize),
    /// A name that no directory can have.
    #[error("model name {name:?} {reason}")]
    Name {
        /// The name, shortened.
        name: String,
        /// The fault.
        reason: &'static str,
    },
    /// The generation that stands for none.
    #[error("generation 0 is no life of a model")]
    Generation,
    /// An element type that this release does not know.
    #[error("tensor {tensor:?} is of unknown element type {got:?}")]
    DType {
        /// The tensor.
        tensor: String,
        /// The name in the record.
        got: String,
    },
    /// Tensors that have no layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Tensors in another order than that of their layout.
    #[error("tensor {got:?} stands where the layout has {expected:?}")]
    Order {
        /// The layout's.
        expected: String,
        /// The record's.
        got: String,
    },
    /// More than [`MAX_BLOCKS`].
    #[error("a model of {got} blocks, the limit is {MAX_BLOCKS}: use larger blocks")]
    TooManyBlocks {
        /// How many.
        got: u64,
    },
    /// Owners of more or fewer blocks than there are, or a run of none.
    #[error("the block map has owners for {got} blocks, the model has {expected}")]
    Owners {
        /// Blocks of the model.
        expected: u64,
        /// Blocks of the map.
        got: u64,
    },
    /// A block map that is none.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The coordinator owns no block.
    #[error("the coordinator, shard {0}, owns no block of the model")]
    Coordinator(ShardId),
    /// An owner that is not among the shards.
    #[error("shard {0} owns blocks, and is not among the shards")]
    Unknown(ShardId),
    /// A setting has a value that it cannot have.
    #[error("a setting of the model: {0}")]
    Controls(#[from] ControlError),
    /// More than [`MAX_METADATA`].
    #[error("{got} {what}, the limit is {limit}")]
    TooMany {
        /// The kind of items.
        what: &'static str,
        /// The limit.
        limit: usize,
        /// How many.
        got: usize,
    },
}

/// Checks that a model can have this name: it is the name of a directory.
///
/// # Errors
/// [`RecordError::Name`].
pub fn check_model_name(name: &str) -> Result<(), RecordError> {
    let reason = match name {
        "" => "is empty",
        "." | ".." => "is a directory's own name",
        _ if name.contains('/') => "contains '/', so it cannot be a directory's",
        _ if name.contains(char::is_control) => "contains a control character",
        _ if name.len() > MAX_MODEL_NAME => "is longer than 255 bytes, so it cannot be a directory's",
        _ => return Ok(()),
    };
    Err(RecordError::Name { name: name.chars().take(MAX_MODEL_NAME).collect(), reason })
}

impl ModelRecord {
    /// The record of a new model, whose blocks are not at their shards yet.
    ///
    /// # Errors
    /// [`RecordError`] where the parts do not fit each other or their limits.
    pub fn new(
        name: &str,
        generation: Generation,
        layout: &ModelLayout,
        metadata: BTreeMap<String, String>,
        map: &BlockMap,
        coordinator: ShardId,
        controls: Controls,
    ) -> Result<ModelRecord, RecordError> {
        let tensor = |tensor: &crate::vocabulary::layout::Tensor| {
            let shape = tensor.shape.iter().map(|&dim| dim as u64).collect();
            (tensor.name.clone(), tensor.dtype.name(), shape)
        };
        let record = ModelRecord {
            name: name.to_owned(),
            generation,
            tensors: layout.tensors().iter().map(tensor).collect(),
            metadata,
            block_size: layout.block_size(),
            epoch: map.epoch(),
            owners: runs(map),
            coordinator,
            controls,
            ready: false,
            lineage: Lineage::new(generation, Version(0)),
        };
        record.check_heads()?;
        record.check_owners()?;
        record.check_coordinator()?;
        Ok(record)
    }

    /// The same model under another block map and coordinator.
    ///
    /// # Errors
    /// [`RecordError`] where they do not fit.
    pub fn moved(&self, map: &BlockMap, coordinator: ShardId) -> Result<ModelRecord, RecordError> {
        let record = ModelRecord { epoch: map.epoch(), owners: runs(map), coordinator, ..self.clone() };
        record.block_map()?;
        Ok(record)
    }

    /// The layout of its tensors.
    ///
    /// # Errors
    /// [`RecordError`] for tensors that have none, or have it in another order.
    pub fn layout(&self) -> Result<ModelLayout, RecordError> {
        let layout = ModelLayout::new(self.typed()?, self.block_size)?;
        self.check_order(layout.tensors())?;
        Ok(layout)
    }

    /// The tensors as the layout takes them.
    fn typed(&self) -> Result<Vec<(String, DType, Vec<usize>)>, RecordError> {
        self.blocks()?;
        let mut tensors = Vec::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            let (dtype, shape) = typed(tensor)?;
            tensors.push((tensor.0.clone(), dtype, shape));
        }
        Ok(tensors)
    }

    fn check_order(&self, placed: &[Tensor]) -> Result<(), RecordError> {
        let mut pairs = placed.iter().zip(&self.tensors);
        match pairs.find(|(placed, (name, ..))| placed.name != *name) {
            Some((placed, (got, ..))) => {
                Err(RecordError::Order { expected: placed.name.clone(), got: got.clone() })
            }
            None => Ok(()),
        }
    }

    /// The owner of each of its blocks.
    ///
    /// # Errors
    /// [`RecordError`] for a map that does not fit the tensors, or whose coordinator owns nothing.
    pub fn block_map(&self) -> Result<BlockMap, RecordError> {
        self.check_owners()?;
        self.check_coordinator()?;
        let owners = self.owners.iter().flat_map(|&(owner, run)| std::iter::repeat_n(owner, run as usize));
        Ok(BlockMap::from_owners(self.epoch, owners.collect())?)
    }

    fn check_coordinator(&self) -> Result<(), RecordError> {
        match self.owners.iter().any(|&(owner, _)| owner == self.coordinator) {
            true => Ok(()),
            false => Err(RecordError::Coordinator(self.coordinator)),
        }
    }

    fn check_owners(&self) -> Result<(), RecordError> {
        let expected = u64::from(self.blocks()?);
        let got = self.owners.iter().map(|&(_, run)| u64::from(run)).sum();
        if got != expected || self.owners.iter().any(|&(_, run)| run == 0) {
            return Err(RecordError::Owners { expected, got });
        }
        let shards: BTreeSet<ShardId> = self.owners.iter().map(|&(owner, _)| owner).collect();
        match shards.len() {
            shards if shards > MAX_SHARDS => Err(MapError::TooManyShards(shards).into()),
            _ => Ok(()),
        }
    }

    /// Checks everything: [`Self::layout`] and [`Self::block_map`] then find no error. Makes no table of the
    /// blocks.
    ///
    /// # Errors
    /// [`RecordError`] for the first thing that is not.
    pub fn check(&self) -> Result<(), RecordError> {
        self.check_heads()?;
        self.check_order(&ModelLayout::order(self.typed()?, self.block_size)?)?;
        self.check_owners()?;
        self.check_coordinator()
    }

    /// The encoding in bytes, by postcard.
    ///
    /// # Errors
    /// [`RecordError::TooLong`], and the errors of [`Self::decode`].
    pub fn encode(&self) -> Result<Vec<u8>, RecordError> {
        self.check_heads()?;
        encode(self)
    }

    /// Decodes bytes. Only [`Self::check`] tells whether the parts fit each other.
    ///
    /// # Errors
    /// [`RecordError`] for bytes that are no record, or have a name or lists beyond their limits.
    pub fn decode(bytes: &[u8]) -> Result<ModelRecord, RecordError> {
        let record: ModelRecord = decode(bytes)?;
        record.check_heads()?;
        Ok(record)
    }

    /// Checks everything that is cheap to check.
    pub(super) fn check_heads(&self) -> Result<(), RecordError> {
        check_model_name(&self.name)?;
        if self.generation == Generation(0) {
            return Err(RecordError::Generation);
        }
        if self.metadata.len() > MAX_METADATA {
            let (what, limit, got) = ("entries of metadata", MAX_METADATA, self.metadata.len());
            return Err(RecordError::TooMany { what, limit, got });
        }
        Ok(self.controls.check()?)
    }

    /// How many blocks the tensors take.
    fn blocks(&self) -> Result<u32, RecordError> {
        if self.block_size == 0 {
            return Err(LayoutError::BlockSize(0).into());
        }
        let mut size = 0u64;
        for tensor in &self.tensors {
            let (dtype, shape) = typed(tensor)?;
            let sum = size.checked_add(tensor_bytes(&tensor.0, dtype, &shape)?);
            size = sum.ok_or_else(|| LayoutError::TooLarge(tensor.0.clone()))?;
        }
        let got = size.div_ceil(self.block_size.into());
        match u32::try_from(got) {
            Ok(blocks) if blocks <= MAX_BLOCKS => Ok(blocks),
            _ => Err(RecordError::TooManyBlocks { got }),
        }
    }
}

/// The encoding in bytes, by postcard.
///
/// # Errors
/// [`RecordError::TooLong`].
pub(super) fn encode(what: &impl Serialize) -> Result<Vec<u8>, RecordError> {
    let bytes = postcard::to_stdvec(what)?;
    if bytes.len() > MAX_PAYLOAD as usize {
        return Err(RecordError::TooLong { got: bytes.len() });
    }
    Ok(bytes)
}

/// Decodes a value from all of the bytes.
///
/// # Errors
/// [`RecordError`] for bytes that are too long, or say something else, or more.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RecordError> {
    if bytes.len() > MAX_PAYLOAD as usize {
        return Err(RecordError::TooLong { got: bytes.len() });
    }
    let (decoded, rest) = postcard::take_from_bytes(bytes)?;
    if !rest.is_empty() {
        return Err(RecordError::Trailing(rest.len()));
    }
    Ok(decoded)
}

/// Runs of blocks with one owner, in order.
fn runs(map: &BlockMap) -> Vec<(ShardId, u32)> {
    let mut owners: Vec<(ShardId, u32)> = Vec::new();
    for &owner in map.owners() {
        match owners.last_mut() {
            Some((last, run)) if *last == owner => *run += 1,
            _ => owners.push((owner, 1)),
        }
    }
    owners
}

/// Element type and shape of a record's tensor, as the layout takes them.
fn typed((name, dtype, shape): &(String, String, Vec<u64>)) -> Result<(DType, Vec<usize>), RecordError> {
    let unknown = || RecordError::DType { tensor: name.clone(), got: dtype.clone() };
    let known = DType::from_name(dtype).ok_or_else(unknown)?;
    let dims: Result<_, _> = shape.iter().map(|&dim| usize::try_from(dim)).collect();
    Ok((known, dims.map_err(|_| LayoutError::TooLarge(name.clone()))?))
}

#[cfg(test)]
mod tests;
