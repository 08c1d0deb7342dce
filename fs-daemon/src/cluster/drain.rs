//! `gradfs drain`: all that a shard has moves to others, and it takes no more; or that is taken back.
//!
//! The coordinators of the models move them. This command asks them, one model after the other, until the
//! registry says that nothing is left. So it can be repeated, and goes on where it has stopped. A signal
//! stops the move that is under way.

mod coordinators;

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::registry::{Registry, RegistryError};
use libmodelio::vocabulary::ids::ShardId;
use libmodelio::wire::{Fate, HeldPartition, ModelRecord, ShardRecord};

use super::{ask, deadline, explain_new_registry, registry, registry_error};
use crate::config::cluster::{DrainConfig, ShardName};
use crate::config::registry::RegistryAt;
use crate::error::Error;
use crate::signals::Interrupt;
use coordinators::{Unmoved, stop_move};

/// The pause before a request is repeated that another move, or a change of the coordinator, has prevented.
const RETRY_PAUSE: Duration = Duration::from_millis(300);
/// A shard that a model has left may learn of that a moment later.
const SETTLES: Duration = Duration::from_secs(5);
const NOBODY: &str = "no other shard takes models";

/// Moves all models off a shard, or takes that back.
///
/// # Errors
/// Fails when the registry knows no such shard, or when a model cannot be moved, or not in time. Models that
/// have moved stay moved.
pub fn run(config: &DrainConfig) -> Result<(), Error> {
    // Before there are threads.
    let interrupt = Interrupt::install()?;
    let table = &*registry(&config.registry)?;
    let failed = |error| registry_error(&config.registry, error);
    let shards = table.shards(deadline()).map_err(failed)?;
    let shard =
        find(&shards, &config.shard).map_err(|error| explain_new_registry(&config.registry, error))?;
    if config.cancel {
        return cancel(config, table, shard);
    }
    table.drain(shard.shard, deadline()).map_err(failed)?;
    let mut moved = Vec::new();
    let drain = Drain {
        registry: &config.registry,
        timeout: config.timeout,
        hold: config.hold,
        table,
        shard,
        interrupt: Some(interrupt),
        ends: false,
    };
    loop {
        if let Err(Failure { error, undo }) = drain.all(&mut moved) {
            return Err(give_up(table, shard, &moved, error, undo));
        }
        if keeps_nothing(config, table, shard)? {
            break;
        }
    }
    println!("gradfs: shard {} at {} takes no more models", shard.shard, shard.address);
    let serves_registry = ask(&shard.address).is_ok_and(|status| status["registry"] == "here");
    let then = match serves_registry {
        true => "but it is the registry, too, and has to stay for that",
        false => "it can be stopped",
    };
    println!(
        "gradfs: {} model(s) moved off it{}, and nothing is left there: {then}",
        moved.len(),
        named(&moved)
    );
    Ok(())
}

/// The reason why a shard could not be drained.
struct Failure {
    error: Error,
    /// Nothing is under way any more. If nothing has moved either, the drain is undone.
    undo: bool,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure { error, undo: true }
    }
}

fn named(models: &[String]) -> String {
    if models.is_empty() { String::new() } else { format!(" ({})", models.join(", ")) }
}

/// The error that the command ends with. A drain that has moved nothing leaves nothing behind, not even the mark,
/// unless that was there before.
fn give_up(table: &dyn Registry, shard: &ShardRecord, moved: &[String], error: Error, undo: bool) -> Error {
    let back = format!("gradfs drain --cancel {} takes that back", shard.shard);
    if !moved.is_empty() {
        return error.hint(format!(
            "{} model(s) have moved already{}; the shard takes no more models: run the command again to go on, \
             or {back}",
            moved.len(),
            named(moved)
        ));
    }
    if shard.draining || !undo {
        return error
            .hint(format!("nothing has moved that is known of; the shard takes no more models: {back}"));
    }
    match table.undrain(shard.shard, deadline()) {
        Ok(()) => error.hint("nothing has moved, and the shard takes models as before"),
        Err(why) => {
            error.hint(format!("nothing has moved, but the shard takes no more models ({why}): {back}"))
        }
    }
}

struct Drain<'a> {
    registry: &'a RegistryAt,
    timeout: Duration,
    hold: Option<Duration>,
    table: &'a dyn Registry,
    /// The shard's record before the drain.
    shard: &'a ShardRecord,
    /// What stops it, if something may.
    interrupt: Option<Interrupt>,
    /// The shard is about to end, as others may be, and moves nothing once none of them stays.
    ends: bool,
}

/// A shard that is about to end, and hands over what it has.
pub(super) struct HandOver<'a> {
    registry: &'a RegistryAt,
    table: Arc<dyn Registry>,
    shard: ShardRecord,
}

