//! What the contributions to a segment become: the next weights, by the arithmetic of the reducer, in one pass of
//! [`libmodelio::bytes::kernels`].

mod ops;

use libmodelio::bytes::kernels::{
    Operands, Source, Total, bytes, bytes_mut, copy_checked, sources_are_finite, stream_copy, widen,
};
use libmodelio::vocabulary::reducer::{Reducer, Step};

/// Compute the next version of a segment: `output = reducer(input, sum of sources)`.
///
/// Sources are summed in fp32 (F64 in f64) in the order given; none at all is a zero gradient, with which optimizers
/// still decay and step. `assign` takes the last source, bytes as they are, and without one keeps the
/// weights.
///
/// Returns whether every element of every source was finite, or true if not asked to `check`. The output
/// is complete either way; a caller who refuses the contributions drops it.
///
/// # Panics
/// If lengths disagree, or parts are there that the reducer or the type does not have, or missing.
pub fn apply(step: &Step, operands: Operands<'_>, check: bool) -> bool {
    operands.assert_complete(step.reducer.state_slots());
    let finite = match step.reducer {
        Reducer::Assign => return assign(operands, check),
        Reducer::Sum if step.hyper.carry == 0.0 && !operands.sources.is_empty() => {
            operands.reduce(Total::new(), Total::new())
        }
        Reducer::Sum => operands.reduce(ops::Sum::new(step), ops::Sum::new(step)),
        Reducer::Sgd => operands.reduce(ops::Sgd::new(step), ops::Sgd::new(step)),
        Reducer::Momentum | Reducer::Nesterov => {
            let nesterov = step.reducer == Reducer::Nesterov;
            if step.t <= 1 {
                let first = ops::Momentum::<_, true>::new(step, nesterov);
                operands.reduce(first, ops::Momentum::<_, true>::new(step, nesterov))
            } else {
                let later = ops::Momentum::<_, false>::new(step, nesterov);
                operands.reduce(later, ops::Momentum::<_, false>::new(step, nesterov))
            }
        }
        Reducer::Adam => operands.reduce(ops::Adam::new(step, false), ops::Adam::new(step, false)),
        Reducer::AdamW => operands.reduce(ops::Adam::new(step, true), ops::Adam::new(step, true)),
    };
    finite || !check
}

fn assign(operands: Operands<'_>, check: bool) -> bool {
    let Operands { wire, sources, input, output } = operands;
    let Some((last, before)) = sources.split_last() else {
        stream_copy(input.weights, output.weights);
        if let (Some(old), Some(new)) = (input.master, output.master) {
            stream_copy(bytes(old), bytes_mut(new));
        }
        return true;
    };
    let finite = !check || sources_are_finite(wire, before);
    match last {
        // Others may be storing into the source: what is judged is read once.
        Source::Wire(src) if check && output.master.is_none() => {
            copy_checked(wire, src, output.weights) && finite
        }
        Source::Wire(src) if !check => {
            stream_copy(src, output.weights);
            if let Some(master) = output.master {
                widen(wire, src, master);
            }
            finite
        }
        _ => {
            let sources = std::slice::from_ref(last);
            let fine = Operands { wire, sources, input, output }.reduce(Total::new(), Total::new());
            (fine || !check) && finite
        }
    }
}
