//! Fetching blocks of versions from the shard's memory straight into the back buffer, without the shard's CPU.
//!
//! A second read of the shard's directory must show that the version was there all the time (see [`published`]).
//! Fetched blocks count only then, and nobody sees them before.
//!
//! Blocks that the shard calls unchanged since the shown version are not fetched, but made from those.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::unchanged::Unchanged;
use super::{MAX_DIRECTORY_READS, RdmaPath};
use crate::client::shared::Connection;
use crate::client::shared::Shared;
use crate::transport::frames::Outgoing;
use crate::transport::rdma::published::{self, DIRECTORY, ENTRY, Seen};
use crate::transport::rdma::{Finished, RemoteMemory, VerbsError, Work};
use crate::transport::stream::Target;
use crate::transport::tally::Flow;
use crate::vocabulary::block_ranges::BlockRanges;
use crate::vocabulary::ids::{BlockId, Version};
use crate::wire::{Message, Refusal};

/// The number of blocks that are fetched before the directory is read again.
const BATCH: usize = 8;
/// The number of unchanged blocks that are made before the connection looks at other things.
const MADE_AT_ONCE: usize = 8;
/// The pause before the directory is read again for a version that is not in it yet.
const RETRY_PAUSE: Duration = Duration::from_millis(2);

/// The tokens of the work requests.
const DIRECTORY_READ: u64 = 1 << 40;
const CHECK: u64 = 2 << 40;
const BLOCK: u64 = 3 << 40;
pub(super) const PUT: u64 = 4 << 40;
const KIND: u64 = !((1 << 40) - 1);

/// The fetch of a version.
#[derive(Default)]
pub(super) struct Fetch {
    version: Version,
    /// The place of the version, once it is known.
    seen: Option<Seen>,
    looking: bool,
    /// When to read the directory again for a version that was not in it.
    again: Option<Instant>,
    /// The blocks that are not fetched.
    unchanged: Unchanged,
    /// Blocks that the core has asked for, and that are not fetched yet.
    asked: VecDeque<BlockId>,
    /// Blocks that are being fetched, and are not checked yet.
    batches: VecDeque<Batch>,
    /// The version cannot be read, or not into the back buffer. The shard is asked for its blocks, which come through
    /// the ring.
    pub(super) by_ring: bool,
}

impl Fetch {
    /// Begins with `version`, unless it has, or a read for another one is under way. Gives the fetch before.
    fn turn_to(&mut self, version: Version) -> Option<Fetch> {
        let is_idle = self.batches.is_empty() && !self.looking;
        (self.version != version && is_idle)
            .then(|| std::mem::replace(self, Fetch { version, ..Fetch::default() }))
    }

    /// When to look at it again, if nothing comes before.
    fn until(&self) -> Option<Instant> {
        [self.again, self.unchanged.until()].into_iter().flatten().min()
    }
}

struct Batch {
    seen: Seen,
    blocks: Vec<BlockId>,
    /// The number of blocks that are not here yet.
    coming: usize,
}

