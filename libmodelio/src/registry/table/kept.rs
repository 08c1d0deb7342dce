//! A table as a store keeps it: without times, which mean nothing to another process.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{BTreeSet, Duration, Now, RegisteredModel, RegistryCore, Shard};
use crate::vocabulary::ids::{Epoch, Generation, ShardId};
use crate::wire::{RefusedShard, ShardRecord};

/// A shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptShard {
    /// Its record.
    pub record: ShardRecord,
    /// It holds partitions under its number, as it says.
    pub holds: bool,
    /// Its lease is not over.
    pub living: bool,
    /// It has announced itself, or is known to be gone.
    pub announced: bool,
}

/// What the table knows of a model besides its record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptModel {
    /// The life of its name.
    pub generation: Generation,
    /// The epoch of the block map.
    pub epoch: Epoch,
    /// Its blocks are all at their shards.
    pub ready: bool,
    /// The shards with blocks of it.
    pub owners: BTreeSet<ShardId>,
    /// Set if it is restored when blocks are lost: the shard that has restored it, or 0.
    pub restorer: Option<ShardId>,
    /// Bytes of the record.
    pub len: usize,
}

/// A table, or those parts of it that a request needs.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    /// The shards, by their numbers.
    pub shards: Vec<KeptShard>,
    /// The models and their records, by their names. A record that was not read is empty.
    pub models: BTreeMap<String, (KeptModel, Arc<[u8]>)>,
    /// The deleted models, the oldest first.
    pub deleted: Vec<(String, Generation)>,
    /// The refused shards.
    pub refused: Vec<RefusedShard>,
}

impl RegistryCore {
    /// The table that was kept. Who was alive is so for `lease` from `now` on. With `hint`, shards that announce
    /// themselves know better: they take numbers and names that the table has given away.
    pub fn of(kept: &Kept, now: Now, lease: Duration, hint: bool) -> RegistryCore {
        let mut core = RegistryCore::new();
        for KeptShard { record, holds, living, announced } in &kept.shards {
            let until = if *living { now + lease } else { now };
            // What a file knows may be long ago.
            let (record, holds, announced) = (record.clone(), *holds, *announced && !hint);
            let shard = Shard { record, until, last_announced: None, announced, holds, from: None, hint };
            core.shards.insert(shard.record.shard, shard);
        }
        for (name, (model, bytes)) in &kept.models {
            let KeptModel { generation, epoch, ready, owners, restorer, len } = model.clone();
            let bytes = Arc::clone(bytes);
            let model = RegisteredModel { generation, epoch, ready, owners, restorer, len, bytes, hint };
            core.models.insert(name.clone(), model);
        }
        kept.deleted.iter().for_each(|(name, generation)| core.deleted.add(name, *generation));
        kept.refused.iter().for_each(|shard| core.refused.insert(shard.clone(), now + lease));
        core
    }

    /// The table as a store keeps it.
    pub fn kept(&self, now: Now) -> Kept {
        let shard = |shard: &Shard| KeptShard {
            record: shard.record.clone(),
            holds: shard.holds,
            living: shard.until > now,
            announced: shard.announced,
        };
        let model = |(name, model): (&String, &RegisteredModel)| {
            let RegisteredModel { generation, epoch, ready, ref owners, restorer, len, ref bytes, .. } =
                *model;
            let kept = KeptModel { generation, epoch, ready, owners: owners.clone(), restorer, len };
            (name.clone(), (kept, Arc::clone(bytes)))
        };
        Kept {
            shards: self.shards.values().map(shard).collect(),
            models: self.models.iter().map(model).collect(),
            deleted: self.deleted.all(),
            refused: self.refused.until_now(now),
        }
    }
}
