//! The versions that exist, their users, and the memory that may be written again. Pure: `B` stands for the
//! memory.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::time::SystemTime;

use libmodelio::vocabulary::ids::Version;

/// A version that is there.
#[derive(Debug)]
pub struct Published<B> {
    /// The memory of the version.
    pub buffer: B,
    /// Since when.
    pub at: SystemTime,
    pins: u64,
    /// Those outside of this process that show it until they say otherwise.
    shows: u64,
    /// Somebody outside of this process may read the buffer for as long as it likes: it is never written again.
    given_up: bool,
}

/// The remains of a version that is gone.
#[derive(Debug, PartialEq, Eq)]
pub enum Left<B> {
    /// Its memory, which may be written.
    Free(B),
    /// No memory is left to reuse: somebody may still read it.
    GivenUp,
}

/// Versions by their numbers.
#[derive(Debug)]
pub struct Table<B> {
    all: BTreeMap<Version, Published<B>>,
}

impl<B> Table<B> {
    /// With one version.
    pub fn new(version: Version, buffer: B, at: SystemTime) -> Table<B> {
        let mut table = Table { all: BTreeMap::new() };
        table.insert(version, buffer, at);
        table
    }

    /// Adds a version.
    pub fn insert(&mut self, version: Version, buffer: B, at: SystemTime) {
        self.all.insert(version, Published { buffer, at, pins: 0, shows: 0, given_up: false });
    }

    /// The first version is this one from now on.
    pub fn rename_first(&mut self, version: Version) {
        if let Some((_, first)) = self.all.pop_first() {
            self.all.insert(version, first);
        }
    }

    /// Keeps `version` from being removed. False when it is gone.
    pub fn pin(&mut self, version: Version) -> bool {
        self.all.get_mut(&version).map(|published| published.pins += 1).is_some()
    }

    /// Takes `count` pins back.
    pub fn unpin(&mut self, version: Version, count: u64) {
        if let Some(published) = self.all.get_mut(&version) {
            debug_assert!(published.pins >= count, "{version} has {} pins", published.pins);
            published.pins = published.pins.saturating_sub(count);
        }
    }

    /// Somebody outside of this process shows `version`, who holds a pin until now: its buffer is not written before that is
    /// over, see [`Self::unshow`], but it may be let go of.
    pub fn show(&mut self, version: Version) {
        if let Some(published) = self.all.get_mut(&version) {
            debug_assert!(published.pins > 0, "{version} may have been used again");
            published.shows += 1;
        }
    }

    /// One of those does not show it any more.
    pub fn unshow(&mut self, version: Version) {
        if let Some(published) = self.all.get_mut(&version) {
            debug_assert!(published.shows > 0, "nobody shows {version}");
            published.shows = published.shows.saturating_sub(1);
        }
    }

    /// Somebody outside of this process may go on reading the buffer of `version`, and nobody knows for how long. The
    /// buffer is not used for another version. The caller holds a pin, or shows it.
    pub fn give_up(&mut self, version: Version) {
        if let Some(published) = self.all.get_mut(&version) {
            debug_assert!(published.pins + published.shows > 0, "{version} may have been used again");
            published.given_up = true;
        }
    }

    /// Versions that are neither needed nor among the newest one and the `retain` before it.
    pub fn idle(&self, retain: usize) -> Vec<Version> {
        self.unpinned(retain).filter(|(_, shows)| *shows == 0).map(|(version, _)| version).collect()
    }

    /// The oldest version that is not idle only because it is shown outside of this process.
    pub fn oldest_shown(&self, retain: usize) -> Option<Version> {
        self.unpinned(retain).find(|(_, shows)| *shows > 0).map(|(version, _)| version)
    }

    /// Those that are not retained and that nobody reads in this process, with the number of those who show them.
    fn unpinned(&self, retain: usize) -> impl Iterator<Item = (Version, u64)> {
        let keep = self.all.keys().rev().nth(retain).copied().unwrap_or(Version(0));
        let older = self.all.range(..keep).filter(|(_, published)| published.pins == 0);
        older.map(|(&version, published)| (version, published.shows))
    }

    /// A version that nobody reads in this process is no more.
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
        // One that is read here, too, is needed.
        assert!(table.pin(Version(0)));
        assert_eq!(table.oldest_shown(1), Some(Version(1)));
        table.unshow(Version(1));
        assert_eq!((table.idle(1), table.oldest_shown(1)), (vec![Version(1)], None));
        assert_eq!(table.remove(Version(1)), Some(Left::Free("b")));
        table.unpin(Version(0), 1);
        assert_eq!(table.remove(Version(0)), Some(Left::GivenUp));
        // Whoever shows it says so in the end.
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
