//! Partitions that are to be: their memory is taken, they are filled, and looked after until somebody has said what
//! becomes of them.
//!
//! One is dropped when it is told so, or when the registry says that its map never will be in force; not because
//! nobody has spoken of it for a while, for the record may just have been replaced, nor because the registry does not
//! know the model, for it may have been started anew.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::registry::RegistryError;
use libmodelio::vocabulary::ids::{Generation, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::{Adoption, Moved, Refusal};

use super::adopting::{Adopting, Here};
use crate::server::partition::Partition;
use crate::server::shared::Shared;

/// When nobody says what becomes of a partition that is filled, the registry is asked.
const ASK_AFTER: Duration = Duration::from_secs(5);
const ASK_AGAIN: Duration = Duration::from_secs(2);
/// How soon it is seen that nobody needs it any more.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

impl Shared {
    /// Takes the memory of a partition that is to be. Takes time.
    pub(super) fn adopt(self: &Arc<Shared>, payload: &[u8]) -> Result<(), Refusal> {
        let told = Adoption::decode(payload).map_err(Refusal::other)?;
        let (name, generation) = (told.record.name.clone(), told.record.generation);
        let new = told.record.block_map().map_err(Refusal::other)?;
        let before = told.map_in_force().map_err(Refusal::other)?;
        let Some(mut taking) = self.adopting.begin(generation, told.attempt, told.epoch)? else {
            return Ok(());
        };
        // From here on the number stays.
        let me = *self.shard.lock();
        let in_force = self.partition_in_force(&name, &told, before.shares().contains_key(&me))?;
        let (partition, stays) = match in_force {
            Some(partition) if new.blocks_of(me).eq(before.blocks_of(me)) => {
                (partition.again(&told.record), true)
            }
            _ => {
                // The one before is of use if it is the same: else its memory is needed.
                let known = taking.before.take().and_then(|known| known.untouched(&told.record));
                let partition = known.map_or_else(|| Partition::new(&told.record, me, &self.executor), Ok);
                (partition.map_err(Refusal::other)?, false)
            }
        };
        taking.done(Adopting::new(told, partition, stays))
    }

    /// The partition that there is, if there should be one.
    fn partition_in_force(
        &self,
        name: &str,
        told: &Adoption,
        owns: bool,
    ) -> Result<Option<Arc<Partition>>, Refusal> {
        let models = self.models.lock();
        match models.get(name) {
            Some(model) if model.generation != told.record.generation => {
                Err(Refusal::Exists(name.to_owned()))
            }
            Some(model) if model.partition.epoch != told.epoch => {
                Err(Refusal::Epoch { expected: model.partition.epoch, got: told.epoch })
            }
            Some(model) => Ok(Some(Arc::clone(&model.partition))),
            None if owns => Err(Refusal::NoModel(name.to_owned())),
            None => Ok(None),
        }
    }

    pub(super) fn adopting(&self, generation: Generation, attempt: u64) -> Result<Arc<Adopting>, Refusal> {
        let adopting = self.adopting.of(generation).filter(|adopting| adopting.attempt() == attempt);
        adopting
            .ok_or_else(|| Refusal::other("this shard does not take part in the move, or was started anew"))
    }

    /// Begins to fetch its blocks. Nothing happens the second time.
    pub(super) fn fill(
        self: &Arc<Shared>,
        generation: Generation,
        attempt: u64,
        version: Version,
        reducer: Reducer,
    ) -> Result<(), Refusal> {
        let adopting = self.adopting(generation, attempt)?;
        if !adopting.begins(version, reducer)? {
            return Ok(());
        }
        let (shared, kept) = (Arc::clone(self), Arc::clone(&adopting));
        let fills = move || {
            let (me, generation) = (*shared.shard.lock(), kept.record().generation);
            let epoch = kept.epoch_in_force();
            let kept_here =
                |(block, what)| shared.partition_of(generation)?.1.kept(epoch, version, block, what);
            let outcome = kept.fetch(me, &mut Here(kept_here), version);
            let shared = {
                let weak = shared.this.clone();
                drop(shared);
                weak
            };
            match outcome {
                Ok(()) => {
                    kept.is_filled(version);
                    keep(&kept, &shared);
                }
                Err(refusal) => {
                    tracing::warn!(model = %kept.record().name, %refusal, "blocks cannot be moved here");
                    kept.has_failed(refusal);
                }
            }
        };
        let spawned = std::thread::Builder::new().name("adopting".into()).spawn(fills);
        spawned.map(drop).map_err(|error| {
            let refusal = Refusal::other(format!("no thread to fetch blocks: {error}"));
            adopting.has_failed(refusal.clone());
            refusal
        })
    }
}

/// Until somebody has said what becomes of it: looks after it.
fn keep(adopting: &Arc<Adopting>, shared: &std::sync::Weak<Shared>) {
    let filled = Instant::now();
    let mut asked = filled;
    while !adopting.is_over() {
        std::thread::sleep(CHECK_INTERVAL);
        let Some(shared) = shared.upgrade().filter(|shared| !shared.is_stopping()) else { return };
        if filled.elapsed() < ASK_AFTER || asked.elapsed() < ASK_AGAIN {
            continue;
        }
        asked = Instant::now();
        let (record, generation) = (adopting.record(), adopting.record().generation);
        match shared.registry(|registry, deadline| registry.model(&record.name, deadline)) {
            Ok(there) if there == *record => {
                let shards = adopting.shards().to_vec();
                let payload = Moved { record: there, shards }.encode().map_err(Refusal::other);
                if let Err(refusal) = payload.and_then(|payload| shared.switch(&payload)) {
                    tracing::warn!(model = %record.name, %refusal, "its new block map is in force");
                }
            }
            Ok(there) if there.generation == generation && there.epoch < record.epoch => {}
            // What it knows to be deleted the announcer drops.
            Err(RegistryError::NoModel(_)) => {}
            Ok(there) if there.generation != generation => {}
            Ok(_) => {
                tracing::info!(model = %record.name, "another block map is in force: blocks are dropped");
                shared.adopting.forget(adopting);
            }
            Err(error) => {
                tracing::warn!(model = %record.name, %error, "whether it has moved is not known")
            }
        }
    }
}
