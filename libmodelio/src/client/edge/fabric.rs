//! Connections to shards by RDMA: blocks are named and fetched by the shard, or placed where the shard wants them; blocks
//! of versions are fetched from the shard's memory straight into the back buffer, past the shard's CPU.
//!
//! Fetched blocks count only when a second look at the shard's directory shows that the version was there all the time
//! (see [`published`]): until then nobody sees them.

use std::collections::{HashMap, VecDeque};
use std::net::ToSocketAddrs;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::memory::{Common, Memory};
use super::{Shared, Shortcut, Way};
use crate::bytes::mmap::Mapping;
use crate::client::conversation::Data;
use crate::client::core::Part;
use crate::transport::frames::{Framed, Link};
use crate::transport::rdma::published::{self, DIRECTORY, ENTRY, Seen};
use crate::transport::rdma::verbs::{Done, Finished, Pool, Remote as Place, VerbsError, Work};
use crate::transport::rdma::{Endpoint, Placement, QueuePair};
use crate::transport::shm::MAX_REGIONS;
use crate::transport::stream::{Close, Stream, Target};
use crate::transport::tally::Flow;
use crate::vocabulary::ids::{BlockId, Version};
use crate::vocabulary::layout::PartitionLayout;
use crate::wire::{Message, Refusal};

/// Bytes that are read from a ring at once.
const AHEAD: usize = 512;
/// Looks at the directory, or at entries, that may be under way on one connection.
const LOOKS: usize = 16;
/// Blocks that are fetched before it is looked whether the version is still there.
const BATCH: usize = 8;
/// A version that is not in the directory yet is looked for again after this.
const AGAIN: Duration = Duration::from_millis(2);
/// Requests of pushes into slots of the shard's have numbers from here on.
pub(super) const PLACED: u64 = 1 << 32;
/// Blocks up to this many bytes are placed, longer ones fetched, unless it is said otherwise. Where the two cross on real
/// devices is not measured.
const PLACE_UP_TO: usize = 64 << 10;

/// What work was for.
const LOOK: u64 = 1 << 40;
const CHECK: u64 = 2 << 40;
const BLOCK: u64 = 3 << 40;
const PUT: u64 = 4 << 40;
const KIND: u64 = !((1 << 40) - 1);

/// What one connection has in common with a shard elsewhere.
pub(in crate::client) struct Remote {
    queue_pair: Arc<QueuePair>,
    /// The shard's blocks, as they lie in its versions.
    layout: PartitionLayout,
    /// Memory that the shard may fetch from, by where it is.
    shared: HashMap<usize, (u32, Weak<Mapping>)>,
    last: u32,
    directory: Option<Place>,
    /// Room for what is looked at.
    looks: Arc<Pool>,
    granted: Option<Granted>,
    pull: Pull,
    done: Done,
    /// It was said that versions come through the ring.
    said: bool,
}

/// Slots of the shard's that this end writes.
struct Granted {
    start: Place,
    bytes: u32,
    count: u32,
    free: Vec<u32>,
}

/// Blocks of a version on their way.
#[derive(Default)]
struct Pull {
    version: Version,
    /// Where it is, once that is known.
    seen: Option<Seen>,
    looking: bool,
    /// It was not there: look again then.
    again: Option<Instant>,
    /// Asked for by the core, and not fetched yet.
    asked: VecDeque<BlockId>,
    /// Being fetched, and not checked.
    batches: VecDeque<Batch>,
    /// It cannot be read, or not to where it belongs: the shard is asked for its blocks, which come through the ring.
    by_ring: bool,
}

struct Batch {
    seen: Seen,
    blocks: Vec<BlockId>,
    /// Those that are not here yet.
    coming: usize,
}

impl Remote {
    pub(super) fn new(queue_pair: &Arc<QueuePair>, layout: PartitionLayout) -> Result<Remote, VerbsError> {
        let chunk = queue_pair.device().arena().take(LOOKS * DIRECTORY)?;
        Ok(Remote {
            queue_pair: Arc::clone(queue_pair),
            layout,
            shared: HashMap::new(),
            last: 0,
            directory: None,
            looks: Pool::new(chunk, DIRECTORY, false),
            granted: None,
            pull: Pull::default(),
            done: Vec::new(),
            said: false,
        })
    }

