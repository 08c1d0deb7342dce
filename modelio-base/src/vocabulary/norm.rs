//! The norms of a step's gradient and of single tensors, and the sums of squares that they are the roots of. Shards add
//! up the squares of their blocks, and the coordinator adds up the shards' sums. No addition rounds, so the norm
//! depends neither on the order of blocks nor on the shards that have them.

use serde::{Deserialize, Serialize};

/// A norm. Two are equal if their bits are, so that a plan whose norm is NaN equals its repetition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Norm(u64);

impl Norm {
    /// The norm of this value.
    pub fn new(value: f64) -> Norm {
        Norm(value.to_bits())
    }

    /// The norm as a number.
    pub fn get(self) -> f64 {
        f64::from_bits(self.0)
    }
}

/// A sum of numbers that are not negative, without any rounding.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExactSum {
    /// The finite numbers, in units of the smallest f64 above zero. The last word is not zero.
    words: Vec<u64>,
    /// The sum of the others: Inf, NaN, or zero if there are none.
    others: f64,
}

/// The words that the largest f64 takes; one more holds the carries of as many additions as there may be.
const WORDS: usize = 34;
const FRACTION: u32 = f64::MANTISSA_DIGITS - 1;
/// The exponent of the smallest f64 above zero.
const SMALLEST: i32 = f64::MIN_EXP - f64::MANTISSA_DIGITS as i32;

impl ExactSum {
    /// Adds a number.
    pub fn add(&mut self, value: f64) {
        if !value.is_finite() {
            self.others += value;
            return;
        }
        // A zero may have a sign.
        let bits = value.abs().to_bits();
        let (exponent, fraction) = (bits >> FRACTION, bits & ((1 << FRACTION) - 1));
        let (digits, shift) = match exponent {
            0 => (fraction, 0),
            _ => (fraction | 1 << FRACTION, exponent as usize - 1),
        };
        let digits = u128::from(digits) << (shift % 64);
        self.add_word(shift / 64, digits as u64);
        self.add_word(shift / 64 + 1, (digits >> 64) as u64);
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &ExactSum) {
        self.others += other.others;
        other.words.iter().take(WORDS).enumerate().for_each(|(at, &word)| self.add_word(at, word));
    }

    fn add_word(&mut self, mut at: usize, mut word: u64) {
        while word != 0 {
            self.words.resize(self.words.len().max(at + 1), 0);
            let (sum, carries) = self.words[at].overflowing_add(word);
            self.words[at] = sum;
            (at, word) = (at + 1, carries.into());
        }
    }

    /// The sum as f64, or Inf if it is beyond that type.
    pub fn value(&self) -> f64 {
        // Words that are too low to matter vanish on the way up.
        let value = self.words.iter().fold(0.0, |low, &word| low / 2f64.powi(64) + word as f64);
        let exponent = 64 * (self.words.len() as i32 - 1) + SMALLEST;
        // No power of two is beyond f64 in halves.
        self.others + value * 2f64.powi(exponent / 2) * 2f64.powi(exponent - exponent / 2)
    }
}

/// The most tensors whose norms are measured: a shard tells those of all in one message, whatever they are.
pub const MOST_MEASURED: usize = 1400;

/// The squares of a tensor's elements: how large its weights are, and how large the direction is in which the reducer
/// would change them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TensorSquares {
    /// Of the newest version's weights.
    pub weights: ExactSum,
    /// Of the direction.
    pub direction: ExactSum,
}

impl TensorSquares {
    /// The norms of both.
    pub fn norms(&self) -> TensorNorms {
        let [weights, direction] = [&self.weights, &self.direction].map(|sum| sum.value().sqrt());
        TensorNorms { weights, direction }
    }

    /// Adds others of the same tensor.
    pub fn merge(&mut self, other: &TensorSquares) {
        self.weights.merge(&other.weights);
        self.direction.merge(&other.direction);
    }
}

/// The norms of one tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TensorNorms {
    /// Of the newest version's weights.
    pub weights: f64,
    /// Of the direction in which the reducer would change them.
    pub direction: f64,
}

/// What a step must know before it can change a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Quantity {
    /// The norm of the whole gradient.
    Gradient,
    /// The norms of each tensor whose reducer is layer-wise.
    Tensors,
}

/// The sums of squares for a [`Quantity`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Squares {
    /// Of the whole gradient.
    Gradient(ExactSum),
    /// Of each tensor of the model, in order. Those that are not measured have zeros.
    Tensors(Vec<TensorSquares>),
}

impl Squares {
    /// Nothing is measured yet, of a model with so many tensors.
    pub fn new(quantity: Quantity, tensors: usize) -> Squares {
        match quantity {
            Quantity::Gradient => Squares::Gradient(ExactSum::default()),
            Quantity::Tensors => Squares::Tensors(vec![TensorSquares::default(); tensors]),
        }
    }

    /// Adds those of other blocks. False, and nothing changes, if they are of something else.
    pub fn merge(&mut self, other: &Squares) -> bool {
        match (self, other) {
            (Squares::Gradient(sum), Squares::Gradient(other)) => sum.merge(other),
            (Squares::Tensors(all), Squares::Tensors(others)) if all.len() == others.len() => {
                all.iter_mut().zip(others).for_each(|(sum, other)| sum.merge(other));
            }
            _ => return false,
        }
        true
    }
}

/// A factor of each tensor, by runs of tensors with the same one: on its step, or on the sum of its values. There are
/// no runs if no tensor has a factor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorFactors(Vec<(u32, Option<Norm>)>);

