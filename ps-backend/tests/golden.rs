//! Every optimizer against torch's: 100 steps of the same gradients lead to the same weights, in all types.
//!
//! `scripts/lib/torch_golden.py` has made `golden/torch.json` of torch, in fp32 and fp64, and
//! `golden/torch_groups.json` of torch's parameter groups.

use std::collections::BTreeMap;

use libmodelio::bytes::kernels::{Input, Operands, Output, Source, Wire, accumulate, bytes, squares, widen};
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::dtype::DType;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::norm::{Norm, TensorSquares};
use libmodelio::vocabulary::reducer::{Reducer, Step};
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use libmodelio::wire::{DataKind, Work};
use ps_backend::partition::store::{Home, Limits, PartitionStore, Payload};
use ps_backend::reducers::{apply, factor, measure_tensor};
use serde::Deserialize;
use test_devices::one_by_one::OneByOne;

use test_devices::fp8;
use test_devices::numbers::{decode, encode};

/// The types whose masters are compared.
const NARROW: [Wire; 4] = [Wire::F16, Wire::BF16, Wire::E4M3, Wire::E5M2];

#[derive(Deserialize)]
struct Golden {
    elements: usize,
    steps: u64,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    reducer: String,
    settings: BTreeMap<String, String>,
    /// Where torch ends in fp64, and in fp32.
    f64: Vec<f64>,
    f32: Vec<f64>,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("golden/torch.json")).unwrap()
}

/// A multiple of 1/16 from -2 to below 2.
fn noise(seed: u64, i: u64) -> f64 {
    let mixed = ((i * 2_654_435_761) ^ (seed * 40_503)) & 0xffff_ffff;
    ((mixed >> 5) % 64) as f64 / 16.0 - 2.0
}

fn weight(i: u64) -> f64 {
    3.0 + noise(1, i) / 2.0
}

fn gradient(t: u64, i: u64) -> f64 {
    if i == 0 || i.is_multiple_of(5) && t.is_multiple_of(2) {
        return 0.0;
    }
    noise(100 + t, i) * 2f64.powi((i % 7) as i32 - 4)
}

fn has_8_bits(wire: Wire) -> bool {
    wire.size() == 1
}

/// Contributions whose sum is exactly that of `values`: several of types that have too few bits for one.
fn contributions(wire: Wire, values: impl Iterator<Item = f64>) -> Vec<Vec<u8>> {
    if !has_8_bits(wire) {
        return vec![encode(wire, values)];
    }
    let (mut rest, mut all) = (values.collect::<Vec<_>>(), Vec::new());
    while rest.iter().any(|value| *value != 0.0) {
        let part = encode(wire, rest.iter().copied());
        rest.iter_mut().zip(&part).for_each(|(value, code)| *value -= fp8::value(wire, *code));
        all.push(part);
    }
    assert!(all.len() < 6, "{} contributions", all.len());
    all
}

impl Case {
    fn controls(&self) -> Controls {
        let settings = self.settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        Controls::default().with_all(settings.chain([("reducer", self.reducer.as_str())])).unwrap()
    }

