//! Summing one block of several contributions before it crosses the network.
//!
//! Sums are made in fp32 (f64 for f64 tensors), in the order of the contributions. On the wire, sums of
//! narrower tensors stay fp32, so nothing is rounded twice.

use std::ops::Range;

use crate::bytes::block::is_finite;
use crate::bytes::kernels::{self, Wire};
use crate::vocabulary::ids::BlockId;
use crate::vocabulary::layout::{ModelLayout, Segment};

/// The bytes of a sum that all contributions are added to before the next bytes. They stay in the cache meanwhile.
const CHUNK: usize = 8 << 10;

/// The written ranges of a block, if a contribution has not written all of it.
pub(crate) type Written = Option<Vec<Range<u32>>>;

/// The shape of a sum of `count` contributions to `block`: whether it is wide, with its reducible elements as fp32,
/// and its length in bytes.
pub(crate) fn shape(layout: &ModelLayout, block: BlockId, count: usize, replaces: bool) -> (bool, usize) {
    let bytes = |segment: &Segment| (segment.bytes.end - segment.bytes.start) as usize;
    let widened = |segment: &Segment| segment.dtype.widening() * bytes(segment);
    let segments = layout.segments(block);
    let plain = replaces || count < 2;
    let wide = !plain && segments.iter().any(|s| s.dtype.is_narrow());
    (wide, segments.iter().map(|segment| if wide { widened(segment) } else { bytes(segment) }).sum())
}

/// The number of bytes in a payload of this [`shape`] that are copied, and not added up.
pub(crate) fn copied(layout: &ModelLayout, block: BlockId, count: usize, replaces: bool) -> usize {
    let bytes = |segment: &Segment| (segment.bytes.end - segment.bytes.start) as usize;
    let plain = replaces || count < 2;
    layout.segments(block).iter().filter(|s| plain || !s.dtype.is_reducible()).map(bytes).sum()
}

/// Puts the sum of `parts`, each a whole block, into `out`. True if the sum is wide: its reducible elements are fp32.
///
/// The last part counts for elements that cannot be reduced, and for all elements if it `replaces`. In that case
/// `written` has the written ranges of each part, or is empty if all parts are whole.
///
/// # Errors
/// The index of a part that holds NaN or Inf, if `check` asks for that.
pub(crate) fn sum(
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

/// Like [`sum`], into memory of the right [`shape`].
///
/// # Errors
/// The same as of [`sum`].
///
/// # Panics
/// If `out` has another length.
pub(crate) fn sum_to(
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
        // A program may be storing into mapped memory, so the copy that counts is checked, and nothing else.
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
        let wire = Wire::of(segment.dtype);
        let (here, behind) = rest
            .split_at_mut(wire.map_or(local.len(), |wire| local.len() / wire.size() * wire.wide().size()));
        rest = behind;
        let Some(wire) = wire else {
            here.copy_from_slice(&last[local]);
            continue;
        };
        let wide = wire.wide().size();
        for (i, sums) in here.chunks_mut(CHUNK).enumerate() {
            let elements = i * CHUNK / wide..(i * CHUNK + sums.len()) / wide;
            let bytes = local.start + elements.start * wire.size()..local.start + elements.end * wire.size();
            for (at, part) in parts.iter().enumerate() {
                // The checked values are the very values that are added.
                if !kernels::accumulate_bytes(wire, &part[bytes.clone()], sums, at == 0) && check {
                    return Err(at);
                }
            }
        }
    }
    assert!(rest.is_empty(), "{} bytes more than block {block} has", rest.len());
    Ok(())
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // lists of ranges that happen to have one
mod tests {
    use half::{bf16, f16};

    use crate::vocabulary::layout::DType;

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

    /// An element type: the bytes of a value in a model, and the value of bytes in a wide payload.
    type Element = (DType, fn(f64) -> Vec<u8>, fn(&[u8]) -> f64);

    #[test]
    fn a_sum_of_many_chunks_has_the_bits_of_a_loop() {
        let types: [Element; 5] = [
            (DType::F64, |x| x.to_le_bytes().into(), |b| f64::from_le_bytes(b.try_into().unwrap())),
            (
                DType::F32,
                |x| (x as f32).to_le_bytes().into(),
                |b| f32::from_le_bytes(b.try_into().unwrap()).into(),
            ),
            (
                DType::F16,
                |x| f16::from_f64(x).to_le_bytes().into(),
                |b| f16::from_le_bytes(b.try_into().unwrap()).into(),
            ),
            (
                DType::BF16,
                |x| bf16::from_f64(x).to_le_bytes().into(),
                |b| bf16::from_le_bytes(b.try_into().unwrap()).into(),
            ),
            // The upper half of a binary16.
            (
                DType::E5M2,
                |x| vec![f16::from_f64(x).to_le_bytes()[1]],
                |b| f16::from_le_bytes([0, b[0]]).into(),
            ),
        ];
        for (dtype, encode, decode) in types {
            for n in [1, 2047, 2048, 2049, 9001] {
                let layout = ModelLayout::new(vec![("t".into(), dtype, vec![n])], 1 << 20).unwrap();
                // The values have several magnitudes, so that another order of addition gives other bits.
                let value = |part: usize, i: usize| (1.0 + i as f64 * 0.37).sin() * [1e4, 1.0, 1e-3][part];
                let parts =
                    [0, 1, 2].map(|part| (0..n).flat_map(|i| encode(value(part, i))).collect::<Vec<u8>>());
                let size = dtype.size_bytes().unwrap();
                let element = |part: &Vec<u8>, i: usize| decode(&part[i * size..][..size]);
                let want: Vec<u8> = (0..n)
                    .flat_map(|i| {
                        let [a, b, c] = parts.each_ref().map(|part| element(part, i));
                        match dtype {
                            DType::F64 => (a + b + c).to_le_bytes().to_vec(),
                            _ => (a as f32 + b as f32 + c as f32).to_le_bytes().to_vec(),
                        }
                    })
                    .collect();
                let mut out = Vec::new();
                let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
                sum(&layout, BlockId(0), &parts, (false, &[]), true, &mut out).unwrap();
                assert!(out == want, "{n} of {dtype}");
            }
        }
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
        // The last whole part hides everything before it.
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
    fn a_part_with_nan_is_named() {
        let layout = ModelLayout::blank(4, DType::F32, 64 << 10).unwrap();
        let (a, b) = (bytes(&[1.0]), bytes(&[f32::NAN]));
        let mut out = Vec::new();
        assert_eq!(sum(&layout, BlockId(0), &[&a, &b], (false, &[]), true, &mut out), Err(1));
        assert_eq!(sum(&layout, BlockId(0), &[&a, &b], (false, &[]), false, &mut out), Ok(false));
    }
}
