//! Snapshots that shards write into a store. The coordinator has all of them copy one version, and each writes its copy.
//! When all parts are there, the coordinator writes the description, and the snapshot counts.

pub(super) mod periodic;

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{Epoch, Generation, Version};
use libmodelio::vocabulary::layout::PartitionLayout;
use libmodelio::wire::{Message, ModelRecord, Refusal};

use super::capturing::{self, Taken, ask_each};
use super::models;
use super::peer_shard::AnswersHere;
use super::saves::{Save, Subject};
use super::shared::Shared;
use crate::snapshot::{Copied, Head, Keep, Places, Shelf, SnapshotError, now, write_part};
use crate::stores::StoreError;

/// The longest wait for a shard to say how far it is.
const PROMPT: Duration = Duration::from_secs(10);
/// A snapshot of which nothing comes into the store for so long has failed.
const STALLED: Duration = Duration::from_secs(120);

/// A model's life under a block map.
type Life<'a> = (&'a str, Generation, Epoch);

/// Begins to write a snapshot of a model that is coordinated here, or tells how far that is.
pub(super) fn take(
    shared: &Arc<Shared>,
    (model, generation, epoch): Life<'_>,
    (snapshot, to): (u64, String),
    here: AnswersHere,
) -> Result<Message, Refusal> {
    let (_, settings) = models::coordinator_of(shared, model, generation)?.snapshots();
    // Elsewhere all stay.
    let (to, keep) = match to.is_empty() || to == settings.to {
        true => (settings.to.clone(), Some(Keep::of(&settings))),
        false => (to, None),
    };
    if to.is_empty() {
        return Err(Refusal::other(
            "the job has no place for snapshots: name one, or set control/snapshot_to",
        ));
    }
    let (this, model) = (Arc::clone(shared), model.to_owned());
    shared.snapshots.saves.ask((generation, snapshot, Subject::Job), move |save| {
        let life = (&*model, generation, epoch);
        let version = take_here(&this, save, life, (snapshot, &to, keep), here)?;
        tracing::info!(model, %version, to, "a snapshot was saved");
        Ok(())
    })
}

fn take_here(
    shared: &Arc<Shared>,
    save: &Save,
    (model, generation, epoch): Life<'_>,
    (snapshot, to, keep): (u64, &str, Option<Keep>),
    here: AnswersHere,
) -> Result<Version, Refusal> {
    let shelf = Shelf::open(to).map_err(Refusal::other)?;
    // First of all, so that nothing is held up for a store that cannot be written.
    shelf.claim(model, generation, false).map_err(Refusal::other)?;
    shelf.begin(snapshot).map_err(Refusal::other)?;
    let before = shelf.names().map_err(Refusal::other)?.pop().unwrap_or_default();
    let record = shared.models.lock().get(model).map(|found| found.record.clone());
    let record = record.ok_or_else(|| Refusal::NoModel(model.to_owned()))?;
    let taken = capturing::take(shared, (model, generation), epoch, (snapshot, here))?;
    let message = Message::SaveCopy { generation, snapshot, to: to.to_owned(), before };
    let version = taken.record.version;
    let written = write(shared, save, &taken, &message)
        .and_then(|()| shelf.check_claim(generation).map_err(Refusal::other))
        .and_then(|()| describe(&shelf, snapshot, taken_of(&taken, &record)?).map_err(Refusal::other));
    // A shard that misses this gives its copy up by itself.
    let release = Message::Release { generation, snapshot };
    let _ = ask_each(shared, taken.peers.values(), PROMPT, &release);
    let writers = taken.peers.keys().map(|shard| u32::from(shard.0));
    let tidied = shelf.end(snapshot, writers);
    written?;
    // What has failed before is removed, too.
    let collected = keep.map_or(Ok(()), |keep| shelf.collect(keep));
    if let Err(error) = tidied.map_err(SnapshotError::from).and(collected) {
        tracing::warn!(model, "older snapshots, or parts of one, are not removed: {error}");
    }
    Ok(version)
}

/// What the description of a snapshot is made of: its head, and who has written a part.
fn taken_of(taken: &Taken, record: &ModelRecord) -> Result<(Head, Vec<u32>), Refusal> {
    let head = Head::of(record, taken.record.clone(), taken.settings.clone()).map_err(Refusal::other)?;
    Ok((head, taken.peers.keys().map(|shard| u32::from(shard.0)).collect()))
}

/// All parts are written.
fn describe(shelf: &Shelf, snapshot: u64, (head, writers): (Head, Vec<u32>)) -> Result<(), SnapshotError> {
    let places = shelf.parts(snapshot, writers.into_iter())?;
    shelf.add(snapshot, head, now(), places).map(drop)
}

/// Has all shards write their parts, and waits for them.
fn write(shared: &Arc<Shared>, save: &Save, taken: &Taken, message: &Message) -> Result<(), Refusal> {
    let mut went_on = (0, Instant::now());
    loop {
        let answers = ask_each(shared, taken.peers.values(), PROMPT, message)?;
        let mut all = (0, 0, 0, true);
        for answer in answers {
            let Message::Saved { dealt, of, written, ended, .. } = answer else {
                return Err(Refusal::other(format!("a shard answers with {}", answer.name())));
            };
            all = (all.0 + dealt, all.1 + of, all.2 + written, all.3 && ended);
        }
        let (dealt, of, written, ended) = all;
        save.is_of(taken.record.version, of);
        save.is_at(dealt, written);
        if ended {
            return Ok(());
        }
        if dealt != went_on.0 {
            went_on = (dealt, Instant::now());
        }
        if went_on.1.elapsed() > STALLED {
            let why = format!("nothing has come into the store for {} s", STALLED.as_secs());
            return Err(Refusal::other(why));
        }
    }
}

/// Begins to write this shard's copy, or tells how far that is.
pub(super) fn save_copy(
    shared: &Shared,
    (generation, snapshot): (Generation, u64),
    (to, before): (String, String),
) -> Result<Message, Refusal> {
    let (copied, partition) = shared.snapshots.captures.copied((generation, snapshot))?;
    let writer = u32::from(shared.identity.number().0);
    shared.snapshots.saves.ask((generation, snapshot, Subject::Copy), move |save| {
        let of = (snapshot, writer);
        write_copy(save, (&copied, &partition), of, (&to, &before)).map_err(Refusal::other)
    })
}

fn write_copy(
    save: &Save,
    (copied, partition): (&Copied, &PartitionLayout),
    (snapshot, writer): (u64, u32),
    (to, before): (&str, &str),
) -> Result<(), SnapshotError> {
    let shelf = Shelf::open(to)?;
    shelf.check_begun(snapshot).map_err(|error| match error {
        StoreError::Missing(_) => SnapshotError::Nothing(format!(
            "{} is not the place that the coordinator writes to: all hosts must see one directory there",
            shelf.url()
        )),
        error => error.into(),
    })?;
    let before = if before.is_empty() { Places::default() } else { shelf.description(before)?.places };
    let all = copied.len();
    save.is_of(Version(0), all);
    let done = |bytes| {
        save.goes_on(bytes);
        if save.is_wanted() { Ok(()) } else { Err(SnapshotError::Interrupted) }
    };
    let global = |(local, what)| Some((partition.global(local)?, what));
    let pieces = copied.pieces().filter_map(|(piece, bytes)| Some((global(piece)?, bytes)));
    let name = Shelf::pack_name(snapshot, writer);
    let part = write_part(&**shelf.store(), &name, &before, pieces, &done)?;
    shelf.add_part(snapshot, writer, &part.places)?;
    save.is_at(all, part.written);
    Ok(())
}
