//! Where a model is now: what a shard answers to whoever speaks of an older block map.

use serde::{Deserialize, Serialize};

use super::record::list;
use super::{MAX_PAYLOAD, ModelRecord, RecordError, ShardRecord};
use crate::block_map::MAX_SHARDS;

/// The payload of [`super::Message::Moved`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// The model with its new block map, under a higher epoch.
    pub record: ModelRecord,
    /// Its shards, and where they listen.
    #[serde(deserialize_with = "list::<MAX_SHARDS, _, _>")]
    pub shards: Vec<ShardRecord>,
}

impl Moved {
    /// As bytes: postcard's.
    ///
    /// # Errors
    /// [`RecordError::TooLong`], and others for a record that [`ModelRecord::encode`] would not take.
    pub fn encode(&self) -> Result<Vec<u8>, RecordError> {
        self.record.check_heads()?;
        let bytes = postcard::to_stdvec(self)?;
        if bytes.len() > MAX_PAYLOAD as usize {
            return Err(RecordError::TooLong { got: bytes.len() });
        }
        Ok(bytes)
    }

    /// From bytes, with a record whose parts fit each other and whose owners are all among the shards.
    ///
    /// # Errors
    /// [`RecordError`] for anything else.
    pub fn decode(bytes: &[u8]) -> Result<Moved, RecordError> {
        if bytes.len() > MAX_PAYLOAD as usize {
            return Err(RecordError::TooLong { got: bytes.len() });
        }
        let (moved, rest) = postcard::take_from_bytes::<Moved>(bytes)?;
        if !rest.is_empty() {
            return Err(RecordError::Trailing(rest.len()));
        }
        moved.record.check()?;
        let is_known = |owner| moved.shards.iter().any(|shard| shard.shard == owner);
        match moved.record.block_map()?.shares().into_keys().find(|&owner| !is_known(owner)) {
            Some(owner) => Err(RecordError::Unknown(owner)),
            None => Ok(moved),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::block_map::BlockMap;
    use crate::ids::{Generation, ShardId};
    use crate::layout::{DType, ModelLayout};

    #[test]
    fn where_a_model_is_goes_there_and_back_or_is_refused() {
        let layout = ModelLayout::blank(1 << 20, DType::F32, 64 << 10).unwrap();
        let map = BlockMap::striped(layout.blocks(), &[ShardId(1), ShardId(2)]).unwrap();
        let map = map.without(ShardId(2), &[ShardId(1), ShardId(3)]).unwrap();
        let record =
            ModelRecord::new("m", Generation(1), &layout, BTreeMap::new(), &map, ShardId(1), Vec::new());
        let shard = |number| ShardRecord {
            shard: ShardId(number),
            address: format!("node{number}:7070"),
            host: String::new(),
            draining: false,
        };
        let mut moved = Moved { record: record.unwrap(), shards: vec![shard(1), shard(3)] };
        let bytes = moved.encode().unwrap();
        assert_eq!(Moved::decode(&bytes).unwrap(), moved);
        assert!(matches!(Moved::decode(&[&bytes[..], &[0]].concat()), Err(RecordError::Trailing(1))));
        assert!(Moved::decode(&bytes[..bytes.len() - 1]).is_err());
        moved.shards.pop();
        assert!(matches!(Moved::decode(&moved.encode().unwrap()), Err(RecordError::Unknown(ShardId(3)))));
    }
}
