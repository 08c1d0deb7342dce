//! What the client notes of its own course, for the status and metrics. It is noted under the lock that is held anyway.

use crate::client::core::{ClientCore, Now};
use crate::observe::staleness::{Staleness, VersionTimes};
use crate::vocabulary::ids::Version;

/// The notes of one client.
#[derive(Default)]
pub(super) struct Observed {
    versions: VersionTimes,
}

impl Observed {
    /// The core may have changed. `now` is asked for only if it has.
    pub(super) fn look(&mut self, core: &ClientCore, now: impl FnOnce() -> Now) {
        let newest = core.state().version;
        if self.versions.newest() != Some(newest) {
            self.versions.known(newest, now());
        }
    }

    /// How far a version is behind the newest one that the coordinator has announced.
    pub(super) fn staleness(&self, of: Version, now: Now) -> Staleness {
        self.versions.of(of, now)
    }
}
