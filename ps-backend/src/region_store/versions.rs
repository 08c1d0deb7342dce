//! Which versions there are, and who is told of them.
//!
//! A version's buffer is written again only when it has left this table; whoever watches is told before it leaves.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Deref;
use std::sync::Arc;
use std::time::SystemTime;

use libmodelio::ids::Version;
use libmodelio::transport::Region;

use super::{RegionStore, VersionBuffer};

/// Somebody who is told which versions there are: one who shows them to readers that the store does not know of.
///
/// It is called under the store's lock: it does not wait, nor ask the store anything.
pub trait VersionWatch: Send + Sync + Debug {
    /// `version` is complete, lies in `memory` from its beginning, and stays as it is until it is retired. Buffers are
    /// used again and again: one of the same [`Region::key`] is the same, for as long as the store lives.
    fn published(&self, version: Version, memory: &Region);

    /// From when this returns, what `version` lies in may be written, or given back to the system. A version that was
    /// published is retired once, at the latest when the store ends.
    fn retired(&self, version: Version);
}

/// A version that is there.
#[derive(Debug)]
pub(super) struct Published {
    pub(super) buffer: Arc<VersionBuffer>,
    pub(super) at: SystemTime,
    pub(super) pins: u64,
    /// Somebody outside of this process may read the buffer for as long as it likes: it is never written again.
    pub(super) given_up: bool,
}

impl Published {
    fn now(buffer: Arc<VersionBuffer>) -> Published {
        Published { buffer, at: SystemTime::now(), pins: 0, given_up: false }
    }
}

/// Versions by their numbers. It is never empty, but for the time in which the first gets another number.
#[derive(Debug)]
pub(super) struct Versions {
    all: BTreeMap<Version, Published>,
    watches: Vec<Arc<dyn VersionWatch>>,
    /// The first version is loaded. Until then nobody is told of it.
    complete: bool,
}

impl Versions {
    /// Version 0, which is to be loaded.
    pub(super) fn loading(buffer: Arc<VersionBuffer>) -> Versions {
        let all = BTreeMap::from([(Version(0), Published::now(buffer))]);
        Versions { all, watches: Vec::new(), complete: false }
    }

    /// What is loaded is this version, and not the one that it was. Nothing happens once it is complete.
    pub(super) fn load_as(&mut self, version: Version) {
        if !self.complete
            && let Some((_, first)) = self.all.pop_first()
        {
            self.all.insert(version, first);
        }
    }

    /// The first version is loaded.
    pub(super) fn complete(&mut self) {
        if !std::mem::replace(&mut self.complete, true) {
            self.watches.iter().for_each(|watch| self.tell_all(&**watch));
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Tells `watch` of what there is, and of what there will be.
    pub(super) fn watch(&mut self, watch: Arc<dyn VersionWatch>) {
        if self.complete {
            self.tell_all(&*watch);
        }
        self.watches.push(watch);
    }

    fn tell_all(&self, watch: &dyn VersionWatch) {
        self.all.iter().for_each(|(&version, published)| watch.published(version, published.buffer.region()));
    }

    /// A version that is newer than all others.
    pub(super) fn insert(&mut self, version: Version, buffer: Arc<VersionBuffer>) {
        debug_assert!(self.complete && self.all.keys().all(|&known| known < version), "{version}");
        self.watches.iter().for_each(|watch| watch.published(version, buffer.region()));
        self.all.insert(version, Published::now(buffer));
    }

    /// What there was of a version that is no more.
    pub(super) fn remove(&mut self, version: Version) -> Option<Published> {
        let published = self.all.get(&version)?;
        debug_assert!(self.complete && published.pins == 0, "{version} is needed");
        self.watches.iter().for_each(|watch| watch.retired(version));
        self.all.remove(&version)
    }

    pub(super) fn get_mut(&mut self, version: Version) -> Option<&mut Published> {
        self.all.get_mut(&version)
    }
}

impl RegionStore {
    /// What [`Self::loading`] gave is complete.
    pub(crate) fn loaded(&mut self) {
        self.versions.complete();
    }

    /// `watch` is told of the versions that there are, and from now on of all changes.
    pub(crate) fn watch(&mut self, watch: Arc<dyn VersionWatch>) {
        self.versions.watch(watch);
    }
}

impl Deref for Versions {
    type Target = BTreeMap<Version, Published>;

    fn deref(&self) -> &BTreeMap<Version, Published> {
        &self.all
    }
}

impl Drop for Versions {
    fn drop(&mut self) {
        if self.complete {
            for version in self.all.keys() {
                self.watches.iter().for_each(|watch| watch.retired(*version));
            }
        }
    }
}
