//! The partition of a shard under a block map that is not in force yet. Its blocks come from the partition that the
//! shard has, and from the shard that the move leaves; the coordinator's state comes from the present coordinator.

use std::sync::Arc;
use std::time::Duration;

use libmodelio::vocabulary::ids::{BlockId, Epoch, ShardId, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::{DataKind, ModelRecord, Moved, Refusal};
use parking_lot::Mutex;

use crate::coordinator::CoordinatorCore;
use crate::server::partition::Partition;
use crate::snapshot::{Fetched, Load, Piece, Shards, Sink, SnapshotError, Source};

/// Most bytes of a coordinator's state.
const MAX_STATE: u64 = 1 << 30;

#[derive(Debug)]
pub(super) enum Stage {
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
pub(in crate::server) struct IncomingPartition {
    pub(super) attempt: u64,
    /// The shard that the move leaves.
    off: ShardId,
    /// The new block map.
    pub(in crate::server) moved: Moved,
    partition: Arc<Partition>,
    /// The partition that the shard has under the map in force.
    before: Option<Arc<Partition>>,
    /// It has the same blocks, in the same memory.
    stays: bool,
    pub(super) stage: Mutex<Stage>,
    handed: Mutex<Handed>,
}

impl IncomingPartition {
    /// The partition for a move, with nothing in it yet. `make` takes its memory, if it is not that of the one
    /// `before`.
    pub(super) fn new(
        (attempt, off): (u64, ShardId),
        moved: Moved,
        before: Option<Arc<Partition>>,
        (blocks, make): (&[BlockId], impl FnOnce() -> Result<Arc<Partition>, Refusal>),
    ) -> Result<IncomingPartition, Refusal> {
        let same = before.as_ref().filter(|before| before.store().partition().blocks() == blocks);
        let stays = same.is_some();
        let partition = same.map_or_else(make, |same| Ok(same.again(&moved.record)))?;
        let (stage, handed) = (Mutex::new(Stage::Made), Mutex::default());
        Ok(IncomingPartition { attempt, off, moved, partition, before, stays, stage, handed })
    }

    /// The epoch of the block map in force.
    pub(in crate::server) fn epoch_in_force(&self) -> Epoch {
        epoch_before(&self.moved.record)
    }

    /// Nothing of it is there, so any attempt may take its place.
    pub(super) fn is_empty(&self) -> bool {
        matches!(&*self.stage.lock(), Stage::Made | Stage::Over(_))
    }

    /// Nobody needs it any more.
    pub(super) fn end(&self) {
        *self.stage.lock() = Stage::Over(Refusal::other("the move was abandoned"));
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

    /// Begins to fetch its blocks, as they are at a version with the state of this reducer. Does nothing the second
    /// time.
    pub(super) fn fill(
        self: &Arc<IncomingPartition>,
        version: Version,
        reducer: Reducer,
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
            let outcome = this.fetch(version);
            let mut stage = this.stage.lock();
            match outcome {
                Ok(()) if matches!(&*stage, Stage::Filling(_)) => *stage = Stage::Filled,
                Ok(()) => {}
                Err(refusal) => {
                    tracing::warn!(model = %this.moved.record.name, %refusal, "blocks cannot be moved here");
                    *stage = Stage::Over(refusal);
                }
            }
        };
        let spawned = std::thread::Builder::new().name("incoming".into()).spawn(fills);
        spawned.map(drop).map_err(|error| Refusal::other(format!("no thread to fetch blocks: {error}")))
    }

    /// Fetches all blocks: those that this shard has from its own memory.
    fn fetch(&self, version: Version) -> Result<(), Refusal> {
        let store = self.partition.store();
        if self.stays {
            let newest = store.newest().map(|newest| newest.version()).unwrap_or_default();
            let wanted = version;
            return if newest == wanted { Ok(()) } else { Err(Refusal::NoVersion { wanted, newest }) };
        }
        let (epoch, generation) = (self.epoch_in_force(), self.moved.record.generation);
        let mut taken = Taken { incoming: self, load: Load::of(store) };
        let mut others = Vec::new();
        for &block in store.partition().blocks() {
            let local = store.partition().local(block).ok_or(Refusal::NotMine { block })?;
            let wants = [DataKind::Weights].into_iter().chain(store.wants(local).map_err(Refusal::other)?);
            let is_mine = |before: &&Arc<Partition>| before.store().partition().local(block).is_some();
            match self.before.as_ref().filter(is_mine) {
                None => others.extend(wants.map(|what| (block, what))),
                Some(before) => {
                    for what in wants {
                        let bytes = before.kept(epoch, version, block, what)?;
                        taken.take((block, what), &bytes).map_err(refusal)?;
                    }
                }
            }
        }
        let fetched = Fetched::Newest(epoch, version);
        let addresses = self.moved.shards.iter().map(|shard| (shard.shard, shard.address.clone()));
        let layout = store.partition().layout();
        let mut there = Shards::new(generation, fetched, layout, addresses, |_| Ok(self.off));
        let came = there.send(&mut others.into_iter(), &mut taken);
        came.and_then(|()| taken.load.finish()).map_err(refusal)
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
            let map = self.moved.record.block_map().map_err(Refusal::other)?;
            let layout = self.moved.record.layout().map_err(Refusal::other)?;
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
    incoming: &'a IncomingPartition,
    load: Load,
}

impl Sink for Taken<'_> {
    fn take(&mut self, piece: Piece, bytes: &[u8]) -> Result<(), SnapshotError> {
        if let Stage::Over(refusal) = &*self.incoming.stage.lock() {
            return Err(refusal.clone().into());
        }
        self.load.take(piece, bytes)?;
        if let (DataKind::Weights, Stage::Filling(blocks)) = (piece.1, &mut *self.incoming.stage.lock()) {
            *blocks += 1;
        }
        Ok(())
    }
}

/// The epoch of the map that a record's map follows.
pub(super) fn epoch_before(record: &ModelRecord) -> Epoch {
    Epoch(record.epoch.0.saturating_sub(1))
}

fn refusal(error: SnapshotError) -> Refusal {
    match error {
        SnapshotError::Refused(refusal) => refusal,
        error => Refusal::other(error),
    }
}
