//! `gradfs create` and `gradfs delete`.

use libmodelio::registry::RegistryError;
use libmodelio::vocabulary::ids::Generation;
use libmodelio::wire::ModelRecord;
use ps_backend::create::{self, CreateError, NewModel};
use ps_backend::snapshot::{Shelf, SnapshotError, Stored};

use crate::config::cluster::{CreateConfig, DeleteConfig};
use crate::error::Error;
use crate::progress;
use crate::source::Source;

use crate::signals::Interrupt;

use super::{deadline, explain_new_registry, registry, registry_error};

/// Makes a model on the shards of a registry.
///
/// # Errors
/// Fails with the reason why the model could not be created. Nothing of the model is left then.
pub fn create(config: &CreateConfig) -> Result<(), Error> {
    // Before there are threads.
    let interrupt = Interrupt::install()?;
    let name = &config.name;
    let mut source = Source::open(name, &config.source, config.block_size)?;
    source.check_types(name, &config.controls)?;
    let go_on = || match interrupt.why() {
        Some(_) => Err(SnapshotError::Interrupted),
        None => Ok(()),
    };
    let interrupted =
        |why| Error::new(format!("creating {name} was interrupted by {why}: nothing is left of it"));
    let snapshot =
        source.verified_snapshot(&go_on).map_err(|error| interrupt.why().map_or(error, interrupted))?;
    let registry = registry(&config.registry)?;
    let new = NewModel {
        name,
        layout: &source.layout,
        metadata: source.metadata.clone(),
        controls: &config.controls,
        shards: config.shards.map(usize::from),
        record: snapshot.as_ref().map(|snapshot| &snapshot.head().record),
        place: snapshot.as_ref().and_then(Stored::place),
    };
    let bytes = snapshot.as_ref().map_or(source.layout.size(), Stored::len);
    let progress = progress::bar(progress::BYTES, bytes, format!("loading {name}"));
    let record = create::create(
        &*registry,
        &new,
        &|piece, bytes| match &snapshot {
            Some(snapshot) => snapshot.piece(piece, bytes),
            None => source.block(piece.0, bytes),
        },
        &|there| {
            progress.inc(there);
            go_on()
        },
    );
    progress.finish_and_clear();
    let record = record.map_err(|error| match interrupt.why() {
        Some(why) => interrupted(why),
        None => match error {
            CreateError::Registry(why @ RegistryError::Peer(_)) => registry_error(&config.registry, why),
            error => Error::new(format!("cannot create {name}")).caused_by(error),
        },
    })?;
    let store = snapshot.as_ref().filter(|of| of.head().model == *name).and_then(Stored::store);
    if let Some(store) = store
        && let Err(error) = store.claim((name, record.generation, &record.lineage), true)
    {
        tracing::warn!("the snapshots in {} still belong to the job before: {error}", store.url());
    }
    let mut owners: Vec<_> = record.owners.iter().map(|(shard, _)| shard.0).collect();
    owners.sort_unstable();
    owners.dedup();
    println!(
        "gradfs: created {name}: {} bytes in {} blocks on {} shard(s), coordinated by shard {}",
        source.layout.size(),
        source.layout.blocks(),
        owners.len(),
        record.coordinator,
    );
    Ok(())
}

/// The store of a model, and the life whose snapshots are in it.
fn store_of(record: &ModelRecord) -> Result<(Shelf, Generation), Error> {
    let (lineage, settings) = (&record.lineage, &record.controls.snapshots);
    let url = if lineage.store.is_empty() { &settings.to } else { &lineage.store };
    let what = format!("cannot remove the snapshots of {}", record.name);
    let refused = |why: SnapshotError| {
        Error::new(&what).caused_by(why).hint("without --snapshots the model alone is deleted")
    };
    if url.is_empty() {
        return Err(refused(SnapshotError::Nothing("it has no place for snapshots (snapshot_to)".into())));
    }
    let shelf = Shelf::open(url).map_err(|error| refused(error.into()))?;
    if shelf.check_claim(record.generation).map_err(refused)? == 0 {
        let why = format!("{} has none of them, as this host sees it", shelf.url());
        return Err(refused(SnapshotError::Nothing(why)));
    }
    Ok((shelf, record.generation))
}

/// Deletes a model.
///
/// # Errors
/// When there is none, or the registry does not answer. Shards that do not are named, and hear of it later. If its snapshots
/// are to be removed, and another job has their store, nothing is deleted.
pub fn delete(config: &DeleteConfig) -> Result<(), Error> {
    let (name, table) = (&config.name, registry(&config.registry)?);
    let failed = |error: CreateError| {
        let is_unknown = matches!(error, CreateError::Registry(RegistryError::NoModel(_)));
        let error = Error::new(format!("cannot delete {name}")).caused_by(error);
        if is_unknown { explain_new_registry(&config.registry, error) } else { error }
    };
    let store = match config.snapshots {
        true => Some(store_of(&table.model(name, deadline()).map_err(|error| failed(error.into()))?)?),
        false => None,
    };
    let unconfirmed = create::delete(&*table, name).map_err(failed)?;
    println!("gradfs: deleted {name}");
    if let Some((shelf, generation)) = store {
        let removed = shelf.clear(generation).map_err(|error| {
            let left = format!("{name} is deleted, but some of its snapshots are left");
            Error::new(left).caused_by(error).hint(format!("remove {} by hand", shelf.url()))
        })?;
        println!("gradfs: removed {removed} snapshot(s) from {}", shelf.url());
    }
    for why in unconfirmed {
        eprintln!("gradfs: not confirmed by a shard, which drops its blocks when it hears of this: {why}");
    }
    Ok(())
}
