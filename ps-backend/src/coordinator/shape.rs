//! The model that a job is of, and the shards that have it.

use std::sync::Arc;

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::block_map::PartitionIndex;
use libmodelio::vocabulary::block_ranges::BlockRanges;
use libmodelio::vocabulary::ids::ShardId;
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use serde::{Deserialize, Serialize};

/// Facts about the model that do not change while a coordinator has the job.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Shape {
    blocks: u32,
    tensors: u32,
    /// The names and types of the tensors.
    #[serde(skip)]
    names: Arc<[(String, DType)]>,
    /// Whether the model has a tensor that can be reduced.
    #[serde(skip)]
    is_trainable: bool,
    partitions: usize,
    /// Their numbers, for people.
    #[serde(skip)]
    shards: Arc<[ShardId]>,
}

impl Shape {
    /// A model of this layout on so many shards.
    pub(super) fn new(layout: &ModelLayout, partitions: usize) -> Shape {
        Shape {
            blocks: layout.blocks(),
            tensors: layout.tensors().len() as u32,
            names: layout.tensors().iter().map(|tensor| (tensor.name.clone(), tensor.dtype)).collect(),
            is_trainable: layout.is_trainable(),
            partitions,
            shards: Arc::default(),
        }
    }

    /// The shards' numbers, for messages.
    pub(super) fn set_shards(&mut self, shards: Vec<ShardId>) {
        self.shards = shards.into();
    }

    /// Whether it can be of this layout.
    pub(super) fn is_of(&self, layout: &ModelLayout) -> bool {
        self.blocks == layout.blocks() && self.tensors == layout.tensors().len() as u32
    }

    pub(super) fn blocks(&self) -> u32 {
        self.blocks
    }

    pub(super) fn tensors(&self) -> u32 {
        self.tensors
    }

    /// The names and types of the tensors.
    pub(super) fn names(&self) -> impl ExactSizeIterator<Item = (&str, DType)> + Clone {
        self.names.iter().map(|(name, dtype)| (name.as_str(), *dtype))
    }

    /// Whether the model has a tensor that can be reduced.
    pub(super) fn is_trainable(&self) -> bool {
        self.is_trainable
    }

    pub(super) fn partitions(&self) -> impl Iterator<Item = PartitionIndex> {
        0..self.partitions
    }

    /// The shard of a partition, for people.
    pub(super) fn shard(&self, partition: PartitionIndex) -> String {
        self.shards.get(partition).map_or("a shard".into(), |shard| format!("shard {shard}"))
    }

    /// The blocks as a set. None if the model does not have them.
    pub(super) fn block_set(&self, ranges: &BlockRanges) -> Option<FixedBitSet> {
        let mut set = FixedBitSet::with_capacity(self.blocks as usize);
        for range in ranges {
            if range.start >= range.end || range.end > self.blocks {
                return None;
            }
            set.insert_range(range.start as usize..range.end as usize);
        }
        Some(set)
    }
}