    /// What it goes over.
    pub(super) fn queue_pair(&self) -> Arc<QueuePair> {
        Arc::clone(&self.queue_pair)
    }

    /// The number under which the shard knows `memory`, and what it is to be told if it does not yet.
    pub(super) fn lend(&mut self, memory: &Arc<Mapping>) -> Result<(u32, Option<Message>), String> {
        let key = Arc::as_ptr(memory).addr();
        if let Some((number, known)) = self.shared.get(&key)
            && known.strong_count() > 0
        {
            return Ok((*number, None));
        }
        if self.shared.len() >= MAX_REGIONS {
            return Err(format!("more than {MAX_REGIONS} regions on one connection"));
        }
        let registration = self.queue_pair.device().register(memory).map_err(|error| error.to_string())?;
        self.last = self.last.wrapping_add(1);
        let Place { address, key: remote_key } = registration.remote();
        self.shared.insert(key, (self.last, Arc::downgrade(memory)));
        let (region, bytes) = (self.last, memory.len() as u64);
        Ok((region, Some(Message::ShareAt { region, bytes, address, key: remote_key })))
    }

    /// Numbers of memory that is gone.
    pub(super) fn gone(&mut self) -> Vec<u32> {
        let gone = |(number, memory): &(u32, Weak<Mapping>)| (memory.strong_count() == 0).then_some(*number);
        let numbers: Vec<u32> = self.shared.values().filter_map(gone).collect();
        self.shared.retain(|_, (_, memory)| memory.strong_count() > 0);
        numbers
    }

    /// Writes `len` bytes at `start` of `memory` into a slot of the shard's, if they are to go that way and there is one
    /// free: its number.
    pub(super) fn place(
        &mut self,
        piece: crate::transport::stream::Piece,
        memory: &Arc<Mapping>,
    ) -> Result<Option<u32>, String> {
        let Some(granted) = &mut self.granted else { return Ok(None) };
        if self.queue_pair.room(1) == 0 {
            return Ok(None);
        }
        let Some(slot) = granted.free.pop() else { return Ok(None) };
        let to = granted.start.at(u64::from(slot) * u64::from(granted.bytes));
        let placed = self.queue_pair.device().register(memory).and_then(|registration| {
            self.queue_pair.write(PUT, piece, registration, to)?;
            self.queue_pair.post()
        });
        match placed {
            Ok(()) => Ok(Some(slot)),
            Err(error) => {
                granted.free.push(slot);
                Err(error.to_string())
            }
        }
    }

    /// Whether so many bytes of `memory` are to be placed, and whether they must be.
    pub(super) fn places(&self, len: usize, memory: &Arc<Mapping>) -> (bool, bool) {
        let fits = self.granted.as_ref().is_some_and(|granted| len <= granted.bytes as usize)
            && self.queue_pair.device().register(memory).is_ok();
        match self.queue_pair.device().options().placement {
            Placement::Static => (fits, fits),
            Placement::Dynamic => (false, false),
            Placement::Auto => (fits && len <= PLACE_UP_TO, false),
        }
    }

    /// A slot may be written again.
    pub(super) fn freed(&mut self, request: u64) -> Result<(), Close> {
        let slot = request.checked_sub(PLACED).and_then(|slot| u32::try_from(slot).ok());
        match (slot, &mut self.granted) {
            (Some(slot), Some(granted)) if slot < granted.count && !granted.free.contains(&slot) => {
                granted.free.push(slot);
                Ok(())
            }
            _ => Err(Close::Asked(format!("request {request} was not asked").into())),
        }
    }

