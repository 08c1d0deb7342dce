//! `adagrad`: steps against the gradient, in units of the root of the sum of its squares.

use libmodelio::bytes::kernels::{Lanes, Op, Operands, Scalar};
use libmodelio::vocabulary::reducer::{Hyper, Step};

use super::gradient::{Gradient, constant};
use super::{Formula, Function, Reduce};

pub(super) struct AdaGrad;

impl Reduce for AdaGrad {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        operands.reduce(|| SumOfSquares::new(step), || SumOfSquares::new(step))
    }

    fn formula(&self, step: &Step, _: bool) -> Formula {
        Formula::new(
            Function::AdaGrad,
            SumOfSquares::new(step).constants(),
            SumOfSquares::new(step).constants(),
        )
    }

    fn is_inert(&self, hyper: &Hyper) -> bool {
        hyper.weight_decay == 0.0
    }
}

#[derive(Clone, Copy)]
struct SumOfSquares<S> {
    gradient: Gradient<S>,
    rate: S,
    epsilon: S,
}

impl<S: Scalar> SumOfSquares<S> {
    fn new(step: &Step) -> Self {
        Self {
            gradient: Gradient::new(step),
            rate: constant(step.hyper.learning_rate),
            epsilon: constant(step.hyper.epsilon),
        }
    }

    fn constants(&self) -> [S; 5] {
        let [scale, decay, limit] = self.gradient.constants();
        [scale, decay, limit, self.rate, self.epsilon]
    }
}

impl<S: Scalar> Op for SumOfSquares<S> {
    type Scalar = S;
    const SLOTS: usize = 1;

    #[inline(always)]
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, w: L, [sum, unused]: [L; 2]) -> (L, [L; 2]) {
        let g = self.gradient.of(g, w);
        let sum = sum + g * g;
        let update = L::splat(self.rate) * g / (sum.sqrt() + L::splat(self.epsilon));
        (w - update, [sum, unused])
    }
}
