//! A partition under a block map that is not in force yet: its blocks come from the shards that have them, and the
//! coordinator's state from the present one.

use std::sync::Arc;
use std::time::Duration;

use libmodelio::vocabulary::ids::{Epoch, ShardId, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::{Adoption, Kept, ModelRecord, Refusal, ShardRecord};
use parking_lot::Mutex;

use crate::coordinator::CoordinatorCore;
use crate::server::partition::Partition;
use crate::snapshot::{Fetched, Load, Piece, Shards, Sink, SnapshotError, Source};

/// Most bytes of a coordinator's state.
const MAX_STATE: u64 = 1 << 30;

#[derive(Debug)]
enum Stage {
    /// Nothing but its memory is there.
    Made,
    /// So many blocks have come.
    Filling(u32),
    Filled,
    /// Nothing comes of it.
    Over(Refusal),
}

/// The coordinator's state, as far as it has come.
#[derive(Debug, Default)]
struct Handed {
    bytes: Vec<u8>,
    of: u64,
    now: Duration,
}

/// A partition that is to be.
pub(in crate::server) struct Adopting {
    told: Adoption,
    partition: Arc<Partition>,
    /// It is the partition that there is, with the same blocks.
    stays: bool,
    stage: Mutex<Stage>,
    handed: Mutex<Handed>,
}

impl Adopting {
    /// Nothing of it is there yet; with `stays`, `partition` is the one that there is.
    pub(super) fn new(told: Adoption, partition: Arc<Partition>, stays: bool) -> Adopting {
        let (stage, handed) = (Mutex::new(Stage::Made), Mutex::default());
        Adopting { told, partition, stays, stage, handed }
    }

    pub(in crate::server) fn record(&self) -> &ModelRecord {
        &self.told.record
    }

    pub(super) fn attempt(&self) -> u64 {
        self.told.attempt
    }

    /// The shards of the new map.
    pub(in crate::server) fn shards(&self) -> &[ShardRecord] {
        &self.told.shards
    }

    pub(in crate::server) fn epoch_in_force(&self) -> Epoch {
        self.told.epoch
    }

    /// Nobody needs it any more.
    pub(super) fn end(&self) {
        *self.stage.lock() = Stage::Over(Refusal::other("the move was abandoned"));
    }

    /// Its memory for another attempt at the same, if nothing was done with it.
    pub(super) fn untouched(&self, record: &ModelRecord) -> Option<Arc<Partition>> {
        let mut stage = self.stage.lock();
        let is_it = matches!(&*stage, Stage::Made) && !self.stays && self.told.record == *record;
        *stage = Stage::Over(Refusal::other("a later attempt to move the model has begun"));
        is_it.then(|| Arc::clone(&self.partition))
    }

    /// Blocks that are there, and that are to be.
    pub(super) fn progress(&self) -> Result<(u32, u32), Refusal> {
        let of = self.partition.layout().blocks();
        match &*self.stage.lock() {
            Stage::Made => Ok((0, of)),
            // When the last block is there, it is not yet known to be complete.
            Stage::Filling(blocks) => Ok(((*blocks).min(of - 1), of)),
            Stage::Filled => Ok((of, of)),
            Stage::Over(refusal) => Err(refusal.clone()),
        }
    }

    /// The partition, if all of it is there.
    pub(super) fn filled(&self) -> Result<Arc<Partition>, Refusal> {
        match self.progress()? {
            (blocks, of) if blocks == of => Ok(Arc::clone(&self.partition)),
            _ => Err(Refusal::other("its blocks are not all there")),
        }
    }

    /// Begins to fetch its blocks, as they are at a version with the state of this reducer. Shard `me` is this one, and
    /// `here` reads what it has of a block itself. Does nothing the second time.
    pub(super) fn fill(
        self: &Arc<Adopting>,
        me: ShardId,
        here: impl Fn(Piece) -> Result<Vec<u8>, Refusal> + Send + 'static,
        (version, reducer): (Version, Reducer),
    ) -> Result<(), Refusal> {
        let mut stage = self.stage.lock();
        if !matches!(&*stage, Stage::Made) {
            return Ok(());
        }
        if !self.stays {
            self.partition.store().begin_at(version, reducer).map_err(Refusal::other)?;
        }
        self.partition.begin_at(version);
        *stage = Stage::Filling(0);
        drop(stage);
        let this = Arc::clone(self);
        let fills = move || {
            let outcome = this.fetch(me, Here(here), version);
            let mut stage = this.stage.lock();
            match outcome {
                Ok(()) if matches!(&*stage, Stage::Filling(_)) => *stage = Stage::Filled,
                Ok(()) => {}
                Err(refusal) => {
                    tracing::warn!(model = %this.record().name, %refusal, "blocks cannot be moved here");
                    *stage = Stage::Over(refusal);
                }
            }
        };
        let spawned = std::thread::Builder::new().name("adopting".into()).spawn(fills);
        spawned.map(drop).map_err(|error| Refusal::other(format!("no thread to fetch blocks: {error}")))
    }

    /// Fetches all blocks: those that this shard has from its own memory.
    fn fetch(&self, me: ShardId, mut here: impl Source, version: Version) -> Result<(), Refusal> {
        let store = self.partition.store();
        if self.stays {
            let newest = store.newest().map(|newest| newest.version()).unwrap_or_default();
            let wanted = version;
            return if newest == wanted { Ok(()) } else { Err(Refusal::NoVersion { wanted, newest }) };
        }
        let (generation, epoch) = (self.record().generation, self.told.epoch);
        let before = self.told.map_in_force().map_err(Refusal::other)?;
        let owner = |block| before.owner(epoch, block).map_err(Refusal::other);
        let (mut mine, mut others) = (Vec::new(), Vec::new());
        for &block in store.partition().blocks() {
            let local = store.partition().local(block).ok_or(Refusal::NotMine { block })?;
            let wants = [Kept::Weights].into_iter().chain(store.wants(local).map_err(Refusal::other)?);
            let pieces = if owner(block)? == me { &mut mine } else { &mut others };
            pieces.extend(wants.map(|what| (block, what)));
        }
        let addresses = self.told.shards.iter().map(|shard| (shard.shard, shard.address.clone()));
        let (fetched, block_size) = (Fetched::Newest(epoch, version), self.record().block_size);
        let mut there = Shards::new(generation, fetched, block_size, addresses, owner);
        let mut taken = Taken { adopting: self, load: Load::of(store) };
        let came = here
            .send(&mut mine.into_iter(), &mut taken)
            .and_then(|()| there.send(&mut others.into_iter(), &mut taken))
            .and_then(|()| taken.load.finish());
        came.map_err(|error| match error {
            SnapshotError::Refused(refusal) => refusal,
            error => Refusal::other(error),
        })
    }

    /// Takes a piece of the coordinator's state. When it is whole, it is one that can be used.
    pub(super) fn hand_over(&self, at: u64, of: u64, now: Duration, piece: &[u8]) -> Result<(), Refusal> {
        if of > MAX_STATE {
            return Err(Refusal::other(format!(
                "{of} bytes of the coordinator's state, the limit is {MAX_STATE}"
            )));
        }
        let mut handed = self.handed.lock();
        if at == 0 {
            *handed = Handed { bytes: Vec::new(), of, now };
        }
        let end = at.saturating_add(piece.len() as u64);
        if (at, of, now) != (handed.bytes.len() as u64, handed.of, handed.now) || end > of {
            return Err(Refusal::other(
                "a piece of the coordinator's state that does not follow on the last one",
            ));
        }
        handed.bytes.extend_from_slice(piece);
        if end == of {
            let map = self.record().block_map().map_err(Refusal::other)?;
            let layout = self.record().layout().map_err(Refusal::other)?;
            CoordinatorCore::taken_over(&handed.bytes, &layout, map.shares().len(), now)
                .map_err(Refusal::other)?;
        }
        Ok(())
    }

    /// The coordinator's state and what time it is there.
    pub(super) fn handed_over(&self) -> Result<(Vec<u8>, Duration), Refusal> {
        let handed = self.handed.lock();
        match handed.of {
            of if of > 0 && of == handed.bytes.len() as u64 => Ok((handed.bytes.clone(), handed.now)),
            _ => Err(Refusal::other("the coordinator's state was not handed over")),
        }
    }
}

/// A partition that is to be, as a sink.
struct Taken<'a> {
    adopting: &'a Adopting,
    load: Load,
}

impl Sink for Taken<'_> {
    fn take(&mut self, piece: Piece, bytes: &[u8]) -> Result<(), SnapshotError> {
        if let Stage::Over(refusal) = &*self.adopting.stage.lock() {
            return Err(refusal.clone().into());
        }
        self.load.take(piece, bytes)?;
        if let (Kept::Weights, Stage::Filling(blocks)) = (piece.1, &mut *self.adopting.stage.lock()) {
            *blocks += 1;
        }
        Ok(())
    }
}

/// What this shard keeps of the version that is wanted, as a source.
struct Here<F>(F);

impl<F: Fn(Piece) -> Result<Vec<u8>, Refusal>> Source for Here<F> {
    fn send(
        &mut self,
        wanted: &mut dyn Iterator<Item = Piece>,
        sink: &mut dyn Sink,
    ) -> Result<(), SnapshotError> {
        for piece in wanted {
            sink.take(piece, &(self.0)(piece)?)?;
        }
        Ok(())
    }
}
