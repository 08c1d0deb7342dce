//! Names that the kernel keeps in directories that can disappear while in use: those of a version, and of a
//! learner.
//!
//! When such a directory is dropped while a file in it is in use or being looked up, the file's name stays in
//! the kernel's cache. With the name, the directory and the version stay in memory. So each leftover name is
//! dropped by itself, repeatedly, until the version is gone. The leftover names are known exactly: the
//! kernel's lookups are counted until it forgets them.

use std::collections::HashMap;

use libmodelio::vocabulary::ids::Version;
use parking_lot::Mutex;

/// More names than this in one version the kernel gets time to forget by itself, as it does when their directory is
/// dropped; they would take longer one by one.
const MANY: usize = 64;

/// A name, and how often the kernel has looked it up and not forgotten it.
struct Name {
    parent: u64,
    name: String,
    lookups: u64,
}

/// By model and version: the names that lead to its inodes, by inode.
type ByVersion = HashMap<(u8, Version), HashMap<u64, Name>>;

/// The names of one mount.
#[derive(Default)]
pub(super) struct LookedUpNames(Mutex<ByVersion>);

/// The state of a version, which decides what happens to its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The version is still shown.
    Stays,
    /// The version is no longer shown, and somebody keeps it in memory.
    Held,
    /// The version is gone.
    Gone,
}

impl LookedUpNames {
    /// `name` in `parent` was looked up, and leads to `ino`, an inode of `version`.
    pub(super) fn looked_up(&self, model: u8, version: Version, ino: u64, parent: u64, name: &str) {
        let mut names = self.0.lock();
        let of_version = names.entry((model, version)).or_default();
        let new = || Name { parent, name: name.to_owned(), lookups: 0 };
        of_version.entry(ino).or_insert_with(new).lookups += 1;
    }

    /// The kernel forgets `count` lookups of `ino`.
    pub(super) fn forgotten(&self, model: u8, version: Version, ino: u64, count: u64) {
        let mut names = self.0.lock();
        if let Some(of_version) = names.get_mut(&(model, version))
            && let Some(name) = of_version.get_mut(&ino)
        {
            name.lookups = name.lookups.saturating_sub(count);
            if name.lookups == 0 {
                of_version.remove(&ino);
            }
        }
    }

    /// Directory and name of each entry that the kernel should drop, given the `fate` of each version of
    /// `model`. `patient` leaves out entries that the kernel may be forgetting just now.
    pub(super) fn to_drop(
        &self,
        model: u8,
        patient: bool,
        fate: impl Fn(Version) -> Fate,
    ) -> Vec<(u64, String)> {
        let mut old = Vec::new();
        self.0.lock().retain(|&(index, version), names| {
            if index != model {
                return true;
            }
            let fate = fate(version);
            if fate == Fate::Held && !(patient && names.len() > MANY) {
                old.extend(names.values().map(|name| (name.parent, name.name.clone())));
            }
            fate != Fate::Gone && !names.is_empty()
        });
        old
    }
}

/// The inodes of one mount, as long as the kernel knows them.
#[derive(Default)]
pub(super) struct Bypassed(Mutex<HashMap<u64, Known>>);

#[derive(Default)]
struct Known {
    lookups: u64,
    /// Whether opens of it bypass the daemon. All opens of an inode go the same way: the first one decides.
    bypasses: Option<bool>,
}

impl Bypassed {
    /// The kernel has looked the inode up.
    pub(super) fn looked_up(&self, ino: u64) {
        self.0.lock().entry(ino).or_default().lookups += 1;
    }

    /// The inode is opened. Whether that bypasses the daemon: `may` is asked at the first open.
    pub(super) fn opened(&self, ino: u64, may: impl FnOnce() -> bool) -> bool {
        *self.0.lock().entry(ino).or_default().bypasses.get_or_insert_with(may)
    }

    /// The kernel forgets `count` lookups. True if it does not know the inode any more, and opens have bypassed the daemon.
    pub(super) fn forgotten(&self, ino: u64, count: u64) -> bool {
        let mut all = self.0.lock();
        let Some(known) = all.get_mut(&ino) else { return false };
        known.lookups = known.lookups.saturating_sub(count);
        known.lookups == 0 && all.remove(&ino).is_some_and(|known| known.bypasses == Some(true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_the_kernel_has_forgotten_are_not_dropped_again() {
        let names = LookedUpNames::default();
        let (old, new) = (Version(1), Version(2));
        for name in ["a", "a", "b"] {
            names.looked_up(0, old, u64::from(name.as_bytes()[0]), 7, name);
        }
        names.looked_up(0, new, 9, 7, "c");
        names.looked_up(1, old, 9, 7, "d");
        let fate = |version| if version == new { Fate::Stays } else { Fate::Held };
        let dropped = || {
            let mut dropped = names.to_drop(0, false, fate);
            dropped.sort();
            dropped
        };
        assert_eq!(dropped(), [(7, "a".to_owned()), (7, "b".to_owned())]);
        names.forgotten(0, old, u64::from(b'a'), 1);
        names.forgotten(0, old, u64::from(b'b'), 1);
        assert_eq!(dropped(), [(7, "a".to_owned())], "looked up twice, forgotten once");
        names.forgotten(0, old, u64::from(b'a'), 1);
        assert!(dropped().is_empty());
        assert!(names.to_drop(0, false, |_| Fate::Gone).is_empty());
        assert_eq!(names.0.lock().len(), 1, "of the other model");
    }

    #[test]
    fn many_names_are_left_to_the_kernel_at_first() {
        let names = LookedUpNames::default();
        for ino in 0..=MANY as u64 {
            names.looked_up(0, Version(1), ino, 7, "a");
        }
        assert!(names.to_drop(0, true, |_| Fate::Held).is_empty());
        assert_eq!(names.to_drop(0, false, |_| Fate::Held).len(), MANY + 1);
        names.forgotten(0, Version(1), 0, 1);
        assert_eq!(names.to_drop(0, true, |_| Fate::Held).len(), MANY);
    }

    #[test]
    fn an_inode_is_opened_in_one_way_until_the_kernel_forgets_it() {
        let all = Bypassed::default();
        for (ino, may) in [(1, true), (2, false)] {
            all.looked_up(ino);
            all.looked_up(ino);
            assert_eq!(all.opened(ino, || may), may);
            assert_eq!(all.opened(ino, || !may), may);
            assert!(!all.forgotten(ino, 1));
            assert_eq!(all.forgotten(ino, 1), may);
            assert!(!all.forgotten(ino, 1), "it is unknown");
        }
        all.looked_up(3);
        assert!(!all.forgotten(3, 1), "nobody has opened it");
        assert!(all.0.lock().is_empty());
    }
}
