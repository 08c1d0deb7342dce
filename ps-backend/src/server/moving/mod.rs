//! A model's blocks on their way to other shards, under a new block map, while the job runs.
//!
//! The model's coordinator does it (`mover`, around [`crate::moving::MoveCore`]): it has the shards of the new map take
//! memory, holds the job between two versions, has them fetch what the others keep, hands its own state over, and
//! replaces the record at the registry. That is the moment from which the new map is in force, and nothing can fail any
//! more. Then every shard is told to switch, and clients hear of the new map from whichever shard they speak to. Until
//! then the new partitions (`adopting`) are beside the old ones, and can be dropped. `docs/network.md` has the story.

mod adopting;
mod adoptions;
mod mover;
mod moves;
mod told;

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{BlockId, Epoch, Generation, ShardId, Version};
use libmodelio::wire::{Held, Kept, Message, Moved, Refusal, Role};
use serde_json::{Value, json};

pub(super) use adoptions::Adoptions;
use moves::MAX_MOVES;
pub(super) use moves::Moves;

use super::announcer::life;
use super::conversation::TurnedAway;
use super::coordinator::Coordinator;
use super::{AdminAnswer, Model, Shared};
pub use crate::moving::Progress;

/// Longest wait for a move that is to stop. One that cannot be stopped any more may take longer.
const STOPPING: Duration = Duration::from_secs(5);

/// Models that were here and are remembered.
const MAX_GONE: usize = 1024;

/// Where a model is now: what is told to whoever speaks of an older block map.
#[derive(Clone, Debug)]
pub(super) struct Whereabouts {
    pub generation: Generation,
    pub epoch: Epoch,
    /// A [`Moved`].
    pub payload: Arc<[u8]>,
}

/// Whether a message is one of those by which shards move blocks.
pub(super) fn is_between_shards(message: &Message) -> bool {
    matches!(
        message,
        Message::Adopt
            | Message::Fill { .. }
            | Message::Adopting { .. }
            | Message::Fetch { .. }
            | Message::HandOver { .. }
            | Message::Switch
            | Message::Abandon { .. }
            | Message::StopMove { .. }
    )
}

impl Shared {
    /// Begins to move a model's blocks off a shard, in so much time and holding the job no longer than that; `answer` is
    /// called when it is over.
    pub(super) fn move_model(
        self: &Arc<Shared>,
        model: &str,
        generation: Generation,
        off: ShardId,
        (timeout, hold): (Duration, Option<Duration>),
        answer: impl FnOnce(AdminAnswer) + Send + 'static,
    ) -> Result<(), Refusal> {
        let coordinator = self.coordinator_of(model, generation)?;
        // Before the registry is asked: whoever wants to stop it finds it from here on.
        let moving = coordinator.moves.begin(off).ok_or_else(|| {
            Refusal::other(format!(
                "{MAX_MOVES} moves of model {model:?} are under way or wait: run the command again later"
            ))
        })?;
        let shared = Arc::clone(self);
        let moves = move || mover::run(&shared, &coordinator, moving, timeout, hold, Box::new(answer));
        let spawned = std::thread::Builder::new().name("mover".into()).spawn(moves);
        spawned.map(drop).map_err(|error| Refusal::other(format!("no thread to move it: {error}")))
    }

    fn coordinator_of(&self, model: &str, generation: Generation) -> Result<Arc<Coordinator>, Refusal> {
        let models = self.models.lock();
        let found = models.get(model).ok_or_else(|| Refusal::NoModel(model.to_owned()))?;
        if found.generation != generation {
            let (model, expected) = (model.to_owned(), found.generation);
            return Err(Refusal::Generation { model, expected, got: generation });
        }
        let coordinator = found.coordinator.clone();
        coordinator.ok_or_else(|| Refusal::other(format!("this shard does not coordinate model {model:?}")))
    }

    /// What moves the model off a shard stops, and is waited for; nothing happens if there is nothing, or if the model
    /// has moved.
    fn stop_move(&self, model: &str, generation: Generation, off: ShardId) -> Result<(), Refusal> {
        match self.coordinator_of(model, generation)?.moves.stop(off, Instant::now() + STOPPING) {
            true => Ok(()),
            false => Err(Refusal::other(
                "it cannot be stopped any more: the registry was asked to put the new block map in force, or has done so",
            )),
        }
    }

    /// What shards ask of each other. May take time.
    pub(super) fn between_shards(self: &Arc<Shared>, message: Message, payload: &[u8]) -> AdminAnswer {
        let done = |()| (Message::Done, None);
        match message {
            Message::Adopt => self.adopt(payload).map(done),
            Message::Fill { generation, attempt, version, reducer } => {
                self.fill(generation, attempt, version, reducer).map(done)
            }
            Message::Adopting { generation, attempt } => {
                let (blocks, of) = self.adopting(generation, attempt)?.progress()?;
                Ok((Message::Adopted { blocks, of }, None))
            }
            Message::Fetch { generation, epoch, version, block, what } => {
                let bytes = self.fetch(generation, epoch, version, block, what)?;
                Ok((Message::Fetched, Some(bytes)))
            }
            Message::HandOver { generation, attempt, at, of, now } => {
                let adopting = self.adopting(generation, attempt)?;
                adopting.hand_over(at, of, Duration::from_nanos(now), payload).map(done)
            }
            Message::Switch => self.switch(payload).map(done),
            Message::Abandon { generation, attempt } => {
                self.abandon(generation, attempt);
                Ok((Message::Done, None))
            }
            Message::StopMove { model, generation, off } => self.stop_move(&model, generation, off).map(done),
            other => Err(Refusal::Role { what: other.name().to_owned() }),
        }
    }

