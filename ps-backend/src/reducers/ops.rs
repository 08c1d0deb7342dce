//! The arithmetic of each reducer on one line: gradient, weights and state in, weights and state out.
//!
//! Operation for operation what PyTorch's single-tensor implementations do, except that Adam's two bias
//! corrections are folded into its step size and epsilon.

use libmodelio::vocabulary::reducer::{Aggregation, Step};

use libmodelio::bytes::kernels::{Lanes, Op, Scalar};

/// What the optimizers multiply the sum of contributions with.
fn scale<S: Scalar>(step: &Step) -> S {
    S::nearest(match step.hyper.aggregation {
        Aggregation::Mean => 1.0 / f64::from(step.contributions.max(1)),
        Aggregation::Sum => 1.0,
    })
}

/// A hyper-parameter as it is computed with.
fn constant<S: Scalar>(value: f32) -> S {
    S::nearest(S::meant(value))
}

/// The gradient an optimizer sees: scaled, plus the L2 penalty.
#[derive(Clone, Copy)]
struct Gradient<S> {
    scale: S,
    decay: S,
}

impl<S: Scalar> Gradient<S> {
    #[inline(always)]
    fn of<L: Lanes<Scalar = S>>(self, sum: L, w: L) -> L {
        sum * L::splat(self.scale) + L::splat(self.decay) * w
    }
}

/// `sum`.
#[derive(Clone, Copy)]
pub struct Sum<S> {
    carry: S,
}

impl<S: Scalar> Sum<S> {
    pub fn new(step: &Step) -> Self {
        Self { carry: constant(step.hyper.carry) }
    }
}

impl<S: Scalar> Op for Sum<S> {
    type Scalar = S;

    #[inline(always)]
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, w: L, slots: [L; 2]) -> (L, [L; 2]) {
        (L::splat(self.carry) * w + g, slots)
    }
}

/// `sgd`.
#[derive(Clone, Copy)]
pub struct Sgd<S> {
    gradient: Gradient<S>,
    rate: S,
}

impl<S: Scalar> Sgd<S> {
    pub fn new(step: &Step) -> Self {
        let gradient = Gradient { scale: scale(step), decay: constant(step.hyper.weight_decay) };
        Self { gradient, rate: constant(step.hyper.learning_rate) }
    }
}

impl<S: Scalar> Op for Sgd<S> {
    type Scalar = S;

    #[inline(always)]
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, w: L, slots: [L; 2]) -> (L, [L; 2]) {
        (w - L::splat(self.rate) * self.gradient.of(g, w), slots)
    }
}

/// `momentum` and `nesterov`; the `FIRST` step fills the buffer.
#[derive(Clone, Copy)]
pub struct Momentum<S, const FIRST: bool> {
    sgd: Sgd<S>,
    momentum: S,
    undamped: S,
    nesterov: bool,
}

impl<S: Scalar, const FIRST: bool> Momentum<S, FIRST> {
    pub fn new(step: &Step, nesterov: bool) -> Self {
        let momentum = constant(step.hyper.momentum);
        let undamped = S::nearest(1.0 - S::meant(step.hyper.dampening));
        Self { sgd: Sgd::new(step), momentum, undamped, nesterov }
    }
}

impl<S: Scalar, const FIRST: bool> Op for Momentum<S, FIRST> {
    type Scalar = S;
    const READS_SLOTS: bool = !FIRST;
    const SLOTS: usize = 1;

    #[inline(always)]
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, w: L, [buffer, unused]: [L; 2]) -> (L, [L; 2]) {
        let g = self.sgd.gradient.of(g, w);
        let momentum = L::splat(self.momentum);
        let buffer = if FIRST { g } else { momentum * buffer + L::splat(self.undamped) * g };
        let direction = if self.nesterov { g + momentum * buffer } else { buffer };
        (w - L::splat(self.sgd.rate) * direction, [buffer, unused])
    }
}

/// `adam` and `adamw`.
#[derive(Clone, Copy)]
pub struct Adam<S> {
    gradient: Gradient<S>,
    /// Factor on the weights: decoupled weight decay.
    keep: S,
    toward: S,
    beta2: S,
    rest2: S,
    rate: S,
    epsilon: S,
}

impl<S: Scalar> Adam<S> {
    pub fn new(step: &Step, decoupled: bool) -> Self {
        let h = &step.hyper;
        let (rate, weight_decay) = (S::meant(h.learning_rate), S::meant(h.weight_decay));
        let (beta1, beta2) = (written(h.beta1), written(h.beta2));
        let t = step.t.max(1) as f64;
        let correction1 = 1.0 - beta1.powf(t);
        let correction2 = (1.0 - beta2.powf(t)).sqrt();
        Self {
            gradient: Gradient {
                scale: scale(step),
                decay: S::nearest(if decoupled { 0.0 } else { weight_decay }),
            },
            keep: S::nearest(if decoupled { 1.0 - rate * weight_decay } else { 1.0 }),
            toward: S::nearest(1.0 - beta1),
            beta2: S::nearest(beta2),
            rest2: S::nearest(1.0 - beta2),
            // sqrt(v) / c2 + eps == (sqrt(v) + eps * c2) / c2
            rate: S::nearest(rate * correction2 / correction1),
            epsilon: S::nearest(S::meant(h.epsilon) * correction2),
        }
    }
}

/// The decimal number behind a decay: 0.999 in fp32 is 0.99900001, and `1 - beta` would be off by 1e-5 of
/// itself against PyTorch, whose decays are doubles.
fn written(beta: f32) -> f64 {
    (f64::from(beta) * 1e7).round() / 1e7
}

impl<S: Scalar> Op for Adam<S> {
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
