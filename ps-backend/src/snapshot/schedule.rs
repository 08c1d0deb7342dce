//! When the next snapshot of a job is taken, and what has come of the last ones.

use std::time::Duration;

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::snapshots::Every;
use serde_json::{Value, json};

/// The pause after a snapshot that has failed; twice as long after each one more.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// A snapshot that is in its store.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedSnapshot {
    /// Its version.
    pub version: Version,
    /// Its bytes, and those of them that were written.
    pub bytes: (u64, u64),
}

/// The snapshots of a job that are taken by themselves.
#[derive(Clone, Debug, Default)]
pub struct SnapshotSchedule {
    /// The store that all of this is of.
    to: String,
    /// The last one, when it was begun, and how long it took.
    last: Option<(SavedSnapshot, Duration, Duration)>,
    /// How many have failed since then, when the last of those did, and why.
    failed: Option<(u32, Duration, String)>,
    /// How many have failed in all.
    failures: u64,
}

impl SnapshotSchedule {
    /// They go to this store from now on. Nothing is known of another one.
    pub fn is_to(&mut self, to: &str) {
        if self.to != to {
            *self = SnapshotSchedule { to: to.to_owned(), ..SnapshotSchedule::default() };
        }
    }

    /// The store.
    pub fn to(&self) -> &str {
        &self.to
    }

    /// Whether one is to be taken now. The first one is at once, so that there is one to go on from.
    pub fn is_due(&self, every: Every, version: Version, now: Duration) -> bool {
        let pause = |failed: u32| (PAUSE * 2_u32.saturating_pow(failed - 1)).min(LONGEST_PAUSE);
        if self.failed.as_ref().is_some_and(|(failed, at, _)| now < *at + pause(*failed)) {
            return false;
        }
        match (every, &self.last) {
            (Every::Never, _) => false,
            (_, None) => true,
            (_, Some((last, ..))) if last.version == version => false,
            (Every::Versions(versions), Some((last, ..))) => {
                version.0.saturating_sub(last.version.0) >= versions
            }
            (Every::Time(time), Some((_, begun, _))) => now >= *begun + time,
        }
    }

    /// One is in the store, which was begun then.
    pub fn saved(&mut self, snapshot: SavedSnapshot, begun: Duration, now: Duration) {
        self.last = Some((snapshot, begun, now.saturating_sub(begun)));
        self.failed = None;
    }

    /// One has failed. Returns whether it is the first one since the last that has not.
    pub fn failed(&mut self, why: String, now: Duration) -> bool {
        let before = self.failed.as_ref().map_or(0, |(failed, ..)| *failed);
        self.failed = Some((before + 1, now, why));
        self.failures += 1;
        before == 0
    }

    /// The version of the last one.
    pub fn newest(&self) -> Option<Version> {
        self.last.as_ref().map(|(of, ..)| of.version)
    }

    /// Why the last try has failed, if it has.
    pub fn why(&self) -> Option<String> {
        self.failed.as_ref().map(|(.., why)| why.clone())
    }

    /// What has come of them: versions, seconds and bytes.
    pub fn status(&self, now: Duration) -> Value {
        let last = self.last.as_ref();
        json!({
            "durable_version": last.map(|(of, ..)| of.version.0),
            "age_seconds": last.map(|(_, begun, _)| now.saturating_sub(*begun).as_secs_f64()),
            "seconds": last.map(|(.., took)| took.as_secs_f64()),
            "bytes": last.map(|(of, ..)| of.bytes.0),
            "written_bytes": last.map(|(of, ..)| of.bytes.1),
            "failures": self.failures,
            "why": self.failed.as_ref().map(|(.., why)| why),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn saved(version: u64) -> SavedSnapshot {
        SavedSnapshot { version: Version(version), bytes: (10, 5) }
    }

    #[test]
    fn the_first_snapshot_is_at_once_and_others_when_they_are_due() {
        let mut schedule = SnapshotSchedule::default();
        let (versions, time) = (Every::Versions(10), Every::Time(at(60)));
        assert!(!schedule.is_due(Every::Never, Version(5), at(0)));
        assert!(schedule.is_due(versions, Version(0), at(0)) && schedule.is_due(time, Version(0), at(0)));
        schedule.saved(saved(3), at(100), at(104));
        for (every, version, now, is_due) in [
            (versions, 12, 1000, false),
            (versions, 13, 104, true),
            (versions, 2, 104, false),
            (time, 4, 159, false),
            (time, 4, 160, true),
            // It has not changed.
            (time, 3, 1000, false),
            (Every::Never, 99, 9999, false),
        ] {
            assert_eq!(schedule.is_due(every, Version(version), at(now)), is_due, "{every} {version} {now}");
        }
        assert_eq!(schedule.status(at(110))["age_seconds"], 10.0);
        assert_eq!(schedule.status(at(110))["seconds"], 4.0);
    }

    #[test]
    fn after_a_failure_it_is_tried_again_later_and_later() {
        let (mut schedule, every) = (SnapshotSchedule::default(), Every::Versions(1));
        let mut now = at(0);
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert!(schedule.is_due(every, Version(1), now));
            assert_eq!(schedule.failed("the disk is full".into(), now), pause == 1);
            assert!(!schedule.is_due(every, Version(9), now + at(pause) - Duration::from_millis(1)));
            now += at(pause);
        }
        let status = schedule.status(now);
        assert_eq!((&status["failures"], &status["why"]), (&json!(8), &json!("the disk is full")));
        schedule.saved(saved(9), now, now);
        assert!(schedule.is_due(every, Version(10), now) && schedule.status(now)["why"].is_null());
    }

    #[test]
    fn another_store_has_no_snapshot_yet() {
        let mut schedule = SnapshotSchedule::default();
        schedule.is_to("/a");
        schedule.saved(saved(3), at(0), at(1));
        schedule.is_to("/a");
        assert!(!schedule.is_due(Every::Versions(1), Version(3), at(9)));
        schedule.is_to("/b");
        assert!(schedule.is_due(Every::Versions(1), Version(3), at(9)) && schedule.newest().is_none());
    }
}
