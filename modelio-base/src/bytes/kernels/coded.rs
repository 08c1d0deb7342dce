//! Loops that put fp32 values into a [`Coding`] and get them back, a segment's elements at a time.
//!
//! | form | bytes of `n` elements |
//! |---|---|
//! | bf16, fp16 | `n` halves |
//! | int8, fp8 | the fp32 scales of all groups, then `n` codes |
//! | topk | the `k` indices (u32, rising), then the `k` values (fp32) |
//!
//! All of it is little-endian and at any address. NaN and Inf become NaN: of one element in a half or in topk, of the
//! whole group with int8 and fp8, whose scale is NaN then. Finite values stay finite. Results are the same bit for bit
//! on every CPU.

use std::cell::Cell;
use std::ops::Range;

use super::Wire;
use super::level::{Kernel, dispatch};
use super::line::{INFINITY, LANES, Line, MAGNITUDE, RawHalf, RawQuarter};
use super::pass::{Accumulate, bytes_mut};
use crate::vocabulary::coding::{Coding, GROUP};

/// What is wrong with coded elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A scale that no encoder makes.
    #[error("the scale of group {0} is negative or infinite")]
    Scale(usize),
    /// An index that is no element's.
    #[error("index {index} of {elements} elements")]
    Index {
        /// The index.
        index: u32,
        /// The number of elements.
        elements: usize,
    },
    /// An index that is not above the one before.
    #[error("index {0} does not follow a lower one")]
    Order(u32),
}

/// The largest code of int8, and the largest number of fp8, which is E4M3.
const INT8: f32 = 127.0;
const FP8: f32 = 448.0;
/// Adding it rounds a small number to a whole one, which the lowest bits of the sum then are.
const ROUND: f32 = 12_582_912.0;

/// Puts values into their form. What the form loses of each stays in `values`; it is zero for NaN and Inf.
///
/// # Panics
/// If `out` has another length than [`Coding::bytes`].
pub fn encode(coding: Coding, values: &mut [f32], out: &mut [u8]) {
    assert_eq!(out.len(), coding.bytes(values.len()), "coded elements");
    match coding {
        Coding::Bf16 => dispatch(Halves { bf16: true, values, out }),
        Coding::Fp16 => dispatch(Halves { bf16: false, values, out }),
        Coding::Int8 => dispatch(Groups { fp8: false, values, out }),
        Coding::Fp8 => dispatch(Groups { fp8: true, values, out }),
        Coding::TopK(_) => largest(values, out),
    }
}

/// Gets the elements from `at` on, of so many that `bytes` has. There are as many as `out` has room for.
///
/// # Panics
/// If the bytes are not of so many elements, or the elements are not among them.
pub fn decode(coding: Coding, elements: usize, bytes: &[u8], at: usize, out: &mut [f32]) {
    assert_eq!(bytes.len(), coding.bytes(elements), "coded elements");
    assert!(at + out.len() <= elements, "elements {at} to {} of {elements}", at + out.len());
    let wire = match coding {
        Coding::Bf16 => Wire::BF16,
        Coding::Fp16 => Wire::F16,
        Coding::Int8 | Coding::Fp8 => {
            let (scales, codes) = bytes.split_at(4 * elements.div_ceil(GROUP));
            let codes = &codes[at..at + out.len()];
            return dispatch(Scaled { fp8: coding == Coding::Fp8, scales, codes, at, out });
        }
        Coding::TopK(_) => return scatter(bytes, at, out),
    };
    let src = &bytes[2 * at..2 * (at + out.len())];
    dispatch(Accumulate { wire, src, acc: bytes_mut(out), first: true });
}

/// Checks what the length does not say. Elements that pass are decoded without a panic, whoever has sent them.
///
/// # Errors
/// The first fault.
///
/// # Panics
/// If the bytes are not of so many elements.
pub fn check(coding: Coding, elements: usize, bytes: &[u8]) -> Result<(), Fault> {
    assert_eq!(bytes.len(), coding.bytes(elements), "coded elements");
    match coding {
        Coding::Bf16 | Coding::Fp16 => Ok(()),
        Coding::Int8 | Coding::Fp8 => {
            let scales = &bytes[..4 * elements.div_ceil(GROUP)];
            let is_bad = |scale: &[u8; 4]| {
                let scale = f32::from_le_bytes(*scale);
                !scale.is_nan() && (scale.is_sign_negative() || scale.is_infinite())
            };
            scales.as_chunks().0.iter().position(is_bad).map_or(Ok(()), |group| Err(Fault::Scale(group)))
        }
        Coding::TopK(_) => {
            let mut least = 0;
            for index in indices(bytes).0 {
                let index = u32::from_le_bytes(*index);
                if index as usize >= elements {
                    return Err(Fault::Index { index, elements });
                }
                if index < least {
                    return Err(Fault::Order(index));
                }
                least = index + 1;
            }
            Ok(())
        }
    }
}

