//! The block map: the owner of each block. Blocks are striped over the shards, and an epoch fences older
//! maps.
//!
//! Blocks go round the shards in turn, so that a sequential write or read keeps all of them busy and shares
//! differ by one block at most, whatever the size of the model. A shard that goes gives its blocks to the
//! others evenly, a new shard takes an even part of everybody's; no other block moves. Pure.
//!
//! On one machine a model has one shard and no map; this is for those on several.

use std::collections::BTreeMap;

use crate::vocabulary::ids::{BlockId, Epoch, ShardId};

/// The index of a partition, and of its shard, among those of a model: by rising [`ShardId`].
pub type PartitionIndex = usize;

/// Shards a model can be striped over.
pub const MAX_SHARDS: usize = 1024;

/// Why a map cannot be made, or does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// A model needs a shard.
    #[error("a model needs at least one shard")]
    NoShards,
    /// More than [`MAX_SHARDS`].
    #[error("{0} shards are more than the {MAX_SHARDS} that a model can be striped over")]
    TooManyShards(usize),
    /// The shard is in the map twice.
    #[error("shard {0} is named twice")]
    Duplicate(ShardId),
    /// The shard is not in the map.
    #[error("shard {0} owns no block of this model")]
    UnknownShard(ShardId),
    /// A request was made under another map.
    #[error("the request is of block map {got}, the shard's is {expected}: fetch the new map")]
    Epoch {
        /// The map's epoch.
        expected: Epoch,
        /// The request's.
        got: Epoch,
    },
    /// The model has no such block.
    #[error("block {block} is outside of the model's {blocks} blocks")]
    NoBlock {
        /// The requested block.
        block: BlockId,
        /// How many there are.
        blocks: u32,
    },
}

/// The owner of every block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockMap {
    epoch: Epoch,
    owners: Vec<ShardId>,
}

impl BlockMap {
    /// `blocks` blocks, in turn over `shards`, under epoch 1.
    ///
    /// # Errors
    /// [`MapError`] for no shards, too many, or one that is named twice.
    pub fn striped(blocks: u32, shards: &[ShardId]) -> Result<BlockMap, MapError> {
        check(shards)?;
        let owners = shards.iter().copied().cycle().take(blocks as usize).collect();
        Ok(BlockMap { epoch: Epoch(1), owners })
    }

    /// A map as it was received: the owner of each block.
    ///
    /// # Errors
    /// [`MapError::TooManyShards`].
    pub fn from_owners(epoch: Epoch, owners: Vec<ShardId>) -> Result<BlockMap, MapError> {
        let map = BlockMap { epoch, owners };
        match map.shares().len() {
            shards if shards > MAX_SHARDS => Err(MapError::TooManyShards(shards)),
            _ => Ok(map),
        }
    }

    /// Its generation.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Blocks of the model.
    pub fn blocks(&self) -> u32 {
        self.owners.len() as u32
    }

    /// The owner of each block.
    pub fn owners(&self) -> &[ShardId] {
        &self.owners
    }

    /// The owner of `block`, for a request that was made under `epoch`.
    ///
    /// # Errors
    /// [`MapError::Epoch`] for a request of another map, [`MapError::NoBlock`].
    pub fn owner(&self, epoch: Epoch, block: BlockId) -> Result<ShardId, MapError> {
        if epoch != self.epoch {
            return Err(MapError::Epoch { expected: self.epoch, got: epoch });
        }
        let owner = self.owners.get(block.index()).copied();
        owner.ok_or(MapError::NoBlock { block, blocks: self.blocks() })
    }

    /// The blocks of `shard`, in order.
    pub fn blocks_of(&self, shard: ShardId) -> impl Iterator<Item = BlockId> {
        let owners = self.owners.iter().zip(0..);
        owners.filter(move |(owner, _)| **owner == shard).map(|(_, block)| BlockId(block))
    }

    /// How many blocks each shard owns. Shards without any are not named.
    pub fn shares(&self) -> BTreeMap<ShardId, u32> {
        let mut shares = BTreeMap::new();
        for owner in &self.owners {
            *shares.entry(*owner).or_insert(0) += 1;
        }
        shares
    }

    /// The map after `gone` has left, its blocks spread over `others`.
    ///
    /// # Errors
    /// [`MapError`]; `gone` itself must not be among `others`.
    pub fn without(&self, gone: ShardId, others: &[ShardId]) -> Result<BlockMap, MapError> {
        check(others)?;
        if others.contains(&gone) {
            return Err(MapError::Duplicate(gone));
        }
        if !self.owners.contains(&gone) {
            return Err(MapError::UnknownShard(gone));
        }
        let mut shares = self.shares();
        let mut owners = self.owners.clone();
        for owner in owners.iter_mut().filter(|owner| **owner == gone) {
            // Chooses the shard with the fewest blocks. Equal shards take turns, since the count rises with
            // each.
            let least = others.iter().min_by_key(|shard| (shares.get(shard).copied().unwrap_or(0), **shard));
            let least = *least.ok_or(MapError::NoShards)?;
            *shares.entry(least).or_insert(0) += 1;
            *owner = least;
        }
        Ok(BlockMap { epoch: self.next_epoch(), owners })
    }

