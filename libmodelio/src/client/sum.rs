//! Adding up one block of several contributions before it crosses the network: the lower of the two levels.
//!
//! Sums are made in fp32 (of f64: in f64), in the order of the contributions, and stay fp32 on the wire where the model
//! has half precision: nothing is rounded twice. The loops are plain; compilers vectorise them, and memory bounds them.

use std::ops::Range;

use half::{bf16, f16};

use crate::vocabulary::ids::BlockId;
use crate::vocabulary::layout::{DType, ModelLayout, Segment};

/// The bytes of a block that one contribution has written, if those are not all of it.
pub type Written = Option<Vec<Range<u32>>>;

/// How a sum of `count` contributions to `block` looks: whether it is wide, with its reducible elements as fp32, and how
/// many bytes it has.
pub fn shape(layout: &ModelLayout, block: BlockId, count: usize, replaces: bool) -> (bool, usize) {
    let bytes = |segment: &Segment| (segment.bytes.end - segment.bytes.start) as usize;
    let widened = |segment: &Segment| match segment.dtype {
        DType::F16 | DType::BF16 => 2 * bytes(segment),
        _ => bytes(segment),
    };
    let segments = layout.segments(block);
    let plain = replaces || count < 2;
    let wide = !plain && segments.iter().any(|s| matches!(s.dtype, DType::F16 | DType::BF16));
    (wide, segments.iter().map(|segment| if wide { widened(segment) } else { bytes(segment) }).sum())
}

/// Bytes of a payload of such a [`shape`] that are copied as they are, and not added up.
pub fn copied(layout: &ModelLayout, block: BlockId, count: usize, replaces: bool) -> usize {
    let bytes = |segment: &Segment| (segment.bytes.end - segment.bytes.start) as usize;
    let plain = replaces || count < 2;
    layout.segments(block).iter().filter(|s| plain || !s.dtype.is_reducible()).map(bytes).sum()
}

/// Puts the sum of `parts` (each the whole block) into `out`. True if it is wide: reducible elements as fp32.
/// Of elements that cannot be reduced, and of all if it `replaces`, the last part counts; there, `written` has for each
/// part what of it does, if that is not all, or is empty.
///
/// # Errors
/// The index of a part that holds NaN or Inf, if they are to be looked for.
pub fn sum(
    layout: &ModelLayout,
    block: BlockId,
    parts: &[&[u8]],
    (replaces, written): (bool, &[Written]),
    check: bool,
    out: &mut Vec<u8>,
) -> Result<bool, usize> {
    let (wide, len) = shape(layout, block, parts.len(), replaces);
    out.resize(len, 0);
    sum_to(layout, block, parts, (replaces, written), check, out)?;
    Ok(wide)
}

/// The same, into memory of the right [`shape`].
///
/// # Errors
/// As of [`sum`].
///
/// # Panics
/// If `out` has another length.
pub fn sum_to(
    layout: &ModelLayout,
    block: BlockId,
    parts: &[&[u8]],
    (replaces, written): (bool, &[Written]),
    check: bool,
    out: &mut [u8],
) -> Result<(), usize> {
    let Some((last, before)) = parts.split_last() else { return Ok(()) };
    if replaces || before.is_empty() {
        let written = |part: usize| written.get(part).and_then(Option::as_deref);
        let whole = (0..parts.len()).rfind(|&part| written(part).is_none()).unwrap_or(0);
        let mut others = parts.iter().enumerate().filter(|(part, _)| *part != whole);
        if check && let Some((bad, _)) = others.find(|(_, part)| !is_finite(layout, block, part)) {
            return Err(bad);
        }
        // A program may be storing into what it has mapped, which is a whole: what counts is looked at, and that alone.
        out.copy_from_slice(parts[whole]);
        for (at, part) in parts.iter().enumerate().skip(whole + 1) {
            for range in written(at).unwrap_or_default() {
                let range = (range.start as usize).min(out.len())..(range.end as usize).min(out.len());
                out[range.clone()].copy_from_slice(&part[range]);
            }
        }
        return if check && !is_finite(layout, block, out) { Err(whole) } else { Ok(()) };
    }
    let start = layout.block_bytes(block).start;
    let mut rest = out;
    for segment in layout.segments(block) {
        let local = (segment.bytes.start - start) as usize..(segment.bytes.end - start) as usize;
        let half = matches!(segment.dtype, DType::F16 | DType::BF16);
        let (here, behind) = rest.split_at_mut(if half { 2 * local.len() } else { local.len() });
        rest = behind;
        if !segment.dtype.is_reducible() {
            here.copy_from_slice(&last[local]);
            continue;
        }
        for (at, part) in parts.iter().enumerate() {
            let bytes = &part[local.clone()];
            let fine = match segment.dtype {
                DType::F16 => add(here, at == 0, bytes, |b: [u8; 2]| f16::from_le_bytes(b).to_f32()),
                DType::BF16 => add(here, at == 0, bytes, |b: [u8; 2]| bf16::from_le_bytes(b).to_f32()),
                DType::F64 => add_doubles(here, at == 0, bytes),
                _ => add(here, at == 0, bytes, f32::from_le_bytes),
            };
            if check && !fine {
                return Err(at);
            }
        }
    }
    assert!(rest.is_empty(), "{} bytes more than block {block} has", rest.len());
    Ok(())
}

