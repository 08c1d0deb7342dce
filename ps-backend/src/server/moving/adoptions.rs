//! Which partitions are to be, and whose memory is being taken: of each life of a model one at a time.
//!
//! Taking memory takes long and cannot be interrupted. An attempt that begins meanwhile waits, and goes on with what
//! the one before has taken if that is the same partition.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{Epoch, Generation};
use libmodelio::wire::Refusal;
use parking_lot::{Condvar, Mutex, MutexGuard};
use serde_json::{Value, json};

use super::adopting::Adopting;

/// Longest wait for an earlier attempt, whose asker may have given up.
const PATIENCE: Duration = Duration::from_secs(300);
/// Attempts that are remembered because nothing is to come of them, though they may be heard of late.
const MAX_VOID: usize = 256;

#[derive(Default)]
pub(in crate::server) struct Known {
    partitions: BTreeMap<Generation, Arc<Adopting>>,
    /// Whose memory is being taken, and the newest attempt that wants it.
    taking: BTreeMap<Generation, u64>,
    /// Attempts up to this one are abandoned.
    void: VecDeque<(Generation, u64)>,
}

impl Known {
    /// Whether nothing is to be.
    pub(in crate::server) fn is_empty(&self) -> bool {
        self.partitions.is_empty() && self.taking.is_empty()
    }

    fn is_void(&self, generation: Generation, attempt: u64) -> bool {
        self.void.iter().any(|(known, up_to)| *known == generation && attempt <= *up_to)
    }

    fn take_out(&mut self, generation: Generation) -> Option<Arc<Adopting>> {
        let gone = self.partitions.remove(&generation);
        gone.inspect(|gone| gone.end())
    }
}

/// All of a shard.
#[derive(Default)]
pub(in crate::server) struct Adoptions {
    known: Mutex<Known>,
    changed: Condvar,
}

/// Memory is being taken for this attempt. Nobody else takes any for this life of the model meanwhile.
pub(super) struct Taking<'a> {
    of: &'a Adoptions,
    generation: Generation,
    attempt: u64,
    /// What the attempt before has left.
    pub(super) before: Option<Arc<Adopting>>,
}

impl Adoptions {
    /// The partition of this life of a model.
    pub(in crate::server) fn of(&self, generation: Generation) -> Option<Arc<Adopting>> {
        self.known.lock().partitions.get(&generation).cloned()
    }

    /// As long as this is held, nobody begins.
    pub(in crate::server) fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock()
    }

    pub(in crate::server) fn all(&self) -> Vec<Arc<Adopting>> {
        self.known.lock().partitions.values().cloned().collect()
    }

    /// Partitions that are being filled, for status.
    pub(in crate::server) fn status(&self) -> Vec<Value> {
        let adopting = self.all();
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

    /// It is this attempt's turn to take memory; `None` if it has done so. The attempt starts from the block map of
    /// `in_force`: a partition under that map is the model's, though nobody has told this shard yet.
    pub(super) fn begin(
        &self,
        generation: Generation,
        attempt: u64,
        in_force: Epoch,
    ) -> Result<Option<Taking<'_>>, Refusal> {
        let until = Instant::now() + PATIENCE;
        let mut known = self.known.lock();
        loop {
            let there = known.partitions.get(&generation).map(|partition| partition.attempt());
            let newest = there.max(known.taking.get(&generation).copied());
            if newest.is_some_and(|newest| newest > attempt) {
                return Err(Refusal::other("a later attempt to move the model has begun"));
            }
            if known.is_void(generation, attempt) {
                return Err(Refusal::other("the move was abandoned"));
            }
            if there == Some(attempt) {
                return Ok(None);
            }
            let is_in_force = |partition: &Arc<Adopting>| partition.record().epoch <= in_force;
            if known.partitions.get(&generation).is_some_and(is_in_force) {
                return Err(Refusal::other(format!(
                    "this shard has not switched to block map {in_force} yet: run the command again"
                )));
            }
            let Some(newest) = known.taking.get_mut(&generation) else { break };
            *newest = attempt;
            if self.changed.wait_until(&mut known, until).timed_out() {
                return Err(Refusal::other(
                    "memory for an earlier attempt to move the model is being taken still: is the host short of it?",
                ));
            }
        }
        known.taking.insert(generation, attempt);
        let before = known.take_out(generation);
        Ok(Some(Taking { of: self, generation, attempt, before }))
    }

    /// Nothing is to come of this attempt, nor of those before it. But an earlier partition that is whole stays until
    /// the registry has said what becomes of it: its map may be in force.
    pub(super) fn abandon(&self, generation: Generation, attempt: u64) {
        let mut known = self.known.lock();
        known.void.retain(|(of, _)| *of != generation);
        if known.void.len() >= MAX_VOID {
            known.void.pop_front();
        }
        known.void.push_back((generation, attempt));
        let is_void = |partition: &Arc<Adopting>| {
            partition.attempt() == attempt || partition.attempt() < attempt && partition.filled().is_err()
        };
        if known.partitions.get(&generation).is_some_and(is_void) {
            known.take_out(generation);
        }
        self.changed.notify_all();
    }

    /// This one will never be.
    pub(super) fn forget(&self, gone: &Arc<Adopting>) {
        gone.end();
        let mut known = self.known.lock();
        let generation = gone.record().generation;
        if known.partitions.get(&generation).is_some_and(|partition| Arc::ptr_eq(partition, gone)) {
            known.partitions.remove(&generation);
        }
    }

    /// Something has come of it.
    pub(super) fn take_out(&self, generation: Generation) {
        self.known.lock().take_out(generation);
    }

    /// The model is no more.
    pub(in crate::server) fn delete(&self, generation: Generation) {
        // A later attempt may have begun here only if its memory is being taken.
        if self.known.lock().taking.contains_key(&generation) {
            self.abandon(generation, u64::MAX);
        }
        self.take_out(generation);
    }
}

impl Taking<'_> {
    /// Its memory is there.
    pub(super) fn done(self, partition: Adopting) -> Result<(), Refusal> {
        let mut known = self.of.known.lock();
        if known.is_void(self.generation, self.attempt) {
            return Err(Refusal::other("the move was abandoned"));
        }
        // A later attempt that waits goes on with it.
        known.partitions.insert(self.generation, Arc::new(partition));
        match known.taking.get(&self.generation) {
            Some(newest) if *newest > self.attempt => {
                Err(Refusal::other("a later attempt to move the model has begun"))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        self.of.known.lock().taking.remove(&self.generation);
        self.of.changed.notify_all();
    }
}
