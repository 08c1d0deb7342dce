//! Snapshots that shards write into a store. The coordinator has all of them copy one version, and each writes its copy.
//! When all parts are there, the coordinator writes the description, and the snapshot counts.

pub(super) mod last;
pub(super) mod periodic;

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{Epoch, Generation, Version};
use libmodelio::vocabulary::layout::PartitionLayout;
use libmodelio::vocabulary::snapshots::{PLACE, is_place};
use libmodelio::wire::{Message, Refusal};

use super::capturing::{self, Taken, ask_each};
use super::partition::StepWatch;
use super::peer_shard::AnswersHere;
use super::saves::{Save, Subject};
use super::shared::Shared;
use super::{keeping, models};
use crate::snapshot::{
    Copied, Filling, Head, Keep, Pace, PackedReader, Places, SavedSnapshot, Shelf, SnapshotError, Stepping,
    now as now_in_seconds, write_part,
};
use crate::stores::{StoreError, absolute_url};

/// The longest wait for a shard to say how far it is.
const PROMPT: Duration = Duration::from_secs(10);
/// The longest time in which no shard brings anything into the store.
const STALLED: Duration = Duration::from_secs(120);

/// A model's life under a block map.
type Life<'a> = (&'a str, Generation, Epoch);

/// Begins to write a snapshot of a model that is coordinated here, or tells how far that is.
pub(super) fn take(
    shared: &Arc<Shared>,
    (model, generation, epoch): Life<'_>,
    (snapshot, to, hurries): (u64, String, bool),
    here: AnswersHere,
) -> Result<Message, Refusal> {
    let (_, settings) = models::coordinator_of(shared, model, generation)?.snapshots();
    if !is_place(&to) {
        return Err(Refusal::other(format!("{to:?} is no place for snapshots: expected is {PLACE}")));
    }
    // Elsewhere all stay.
    let (own, to) = (absolute_url(&settings.to), absolute_url(&to));
    let (to, keep) = match to.is_empty() || to == own {
        true => (own, Some(Keep::of(&settings))),
        false => (to, None),
    };
    if to.is_empty() {
        let why = "the job has no place for snapshots: name one, or set control/snapshot_to";
        return Err(Refusal::Control(why.to_owned()));
    }
    let (this, model, own) = (Arc::clone(shared), model.to_owned(), settings.to);
    shared.snapshots.saves.ask((generation, snapshot, Subject::Job), hurries, move |save| {
        let (life, begun) = ((&*model, generation, epoch), this.snapshots.schedules.now());
        let version = take_here(&this, save, life, (snapshot, &to, keep), here)?;
        tracing::info!(model, %version, to, "a snapshot was saved");
        let Ok(coordinator) = models::coordinator_of(&this, &model, generation) else { return Ok(()) };
        // The job's own store may be another one by now.
        if keep.is_some() && coordinator.snapshots().1.to == own {
            let (now, saved) =
                (this.snapshots.schedules.now(), SavedSnapshot { version, bytes: save.bytes() });
            this.snapshots.schedules.with(generation, |schedule| {
                schedule.is_to(&own);
                schedule.saved(saved, begun, now);
            });
            keeping::saved(&this, (&model, generation), (version, to));
        }
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
    let lineage = shared.models.lock().get(model).map(|of| of.record.lineage.clone()).unwrap_or_default();
    shelf.claim((model, generation, &lineage), false).map_err(Refusal::other)?;
    shelf.begin(snapshot, generation).map_err(Refusal::other)?;
    let written = write_all(shared, save, (model, generation, epoch), (snapshot, &shelf), here);
    if written.is_err() {
        let _ = shelf.abandon(snapshot);
    }
    let version = written?;
    let collect = |keep| shelf.check_claim(generation).and_then(|_| shelf.collect(keep, generation));
    let collected = keep.map_or(Ok(()), collect);
    if let Err(error) = collected {
        tracing::warn!(model, "older snapshots, or parts of one, are not removed: {error}");
    }
    Ok(version)
}

/// Has all shards copy one version and write their copies, and describes them.
fn write_all(
    shared: &Arc<Shared>,
    save: &Save,
    (model, generation, epoch): Life<'_>,
    (snapshot, shelf): (u64, &Shelf),
    here: AnswersHere,
) -> Result<Version, Refusal> {
    let record = shared.models.lock().get(model).map(|found| found.record.clone());
    let record = record.ok_or_else(|| Refusal::NoModel(model.to_owned()))?;
    let full_every = models::coordinator_of(shared, model, generation)?.snapshots().1.full_every;
    let base = shelf.base(full_every).map_err(Refusal::other)?;
    let taken = capturing::take(shared, (model, generation), epoch, (snapshot, here))?;
    let message = |hurries| {
        let (to, before) = (shelf.url().to_owned(), base.name.clone());
        Message::SaveCopy { generation, snapshot, to, before, hurries }
    };
    let version = taken.record.version;
    let written = write(shared, save, &taken, message).and_then(|()| {
        let places = shelf.parts(snapshot, writers(&taken)).map_err(Refusal::other)?;
        shelf.check_packs(&places).map_err(Refusal::other)?;
        // It may have moved: then others take its snapshots, and may have removed what this one needs.
        let (_, now) = models::coordinator_of(shared, model, generation)?.life();
        if now != epoch {
            return Err(Refusal::Epoch { expected: now, got: epoch });
        }
        let claim = shelf.own_claim(generation).map_err(Refusal::other)?;
        let (of, settings) = (taken.record.clone(), taken.settings.clone());
        let head = Head::of(&record, of, settings).map_err(Refusal::other)?;
        shelf
            .add((snapshot, claim), head, now_in_seconds(), (places, base.after_full))
            .map_err(Refusal::other)
    });
    // A shard that misses this gives its copy up by itself.
    let release = Message::Release { generation, snapshot };
    let _ = ask_each(shared, taken.peers.values(), PROMPT, &release);
    written?;
    if let Err(error) = shelf.end(snapshot, writers(&taken)) {
        tracing::warn!(model, "something is left over of writing a snapshot: {error}");
    }
    Ok(version)
}

/// The numbers under which shards write their parts.
fn writers(taken: &Taken) -> impl Iterator<Item = u32> {
    taken.peers.keys().map(|shard| u32::from(shard.0))
}

/// Has all shards write their parts, and waits for them.
fn write(
    shared: &Arc<Shared>,
    save: &Save,
    taken: &Taken,
    message: impl Fn(bool) -> Message,
) -> Result<(), Refusal> {
    let mut went_on = (0, Instant::now());
    loop {
        let answers = ask_each(shared, taken.peers.values(), PROMPT, &message(save.hurries()))?;
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
    shared: &Arc<Shared>,
    (generation, snapshot): (Generation, u64),
    (to, before, hurries): (String, String, bool),
) -> Result<Message, Refusal> {
    let (copied, partition) = shared.snapshots.captures.copied((generation, snapshot))?;
    let writer = u32::from(shared.identity.number().0);
    let mut models = shared.models.lock();
    if let Some(model) = models.values_mut().find(|model| model.generation == generation) {
        model.copied = Some((snapshot, to.clone()));
    }
    drop(models);
    let this = Arc::clone(shared);
    shared.snapshots.saves.ask((generation, snapshot, Subject::Copy), hurries, move |save| {
        let steps = models::partition_of(&this, generation).ok().map(|(_, of)| StepWatch::of(&of));
        let is_stepping = || !save.hurries() && steps.as_ref().is_some_and(StepWatch::is_stepping);
        let (save, of) = ((save, (&this.snapshots.pace, &is_stepping as _)), (snapshot, writer));
        write_copy(save, (&copied, &partition), of, (&to, &before)).map_err(Refusal::other)
    })
}

fn write_copy(
    (save, pace): (&Save, (&Pace, Stepping<'_>)),
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
    let part = write_part(&**shelf.store(), &name, &before, pace, pieces, &done)?;
    shelf.add_part(snapshot, writer, &part.places)?;
    save.is_at(all, part.written);
    Ok(())
}

/// Begins to load this shard's blocks of a new model from a snapshot, or tells how far that is.
pub(super) fn load_copy(
    shared: &Arc<Shared>,
    generation: Generation,
    (from, name): (String, String),
) -> Result<Message, Refusal> {
    let partition = models::partition_of(shared, generation)?.1;
    let snapshot = Shelf::number_of(&name).unwrap_or_default();
    let this = Arc::clone(shared);
    shared.snapshots.saves.ask((generation, snapshot, Subject::Load), true, move |save| {
        let shelf = Shelf::open(&from).map_err(Refusal::other)?;
        let description = shelf.description(&name).map_err(Refusal::other)?;
        let (version, optimizer) = (description.head.record.version, description.head.record.optimizer);
        save.is_of(version, 0);
        // A model that was given up needs no blocks.
        let done = |bytes| {
            save.goes_on(bytes);
            match save.is_wanted() && models::partition_of(&this, generation).is_ok() {
                true => Ok(()),
                false => Err(SnapshotError::Interrupted),
            }
        };
        let reader = PackedReader::new(shelf.store().clone(), description, None);
        let filled = reader.and_then(|reader| Filling::of(&reader, partition.store(), &done).run(optimizer));
        filled.map_err(Refusal::other)
    })
}

#[cfg(test)]
mod tests {
    use libmodelio::vocabulary::ids::BlockId;
    use libmodelio::vocabulary::layout::{DType, ModelLayout};
    use libmodelio::wire::DataKind;

    use super::*;
    use crate::server::saves::Saves;

    #[test]
    fn a_shard_that_sees_another_directory_than_the_coordinator_refuses() {
        let (there, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let shelf = Shelf::open(there.path().to_str().unwrap()).unwrap();
        shelf.begin(7, Generation(1)).unwrap();
        let layout = ModelLayout::blank(1 << 16, DType::F32, 1 << 16).unwrap();
        let partition = layout.partition(&[BlockId(0)]).unwrap();
        let copied = Arc::new(Copied::reserve(partition.layout(), [DataKind::Weights].into_iter()).unwrap());
        let saves = Saves::default();
        for (dir, is_there) in [(&there, true), (&elsewhere, false)] {
            let (to, name) =
                (dir.path().to_str().unwrap().to_owned(), (Generation(1), is_there.into(), Subject::Copy));
            let (copied, partition) = (Arc::clone(&copied), partition.clone());
            let told = saves.ask(name, true, move |save| {
                write_copy((save, (&Pace::default(), &|| false)), (&copied, &partition), (7, 1), (&to, ""))
                    .map_err(Refusal::other)
            });
            match told {
                Ok(Message::Saved { dealt, ended, .. }) => assert!(is_there && ended && dealt == 1 << 16),
                Err(refusal) => {
                    assert!(!is_there && refusal.to_string().contains("one directory"), "{refusal}")
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    }
}
