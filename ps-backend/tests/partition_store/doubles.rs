//! F64 tensors: their arithmetic is that of doubles, and what lies beside them in a block is reduced as ever.

use half::bf16;
use libmodelio::bytes::kernels::{
    Input, Level, Operands, Output, Source, Wire, accumulate, all_finite, with_level,
};
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::{Hyper, Reducer, Step};
use libmodelio::wire::Work;
use proptest::prelude::*;
use ps_backend::partition::store::Payload;
use ps_backend::reducers::apply;
use test_devices::formulas::{self, Brought, Constants};
use test_devices::numbers;
use test_devices::one_by_one::OneByOne;

use crate::driver::{conclude, loaded, reduces_all};

const OPTIMIZERS: [Reducer; 9] = [
    Reducer::Sum,
    Reducer::Sgd,
    Reducer::Momentum,
    Reducer::Nesterov,
    Reducer::Adam,
    Reducer::AdamW,
    Reducer::RmsProp,
    Reducer::AdaGrad,
    Reducer::Lion,
];

/// What a user writes as 0.1, and so on.
fn hyper() -> Hyper {
    Hyper { learning_rate: 0.01, weight_decay: 0.1, momentum: 0.9, dampening: 0.3, ..Hyper::default() }
}

/// New weight and state of the mean `g` of two contributions.
fn reference(reducer: Reducer, t: u64, g: f64, w: f64, slots: [f64; 2]) -> (f64, [f64; 2]) {
    let brought = Brought { sum: 2.0 * g, mean: g, gradient: g, total: 2.0 * g, last: None };
    formulas::step(reducer, &Constants::of(&hyper()), (t, 1.0), &brought, w, slots)
}

