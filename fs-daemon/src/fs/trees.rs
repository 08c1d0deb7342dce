//! The models of a mount, by the number that their inodes have.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;

use super::node::MAX_MODELS;

/// A number is another model's only so long after its last one has gone. Nobody expects anything of that one by then.
const REUSED_AFTER: Duration = Duration::from_secs(2);

/// The models `T` of a mount, with views among them.
pub(super) struct Trees<T>(RwLock<Vec<Slot<T>>>);

/// The place of a model. Another one takes it when the kernel knows no inode of the one before.
struct Slot<T> {
    /// None once the model is gone and nobody uses its files.
    tree: Option<Arc<T>>,
    /// Whether its name is in the root.
    shown: bool,
    /// How often the kernel was told of inodes that it has not forgotten.
    told: AtomicU64,
    /// When the model has gone.
    free_since: Option<Instant>,
}

impl<T> Slot<T> {
    fn is_free(&self, now: Instant) -> bool {
        let since = |since: Instant| now.saturating_duration_since(since);
        self.told.load(Ordering::Relaxed) == 0 && self.free_since.is_some_and(|at| since(at) >= REUSED_AFTER)
    }
}

impl<T> Default for Trees<T> {
    fn default() -> Trees<T> {
        Trees(RwLock::default())
    }
}

impl<T> Trees<T> {
    /// Adds what `make` makes for a number. `None` if all numbers are in use.
    pub(super) fn add(&self, now: Instant, shown: bool, make: impl FnOnce(u8) -> T) -> Option<Arc<T>> {
        let mut slots = self.0.write();
        let at = slots.iter().position(|slot| slot.is_free(now)).unwrap_or(slots.len());
        let tree = Arc::new(make(u8::try_from(at).ok().filter(|_| at < MAX_MODELS)?));
        let slot = Slot { tree: Some(Arc::clone(&tree)), shown, told: AtomicU64::new(0), free_since: None };
        match slots.get_mut(at) {
            Some(free) => *free = slot,
            None => slots.push(slot),
        }
        Some(tree)
    }

    /// Whether one more can be added.
    pub(super) fn has_room(&self, now: Instant) -> bool {
        let slots = self.0.read();
        slots.len() < MAX_MODELS || slots.iter().any(|slot| slot.is_free(now))
    }

    /// The model's name leads nowhere from now on. False if that was so before.
    pub(super) fn hide(&self, is_it: impl Fn(&T) -> bool) -> bool {
        let mut slots = self.0.write();
        let of = |slot: &&mut Slot<T>| slot.tree.as_ref().is_some_and(|tree| is_it(tree));
        slots.iter_mut().find(of).is_some_and(|slot| std::mem::take(&mut slot.shown))
    }

    /// Takes out those that are not shown, and that nobody else has.
    pub(super) fn take_unused(&self, now: Instant) -> Vec<Arc<T>> {
        let unused = |slot: &Slot<T>| {
            !slot.shown && slot.tree.as_ref().is_some_and(|tree| Arc::strong_count(tree) == 1)
        };
        let take = |slot: &mut Slot<T>| {
            slot.free_since = Some(now);
            slot.tree.take()
        };
        self.0.write().iter_mut().filter(|slot| unused(slot)).filter_map(take).collect()
    }

    /// All of them, or those that are shown, in the order of their numbers.
    pub(super) fn all(&self, shown: bool) -> Vec<Arc<T>> {
        let slots = self.0.read();
        slots.iter().filter(|slot| slot.shown || !shown).filter_map(|slot| slot.tree.clone()).collect()
    }

    /// The one with this number.
    pub(super) fn get(&self, index: u8) -> Option<Arc<T>> {
        self.0.read().get(usize::from(index))?.tree.clone()
    }

    /// The kernel is about to be told of an inode with this number.
    pub(super) fn tells(&self, index: u8) {
        if let Some(slot) = self.0.read().get(usize::from(index)) {
            slot.told.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The kernel has forgotten an inode with this number so many times.
    pub(super) fn is_forgotten(&self, index: u8, count: u64) {
        if let Some(slot) = self.0.read().get(usize::from(index)) {
            slot.told.fetch_sub(count, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_used_again_when_nobody_knows_the_one_before() {
        let (trees, now) = (Trees::default(), Instant::now());
        let later = now + REUSED_AFTER;
        let first = trees.add(now, false, |index| index).unwrap();
        assert_eq!((*first, *trees.add(now, true, |index| index).unwrap()), (0, 1));
        trees.tells(0);
        assert!(trees.take_unused(now).is_empty(), "it is in use, and the other one is shown");
        drop(first);
        assert_eq!(trees.take_unused(now).len(), 1);
        assert_eq!(*trees.add(later, false, |index| index).unwrap(), 2, "the kernel knows an inode");
        trees.is_forgotten(0, 1);
        assert_eq!(*trees.add(now, false, |index| index).unwrap(), 3, "it is too soon");
        assert_eq!(*trees.add(later, false, |index| index + 10).unwrap(), 10);
        assert_eq!((trees.get(0).as_deref(), trees.all(true).len()), (Some(&10), 1));
        for index in 4..=u8::MAX {
            assert_eq!(trees.add(later, false, |index| index).as_deref(), Some(&index));
        }
        assert!(!trees.has_room(later) && trees.add(later, false, |index| index).is_none());
        assert!(trees.hide(|tree| *tree == 1) && !trees.hide(|tree| *tree == 1));
    }
}
