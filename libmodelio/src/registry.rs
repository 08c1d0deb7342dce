//! The registry: a small table of shards and models, asked over a network. Holds no bytes of models.

mod etcd;
mod remote;
pub mod table;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use etcd::EtcdRegistry;
pub use gradfs_stores::etcd::{EtcdError, EtcdUrl};
pub use remote::RemoteRegistry;

use crate::admin::AdminError;
use crate::vocabulary::ids::{Epoch, Generation, ShardId, Version};
use crate::wire::{
    Fate, HeldPartition, Losses, ModelRecord, RecordError, Refusal, RefusedShard, RegistryAnswer,
    RegistryRequest, ShardRecord,
};

/// The registry at `host:port`, or in the etcd at `etcd://a:2379,b:2379,c:2379/prefix` (`etcds://` for TLS), whose
/// credentials are in the environment. Connects at the first call.
///
/// # Errors
/// [`RegistryError::Peer`] for a URL that is none, and credentials that do not go together.
pub fn open(at: &str) -> Result<Arc<dyn Registry>, RegistryError> {
    if EtcdUrl::is_meant(at) {
        return Ok(Arc::new(EtcdRegistry::open(EtcdUrl::parse(at).map_err(AdminError::Etcd)?)?));
    }
    Ok(Arc::new(RemoteRegistry::new(at)))
}

/// The directory of a cluster: shards announce themselves here, and clients find models.
///
/// All calls block until `deadline` at most. All can be made again when it is not known whether they took effect:
/// the second time changes nothing. A table with leases and compare-and-swap is all that an implementation needs.
pub trait Registry: Send + Sync {
    /// Asks the registry. The other calls are requests of this one.
    ///
    /// # Errors
    /// [`RegistryError::Peer`] if it does not answer, or what the request is refused with.
    fn ask(
        &self,
        request: RegistryRequest,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<(RegistryAnswer, Vec<u8>), RegistryError>;

    /// Announces a shard for the length of `lease`; the shard repeats it before that is over. Returns the
    /// shard's number, which is the same as long as it announces itself from the same address. `record.shard`
    /// is the number that it got before, or 0. A registry that was restarted gives a number to the first
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
    ) -> Result<ShardId, RegistryError> {
        let lease_ms = u32::try_from(lease.as_millis()).unwrap_or(u32::MAX);
        let request = RegistryRequest::Announce { record: record.clone(), lease_ms, bound };
        match self.ask(request, &[], deadline)?.0 {
            RegistryAnswer::Shard(shard) => Ok(shard),
            _ => Err(unexpected()),
        }
    }

    /// A shard goes.
    ///
    /// # Errors
    /// Only if the registry does not answer.
    fn withdraw(&self, shard: ShardId, deadline: Instant) -> Result<(), RegistryError> {
        done(self, RegistryRequest::Withdraw { shard }, &[], deadline)
    }

    /// A shard is to take no new models.
    ///
    /// # Errors
    /// [`RegistryError::Refused`] for one that never announced itself.
    fn drain(&self, shard: ShardId, deadline: Instant) -> Result<(), RegistryError> {
        done(self, RegistryRequest::Drain { shard }, &[], deadline)
    }

    /// A shard may take models again.
    ///
    /// # Errors
    /// [`RegistryError::Refused`] for one that never announced itself.
    fn undrain(&self, shard: ShardId, deadline: Instant) -> Result<(), RegistryError> {
        done(self, RegistryRequest::Undrain { shard }, &[], deadline)
    }

    /// The shards whose lease is not over, by their numbers.
    ///
    /// # Errors
    /// Only if the registry does not answer.
    fn shards(&self, deadline: Instant) -> Result<Vec<ShardRecord>, RegistryError> {
        match self.ask(RegistryRequest::Shards, &[], deadline)?.0 {
            RegistryAnswer::Shards(shards) => Ok(shards),
            _ => Err(unexpected()),
        }
    }

    /// Shards that announce themselves and are refused, as long as they do. An implementation may remember only some.
    ///
    /// # Errors
    /// Only if the registry does not answer.
    fn refused(&self, deadline: Instant) -> Result<Vec<RefusedShard>, RegistryError> {
        match self.ask(RegistryRequest::Refused, &[], deadline)?.0 {
            RegistryAnswer::Refused(shards) => Ok(shards),
            _ => Err(unexpected()),
        }
    }

    /// The names of all models, by the alphabet.
    ///
    /// # Errors
    /// Only if the registry does not answer.
    fn models(&self, deadline: Instant) -> Result<Vec<String>, RegistryError> {
        match self.ask(RegistryRequest::Models, &[], deadline)?.0 {
            RegistryAnswer::Models(names) => Ok(names),
            _ => Err(unexpected()),
        }
    }

