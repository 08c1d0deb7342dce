//! What a shard does with contributions: the names, hyper-parameters and per-step constants of the
//! reducers.
//!
//! Plain data and parsing only. The arithmetic is in `ps_backend::reducers`; semantics follow PyTorch's
//! optimizers of the same names, with the hyper-parameters in fp32.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How contributions become the next weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reducer {
    /// `w' = carry * w + sum of contributions`; never averaged.
    Sum,
    /// `w' = w - lr * g`, with L2 weight decay in `g`.
    #[default]
    Sgd,
    /// SGD with heavy-ball momentum; one state slot (the momentum buffer).
    Momentum,
    /// SGD with Nesterov momentum; one state slot.
    Nesterov,
    /// Adam with L2 weight decay; two state slots (first and second moment).
    Adam,
    /// Adam with decoupled weight decay; two state slots.
    AdamW,
    /// `w'` is the value the last contribution holds; without one, `w` stays.
    Assign,
}

/// Every reducer with the name that control files and messages use.
const NAMES: [(Reducer, &str); 7] = [
    (Reducer::Sum, "sum"),
    (Reducer::Sgd, "sgd"),
    (Reducer::Momentum, "momentum"),
    (Reducer::Nesterov, "nesterov"),
    (Reducer::Adam, "adam"),
    (Reducer::AdamW, "adamw"),
    (Reducer::Assign, "assign"),
];

impl Reducer {
    /// All reducers, in the order messages list them.
    pub fn all() -> impl Iterator<Item = Self> {
        NAMES.iter().map(|&(reducer, _)| reducer)
    }

    /// The lower-case name.
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|&&(reducer, _)| reducer == self).map_or("", |&(_, name)| name)
    }

    /// fp32 values of optimizer state kept for each weight.
    pub fn state_slots(self) -> usize {
        match self {
            Self::Sum | Self::Sgd | Self::Assign => 0,
            Self::Momentum | Self::Nesterov => 1,
            Self::Adam | Self::AdamW => 2,
        }
    }

    /// Whether [`Hyper::aggregation`] applies; `sum` always sums and `assign` takes values.
    pub fn averages(self) -> bool {
        !matches!(self, Self::Sum | Self::Assign)
    }
}

impl fmt::Display for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Reducer {
    type Err = ReducerError;

    /// Takes exactly the lower-case names.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        NAMES
            .iter()
            .find(|(_, name)| *name == text)
            .map(|&(reducer, _)| reducer)
            .ok_or_else(|| ReducerError::UnknownReducer(text.to_owned()))
    }
}

/// What a sum of contributions becomes before an optimizer sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Aggregation {
    /// Divided by the number of contributions.
    #[default]
    Mean,
    /// Left as it is.
    Sum,
}

impl fmt::Display for Aggregation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Mean => "mean",
            Self::Sum => "sum",
        })
    }
}

impl FromStr for Aggregation {
    type Err = ReducerError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "mean" => Ok(Self::Mean),
            "sum" => Ok(Self::Sum),
            _ => Err(ReducerError::UnknownAggregation(text.to_owned())),
        }
    }
}

/// A name that is not a reducer's or an aggregation's; the message lists the valid ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReducerError {
    /// Not a reducer.
    #[error("unknown reducer {0:?}: use one of {names}", names = NAMES.map(|(_, name)| name).join(", "))]
    UnknownReducer(String),
    /// Not an aggregation.
    #[error("unknown aggregation {0:?}: use one of mean, sum")]
    UnknownAggregation(String),
}

/// Hyper-parameters of all reducers together; each reducer reads those it has in PyTorch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hyper {
    /// Step size of every optimizer.
    pub learning_rate: f32,
    /// Factor on the momentum buffer (`momentum`, `nesterov`).
    pub momentum: f32,
    /// The gradient enters the momentum buffer times `1 - dampening`, except at the first step.
    pub dampening: f32,
    /// Decay of the first moment (`adam`, `adamw`).
    pub beta1: f32,
    /// Decay of the second moment (`adam`, `adamw`).
    pub beta2: f32,
    /// Added to the denominator (`adam`, `adamw`).
    pub epsilon: f32,
    /// L2 penalty in the gradient; for `adamw`, decay of the weights themselves.
    pub weight_decay: f32,
    /// `sum`: factor on the old weights; with 0 they are not read at all.
    pub carry: f32,
    /// Mean or sum of the contributions.
    pub aggregation: Aggregation,
}

impl Default for Hyper {
    fn default() -> Self {
        Self {
            learning_rate: 0.01,
            momentum: 0.9,
            dampening: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.0,
            carry: 1.0,
            aggregation: Aggregation::Mean,
        }
    }
}

/// One application of a reducer to a version.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// What to compute.
    pub reducer: Reducer,
    /// With which constants.
    pub hyper: Hyper,
    /// Contributions behind the sources (an accumulator may hold several); 0 counts as 1.
    pub contributions: u32,
    /// Optimizer step, counted from 1: the first sets the momentum buffer, and Adam's bias correction
    /// depends on it.
    pub t: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for reducer in Reducer::all() {
            assert_eq!(reducer.to_string().parse(), Ok(reducer));
            assert_eq!(reducer.name(), reducer.name().to_lowercase());
        }
        assert_eq!(Reducer::all().count(), 7);
        for aggregation in [Aggregation::Mean, Aggregation::Sum] {
            assert_eq!(aggregation.to_string().parse(), Ok(aggregation));
        }
    }

    #[test]
    fn unknown_names_list_the_valid_ones() {
        for text in ["", "SGD", " sgd", "sgd\n", "rmsprop"] {
            let error = text.parse::<Reducer>().unwrap_err();
            assert_eq!(error, ReducerError::UnknownReducer(text.to_owned()));
            let message = error.to_string();
            assert!(
                message.contains("sum, sgd, momentum, nesterov, adam, adamw, assign"),
                "message was {message}"
            );
        }
        assert!("avg".parse::<Aggregation>().unwrap_err().to_string().contains("mean, sum"));
    }

    #[test]
    fn slots_and_defaults() {
        let slots: Vec<_> = Reducer::all().map(Reducer::state_slots).collect();
        assert_eq!(slots, [0, 0, 1, 1, 2, 2, 0]);
        let hyper = Hyper::default();
        assert_eq!((hyper.learning_rate, hyper.momentum, hyper.dampening), (0.01, 0.9, 0.0));
        assert_eq!((hyper.beta1, hyper.beta2, hyper.epsilon), (0.9, 0.999, 1e-8));
        assert_eq!((hyper.weight_decay, hyper.carry, hyper.aggregation), (0.0, 1.0, Aggregation::Mean));
    }
}
