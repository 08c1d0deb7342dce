//! How many copies of optimizer state a shard has: memory against early work.

use std::str::FromStr;

/// How many copies of optimizer state and fp32 masters there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StateCopies {
    /// One, which is changed in place once a version counts. Blocks of the version are computed then.
    #[default]
    Single,
    /// One of the newest version, and one of the next. A block is computed when its last contribution has come.
    Double,
}

impl StateCopies {
    /// Their names.
    pub const VARIANTS: &[&str] = &["single", "double"];

    /// The number.
    pub fn count(self) -> usize {
        match self {
            StateCopies::Single => 1,
            StateCopies::Double => 2,
        }
    }
}

/// No number of copies has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither single nor double")]
pub struct UnknownCopies(String);

impl FromStr for StateCopies {
    type Err = UnknownCopies;

    fn from_str(text: &str) -> Result<StateCopies, UnknownCopies> {
        match text {
            "single" => Ok(StateCopies::Single),
            "double" => Ok(StateCopies::Double),
            _ => Err(UnknownCopies(text.to_owned())),
        }
    }
}
