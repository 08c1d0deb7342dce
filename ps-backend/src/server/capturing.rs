//! Taking a snapshot of a running model: the coordinator has every shard copy the same version, which is also its
//! own.
//!
//! All shards pin their newest version, so that none of them begins another plan. Plans under way may still be
//! concluded, so a shard, or the coordinator, may be one version ahead of another. None can get further, so the
//! coordinator pins a shard that is behind again, until all are at one version. Then they copy, and the job goes on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{Epoch, Generation, ShardId, Version};
use libmodelio::wire::{DataKind, Message, Refusal};
use serde_json::json;

use super::captures::{Name, PINNED};
use super::coordinator::Coordinator;
use super::models;
use super::peer_shard::{AnswersHere, PeerShard, ask_all};
use super::saves::Subject;
use super::shared::Shared;
use super::unsent::AdminAnswer;
use crate::core::JobRecord;
use crate::snapshot;

/// The longest wait for the memory of a copy.
const PATIENT: Duration = Duration::from_secs(300);
/// The longest wait for any other answer.
const PROMPT: Duration = Duration::from_secs(10);
/// The pause before a shard that is behind is pinned again.
const PIN_PAUSE: Duration = Duration::from_millis(2);
/// How often pins and copies are checked for their end.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A snapshot under way.
struct Capturing<'a> {
    shared: &'a Arc<Shared>,
    coordinator: &'a Coordinator,
    peers: BTreeMap<ShardId, Arc<PeerShard>>,
    generation: Generation,
    epoch: Epoch,
    snapshot: u64,
}

/// Handles a request about snapshots. This may take a while.
pub(super) fn of_snapshot(
    shared: &Arc<Shared>,
    message: Message,
    payload: &[u8],
    here: AnswersHere,
) -> AdminAnswer {
    let done = |()| (Message::Done, None);
    match message {
        Message::Capture { model, generation, epoch } => capture(shared, (&model, generation), epoch, here),
        Message::Pin { generation, epoch, snapshot, slots, holds } => {
            let version = pin(shared, (generation, snapshot), epoch, slots, holds)?;
            Ok((Message::Pinned { version }, None))
        }
        Message::Copy { generation, snapshot, version, slots } => shared
            .snapshots
            .captures
            .copy((generation, snapshot), version, slots, &*shared.executor)
            .map(done),
        Message::FetchCopy { generation, snapshot, block, what } => {
            let bytes = shared.snapshots.captures.fetch((generation, snapshot), (block, what))?;
            Ok((Message::Fetched, Some(bytes)))
        }
        Message::Release { generation, snapshot } => {
            shared.snapshots.saves.cancel((generation, snapshot, Subject::Copy));
            shared.snapshots.captures.release((generation, snapshot));
            Ok((Message::Done, None))
        }
        Message::BeginAt { generation } => begin_at(shared, generation, payload).map(done),
        other => Err(Refusal::Role { what: other.name().to_owned() }),
    }
}

fn pin(shared: &Arc<Shared>, name: Name, epoch: Epoch, slots: u8, holds: bool) -> Result<Version, Refusal> {
    let (_, partition) = models::partition_of(shared, name.0)?;
    if partition.epoch != epoch {
        return Err(Refusal::Epoch { expected: partition.epoch, got: epoch });
    }
    let starts_expiry = || {
        let weak = Arc::downgrade(shared);
        let expires = move || {
            loop {
                std::thread::sleep(CHECK_INTERVAL);
                let Some(shared) = weak.upgrade().filter(|shared| !shared.ending.has_begun()) else {
                    return;
                };
                if !shared.snapshots.captures.expire(Instant::now()) {
                    return;
                }
            }
        };
        let spawned = std::thread::Builder::new().name("captures".into()).spawn(expires);
        spawned.map(drop).map_err(|error| Refusal::other(format!("no thread to end it: {error}")))
    };
    if holds {
        return shared.snapshots.captures.pin(name, partition.store());
    }
    shared.snapshots.captures.reserve(name, partition.store(), slots, starts_expiry)?;
    // Who saves again soon waits here, where the coordinator is patient.
    while shared.snapshots.captures.rests(name.0, Instant::now()) && !shared.ending.has_begun() {
        std::thread::sleep(CHECK_INTERVAL);
    }
    Ok(partition.progress().0)
}

