//! `average`, `easgd`, `sma` and `diloco`: the sum of the contributions is a way to go, and not a gradient.
//!
//! A client sends what its learners have come to, less what they began from (of `easgd` and `sma`, the corrections of
//! their replicas): `libmodelio::contributor` makes the difference. So nothing here knows of learners or replicas, and
//! the arithmetic is that of sums and of running gradients:
//!
//! - Elastic averaging adds the corrections to the central model (Zhang et al., *Deep learning with Elastic Averaging
//!   SGD*, equation 4).
//! - SMA adds them with momentum (*Crossbow*, Algorithm 2): `z' = z + m'`, where `m' = z' - z` is `μm + Σ`.
//! - DiLoCo steps by Nesterov momentum along the pseudo-gradient, which is the mean difference with the other sign.

use libmodelio::bytes::kernels::{Operands, Scalar};
use libmodelio::vocabulary::reducer::{Hyper, Step};

use super::gradient::Gradient;
use super::momentum::{Running, Way};
use super::sum::Carried;
use super::{Formula, Function, Reduce};

/// The mean or the sum of the contributions, added to the weights.
pub struct Average;

impl Average {
    fn op<S: Scalar>(step: &Step) -> Carried<S, true> {
        Carried::with(1.0, step.scale())
    }
}

impl Reduce for Average {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        operands.reduce(|| Self::op(step), || Self::op(step))
    }

    fn formula(&self, step: &Step, _: bool) -> Formula {
        let single = Self::op::<f32>(step).constants();
        Formula::new(Function::Carried, single, Self::op::<f64>(step).constants())
    }

    fn is_inert(&self, _: &Hyper) -> bool {
        true
    }
}

/// The sum of the corrections, with momentum.
pub struct Sma;

impl Sma {
    fn way<S: Scalar>(step: &Step) -> Way<S> {
        Way { gradient: Gradient::scaled(step.scale()), rate: S::nearest(-1.0), nesterov: false }
    }
}

impl Reduce for Sma {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        Running::pass(step, operands, Self::way, Self::way)
    }

    fn formula(&self, step: &Step, _: bool) -> Formula {
        Running::formula(step, Self::way(step), Self::way(step))
    }
}

/// A step of the outer optimizer.
pub struct Diloco;

impl Diloco {
    fn way<S: Scalar>(step: &Step) -> Way<S> {
        let rate = S::nearest(S::meant(step.hyper.learning_rate));
        Way { gradient: Gradient::scaled(-step.scale()), rate, nesterov: true }
    }
}

impl Reduce for Diloco {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        Running::pass(step, operands, Self::way, Self::way)
    }

    fn formula(&self, step: &Step, _: bool) -> Formula {
        Running::formula(step, Self::way(step), Self::way(step))
    }
}
