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
}

impl Lineage {
    /// That of a new model, which begins at a version.
    pub fn new(first: Generation, version: Version) -> Lineage {
        Lineage { first, reserved: Lineage::reserved_for(version), ..Lineage::default() }
    }

    /// Where the numbers end that are reserved for a job at this version: there is room for many more.
    pub fn reserved_for(version: Version) -> Version {
        Version((version.0 / (AT_ONCE / 2) + 2).saturating_mul(AT_ONCE / 2))
    }

    /// The lineage of the model when a shard restores it, and the number of its first version. Nobody has seen a version
    /// of that number.
    pub fn restored(&self, by: ShardId, snapshot: Version) -> (Lineage, Version) {
        let begins = self.reserved.max(snapshot.next());
        let reserved = Lineage::reserved_for(begins);
        (Lineage { restored: self.restored + 1, by, reserved, ..self.clone() }, begins)
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
            let (next, begins) = of.restored(ShardId(2), Version(3));
            assert!(begins > shown && next.reserved > begins && next.restored == restored);
            assert!(next.follows(&before) && !before.follows(&next));
            (of, shown) = (next, begins);
        }
        assert!(!Lineage { restored: 9, ..Lineage::new(Generation(8), Version(0)) }.follows(&of));
    }

    #[test]
    fn so_many_numbers_are_reserved_that_it_is_rarely_done() {
        for version in [0, 1, AT_ONCE / 2 - 1, AT_ONCE / 2, AT_ONCE, 7 * AT_ONCE + 5] {
            let reserved = Lineage::reserved_for(Version(version));
            assert!((version + AT_ONCE / 2..=version + AT_ONCE).contains(&reserved.0), "{version}");
        }
    }
}
