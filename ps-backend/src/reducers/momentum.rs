//! `momentum` and `nesterov`: steps along a running gradient.

use libmodelio::bytes::kernels::{Lanes, Op, Operands, Scalar};
use libmodelio::vocabulary::reducer::Step;

use super::gradient::{Gradient, constant};
use super::{Formula, Function, Reduce};

pub struct Momentum {
    pub nesterov: bool,
}

impl Reduce for Momentum {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        if step.t <= 1 {
            operands.reduce(|| self.running::<_, true>(step), || self.running::<_, true>(step))
        } else {
            operands.reduce(|| self.running::<_, false>(step), || self.running::<_, false>(step))
        }
    }

    fn formula(&self, step: &Step, _: bool) -> Formula {
        let function = match (step.t <= 1, self.nesterov) {
            (true, false) => Function::MomentumFirst,
            (true, true) => Function::NesterovFirst,
            (false, false) => Function::Momentum,
            (false, true) => Function::Nesterov,
        };
        let single = self.running::<f32, false>(step).constants();
        Formula::new(function, single, self.running::<f64, false>(step).constants())
    }
}

impl Momentum {
    fn running<S: Scalar, const FIRST: bool>(&self, step: &Step) -> Running<S, FIRST> {
        Running {
            gradient: Gradient::new(step),
            rate: constant(step.hyper.learning_rate),
            momentum: constant(step.hyper.momentum),
            undamped: S::nearest(1.0 - S::meant(step.hyper.dampening)),
            nesterov: self.nesterov,
        }
    }
}

/// The `FIRST` step fills the buffer.
#[derive(Clone, Copy)]
struct Running<S, const FIRST: bool> {
    gradient: Gradient<S>,
    rate: S,
    momentum: S,
    undamped: S,
    nesterov: bool,
}

impl<S: Scalar, const FIRST: bool> Running<S, FIRST> {
    fn constants(&self) -> [S; 6] {
        let [scale, decay, limit] = self.gradient.constants();
        [scale, decay, limit, self.rate, self.momentum, self.undamped]
    }
}

impl<S: Scalar, const FIRST: bool> Op for Running<S, FIRST> {
    type Scalar = S;
    const READS_SLOTS: bool = !FIRST;
    const SLOTS: usize = 1;

    #[inline(always)]
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, w: L, [buffer, unused]: [L; 2]) -> (L, [L; 2]) {
        let g = self.gradient.of(g, w);
        let momentum = L::splat(self.momentum);
        let buffer = if FIRST { g } else { momentum * buffer + L::splat(self.undamped) * g };
        let direction = if self.nesterov { g + momentum * buffer } else { buffer };
        (w - L::splat(self.rate) * direction, [buffer, unused])
    }
}
