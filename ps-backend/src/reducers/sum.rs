//! `sum`: the contributions, added to a share of the old weights.

use libmodelio::bytes::kernels::{Lanes, Op, Operands, Scalar, Total};
use libmodelio::vocabulary::reducer::{Hyper, Step};

use super::gradient::{clip, constant, limit};
use super::{Formula, Function, Reduce};

pub(super) struct Sum;

impl Reduce for Sum {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        match step.hyper.carry == 0.0 && !operands.sources.is_empty() {
            true if is_plain(step) => operands.reduce(Total::new, Total::new),
            true => operands.reduce(|| Carried::<_, false>::new(step), || Carried::<_, false>::new(step)),
            false => operands.reduce(|| Carried::<_, true>::new(step), || Carried::<_, true>::new(step)),
        }
    }

    fn formula(&self, step: &Step, has_sums: bool) -> Formula {
        let function = match step.hyper.carry == 0.0 && has_sums {
            true if is_plain(step) => return Formula::new(Function::Total, [], []),
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

/// Whether the sum is used as it is.
fn is_plain(step: &Step) -> bool {
    step.scale() * clip(step) == 1.0 && limit::<f32>(step) == f32::INFINITY
}

/// Without `WEIGHTS` there is nothing to carry, and old weights are not read.
#[derive(Clone, Copy)]
pub(super) struct Carried<S, const WEIGHTS: bool> {
    carry: S,
    scale: S,
    limit: S,
}

impl<S: Scalar, const WEIGHTS: bool> Carried<S, WEIGHTS> {
    fn new(step: &Step) -> Self {
        let scale = S::nearest(step.scale() * clip(step));
        Self { carry: constant(step.hyper.carry), scale, limit: limit(step) }
    }

    /// The gradient of a step, and nothing of the weights.
    pub(super) fn gradient(step: &Step) -> Self {
        Self { carry: S::nearest(0.0), scale: S::nearest(step.scale() * clip(step)), limit: limit(step) }
    }

    /// This share of the weights, and the sum times `scale`.
    pub(super) fn with(carry: f64, scale: f64) -> Self {
        let limit = S::nearest(f64::INFINITY);
        Self { carry: S::nearest(carry), scale: S::nearest(scale), limit }
    }

    pub(super) fn constants(&self) -> [S; 3] {
        [self.carry, self.scale, self.limit]
    }
}

impl<S: Scalar, const WEIGHTS: bool> Op for Carried<S, WEIGHTS> {
    type Scalar = S;
    const READS_WEIGHTS: bool = WEIGHTS;

    #[inline(always)]
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, w: L, slots: [L; 2]) -> (L, [L; 2]) {
        let g = (L::splat(self.scale) * g).clamp(self.limit);
        (L::splat(self.carry) * w + g, slots)
    }
}
