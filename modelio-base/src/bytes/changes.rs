//! What changes in a block from one version to another, and patches that bring a copy of the block up to date.
//!
//! A block is compared by *units*: the bytes of its narrowest element. What has changed is kept as positions without
//! values, in the form that makes the shortest patch: gaps between units, a bit a unit, a bit a line of 64 bytes, or
//! nothing but that all may have changed. Pure.

use std::cell::RefCell;
use std::ops::Range;

use crate::bytes::kernels;
use crate::vocabulary::ids::BlockId;

mod packed;
mod positions;
mod runs;
mod union;

pub use packed::packed;
use positions::{Gaps, Positions, shift_of};
pub use runs::{Runs, RunsBuilder};
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
    /// The patch ends too early, or goes on after its end.
    #[error("the patch is not as long as it says")]
    Length,
    /// The form of its positions is unknown.
    #[error("the patch has an unknown form")]
    Form,
    /// The patch changes bytes that the block does not have.
    #[error("the patch goes beyond the block")]
    Beyond,
    /// The patch is compressed, and cannot be read.
    #[error("the patch cannot be unpacked")]
    Packed,
}

/// The bytes before the positions: the unit's size and the form, the number of units, the bytes of the positions.
const HEAD: usize = 12;

/// Compared before the rest: so many pieces, of so many bytes each.
const SAMPLES: usize = 4;
const SAMPLED: usize = 1 << 10;

/// Room that comparisons use again.
#[derive(Default)]
struct Scratch {
    /// A bit for each line that differs.
    lines: Vec<u64>,
    gaps: Gaps,
    /// A bit for each unit that differs.
    units: Vec<u64>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
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
        SCRATCH.with_borrow_mut(|Scratch { lines, gaps, units }| {
            lines.resize(len.div_ceil(LINE).div_ceil(64), 0);
            kernels::differing_lines(old, new, lines);
            let differing = lines.iter().map(|word| word.count_ones() as usize).sum::<usize>();
            if differing == 0 {
                return Changed::Nothing;
            }
            let most = len.min(bytes_of_lines(differing, len)) / (unit + 1);
            if let Some(found) = gaps.of_lines(lines, old, new, shift, most)
                && found * unit + gaps.bytes().len() <= bytes_of_bits(found, shift, len)
            {
                return Changed::Some(Units(Positions::of_gaps(gaps.bytes(), shift, found)));
            }
            units.clear();
            units.resize((len >> shift).div_ceil(64), 0);
            each_line(lines, len, |line| {
                let first = line.start >> shift;
                each_differing(&old[line.clone()], &new[line], shift, |unit| {
                    units[(first + unit) / 64] |= 1 << ((first + unit) % 64);
                    true
                })
            });
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

    /// Appends the patch that makes this version of the block from the one before. False if that is no shorter than the
    /// block, or all of the block may have changed.
    ///
    /// # Panics
    /// If the block is shorter than the one that was compared.
    pub fn patch(&self, block: &[u8], out: &mut Vec<u8>) -> bool {
        let start = out.len();
        match self {
            Changed::Nothing => out.extend_from_slice(&Positions::none().head()),
            Changed::Some(Units(positions)) => positions.patch(block, out),
            Changed::Whole => return false,
        }
        let is_shorter = out.len() - start < block.len();
        if !is_shorter {
            out.truncate(start);
        }
        is_shorter
    }

    /// Applies a patch, which may be [`packed()`], to the block that it was made for. Returns what has changed. After an
    /// error, the contents of the block are void.
    ///
    /// # Errors
    /// [`PatchError`].
    pub fn apply(patch: &[u8], block: &mut [u8]) -> Result<Changed, PatchError> {
        let patch = packed::unpacked(patch, block.len())?;
        let (positions, values) = Positions::of_patch(&patch, block.len())?;
        positions.write(values, block)?;
        Ok(if positions.is_empty() { Changed::Nothing } else { Changed::Some(Units(positions)) })
    }

    /// Appends what has changed, without values: the beginning of a patch, or a head alone if all may have changed.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Changed::Nothing => Positions::none().encode(out),
            Changed::Some(Units(positions)) => positions.encode(out),
            Changed::Whole => out.extend_from_slice(&positions::WHOLE),
        }
    }

