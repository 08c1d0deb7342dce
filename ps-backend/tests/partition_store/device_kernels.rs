//! The kernels of a device make the CPU's bits, of any numbers, at any place.

use libmodelio::bytes::kernels::{self, Input, Operands, Output, Source, Wire};
use libmodelio::vocabulary::norm::Norm;
use libmodelio::vocabulary::reducer::{Hyper, Reducer, Step};
use ps_backend::device::{Accelerator, Adoption, Device, DeviceError, Launch, Memory, Stream};
use ps_backend::reducers;

use test_devices::{fp8, homes};

const WIRES: [Wire; 6] = [Wire::F32, Wire::F64, Wire::F16, Wire::BF16, Wire::E4M3, Wire::E5M2];

/// Any bits: numbers of all sizes, among them subnormal ones, infinities and NaN.
fn words(random: &mut fastrand::Rng, count: usize, wild: bool) -> Vec<f32> {
    let one = |random: &mut fastrand::Rng| match random.u8(..8) {
        0 if wild => f32::from_bits(random.u32(..)),
        1 => f32::from_bits(random.u32(..) & 0x807f_ffff),
        2 => f32::from_bits(random.u32(..) & 0x80ff_ffff | 0x3800_0000),
        _ => (random.f32() - 0.5) * 4.0,
    };
    (0..count).map(|_| one(random)).collect()
}

/// The same for elements of a type. The upper word of an f64 decides about its size.
fn elements(random: &mut fastrand::Rng, wire: Wire, count: usize, wild: bool) -> Vec<f32> {
    let mut all = words(random, count * wire.words(), wild);
    if wire == Wire::F64 {
        for pair in all.as_chunks_mut::<2>().0 {
            let value = f64::from(pair[1]) + f64::from(pair[0]) * 1e-9;
            let bytes = value.to_le_bytes();
            let [low, high] = [0, 4].map(|at| u32::from_le_bytes(*bytes[at..].first_chunk().unwrap()));
            *pair = [f32::from_bits(low), f32::from_bits(high)];
        }
    }
    all
}

/// A device does something, which is waited for.
fn does(accelerator: &Accelerator, what: impl FnOnce(&dyn Device, Stream) -> Result<(), DeviceError>) {
    let device = accelerator.device();
    let stream = device.open_stream().unwrap();
    what(&**device, stream).unwrap();
    device.synchronize(stream).unwrap();
    device.close_stream(stream);
}

/// Values at a distance from a multiple of 16 bytes, in the device's memory.
struct There {
    memory: Memory,
    at: usize,
    len: usize,
}

impl There {
    fn new(accelerator: &Accelerator, at: usize, bytes: &[u8]) -> There {
        let memory = Memory::take(accelerator.device(), at + bytes.len().max(1)).unwrap();
        let there = There { memory, at, len: bytes.len() };
        // SAFETY: the copy is waited for.
        does(accelerator, |device, stream| unsafe { device.upload(stream, bytes, there.address()) });
        there
    }

    fn address(&self) -> ps_backend::device::Address {
        self.memory.at(self.at..self.at + self.len)
    }

    fn bytes(&self, accelerator: &Accelerator) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        // SAFETY: the copy is waited for.
        does(accelerator, |device, stream| unsafe {
            device.download(stream, self.address(), &raw mut bytes[..])
        });
        bytes
    }
}

/// Equal bits, or both NaN.
fn assert_same(wire: Wire, got: &[u8], want: &[u8], what: &str) {
    let is_nan = |bytes: &[u8]| match wire {
        Wire::F32 => f32::from_le_bytes(*bytes.first_chunk().unwrap()).is_nan(),
        Wire::F64 => f64::from_le_bytes(*bytes.first_chunk().unwrap()).is_nan(),
        Wire::F16 => half::f16::from_le_bytes(*bytes.first_chunk().unwrap()).is_nan(),
        Wire::BF16 => half::bf16::from_le_bytes(*bytes.first_chunk().unwrap()).is_nan(),
        Wire::E4M3 | Wire::E5M2 => fp8::value(wire, bytes[0]).is_nan(),
    };
    assert_eq!(got.len(), want.len());
    for (at, (got, want)) in got.chunks(wire.size()).zip(want.chunks(wire.size())).enumerate() {
        assert!(
            got == want || is_nan(got) && is_nan(want),
            "{what}: element {at} is {got:x?}, not {want:x?}"
        );
    }
}

fn steps(random: &mut fastrand::Rng) -> Vec<Step> {
    let norm = Norm::new(3.0);
    let hypers = [
        Hyper::default(),
        Hyper {
            learning_rate: 0.37,
            momentum: 0.83,
            dampening: 0.21,
            beta1: 0.77,
            beta2: 0.91,
            alpha: 0.63,
            epsilon: 1e-3,
            weight_decay: 0.11,
            carry: 0.0,
            clip_norm: 1.5,
            ..Hyper::default()
        },
        Hyper { carry: -0.7, learning_rate: 1e-4, clip_value: 0.4, ..Hyper::default() },
        Hyper { carry: 0.0, clip_value: 1e-3, loss_scale: 3.0, weight_decay: 0.01, ..Hyper::default() },
    ];
    let mut all = Vec::new();
    for reducer in Reducer::all() {
        for hyper in &hypers {
            for t in [1, 2, 1 + random.u64(..5_000)] {
                let norm = reducer.measures(hyper).then_some(norm);
                let step = Step {
                    reducer,
                    hyper: hyper.clone(),
                    contributions: random.u32(1..9),
                    t,
                    norm,
                    ..Step::default()
                };
                all.push(Step { norm: None, ..step.clone() });
                all.push(step);
            }
        }
    }
    all
}

