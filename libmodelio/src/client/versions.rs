//! The versions that a client shows. Their buffers are of the model's size: the client pulls into them and recycles
//! them, or they are the shard's own.
//!
//! Until a buffer is published, it belongs to the thread that pulls or writes into it. Afterwards nobody writes it
//! before it is recycled, which waits for its pins.

mod lent;

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use crate::bytes::available;
use crate::bytes::mmap::Mapping;
use crate::bytes::region::{Region, RegionKey};
use crate::bytes::surplus::{Surplus, UNUSED_FOR};
use crate::client::patching::{Patches, Patching};
use crate::vocabulary::ids::{BlockId, Version};
use crate::vocabulary::meta::Meta;

pub(super) use lent::Lent;

/// A version that the client shows.
#[derive(Clone)]
pub(super) struct Shown {
    /// Its bytes. They stay unchanged only while the version is the newest, or pinned.
    pub buffer: Region,
    /// When it was complete here.
    pub at: SystemTime,
    pins: u64,
    /// The pins of readers: programs that have it open.
    readers: u64,
    /// Names of it that the kernel knows. They keep it only while its buffer is not needed.
    names: u64,
    /// Files of it that the kernel has opened past this process, and knows. Each may be mapped, though nobody has it
    /// open.
    mapped: u64,
    /// Keeps the buffer, if it is the shard's own.
    hold: Option<Arc<dyn Any + Send + Sync>>,
    /// The client has sent the buffer, or lent it to followers. Connections may read it for a while after that.
    is_sent: bool,
}

impl Shown {
    fn new(buffer: Region, at: SystemTime) -> Shown {
        Shown { buffer, at, pins: 0, readers: 0, names: 0, mapped: 0, hold: None, is_sent: false }
    }
}

impl fmt::Debug for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shown { buffer, at, pins, readers, names, mapped, hold, is_sent } = self;
        let is_held = hold.is_some();
        write!(
            f,
            "Shown {{ buffer: {buffer:?}, at: {at:?}, pins: {pins}, readers: {readers}, names: {names}, mapped: {mapped}, is_held: {is_held}, is_sent: {is_sent} }}"
        )
    }
}

/// Takes memory for a version of `size` bytes, with all its pages. This takes a while, so no lock may be held.
///
/// # Errors
/// When there is no memory.
pub(super) fn spare(size: usize) -> io::Result<Mapping> {
    available::check(size as u64)?;
    let memory = memory(size)?;
    memory.prefault()?;
    Ok(memory)
}

fn memory(size: usize) -> io::Result<Mapping> {
    let memory = Mapping::memfd("gradfs-version", size)?;
    // Programs get this memory through passthrough, and no program may ever change it.
    memory.seal()?;
    Ok(memory)
}

/// A buffer is kept for new weights until more versions than this were shown without any.
const KEEP_FOR: u32 = 2;

/// All versions in memory, and the free buffers.
#[derive(Debug)]
pub(super) struct Versions {
    size: usize,
    shown: BTreeMap<Version, Shown>,
    /// What publishers have said of versions that are shown or to come, where that is something.
    metas: BTreeMap<Version, Meta>,
    free: Vec<Region>,
    surplus: Surplus,
    /// A buffer of which no page was touched, until another thread takes its pages.
    untouched: Option<Arc<Mapping>>,
    /// Buffers that were handed out to be written, and not returned.
    lent: Vec<(RegionKey, Weak<Mapping>)>,
    /// A buffer of new weights that was not shown, for the next ones, and how many versions were shown since.
    kept: Option<(Region, u32)>,
    /// The buffer that is being pulled into.
    back: Option<Region>,
    /// Connections may read it.
    back_is_sent: bool,
    /// How that is done where what has changed is pulled.
    patches: Patches,
    /// A spare buffer is being taken.
    coming: bool,
    /// The last spare buffer that was wanted did not come.
    spare_failed: bool,
    /// The client has had learners, or written new weights: a step must not wait for memory. One that only reads holds two
    /// buffers, and more only for as long as readers hold older versions.
    writes: bool,
    next_key: u64,
}

