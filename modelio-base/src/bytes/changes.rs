//! What changes in a block from one version to another, and patches that bring a copy of the block up to date.
//!
//! A block is compared by *units*: the bytes of its narrowest element. What has changed is kept as positions without
//! values, in the form that makes the shortest patch: gaps between units, a bit a unit, a bit a line of 64 bytes, or
//! nothing but that all may have changed. Pure.

use std::cell::RefCell;

use crate::bytes::kernels;

mod positions;
mod union;

use positions::{Positions, shift_of};
pub use union::Union;

/// What has changed in a block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Changed {
    /// Nothing.
    #[default]
    Nothing,
    /// Some units.
    Some(Units),
    /// All of it, as far as is known.
    Whole,
}

/// Units of a block that have changed. The others have not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Units(Positions);

/// The patch cannot be applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatchError {
    /// It ends too early, or goes on after its end.
    #[error("the patch is not as long as it says")]
    Length,
    /// It is in no form that is known.
    #[error("the patch has an unknown form")]
    Form,
    /// It changes what the block does not have.
    #[error("the patch goes beyond the block")]
    Beyond,
}

/// The bytes before the positions: the unit's size and the form, the number of units, the bytes of the positions.
const HEAD: usize = 12;

/// Compared before the rest: so many pieces, of so many bytes each.
const SAMPLES: usize = 4;
const SAMPLED: usize = 1 << 10;

