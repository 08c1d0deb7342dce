//! The arithmetic of the reducers: it turns the contributions to a segment into the next weights, in one pass
//! of [`libmodelio::bytes::kernels`].
//!
//! A reducer is a file here, its line in [`of`], and its entry in the table of [`libmodelio::vocabulary::reducer`],
//! which also has the hyper-parameters and answers what everybody else asks of a reducer. Operation for operation they
//! do what PyTorch's single-tensor implementations do, except that Adam's two bias corrections enter its step size and
//! epsilon.
//!
//! A block is reduced as soon as all of its contributions are there, while others are still on their way: a
//! pass knows no block but its own, and makes nothing but the version. What it must know of all blocks, or of all of a
//! tensor, a plan before it measures. What is made for each learner, its client makes (`libmodelio::contributor`).

mod adagrad;
mod adam;
mod assign;
mod formula;
mod gradient;
mod lamb;
mod lars;
mod layerwise;
mod lion;
mod models;
mod momentum;
mod rmsprop;
mod sgd;
mod sum;

use libmodelio::bytes::kernels::Operands;
use libmodelio::vocabulary::norm::TensorNorms;
use libmodelio::vocabulary::reducer::{Hyper, Reducer, Step};

pub use formula::{CONSTANTS, Formula, Function};
pub use layerwise::{factor, measure_tensor, measured_slots};

/// The arithmetic of a reducer, or of some that are much alike.
trait Reduce: Sync {
    /// Compute the output of one segment. Returns whether every element of every source was finite; it need not
    /// look unless it is to `check`.
    fn pass(&self, step: &Step, operands: Operands<'_>, check: bool) -> bool;

    /// The pass as the kernels of a device compute it, with or without contributions.
    fn formula(&self, step: &Step, has_sums: bool) -> Formula;

    /// Whether weights without contributions keep their values and their state.
    fn is_inert(&self, _: &Hyper) -> bool {
        false
    }
}

/// What a layer-wise reducer makes of the norms of a tensor.
trait Layerwise: Sync {
    /// The values of state for each element that the direction depends on.
    fn slots(&self) -> usize;

    /// Computes the direction in which the step would change the weights, in place of the weights. The step has no
    /// factor. The state that comes with it does not count.
    fn direction(&self, step: &Step, operands: Operands<'_>);

    /// The factor on the step of a tensor with these norms, neither of them zero.
    fn factor(&self, step: &Step, norms: TensorNorms) -> f64;
}

/// Every reducer's arithmetic.
fn of(reducer: Reducer) -> &'static dyn Reduce {
    match reducer {
        Reducer::Sum => &sum::Sum,
        Reducer::Sgd => &sgd::Sgd,
        Reducer::Momentum => &momentum::Momentum { nesterov: false },
        Reducer::Nesterov => &momentum::Momentum { nesterov: true },
        Reducer::Adam => &adam::Adam { decoupled: false },
        Reducer::AdamW => &adam::Adam { decoupled: true },
        Reducer::RmsProp => &rmsprop::RmsProp,
        Reducer::AdaGrad => &adagrad::AdaGrad,
        Reducer::Lion => &lion::Lion,
        Reducer::Lars => &lars::Lars,
        Reducer::Lamb => &lamb::Lamb,
        Reducer::Assign => &assign::Assign,
        Reducer::Average | Reducer::Easgd => &models::Average,
        Reducer::Sma => &models::Sma,
        Reducer::Diloco => &models::Diloco,
    }
}

/// The part of a reducer that is layer-wise, if it is.
fn layerwise(reducer: Reducer) -> Option<&'static dyn Layerwise> {
    match reducer {
        Reducer::Lars => Some(&lars::Lars),
        Reducer::Lamb => Some(&lamb::Lamb),
        _ => None,
    }
}

/// Compute the next version of a segment: `output = reducer(input, sum of sources)`.
///
/// Sources are summed in fp32 (F64 in f64) in the order given; none at all is a zero gradient, with which optimizers
/// still decay and step. A reducer that [replaces](libmodelio::vocabulary::reducer::Combine::replaces) takes the last
/// source, bytes as they are, and without one keeps the weights.
///
/// Returns whether every element of every source was finite, or true if not asked to `check`. The output
/// is complete either way; a caller who refuses the contributions drops it.
///
/// # Panics
/// If lengths disagree, or parts are there that the reducer or the type does not have, or missing.
pub fn apply(step: &Step, operands: Operands<'_>, check: bool) -> bool {
    operands.assert_complete(step.reducer.state_slots());
    of(step.reducer).pass(step, operands, check) || !check
}

/// The formula by which a device computes the next version of elements, which have contributions or have none.
/// Operation for operation it does what [`apply`] does.
pub fn formula(step: &Step, has_sums: bool) -> Formula {
    of(step.reducer).formula(step, has_sums)
}

/// Whether a block without any contribution keeps its value.
pub fn is_inert(step: &Step) -> bool {
    of(step.reducer).is_inert(&step.hyper)
}