impl TensorFactors {
    /// The factors of tensors, in order.
    pub fn new(of_tensors: impl IntoIterator<Item = Option<f64>>) -> TensorFactors {
        let mut runs: Vec<(u32, Option<Norm>)> = Vec::new();
        for factor in of_tensors {
            let factor = factor.map(Norm::new);
            match runs.last_mut() {
                Some((count, same)) if *same == factor => *count += 1,
                _ => runs.push((1, factor)),
            }
        }
        if runs.iter().all(|(_, factor)| factor.is_none()) {
            runs.clear();
        }
        TensorFactors(runs)
    }

    /// The number of tensors.
    pub fn tensors(&self) -> u64 {
        self.0.iter().map(|&(count, _)| u64::from(count)).sum()
    }

    /// The factor of one tensor.
    pub fn of(&self, tensor: usize) -> Option<f64> {
        let mut end = 0;
        let run = self.0.iter().find(|(count, _)| {
            end += *count as usize;
            tensor < end
        });
        run.and_then(|&(_, factor)| factor).map(Norm::get)
    }

    /// How many tensors in a row have which factor.
    pub fn runs(&self) -> &[(u32, Option<Norm>)] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sum(values: &[f64]) -> ExactSum {
        values.iter().fold(ExactSum::default(), |mut sum, &value| {
            sum.add(value);
            sum
        })
    }

    #[test]
    fn the_squares_of_tensors_are_added_up_tensor_by_tensor() {
        let of = |weights: f64, direction: f64| TensorSquares {
            weights: sum(&[weights]),
            direction: sum(&[direction]),
        };
        let mut all = Squares::new(Quantity::Tensors, 2);
        assert!(all.merge(&Squares::Tensors(vec![of(9.0, 1.0), of(0.0, 5.0)])));
        assert!(all.merge(&Squares::Tensors(vec![of(7.0, 3.0), of(0.0, 4.0)])));
        let norms =
            [TensorNorms { weights: 4.0, direction: 2.0 }, TensorNorms { weights: 0.0, direction: 3.0 }];
        let Squares::Tensors(sums) = &all else { panic!() };
        assert_eq!(sums.iter().map(TensorSquares::norms).collect::<Vec<_>>(), norms);
        let before = all.clone();
        assert!(
            !all.merge(&Squares::Gradient(sum(&[1.0]))) && !all.merge(&Squares::new(Quantity::Tensors, 3))
        );
        assert_eq!(all, before);
    }

    #[test]
    fn tensors_with_the_same_factor_are_one_run() {
        let factors = TensorFactors::new([None, Some(0.5), Some(0.5), Some(f64::NAN), None]);
        let counts: Vec<u32> = factors.runs().iter().map(|(count, _)| *count).collect();
        assert_eq!(counts, [1, 2, 1, 1]);
        assert_eq!(TensorFactors::new([None; 4]), TensorFactors::default());
    }

    #[test]
    fn nothing_is_lost_between_numbers_of_any_size() {
        assert_eq!(sum(&[]).value(), 0.0);
        assert_eq!(sum(&[0.0, -0.0]), ExactSum::default());
        for value in [1.0, 0.1, 5e-324, f64::MIN_POSITIVE, f64::MAX, 1e-300, 3.0f64.sqrt()] {
            assert_eq!(sum(&[value]).value(), value);
            assert_eq!(sum(&[value / 2.0, value / 2.0]).value(), value / 2.0 + value / 2.0);
        }
        // In f64 each of these is lost next to the one before.
        let small = sum(&[1e300, 1.0, 1e-300, 5e-324]);
        let mut larger = small.clone();
        larger.add(5e-324);
        assert_ne!(small, larger);
        let ones = sum(&[vec![1e16], vec![1.0; 4]].concat());
        assert_eq!(ones.value(), 1e16 + 4.0);
    }

    #[test]
    fn what_is_beyond_f64_is_infinite() {
        assert_eq!(sum(&[f64::MAX, f64::MAX]).value(), f64::INFINITY);
        assert_eq!(sum(&[1.0, f64::INFINITY]).value(), f64::INFINITY);
        assert!(sum(&[1.0, f64::NAN, f64::INFINITY]).value().is_nan());
        let nan = Norm::new(f64::NAN);
        assert_eq!(nan, nan);
        assert!(nan.get().is_nan());
    }

    proptest! {
        #[test]
        fn the_sum_is_the_same_in_any_order_and_grouping(
            values in proptest::collection::vec((0u64..0x7FF0_0000_0000_0000).prop_map(f64::from_bits), 0..40),
            groups in proptest::collection::vec(0usize..3, 40),
        ) {
            let whole = sum(&values);
            let mut reversed = values.clone();
            reversed.reverse();
            prop_assert_eq!(&sum(&reversed), &whole);
            let mut parts = [ExactSum::default(), ExactSum::default(), ExactSum::default()];
            values.iter().zip(groups).for_each(|(&value, group)| parts[group].add(value));
            let mut merged = ExactSum::default();
            parts.iter().rev().for_each(|part| merged.merge(part));
            prop_assert_eq!(merged.value().to_bits(), whole.value().to_bits());
            prop_assert_eq!(merged, whole);
        }

        #[test]
        fn the_value_is_near_the_plain_sum(values in proptest::collection::vec(0.0f64..1e9, 1..100)) {
            let plain: f64 = values.iter().sum();
            prop_assert!((sum(&values).value() - plain).abs() <= plain * 1e-13);
        }
    }
}
