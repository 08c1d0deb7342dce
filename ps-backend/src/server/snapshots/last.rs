//! The last snapshots of a shard that is told to end: of every model of which it has blocks, and whose job has a store. All
//! shards of a model may be told at once. Each one asks the coordinator, which takes one snapshot after the other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{Epoch, Generation, ShardId, Version};
use libmodelio::wire::{Message, Refusal};

use super::take;
use crate::server::peer_shard::{AnswersHere, PeerShard};
use crate::server::shared::{HostedModel, Shared};
use crate::snapshot::Shelf;

/// The pause before the coordinator is asked again.
const PAUSE: Duration = Duration::from_millis(200);
/// The longest wait for an answer of it.
const PROMPT: Duration = Duration::from_secs(10);

/// A model of which this shard has blocks.
struct Held {
    name: String,
    generation: Generation,
    epoch: Epoch,
    coordinator: ShardId,
    /// The newest version when the shard was told to end.
    wanted: Version,
    /// Whether the job may have a store, as far as this shard knows.
    may_have_store: bool,
}

impl Held {
    fn of(name: &str, model: &HostedModel) -> Held {
        let settings = model.coordinator.as_ref().map(|coordinator| coordinator.snapshots().1);
        let to = settings.as_ref().map_or(&model.record.controls.snapshots.to, |settings| &settings.to);
        Held {
            name: name.to_owned(),
            generation: model.generation,
            epoch: model.partition.epoch,
            coordinator: model.record.coordinator,
            wanted: model.partition.progress().0,
            may_have_store: !to.is_empty() || model.copied.is_some(),
        }
    }
}

/// What has become of a model: the version that is in its store, nothing if it has no store, or why it is lost.
pub type LastSnapshot = (String, Result<Option<Version>, String>);

/// Has the last snapshots taken, within this time.
pub(in crate::server) fn save_all(
    shared: &Arc<Shared>,
    here: AnswersHere,
    within: Duration,
) -> Vec<LastSnapshot> {
    let deadline = Instant::now() + within;
    let held: Vec<Held> = {
        let models = shared.models.lock();
        models.iter().map(|(name, model)| Held::of(name, model)).collect()
    };
    let saved = held.into_iter().filter_map(|held| {
        let name = held.name.clone();
        Some((name, save(shared, held, here, deadline)?))
    });
    saved.collect()
}

/// What becomes of one. Nothing if it has gone to other shards meanwhile.
fn save(
    shared: &Arc<Shared>,
    mut held: Held,
    here: AnswersHere,
    deadline: Instant,
) -> Option<Result<Option<Version>, String>> {
    if !held.may_have_store {
        return Some(Ok(None));
    }
    let wanted = held.wanted;
    let mut snapshot = random();
    loop {
        // The coordinator may have ended after all parts were written.
        if let Some(version) = is_stored(shared, &held, wanted) {
            return Some(Ok(Some(version)));
        }
        let asked = match &snapshot {
            Ok(snapshot) => ask(shared, &held, *snapshot, here),
            Err(why) => return Some(Err(why.clone())),
        };
        let why = match asked {
            Ok(Message::Saved { version, ended: true, .. }) => return Some(Ok(Some(version))),
            Ok(Message::Saved { .. }) => "it is still being written".to_owned(),
            Ok(other) => format!("the coordinator answers with {}", other.name()),
            Err(Refusal::Control(_)) => return Some(Ok(None)),
            Err(refusal) => {
                snapshot = random();
                std::thread::sleep(PAUSE);
                refusal.to_string()
            }
        };
        if Instant::now() >= deadline {
            return Some(Err(why));
        }
        // Others that end may have moved blocks.
        let models = shared.models.lock();
        let now = models.get(&held.name).filter(|model| model.generation == held.generation)?;
        held = Held::of(&held.name, now);
    }
}

fn random() -> Result<u64, String> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|error| error.to_string())?;
    Ok(u64::from_le_bytes(random))
}

/// The version of the last snapshot that this shard has written a part of, if it is in its store and has a version that is
/// `wanted`, or a newer one.
fn is_stored(shared: &Shared, held: &Held, wanted: Version) -> Option<Version> {
    let models = shared.models.lock();
    let (snapshot, to) = models.get(&held.name)?.copied.clone()?;
    drop(models);
    let names = Shelf::open(&to).ok()?.names().ok()?;
    let name = names.iter().find(|name| name.ends_with(&format!("-{snapshot:016x}")))?;
    Shelf::version_of(name).filter(|version| *version >= wanted)
}

fn ask(shared: &Arc<Shared>, held: &Held, snapshot: u64, here: AnswersHere) -> Result<Message, Refusal> {
    let Held { name, generation, epoch, coordinator, .. } = held;
    if *coordinator == shared.identity.number() {
        return take(shared, (name, *generation, *epoch), (snapshot, String::new(), true), here);
    }
    let listed = shared.directory.ask(|registry, deadline| registry.shards(deadline));
    let listed = listed.map_err(Refusal::other)?;
    let record = listed.iter().find(|record| record.shard == *coordinator);
    let record =
        record.ok_or_else(|| Refusal::other(format!("shard {coordinator}, its coordinator, is gone")))?;
    let (model, to) = (name.clone(), String::new());
    let (generation, epoch, hurries) = (*generation, *epoch, true);
    let message = Message::TakeSnapshot { model, generation, epoch, snapshot, to, hurries };
    PeerShard::new(record, here).refused(&message, PROMPT)
}