/// Sets what is not finite to zero.
#[inline(always)]
fn zero_nonfinite(values: &mut [f32]) {
    for value in values {
        let bits = value.to_bits();
        *value = f32::from_bits(if bits & MAGNITUDE < INFINITY { bits } else { 0 });
    }
}

struct Halves<'a> {
    bf16: bool,
    values: &'a mut [f32],
    out: &'a mut [u8],
}

/// The halves of one line. What they lose takes its place.
#[inline(always)]
fn halve<L: Line>(bf16: bool, values: &mut [u8; 4 * LANES]) -> RawHalf {
    let value = L::load(values);
    // What a half has no room for stays behind. The product is zero, or NaN of what is not finite.
    let limit = if bf16 { f32::from_bits(0x7f7f_0000) } else { 65_504.0 };
    let kept = value.clamp(limit) + value * L::splat(0.0);
    let half = if bf16 { kept.to_bf16() } else { kept.to_f16() };
    let back = if bf16 { L::load_bf16(&half) } else { L::load_f16(&half) };
    (value - back).store(values);
    half
}

impl Kernel for Halves<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Line>(self) {
        let (lines, rest) = bytes_mut(self.values).as_chunks_mut();
        let (halves, rest_out) = self.out.split_at_mut(2 * LANES * lines.len());
        for (line, half) in lines.iter_mut().zip(halves.as_chunks_mut().0) {
            *half = halve::<L>(self.bf16, line);
        }
        let mut padded = [0; 4 * LANES];
        padded[..rest.len()].copy_from_slice(rest);
        let half = halve::<L>(self.bf16, &mut padded);
        rest.copy_from_slice(&padded[..rest.len()]);
        rest_out.copy_from_slice(&half[..rest_out.len()]);
        zero_nonfinite(self.values);
    }
}

struct Groups<'a> {
    fp8: bool,
    values: &'a mut [f32],
    out: &'a mut [u8],
}

impl Kernel for Groups<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Line>(self) {
        let groups = self.values.len().div_ceil(GROUP);
        let (scales, codes) = self.out.split_at_mut(4 * groups);
        let each = self.values.chunks_mut(GROUP).zip(codes.chunks_mut(GROUP));
        for ((values, codes), scale) in each.zip(scales.as_chunks_mut().0) {
            let greatest = if self.fp8 { FP8 } else { INT8 };
            let of_group = scale_of(values, greatest);
            *scale = of_group.to_le_bytes();
            match of_group {
                // Nothing of the group can be sent, so all of it is left.
                0.0 => codes.fill(0),
                scale if scale.is_nan() => {
                    codes.fill(0);
                    values.fill(0.0);
                }
                scale if self.fp8 => to_fp8::<L>(scale, values, codes),
                scale => {
                    let inverse = 1.0 / scale;
                    for (value, code) in values.iter_mut().zip(codes) {
                        let sum = *value * inverse + ROUND;
                        *code = sum.to_bits() as u8;
                        *value -= (sum - ROUND) * scale;
                    }
                }
            }
        }
    }
}

/// The scale of a group whose largest magnitude becomes `greatest`. NaN if not all of it is finite, and zero if it is
/// so small that a scale has no inverse.
#[inline(always)]
fn scale_of(values: &[f32], greatest: f32) -> f32 {
    let largest = values.iter().fold(0, |most, value| (value.to_bits() & MAGNITUDE).max(most));
    if largest >= INFINITY {
        return f32::NAN;
    }
    let scale = f32::from_bits(largest) / greatest;
    if scale < f32::MIN_POSITIVE {
        0.0
    } else if (scale * greatest).is_finite() {
        scale
    } else {
        f32::from_bits(scale.to_bits() - 1)
    }
}

/// The nearest codes. What they lose stays in `values`.
#[inline(always)]
fn to_fp8<L: Line>(scale: f32, values: &mut [f32], codes: &mut [u8]) {
    let (lines, rest) = bytes_mut(values).as_chunks_mut();
    let (whole, rest_codes) = codes.split_at_mut(LANES * lines.len());
    for (line, codes) in lines.iter_mut().zip(whole.as_chunks_mut().0) {
        *codes = codes_of::<L>(scale, line);
    }
    if !rest.is_empty() {
        let mut padded = [0; 4 * LANES];
        padded[..rest.len()].copy_from_slice(rest);
        let codes = codes_of::<L>(scale, &mut padded);
        rest.copy_from_slice(&padded[..rest.len()]);
        rest_codes.copy_from_slice(&codes[..rest_codes.len()]);
    }
}

