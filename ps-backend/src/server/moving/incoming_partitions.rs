//! The partitions that are to be, of each life of a model one, and the taking of their memory.
//!
//! Taking memory takes long and cannot be interrupted. An attempt that begins meanwhile waits for that.
//!
//! A partition is dropped when it is told so, or when the registry says that its map never will be in force; not because
//! nobody has spoken of it for a while, for the record may just have been replaced, nor because the registry does not
//! know the model, for it may have been started anew.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use libmodelio::vocabulary::ids::{Epoch, Generation};
use libmodelio::wire::Refusal;
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};

use super::incoming::IncomingPartition;

/// Longest wait for memory that is being taken for another move.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(300);
/// The shard remembers the ended attempts of this many models. A late message of such an attempt changes nothing.
const MAX_IDLE: usize = 256;
/// Of one model it remembers the last of them.
const MAX_ENDED: usize = 16;

/// The attempts to bring a partition here, for one life of a model.
#[derive(Default)]
pub(in crate::server) struct Place {
    /// Attempts that are over. Nothing is concluded about others: a number may be a stranger's invention.
    ended: VecDeque<u64>,
    /// The attempt that memory is being taken for.
    taking: Option<u64>,
    partition: Option<Arc<IncomingPartition>>,
}

type Places = BTreeMap<Generation, Place>;

/// The partitions that a shard receives in moves, by model.
#[derive(Default)]
pub(in crate::server) struct IncomingPartitions {
    places: Mutex<Places>,
    /// Held while memory is being taken.
    taking: Mutex<()>,
}

impl IncomingPartitions {
    /// The partition of this life of a model.
    pub(in crate::server) fn of(&self, generation: Generation) -> Option<Arc<IncomingPartition>> {
        self.places.lock().get(&generation)?.partition.clone()
    }

    /// If nothing is to be: as long as this is held, nothing begins to be.
    pub(in crate::server) fn idle(&self) -> Option<MutexGuard<'_, Places>> {
        let places = self.places.lock();
        let is_idle = !self.taking.is_locked() && places.values().all(|place| place.partition.is_none());
        is_idle.then_some(places)
    }

    pub(in crate::server) fn all(&self) -> Vec<Arc<IncomingPartition>> {
        self.places.lock().values().filter_map(|place| place.partition.clone()).collect()
    }

    /// Partitions that are being filled, for status.
    pub(in crate::server) fn status(&self) -> Vec<Value> {
        let status = self.all().into_iter().map(|incoming| {
            let progress = incoming.progress();
            let trouble = progress.as_ref().err().map(Refusal::to_string);
            let ((blocks, of), record) = (progress.unwrap_or_default(), &incoming.moved.record);
            json!({
                "name": record.name, "epoch": record.epoch.0, "blocks": blocks, "of": of, "failed": trouble,
            })
        });
        status.collect()
    }

    /// Has an attempt take memory by `make`. The block map of `in_force` is the one that it replaces: a partition under
    /// that map is the model's, though nobody has told this shard yet.
    pub(super) fn take(
        &self,
        generation: Generation,
        (attempt, in_force): (u64, Epoch),
        make: impl FnOnce() -> Result<IncomingPartition, Refusal>,
    ) -> Result<(), Refusal> {
        let over = || Err(Refusal::other("the move was abandoned, or a later attempt has begun"));
        let Some(_taking) = self.taking.try_lock_for(MEMORY_TIMEOUT) else {
            return Err(Refusal::other(
                "memory for another move is being taken still: is the host short of it?",
            ));
        };
        {
            let mut places = self.places.lock();
            let place = place(&mut places, generation);
            match &place.partition {
                _ if place.ended.contains(&attempt) => return over(),
                // Any number can be invented, so it alone keeps nobody out.
                Some(partition) if partition.attempt > attempt && !partition.is_empty() => return over(),
                Some(partition) if partition.attempt == attempt => return Ok(()),
                Some(partition) if partition.moved.record.epoch <= in_force => {
                    return Err(Refusal::other(format!(
                        "this shard has not switched to block map {in_force} yet: run the command again"
                    )));
                }
                _ => place.begin(attempt),
            }
        }
        let made = make();
        let mut places = self.places.lock();
        let place = places.get_mut(&generation).filter(|place| place.taking == Some(attempt));
        let Some(place) = place else { return over() };
        place.taking = None;
        if place.ended.contains(&attempt) {
            return over();
        }
        place.partition = Some(Arc::new(made?));
        Ok(())
    }

    /// Nothing is to come of this attempt. The partition of another one stays until the registry has said what becomes
    /// of it: its map may be in force.
    pub(super) fn abandon(&self, generation: Generation, attempt: u64) {
        let mut places = self.places.lock();
        place(&mut places, generation).end(attempt);
    }

    /// This one will never be, or is in force.
    pub(in crate::server) fn forget(&self, gone: &Arc<IncomingPartition>) {
        let (mut places, generation) = (self.places.lock(), gone.moved.record.generation);
        let is_it = |known: &Arc<IncomingPartition>| Arc::ptr_eq(known, gone);
        let known = places.get_mut(&generation).filter(|place| place.partition.as_ref().is_some_and(is_it));
        if let Some(place) = known {
            place.end(gone.attempt);
        }
    }

    /// The model is no more.
    pub(in crate::server) fn delete(&self, generation: Generation) {
        if let Some(mut place) = self.places.lock().remove(&generation) {
            place.drop_partition();
        }
    }
}

