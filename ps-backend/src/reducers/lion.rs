//! `lion`: steps of one size in every element, in the direction of a mean of the gradient and the running gradient.

use libmodelio::bytes::kernels::{Lanes, Op, Operands, Scalar};
use libmodelio::vocabulary::reducer::Step;

use super::gradient::{Gradient, constant, written};
use super::{Formula, Function, Reduce};

pub(super) struct Lion;

impl Reduce for Lion {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        operands.reduce(|| Direction::new(step), || Direction::new(step))
    }

    fn formula(&self, step: &Step, _: bool) -> Formula {
        Formula::new(Function::Lion, Direction::new(step).constants(), Direction::new(step).constants())
    }
}

#[derive(Clone, Copy)]
struct Direction<S> {
    gradient: Gradient<S>,
    /// Factor on the weights: decoupled weight decay.
    keep: S,
    beta1: S,
    rest1: S,
    beta2: S,
    rest2: S,
    rate: S,
}

impl<S: Scalar> Direction<S> {
    fn new(step: &Step) -> Self {
        let h = &step.hyper;
        let (beta1, beta2) = (written(h.beta1), written(h.beta2));
        Self {
            gradient: Gradient::plain(step),
            keep: S::nearest(1.0 - S::meant(h.learning_rate) * S::meant(h.weight_decay)),
            beta1: S::nearest(beta1),
            rest1: S::nearest(1.0 - beta1),
            beta2: S::nearest(beta2),
            rest2: S::nearest(1.0 - beta2),
            rate: constant(h.learning_rate),
        }
    }

    fn constants(&self) -> [S; 9] {
        let [scale, decay, limit] = self.gradient.constants();
        [scale, decay, limit, self.keep, self.beta1, self.rest1, self.beta2, self.rest2, self.rate]
    }
}

impl<S: Scalar> Op for Direction<S> {
    type Scalar = S;
    const SLOTS: usize = 1;

    #[inline(always)]
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, w: L, [mean, unused]: [L; 2]) -> (L, [L; 2]) {
        let g = self.gradient.of(g, w);
        let direction = (L::splat(self.beta1) * mean + L::splat(self.rest1) * g).sign();
        let mean = L::splat(self.beta2) * mean + L::splat(self.rest2) * g;
        (L::splat(self.keep) * w - L::splat(self.rate) * direction, [mean, unused])
    }
}

#[cfg(test)]
mod tests {
    use libmodelio::bytes::kernels::{Input, Level, Output, Source, Wire, with_level};
    use libmodelio::vocabulary::reducer::{Hyper, Reducer};

    use super::super::apply;
    use super::*;

    #[test]
    fn a_direction_of_zero_or_nan_is_no_step() {
        let gradients = [0.0, -0.0, f32::NAN, 1e-40, -1e-40, f32::INFINITY, f32::NEG_INFINITY, 3.0, -0.5];
        let signs = [0.0, 0.0, 0.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0];
        let hyper = Hyper { learning_rate: 0.25, ..Hyper::default() };
        let step = Step { reducer: Reducer::Lion, hyper, contributions: 1, t: 1, ..Step::default() };
        // Of a whole line, and of the rest of one.
        let count = 2 * gradients.len();
        let sum: Vec<f32> = gradients.into_iter().cycle().take(count).collect();
        for level in Level::available() {
            let weights: Vec<u8> = (0..count).flat_map(|_| 1f32.to_le_bytes()).collect();
            let (mut next, mut mean) = (weights.clone(), vec![f32::NAN; count]);
            let zeros = vec![0.0; count];
            let input = Input { weights: &weights, master: None, slots: [&zeros, &[]] };
            let output = Output { weights: &mut next, master: None, slots: [&mut mean, &mut []] };
            let operands = Operands { wire: Wire::F32, sources: &[Source::Acc(&sum)], input, output };
            assert!(with_level(level, || apply(&step, operands, false)).unwrap());
            for (at, (weight, sign)) in next.as_chunks::<4>().0.iter().zip(signs.iter().cycle()).enumerate() {
                assert_eq!(f32::from_le_bytes(*weight), 1.0 - 0.25 * sign, "{level:?}, element {at}");
            }
            assert!(mean[2].is_nan() && mean[0] == 0.0, "{level:?}");
        }
    }
}
