//! The versions that exist, their users, and the memory that may be written again. Pure: `B` stands for the memory.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::time::SystemTime;

use libmodelio::vocabulary::ids::Version;

/// A version that exists.
#[derive(Debug)]
pub struct Published<B> {
    /// The memory of the version.
    pub buffer: B,
    /// When it was published.
    pub at: SystemTime,
    pins: u64,
    /// The number of other processes that show it.
    shows: u64,
    /// Another process may read the buffer for an unknown time, so the buffer is never written again.
    given_up: bool,
}

/// What a removed version leaves.
#[derive(Debug, PartialEq, Eq)]
pub enum Left<B> {
    /// Its memory, which may be written.
    Free(B),
    /// No memory: another process may still read it.
    GivenUp,
}

/// Versions by their numbers.
#[derive(Debug)]
pub struct Table<B> {
    all: BTreeMap<Version, Published<B>>,
}

impl<B> Table<B> {
    /// A table with one version.
    pub fn new(version: Version, buffer: B, at: SystemTime) -> Table<B> {
        let mut table = Table { all: BTreeMap::new() };
        table.insert(version, buffer, at);
        table
    }

    /// Adds a version.
    pub fn insert(&mut self, version: Version, buffer: B, at: SystemTime) {
        self.all.insert(version, Published { buffer, at, pins: 0, shows: 0, given_up: false });
    }

    /// Gives the first version another number.
    pub fn rename_first(&mut self, version: Version) {
        if let Some((_, first)) = self.all.pop_first() {
            self.all.insert(version, first);
        }
    }

    /// Keeps `version` from being removed. False if it is gone.
    pub fn pin(&mut self, version: Version) -> bool {
        self.all.get_mut(&version).map(|published| published.pins += 1).is_some()
    }

    /// Takes back `count` pins.
    pub fn unpin(&mut self, version: Version, count: u64) {
        if let Some(published) = self.all.get_mut(&version) {
            debug_assert!(published.pins >= count, "{version} has {} pins", published.pins);
            published.pins = published.pins.saturating_sub(count);
        }
    }

    /// Another process, whose client holds a pin until now, shows `version`. Its buffer is not written until
    /// [`Self::unshow`], but it may be given up.
    pub fn show(&mut self, version: Version) {
        if let Some(published) = self.all.get_mut(&version) {
            debug_assert!(published.pins > 0, "{version} may have been used again");
            published.shows += 1;
        }
    }

    /// One of those processes no longer shows it.
    pub fn unshow(&mut self, version: Version) {
        if let Some(published) = self.all.get_mut(&version) {
            debug_assert!(published.shows > 0, "nobody shows {version}");
            published.shows = published.shows.saturating_sub(1);
        }
    }

    /// Another process may go on reading the buffer of `version` for an unknown time, so the buffer is not used for
    /// another version. The caller holds a pin, or shows the version.
    pub fn give_up(&mut self, version: Version) {
        if let Some(published) = self.all.get_mut(&version) {
            debug_assert!(published.pins + published.shows > 0, "{version} may have been used again");
            published.given_up = true;
        }
    }

    /// The versions that are neither needed nor among the newest one and the `retain` before it.
    pub fn idle(&self, retain: usize) -> Vec<Version> {
        self.unpinned(retain).filter(|(_, shows)| *shows == 0).map(|(version, _)| version).collect()
    }

    /// The oldest version that would be idle if other processes did not show it.
    pub fn oldest_shown(&self, retain: usize) -> Option<Version> {
        self.unpinned(retain).find(|(_, shows)| *shows > 0).map(|(version, _)| version)
    }

    /// The versions that are not retained and not read in this process, with the number of processes that show them.
    fn unpinned(&self, retain: usize) -> impl Iterator<Item = (Version, u64)> {
        let keep = self.all.keys().rev().nth(retain).copied().unwrap_or(Version(0));
        let older = self.all.range(..keep).filter(|(_, published)| published.pins == 0);
        older.map(|(&version, published)| (version, published.shows))
    }

    /// Removes a version that is not read in this process.
    pub fn remove(&mut self, version: Version) -> Option<Left<B>> {
        let published = self.all.remove(&version)?;
        debug_assert!(published.pins == 0, "{version} is needed");
        Some(if published.given_up || published.shows > 0 {
            Left::GivenUp
        } else {
            Left::Free(published.buffer)
        })
    }
}

impl<B> Deref for Table<B> {
    type Target = BTreeMap<Version, Published<B>>;

    fn deref(&self) -> &BTreeMap<Version, Published<B>> {
        &self.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_that_is_shown_elsewhere_can_be_let_go_of_and_is_never_written_again() {
        let at = SystemTime::UNIX_EPOCH;
        let mut table = Table::new(Version(0), "a", at);
        for version in [0, 1, 2].map(Version) {
            assert!(table.pin(version));
            table.show(version);
            table.unpin(version, 1);
            table.insert(version.next(), "b", at);
        }
        assert_eq!((table.idle(1), table.oldest_shown(1)), (vec![], Some(Version(0))));
        // A version that is read here, too, is needed.
        assert!(table.pin(Version(0)));
        assert_eq!(table.oldest_shown(1), Some(Version(1)));
        table.unshow(Version(1));
        assert_eq!((table.idle(1), table.oldest_shown(1)), (vec![Version(1)], None));
        assert_eq!(table.remove(Version(1)), Some(Left::Free("b")));
        table.unpin(Version(0), 1);
        assert_eq!(table.remove(Version(0)), Some(Left::GivenUp));
        // A process that shows a version ends that by a message.
        table.unshow(Version(0));
        assert_eq!(table.oldest_shown(1), None, "2 is retained");
    }

    #[test]
    fn memory_that_a_silent_reader_may_still_read_is_never_written_again() {
        let at = SystemTime::UNIX_EPOCH;
        let mut table = Table::new(Version(0), "a", at);
        table.insert(Version(1), "b", at);
        for version in [0, 0, 1].map(Version) {
            assert!(table.pin(version));
        }
        table.insert(Version(2), "c", at);
        table.insert(Version(3), "d", at);
        assert_eq!(table.idle(1), [], "both old ones are pinned");
        // One of two readers is silent for too long, and the other goes on.
        table.give_up(Version(0));
        table.unpin(Version(0), 1);
        assert_eq!(table.idle(1), []);
        table.unpin(Version(0), 1);
        table.unpin(Version(1), 1);
        assert_eq!(table.idle(1), [0, 1].map(Version));
        assert_eq!(table.remove(Version(0)), Some(Left::GivenUp));
        assert_eq!(table.remove(Version(1)), Some(Left::Free("b")));
        assert_eq!((table.remove(Version(1)), table.pin(Version(1))), (None, false));
    }
}
