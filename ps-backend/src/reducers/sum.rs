//! `sum`: the contributions, added to a share of the old weights.

use libmodelio::bytes::kernels::{Lanes, Op, Operands, Scalar, Total};
use libmodelio::vocabulary::reducer::{Hyper, Step};

use super::Reduce;
use super::gradient::constant;

pub struct Sum;

impl Reduce for Sum {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        if step.hyper.carry == 0.0 && !operands.sources.is_empty() {
            return operands.reduce(Total::new, Total::new);
        }
        operands.reduce(|| Carried::new(step), || Carried::new(step))
    }

    fn is_inert(&self, hyper: &Hyper) -> bool {
        hyper.carry == 1.0
    }
}

#[derive(Clone, Copy)]
struct Carried<S> {
    carry: S,
}

impl<S: Scalar> Carried<S> {
    fn new(step: &Step) -> Self {
        Self { carry: constant(step.hyper.carry) }
    }
}

impl<S: Scalar> Op for Carried<S> {
    type Scalar = S;

    #[inline(always)]
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, w: L, slots: [L; 2]) -> (L, [L; 2]) {
        (L::splat(self.carry) * w + g, slots)
    }
}
