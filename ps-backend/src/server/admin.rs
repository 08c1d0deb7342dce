//! Administration of a shard: creating, loading and deleting models, and its status.

use libmodelio::vocabulary::ids::{BlockId, Generation, ShardId, Version};
use libmodelio::vocabulary::readers::ReaderState;
use libmodelio::wire::{Message, ModelRecord, Refusal};
use serde_json::{Value, json};

use super::coordinator::Begins;
use super::models;
use super::partition::{MakeError, Partition};
use super::shared::{Creation, HostedModel, Shared};
use super::unsent::AdminAnswer;
use crate::memory;
use crate::snapshot::Piece;

/// An answer about changes goes on until it has so many bytes.
const CHANGES_AT_ONCE: usize = 1 << 20;
/// The memory that such an answer counts for. What is known of its last block may come on top.
pub(super) const CHANGES_BYTES: usize = 2 * CHANGES_AT_ONCE;

/// Makes this shard's partition of a model. This takes a while.
pub(super) fn create(shared: &Shared, payload: &[u8]) -> AdminAnswer {
    let record = ModelRecord::decode(payload).map_err(Refusal::other)?;
    let (name, generation) = (record.name.clone(), record.generation);
    {
        let models = shared.models.lock();
        match models.get(&name) {
            // The request was repeated.
            Some(model) if model.generation == generation => return Ok((Message::Done, None)),
            Some(_) => return Err(Refusal::Exists(name)),
            None => {}
        }
        let mut creations = shared.creations.lock();
        let busy =
            |(life, of): (&Generation, &Creation)| *life == generation || (of.name == name && !of.deleted);
        if creations.iter().any(busy) {
            return Err(Refusal::other(format!("model {name:?} is being created")));
        }
        creations.insert(generation, Creation { name: name.clone(), deleted: false });
    }
    let shard = shared.identity.number();
    let partition = has_room(&record, shard)
        .and_then(|()| Partition::new(&record, shard, &shared.executor, shared.of_partitions()));
    let mut models = shared.models.lock();
    let deleted = shared.creations.lock().remove(&generation).is_none_or(|creation| creation.deleted);
    let partition = partition.map_err(Refusal::other)?;
    if deleted {
        return Err(Refusal::Deleted(name));
    }
    let layout = partition.layout();
    tracing::info!(model = %name, blocks = layout.blocks(), bytes = layout.size(), "created");
    shared.gone.is_back(&name);
    let (coordinator, redirect, begins) = (None, None, None);
    models.insert(
        name,
        HostedModel {
            generation,
            record,
            partition,
            coordinator,
            redirect,
            copied: None,
            saved: None,
            begins,
        },
    );
    Ok((Message::Done, None))
}

/// Loads a piece of the model's first version.
pub(super) fn load(
    shared: &Shared,
    generation: Generation,
    piece: Piece,
    bytes: &[u8],
) -> Result<(), Refusal> {
    models::partition_of(shared, generation)?.1.load(piece, bytes)
}

/// All blocks were sent. The partition can be used now, and the job begins if this shard coordinates it.
pub(super) fn loaded(shared: &Shared, generation: Generation) -> AdminAnswer {
    let (name, partition) = models::partition_of(shared, generation)?;
    partition.store().finish_loading().map_err(Refusal::other)?;
    let mut models = shared.models.lock();
    let Some(model) = models.get_mut(&name).filter(|model| model.generation == generation) else {
        return Err(Refusal::NoModel(name));
    };
    let shard = shared.identity.number();
    if model.coordinator.is_none() && model.record.coordinator == shard {
        let job = model.begins.take().map_or(Begins::Anew, Begins::AtRecord);
        model.coordinator = Some(models::coordinator(shared, &model.record, &model.partition, job, &[])?);
    }
    Ok((Message::Done, None))
}

/// What has changed in the shard's blocks from one version to another.
pub(super) fn changed_since(
    shared: &Shared,
    generation: Generation,
    versions: (Version, Version),
    first: BlockId,
) -> AdminAnswer {
    let partition = models::partition_of(shared, generation)?.1;
    let (encoded, next) = partition.changed_since(versions, first, CHANGES_AT_ONCE)?;
    Ok((Message::ChangedBlocks { next }, Some(encoded)))
}

