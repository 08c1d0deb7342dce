//! The reduction kernels against the optimizers' definitions in f64, and against themselves: every
//! instruction set, address and length gives the same bits.

use half::{bf16, f16};
use libmodelio::bytes::kernels::{
    Input, Level, Operands, Output, Source, Wire, accumulate, all_finite, squares, stream_copy, widen,
    with_level,
};
use libmodelio::vocabulary::norm::Norm;
use libmodelio::vocabulary::reducer::{Aggregation, Hyper, Reducer, Step};
use proptest::prelude::*;
use ps_backend::reducers::apply;

use test_devices::formulas::{self, Brought, Constants};
use test_devices::numbers;

const WIRES: [Wire; 5] = [Wire::F32, Wire::F16, Wire::BF16, Wire::E4M3, Wire::E5M2];

/// Elements of `T` that start `offset` elements after a 64-byte boundary.
struct Placed<T> {
    memory: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy + Default> Placed<T> {
    fn new(values: &[T], offset: usize) -> Self {
        let mut memory = vec![T::default(); values.len() + offset + 64];
        let start = memory.as_ptr().align_offset(64) + offset;
        memory[start..][..values.len()].copy_from_slice(values);
        Self { memory, start, len: values.len() }
    }

    fn zeros(len: usize, offset: usize) -> Self {
        Self::new(&vec![T::default(); len], offset)
    }

    fn get(&self) -> &[T] {
        &self.memory[self.start..][..self.len]
    }

    fn get_mut(&mut self) -> &mut [T] {
        &mut self.memory[self.start..][..self.len]
    }

    /// Fails if anything around the elements was written.
    fn assert_clean(&self)
    where
        T: PartialEq + std::fmt::Debug,
    {
        let (before, rest) = self.memory.split_at(self.start);
        assert!(before.iter().chain(&rest[self.len..]).all(|&value| value == T::default()));
    }
}

/// Pseudo-random values in -2..2.
fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        ((state >> 40) as f32 / (1u64 << 22) as f32) - 2.0
    };
    (0..n).map(|_| next()).collect()
}

fn encode(wire: Wire, values: &[f32]) -> Vec<u8> {
    numbers::encode(wire, values.iter().map(|value| f64::from(*value)))
}

fn decode(wire: Wire, bytes: &[u8]) -> Vec<f32> {
    numbers::decode(wire, bytes).into_iter().map(|value| value as f32).collect()
}

/// One reduction to test: everything but the instruction set.
#[derive(Clone, Debug)]
struct Case {
    wire: Wire,
    step: Step,
    elements: usize,
    /// Whether each source is an accumulator, and the address it has.
    sources: Vec<(bool, usize)>,
    master: bool,
    /// Of every output from a line's start, and of the state outputs beyond that.
    offsets: (usize, usize),
    seed: u64,
}

struct Outcome {
    weights: Vec<u8>,
    master: Option<Vec<f32>>,
    slots: [Vec<f32>; 2],
}

impl Outcome {
    fn bits(&self) -> (&[u8], Vec<u32>) {
        let all = self.master.iter().flatten().chain(self.slots.iter().flatten());
        (&self.weights, all.map(|value| value.to_bits()).collect())
    }
}

impl Case {
    fn has_slot(&self, slot: usize) -> bool {
        slot < self.step.reducer.state_slots()
    }

    fn source_values(&self, i: usize) -> Vec<f32> {
        // Of several sizes and with every bit used, so that another order of adding gives other bits.
        let scale = [1.0, 0.3, 0.007][i % 3];
        let mut values = random(self.seed + 10 + i as u64, self.elements);
        values.iter_mut().for_each(|value| *value *= scale);
        if self.sources[i].0 { values } else { decode(self.wire, &encode(self.wire, &values)) }
    }

    fn master_values(&self) -> Vec<f32> {
        let values = random(self.seed, self.elements);
        if self.master { values } else { decode(self.wire, &encode(self.wire, &values)) }
    }

