//! The registry: a small table of shards and models, asked over a network. Holds no bytes of models.

mod remote;

use std::time::{Duration, Instant};

pub use remote::RemoteRegistry;

use crate::admin::AdminError;
use crate::vocabulary::ids::{Epoch, Generation, ShardId};
use crate::wire::{Fate, Held, ModelRecord, RecordError, Refusal, RefusedShard, ShardRecord};

/// The directory of a cluster: shards announce themselves here, and clients find models.
///
/// All calls block until `deadline` at most. All can be made again when it is not known whether they took effect:
/// the second time changes nothing. A table with leases and compare-and-swap is all that an implementation needs.
pub trait Registry: Send + Sync {
    /// Announces a shard for the length of `lease`; the shard repeats it before that is over. Returns the
    /// shard's number, which is the same as long as it announces itself from the same address. `record.shard`
    /// is the number that it got before, or 0. A registry that was started anew gives a number to the first
    /// shard that claims it; a shard that is `bound` to it, by parts of models that it holds, has it in any
    /// case. `record.draining` counts only where the registry does not know the shard.
    ///
    /// # Errors
    /// [`RegistryError::Refused`] for a record that is none, one shard too many, or a number that another shard is
    /// bound to.
    fn announce(
        &self,
        record: &ShardRecord,
        bound: bool,
        lease: Duration,
        deadline: Instant,
    ) -> Result<ShardId, RegistryError>;

    /// A shard goes.
    ///
    /// # Errors
    /// Only if the registry does not answer.
    fn withdraw(&self, shard: ShardId, deadline: Instant) -> Result<(), RegistryError>;

    /// A shard is to take no new models.
    ///
    /// # Errors
    /// [`RegistryError::Refused`] for one that never announced itself.
    fn drain(&self, shard: ShardId, deadline: Instant) -> Result<(), RegistryError>;

    /// A shard may take models again.
    ///
    /// # Errors
    /// [`RegistryError::Refused`] for one that never announced itself.
    fn undrain(&self, shard: ShardId, deadline: Instant) -> Result<(), RegistryError>;

    /// The shards whose lease is not over, by their numbers.
    ///
    /// # Errors
    /// Only if the registry does not answer.
    fn shards(&self, deadline: Instant) -> Result<Vec<ShardRecord>, RegistryError>;

    /// Shards that announce themselves and are refused, as long as they do. An implementation may remember only some.
    ///
    /// # Errors
    /// Only if the registry does not answer.
    fn refused(&self, deadline: Instant) -> Result<Vec<RefusedShard>, RegistryError>;

    /// The names of all models, by the alphabet.
    ///
    /// # Errors
    /// Only if the registry does not answer.
    fn models(&self, deadline: Instant) -> Result<Vec<String>, RegistryError>;

    /// A model's record.
    ///
    /// # Errors
    /// [`RegistryError::NoModel`].
    fn model(&self, name: &str, deadline: Instant) -> Result<ModelRecord, RegistryError>;

    /// A new model, where `replaces` is `None`; otherwise the new state of the one whose record is of that epoch.
    /// A record of the same epoch may differ in being ready, and no record of a ready model is not.
    ///
    /// # Errors
    /// [`RegistryError::Exists`], [`RegistryError::NoModel`], [`RegistryError::Epoch`],
    /// [`RegistryError::Generation`], and [`RegistryError::Refused`] for a record that does not follow on the one
    /// that is there.
    fn put(
        &self,
        record: &ModelRecord,
        replaces: Option<Epoch>,
        deadline: Instant,
    ) -> Result<(), RegistryError>;

    /// Forgets a model in this life of it. A model that is not there counts as forgotten.
    ///
    /// # Errors
    /// [`RegistryError::Generation`] if the name has another life.
    fn delete(&self, name: &str, generation: Generation, deadline: Instant) -> Result<(), RegistryError>;

    /// The fate of the parts that a shard holds: whether it is to take no new models, and one [`Fate`] a
    /// part. `deleted` are models that the shard had to forget, for a registry that was started anew. At most
    /// [`MAX_HELD`](crate::wire::MAX_HELD) of each.
    ///
    /// # Errors
    /// Only if the registry does not answer.
    fn holding(
        &self,
        shard: ShardId,
        held: &[Held],
        deleted: &[(String, Generation)],
        deadline: Instant,
    ) -> Result<(bool, Vec<Fate>), RegistryError>;

    /// Restores a model that a shard reports because it holds a part of it, with its shards as far as they
    /// are known. A newer epoch that the registry knows stays, and so does the fact that the model is ready.
    ///
    /// # Errors
    /// [`RegistryError::Exists`] if the name has another life, [`RegistryError::Deleted`],
    /// [`RegistryError::Epoch`] if there is a newer one, and [`RegistryError::Refused`].
    fn restore(
        &self,
        record: &ModelRecord,
        shards: &[ShardRecord],
        deadline: Instant,
    ) -> Result<(), RegistryError>;
}

/// Why the registry did not do it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The registry is not reached, or answers wrongly. It is unknown whether the call took effect.
    #[error("registry: {0}")]
    Peer(#[from] AdminError),
    /// No model of this name.
    #[error("there is no model {0:?}")]
    NoModel(String),
    /// There is a model of that name.
    #[error("there is already a model {0:?}: delete it first")]
    Exists(String),
    /// The model was deleted, and does not come back in this life.
    #[error("model {0:?} was deleted")]
    Deleted(String),
    /// Somebody else has changed the record.
    #[error("the model's record is of epoch {expected}, not {got}: somebody else has changed it; look again")]
    Epoch {
        /// The registry's.
        expected: Epoch,
        /// The caller's.
        got: Epoch,
    },
    /// The name has another life.
    #[error("model {model:?} is of generation {expected}, not {got}: it was created again")]
    Generation {
        /// The model.
        model: String,
        /// The registry's.
        expected: Generation,
        /// The caller's.
        got: Generation,
    },
    /// A record that is none, the caller's or the registry's.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Any other reason of the registry's.
    #[error("the registry refuses: {0}")]
    Refused(Refusal),
}

impl From<Refusal> for RegistryError {
    fn from(refusal: Refusal) -> RegistryError {
        match refusal {
            Refusal::NoModel(name) => RegistryError::NoModel(name),
            Refusal::Exists(name) => RegistryError::Exists(name),
            Refusal::Deleted(name) => RegistryError::Deleted(name),
            Refusal::Epoch { expected, got } => RegistryError::Epoch { expected, got },
            Refusal::Generation { model, expected, got } => {
                RegistryError::Generation { model, expected, got }
            }
            other => RegistryError::Refused(other),
        }
    }
}
