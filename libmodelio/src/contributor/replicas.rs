//! A learner's replicas of the model, for reducers that give each learner one.
//!
//! A contribution makes the next replica, which shows with the version that the contribution is part of. So one version
//! always shows the same replica, as it shows the same weights. The memory of an older one is used again when no version
//! is held any more with which it was shown.

use std::collections::VecDeque;
use std::ops::Range;

use crate::bytes::region::Region;
use crate::vocabulary::ids::{Step, Version};

/// The replicas of one learner.
///
/// `since` is the version with which replicas begin anew: from it on, only later ones are shown.
#[derive(Default)]
pub(super) struct Replicas {
    /// The replicas, each with the version from which it is shown, in their order.
    shown: Vec<(Version, Region)>,
    /// The replicas of commits that are part of no version yet, with their steps, in their order. A commit that was given
    /// up may have been taken, so its replica stays until another contribution to the step is committed.
    next: VecDeque<(Step, Region)>,
}

impl Replicas {
    /// The commit of `step` is sent, and makes this replica.
    pub(super) fn committing(&mut self, step: Step, next: Region) {
        self.next.retain(|(other, _)| *other < step);
        self.next.push_back((step, next));
    }

    /// The first step whose replica waits to be shown.
    pub(super) fn waiting(&self) -> Option<Step> {
        self.next.front().map(|(step, _)| *step)
    }

    /// That step is part of this version.
    pub(super) fn show(&mut self, from: Version) {
        self.shown.extend(self.next.pop_front().map(|(_, next)| (from, next)));
    }

    /// The replica that `version` shows. None if it shows the model.
    pub(super) fn at(&self, version: Version, since: Version) -> Option<&Region> {
        let shows = |from: Version| from <= version && (version < since || from > since);
        self.shown.iter().rfind(|(from, _)| shows(*from)).map(|(_, replica)| replica)
    }

    /// The versions that show a replica. None of the newest one, unless replicas have begun anew.
    fn versions(&self, index: usize, since: Version) -> Option<Range<Version>> {
        let from = self.shown[index].0;
        let next = self.shown.get(index + 1).map(|(next, _)| *next);
        let end = Some(since).filter(|since| from <= *since);
        let end = next.into_iter().chain(end).min()?;
        Some(from..end)
    }

    /// Memory that nobody reads any more. `is_held`: whether a version of these is held.
    pub(super) fn take_free(
        &mut self,
        since: Version,
        is_held: impl Fn(Range<Version>) -> bool,
    ) -> Option<Region> {
        let is_free = |index: &usize| self.versions(*index, since).is_some_and(&|range| !is_held(range));
        let free = (0..self.shown.len()).find(is_free)?;
        Some(self.shown.remove(free).1)
    }

    /// Lets go of all memory that nobody reads any more: the learner makes no more replicas.
    pub(super) fn let_go(&mut self, since: Version, is_held: impl Fn(Range<Version>) -> bool) {
        self.next.clear();
        while self.take_free(since, &is_held).is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::bytes::mmap::Mapping;
    use crate::bytes::region::RegionKey;

    fn region(key: u64) -> Region {
        Region::new(Arc::new(Mapping::anonymous(4096).unwrap()), RegionKey(key))
    }

    fn key(replica: Option<&Region>) -> Option<u64> {
        replica.map(|replica| replica.key().0)
    }

    /// Replicas of the versions 10, 20 and 30.
    fn three() -> Replicas {
        let mut replicas = Replicas::default();
        for step in 1..=3 {
            replicas.committing(Step(step), region(step));
            replicas.show(Version(10 * step));
        }
        replicas
    }

    #[test]
    fn a_replica_shows_with_the_version_of_its_step() {
        let mut replicas = Replicas::default();
        replicas.committing(Step(1), region(1));
        assert_eq!((replicas.waiting(), key(replicas.at(Version(9), Version(0)))), (Some(Step(1)), None));
        replicas.show(Version(3));
        replicas.committing(Step(2), region(2));
        replicas.committing(Step(2), region(3));
        replicas.show(Version(5));
        let shown = [2, 3, 4, 5, 6].map(|version| key(replicas.at(Version(version), Version(0))));
        assert_eq!(shown, [None, Some(1), Some(1), Some(3), Some(3)]);
    }

    #[test]
    fn replicas_begin_anew_with_a_version_and_earlier_versions_show_what_they_showed() {
        let replicas = three();
        let shown = |since| [15, 19, 20, 29, 30].map(|of| key(replicas.at(Version(of), Version(since))));
        assert_eq!(shown(0), [Some(1), Some(1), Some(2), Some(2), Some(3)]);
        assert_eq!(shown(20), [Some(1), Some(1), None, None, Some(3)]);
        assert_eq!(shown(21), [Some(1), Some(1), Some(2), None, Some(3)]);
        assert_eq!(shown(30), [Some(1), Some(1), Some(2), Some(2), None]);
    }

    #[test]
    fn memory_is_used_again_once_no_version_with_it_is_held() {
        let mut replicas = three();
        let held = |versions: &'static [u64]| {
            move |range: Range<Version>| versions.iter().any(|version| range.contains(&Version(*version)))
        };
        assert_eq!(key(replicas.take_free(Version(0), held(&[15, 20, 30])).as_ref()), None);
        assert_eq!(key(replicas.take_free(Version(0), held(&[15, 30])).as_ref()), Some(2));
        assert_eq!(key(replicas.take_free(Version(0), held(&[30])).as_ref()), Some(1));
        assert_eq!(key(replicas.take_free(Version(0), held(&[])).as_ref()), None, "the newest one stays");
        // Unless replicas have begun anew.
        assert_eq!(key(replicas.take_free(Version(31), held(&[30])).as_ref()), None);
        assert_eq!(key(replicas.take_free(Version(31), held(&[31])).as_ref()), Some(3));
    }
}
