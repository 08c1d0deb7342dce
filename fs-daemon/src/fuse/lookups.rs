//! Opens that were sent back to look their name up again: for a newer version, or for the memory of `gradients`.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{LearnerId, Version};
use parking_lot::Mutex;

/// How long a second look at a name may take to come.
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// Second looks that are expected at once.
const MAX_LOOKS: usize = 4096;

/// What is expected of threads for [`MAX_PAUSE`].
struct Expected<K, V>(Mutex<HashMap<K, (V, Instant)>>);

impl<K, V> Default for Expected<K, V> {
    fn default() -> Expected<K, V> {
        Expected(Mutex::default())
    }
}

impl<K: Eq + Hash, V: Clone> Expected<K, V> {
    /// False if too much is expected.
    fn insert(&self, key: K, value: V) -> bool {
        let mut all = self.0.lock();
        if all.len() >= MAX_LOOKS {
            all.retain(|_, (_, at)| at.elapsed() < MAX_PAUSE);
        }
        let has_room = all.len() < MAX_LOOKS;
        if has_room {
            all.insert(key, (value, Instant::now()));
        }
        has_room
    }

    fn get(&self, key: &K) -> Option<V> {
        let all = self.0.lock();
        all.get(key).filter(|(_, at)| at.elapsed() < MAX_PAUSE).map(|(value, _)| value.clone())
    }

    fn remove(&self, key: &K) {
        self.0.lock().remove(key);
    }
}

/// Threads that were told to look a name up again, and the versions that they may then be shown.
///
/// The kernel looks again only once. Versions may come faster than that; a version that was the newest
/// when the thread was sent back holds all that it had committed before its open.
#[derive(Default)]
pub struct SecondLookups(Expected<(u32, u8), SecondLookup>);

#[derive(Clone)]
struct SecondLookup {
    learner: Option<LearnerId>,
    named: Version,
    newest: Version,
}

impl SecondLookups {
    /// `tid` is sent away from `named`, and to look again for a version of `model` that is at least `newest`.
    pub fn expect(&self, tid: u32, model: u8, learner: Option<LearnerId>, named: Version, newest: Version) {
        if tid != 0 {
            self.0.insert((tid, model), SecondLookup { learner, named, newest });
        }
    }

    /// Whether `tid` comes back from that lookup with `version`: with a newer one, or with the same, since it
    /// looks from a directory of that version.
    pub fn is_expected(&self, tid: u32, model: u8, learner: Option<LearnerId>, version: Version) -> bool {
        let lookup = self.0.get(&(tid, model));
        self.0.remove(&(tid, model));
        let is_one = |lookup: &SecondLookup| version >= lookup.newest || version == lookup.named;
        lookup.is_some_and(|lookup| lookup.learner == learner && is_one(&lookup))
    }
}

/// Threads that open `gradients` for its memory. The name leads to the inode that maps to the page cache, so they are sent
/// back to look the name up again, and find the memory's inode then.
///
/// The kernel may look a name up twice before it opens what it has found. So a thread is led until it has arrived.
#[derive(Default)]
pub struct MemoryLookups(Expected<u32, (u64, u64)>);

impl MemoryLookups {
    /// `tid` is to find `to` where its lookup finds `from`. False if it cannot be led: it is not seen, or too many are.
    pub fn lead(&self, tid: u32, from: u64, to: u64) -> bool {
        tid != 0 && self.0.insert(tid, (from, to))
    }

    /// The inode that `tid` finds where `ino` is.
    pub fn led(&self, tid: u32, ino: u64) -> u64 {
        self.0.get(&tid).filter(|(from, _)| *from == ino).map_or(ino, |(_, to)| to)
    }

    /// `tid` opens what it has found.
    pub fn arrived(&self, tid: u32) {
        self.0.remove(&tid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_lookup_is_expected_once_and_for_its_version() {
        let lookups = SecondLookups::default();
        lookups.expect(7, 0, Some(LearnerId(1)), Version(3), Version(5));
        assert!(!lookups.is_expected(8, 0, Some(LearnerId(1)), Version(5)));
        assert!(lookups.is_expected(7, 0, Some(LearnerId(1)), Version(6)));
        assert!(!lookups.is_expected(7, 0, Some(LearnerId(1)), Version(6)), "once");
        lookups.expect(7, 0, Some(LearnerId(1)), Version(3), Version(5));
        assert!(!lookups.is_expected(7, 0, Some(LearnerId(1)), Version(4)), "too old");
        lookups.expect(7, 0, Some(LearnerId(1)), Version(3), Version(5));
        assert!(lookups.is_expected(7, 0, Some(LearnerId(1)), Version(3)), "from a directory of its own");
    }

    #[test]
    fn a_thread_is_led_to_the_memory_until_it_opens_it() {
        let lookups = MemoryLookups::default();
        assert_eq!(lookups.led(7, 5), 5);
        assert!(lookups.lead(7, 5, 6));
        assert_eq!([(7, 5), (7, 5), (7, 4), (8, 5)].map(|(tid, ino)| lookups.led(tid, ino)), [6, 6, 4, 5]);
        lookups.arrived(7);
        assert_eq!(lookups.led(7, 5), 5);
        assert!(!lookups.lead(0, 5, 6), "threads of other namespaces are not told apart");
    }
}
