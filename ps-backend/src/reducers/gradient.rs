//! The gradient an optimizer sees, and its constants.

use libmodelio::bytes::kernels::{Lanes, Scalar};
use libmodelio::vocabulary::reducer::Step;

/// A hyper-parameter as it is computed with.
pub(super) fn constant<S: Scalar>(value: f32) -> S {
    S::nearest(S::meant(value))
}

/// The decimal number behind a decay: 0.999 in fp32 is 0.99900001, and `1 - beta` would be off by 1e-5 of
/// itself against PyTorch, whose decays are doubles.
pub(super) fn written(beta: f32) -> f64 {
    (f64::from(beta) * 1e7).round() / 1e7
}

/// The factor by which the step's gradient is clipped, as torch's `clip_grad_norm_` computes it. Of a norm that is NaN
/// it is NaN.
pub(super) fn clip(step: &Step) -> f64 {
    let Some(norm) = step.norm else { return 1.0 };
    let factor = f64::meant(step.hyper.clip_norm) / (norm.get() + 1e-6);
    if factor > 1.0 { 1.0 } else { factor }
}

/// The largest element of a gradient: Inf if none is too large.
pub(super) fn limit<S: Scalar>(step: &Step) -> S {
    match step.hyper.clip_value {
        0.0 => S::nearest(f64::INFINITY),
        value => constant(value),
    }
}

/// The sum of the contributions, scaled and clipped, plus the L2 penalty.
#[derive(Clone, Copy)]
pub(super) struct Gradient<S> {
    scale: S,
    decay: S,
    limit: S,
}

impl<S: Scalar> Gradient<S> {
    /// With the weight decay of the step as the penalty.
    pub(super) fn new(step: &Step) -> Self {
        Self { decay: constant(step.hyper.weight_decay), ..Self::plain(step) }
    }

    /// The same, times a factor.
    pub(super) fn times(step: &Step, factor: f64) -> Self {
        let limit = match step.hyper.clip_value {
            0.0 => f64::INFINITY,
            value => f64::meant(value) * factor,
        };
        Self {
            scale: S::nearest(step.scale() * clip(step) * factor),
            decay: S::nearest(f64::meant(step.hyper.weight_decay) * factor),
            limit: S::nearest(limit),
        }
    }

    /// Without a penalty.
    pub(super) fn plain(step: &Step) -> Self {
        let scale = S::nearest(step.scale() * clip(step));
        Self { scale, decay: S::nearest(0.0), limit: limit(step) }
    }

    /// The sum times this, and nothing else.
    pub(super) fn scaled(scale: f64) -> Self {
        Self { scale: S::nearest(scale), decay: S::nearest(0.0), limit: S::nearest(f64::INFINITY) }
    }

    /// Its constants: the scale, the decay and the limit.
    pub(super) fn constants(&self) -> [S; 3] {
        [self.scale, self.decay, self.limit]
    }

    #[inline(always)]
    pub(super) fn of<L: Lanes<Scalar = S>>(self, sum: L, w: L) -> L {
        (sum * L::splat(self.scale)).clamp(self.limit) + L::splat(self.decay) * w
    }
}

#[cfg(test)]
mod tests {
    use libmodelio::bytes::kernels::{Input, Level, Operands, Output, Source, Wire, with_level};
    use libmodelio::vocabulary::reducer::{Hyper, Reducer};

    use super::super::apply;
    use super::*;

    /// What `sum`, which carries nothing, makes of a gradient in both types, at all levels.
    fn clipped(gradient: &[f64], clip_value: f32) -> Vec<Vec<f64>> {
        let hyper = Hyper { clip_value, carry: 0.0, loss_scale: 0.5, ..Hyper::default() };
        let step = Step { reducer: Reducer::Sum, hyper, contributions: 1, t: 1, ..Step::default() };
        let mut all = Vec::new();
        for (level, wire) in Level::available().flat_map(|level| [(level, Wire::F32), (level, Wire::F64)]) {
            let encode = |value: &f64| match wire {
                Wire::F64 => value.to_le_bytes().to_vec(),
                _ => (*value as f32).to_le_bytes().to_vec(),
            };
            let sent: Vec<u8> = gradient.iter().flat_map(encode).collect();
            let (old, mut new) = (vec![0; sent.len()], vec![0; sent.len()]);
            let input = Input { weights: &old, master: None, slots: [&[], &[]] };
            let output = Output { weights: &mut new, master: None, slots: [&mut [], &mut []] };
            let operands = Operands { wire, sources: &[Source::Wire(&sent)], input, output };
            assert!(with_level(level, || apply(&step, operands, false)).unwrap());
            let decode = |bytes: &[u8]| match bytes.try_into() {
                Ok(double) => f64::from_le_bytes(double),
                Err(_) => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
            };
            all.push(new.chunks(wire.size()).map(decode).collect());
        }
        all
    }

    #[test]
    fn elements_are_clipped_after_they_are_scaled() {
        let gradient: Vec<f64> = (0..40).map(|i| f64::from(i) / 16.0 - 1.25).collect();
        for got in clipped(&gradient, 1.5) {
            let want: Vec<f64> = gradient.iter().map(|value| (2.0 * value).clamp(-1.5, 1.5)).collect();
            assert_eq!(got, want);
        }
        // Without a limit there is none.
        let want: Vec<f64> = gradient.iter().map(|value| 2.0 * value).collect();
        clipped(&gradient, 0.0).into_iter().for_each(|got| assert_eq!(got, want));
    }

    #[test]
    fn nan_and_zeros_stay_and_infinity_is_clipped() {
        let gradient = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0].repeat(5);
        for got in clipped(&gradient, 0.25) {
            for five in got.chunks(5) {
                assert!(five[0].is_nan());
                assert_eq!(five[1..], [0.25, -0.25, 0.0, 0.0]);
            }
        }
        for got in clipped(&gradient, 0.0) {
            assert!(got[0].is_nan());
            assert_eq!(got[1..3], [f64::INFINITY, f64::NEG_INFINITY]);
        }
    }
}