impl RdmaPath {
    /// Fetches the blocks that the core wants, unless the shard must be asked for them.
    pub(super) fn fetch(&mut self, to: &Connection, directory: RemoteMemory) -> Result<(), VerbsError> {
        let shared = &to.shared;
        let Some(version) = shared.inner.lock().core.pulling() else { return Ok(()) };
        if let Some(before) = self.pull.turn_to(version) {
            shared.not_fetched(before.version, before.asked);
            self.ask_which_changed(to, version);
        }
        if self.pull.version != version || self.pull.by_ring {
            return Ok(());
        }
        let Some(seen) = self.pull.seen else { return self.read_directory(directory) };
        if !seen.is_readable() {
            self.pull_by_ring(to, &"the shard's memory cannot be read (its log says why)");
            return Ok(());
        }
        let back = shared.back_buffer();
        if let Some(Err(error)) = back.map(|back| self.queue_pair.device().register_to_fill(&back)) {
            self.pull_by_ring(to, &error);
            return Ok(());
        }
        if self.pull.unchanged.is_awaited() {
            return Ok(());
        }
        let mut made = 0;
        loop {
            // One work request is left for the check after the blocks.
            let room = self.queue_pair.room(2).saturating_sub(1).min(BATCH);
            if room == 0 || self.pull.batches.len() >= MAX_DIRECTORY_READS - 1 {
                return Ok(());
            }
            let mut blocks = Vec::with_capacity(room);
            while blocks.len() < room && made < MADE_AT_ONCE {
                let Some(block) = self.next_asked(to) else { break };
                let extent = shared.layout.block_bytes(block);
                let place = self.layout.local(block).and_then(|local| {
                    let offset = self.layout.layout().block_bytes(local).start;
                    seen.place(offset, extent.end - extent.start)
                });
                let base = self.pull.unchanged.base();
                let beside = base.and_then(|base| shared.reserve_patched(&to.route, version, block, base));
                let target = match beside {
                    Some(patched) if self.pull.unchanged.has(block) => {
                        shared.accounts.tally.patched(patched.keep(&shared.layout));
                        shared.end_reservation(version, block, true);
                        made += 1;
                        continue;
                    }
                    Some(patched) => Some(patched.whole()),
                    None => shared.reserve(&to.route, version, block),
                };
                let Some(target) = target else { continue };
                blocks.push(block);
                let fetched = match place {
                    Some(address) => {
                        self.fetch_block(to, target, block, RemoteMemory { address, key: seen.key })
                    }
                    None => {
                        Err(VerbsError::Broken(format!("block {block} is outside of the shard's version")))
                    }
                };
                if let Err(error) = fetched {
                    // Earlier blocks of the batch may still be fetched: they are given up when the connection ends.
                    let coming = blocks.len();
                    self.pull.batches.push_back(Batch { seen, blocks, coming });
                    return Err(error);
                }
            }
            if made == MADE_AT_ONCE {
                to.link.wake();
            }
            if blocks.is_empty() {
                return Ok(());
            }
            let entry = directory.at(seen.offset() as u64);
            let coming = blocks.len();
            self.pull.batches.push_back(Batch { seen, blocks, coming });
            if self.queue_pair.device().is_iwarp() {
                // The device cannot wait for the blocks before the check, so the check is posted when they are here.
                self.queue_pair.post()?;
                continue;
            }
            // There is one more slot than there are batches.
            let slot = self.directory_reads.take(None).ok_or(VerbsError::Full(MAX_DIRECTORY_READS))?;
            // The read is fenced: the device does it after it has the blocks.
            self.queue_pair.read(CHECK, slot, ENTRY, entry, true).map_err(|(error, _)| error)?;
            self.queue_pair.post()?;
        }
    }

    /// Asks the shard which blocks of a version have changed since the one that is shown, if that may be used.
    fn ask_which_changed(&mut self, to: &Connection, version: Version) {
        let Some(base) = to.shared.inner.lock().core.base_of(version) else { return };
        let ask = Message::WhichChanged { version, base };
        to.link.send(Outgoing { epoch: to.route.epoch(), ..Outgoing::new(0, ask) });
        self.pull.unchanged = Unchanged::asked(base);
    }

    /// Asks the shard for the blocks of this version from now on.
    fn pull_by_ring(&mut self, to: &Connection, why: &dyn std::fmt::Display) {
        self.pull.by_ring = true;
        let asked = std::mem::take(&mut self.pull.asked);
        to.shared.not_fetched(self.pull.version, asked);
        if !std::mem::replace(&mut self.said, true) {
            let (model, address, version) = (&to.shared.model, to.route.address(), self.pull.version);
            tracing::warn!(%model, address, %version, "is not read by RDMA, but sent, as others may be: {why}");
        }
    }

    fn fetch_block(
        &self,
        to: &Connection,
        target: Target,
        block: BlockId,
        from: RemoteMemory,
    ) -> Result<(), VerbsError> {
        let back = to
            .shared
            .back_buffer()
            .ok_or_else(|| VerbsError::Broken("the version is not wanted any more".into()))?;
        let registration = self.queue_pair.device().register_to_fill(&back)?;
        self.queue_pair.read_to(BLOCK | u64::from(block.0), target, registration, from)
    }

    /// The next block that the core wants of this shard.
    fn next_asked(&mut self, to: &Connection) -> Option<BlockId> {
        if let Some(block) = self.pull.asked.pop_front() {
            return Some(block);
        }
        let due = self.pull.batches.iter().map(|batch| batch.blocks.len()).sum();
        let (outgoing, _) =
            to.shared.pull_request(&mut to.shared.inner.lock(), &to.route, due, usize::MAX)?;
        let Message::Pull { version, blocks, .. } = outgoing.message else { return None };
        if version != self.pull.version {
            to.shared.not_fetched(version, blocks.map(BlockId));
            return None;
        }
        let owned = |block: &BlockId| self.layout.local(*block).is_some();
        self.pull.asked.extend(blocks.map(BlockId).filter(owned));
        self.pull.asked.pop_front()
    }