/// A created model begins at a snapshot.
fn begin_at(shared: &Shared, generation: Generation, record: &[u8]) -> Result<(), Refusal> {
    let record: JobRecord = serde_json::from_slice(record)
        .map_err(|error| Refusal::other(format!("the record of the job cannot be read: {error}")))?;
    let (name, partition) = models::partition_of(shared, generation)?;
    partition.store().begin_at(record.version, record.optimizer).map_err(Refusal::other)?;
    partition.begin_at(record.version);
    let mut models = shared.models.lock();
    let model = models.get_mut(&name).filter(|model| model.generation == generation);
    model.ok_or(Refusal::NoModel(name))?.begins = Some(record);
    Ok(())
}

/// Takes a snapshot of a model that is coordinated here, for whoever fetches it. This takes a while.
fn capture(
    shared: &Arc<Shared>,
    (model, generation): (&str, Generation),
    epoch: Epoch,
    here: AnswersHere,
) -> AdminAnswer {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(Refusal::other)?;
    let snapshot = u64::from_le_bytes(random);
    let taken = take(shared, (model, generation), epoch, (snapshot, here))?;
    let said = json!({ "record": taken.record, "settings": taken.settings });
    let payload = serde_json::to_vec(&said).map_err(Refusal::other)?;
    Ok((Message::Captured { snapshot }, Some(payload)))
}

/// A snapshot of which every shard has a copy.
pub(super) struct Taken {
    /// The shards.
    pub(super) peers: BTreeMap<ShardId, Arc<PeerShard>>,
    /// The record of the job.
    pub(super) record: JobRecord,
    /// All settings.
    pub(super) settings: BTreeMap<String, String>,
}

/// Takes a snapshot of this name of a model that is coordinated here. This takes a while.
///
/// # Errors
/// Why not. No copy is left then.
pub(super) fn take(
    shared: &Arc<Shared>,
    (model, generation): (&str, Generation),
    epoch: Epoch,
    (snapshot, here): (u64, AnswersHere),
) -> Result<Taken, Refusal> {
    let coordinator = models::coordinator_of(shared, model, generation)?;
    // A move of the model pins it by itself.
    let alone = coordinator.moves.alone.try_lock_for(PROMPT).ok_or_else(|| {
        Refusal::other(format!("model {model:?} is being moved: run the command again when that is over"))
    })?;
    let (_, expected) = coordinator.life();
    if expected != epoch {
        return Err(Refusal::Epoch { expected, got: epoch });
    }
    let records = shared.directory.ask(|registry, deadline| registry.shards(deadline));
    let records =
        records.map_err(|error| Refusal::other(format!("the registry cannot be asked: {error}")))?;
    let owners = owners_of(shared, model)?;
    let peer = |owner: &ShardId| {
        let record = records.iter().find(|record| record.shard == *owner);
        let record = record.ok_or_else(|| Refusal::other(format!("shard {owner} is not announced")))?;
        Ok((*owner, Arc::new(PeerShard::new(record, here))))
    };
    let peers = owners.iter().map(peer).collect::<Result<BTreeMap<_, _>, Refusal>>()?;
    let capturing = Capturing { shared, coordinator: &coordinator, peers, generation, epoch, snapshot };
    let taken = capturing.take();
    drop(alone);
    match taken {
        Ok((record, settings)) => Ok(Taken { peers: capturing.peers, record, settings }),
        Err(refusal) => {
            // Shards out of reach give the snapshot up by themselves.
            let _ = capturing.all(PROMPT, &Message::Release { generation, snapshot });
            Err(refusal)
        }
    }
}

