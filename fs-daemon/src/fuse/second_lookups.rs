//! Opens that were sent back to look their name up again, and the versions that they may then be shown.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{LearnerId, Version};
use parking_lot::Mutex;

/// How long a second look at a name may take to come.
pub(super) const MAX_PAUSE: Duration = Duration::from_secs(1);
/// Second looks that are expected at once.
pub(super) const MAX_LOOKS: usize = 4096;

/// Threads that were told to look a name up again, and the versions that they may then be shown.
///
/// The kernel looks again only once. Versions may come faster than that; a version that was the newest
/// when the thread was sent back holds all that it had committed before its open.
#[derive(Default)]
pub struct SecondLookups(Mutex<HashMap<(u32, u8), SecondLookup>>);

struct SecondLookup {
    learner: Option<LearnerId>,
    named: Version,
    newest: Version,
    at: Instant,
}

impl SecondLookups {
    /// `tid` is sent away from `named`, and to look again for a version of `model` that is at least `newest`.
    pub fn expect(&self, tid: u32, model: u8, learner: Option<LearnerId>, named: Version, newest: Version) {
        if tid == 0 {
            return;
        }
        let mut lookups = self.0.lock();
        if lookups.len() >= MAX_LOOKS {
            lookups.retain(|_, lookup| lookup.at.elapsed() < MAX_PAUSE);
        }
        if lookups.len() < MAX_LOOKS {
            lookups.insert((tid, model), SecondLookup { learner, named, newest, at: Instant::now() });
        }
    }

    /// Whether `tid` comes back from that lookup with `version`: with a newer one, or with the same, since it
    /// looks from a directory of that version.
    pub fn is_expected(&self, tid: u32, model: u8, learner: Option<LearnerId>, version: Version) -> bool {
        let Some(lookup) = self.0.lock().remove(&(tid, model)) else { return false };
        let is_one = version >= lookup.newest || version == lookup.named;
        lookup.learner == learner && is_one && lookup.at.elapsed() < MAX_PAUSE
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
}