impl<'a> HandOver<'a> {
    /// Looks for other shards. Nothing if there is none, or the registry does not answer.
    pub(super) fn begin(registry: &'a RegistryAt, shard: ShardId) -> Option<HandOver<'a>> {
        let table = self::registry(registry).ok()?;
        let shards = table.shards(deadline()).ok()?;
        let (ours, others): (Vec<_>, Vec<_>) = shards.into_iter().partition(|of| of.shard == shard);
        let shard = ours.into_iter().next().filter(|_| !others.is_empty())?;
        Some(HandOver { registry, table, shard })
    }

    /// Moves all models to shards that stay, if there are any. Returns which have moved, and why others have not.
    pub(super) fn run(&self, timeout: Duration) -> (Vec<String>, Result<(), Error>) {
        let (mut moved, table) = (Vec::new(), &*self.table);
        let HandOver { registry, shard, .. } = self;
        let drain = Drain { registry, timeout, hold: None, table, shard, interrupt: None, ends: true };
        if drain.is_alone() {
            return (moved, Err(Error::new(NOBODY)));
        }
        let outcome = drain.all(&mut moved).map_err(|Failure { error, .. }| error);
        (moved, outcome)
    }
}

/// The outcome for a model that was on the shard.
enum Left {
    Moved,
    /// The model is deleted.
    Deleted,
}

impl Drain<'_> {
    /// What has stopped it.
    fn interrupt(&self) -> Option<&str> {
        self.interrupt.as_ref()?.why()
    }

    /// Whether no other shard takes models, as far as is known.
    fn is_alone(&self) -> bool {
        let takes = |of: &ShardRecord| !of.draining && of.shard != self.shard.shard;
        self.table.shards(deadline()).is_ok_and(|shards| !shards.iter().any(takes))
    }

    fn all(&self, moved: &mut Vec<String>) -> Result<(), Failure> {
        let until = Instant::now() + self.timeout;
        // A model that is being made may not have been there at the first look.
        loop {
            let left =
                models_on(self.table, self.shard).map_err(|error| registry_error(self.registry, error))?;
            if left.is_empty() {
                return Ok(());
            }
            for record in left {
                if let Some(why) = self.interrupt() {
                    return Err(Error::new(format!("interrupted by {why}")).into());
                }
                let name = record.name.clone();
                match self.one(record, until)? {
                    Left::Moved => moved.push(name),
                    Left::Deleted => println!("gradfs: {name} was deleted meanwhile"),
                }
            }
        }
    }

    /// Asks the model's coordinator until the model has moved.
    fn one(&self, mut record: ModelRecord, until: Instant) -> Result<Left, Failure> {
        let (shard, name) = (self.shard, record.name.clone());
        // The outcome of a requested move is unknown.
        let unknown = |error| Failure { error: registry_error(self.registry, error), undo: false };
        loop {
            let asked = self.ask_coordinator(&record, until);
            let is_late = || Instant::now() >= until;
            let now = match self.table.model(&name, deadline()) {
                Ok(now) if now.generation == record.generation => now,
                Ok(_) | Err(RegistryError::NoModel(_)) => {
                    if self.is_deleted(&record).map_err(unknown)? || is_late() {
                        return Ok(Left::Deleted);
                    }
                    // The registry was restarted: it hears of the model again.
                    std::thread::sleep(RETRY_PAUSE);
                    continue;
                }
                Err(error) => return Err(unknown(error)),
            };
            if !owns(&now, shard) {
                if let Err(Unmoved { why, .. }) = asked {
                    eprintln!("gradfs: {name} has moved, but: {why}");
                }
                return Ok(Left::Moved);
            }
            // Somebody else moves it, or it is still being made: that passes.
            let changes = (now.epoch, now.ready) != (record.epoch, record.ready) || !now.ready;
            let still_there = || Unmoved::from("the registry says that it is still there".to_owned());
            let Unmoved { why, passes } = asked.err().unwrap_or_else(still_there);
            if !(passes || changes) || is_late() || self.interrupt().is_some() {
                let why =
                    format!("{name} cannot be moved off shard {} at {}: {why}", shard.shard, shard.address);
                return Err(Error::new(why).into());
            }
            // The shard that was to take it may end as well.
            if self.ends && self.is_alone() {
                return Err(Error::new(format!("{name} does not move: {NOBODY}")).into());
            }
            record = now;
            std::thread::sleep(RETRY_PAUSE);
        }
    }

    /// Whether the registry knows that the model is deleted.
    fn is_deleted(&self, record: &ModelRecord) -> Result<bool, RegistryError> {
        let ModelRecord { name, generation, epoch, .. } = record;
        let held = [HeldPartition { model: name.clone(), generation: *generation, epoch: *epoch }];
        let (_, fates) = self.table.holding(self.shard.shard, &held, &[], deadline())?;
        Ok(!matches!(fates[..], [Fate::Unknown | Fate::Known { .. }]))
    }
}