    /// Takes completions of the posted work.
    pub(super) fn take_finished(&mut self, to: &Connection) -> Option<Instant> {
        let shared = &to.shared;
        let mut done = std::mem::take(&mut self.done);
        self.queue_pair.take(&mut done);
        let any = !done.is_empty();
        for Finished { token, work } in done.drain(..) {
            match (token & KIND, work) {
                (DIRECTORY_READ, Work::Read { slot, .. }) => {
                    let bytes = slot.copy::<DIRECTORY>();
                    let pull = &mut self.pull;
                    pull.looking = false;
                    match published::find(&bytes, pull.version) {
                        Ok(seen) => {
                            pull.seen = Some(seen);
                            pull.unchanged.can_be_read(Instant::now());
                        }
                        Err(absent) => {
                            pull.again = Some(Instant::now() + RETRY_PAUSE);
                            let (wanted, newest) = (pull.version, absent.newest.unwrap_or(Version(0)));
                            let refused = Message::Refused(Refusal::NoVersion { wanted, newest });
                            let reported = shared.with_core_by(&to.route, |core, now, actions| {
                                core.from_shard(to.route.partition, refused, now, actions);
                            });
                            if let Err(why) = reported {
                                tracing::debug!(%why, "a version is gone, and so is its block map");
                            }
                        }
                    }
                }
                (BLOCK, _) => {
                    let coming = self.pull.batches.iter_mut().find(|batch| batch.coming > 0);
                    let Some(batch) = coming else { continue };
                    batch.coming -= 1;
                    let seen = (batch.coming == 0).then_some(batch.seen);
                    if let Some(seen) = seen.filter(|_| self.queue_pair.device().is_iwarp())
                        && let Err(error) = self.check(&seen)
                    {
                        self.queue_pair.give_up(&error);
                    }
                }
                (CHECK, Work::Read { slot, .. }) => {
                    let entry = slot.copy::<ENTRY>();
                    if let Some(Batch { seen, blocks, .. }) = self.pull.batches.pop_front() {
                        let whole = seen.still_there(&entry);
                        if !whole {
                            self.pull.seen = None;
                        }
                        shared.fetched(seen.version, &blocks, whole);
                    }
                }
                _ => {}
            }
        }
        self.done = done;
        let now = Instant::now();
        let is_overdue = self.pull.unchanged.is_overdue(now);
        if is_overdue {
            let (model, address, version) = (&shared.model, to.route.address(), self.pull.version);
            tracing::warn!(%model, address, %version, "the shard does not say what has changed, so all is read");
        }
        if any || is_overdue || self.pull.again.is_some_and(|at| at <= now) {
            self.pull.again = self.pull.again.filter(|&at| at > now);
            to.link.wake();
        }
        self.pull.until()
    }

    /// The shard says which blocks of a version are those of another one.
    pub(super) fn take_unchanged(&mut self, version: Version, base: Version, blocks: &BlockRanges) {
        if version == self.pull.version {
            self.pull.unchanged.said(base, blocks);
        }
    }

    fn read_directory(&mut self, directory: RemoteMemory) -> Result<(), VerbsError> {
        if self.pull.looking
            || self.pull.again.is_some_and(|at| at > Instant::now())
            || self.queue_pair.room(1) == 0
        {
            return Ok(());
        }
        let Some(slot) = self.directory_reads.take(None) else { return Ok(()) };
        self.queue_pair
            .read(DIRECTORY_READ, slot, DIRECTORY, directory, false)
            .map_err(|(error, _)| error)?;
        self.pull.looking = true;
        self.pull.again = None;
        self.queue_pair.post()
    }

    /// Checks that a version is still in the directory.
    fn check(&self, seen: &Seen) -> Result<(), VerbsError> {
        let Some(directory) = self.directory else { return Ok(()) };
        let slot = self.directory_reads.take(None).ok_or(VerbsError::Full(MAX_DIRECTORY_READS))?;
        let entry = directory.at(seen.offset() as u64);
        self.queue_pair.read(CHECK, slot, ENTRY, entry, false).map_err(|(error, _)| error)?;
        self.queue_pair.post()
    }

    /// Stops fetching. The device no longer touches the memory afterwards.
    pub(super) fn give_up_fetching(&mut self, to: &Connection) {
        for Batch { seen, blocks, .. } in std::mem::take(&mut self.pull.batches) {
            to.shared.fetched(seen.version, &blocks, false);
        }
        let asked = std::mem::take(&mut self.pull.asked);
        to.shared.not_fetched(self.pull.version, asked);
    }
}

impl Shared {
    /// The fetched blocks count, or were fetched in vain (not `whole`).
    fn fetched(&self, version: Version, blocks: &[BlockId], whole: bool) {
        for &block in blocks {
            if whole {
                let extent = self.layout.block_bytes(block);
                self.accounts.tally.moved(Flow::Pull, (extent.end - extent.start) as usize);
            }
            self.end_reservation(version, block, whole);
        }
    }

    /// Returns blocks that were asked for and are not fetched to the missing ones.
    fn not_fetched(&self, version: Version, blocks: impl IntoIterator<Item = BlockId>) {
        self.with_core(|core, _, _| blocks.into_iter().for_each(|block| core.not_asked(version, block)));
    }
}