impl Versions {
    /// No version yet. Each takes `size` bytes.
    pub(super) fn new(size: usize) -> Versions {
        Versions {
            size,
            shown: BTreeMap::new(),
            metas: BTreeMap::new(),
            free: Vec::new(),
            surplus: Surplus::default(),
            untouched: None,
            lent: Vec::new(),
            kept: None,
            back: None,
            back_is_sent: false,
            patches: Patches::default(),
            coming: false,
            spare_failed: false,
            writes: false,
            next_key: 1,
        }
    }

    fn allocate(&mut self) -> io::Result<Region> {
        let memory = memory(self.size)?;
        let region = self.region(memory);
        available::promise(region.memory())?;
        Ok(region)
    }

    fn region(&mut self, memory: Mapping) -> Region {
        let key = self.key();
        Region::new(Arc::new(memory), key)
    }

    fn named_anew(&mut self, region: &Region) -> Region {
        let key = self.key();
        Region::new(Arc::clone(region.memory()), key)
    }

    fn key(&mut self) -> RegionKey {
        let key = RegionKey(self.next_key);
        self.next_key += 1;
        key
    }

    /// The client has a learner, or writes new weights.
    pub(super) fn writes(&mut self) {
        self.writes = true;
    }

    /// Whether to take a spare buffer, which [`Self::add_spare`] or [`Self::no_spare`] must follow. It is worth its
    /// memory while none is free or being taken, and fewer exist than are used in turn: the newest version, the
    /// `retain` before it, and the next.
    pub(super) fn wants_spare(&mut self, retain: usize, max: usize) -> bool {
        let wants = self.lacks_spare(retain, max);
        self.coming |= wants;
        wants
    }

    /// Whether [`Self::wants_spare`] would say so.
    pub(super) fn lacks_spare(&mut self, retain: usize, max: usize) -> bool {
        // If the shard's own buffers are shown, nothing is pulled into a buffer.
        !self.shows_shards_memory()
            && !self.coming
            && self.free.is_empty()
            && self.total() < max.min(retain + 2)
    }

    /// The spare buffer does not come. True if the last one that was wanted came.
    pub(super) fn no_spare(&mut self) -> bool {
        self.coming = false;
        !std::mem::replace(&mut self.spare_failed, true)
    }

    /// Adds the memory of [`spare`], unless there are `max` buffers by now.
    pub(super) fn add_spare(&mut self, memory: Mapping, max: usize) {
        (self.coming, self.spare_failed) = (false, false);
        if self.total() >= max {
            return;
        }
        let region = self.region(memory);
        self.free.push(region);
    }

    /// The memory of all buffers, without that of a shard.
    pub(super) fn own(&self) -> Vec<Arc<Mapping>> {
        let shown = self.shown.values().filter(|shown| shown.hold.is_none()).map(|shown| &shown.buffer);
        let others = self.free.iter().chain(self.kept.iter().map(|(kept, _)| kept)).chain(&self.back);
        let here = shown.chain(others).map(|region| Arc::clone(region.memory()));
        here.chain(self.lent.iter().filter_map(|(_, lent)| lent.upgrade())).collect()
    }

    /// The number of buffers.
    fn total(&mut self) -> usize {
        self.lent.retain(|(_, memory)| memory.strong_count() > 0);
        let others = usize::from(self.back.is_some()) + usize::from(self.kept.is_some());
        self.shown.len() + self.free.len() + self.lent.len() + others
    }

    /// The number of buffers, and of those that nobody needs.
    pub(super) fn buffers(&mut self) -> (usize, usize) {
        (self.total(), self.free.len())
    }

    /// The buffer to pull into. It recycles a version that is neither retained nor pinned, or takes a new buffer
    /// while there are fewer than `max`. None if all buffers are held.
    ///
    /// # Errors
    /// When there is no memory.
    pub(super) fn back(&mut self, retain: usize, max: usize) -> io::Result<Option<Region>> {
        while self.back.is_none() {
            // Versions that are pulled have buffers that new weights can take in turn.
            self.kept = None;
            self.recycle(retain, max);
            while !self.writes && self.take_from_names(retain) {}
            self.back = self.free.pop();
            if self.back.is_some() {
                self.surplus.taken(self.free.len());
            } else if self.total() < max {
                match self.allocate() {
                    Ok(region) => {
                        self.untouched = Some(Arc::clone(region.memory()));
                        self.back = Some(region);
                    }
                    Err(error) if !self.take_from_names(retain) => return Err(error),
                    Err(_) => {}
                }
            } else if !self.take_from_names(retain) {
                break;
            }
        }
        Ok(self.back.clone())
    }

