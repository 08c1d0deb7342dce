//! A table that was begun anew, and shards that know more than it does.
//!
//! A number belongs to the shard that holds blocks under it: the shard says so itself (`bound`), or a record
//! of a model does, together with the shard's address. A shard that has been given the number meanwhile and
//! holds nothing takes another one when it announces itself again. Records only go forward: for one life of a
//! model the highest epoch counts.

use std::collections::BTreeSet;

use crate::vocabulary::block_map::MAX_SHARDS;
use crate::vocabulary::ids::{Generation, ShardId};
use crate::wire::{ModelRecord, Refusal, ShardRecord, check_model_name};

use super::{Given, Now, RegistryCore, Shard, check_shard, follows};

impl RegistryCore {
    /// The number of a shard that holds blocks under it: nobody has it afterwards. The table is as it was if that is
    /// refused.
    pub(super) fn claimed(
        &mut self,
        record: &ShardRecord,
        known: Option<ShardId>,
        now: Now,
    ) -> Result<ShardId, Refusal> {
        let number = record.shard;
        if known == Some(number) {
            return Ok(number);
        }
        self.may_take(number)?;
        if known.is_none() && !self.shards.contains_key(&number) {
            self.make_room(now)?;
        }
        self.shards.remove(&number);
        Ok(number)
    }

    /// Checks that nobody else has blocks under this number.
    fn may_take(&self, number: ShardId) -> Result<(), Refusal> {
        match self.shards.get(&number) {
            // A state file that names another shard is older than the one that announces itself.
            Some(holder) if !holder.hint && (holder.holds || self.owns(number)) => {
                Err(Refusal::NumberTaken { shard: number, address: holder.record.address.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Records models that shards had to forget. A second call does nothing.
    pub(super) fn are_deleted(&mut self, deleted: &[(String, Generation)]) -> Result<(), Refusal> {
        for (name, _) in deleted {
            check_model_name(name).map_err(Refusal::other)?;
        }
        for (name, generation) in deleted {
            match self.models.get(name) {
                Some(model) if model.generation == *generation => self.delete(name, *generation)?,
                _ => self.deleted.add(name, *generation),
            }
        }
        Ok(())
    }

    /// A model that a shard holds a partition of.
    pub(super) fn restore(
        &mut self,
        shards: &[ShardRecord],
        given: Given<'_>,
        now: Now,
    ) -> Result<(), Refusal> {
        let (record, payload) = self.of_known_lineage(given)?;
        let payload = &*payload;
        let is_news = match self.models.get(&record.name) {
            Some(stored) if *stored.bytes == *payload => false,
            Some(stored) if stored.generation != record.generation && !stored.hint => {
                return Err(Refusal::Exists(record.name));
            }
            Some(stored) if stored.generation == record.generation => {
                // The model may have become ready without this shard's knowing.
                let claimed = ModelRecord { ready: record.ready || stored.ready, ..record.clone() };
                follows(stored, stored.epoch, &claimed)?;
                record.epoch > stored.epoch || record.ready && !stored.ready
            }
            _ => {
                self.may_come(&record)?;
                true
            }
        };
        let owners: BTreeSet<ShardId> = record.owners.iter().map(|&(owner, _)| owner).collect();
        let claims = self.claims(&owners, shards)?;
        match self.models.get_mut(&record.name).filter(|_| !is_news) {
            Some(stored) => stored.hint = false,
            None => self.store(record, owners, payload)?,
        }
        for mut claim in claims {
            // The shard is listed once it announces itself. An announcement that it has already made counts.
            let known = self.at(&claim.address).and_then(|known| self.shards.remove(&known));
            let until = known.as_ref().map_or(now, |known| known.until);
            let announced = known.as_ref().is_some_and(|known| known.announced);
            claim.draining = known.is_some_and(|known| known.record.draining);
            if !self.shards.contains_key(&claim.shard) {
                self.make_room(now)?;
            }
            self.shards.insert(
                claim.shard,
                Shard {
                    record: claim,
                    until,
                    last_announced: None,
                    announced,
                    holds: false,
                    from: None,
                    hint: false,
                },
            );
        }
        Ok(())
    }

    /// Owners of a model whose numbers the table does not have yet.
    fn claims(
        &self,
        owners: &BTreeSet<ShardId>,
        shards: &[ShardRecord],
    ) -> Result<Vec<ShardRecord>, Refusal> {
        let mut claims: Vec<ShardRecord> = Vec::new();
        for shard in shards.iter().filter(|shard| owners.contains(&shard.shard)) {
            check_shard(shard)?;
            let known = self.at(&shard.address);
            if known == Some(shard.shard) {
                continue;
            }
            self.may_take(shard.shard)?;
            if claims.iter().any(|claim| claim.shard == shard.shard || claim.address == shard.address) {
                return Err(Refusal::other(format_args!("shard {} is named twice", shard.shard)));
            }
            // If another process has blocks there, under another number, those of this model are lost.
            let has_blocks = |shard: &Shard| !shard.hint && (shard.holds || self.owns(shard.record.shard));
            let holds = |known| self.shards.get(&known).is_some_and(has_blocks);
            if !known.is_some_and(holds) {
                claims.push(shard.clone());
            }
        }
        // The others can give way.
        let needed = self.shards.keys().filter(|&&number| self.owns(number)).count();
        if needed + claims.len() > MAX_SHARDS {
            return Err(Refusal::other(format_args!("there would be more than {MAX_SHARDS} shards")));
        }
        Ok(claims)
    }
}
