//! The shard's memory: version buffers and optimizer state.
//!
//! Version buffers are double. A version is computed from the newest buffer into the next one, and publishing it swaps
//! them. Until then the old one is whole, so a contribution that is dropped in the middle leaves nothing behind that
//! counts. Stamps identify what it left in the next buffer: each block of a buffer has the number of the version whose
//! value it holds.
//!
//! Optimizer state and fp32 masters are double, too, or there is one copy of them ([`StateCopies`]). One copy is
//! changed in place, which cannot be undone: a version that changes it is computed once it counts. Until then its
//! contributions are added up.
//!
//! Of a model on a device ([`crate::device`]) they lie there, with a copy of the newest weights. The device changes
//! them in place, and every version by it is computed once it counts.
//!
//! This module and those below it may hold `unsafe`: they turn shared mappings into slices. That is sound because
//! blocks have owners. A published version is never written before it is recycled, which waits for its pins. The
//! buffer of the next version is written block by block, and [`crate::partition::store`] gives a block to one thread
//! at a time.

pub(crate) mod accumulator;
mod buffers;
mod builder;
mod coded;
mod elements;
mod keeping;
mod measuring;
mod on_device;
pub mod table;
mod versions;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant, SystemTime};

use libmodelio::bytes::available;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::{Region, RegionKey};
use libmodelio::bytes::surplus::Surplus;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::vocabulary::tensor_steps::ByteSteps;
use smallvec::SmallVec;

use accumulator::Accumulator;
pub use buffers::VersionBuffer;
pub(crate) use buffers::{EarlyReader, Loading};
use buffers::{StateBuffer, VOID};
pub(crate) use builder::{How, Term, VersionBuilder, Written};
pub(crate) use keeping::Keeping;
pub use keeping::kept_range;
pub(crate) use measuring::Measuring;
use table::Left;
pub use versions::VersionWatch;
use versions::Versions;

use crate::device::{Accelerator, Arrays, DeviceError};
use crate::state_copies::StateCopies;

/// A version that a program has just closed may still be held for a moment.
const GRACE: Duration = Duration::from_millis(200);

/// Where optimizer state is, and what computes versions.
#[derive(Clone, Debug)]
pub enum Home {
    /// The host.
    Host(StateCopies),
    /// A device.
    Device(Arc<Accelerator>),
}

impl Home {
    /// The number of copies of state in the host's memory, if it is there.
    pub fn copies(&self) -> Option<StateCopies> {
        match self {
            Home::Host(copies) => Some(*copies),
            Home::Device(_) => None,
        }
    }
}

impl Default for Home {
    fn default() -> Home {
        Home::Host(StateCopies::default())
    }
}

impl From<StateCopies> for Home {
    fn from(copies: StateCopies) -> Home {
        Home::Host(copies)
    }
}

