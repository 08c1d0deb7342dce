//! Staleness: how many versions one that is opened is behind the newest one that is known, and since when.

use std::collections::VecDeque;
use std::time::Duration;

use super::Now;
use crate::vocabulary::ids::Version;

/// So many versions are remembered with the time at which they became known.
const REMEMBERED: usize = 128;

/// How far a version is behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Staleness {
    /// The number of versions after it that are known.
    pub versions: u64,
    /// How long a newer one has been known.
    pub behind: Duration,
}

/// When versions became known.
#[derive(Debug)]
pub struct VersionTimes(VecDeque<(Version, Now)>);

impl Default for VersionTimes {
    fn default() -> VersionTimes {
        VersionTimes(VecDeque::with_capacity(REMEMBERED))
    }
}

impl VersionTimes {
    /// The newest one that is known.
    pub fn newest(&self) -> Option<Version> {
        self.0.back().map(|(version, _)| *version)
    }

    /// This version is the newest one now. A job that was restored may go back.
    pub fn known(&mut self, version: Version, now: Now) {
        while self.newest().is_some_and(|newest| newest >= version) {
            self.0.pop_back();
        }
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back((version, now));
    }

    /// How far `version` is behind. Where it is behind by more versions than are remembered, a newer one may have been
    /// known for longer.
    pub fn of(&self, version: Version, now: Now) -> Staleness {
        let Some(newest) = self.newest().filter(|newest| *newest > version) else {
            return Staleness::default();
        };
        let first = self.0.partition_point(|(known, _)| *known <= version);
        let since = self.0.get(first).map_or(now, |(_, since)| *since);
        Staleness { versions: newest.0 - version.0, behind: now.saturating_sub(since) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn staleness(versions: u64, seconds: u32) -> Staleness {
        Staleness { versions, behind: SECOND * seconds }
    }

    #[test]
    fn a_version_is_behind_since_the_next_one_is_known() {
        let mut times = VersionTimes::default();
        assert_eq!(times.of(Version(0), SECOND), staleness(0, 0), "nothing is known");
        for version in [1, 2, 5] {
            times.known(Version(version), SECOND * version as u32);
        }
        let now = SECOND * 10;
        assert_eq!(times.of(Version(5), now), staleness(0, 0));
        assert_eq!(
            times.of(Version(6), now),
            staleness(0, 0),
            "a shard may show it before the coordinator tells"
        );
        assert_eq!(times.of(Version(4), now), staleness(1, 5));
        assert_eq!(times.of(Version(1), now), staleness(4, 8));
        assert_eq!(times.of(Version(1), SECOND), staleness(4, 0), "the clock has jumped back");
    }

    #[test]
    fn a_job_that_goes_back_forgets_what_is_no_more() {
        let mut times = VersionTimes::default();
        (1..=9).for_each(|version| times.known(Version(version), SECOND));
        times.known(Version(3), SECOND * 2);
        assert_eq!(times.newest(), Some(Version(3)));
        assert_eq!(times.of(Version(2), SECOND * 4), staleness(1, 2));
    }

    #[test]
    fn memory_is_bounded() {
        let mut times = VersionTimes::default();
        (0..1000).for_each(|version| times.known(Version(version), SECOND * version as u32));
        assert_eq!(times.0.len(), REMEMBERED);
        assert_eq!(times.of(Version(0), SECOND * 1000).versions, 999);
    }
}
