//! The model moves: a shard says so, or the registry, where shards that were to say it are gone. From then on another
//! block map is in force, and all connections are opened anew.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connections::Peer;
use super::whereabouts::{Place, Way, Whereabouts};
use super::{Inner, Shared};
use crate::client::core::{Action, ClientCore, Now};
use crate::net::Close;
use crate::registry::{Registry, RegistryError};
use crate::wire::{ModelRecord, Moved, ShardRecord};

/// A shard that cannot be reached for so long may have been stopped because its blocks are elsewhere: the registry is
/// asked, and again after pauses that grow from this.
const GONE: Duration = Duration::from_secs(2);
/// Longest pause between two questions.
const LONGEST: Duration = Duration::from_secs(60);
/// Longest wait for an answer of the registry's.
const ANSWER: Duration = Duration::from_secs(5);

/// Why a connection ends that was opened under an older map.
pub(super) fn overtaken() -> Close {
    Close::Asked("the model has moved".into())
}

/// What is asked of the registry.
#[derive(Default)]
pub(super) struct Inquiry {
    under_way: bool,
    /// Questions since all shards were last there.
    tries: u32,
    /// The next one.
    next: Option<Instant>,
}

impl Inner {
    /// Whether what came by this way concerns those that are spoken to now.
    pub(super) fn is_in_force(&self, way: &Way) -> bool {
        Arc::ptr_eq(&self.map, &way.map)
    }
}

impl Shared {
    /// As [`Shared::with_core`], for what comes over a connection.
    ///
    /// # Errors
    /// If it was opened under an older map: nothing is changed, and the connection is to end.
    pub(in crate::client) fn with_core_by(
        &self,
        way: &Way,
        change: impl FnOnce(&mut ClientCore, Now, &mut Vec<Action>),
    ) -> Result<(), Close> {
        let mut inner = self.inner.lock();
        if !inner.is_in_force(way) {
            return Err(overtaken());
        }
        let mut actions = Vec::new();
        change(&mut inner.core, self.now(), &mut actions);
        self.act(inner, actions);
        Ok(())
    }

    /// # Errors
    /// If a connection was opened under a map that is no longer in force.
    pub(in crate::client) fn check_in_force(&self, way: &Way) -> Result<(), Close> {
        if self.inner.lock().is_in_force(way) { Ok(()) } else { Err(overtaken()) }
    }

    /// A shard says where the model is now.
    ///
    /// # Errors
    /// The connection is to end: it belongs to an older map, or what was said makes no sense.
    pub(in crate::client) fn hear_moved(&self, way: &Way, bytes: &[u8]) -> Result<(), Close> {
        let bad = |why: &dyn std::fmt::Display| {
            Close::Asked(
                format!("what the shard says of where the model is now makes no sense: {why}").into(),
            )
        };
        let moved = Moved::decode(bytes).map_err(|error| bad(&error))?;
        self.moved(&moved.record, &moved.shards).map_err(|why| bad(&why))?;
        self.check_in_force(way)
    }

    /// The model is where `record` says, if that is of a newer map than the one in force. True if it was.
    ///
    /// # Errors
    /// For another model, or a record that leads nowhere: nothing has changed.
    fn moved(&self, record: &ModelRecord, shards: &[ShardRecord]) -> Result<bool, String> {
        self.check_same(record)?;
        if record.epoch <= self.inner.lock().map.epoch {
            return Ok(false);
        }
        let map = record.block_map().map_err(|error| error.to_string())?;
        let (transport, connections) = (self.options.transport, self.options.connections);
        let new = Arc::new(Whereabouts::new(&map, record.lead, shards, transport, connections)?);
        let mut inner = self.inner.lock();
        let mut actions = Vec::new();
        // Another connection may have said the same meanwhile.
        if self.is_stopping() || !inner.core.moved(&map, self.now(), &mut actions) {
            return Ok(false);
        }
        let peers = new.parts.iter().map(|place| Peer::new(place.barred.is_some())).collect();
        let before = std::mem::replace(&mut inner.map, Arc::clone(&new));
        let parts = std::mem::replace(&mut inner.parts, peers);
        let lead = std::mem::replace(&mut inner.lead, Peer::new(false));
        inner.inquiry = Inquiry { under_way: inner.inquiry.under_way, ..Inquiry::default() };
        parts.iter().chain([&lead]).flat_map(|peer| &peer.links).for_each(|link| link.close(overtaken()));
        self.act(inner, actions);
        // They end by themselves, and nobody waits for them.
        let _ = before.threads.shut_down(Duration::ZERO);
        let at: Vec<String> = new
            .parts
            .iter()
            .map(|place| format!("shard {} at {}", place.record.shard, place.record.address))
            .collect();
        tracing::info!(model = %self.model, epoch = %new.epoch, "the model has moved: {}", at.join(", "));
        for why in new.parts.iter().filter_map(|place| place.barred.as_ref()) {
            tracing::error!(
                model = %self.model,
                "{why}: requests that need it end at their deadlines; connect anew without asking for shared memory alone"
            );
        }
        self.changed.notify_all();
        Ok(true)
    }

