//! The weight of a contribution: how much it counts beside the others of its version. Pure.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The least and the largest weight. Products with them, and one by their sum, are finite and not zero in fp32, too.
const MIN_WEIGHT: f64 = 1e-15;
const MAX_WEIGHT: f64 = 1e15;

/// A number above zero, such as the tokens or samples behind a contribution. Two are equal if their bits are.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weight(u64);

/// A number that is no weight.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a number from 1e-15 to 1e15")]
pub struct NoWeight(String);

impl Weight {
    /// The weight of a contribution that counts once.
    pub const ONE: Weight = Weight(1f64.to_bits());

    /// As a number.
    pub fn get(self) -> f64 {
        f64::from_bits(self.0)
    }

    /// Whether it is a number that a weight can be. What a peer says may be any.
    pub fn is_valid(self) -> bool {
        (MIN_WEIGHT..=MAX_WEIGHT).contains(&self.get())
    }
}

impl Default for Weight {
    fn default() -> Weight {
        Weight::ONE
    }
}

impl FromStr for Weight {
    type Err = NoWeight;

    fn from_str(text: &str) -> Result<Weight, NoWeight> {
        let weight = text.trim().parse().map(f64::to_bits).map(Weight);
        weight.ok().filter(|weight| weight.is_valid()).ok_or_else(|| NoWeight(text.trim().to_owned()))
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

impl fmt::Debug for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Weight({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_numbers_within_bounds() {
        for (text, weight) in [("1", 1.0), (" 0.25\n", 0.25), ("4096", 4096.0), ("1e15", 1e15)] {
            assert_eq!(text.parse::<Weight>().unwrap().get(), weight);
            assert_eq!(text.parse::<Weight>().unwrap().to_string().parse(), text.parse::<Weight>());
        }
        for text in ["", "0", "-1", "1e-16", "NaN", "inf", "1e16", "many"] {
            let error = text.parse::<Weight>().unwrap_err();
            assert_eq!(error.to_string(), format!("{text:?} is not a number from 1e-15 to 1e15"));
        }
        assert_eq!(Weight::default().get(), 1.0);
    }
}
