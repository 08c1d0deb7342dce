//! The new place of a model. A shard gives it as the answer to a peer that uses an older block map, and gets
//! it when it is to own blocks of the model.

use serde::{Deserialize, Serialize};

use super::bounded::list;
use super::record::{decode, encode};
use super::{ModelRecord, RecordError, ShardRecord};
use crate::vocabulary::block_map::MAX_SHARDS;
use crate::vocabulary::ids::ShardId;

/// The data that a shard keeps of a block, besides sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum DataKind {
    /// Its bytes.
    Weights,
    /// fp32 masters, of all reducible elements, if some are of a narrower type.
    Masters,
    /// A slot of the optimizer's state, of all reducible elements: 0 or 1.
    Slot(u8),
}

/// The payload of [`super::Message::Moved`], `Prepare` and `Switch`.
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
        let is_known = |owner: &ShardId| moved.shards.iter().any(|shard| shard.shard == *owner);
        let mut owners = moved.record.owners.iter().map(|(owner, _)| *owner);
        match owners.find(|owner| !is_known(owner)) {
            Some(owner) => Err(RecordError::Unknown(owner)),
            None => Ok(moved),
        }
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

    /// A model that has left shard 2 for 3.
    fn sample() -> Moved {
        let layout = ModelLayout::blank(1 << 20, DType::F32, 64 << 10).unwrap();
        let map = BlockMap::striped(layout.blocks(), &[ShardId(1), ShardId(2)]).unwrap();
        let map = map.without(ShardId(2), &[ShardId(1), ShardId(3)]).unwrap();
        let controls = Controls::default();
        let record =
            ModelRecord::new("m", Generation(1), &layout, BTreeMap::new(), &map, ShardId(1), controls);
        Moved { record: record.unwrap(), shards: vec![shard(1), shard(3)] }
    }

    /// Bytes that decode are sound, and encode again.
    fn decodes(bytes: &[u8]) {
        if let Ok(moved) = Moved::decode(bytes) {
            moved.record.check().unwrap();
            assert_eq!(Moved::decode(&moved.encode().unwrap()).unwrap(), moved);
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
            decodes(&bytes);
        }

        #[test]
        fn changed_bytes_are_refused_or_sound(
            changes in proptest::collection::vec((any::<usize>(), any::<u8>(), any::<u8>()), 1..6),
        ) {
            decodes(&mutated(&sample().encode().unwrap(), &changes));
        }
    }

    #[test]
    fn where_a_model_is_goes_there_and_back_or_is_refused() {
        let mut moved = sample();
        let bytes = moved.encode().unwrap();
        assert_eq!(Moved::decode(&bytes).unwrap(), moved);
        assert!(matches!(Moved::decode(&[&bytes[..], &[0]].concat()), Err(RecordError::Trailing(1))));
        assert!(Moved::decode(&bytes[..bytes.len() - 1]).is_err());
        moved.shards.pop();
        assert!(matches!(Moved::decode(&moved.encode().unwrap()), Err(RecordError::Unknown(ShardId(3)))));
    }
}