/// The shards that own blocks of a model.
fn owners_of(shared: &Shared, model: &str) -> Result<Vec<ShardId>, Refusal> {
    let models = shared.models.lock();
    let found = models.get(model).ok_or_else(|| Refusal::NoModel(model.to_owned()))?;
    let map = found.record.block_map().map_err(Refusal::other)?;
    Ok(map.shares().into_keys().collect())
}

impl Capturing<'_> {
    fn take(&self) -> Result<(JobRecord, BTreeMap<String, String>), Refusal> {
        let slots = slots(&self.coordinator.record().0);
        let (generation, epoch, snapshot) = (self.generation, self.epoch, self.snapshot);
        let pin = |holds| Message::Pin { generation, epoch, snapshot, slots, holds };
        // Memory takes a while, and the job goes on meanwhile.
        self.all(PATIENT, &pin(false))?;
        let pin = pin(true);
        let mut versions = self.all(PINNED, &pin)?.iter().map(pinned).collect::<Result<Vec<_>, _>>()?;
        let until = Instant::now() + PINNED / 2;
        let (record, controls) = loop {
            let (record, controls) = self.coordinator.record();
            let newest = versions.iter().copied().max().unwrap_or_default().max(record.version);
            if record.version == newest && versions.iter().all(|&version| version == newest) {
                break (record, controls);
            }
            if Instant::now() >= until {
                let why = "its shards do not come to one version: run the command again";
                return Err(Refusal::other(why));
            }
            std::thread::sleep(PIN_PAUSE);
            for (peer, version) in self.peers.values().zip(&mut versions).filter(|(_, v)| **v < newest) {
                let [answer] = &self.ask([peer].into_iter(), PROMPT, &pin)?[..] else { continue };
                *version = pinned(answer)?;
            }
        };
        let (version, slots) = (record.version, slots_of(&record));
        self.all(PATIENT, &Message::Copy { generation, snapshot, version, slots })?;
        tracing::info!(model = %self.coordinator.model, %version, "a snapshot was taken");
        Ok((record, snapshot::settings(&controls)))
    }

    fn ask<'a>(
        &self,
        peers: impl Iterator<Item = &'a Arc<PeerShard>> + Clone,
        within: Duration,
        message: &Message,
    ) -> Result<Vec<Message>, Refusal> {
        ask_each(self.shared, peers, within, message)
    }

    fn all(&self, within: Duration, message: &Message) -> Result<Vec<Message>, Refusal> {
        self.ask(self.peers.values(), within, message)
    }
}

/// Sends some shards a request at once. All answers are awaited, and are in the order of the shards.
///
/// # Errors
/// That of the first shard which refuses it, or cannot be asked.
pub(super) fn ask_each<'a>(
    shared: &Arc<Shared>,
    peers: impl Iterator<Item = &'a Arc<PeerShard>> + Clone,
    within: Duration,
    message: &Message,
) -> Result<Vec<Message>, Refusal> {
    let asked = ask_all(shared, peers.clone().cloned(), message, &Arc::from([]), within);
    let mut answers: BTreeMap<_, _> = asked.into_iter().collect();
    let answer = |peer: &Arc<PeerShard>| {
        let answer = answers.remove(&peer.shard()).unwrap_or_else(|| Err("a thread panicked".into()));
        let named = |why| Refusal::other(format!("shard {} at {}: {why}", peer.shard(), peer.address()));
        answer.map_err(named)
    };
    peers.map(answer).collect()
}

/// The number of kinds of optimizer state that may be needed.
fn slots(record: &JobRecord) -> u8 {
    // The optimizer may take its first step before the shards are pinned.
    record.optimizer.state_slots() as u8
}

/// The number of kinds of optimizer state in the record.
fn slots_of(record: &JobRecord) -> u8 {
    snapshot::kinds(record).filter(|what| matches!(what, DataKind::Slot(_))).count() as u8
}

fn pinned(answer: &Message) -> Result<Version, Refusal> {
    match answer {
        Message::Pinned { version } => Ok(*version),
        other => Err(Refusal::other(format!("a shard answers with {}", other.name()))),
    }
}
