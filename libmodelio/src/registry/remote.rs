//! A registry in another process, asked over a connection that is made when it is needed.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Registry, RegistryError};
use crate::admin::{AdminError, AdminPeer};
use crate::vocabulary::ids::{Epoch, Generation, ShardId};
use crate::wire::{
    Fate, Held, Message, ModelRecord, RefusedShard, RegistryAnswer, RegistryRequest, ShardRecord,
};

/// The registry at an address. It makes one call at a time. A call that fails ends the connection, and the
/// next call makes another.
#[derive(Debug)]
pub struct RemoteRegistry {
    address: String,
    peer: Mutex<Option<AdminPeer>>,
}

impl RemoteRegistry {
    /// The registry at `address` (`host:port`). Connects at the first call.
    pub fn new(address: impl Into<String>) -> RemoteRegistry {
        RemoteRegistry { address: address.into(), peer: Mutex::new(None) }
    }

    /// Its address.
    pub fn address(&self) -> &str {
        &self.address
    }

    fn ask(
        &self,
        request: RegistryRequest,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<(RegistryAnswer, Vec<u8>), RegistryError> {
        let busy =
            || AdminError::TimedOut { address: self.address.clone(), doing: "waiting for other calls to" };
        let mut place = self.peer.try_lock_until(deadline).ok_or_else(busy)?;
        let request = Message::Registry(request);
        // A connection from before may have ended unnoticed: then the call is made again on a new one, which
        // changes nothing if it was carried out.
        if let Some(mut peer) = place.take().filter(|peer| !peer.is_stale()) {
            match peer.request(&request, payload, deadline) {
                Err(error) if error.is_disconnect() => {}
                answered => return self.answer(answered, peer, &mut place),
            }
        }
        let mut peer = AdminPeer::connect(&self.address, deadline)?;
        let answered = peer.request(&request, payload, deadline);
        self.answer(answered, peer, &mut place)
    }

    fn answer(
        &self,
        answered: Result<(Message, Vec<u8>), AdminError>,
        peer: AdminPeer,
        place: &mut Option<AdminPeer>,
    ) -> Result<(RegistryAnswer, Vec<u8>), RegistryError> {
        match answered {
            Ok((Message::Registered(answer), payload)) => {
                *place = Some(peer);
                Ok((answer, payload))
            }
            Ok((other, _)) => Err(self.unexpected(other.name())),
            Err(AdminError::Refusal(refusal)) => {
                *place = Some(peer);
                Err(refusal.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn unexpected(&self, what: &'static str) -> RegistryError {
        AdminError::Unexpected { address: self.address.clone(), what }.into()
    }

    fn done(&self, request: RegistryRequest, payload: &[u8], deadline: Instant) -> Result<(), RegistryError> {
        match self.ask(request, payload, deadline)?.0 {
            RegistryAnswer::Done => Ok(()),
            _ => Err(self.unexpected("an answer to another question")),
        }
    }
}

impl Registry for RemoteRegistry {
    fn announce(
        &self,
        record: &ShardRecord,
        bound: bool,
        lease: Duration,
        deadline: Instant,
    ) -> Result<ShardId, RegistryError> {
        let lease_ms = u32::try_from(lease.as_millis()).unwrap_or(u32::MAX);
        let request = RegistryRequest::Announce { record: record.clone(), lease_ms, bound };
        match self.ask(request, &[], deadline)?.0 {
            RegistryAnswer::Shard(shard) => Ok(shard),
            _ => Err(self.unexpected("an answer to another question")),
        }
    }

    fn withdraw(&self, shard: ShardId, deadline: Instant) -> Result<(), RegistryError> {
        self.done(RegistryRequest::Withdraw { shard }, &[], deadline)
    }

    fn drain(&self, shard: ShardId, deadline: Instant) -> Result<(), RegistryError> {
        self.done(RegistryRequest::Drain { shard }, &[], deadline)
    }

    fn undrain(&self, shard: ShardId, deadline: Instant) -> Result<(), RegistryError> {
        self.done(RegistryRequest::Undrain { shard }, &[], deadline)
    }

    fn shards(&self, deadline: Instant) -> Result<Vec<ShardRecord>, RegistryError> {
        match self.ask(RegistryRequest::Shards, &[], deadline)?.0 {
            RegistryAnswer::Shards(shards) => Ok(shards),
            _ => Err(self.unexpected("an answer to another question")),
        }
    }

    fn refused(&self, deadline: Instant) -> Result<Vec<RefusedShard>, RegistryError> {
        match self.ask(RegistryRequest::Refused, &[], deadline)?.0 {
            RegistryAnswer::Refused(shards) => Ok(shards),
            _ => Err(self.unexpected("an answer to another question")),
        }
    }

    fn models(&self, deadline: Instant) -> Result<Vec<String>, RegistryError> {
        match self.ask(RegistryRequest::Models, &[], deadline)?.0 {
            RegistryAnswer::Models(names) => Ok(names),
            _ => Err(self.unexpected("an answer to another question")),
        }
    }

    fn model(&self, name: &str, deadline: Instant) -> Result<ModelRecord, RegistryError> {
        match self.ask(RegistryRequest::Model { name: name.to_owned() }, &[], deadline)? {
            (RegistryAnswer::Model, payload) => {
                let record = ModelRecord::decode(&payload)?;
                record.check()?;
                Ok(record)
            }
            _ => Err(self.unexpected("an answer to another question")),
        }
    }

    fn put(
        &self,
        record: &ModelRecord,
        replaces: Option<Epoch>,
        deadline: Instant,
    ) -> Result<(), RegistryError> {
        self.done(RegistryRequest::Put { replaces }, &record.encode()?, deadline)
    }

    fn delete(&self, name: &str, generation: Generation, deadline: Instant) -> Result<(), RegistryError> {
        self.done(RegistryRequest::Delete { name: name.to_owned(), generation }, &[], deadline)
    }

    fn holding(
        &self,
        shard: ShardId,
        held: &[Held],
        deleted: &[(String, Generation)],
        deadline: Instant,
    ) -> Result<(bool, Vec<Fate>), RegistryError> {
        let request = RegistryRequest::Holding { shard, held: held.to_vec(), deleted: deleted.to_vec() };
        match self.ask(request, &[], deadline)?.0 {
            RegistryAnswer::Fates { draining, fates } if fates.len() == held.len() => Ok((draining, fates)),
            _ => Err(self.unexpected("an answer to another question")),
        }
    }

    fn restore(
        &self,
        record: &ModelRecord,
        shards: &[ShardRecord],
        deadline: Instant,
    ) -> Result<(), RegistryError> {
        let request = RegistryRequest::Restore { shards: shards.to_vec() };
        self.done(request, &record.encode()?, deadline)
    }
}
