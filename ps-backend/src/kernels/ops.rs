//! The arithmetic of each reducer on one line: gradient, weights and state in, weights and state out.
//!
//! Operation for operation what PyTorch's single-tensor implementations do, except that Adam's two bias
//! corrections are folded into its step size and epsilon.

use super::line::Line;
use crate::reducer::{Aggregation, Step};

/// How one line becomes the next.
pub trait Op: Copy {
    /// Whether the old weights are looked at.
    const READS_WEIGHTS: bool = true;
    /// Whether the old state is looked at.
    const READS_SLOTS: bool = true;
    /// fp32 values of state for each weight.
    const SLOTS: usize = 0;

    /// `g` is the sum of the sources; what is not read comes as zero.
    fn step<L: Line>(&self, g: L, w: L, slots: [L; 2]) -> (L, [L; 2]);
}

/// What the optimizers multiply the sum of contributions with.
fn scale(step: &Step) -> f32 {
    match step.hyper.aggregation {
        Aggregation::Mean => 1.0 / step.contributions.max(1) as f32,
        Aggregation::Sum => 1.0,
    }
}

/// The gradient an optimizer sees: scaled, plus the L2 penalty.
#[derive(Clone, Copy)]
struct Gradient {
    scale: f32,
    decay: f32,
}

impl Gradient {
    #[inline(always)]
    fn of<L: Line>(self, sum: L, w: L) -> L {
        sum * L::splat(self.scale) + L::splat(self.decay) * w
    }
}

/// The sum itself: `sum` without carry, and assignments from an accumulator.
#[derive(Clone, Copy)]
pub struct Replace;

impl Op for Replace {
    const READS_WEIGHTS: bool = false;

    #[inline(always)]
    fn step<L: Line>(&self, g: L, _: L, slots: [L; 2]) -> (L, [L; 2]) {
        (g, slots)
    }
}

/// `sum`.
#[derive(Clone, Copy)]
pub struct Sum {
    pub carry: f32,
}

impl Op for Sum {
    #[inline(always)]
    fn step<L: Line>(&self, g: L, w: L, slots: [L; 2]) -> (L, [L; 2]) {
        (L::splat(self.carry) * w + g, slots)
    }
}

/// `sgd`.
#[derive(Clone, Copy)]
pub struct Sgd {
    gradient: Gradient,
    rate: f32,
}

impl Sgd {
    pub fn new(step: &Step) -> Self {
        let gradient = Gradient { scale: scale(step), decay: step.hyper.weight_decay };
        Self { gradient, rate: step.hyper.learning_rate }
    }
}

impl Op for Sgd {
    #[inline(always)]
    fn step<L: Line>(&self, g: L, w: L, slots: [L; 2]) -> (L, [L; 2]) {
        (w - L::splat(self.rate) * self.gradient.of(g, w), slots)
    }
}

/// `momentum` and `nesterov`; the `FIRST` step fills the buffer.
#[derive(Clone, Copy)]
pub struct Momentum<const FIRST: bool> {
    sgd: Sgd,
    momentum: f32,
    undamped: f32,
    nesterov: bool,
}

impl<const FIRST: bool> Momentum<FIRST> {
    pub fn new(step: &Step, nesterov: bool) -> Self {
        let (momentum, undamped) = (step.hyper.momentum, 1.0 - step.hyper.dampening);
        Self { sgd: Sgd::new(step), momentum, undamped, nesterov }
    }
}

impl<const FIRST: bool> Op for Momentum<FIRST> {
    const READS_SLOTS: bool = !FIRST;
    const SLOTS: usize = 1;

    #[inline(always)]
    fn step<L: Line>(&self, g: L, w: L, [buffer, unused]: [L; 2]) -> (L, [L; 2]) {
        let g = self.sgd.gradient.of(g, w);
        let momentum = L::splat(self.momentum);
        let buffer = if FIRST { g } else { momentum * buffer + L::splat(self.undamped) * g };
        let direction = if self.nesterov { g + momentum * buffer } else { buffer };
        (w - L::splat(self.sgd.rate) * direction, [buffer, unused])
    }
}

/// `adam` and `adamw`.
#[derive(Clone, Copy)]
pub struct Adam {
    gradient: Gradient,
    /// Factor on the weights: decoupled weight decay.
    keep: f32,
    toward: f32,
    beta2: f32,
    rest2: f32,
    rate: f32,
    epsilon: f32,
}

impl Adam {
    pub fn new(step: &Step, decoupled: bool) -> Self {
        let h = &step.hyper;
        let (rate, weight_decay) = (f64::from(h.learning_rate), f64::from(h.weight_decay));
        let (beta1, beta2) = (written(h.beta1), written(h.beta2));
        let t = step.t.max(1) as f64;
        let correction1 = 1.0 - beta1.powf(t);
        let correction2 = (1.0 - beta2.powf(t)).sqrt();
        Self {
            gradient: Gradient { scale: scale(step), decay: if decoupled { 0.0 } else { h.weight_decay } },
            keep: if decoupled { (1.0 - rate * weight_decay) as f32 } else { 1.0 },
            toward: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            rest2: (1.0 - beta2) as f32,
            // sqrt(v) / c2 + eps == (sqrt(v) + eps * c2) / c2
            rate: (rate * correction2 / correction1) as f32,
            epsilon: (f64::from(h.epsilon) * correction2) as f32,
        }
    }
}

/// The decimal number behind a decay: 0.999 in fp32 is 0.99900001, and `1 - beta` would be off by 1e-5 of
/// itself against PyTorch, whose decays are doubles.
fn written(beta: f32) -> f64 {
    (f64::from(beta) * 1e7).round() / 1e7
}

impl Op for Adam {
    const SLOTS: usize = 2;

    #[inline(always)]
    fn step<L: Line>(&self, g: L, w: L, [m, v]: [L; 2]) -> (L, [L; 2]) {
        let g = self.gradient.of(g, w);
        let m = m + (g - m) * L::splat(self.toward);
        let v = L::splat(self.beta2) * v + L::splat(self.rest2) * g * g;
        let update = L::splat(self.rate) * m / (v.sqrt() + L::splat(self.epsilon));
        (L::splat(self.keep) * w - update, [m, v])
    }
}