    /// What has changed in a block of `len` bytes, from [`Self::encode`].
    ///
    /// # Errors
    /// [`PatchError`].
    pub fn decode(bytes: &[u8], len: usize) -> Result<Changed, PatchError> {
        if bytes == positions::WHOLE {
            return Ok(Changed::Whole);
        }
        let (positions, values) = Positions::of_patch(bytes, len)?;
        let mut last = None;
        positions.each(|unit| last = Some(unit));
        match last {
            _ if !values.is_empty() => Err(PatchError::Length),
            None => Ok(Changed::Nothing),
            Some(last) if last << positions.shift() >= len => Err(PatchError::Beyond),
            Some(_) => Ok(Changed::Some(Units(positions))),
        }
    }

    /// Calls `each` with the bytes of a block of `len` bytes that have changed, in order. With the version before, only
    /// units that differ count, of `unit` bytes; else all units that may have changed do.
    ///
    /// # Panics
    /// If the block is shorter than the one that was compared, or the versions are not of its length.
    pub fn each_range(
        &self,
        len: usize,
        versions: Option<(&[u8], &[u8], usize)>,
        mut each: impl FnMut(Range<usize>),
    ) {
        let mut narrow = |range: Range<usize>| match versions {
            None => each(range),
            Some((old, new, unit)) => {
                let mut start = None;
                for at in range.clone().step_by(unit) {
                    let one = at..range.end.min(at + unit);
                    match (old[one.clone()] != new[one], start) {
                        (true, None) => start = Some(at),
                        (false, Some(from)) => {
                            each(from..at);
                            start = None;
                        }
                        _ => {}
                    }
                }
                start.into_iter().for_each(|from| each(from..range.end));
            }
        };
        match (self, versions) {
            (Changed::Nothing, _) => {}
            (Changed::Some(Units(positions)), _) => positions.each(|unit| {
                let start = unit << positions.shift();
                narrow(start..len.min(start + (1 << positions.shift())));
            }),
            (Changed::Whole, None) => narrow(0..len),
            (Changed::Whole, Some((old, new, _))) => {
                let mut lines = vec![0; len.div_ceil(LINE).div_ceil(64)];
                kernels::differing_lines(old, new, &mut lines);
                each_line(&lines, len, |line| {
                    narrow(line);
                    true
                });
            }
        }
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

impl Units {
    /// The bytes of a unit.
    pub fn unit(&self) -> usize {
        1 << self.0.shift()
    }

    /// Takes the numbers of the units, in order, in place of those in `numbers`.
    pub fn numbers(&self, numbers: &mut Vec<u32>) {
        numbers.clear();
        self.0.each(|unit| numbers.push(unit as u32));
    }
}

/// Appends what has changed in a block: the block's number, the length of what follows, and [`Changed::encode`].
pub fn encode_block(block: BlockId, changed: &Changed, out: &mut Vec<u8>) {
    let start = out.len();
    out.extend_from_slice(&block.0.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    changed.encode(out);
    let len = (out.len() - start - 8) as u32;
    out[start + 4..start + 8].copy_from_slice(&len.to_le_bytes());
}

/// What has changed in blocks, from [`encode_block`]. `len` tells the length of a block, if there is such a block.
///
/// # Errors
/// [`PatchError`].
pub fn decode_blocks(
    mut encoded: &[u8],
    len: impl Fn(BlockId) -> Option<usize>,
) -> Result<Vec<(BlockId, Changed)>, PatchError> {
    let mut blocks = Vec::new();
    while !encoded.is_empty() {
        let (block, rest) = encoded.split_first_chunk::<4>().ok_or(PatchError::Length)?;
        let (taken, rest) = rest.split_first_chunk::<4>().ok_or(PatchError::Length)?;
        let (taken, block) = (u32::from_le_bytes(*taken) as usize, BlockId(u32::from_le_bytes(*block)));
        let (changed, rest) = rest.split_at_checked(taken).ok_or(PatchError::Length)?;
        blocks.push((block, Changed::decode(changed, len(block).ok_or(PatchError::Beyond)?)?));
        encoded = rest;
    }
    Ok(blocks)
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

/// Calls `each` with the bytes of each line whose bit is set, as long as it says so. Returns whether it always has.
fn each_line(lines: &[u64], len: usize, mut each: impl FnMut(Range<usize>) -> bool) -> bool {
    for (word, &bits) in lines.iter().enumerate() {
        let mut bits = bits;
        while bits != 0 {
            let at = (word * 64 + bits.trailing_zeros() as usize) * LINE;
            if !each(at..len.min(at + LINE)) {
                return false;
            }
            bits &= bits - 1;
        }
    }
    true
}

/// Calls `each` with the numbers of the units that differ, as long as it says so. Returns whether it always has.
#[inline(always)]
fn each_differing(old: &[u8], new: &[u8], shift: u8, mut each: impl FnMut(usize) -> bool) -> bool {
    let width = 8_u32 << shift;
    if let (1, Ok(old), Ok(new)) = (shift, <&[u8; LINE]>::try_from(old), <&[u8; LINE]>::try_from(new)) {
        let mut units = differing_pairs(old, new);
        while units != 0 {
            if !each(units.trailing_zeros() as usize) {
                return false;
            }
            units &= units - 1;
        }
        return true;
    }
    let mut of_word = |word: usize, mut differs: u64| {
        while differs != 0 {
            let unit = differs.trailing_zeros() / width;
            if !each((word << (3 - shift)) + unit as usize) {
                return false;
            }
            // The bits of the unit, and all below it.
            differs = differs
                .checked_shr((unit + 1) * width)
                .and_then(|rest| rest.checked_shl((unit + 1) * width))
                .unwrap_or(0);
        }
        true
    };
    let ((words, rest), (new_words, new_rest)) = (old.as_chunks::<8>(), new.as_chunks::<8>());
    for (word, (old, new)) in words.iter().zip(new_words).enumerate() {
        let differs = u64::from_le_bytes(*old) ^ u64::from_le_bytes(*new);
        if differs != 0 && !of_word(word, differs) {
            return false;
        }
    }
    let differs = rest.iter().zip(new_rest).rev().fold(0, |all, (old, new)| all << 8 | u64::from(old ^ new));
    of_word(words.len(), differs)
}

/// A bit for each two bytes of a line: whether they differ.
#[inline(always)]
fn differing_pairs(old: &[u8; LINE], new: &[u8; LINE]) -> u32 {
    let pairs = old.as_chunks::<2>().0.iter().zip(new.as_chunks::<2>().0);
    pairs.enumerate().fold(0, |units, (at, (old, new))| units | u32::from(old != new) << at)
}

/// Whether nearly all units of a sample differ.
fn is_dense(old: &[u8], new: &[u8], shift: u8) -> bool {
    let len = new.len();
    if len < SAMPLES * SAMPLED {
        return false;
    }
    let differ = |sample: usize| {
        let at = (len / SAMPLES * sample) & !(LINE - 1);
        let mut count = 0;
        each_differing(&old[at..at + SAMPLED], &new[at..at + SAMPLED], shift, |_| {
            count += 1;
            true
        });
        count
    };
    (0..SAMPLES).all(|sample| differ(sample) * 8 > 7 * (SAMPLED >> shift))
}

/// The bytes of a patch of so many units, by bits.
fn bytes_of_bits(count: usize, shift: u8, len: usize) -> usize {
    (count << shift) + (len >> shift) / 8
}

/// The bytes of a patch of so many lines.
fn bytes_of_lines(count: usize, len: usize) -> usize {
    count * LINE + len / (8 * LINE)
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
