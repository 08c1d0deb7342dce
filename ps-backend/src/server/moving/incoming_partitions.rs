//! The partitions that are to be, of each life of a model one, and the taking of their memory.
//!
//! Taking memory takes long and cannot be interrupted. An attempt that begins meanwhile waits for that.
//!
//! A partition is dropped when it is told so, or when the registry says that its map never will be in force; not because
//! nobody has spoken of it for a while, for the record may just have been replaced, nor because the registry does not
//! know the model, for it may have been started anew.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use libmodelio::vocabulary::ids::{Epoch, Generation};
use libmodelio::wire::Refusal;
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};

use super::incoming::IncomingPartition;

/// Longest wait for memory that is being taken for another move.
const PATIENCE: Duration = Duration::from_secs(300);
/// The shard remembers the ended attempts of this many models. A late message of such an attempt changes nothing.
const MAX_IDLE: usize = 256;

/// The attempts to bring a partition here, for one life of a model.
#[derive(Default)]
pub(in crate::server) struct Place {
    /// Attempts before this one are over.
    least: u64,
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
        let Some(_taking) = self.taking.try_lock_for(PATIENCE) else {
            return Err(Refusal::other(
                "memory for another move is being taken still: is the host short of it?",
            ));
        };
        {
            let mut places = self.places.lock();
            let place = place(&mut places, generation);
            match &place.partition {
                _ if attempt < place.least => return over(),
                Some(partition) if partition.attempt == attempt => return Ok(()),
                Some(partition) if partition.moved.record.epoch <= in_force => {
                    return Err(Refusal::other(format!(
                        "this shard has not switched to block map {in_force} yet: run the command again"
                    )));
                }
                _ => place.begin(attempt),
            }
        }
        let made = Arc::new(make()?);
        match self.places.lock().get_mut(&generation).filter(|place| place.least == attempt) {
            Some(place) => place.partition = Some(made),
            None => return over(),
        }
        Ok(())
    }

    /// Nothing is to come of this attempt, nor of those before it. The partition of an earlier one stays until the
    /// registry has said what becomes of it: its map may be in force.
    pub(super) fn abandon(&self, generation: Generation, attempt: u64) {
        let mut places = self.places.lock();
        let place = place(&mut places, generation);
        place.least = place.least.max(attempt.saturating_add(1));
        if place.partition.as_ref().is_some_and(|partition| partition.attempt == attempt) {
            place.begin(place.least);
        }
    }

    /// This one will never be, or is in force.
    pub(in crate::server) fn forget(&self, gone: &Arc<IncomingPartition>) {
        let (mut places, generation) = (self.places.lock(), gone.moved.record.generation);
        let is_it = |known: &Arc<IncomingPartition>| Arc::ptr_eq(known, gone);
        let known = places.get_mut(&generation).filter(|place| place.partition.as_ref().is_some_and(is_it));
        if let Some(place) = known {
            place.begin(place.least);
        }
    }

    /// The model is no more.
    pub(in crate::server) fn delete(&self, generation: Generation) {
        if let Some(mut place) = self.places.lock().remove(&generation) {
            place.begin(0);
        }
    }
}

impl Place {
    /// An attempt begins, and the one before is over.
    fn begin(&mut self, attempt: u64) {
        self.least = attempt;
        self.partition.take().inspect(|partition| partition.end());
    }
}

fn place(places: &mut Places, generation: Generation) -> &mut Place {
    if places.len() >= MAX_IDLE {
        places.retain(|_, place| place.partition.is_some());
    }
    places.entry(generation).or_default()
}
