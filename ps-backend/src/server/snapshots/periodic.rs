//! Taking snapshots as `control/snapshot_every` says, of the models that are coordinated here.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use libmodelio::vocabulary::ids::Generation;
use libmodelio::wire::{Message, Refusal};

use super::take;
use crate::server::coordinator::Coordinator;
use crate::server::peer_shard::AnswersHere;
use crate::server::saves::Subject;
use crate::server::shared::Shared;

/// How often it is looked whether a snapshot is due.
const TICK: Duration = Duration::from_millis(100);

/// So many snapshots are written at once: each takes the memory of its model.
const AT_ONCE: usize = 2;

/// A snapshot that is being written, and its store.
struct Running {
    snapshot: u64,
    to: String,
}

/// Takes snapshots when they are due, as long as the process lives.
pub(in crate::server) fn run(shared: &Weak<Shared>, here: AnswersHere) {
    let mut running = BTreeMap::new();
    loop {
        let Some(shared) = shared.upgrade() else { return };
        shared.ending.pause(TICK);
        if shared.ending.has_begun() {
            return;
        }
        let models: Vec<(String, Arc<Coordinator>)> = {
            let models = shared.models.lock();
            let of = models.iter().filter_map(|(name, of)| Some((name.clone(), of.coordinator.clone()?)));
            of.collect()
        };
        let stored = models.into_iter().filter(|(_, of)| !of.snapshots().1.to.is_empty());
        let stored: Vec<_> = stored.map(|(name, of)| (of.life().0, (name, of))).collect();
        let has_store = |model: Generation| stored.iter().any(|(of, _)| *of == model);
        shared.snapshots.schedules.retain(has_store);
        running.retain(|model, _| has_store(*model));
        for (generation, (name, coordinator)) in &stored {
            match running.get(generation) {
                Some(begun) if !has_ended(&shared, (name, coordinator), begun) => {}
                Some(_) => drop(running.remove(generation)),
                None if running.len() >= AT_ONCE => {}
                None => running.extend(begin(&shared, (name, coordinator), here).map(|of| (*generation, of))),
            }
        }
    }
}

/// Begins a snapshot of a model, if one is due.
fn begin(
    shared: &Arc<Shared>,
    (name, coordinator): (&str, &Coordinator),
    here: AnswersHere,
) -> Option<Running> {
    let ((version, settings), (generation, epoch)) = (coordinator.snapshots(), coordinator.life());
    if coordinator.failed().is_some() {
        return None;
    }
    shared.snapshots.schedules.with(generation, |schedule| schedule.is_to(&settings.to));
    if !shared.snapshots.begins(generation, settings.every, version) {
        return None;
    }
    let mut random = [0; 8];
    let taken = getrandom::fill(&mut random).map_err(Refusal::other).and_then(|()| {
        let (life, snapshot) = ((name, generation, epoch), u64::from_le_bytes(random));
        take(shared, life, (snapshot, settings.to.clone(), false), here).map(|_| snapshot)
    });
    match taken {
        Ok(snapshot) => Some(Running { snapshot, to: settings.to }),
        Err(refusal) => {
            failed(shared, (name, generation), (&settings.to, &refusal));
            None
        }
    }
}

/// Whether a snapshot that was begun is in its store, or has failed.
fn has_ended(
    shared: &Shared,
    (name, coordinator): (&str, &Coordinator),
    Running { snapshot, to }: &Running,
) -> bool {
    let (generation, _) = coordinator.life();
    match shared.snapshots.saves.told((generation, *snapshot, Subject::Job)) {
        Ok(Message::Saved { ended: false, .. }) => return false,
        // Whoever has written it has noted it.
        Ok(Message::Saved { .. }) => {}
        Ok(other) => failed(shared, (name, generation), (to, &Refusal::other(other.name()))),
        Err(refusal) => failed(shared, (name, generation), (to, &refusal)),
    }
    true
}

/// Notes that a snapshot has failed. The log has one line of several that fail one after the other.
fn failed(shared: &Shared, (name, generation): (&str, Generation), (to, refusal): (&str, &Refusal)) {
    let schedules = &shared.snapshots.schedules;
    let (now, why) = (schedules.now(), refusal.to_string());
    // It may go elsewhere by now.
    if schedules.with(generation, |schedule| schedule.to() == to && schedule.failed(why, now)) {
        tracing::warn!(model = name, "no snapshot was saved, and the job goes on: {refusal}");
    }
}
