//! `sum`: the contributions, added to a share of the old weights.

use libmodelio::bytes::kernels::{Lanes, Op, Operands, Scalar, Total};
use libmodelio::vocabulary::reducer::{Hyper, Step};

use super::gradient::{clip, constant};
use super::{Formula, Function, Reduce};

pub struct Sum;

impl Reduce for Sum {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        match step.hyper.carry == 0.0 && !operands.sources.is_empty() {
            true if clip(step) == 1.0 => operands.reduce(Total::new, Total::new),
            true => operands.reduce(|| Carried::<_, false>::new(step), || Carried::<_, false>::new(step)),
            false => operands.reduce(|| Carried::<_, true>::new(step), || Carried::<_, true>::new(step)),
        }
    }

    fn formula(&self, step: &Step, has_sums: bool) -> Formula {
        let function = match step.hyper.carry == 0.0 && has_sums {
            true if clip(step) == 1.0 => return Formula::new(Function::Total, [], []),
            true => Function::Scaled,
            false => Function::Carried,
        };
        let single = Carried::<f32, true>::new(step).constants();
        Formula::new(function, single, Carried::<f64, true>::new(step).constants())
    }

    fn is_inert(&self, hyper: &Hyper) -> bool {
        hyper.carry == 1.0
    }
}

/// Without `WEIGHTS` there is nothing to carry, and old weights are not read.
#[derive(Clone, Copy)]
struct Carried<S, const WEIGHTS: bool> {
    carry: S,
    scale: S,
}

impl<S: Scalar, const WEIGHTS: bool> Carried<S, WEIGHTS> {
    fn new(step: &Step) -> Self {
        Self { carry: constant(step.hyper.carry), scale: S::nearest(clip(step)) }
    }

    fn constants(&self) -> [S; 2] {
        [self.carry, self.scale]
    }
}

impl<S: Scalar, const WEIGHTS: bool> Op for Carried<S, WEIGHTS> {
    type Scalar = S;
    const READS_WEIGHTS: bool = WEIGHTS;

    #[inline(always)]
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, w: L, slots: [L; 2]) -> (L, [L; 2]) {
        (L::splat(self.carry) * w + L::splat(self.scale) * g, slots)
    }
}
