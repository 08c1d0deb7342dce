//! `gradfs drain`: all that a shard has moves to others, and it takes no more.
//!
//! The leads of the models do it; this asks them, one model after the other, until the registry says that nothing is
//! left. So it can be said again, and goes on where it has stopped.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::registry::{Registry, RegistryError};
use libmodelio::wire::{Message, ModelRecord, Refusal, ShardRecord};
use serde_json::Value;

use super::status::moving;
use super::{deadline, registry, registry_error};
use crate::config::cluster::{DrainConfig, ShardName};
use crate::error::Error;
use crate::progress::Progress;

/// How often the lead is asked how far it is.
const LOOK: Duration = Duration::from_millis(200);
/// What another move, or a change of the lead, has kept from being done is asked for again after this time.
const AGAIN: Duration = Duration::from_millis(300);
/// The lead gives up before we do, and says why.
const GRACE: Duration = Duration::from_secs(30);
/// A shard that has been left may hear of that a moment later.
const SETTLES: Duration = Duration::from_secs(5);

/// Moves all models off a shard.
///
/// # Errors
/// When the registry knows no such shard, when a model cannot be moved, or not in time. What has moved stays so.
pub fn run(config: &DrainConfig) -> Result<(), Error> {
    let at = &config.registry;
    let table = registry(at);
    let failed = |error| registry_error(at, error);
    let until = Instant::now() + config.timeout;
    let shards = table.shards(deadline()).map_err(failed)?;
    let Some(shard) = find(&shards, &config.shard) else {
        let known: Vec<String> =
            shards.iter().map(|shard| format!("{} (shard {})", shard.address, shard.shard)).collect();
        let what = match &config.shard {
            ShardName::Number(number) => format!("there is no shard {number}"),
            ShardName::At(at) => format!("no shard has announced itself from {at}"),
        };
        return Err(Error::new(what)
            .hint(format!("there are {}", if known.is_empty() { "none".into() } else { known.join(", ") })));
    };
    table.drain(shard.shard, deadline()).map_err(failed)?;
    let mut moved = 0;
    // A model that is being made may not have been there at the first look.
    loop {
        let left = models_on(&table, shard).map_err(failed)?;
        if left.is_empty() {
            break;
        }
        for record in left {
            move_one(config, &table, shard, record, until)?;
            moved += 1;
        }
    }
    keeps_nothing(shard)?;
    println!("gradfs: shard {} at {} takes no more models", shard.shard, shard.address);
    let then = match serves_registry(shard) {
        true => "but it is the registry, too, and has to stay for that",
        false => "it can be stopped",
    };
    println!("gradfs: {moved} model(s) moved off it, and nothing is left there: {then}");
    Ok(())
}

/// The shard has the last word: a registry that was started anew does not know what there is.
fn keeps_nothing(shard: &ShardRecord) -> Result<(), Error> {
    let until = Instant::now() + SETTLES;
    loop {
        let Some(status) = status_of(&shard.address) else { return Ok(()) };
        let models = status["models"].as_array().cloned().unwrap_or_default();
        let names: Vec<&str> = models.iter().filter_map(|model| model["name"].as_str()).collect();
        if names.is_empty() {
            return Ok(());
        }
        if Instant::now() >= until {
            let what = format!(
                "shard {} at {} has blocks of models that the registry does not know: {}",
                shard.shard,
                shard.address,
                names.join(", ")
            );
            return Err(
                Error::new(what).hint("do not stop it while they are used: the registry has lost its table")
            );
        }
        std::thread::sleep(AGAIN);
    }
}

fn find<'a>(shards: &'a [ShardRecord], wanted: &ShardName) -> Option<&'a ShardRecord> {
    shards.iter().find(|shard| match wanted {
        ShardName::Number(number) => shard.shard.0 == *number,
        ShardName::At(endpoint) => shard.address == endpoint.to_string(),
    })
}

