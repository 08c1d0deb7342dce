//! The norms of tensors that layer-wise reducers measure, and the factors on steps that come of them.

use libmodelio::bytes::kernels::{self, Input, Operands, Output, Source, Wire};
use libmodelio::vocabulary::norm::{TensorNorms, TensorSquares};
use libmodelio::vocabulary::reducer::{Reducer, Step};
use smallvec::SmallVec;

use super::{Layerwise, layerwise};

/// Elements that are measured at once. All that is computed of them stays in the nearest cache.
const PIECE: usize = 512;
/// Values of 32 bits that a piece has.
const WORDS: usize = 2 * PIECE;

/// Adds a piece of a tensor to its squares: those of its weights, and of the direction in which the step would change
/// them. The gradient is the sum of accumulators, or zero if there are none. `weights` are bytes with their type: that of
/// the tensor, or fp32 if they are masters. `slots` are the bytes of the state before the step, and empty if it is zero.
/// The outcome depends on the number of elements, and not on the order of work.
///
/// # Panics
/// If lengths disagree, or the reducer is not layer-wise.
pub fn measure_tensor(
    step: &Step,
    wire: Wire,
    sums: &[&[f32]],
    (from, weights): (Wire, &[u8]),
    slots: [&[u8]; 2],
    squares: &mut TensorSquares,
) {
    let reducer = layerwise(step.reducer).expect("a layer-wise reducer is measured");
    let (wide, words) = (wire.wide(), wire.words());
    let (mut old, mut new) = ([0.0; WORDS], [0.0; WORDS]);
    let (mut old_slots, mut new_slots) = ([[0.0; WORDS]; 2], [[0.0; WORDS]; 2]);
    for (piece, weights) in weights.chunks(PIECE * from.size()).enumerate() {
        let length = weights.len() / from.size() * words;
        let at = piece * PIECE * words;
        let old = &mut old[..length];
        // Doubles keep their bytes, and all others become fp32.
        kernels::widen(from, weights, old);
        squares.weights.add(kernels::squares(wide, &[&*old]));
        for (slot, old) in slots.iter().zip(&mut old_slots).filter(|(slot, _)| !slot.is_empty()) {
            kernels::bytes_mut(&mut old[..length]).copy_from_slice(&slot[4 * at..4 * (at + length)]);
        }
        let used = |slot: usize| if slot < reducer.slots() { length } else { 0 };
        let [first, second] = new_slots.each_mut();
        let sources: SmallVec<[Source<'_>; 2]> =
            sums.iter().map(|sum| Source::Acc(&sum[at..at + length])).collect();
        let input = Input {
            weights: kernels::bytes(old),
            master: None,
            slots: [&old_slots[0][..used(0)], &old_slots[1][..used(1)]],
        };
        let output = Output {
            weights: kernels::bytes_mut(&mut new[..length]),
            master: None,
            slots: [&mut first[..used(0)], &mut second[..used(1)]],
        };
        reducer.direction(step, Operands { wire: wide, sources: &sources, input, output });
        squares.direction.add(kernels::squares(wide, &[&new[..length]]));
    }
}

/// The values of state for each element that [`measure_tensor`] reads. None if the reducer is not layer-wise.
pub fn measured_slots(reducer: Reducer) -> Option<usize> {
    layerwise(reducer).map(Layerwise::slots)
}

/// The factor on the step of a tensor, of a layer-wise reducer. Tensors whose weights or whose direction are zero have
/// 1. Of a norm that is NaN it is NaN.
pub fn factor(step: &Step, norms: TensorNorms) -> f64 {
    match layerwise(step.reducer) {
        Some(reducer) if norms.weights != 0.0 && norms.direction != 0.0 => reducer.factor(step, norms),
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reducers_that_are_layerwise_can_be_measured() {
        assert!(Reducer::all().all(|reducer| reducer.is_layerwise() == measured_slots(reducer).is_some()));
    }

    #[test]
    fn a_tensor_of_zeros_has_the_factor_one_and_nan_stays() {
        for reducer in [Reducer::Lars, Reducer::Lamb] {
            let step = Step { reducer, ..Step::default() };
            let of = |weights, direction| factor(&step, TensorNorms { weights, direction });
            assert_eq!([of(0.0, 3.0), of(3.0, 0.0), of(0.0, 0.0)], [1.0; 3]);
            assert!(of(f64::NAN, 1.0).is_nan() && of(1.0, f64::NAN).is_nan());
        }
    }
}
