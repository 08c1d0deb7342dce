//! The formulas of all reducers in f64, as PyTorch and the papers have them: what kernels are compared with.

use libmodelio::vocabulary::reducer::{Hyper, Reducer};

/// The settings that formulas read, as a user wrote them.
#[derive(Clone, Debug)]
pub struct Constants {
    /// `learning_rate`
    pub rate: f64,
    /// `momentum`
    pub momentum: f64,
    /// `dampening`
    pub dampening: f64,
    /// `weight_decay`
    pub decay: f64,
    /// `epsilon`
    pub epsilon: f64,
    /// `carry`
    pub carry: f64,
    /// `alpha`
    pub alpha: f64,
    /// `beta1` and `beta2`
    pub betas: [f64; 2],
}

impl Constants {
    /// Those of a step.
    pub fn of(hyper: &Hyper) -> Constants {
        let written = |value: f32| value.to_string().parse::<f64>().unwrap();
        Constants {
            rate: written(hyper.learning_rate),
            momentum: written(hyper.momentum),
            dampening: written(hyper.dampening),
            decay: written(hyper.weight_decay),
            epsilon: written(hyper.epsilon),
            carry: written(hyper.carry),
            alpha: written(hyper.alpha),
            betas: [hyper.beta1, hyper.beta2].map(written),
        }
    }
}

/// What learners bring for one element.
#[derive(Clone, Copy, Debug)]
pub struct Brought {
    /// The sum of all: of models, of what these have changed.
    pub sum: f64,
    /// The mean of the same.
    pub mean: f64,
    /// The gradient of optimizers.
    pub gradient: f64,
    /// What is added to the weight where contributions are summed.
    pub total: f64,
    /// The value that replaces others.
    pub last: Option<f64>,
}

/// The next weight and state of an element whose state has made `t - 1` steps. `factor` is that of layer-wise steps.
pub fn step(
    reducer: Reducer,
    of: &Constants,
    (t, factor): (u64, f64),
    brought: &Brought,
    w: f64,
    [m, v]: [f64; 2],
) -> (f64, [f64; 2]) {
    let Brought { sum, mean, gradient: g, total, last } = *brought;
    let penalised = g + of.decay * w;
    let buffer = |share: f64, new: f64| if t == 1 { new } else { of.momentum * m + share * new };
    match reducer {
        Reducer::Sum => (of.carry * w + total, [m, v]),
        Reducer::Assign => (last.unwrap_or(w), [m, v]),
        Reducer::Average => (w + mean, [m, v]),
        Reducer::Easgd => (w + sum, [m, v]),
        Reducer::Sma => {
            let m = buffer(1.0, sum);
            (w + m, [m, v])
        }
        Reducer::Diloco => {
            let m = buffer(1.0, -mean);
            (w - of.rate * (of.momentum * m - mean), [m, v])
        }
        Reducer::Sgd => (w - of.rate * penalised, [m, v]),
        Reducer::Momentum | Reducer::Nesterov | Reducer::Lars => {
            let g = if reducer == Reducer::Lars { factor * penalised } else { penalised };
            let m = buffer(1.0 - of.dampening, g);
            let way = if reducer == Reducer::Nesterov { g + of.momentum * m } else { m };
            (w - of.rate * way, [m, v])
        }
        Reducer::RmsProp => {
            let m = of.alpha * m + (1.0 - of.alpha) * penalised * penalised;
            (w - of.rate * penalised / (m.sqrt() + of.epsilon), [m, v])
        }
        Reducer::AdaGrad => {
            let m = m + penalised * penalised;
            (w - of.rate * penalised / (m.sqrt() + of.epsilon), [m, v])
        }
        Reducer::Lion => {
            let [b1, b2] = of.betas;
            let update = b1 * m + (1.0 - b1) * g;
            let sign = if update == 0.0 { 0.0 } else { update.signum() };
            (w * (1.0 - of.rate * of.decay) - of.rate * sign, [b2 * m + (1.0 - b2) * g, v])
        }
        Reducer::Adam | Reducer::AdamW | Reducer::Lamb => {
            let rate = if reducer == Reducer::Lamb { factor * of.rate } else { of.rate };
            let (g, kept) = match reducer {
                Reducer::Adam => (penalised, w),
                _ => (g, w * (1.0 - rate * of.decay)),
            };
            let [b1, b2] = of.betas;
            let (m, v) = (b1 * m + (1.0 - b1) * g, b2 * v + (1.0 - b2) * g * g);
            let (c1, c2) = (1.0 - b1.powi(t as i32), 1.0 - b2.powi(t as i32));
            (kept - rate / c1 * m / ((v / c2).sqrt() + of.epsilon), [m, v])
        }
    }
}
