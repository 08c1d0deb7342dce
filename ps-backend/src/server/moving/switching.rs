//! A new block map comes into force: its partition takes the place of the one before, or the model is gone from here.

use libmodelio::wire::{Moved, Refusal};

use crate::server::coordinator::Begins;
use crate::server::models;
use crate::server::redirect::Redirect;
use crate::server::shared::{HostedModel, Shared};

/// Another block map is in force. Nothing happens the second time.
pub(in crate::server) fn switch(shared: &Shared, payload: &[u8]) -> Result<(), Refusal> {
    let moved = Moved::decode(payload).map_err(Refusal::other)?;
    let Moved { record, shards } = moved;
    let (name, generation, epoch) = (record.name.clone(), record.generation, record.epoch);
    let to = Redirect { generation, epoch, payload: payload.into() };
    let me = shared.identity.number();
    let owns = record.owners.iter().any(|(owner, _)| *owner == me);
    if shards.iter().any(|shard| shard.shard == me && shard.draining) {
        shared.standing.lock().draining = true;
    }
    let has_it = |model: &HostedModel| model.generation == generation && model.partition.epoch < epoch;
    if !owns && shared.models.lock().get(&name).is_some_and(has_it) {
        // Blocks are given up: whoever says so, the registry has the last word.
        let there = shared.directory.ask(|registry, deadline| registry.model(&name, deadline));
        let there =
            there.map_err(|error| Refusal::other(format!("the registry cannot be asked: {error}")))?;
        if there.generation != generation || there.epoch < epoch {
            return Err(Refusal::other(format!(
                "the registry has block map {} of model {name:?}, not {epoch}",
                there.epoch
            )));
        }
    }
    let before = {
        let mut models = shared.models.lock();
        let here = models.get(&name).filter(|model| model.generation == generation);
        if here.is_some_and(|model| model.partition.epoch >= epoch) {
            return Ok(());
        }
        if !owns {
            let before = here.is_some().then(|| models.remove(&name)).flatten();
            shared.gone.add(&name, to.clone());
            before
        } else {
            if let Some(other) = models.get(&name).filter(|model| model.generation != generation) {
                let expected = other.generation;
                return Err(Refusal::Generation { model: name, expected, got: generation });
            }
            let incoming = shared.incoming.of(generation);
            let incoming = incoming.filter(|incoming| incoming.moved.record == record);
            let incoming = incoming.ok_or_else(|| {
                Refusal::other(format!("this shard has no blocks of model {name:?} under block map {epoch}"))
            })?;
            let partition = incoming.filled()?;
            let coordinator = if record.coordinator == me {
                let (bytes, now) = incoming.handed_over()?;
                let begins = Begins::HandedOver(&bytes, now);
                Some(models::coordinator(shared, &record, &partition, begins, &shards)?)
            } else {
                None
            };
            let redirect = Some(to.clone());
            let model = HostedModel {
                generation,
                record,
                partition,
                coordinator,
                redirect,
                copied: None,
                saved: None,
                begins: None,
            };
            let before = models.insert(name.clone(), model);
            shared.gone.is_back(&name);
            shared.incoming.forget(&incoming);
            before
        }
    };
    if let Some(before) = before {
        before.partition.has_moved(&to);
        if let Some(coordinator) = before.coordinator {
            coordinator.retire(&to);
        }
    }
    tracing::info!(model = %name, %epoch, owns, "the model has moved");
    Ok(())
}
