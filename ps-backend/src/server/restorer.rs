//! The thread that restores models whose blocks are lost, and that looks after the shards whose death would lose some.

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::registry::RegistryError;
use libmodelio::vocabulary::ids::{Generation, Version};
use libmodelio::wire::{Lineage, LostModel, MAX_HELD, Moved, ShardRecord};
use parking_lot::Mutex;

use super::directory::Directory;
use super::shared::Shared;
use crate::create::{self, CreateError, Restored};
use crate::losses::LossWatch;
use crate::offers::Offer;

/// The time between two looks after other shards.
const TICK: Duration = Duration::from_millis(500);
/// The registry is asked at every so many looks, unless something seems to be lost.
const LOOKS: u32 = 4;
/// The longest wait for a sign of life. Only a refusal means that nobody is there.
const PROBE: Duration = Duration::from_secs(1);

/// A restoration has ended.
struct Ended {
    model: String,
    is_restored: bool,
    why: String,
}

/// What the thread has.
struct Restorer {
    watch: LossWatch,
    /// The lives that this shard is making.
    making: Arc<Mutex<BTreeSet<Generation>>>,
    ends: Sender<Ended>,
    ended: Receiver<Ended>,
    began: Instant,
}

/// Restores models as long as the process lives.
pub(super) fn run(shared: &Weak<Shared>) {
    let (ends, ended) = channel();
    let (watch, making, began) = (LossWatch::default(), Arc::default(), Instant::now());
    let mut restorer = Restorer { watch, making, ends, ended, began };
    // What it has lost by being started anew is restored soon.
    let mut looks = LOOKS;
    loop {
        let Some(shared) = shared.upgrade() else { return };
        shared.ending.pause(TICK);
        if shared.ending.has_begun() {
            return;
        }
        looks += 1;
        let found_dead = restorer.probe(&shared);
        restorer.hear_ends();
        if found_dead || restorer.watch.is_anxious() || looks >= LOOKS {
            looks = 0;
            restorer.look(&shared);
        }
    }
}

impl Restorer {
    /// Looks after other shards, all at once. Returns whether one was found dead.
    fn probe(&mut self, shared: &Shared) -> bool {
        let watched = self.watch.watched(shared.identity.number());
        let is_refused = |of: &ShardRecord| {
            let met = AdminPeer::connect(&of.address, Instant::now() + PROBE);
            matches!(met, Err(AdminError::ConnectionRefused { .. }))
        };
        let refused: Vec<bool> = std::thread::scope(|scope| {
            let probes: Vec<_> = watched.iter().map(|of| scope.spawn(move || is_refused(of))).collect();
            probes.into_iter().map(|probe| probe.join().unwrap_or(false)).collect()
        });
        let mut found_dead = false;
        for (of, is_refused) in watched.iter().zip(refused) {
            if !self.watch.probed(of.shard, is_refused) {
                continue;
            }
            found_dead = true;
            tracing::warn!(shard = %of.shard, address = %of.address, "nobody listens there: the shard is dead");
            let gone = shared.directory.ask(|registry, deadline| registry.withdraw(of.shard, deadline));
            if let Err(error) = gone {
                tracing::debug!(shard = %of.shard, %error, "the registry does not hear that it is dead");
            }
        }
        found_dead
    }

    fn hear_ends(&mut self) {
        while let Ok(Ended { model, is_restored, why }) = self.ended.try_recv() {
            if self.watch.ended(&model, is_restored, self.began.elapsed()) {
                tracing::error!("{why}");
            }
        }
    }

    /// Asks the registry, and begins what is due.
    fn look(&mut self, shared: &Arc<Shared>) {
        let shard = shared.identity.number();
        let held = held(shared);
        // With more than fit into a request, only other shards tell that this one has lost some.
        let held = if held.len() > MAX_HELD { Vec::new() } else { held };
        let asks = if held.is_empty() && shared.models.lock().len() > MAX_HELD / 2 {
            Default::default()
        } else {
            shard
        };
        let makes: Vec<Generation> = self.making.lock().iter().copied().collect();
        let of = (&held[..], &makes[..]);
        let losses = shared.directory.ask(|registry, deadline| registry.losses(asks, of, deadline));
        let Ok(losses) = losses else { return };
        for lost in self.watch.lost(shard, losses, self.began.elapsed()) {
            let (of, making, ends) = (Arc::clone(shared), Arc::clone(&self.making), self.ends.clone());
            let model = lost.model.clone();
            let restores = move || {
                let (is_restored, why) = restore(&of, &lost, &making);
                let _ = ends.send(Ended { model: lost.model, is_restored, why });
            };
            if let Err(error) = std::thread::Builder::new().name("restores".into()).spawn(restores) {
                let why = format!("no thread to restore a model: {error}");
                let _ = self.ends.send(Ended { model, is_restored: false, why });
            }
        }
    }
}

