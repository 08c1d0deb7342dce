//! The end of a move at which blocks arrive: a partition under a block map that is not in force yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use libmodelio::vocabulary::ids::{BlockId, Epoch, ShardId, Version};
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
    Made,
    Filling(Version),
    Filled(Version),
    Failed(Refusal),
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
    blocks: AtomicU32,
    handed: Mutex<Handed>,
    over: AtomicBool,
}

impl Adopting {
    /// Nothing of it is there yet; with `stays`, `partition` is the one that there is.
    pub(super) fn new(told: Adoption, partition: Arc<Partition>, stays: bool) -> Adopting {
        Adopting {
            told,
            partition,
            stays,
            stage: Mutex::new(Stage::Made),
            blocks: AtomicU32::new(0),
            handed: Mutex::default(),
            over: AtomicBool::new(false),
        }
    }

    pub(in crate::server) fn record(&self) -> &ModelRecord {
        &self.told.record
    }

    pub(super) fn attempt(&self) -> u64 {
        self.told.attempt
    }

    /// Nobody needs it any more.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Its memory for another attempt at the same, if nothing was done with it.
    pub(super) fn untouched(&self, record: &ModelRecord) -> Option<Arc<Partition>> {
        let mut stage = self.stage.lock();
        if !matches!(&*stage, Stage::Made) || self.stays || self.told.record != *record {
            return None;
        }
        *stage = Stage::Failed(Refusal::other("a later attempt to move the model has begun"));
        Some(Arc::clone(&self.partition))
    }

    /// The shards of the new map.
    pub(super) fn shards(&self) -> &[ShardRecord] {
        &self.told.shards
    }

    pub(in crate::server) fn epoch_in_force(&self) -> Epoch {
        self.told.epoch
    }

    /// Blocks that are there, and that are to be.
    pub(super) fn progress(&self) -> Result<(u32, u32), Refusal> {
        let of = self.partition.layout().blocks();
        match &*self.stage.lock() {
            Stage::Failed(refusal) => Err(refusal.clone()),
            Stage::Filled(_) => Ok((of, of)),
            // When the last block is there, it is not yet known to be complete.
            Stage::Made | Stage::Filling(_) => Ok((self.blocks.load(Ordering::Relaxed).min(of - 1), of)),
        }
    }

    /// The partition, if all of it is there.
    pub(super) fn filled(&self) -> Result<Arc<Partition>, Refusal> {
        match &*self.stage.lock() {
            Stage::Filled(_) => Ok(Arc::clone(&self.partition)),
            Stage::Failed(refusal) => Err(refusal.clone()),
            Stage::Made | Stage::Filling(_) => Err(Refusal::other("its blocks are not all there")),
        }
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
        if at != handed.bytes.len() as u64 || of != handed.of || now != handed.now || end > of {
            return Err(Refusal::other(
                "a piece of the coordinator's state that does not follow on the last one",
            ));
        }
        handed.bytes.extend_from_slice(piece);
        if end == of {
            let map = self.told.record.block_map().map_err(Refusal::other)?;
            let layout = self.told.record.layout().map_err(Refusal::other)?;
            CoordinatorCore::taken_over(&handed.bytes, &layout, map.shares().len(), now)
                .map_err(Refusal::other)?;
        }
        Ok(())
    }