    fn slot_values(&self, slot: usize) -> Vec<f32> {
        let n = if self.has_slot(slot) { self.elements } else { 0 };
        let values = random(self.seed + 1 + slot as u64, n);
        // A mean square is never negative.
        if slot == 1 || [Reducer::RmsProp, Reducer::AdaGrad].contains(&self.step.reducer) {
            values.iter().map(|value| value.abs()).collect()
        } else {
            values
        }
    }

    fn run(&self) -> Outcome {
        let values: Vec<_> = (0..self.sources.len()).map(|i| self.source_values(i)).collect();
        let wires: Vec<_> = (values.iter().zip(&self.sources))
            .map(|(values, &(_, offset))| Placed::new(&encode(self.wire, values), offset))
            .collect();
        let sources: Vec<_> = (0..values.len())
            .map(|i| if self.sources[i].0 { Source::Acc(&values[i]) } else { Source::Wire(wires[i].get()) })
            .collect();
        let weights = encode(self.wire, &self.master_values());
        let master = self.master.then(|| self.master_values());
        let slots = [self.slot_values(0), self.slot_values(1)];

        let (offset, apart) = self.offsets;
        let mut weights_out = Placed::zeros(weights.len(), offset * self.wire.size());
        let mut master_out = Placed::zeros(self.elements, offset);
        let [mut slot0, mut slot1] = [0, 1].map(|i| Placed::zeros(slots[i].len(), offset + apart));
        let input = Input { weights: &weights, master: master.as_deref(), slots: [&slots[0], &slots[1]] };
        let output = Output {
            weights: weights_out.get_mut(),
            master: self.master.then_some(master_out.get_mut()),
            slots: [slot0.get_mut(), slot1.get_mut()],
        };
        let finite = apply(&self.step, Operands { wire: self.wire, sources: &sources, input, output }, true);
        assert!(finite);
        weights_out.assert_clean();
        [&master_out, &slot0, &slot1].into_iter().for_each(Placed::assert_clean);
        Outcome {
            weights: weights_out.get().to_vec(),
            master: self.master.then(|| master_out.get().to_vec()),
            slots: [slot0.get().to_vec(), slot1.get().to_vec()],
        }
    }

    /// PyTorch's formulas on one element: the new weight and state, and the size of the terms.
    /// The size bounds the rounding error, so a gradient's terms count with their factors.
    fn reference(&self, i: usize, values: &[Vec<f32>], w: f64, slots: [f64; 2]) -> (f64, [f64; 2], f64) {
        let (step, h) = (&self.step, &self.step.hyper);
        let of = Constants::of(h);
        let sum: f64 = values.iter().map(|source| f64::from(source[i])).sum();
        let terms = values.iter().map(|source| f64::from(source[i].abs())).sum::<f64>() + w.abs() + 1.0;
        let clip = step.norm.map_or(1.0, |norm| (f64::from(h.clip_norm) / (norm.get() + 1e-6)).min(1.0));
        let limit = if h.clip_value == 0.0 { f64::INFINITY } else { f64::from(h.clip_value) };
        let count = f64::from(step.contributions.max(1));
        let change = sum / f64::from(h.loss_scale);
        let clipped = clip * change;
        let is_mean = h.aggregation == Aggregation::Mean;
        let gradient = if is_mean { clipped / count } else { clipped }.clamp(-limit, limit);
        let brought = Brought {
            sum: change,
            mean: change / count,
            gradient,
            total: clipped.clamp(-limit, limit),
            last: values.last().map(|last| f64::from(last[i])),
        };
        let at = (step.t, step.factor());
        let (new, state) = formulas::step(step.reducer, &of, at, &brought, w, slots);
        let mut size = terms;
        match step.reducer {
            Reducer::RmsProp | Reducer::AdaGrad => size += of.rate * terms / (state[0].sqrt() + of.epsilon),
            // Where rounding may change the sign, the step may go either way.
            Reducer::Lion => {
                let update = of.betas[0] * slots[0] + (1.0 - of.betas[0]) * gradient;
                if update != 0.0 && update.abs() < 1e-6 * (terms + slots[0].abs()) {
                    size += 2e6 * of.rate;
                }
            }
            Reducer::Adam | Reducer::AdamW | Reducer::Lamb => {
                let [c1, c2] = of.betas.map(|beta| 1.0 - beta.powi(step.t as i32));
                size += at.1 * of.rate / c1 * terms / ((state[1] / c2).sqrt() + of.epsilon);
            }
            _ => {}
        }
        const PENALISED: [Reducer; 5] =
            [Reducer::Momentum, Reducer::Nesterov, Reducer::RmsProp, Reducer::AdaGrad, Reducer::Adam];
        let g = if PENALISED.contains(&step.reducer) { gradient + of.decay * w } else { gradient };
        size += (new - w).abs() + state[0].abs() + state[1].abs() + g * g;
        (new, state, size)
    }

