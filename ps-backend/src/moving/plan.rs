//! The new places of a model's blocks when they move off a shard, and the orders to all shards. Nothing is
//! asked or held yet: an impossible move is refused here.

use std::sync::Arc;
use std::time::Duration;

use libmodelio::vocabulary::block_map::MapError;
use libmodelio::vocabulary::ids::{Epoch, Generation, ShardId};
use libmodelio::wire::{ModelRecord, Moved, RecordError, Refusal, ShardRecord};

use libmodelio::vocabulary::controls::Controls;

/// The coordinator's facts about the job.
#[derive(Clone, Debug)]
pub struct JobFacts<'a> {
    /// The life of the model that it coordinates.
    pub generation: Generation,
    /// The number of the block map in force.
    pub epoch: Epoch,
    /// The settings as they are now.
    pub controls: &'a Controls,
}

/// A move that can be carried out.
#[derive(Clone, Debug)]
pub struct MovePlan {
    /// The number of the attempt. It rises with each attempt to move the model.
    pub attempt: u64,
    /// The shard that the model leaves.
    pub off: ShardId,
    /// The model as it is.
    pub before: ModelRecord,
    /// The record after the move.
    pub after: ModelRecord,
    /// The shards of both maps. The one that is left is the last.
    pub shards: Vec<ShardRecord>,
    /// The time for which the job may stand still, unless the operator says otherwise.
    pub hold: Duration,
    /// The payload of the orders to take memory and to switch.
    pub moved: Arc<[u8]>,
}

/// The job may stand still for the commits' timeout divided by this.
const SHARE_OF_TIMEOUT: u32 = 2;

impl MovePlan {
    /// The plan of a move, by the registry's record of `shards` and of the model; `None` if the shard has no
    /// blocks.
    ///
    /// # Errors
    /// The obstacle to the move, and the remedy.
    pub fn new(
        off: ShardId,
        before: ModelRecord,
        shards: &[ShardRecord],
        job: &JobFacts<'_>,
        attempt: u64,
    ) -> Result<Option<MovePlan>, Refusal> {
        if before.generation != job.generation {
            let (model, expected, got) = (before.name, before.generation, job.generation);
            return Err(Refusal::Generation { model, expected, got });
        }
        if before.epoch != job.epoch {
            return Err(Refusal::Epoch { expected: before.epoch, got: job.epoch });
        }
        if !before.ready {
            return Err(Refusal::other("the model is still being loaded: run the command again"));
        }
        let map = before.block_map().map_err(Refusal::other)?;
        if !map.shares().contains_key(&off) {
            return Ok(None);
        }
        let find = |wanted: ShardId| {
            let found = shards.iter().find(|shard| shard.shard == wanted).cloned();
            found.ok_or_else(|| {
                Refusal::other(format!(
                    "shard {wanted}, which owns blocks of the model, is not announced: it is stopped or cut off"
                ))
            })
        };
        if !find(off)?.draining {
            // The operator who has taken the mark back was told that nothing moves any more.
            return Err(Refusal::other(format!(
                "shard {off} is not being drained (any more): run gradfs drain again if it is to be"
            )));
        }
        let takers: Vec<ShardId> =
            shards.iter().filter(|shard| !shard.draining).map(|shard| shard.shard).collect();
        let others = map.successors(off, &takers, job.generation.0).map_err(|error| match error {
            MapError::NoShards => Refusal::other("no other shard takes blocks: start another shard first"),
            other => Refusal::other(other),
        })?;
        let new = map.without(off, &others).map_err(Refusal::other)?;
        let shares = new.shares();
        let coordinator = match before.coordinator == off {
            false => before.coordinator,
            true => {
                let able: Vec<_> =
                    others.iter().copied().filter(|other| shares.contains_key(other)).collect();
                let at = job.generation.0.checked_rem(able.len() as u64);
                at.map(|at| able[at as usize])
                    .ok_or_else(|| Refusal::other("no shard is left to coordinate the model"))?
            }
        };
        let mut after = before.moved(&new, coordinator).map_err(Refusal::other)?;
        after.controls = job.controls.clone();
        let owners = shares.keys().chain([&off]);
        let shards = owners.map(|&shard| find(shard)).collect::<Result<Vec<_>, _>>()?;
        let hold = job.controls.timeout / SHARE_OF_TIMEOUT;
        let moved = Moved { record: after.clone(), shards: shards.clone() };
        let moved = moved.encode().map_err(untold)?.into();
        Ok(Some(MovePlan { attempt, off, before, after, shards, hold, moved }))
    }

    /// The numbers of the shards of both maps.
    pub fn all(&self) -> impl Iterator<Item = ShardId> {
        self.shards.iter().map(|shard| shard.shard)
    }
}

fn untold(error: RecordError) -> Refusal {
    let RecordError::TooLong { got } = error else { return Refusal::other(error) };
    Refusal::other(format!(
        "it cannot be moved: the record of its move takes {got} bytes, the limit is {}; \
         a model of larger blocks, of fewer tensors or with less metadata could be",
        libmodelio::wire::MAX_PAYLOAD
    ))
}
