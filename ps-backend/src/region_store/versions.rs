//! The versions that exist, and their observers.
//!
//! A version's buffer is written again only after it has left this table. Observers are notified before it leaves.

use std::fmt::Debug;
use std::ops::Deref;
use std::sync::Arc;
use std::time::SystemTime;

use libmodelio::bytes::region::Region;
use libmodelio::vocabulary::ids::Version;

use super::table::{Left, Table};
use super::{RegionStore, VersionBuffer};

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

/// The versions by their numbers. There is always at least one, except while the first version gets another number.
#[derive(Debug)]
pub(super) struct Versions {
    all: Table<Arc<VersionBuffer>>,
    watches: Vec<Arc<dyn VersionWatch>>,
    /// Whether the first version is loaded. Observers are not notified of it before.
    complete: bool,
}

impl Versions {
    /// Version 0, which must be loaded.
    pub(super) fn loading(buffer: Arc<VersionBuffer>) -> Versions {
        let all = Table::new(Version(0), buffer, SystemTime::now());
        Versions { all, watches: Vec::new(), complete: false }
    }

    /// Gives the version that is being loaded this number. It does nothing once that version is complete.
    pub(super) fn load_as(&mut self, version: Version) {
        if !self.complete {
            self.all.rename_first(version);
        }
    }

    /// The first version is loaded.
    pub(super) fn complete(&mut self) {
        if !std::mem::replace(&mut self.complete, true) {
            self.watches.iter().for_each(|watch| self.publish_all(&**watch));
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Notifies `watch` of the present versions and of later ones.
    pub(super) fn watch(&mut self, watch: Arc<dyn VersionWatch>) {
        if self.complete {
            self.publish_all(&*watch);
        }
        self.watches.push(watch);
    }

    fn publish_all(&self, watch: &dyn VersionWatch) {
        self.all.iter().for_each(|(&version, published)| watch.published(version, published.buffer.region()));
    }

    /// Adds a version that is newer than all others.
    pub(super) fn insert(&mut self, version: Version, buffer: Arc<VersionBuffer>) {
        debug_assert!(self.complete && self.all.keys().all(|&known| known < version), "{version}");
        self.watches.iter().for_each(|watch| watch.published(version, buffer.region()));
        self.all.insert(version, buffer, SystemTime::now());
    }

    /// Removes a version.
    pub(super) fn remove(&mut self, version: Version) -> Option<Left<Arc<VersionBuffer>>> {
        debug_assert!(self.complete, "{version} is being loaded");
        if self.all.contains_key(&version) {
            self.watches.iter().for_each(|watch| watch.retired(version));
        }
        self.all.remove(version)
    }

    /// See [`Table::pin`].
    pub(super) fn pin(&mut self, version: Version) -> bool {
        self.all.pin(version)
    }

    /// See [`Table::unpin`].
    pub(super) fn unpin(&mut self, version: Version, count: u64) {
        self.all.unpin(version, count);
    }

    /// See [`Table::show`].
    pub(super) fn show(&mut self, version: Version) {
        self.all.show(version);
    }

    /// See [`Table::unshow`].
    pub(super) fn unshow(&mut self, version: Version) {
        self.all.unshow(version);
    }

    /// See [`Table::give_up`].
    pub(super) fn give_up(&mut self, version: Version) {
        self.all.give_up(version);
    }
}

impl RegionStore {
    /// The version of [`Self::loading`] is complete.
    pub(crate) fn loaded(&mut self) {
        self.versions.complete();
    }

    /// Notifies `watch` of the present versions and of all later changes.
    pub(crate) fn watch(&mut self, watch: Arc<dyn VersionWatch>) {
        self.versions.watch(watch);
    }
}

impl Deref for Versions {
    type Target = Table<Arc<VersionBuffer>>;

    fn deref(&self) -> &Table<Arc<VersionBuffer>> {
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
