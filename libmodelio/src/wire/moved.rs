//! The new place of a model. A shard gives it as the answer to a peer that uses an older block map, and gets
//! it when it is to own blocks of the model.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::bounded::list;
use super::{MAX_PAYLOAD, ModelRecord, RecordError, ShardRecord};
use crate::vocabulary::block_map::{BlockMap, MAX_SHARDS};
use crate::vocabulary::ids::{Epoch, ShardId};

/// The data that a shard keeps of a block, besides sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kept {
    /// Its bytes.
    Weights,
    /// fp32 masters, of all reducible elements, if some are of half precision.
    Masters,
    /// A slot of the optimizer's state, of all reducible elements: 0 or 1.
    Slot(u8),
}

/// The payload of [`super::Message::Adopt`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adoption {
    /// The number of the attempt: the numbers of a model's attempts rise.
    pub attempt: u64,
    /// The model with the block map that is to be.
    pub record: ModelRecord,
    /// The epoch of the one that is in force.
    pub epoch: Epoch,
    /// Runs of blocks in that map, as in a record.
    pub owners: Vec<(ShardId, u32)>,
    /// The shards of both, and where they listen.
    #[serde(deserialize_with = "list::<MAX_SHARDS, _, _>")]
    pub shards: Vec<ShardRecord>,
}

impl Adoption {
    /// The encoding in bytes, by postcard.
    ///
    /// # Errors
    /// Fails as [`Moved::encode`] does.
    pub fn encode(&self) -> Result<Vec<u8>, RecordError> {
        self.record.check_heads()?;
        encode(self)
    }

    /// From bytes, with maps that fit the model, the new one after the old one, and shards that are all known.
    ///
    /// # Errors
    /// [`RecordError`] for anything else.
    pub fn decode(bytes: &[u8]) -> Result<Adoption, RecordError> {
        let adoption: Adoption = decode(bytes)?;
        adoption.record.check()?;
        let maps = [adoption.record.block_map()?, adoption.map_in_force()?];
        check_known(&maps, &adoption.shards)?;
        match adoption.epoch.0.checked_add(1) {
            Some(next) if next == adoption.record.epoch.0 => Ok(adoption),
            _ => Err(crate::vocabulary::block_map::MapError::Epoch {
                expected: Epoch(adoption.epoch.0.saturating_add(1)),
                got: adoption.record.epoch,
            }
            .into()),
        }
    }

    /// The block map that is in force.
    ///
    /// # Errors
    /// [`RecordError`] for one that does not fit the model.
    pub fn map_in_force(&self) -> Result<BlockMap, RecordError> {
        self.record.map_of(self.epoch, &self.owners)
    }
}

fn encode(what: &impl Serialize) -> Result<Vec<u8>, RecordError> {
    let bytes = postcard::to_stdvec(what)?;
    if bytes.len() > MAX_PAYLOAD as usize {
        return Err(RecordError::TooLong { got: bytes.len() });
    }
    Ok(bytes)
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RecordError> {
    if bytes.len() > MAX_PAYLOAD as usize {
        return Err(RecordError::TooLong { got: bytes.len() });
    }
    let (decoded, rest) = postcard::take_from_bytes(bytes)?;
    if !rest.is_empty() {
        return Err(RecordError::Trailing(rest.len()));
    }
    Ok(decoded)
}

/// # Errors
/// [`RecordError::Unknown`] names an owner that is not among the shards.
fn check_known(maps: &[BlockMap], shards: &[ShardRecord]) -> Result<(), RecordError> {
    let is_known = |owner: &ShardId| shards.iter().any(|shard| shard.shard == *owner);
    let mut owners = maps.iter().flat_map(|map| map.shares().into_keys());
    owners.find(|owner| !is_known(owner)).map_or(Ok(()), |owner| Err(RecordError::Unknown(owner)))
}

/// The payload of [`super::Message::Moved`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    /// The model with its new block map, under a higher epoch.
    pub record: ModelRecord,
    /// Its shards, and where they listen.
    #[serde(deserialize_with = "list::<MAX_SHARDS, _, _>")]
    pub shards: Vec<ShardRecord>,
}

impl Moved {
    /// The encoding in bytes, by postcard.
    ///
    /// # Errors
    /// [`RecordError::TooLong`], and others for a record that [`ModelRecord::encode`] would not take.
    pub fn encode(&self) -> Result<Vec<u8>, RecordError> {
        self.record.check_heads()?;
        encode(self)
    }

