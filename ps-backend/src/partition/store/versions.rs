//! The memory of versions.
//!
//! Version buffers are double. A version is computed from the newest buffer into the next one, and publishing it swaps
//! them. Until then the old one is whole, so a contribution that is dropped in the middle leaves nothing behind that
//! counts. Stamps identify what it left in the next buffer: each block of a buffer has the number of the version whose
//! value it holds.
//!
//! A version's buffer is written again only after it has left the table. Observers are notified before it leaves.

use std::fmt::Debug;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use libmodelio::bytes::available;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::{Region, RegionKey};
use libmodelio::bytes::surplus::{Surplus, UNUSED_FOR};
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::ModelLayout;

use super::buffer::{VOID, VersionBuffer};
use super::table::{Left, Table};

/// A version that a program has just closed may still be held for a moment.
const GRACE: Duration = Duration::from_millis(200);

/// An observer of versions, which shows them to readers that the store does not know.
///
/// The store calls it under its lock, so the observer must neither wait nor call the store.
pub trait VersionWatch: Send + Sync + Debug {
    /// `version` is complete. It lies in `memory` from its beginning, and stays unchanged until it is retired.
    /// Buffers are used again and again: the same [`Region::key`] means the same buffer, as long as the store lives.
    fn published(&self, version: Version, memory: &Region);

    /// When this returns, the memory of `version` may be written, or given back to the system. A published version is
    /// retired once, at the latest when the store ends.
    fn retired(&self, version: Version);
}

/// How many versions are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The number of versions before the newest that are kept, read or not.
    pub retain: usize,
    /// The most version buffers. The newest, the next and the retained versions always have one.
    pub buffers: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { retain: 0, buffers: 6 }
    }
}

impl Limits {
    pub(super) fn max(&self) -> usize {
        self.buffers.max(self.retain + 2)
    }
}

/// The versions by their numbers, at least one, and the buffers for later ones.
#[derive(Debug)]
pub(super) struct Versions {
    layout: Arc<ModelLayout>,
    pub(super) limits: Limits,
    pub(super) table: Table<Arc<VersionBuffer>>,
    watches: Vec<Arc<dyn VersionWatch>>,
    /// Whether the first version is loaded. Observers are not notified of it before.
    complete: bool,
    /// The version in which each block last changed.
    pub(super) changed: Arc<[AtomicU64]>,
    /// The buffer of the next version.
    pub(super) back: Option<Arc<VersionBuffer>>,
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
    /// Why there is no memory for the next version, as long as it has none, and since when.
    shortage: Option<(Instant, String)>,
}

impl Versions {
    /// Version 0, which must be loaded and is pre-faulted, and the buffers of the next version and of retained ones.
    ///
    /// # Errors
    /// When there is no memory.
    pub(super) fn new(layout: &Arc<ModelLayout>, limits: Limits) -> io::Result<Versions> {
        let front = VersionBuffer::allocate(layout, RegionKey(1), 0)?;
        front.region.memory().prefault()?;
        let mut versions = Versions {
            layout: Arc::clone(layout),
            limits,
            table: Table::new(Version(0), front, SystemTime::now()),
            watches: Vec::new(),
            complete: false,
            changed: (0..layout.blocks()).map(|_| AtomicU64::new(0)).collect(),
            back: None,
            free: Vec::new(),
            surplus: Surplus::default(),
            live: 1,
            left: Vec::new(),
            lent: Vec::new(),
            coming: 0,
            next_key: 2,
            shortage: None,
        };
        // Together with the retained ones, every version has a buffer then, unless a reader holds an old one.
        for _ in 0..=limits.retain {
            let buffer = versions.allocate()?;
            versions.free.push(buffer);
        }
        versions.back = versions.free.pop();
        Ok(versions)
    }

    /// A new buffer whose blocks hold no version. Its pages are taken when they are touched.
    fn allocate(&mut self) -> io::Result<Arc<VersionBuffer>> {
        let buffer = VersionBuffer::allocate(&self.layout, RegionKey(self.next_key), VOID)?;
        available::promise(buffer.region.memory())?;
        self.next_key += 1;
        self.live += 1;
        Ok(buffer)
    }

    /// The newest version.
    pub(super) fn newest(&self) -> Option<(Version, &Arc<VersionBuffer>)> {
        self.table.last_key_value().map(|(version, published)| (*version, &published.buffer))
    }