/// Why there is no memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The system's reason.
    #[error(transparent)]
    Host(#[from] io::Error),
    /// The device's.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// The memory of one model's shard. Its owner's lock guards it. A [`VersionBuilder`] has the part that is needed for
/// computing blocks without that lock.
#[derive(Debug)]
pub struct RegionStore {
    layout: Arc<ModelLayout>,
    has_narrow: bool,
    versions_hold_sums: bool,
    versions: Versions,
    back: Option<Arc<VersionBuffer>>,
    free: Vec<Arc<VersionBuffer>>,
    surplus: Surplus,
    /// The number of buffers, without those in `left` and `lent`.
    live: usize,
    /// Buffers that were left to readers of blocks of dropped plans.
    left: Vec<Weak<VersionBuffer>>,
    /// Buffers that were handed out for new weights.
    lent: Vec<(RegionKey, Weak<Mapping>)>,
    /// The number of spares that are being pre-faulted outside.
    coming: usize,
    next_key: u64,
    /// The state of the newest version, and of the next one unless there is one copy.
    state: SmallVec<[Arc<StateBuffer>; 2]>,
    /// The state on a device, if it is there. Then the host has none.
    arrays: Option<Arc<Arrays>>,
    /// The version in which each block last changed.
    changed: Arc<[AtomicU64]>,
    /// Whether the optimizer's slots are no longer zero.
    slots_used: bool,
    /// Why there is no memory for the next version, as long as it has none, and since when.
    shortage: Option<(Instant, String)>,
}

impl RegionStore {
    /// Memory for a model: version 0 (zeros until [`Self::loading`] fills it) and the next version's buffer, both
    /// pre-faulted. On a device, memory is taken for the state of `reducer`, too.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(layout: Arc<ModelLayout>, home: &Home, reducer: Reducer) -> Result<RegionStore, MemoryError> {
        let (copies, arrays) = match home {
            Home::Host(copies) => (copies.count(), None),
            Home::Device(accelerator) => {
                let words = layout.elements() as usize;
                (1, Some(Arc::new(Arrays::new(accelerator, words, reducer.state_slots())?)))
            }
        };
        let blocks = layout.blocks();
        let has_narrow = (0..blocks)
            .flat_map(|block| layout.segments(BlockId(block)))
            .any(|segment| segment.dtype.is_narrow());
        let front = VersionBuffer::allocate(&layout, RegionKey(1), 0)?;
        front.region.memory().prefault()?;
        let mut store = RegionStore {
            has_narrow,
            versions_hold_sums: lies_like_sums(&layout),
            versions: Versions::loading(front),
            back: None,
            free: Vec::new(),
            surplus: Surplus::default(),
            live: 1,
            left: Vec::new(),
            lent: Vec::new(),
            coming: 0,
            next_key: 2,
            state: (0..copies).map(|_| Arc::default()).collect(),
            arrays,
            changed: (0..blocks).map(|_| AtomicU64::new(0)).collect(),
            slots_used: false,
            shortage: None,
            layout,
        };
        let back = store.allocate()?;
        back.region.memory().prefault()?;
        if let (Some(arrays), Some(front)) = (&store.arrays, store.newest()) {
            arrays.pin(front.region.memory());
            arrays.pin(back.region.memory());
        }
        store.back = Some(back);
        Ok(store)
    }

    /// A new buffer whose blocks hold no version. Its pages are taken when they are touched.
    fn allocate(&mut self) -> io::Result<Arc<VersionBuffer>> {
        let buffer = VersionBuffer::allocate(&self.layout, RegionKey(self.next_key), VOID)?;
        available::promise(buffer.region.memory())?;
        self.next_key += 1;
        self.live += 1;
        Ok(buffer)
    }

    /// The memory that version 0 is loaded into, block by block. It comes after [`Self::prepare`], and must be
    /// dropped before any other call, above all [`Self::loaded`].
    pub(crate) fn loading(&self) -> Option<Loading> {
        debug_assert!(!self.versions.is_complete(), "others read it");
        let front = self.newest()?;
        let arrays = self.arrays.clone();
        Some(Loading { layout: Arc::clone(&self.layout), front, state: Arc::clone(&self.state[0]), arrays })
    }

    /// Whether a version by this reducer changes state that cannot be restored. Then it is computed once it counts.
    pub(crate) fn changes_in_place(&self, reducer: Reducer) -> bool {
        self.arrays.is_some() || self.state.len() == 1 && (self.has_narrow || reducer.state_slots() > 0)
    }

    /// The memory on a device, if the model has some.
    pub(crate) fn arrays(&self) -> Option<&Arc<Arrays>> {
        self.arrays.as_ref()
    }

    /// Whether sums of contributions have the type and the place of the elements of a version.
    pub(crate) fn versions_hold_sums(&self) -> bool {
        self.versions_hold_sums
    }

    /// Makes sure that all copies of state have exactly what `reducer` needs, pre-faulted. `fresh` starts its slots
    /// from zero. No [`VersionBuilder`] may exist.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn prepare(&mut self, reducer: Reducer, fresh: bool) -> Result<(), MemoryError> {
        let fresh = fresh && self.slots_used;
        if let Some(arrays) = &self.arrays {
            arrays.prepare(reducer.state_slots(), fresh)?;
            self.slots_used &= !fresh;
            return Ok(());
        }
        let bytes = self.layout.elements() as usize * 4;
        if bytes == 0 {
            return Ok(());
        }
        let new = || -> io::Result<Mapping> {
            available::check(bytes as u64)?;
            let mapping = Mapping::anonymous(bytes)?;
            mapping.prefault()?;
            Ok(mapping)
        };
        for (side, shared) in self.state.iter_mut().enumerate() {
            let blocks = self.layout.blocks();
            // Builders have clones while they exist. Between them this is the only owner.
            let Some(state) = Arc::get_mut(shared) else {
                return Err(io::Error::other("optimizer state is in use").into());
            };
            if state.stamps.is_empty() {
                let stamp = if side == 0 { 0 } else { VOID };
                state.stamps = (0..blocks).map(|_| AtomicU64::new(stamp)).collect();
            }
            if self.has_narrow && state.master.is_none() {
                state.master = Some(new()?);
            }
            for (i, slot) in state.slots.iter_mut().enumerate() {
                if i >= reducer.state_slots() {
                    *slot = None;
                } else if slot.is_none() || fresh {
                    // The old memory is given back first, because both together may not fit.
                    *slot = None;
                    *slot = Some(new()?);
                }
            }
        }
        self.slots_used &= !fresh;
        Ok(())
    }

    /// The newest version's buffer.
    pub fn newest(&self) -> Option<Arc<VersionBuffer>> {
        self.versions.last_key_value().map(|(_, published)| Arc::clone(&published.buffer))
    }

    /// The buffer of `version` and the time of its publication, if it still exists.
    pub fn get(&self, version: Version) -> Option<(Arc<VersionBuffer>, SystemTime)> {
        self.versions.get(&version).map(|published| (Arc::clone(&published.buffer), published.at))
    }

    /// The numbers of all versions in memory. Pinned ones are included.
    pub fn versions(&self) -> impl DoubleEndedIterator<Item = Version> {
        self.versions.keys().copied()
    }

    /// The number of buffers, and of those that nobody needs.
    pub fn buffers(&self) -> (usize, usize) {
        let lent = self.lent.iter().filter(|(_, lent)| lent.strong_count() > 0).count();
        (self.live + lent, self.free.len())
    }

    /// The memory of versions, of the next one and of later ones, without lent buffers and spares that are being
    /// made.
    pub fn memory(&self) -> impl Iterator<Item = &Arc<Mapping>> {
        let shown = self.versions.values().map(|published| &published.buffer);
        shown.chain(&self.back).chain(&self.free).map(|buffer| buffer.region.memory())
    }

    /// The number of buffers.
    fn total(&mut self) -> usize {
        self.lent.retain(|(_, lent)| lent.strong_count() > 0);
        self.live + self.lent.len()
    }

    /// Keeps `version` from being recycled. False if it is gone.
    pub fn pin(&mut self, version: Version) -> bool {
        self.versions.pin(version)
    }

    /// Takes back `count` pins.
    pub fn unpin(&mut self, version: Version, count: u64) {
        self.versions.unpin(version, count);
    }

    /// Another process, whose client holds a pin until now, shows `version` from now on. The store waits for it as
    /// for a pin, unless it needs the buffer. Then it gives the buffer up, and the kernel keeps the memory for the
    /// processes that map it.
    pub fn show_outside(&mut self, version: Version) {
        self.versions.show(version);
    }

    /// One of those processes no longer shows it.
    pub fn unshow(&mut self, version: Version) {
        self.versions.unshow(version);
    }

    /// Another process may go on reading the buffer of `version` for an unknown time. So the buffer is not used for
    /// another version. When this version is over, the store gives the buffer up, and the kernel keeps the memory for
    /// the processes that map it. The caller holds a pin.
    pub fn give_up(&mut self, version: Version) {
        self.versions.give_up(version);
    }

    /// Recycles versions that are neither retained nor needed, and finds a buffer for the next version if it has
    /// none and one is free. Returns whether the next version has a buffer now.
    pub fn reuse(&mut self, retain: usize, max: usize) -> bool {
        self.find_free(retain);
        self.drop_above(max);
        self.back.is_some()
    }

    /// Like [`Self::reuse`]. If no buffer is free, it takes a new one. If as many as may be are in use, it takes one in
    /// place of the oldest version that is only shown by other processes. It waits for a spare that is being made.
    pub fn recycle(&mut self, retain: usize, max: usize) -> bool {
        self.find_free(retain);
        if self.back.is_none() {
            self.take_next(retain, max);
        }
        self.drop_above(max);
        self.back.is_some()
    }

    fn find_free(&mut self, retain: usize) {
        let is_read = |version: &Version| self.versions[version].buffer.is_read_early();
        let mut idle = self.versions.idle(retain);
        idle.retain(|version| !is_read(version));
        for version in idle {
            match self.versions.remove(version) {
                Some(Left::GivenUp) => self.live -= 1,
                Some(Left::Free(buffer)) => self.free.push(buffer),
                None => {}
            }
        }
        if self.back.is_none() {
            self.back = self.free.pop();
            if self.back.is_some() {
                self.surplus.taken(self.free.len());
            }
        }
        if self.back.is_some() {
            self.shortage = None;
        }
    }

    /// Why there is no memory for the next version, if there is none and readers hold all buffers that exist, for
    /// longer than the kernel takes to tell that a program has closed a version.
    pub fn shortage(&self) -> Option<&str> {
        let lasts = self.shortage.as_ref().filter(|(since, _)| since.elapsed() >= GRACE);
        lasts.map(|(_, why)| why.as_str())
    }

    /// Takes a buffer for the next version.
    fn take_next(&mut self, retain: usize, max: usize) {
        if self.total() >= max
            && let Some(version) = self.versions.oldest_shown(retain)
        {
            tracing::debug!(%version, "is shown by a client on this host, which keeps its buffer");
            self.versions.remove(version);
            self.live -= 1;
        }
        if self.coming == 0 && self.total() < max {
            match self.allocate() {
                Ok(buffer) => {
                    self.back = Some(buffer);
                    self.shortage = None;
                }
                Err(error) => {
                    self.shortage.get_or_insert_with(|| (Instant::now(), error.to_string()));
                }
            }
        }
    }

    /// Gives back the buffers that are free, but for that of the next version.
    pub fn give_back(&mut self, retain: usize) {
        self.find_free(retain);
        self.live -= self.free.len();
        self.free.clear();
    }

    /// Gives free buffers above the present limit back to the system.
    fn drop_above(&mut self, max: usize) {
        while self.total() > max && self.free.pop().is_some() {
            self.live -= 1;
        }
    }

    /// Whether there is, or may be, a buffer for the next version, after [`Self::reuse`].
    pub fn may_go_on(&mut self, max: usize) -> bool {
        self.back.is_some() || self.total() < max
    }

    /// The plan that used the next version's buffer was dropped. If somebody still reads blocks there, the buffer is
    /// left to the readers, and the next version gets another one. False if `max` buffers are left to readers already:
    /// then the next plan waits for them.
    pub(crate) fn leave_to_readers(&mut self, max: usize) -> bool {
        let Some(back) = self.back.as_ref().filter(|back| back.is_read_early()) else { return true };
        self.left.retain(|left| left.strong_count() > 0);
        if self.left.len() >= max {
            return false;
        }
        self.left.push(Arc::downgrade(back));
        self.back = None;
        self.live -= 1;
        true
    }

    /// A buffer for new weights. It counts as existing until it is published or dropped.
    ///
    /// # Errors
    /// When `max` buffers exist already, or there is no memory.
    pub fn take_buffer(&mut self, max: usize) -> io::Result<Region> {
        let buffer = match self.free.pop() {
            Some(buffer) => {
                self.surplus.taken(self.free.len());
                buffer
            }
            None if self.total() >= max => {
                return Err(io::Error::other(format!(
                    "all {max} version buffers (twice control/max_versions) are in use"
                )));
            }
            None => self.allocate()?,
        };
        self.live -= 1;
        let region = buffer.region.clone();
        self.lent.push((region.key(), Arc::downgrade(region.memory())));
        Ok(region)
    }

    /// The buffer of this key that [`Self::take_buffer`] gave, if it is still in use.
    pub(crate) fn lent(&self, key: RegionKey) -> Option<Arc<VersionBuffer>> {
        let (_, memory) = self.lent.iter().find(|(lent, _)| *lent == key)?;
        let region = Region::new(memory.upgrade()?, key);
        Some(Arc::new(VersionBuffer::new(region, self.layout.blocks(), VOID)))
    }

    /// Whether the next version has a buffer.
    pub fn has_buffer(&self) -> bool {
        self.back.is_some() || !self.free.is_empty()
    }

    /// Whether `reducer` can make the next version without taking or clearing memory.
    pub fn is_prepared(&self, reducer: Reducer, fresh: bool) -> bool {
        let wanted = reducer.state_slots();
        let is_there = |state: &Arc<StateBuffer>| {
            let slots = state.slots[..wanted].iter().all(Option::is_some);
            !state.stamps.is_empty() && slots && state.master.is_some() == self.has_narrow
        };
        let takes_new = fresh && self.slots_used && wanted > 0;
        if let Some(arrays) = &self.arrays {
            return self.has_buffer() && !takes_new && arrays.slots() >= wanted;
        }
        self.has_buffer() && !takes_new && self.state.iter().all(is_there)
    }

    /// Whether to make one more buffer ahead: fewer than `count` are there for the next version and later ones, and
    /// none is being made.
    pub fn wants_spares(&mut self, count: usize, max: usize) -> bool {
        let there = usize::from(self.back.is_some()) + self.free.len();
        there < count && self.coming == 0 && self.total() < max
    }

    /// A new buffer, which the caller pre-faults and hands to [`Self::add_spare`].
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new_spare(&mut self) -> io::Result<Arc<VersionBuffer>> {
        let buffer = self.allocate()?;
        self.coming += 1;
        Ok(buffer)
    }

    /// Adds a pre-faulted buffer.
    pub fn add_spare(&mut self, buffer: Arc<VersionBuffer>) {
        self.coming = self.coming.saturating_sub(1);
        self.free.push(buffer);
    }

    /// The builder of `version`, with these optimizer `steps`, after [`Self::prepare`] if its reducer keeps state. The
    /// version lies in the `written` buffer, which holds new values, or else in the next one.
    ///
    /// # Errors
    /// When there is no buffer for the version.
    pub(crate) fn next_version(
        &self,
        version: Version,
        written: Option<Arc<VersionBuffer>>,
        steps: ByteSteps,
        how: How,
    ) -> io::Result<VersionBuilder> {
        let back = written.or_else(|| self.back.clone()).ok_or_else(no_buffer)?;
        let front = self.newest().ok_or_else(no_buffer)?;
        let mut shown = self.versions.values().map(|published| published.buffer.region.key());
        debug_assert!(shown.all(|key| key != back.region.key()), "a version is to be written");
        // Blocks that a dropped contribution left behind belong to no version. Their stamp may equal the new
        // version's number, also for an assignment.
        let newest = version.0 - 1;
        let next = self.back.iter().flat_map(|next| &next.stamps);
        let state = self.state.iter().skip(1).flat_map(|state| &state.stamps);
        for stamp in back.stamps.iter().chain(next).chain(state) {
            if stamp.load(Ordering::Relaxed) > newest {
                stamp.store(VOID, Ordering::Relaxed);
            }
        }
        let copies = || self.state.iter().map(Arc::clone);
        Ok(VersionBuilder {
            layout: Arc::clone(&self.layout),
            version,
            steps,
            sealed: OnceLock::new(),
            sum: how.adds_there.then(|| Accumulator::over(back.region.memory())),
            front,
            back,
            arrays: self.arrays.clone(),
            old_state: copies().next().unwrap_or_default(),
            new_state: copies().next_back().unwrap_or_default(),
            changed: Arc::clone(&self.changed),
            how,
        })
    }

    /// The version of [`Self::next_version`] is complete, and becomes the newest.
    pub(crate) fn publish_next(&mut self, builder: &VersionBuilder) {
        let key = builder.back.region.key();
        if self.back.take_if(|back| back.region.key() == key).is_none() {
            self.lent.retain(|(lent, _)| *lent != key);
            self.live += 1;
        }
        let version = builder.version;
        for (stamp, changed) in builder.back.stamps.iter().zip(self.changed.iter()) {
            if stamp.load(Ordering::Relaxed) == version.0 {
                changed.store(version.0, Ordering::Relaxed);
            }
        }
        self.state.reverse();
        self.versions.insert(version, Arc::clone(&builder.back));
        for _ in 0..self.surplus.made(self.free.len()) {
            self.live -= usize::from(self.free.pop().is_some());
        }
    }

    /// A version by this reducer was published: its state is not zero any more.
    pub(crate) fn has_used(&mut self, reducer: Reducer) {
        self.slots_used |= reducer.state_slots() > 0;
    }

    /// The bytes of masters and slots that are taken from the system.
    pub(crate) fn state_taken(&self) -> u64 {
        self.state
            .iter()
            .flat_map(|state| state.slots.iter().chain([&state.master]))
            .flatten()
            .map(Mapping::taken)
            .sum()
    }

    /// The buffers that were handed out for new weights.
    pub(crate) fn lent_memory(&self) -> impl Iterator<Item = Arc<Mapping>> {
        self.lent.iter().filter_map(|(_, lent)| lent.upgrade())
    }

    /// Bytes of fp32 masters, and of the optimizer's slots, in the host's memory.
    pub(crate) fn state_bytes(&self) -> (u64, u64) {
        let len = |mapping: &Option<Mapping>| mapping.as_ref().map_or(0, |mapping| mapping.len() as u64);
        let masters = self.state.iter().map(|state| len(&state.master)).sum();
        let slots = self.state.iter().flat_map(|state| &state.slots).map(len).sum();
        (masters, slots)
    }
}

/// Whether all elements of a version have the type and the place of their sums.
fn lies_like_sums(layout: &ModelLayout) -> bool {
    let mut segments = (0..layout.blocks()).flat_map(|block| layout.segments(BlockId(block)));
    segments.all(|segment| {
        matches!(segment.dtype, DType::F32 | DType::F64) && segment.element * 4 == segment.bytes.start
    })
}

fn no_buffer() -> io::Error {
    io::Error::other("no buffer for the next version")
}