/// The status: what this shard holds and does.
pub(super) fn status(shared: &Shared) -> Value {
    let models = shared.models.lock();
    let models: Vec<Value> = models
        .iter()
        .map(|(name, model)| {
            let snapshots = shared.snapshots.schedules.status(model.generation);
            let mut status = status_of(name, model, &snapshots.unwrap_or_default());
            status["not_in_registry"] = json!(shared.standing.lock().why_unknown(model.generation));
            status
        })
        .collect();
    json!({
        "shard": shared.identity.number().0,
        "address": shared.identity.address,
        "not_listed": shared.why_not_listed(),
        "io": shared.net.backend().to_string(),
        "tcp": {
            // The listener does not count.
            "connections": shared.net.connections().saturating_sub(1),
        },
        "shared_memory": shared.fast.memory_status(),
        "rdma": shared.fast.rdma_status(&shared.identity.address),
        "checksum": shared.options.checksum.name(),
        "device": shared.executor.device().map_or("cpu", |device| device.name()),
        "threads": shared.options.threads,
        "memory_available": memory::for_models(),
        "registry": shared.directory.name(),
        "registry_seconds": shared.directory.table().map(|table| table.age().as_secs_f64()),
        "registry_announcements": shared.directory.table().map(|table| table.announcements()),
        "models": models,
        "incoming": shared.incoming.status(),
        "left": shared.gone.names(),
    })
}

/// Refuses a model that can never fit, before tables of its blocks are made.
fn has_room(record: &ModelRecord, shard: ShardId) -> Result<(), MakeError> {
    let mine = record.owners.iter().filter(|(owner, _)| *owner == shard);
    let blocks: u64 = mine.map(|&(_, run)| u64::from(run)).sum();
    // All blocks but the last have this size, and there are at least two versions.
    let needed = blocks.saturating_sub(1).saturating_mul(record.block_size.into()).saturating_mul(2);
    match memory::for_models() {
        Some(available) if available < needed => Err(MakeError::Room { needed, available }),
        _ => Ok(()),
    }
}

fn status_of(name: &str, model: &HostedModel, snapshots: &Value) -> Value {
    let (version, plan) = model.partition.progress();
    let (memory, taken) = (model.partition.store().bytes(), model.partition.store().taken());
    let coordinator = model.coordinator.as_ref().map(|coordinator| {
        let status = coordinator.status();
        let setting = |name| status.controls.get(name).unwrap_or_default();
        let learners: Vec<Value> = status
            .members
            .iter()
            .map(|member| {
                let sight = status.sights.get(&member.learner).cloned().unwrap_or_default();
                json!({
                    "id": member.learner.0,
                    "name": member.name,
                    "host": sight.host,
                    "step": member.step.0,
                    "steps_per_second": sight.steps_per_second.map(|rate| (rate * 1e3).round() / 1e3),
                    "phase": member.phase,
                    "silent_seconds": member.silent.as_secs_f64(),
                })
            })
            .collect();
        let addresses = coordinator.addresses();
        let unreachable = status.unreachable.iter().map(|(shard, gone, why)| {
            let address = addresses.iter().find(|(of, _)| of == shard).map(|(_, address)| address);
            json!({ "shard": shard.0, "address": address, "why": why, "seconds": gone.as_secs_f64() })
        });
        let unreachable: Vec<Value> = unreachable.collect();
        json!({
            "version": status.version.0,
            "state": status.state.name(),
            "why": status.failed,
            "reducer": setting("reducer"),
            "consistency": setting("consistency"),
            "learners": learners,
            "clients": status.clients.0,
            "contributions": status.contributions,
            "readers": status.readers.iter().map(ReaderState::to_json).collect::<Vec<_>>(),
            "held_by": status.held_by,
            "snapshots": snapshots,
            "relays": status.relays,
            "unreachable": unreachable,
            "late": status.late.map(|(late, waited)| json!({
                "learners": late.learners,
                "more": late.more,
                "seconds": waited.as_secs_f64(),
            })),
            "moving": status.moving.map(|moving| json!({
                "off": moving.off.0,
                "stage": moving.stage,
                "blocks": moving.blocks,
                "of": moving.of,
            })),
        })
    });
    json!({
        "name": name,
        "generation": model.generation.0,
        "epoch": model.partition.epoch.0,
        "version": version.0,
        "loaded": model.partition.store().is_loaded(),
        "blocks": model.partition.layout().blocks(),
        "bytes": model.partition.layout().size(),
        "memory_bytes": memory.total(),
        "device_bytes": model.partition.store().device_bytes().map(|(values, slots)| values + slots),
        "memory": { "versions": taken.versions, "state": taken.state, "sums": taken.sums },
        "payload": model.partition.store().tally().read(),
        "reduce_seconds": model.partition.reduce().read(),
        "plan": plan.map(|(plan, left)| json!({ "id": plan.0, "payloads_to_come": left })),
        "coordinator": coordinator,
    })
}
