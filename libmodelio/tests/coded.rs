//! Coded elements: how far they are off, what is left, and payloads that nobody has coded.

use half::{bf16, f16};
use libmodelio::bytes::kernels::coded::{Fault, check, decode, encode};
use libmodelio::bytes::kernels::{Level, with_level};
use libmodelio::vocabulary::coding::{Coding, GROUP};
use proptest::prelude::*;

fn top(millionths: u32) -> Coding {
    Coding::TopK(millionths.try_into().unwrap())
}

const ALL: [&str; 6] = ["bf16", "fp16", "int8", "fp8", "topk(0.01)", "topk(1)"];

fn codings() -> impl Iterator<Item = Coding> {
    ALL.iter().map(|text| text.parse().unwrap())
}

/// The coded bytes, and what is left.
fn coded(coding: Coding, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let (mut left, mut out) = (values.to_vec(), vec![0xaa; coding.bytes(values.len())]);
    encode(coding, &mut left, &mut out);
    (out, left)
}

fn back(coding: Coding, elements: usize, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; elements];
    decode(coding, elements, bytes, 0, &mut out);
    out
}

/// Finite numbers of all magnitudes, and those that a model has.
fn number() -> impl Strategy<Value = f32> {
    let any = any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |value| value.is_finite());
    prop_oneof![4 => -1.0f32..1.0, 1 => any, 1 => Just(0.0), 1 => Just(f32::MAX)]
}

fn numbers() -> impl Strategy<Value = Vec<f32>> {
    proptest::collection::vec(number(), 1..3 * GROUP)
}

/// A group's largest number, and numbers as near to the middle between two of its codes as a float comes.
fn ties() -> impl Strategy<Value = Vec<f32>> {
    let tie = (-127i8..127, -2i32..=2);
    (1f32..1e3, proptest::collection::vec(tie, 1..GROUP)).prop_map(|(largest, ties)| {
        let of_code = |(code, bits): (i8, i32)| {
            let middle = (f32::from(code) + 0.5) * (largest / 127.0);
            f32::from_bits(middle.to_bits().wrapping_add_signed(bits))
        };
        std::iter::once(largest).chain(ties.into_iter().map(of_code)).collect()
    })
}

proptest! {
    #[test]
    fn what_comes_and_what_is_left_are_all_there_was(values in numbers(), at in 0..ALL.len()) {
        let coding: Coding = ALL[at].parse().unwrap();
        let (bytes, left) = coded(coding, &values);
        prop_assert_eq!(check(coding, values.len(), &bytes), Ok(()));
        let come = back(coding, values.len(), &bytes);
        for ((value, come), left) in values.iter().zip(&come).zip(&left) {
            prop_assert!(come.is_finite() && left.is_finite(), "{value} comes as {come}, and leaves {left}");
            prop_assert_eq!(value - come, *left, "{} comes as {}", value, come);
        }
    }

    /// Half a scale, and what four operations round: the inverse of the scale, a value times it, and a code times the
    /// scale are off by half an `EPSILON` of at most 127 scales each, and the last difference by that of its own.
    #[test]
    fn the_error_of_int8_is_half_a_scale(values in prop_oneof![proptest::collection::vec(-1e3f32..1e3, 1..3 * GROUP), ties()]) {
        let (bytes, left) = coded(Coding::Int8, &values);
        let scales = bytes.as_chunks::<4>().0.iter().map(|scale| f64::from(f32::from_le_bytes(*scale)));
        let half_a_bit = f64::from(f32::EPSILON) / 2.0;
        for ((values, left), scale) in values.chunks(GROUP).zip(left.chunks(GROUP)).zip(scales) {
            let largest = values.iter().fold(0f64, |most, value| most.max(f64::from(value.abs())));
            prop_assert!((scale * 127.0 - largest).abs() <= largest * half_a_bit);
            // Products of these errors are less than one of 128 more.
            let most = scale * (0.5 + (3.0 * 128.0) * half_a_bit);
            for left in left {
                prop_assert!(f64::from(left.abs()) <= most, "{left} of scale {scale}");
            }
        }
    }

    #[test]
    fn any_piece_is_that_of_the_whole(values in numbers(), at in 0..ALL.len(), cut in any::<(u16, u16)>()) {
        let coding: Coding = ALL[at].parse().unwrap();
        let (bytes, _) = coded(coding, &values);
        let all = back(coding, values.len(), &bytes);
        let start = usize::from(cut.0) % values.len();
        let end = start + usize::from(cut.1) % (values.len() - start + 1);
        let mut piece = vec![0.5; end - start];
        decode(coding, values.len(), &bytes, start, &mut piece);
        prop_assert_eq!(piece, &all[start..end]);
    }

    #[test]
    fn bytes_of_a_stranger_are_refused_or_decoded(
        bytes in proptest::collection::vec(any::<u8>(), 4096),
        elements in 1usize..1024,
        at in 0..ALL.len(),
    ) {
        let coding: Coding = ALL[at].parse().unwrap();
        let Some(bytes) = bytes.get(..coding.bytes(elements)) else { return Ok(()) };
        if check(coding, elements, bytes).is_ok() {
            back(coding, elements, bytes);
        }
    }
}

