//! Asking the coordinator of a model to move it off a shard, or to stop that, and any shard how it is.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use libmodelio::admin::AdminError;
use libmodelio::registry::Registry;
use libmodelio::wire::{Message, ModelRecord, Refusal, ShardRecord};

use super::Drain;
use crate::cluster::status::moving;
use crate::cluster::{ask, deadline, list, request};
use crate::progress;
use crate::signals::Interrupt;

/// How often the coordinator is asked how far it is, and whether somebody wants to stop is looked at.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The coordinator gives up before we do, and says why.
const GRACE: Duration = Duration::from_secs(30);

/// Why a model was not moved.
pub(super) struct Unmoved {
    pub why: String,
    /// Another move of the model is under way: that passes.
    pub passes: bool,
}

impl From<String> for Unmoved {
    fn from(why: String) -> Unmoved {
        Unmoved { why, passes: false }
    }
}

fn coordinator_of(table: &dyn Registry, record: &ModelRecord) -> Result<ShardRecord, String> {
    let shards = table.shards(deadline()).map_err(|error| error.to_string())?;
    let coordinator = shards.into_iter().find(|shard| shard.shard == record.coordinator);
    coordinator.ok_or_else(|| {
        format!("shard {}, which coordinates the model, is not announced: is it running?", record.coordinator)
    })
}

impl Drain<'_> {
    /// Asks the coordinator to move a model, and shows the progress.
    pub(super) fn ask_coordinator(&self, record: &ModelRecord, until: Instant) -> Result<(), Unmoved> {
        let coordinator = coordinator_of(self.table, record)?;
        let millis = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        let message = Message::Move {
            model: record.name.clone(),
            generation: record.generation,
            off: self.shard.shard,
            timeout_ms: millis(until.saturating_duration_since(Instant::now())),
            hold_ms: self.hold.map_or(0, millis),
        };
        let asks = || request(&coordinator.address, &message, until + GRACE);
        let progress = progress::bar(progress::THINGS, 0, format!("{}: moves", record.name));
        let answer = std::thread::scope(|scope| {
            let asked = std::thread::Builder::new().name("asks-coord".into()).spawn_scoped(scope, asks);
            let asked = asked.map_err(|error| format!("no thread: {error}"))?;
            let mut stopped = false;
            while !asked.is_finished() {
                std::thread::sleep(CHECK_INTERVAL);
                show(&progress, record, &coordinator);
                if let Some(why) = self.interrupt.as_ref().and_then(Interrupt::why)
                    && !std::mem::replace(&mut stopped, true)
                {
                    let name = &record.name;
                    eprintln!("gradfs: {why}: the move of {name} is stopped (once more to end at once)");
                    if let Err(why) = stop_at(&coordinator, self.shard, record) {
                        eprintln!("gradfs: {name}: {why}");
                    }
                }
            }
            asked.join().map_err(|_| "asking its coordinator panicked".to_owned())
        })?;
        match answer {
            Ok((Message::Done, _)) => Ok(()),
            Ok((other, _)) => Err(format!("its coordinator answers with {}", other.name()).into()),
            Err(AdminError::Refusal(Refusal::NoModel(_))) => {
                Err("its coordinator does not have it: run the command again".to_owned().into())
            }
            Err(error) => {
                let passes = matches!(error, AdminError::Refusal(Refusal::Moving { .. }));
                Err(Unmoved { why: error.to_string(), passes })
            }
        }
    }
}

/// Has the coordinator stop what moves a model off a shard.
pub(super) fn stop_move(
    table: &dyn Registry,
    shard: &ShardRecord,
    record: &ModelRecord,
) -> Result<(), String> {
    stop_at(&coordinator_of(table, record)?, shard, record)
}

fn stop_at(coordinator: &ShardRecord, shard: &ShardRecord, record: &ModelRecord) -> Result<(), String> {
    let (model, generation) = (record.name.clone(), record.generation);
    let message = Message::StopMove { model, generation, off: shard.shard };
    match request(&coordinator.address, &message, deadline()) {
        // The model is deleted, or has moved: nothing moves it from there.
        Ok(_) | Err(AdminError::Refusal(Refusal::NoModel(_) | Refusal::Generation { .. })) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

fn show(progress: &ProgressBar, record: &ModelRecord, coordinator: &ShardRecord) {
    if progress.is_hidden() {
        return;
    }
    let Ok(status) = ask(&coordinator.address) else { return };
    let Some(model) = list(&status["models"]).iter().find(|model| model["name"] == *record.name) else {
        return;
    };
    if let Some(said) = moving(&model["coordinator"]) {
        let of = |key: &str| model["coordinator"]["moving"][key].as_u64().unwrap_or_default();
        progress.set_message(format!("{} {said}", record.name));
        progress.set_length(of("of"));
        progress.set_position(of("blocks"));
    }
}