#[inline(always)]
fn codes_of<L: Line>(scale: f32, values: &mut [u8; 4 * LANES]) -> RawQuarter {
    let value = L::load(values);
    let codes = (value * L::splat(1.0 / scale)).to_e4m3();
    (value - L::load_e4m3(&codes) * L::splat(scale)).store(values);
    codes
}

/// The values of codes.
#[inline(always)]
fn from_fp8<L: Line>(scale: f32, codes: &[u8], values: &mut [f32]) {
    let (lines, rest) = bytes_mut(values).as_chunks_mut();
    let (whole, rest_codes) = codes.split_at(LANES * lines.len());
    for (codes, line) in whole.as_chunks().0.iter().zip(lines) {
        (L::load_e4m3(codes) * L::splat(scale)).store(line);
    }
    if !rest.is_empty() {
        let (mut padded, mut line) = ([0; LANES], [0; 4 * LANES]);
        padded[..rest_codes.len()].copy_from_slice(rest_codes);
        (L::load_e4m3(&padded) * L::splat(scale)).store(&mut line);
        rest.copy_from_slice(&line[..rest.len()]);
    }
}

struct Scaled<'a> {
    fp8: bool,
    scales: &'a [u8],
    codes: &'a [u8],
    /// The first element.
    at: usize,
    out: &'a mut [f32],
}

impl Kernel for Scaled<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Line>(self) {
        let Scaled { fp8, scales, mut codes, mut at, mut out } = self;
        let scales = scales.as_chunks().0;
        while !out.is_empty() {
            let scale = f32::from_le_bytes(scales[at / GROUP]);
            let count = (GROUP - at % GROUP).min(out.len());
            let (here, rest) = out.split_at_mut(count);
            let (of_here, others) = codes.split_at(count);
            if fp8 {
                from_fp8::<L>(scale, of_here, here);
            } else {
                here.iter_mut()
                    .zip(of_here)
                    .for_each(|(value, code)| *value = f32::from(*code as i8) * scale);
            }
            (out, codes, at) = (rest, others, at + count);
        }
    }
}

thread_local! {
    /// Magnitudes among which the largest are sought.
    static MAGNITUDES: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
}

/// Takes the largest magnitudes out of `values`. Of equal ones, the first are taken.
fn largest(values: &mut [f32], out: &mut [u8]) {
    let count = out.len() / 8;
    let (indices, kept) = out.split_at_mut(4 * count);
    let (indices, kept) = (indices.as_chunks_mut::<4>().0, kept.as_chunks_mut::<4>().0);
    let magnitude = |value: &f32| value.to_bits() & MAGNITUDE;
    if count == 0 {
        return;
    }
    let mut magnitudes = MAGNITUDES.take();
    magnitudes.clear();
    magnitudes.extend(values.iter().map(magnitude));
    let (above, least, _) = magnitudes.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
    let least = *least;
    let mut equal = count - above.iter().filter(|above| **above > least).count();
    MAGNITUDES.set(magnitudes);
    let mut at = 0;
    for (index, value) in values.iter_mut().enumerate() {
        let magnitude = magnitude(value);
        if magnitude < least || magnitude == least && equal == 0 {
            continue;
        }
        equal -= usize::from(magnitude == least);
        let sent = if value.is_finite() { *value } else { f32::NAN };
        (indices[at], kept[at]) = ((index as u32).to_le_bytes(), sent.to_le_bytes());
        *value = 0.0;
        at += 1;
    }
    zero_nonfinite(values);
}

/// The indices and the values of topk.
fn indices(bytes: &[u8]) -> (&[[u8; 4]], &[[u8; 4]]) {
    let all = bytes.as_chunks::<4>().0;
    all.split_at(all.len() / 2)
}

/// The elements from `at` on: zero but for those that were kept.
fn scatter(bytes: &[u8], at: usize, out: &mut [f32]) {
    out.fill(0.0);
    let (indices, values) = indices(bytes);
    let below = |limit: usize| indices.partition_point(|of| (u32::from_le_bytes(*of) as usize) < limit);
    let Range { start, end } = below(at)..below(at + out.len());
    for (index, value) in indices[start..end].iter().zip(&values[start..end]) {
        out[u32::from_le_bytes(*index) as usize - at] = f32::from_le_bytes(*value);
    }
}