    /// A message that only a shard elsewhere says. False if it is another one.
    pub(super) fn hear(&mut self, message: &Message) -> Result<bool, Close> {
        match *message {
            Message::Directory { address, key } => self.directory = Some(Place { address, key }),
            Message::Slots { count, bytes, address, key } => {
                if self.granted.is_some() || count > 1 << 16 {
                    return Err(Close::Asked("slots were granted before, or too many".into()));
                }
                let (start, free) = (Place { address, key }, (0..count).rev().collect());
                self.granted = Some(Granted { start, bytes, count, free });
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Looks whether a version is still there.
    fn check(&self, seen: &Seen) -> Result<(), VerbsError> {
        let Some(directory) = self.directory else { return Ok(()) };
        let slot = self.looks.take(None).ok_or(VerbsError::Full(LOOKS))?;
        let entry = directory.at(seen.offset() as u64);
        self.queue_pair.read(CHECK, slot, ENTRY, entry, false).map_err(|(error, _)| error)?;
        self.queue_pair.post()
    }

    /// When to look again at the latest.
    pub(super) fn due(&self) -> Option<Instant> {
        self.pull.again
    }
}

impl Shared {
    /// Opens a connection by RDMA, or if that does not come about and need not, another way.
    pub(super) fn connect_by_rdma(&self, endpoint: &Arc<Endpoint>, way: Way, part: Part) {
        let (Some(this), endpoint) = (self.this.upgrade(), Arc::clone(endpoint)) else { return };
        let patience = self.options.patience.min(Duration::from_secs(5));
        let of_failure = way.clone();
        let begin = move || {
            if let Err(why) = this.register_next(&endpoint) {
                return this.without(Shortcut::Rdma, way, part, &why);
            }
            let address = way.map.parts[part].record.rdma.clone();
            let to = match address.to_socket_addrs().map(|mut all| all.next()) {
                Ok(Some(to)) => to,
                Ok(None) => return this.without(Shortcut::Rdma, way, part, "its address leads nowhere"),
                Err(error) => return this.without(Shortcut::Rdma, way, part, &format!("{address}: {error}")),
            };
            let number = part + way.number;
            endpoint.connect(to, Instant::now() + patience, number, move |queue_pair| {
                let queue_pair = match queue_pair {
                    Ok(queue_pair) => queue_pair,
                    Err(why) => {
                        this.without(Shortcut::Rdma, way, part, &why);
                        return None;
                    }
                };
                let remote = this
                    .part_layout(&way, part)
                    .and_then(|layout| Remote::new(queue_pair, layout).map_err(|error| error.to_string()));
                match remote {
                    Ok(remote) => {
                        let memory = Memory::by_rdma(way.clone(), Box::new(remote));
                        let conversation = Data::new(this, way, part, Some(memory));
                        Some(Box::new(Framed::new(conversation, Link::default(), AHEAD)) as Box<dyn Stream>)
                    }
                    Err(why) => {
                        this.without(Shortcut::Rdma, way, part, &why);
                        None
                    }
                }
            });
        };
        // Names are resolved by a thread that may take its time.
        if let Err(error) = std::thread::Builder::new().name("client-resolver".into()).spawn(begin) {
            self.ended(&of_failure, &Link::default(), &format!("no thread to connect by RDMA: {error}"));
        }
    }

    /// Registers what the next version is pulled into. If that cannot be, it is better known before the shard is spoken to.
    fn register_next(&self, endpoint: &Endpoint) -> Result<(), String> {
        let next = self.inner.lock().versions.next_memory();
        next.map_or(Ok(()), |next| {
            endpoint.device().register_to_fill(&next).map(drop).map_err(|error| error.to_string())
        })
    }

    fn part_layout(&self, way: &Way, part: Part) -> Result<PartitionLayout, String> {
        let blocks: Vec<BlockId> =
            way.map.parts[part].owned.iter().flat_map(|run| run.clone().map(BlockId)).collect();
        self.layout.partition(&blocks).map_err(|error| error.to_string())
    }

    /// Fetches what the core wants of a version. True if the shard is to be asked for it instead.
    pub(super) fn pull_by_rdma(&self, memory: &mut Memory, part: Part) -> bool {
        let way = memory.way.clone();
        let Common::Rdma(remote) = &mut memory.common else { return false };
        let Some(directory) = remote.directory else { return false };
        if let Err(error) = self.fetch(&way, part, remote, directory) {
            remote.queue_pair.give_up(&error);
        }
        remote.pull.by_ring
    }

    fn fetch(&self, way: &Way, part: Part, remote: &mut Remote, directory: Place) -> Result<(), VerbsError> {
        let Some(version) = self.inner.lock().core.pulling() else { return Ok(()) };
        if remote.pull.version != version && remote.pull.batches.is_empty() && !remote.pull.looking {
            let asked = std::mem::take(&mut remote.pull.asked);
            self.not_fetched(remote.pull.version, asked);
            remote.pull = Pull { version, ..Pull::default() };
        }
        if remote.pull.version != version || remote.pull.by_ring {
            return Ok(());
        }
        let Some(seen) = remote.pull.seen else { return look(remote, directory) };
        if !seen.is_readable() {
            self.pull_by_ring(way, remote, &"the shard's memory cannot be read (its log says why)");
            return Ok(());
        }
        let back = self.back_buffer();
        if let Some(Err(error)) = back.map(|back| remote.queue_pair.device().register_to_fill(&back)) {
            self.pull_by_ring(way, remote, &error);
            return Ok(());
        }
        loop {
            // One more for the look after them.
            let room = remote.queue_pair.room(2).saturating_sub(1).min(BATCH);
            if room == 0 || remote.pull.batches.len() >= LOOKS - 1 {
                return Ok(());
            }
            let mut blocks = Vec::with_capacity(room);
            while blocks.len() < room {
                let Some(block) = self.next_asked(way, part, remote) else { break };
                let extent = self.layout.block_bytes(block);
                let place = remote.layout.local(block).and_then(|local| {
                    let offset = remote.layout.layout().block_bytes(local).start;
                    seen.place(offset, extent.end - extent.start)
                });
                let Some(target) = self.lands(way, version, block) else { continue };
                blocks.push(block);
                let fetched = match place {
                    Some(address) => {
                        self.fetch_block(remote, target, block, Place { address, key: seen.key })
                    }
                    None => {
                        Err(VerbsError::Broken(format!("block {block} is outside of the shard's version")))
                    }
                };
                if let Err(error) = fetched {
                    // Those before it may be fetched all the same: they are given up when the connection is over.
                    let coming = blocks.len();
                    remote.pull.batches.push_back(Batch { seen, blocks, coming });
                    return Err(error);
                }
            }
            if blocks.is_empty() {
                return Ok(());
            }
            let entry = directory.at(seen.offset() as u64);
            let coming = blocks.len();
            remote.pull.batches.push_back(Batch { seen, blocks, coming });
            if remote.queue_pair.device().is_iwarp() {
                // It cannot wait for the blocks by itself: it is asked when they are here.
                remote.queue_pair.post()?;
                continue;
            }
            // There are as many slots as there may be batches, and one.
            let slot = remote.looks.take(None).ok_or(VerbsError::Full(LOOKS))?;
            // Fenced: the device asks for it when it has the blocks, and no sooner.
            remote.queue_pair.read(CHECK, slot, ENTRY, entry, true).map_err(|(error, _)| error)?;
            remote.queue_pair.post()?;
        }
    }

    /// The version that is being pulled is asked for from now on.
    fn pull_by_ring(&self, way: &Way, remote: &mut Remote, why: &dyn std::fmt::Display) {
        remote.pull.by_ring = true;
        let asked = std::mem::take(&mut remote.pull.asked);
        self.not_fetched(remote.pull.version, asked);
        if !std::mem::replace(&mut remote.said, true) {
            let (model, address, version) = (&self.model, way.address(), remote.pull.version);
            tracing::warn!(%model, address, %version, "is not read by RDMA, but sent, as others may be: {why}");
        }
    }

    fn fetch_block(
        &self,
        remote: &Remote,
        target: Target,
        block: BlockId,
        from: Place,
    ) -> Result<(), VerbsError> {
        let back = self
            .back_buffer()
            .ok_or_else(|| VerbsError::Broken("the version is not wanted any more".into()))?;
        let registration = remote.queue_pair.device().register_to_fill(&back)?;
        remote.queue_pair.read_to(BLOCK | u64::from(block.0), target, registration, from)
    }

    /// The next block that the core wants of this shard.
    fn next_asked(&self, way: &Way, part: Part, remote: &mut Remote) -> Option<BlockId> {
        if let Some(block) = remote.pull.asked.pop_front() {
            return Some(block);
        }
        let due = remote.pull.batches.iter().map(|batch| batch.blocks.len()).sum();
        let (outgoing, _) = self.next_pull_for(self.inner.lock(), way, part, due, usize::MAX)?;
        let Message::Pull { version, blocks } = outgoing.message else { return None };
        if version != remote.pull.version {
            self.not_fetched(version, blocks.map(BlockId));
            return None;
        }
        let owned = |block: &BlockId| remote.layout.local(*block).is_some();
        remote.pull.asked.extend(blocks.map(BlockId).filter(owned));
        remote.pull.asked.pop_front()
    }

    /// What was fetched counts, or (not `whole`) was in vain.
    fn fetched(&self, version: Version, blocks: &[BlockId], whole: bool) {
        for &block in blocks {
            if whole {
                let extent = self.layout.block_bytes(block);
                self.tally.moved(Flow::Pull, (extent.end - extent.start) as usize);
            }
            self.with_core(|core, now, actions| core.landed(version, block, whole, now, actions));
        }
    }

    /// Blocks that were asked for are not fetched: they are missing as before.
    fn not_fetched(&self, version: Version, blocks: impl IntoIterator<Item = BlockId>) {
        self.with_core(|core, _, _| blocks.into_iter().for_each(|block| core.not_asked(version, block)));
    }

    /// News of what was posted.
    pub(in crate::client) fn hear_of_rdma(&self, memory: &mut Memory, link: &Link) -> Option<Instant> {
        let Common::Rdma(remote) = &mut memory.common else { return None };
        let mut done = std::mem::take(&mut remote.done);
        remote.queue_pair.take(&mut done);
        let any = !done.is_empty();
        for Finished { token, work } in done.drain(..) {
            match (token & KIND, work) {
                (LOOK, Work::Read { slot, .. }) => {
                    let bytes = slot.copy::<DIRECTORY>();
                    let pull = &mut remote.pull;
                    pull.looking = false;
                    match published::find(&bytes, pull.version) {
                        Ok(seen) => pull.seen = Some(seen),
                        Err(absent) => {
                            pull.again = Some(Instant::now() + AGAIN);
                            let (wanted, newest) = (pull.version, absent.newest.unwrap_or(Version(0)));
                            let refused = Message::Refused(Refusal::NoVersion { wanted, newest });
                            let part = memory.way.part.unwrap_or(0);
                            let heard = self.with_core_by(&memory.way, |core, now, actions| {
                                core.from_shard(part, refused, now, actions);
                            });
                            if let Err(why) = heard {
                                tracing::debug!(%why, "a version is gone, and so is its block map");
                            }
                        }
                    }
                }
                (BLOCK, _) => {
                    let coming = remote.pull.batches.iter_mut().find(|batch| batch.coming > 0);
                    let Some(batch) = coming else { continue };
                    batch.coming -= 1;
                    let seen = (batch.coming == 0).then_some(batch.seen);
                    if let Some(seen) = seen.filter(|_| remote.queue_pair.device().is_iwarp())
                        && let Err(error) = remote.check(&seen)
                    {
                        remote.queue_pair.give_up(&error);
                    }
                }
                (CHECK, Work::Read { slot, .. }) => {
                    let entry = slot.copy::<ENTRY>();
                    if let Some(Batch { seen, blocks, .. }) = remote.pull.batches.pop_front() {
                        let whole = seen.still_there(&entry);
                        if !whole {
                            remote.pull.seen = None;
                        }
                        self.fetched(seen.version, &blocks, whole);
                    }
                }
                _ => {}
            }
        }
        remote.done = done;
        if any || remote.pull.again.is_some_and(|at| at <= Instant::now()) {
            remote.pull.again = remote.pull.again.filter(|&at| at > Instant::now());
            link.wake();
        }
        remote.due()
    }

    /// The connection is over, and the device touches nothing for it any more.
    pub(in crate::client) fn rdma_is_over(&self, memory: &mut Memory) {
        let Common::Rdma(remote) = &mut memory.common else { return };
        for Batch { seen, blocks, .. } in std::mem::take(&mut remote.pull.batches) {
            self.fetched(seen.version, &blocks, false);
        }
        let asked = std::mem::take(&mut remote.pull.asked);
        self.not_fetched(remote.pull.version, asked);
    }
}

fn look(remote: &mut Remote, directory: Place) -> Result<(), VerbsError> {
    if remote.pull.looking
        || remote.pull.again.is_some_and(|at| at > Instant::now())
        || remote.queue_pair.room(1) == 0
    {
        return Ok(());
    }
    let Some(slot) = remote.looks.take(None) else { return Ok(()) };
    remote.queue_pair.read(LOOK, slot, DIRECTORY, directory, false).map_err(|(error, _)| error)?;
    remote.pull.looking = true;
    remote.pull.again = None;
    remote.queue_pair.post()
}
