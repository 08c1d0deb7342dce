//! The shard's memory: version buffers and optimizer state; what is recycled when.
//!
//! Version buffers, optimizer state and fp32 masters are double: a version is computed from the newest
//! ones into the next ones, and publishing it swaps them. Until then the old ones are whole, so a
//! contribution that is dropped in the middle leaves nothing behind. What it left in the next buffer is
//! told apart by stamps: each block of a buffer says which version's value it holds.
//!
//! This and its submodules are among the modules that may hold `unsafe`: they turn shared mappings into
//! slices. What makes that sound is block ownership. A version that is published is never written before
//! it is recycled, which waits for its pins; the buffer of the next version is written block by block,
//! and [`crate::partition::store`] gives a block to one thread at a time.

pub(crate) mod accumulator;
mod buffers;
mod builder;
mod elements;
mod keeping;
pub mod table;
mod versions;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::SystemTime;

use libmodelio::bytes::mmap::Mapping;
use libmodelio::transport::{Region, RegionKey};
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::vocabulary::tensor_steps::ByteSteps;

pub(crate) use buffers::Loading;
pub use buffers::VersionBuffer;
use buffers::{StateBuffer, VOID};
pub(crate) use builder::{Term, VersionBuilder, Written};
pub(crate) use keeping::Keeping;
pub use keeping::kept_range;
use table::Left;
pub use versions::VersionWatch;
use versions::Versions;

/// All memory of one model's shard. Not shared: its owner's lock guards it, and a [`VersionBuilder`] takes along
/// what computing blocks without that lock needs.
#[derive(Debug)]
pub struct RegionStore {
    layout: Arc<ModelLayout>,
    has_halves: bool,
    versions: Versions,
    back: Option<Arc<VersionBuffer>>,
    free: Vec<Arc<VersionBuffer>>,
    /// Buffers in existence, but for those in `lent`.
    live: usize,
    /// Handed out to be filled with new weights.
    lent: Vec<Weak<Mapping>>,
    /// Spares being pre-faulted outside.
    coming: usize,
    next_key: u64,
    /// State of the newest version, and of the next.
    state: [Arc<StateBuffer>; 2],
    /// The version in which each block last changed.
    changed: Arc<[AtomicU64]>,
    /// The optimizer's slots are no longer zero.
    slots_used: bool,
    /// The log says that there is no memory for another version.
    said_full: bool,
}

