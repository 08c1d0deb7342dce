//! `gradfs create` and `gradfs delete`.

use libmodelio::registry::RegistryError;
use ps_backend::create::{self, CreateError, NewModel};
use ps_backend::snapshot::{SnapshotError, Stored};

use crate::config::cluster::{CreateConfig, DeleteConfig};
use crate::error::Error;
use crate::progress;
use crate::source::Source;

use crate::signals::Interrupt;

use super::{explain_new_registry, registry, registry_error};

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

/// Deletes a model.
///
/// # Errors
/// When there is none, or the registry does not answer. Shards that do not are named, and hear of it later.
pub fn delete(config: &DeleteConfig) -> Result<(), Error> {
    let name = &config.name;
    let unconfirmed = create::delete(&*registry(&config.registry)?, name).map_err(|error| {
        let is_unknown = matches!(error, CreateError::Registry(RegistryError::NoModel(_)));
        let error = Error::new(format!("cannot delete {name}")).caused_by(error);
        if is_unknown { explain_new_registry(&config.registry, error) } else { error }
    })?;
    println!("gradfs: deleted {name}");
    for why in unconfirmed {
        eprintln!("gradfs: not confirmed by a shard, which drops its blocks when it hears of this: {why}");
    }
    Ok(())
}