fn value(seed: usize, i: usize) -> f64 {
    let mut bits = (seed * 1_000_003 + i + 1) as u64;
    for _ in 0..3 {
        bits = (bits ^ (bits >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    // All bits of the mantissa are in use.
    (bits >> 11) as f64 / (1u64 << 53) as f64 + 0.5
}

fn raw(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn doubles(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
}

fn words(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_bits(u32::from_le_bytes(*bytes))).collect()
}

fn close(got: f64, want: f64, what: &str) {
    assert!((got - want).abs() <= 1e-12 * want.abs().max(1.0), "{what}: got {got:?}, want {want:?}");
}

/// Weights and slots, as bytes, after 60 steps.
fn trained(reducer: Reducer, n: usize) -> (Vec<u8>, [Vec<f32>; 2]) {
    let mut weights = raw(&(0..n).map(|i| value(0, i)).collect::<Vec<_>>());
    let mut slots = [0, 1].map(|slot| vec![0f32; if slot < reducer.state_slots() { 2 * n } else { 0 }]);
    for t in 1..=60usize {
        let [a, b] = [1, 2].map(|who| raw(&(0..n).map(|i| value(10 * t + who, i)).collect::<Vec<_>>()));
        let mut sum = vec![0f32; 2 * n];
        assert!(accumulate(Wire::F64, &a, &mut sum, true));
        let step = Step { reducer, hyper: hyper(), contributions: 2, t: t as u64, ..Step::default() };
        let (mut next, [mut s0, mut s1]) = (vec![0; weights.len()], slots.clone());
        let output = Output { weights: &mut next, master: None, slots: [&mut s0, &mut s1] };
        let input = Input { weights: &weights, master: None, slots: [&slots[0], &slots[1]] };
        assert!(apply(
            &step,
            Operands { wire: Wire::F64, sources: &[Source::Acc(&sum), Source::Wire(&b)], input, output },
            true
        ));
        (weights, slots) = (next, [s0, s1]);
    }
    (weights, slots)
}

#[test]
fn optimizers_of_doubles_follow_their_definitions_in_f64() {
    let n = 37;
    for reducer in OPTIMIZERS {
        let mut levels = Level::available().map(|level| with_level(level, || trained(reducer, n)).unwrap());
        let (weights, slots) = levels.next().unwrap();
        for (other, state) in levels {
            let bits = |slots: &[Vec<f32>; 2]| {
                slots.clone().map(|s| s.iter().map(|v| v.to_bits()).collect::<Vec<_>>())
            };
            assert!(weights == other && bits(&slots) == bits(&state), "{reducer}: levels differ");
        }
        for (i, got) in doubles(&weights).into_iter().enumerate() {
            let (mut w, mut state) = (value(0, i), [0.0; 2]);
            for t in 1..=60usize {
                let g = (value(10 * t + 1, i) + value(10 * t + 2, i)) / 2.0;
                (w, state) = reference(reducer, t as u64, g, w, state);
            }
            close(got, w, &format!("{reducer}, element {i}"));
        }
    }
}

#[test]
fn non_finite_doubles_are_found() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for (at, n) in [(0, 1), (7, 8), (8, 9), (12, 37)] {
            let mut values: Vec<f64> = (0..n).map(|i| value(1, i)).collect();
            let mut sum = vec![0f32; 2 * n];
            assert!(accumulate(Wire::F64, &raw(&values), &mut sum, true));
            values[at] = bad;
            assert!(!accumulate(Wire::F64, &raw(&values), &mut sum, false), "{bad} at {at} of {n}");
            assert!(!all_finite(Wire::F64, &raw(&values)), "{bad} at {at} of {n}");
            values[at] = f64::MAX;
            assert!(all_finite(Wire::F64, &raw(&values)));
        }
    }
}

/// One tensor's elements of one contribution, as they lie in the model and as they are sent wide.
fn element(dtype: DType, x: f64) -> (Vec<u8>, Vec<u8>) {
    let wire = Wire::of(dtype).unwrap();
    let plain = numbers::encode(wire, [x]);
    let as_wide = if wire == Wire::F64 { Wire::F64 } else { Wire::F32 };
    let wide = numbers::encode(as_wide, numbers::decode(wire, &plain));
    (plain, wide)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn doubles_share_blocks_with_other_types(
        kinds in prop::collection::vec((0usize..3, 1usize..90), 1..8),
        reducer in prop::sample::select(OPTIMIZERS.to_vec()),
        ways in prop::collection::vec(any::<bool>(), 6),
    ) {
        let types = [DType::F64, DType::F32, DType::BF16];
        // The order of the layout is not the order of the list: sums of doubles begin at any multiple of four.
        let specs = kinds.iter().enumerate().map(|(i, &(kind, n))| (format!("t{i}"), types[kind], vec![n]));
        let layout = ModelLayout::new(specs.collect(), 64 << 10).unwrap();
        let of: Vec<DType> = layout.tensors().iter().flat_map(|t| vec![t.dtype; t.shape[0]]).collect();
        let payload = |seed: usize, wide: bool| -> Vec<u8> {
            let one = |(i, dtype): (usize, &DType)| {
                let (plain, as_wide) = element(*dtype, value(seed, i));
                if wide { as_wide } else { plain }
            };
            of.iter().enumerate().flat_map(one).collect()
        };
        let block = BlockId(0);
        let store = loaded(&layout, reducer, &payload(0, false));
        for t in 1..=3usize {
            let base = Version(t as u64 - 1);
            let job = store.begin(base, Work::Add { combine: reducer.combine() }, true).unwrap();
            let first = payload(10 * t + 1, ways[2 * t - 2]);
            match job.destination(block, Form::full(ways[2 * t - 2])).unwrap() {
                Some(mut target) => {
                    target.bytes().copy_from_slice(&first);
                    prop_assert!(target.complete(None));
                }
                None if ways[2 * t - 2] => prop_assert!(job.add(block, Payload::Wide(&first)).unwrap()),
                None => prop_assert!(job.add(block, Payload::Plain(&first)).unwrap()),
            }
            prop_assert!(conclude(&store, &job).unwrap().is_none());
            drop(job);
            let step = Step { reducer, hyper: hyper(), contributions: 2, t: t as u64, ..Step::default() };
            let job = store.begin(base, reduces_all(&store, step, false), true).unwrap();
            let wide = ways[2 * t - 1];
            let second = payload(10 * t + 2, wide);
            let second = if wide { Payload::Wide(&second) } else { Payload::Plain(&second) };
            prop_assert!(job.finish(block, Some(second)).unwrap());
            conclude(&store, &job).unwrap();
        }
        let newest = store.version(Version(3)).unwrap();
        let mut rest = newest.block(block);
        for (i, &dtype) in of.iter().enumerate() {
            // What each type can hold of the inputs.
            let wire = Wire::of(dtype).unwrap();
            let held = |seed| numbers::decode(wire, &numbers::encode(wire, [value(seed, i)]))[0];
            let (mut w, mut state) = (held(0), [0.0; 2]);
            for t in 1..=3usize {
                let g = (held(10 * t + 1) + held(10 * t + 2)) / 2.0;
                (w, state) = reference(reducer, t as u64, g, w, state);
            }
            let (bytes, behind) = rest.split_at(dtype.size_bytes().unwrap());
            rest = behind;
            let (got, error) = match dtype {
                DType::F64 => (doubles(bytes)[0], 1e-12),
                DType::F32 => (f64::from(words(bytes)[0]), 1e-5),
                _ => (bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(), 1.0 / 128.0),
            };
            prop_assert!((got - w).abs() <= error * w.abs().max(1.0), "{:?} {}: got {}, want {}", dtype, i, got, w);
        }
        drop(newest);
    }
}