    /// From bytes, with a record whose parts fit each other and whose owners are all among the shards.
    ///
    /// # Errors
    /// [`RecordError`] for anything else.
    pub fn decode(bytes: &[u8]) -> Result<Moved, RecordError> {
        let moved: Moved = decode(bytes)?;
        moved.record.check()?;
        check_known(&[moved.record.block_map()?], &moved.shards)?;
        Ok(moved)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::vocabulary::block_map::BlockMap;
    use crate::vocabulary::controls::Controls;
    use crate::vocabulary::ids::{Generation, ShardId};
    use crate::vocabulary::layout::{DType, ModelLayout};

    fn shard(number: u16) -> ShardRecord {
        let address = format!("node{number}:7070");
        ShardRecord {
            shard: ShardId(number),
            address,
            host: String::new(),
            draining: false,
            rdma: String::new(),
        }
    }

    /// A model that has left shard 2 for 3, and its earlier adoption.
    fn samples() -> (Moved, Adoption) {
        let layout = ModelLayout::blank(1 << 20, DType::F32, 64 << 10).unwrap();
        let map = BlockMap::striped(layout.blocks(), &[ShardId(1), ShardId(2)]).unwrap();
        let map = map.without(ShardId(2), &[ShardId(1), ShardId(3)]).unwrap();
        let record = ModelRecord::new(
            "m",
            Generation(1),
            &layout,
            BTreeMap::new(),
            &map,
            ShardId(1),
            Controls::default(),
        )
        .unwrap();
        let moved = Moved { record: record.clone(), shards: vec![shard(1), shard(3)] };
        let shards = vec![shard(1), shard(2), shard(3)];
        let owners = vec![(ShardId(1), 8), (ShardId(2), 8)];
        (moved, Adoption { attempt: 7, record, epoch: Epoch(1), owners, shards })
    }

    /// Bytes that decode are sound, and encode again.
    fn decode_both(bytes: &[u8]) {
        if let Ok(moved) = Moved::decode(bytes) {
            moved.record.check().unwrap();
            assert_eq!(Moved::decode(&moved.encode().unwrap()).unwrap(), moved);
        }
        if let Ok(adoption) = Adoption::decode(bytes) {
            let maps = (adoption.record.block_map().unwrap(), adoption.map_in_force().unwrap());
            assert_eq!(maps.0.blocks(), maps.1.blocks());
            assert_eq!(Adoption::decode(&adoption.encode().unwrap()).unwrap(), adoption);
        }
    }

    /// Some bytes replaced, others cut out or put in.
    fn mutated(bytes: &[u8], changes: &[(usize, u8, u8)]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for &(at, what, value) in changes {
            let at = at % (bytes.len() + 1);
            match what % 3 {
                0 if at < bytes.len() => bytes[at] = value,
                1 if at < bytes.len() => drop(bytes.remove(at)),
                _ => bytes.insert(at, value),
            }
        }
        bytes
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_sound(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            decode_both(&bytes);
        }

        #[test]
        fn changed_bytes_are_refused_or_sound(
            changes in proptest::collection::vec((any::<usize>(), any::<u8>(), any::<u8>()), 1..6),
        ) {
            let (moved, adoption) = samples();
            decode_both(&mutated(&moved.encode().unwrap(), &changes));
            decode_both(&mutated(&adoption.encode().unwrap(), &changes));
        }
    }

    #[test]
    fn where_a_model_is_goes_there_and_back_or_is_refused() {
        let (mut moved, adoption) = samples();
        let bytes = moved.encode().unwrap();
        assert_eq!(Moved::decode(&bytes).unwrap(), moved);
        assert!(matches!(Moved::decode(&[&bytes[..], &[0]].concat()), Err(RecordError::Trailing(1))));
        assert!(Moved::decode(&bytes[..bytes.len() - 1]).is_err());
        moved.shards.pop();
        assert!(matches!(Moved::decode(&moved.encode().unwrap()), Err(RecordError::Unknown(ShardId(3)))));

        let bytes = adoption.encode().unwrap();
        assert_eq!(Adoption::decode(&bytes).unwrap(), adoption);
        assert!(matches!(Adoption::decode(&[&bytes[..], &[0]].concat()), Err(RecordError::Trailing(1))));
        for (what, wrong) in [
            ("another epoch", Adoption { epoch: Epoch(2), ..adoption.clone() }),
            ("too few blocks", Adoption { owners: vec![(ShardId(1), 8)], ..adoption.clone() }),
            ("a shard too few", Adoption { shards: vec![shard(1), shard(3)], ..adoption.clone() }),
        ] {
            assert!(Adoption::decode(&wrong.encode().unwrap()).is_err(), "{what}");
        }
    }
}
