//! A restoration, in the steps of `ps-backend/src/create/restore.rs`: its shard may end, or stand still, between any two.

use std::collections::BTreeSet;

use libmodelio::vocabulary::ids::{Epoch, Generation, ShardId, Version};
use libmodelio::wire::{Lineage, ModelRecord, RegistryAnswer, RegistryRequest};
use ps_backend::core::JobRecord;
use ps_backend::offers::Offers;

use super::content::Content;
use super::store::Snapshot;
use super::world::{MODEL, Unanswered, World, address};

enum Stage {
    /// Looks the record up.
    Reads,
    /// Looks for the newest snapshot.
    Opens(Box<ModelRecord>),
    /// Begins a life with it.
    Begins(Box<ModelRecord>, Snapshot),
    /// The life is begun; takes the store, ends the life before, and looks for a newer snapshot.
    Takes(Making),
    /// Hears of newer weights.
    Hears(Making, Offers),
    /// Reads the data of the snapshot, or has a mount bring newer weights.
    Weights(Making),
    /// Loads the blocks of the shard of this place among the owners.
    Loads(Making, usize),
    /// Tells the registry that all is there.
    Tells(Box<ModelRecord>, Content),
}

/// A life that is made.
struct Making {
    record: Box<ModelRecord>,
    owners: Vec<usize>,
    snapshot: Snapshot,
    /// What the job begins with.
    job: JobRecord,
    /// The weights, once they are known.
    content: Option<Content>,
}

pub(super) struct Restoring {
    lost: Generation,
    stage: Stage,
    /// Snapshots that are damaged.
    passed_over: BTreeSet<String>,
    /// The life that is made.
    pub(super) makes: Option<Generation>,
}

impl Restoring {
    pub(super) fn new(lost: Generation) -> Restoring {
        Restoring { lost, stage: Stage::Reads, passed_over: BTreeSet::new(), makes: None }
    }

    /// The restoration of a shard goes on.
    pub(super) fn step(world: &mut World, shard: usize) {
        if world.random.bool() {
            return;
        }
        let Some(mut of) = world.shards[shard].restoring.take() else { return };
        match of.next(world, shard) {
            Ok(true) => world.restoration_ends(shard, true),
            Ok(false) => world.shards[shard].restoring = Some(of),
            Err(is_other) => world.restoration_ends(shard, is_other),
        }
    }

    /// One step. True once it is done, and an error if it fails: `true` if somebody else was first.
    fn next(&mut self, world: &mut World, shard: usize) -> Result<bool, bool> {
        let failed = |error| matches!(error, Unanswered::Refused);
        self.stage = match std::mem::replace(&mut self.stage, Stage::Reads) {
            Stage::Reads => {
                let request = RegistryRequest::Model { name: MODEL.to_owned() };
                let (_, payload) = world.ask(shard, &request, &[]).map_err(failed)?;
                let record = ModelRecord::decode(&payload).unwrap();
                if record.generation != self.lost {
                    return Err(true);
                }
                Stage::Opens(Box::new(record))
            }
            Stage::Opens(lost) => {
                let name = world.store.newest(&self.passed_over).ok_or(false)?;
                match world.store.open(name) {
                    Ok(snapshot) => Stage::Begins(lost, snapshot),
                    Err(name) => self.pass_over(name, lost),
                }
            }
            Stage::Begins(lost, snapshot) => self.begin(world, shard, &lost, snapshot)?,
            Stage::Takes(making) => self.take(world, making)?,
            Stage::Hears(mut making, mut offers) => {
                let generation = making.record.generation;
                world.offer(generation, &mut offers);
                match offers.choose(generation, world.time()) {
                    Err(_) => Stage::Hears(making, offers),
                    Ok(None) => Stage::Weights(making),
                    // The mount has failed.
                    Ok(Some(_)) if world.random.u8(0..8) == 0 => return Err(false),
                    Ok(Some(offer)) => {
                        making.content = Some(world.promises.shown(offer.version));
                        making.job = offer.goes_on(making.job);
                        Stage::Weights(making)
                    }
                }
            }
            Stage::Weights(mut making) => match world.store.load(&making.snapshot) {
                None => self.pass_over(making.snapshot.name, making.record),
                Some(of_snapshot) => {
                    world.counts.brought += u64::from(making.content.is_some());
                    // The optimizer's state is that of the snapshot in any case.
                    making.content.get_or_insert(of_snapshot);
                    Stage::Loads(making, 0)
                }
            },
            Stage::Loads(making, at) => {
                let generation = making.record.generation;
                let Some(&owner) = making.owners.get(at) else {
                    let Making { record, owners, job, content, .. } = making;
                    let coordinator = owners[0];
                    if !world.runs(coordinator) || !world.shards[coordinator].held.contains(&generation) {
                        return Err(false);
                    }
                    let content = content.unwrap_or_default();
                    let of = (generation, record.lineage.clone());
                    world.begin_job(coordinator, of, owners, (job, content.clone()));
                    self.stage = Stage::Tells(record, content);
                    return Ok(false);
                };
                // It has another life of the model still.
                if !world.runs(owner) || world.shards[owner].held.iter().any(|of| *of != generation) {
                    return Err(false);
                }
                world.shards[owner].held.insert(generation);
                Stage::Loads(making, at + 1)
            }
            Stage::Tells(record, content) => {
                let ready = ModelRecord { ready: true, ..(*record).clone() };
                let request = RegistryRequest::Put { replaces: Some(Epoch(1)) };
                match world.ask(shard, &request, &ready.encode().unwrap()) {
                    // Only then does anybody learn of the life.
                    Ok(_) => {
                        world.promises.begins(record.generation, &content);
                        world.restored(record.generation, !self.passed_over.is_empty());
                        return Ok(true);
                    }
                    Err(Unanswered::Refused) => return Err(true),
                    // It is repeated.
                    Err(Unanswered::Silence) => Stage::Tells(record, content),
                }
            }
        };
        Ok(false)
    }

