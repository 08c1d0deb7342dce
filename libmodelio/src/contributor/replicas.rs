//! A learner's replicas of the model, for reducers that give each learner one.
//!
//! A contribution makes the next replica, which shows with the version that the contribution is part of. So one version
//! always shows the same replica, as it shows the same weights. The memory of an older one is used again when no version
//! is held any more with which it was shown.

use std::collections::VecDeque;
use std::ops::Range;

use crate::transport::Region;
use crate::vocabulary::ids::{Step, Version};
use crate::vocabulary::reducer::Reducer;

/// The replicas of one learner.
#[derive(Default)]
pub(super) struct Replicas {
    /// The reducer, and the bits of the learning rate if another one begins anew.
    of: Option<(Reducer, Option<u32>)>,
    /// The replicas, each with the version from which it is shown, in their order.
    shown: Vec<(Version, Region)>,
    /// The replicas of commits that are part of no version yet, with their steps, in their order.
    next: VecDeque<(Step, Region)>,
}

impl Replicas {
    /// The settings are these. Under others, replicas begin anew from the model.
    pub(super) fn follow(&mut self, reducer: Reducer, learning_rate: f32) {
        let of = (reducer, reducer.restarts().then_some(learning_rate.to_bits()));
        if self.of.replace(of) != Some(of) {
            self.shown.clear();
            self.next.clear();
        }
    }

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

    /// The contribution to `step` comes to nothing.
    pub(super) fn drop_from(&mut self, step: Step) {
        self.next.retain(|(other, _)| *other < step);
    }

    /// The replica that `version` shows. None if it shows the model.
    pub(super) fn at(&self, version: Version) -> Option<&Region> {
        self.shown.iter().rfind(|(from, _)| *from <= version).map(|(_, replica)| replica)
    }

    /// Memory that nobody reads any more. `is_held`: whether a version of these is held.
    pub(super) fn take_free(&mut self, is_held: impl Fn(Range<Version>) -> bool) -> Option<Region> {
        let free = self.shown.windows(2).position(|two| !is_held(two[0].0..two[1].0))?;
        Some(self.shown.remove(free).1)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::bytes::mmap::Mapping;
    use crate::transport::RegionKey;

    fn region(key: u64) -> Region {
        Region::new(Arc::new(Mapping::anonymous(4096).unwrap()), RegionKey(key))
    }

    fn key(replica: Option<&Region>) -> Option<u64> {
        replica.map(|replica| replica.key().0)
    }

    #[test]
    fn a_replica_shows_with_the_version_of_its_step() {
        let mut replicas = Replicas::default();
        replicas.follow(Reducer::Sma, 0.1);
        replicas.committing(Step(1), region(1));
        assert_eq!((replicas.waiting(), key(replicas.at(Version(9)))), (Some(Step(1)), None));
        replicas.show(Version(3));
        replicas.committing(Step(2), region(2));
        replicas.show(Version(5));
        let shown = [2, 3, 4, 5, 6].map(|version| key(replicas.at(Version(version))));
        assert_eq!(shown, [None, Some(1), Some(1), Some(2), Some(2)]);
    }

    #[test]
    fn another_learning_rate_begins_anew_where_the_reducer_says_so() {
        for (reducer, anew) in [(Reducer::Sma, true), (Reducer::Easgd, false)] {
            let mut replicas = Replicas::default();
            replicas.follow(reducer, 0.1);
            replicas.committing(Step(1), region(1));
            replicas.show(Version(1));
            replicas.follow(reducer, 0.1);
            assert_eq!(key(replicas.at(Version(1))), Some(1));
            replicas.follow(reducer, 0.2);
            assert_eq!(replicas.at(Version(1)).is_none(), anew, "{reducer}");
        }
    }

    #[test]
    fn memory_is_used_again_once_no_version_with_it_is_held() {
        let mut replicas = Replicas::default();
        for step in 1..=3 {
            replicas.committing(Step(step), region(step));
            replicas.show(Version(10 * step));
        }
        let held = |versions: &'static [u64]| {
            move |range: Range<Version>| versions.iter().any(|version| range.contains(&Version(*version)))
        };
        assert_eq!(key(replicas.take_free(held(&[15, 20, 30])).as_ref()), None);
        assert_eq!(key(replicas.take_free(held(&[15, 30])).as_ref()), Some(2));
        assert_eq!(key(replicas.at(Version(25))), Some(1), "nobody asks for it");
        assert_eq!(key(replicas.take_free(held(&[30])).as_ref()), Some(1));
        assert_eq!(key(replicas.take_free(held(&[])).as_ref()), None, "the newest one stays");
    }
}
