//! `adam` and `adamw`: steps along the first moment of the gradient, in units of the root of the second.

use libmodelio::bytes::kernels::{Lanes, Op, Operands, Scalar};
use libmodelio::vocabulary::reducer::{Hyper, Step};

use super::gradient::{Gradient, constant, written};
use super::{Formula, Function, Reduce};

pub(super) struct Adam {
    /// Whether weights decay by themselves, and not through the gradient.
    pub decoupled: bool,
}

impl Reduce for Adam {
    fn pass(&self, step: &Step, operands: Operands<'_>, _: bool) -> bool {
        operands.reduce(|| Moments::new(step, self.decoupled), || Moments::new(step, self.decoupled))
    }

    fn formula(&self, step: &Step, _: bool) -> Formula {
        let single = Moments::new(step, self.decoupled).constants();
        Formula::new(Function::Adam, single, Moments::new(step, self.decoupled).constants())
    }
}

#[derive(Clone, Copy)]
pub(super) struct Moments<S> {
    gradient: Gradient<S>,
    /// Factor on the weights: decoupled weight decay.
    keep: S,
    toward: S,
    beta2: S,
    rest2: S,
    rate: S,
    epsilon: S,
}

impl<S: Scalar> Moments<S> {
    fn new(step: &Step, decoupled: bool) -> Self {
        let h = &step.hyper;
        let (rate, weight_decay) = (S::meant(h.learning_rate) * step.factor(), S::meant(h.weight_decay));
        let (beta1, beta2) = (written(h.beta1), written(h.beta2));
        let t = step.t.max(1) as f64;
        let correction1 = 1.0 - beta1.powf(t);
        let correction2 = (1.0 - beta2.powf(t)).sqrt();
        Self {
            gradient: if decoupled { Gradient::plain(step) } else { Gradient::new(step) },
            keep: S::nearest(if decoupled { 1.0 - rate * weight_decay } else { 1.0 }),
            toward: S::nearest(1.0 - beta1),
            beta2: S::nearest(beta2),
            rest2: S::nearest(1.0 - beta2),
            // sqrt(v) / c2 + eps == (sqrt(v) + eps * c2) / c2
            rate: S::nearest(rate * correction2 / correction1),
            epsilon: S::nearest(S::meant(h.epsilon) * correction2),
        }
    }

    /// In place of the next weights: the step with decoupled decay, at learning rate 1.
    pub(super) fn direction(step: &Step) -> Self {
        let hyper = Hyper { learning_rate: -1.0, ..step.hyper.clone() };
        let step = Step { hyper, factor: None, ..step.clone() };
        Self { keep: constant(step.hyper.weight_decay), ..Self::new(&step, true) }
    }

    fn constants(&self) -> [S; 9] {
        let [scale, decay, limit] = self.gradient.constants();
        [scale, decay, limit, self.keep, self.toward, self.beta2, self.rest2, self.rate, self.epsilon]
    }
}

impl<S: Scalar> Op for Moments<S> {
    type Scalar = S;
    const SLOTS: usize = 2;

    #[inline(always)]
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, w: L, [m, v]: [L; 2]) -> (L, [L; 2]) {
        let g = self.gradient.of(g, w);
        let m = m + (g - m) * L::splat(self.toward);
        let v = L::splat(self.beta2) * v + L::splat(self.rest2) * g * g;
        let update = L::splat(self.rate) * m / (v.sqrt() + L::splat(self.epsilon));
        (L::splat(self.keep) * w - update, [m, v])
    }
}