/// Adds elements to fp32 values, or puts them there if they are the first. Whether all of them are finite: the very
/// values that are added.
fn add<const N: usize>(sums: &mut [u8], first: bool, bytes: &[u8], widen: impl Fn([u8; N]) -> f32) -> bool {
    let (elements, _) = bytes.as_chunks::<N>();
    let (sums, _) = sums.as_chunks_mut::<4>();
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

/// As [`add`], of f64 in f64.
fn add_doubles(sums: &mut [u8], first: bool, bytes: &[u8]) -> bool {
    let mut fine = true;
    for (sum, element) in sums.as_chunks_mut::<8>().0.iter_mut().zip(bytes.as_chunks::<8>().0) {
        let value = f64::from_le_bytes(*element);
        fine &= value.is_finite();
        *sum = (if first { value } else { f64::from_le_bytes(*sum) + value }).to_le_bytes();
    }
    fine
}

/// Whether a whole block holds only finite numbers.
pub fn is_finite(layout: &ModelLayout, block: BlockId, bytes: &[u8]) -> bool {
    let start = layout.block_bytes(block).start;
    layout.segments(block).iter().all(|segment| {
        let bytes = &bytes[(segment.bytes.start - start) as usize..(segment.bytes.end - start) as usize];
        match segment.dtype {
            DType::F64 => bytes
                .as_chunks::<8>()
                .0
                .iter()
                .fold(true, |fine, b| fine & f64::from_le_bytes(*b).is_finite()),
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
#[allow(clippy::single_range_in_vec_init)] // lists of ranges that happen to have one
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
        assert_eq!(sum(&layout, BlockId(0), &[&a, &b, &c], (false, &[]), true, &mut out), Ok(false));
        assert_eq!(out, bytes(&[(1e8 + 1.0) + -1e8, 6.0]));
        assert_eq!(sum(&layout, BlockId(0), &[&a, &b], (true, &[]), true, &mut out), Ok(false));
        assert_eq!(out, b);
    }

    #[test]
    fn what_was_not_written_takes_no_part_in_assign() {
        let layout = ModelLayout::blank(16, DType::F32, 64 << 10).unwrap();
        let parts =
            [[1.0, 1.0, 1.0, 1.0], [2.0, 0.0, 2.0, 0.0], [0.0, 0.0, 3.0, 0.0]].map(|part| bytes(&part));
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let mut out = Vec::new();
        let mut of = |parts: &[&[u8]], written: &[Written]| {
            assert_eq!(sum(&layout, BlockId(0), parts, (true, written), true, &mut out), Ok(false));
            out.clone()
        };
        let written = [None, Some(vec![0..4, 8..12]), Some(vec![8..12])];
        assert_eq!(of(&parts, &written), bytes(&[2.0, 1.0, 3.0, 1.0]));
        assert_eq!(of(&parts[1..], &written[1..]), bytes(&[2.0, 0.0, 3.0, 0.0]));
        // Nothing shows of what the last whole one has covered.
        let [whole, first, second] = written;
        assert_eq!(
            of(&[parts[1], parts[0], parts[2]], &[first, whole, second]),
            bytes(&[1.0, 1.0, 3.0, 1.0])
        );
    }

    #[test]
    fn sums_of_doubles_are_doubles_beside_wide_halves() {
        let tensors = vec![("d".into(), DType::F64, vec![1]), ("h".into(), DType::BF16, vec![2])];
        let layout = ModelLayout::new(tensors, 64 << 10).unwrap();
        let part =
            |d: f64| [&d.to_le_bytes()[..], &bf16::ONE.to_le_bytes(), &bf16::ONE.to_le_bytes()].concat();
        let (a, b) = (part(1.0), part(1e-12));
        let mut out = Vec::new();
        assert_eq!(sum(&layout, BlockId(0), &[&a, &b], (false, &[]), true, &mut out), Ok(true));
        assert_eq!(out, [&(1.0 + 1e-12f64).to_le_bytes()[..], &bytes(&[2.0, 2.0])].concat());
        let bad = part(f64::INFINITY);
        assert_eq!(sum(&layout, BlockId(0), &[&a, &bad], (false, &[]), true, &mut out), Err(1));
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
        assert_eq!(sum(&layout, BlockId(0), &[&a, &b], (false, &[]), true, &mut out), Ok(true));
        assert_eq!(out, [bytes(&[2049.0, 2.0]), vec![9]].concat(), "2049 is no fp16");
        assert_eq!(sum(&layout, BlockId(0), &[&a], (false, &[]), true, &mut out), Ok(false));
        assert_eq!(out, a);
    }

    #[test]
    fn who_holds_nan_is_named() {
        let layout = ModelLayout::blank(4, DType::F32, 64 << 10).unwrap();
        let (a, b) = (bytes(&[1.0]), bytes(&[f32::NAN]));
        let mut out = Vec::new();
        assert_eq!(sum(&layout, BlockId(0), &[&a, &b], (false, &[]), true, &mut out), Err(1));
        assert_eq!(sum(&layout, BlockId(0), &[&a, &b], (false, &[]), false, &mut out), Ok(false));
    }
}
