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

/// The sum of the contributions, scaled, plus the L2 penalty.
#[derive(Clone, Copy)]
pub struct Gradient<S> {
    scale: S,
    decay: S,
}

impl<S: Scalar> Gradient<S> {
    /// With the weight decay of the step as the penalty.
    pub fn new(step: &Step) -> Self {
        Self { decay: constant(step.hyper.weight_decay), ..Self::plain(step) }
    }

    /// Without a penalty.
    pub fn plain(step: &Step) -> Self {
        Self { scale: S::nearest(step.scale() * clip(step)), decay: S::nearest(0.0) }
    }

    /// Its constants: the scale and the decay.
    pub fn constants(&self) -> [S; 2] {
        [self.scale, self.decay]
    }

    #[inline(always)]
    pub fn of<L: Lanes<Scalar = S>>(self, sum: L, w: L) -> L {
        sum * L::splat(self.scale) + L::splat(self.decay) * w
    }
}
