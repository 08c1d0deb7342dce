//! What the registry must know of the models that are coordinated here when blocks of them are lost: their stores, and the
//! numbers that their versions may have.

use std::sync::Arc;

use libmodelio::registry::RegistryError;
use libmodelio::wire::{HeldPartition, Lineage};

use super::coordinator::Coordinator;
use super::shared::{HostedModel, Shared};
use super::standing::life;
use crate::stores::absolute_url;

/// A model that is coordinated here.
struct Kept {
    life: HeldPartition,
    lineage: Lineage,
    coordinator: Arc<Coordinator>,
}

impl Kept {
    fn of(of: &HostedModel) -> Option<Kept> {
        let (life, lineage) = (life(&of.record), of.record.lineage.clone());
        Some(Kept { life, lineage, coordinator: of.coordinator.clone()? })
    }

    /// Tells of the model, which `is_durable` if it has a snapshot in its store.
    fn keep(&self, shared: &Shared, is_durable: bool) -> Result<(), RegistryError> {
        let Kept { life, lineage, coordinator } = self;
        let (version, settings, _) = coordinator.survival();
        let restores = settings.restores() && is_durable;
        let store = if restores { absolute_url(&settings.to) } else { String::new() };
        if coordinator.is_frozen() || store.is_empty() && lineage.store.is_empty() {
            return Ok(());
        }
        let reserved = Lineage::reserved_for(version).max(lineage.reserved);
        shared.directory.ask(|registry, deadline| registry.keep(life, reserved, &store, deadline))?;
        coordinator.set_reserved(restores.then_some(reserved));
        let mut models = shared.models.lock();
        let of = models.get_mut(&life.model).filter(|of| of.generation == life.generation);
        if let Some(of) = of {
            (of.record.lineage.reserved, of.record.lineage.store) = (reserved, store);
        }
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
        let (_, _, durable) = model.coordinator.survival();
        match model.keep(shared, durable.is_some()) {
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

/// A model has a snapshot in its store. Nobody hears that it is durable before the registry knows where.
pub(super) fn keep_durable(shared: &Shared, name: &str) {
    let model = shared.models.lock().get(name).and_then(Kept::of);
    if let Some(Err(error)) = model.map(|model| model.keep(shared, true)) {
        tracing::warn!(model = %name, "the registry does not know its snapshot yet: {error}");
    }
}
