//! Which shard has which block, which shards are connected, and the relay that has all blocks of versions.

use std::ops::Range;

use fixedbitset::FixedBitSet;

use super::relay::Relay;
use crate::vocabulary::block_map::{BlockMap, PartitionIndex};
use crate::vocabulary::ids::{BlockId, ClientId, Epoch, ShardId};

/// The block map in force, as the client needs it. It numbers the partitions.
#[derive(Debug)]
pub(super) struct Owners {
    epoch: Epoch,
    blocks: usize,
    shards: Vec<ShardId>,
    /// For each partition, its blocks.
    owned: Vec<FixedBitSet>,
    /// For each partition, whether its shard is connected.
    up: Vec<bool>,
    /// The block to begin sending at.
    first: usize,
    /// The relay, if versions are pulled by one.
    pub(super) relay: Relay,
}

impl Owners {
    /// Those of a map. No shard is connected.
    pub(super) fn new(map: &BlockMap) -> Owners {
        let shards: Vec<ShardId> = map.shares().into_keys().collect();
        let mut owned = vec![FixedBitSet::with_capacity(map.blocks() as usize); shards.len()];
        for (block, owner) in map.owners().iter().enumerate() {
            // Every owner is in the list of shards.
            if let Ok(partition) = shards.binary_search(owner) {
                owned[partition].insert(block);
            }
        }
        let (up, relay) = (vec![false; shards.len()], Relay::default());
        Owners { epoch: map.epoch(), blocks: map.blocks() as usize, shards, owned, up, first: 0, relay }
    }

    /// Another map of the model is in force. No shard is connected, and no relay.
    pub(super) fn go_to(&mut self, map: &BlockMap) {
        let mut relay = std::mem::take(&mut self.relay);
        relay.is_up = false;
        *self = Owners { first: self.first, relay, ..Owners::new(map) };
    }

    /// Begins sending at a block that depends on `client`.
    pub(super) fn begin_apart(&mut self, client: ClientId) {
        // Consecutive client numbers must begin far apart.
        let mixed = client.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        self.first = ((mixed * self.blocks as u64) >> 32) as usize;
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The number of the model's blocks.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// The block to begin sending at.
    pub(super) fn first(&self) -> usize {
        self.first
    }

    /// A set of the model's blocks without any.
    pub(super) fn no_blocks(&self) -> FixedBitSet {
        FixedBitSet::with_capacity(self.blocks)
    }

    /// The blocks in these ranges that the model has.
    pub(super) fn bits(&self, ranges: &[Range<u32>]) -> FixedBitSet {
        let mut bits = self.no_blocks();
        for range in ranges {
            bits.insert_range((range.start as usize).min(self.blocks)..(range.end as usize).min(self.blocks));
        }
        bits
    }

    /// The shards, by partition.
    pub(super) fn shards(&self) -> &[ShardId] {
        &self.shards
    }

    pub(super) fn partitions(&self) -> Range<PartitionIndex> {
        0..self.shards.len()
    }

    /// For each partition, its blocks.
    pub(super) fn owned(&self) -> &[FixedBitSet] {
        &self.owned
    }

    /// The partition that has a block.
    pub(super) fn of(&self, block: BlockId) -> Option<PartitionIndex> {
        self.owned.iter().position(|owned| owned.contains(block.index()))
    }

    /// The shard is connected, or not any more. Returns whether it was.
    pub(super) fn set_up(&mut self, partition: PartitionIndex, is_up: bool) -> bool {
        std::mem::replace(&mut self.up[partition], is_up)
    }

    /// Whether all shards are connected.
    pub(super) fn are_all_up(&self) -> bool {
        self.up.iter().all(|up| *up)
    }
}
