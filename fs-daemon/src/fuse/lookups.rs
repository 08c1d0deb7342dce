//! Opens that were sent back to look their name up again: for a newer version, or for another inode.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::reader::Reader;
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

    fn remove(&self, key: &K) -> Option<V> {
        self.0.lock().remove(key).map(|(value, _)| value)
    }

    fn expire(&self) {
        let is_late = |_: &K, (_, at): &mut (V, Instant)| at.elapsed() >= MAX_PAUSE;
        let _late: Vec<_> = self.0.lock().extract_if(is_late).collect();
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

/// Threads whose open is to be one of another inode than the name leads to: of the memory of `gradients`, whose name leads
/// to the inode that maps to the page cache; of the version that a learner's tensor has to be of. They are sent back to look
/// the name up again, and find the other inode then.
///
/// The kernel may look a name up twice before it opens what it has found. So a thread is led until it has arrived.
#[derive(Default)]
pub struct LedLookups(Expected<u32, Lead>);

/// Where a thread is led.
#[derive(Clone)]
pub struct Lead {
    from: u64,
    to: u64,
    /// The version of the other inode, which must not go meanwhile.
    _keeps: Option<Arc<Reader>>,
}

impl LedLookups {
    /// `tid` is to find `to` where its lookup finds `from`. False if it cannot be led: it is not seen, or too many are.
    pub fn lead(&self, tid: u32, from: u64, to: u64, keeps: Option<Reader>) -> bool {
        tid != 0 && self.0.insert(tid, Lead { from, to, _keeps: keeps.map(Arc::new) })
    }

    /// The inode that `tid` finds where `ino` is, if it is another one.
    pub fn led(&self, tid: u32, ino: u64) -> Option<u64> {
        self.0.get(&tid).filter(|lead| lead.from == ino).map(|lead| lead.to)
    }

    /// `tid` opens what it has found. If it was led to that, what keeps its version is returned.
    pub fn arrived(&self, tid: u32, ino: u64) -> Option<Lead> {
        self.0.remove(&tid).filter(|lead| lead.to == ino)
    }

    /// Forgets threads that have not come. Their versions are let go.
    pub fn expire(&self) {
        self.0.expire();
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
    fn a_thread_is_led_to_another_inode_until_it_opens_it() {
        let lookups = LedLookups::default();
        assert_eq!(lookups.led(7, 5), None);
        assert!(lookups.lead(7, 5, 6, None));
        let led = [(7, 5), (7, 5), (7, 4), (8, 5)].map(|(tid, ino)| lookups.led(tid, ino));
        assert_eq!(led, [Some(6), Some(6), None, None]);
        lookups.expire();
        assert!(lookups.arrived(7, 6).is_some());
        assert_eq!(lookups.led(7, 5), None);
        assert!(lookups.lead(7, 5, 6, None) && lookups.arrived(7, 5).is_none(), "it opens something else");
        assert!(!lookups.lead(0, 5, 6, None), "threads of other namespaces are not told apart");
    }
}