    /// A snapshot is damaged: the one before is looked for.
    fn pass_over(&mut self, name: String, mut lost: Box<ModelRecord>) -> Stage {
        self.passed_over.insert(name);
        lost.lineage.newest = false;
        Stage::Opens(lost)
    }

    fn begin(
        &mut self,
        world: &mut World,
        shard: usize,
        lost: &ModelRecord,
        snapshot: Snapshot,
    ) -> Result<Stage, bool> {
        let failed = |error| matches!(error, Unanswered::Refused);
        let generation = world.new_generation();
        let listed = world.ask(shard, &RegistryRequest::Shards, &[]).map_err(failed)?;
        let RegistryAnswer::Shards(listed) = listed.0 else { return Err(false) };
        let is_there = |of: &usize| {
            let number = world.shards[*of].number;
            number != ShardId(0)
                && listed.iter().any(|one| one.address == address(*of) && one.shard == number)
        };
        let mut owners: Vec<usize> = (0..world.shards.len()).filter(is_there).collect();
        world.random.shuffle(&mut owners);
        owners.truncate(1 + world.random.usize(0..3));
        if owners.is_empty() {
            return Err(false);
        }
        let version = snapshot.record.version;
        let (lineage, begins): (Lineage, Version) =
            lost.lineage.restored(world.shards[shard].number, version, lost.ready);
        let record = Box::new(world.record(generation, &owners, Some(lineage)));
        self.makes = Some(generation);
        let request = RegistryRequest::Succeed { generation: lost.generation, epoch: Epoch(1) };
        world.ask(shard, &request, &record.encode().unwrap()).map_err(failed)?;
        world.say(format_args!("life {generation} takes the place of {}", lost.generation));
        self.lost = generation;
        let job = JobRecord { version: begins, ..snapshot.record.clone() };
        Ok(Stage::Takes(Making { record, owners, snapshot, job, content: None }))
    }

    fn take(&mut self, world: &mut World, making: Making) -> Result<Stage, bool> {
        let (generation, lineage) = (making.record.generation, &making.record.lineage);
        // A later life of the lineage may have it.
        world.store.shelf.claim((MODEL, generation, lineage), true).map_err(|_| false)?;
        for other in 0..world.shards.len() {
            let old: Vec<Generation> = world.shards[other].held.iter().copied().collect();
            // A message may be lost: then the shard hears of it from the registry.
            for life in old.into_iter().filter(|life| *life < generation) {
                if world.runs(other) && !world.is_cut(other) && world.random.u8(..) > 30 {
                    world.drop_life(other, life);
                }
            }
        }
        if world.store.newest(&self.passed_over).as_ref() != Some(&making.snapshot.name) {
            return Ok(Stage::Opens(making.record));
        }
        if !lineage.newest {
            return Ok(Stage::Weights(making));
        }
        let mut offers = Offers::default();
        offers.begin(generation, lineage, making.snapshot.record.version, world.time());
        Ok(Stage::Hears(making, offers))
    }
}
