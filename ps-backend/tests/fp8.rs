//! The types of 8 bits: every number of them, and every place where rounding to them changes, at every level.

use libmodelio::bytes::kernels::{
    Input, Level, Operands, Output, Source, Total, Wire, all_finite, copy_checked, widen, widen_at,
    widen_changed, with_level,
};
use proptest::prelude::*;

use test_devices::fp8;

const WIRES: [Wire; 2] = [Wire::E4M3, Wire::E5M2];

/// The codes that the kernels make of values, which is what a version shows of masters.
fn narrowed(wire: Wire, values: &[f32]) -> Vec<u8> {
    let (zeros, mut codes) = (vec![0; values.len()], vec![0; values.len()]);
    let input = Input { weights: &zeros, master: None, slots: [&[], &[]] };
    let output = Output { weights: &mut codes, master: None, slots: [&mut [], &mut []] };
    Operands { wire, sources: &[Source::Acc(values)], input, output }.reduce(Total::new, Total::new);
    codes
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Compares the codes of values with the reference, at every level.
fn check(wire: Wire, values: &[f32]) {
    for level in Level::available() {
        let codes = with_level(level, || narrowed(wire, values)).unwrap();
        for (value, code) in values.iter().zip(codes) {
            let want = fp8::code(wire, f64::from(*value));
            assert_eq!(code, want, "{level:?} {wire:?}: {value:e} ({:#x})", value.to_bits());
        }
    }
}

#[test]
fn the_reference_has_the_numbers_of_the_specification() {
    for (wire, code, value) in [
        (Wire::E4M3, 0x00, 0.0),
        (Wire::E4M3, 0x01, 2f64.powi(-9)),
        (Wire::E4M3, 0x07, 0.875 * 2f64.powi(-6)),
        (Wire::E4M3, 0x08, 2f64.powi(-6)),
        (Wire::E4M3, 0x38, 1.0),
        (Wire::E4M3, 0xc0, -2.0),
        (Wire::E4M3, 0x7e, 448.0),
        (Wire::E5M2, 0x01, 2f64.powi(-16)),
        (Wire::E5M2, 0x03, 0.75 * 2f64.powi(-14)),
        (Wire::E5M2, 0x04, 2f64.powi(-14)),
        (Wire::E5M2, 0x3c, 1.0),
        (Wire::E5M2, 0x7b, 57_344.0),
        (Wire::E5M2, 0xfc, f64::NEG_INFINITY),
    ] {
        assert_eq!(fp8::value(wire, code), value, "{wire:?} {code:#x}");
        assert_eq!(fp8::code(wire, value), code, "{wire:?} {value}");
    }
    for (wire, nans) in [(Wire::E4M3, 0x7f..=0x7f), (Wire::E5M2, 0x7d..=0x7f)] {
        let is_nan = |code: u8| fp8::value(wire, code).is_nan();
        assert!(
            (0..=0x7f)
                .all(|code| is_nan(code) == nans.contains(&code) && is_nan(code) == is_nan(code | 0x80))
        );
    }
}

#[test]
fn every_number_of_8_bits_is_widened_exactly() {
    let all: Vec<u8> = (0..=u8::MAX).collect();
    for (level, wire) in Level::available().flat_map(|level| WIRES.map(|wire| (level, wire))) {
        // At any address, and in ragged ends.
        for start in 0..70 {
            let mut wide = vec![0.0; all.len() - start];
            with_level(level, || widen(wire, &all[start..], &mut wide)).unwrap();
            for (code, got) in all[start..].iter().zip(wide) {
                assert!(
                    same(got, fp8::value(wire, *code) as f32),
                    "{level:?} {wire:?}: {code:#x} is {got:e}"
                );
            }
        }
    }
}

#[test]
fn every_number_of_8_bits_is_its_own_code() {
    for wire in WIRES {
        let finite = (0..=u8::MAX).filter(|code| !fp8::value(wire, *code).is_nan());
        let (codes, values): (Vec<u8>, Vec<f32>) =
            finite.map(|code| (code, fp8::value(wire, code) as f32)).unzip();
        for level in Level::available() {
            assert_eq!(with_level(level, || narrowed(wire, &values)).unwrap(), codes, "{level:?} {wire:?}");
        }
    }
}

#[test]
fn values_are_rounded_to_nearest_even_and_the_largest_of_e4m3_stands_for_more() {
    for wire in WIRES {
        let mut values = vec![0.0, f32::MIN_POSITIVE, f32::from_bits(1), f32::MAX, f32::INFINITY, f32::NAN];
        values.extend([1e3, 448.0, 464.0, 480.0, 57_344.0, 61_440.0, 65_504.0, 65_536.0, 1e9]);
        // Each number, the middle to the next one, and their neighbours in fp32.
        for code in 0..0x7fu8 {
            let [here, next] = [code, code + 1].map(|code| fp8::value(wire, code) as f32);
            values.extend([here, (here + next) / 2.0]);
        }
        let around = |value: f32| {
            [-2, -1, 0, 1, 2].map(|apart| f32::from_bits(value.to_bits().saturating_add_signed(apart)))
        };
        let values: Vec<f32> =
            values.into_iter().flat_map(around).flat_map(|value| [value, -value]).collect();
        check(wire, &values);
    }
    let [e4m3, e5m2] =
        WIRES.map(|wire| narrowed(wire, &[448.1, -1e30, f32::INFINITY, -f32::INFINITY, f32::NAN]));
    assert_eq!(e4m3, [0x7e, 0xfe, 0x7f, 0xff, 0x7f]);
    assert_eq!(e5m2, [0x5f, 0xfc, 0x7c, 0xfc, 0x7f]);
}

#[test]
fn a_sweep_of_all_exponents_is_rounded_to_nearest() {
    let values: Vec<f32> = (0..=u32::MAX).step_by(10_007).map(f32::from_bits).collect();
    WIRES.into_iter().for_each(|wire| check(wire, &values));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_values_are_rounded_to_nearest(
        bits in prop::collection::vec(any::<u32>(), 1..200),
        near in prop::collection::vec(-600f32..600.0, 1..200),
    ) {
        for wire in WIRES {
            check(wire, &bits.iter().map(|bits| f32::from_bits(*bits)).collect::<Vec<_>>());
            check(wire, &near);
        }
    }
}

#[test]
fn copies_keep_finite_numbers_and_find_others_at_every_position() {
    for (level, wire) in Level::available().flat_map(|level| WIRES.map(|wire| (level, wire))) {
        let bad: Vec<u8> = (0..=u8::MAX).filter(|code| !fp8::value(wire, *code).is_finite()).collect();
        let good: Vec<u8> = (0..=u8::MAX).filter(|code| !bad.contains(code)).collect();
        // Around a line of memory, and long enough to be streamed.
        for (len, start) in [(1, 0), (63, 1), (130, 0), (70_001, 3), (65_536, 0)] {
            let mut src: Vec<u8> = good.iter().copied().cycle().take(len).collect();
            let mut room = vec![0; len + 64];
            let copied =
                |src: &[u8], dst: &mut [u8]| with_level(level, || copy_checked(wire, src, dst)).unwrap();
            assert!(copied(&src, &mut room[start..][..len]));
            assert!(room[start..][..len] == src && room[start + len..].iter().all(|byte| *byte == 0));
            for at in (0..len.min(150)).chain((len - len.min(150))..len) {
                let bad = bad[at % bad.len()];
                let before = std::mem::replace(&mut src[at], bad);
                let what = format!("{level:?} {wire:?}: {bad:#x} at {at} of {len}");
                assert!(!copied(&src, &mut room[start..][..len]), "{what}");
                assert!(!with_level(level, || all_finite(wire, &src)).unwrap(), "{what}");
                src[at] = before;
            }
            assert!(with_level(level, || all_finite(wire, &src)).unwrap());
        }
    }
}

#[test]
fn masters_of_weights_that_stay_keep_their_precision() {
    for wire in WIRES {
        let old: Vec<u8> = (0..5000).map(|i| (i % 120) as u8).collect();
        let mut new = old.clone();
        new.iter_mut().step_by(7).for_each(|code| *code ^= 0x80);
        let mut masters = vec![0.123; old.len()];
        widen_changed(wire, &old, &new, &mut masters);
        for (at, master) in masters.into_iter().enumerate() {
            let want = if at % 7 == 0 { fp8::value(wire, new[at]) as f32 } else { 0.123 };
            assert_eq!(master.to_bits(), want.to_bits(), "{wire:?} {at}");
        }
    }
}

#[test]
fn masters_are_the_same_by_the_places_that_have_changed() {
    for (wire, size) in [(WIRES[0], 1), (WIRES[1], 1), (Wire::BF16, 2), (Wire::F16, 2)] {
        for step in [1, 7, 300, 5000] {
            let old: Vec<u8> = (0..5000 * size).map(|i| (i * 31 % 120) as u8).collect();
            let (mut new, mut places) = (old.clone(), Vec::new());
            for place in (0..5000).step_by(step) {
                new[place * size] ^= 0x41;
                places.push(place as u32);
            }
            let (mut compared, mut told) = (vec![0.123; 5000], vec![0.123; 5000]);
            widen_changed(wire, &old, &new, &mut compared);
            widen_at(wire, &new, &places, &mut told);
            let bits = |masters: &[f32]| masters.iter().map(|master| master.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&compared), bits(&told), "{wire:?} {step}");
        }
    }
}
