//! The registry in this process: the table with its lock and clock, and the interface that other processes reach over
//! the network.

use std::time::{Duration, Instant};

use libmodelio::registry::{Registry, RegistryError};
use libmodelio::vocabulary::ids::{Epoch, Generation, ShardId};
use libmodelio::wire::{
    Fate, Held, ModelRecord, Refusal, RefusedShard, RegistryAnswer, RegistryRequest, ShardRecord,
};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::registry::{Answer, RegistryCore};

/// The registry in this process.
pub(super) struct Table {
    core: Mutex<RegistryCore>,
    started: Instant,
}

impl Table {
    pub(super) fn new() -> Table {
        Table { core: Mutex::new(RegistryCore::new()), started: Instant::now() }
    }

    pub(super) fn handle(&self, request: &RegistryRequest, payload: &[u8]) -> Result<Answer, Refusal> {
        self.core.lock().handle(request, payload, self.age())
    }

    /// The known shards, and how long ago each has announced itself.
    pub(super) fn announcements(&self) -> Value {
        let age = self.age();
        let core = self.core.lock();
        let shards = core.announcements().map(|(record, last_announced)| {
            let seconds =
                last_announced.map(|last_announced| age.saturating_sub(last_announced).as_secs_f64());
            json!({ "shard": record.shard.0, "address": record.address, "seconds": seconds })
        });
        shards.collect()
    }

    /// How long the registry has been running.
    pub(super) fn age(&self) -> Duration {
        self.started.elapsed()
    }
}

/// The registry of this process, behind the interface of remote ones.
pub(super) struct Local<'a>(pub &'a Table);

impl Local<'_> {
    fn ask(&self, request: &RegistryRequest, payload: &[u8]) -> Result<Answer, RegistryError> {
        self.0.handle(request, payload).map_err(RegistryError::from)
    }
}

fn unexpected() -> RegistryError {
    RegistryError::Refused(Refusal::other("the registry answers something else"))
}

impl Registry for Local<'_> {
    fn announce(
        &self,
        record: &ShardRecord,
        bound: bool,
        lease: Duration,
        _: Instant,
    ) -> Result<ShardId, RegistryError> {
        let lease_ms = u32::try_from(lease.as_millis()).unwrap_or(u32::MAX);
        let request = RegistryRequest::Announce { record: record.clone(), lease_ms, bound };
        match self.ask(&request, &[])?.message {
            RegistryAnswer::Shard(shard) => Ok(shard),
            _ => Err(unexpected()),
        }
    }

    fn withdraw(&self, shard: ShardId, _: Instant) -> Result<(), RegistryError> {
        self.ask(&RegistryRequest::Withdraw { shard }, &[]).map(drop)
    }

    fn drain(&self, shard: ShardId, _: Instant) -> Result<(), RegistryError> {
        self.ask(&RegistryRequest::Drain { shard }, &[]).map(drop)
    }

    fn undrain(&self, shard: ShardId, _: Instant) -> Result<(), RegistryError> {
        self.ask(&RegistryRequest::Undrain { shard }, &[]).map(drop)
    }

    fn shards(&self, _: Instant) -> Result<Vec<ShardRecord>, RegistryError> {
        match self.ask(&RegistryRequest::Shards, &[])?.message {
            RegistryAnswer::Shards(shards) => Ok(shards),
            _ => Err(unexpected()),
        }
    }

    fn refused(&self, _: Instant) -> Result<Vec<RefusedShard>, RegistryError> {
        match self.ask(&RegistryRequest::Refused, &[])?.message {
            RegistryAnswer::Refused(shards) => Ok(shards),
            _ => Err(unexpected()),
        }
    }

    fn models(&self, _: Instant) -> Result<Vec<String>, RegistryError> {
        match self.ask(&RegistryRequest::Models, &[])?.message {
            RegistryAnswer::Models(names) => Ok(names),
            _ => Err(unexpected()),
        }
    }

    fn model(&self, name: &str, _: Instant) -> Result<ModelRecord, RegistryError> {
        let answer = self.ask(&RegistryRequest::Model { name: name.to_owned() }, &[])?;
        let bytes = answer.payload.ok_or_else(unexpected)?;
        ModelRecord::decode(&bytes).map_err(|error| RegistryError::Refused(Refusal::other(error)))
    }

    fn put(&self, record: &ModelRecord, replaces: Option<Epoch>, _: Instant) -> Result<(), RegistryError> {
        let bytes = record.encode().map_err(|error| RegistryError::Refused(Refusal::other(error)))?;
        self.ask(&RegistryRequest::Put { replaces }, &bytes).map(drop)
    }

    fn delete(&self, name: &str, generation: Generation, _: Instant) -> Result<(), RegistryError> {
        self.ask(&RegistryRequest::Delete { name: name.to_owned(), generation }, &[]).map(drop)
    }

    fn holding(
        &self,
        shard: ShardId,
        held: &[Held],
        deleted: &[(String, Generation)],
        _: Instant,
    ) -> Result<(bool, Vec<Fate>), RegistryError> {
        let request = RegistryRequest::Holding { shard, held: held.to_vec(), deleted: deleted.to_vec() };
        match self.ask(&request, &[])?.message {
            RegistryAnswer::Fates { draining, fates } => Ok((draining, fates)),
            _ => Err(unexpected()),
        }
    }

    fn restore(&self, record: &ModelRecord, shards: &[ShardRecord], _: Instant) -> Result<(), RegistryError> {
        let bytes = record.encode().map_err(|error| RegistryError::Refused(Refusal::other(error)))?;
        self.ask(&RegistryRequest::Restore { shards: shards.to_vec() }, &bytes).map(drop)
    }
}
