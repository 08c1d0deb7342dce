//! The shard's announcements to the registry. They are repeated: that the shard exists, and which partitions of
//! models it holds, because a restarted registry knows only what shards announce.
//!
//! - A shard that holds partitions keeps its number, whatever the registry says.
//! - If the registry does not know a model, its coordinator puts the record there again. If that does not happen for
//!   some time, a shard that holds a partition of it does, so that the model can be deleted.
//! - A partition is dropped if the registry knows that its model was deleted. It is never dropped because the
//!   registry does not know the model.

use std::sync::{Arc, Weak};
use std::time::Duration;

use libmodelio::registry::RegistryError;
use libmodelio::transport::shm;
use libmodelio::vocabulary::ids::{Generation, ShardId};
use libmodelio::wire::{Fate, HeldPartition, MAX_HELD, ModelRecord, Moved, Refusal, ShardRecord};

use super::coordinator::Coordinator;
use super::shared::{HostedModel, Shared};
use super::standing::life;
use super::{keeping, models, moving};

/// The registry forgets a shard after this silence.
const LEASE: Duration = Duration::from_secs(10);
/// A partition counts as left over when for this long no other shard has reported its model to the registry.
const LEFT_OVER: Duration = Duration::from_secs(10);
/// A partition of this shard, for the registry.
struct Here {
    held: HeldPartition,
    /// Its block map is in force, as far as this shard knows.
    is_partition: bool,
}

/// Announces the shard, and takes the number that the registry gives. A shard that holds partitions keeps its own
/// number.
pub(super) fn announce(shared: &Shared) -> Result<(), RegistryError> {
    let outcome = try_announce(shared);
    shared.standing.lock().not_listed = outcome.as_ref().err().map(RegistryError::to_string);
    outcome
}

fn try_announce(shared: &Shared) -> Result<(), RegistryError> {
    let mut number = ShardId(0);
    // A partition may come while the registry answers. A second round then announces it.
    for _ in 0..2 {
        // Locks are taken one at a time. A thread that reads the status holds the models' lock while it waits for
        // the number's.
        let bound = is_bound(shared);
        let shard = shared.identity.number();
        let (address, draining) = (shared.identity.address.clone(), shared.standing.lock().draining);
        let (host, rdma) = (shm::host(), shared.fast.rdma_address(&shared.identity.address));
        let record = ShardRecord { shard, address, host, draining, rdma };
        number =
            shared.directory.ask(|registry, deadline| registry.announce(&record, bound, LEASE, deadline))?;
        if take_number(shared, number) {
            return Ok(());
        }
    }
    let shard = shared.identity.number();
    Err(RegistryError::Refused(Refusal::other(format_args!(
        "it gives this shard number {number}, which has partitions of models under number {shard}"
    ))))
}

fn is_bound(shared: &Shared) -> bool {
    let models = shared.models.lock();
    !(models.is_empty() && shared.creations.lock().is_empty() && shared.incoming.idle().is_some())
}

/// Takes the number, and returns whether the shard has it now.
fn take_number(shared: &Shared, number: ShardId) -> bool {
    // A thread that makes a partition is in one of these tables before it reads the number.
    let (models, creations, idle) = (shared.models.lock(), shared.creations.lock(), shared.incoming.idle());
    let bound = !(models.is_empty() && creations.is_empty() && idle.is_some());
    shared.identity.take(number, bound)
}

/// Reports to the registry. Partitions are reported even if the registry refuses this shard its number.
fn report_to_registry(shared: &Shared) -> Result<(), RegistryError> {
    let announced = announce(shared);
    match announced {
        Err(RegistryError::Peer(_)) => announced,
        _ => reconcile(shared).and(announced),
    }
}

