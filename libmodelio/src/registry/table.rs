//! The registry's table: which shards there are, which models, and what may change. Pure: a request and `now` go in,
//! an answer comes out. Leases need no timer; who asks sees which are over.
//!
//! The truth lies with the shards. A table that begins anew is filled by them: those that hold partitions keep their
//! numbers, and put the records of their models back (`restoring`).

mod deleted;
mod kept;
mod lineage;
mod lost;
mod refused;
mod requests;
mod restoring;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::vocabulary::block_map::MAX_SHARDS;
use crate::vocabulary::ids::{Epoch, Generation, ShardId};
use crate::wire::{
    Fate, HeldPartition, ModelRecord, Refusal, RegistryAnswer, RegistryRequest, ShardRecord, check_model_name,
};

use self::deleted::Deleted;
pub use self::kept::{Kept, KeptModel, KeptShard};
use self::refused::Refused;

/// Time since some moment of the caller's.
pub type Now = Duration;

/// Most models: their names fit into one answer.
pub const MAX_MODELS: usize = 2048;
/// Most bytes of all models' records together.
pub const MAX_RECORD_BYTES: usize = 256 << 20;
/// Longest address and longest host in a shard's record, in bytes.
pub const MAX_SHARD_TEXT: usize = 255;
/// Longest lease.
pub const MAX_LEASE: Duration = Duration::from_secs(3600);

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// What it says.
    pub message: RegistryAnswer,
    /// A model's record, where the answer is [`RegistryAnswer::Model`].
    pub payload: Option<Arc<[u8]>>,
}

/// A record that came with a request.
#[derive(Clone, Debug)]
pub struct Given<'a> {
    record: ModelRecord,
    bytes: &'a [u8],
}

impl Given<'_> {
    /// The model's name.
    pub fn name(&self) -> &str {
        &self.record.name
    }

    /// Reads the payload of a request, if it is a record.
    ///
    /// # Errors
    /// If it is none that can be used.
    pub fn of<'a>(request: &RegistryRequest, payload: &'a [u8]) -> Result<Option<Given<'a>>, Refusal> {
        let has_record = matches!(
            request,
            RegistryRequest::Put { .. } | RegistryRequest::Restore { .. } | RegistryRequest::Succeed { .. }
        );
        if !has_record {
            return Ok(None);
        }
        let record = ModelRecord::decode(payload).map_err(Refusal::other)?;
        record.check().map_err(Refusal::other)?;
        Ok(Some(Given { record, bytes: payload }))
    }
}

/// A shard that has announced itself at some time.
#[derive(Debug)]
struct Shard {
    record: ShardRecord,
    until: Now,
    /// When it last announced itself; `None` if only others have told of it.
    last_announced: Option<Now>,
    /// It has announced itself, or is known to be gone. Otherwise only others have told of it.
    announced: bool,
    /// It holds partitions under its number, as it says.
    holds: bool,
    /// The address that its announcement came from; `None` for this process.
    from: Option<IpAddr>,
    /// Only a state file has told of it.
    hint: bool,
}

/// A model, as its last record says.
#[derive(Debug)]
struct RegisteredModel {
    generation: Generation,
    epoch: Epoch,
    ready: bool,
    owners: BTreeSet<ShardId>,
    /// Set if it is restored when blocks are lost: the shard that has restored it, or 0.
    restorer: Option<ShardId>,
    /// Bytes of the record.
    len: usize,
    /// The record; empty in a table of which only the rest was read.
    bytes: Arc<[u8]>,
    /// Only a state file has told of it.
    hint: bool,
}

/// The table.
#[derive(Debug, Default)]
pub struct RegistryCore {
    shards: BTreeMap<ShardId, Shard>,
    models: BTreeMap<String, RegisteredModel>,
    deleted: Deleted,
    refused: Refused,
}

impl RegistryCore {
    /// An empty table.
    pub fn new() -> RegistryCore {
        RegistryCore::default()
    }

    /// Shards whose lease is not over, by their numbers.
    pub fn living(&self, now: Now) -> impl Iterator<Item = &ShardRecord> {
        self.shards.values().filter(move |shard| shard.until > now).map(|shard| &shard.record)
    }

    /// When each shard last announced itself, those that have not for long included.
    pub fn announcements(&self) -> impl Iterator<Item = (&ShardRecord, Option<Now>)> {
        self.shards.values().map(|shard| (&shard.record, shard.last_announced))
    }

    /// The number of the shard at an address.
    fn at(&self, address: &str) -> Option<ShardId> {
        let same = |shard: &&Shard| shard.record.address == address;
        self.shards.values().find(same).map(|shard| shard.record.shard)
    }