    /// The buffer that [`Self::back`] has taken last, if it has no pages yet. It is given once.
    pub(super) fn take_untouched(&mut self) -> Option<Arc<Mapping>> {
        self.untouched.take()
    }

    /// The memory that the next version is pulled into, as far as it exists.
    pub(super) fn next_memory(&self) -> Option<Arc<Mapping>> {
        self.back.as_ref().or(self.free.last()).map(|region| Arc::clone(region.memory()))
    }

    /// Gives back the buffers that nobody needs, but for that of the next version.
    pub(super) fn give_back(&mut self, retain: usize, max: usize) {
        self.recycle(retain, max);
        while self.take_from_names(retain) {}
        let next = usize::from(self.back.is_none() && !self.shows_shards_memory());
        self.free.truncate(next);
    }

    /// Frees versions that are neither pinned nor named, and not among the newest and the `retain` before it.
    pub(super) fn recycle(&mut self, retain: usize, max: usize) {
        let idle: Vec<Version> = self
            .unpinned(retain)
            .filter(|(_, shown)| shown.names == 0)
            .map(|(&version, _)| version)
            .collect();
        idle.into_iter().for_each(|version| self.free(version));
        while self.total() > max && (self.free.pop().is_some() || self.kept.take().is_some()) {}
        let (free, back) = (&self.free, &self.back);
        self.patches.retain(|key| free.iter().chain(back).any(|region| region.key() == key));
    }

    /// The versions that are neither pinned nor retained, nor perhaps mapped, the oldest first.
    fn unpinned(&self, retain: usize) -> impl Iterator<Item = (&Version, &Shown)> {
        let keep = self.shown.keys().rev().nth(retain).copied().unwrap_or(Version(0));
        self.shown.range(..keep).filter(|(_, shown)| shown.pins + shown.mapped == 0)
    }

    fn free(&mut self, version: Version) {
        let Some(shown) = self.shown.remove(&version) else { return };
        // A buffer that a connection may still read is not written again.
        let is_read = shown.is_sent && Arc::strong_count(shown.buffer.memory()) > 1;
        // Nor is one that a program outside has, and has not given back.
        if shown.hold.is_none() && !is_read && !shown.buffer.memory().is_lent() {
            self.patches.frees(shown.buffer.key(), version);
            self.free.push(shown.buffer);
        }
    }

    /// The filling of the buffer that is pulled into by what has changed since `base`. None if that is not the newest
    /// version, or there is no such buffer.
    pub(super) fn patching(&mut self, base: Version, blocks: u32) -> Option<Arc<Patching>> {
        if let Some(now) = self.patches.now()
            && now.base() == base
        {
            return Some(Arc::clone(now));
        }
        let back = self.back.as_ref()?.key();
        let front = self.newest().filter(|(newest, _)| *newest == base)?.1.buffer.memory();
        let front = Arc::clone(front);
        self.pin(base);
        let (patching, before) = self.patches.begin((base, front), back, blocks);
        before.into_iter().for_each(|before| self.unpin(before, 1));
        Some(patching)
    }

    /// A block is about to be written into the buffer that is pulled into, as a whole.
    pub(super) fn comes_whole(&mut self, block: BlockId) {
        match (self.patches.now(), &self.back) {
            (Some(now), _) => now.comes_whole(block),
            (None, Some(back)) => self.patches.forget(back.key()),
            (None, None) => {}
        }
    }

    /// The buffer that is pulled into is about to be written otherwise.
    pub(super) fn is_filled(&mut self) {
        let before = self.patches.end();
        before.into_iter().for_each(|before| self.unpin(before, 1));
        self.back.iter().for_each(|back| self.patches.forget(back.key()));
    }

