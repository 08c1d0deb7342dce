//! The end of a move at which blocks arrive: a partition under a block map that is not in force yet.
//!
//! It is dropped when it is told so, or when the registry says that its map never will be in force; not because
//! nobody has spoken of it for a while, for the record may just have been replaced, nor because the registry does not
//! know the model, for it may have been started anew.
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::registry::RegistryError;
use libmodelio::vocabulary::ids::{BlockId, Epoch, Generation, ShardId, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::{Adoption, Kept, Message, ModelRecord, Moved, Refusal};
use parking_lot::Mutex;

use super::Shared;
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
/// When nobody says what becomes of a partition that is filled, the registry is asked.
const ASK_AFTER: Duration = Duration::from_secs(5);
const ASK_AGAIN: Duration = Duration::from_secs(2);
/// How soon it is seen that nobody needs it any more.
const LOOK: Duration = Duration::from_millis(100);

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
    pub(super) fn record(&self) -> &ModelRecord {
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
    fn untouched(&self, record: &ModelRecord) -> Option<Arc<Partition>> {
        let mut stage = self.stage.lock();
        if !matches!(&*stage, Stage::Made) || self.stays || self.told.record != *record {
            return None;
        }
        *stage = Stage::Failed(Refusal::other("a later attempt to move the model has begun"));
        Some(Arc::clone(&self.partition))
    }

    pub(super) fn epoch_in_force(&self) -> Epoch {
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

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Fetches all blocks.
    fn fetch(&self, shared: &Shared, version: Version) -> Result<(), Refusal> {
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
        let me = *shared.shard.lock();
        for (source, blocks) in sources {
            if source == me {
                self.copy(shared, version, &blocks)
            } else {
                self.pull(source, version, &blocks)
            }?;
        }
        self.partition.store().finish_loading().map_err(Refusal::other)
    }

    /// Blocks that are here already.
    fn copy(&self, shared: &Shared, version: Version, blocks: &[BlockId]) -> Result<(), Refusal> {
        let (generation, epoch) = (self.told.record.generation, self.told.epoch);
        for &block in blocks {
            let weights = shared.fetch(generation, epoch, version, block, Kept::Weights)?;
            let mut state = Vec::new();
            for what in self.wants(block)? {
                state.push((what, shared.fetch(generation, epoch, version, block, what)?));
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

    /// Until somebody has said what becomes of it: looks after it.
    fn keep(self: &Arc<Adopting>, shared: &std::sync::Weak<Shared>) {
        let filled = Instant::now();
        let mut asked = filled;
        while !self.is_over() {
            std::thread::sleep(LOOK);
            let Some(shared) = shared.upgrade().filter(|shared| !shared.is_stopping()) else { return };
            if filled.elapsed() < ASK_AFTER || asked.elapsed() < ASK_AGAIN {
                continue;
            }
            asked = Instant::now();
            let (record, generation) = (self.record(), self.record().generation);
            match shared.registry(|registry, deadline| registry.model(&record.name, deadline)) {
                Ok(there) if there == *record => {
                    let shards = self.told.shards.clone();
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
                    shared.adopting.forget(self);
                }
                Err(error) => {
                    tracing::warn!(model = %record.name, %error, "whether it has moved is not known")
                }
            }
        }
    }
}

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
                let partition = known.map_or_else(|| Partition::new(&told.record, me, &self.pool), Ok);
                (partition.map_err(Refusal::other)?, false)
            }
        };
        taking.done(Adopting {
            told,
            partition,
            stays,
            stage: Mutex::new(Stage::Made),
            blocks: AtomicU32::new(0),
            handed: Mutex::default(),
            over: AtomicBool::new(false),
        })
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
        {
            let mut stage = adopting.stage.lock();
            match &*stage {
                Stage::Made => {}
                Stage::Filling(of) | Stage::Filled(of) if *of == version => return Ok(()),
                Stage::Filling(of) | Stage::Filled(of) => {
                    return Err(Refusal::other(format!("it was to be filled with version {of}")));
                }
                Stage::Failed(refusal) => return Err(refusal.clone()),
            }
            if !adopting.stays {
                adopting.partition.store().begin_at(version, reducer).map_err(Refusal::other)?;
            }
            adopting.partition.begin_at(version);
            *stage = Stage::Filling(version);
        }
        let (shared, kept) = (Arc::clone(self), Arc::clone(&adopting));
        let fills = move || {
            let outcome = kept.fetch(&shared, version);
            let shared = {
                let weak = shared.this.clone();
                drop(shared);
                weak
            };
            match outcome {
                Ok(()) => {
                    *kept.stage.lock() = Stage::Filled(version);
                    kept.keep(&shared);
                }
                Err(refusal) => {
                    tracing::warn!(model = %kept.record().name, %refusal, "blocks cannot be moved here");
                    *kept.stage.lock() = Stage::Failed(refusal);
                }
            }
        };
        let spawned = std::thread::Builder::new().name("adopting".into()).spawn(fills);
        spawned.map(drop).map_err(|error| {
            let refusal = Refusal::other(format!("no thread to fetch blocks: {error}"));
            *adopting.stage.lock() = Stage::Failed(refusal.clone());
            refusal
        })
    }

    /// The partition will never be. Nothing happens the second time.
    pub(super) fn abandon(&self, generation: Generation, attempt: u64) {
        self.adopting.abandon(generation, attempt);
    }

    /// Nothing is to come of what is adopted of this model.
    pub(in crate::server) fn stop_adopting(&self, generation: Generation) {
        self.adopting.delete(generation);
    }
}