thread_local! {
    /// A bit for each line that differs, and for each unit.
    static BITS: RefCell<(Vec<u64>, Vec<u64>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

impl Changed {
    /// The length of a patch that changes nothing.
    pub const NOTHING_BYTES: usize = HEAD;

    /// Compares two versions of a block, whose elements have `unit` bytes or more. A block of which nearly all of a
    /// sample has changed counts as changed on the whole.
    ///
    /// # Panics
    /// If the lengths disagree, or `unit` is no power of two up to 8.
    pub fn between(old: &[u8], new: &[u8], unit: usize) -> Changed {
        assert_eq!(old.len(), new.len(), "versions of a block");
        let (len, shift) = (new.len(), shift_of(unit));
        // A last element may be cut where a block ends.
        let shift = if len.is_multiple_of(unit) { shift } else { 0 };
        if is_dense(old, new, shift) {
            return Changed::Whole;
        }
        BITS.with_borrow_mut(|(lines, units)| {
            lines.resize(len.div_ceil(LINE).div_ceil(64), 0);
            kernels::differing_lines(old, new, lines);
            if lines.iter().all(|word| *word == 0) {
                return Changed::Nothing;
            }
            units.clear();
            units.resize((len >> shift).div_ceil(64), 0);
            for (word, &lines) in lines.iter().enumerate() {
                each_bit(lines, |bit| {
                    let at = (word * 64 + bit) * LINE;
                    let end = len.min(at + LINE);
                    differing_units(&old[at..end], &new[at..end], shift, at >> shift, units);
                });
            }
            least(units, shift, len)
        })
    }

    /// The memory that it takes besides its own, in bytes.
    pub fn taken(&self) -> usize {
        match self {
            Changed::Some(Units(positions)) => positions.taken(),
            Changed::Nothing | Changed::Whole => 0,
        }
    }

    /// Appends the patch that makes this version of the block from the one before, unless all of it may have changed.
    ///
    /// # Panics
    /// If the block is shorter than the one that was compared.
    pub fn patch(&self, block: &[u8], out: &mut Vec<u8>) -> bool {
        match self {
            Changed::Nothing => out.extend_from_slice(&Positions::none().head()),
            Changed::Some(Units(positions)) => positions.patch(block, out),
            Changed::Whole => return false,
        }
        true
    }

    /// Applies a patch to the block that it was made for. Returns what has changed. After an error, the contents of the
    /// block are void.
    ///
    /// # Errors
    /// [`PatchError`].
    pub fn apply(patch: &[u8], block: &mut [u8]) -> Result<Changed, PatchError> {
        let (positions, values) = Positions::of_patch(patch, block.len())?;
        positions.write(values, block)?;
        Ok(if positions.is_empty() { Changed::Nothing } else { Changed::Some(Units(positions)) })
    }

    /// Copies what has changed.
    ///
    /// # Panics
    /// If the lengths disagree, or are not those of the block that was compared.
    pub fn copy(&self, from: &[u8], to: &mut [u8]) {
        assert_eq!(from.len(), to.len(), "copies of a block");
        match self {
            Changed::Nothing => {}
            Changed::Some(Units(positions)) => positions.copy(from, to),
            Changed::Whole => kernels::stream_copy(from, to),
        }
    }
}

/// The bytes of a line.
const LINE: usize = 64;

/// Calls `each` with the numbers of the bits that are set.
fn each_bit(mut word: u64, mut each: impl FnMut(usize)) {
    while word != 0 {
        each(word.trailing_zeros() as usize);
        word &= word - 1;
    }
}

/// Sets the bits of units that differ, the first of which is unit `first`.
fn differing_units(old: &[u8], new: &[u8], shift: u8, first: usize, bits: &mut [u64]) {
    let ((old, old_rest), (new, new_rest)) = (old.as_chunks::<8>(), new.as_chunks::<8>());
    let mut last = ([0; 8], [0; 8]);
    last.0[..old_rest.len()].copy_from_slice(old_rest);
    last.1[..new_rest.len()].copy_from_slice(new_rest);
    let words = old.iter().zip(new).chain([(&last.0, &last.1)]);
    for (word, (old, new)) in words.enumerate() {
        let mut differs = u64::from_le_bytes(*old) ^ u64::from_le_bytes(*new);
        while differs != 0 {
            let unit = differs.trailing_zeros() as usize >> (3 + shift);
            let at = first + (word << (3 - shift)) + unit;
            bits[at / 64] |= 1 << (at % 64);
            let width = 8 << shift;
            let of_unit = if width == 64 { u64::MAX } else { ((1 << width) - 1) << (unit * width) };
            differs &= !of_unit;
        }
    }
}

/// Whether nearly all units of a sample differ.
fn is_dense(old: &[u8], new: &[u8], shift: u8) -> bool {
    let len = new.len();
    if len < SAMPLES * SAMPLED {
        return false;
    }
    let differ = |sample: usize| {
        let at = (len / SAMPLES * sample) & !(LINE - 1);
        let mut bits = [0; SAMPLED / 64];
        differing_units(&old[at..at + SAMPLED], &new[at..at + SAMPLED], shift, 0, &mut bits);
        bits.iter().map(|word| word.count_ones() as usize).sum::<usize>()
    };
    (0..SAMPLES).all(|sample| differ(sample) * 8 > 7 * (SAMPLED >> shift))
}

/// The form of these units, of a block of `len` bytes, that makes the shortest patch.
fn least(units: &[u64], shift: u8, len: usize) -> Changed {
    let count: usize = units.iter().map(|word| word.count_ones() as usize).sum();
    if count == 0 {
        return Changed::Nothing;
    }
    // A gap of 128 units or more takes another byte.
    let gaps = (count << shift) + count + count.min((len >> shift) / 128);
    let bits = (count << shift) + (len >> shift) / 8;
    let of_lines = positions::lines_of(units, shift);
    let lines =
        of_lines.iter().map(|word| word.count_ones() as usize).sum::<usize>() * LINE + len / (8 * LINE);
    let least = gaps.min(bits).min(lines);
    if least + HEAD >= len {
        return Changed::Whole;
    }
    Changed::Some(Units(match least {
        _ if least == gaps => Positions::gaps(units, shift, count),
        _ if least == lines => Positions::bits(of_lines, shift_of(LINE)),
        _ => Positions::bits(units.to_vec(), shift),
    }))
}

#[cfg(test)]
mod tests;
