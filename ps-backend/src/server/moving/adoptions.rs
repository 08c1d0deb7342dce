//! The partitions that are to be, of each life of a model one, and the taking of their memory.
//!
//! Taking memory takes long and cannot be interrupted. An attempt that begins meanwhile waits, and goes on with what
//! the one before has taken if that is the same partition.
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

use super::adopting::Adopting;

/// Longest wait for an earlier attempt, whose asker may have given up.
const PATIENCE: Duration = Duration::from_secs(300);
/// Models of which is remembered which attempts are over, though they may be heard of late.
const MAX_IDLE: usize = 256;

/// What there is for one life of a model.
#[derive(Default)]
struct Place {
    /// Attempts before this one are over.
    least: u64,
    /// It has begun, and was not abandoned.
    wanted: bool,
    /// Held while memory is being taken.
    turn: Arc<Mutex<()>>,
    partition: Option<Arc<Adopting>>,
}

#[derive(Default)]
pub(in crate::server) struct Places(BTreeMap<Generation, Place>);

/// All of a shard.
#[derive(Default)]
pub(in crate::server) struct Adoptions(Mutex<Places>);

impl Place {
    fn is_idle(&self) -> bool {
        self.partition.is_none() && !self.turn.is_locked()
    }

    fn clear(&mut self) {
        self.partition.take().inspect(|partition| partition.end());
    }
}

impl Places {
    /// Whether nothing is to be.
    pub(in crate::server) fn is_empty(&self) -> bool {
        self.0.values().all(Place::is_idle)
    }

    fn of(&mut self, generation: Generation) -> &mut Place {
        if !self.0.contains_key(&generation)
            && self.0.values().filter(|place| place.is_idle()).count() >= MAX_IDLE
            && let Some(oldest) = self.0.iter().find(|(_, place)| place.is_idle()).map(|(&of, _)| of)
        {
            self.0.remove(&oldest);
        }
        self.0.entry(generation).or_default()
    }
}

impl Adoptions {
    /// The partition of this life of a model.
    pub(in crate::server) fn of(&self, generation: Generation) -> Option<Arc<Adopting>> {
        self.0.lock().0.get(&generation)?.partition.clone()
    }

    /// As long as this is held, nobody begins.
    pub(in crate::server) fn lock(&self) -> MutexGuard<'_, Places> {
        self.0.lock()
    }

    pub(in crate::server) fn all(&self) -> Vec<Arc<Adopting>> {
        self.0.lock().0.values().filter_map(|place| place.partition.clone()).collect()
    }

    /// Partitions that are being filled, for status.
    pub(in crate::server) fn status(&self) -> Vec<Value> {
        let adopting = self.all();
        let status = adopting.iter().map(|adopting| {
            let progress = adopting.progress();
            let trouble = progress.as_ref().err().map(Refusal::to_string);
            let ((blocks, of), record) = (progress.unwrap_or_default(), adopting.record());
            json!({
                "name": record.name, "epoch": record.epoch.0, "blocks": blocks, "of": of, "failed": trouble,
            })
        });
        status.collect()
    }

    /// An attempt wants memory, from now on or still. It starts from the block map of `in_force`: a partition under that
    /// map is the model's, though nobody has told this shard yet. `None` if its partition is there.
    fn begin(
        &self,
        generation: Generation,
        attempt: u64,
        in_force: Epoch,
    ) -> Result<Option<Arc<Mutex<()>>>, Refusal> {
        let mut places = self.0.lock();
        let place = places.of(generation);
        if attempt < place.least {
            return Err(Refusal::other("the move was abandoned, or a later attempt has begun"));
        }
        match &place.partition {
            Some(partition) if partition.attempt() == attempt => return Ok(None),
            Some(partition) if partition.record().epoch <= in_force => {
                return Err(Refusal::other(format!(
                    "this shard has not switched to block map {in_force} yet: run the command again"
                )));
            }
            _ => {}
        }
        (place.least, place.wanted) = (attempt, true);
        Ok(Some(Arc::clone(&place.turn)))
    }

    /// Has an attempt take memory, if it has not: `make` is given what the one before has left.
    pub(super) fn take(
        &self,
        generation: Generation,
        (attempt, in_force): (u64, Epoch),
        make: impl FnOnce(Option<Arc<Adopting>>) -> Result<Adopting, Refusal>,
    ) -> Result<(), Refusal> {
        let Some(turn) = self.begin(generation, attempt, in_force)? else { return Ok(()) };
        let Some(_turn) = turn.try_lock_for(PATIENCE) else {
            return Err(Refusal::other(
                "memory for an earlier attempt to move the model is being taken still: is the host short of it?",
            ));
        };
        // The one before may have been this one, or there may be a later one.
        if self.begin(generation, attempt, in_force)?.is_none() {
            return Ok(());
        }
        let before = self.0.lock().of(generation).partition.take();
        let made = Arc::new(make(before)?);
        let mut places = self.0.lock();
        let place = places.of(generation);
        let is_newest = place.least == attempt;
        if place.wanted {
            // A later attempt that waits goes on with it.
            place.partition = Some(made);
        }
        match place.wanted && is_newest {
            true => Ok(()),
            false => Err(Refusal::other("the move was abandoned, or a later attempt has begun")),
        }
    }

    /// Nothing is to come of this attempt, nor of those before it. But an earlier partition that is whole stays until
    /// the registry has said what becomes of it: its map may be in force.
    pub(super) fn abandon(&self, generation: Generation, attempt: u64) {
        let mut places = self.0.lock();
        let place = places.of(generation);
        if attempt >= place.least {
            (place.least, place.wanted) = (attempt.saturating_add(1), false);
        }
        if place.partition.as_ref().is_some_and(|partition| {
            partition.attempt() == attempt || partition.attempt() < attempt && partition.filled().is_err()
        }) {
            place.clear();
        }
    }

    /// This one will never be.
    pub(in crate::server) fn forget(&self, gone: &Arc<Adopting>) {
        let mut places = self.0.lock();
        let place = places.of(gone.record().generation);
        if place.partition.as_ref().is_some_and(|partition| Arc::ptr_eq(partition, gone)) {
            place.clear();
        }
    }

    /// The model is no more.
    pub(in crate::server) fn delete(&self, generation: Generation) {
        if let Some(place) = self.0.lock().0.get_mut(&generation) {
            (place.least, place.wanted) = (u64::MAX, false);
            place.clear();
        }
    }
}