    /// The coordinator's state and what time it is there, if it has come.
    pub(super) fn handed_over(&self) -> Result<Option<(Vec<u8>, Duration)>, Refusal> {
        let handed = self.handed.lock();
        match handed.of {
            0 => Ok(None),
            of if of == handed.bytes.len() as u64 => Ok(Some((handed.bytes.clone(), handed.now))),
            _ => Err(Refusal::other("the coordinator's state is not whole")),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// It is to be filled with a version, for this reducer. False if somebody fills it with that already.
    pub(super) fn begins(&self, version: Version, reducer: Reducer) -> Result<bool, Refusal> {
        let mut stage = self.stage.lock();
        match &*stage {
            Stage::Made => {}
            Stage::Filling(of) | Stage::Filled(of) if *of == version => return Ok(false),
            Stage::Filling(of) | Stage::Filled(of) => {
                return Err(Refusal::other(format!("it was to be filled with version {of}")));
            }
            Stage::Failed(refusal) => return Err(refusal.clone()),
        }
        if !self.stays {
            self.partition.store().begin_at(version, reducer).map_err(Refusal::other)?;
        }
        self.partition.begin_at(version);
        *stage = Stage::Filling(version);
        Ok(true)
    }

    /// All of it is there.
    pub(super) fn is_filled(&self, version: Version) {
        *self.stage.lock() = Stage::Filled(version);
    }

    /// It cannot be filled.
    pub(super) fn has_failed(&self, refusal: Refusal) {
        *self.stage.lock() = Stage::Failed(refusal);
    }

    /// Fetches all blocks: those that this shard, `me`, has are `here`.
    pub(super) fn fetch(&self, me: ShardId, here: &mut dyn Source, version: Version) -> Result<(), Refusal> {
        if self.stays {
            let newest = self.partition.store().newest().map(|newest| newest.version());
            return match newest {
                Some(newest) if newest == version => Ok(()),
                newest => {
                    let newest = newest.unwrap_or_default();
                    Err(Refusal::NoVersion { wanted: version, newest })
                }
            };
        }
        let epoch = self.told.epoch;
        let before = self.told.map_in_force().map_err(Refusal::other)?;
        let (mut mine, mut others) = (Vec::new(), Vec::new());
        for &block in self.partition.store().partition().blocks() {
            let is_mine = before.owner(epoch, block).map_err(Refusal::other)? == me;
            if is_mine { &mut mine } else { &mut others }.push(block);
        }
        let (generation, block_size) = (self.told.record.generation, self.told.record.block_size);
        let addresses = self.told.shards.iter().map(|shard| (shard.shard, shard.address.clone()));
        let owner = |block| before.owner(epoch, block).map_err(Refusal::other);
        let mut there =
            Shards::new(generation, Fetched::Newest(epoch, version), block_size, addresses, owner);
        let mut taken = Taken { adopting: self, load: Load::of(self.partition.store()) };
        let mut mine = self.pieces(mine)?.into_iter();
        let mut others = self.pieces(others)?.into_iter();
        let refusal = |error| match error {
            SnapshotError::Refused(refusal) => refusal,
            error => Refusal::other(error),
        };
        here.send(&mut mine, &mut taken).map_err(refusal)?;
        there.send(&mut others, &mut taken).map_err(refusal)?;
        self.partition.store().finish_loading().map_err(Refusal::other)
    }

    /// All that is kept of these blocks.
    fn pieces(&self, blocks: Vec<BlockId>) -> Result<Vec<Piece>, Refusal> {
        let store = self.partition.store();
        let mut pieces = Vec::new();
        for block in blocks {
            let local = store.partition().local(block).ok_or(Refusal::NotMine { block })?;
            pieces.push((block, Kept::Weights));
            let wants = store.wants(local).map_err(Refusal::other)?;
            pieces.extend(wants.into_iter().map(|what| (block, what)));
        }
        Ok(pieces)
    }
}

/// A partition that is to be, as a sink.
struct Taken<'a> {
    adopting: &'a Adopting,
    load: Load,
}

impl Sink for Taken<'_> {
    fn take(&mut self, piece: Piece, bytes: &[u8]) -> Result<(), SnapshotError> {
        if self.adopting.is_over() {
            return Err(Refusal::other("the move was abandoned").into());
        }
        self.load.take(piece, bytes)?;
        if piece.1 == Kept::Weights {
            self.adopting.blocks.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// What this shard keeps of the version that is wanted, as a source.
pub(super) struct Here<F>(pub(super) F);

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