    /// A buffer is needed: frees the oldest version that names alone keep. Whoever opens such a name later finds that
    /// its version is gone. False if there is none.
    pub(super) fn take_from_names(&mut self, retain: usize) -> bool {
        let oldest = self.unpinned(retain).next().map(|(&version, _)| version);
        oldest.inspect(|&version| self.free(version)).is_some()
    }

    /// The publisher of the newest version that there is has said this of it. `pulled` is still to be shown.
    pub(super) fn announced(&mut self, newest: Version, meta: &Meta, pulled: Option<Version>) {
        self.metas.insert(newest, meta.clone());
        let shown = &self.shown;
        let is_kept = |version| version == newest || Some(version) == pulled || shown.contains_key(&version);
        self.metas.retain(|version, meta| !meta.is_empty() && is_kept(*version));
    }

    /// What the publisher of a version that is shown has said of it.
    pub(super) fn meta(&self, version: Version) -> Meta {
        self.metas.get(&version).cloned().unwrap_or_default()
    }

    /// The blocks of the last pulled version that came whole. None if all did.
    pub(super) fn pulled_whole(&self) -> Option<usize> {
        self.patches.whole()
    }

    /// Makes the buffer that was pulled into `version`.
    pub(super) fn publish(&mut self, version: Version) {
        if let Some(buffer) = self.back.take() {
            let before = self.patches.publish(version, buffer.key());
            before.into_iter().for_each(|before| self.unpin(before, 1));
            let is_sent = std::mem::take(&mut self.back_is_sent);
            self.shown.insert(version, Shown { is_sent, ..Shown::new(buffer, SystemTime::now()) });
            let gone = self.surplus.made(self.free.len(), if self.writes { UNUSED_FOR } else { 1 });
            self.free.truncate(self.free.len() - gone);
        }
    }

    /// Shows `version` from the buffer of new weights that it was made from. [`Self::take_buffer`] gave the buffer, and
    /// nobody writes it any more.
    pub(super) fn show_own(&mut self, version: Version, buffer: Region) {
        self.is_filled();
        self.lent.retain(|(key, _)| *key != buffer.key());
        self.shown.insert(version, Shown { is_sent: true, ..Shown::new(buffer, SystemTime::now()) });
    }

    /// The new weights in this buffer are a version, and the buffer is not needed any more. If the version is shown
    /// from the shard's memory, the buffer is kept for the next new weights: their pages need not be taken anew.
    pub(super) fn keep(&mut self, buffer: Region) {
        self.lent.retain(|(key, _)| *key != buffer.key());
        if self.shows_shards_memory() {
            self.kept = Some((buffer, 0));
        }
    }

    /// Whether the newest version is shown from the shard's own memory.
    pub(super) fn shows_shards_memory(&self) -> bool {
        self.newest().is_some_and(|(_, newest)| newest.hold.is_some())
    }

    /// Whether one more version may be shown from the shard's memory: fewer than `max` versions are needed.
    pub(super) fn has_room(&mut self, retain: usize, max: usize) -> bool {
        loop {
            self.recycle(retain, max);
            let unneeded = usize::from(self.back.is_some()) + usize::from(self.kept.is_some());
            let has_room = self.total() - self.free.len() - unneeded < max;
            if has_room || !self.take_from_names(retain) {
                return has_room;
            }
        }
    }

    /// Shows `version` from the shard's own memory, which `hold` keeps unchanged. Buffers for pulling are not needed
    /// any more.
    pub(super) fn show(
        &mut self,
        version: Version,
        buffer: Region,
        at: SystemTime,
        hold: Arc<dyn Any + Send + Sync>,
    ) {
        self.is_filled();
        self.free.clear();
        self.back = None;
        self.patches.retain(|_| false);
        // Who publishes again and again takes it before the next version or so.
        if let Some((_, versions)) = &mut self.kept {
            *versions += 1;
        }
        self.kept.take_if(|(_, versions)| *versions > KEEP_FOR);
        self.shown.insert(version, Shown { hold: Some(hold), ..Shown::new(buffer, at) });
    }