    /// The weights after all steps, of two learners' contributions each; of narrow types their masters.
    fn run(&self, wire: Wire, elements: u64, steps: u64) -> Vec<f64> {
        let Controls { reducer, hyper, .. } = self.controls();
        let mut weights = encode(wire, (0..elements).map(weight));
        let mut master = vec![0.0; if wire.is_narrow() { elements as usize } else { 0 }];
        if wire.is_narrow() {
            widen(wire, &weights, &mut master);
        }
        if has_8_bits(wire) {
            // The type has too few bits for the weights that torch begins with.
            master = (0..elements).map(|i| weight(i) as f32).collect();
        }
        let words = elements as usize * wire.words();
        let mut slots = [0, 1].map(|slot| vec![0f32; if slot < reducer.state_slots() { words } else { 0 }]);
        let scale = f64::from(hyper.loss_scale);
        for t in 1..=steps {
            let pair = [0.5, -0.5]
                .map(|away| contributions(wire, (0..elements).map(|i| (gradient(t, i) + away) * scale)));
            let all = pair.concat();
            let sources: Vec<_> = all.iter().map(|bytes| Source::Wire(bytes)).collect();
            let mut step = Step { reducer, hyper: hyper.clone(), contributions: 2, t, ..Step::default() };
            let mut sum = vec![0.0; words];
            all.iter().enumerate().for_each(|(at, bytes)| {
                assert!(accumulate(wire, bytes, &mut sum, at == 0));
            });
            if reducer.measures(&hyper) {
                step.norm = Some(Norm::new(step.scale() * squares(wire, &[&sum]).sqrt()));
            }
            if reducer.is_layerwise() {
                let values =
                    if wire.is_narrow() { (Wire::F32, bytes(&master)) } else { (wire, &weights[..]) };
                let mut measured = TensorSquares::default();
                let slots = slots.each_ref().map(|slot| bytes(slot));
                measure_tensor(&step, wire, &[&sum], values, slots, &mut measured);
                step.factor = Some(Norm::new(factor(&step, measured.norms())));
            }
            let (mut next, mut next_master) = (weights.clone(), master.clone());
            let [mut s0, mut s1] = slots.clone();
            let input = Input {
                weights: &weights,
                master: wire.is_narrow().then_some(&master),
                slots: [&slots[0], &slots[1]],
            };
            let output = Output {
                weights: &mut next,
                master: wire.is_narrow().then_some(&mut next_master),
                slots: [&mut s0, &mut s1],
            };
            assert!(apply(&step, Operands { wire, sources: &sources, input, output }, true));
            (weights, master, slots) = (next, next_master, [s0, s1]);
        }
        match wire {
            Wire::F64 | Wire::F32 => decode(wire, &weights),
            _ => master.into_iter().map(f64::from).collect(),
        }
    }

    /// The largest error of an element, as a share of it.
    fn error(&self, got: &[f64]) -> f64 {
        assert_eq!(got.len(), self.f64.len());
        let errors = got.iter().zip(&self.f64).map(|(got, want)| (got - want).abs() / want.abs());
        errors.fold(0.0, f64::max)
    }
}

#[test]
fn optimizers_end_where_torch_does() {
    let Golden { elements, steps, cases } = golden();
    for case in &cases {
        let of_torch = case.error(&case.f32);
        for wire in [Wire::F64, Wire::F32].into_iter().chain(NARROW) {
            let error = case.error(&case.run(wire, elements as u64, steps));
            let most = if wire == Wire::F64 { 1e-13 } else { of_torch.max(1e-6) };
            let what = format!("{} {:?} of {wire:?}", case.reducer, case.settings);
            assert!(error <= most, "{what}: {error:e}, and torch's fp32 {of_torch:e}");
        }
    }
}

#[test]
fn every_optimizer_has_a_golden_run() {
    let cases = golden().cases;
    let has = |reducer: &Reducer| cases.iter().any(|case| case.reducer == reducer.name());
    assert!(Reducer::all().filter(|reducer| reducer.averages()).all(|reducer| has(&reducer)));
    // A run says something only if its weights have gone somewhere.
    for case in &cases {
        let moved = (0..).zip(&case.f64).filter(|(i, end)| (weight(*i) - **end).abs() > 1e-3).count();
        assert!(moved > case.f64.len() / 2, "{}", case.reducer);
    }
}

#[derive(Deserialize)]
struct GoldenGroups {
    steps: u64,
    cases: Vec<Groups>,
}

#[derive(Deserialize)]
struct Groups {
    reducer: String,
    settings: BTreeMap<String, String>,
    /// Where torch ends with each tensor.
    f64: BTreeMap<String, Vec<f64>>,
    f32: BTreeMap<String, Vec<f64>>,
}

/// The tensors, in the order in which they take elements.
const TENSORS: [(&str, usize); 4] =
    [("body.weight", 10), ("body.bias", 4), ("norm.weight", 4), ("head.weight", 6)];