    /// The shards of `takers`, which all may be given blocks, that are to own blocks when `gone` has left:
    /// those that own some already, and one in its place, if there is one that owns none. `choice` picks that
    /// one.
    ///
    /// # Errors
    /// [`MapError::NoShards`].
    pub fn successors(
        &self,
        gone: ShardId,
        takers: &[ShardId],
        choice: u64,
    ) -> Result<Vec<ShardId>, MapError> {
        let shares = self.shares();
        let takers = takers.iter().copied().filter(|&taker| taker != gone);
        let (mut chosen, others): (Vec<_>, Vec<_>) = takers.partition(|taker| shares.contains_key(taker));
        if let Some(at) = choice.checked_rem(others.len() as u64) {
            chosen.push(others[at as usize]);
        }
        if chosen.is_empty() { Err(MapError::NoShards) } else { Ok(chosen) }
    }

    fn next_epoch(&self) -> Epoch {
        Epoch(self.epoch.0 + 1)
    }
}

fn check(shards: &[ShardId]) -> Result<(), MapError> {
    if shards.is_empty() {
        return Err(MapError::NoShards);
    }
    if shards.len() > MAX_SHARDS {
        return Err(MapError::TooManyShards(shards.len()));
    }
    let mut sorted = shards.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(MapError::Duplicate(pair[0])),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shards(count: u16) -> Vec<ShardId> {
        (0..count).map(|i| ShardId(i * 3 + 1)).collect()
    }

    /// Within one block, or 1% of an even share.
    fn is_even(map: &BlockMap, count: usize) -> bool {
        let shares = map.shares();
        let even = map.blocks() as f64 / count as f64;
        let slack = (even / 100.0).max(1.0);
        let absent = shares.len() < count && even > slack;
        !absent && shares.values().all(|&share| (f64::from(share) - even).abs() <= slack)
    }

    fn moved(before: &BlockMap, after: &BlockMap) -> usize {
        before.owners().iter().zip(after.owners()).filter(|(a, b)| a != b).count()
    }

    proptest! {
        #[test]
        fn shares_are_even(blocks in 0..5000u32, count in 1..40u16) {
            let map = BlockMap::striped(blocks, &shards(count)).unwrap();
            prop_assert!(is_even(&map, count.into()), "{:?}", map.shares());
            let listed: u32 = shards(count).iter().map(|&shard| map.blocks_of(shard).count() as u32).sum();
            prop_assert_eq!(listed, blocks);
        }

        #[test]
        fn only_what_must_move_moves(blocks in 1..5000u32, count in 2..20u16, gone in 0..20usize) {
            let all = shards(count);
            let gone = all[gone % all.len()];
            let before = BlockMap::striped(blocks, &all).unwrap();
            let others: Vec<_> = all.iter().copied().filter(|shard| *shard != gone).collect();
            let Ok(after) = before.without(gone, &others) else {
                prop_assert!(!before.owners().contains(&gone));
                return Ok(());
            };
            prop_assert_eq!(moved(&before, &after), before.blocks_of(gone).count());
            prop_assert!(is_even(&after, others.len()), "{:?}", after.shares());
            prop_assert_eq!(after.epoch(), Epoch(2));
        }
    }

    #[test]
    fn requests_of_another_epoch_are_refused() {
        let map = BlockMap::striped(10, &shards(3)).unwrap();
        assert_eq!(map.owner(Epoch(1), BlockId(4)), Ok(ShardId(4)));
        let stale = MapError::Epoch { expected: Epoch(1), got: Epoch(0) };
        assert_eq!(map.owner(Epoch(0), BlockId(4)), Err(stale));
        let outside = MapError::NoBlock { block: BlockId(10), blocks: 10 };
        assert_eq!(map.owner(Epoch(1), BlockId(10)), Err(outside));
    }

    #[test]
    fn one_who_has_no_blocks_takes_the_place_of_who_goes() {
        let map = BlockMap::striped(30, &shards(3)).unwrap();
        let [gone, second, third] = [ShardId(1), ShardId(4), ShardId(7)];
        let (new, other) = (ShardId(20), ShardId(21));
        assert_eq!(map.successors(gone, &[second, third, gone], 5), Ok(vec![second, third]));
        let chosen = map.successors(gone, &[gone, new, second, other, third], 5).unwrap();
        assert_eq!(chosen, [second, third, other]);
        let after = map.without(gone, &chosen).unwrap();
        assert_eq!(after.blocks_of(other).collect::<Vec<_>>(), map.blocks_of(gone).collect::<Vec<_>>());
        assert_eq!(map.successors(gone, &[gone], 5), Err(MapError::NoShards));
    }

    #[test]
    fn bad_lists_of_shards_are_refused() {
        assert_eq!(BlockMap::striped(1, &[]), Err(MapError::NoShards));
        assert_eq!(BlockMap::striped(1, &[ShardId(2), ShardId(2)]), Err(MapError::Duplicate(ShardId(2))));
        let many: Vec<_> = (0..=MAX_SHARDS as u16).map(ShardId).collect();
        assert_eq!(BlockMap::striped(1, &many), Err(MapError::TooManyShards(1025)));
        let map = BlockMap::striped(4, &shards(2)).unwrap();
        assert_eq!(map.without(ShardId(9), &shards(2)), Err(MapError::UnknownShard(ShardId(9))));
        assert_eq!(map.without(ShardId(1), &shards(2)), Err(MapError::Duplicate(ShardId(1))));
    }
}
