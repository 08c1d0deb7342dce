//! The gradient an optimizer sees, and its constants.

use libmodelio::bytes::kernels::{Lanes, Scalar};
use libmodelio::vocabulary::reducer::Step;

/// A hyper-parameter as it is computed with.
pub fn constant<S: Scalar>(value: f32) -> S {
    S::nearest(S::meant(value))
}

/// The decimal number behind a decay: 0.999 in fp32 is 0.99900001, and `1 - beta` would be off by 1e-5 of
/// itself against PyTorch, whose decays are doubles.
pub fn written(beta: f32) -> f64 {
    (f64::from(beta) * 1e7).round() / 1e7
}

/// The factor by which the step's gradient is clipped, as torch's `clip_grad_norm_` computes it. Of a norm that is NaN it
/// is NaN.
pub fn clip(step: &Step) -> f64 {
    let Some(norm) = step.norm else { return 1.0 };
    let factor = f64::meant(step.hyper.clip_norm) / (norm.get() + 1e-6);
    if factor > 1.0 { 1.0 } else { factor }
}

/// The largest element of a gradient: Inf if none is too large.
pub fn limit<S: Scalar>(step: &Step) -> S {
    match step.hyper.clip_value {
        0.0 => S::nearest(f64::INFINITY),
        value => constant(value),
    }
}

/// The sum of the contributions, scaled and clipped, plus the L2 penalty.
#[derive(Clone, Copy)]
pub struct Gradient<S> {
    scale: S,
    decay: S,
    limit: S,
}

impl<S: Scalar> Gradient<S> {
    /// With the weight decay of the step as the penalty.
    pub fn new(step: &Step) -> Self {
        Self { decay: constant(step.hyper.weight_decay), ..Self::plain(step) }
    }

    /// Without a penalty.
    pub fn plain(step: &Step) -> Self {
        let scale = S::nearest(step.scale() * clip(step));
        Self { scale, decay: S::nearest(0.0), limit: limit(step) }
    }

    /// Its constants: the scale, the decay and the limit.
    pub fn constants(&self) -> [S; 3] {
        [self.scale, self.decay, self.limit]
    }

    #[inline(always)]
    pub fn of<L: Lanes<Scalar = S>>(self, sum: L, w: L) -> L {
        (sum * L::splat(self.scale)).clamp(self.limit) + L::splat(self.decay) * w
    }
}