    /// A model's record.
    ///
    /// # Errors
    /// [`RegistryError::NoModel`].
    fn model(&self, name: &str, deadline: Instant) -> Result<ModelRecord, RegistryError> {
        match self.ask(RegistryRequest::Model { name: name.to_owned() }, &[], deadline)? {
            (RegistryAnswer::Model, payload) => {
                let record = ModelRecord::decode(&payload)?;
                record.check()?;
                Ok(record)
            }
            _ => Err(unexpected()),
        }
    }

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
    ) -> Result<(), RegistryError> {
        done(self, RegistryRequest::Put { replaces }, &record.encode()?, deadline)
    }

    /// Forgets a model in this life of it. A model that is not there counts as forgotten.
    ///
    /// # Errors
    /// [`RegistryError::Generation`] if the name has another life.
    fn delete(&self, name: &str, generation: Generation, deadline: Instant) -> Result<(), RegistryError> {
        done(self, RegistryRequest::Delete { name: name.to_owned(), generation }, &[], deadline)
    }

    /// The fate of the parts that a shard holds: whether it is to take no new models, and one [`Fate`] a
    /// part. `deleted` are models that the shard had to forget, for a registry that was restarted. At most
    /// [`MAX_HELD`](crate::wire::MAX_HELD) of each.
    ///
    /// # Errors
    /// Only if the registry does not answer.
    fn holding(
        &self,
        shard: ShardId,
        held: &[HeldPartition],
        deleted: &[(String, Generation)],
        deadline: Instant,
    ) -> Result<(bool, Vec<Fate>), RegistryError> {
        let request = RegistryRequest::Holding { shard, held: held.to_vec(), deleted: deleted.to_vec() };
        match self.ask(request, &[], deadline)?.0 {
            RegistryAnswer::Fates { draining, fates } if fates.len() == held.len() => Ok((draining, fates)),
            _ => Err(unexpected()),
        }
    }

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
    ) -> Result<(), RegistryError> {
        let request = RegistryRequest::Restore { shards: shards.to_vec() };
        done(self, request, &record.encode()?, deadline)
    }

    /// What must be known of a model if its blocks are lost: a bound of its versions' numbers; the store that it is restored
    /// from, which is empty if it is not; and whether newer weights of mounts count then.
    ///
    /// # Errors
    /// [`RegistryError::NoModel`], [`RegistryError::Generation`], and [`RegistryError::Epoch`] if another block map is in
    /// force.
    fn keep(
        &self,
        of: &HeldPartition,
        reserved: Version,
        (store, newest): (&str, bool),
        deadline: Instant,
    ) -> Result<(), RegistryError> {
        let HeldPartition { model, generation, epoch } = of.clone();
        let store = store.to_owned();
        let request = RegistryRequest::Keep { model, generation, epoch, reserved, store, newest };
        done(self, request, &[], deadline)
    }

    /// A model begins a new life, with this record: it is restored after blocks of the life `before` were lost. That one
    /// counts as deleted.
    ///
    /// # Errors
    /// [`RegistryError::NoModel`], [`RegistryError::Generation`] and [`RegistryError::Epoch`] if somebody else was first,
    /// and [`RegistryError::Refused`] for a record that does not follow on the one that is there.
    fn succeed(
        &self,
        record: &ModelRecord,
        (generation, epoch): (Generation, Epoch),
        deadline: Instant,
    ) -> Result<(), RegistryError> {
        done(self, RegistryRequest::Succeed { generation, epoch }, &record.encode()?, deadline)
    }

    /// The models that are to be restored. A shard that asks has parts of the models `held`, and `makes` others: at most
    /// [`MAX_HELD`](crate::wire::MAX_HELD) of each.
    ///
    /// # Errors
    /// Only if the registry does not answer.
    fn losses(
        &self,
        shard: ShardId,
        (held, makes): (&[Generation], &[Generation]),
        deadline: Instant,
    ) -> Result<Losses, RegistryError> {
        let request = RegistryRequest::Lost { shard, held: held.to_vec(), makes: makes.to_vec() };
        match self.ask(request, &[], deadline)?.0 {
            RegistryAnswer::Losses(losses) => Ok(losses),
            _ => Err(unexpected()),
        }
    }
}

fn done(
    registry: &(impl Registry + ?Sized),
    request: RegistryRequest,
    payload: &[u8],
    deadline: Instant,
) -> Result<(), RegistryError> {
    match registry.ask(request, payload, deadline)?.0 {
        RegistryAnswer::Done => Ok(()),
        _ => Err(unexpected()),
    }
}

fn unexpected() -> RegistryError {
    RegistryError::Refused(Refusal::other("it answers another question: use the same release on both sides"))
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

/// What the registry refuses the request with, if it has answered.
impl TryFrom<RegistryError> for Refusal {
    type Error = RegistryError;

    fn try_from(error: RegistryError) -> Result<Refusal, RegistryError> {
        Ok(match error {
            RegistryError::NoModel(name) => Refusal::NoModel(name),
            RegistryError::Exists(name) => Refusal::Exists(name),
            RegistryError::Deleted(name) => Refusal::Deleted(name),
            RegistryError::Epoch { expected, got } => Refusal::Epoch { expected, got },
            RegistryError::Generation { model, expected, got } => {
                Refusal::Generation { model, expected, got }
            }
            RegistryError::Refused(refusal) => refusal,
            error @ (RegistryError::Peer(_) | RegistryError::Record(_)) => return Err(error),
        })
    }
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
