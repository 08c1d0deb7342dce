//! Restoring a model whose blocks are lost: its newest snapshot becomes the first version of a new life, on the shards
//! that there are.

use std::collections::BTreeSet;
use std::time::Instant;

use libmodelio::registry::Registry;
use libmodelio::vocabulary::block_map::BlockMap;
use libmodelio::vocabulary::ids::{Generation, ShardId, Version};
use libmodelio::wire::{Lineage, ModelRecord, Moved};

use super::placing::choose;
use super::{CreateError, NewModel, PROMPT, ask, forget, make, new_generation, put_ready};
use crate::memory::MemoryUse;
use crate::offers::Offer;
use crate::snapshot::{Shelf, SnapshotError, Stored};
use crate::state_copies::StateCopies;

/// What came of a restoration.
#[derive(Debug)]
pub struct Restored {
    /// The record of the new life.
    pub record: ModelRecord,
    /// The version of the snapshot.
    pub snapshot: Version,
    /// The number that it has in the new life.
    pub version: Version,
    /// The version of the weights in the life before, if a mount had newer ones than the snapshot. Optimizer state is older.
    pub weights: Option<Version>,
    /// Snapshots that were newer, and damaged.
    pub damaged: Vec<String>,
}

/// Who restores: it knows what it makes, and hears mounts.
pub trait Restorer {
    /// A new life begins, from this snapshot. The registry is told next. Mounts are heard that have newer weights.
    fn begins(&self, generation: Generation, lineage: &Lineage, snapshot: Version);

    /// The newest weights that a mount has. Waits for mounts.
    fn offer(&self, generation: Generation) -> Option<Offer>;

    /// Has their mount bring them to the shards of the new life, and waits for that.
    ///
    /// # Errors
    /// [`CreateError::NotBrought`].
    fn bring(&self, generation: Generation, to: &Moved) -> Result<(), CreateError>;
}

/// Restores the life of a model whose record is `lost`, for shard `by`. A snapshot that is damaged is passed over, for the
/// one before.
///
/// # Errors
/// [`CreateError`]. If somebody else was first, it is the registry's word.
pub fn restore(
    registry: &dyn Registry,
    mut lost: ModelRecord,
    (by, restorer): (ShardId, &dyn Restorer),
) -> Result<Restored, CreateError> {
    let (mut damaged, mut passed_over) = (Vec::new(), BTreeSet::new());
    let store = lost.lineage.store.clone();
    let shelf = Shelf::open(&store).map_err(SnapshotError::from)?;
    while let Some(name) = newest(&shelf, &passed_over)? {
        let version = Shelf::version_of(&name).unwrap_or_default();
        let is_newest = || Ok(newest(&shelf, &passed_over)?.as_ref() == Some(&name));
        match restore_from(registry, &mut lost, (&shelf, &name), (by, restorer), &is_newest) {
            Ok(None) => {}
            Ok(Some((record, begins_at, weights))) => {
                return Ok(Restored { record, snapshot: version, version: begins_at, weights, damaged });
            }
            Err(CreateError::Source(error)) if error.is_damage() => {
                damaged.push(format!("version {version}: {error}"));
                passed_over.insert(name);
                // How many steps newer weights are ahead of an older one may not be known.
                lost.lineage.newest = false;
            }
            Err(error) => return Err(error),
        }
    }
    let why = match damaged.is_empty() {
        true => format!("{store} has no snapshot"),
        false => format!("{store} has no snapshot that can be read: {}", damaged.join("; ")),
    };
    Err(SnapshotError::Nothing(why).into())
}

/// The name of the newest snapshot of a store, but for some.
fn newest(shelf: &Shelf, passed_over: &BTreeSet<String>) -> Result<Option<String>, SnapshotError> {
    let names = shelf.names()?;
    Ok(names.into_iter().rfind(|name| !passed_over.contains(name)))
}

/// Restores one snapshot. `lost` is the life that it goes on from; after a failure that may be another one. If the life
/// before had added a newer snapshot when the new one began, nothing is returned: that may have been called durable.
fn restore_from(
    registry: &dyn Registry,
    lost: &mut ModelRecord,
    (shelf, snapshot): (&Shelf, &str),
    (by, restorer): (ShardId, &dyn Restorer),
    is_newest: &dyn Fn() -> Result<bool, SnapshotError>,
) -> Result<Option<(ModelRecord, Version, Option<Version>)>, CreateError> {
    let name = lost.name.clone();
    let version = Shelf::version_of(snapshot).unwrap_or_default();
    let stored = Stored::named(shelf, snapshot, Some(lost.block_size))?;
    let (head, layout) = (stored.head(), stored.layout());
    let (mut controls, mut job) = (head.controls()?, head.record.clone());
    let (lineage, begins_at) = lost.lineage.restored(by, job.version, lost.ready);
    controls.renumber(job.version, begins_at);
    job.version = begins_at;
    let all = registry.shards(Instant::now() + PROMPT)?;
    // The memory of the life before is free again, once its shards have heard of this.
    let (draining, there): (Vec<_>, Vec<_>) = all.iter().cloned().partition(|shard| shard.draining);
    if there.is_empty() {
        let draining = draining.iter().map(|shard| format!("{} at {}", shard.shard, shard.address)).collect();
        return Err(CreateError::TooFewShards { wanted: 1, there: 0, draining });
    }
    let generation = new_generation().map_err(|error| CreateError::Random(error.to_string()))?;
    let needed = MemoryUse::of_partition(layout, &controls, Some(StateCopies::default()));
    let there = choose(ask(there), None, layout.blocks() as usize, needed.total());
    let ids: Vec<ShardId> = there.iter().map(|shard| shard.shard).collect();
    let map = BlockMap::striped(layout.blocks(), &ids)?;
    let metadata = lost.metadata.clone();
    let mut record =
        ModelRecord::new(&name, generation, layout, metadata.clone(), &map, ids[0], controls.clone())?;
    record.lineage = lineage;
    restorer.begins(generation, &record.lineage, version);
    registry.succeed(&record, (lost.generation, lost.epoch), Instant::now() + PROMPT)?;
    let before = std::mem::replace(lost, record.clone());
    // From here on the life before adds no snapshot.
    shelf.claim((&name, generation, &record.lineage), true).map_err(CreateError::Claim)?;
    forget(&before, &all);
    if !is_newest()? {
        return Ok(None);
    }
    // State that is older than the weights would make other bits.
    let takes_newest = record.lineage.newest && !controls.deterministic;
    let offer = if takes_newest { restorer.offer(generation) } else { None };
    if let Some(offer) = &offer {
        job = offer.goes_on(job);
    }
    let moved = Moved { record: record.clone(), shards: there.clone() };
    let brings = || restorer.bring(generation, &moved);
    let brings: Option<&dyn Fn() -> Result<(), CreateError>> =
        if offer.is_some() { Some(&brings) } else { None };
    let (shards, place) = (None, stored.place());
    let new =
        NewModel { name: &name, layout, metadata, controls: &controls, shards, record: Some(&job), place };
    let source = |piece, bytes: &mut _| stored.piece(piece, bytes);
    make(&new, (&map, &record), &there, (&source, &|_| Ok(())), brings)?;
    record.ready = true;
    put_ready(registry, &record, &there)?;
    Ok(Some((record, job.version, offer.map(|offer| offer.version))))
}
