//! `sgd`: a step against the gradient.

use libmodelio::bytes::kernels::{Lanes, Op, Operands, Scalar};
use libmodelio::vocabulary::reducer::{Hyper, Step};

use super::gradient::{Gradient, constant};
use super::{Formula, Function, Reduce};

pub(super) struct Sgd;

impl Reduce for Sgd {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        operands.reduce(|| Descent::new(step), || Descent::new(step))
    }

    fn formula(&self, step: &Step, _: bool) -> Formula {
        Formula::new(Function::Sgd, Descent::new(step).constants(), Descent::new(step).constants())
    }

    fn is_inert(&self, hyper: &Hyper) -> bool {
        hyper.weight_decay == 0.0
    }
}

#[derive(Clone, Copy)]
struct Descent<S> {
    gradient: Gradient<S>,
    rate: S,
}

impl<S: Scalar> Descent<S> {
    fn new(step: &Step) -> Self {
        Self { gradient: Gradient::new(step), rate: constant(step.hyper.learning_rate) }
    }

    fn constants(&self) -> [S; 4] {
        let [scale, decay, limit] = self.gradient.constants();
        [scale, decay, limit, self.rate]
    }
}

impl<S: Scalar> Op for Descent<S> {
    type Scalar = S;

    #[inline(always)]
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, w: L, slots: [L; 2]) -> (L, [L; 2]) {
        (w - L::splat(self.rate) * self.gradient.of(g, w), slots)
    }
}