    fn check(&self) {
        let mut outcomes = Level::available().map(|level| with_level(level, || self.run()).unwrap());
        let outcome = outcomes.next().unwrap();
        for other in outcomes {
            assert_eq!(outcome.bits(), other.bits(), "levels differ");
        }
        if let Some(master) = &outcome.master {
            assert_eq!(outcome.weights, encode(self.wire, master), "weights are not the rounded master");
        }
        let new = outcome.master.clone().unwrap_or_else(|| decode(self.wire, &outcome.weights));
        // Of normal numbers, and below them.
        let (ulp, least) = match (self.wire, self.master) {
            (Wire::F16, false) => (1.0 / 2048.0, 0.0),
            (Wire::BF16, false) => (1.0 / 256.0, 0.0),
            (Wire::E4M3, false) => (1.0 / 16.0, 2f64.powi(-10)),
            (Wire::E5M2, false) => (1.0 / 8.0, 2f64.powi(-17)),
            _ => (0.0, 0.0),
        };
        let largest = if self.wire == Wire::E4M3 && !self.master { 448.0 } else { f64::INFINITY };

        let values: Vec<_> = (0..self.sources.len()).map(|i| self.source_values(i)).collect();
        let old = self.master_values();
        let slots = [self.slot_values(0), self.slot_values(1)];
        for i in 0..self.elements {
            let before = [0, 1].map(|slot| slots[slot].get(i).map_or(0.0, |&value| f64::from(value)));
            let (w, after, size) = self.reference(i, &values, f64::from(old[i]), before);
            let close = |got: f32, want: f64, rounding: f64| {
                let error = (f64::from(got) - want).abs();
                assert!(error <= 1e-6 * size + rounding, "element {i}: got {got}, want {want}");
            };
            let w = w.clamp(-largest, largest);
            close(new[i], w, w.abs() * ulp + least);
            for (slot, want) in outcome.slots.iter().zip(after) {
                if let Some(&got) = slot.get(i) {
                    close(got, want, 0.0);
                }
            }
        }
    }
}

fn hyper() -> impl Strategy<Value = Hyper> {
    let rates = (0.0001f32..0.1, prop::sample::select(vec![0.0f32, 0.01]));
    let decays = (0.0f32..1.0, prop::sample::select(vec![0.0f32, 0.5]));
    let carry = prop::sample::select(vec![0.0f32, 0.5, 1.0]);
    let alpha = prop::sample::select(vec![0.0f32, 0.5, 0.99]);
    let mean = any::<bool>();
    let gradient = prop::sample::select(vec![(0.0f32, 1.0f32), (0.25, 1.0), (0.0, 3.0), (0.01, 1024.0)]);
    let all = (rates, decays, carry, alpha, mean, gradient);
    all.prop_map(|(rates, decays, carry, alpha, mean, (clip_value, loss_scale))| Hyper {
        clip_value,
        loss_scale,
        learning_rate: rates.0,
        weight_decay: rates.1,
        momentum: decays.0,
        dampening: decays.1,
        carry,
        alpha,
        aggregation: if mean { Aggregation::Mean } else { Aggregation::Sum },
        ..Hyper::default()
    })
}

