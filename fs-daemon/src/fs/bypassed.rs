//! Inodes of versions that the kernel may read and map past the daemon.
//!
//! A mapping that bypasses the daemon outlives the descriptor, and the kernel tells nobody of its end. What it tells is
//! that it has forgotten the inode. So whoever has opened such an inode holds its version until then.

use std::collections::HashMap;

use parking_lot::Mutex;

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