impl Place {
    /// An attempt begins, and the one before is over.
    fn begin(&mut self, attempt: u64) {
        self.taking = Some(attempt);
        if let Some(before) = self.partition.as_ref().map(|partition| partition.attempt) {
            self.end(before);
        }
    }

    /// An attempt is over.
    fn end(&mut self, attempt: u64) {
        if !self.ended.contains(&attempt) {
            self.ended.truncate(MAX_ENDED - 1);
            self.ended.push_front(attempt);
        }
        if self.partition.as_ref().is_some_and(|partition| partition.attempt == attempt) {
            self.drop_partition();
        }
    }

    fn drop_partition(&mut self) {
        self.partition.take().inspect(|partition| partition.end());
    }
}

fn place(places: &mut Places, generation: Generation) -> &mut Place {
    if places.len() >= MAX_IDLE && !places.contains_key(&generation) {
        places.retain(|_, place| place.partition.is_some() || place.taking.is_some());
    }
    places.entry(generation).or_default()
}

#[cfg(test)]
mod tests {
    use libmodelio::vocabulary::controls::Controls;
    use libmodelio::vocabulary::ids::{BlockId, ShardId};
    use libmodelio::wire::{ModelRecord, Moved};

    use super::super::incoming::Stage;
    use super::*;
    use crate::partition::executor::{Executor, Pool};
    use crate::server::partition::{Partition, PartitionOptions};

    const MODEL: Generation = Generation(1);

    /// Whether an attempt gets as far as taking memory, which there is none of.
    fn begins(incoming: &IncomingPartitions, attempt: u64) -> bool {
        let mut begun = false;
        let none = || {
            begun = true;
            Err(Refusal::other("no memory"))
        };
        incoming.take(MODEL, (attempt, Epoch(1)), none).unwrap_err();
        begun
    }

    #[test]
    fn an_abandoned_attempt_is_over_and_no_other() {
        let incoming = IncomingPartitions::default();
        for attempt in [5, u64::MAX] {
            incoming.abandon(MODEL, attempt);
        }
        assert!(!begins(&incoming, 5) && !begins(&incoming, u64::MAX));
        assert!(begins(&incoming, 4) && begins(&incoming, 6));
    }

    /// A shard's partition under a new block map, which takes no time and hardly any memory.
    fn prepared(attempt: u64) -> Result<IncomingPartition, Refusal> {
        let block = 1 << 16;
        let record = ModelRecord {
            name: "m".into(),
            generation: MODEL,
            tensors: vec![("t".into(), "F32".into(), vec![u64::from(block) / 4])],
            metadata: Default::default(),
            block_size: block,
            epoch: Epoch(2),
            owners: vec![(ShardId(1), 1)],
            coordinator: ShardId(1),
            controls: Controls::default(),
            ready: true,
            lineage: Default::default(),
        };
        let cpu: Arc<dyn Executor> = Pool::start(1, None).unwrap();
        let options = PartitionOptions::default();
        let make = || Partition::new(&record, ShardId(1), &cpu, options).map_err(Refusal::other);
        let moved = Moved { record: record.clone(), shards: Vec::new() };
        IncomingPartition::new((attempt, ShardId(2)), moved, None, (&[BlockId(0)], make))
    }

    #[test]
    fn an_invented_attempt_keeps_no_other_out() {
        let incoming = IncomingPartitions::default();
        let take = |attempt| incoming.take(MODEL, (attempt, Epoch(1)), || prepared(attempt));
        take(u64::MAX).unwrap();
        take(5).unwrap();
        assert_eq!(incoming.of(MODEL).unwrap().attempt, 5);
        take(u64::MAX).unwrap_err();
        // Once blocks are on their way, only a later attempt takes its place.
        for stage in [Stage::Filling(0), Stage::Filled] {
            *incoming.of(MODEL).unwrap().stage.lock() = stage;
            take(4).unwrap_err();
        }
        incoming.of(MODEL).unwrap().end();
        take(4).unwrap();
        take(7).unwrap();
    }

    #[test]
    fn abandoned_attempts_take_no_more_than_their_room_and_end_none_under_way() {
        let incoming = IncomingPartitions::default();
        let taken = incoming.take(MODEL, (5, Epoch(1)), || {
            for other in 0..4 * MAX_IDLE as u64 {
                incoming.abandon(Generation(other), other + 100);
                incoming.abandon(MODEL, other + 1000);
            }
            Err(Refusal::other("no memory"))
        });
        // It got to the end of what it was doing.
        assert_eq!(taken, Err(Refusal::other("no memory")));
        let places = incoming.places.lock();
        assert!(places.len() <= MAX_IDLE && places[&MODEL].ended.len() == MAX_ENDED);
    }
}