/// Reports the partitions of this shard, restores records that the registry has lost, and drops partitions that
/// it knows to be deleted.
fn reconcile(shared: &Shared) -> Result<(), RegistryError> {
    let shard = shared.identity.number();
    let here = here(shared);
    let deleted = shared.standing.lock().deleted();
    let mut first = true;
    let mut chunks = here.chunks(MAX_HELD);
    // One report is sent even if there is no partition.
    while let Some(chunk) = chunks.next().or_else(|| first.then_some(&[][..])) {
        let deleted = if std::mem::take(&mut first) { &deleted[..] } else { &[] };
        let held: Vec<HeldPartition> = chunk.iter().map(|here| here.held.clone()).collect();
        let (draining, fates) =
            shared.directory.ask(|registry, deadline| registry.holding(shard, &held, deleted, deadline))?;
        let mut standing = shared.standing.lock();
        if standing.not_listed.is_none() {
            standing.draining = draining;
        }
        drop(standing);
        for (here, fate) in chunk.iter().zip(fates) {
            accept_fate(shared, here, fate)?;
        }
    }
    let is_here = |generation| here.iter().any(|here| here.held.generation == generation);
    shared.standing.lock().retain(is_here);
    keeping::keep_all(shared)
}

/// The partitions of this shard, and those that it is about to have.
fn here(shared: &Shared) -> Vec<Here> {
    let of_model = |model: &HostedModel| Here { held: life(&model.record), is_partition: true };
    let mut here: Vec<Here> = shared.models.lock().values().map(of_model).collect();
    here.extend(
        shared
            .incoming
            .all()
            .iter()
            .map(|incoming| life(&incoming.moved.record))
            .map(|held| Here { held, is_partition: false }),
    );
    here
}

/// The record of a model for the registry, and its coordinator. None while the model moves and was handed over:
/// the coordinator that moves it puts the record then.
fn to_restore(shared: &Shared, of: &HeldPartition) -> Option<(ModelRecord, Option<Arc<Coordinator>>)> {
    let models = shared.models.lock();
    let found = models.get(&of.model).filter(|model| life(&model.record) == *of)?;
    let coordinator = found.coordinator.clone();
    if coordinator.as_ref().is_some_and(|coordinator| coordinator.is_frozen()) {
        return None;
    }
    // Once there is a coordinator, all blocks have been loaded.
    let ready = found.record.ready || coordinator.is_some();
    Some((ModelRecord { ready, ..found.record.clone() }, coordinator))
}

fn accept_fate(shared: &Shared, here: &Here, fate: Fate) -> Result<(), RegistryError> {
    let HeldPartition { model, generation, epoch } = &here.held;
    let outcome = match fate {
        Fate::Deleted => {
            tracing::info!(%model, "the registry knows that it was deleted: its partition is dropped");
            drop_partition(shared, model, *generation);
            return Ok(());
        }
        Fate::Known { epoch: known } if known > *epoch || known == *epoch && !here.is_partition => {
            left_behind(shared, here)
        }
        Fate::Known { epoch: known } if known >= *epoch => Ok(true),
        Fate::Taken { .. } => Err(RegistryError::Exists(model.clone())),
        Fate::Known { .. } | Fate::Unknown if here.is_partition => restore(shared, &here.held),
        Fate::Known { .. } | Fate::Unknown => Ok(false),
    };
    let mut standing = shared.standing.lock();
    match outcome {
        // A newer block map is in force. The coordinator that moves the model reports it.
        Ok(true) | Err(RegistryError::Epoch { .. }) => {
            standing.is_known(*generation);
        }
        Ok(false) => {}
        Err(RegistryError::Deleted(_)) => {
            drop(standing);
            drop_partition(shared, model, *generation);
        }
        Err(error @ RegistryError::Peer(_)) => return Err(error),
        Err(error) => {
            let why = match &error {
                RegistryError::Exists(_) => {
                    "the name is another model's since the registry was restarted: those who take part in this \
                     one go on, and nobody else finds it"
                        .to_owned()
                }
                error => format!("it does not take the model back: {error}"),
            };
            if standing.is_unknown(*generation, &why) {
                tracing::warn!(%model, %generation, "{why}");
            }
        }
    }
    Ok(())
}

