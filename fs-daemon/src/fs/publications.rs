//! The name `publish`: each lookup leads to an inode of its own, and an inode is opened by one program at a time.
//!
//! A mapping goes straight to the memory of its inode, and the kernel takes one memory for an inode. So two
//! publications must not share one.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::node::MAX_PUBLICATIONS;

/// The publications of one model.
#[derive(Default)]
pub struct Publications {
    looked_up: AtomicU64,
    open: Mutex<HashSet<u64>>,
}

/// Keeps a publication's inode from being opened again, until this is dropped.
pub struct OpenPublication {
    of: Arc<Publications>,
    number: u64,
}

impl Publications {
    /// A number that no earlier lookup got. Listings show 0, which no lookup gets.
    pub fn number(&self) -> u64 {
        1 + self.looked_up.fetch_add(1, Ordering::Relaxed) % (MAX_PUBLICATIONS - 1)
    }

    /// Opens the publication of this number. None if it is open.
    pub fn open(self: &Arc<Self>, number: u64) -> Option<OpenPublication> {
        self.open.lock().insert(number).then(|| OpenPublication { of: Arc::clone(self), number })
    }
}

impl Drop for OpenPublication {
    fn drop(&mut self) {
        self.of.open.lock().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_open_once_at_a_time() {
        let publications = Arc::<Publications>::default();
        let (one, other) = (publications.number(), publications.number());
        assert!(one != 0 && one != other);
        let open = publications.open(one);
        assert!(open.is_some() && publications.open(one).is_none());
        assert!(publications.open(other).is_some());
        drop(open);
        assert!(publications.open(one).is_some());
    }

    #[test]
    fn numbers_begin_again_behind_the_highest() {
        let publications = Publications::default();
        publications.looked_up.store(MAX_PUBLICATIONS - 2, Ordering::Relaxed);
        assert_eq!((publications.number(), publications.number()), (MAX_PUBLICATIONS - 1, 1));
    }
}