/// The models that this shard has partitions of, or is about to have.
fn held(shared: &Shared) -> Vec<Generation> {
    // What is finished meanwhile goes the way of this order.
    let mut held: BTreeSet<Generation> = shared.creations.lock().keys().copied().collect();
    held.extend(shared.incoming.all().iter().map(|incoming| incoming.moved.record.generation));
    held.extend(shared.models.lock().values().map(|model| model.generation));
    held.into_iter().collect()
}

/// Restores a model. Returns whether it is there again, and if not, why.
fn restore(shared: &Shared, lost: &LostModel, making: &Mutex<BTreeSet<Generation>>) -> (bool, String) {
    let name = &lost.model;
    let shards: Vec<String> = lost.shards.iter().map(|shard| shard.to_string()).collect();
    let since = Instant::now();
    tracing::warn!(model = %name, "blocks are lost with shard {}: the model is restored", shards.join(", "));
    let outcome = {
        let restoration = Restoration { shared, making, lives: Mutex::default() };
        restored(&shared.directory, lost, &restoration)
    };
    match outcome {
        Ok(Restored { record, snapshot, version, weights, damaged }) => {
            damaged
                .iter()
                .for_each(|why| tracing::error!(model = %name, "a snapshot was passed over: {why}"));
            let seconds = since.elapsed().as_secs_f64();
            tracing::warn!(
                model = %name, generation = %record.generation,
                "restored from version {snapshot} in {seconds:.1} s: it goes on as version {version}"
            );
            if let Some(weights) = weights {
                let older = version.0.saturating_sub(record.lineage.begins.0);
                tracing::warn!(
                    model = %name,
                    "its weights are those of version {weights}, which a mount had: optimizer state is {older} versions older"
                );
            }
            (true, String::new())
        }
        // Somebody else was first.
        Err(CreateError::Registry(
            error @ (RegistryError::Generation { .. }
            | RegistryError::Epoch { .. }
            | RegistryError::NoModel(_)),
        )) => {
            tracing::info!(model = %name, "not restored here: {error}");
            (true, String::new())
        }
        Err(error) => (false, format!("model {name} is not restored, which is tried again: {error}")),
    }
}

fn restored(
    directory: &Directory,
    lost: &LostModel,
    restoration: &Restoration<'_>,
) -> Result<Restored, CreateError> {
    let record = directory.ask(|registry, deadline| registry.model(&lost.model, deadline))?;
    if record.generation != lost.generation {
        let (model, expected, got) = (lost.model.clone(), record.generation, lost.generation);
        return Err(RegistryError::Generation { model, expected, got }.into());
    }
    let by = restoration.shared.identity.number();
    directory.with(|registry| create::restore(registry, record, (by, restoration)))
}

/// One restoration, with the lives that it has begun. They are given up with it, unless they are there.
struct Restoration<'a> {
    shared: &'a Shared,
    making: &'a Mutex<BTreeSet<Generation>>,
    lives: Mutex<Vec<Generation>>,
}

impl create::Restorer for Restoration<'_> {
    fn begins(&self, generation: Generation, lineage: &Lineage, snapshot: Version) {
        self.making.lock().insert(generation);
        self.lives.lock().push(generation);
        if lineage.newest {
            self.shared.snapshots.offers.begin(generation, lineage, snapshot);
        }
    }

    fn offer(&self, generation: Generation) -> Option<Offer> {
        self.shared.snapshots.offers.wait(|offers, now| offers.choose(generation, now))
    }

    fn bring(&self, generation: Generation, to: &Moved) -> Result<(), CreateError> {
        self.shared.snapshots.offers.ask(generation, to.encode()?);
        let is_brought = self.shared.snapshots.offers.wait(|offers, now| offers.has_brought(generation, now));
        if is_brought { Ok(()) } else { Err(CreateError::NotBrought) }
    }
}

impl Drop for Restoration<'_> {
    fn drop(&mut self) {
        for life in self.lives.lock().drain(..) {
            self.making.lock().remove(&life);
            self.shared.snapshots.offers.end(life);
        }
    }
}