#[test]
fn every_level_gives_the_same_bits() {
    let values: Vec<f32> =
        (0..5000).map(|i| ((i * 37 % 1009) as f32 - 500.0) * 1.1f32.powi(i % 90)).collect();
    for coding in codings() {
        let of = |level| with_level(level, || coded(coding, &values)).unwrap();
        let want = of(Level::Portable);
        for level in Level::available() {
            let got = of(level);
            assert!(got == want, "{coding} at {level:?}");
            let come = with_level(level, || back(coding, values.len(), &got.0)).unwrap();
            assert!(come == back(coding, values.len(), &want.0));
        }
    }
}

#[test]
fn numbers_that_a_form_has_come_as_they_are() {
    let of = |coding: Coding, values: &[f32]| {
        let (bytes, left) = coded(coding, values);
        assert_eq!(back(coding, values.len(), &bytes), values, "{coding}");
        assert!(left.iter().all(|left| *left == 0.0), "{coding}");
    };
    of(
        Coding::Bf16,
        &(0..1 << 15)
            .map(|bits| bf16::from_bits(bits).to_f32())
            .filter(|v| v.is_finite())
            .collect::<Vec<_>>(),
    );
    of(
        Coding::Fp16,
        &(0..1 << 15).map(|bits| f16::from_bits(bits).to_f32()).filter(|v| v.is_finite()).collect::<Vec<_>>(),
    );
    of(Coding::Int8, &(-127..=127).map(|n| n as f32 * 0.25).collect::<Vec<_>>());
    // All numbers of fp8, with the largest among them.
    let fp8: Vec<f32> = (0..127u32)
        .map(|code| match (code >> 3, (code & 7) as f32) {
            (0, mantissa) => mantissa / 512.0,
            (exponent, mantissa) => (1.0 + mantissa / 8.0) * 2f32.powi(exponent as i32 - 7),
        })
        .flat_map(|value| [value, -value])
        .collect();
    of(Coding::Fp8, &fp8);
    of(top(1_000_000), &[1.0, -2.0, 0.0, 1e-30]);
}

#[test]
fn topk_takes_the_largest_and_of_equal_ones_the_first() {
    let values = [1.0, -5.0, 5.0, 0.0, 3.0, -3.0, 3.0, 0.5, 2.0, 4.0];
    let (bytes, left) = coded(top(400_000), &values);
    assert_eq!(back(top(400_000), 10, &bytes), [0.0, -5.0, 5.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 4.0]);
    assert_eq!(left, [1.0, 0.0, 0.0, 0.0, 0.0, -3.0, 3.0, 0.5, 2.0, 0.0]);
}

#[test]
fn what_is_not_finite_comes_as_nan_and_leaves_nothing() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for coding in codings() {
            let mut values = vec![1.0; 2 * GROUP];
            values[3] = bad;
            let (bytes, left) = coded(coding, &values);
            assert_eq!(check(coding, values.len(), &bytes), Ok(()), "{coding}");
            let come = back(coding, values.len(), &bytes);
            assert!(come[3].is_nan(), "{coding}: {bad} comes as {}", come[3]);
            assert!(
                come[GROUP..].iter().all(|value| value.is_finite()),
                "{coding}: other groups are not concerned"
            );
            assert!(left.iter().all(|left| left.is_finite()), "{coding}");
        }
    }
}

#[test]
fn a_fault_is_named() {
    let (mut bytes, _) = coded(Coding::Int8, &[1.0; 2 * GROUP]);
    for bad in [-1.0f32, -0.0, f32::INFINITY, f32::NEG_INFINITY] {
        bytes[4..8].copy_from_slice(&bad.to_le_bytes());
        assert_eq!(check(Coding::Int8, 2 * GROUP, &bytes), Err(Fault::Scale(1)), "{bad}");
    }
    let topk = |indices: [u32; 2]| {
        let bytes: Vec<u8> = indices.iter().flat_map(|i| i.to_le_bytes()).chain([0; 8]).collect();
        check(top(20_000), 100, &bytes)
    };
    assert_eq!(topk([0, 99]), Ok(()));
    assert_eq!(topk([0, 100]), Err(Fault::Index { index: 100, elements: 100 }));
    assert_eq!(topk([u32::MAX, 0]), Err(Fault::Index { index: u32::MAX, elements: 100 }));
    assert_eq!(topk([7, 7]), Err(Fault::Order(7)));
    assert_eq!(topk([8, 7]), Err(Fault::Order(7)));
}
