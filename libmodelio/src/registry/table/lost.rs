//! Models whose blocks are lost, and that are restored from a snapshot: a new life takes the place of the one before.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::vocabulary::ids::{Epoch, Generation, ShardId, Version};
use crate::wire::{Losses, LostModel, MAX_NUMBER, ModelRecord, Refusal};

use super::{Given, Now, RegistryCore, Shard, check_generation, is_same_model};

/// A shard that others have named, and that has never announced itself, is lost after this time. So is one that a file
/// names. An etcd tells no times: there such a shard is not lost until somebody has found that nobody is at its address.
const NEVER_ANNOUNCED: Duration = Duration::from_secs(10);

impl Shard {
    /// Whether it is certain that the shard does not live any more, or is cut off.
    fn is_lost(&self, now: Now) -> bool {
        let until = if self.announced { self.until } else { self.until + NEVER_ANNOUNCED };
        until <= now
    }
}

impl RegistryCore {
    /// What a model's coordinator needs to be known if blocks are lost.
    pub(super) fn keep(
        &mut self,
        name: &str,
        (generation, epoch): (Generation, Epoch),
        reserved: Version,
        (store, newest): (&str, bool),
    ) -> Result<(), Refusal> {
        let stored = self.model(name)?;
        check_generation(name, stored.generation, generation)?;
        if stored.epoch != epoch {
            return Err(Refusal::Epoch { expected: stored.epoch, got: epoch });
        }
        if reserved.0 > MAX_NUMBER {
            return Err(Refusal::other(format_args!("{reserved} is more versions than there can be")));
        }
        let mut record = ModelRecord::decode(&stored.bytes).map_err(Refusal::other)?;
        let before = record.lineage.clone();
        record.lineage.reserved = before.reserved.max(reserved);
        store.clone_into(&mut record.lineage.store);
        record.lineage.newest = newest;
        if record.lineage == before {
            return Ok(());
        }
        let owners = stored.owners.clone();
        let payload = record.encode().map_err(Refusal::other)?;
        self.store(record, owners, &payload)
    }

    /// A model is restored: its record is that of a new life, which nobody else has begun meanwhile.
    pub(super) fn succeed(
        &mut self,
        (generation, epoch): (Generation, Epoch),
        Given { record, bytes: payload }: Given<'_>,
    ) -> Result<(), Refusal> {
        let stored = self.model(&record.name)?;
        // The request was repeated.
        if *stored.bytes == *payload {
            return Ok(());
        }
        check_generation(&record.name, stored.generation, generation)?;
        if stored.epoch != epoch {
            return Err(Refusal::Epoch { expected: stored.epoch, got: epoch });
        }
        let before = ModelRecord::decode(&stored.bytes).map_err(Refusal::other)?;
        is_same_model(&before, &record)?;
        let (new, old) = (&record.lineage, &before.lineage);
        // The life before may have used all of its numbers, also those that it had reserved last.
        let is_behind = new.begins >= old.reserved && new.reserved > new.begins;
        let is_next = record.generation != generation && new.follows(old) && is_behind;
        // Otherwise nobody would notice that whoever restores it is gone.
        if !is_next || new.by == ShardId(0) {
            return Err(Refusal::other(format_args!(
                "the record of model {:?} is none of a life after generation {generation}",
                record.name
            )));
        }
        self.may_come(&record)?;
        let owners: BTreeSet<ShardId> = record.owners.iter().map(|&(owner, _)| owner).collect();
        let name = record.name.clone();
        self.store(record, owners, payload)?;
        self.deleted.add(&name, generation);
        Ok(())
    }

    /// The models that are to be restored: an owner does not live any more, or the shard that asks was started anew and
    /// this is none of those that it has `held`. One that was to be restored is among them if whoever did that is gone, or
    /// `makes` it no more.
    pub(super) fn losses(
        &self,
        asks: ShardId,
        (held, makes): (&[Generation], &[Generation]),
        now: Now,
    ) -> Losses {
        let mut models = Vec::new();
        let mut all_needed = BTreeSet::new();
        for (name, model) in &self.models {
            let needed = match (model.restorer, model.ready) {
                (Some(_), true) => model.owners.clone(),
                (Some(by), false) if by != ShardId(0) => BTreeSet::from([by]),
                // It is being created, or is not restored.
                _ => continue,
            };
            let has = if model.ready { held } else { makes };
            let has_not = |shard: &ShardId| *shard == asks && !has.contains(&model.generation);
            let is_lost = |shard: &ShardId| self.shards.get(shard).is_some_and(|of| of.is_lost(now));
            let shards: Vec<ShardId> =
                needed.iter().copied().filter(|shard| has_not(shard) || is_lost(shard)).collect();
            if !shards.is_empty() {
                models.push(LostModel { model: name.clone(), generation: model.generation, shards });
            }
            all_needed.extend(needed);
        }
        let rank = self.living(now).filter(|shard| shard.shard < asks).count() as u32;
        let is_needed = |of: &&Shard| all_needed.contains(&of.record.shard) && !of.is_lost(now);
        let needed = self.shards.values().filter(is_needed).map(|of| of.record.clone()).collect();
        Losses { models, needed, rank }
    }
}
