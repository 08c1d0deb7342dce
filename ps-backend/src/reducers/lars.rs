//! `lars`: momentum whose gradient is scaled, tensor by tensor, to a share of the weights' norm (You, Gitman, Ginsburg,
//! *Large Batch Training of Convolutional Networks*, Algorithm 1; the learning rate is outside of the momentum buffer,
//! as in torch's SGD).

use libmodelio::bytes::kernels::{Operands, Scalar};
use libmodelio::vocabulary::norm::TensorNorms;
use libmodelio::vocabulary::reducer::Step;

use super::gradient::{Gradient, constant};
use super::momentum::{RunningMomentum, Way};
use super::sum::Carried;
use super::{Formula, Layerwise, Reduce};

pub(super) struct Lars;

impl Lars {
    fn way<S: Scalar>(step: &Step) -> Way<S> {
        let gradient = Gradient::times(step, step.factor());
        Way { gradient, rate: constant(step.hyper.learning_rate), nesterov: false }
    }
}

impl Reduce for Lars {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        RunningMomentum::pass(step, operands, Self::way, Self::way)
    }

    fn formula(&self, step: &Step, _: bool) -> Formula {
        RunningMomentum::formula(step, Self::way(step), Self::way(step))
    }
}

/// The direction is the gradient, without the penalty.
impl Layerwise for Lars {
    fn slots(&self) -> usize {
        0
    }

    fn direction(&self, step: &Step, operands: Operands<'_>) {
        operands.reduce(|| Carried::<_, false>::gradient(step), || Carried::<_, false>::gradient(step));
    }

    fn factor(&self, step: &Step, norms: TensorNorms) -> f64 {
        let (trust, decay) = (f64::meant(step.hyper.trust_coefficient), f64::meant(step.hyper.weight_decay));
        trust * norms.weights / (norms.direction + decay * norms.weights)
    }
}