impl RegionStore {
    /// Memory for a model: version 0 (zeros until [`Self::loading`] fills it) and the next version's buffer, both
    /// pre-faulted.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn new(layout: Arc<ModelLayout>) -> io::Result<RegionStore> {
        let blocks = layout.blocks();
        let has_halves = (0..blocks)
            .flat_map(|block| layout.segments(BlockId(block)))
            .any(|segment| matches!(segment.dtype, DType::F16 | DType::BF16));
        let front = VersionBuffer::allocate(&layout, RegionKey(1), 0)?;
        front.region.memory().prefault()?;
        let mut store = RegionStore {
            has_halves,
            versions: Versions::loading(front),
            back: None,
            free: Vec::new(),
            live: 1,
            lent: Vec::new(),
            coming: 0,
            next_key: 2,
            state: [Arc::default(), Arc::default()],
            changed: (0..blocks).map(|_| AtomicU64::new(0)).collect(),
            slots_used: false,
            said_full: false,
            layout,
        };
        let back = store.allocate()?;
        back.region.memory().prefault()?;
        store.back = Some(back);
        Ok(store)
    }

    /// A new buffer whose blocks hold nothing. Its pages are taken when touched.
    fn allocate(&mut self) -> io::Result<Arc<VersionBuffer>> {
        let buffer = VersionBuffer::allocate(&self.layout, RegionKey(self.next_key), VOID)?;
        self.next_key += 1;
        self.live += 1;
        Ok(buffer)
    }

    /// What version 0 is loaded into, block by block: after [`Self::prepare`], and given back before anything else is
    /// done, [`Self::loaded`] first of all.
    pub(crate) fn loading(&self) -> Option<Loading> {
        debug_assert!(!self.versions.is_complete(), "others read it");
        let front = self.newest()?;
        Some(Loading { layout: Arc::clone(&self.layout), front, state: Arc::clone(&self.state[0]) })
    }

    /// Makes sure that both state buffers have what `reducer` needs, pre-faulted, and nothing more;
    /// `fresh` starts its slots from zero. Not while a [`VersionBuilder`] exists.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn prepare(&mut self, reducer: Reducer, fresh: bool) -> io::Result<()> {
        let fresh = fresh && self.slots_used;
        let bytes = self.layout.elements() as usize * 4;
        if bytes == 0 {
            return Ok(());
        }
        let new = || -> io::Result<Mapping> {
            let mapping = Mapping::anonymous(bytes)?;
            mapping.prefault()?;
            Ok(mapping)
        };
        for (side, shared) in self.state.iter_mut().enumerate() {
            let blocks = self.layout.blocks();
            // Makings hold clones only while they exist; between them this is the one owner.
            let Some(state) = Arc::get_mut(shared) else {
                return Err(io::Error::other("optimizer state is in use"));
            };
            if state.stamps.is_empty() {
                let stamp = if side == 0 { 0 } else { VOID };
                state.stamps = (0..blocks).map(|_| AtomicU64::new(stamp)).collect();
            }
            if self.has_halves && state.master.is_none() {
                state.master = Some(new()?);
            }
            for (i, slot) in state.slots.iter_mut().enumerate() {
                if i >= reducer.state_slots() {
                    *slot = None;
                } else if slot.is_none() || fresh {
                    // Give the old one back first: both together may not fit.
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

    /// The buffer of `version` and when it was published, if it still exists.
    pub fn get(&self, version: Version) -> Option<(Arc<VersionBuffer>, SystemTime)> {
        self.versions.get(&version).map(|published| (Arc::clone(&published.buffer), published.at))
    }

    /// Numbers of all versions in memory, the merely pinned ones included.
    pub fn versions(&self) -> impl DoubleEndedIterator<Item = Version> {
        self.versions.keys().copied()
    }

    /// Buffers in existence, and those nobody needs.
    pub fn buffers(&self) -> (usize, usize) {
        let lent = self.lent.iter().filter(|lent| lent.strong_count() > 0).count();
        (self.live + lent, self.free.len())
    }

    /// The memory of versions, of the next one, and of those to come, but for what is lent or on its way.
    pub fn memory(&self) -> impl Iterator<Item = &Arc<Mapping>> {
        let shown = self.versions.values().map(|published| &published.buffer);
        shown.chain(&self.back).chain(&self.free).map(|buffer| buffer.region.memory())
    }

    /// Buffers in existence.
    fn total(&mut self) -> usize {
        self.lent.retain(|lent| lent.strong_count() > 0);
        self.live + self.lent.len()
    }

    /// Keeps `version` from being recycled. False when it is gone.
    pub fn pin(&mut self, version: Version) -> bool {
        self.versions.pin(version)
    }

    /// Takes `count` pins back.
    pub fn unpin(&mut self, version: Version, count: u64) {
        self.versions.unpin(version, count);
    }

    /// Somebody outside of this process shows `version` from now on, who holds a pin until now. The store waits for it as
    /// for a pin, unless it needs the buffer: then it lets go of it, and the kernel keeps it for whoever has it mapped.
    pub fn show_outside(&mut self, version: Version) {
        self.versions.show(version);
    }

    /// One of those does not show it any more.
    pub fn unshow(&mut self, version: Version) {
        self.versions.unshow(version);
    }

    /// Somebody outside of this process may go on reading the buffer of `version`, and nobody knows for how long. The
    /// buffer is not used for another version: once this one is over, the store lets go of it, and the kernel keeps it
    /// for whoever has it mapped. The caller holds a pin.
    pub fn give_up(&mut self, version: Version) {
        self.versions.give_up(version);
    }

    /// Recycles versions that are neither retained nor needed, and finds the next version's buffer if it has none: where all
    /// are in use, it takes one in place of the oldest that is only shown outside of this process. It waits for a spare
    /// buffer that is being made. Returns whether it has one now.
    pub fn recycle(&mut self, retain: usize, max: usize) -> bool {
        for version in self.versions.idle(retain) {
            match self.versions.remove(version) {
                Some(Left::GivenUp) => self.live -= 1,
                Some(Left::Free(buffer)) => self.free.push(buffer),
                None => {}
            }
        }
        if self.back.is_none() {
            self.back = self.free.pop();
        }
        if self.back.is_none()
            && self.total() >= max
            && let Some(version) = self.versions.oldest_shown(retain)
        {
            tracing::debug!(%version, "is shown by a client on this host, which keeps its buffer");
            self.versions.remove(version);
            self.live -= 1;
        }
        if self.back.is_none() && self.coming == 0 && self.total() < max {
            match self.allocate() {
                Ok(buffer) => {
                    self.back = Some(buffer);
                    self.said_full = false;
                }
                // Said once: it is tried again and again.
                Err(error) if !std::mem::replace(&mut self.said_full, true) => {
                    tracing::error!(%error, "no buffer for another version; trying again");
                }
                Err(_) => {}
            }
        }
        // Buffers beyond what the present bound allows go back to the system.
        while self.total() > max && self.free.pop().is_some() {
            self.live -= 1;
        }
        self.back.is_some()
    }

    /// A buffer for a write of `weights`. It counts as existing until it is published or dropped.
    ///
    /// # Errors
    /// When `max` exist already, or there is no memory.
    pub fn take_buffer(&mut self, max: usize) -> io::Result<Region> {
        let buffer = match self.free.pop() {
            Some(buffer) => buffer,
            None if self.total() >= max => {
                return Err(io::Error::other(format!(
                    "all {max} version buffers (control/max_versions) are in use"
                )));
            }
            None => self.allocate()?,
        };
        self.live -= 1;
        let region = buffer.region.clone();
        self.lent.push(Arc::downgrade(region.memory()));
        Ok(region)
    }

    /// Whether there is a buffer for the next version.
    pub fn has_buffer(&self) -> bool {
        self.back.is_some() || !self.free.is_empty()
    }

    /// Whether the next version can be made by `reducer` without taking memory, or clearing any.
    pub fn is_prepared(&self, reducer: Reducer, fresh: bool) -> bool {
        let wanted = reducer.state_slots();
        let is_there = |state: &Arc<StateBuffer>| {
            let slots = state.slots[..wanted].iter().all(Option::is_some);
            !state.stamps.is_empty() && slots && state.master.is_some() == self.has_halves
        };
        let takes_new = fresh && self.slots_used && wanted > 0;
        self.has_buffer() && !takes_new && self.state.iter().all(is_there)
    }

    /// Whether one more spare buffer is to be made: fewer than `count` are free and none is on its way. They save the
    /// next versions from first touches.
    pub fn wants_spares(&mut self, count: usize, max: usize) -> bool {
        self.free.len() < count && self.coming == 0 && self.total() < max
    }

    /// A new buffer to pre-fault outside and hand to [`Self::add_spare`].
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new_spare(&mut self) -> io::Result<Arc<VersionBuffer>> {
        let buffer = self.allocate()?;
        self.coming += 1;
        Ok(buffer)
    }

    /// Takes a pre-faulted buffer in.
    pub fn add_spare(&mut self, buffer: Arc<VersionBuffer>) {
        self.coming = self.coming.saturating_sub(1);
        self.free.push(buffer);
    }

    /// The memory for computing `version` from what is at hand elsewhere, with these optimizer `steps`, after
    /// [`Self::prepare`] if its reducer keeps state.
    ///
    /// # Errors
    /// When there is no buffer for the version.
    pub(crate) fn next_version(
        &self,
        version: Version,
        steps: ByteSteps,
        check: bool,
    ) -> io::Result<VersionBuilder> {
        let back = self.back.clone().ok_or_else(no_buffer)?;
        let front = self.newest().ok_or_else(no_buffer)?;
        let mut shown = self.versions.values().map(|published| published.buffer.region.key());
        debug_assert!(shown.all(|key| key != back.region.key()), "a version is to be written");
        // Blocks that a dropped contribution left behind are of no version; an assignment, too, takes a version number
        // that they may be stamped with.
        let newest = version.0 - 1;
        for stamp in back.stamps.iter().chain(&self.state[1].stamps) {
            if stamp.load(Ordering::Relaxed) > newest {
                stamp.store(VOID, Ordering::Relaxed);
            }
        }
        Ok(VersionBuilder {
            layout: Arc::clone(&self.layout),
            version,
            steps,
            sealed: OnceLock::new(),
            front,
            back,
            state: self.state.clone(),
            changed: Arc::clone(&self.changed),
            check,
        })
    }

    /// What [`Self::next_version`] gave is complete and becomes the newest.
    pub(crate) fn publish_next(&mut self, builder: &VersionBuilder) {
        self.back = None;
        let version = builder.version;
        for (stamp, changed) in builder.back.stamps.iter().zip(self.changed.iter()) {
            if stamp.load(Ordering::Relaxed) == version.0 {
                changed.store(version.0, Ordering::Relaxed);
            }
        }
        self.state.swap(0, 1);
        self.versions.insert(version, Arc::clone(&builder.back));
    }

    /// A version by this reducer was published: its state is not zero any more.
    pub(crate) fn has_used(&mut self, reducer: Reducer) {
        self.slots_used |= reducer.state_slots() > 0;
    }

    /// Bytes of fp32 masters, and of the optimizer's slots.
    pub(crate) fn state_bytes(&self) -> (u64, u64) {
        let len = |mapping: &Option<Mapping>| mapping.as_ref().map_or(0, |mapping| mapping.len() as u64);
        let masters = self.state.iter().map(|state| len(&state.master)).sum();
        let slots = self.state.iter().flat_map(|state| &state.slots).map(len).sum();
        (masters, slots)
    }
}

fn no_buffer() -> io::Error {
    io::Error::other("no buffer for the next version")
}
