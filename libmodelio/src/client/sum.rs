//! Adding up one block of several contributions before it crosses the network: the lower of the two levels.
//!
//! Sums are made in fp32, in the order of the contributions, and stay fp32 on the wire where the model has half
//! precision: nothing is rounded twice. The loops are plain; compilers vectorise them, and memory bounds them.

use half::{bf16, f16};

use crate::ids::BlockId;
use crate::layout::{DType, ModelLayout};

/// Puts the sum of `parts` (each the whole block) into `out`. True if it is wide: reducible elements as fp32.
/// Of elements that cannot be reduced, and of all if it `replaces`, the last part counts.
///
/// # Errors
/// The index of a part that holds NaN or Inf, if they are to be looked for.
pub fn sum(
    layout: &ModelLayout,
    block: BlockId,
    parts: &[&[u8]],
    replaces: bool,
    check: bool,
    out: &mut Vec<u8>,
) -> Result<bool, usize> {
    out.clear();
    let Some((last, before)) = parts.split_last() else { return Ok(false) };
    if replaces || before.is_empty() {
        if check && let Some(bad) = before.iter().position(|part| !is_finite(layout, block, part)) {
            return Err(bad);
        }
        // A program may be storing into what it has mapped: what counts is looked at, and that alone.
        out.extend_from_slice(last);
        return if check && !is_finite(layout, block, out) { Err(before.len()) } else { Ok(false) };
    }
    let start = layout.block_bytes(block).start;
    let wide = layout.segments(block).iter().any(|s| matches!(s.dtype, DType::F16 | DType::BF16));
    for segment in layout.segments(block) {
        let local = (segment.bytes.start - start) as usize..(segment.bytes.end - start) as usize;
        if !segment.dtype.is_reducible() {
            out.extend_from_slice(&last[local]);
            continue;
        }
        let begin = out.len();
        for (at, part) in parts.iter().enumerate() {
            let bytes = &part[local.clone()];
            let fine = match segment.dtype {
                DType::F16 => add(out, begin, at == 0, bytes, |b: [u8; 2]| f16::from_le_bytes(b).to_f32()),
                DType::BF16 => add(out, begin, at == 0, bytes, |b: [u8; 2]| bf16::from_le_bytes(b).to_f32()),
                _ => add(out, begin, at == 0, bytes, f32::from_le_bytes),
            };
            if check && !fine {
                return Err(at);
            }
        }
    }
    Ok(wide)
}

/// Adds elements to the fp32 values from `begin` on, or puts them there if they are the first. Whether all of them
/// are finite: the very values that are added.
fn add<const N: usize>(
    out: &mut Vec<u8>,
    begin: usize,
    first: bool,
    bytes: &[u8],
    widen: impl Fn([u8; N]) -> f32,
) -> bool {
    let (elements, _) = bytes.as_chunks::<N>();
    if first {
        out.resize(begin + elements.len() * 4, 0);
    }
    let (sums, _) = out[begin..].as_chunks_mut::<4>();
    let mut fine = true;
    if first {
        for (sum, element) in sums.iter_mut().zip(elements) {
            let value = widen(*element);
            fine &= value.is_finite();
            *sum = value.to_le_bytes();
        }
    } else {
        for (sum, element) in sums.iter_mut().zip(elements) {
            let value = widen(*element);
            fine &= value.is_finite();
            *sum = (f32::from_le_bytes(*sum) + value).to_le_bytes();
        }
    }
    fine
}

/// Whether a whole block holds only finite numbers.
pub fn is_finite(layout: &ModelLayout, block: BlockId, bytes: &[u8]) -> bool {
    let start = layout.block_bytes(block).start;
    layout.segments(block).iter().all(|segment| {
        let bytes = &bytes[(segment.bytes.start - start) as usize..(segment.bytes.end - start) as usize];
        match segment.dtype {
            DType::F32 => bytes
                .as_chunks::<4>()
                .0
                .iter()
                .fold(true, |fine, b| fine & f32::from_le_bytes(*b).is_finite()),
            DType::F16 => bytes
                .as_chunks::<2>()
                .0
                .iter()
                .fold(true, |fine, b| fine & f16::from_le_bytes(*b).is_finite()),
            DType::BF16 => bytes
                .as_chunks::<2>()
                .0
                .iter()
                .fold(true, |fine, b| fine & bf16::from_le_bytes(*b).is_finite()),
            DType::Opaque(_) => true,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn sums_are_made_in_order_and_in_fp32() {
        let layout = ModelLayout::blank(8, DType::F32, 64 << 10).unwrap();
        let (a, b, c) = (bytes(&[1e8, 1.0]), bytes(&[1.0, 2.0]), bytes(&[-1e8, 3.0]));
        let mut out = Vec::new();
        assert_eq!(sum(&layout, BlockId(0), &[&a, &b, &c], false, true, &mut out), Ok(false));
        assert_eq!(out, bytes(&[(1e8 + 1.0) + -1e8, 6.0]));
        assert_eq!(sum(&layout, BlockId(0), &[&a, &b], true, true, &mut out), Ok(false));
        assert_eq!(out, b);
    }

    #[test]
    fn half_precision_becomes_wide_where_it_is_added() {
        let tensors = vec![
            ("h".into(), DType::F16, vec![2]),
            ("n".into(), DType::Opaque(safetensors::Dtype::U8), vec![1]),
        ];
        let layout = ModelLayout::new(tensors, 64 << 10).unwrap();
        let part = |x: f32, n: u8| {
            [&f16::from_f32(x).to_le_bytes()[..], &f16::from_f32(1.0).to_le_bytes(), &[n]].concat()
        };
        let (a, b) = (part(2048.0, 7), part(1.0, 9));
        let mut out = Vec::new();
        assert_eq!(sum(&layout, BlockId(0), &[&a, &b], false, true, &mut out), Ok(true));
        assert_eq!(out, [bytes(&[2049.0, 2.0]), vec![9]].concat(), "2049 is no fp16");
        assert_eq!(sum(&layout, BlockId(0), &[&a], false, true, &mut out), Ok(false));
        assert_eq!(out, a);
    }

    #[test]
    fn who_holds_nan_is_named() {
        let layout = ModelLayout::blank(4, DType::F32, 64 << 10).unwrap();
        let (a, b) = (bytes(&[1.0]), bytes(&[f32::NAN]));
        let mut out = Vec::new();
        assert_eq!(sum(&layout, BlockId(0), &[&a, &b], false, true, &mut out), Err(1));
        assert_eq!(sum(&layout, BlockId(0), &[&a, &b], false, false, &mut out), Ok(false));
    }
}