impl Groups {
    /// The weights of each tensor after all steps, of two learners' contributions each; of narrow types their masters.
    fn run(&self, (wire, dtype): (Wire, DType), steps: u64) -> BTreeMap<String, Vec<f64>> {
        let settings = self.settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let settings = settings.chain([("reducer", self.reducer.as_str())]);
        let controls = Controls::default().with_all(settings).unwrap();
        let tensors = TENSORS.map(|(name, count)| (name.to_owned(), dtype, vec![count]));
        let layout = ModelLayout::new(tensors.to_vec(), 64 << 10).unwrap();
        let names = || layout.tensors().iter().map(|tensor| tensor.name.as_str());
        assert!(names().eq(TENSORS.iter().map(|(name, _)| *name)));
        let (frozen, groups) = controls.of_tensors(names().map(|name| (name, dtype))).unwrap();
        let partition = layout.partition(&[BlockId(0)]).unwrap();
        let store =
            PartitionStore::new(partition, controls.widest_reducer(), Limits::default(), Home::default())
                .unwrap();
        let elements = TENSORS.iter().map(|(_, count)| *count as u64).sum();
        assert!(store.load(BlockId(0), &encode(wire, (0..elements).map(weight))).unwrap());
        if has_8_bits(wire) {
            let masters = encode(Wire::F32, (0..elements).map(weight));
            assert!(store.load_piece(BlockId(0), DataKind::Masters, &masters).unwrap());
        }
        store.finish_loading().unwrap();
        let mut written = fixedbitset::FixedBitSet::with_capacity(TENSORS.len());
        written.insert_range(..);
        written.difference_with(&frozen);
        let mut before = TensorSteps::uniform(TENSORS.len(), 0);
        for t in 1..=steps {
            let next = before.next(&written);
            before = before.after(&next);
            let (reducer, hyper) = (controls.reducer, controls.hyper.clone());
            let step = Step { reducer, hyper, contributions: 2, t, ..Step::default() };
            let work = Work::Reduce {
                step,
                tensors: next,
                groups: groups.clone(),
                factors: Default::default(),
                fresh_state: t == 1,
            };
            let job = store.begin(Version(t - 1), work, true).unwrap();
            // Gradients that the type has too few bits for come as sums.
            let sent = if has_8_bits(wire) { Wire::F32 } else { wire };
            let [first, second] =
                [0.5, -0.5].map(|away| encode(sent, (0..elements).map(|i| gradient(t, i) + away)));
            let payload = |bytes| if sent == wire { Payload::Plain(bytes) } else { Payload::Wide(bytes) };
            assert!(job.add(BlockId(0), payload(&first)).unwrap());
            assert!(job.finish(BlockId(0), Some(payload(&second))).unwrap());
            if job.is_in_place() {
                store.make(&job).unwrap().block(BlockId(0)).unwrap();
            }
            assert!(store.conclude(&job).unwrap().is_none());
        }
        let kept = store.keep().unwrap();
        let (what, of) =
            if wire.is_narrow() { (DataKind::Masters, Wire::F32) } else { (DataKind::Weights, wire) };
        let mut all = decode(of, &kept.bytes(BlockId(0), what).unwrap()).into_iter();
        TENSORS
            .iter()
            .map(|(name, count)| ((*name).to_owned(), all.by_ref().take(*count).collect()))
            .collect()
    }

    /// The largest error of an element, as a share of it.
    fn error(&self, got: &BTreeMap<String, Vec<f64>>) -> f64 {
        let pairs = got.iter().flat_map(|(name, values)| values.iter().zip(&self.f64[name]));
        pairs.map(|(got, want)| (got - want).abs() / want.abs()).fold(0.0, f64::max)
    }
}

#[test]
fn groups_of_tensors_end_where_torchs_parameter_groups_do() {
    let types = [
        (Wire::F64, DType::F64),
        (Wire::F32, DType::F32),
        (Wire::F16, DType::F16),
        (Wire::BF16, DType::BF16),
        (Wire::E4M3, DType::E4M3),
        (Wire::E5M2, DType::E5M2),
    ];
    let GoldenGroups { steps, cases } =
        serde_json::from_str(include_str!("golden/torch_groups.json")).unwrap();
    for case in &cases {
        let of_torch = case.error(&case.f32);
        for (wire, dtype) in types {
            let got = case.run((wire, dtype), steps);
            assert_eq!(got.values().map(Vec::len).sum::<usize>(), 24);
            let error = case.error(&got);
            let most = if wire == Wire::F64 { 1e-13 } else { of_torch.max(1e-6) };
            let what = format!("{} {:?} of {wire:?}", case.reducer, case.settings);
            assert!(error <= most, "{what}: {error:e}, and torch's fp32 {of_torch:e}");
        }
    }
}