fn case() -> impl Strategy<Value = Case> {
    let reducer = prop::sample::select(Reducer::all().collect::<Vec<_>>());
    // Some are clipped: to a half, and not at all.
    let norm = prop::sample::select(vec![None, Some(4.0), Some(0.5)]);
    let step =
        (reducer, hyper(), 0u32..6, 1u64..40, norm).prop_map(|(reducer, hyper, contributions, t, norm)| {
            Step {
                reducer,
                hyper: Hyper { clip_norm: norm.map_or(0.0, |_| 2.0), ..hyper },
                contributions,
                t,
                norm: norm.map(Norm::new),
                factor: norm.filter(|_| reducer.is_layerwise()).map(|norm| Norm::new(norm / 4.0)),
                ..Step::default()
            }
        });
    // Around lines, and long enough to be streamed.
    let elements = prop_oneof![0usize..140, 8150usize..8300];
    let sources = prop::collection::vec((any::<bool>(), 0usize..8), 0..5);
    let offsets = (0usize..40, prop_oneof![4 => Just(0), 1 => 0usize..16]);
    (prop::sample::select(WIRES.to_vec()), step, elements, sources, any::<bool>(), offsets, any::<u32>())
        .prop_map(|(wire, step, elements, sources, master, offsets, seed)| Case {
            wire,
            step,
            elements,
            sources,
            master: master && wire != Wire::F32,
            offsets,
            seed: seed.into(),
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn reductions_follow_the_definitions(case in case()) {
        case.check();
    }
}

/// All others compare the levels that there are.
#[test]
#[cfg(target_arch = "aarch64")]
fn arm_has_a_level_of_its_own() {
    assert_eq!(Level::available().collect::<Vec<_>>(), [Level::Neon, Level::Portable]);
}

#[test]
fn every_reducer_takes_every_type_and_mix_of_sources() {
    let mixes: [&[(bool, usize)]; 6] = [
        &[],
        &[(false, 0)],
        &[(true, 0)],
        &[(false, 1), (true, 0)],
        &[(true, 0), (false, 2), (false, 3)],
        &[(false, 0); 4],
    ];
    for (reducer, wire) in Reducer::all().flat_map(|reducer| WIRES.map(|wire| (reducer, wire))) {
        for (sources, (t, elements)) in mixes.iter().flat_map(|mix| [(1, 77), (3, 8209)].map(|at| (mix, at)))
        {
            let step = Step { reducer, hyper: Hyper::default(), contributions: 3, t, ..Step::default() };
            let (master, sources) = (wire != Wire::F32, sources.to_vec());
            Case { wire, step, elements, sources, master, offsets: (5, 0), seed: t }.check();
        }
    }
}

/// Whether `sources` are found finite must be `want`, each of them first in turn.
fn check_finite(wire: Wire, reducer: Reducer, n: usize, sources: &[Source<'_>], want: bool) {
    let step = Step { reducer, hyper: Hyper::default(), contributions: 2, t: 2, ..Step::default() };
    let (weights, zeros) = (vec![0; n * wire.size()], vec![0.0; n]);
    let slots = [0, 1].map(|slot| if slot < reducer.state_slots() { &zeros[..] } else { &[] });
    // Between lines, and all equally far, so that long ones are streamed from a ragged start.
    let mut out = Placed::zeros(weights.len(), 5 * wire.size());
    let [mut slot0, mut slot1] = slots.map(|slot| Placed::new(slot, 5));
    for (turn, check) in (0..sources.len()).flat_map(|turn| [(turn, false), (turn, true)]) {
        let sources = [&sources[turn..], &sources[..turn]].concat();
        let input = Input { weights: &weights, master: None, slots };
        let slots = [slot0.get_mut(), slot1.get_mut()];
        let output = Output { weights: out.get_mut(), master: None, slots };
        let finite = apply(&step, Operands { wire, sources: &sources, input, output }, check);
        assert_eq!(finite, want || !check, "{wire:?} {reducer:?} {turn} of {}", sources.len());
    }
}

/// `value`, if it is bad, must be found at `at`: alone, and in any of up to six sources.
fn check_found(wire: Wire, at: usize, value: f32, n: usize) {
    let (good, mut values, want) = (random(1, n), random(2, n), value.is_finite());
    values[at] = value;
    let (good, bytes) = (encode(wire, &good), Placed::new(&encode(wire, &values), 1));
    assert_eq!(all_finite(wire, bytes.get()), want);
    let mut acc = vec![0.0; n];
    assert_eq!(accumulate(wire, bytes.get(), &mut acc, true), want);
    let mut sources = [Source::Wire(&good); 6];
    // The others compute as some of these do.
    for reducer in Reducer::all().filter(|reducer| !reducer.content().is_weights()) {
        for (bad, least) in [(Source::Wire(bytes.get()), 1), (Source::Acc(&acc), 2)] {
            sources[0] = bad;
            // Which position is bad makes no difference to how many sources are read at once.
            (least..=6).filter(|count| at == 0 || [least, 6].contains(count)).for_each(|count| {
                check_finite(wire, reducer, n, &sources[..count], want);
            });
        }
    }
}

#[test]
fn a_bad_value_is_found_at_every_position_in_every_source() {
    for (level, wire) in Level::available().flat_map(|level| WIRES.map(|wire| (level, wire))) {
        let largest = match wire {
            Wire::F64 => unreachable!("not among WIRES"),
            Wire::F32 => f32::MAX,
            Wire::F16 => f16::MAX.to_f32(),
            Wire::BF16 => bf16::MAX.to_f32(),
            Wire::E4M3 => 448.0,
            Wire::E5M2 => 57_344.0,
        };
        let check = |at, value, n| with_level(level, || check_found(wire, at, value, n)).unwrap();
        for (n, at) in [1, 16, 50].into_iter().flat_map(|n| (0..n).map(move |at| (n, at))) {
            check(at, f32::NAN, n);
            // A position is found as for NaN, whatever the value is.
            if [0, n / 2, n - 1].contains(&at) {
                let others = [f32::INFINITY, f32::NEG_INFINITY, largest, -largest, 0.0, f32::MIN_POSITIVE];
                others.into_iter().for_each(|value| check(at, value, n));
            }
        }
        // In the ragged ends of streamed blocks as well.
        [0, 10, 26, 4084, 8187, 8199].into_iter().for_each(|at| check(at, f32::NAN, 8200));
        check(0, 0.0, 8200);
    }
}

#[test]
fn sums_are_those_of_scalars_in_the_given_order() {
    let hyper = Hyper { carry: 0.0, ..Hyper::default() };
    let step = Step { reducer: Reducer::Sum, hyper, contributions: 6, t: 1, ..Step::default() };
    // Around lines, and around where streaming begins.
    let lengths = (1..=49).chain(63..=65).chain(4094..=4098).chain([8192, 8209]);
    for (elements, wire) in lengths.flat_map(|elements| WIRES.map(|wire| (elements, wire))) {
        for (count, offset) in (1..=6).flat_map(|count| [0, 1, 9].map(|offset| (count, offset))) {
            let sources = (0..count).map(|i| (false, offset * i)).collect();
            let (step, master, offsets) = (step.clone(), wire != Wire::F32, (offset, 0));
            let case = Case { wire, step, elements, sources, master, offsets, seed: 7 };
            let values: Vec<_> = (0..count).map(|i| case.source_values(i)).collect();
            let sum = |at: usize| values.iter().map(|source| source[at]).reduce(|a, b| a + b).unwrap();
            let want: Vec<_> = (0..elements).map(sum).collect();
            for level in Level::available() {
                let outcome = with_level(level, || case.run()).unwrap();
                assert_eq!(outcome.weights, encode(wire, &want), "{level:?} {case:?}");
                let exact = |master: &Vec<f32>| encode(Wire::F32, master) == encode(Wire::F32, &want);
                assert!(outcome.master.as_ref().is_none_or(exact), "{level:?} {case:?}");
            }
        }
    }
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

#[test]
fn halves_widen_as_the_half_crate_says() {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for (level, wire) in Level::available().flat_map(|level| [(level, Wire::F16), (level, Wire::BF16)]) {
        let mut wide = vec![0.0; 1 << 16];
        with_level(level, || widen(wire, &all, &mut wide)).unwrap();
        let want = decode(wire, &all);
        assert!(wide.iter().zip(want).all(|(&got, want)| same(got, want)), "{level:?} {wire:?}");
    }
}

#[test]
fn halves_round_as_the_half_crate_says() {
    // Every half, its neighbours in fp32, the ties between halves with theirs, and a sweep of all exponents.
    let mut values = Vec::new();
    for half in 0..=u16::MAX {
        for wide in [f16::from_bits(half).to_f32(), bf16::from_bits(half).to_f32()] {
            for tie in [0, 0x1000, 0x8000] {
                values.extend(
                    [-1, 0, 1].map(|d: i32| f32::from_bits(wide.to_bits().wrapping_add_signed(tie + d))),
                );
            }
        }
    }
    values.extend((0..=u32::MAX).step_by(40_009).map(f32::from_bits));
    let step = |reducer| Step { reducer, hyper: Hyper::default(), contributions: 1, t: 1, ..Step::default() };
    for (level, wire) in Level::available().flat_map(|level| [(level, Wire::F16), (level, Wire::BF16)]) {
        let zeros = vec![0; values.len() * 2];
        let mut weights = vec![0; values.len() * 2];
        let input = Input { weights: &zeros, master: None, slots: [&[], &[]] };
        let output = Output { weights: &mut weights, master: None, slots: [&mut [], &mut []] };
        let sources = [Source::Acc(&values)];
        with_level(level, || {
            apply(&step(Reducer::Assign), Operands { wire, sources: &sources, input, output }, false)
        })
        .unwrap();
        for ((got, want), value) in
            decode(wire, &weights).into_iter().zip(decode(wire, &encode(wire, &values))).zip(&values)
        {
            assert!(same(got, want), "{level:?} {wire:?}: {value:e} became {got:e}, not {want:e}");
        }
    }
}

#[test]
fn assignment_keeps_every_bit() {
    let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for (level, wire) in Level::available().flat_map(|level| WIRES.map(|wire| (level, wire))) {
        let step = Step {
            reducer: Reducer::Assign,
            hyper: Hyper::default(),
            contributions: 2,
            t: 1,
            ..Step::default()
        };
        let (zeros, mut weights) = (vec![0; bytes.len()], vec![0; bytes.len()]);
        let input = Input { weights: &zeros, master: None, slots: [&[], &[]] };
        let output = Output { weights: &mut weights, master: None, slots: [&mut [], &mut []] };
        let sources = [Source::Wire(&zeros), Source::Wire(&bytes)];
        assert!(
            with_level(level, || apply(&step, Operands { wire, sources: &sources, input, output }, false))
                .unwrap()
        );
        assert_eq!(weights, bytes);
    }
}

#[test]
fn sums_are_accumulated_in_fp32_and_in_order() {
    for (level, wire) in Level::available().flat_map(|level| WIRES.map(|wire| (level, wire))) {
        for (n, offset) in [(0, 0), (1, 3), (47, 0), (9000, 0), (9001, 7)] {
            let sources = [1, 2, 3].map(|seed| encode(wire, &random(seed, n)));
            let mut acc = Placed::new(&vec![f32::NAN; n], offset);
            for (i, source) in sources.iter().enumerate() {
                let source = Placed::new(source, i);
                let finite =
                    with_level(level, || accumulate(wire, source.get(), acc.get_mut(), i == 0)).unwrap();
                assert!(finite);
            }
            let [a, b, c] = sources.map(|source| decode(wire, &source));
            let want: Vec<_> = (0..n).map(|i| a[i] + b[i] + c[i]).collect();
            assert_eq!(acc.get(), want);
            acc.assert_clean();
        }
    }
}

#[test]
fn squares_are_added_up_in_the_same_order_at_every_level() {
    for (n, two) in [0, 1, 7, 8, 9, 64, 9001].into_iter().flat_map(|n| [(n, false), (n, true)]) {
        let sums = [random(1, 2 * n), random(2, 2 * n)];
        let doubles = |sum: &Vec<f32>| {
            sum.chunks(2)
                .map(|two| f64::from_bits(u64::from(two[0].to_bits()) | u64::from(two[1].to_bits()) << 32))
                .collect::<Vec<_>>()
        };
        for wire in [Wire::F32, Wire::BF16, Wire::F64] {
            let words = wire.words() * n;
            let all = [&sums[0][..words], &sums[1][..words]];
            let all = if two { &all[..] } else { &all[..1] };
            let values: Vec<f64> = match (wire, two) {
                (Wire::F64, false) => doubles(&sums[0]),
                (Wire::F64, true) => {
                    doubles(&sums[0]).iter().zip(doubles(&sums[1])).map(|(a, b)| a + b).collect()
                }
                (_, false) => all[0].iter().map(|&a| f64::from(a)).collect(),
                (_, true) => all[0].iter().zip(all[1]).map(|(a, b)| f64::from(a + b)).collect(),
            };
            let mut lanes = [0.0; 8];
            values.iter().enumerate().for_each(|(i, value)| lanes[i % 8] += value * value);
            let want: f64 = lanes.iter().sum();
            for level in Level::available() {
                let got = with_level(level, || squares(wire, all)).unwrap();
                assert_eq!(got.to_bits(), want.to_bits(), "{level:?} {wire:?} {n} {two}");
            }
        }
    }
}

#[test]
fn copies_of_any_length_and_address_are_exact() {
    for level in Level::available() {
        for (n, from, to) in [(0, 0, 0), (100, 1, 2), (20_000, 0, 0), (20_001, 3, 1), (70_000, 0, 63)] {
            let src = Placed::new(&(0..n).map(|i| (i % 251) as u8).collect::<Vec<_>>(), from);
            let mut dst = Placed::zeros(n, to);
            with_level(level, || stream_copy(src.get(), dst.get_mut())).unwrap();
            assert_eq!(src.get(), dst.get());
            dst.assert_clean();
        }
    }
}

#[test]
fn the_first_momentum_step_ignores_the_old_buffer() {
    let step = Step {
        reducer: Reducer::Momentum,
        hyper: Hyper { learning_rate: 0.01, ..Hyper::default() },
        contributions: 1,
        t: 1,
        ..Step::default()
    };
    let (g, w) = (encode(Wire::F32, &[2.0; 20]), encode(Wire::F32, &[1.0; 20]));
    let (mut new, mut buffer) = (vec![0; 80], [0.0; 20]);
    let input = Input { weights: &w, master: None, slots: [&[f32::NAN; 20], &[]] };
    let output = Output { weights: &mut new, master: None, slots: [&mut buffer, &mut []] };
    assert!(apply(&step, Operands { wire: Wire::F32, sources: &[Source::Wire(&g)], input, output }, true));
    assert_eq!((buffer, decode(Wire::F32, &new)), ([2.0; 20], vec![0.98; 20]));
}

#[test]
#[should_panic(expected = "a source is not of 4 elements")]
fn a_short_source_is_refused() {
    let step =
        Step { reducer: Reducer::Sum, hyper: Hyper::default(), contributions: 1, t: 1, ..Step::default() };
    let input = Input { weights: &[0; 16], master: None, slots: [&[], &[]] };
    let output = Output { weights: &mut [0; 16], master: None, slots: [&mut [], &mut []] };
    apply(&step, Operands { wire: Wire::F32, sources: &[Source::Wire(&[0; 12])], input, output }, true);
}
