//! The kernels that make what is sent of a learner's model: every instruction set gives the bits of scalar arithmetic,
//! rounded once to the type.

use libmodelio::bytes::kernels::{Level, Wire, correction, difference, with_level};

use test_devices::numbers::{self, decode};

const WIRES: [Wire; 6] = [Wire::F64, Wire::F32, Wire::F16, Wire::BF16, Wire::E4M3, Wire::E5M2];

fn encode(wire: Wire, values: &[f64]) -> Vec<u8> {
    numbers::encode(wire, values.iter().map(|&value| rounded(wire, value)))
}

/// A number as arithmetic of the type has it: f64, or else fp32.
fn rounded(wire: Wire, value: f64) -> f64 {
    if wire == Wire::F64 { value } else { f64::from(value as f32) }
}

/// Values of the type, another row for each seed.
fn values(wire: Wire, seed: u64, n: usize) -> Vec<f64> {
    let value = |i: usize| ((i as f64 + 1.0) * (seed as f64 + 0.37)).sin() * 3.0;
    decode(wire, &encode(wire, &(0..n).map(value).collect::<Vec<_>>()))
}

#[test]
fn a_difference_is_that_of_scalars() {
    for (wire, n) in WIRES.into_iter().flat_map(|wire| [0, 1, 15, 16, 17, 1000].map(|n| (wire, n))) {
        let [model, base] = [1, 2].map(|seed| values(wire, seed, n));
        for (scale, has_base) in [(1.0, true), (3.0, true), (0.3, false)] {
            let one = |(model, base): (&f64, &f64)| {
                let apart = if has_base { rounded(wire, model - base) } else { *model };
                rounded(wire, rounded(wire, scale) * apart)
            };
            let want = encode(wire, &model.iter().zip(&base).map(one).collect::<Vec<_>>());
            for level in Level::available() {
                let [model, base] = [&model, &base].map(|values| encode(wire, values));
                let mut out = vec![0; model.len()];
                let base = has_base.then_some(&base[..]);
                let finite = with_level(level, || difference(wire, scale, &model, base, &mut out)).unwrap();
                assert!(finite && out == want, "{n} of {wire:?} at {level:?}");
            }
        }
    }
}

/// What a replica loses, the central model gets.
#[test]
fn a_correction_is_taken_off_the_replica_as_it_was_rounded() {
    for (wire, n) in WIRES.into_iter().flat_map(|wire| [1, 16, 33, 1000].map(|n| (wire, n))) {
        let [model, replica, central] = [1, 2, 3].map(|seed| values(wire, seed, n));
        let alpha = 1.0 / 3.0;
        let one = |(replica, central): (&f64, &f64)| {
            rounded(wire, rounded(wire, alpha) * rounded(wire, replica - central))
        };
        let corrections = encode(wire, &replica.iter().zip(&central).map(one).collect::<Vec<_>>());
        let rest = model.iter().zip(decode(wire, &corrections)).map(|(model, c)| rounded(wire, model - c));
        let rest = encode(wire, &rest.collect::<Vec<_>>());
        // What a narrow replica loses is rounded with it.
        let lost = model.iter().zip(decode(wire, &rest)).map(|(model, rest)| model - rest);
        let corrections =
            if wire.is_narrow() { encode(wire, &lost.collect::<Vec<_>>()) } else { corrections };
        for level in Level::available() {
            let [model, replica, central] = [&model, &replica, &central].map(|values| encode(wire, values));
            let [mut out, mut next] = [vec![0; model.len()], vec![0; model.len()]];
            let work = || {
                let places = [&mut out[..], &mut next[..]];
                correction(wire, alpha, &model, [&replica, &central], places)
            };
            assert!(with_level(level, work).unwrap());
            assert!(out == corrections && next == rest, "{n} of {wire:?} at {level:?}");
        }
    }
}

#[test]
fn what_is_not_finite_is_found_everywhere() {
    for (wire, n) in WIRES.into_iter().flat_map(|wire| [1, 16, 17, 100].map(|n| (wire, n))) {
        let all = |value: f64| encode(wire, &vec![value; n]);
        let mut out = vec![0; n * wire.size()];
        let mut next = out.clone();
        for (at, value) in (0..n).flat_map(|at| [f64::NAN, f64::INFINITY].map(|value| (at, value))) {
            let mut model = vec![1.0; n];
            model[at] = value;
            let model = encode(wire, &model);
            assert!(!difference(wire, 1.0, &model, Some(&all(1.0)), &mut out));
            assert!(!difference(wire, 2.0, &model, None, &mut out));
            assert!(!correction(wire, 0.5, &model, [&all(1.0), &all(2.0)], [&mut out, &mut next]));
        }
        // A product may leave the type.
        assert!(!difference(wire, 1e300, &all(1e4), None, &mut out) || wire == Wire::F64);
        assert!(difference(wire, 1e3, &all(1.0), None, &mut out));
    }
}
