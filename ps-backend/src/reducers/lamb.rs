//! `lamb`: Adam whose step, with decoupled weight decay, is scaled tensor by tensor to the weights' norm (You et al.,
//! *Large Batch Optimization for Deep Learning: Training BERT in 76 minutes*, Algorithm 2, with the identity as φ).

use libmodelio::bytes::kernels::Operands;
use libmodelio::vocabulary::norm::TensorNorms;
use libmodelio::vocabulary::reducer::Step;

use super::adam::{Adam, Moments};
use super::{Formula, Layerwise, Reduce};

const ADAM: Adam = Adam { decoupled: true };

pub(super) struct Lamb;

impl Reduce for Lamb {
    fn pass(&self, step: &Step, operands: Operands<'_>, check: bool) -> bool {
        ADAM.pass(step, operands, check)
    }

    fn formula(&self, step: &Step, has_sums: bool) -> Formula {
        ADAM.formula(step, has_sums)
    }
}

/// The direction is the whole step at learning rate 1, with the decay.
impl Layerwise for Lamb {
    fn slots(&self) -> usize {
        2
    }

    fn direction(&self, step: &Step, operands: Operands<'_>) {
        operands.reduce(|| Moments::direction(step), || Moments::direction(step));
    }

    fn factor(&self, _: &Step, norms: TensorNorms) -> f64 {
        norms.weights / norms.direction
    }
}