    /// Whether a model has blocks on the shard of this number.
    fn owns(&self, shard: ShardId) -> bool {
        self.models.values().any(|model| model.owners.contains(&shard))
    }

    /// A number for a shard that the table does not know; `told` is what it was told by an earlier registry, or 0.
    fn number_for(&mut self, wanted: ShardId, now: Now) -> Result<ShardId, Refusal> {
        self.make_room(now)?;
        // One that a model names belongs to a shard that has not been heard of yet.
        let free =
            |number: &ShardId| number.0 != 0 && !self.shards.contains_key(number) && !self.owns(*number);
        let wanted = Some(wanted).filter(free);
        let number = wanted.or_else(|| (1..=MAX_SHARDS as u16).map(ShardId).find(free));
        number.ok_or_else(|| Refusal::other("no number is free for another shard"))
    }

    /// Room for one more shard. Numbers of the gone are kept for when they return, unless they are needed. If all are
    /// there, one gives way that no model needs: of those that hold nothing, of the address that has most of them, the
    /// one that has been silent for longest. It has a place again when it announces itself, which a stranger's
    /// inventions do not.
    fn make_room(&mut self, now: Now) -> Result<(), Refusal> {
        if self.shards.len() < MAX_SHARDS {
            return Ok(());
        }
        let owning: BTreeSet<_> = self.models.values().flat_map(|model| &model.owners).collect();
        let unneeded = || self.shards.iter().filter(|(number, _)| !owning.contains(number));
        let mut crowds: BTreeMap<Option<IpAddr>, usize> = BTreeMap::new();
        unneeded().for_each(|(_, shard)| *crowds.entry(shard.from).or_default() += 1);
        let gone = unneeded().find(|(_, shard)| shard.until <= now);
        let least = |(_, shard): &(&ShardId, &Shard)| {
            (shard.holds, Reverse(crowds.get(&shard.from).copied()), shard.last_announced)
        };
        let Some((&number, _)) = gone.or_else(|| unneeded().min_by_key(least)) else {
            return Err(Refusal::other(format_args!(
                "there are {MAX_SHARDS} shards already, the most that a registry knows"
            )));
        };
        self.shards.remove(&number);
        Ok(())
    }

    fn withdraw(&mut self, shard: ShardId, now: Now) {
        if let Some(shard) = self.shards.get_mut(&shard) {
            (shard.until, shard.announced) = (shard.until.min(now), true);
            shard.record.draining = false;
            shard.holds = false;
        }
    }

    fn drain(&mut self, shard: ShardId, draining: bool) -> Result<(), Refusal> {
        let unknown = || Refusal::other(format_args!("there is no shard {shard}"));
        self.shards.get_mut(&shard).ok_or_else(unknown)?.record.draining = draining;
        Ok(())
    }

    fn model(&self, name: &str) -> Result<&RegisteredModel, Refusal> {
        // A name that is none is not repeated in the refusal: it may be of any length.
        check_model_name(name).map_err(Refusal::other)?;
        self.models.get(name).ok_or_else(|| Refusal::NoModel(name.to_owned()))
    }

    fn put(&mut self, replaces: Option<Epoch>, given: Given<'_>) -> Result<(), Refusal> {
        let (record, payload) = self.of_known_lineage(given)?;
        let (stored, payload) = (self.models.get(&record.name), &*payload);
        if stored.is_some_and(|stored| *stored.bytes == *payload) {
            return Ok(());
        }
        match (stored, replaces) {
            (None, None) => {
                self.may_come(&record)?;
            }
            (None, Some(_)) => return Err(Refusal::NoModel(record.name)),
            (Some(_), None) => return Err(Refusal::Exists(record.name)),
            (Some(stored), Some(epoch)) => follows(stored, epoch, &record)?,
        }
        let owners: BTreeSet<_> = record.owners.iter().map(|&(owner, _)| owner).collect();
        if let Some(unknown) = owners.iter().find(|owner| !self.shards.contains_key(owner)) {
            return Err(Refusal::other(format_args!(
                "the block map names shard {unknown}, which never announced itself"
            )));
        }
        self.store(record, owners, payload)
    }

    /// Whether a model can be one that is not in the table.
    fn may_come(&self, record: &ModelRecord) -> Result<(), Refusal> {
        if self.deleted.contains(&record.name, record.generation) {
            return Err(Refusal::Deleted(record.name.clone()));
        }
        if self.models.len() >= MAX_MODELS && !self.models.contains_key(&record.name) {
            return Err(Refusal::other(format_args!(
                "there are {MAX_MODELS} models already, the most that a registry knows: delete one"
            )));
        }
        Ok(())
    }