    /// A buffer for new weights. It counts as existing until it is dropped. It may be that of a version which names
    /// alone keep, and which is not among the `retain` before the newest.
    ///
    /// # Errors
    /// When `max` exist already, or there is no memory.
    pub(super) fn take_buffer(&mut self, retain: usize, max: usize) -> io::Result<Region> {
        loop {
            match self.take_one(max) {
                Err(_) if self.take_from_names(retain) => {}
                outcome => return outcome,
            }
        }
    }

    fn take_one(&mut self, max: usize) -> io::Result<Region> {
        self.writes();
        // A connection may still read the memory of the last ones.
        let kept = self.kept.take().map(|(region, _)| region);
        let is_idle = |memory: &Arc<Mapping>| Arc::strong_count(memory) == 1 && !memory.is_lent();
        let kept = kept.filter(|region| is_idle(region.memory()));
        let free = self.free.pop().inspect(|_| self.surplus.taken(self.free.len()));
        let region = match free.or(kept) {
            // The key names these weights to the coordinator, which may still get messages about earlier ones.
            Some(region) => {
                self.patches.forget(region.key());
                self.named_anew(&region)
            }
            None if self.total() >= max => {
                return Err(io::Error::other(format!(
                    "all {max} version buffers (twice control/max_versions) are in use"
                )));
            }
            None => self.allocate()?,
        };
        self.lent.push((region.key(), Arc::downgrade(region.memory())));
        Ok(region)
    }

    /// The newest version.
    pub(super) fn newest(&self) -> Option<(Version, &Shown)> {
        self.shown.last_key_value().map(|(&version, shown)| (version, shown))
    }

    /// One version.
    pub(super) fn get(&self, version: Version) -> Option<&Shown> {
        self.shown.get(&version)
    }

    /// The numbers of the versions, in rising order.
    pub(super) fn numbers(&self) -> impl DoubleEndedIterator<Item = Version> {
        self.shown.keys().copied()
    }

    /// Keeps `version` from being recycled. False if it is gone.
    pub(super) fn pin(&mut self, version: Version) -> bool {
        self.shown.get_mut(&version).map(|shown| shown.pins += 1).is_some()
    }

    /// Pins `version` for a reader. False if it is gone.
    pub(super) fn open(&mut self, version: Version) -> bool {
        let opened = self.shown.get_mut(&version);
        opened.map(|shown| (shown.pins, shown.readers) = (shown.pins + 1, shown.readers + 1)).is_some()
    }

    /// A reader of `version` ends. Its pin stays until [`Self::unpin`].
    pub(super) fn close(&mut self, version: Version) {
        if let Some(shown) = self.shown.get_mut(&version) {
            shown.readers = shown.readers.saturating_sub(1);
        }
    }

    /// Whether an open of `version` is one too many: `max` others are open, or programs hold `most` others, by mappings
    /// too. That a learner has it open is no exception: a reader could take one after the other in that way.
    pub(super) fn refuses(&self, version: Version, max: usize, most: usize) -> bool {
        let is_open = |(of, shown): &(&Version, &Shown)| **of != version && shown.readers > 0;
        self.shown.iter().filter(is_open).count() >= max || self.held_besides(version) >= most
    }

    /// The other versions that are open, or perhaps mapped.
    fn held_besides(&self, version: Version) -> usize {
        let is_held = |(of, shown): &(&Version, &Shown)| **of != version && shown.readers + shown.mapped > 0;
        self.shown.iter().filter(is_held).count()
    }

    /// The kernel opens one more file of `version` past this process, until [`Self::unmap`]. False if the version is
    /// gone, or programs hold `most` others.
    pub(super) fn map(&mut self, version: Version, most: usize) -> bool {
        let is_full = self.held_besides(version) >= most;
        let Some(shown) = self.shown.get_mut(&version) else { return false };
        let may = shown.mapped > 0 || !is_full;
        shown.mapped += u64::from(may);
        may
    }

    /// The kernel knows such a file no more: nobody has it open or mapped.
    pub(super) fn unmap(&mut self, version: Version) {
        if let Some(shown) = self.shown.get_mut(&version) {
            shown.mapped = shown.mapped.saturating_sub(1);
        }
    }

    /// The kernel knows one more name of `version`. False if it is gone.
    pub(super) fn look_up(&mut self, version: Version) -> bool {
        self.shown.get_mut(&version).map(|shown| shown.names += 1).is_some()
    }

