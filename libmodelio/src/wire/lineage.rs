//! What a model has in common with those that it was restored from.

use serde::{Deserialize, Serialize};

use crate::vocabulary::ids::{Generation, ShardId, Version};

/// So many numbers of versions are reserved at once.
const AT_ONCE: u64 = 1 << 20;

/// The lives of a model: those before were lost, and it was restored from a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lineage {
    /// The first of them.
    pub first: Generation,
    /// How often it was restored.
    pub restored: u32,
    /// The shard that restores it, or has done so. 0 if it was never restored.
    pub by: ShardId,
    /// No version has had this number, or one above.
    pub reserved: Version,
    /// The store that it is restored from when blocks are lost. Empty if it is not.
    pub store: String,
    /// Whether it then goes on with newer weights, if a mount that lives has some.
    pub newest: bool,
    /// Versions of this life have this number, or one above.
    pub begins: Version,
    /// Versions of the last life before it that was there have this number, or one above.
    pub before: Version,
}

impl Lineage {
    /// That of a new model, which begins at a version.
    pub fn new(first: Generation, version: Version) -> Lineage {
        let reserved = Lineage::reserved_for(version);
        Lineage { first, reserved, begins: version, ..Lineage::default() }
    }

    /// Where the numbers end that are reserved for a job at this version: there is room for many more.
    pub fn reserved_for(version: Version) -> Version {
        Version((version.0 / (AT_ONCE / 2) + 2).saturating_mul(AT_ONCE / 2))
    }

    /// The lineage of the model when a shard restores it, and the number of its first version. Nobody has seen a version
    /// of that number. `was_there` says whether this life was, or was being restored itself.
    pub fn restored(&self, by: ShardId, snapshot: Version, was_there: bool) -> (Lineage, Version) {
        let begins = self.reserved.max(snapshot.next());
        let (reserved, restored) = (Lineage::reserved_for(begins), self.restored + 1);
        let before = if was_there { self.begins } else { self.before };
        (Lineage { restored, by, reserved, begins, before, ..self.clone() }, begins)
    }

    /// The number that a version has in this life, which is restored from a snapshot, if the life before made it after
    /// that: as many steps were taken as its own number says. None for another version.
    pub fn newer(&self, snapshot: Version, version: Version) -> Option<Version> {
        let is_of_life_before = self.before <= version && version < self.begins;
        let steps = version.0.checked_sub(snapshot.max(self.before).0)?;
        let number = self.begins.0 + steps;
        let is_newer = is_of_life_before && version > snapshot && number + AT_ONCE / 4 < self.reserved.0;
        is_newer.then_some(Version(number))
    }

    /// Whether a model of this lineage goes on from one of the other.
    pub fn follows(&self, other: &Lineage) -> bool {
        self.first == other.first && self.restored > other.restored
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restored_model_shows_no_number_twice() {
        let mut of = Lineage::new(Generation(7), Version(0));
        let mut shown = Version(0);
        for restored in 1..5 {
            // It has used all numbers that it may.
            assert!(of.reserved > shown);
            shown = Version(of.reserved.0 - 1);
            let before = of.clone();
            let (next, begins) = of.restored(ShardId(2), Version(3), true);
            assert!(begins > shown && next.reserved > begins && next.restored == restored);
            assert_eq!((next.begins, next.before), (begins, before.begins));
            assert!(next.follows(&before) && !before.follows(&next));
            (of, shown) = (next, begins);
        }
        assert!(!Lineage { restored: 9, ..Lineage::new(Generation(8), Version(0)) }.follows(&of));
    }

    #[test]
    fn a_version_of_the_life_before_has_a_number_for_its_steps() {
        let first = Lineage::new(Generation(7), Version(0));
        let (second, begins) = first.restored(ShardId(2), Version(30), true);
        let newer = |of: &Lineage, snapshot, version| of.newer(Version(snapshot), Version(version));
        assert_eq!(newer(&second, 30, 33), Some(Version(begins.0 + 3)));
        assert_eq!(newer(&second, 30, 30), None, "it is the snapshot");
        assert_eq!(newer(&second, 30, 29), None);
        assert_eq!(newer(&second, 30, begins.0), None, "it is none of the life before");
        // That life was never there. The versions of the one before it are still the newest.
        let (third, again) = second.restored(ShardId(3), Version(30), false);
        assert_eq!(newer(&third, 30, 33), Some(Version(again.0 + 3)));
        assert_eq!(newer(&third, 30, begins.0 + 3), None, "nobody has one");
        // It was there, and has no snapshot of its own yet.
        let (third, again) = second.restored(ShardId(3), Version(30), true);
        assert_eq!(newer(&third, 30, begins.0 + 3), Some(Version(again.0 + 3)));
        assert_eq!(newer(&third, 30, 33), None, "its end was undone");
        // There are not so many numbers.
        let (far, _) = Lineage::new(Generation(7), Version(0)).restored(ShardId(2), Version(1), true);
        assert_eq!(
            newer(&Lineage { begins: Version(1 << 40), reserved: Version((1 << 40) + 9), ..far }, 1, 5),
            None
        );
    }

    #[test]
    fn so_many_numbers_are_reserved_that_it_is_rarely_done() {
        for version in [0, 1, AT_ONCE / 2 - 1, AT_ONCE / 2, AT_ONCE, 7 * AT_ONCE + 5] {
            let reserved = Lineage::reserved_for(Version(version));
            assert!((version + AT_ONCE / 2..=version + AT_ONCE).contains(&reserved.0), "{version}");
        }
    }
}