/// Takes the mark back, and stops what moves.
fn cancel(config: &DrainConfig, table: &dyn Registry, shard: &ShardRecord) -> Result<(), Error> {
    let failed = |error| registry_error(&config.registry, error);
    // From now on no coordinator begins to move anything off the shard.
    table.undrain(shard.shard, deadline()).map_err(failed)?;
    let was = if shard.draining { "" } else { ", as before: it was not being drained" };
    println!("gradfs: shard {} at {} takes models{was}", shard.shard, shard.address);
    let mut unstopped = Vec::new();
    for record in models_on(table, shard).map_err(failed)? {
        if let Err(why) = stop_move(table, shard, &record) {
            unstopped.push(format!("{}: {why}", record.name));
        }
    }
    let stay: Vec<String> =
        models_on(table, shard).map_err(failed)?.into_iter().map(|record| record.name).collect();
    println!("gradfs: {} model(s) have blocks there{}", stay.len(), named(&stay));
    let status = ask(&shard.address).unwrap_or_default();
    let left: Vec<String> = serde_json::from_value(status["left"].clone()).unwrap_or_default();
    let there = table.models(deadline()).map_err(failed)?;
    let left: Vec<String> = left.into_iter().filter(|name| there.contains(name)).collect();
    if !left.is_empty() {
        let count = left.len();
        println!("gradfs: {count} model(s) have moved off it, and stay where they are{}", named(&left));
    }
    if unstopped.is_empty() {
        return Ok(());
    }
    let what = format!("what moves models off shard {} could not be stopped: ", shard.shard);
    Err(Error::new(what + &unstopped.join("; ")).hint("gradfs status tells what comes of it"))
}

/// The shard has the last word: a registry that was restarted does not know all models. False if the
/// registry has learned of a model meanwhile.
fn keeps_nothing(config: &DrainConfig, table: &dyn Registry, shard: &ShardRecord) -> Result<bool, Error> {
    let until = Instant::now() + SETTLES;
    loop {
        let status = ask(&shard.address);
        let models = status.as_ref().ok().and_then(|status| status["models"].as_array());
        let names: Option<Vec<&str>> =
            models.map(|models| models.iter().filter_map(|model| model["name"].as_str()).collect());
        if names.as_ref().is_some_and(Vec::is_empty) {
            return Ok(true);
        }
        let known = models_on(table, shard).map_err(|error| registry_error(&config.registry, error))?;
        if !known.is_empty() {
            return Ok(false);
        }
        if Instant::now() >= until {
            let (what, hint) = match names {
                None => (
                    "does not answer, and may have blocks of models still".to_owned(),
                    "the registry knows of none, but may have been restarted: run the command again when the shard \
                     answers",
                ),
                Some(names) => (
                    format!("has blocks of models that the registry does not know: {}", names.join(", ")),
                    "do not stop it while they are used: the registry was restarted, and does not know them yet",
                ),
            };
            let ShardRecord { shard, address, .. } = shard;
            return Err(Error::new(format!("shard {shard} at {address} {what}")).hint(hint));
        }
        std::thread::sleep(RETRY_PAUSE);
    }
}

fn find<'a>(shards: &'a [ShardRecord], wanted: &ShardName) -> Result<&'a ShardRecord, Error> {
    let found = shards.iter().find(|shard| match wanted {
        ShardName::Number(number) => shard.shard.0 == *number,
        ShardName::At(endpoint) => shard.address == endpoint.to_string(),
    });
    found.ok_or_else(|| {
        let known: Vec<String> =
            shards.iter().map(|shard| format!("{} (shard {})", shard.address, shard.shard)).collect();
        let what = match wanted {
            ShardName::Number(number) => format!("there is no shard {number}"),
            ShardName::At(at) => format!("no shard has announced itself from {at}"),
        };
        let there = if known.is_empty() { "none".into() } else { known.join(", ") };
        Error::new(what).hint(format!("there are {there}"))
    })
}

/// Models that have blocks on a shard.
fn models_on(table: &dyn Registry, shard: &ShardRecord) -> Result<Vec<ModelRecord>, RegistryError> {
    let mut found = Vec::new();
    for name in table.models(deadline())? {
        match table.model(&name, deadline()) {
            Ok(record) if owns(&record, shard) => found.push(record),
            // The model was deleted meanwhile.
            Ok(_) | Err(RegistryError::NoModel(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

fn owns(record: &ModelRecord, shard: &ShardRecord) -> bool {
    record.owners.iter().any(|(owner, _)| *owner == shard.shard)
}