    /// The version to load is this one instead of version 0. This must be called before anything is loaded.
    pub(super) fn begin_at(&mut self, version: Version) {
        debug_assert!(!self.complete, "others read it");
        let Some((_, first)) = self.newest() else { return };
        for block in (0..self.layout.blocks()).map(BlockId) {
            first.stamp(block, version.0);
            self.changed[block.index()].store(version.0, Ordering::Relaxed);
        }
        self.table.rename_first(version);
    }

    /// The first version is loaded.
    pub(super) fn complete(&mut self) {
        self.complete = true;
        self.watches.iter().for_each(|watch| self.publish_all(&**watch));
    }

    /// Notifies `watch` of the present versions and of all later changes.
    pub(super) fn watch(&mut self, watch: Arc<dyn VersionWatch>) {
        if self.complete {
            self.publish_all(&*watch);
        }
        self.watches.push(watch);
    }

    fn publish_all(&self, watch: &dyn VersionWatch) {
        let all = self.table.iter();
        all.for_each(|(&version, published)| watch.published(version, &published.buffer.region));
    }

    /// A version is complete, and becomes the newest.
    pub(super) fn publish(&mut self, version: Version, buffer: &Arc<VersionBuffer>) {
        debug_assert!(self.complete && self.table.keys().all(|&known| known < version), "{version}");
        let key = buffer.region.key();
        if self.back.take_if(|back| back.region.key() == key).is_none() {
            self.lent.retain(|(lent, _)| *lent != key);
            self.live += 1;
        }
        for (stamp, changed) in buffer.stamps.iter().zip(self.changed.iter()) {
            if stamp.load(Ordering::Relaxed) == version.0 {
                changed.store(version.0, Ordering::Relaxed);
            }
        }
        self.watches.iter().for_each(|watch| watch.published(version, &buffer.region));
        self.table.insert(version, Arc::clone(buffer), SystemTime::now());
        for _ in 0..self.surplus.made(self.free.len(), UNUSED_FOR) {
            self.live -= usize::from(self.free.pop().is_some());
        }
    }

    fn remove(&mut self, version: Version) -> Option<Left<Arc<VersionBuffer>>> {
        debug_assert!(self.complete, "{version} is being loaded");
        self.watches.iter().for_each(|watch| watch.retired(version));
        self.table.remove(version)
    }

    /// The number of buffers, and of those that nobody needs.
    pub(super) fn counts(&self) -> (usize, usize) {
        let lent = self.lent.iter().filter(|(_, lent)| lent.strong_count() > 0).count();
        (self.live + lent, self.free.len())
    }

    /// The memory of versions, of the next one and of later ones, without lent buffers and spares that are being
    /// made.
    pub(super) fn memory(&self) -> impl Iterator<Item = &Arc<Mapping>> {
        let shown = self.table.values().map(|published| &published.buffer);
        shown.chain(&self.back).chain(&self.free).map(|buffer| buffer.region.memory())
    }

    /// The memory of the next version and of later ones.
    pub(super) fn memory_to_come(&self) -> impl Iterator<Item = &Arc<Mapping>> {
        self.back.iter().chain(&self.free).map(|buffer| buffer.region.memory())
    }

    /// The buffers that were handed out for new weights.
    pub(super) fn lent_memory(&self) -> impl Iterator<Item = Arc<Mapping>> {
        self.lent.iter().filter_map(|(_, lent)| lent.upgrade())
    }

    /// The number of buffers.
    fn total(&mut self) -> usize {
        self.lent.retain(|(_, lent)| lent.strong_count() > 0);
        self.live + self.lent.len()
    }

    /// Recycles versions that are neither retained nor needed, and finds a buffer for the next version if it has
    /// none and one is free.
    pub(super) fn reuse(&mut self) {
        self.find_free();
        self.drop_above();
    }

    /// Like [`Self::reuse`]. If no buffer is free, it takes a new one. If as many as may be are in use, it takes one in
    /// place of the oldest version that is only shown by other processes. It waits for a spare that is being made.
    /// Returns whether the next version has a buffer now.
    pub(super) fn recycle(&mut self) -> bool {
        self.find_free();
        if self.back.is_none() {
            self.take_next();
        }
        self.drop_above();
        self.back.is_some()
    }