/// Models that have blocks on a shard.
fn models_on(table: &impl Registry, shard: &ShardRecord) -> Result<Vec<ModelRecord>, RegistryError> {
    let mut found = Vec::new();
    for name in table.models(deadline())? {
        match table.model(&name, deadline()) {
            Ok(record) if owns(&record, shard) => found.push(record),
            // It was deleted meanwhile.
            Ok(_) | Err(RegistryError::NoModel(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

fn owns(record: &ModelRecord, shard: &ShardRecord) -> bool {
    record.owners.iter().any(|(owner, _)| *owner == shard.shard)
}

fn status_of(address: &str) -> Option<Value> {
    let asked = AdminPeer::connect(address, deadline())
        .and_then(|mut peer| peer.request(&Message::Status, &[], deadline()));
    match asked {
        Ok((Message::Text, text)) => serde_json::from_slice(&text).ok(),
        _ => None,
    }
}

fn serves_registry(shard: &ShardRecord) -> bool {
    status_of(&shard.address).is_some_and(|status| status["registry"] == "here")
}

/// Asks whoever leads the model until it has moved.
fn move_one(
    config: &DrainConfig,
    table: &impl Registry,
    shard: &ShardRecord,
    mut record: ModelRecord,
    until: Instant,
) -> Result<(), Error> {
    let name = record.name.clone();
    let failed = |why: String| {
        Error::new(format!("{name} cannot be moved off shard {} at {}: {why}", shard.shard, shard.address))
    };
    let registry_failed = |error| registry_error(&config.registry, error);
    loop {
        let asked = ask_lead(table, shard, &record, until).map_err(registry_failed)?;
        let now = match table.model(&name, deadline()) {
            Ok(now) => now,
            Err(RegistryError::NoModel(_)) => return Ok(()),
            Err(error) => return Err(registry_failed(error)),
        };
        if !owns(&now, shard) {
            if let Err(why) = asked {
                eprintln!("gradfs: {name} has moved, but: {why}");
            }
            return Ok(());
        }
        let life = |record: &ModelRecord| (record.generation, record.epoch, record.ready);
        // Somebody else moves it, or it is still being made: that passes.
        let passes = life(&now) != life(&record) || !now.ready;
        let why = asked.err().unwrap_or_else(|| "the registry says that it is still there".into());
        if !passes || Instant::now() >= until {
            return Err(failed(why));
        }
        record = now;
        std::thread::sleep(AGAIN);
    }
}

/// Asks the lead to move a model, and shows how far it is. What it refuses, or why it does not answer, is the inner
/// error.
fn ask_lead(
    table: &impl Registry,
    shard: &ShardRecord,
    record: &ModelRecord,
    until: Instant,
) -> Result<Result<(), String>, RegistryError> {
    let shards = table.shards(deadline())?;
    let Some(lead) = shards.into_iter().find(|shard| shard.shard == record.lead) else {
        return Ok(Err(format!(
            "shard {}, which leads the model, is not announced: is it running?",
            record.lead
        )));
    };
    let left = until.saturating_duration_since(Instant::now());
    let message = Message::Move {
        model: record.name.clone(),
        generation: record.generation,
        off: shard.shard,
        timeout_ms: u32::try_from(left.as_millis()).unwrap_or(u32::MAX),
    };
    let (tell, told) = channel();
    let address = lead.address.clone();
    let asks = move || {
        let answer = AdminPeer::connect(&address, deadline())
            .and_then(|mut peer| peer.request(&message, &[], until + GRACE));
        // Nobody waits any more.
        let _ = tell.send(answer);
    };
    if let Err(error) = std::thread::Builder::new().name("asks-lead".into()).spawn(asks) {
        return Ok(Err(format!("no thread: {error}")));
    }
    let progress = Progress::things(format!("{}: moves", record.name));
    loop {
        match told.recv_timeout(LOOK) {
            Ok(Ok((Message::Done, _))) => return Ok(Ok(())),
            Ok(Ok((other, _))) => return Ok(Err(format!("its lead answers with {}", other.name()))),
            Ok(Err(AdminError::Refusal(Refusal::NoModel(_)))) => {
                return Ok(Err("its lead does not have it: run the command again".into()));
            }
            Ok(Err(error)) => return Ok(Err(error.to_string())),
            Err(RecvTimeoutError::Disconnected) => return Ok(Err("asking its lead panicked".into())),
            Err(RecvTimeoutError::Timeout) => show(&progress, record, &lead),
        }
    }
}

fn show(progress: &Progress, record: &ModelRecord, lead: &ShardRecord) {
    if !progress.is_shown() {
        return;
    }
    let Some(status) = status_of(&lead.address) else { return };
    let models = status["models"].as_array().cloned().unwrap_or_default();
    let Some(model) = models.into_iter().find(|model| model["name"] == *record.name) else { return };
    if let Some(said) = moving(&model["lead"]) {
        let of = |key: &str| model["lead"]["moving"][key].as_u64().unwrap_or_default();
        progress.set(of("blocks"), of("of"), format!("{} {said}", record.name));
    }
}
