//! What the registry must know of the models that are coordinated here when blocks of them are lost: their stores, and the
//! numbers that their versions may have.
//!
//! A version is called durable once it is in the store and the registry has confirmed after that that this life of the
//! model is the one that counts. Whoever restores the model begins the next life first, and then looks for the newest
//! snapshot. So it finds all that were called durable.

use std::sync::Arc;

use libmodelio::registry::RegistryError;
use libmodelio::vocabulary::ids::{Generation, Version};
use libmodelio::wire::{HeldPartition, Lineage};

use super::coordinator::Coordinator;
use super::shared::{HostedModel, Shared};
use super::standing::life;

/// A model that is coordinated here.
struct Kept {
    life: HeldPartition,
    lineage: Lineage,
    coordinator: Arc<Coordinator>,
    /// Its newest snapshot, and the store that has it.
    saved: Option<(Version, String)>,
}

impl Kept {
    fn of(of: &HostedModel) -> Option<Kept> {
        let (life, lineage) = (life(&of.record), of.record.lineage.clone());
        Some(Kept { life, lineage, coordinator: of.coordinator.clone()?, saved: of.saved.clone() })
    }

    /// Tells of the model. If that is done, its newest snapshot is durable.
    fn keep(&self, shared: &Shared) -> Result<(), RegistryError> {
        let Kept { life, lineage, coordinator, saved } = self;
        let (version, settings, durable) = coordinator.survival();
        // The job may have another store by now, which has nothing of it yet.
        let store = saved.as_ref().map_or(&lineage.store, |(_, store)| store);
        let store = if settings.restores() { store.clone() } else { String::new() };
        let saved = saved.as_ref().map(|(version, _)| *version).filter(|version| durable != Some(*version));
        let is_durable = || saved.map(|version| coordinator.is_durable(version));
        if store.is_empty() && lineage.store.is_empty() {
            is_durable();
            return Ok(());
        }
        if coordinator.is_frozen() {
            return Ok(());
        }
        let (reserved, newest) =
            (Lineage::reserved_for(version).max(lineage.reserved), settings.restores_newest());
        shared
            .directory
            .ask(|registry, deadline| registry.keep(life, reserved, (&store, newest), deadline))?;
        coordinator.set_reserved((!store.is_empty()).then_some(reserved));
        let mut models = shared.models.lock();
        let of = models.get_mut(&life.model).filter(|of| of.generation == life.generation);
        if let Some(of) = of {
            let lineage = &mut of.record.lineage;
            (lineage.reserved, lineage.store, lineage.newest) = (reserved, store, newest);
        }
        drop(models);
        is_durable();
        Ok(())
    }
}

/// Tells the registry of all of them.
///
/// # Errors
/// If it does not answer.
pub(super) fn keep_all(shared: &Shared) -> Result<(), RegistryError> {
    let models: Vec<Kept> = shared.models.lock().values().filter_map(Kept::of).collect();
    for model in models {
        match model.keep(shared) {
            Ok(()) => {}
            Err(error @ RegistryError::Peer(_)) => return Err(error),
            // It moves, or was deleted: whoever coordinates it then tells.
            Err(error) => {
                tracing::debug!(model = %model.life.model, %error, "the registry does not keep its store")
            }
        }
    }
    Ok(())
}

/// A snapshot of a life of a model is in its own store. If the registry cannot be asked, it is durable later.
pub(super) fn saved(
    shared: &Shared,
    (name, generation): (&str, Generation),
    (version, store): (Version, String),
) {
    let model = {
        let mut models = shared.models.lock();
        let Some(of) = models.get_mut(name).filter(|of| of.generation == generation) else { return };
        // An older one may have taken longer.
        if of.saved.as_ref().is_none_or(|(newest, at)| *at != store || *newest < version) {
            of.saved = Some((version, store));
        }
        Kept::of(of)
    };
    if let Some(Err(error)) = model.map(|model| model.keep(shared)) {
        tracing::warn!(model = %name, %version, "it is saved, and called durable when the registry can be asked: {error}");
    }
}