    fn find_free(&mut self) {
        let is_read = |version: &Version| self.table[version].buffer.is_read_early();
        let mut idle = self.table.idle(self.limits.retain);
        idle.retain(|version| !is_read(version));
        for version in idle {
            match self.remove(version) {
                Some(Left::Free(buffer)) if !buffer.region.memory().is_lent() => self.free.push(buffer),
                // A program outside may still read it.
                Some(Left::GivenUp | Left::Free(_)) => self.live -= 1,
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

    /// Takes a buffer for the next version.
    fn take_next(&mut self) {
        let max = self.limits.max();
        if self.total() >= max
            && let Some(version) = self.table.oldest_shown(self.limits.retain)
        {
            tracing::debug!(%version, "is shown by a client on this host, which keeps its buffer");
            self.remove(version);
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

    /// Why there is no memory for the next version, if there is none and readers hold all buffers that exist, for
    /// longer than the kernel takes to tell that a program has closed a version.
    pub(super) fn shortage(&self) -> Option<String> {
        let lasts = self.shortage.as_ref().filter(|(since, _)| since.elapsed() >= GRACE);
        lasts.map(|(_, why)| why.clone())
    }

    /// Gives back the buffers that are free, but for that of the next version.
    pub(super) fn give_back(&mut self) {
        self.find_free();
        self.live -= self.free.len();
        self.free.clear();
    }

    /// Gives free buffers above the present limit back to the system.
    fn drop_above(&mut self) {
        while self.total() > self.limits.max() && self.free.pop().is_some() {
            self.live -= 1;
        }
    }

    /// Whether there is, or may be, a buffer for the next version, after [`Self::reuse`].
    pub(super) fn may_go_on(&mut self) -> bool {
        self.back.is_some() || self.total() < self.limits.max()
    }

    /// The plan that used the next version's buffer was dropped. If somebody still reads blocks there, the buffer is
    /// left to the readers, and the next version gets another one. False if as many buffers as there may be are left to
    /// readers already: then the next plan waits for them.
    pub(super) fn leave_to_readers(&mut self) -> bool {
        let Some(back) = self.back.as_ref().filter(|back| back.is_read_early()) else { return true };
        self.left.retain(|left| left.strong_count() > 0);
        if self.left.len() >= self.limits.max() {
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
    /// When the most buffers exist already, or there is no memory.
    pub(super) fn take_buffer(&mut self) -> io::Result<Region> {
        let max = self.limits.max();
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

    /// The memory of this key that [`Self::take_buffer`] gave, if it is still in use.
    pub(super) fn lent_memory_of(&self, key: RegionKey) -> Option<Arc<Mapping>> {
        let (_, memory) = self.lent.iter().find(|(lent, _)| *lent == key)?;
        memory.upgrade()
    }

    /// The same as a buffer.
    pub(super) fn lent(&self, key: RegionKey) -> Option<Arc<VersionBuffer>> {
        let region = Region::new(self.lent_memory_of(key)?, key);
        Some(Arc::new(VersionBuffer::new(region, self.layout.blocks(), VOID)))
    }

    /// Whether the next version has a buffer.
    pub(super) fn has_buffer(&self) -> bool {
        self.back.is_some() || !self.free.is_empty()
    }

    /// One more buffer, which the caller pre-faults and hands to [`Self::add_spare`]. None if `count` are there for the
    /// next version and later ones, or one is being made.
    ///
    /// # Errors
    /// When there is no memory.
    pub(super) fn new_spare(&mut self, count: usize) -> io::Result<Option<Arc<VersionBuffer>>> {
        let there = usize::from(self.back.is_some()) + self.free.len();
        if there >= count || self.coming > 0 || self.total() >= self.limits.max() {
            return Ok(None);
        }
        let buffer = self.allocate()?;
        self.coming += 1;
        Ok(Some(buffer))
    }

    /// Adds a pre-faulted buffer.
    pub(super) fn add_spare(&mut self, buffer: Arc<VersionBuffer>) {
        self.coming -= 1;
        self.free.push(buffer);
    }
}

impl Drop for Versions {
    fn drop(&mut self) {
        for version in self.table.keys().filter(|_| self.complete) {
            self.watches.iter().for_each(|watch| watch.retired(*version));
        }
    }
}