fn check(accelerator: &Accelerator, random: &mut fastrand::Rng, wire: Wire, step: &Step, wild: bool) {
    let (count, phase, sum_count) = (random.usize(0..40), random.usize(0..4), random.usize(0..3));
    if step.reducer == Reducer::Assign && sum_count == 0 {
        return;
    }
    let what = format!("{wire:?}, {step:?}, {count} elements at {phase}, {sum_count} sums");
    let slot_count = step.reducer.state_slots();
    let values = elements(random, wire, count, wild);
    let slots: Vec<Vec<f32>> = (0..slot_count)
        .map(|_| {
            let mut slot = elements(random, wire, count, wild);
            if wire != Wire::F64 {
                // A mean of squares is not negative.
                slot.iter_mut().for_each(|value| *value = value.abs());
            }
            slot
        })
        .collect();
    let sums: Vec<Vec<f32>> = (0..sum_count).map(|_| elements(random, wire, count, wild)).collect();
    // On the CPU.
    let slot = |number: usize| slots.get(number).map_or(&[][..], Vec::as_slice);
    let (mut master, mut new_slots) = (values.clone(), slots.clone());
    let mut weights = vec![0; count * wire.size()];
    let before =
        if wire.is_narrow() { vec![0; count * wire.size()] } else { kernels::bytes(&values).to_vec() };
    let mut rest = new_slots.iter_mut();
    let mut next = || rest.next().map_or(&mut [][..], Vec::as_mut_slice);
    let sources: Vec<Source<'_>> = match step.reducer {
        // The last one counts alone.
        Reducer::Assign => sums.last().map(|sum| Source::Acc(sum)).into_iter().collect(),
        _ => sums.iter().map(|sum| Source::Acc(sum)).collect(),
    };
    let operands = Operands {
        wire,
        sources: &sources,
        input: Input {
            weights: &before,
            master: wire.is_narrow().then_some(&values),
            slots: [slot(0), slot(1)],
        },
        output: Output {
            weights: &mut weights,
            master: wire.is_narrow().then_some(&mut master),
            slots: [next(), next()],
        },
    };
    reducers::apply(step, operands, false);
    // On the device.
    let there = |values: &[f32]| There::new(accelerator, phase * 4, kernels::bytes(values));
    let on_device = there(&values);
    let device_slots: Vec<There> = slots.iter().map(|slot| there(slot)).collect();
    let device_sums: Vec<There> = sources
        .iter()
        .map(|source| match source {
            Source::Acc(sum) => there(sum),
            Source::Wire(_) => unreachable!("all are sums"),
        })
        .collect();
    let out =
        wire.is_narrow().then(|| There::new(accelerator, phase * wire.size(), &vec![0; count * wire.size()]));
    let formula = reducers::formula(step, !sources.is_empty());
    let addresses: Vec<_> = device_sums.iter().map(There::address).collect();
    let launch = Launch {
        wire,
        formula: &formula,
        count,
        values: on_device.address(),
        slots: [0, 1].map(|slot| device_slots.get(slot).map(There::address)),
        sums: &addresses,
        out: out.as_ref().map(There::address),
    };
    // SAFETY: the memory lives until the kernel was waited for.
    does(accelerator, |device, stream| unsafe { device.reduce(stream, &launch) });
    let wide = wire.wide();
    let result = if wire.is_narrow() { kernels::bytes(&master) } else { &weights };
    assert_same(wide, &on_device.bytes(accelerator), result, &format!("values: {what}"));
    if let Some(out) = &out {
        assert_same(wire, &out.bytes(accelerator), &weights, &format!("weights: {what}"));
    }
    for (slot, want) in device_slots.iter().zip(&new_slots) {
        assert_same(wide, &slot.bytes(accelerator), kernels::bytes(want), &format!("state: {what}"));
    }
    for (sum, source) in device_sums.iter().zip(&sources) {
        let Source::Acc(source) = source else { unreachable!("all are sums") };
        assert!(sum.bytes(accelerator) == kernels::bytes(source), "sums: {what}");
    }
}

#[test]
fn every_formula_makes_the_cpu_s_bits() {
    for accelerator in homes::devices() {
        let mut random = fastrand::Rng::with_seed(7);
        for round in 0..4 {
            for step in steps(&mut random) {
                for wire in WIRES {
                    check(&accelerator, &mut random, wire, &step, round % 2 == 1);
                }
            }
        }
    }
}

#[test]
fn a_master_stays_where_its_weight_does() {
    for accelerator in homes::devices() {
        for wire in WIRES.into_iter().filter(|wire| wire.is_narrow()) {
            // Every number of 16 bits, and many times those of 8.
            let new: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
            let mut old = new.clone();
            old.iter_mut().step_by(7).for_each(|byte| *byte ^= 1);
            let count = new.len() / wire.size();
            let before = vec![0.1; count];
            let mut want = before.clone();
            kernels::widen_changed(wire, &old, &new, &mut want);
            let values = There::new(&accelerator, 4, kernels::bytes(&before));
            let [from, to] = [&old, &new].map(|halves| There::new(&accelerator, 2, halves));
            let adoption = Adoption {
                wire,
                count,
                values: values.address(),
                before: from.address(),
                after: to.address(),
            };
            // SAFETY: the memory lives until the kernel was waited for.
            does(&accelerator, |device, stream| unsafe { device.adopt(stream, &adoption) });
            let got = values.bytes(&accelerator);
            assert_same(Wire::F32, &got, kernels::bytes(&want), &format!("{wire:?}"));
        }
    }
}