    fn check_same(&self, record: &ModelRecord) -> Result<(), String> {
        let known = &self.record;
        if (&record.name, record.generation) != (&known.name, known.generation) {
            return Err(format!(
                "it is of model {} of generation {}, not {} of generation {}",
                record.name, record.generation, known.name, known.generation
            ));
        }
        if (&record.tensors, record.block_size) != (&known.tensors, known.block_size) {
            return Err(format!("it has other tensors, or other blocks, than model {} has", known.name));
        }
        Ok(())
    }

    // -- the registry

    /// Asks the registry where the model is if shards have been out of reach for long, on a thread of its own.
    pub(super) fn inquire(&self) {
        let Some(registry) = self.options.registry.clone() else { return };
        {
            let mut inner = self.inner.lock();
            let gone = inner.parts.iter().chain([&inner.lead]).filter_map(|peer| peer.gone_since).min();
            let Some(since) = gone else {
                (inner.inquiry.tries, inner.inquiry.next) = (0, None);
                return;
            };
            let at = inner.inquiry.next.unwrap_or(since + GONE);
            if inner.inquiry.under_way || at > Instant::now() {
                return;
            }
            inner.inquiry.under_way = true;
        }
        let (this, name) = (self.this.clone(), self.model.clone());
        let ask = move || {
            let found = look_up(&*registry, &name);
            if let Some(shared) = this.upgrade() {
                shared.looked_up(found);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("client-registry".into()).spawn(ask) {
            tracing::warn!(%error, "no thread to ask the registry");
            self.asked();
        }
    }

    fn looked_up(&self, found: Result<(ModelRecord, Vec<ShardRecord>), RegistryError>) {
        let moved = found.map_err(|error| error.to_string()).and_then(|(record, mut shards)| {
            // A shard whose lease is over is not listed, but still where it was, if anywhere.
            let known = Arc::clone(&self.inner.lock().map);
            let is_listed = |place: &Place| shards.iter().any(|shard| shard.shard == place.record.shard);
            let others: Vec<ShardRecord> = known
                .parts
                .iter()
                .filter(|place| !is_listed(place))
                .map(|place| place.record.clone())
                .collect();
            shards.extend(others);
            self.moved(&record, &shards)
        });
        if let Err(why) = moved {
            tracing::debug!(model = %self.model, "the registry does not know where the model is: {why}");
        }
        self.asked();
    }

    /// A question is answered, or will not be: when the next one is asked, if shards are still out of reach.
    fn asked(&self) {
        let inquiry = &mut self.inner.lock().inquiry;
        inquiry.under_way = false;
        inquiry.tries += 1;
        inquiry.next = Some(Instant::now() + (GONE * 2u32.pow(inquiry.tries.min(5))).min(LONGEST));
    }
}

fn look_up(registry: &dyn Registry, name: &str) -> Result<(ModelRecord, Vec<ShardRecord>), RegistryError> {
    let deadline = Instant::now() + ANSWER;
    Ok((registry.model(name, deadline)?, registry.shards(deadline)?))
}
