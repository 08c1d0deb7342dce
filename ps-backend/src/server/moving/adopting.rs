//! The end of a move at which blocks arrive: a partition under a block map that is not in force yet.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::vocabulary::ids::{BlockId, Epoch, ShardId, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::{Adoption, Kept, Message, ModelRecord, Refusal, ShardRecord};
use parking_lot::Mutex;

use crate::coordinator::CoordinatorCore;
use crate::server::partition::Partition;

/// Requests for pieces that are under way to one shard: enough to keep the wire busy.
const WINDOW: usize = 32;
/// Bytes that were asked for, at most: what comes is held here until a block is whole.
const WINDOW_BYTES: usize = 64 << 20;
/// Longest wait for one piece.
const PATIENCE: Duration = Duration::from_secs(20);
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
    pub(super) fn fetch(&self, me: ShardId, here: &Here<'_>, version: Version) -> Result<(), Refusal> {
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
        let before = self.told.map_in_force().map_err(Refusal::other)?;
        let mut sources: BTreeMap<ShardId, Vec<BlockId>> = BTreeMap::new();
        for &block in self.partition.store().partition().blocks() {
            let owner = before.owner(self.told.epoch, block).map_err(Refusal::other)?;
            sources.entry(owner).or_default().push(block);
        }
        for (source, blocks) in sources {
            if source == me { self.copy(here, &blocks) } else { self.pull(source, version, &blocks) }?;
        }
        self.partition.store().finish_loading().map_err(Refusal::other)
    }

    /// Blocks that are here already.
    fn copy(&self, here: &Here<'_>, blocks: &[BlockId]) -> Result<(), Refusal> {
        for &block in blocks {
            let weights = here(block, Kept::Weights)?;
            let mut state = Vec::new();
            for what in self.wants(block)? {
                state.push((what, here(block, what)?));
            }
            self.load(block, &weights, &state)?;
        }
        Ok(())
    }

    fn local(&self, block: BlockId) -> Result<BlockId, Refusal> {
        self.partition.store().partition().local(block).ok_or(Refusal::NotMine { block })
    }

    fn wants(&self, block: BlockId) -> Result<Vec<Kept>, Refusal> {
        self.partition.store().wants(self.local(block)?).map_err(Refusal::other)
    }

    fn load(&self, block: BlockId, weights: &[u8], state: &[(Kept, Vec<u8>)]) -> Result<(), Refusal> {
        if self.is_over() {
            return Err(Refusal::other("the move was abandoned"));
        }
        let local = self.local(block)?;
        self.partition.store().load_kept(local, weights, state).map_err(Refusal::other)?;
        self.blocks.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Blocks from another shard, several requests at a time.
    fn pull(&self, source: ShardId, version: Version, blocks: &[BlockId]) -> Result<(), Refusal> {
        let record = self.told.shards.iter().find(|shard| shard.shard == source);
        let address = record.map(|record| record.address.as_str()).unwrap_or_default();
        self.pull_from(address, version, blocks).map_err(|error| match error {
            Trouble::Here(refusal) => refusal,
            Trouble::There(error) => {
                Refusal::other(format!("blocks cannot be fetched from shard {source} at {address}: {error}"))
            }
        })
    }

    fn pull_from(&self, address: &str, version: Version, blocks: &[BlockId]) -> Result<(), Trouble> {
        let mut peer = AdminPeer::connect(address, Instant::now() + PATIENCE)?;
        let mut left = blocks.iter().copied();
        let mut asked: HashMap<u64, (BlockId, Kept)> = HashMap::new();
        let mut coming: HashMap<BlockId, Coming> = HashMap::new();
        let mut queue: VecDeque<(BlockId, Kept)> = VecDeque::new();
        // Of weights, masters and state together.
        let block_bytes = self.partition.layout().block_size() as usize * 7;
        let most = (WINDOW_BYTES / block_bytes).max(1);
        loop {
            while asked.len() < WINDOW {
                if queue.is_empty()
                    && coming.len() < most
                    && let Some(block) = left.next()
                {
                    let wants = self.wants(block)?;
                    coming.insert(block, Coming { weights: None, state: Vec::new(), left: 1 + wants.len() });
                    queue.push_back((block, Kept::Weights));
                    queue.extend(wants.into_iter().map(|what| (block, what)));
                }
                let Some((block, what)) = queue.pop_front() else { break };
                let (generation, epoch) = (self.told.record.generation, self.told.epoch);
                let fetch = Message::Fetch { generation, epoch, version, block, what };
                asked.insert(peer.ask(&fetch, &[], Instant::now() + PATIENCE)?, (block, what));
            }
            if asked.is_empty() {
                return Ok(());
            }
            if self.is_over() {
                return Err(Refusal::other("the move was abandoned").into());
            }
            let (request, answer, bytes) = peer.answer(Instant::now() + PATIENCE)?;
            let known = asked.remove(&request);
            let (block, what) = known.ok_or_else(|| Refusal::other("an answer that nobody asked for"))?;
            match answer {
                Message::Fetched => {}
                Message::Refused(refusal) => return Err(AdminError::from(refusal).into()),
                other => return Err(Refusal::other(format!("it answers with {}", other.name())).into()),
            }
            let Some(one) = coming.get_mut(&block) else { continue };
            match what {
                Kept::Weights => one.weights = Some(bytes),
                what => one.state.push((what, bytes)),
            }
            one.left -= 1;
            if one.left == 0
                && let Some(Coming { weights: Some(weights), state, .. }) = coming.remove(&block)
            {
                self.load(block, &weights, &state)?;
            }
        }
    }
}

/// What this shard keeps of a block, of the version that is wanted.
pub(super) type Here<'a> = dyn Fn(BlockId, Kept) -> Result<Vec<u8>, Refusal> + 'a;

/// What has come of a block.
struct Coming {
    weights: Option<Vec<u8>>,
    state: Vec<(Kept, Vec<u8>)>,
    /// Pieces that are still to come.
    left: usize,
}

/// Why blocks do not come.
enum Trouble {
    Here(Refusal),
    There(AdminError),
}

impl From<Refusal> for Trouble {
    fn from(refusal: Refusal) -> Trouble {
        Trouble::Here(refusal)
    }
}

impl From<AdminError> for Trouble {
    fn from(error: AdminError) -> Trouble {
        Trouble::There(error)
    }
}