/// The registry does not know a model, or has an older block map. Restores the record, and returns whether the
/// registry knows it now.
fn restore(shared: &Shared, held: &HeldPartition) -> Result<bool, RegistryError> {
    let Some((record, coordinator)) = to_restore(shared, held) else { return Ok(false) };
    // The coordinator restores it first.
    if coordinator.is_none() && shared.standing.lock().unknown_for(held.generation) < LEFT_OVER {
        return Ok(false);
    }
    let shard = shared.identity.number();
    let mut shards = coordinator.as_ref().map(|coordinator| coordinator.addresses()).unwrap_or_default();
    shards.push((shard, shared.identity.address.clone()));
    let known = |(shard, address)| ShardRecord {
        shard,
        address,
        host: String::new(),
        draining: false,
        rdma: String::new(),
    };
    let shards: Vec<ShardRecord> = shards.into_iter().map(known).collect();
    shared.directory.ask(|registry, deadline| registry.restore(&record, &shards, deadline))?;
    tracing::info!(model = %record.name, "the registry was restarted: it knows the model again");
    Ok(true)
}

/// Follows a block map that is in force and that no coordinator has announced to this shard. Returns whether that
/// is done.
fn left_behind(shared: &Shared, here: &Here) -> Result<bool, RegistryError> {
    // The owner of a partition of the old map waits, because the coordinator may still announce the new map. A
    // partition of another map need not wait: it comes into force or is dropped.
    if here.is_partition && shared.standing.lock().unknown_for(here.held.generation) < LEFT_OVER {
        return Ok(false);
    }
    match catch_up(shared, &here.held) {
        Err(error @ RegistryError::Peer(_)) => Err(error),
        Err(error) => {
            tracing::warn!(model = %here.held.model, %error, "the model has moved, and this shard cannot follow");
            Ok(false)
        }
        Ok(()) => Ok(true),
    }
}

/// Follows the registry's record of a model. A partition of that block map comes into force, and one of another map
/// is dropped. A shard that owns no block any more gives its partition up.
fn catch_up(shared: &Shared, held: &HeldPartition) -> Result<(), RegistryError> {
    let record = shared.directory.ask(|registry, deadline| registry.model(&held.model, deadline))?;
    if record.generation != held.generation {
        return Ok(());
    }
    let owns = |shard: ShardId| record.owners.iter().any(|(owner, _)| *owner == shard);
    let shards = match shared.incoming.of(held.generation) {
        Some(incoming) if incoming.moved.record == record => incoming.moved.shards.clone(),
        incoming => {
            if let Some(other) = incoming.filter(|other| other.moved.record.epoch <= record.epoch) {
                tracing::info!(model = %held.model, "another block map is in force: blocks are dropped");
                shared.incoming.forget(&other);
            }
            let listed = shared.directory.ask(|registry, deadline| registry.shards(deadline))?;
            let shards: Vec<ShardRecord> = listed.into_iter().filter(|shard| owns(shard.shard)).collect();
            let moves = to_restore(shared, held).is_none();
            let is_listed = |owner: &ShardId| shards.iter().any(|shard| shard.shard == *owner);
            // If an owner is not listed, blocks may be lost. The partition then stays until the model is deleted.
            if moves
                || owns(shared.identity.number())
                || !record.owners.iter().all(|(owner, _)| is_listed(owner))
            {
                return Ok(());
            }
            shards
        }
    };
    moving::switch(shared, &Moved { record, shards }.encode()?).map_err(RegistryError::from)
}

fn drop_partition(shared: &Shared, name: &str, generation: Generation) {
    if let Err(refusal) = models::delete(shared, name, generation) {
        tracing::warn!(model = %name, %refusal, "its partition is not dropped");
    }
}

/// Announces the shard and reports its partitions, again and again, within the lease.
pub(super) fn run(shared: &Weak<Shared>) {
    let mut trouble = None;
    loop {
        let Some(shared) = shared.upgrade() else { return };
        shared.ending.pause(LEASE / 4);
        if shared.ending.has_begun() {
            return;
        }
        match report_to_registry(&shared) {
            Ok(()) if trouble.take().is_some() => tracing::info!("announced to the registry again"),
            Ok(()) => {}
            Err(error) => {
                let error = error.to_string();
                if trouble.as_ref() != Some(&error) {
                    tracing::warn!(%error, "not announced to the registry; trying again");
                    trouble = Some(error);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
