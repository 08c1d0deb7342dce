//! The models of a shard: finding them, beginning to coordinate one, and deleting one.

use std::sync::Arc;

use libmodelio::vocabulary::ids::{Epoch, Generation};
use libmodelio::wire::{Message, ModelRecord, Refusal, Role, ShardRecord};

use super::coordinator::{Begins, Coordinator, Network};
use super::partition::Partition;
use super::redirect::TurnedAway;
use super::shared::Shared;
use super::unsent::AdminAnswer;

/// The partition of this generation of a model, and its name.
pub(super) fn partition_of(
    shared: &Shared,
    generation: Generation,
) -> Result<(String, Arc<Partition>), Refusal> {
    let models = shared.models.lock();
    let found = models.iter().find(|(_, model)| model.generation == generation);
    let (name, model) = found.ok_or_else(|| Refusal::NoModel(format!("generation {generation}")))?;
    Ok((name.clone(), Arc::clone(&model.partition)))
}

/// The coordinator of a model, if it is here.
pub(super) fn coordinator_of(
    shared: &Shared,
    model: &str,
    generation: Generation,
) -> Result<Arc<Coordinator>, Refusal> {
    let models = shared.models.lock();
    let found = models.get(model).ok_or_else(|| Refusal::NoModel(model.to_owned()))?;
    if found.generation != generation {
        let (model, expected) = (model.to_owned(), found.generation);
        return Err(Refusal::Generation { model, expected, got: generation });
    }
    let coordinator = found.coordinator.clone();
    coordinator.ok_or_else(|| Refusal::other(format!("this shard does not coordinate model {model:?}")))
}

/// The answer to a greeting for a model that is not here.
pub(super) fn not_here(
    shared: &Shared,
    name: &str,
    generation: Generation,
    role: Role,
    got: Epoch,
) -> TurnedAway {
    if let Some(to) = shared.gone.of(name, generation).filter(|to| got < to.epoch) {
        return match role {
            // The peer was the coordinator, and is no longer.
            Role::Coordinator => Refusal::Epoch { expected: to.epoch, got }.into(),
            _ => TurnedAway::Moved(to),
        };
    }
    // The partition is about to come. A peer that knows of it already tries again.
    let incoming = shared.incoming.of(generation);
    match incoming.filter(|incoming| incoming.moved.record.name == name) {
        Some(incoming) => Refusal::Epoch { expected: incoming.epoch_in_force(), got }.into(),
        None => Refusal::NoModel(name.to_owned()).into(),
    }
}

/// Begins to coordinate a model. The blocks of the `known` shards are certain to be there.
pub(super) fn coordinator(
    shared: &Shared,
    record: &ModelRecord,
    partition: &Arc<Partition>,
    job: Begins<'_>,
    known: &[ShardRecord],
) -> Result<Arc<Coordinator>, Refusal> {
    let this = shared.this.clone();
    let resolve = Arc::new(move |wanted| {
        let shared = this.upgrade().ok_or("the shard shuts down")?;
        let shards = shared.directory.ask(|registry, deadline| registry.shards(deadline));
        let shards = shards.map_err(|error| error.to_string())?;
        let found = shards.into_iter().find(|record| record.shard == wanted);
        found.map(|record| record.address).ok_or_else(|| format!("shard {wanted} is not announced"))
    });
    let shard = shared.identity.number();
    let network = Some(Network { net: shared.net.clone(), resolve });
    Coordinator::new(record, partition, shard, network, job, known).map_err(Refusal::other)
}

/// Deletes a model. If it has moved away, the answer says where it has to be deleted, too.
pub(super) fn delete(shared: &Shared, name: &str, generation: Generation) -> AdminAnswer {
    shared.incoming.delete(generation);
    if let Some(creation) = shared.creations.lock().get_mut(&generation) {
        creation.deleted = true;
    }
    let model = {
        let mut models = shared.models.lock();
        match models.get(name) {
            // The model is gone already, or never was here. This shard tells the registry all the same, which may
            // have been restarted.
            None => {
                drop(models);
                shared.standing.lock().was_deleted(name, generation);
                return Ok(match shared.gone.of(name, generation) {
                    Some(to) => (Message::Moved, Some(to.payload.to_vec())),
                    None => (Message::Done, None),
                });
            }
            Some(model) if model.generation != generation => {
                return Err(Refusal::Generation {
                    model: name.to_owned(),
                    expected: model.generation,
                    got: generation,
                });
            }
            Some(_) => models.remove(name),
        }
    };
    if let Some(model) = model {
        if let Some(coordinator) = model.coordinator {
            coordinator.stop(&Refusal::NoModel(name.to_owned()));
        }
        model.partition.is_deleted();
        shared.snapshots.saves.give_up(generation);
        shared.standing.lock().was_deleted(name, generation);
    }
    tracing::info!(model = %name, "deleted");
    Ok((Message::Done, None))
}