    /// What this shard keeps of a block.
    fn fetch(
        &self,
        generation: Generation,
        epoch: Epoch,
        wanted: Version,
        block: BlockId,
        what: Kept,
    ) -> Result<Vec<u8>, Refusal> {
        let partition = self.partition_of(generation)?.1;
        if partition.epoch != epoch {
            return Err(Refusal::Epoch { expected: partition.epoch, got: epoch });
        }
        let local = partition.store().partition().local(block).ok_or(Refusal::NotMine { block })?;
        let kept = partition.store().keep().map_err(Refusal::other)?;
        if kept.version() != wanted {
            return Err(Refusal::NoVersion { wanted, newest: kept.version() });
        }
        kept.bytes(local, what).map(<[u8]>::to_vec).map_err(Refusal::other)
    }

    /// Another block map is in force. Nothing happens the second time.
    pub(super) fn switch(&self, payload: &[u8]) -> Result<(), Refusal> {
        let moved = Moved::decode(payload).map_err(Refusal::other)?;
        let Moved { record, shards } = moved;
        let (name, generation, epoch) = (record.name.clone(), record.generation, record.epoch);
        let to = Whereabouts { generation, epoch, payload: payload.into() };
        let me = *self.shard.lock();
        let owns = record.owners.iter().any(|(owner, _)| *owner == me);
        if shards.iter().any(|shard| shard.shard == me && shard.draining) {
            self.is_drained();
        }
        let has_it = |model: &Model| model.generation == generation && model.partition.epoch < epoch;
        if !owns && self.models.lock().get(&name).is_some_and(has_it) {
            // Blocks are given up: whoever says so, the registry has the last word.
            let there = self.registry(|registry, deadline| registry.model(&name, deadline));
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
            let mut models = self.models.lock();
            let here = models.get(&name).filter(|model| model.generation == generation);
            if here.is_some_and(|model| model.partition.epoch >= epoch) {
                return Ok(());
            }
            if !owns {
                let before = here.is_some().then(|| models.remove(&name)).flatten();
                self.is_gone(&name, to.clone());
                before
            } else {
                if let Some(other) = models.get(&name).filter(|model| model.generation != generation) {
                    let expected = other.generation;
                    return Err(Refusal::Generation { model: name, expected, got: generation });
                }
                let adopting = self.adopting.of(generation);
                let adopting = adopting.filter(|adopting| *adopting.record() == record);
                let adopting = adopting.ok_or_else(|| {
                    Refusal::other(format!(
                        "this shard has no blocks of model {name:?} under block map {epoch}"
                    ))
                })?;
                let partition = adopting.filled()?;
                let coordinator = match adopting.handed_over()? {
                    Some((bytes, now)) if record.coordinator == me => {
                        Some(self.coordinator(&record, &partition, Some((&bytes, now)), &shards)?)
                    }
                    None if record.coordinator == me => {
                        return Err(Refusal::other("the coordinator's state was not handed over"));
                    }
                    _ => None,
                };
                let whereabouts = Some(to.clone());
                let model = Model { generation, record, partition, coordinator, whereabouts };
                let before = models.insert(name.clone(), model);
                self.gone.lock().retain(|(gone, _)| *gone != name);
                self.adopting.take_out(generation);
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

    fn is_gone(&self, name: &str, to: Whereabouts) {
        let mut gone = self.gone.lock();
        let newer = |(known, at): &(String, Whereabouts)| {
            known == name && at.generation == to.generation && at.epoch >= to.epoch
        };
        if gone.iter().any(newer) {
            return;
        }
        gone.retain(|(known, _)| known != name);
        if gone.len() >= MAX_GONE {
            gone.pop_front();
        }
        gone.push_back((name.to_owned(), to));
    }

    /// Where a model is that was here.
    pub(super) fn whereabouts(&self, name: &str, generation: Generation) -> Option<Whereabouts> {
        let gone = self.gone.lock();
        let found = gone.iter().find(|(known, to)| known == name && to.generation == generation);
        found.map(|(_, to)| to.clone())
    }

    /// What is said to somebody who greets for a model that is not here.
    pub(super) fn not_here(&self, name: &str, generation: Generation, role: Role, got: Epoch) -> TurnedAway {
        if let Some(to) = self.whereabouts(name, generation).filter(|to| got < to.epoch) {
            return match role {
                // It was the coordinator, and is no longer.
                Role::Coordinator => Refusal::Epoch { expected: to.epoch, got }.into(),
                _ => TurnedAway::Moved(to),
            };
        }
        // It comes; whoever knows of it already comes again.
        let adopting = self.adopting.of(generation);
        match adopting.filter(|adopting| adopting.record().name == name) {
            Some(adopting) => Refusal::Epoch { expected: adopting.epoch_in_force(), got }.into(),
            None => Refusal::NoModel(name.to_owned()).into(),
        }
    }

    /// Partitions that are to be, under block maps that are not in force as far as is known here.
    pub(super) fn adopting_lives(&self) -> Vec<Held> {
        self.adopting.all().iter().map(|adopting| life(adopting.record())).collect()
    }

    /// The names of models that were here and have moved away.
    pub(super) fn left(&self) -> Vec<String> {
        self.gone.lock().iter().map(|(name, _)| name.clone()).collect()
    }

    /// Partitions that are being filled, for status.
    pub(super) fn adopting_status(&self) -> Vec<Value> {
        let adopting = self.adopting.all();
        let status = adopting.iter().map(|adopting| {
            let (blocks, of, trouble) = match adopting.progress() {
                Ok((blocks, of)) => (blocks, of, None),
                Err(refusal) => (0, 0, Some(refusal.to_string())),
            };
            let record = adopting.record();
            json!({
                "name": record.name, "epoch": record.epoch.0, "blocks": blocks, "of": of, "failed": trouble,
            })
        });
        status.collect()
    }
}
