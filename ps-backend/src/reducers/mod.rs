//! The arithmetic of the reducers: it turns the contributions to a segment into the next weights, in one pass
//! of [`libmodelio::bytes::kernels`].
//!
//! A reducer is a file here, its line in [`of`], and its entry in the table of [`libmodelio::vocabulary::reducer`], which
//! also has the hyper-parameters and answers what everybody else asks of a reducer.
//! Operation for operation they do what PyTorch's single-tensor implementations do, except that Adam's two bias corrections
//! enter its step size and epsilon.
//!
//! A block is reduced as soon as all of its contributions are there, while others are still on their way: a
//! pass knows no block but its own, and makes nothing but the version. What it must know of all blocks, a plan before it
//! measures. What is made for each learner, its client makes (`libmodelio::contributor`).

mod adagrad;
mod adam;
mod assign;
mod formula;
mod gradient;
mod lion;
mod models;
mod momentum;
mod rmsprop;
mod sgd;
mod sum;

use libmodelio::bytes::kernels::{self, Operands, Wire};
use libmodelio::vocabulary::reducer::{Hyper, Reducer, Step};

pub use formula::{CONSTANTS, Formula, Function};

/// The arithmetic of a reducer, or of some that are much alike.
trait Reduce: Sync {
    /// Compute the output of one segment. Returns whether every element of every source was finite; it need not
    /// look unless it is to `check`.
    fn pass(&self, step: &Step, operands: Operands<'_>, check: bool) -> bool;

    /// The phase before the pass, of a step that [measures](Reducer::measures): what a piece of a tensor adds to the sum
    /// of squares over all blocks. The piece's gradient is the sum of accumulators, before it is scaled.
    fn measure(&self, wire: Wire, sums: &[&[f32]]) -> f64 {
        kernels::squares(wire, sums)
    }

    /// The pass as the kernels of a device compute it, with or without contributions.
    fn formula(&self, step: &Step, has_sums: bool) -> Formula;

    /// Whether weights without contributions keep their values and their state.
    fn is_inert(&self, _: &Hyper) -> bool {
        false
    }
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
        Reducer::Assign => &assign::Assign,
        Reducer::Average | Reducer::Easgd => &models::Average,
        Reducer::Sma => &models::Sma,
        Reducer::Diloco => &models::Diloco,
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

/// Measure a piece of a tensor for a step: its part of the sum of squares over all blocks. No order of work changes it.
///
/// # Panics
/// If lengths disagree, or there are no sums.
pub fn measure(step: &Step, wire: Wire, sums: &[&[f32]]) -> f64 {
    of(step.reducer).measure(wire, sums)
}

/// The formula by which a device computes the next version of elements, which have contributions or have none. Operation
/// for operation it does what [`apply`] does.
pub fn formula(step: &Step, has_sums: bool) -> Formula {
    of(step.reducer).formula(step, has_sums)
}

/// Whether a block without any contribution keeps its value.
pub fn is_inert(step: &Step) -> bool {
    of(step.reducer).is_inert(&step.hyper)
}