    fn store(
        &mut self,
        record: ModelRecord,
        owners: BTreeSet<ShardId>,
        payload: &[u8],
    ) -> Result<(), Refusal> {
        let before = self.models.get(&record.name).map_or(0, |stored| stored.len);
        let record_bytes = self.record_bytes() - before + payload.len();
        if record_bytes > MAX_RECORD_BYTES {
            return Err(Refusal::other(format_args!(
                "records of {record_bytes} bytes, the most that a registry holds is {MAX_RECORD_BYTES}: delete models"
            )));
        }
        let ModelRecord { name, generation, epoch, ready, lineage, .. } = record;
        let restorer = (!lineage.store.is_empty()).then_some(lineage.by);
        let (len, bytes) = (payload.len(), payload.into());
        let model = RegisteredModel { generation, epoch, ready, owners, restorer, len, bytes, hint: false };
        self.models.insert(name, model);
        Ok(())
    }

    /// Bytes of all records.
    fn record_bytes(&self) -> usize {
        self.models.values().map(|model| model.len).sum()
    }

    fn delete(&mut self, name: &str, generation: Generation) -> Result<(), Refusal> {
        let model = match self.model(name) {
            Ok(model) => model,
            // The model was deleted before.
            Err(Refusal::NoModel(_)) => return Ok(()),
            Err(refusal) => return Err(refusal),
        };
        check_generation(name, model.generation, generation)?;
        self.models.remove(name);
        self.deleted.add(name, generation);
        Ok(())
    }

    /// The registry's answer to a shard about one of its partitions.
    fn fate(&mut self, held: &HeldPartition) -> Fate {
        match self.models.get_mut(&held.model) {
            Some(model) if model.generation == held.generation => {
                model.hint = false;
                Fate::Known { epoch: model.epoch }
            }
            _ if self.deleted.contains(&held.model, held.generation) => Fate::Deleted,
            Some(model) if !model.hint => Fate::Taken { generation: model.generation },
            _ => Fate::Unknown,
        }
    }
}

/// Whether `record` may take the place of the one that is stored, for somebody who saw it at `epoch`.
fn follows(stored: &RegisteredModel, epoch: Epoch, record: &ModelRecord) -> Result<(), Refusal> {
    check_generation(&record.name, stored.generation, record.generation)?;
    if epoch != stored.epoch {
        return Err(Refusal::Epoch { expected: stored.epoch, got: epoch });
    }
    if record.epoch < stored.epoch {
        return Err(Refusal::Epoch { expected: stored.epoch, got: record.epoch });
    }
    // Two who change the same record would otherwise undo each other's change.
    if stored.ready && !record.ready {
        return Err(Refusal::other(format_args!(
            "model {:?} is ready, the record says it is not: look again",
            record.name
        )));
    }
    let before = ModelRecord::decode(&stored.bytes).map_err(Refusal::other)?;
    is_same_model(&before, record)?;
    let same_map = |a: &ModelRecord, b: &ModelRecord| {
        (&a.owners, a.coordinator, &a.controls) == (&b.owners, b.coordinator, &b.controls)
    };
    if record.epoch == stored.epoch && !same_map(&before, record) {
        return Err(Refusal::other(format_args!(
            "the record of model {:?} differs and is of epoch {epoch} as before: give it the next epoch",
            record.name
        )));
    }
    Ok(())
}

fn is_same_model(before: &ModelRecord, record: &ModelRecord) -> Result<(), Refusal> {
    let (a, b) = (before, record);
    if (&a.tensors, &a.metadata, a.block_size) == (&b.tensors, &b.metadata, b.block_size) {
        return Ok(());
    }
    Err(Refusal::other(format_args!(
        "model {:?} has other tensors: delete it and create it again",
        record.name
    )))
}

fn check_generation(model: &str, expected: Generation, got: Generation) -> Result<(), Refusal> {
    if expected == got {
        return Ok(());
    }
    Err(Refusal::Generation { model: model.to_owned(), expected, got })
}

fn check_shard(record: &ShardRecord) -> Result<(), Refusal> {
    for (what, text) in [("address", &record.address), ("host", &record.host), ("RDMA address", &record.rdma)]
    {
        if text.len() > MAX_SHARD_TEXT {
            return Err(Refusal::other(format_args!(
                "{what} of {} bytes, the limit is {MAX_SHARD_TEXT}",
                text.len()
            )));
        }
        if text.contains(char::is_control) {
            return Err(Refusal::other(format_args!("{what} {text:?} contains a control character")));
        }
    }
    let parts = record.address.rsplit_once(':');
    let is_address =
        parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port != 0));
    if is_address {
        return Ok(());
    }
    Err(Refusal::other(format_args!("shard address {:?}, expected host:port", record.address)))
}

#[cfg(test)]
mod tests;
