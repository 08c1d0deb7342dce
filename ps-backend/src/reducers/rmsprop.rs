//! `rmsprop`: steps against the gradient, in units of the root of its running mean square.

use libmodelio::bytes::kernels::{Lanes, Op, Operands, Scalar};
use libmodelio::vocabulary::reducer::Step;

use super::gradient::{Gradient, constant, written};
use super::{Formula, Function, Reduce};

pub(super) struct RmsProp;

impl Reduce for RmsProp {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        operands.reduce(|| MeanSquare::new(step), || MeanSquare::new(step))
    }

    fn formula(&self, step: &Step, _: bool) -> Formula {
        Formula::new(Function::RmsProp, MeanSquare::new(step).constants(), MeanSquare::new(step).constants())
    }
}

#[derive(Clone, Copy)]
struct MeanSquare<S> {
    gradient: Gradient<S>,
    alpha: S,
    rest: S,
    rate: S,
    epsilon: S,
}

impl<S: Scalar> MeanSquare<S> {
    fn new(step: &Step) -> Self {
        let alpha = written(step.hyper.alpha);
        Self {
            gradient: Gradient::new(step),
            alpha: S::nearest(alpha),
            rest: S::nearest(1.0 - alpha),
            rate: constant(step.hyper.learning_rate),
            epsilon: constant(step.hyper.epsilon),
        }
    }

    fn constants(&self) -> [S; 7] {
        let [scale, decay, limit] = self.gradient.constants();
        [scale, decay, limit, self.alpha, self.rest, self.rate, self.epsilon]
    }
}

impl<S: Scalar> Op for MeanSquare<S> {
    type Scalar = S;
    const SLOTS: usize = 1;

    #[inline(always)]
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, w: L, [square, unused]: [L; 2]) -> (L, [L; 2]) {
        let g = self.gradient.of(g, w);
        let square = L::splat(self.alpha) * square + L::splat(self.rest) * g * g;
        let update = L::splat(self.rate) * g / (square.sqrt() + L::splat(self.epsilon));
        (w - update, [square, unused])
    }
}

#[cfg(test)]
mod tests {
    use libmodelio::bytes::kernels::{Input, Output, Source, Wire};
    use libmodelio::vocabulary::reducer::{Hyper, Reducer};

    use super::super::apply;
    use super::*;

    #[test]
    fn a_constant_gradient_makes_steps_of_its_sign_alone() {
        // The mean of the squares is 1/4 after the first step, and 7/16 after the second.
        let wants = [1.0 - 0.1 * 2.0, 0.8 - 0.1 / 0.4375f64.sqrt()];
        for g in [-1e3, -0.5, 1e-3, 40.0] {
            let hyper = Hyper { learning_rate: 0.1, alpha: 0.75, epsilon: 1e-30, ..Hyper::default() };
            let (mut w, mut square) = (1f64.copysign(g).to_le_bytes(), [0f32; 2]);
            for (t, want) in (1..).zip(wants) {
                let step = Step {
                    reducer: Reducer::RmsProp,
                    hyper: hyper.clone(),
                    contributions: 1,
                    t,
                    ..Step::default()
                };
                let (mut next, mut state) = ([0; 8], [0f32; 2]);
                let input = Input { weights: &w, master: None, slots: [&square, &[]] };
                let output = Output { weights: &mut next, master: None, slots: [&mut state, &mut []] };
                let sources = [Source::Wire(&f64::to_le_bytes(g))];
                assert!(apply(&step, Operands { wire: Wire::F64, sources: &sources, input, output }, true));
                (w, square) = (next, state);
                let got = f64::from_le_bytes(w);
                assert!((got - want.copysign(g)).abs() < 1e-14, "step {t}: got {got:?}, want {want:?}");
            }
        }
    }
}
