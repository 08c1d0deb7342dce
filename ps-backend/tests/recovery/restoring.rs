//! A restoration, in the steps of `ps-backend/src/create/restore.rs`: its shard may end, or stand still, between any two.

use libmodelio::vocabulary::ids::{Epoch, Generation, ShardId, Version};
use libmodelio::wire::{Lineage, ModelRecord, RegistryAnswer, RegistryRequest};
use ps_backend::offers::Offers;

use super::world::{MODEL, Snapshot, Unanswered, World, address};

enum Stage {
    /// Looks the record up.
    Reads,
    /// Begins a life.
    Begins(Box<ModelRecord>),
    /// The life is begun; takes the store, ends the life before, and looks for a newer snapshot.
    Takes(Box<ModelRecord>, Vec<usize>, Snapshot, u64),
    /// Hears of newer weights.
    Hears(Box<ModelRecord>, Vec<usize>, Snapshot, Offers),
    /// Loads the blocks of the shard of this place among the owners.
    Loads(Box<ModelRecord>, Vec<usize>, Snapshot, u64, usize),
    /// Tells the registry that all is there.
    Tells(Box<ModelRecord>, Snapshot),
}

pub(super) struct Restoring {
    lost: Generation,
    stage: Stage,
    /// The life that is made.
    pub(super) makes: Option<Generation>,
}

impl Restoring {
    pub(super) fn new(lost: Generation) -> Restoring {
        Restoring { lost, stage: Stage::Reads, makes: None }
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
        match std::mem::replace(&mut self.stage, Stage::Reads) {
            Stage::Reads => {
                let request = RegistryRequest::Model { name: MODEL.to_owned() };
                let (_, payload) = world.ask(shard, &request, &[]).map_err(failed)?;
                let record = ModelRecord::decode(&payload).unwrap();
                if record.generation != self.lost {
                    return Err(true);
                }
                self.stage = Stage::Begins(Box::new(record));
            }
            Stage::Begins(lost) => {
                let (snapshot, generation) = (newest(world).ok_or(false)?, world.new_generation());
                let listed = world.ask(shard, &RegistryRequest::Shards, &[]).map_err(failed)?;
                let RegistryAnswer::Shards(listed) = listed.0 else { return Err(false) };
                let mut owners: Vec<usize> = (0..world.shards.len())
                    .filter(|of| {
                        let number = world.shards[*of].number;
                        number != ShardId(0)
                            && listed.iter().any(|one| one.address == address(*of) && one.shard == number)
                    })
                    .collect();
                world.random.shuffle(&mut owners);
                owners.truncate(1 + world.random.usize(0..3));
                if owners.is_empty() {
                    return Err(false);
                }
                let (lineage, begins): (Lineage, Version) =
                    lost.lineage.restored(world.shards[shard].number, Version(snapshot.version), lost.ready);
                let record = world.record(generation, &owners, Some(lineage));
                self.makes = Some(generation);
                let request = RegistryRequest::Succeed { generation: lost.generation, epoch: Epoch(1) };
                world.ask(shard, &request, &record.encode().unwrap()).map_err(failed)?;
                self.lost = generation;
                self.stage = Stage::Takes(Box::new(record), owners, snapshot, begins.0);
            }
            Stage::Takes(record, owners, snapshot, begins) => {
                // A later life of the lineage has it.
                if world.claim.1 >= record.lineage.restored {
                    return Err(false);
                }
                world.claim = (record.generation, record.lineage.restored);
                for other in 0..world.shards.len() {
                    let old: Vec<Generation> = world.shards[other].held.iter().copied().collect();
                    // A message may be lost: then the shard hears of it from the registry.
                    for life in old.into_iter().filter(|life| *life < record.generation) {
                        if world.runs(other) && world.random.u8(..) > 30 {
                            world.drop_life(other, life);
                        }
                    }
                }
                self.stage = match newest(world)
                    .is_some_and(|of| (of.claim, of.version) != (snapshot.claim, snapshot.version))
                {
                    true => Stage::Begins(record),
                    false if world.takes_newest => {
                        let mut offers = Offers::default();
                        let of = Version(snapshot.version);
                        offers.begin(record.generation, &record.lineage, of, world.time());
                        Stage::Hears(record, owners, snapshot, offers)
                    }
                    false => Stage::Loads(record, owners, snapshot, begins, 0),
                };
            }
            Stage::Hears(record, owners, snapshot, mut offers) => {
                world.offer(record.generation, &mut offers);
                let begins = record.lineage.begins.0;
                self.stage = match offers.choose(record.generation, world.time()) {
                    Err(_) => Stage::Hears(record, owners, snapshot, offers),
                    Ok(None) => Stage::Loads(record, owners, snapshot, begins, 0),
                    // The mount has failed.
                    Ok(Some(_)) if world.random.u8(0..8) == 0 => return Err(false),
                    Ok(Some(offer)) => {
                        let (version, content) = world.held_by(offer.client);
                        // The snapshot may be of a life before the last one, which wrote it late: it is not durable then.
                        world.brought += 1;
                        let of = Snapshot { claim: snapshot.claim, version, content };
                        Stage::Loads(record, owners, of, offer.number.0, 0)
                    }
                };
            }
            Stage::Loads(record, owners, snapshot, begins, at) => {
                let Some(&owner) = owners.get(at) else {
                    let (generation, coordinator) = (record.generation, owners[0]);
                    if !world.runs(coordinator) || !world.shards[coordinator].held.contains(&generation) {
                        return Err(false);
                    }
                    let (content, lineage) = (snapshot.content.clone(), record.lineage.clone());
                    world.begin_job(coordinator, generation, owners, (begins, content), lineage);
                    self.stage = Stage::Tells(record, snapshot);
                    return Ok(false);
                };
                // It has another life of the model still.
                if !world.runs(owner) || world.shards[owner].held.iter().any(|of| *of != record.generation) {
                    return Err(false);
                }
                world.shards[owner].held.insert(record.generation);
                self.stage = Stage::Loads(record, owners, snapshot, begins, at + 1);
            }
            Stage::Tells(record, snapshot) => {
                let ready = ModelRecord { ready: true, ..(*record).clone() };
                let request = RegistryRequest::Put { replaces: Some(Epoch(1)) };
                match world.ask(shard, &request, &ready.encode().unwrap()) {
                    // Only then does anybody learn of the life.
                    Ok(_) => {
                        world.restored_from(record.generation, &snapshot);
                        world.known.insert(record.generation);
                        return Ok(true);
                    }
                    Err(Unanswered::Refused) => return Err(true),
                    // It is repeated.
                    Err(Unanswered::Silence) => self.stage = Stage::Tells(record, snapshot),
                }
            }
        }
        Ok(false)
    }
}

fn newest(world: &World) -> Option<Snapshot> {
    // Of one claim the last one.
    world.snapshots.iter().max_by_key(|snapshot| snapshot.claim).cloned()
}
