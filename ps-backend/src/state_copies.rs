//! How many copies of optimizer state a shard has: memory against early work.

use strum::{EnumString, VariantNames};

/// How many copies of optimizer state and fp32 masters there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, VariantNames)]
#[strum(serialize_all = "lowercase")]
pub enum StateCopies {
    /// One, which is changed in place once a version counts. Blocks of the version are computed then.
    #[default]
    Single,
    /// One of the newest version, and one of the next. A block is computed when its last contribution has come.
    Double,
}

impl StateCopies {
    /// The number.
    pub fn count(self) -> usize {
        match self {
            StateCopies::Single => 1,
            StateCopies::Double => 2,
        }
    }
}
