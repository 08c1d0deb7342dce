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
        for KeptShard { record, holds, living } in &kept.shards {
            let until = if *living { now + lease } else { now };
            let (record, holds) = (record.clone(), *holds);
            let shard = Shard { record, until, last_announced: None, holds, from: None, hint };
            core.shards.insert(shard.record.shard, shard);
        }
        for (name, (model, bytes)) in &kept.models {
            let KeptModel { generation, epoch, ready, owners, len } = model.clone();
            let bytes = Arc::clone(bytes);
            let model = RegisteredModel { generation, epoch, ready, owners, len, bytes, hint };
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
        };
        let model = |(name, model): (&String, &RegisteredModel)| {
            let RegisteredModel { generation, epoch, ready, ref owners, len, ref bytes, .. } = *model;
            let kept = KeptModel { generation, epoch, ready, owners: owners.clone(), len };
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