    /// The kernel has forgotten `count` names of `version`, which may be gone.
    pub(super) fn forget(&mut self, version: Version, count: u64) {
        if let Some(shown) = self.shown.get_mut(&version) {
            debug_assert!(shown.names >= count, "{version} has {} names", shown.names);
            shown.names = shown.names.saturating_sub(count);
        }
    }

    /// Takes back `count` pins.
    pub(super) fn unpin(&mut self, version: Version, count: u64) {
        if let Some(shown) = self.shown.get_mut(&version) {
            debug_assert!(shown.pins >= count, "{version} has {} pins", shown.pins);
            shown.pins = shown.pins.saturating_sub(count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_recycled_when_neither_retained_nor_pinned() {
        let mut versions = Versions::new(4096);
        for version in (1..=3).map(Version) {
            assert!(versions.back(1, 4).unwrap().is_some());
            versions.publish(version);
            if version == Version(1) {
                assert!(versions.pin(version));
            }
        }
        assert_eq!(versions.numbers().collect::<Vec<_>>(), [1, 2, 3].map(Version));
        assert!(versions.back(1, 3).unwrap().is_none(), "1 is pinned, 2 retained, 3 the newest");
        versions.unpin(Version(1), 1);
        assert!(versions.back(1, 3).unwrap().is_some());
        assert_eq!(versions.numbers().collect::<Vec<_>>(), [2, 3].map(Version));
        assert!(!versions.pin(Version(1)));
    }

    #[test]
    fn names_keep_a_version_until_its_buffer_is_needed() {
        let mut versions = Versions::new(4096);
        versions.writes();
        for version in (1..=9).map(Version) {
            assert!(versions.back(0, 4).unwrap().is_some(), "{version}");
            versions.publish(version);
            assert!(versions.look_up(version));
            if version == Version(5) {
                assert!(versions.open(version));
            }
        }
        let numbers = |versions: &Versions| versions.numbers().map(|version| version.0).collect::<Vec<_>>();
        assert_eq!(numbers(&versions), [5, 7, 8, 9], "5 is open, the newest ones are known by name");
        assert!(!versions.look_up(Version(6)) && !versions.open(Version(6)));
        versions.forget(Version(6), 1);
        versions.forget(Version(7), 1);
        versions.recycle(0, 4);
        assert_eq!((numbers(&versions), versions.buffers()), (vec![5, 8, 9], (4, 1)), "nobody knows 7");
        // New weights, and versions in the shard's memory, need room in the same way.
        let lent = [(); 2].map(|()| versions.take_buffer(0, 4).unwrap());
        assert_eq!(numbers(&versions), [5, 9]);
        assert!(versions.take_buffer(0, 4).is_err(), "5 is open, and 9 the newest");
        drop((lent, versions.take_untouched()));
        versions.close(Version(5));
        versions.unpin(Version(5), 1);
        assert!(versions.has_room(0, 2));
        assert_eq!(numbers(&versions), [9]);
    }

    #[test]
    fn a_client_that_only_reads_holds_two_buffers_while_nobody_holds_an_older_version() {
        let mut versions = Versions::new(4096);
        let comes = |versions: &mut Versions, version: u64| {
            assert!(versions.back(0, 32).unwrap().is_some());
            versions.publish(Version(version));
            assert!(versions.look_up(Version(version)));
            versions.recycle(0, 32);
            versions.buffers().0
        };
        assert_eq!((1..=4).map(|version| comes(&mut versions, version)).collect::<Vec<_>>(), [1, 2, 2, 2]);
        assert!(versions.open(Version(4)));
        assert_eq!((5..=8).map(|version| comes(&mut versions, version)).collect::<Vec<_>>(), [2, 3, 3, 3]);
        versions.close(Version(4));
        versions.unpin(Version(4), 1);
        versions.forget(Version(4), 1);
        assert_eq!((9..=11).map(|version| comes(&mut versions, version)).collect::<Vec<_>>(), [2, 2, 2]);
        // Whoever has learners keeps the third one for the next steps.
        versions.writes();
        assert_eq!((12..=14).map(|version| comes(&mut versions, version)).collect::<Vec<_>>(), [3, 4, 5]);
    }

    #[test]
    fn a_version_that_may_be_mapped_is_kept_and_few_are() {
        let mut versions = Versions::new(4096);
        versions.writes();
        for version in (1..=9).map(Version) {
            assert!(versions.back(0, 5).unwrap().is_some(), "{version}");
            versions.publish(version);
            assert!(versions.look_up(version));
            // It is opened, and closed again.
            assert_eq!(versions.map(version, 3), version.0 <= 3, "{version}");
        }
        assert_eq!(versions.numbers().collect::<Vec<_>>(), [1, 2, 3, 8, 9].map(Version));
        assert!(versions.refuses(Version(9), 5, 3) && !versions.refuses(Version(9), 5, 4));
        assert!(versions.map(Version(2), 1), "its other file costs nothing");
        versions.unmap(Version(2));
        versions.unmap(Version(2));
        versions.forget(Version(2), 1);
        versions.recycle(0, 5);
        assert!(versions.get(Version(2)).is_none() && !versions.map(Version(2), 3));
        assert!(versions.map(Version(9), 3));
    }

    #[test]
    fn readers_open_so_many_versions_and_what_is_open_already() {
        let mut versions = Versions::new(4096);
        for version in (1..=3).map(Version) {
            versions.back(0, 8).unwrap();
            versions.publish(version);
            assert!(!versions.refuses(version, 2, 9) || version == Version(3));
            // A name that was looked up is no reader.
            assert!(versions.look_up(version));
            assert!(version == Version(3) || versions.open(version));
        }
        assert!(versions.refuses(Version(3), 2, 9) && !versions.refuses(Version(2), 2, 9));
        // A learner has it open.
        assert!(versions.open(Version(3)) && versions.refuses(Version(3), 2, 9));
        versions.close(Version(3));
        versions.unpin(Version(3), 1);
        versions.close(Version(1));
        versions.unpin(Version(1), 1);
        assert!(!versions.refuses(Version(3), 2, 9) && versions.refuses(Version(3), 2, 1));
        assert!(!versions.open(Version(9)));
    }

    #[test]
    fn versions_that_lie_with_the_shard_take_no_buffers_and_are_let_go_of_in_turn() {
        let mut versions = Versions::new(4096);
        versions.back(1, 4).unwrap();
        versions.publish(Version(1));
        versions.back(1, 4).unwrap();
        assert!(versions.wants_spare(1, 4));
        versions.no_spare();
        let mut holds = Vec::new();
        for version in (2..=4).map(Version) {
            assert!(versions.has_room(1, 4), "{version}");
            let hold: Arc<dyn Any + Send + Sync> = Arc::new(());
            holds.push(Arc::downgrade(&hold));
            let memory = Arc::new(memory(4096).unwrap());
            versions.show(version, Region::new(memory, RegionKey(version.0)), SystemTime::now(), hold);
            assert!(versions.pin(version));
            assert!(!versions.wants_spare(1, 4));
        }
        // The first version was recycled, and its buffer freed.
        assert_eq!(versions.buffers(), (3, 0));
        assert!(!versions.has_room(1, 3) && holds.iter().all(|hold| hold.strong_count() == 1));
        versions.unpin(Version(2), 1);
        assert!(versions.has_room(1, 3));
        assert_eq!(holds.iter().map(std::sync::Weak::strong_count).collect::<Vec<_>>(), [0, 1, 1]);
    }

    #[test]
    fn a_spare_buffer_that_comes_late_is_not_one_too_many() {
        let mut versions = Versions::new(4096);
        versions.back(0, 2).unwrap();
        versions.publish(Version(1));
        assert!(versions.wants_spare(0, 2) && !versions.wants_spare(0, 2));
        let lent = versions.take_buffer(0, 2).unwrap();
        versions.add_spare(spare(4096).unwrap(), 2);
        assert_eq!(versions.buffers(), (2, 0));
        drop(lent);
        // A spare that does not come is asked for again.
        assert!(versions.wants_spare(0, 2));
        versions.no_spare();
        assert!(versions.wants_spare(0, 2));
        versions.add_spare(spare(4096).unwrap(), 2);
        assert_eq!(versions.buffers(), (2, 1));
    }

    #[test]
    fn a_buffer_of_new_weights_that_is_shown_is_used_again_once_nobody_reads_it() {
        let mut versions = Versions::new(4096);
        let shows = |versions: &mut Versions, version| {
            let buffer = versions.take_buffer(0, 4).unwrap();
            versions.show_own(Version(version), buffer.clone());
            buffer
        };
        let sent = Arc::clone(shows(&mut versions, 1).memory());
        assert_eq!(versions.buffers(), (1, 0));
        assert!(versions.pin(Version(1)));
        let of = |buffer: Region| (Arc::as_ptr(buffer.memory()), buffer.key());
        let second = of(shows(&mut versions, 2));
        versions.recycle(0, 4);
        assert_eq!(versions.buffers(), (2, 0), "pinned");
        versions.unpin(Version(1), 1);
        versions.recycle(0, 4);
        assert_eq!(versions.buffers(), (1, 0), "a connection still reads it");
        drop(sent);
        shows(&mut versions, 3);
        versions.recycle(0, 4);
        assert_eq!(versions.buffers(), (2, 1));
        let fourth = of(shows(&mut versions, 4));
        assert!(fourth.0 == second.0 && fourth.1 != second.1, "it has another name");
    }

    #[test]
    fn a_buffer_that_was_lent_and_not_given_back_is_let_go_of() {
        use crate::bytes::loan::Loan;

        for gives_back in [true, false] {
            let mut versions = Versions::new(4096);
            versions.back(0, 4).unwrap();
            versions.publish(Version(1));
            let memory = Arc::downgrade(versions.get(Version(1)).unwrap().buffer.memory());
            assert!(versions.open(Version(1)));
            let (loan, _) = Loan::of(&memory.upgrade().unwrap()).unwrap();
            versions.back(0, 4).unwrap();
            versions.publish(Version(2));
            if gives_back {
                loan.give_back();
            } else {
                drop(loan);
            }
            versions.close(Version(1));
            versions.unpin(Version(1), 1);
            versions.recycle(0, 4);
            assert_eq!(versions.buffers(), if gives_back { (2, 1) } else { (1, 0) });
            assert_eq!(memory.upgrade().is_some(), gives_back);
        }
    }

    #[test]
    fn a_buffer_of_new_weights_is_kept_for_the_next_ones_where_the_shards_memory_is_shown() {
        let mut versions = Versions::new(4096);
        let mut shown = 0;
        let mut shows = |versions: &mut Versions| {
            shown += 1;
            let hold: Arc<dyn Any + Send + Sync> = Arc::new(());
            let buffer = Region::new(Arc::new(memory(4096).unwrap()), RegionKey(90 + shown));
            versions.show(Version(shown), buffer, SystemTime::now(), hold);
            versions.recycle(0, 4);
        };
        let of = |buffer: &Region| (Arc::as_ptr(buffer.memory()), buffer.key());
        let first = versions.take_buffer(0, 4).unwrap();
        let known = of(&first);
        shows(&mut versions);
        versions.keep(first);
        assert_eq!(versions.buffers().0, 2);
        shows(&mut versions);
        let second = versions.take_buffer(0, 4).unwrap();
        assert!(of(&second).0 == known.0 && of(&second).1 != known.1, "it has another name");
        // While a connection reads it, another one is taken.
        let read = Arc::clone(second.memory());
        versions.keep(second);
        let third = versions.take_buffer(0, 4).unwrap();
        assert_ne!(Arc::as_ptr(third.memory()), Arc::as_ptr(&read));
        versions.keep(third);
        assert!(versions.has_room(0, 2), "it is in nobody's way");
        for kept in [2, 2, 1] {
            shows(&mut versions);
            assert_eq!(versions.buffers().0, kept);
        }
    }

    #[test]
    fn buffers_for_new_weights_count_until_they_are_dropped() {
        let mut versions = Versions::new(4096);
        let buffer = versions.take_buffer(0, 1).unwrap();
        assert!(versions.take_buffer(0, 1).is_err());
        assert!(versions.back(1, 1).unwrap().is_none());
        drop(buffer);
        assert!(versions.take_buffer(0, 1).is_ok());
    }
}
