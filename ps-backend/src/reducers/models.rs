//! `average`, `easgd`, `sma` and `diloco`: the sum of the contributions is a way to go, and not a gradient.
//!
//! A client sends what its learners have come to, less what they began from (of `easgd` and `sma`, the corrections of
//! their replicas): `libmodelio::contributor` makes the difference. So nothing here knows of learners or replicas, and
//! the arithmetic is that of sums and of running gradients:
//!
//! - Elastic averaging adds the corrections to the central model (Zhang et al., *Deep learning with Elastic Averaging
//!   SGD*, equation 4).
//! - Of averaged tensors in a model of gradients, learners send the values themselves: their mean is the next value.
//! - SMA adds them with momentum (*Crossbow*, Algorithm 2): `z' = z + m'`, where `m' = z' - z` is `μm + Σ`.
//! - DiLoCo steps by Nesterov momentum along the pseudo-gradient, which is the mean difference with the other sign.

use libmodelio::bytes::kernels::{Operands, Scalar};
use libmodelio::vocabulary::reducer::{Hyper, Step};

use super::gradient::Gradient;
use super::momentum::{RunningMomentum, Way};
use super::sum::Carried;
use super::{Formula, Function, Reduce};

/// The mean or the sum of the contributions, added to the weights, or in their place if it is one of values.
pub(super) struct Average;

impl Average {
    fn op<S: Scalar, const WEIGHTS: bool>(step: &Step) -> Carried<S, WEIGHTS> {
        Carried::with(if WEIGHTS { 1.0 } else { 0.0 }, step.scale())
    }

    fn formula<const WEIGHTS: bool>(step: &Step, function: Function) -> Formula {
        let single = Self::op::<f32, WEIGHTS>(step).constants();
        Formula::new(function, single, Self::op::<f64, WEIGHTS>(step).constants())
    }
}

impl Reduce for Average {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        match step.of_values {
            true => operands.reduce(|| Self::op::<_, false>(step), || Self::op::<_, false>(step)),
            false => operands.reduce(|| Self::op::<_, true>(step), || Self::op::<_, true>(step)),
        }
    }

    fn formula(&self, step: &Step, _: bool) -> Formula {
        match step.of_values {
            true => Self::formula::<false>(step, Function::Scaled),
            false => Self::formula::<true>(step, Function::Carried),
        }
    }

    fn is_inert(&self, _: &Hyper) -> bool {
        true
    }
}

/// The sum of the corrections, with momentum.
pub(super) struct Sma;

impl Sma {
    fn way<S: Scalar>(step: &Step) -> Way<S> {
        Way { gradient: Gradient::scaled(step.scale()), rate: S::nearest(-1.0), nesterov: false }
    }
}

impl Reduce for Sma {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        RunningMomentum::pass(step, operands, Self::way, Self::way)
    }

    fn formula(&self, step: &Step, _: bool) -> Formula {
        RunningMomentum::formula(step, Self::way(step), Self::way(step))
    }
}

/// A step of the outer optimizer.
pub(super) struct Diloco;

impl Diloco {
    fn way<S: Scalar>(step: &Step) -> Way<S> {
        let rate = S::nearest(S::meant(step.hyper.learning_rate));
        Way { gradient: Gradient::scaled(-step.scale()), rate, nesterov: true }
    }
}

impl Reduce for Diloco {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        RunningMomentum::pass(step, operands, Self::way, Self::way)
    }

    fn formula(&self, step: &Step, _: bool) -> Formula {
        RunningMomentum::formula(step, Self::way(step), Self::way(step))
    }
}
