//! `momentum` and `nesterov`: steps along a running gradient.

use libmodelio::bytes::kernels::{Lanes, Op, Operands, Scalar};
use libmodelio::vocabulary::reducer::Step;

use super::gradient::{Gradient, constant};
use super::{Formula, Function, Reduce};

pub(super) struct Momentum {
    pub nesterov: bool,
}

impl Momentum {
    fn way<S: Scalar>(&self, step: &Step) -> Way<S> {
        Way {
            gradient: Gradient::new(step),
            rate: constant(step.hyper.learning_rate),
            nesterov: self.nesterov,
        }
    }
}

impl Reduce for Momentum {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        RunningMomentum::pass(step, operands, |step| self.way(step), |step| self.way(step))
    }

    fn formula(&self, step: &Step, _: bool) -> Formula {
        RunningMomentum::formula(step, self.way(step), self.way(step))
    }
}

/// What goes into the running gradient, and the step along that.
#[derive(Clone, Copy)]
pub(super) struct Way<S> {
    pub gradient: Gradient<S>,
    pub rate: S,
    pub nesterov: bool,
}

impl RunningMomentum<f32, false> {
    /// The pass of a step in both types.
    pub(super) fn pass(
        step: &Step,
        operands: Operands<'_>,
        single: impl Fn(&Step) -> Way<f32>,
        double: impl Fn(&Step) -> Way<f64>,
    ) -> bool {
        if step.t <= 1 {
            operands.reduce(
                || RunningMomentum::<_, true>::new(step, single(step)),
                || RunningMomentum::<_, true>::new(step, double(step)),
            )
        } else {
            operands.reduce(
                || RunningMomentum::<_, false>::new(step, single(step)),
                || RunningMomentum::<_, false>::new(step, double(step)),
            )
        }
    }

    /// The same for a device.
    pub(super) fn formula(step: &Step, single: Way<f32>, double: Way<f64>) -> Formula {
        let function = match (step.t <= 1, single.nesterov) {
            (true, false) => Function::MomentumFirst,
            (true, true) => Function::NesterovFirst,
            (false, false) => Function::Momentum,
            (false, true) => Function::Nesterov,
        };
        let constants = RunningMomentum::<f32, false>::new(step, single).constants();
        Formula::new(function, constants, RunningMomentum::<f64, false>::new(step, double).constants())
    }
}

/// The `FIRST` step fills the buffer.
#[derive(Clone, Copy)]
pub(super) struct RunningMomentum<S, const FIRST: bool> {
    way: Way<S>,
    momentum: S,
    undamped: S,
}

impl<S: Scalar, const FIRST: bool> RunningMomentum<S, FIRST> {
    fn new(step: &Step, way: Way<S>) -> Self {
        let dampening = if step.reducer.reads("dampening") { step.hyper.dampening } else { 0.0 };
        RunningMomentum {
            way,
            momentum: constant(step.hyper.momentum),
            undamped: S::nearest(1.0 - S::meant(dampening)),
        }
    }

    fn constants(&self) -> [S; 6] {
        let [scale, decay, limit] = self.way.gradient.constants();
        [scale, decay, limit, self.way.rate, self.momentum, self.undamped]
    }
}

impl<S: Scalar, const FIRST: bool> Op for RunningMomentum<S, FIRST> {
    type Scalar = S;
    const READS_SLOTS: bool = !FIRST;
    const SLOTS: usize = 1;

    #[inline(always)]
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, w: L, [buffer, unused]: [L; 2]) -> (L, [L; 2]) {
        let g = self.way.gradient.of(g, w);
        let momentum = L::splat(self.momentum);
        let buffer = if FIRST { g } else { momentum * buffer + L::splat(self.undamped) * g };
        let direction = if self.way.nesterov { g + momentum * buffer } else { buffer };
        (w - L::splat(self.way.rate) * direction, [buffer, unused])
    }
}
