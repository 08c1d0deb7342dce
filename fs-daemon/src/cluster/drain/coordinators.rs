//! Asking the coordinator of a model to move it off a shard, or to stop that, and any shard how it is.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::registry::{Registry, RegistryError};
use libmodelio::wire::{Message, ModelRecord, Refusal, ShardRecord};
use serde_json::Value;

use crate::cluster::deadline;
use crate::cluster::interrupt::Interrupt;
use crate::cluster::status::moving;
use crate::config::cluster::DrainConfig;
use crate::progress::Progress;

/// How often the coordinator is asked how far it is, and whether somebody wants to stop is looked at.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The coordinator gives up before we do, and says why.
const GRACE: Duration = Duration::from_secs(30);

fn coordinator_of(
    table: &impl Registry,
    record: &ModelRecord,
) -> Result<Result<ShardRecord, String>, RegistryError> {
    let shards = table.shards(deadline())?;
    let coordinator = shards.into_iter().find(|shard| shard.shard == record.coordinator);
    Ok(coordinator.ok_or_else(|| {
        format!("shard {}, which coordinates the model, is not announced: is it running?", record.coordinator)
    }))
}

/// Asks the coordinator to move a model, and shows the progress. The inner error is the coordinator's
/// refusal, or the reason why it does not answer.
pub(super) fn ask_coordinator(
    config: &DrainConfig,
    table: &impl Registry,
    shard: &ShardRecord,
    record: &ModelRecord,
    until: Instant,
    interrupt: &Interrupt,
) -> Result<Result<(), String>, RegistryError> {
    let coordinator = match coordinator_of(table, record)? {
        Ok(coordinator) => coordinator,
        Err(why) => return Ok(Err(why)),
    };
    let millis = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
    let message = Message::Move {
        model: record.name.clone(),
        generation: record.generation,
        off: shard.shard,
        timeout_ms: millis(until.saturating_duration_since(Instant::now())),
        hold_ms: config.hold.map_or(0, millis),
    };
    let (sender, answers) = channel();
    let address = coordinator.address.clone();
    let asks = move || {
        let answer = AdminPeer::connect(&address, deadline())
            .and_then(|mut peer| peer.request(&message, &[], until + GRACE));
        // Sending fails only when nobody waits any more.
        let _ = sender.send(answer);
    };
    if let Err(error) = std::thread::Builder::new().name("asks-coord".into()).spawn(asks) {
        return Ok(Err(format!("no thread: {error}")));
    }
    let progress = Progress::things(format!("{}: moves", record.name));
    let mut stopped = false;
    loop {
        match answers.recv_timeout(CHECK_INTERVAL) {
            Ok(Ok((Message::Done, _))) => return Ok(Ok(())),
            Ok(Ok((other, _))) => return Ok(Err(format!("its coordinator answers with {}", other.name()))),
            Ok(Err(AdminError::Refusal(Refusal::NoModel(_)))) => {
                return Ok(Err("its coordinator does not have it: run the command again".into()));
            }
            Ok(Err(error)) => return Ok(Err(error.to_string())),
            Err(RecvTimeoutError::Disconnected) => return Ok(Err("asking its coordinator panicked".into())),
            Err(RecvTimeoutError::Timeout) => show(&progress, record, &coordinator),
        }
        if let Some(why) = interrupt.why()
            && !std::mem::replace(&mut stopped, true)
        {
            eprintln!("gradfs: {why}: the move of {} is stopped (once more to end at once)", record.name);
            if let Err(why) = stop_at(&coordinator, shard, record) {
                eprintln!("gradfs: {}: {why}", record.name);
            }
        }
    }
}

/// Has the coordinator stop what moves a model off a shard. Why it does not is the inner error.
pub(super) fn stop_move(
    table: &impl Registry,
    shard: &ShardRecord,
    record: &ModelRecord,
) -> Result<Result<(), String>, RegistryError> {
    Ok(coordinator_of(table, record)?.and_then(|coordinator| stop_at(&coordinator, shard, record)))
}

fn stop_at(coordinator: &ShardRecord, shard: &ShardRecord, record: &ModelRecord) -> Result<(), String> {
    let (model, generation) = (record.name.clone(), record.generation);
    let message = Message::StopMove { model, generation, off: shard.shard };
    let asked = AdminPeer::connect(&coordinator.address, deadline())
        .and_then(|mut peer| peer.request(&message, &[], deadline()));
    match asked {
        // The model is deleted, or has moved: nothing moves it from there.
        Ok(_) | Err(AdminError::Refusal(Refusal::NoModel(_) | Refusal::Generation { .. })) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

fn show(progress: &Progress, record: &ModelRecord, coordinator: &ShardRecord) {
    if !progress.is_shown() {
        return;
    }
    let Some(status) = status_of(&coordinator.address) else { return };
    let models = status["models"].as_array().cloned().unwrap_or_default();
    let Some(model) = models.into_iter().find(|model| model["name"] == *record.name) else { return };
    if let Some(said) = moving(&model["coordinator"]) {
        let of = |key: &str| model["coordinator"]["moving"][key].as_u64().unwrap_or_default();
        progress.set(of("blocks"), of("of"), format!("{} {said}", record.name));
    }
}

/// The status of a shard, if it answers.
pub fn status_of(address: &str) -> Option<Value> {
    let asked = AdminPeer::connect(address, deadline())
        .and_then(|mut peer| peer.request(&Message::Status, &[], deadline()));
    match asked {
        Ok((Message::Text, text)) => serde_json::from_slice(&text).ok(),
        _ => None,
    }
}
