//! A small model of mixed types, and a scalar reference to compare with.

use half::{bf16, f16};
use libmodelio::bytes::kernels::Wire;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::{Aggregation, Hyper, Reducer};
use test_devices::formulas::{self, Brought, Constants};
use test_devices::fp8;

pub const BLOCK: u32 = 64 << 10;

/// A model of one F32 tensor.
pub fn floats_layout(elements: usize) -> ModelLayout {
    ModelLayout::blank(elements as u64 * 4, DType::F32, BLOCK).unwrap()
}

/// The bytes of a model whose element `i` (over all reducible tensors) is `value(i)`; other bytes are `fill`.
pub fn encode(layout: &ModelLayout, fill: u8, value: impl Fn(usize) -> f32) -> Vec<u8> {
    (0..layout.blocks()).flat_map(|block| encode_block(layout, BlockId(block), fill, &value)).collect()
}

/// The bytes of one block of them.
pub fn encode_block(layout: &ModelLayout, block: BlockId, fill: u8, value: impl Fn(usize) -> f32) -> Vec<u8> {
    let range = layout.block_bytes(block);
    let mut bytes = vec![fill; (range.end - range.start) as usize];
    for (at, i, dtype) in elements_of(layout, block) {
        let at = at - range.start as usize;
        match dtype {
            DType::F32 => bytes[at..at + 4].copy_from_slice(&value(i).to_le_bytes()),
            DType::BF16 => bytes[at..at + 2].copy_from_slice(&bf16::from_f32(value(i)).to_le_bytes()),
            DType::E4M3 => bytes[at] = fp8::code(Wire::E4M3, value(i).into()),
            DType::E5M2 => bytes[at] = fp8::code(Wire::E5M2, value(i).into()),
            _ => bytes[at..at + 2].copy_from_slice(&f16::from_f32(value(i)).to_le_bytes()),
        }
    }
    bytes
}

pub fn decode(layout: &ModelLayout, bytes: &[u8]) -> Vec<f32> {
    elements(layout)
        .map(|(at, _, dtype)| match dtype {
            DType::F32 => f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()),
            DType::BF16 => bf16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()).to_f32(),
            DType::E4M3 => fp8::value(Wire::E4M3, bytes[at]) as f32,
            DType::E5M2 => fp8::value(Wire::E5M2, bytes[at]) as f32,
            _ => f16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()).to_f32(),
        })
        .collect()
}

/// Offset, number and type of every reducible element.
pub fn elements(layout: &ModelLayout) -> impl Iterator<Item = (usize, usize, DType)> {
    (0..layout.blocks()).flat_map(|block| elements_of(layout, BlockId(block)))
}

fn elements_of(layout: &ModelLayout, block: BlockId) -> impl Iterator<Item = (usize, usize, DType)> {
    layout.segments(block).iter().filter(|segment| segment.dtype.is_reducible()).flat_map(|segment| {
        let size = segment.dtype.size_bytes().unwrap();
        let count = (segment.bytes.end - segment.bytes.start) as usize / size;
        (0..count).map(move |i| {
            (segment.bytes.start as usize + i * size, segment.element as usize + i, segment.dtype)
        })
    })
}

/// Some number of few bits for element `i`: exact in every type but those of 8 bits.
pub fn noise(seed: usize, i: usize) -> f32 {
    let mixed = (i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503)) >> 5;
    (mixed % 64) as f32 / 16.0 - 2.0
}

pub fn initial_weights(layout: &ModelLayout) -> Vec<u8> {
    encode(layout, 0x5a, |i| noise(1, i))
}

/// What the model should be, in doubles.
pub struct Reference {
    pub weights: Vec<f64>,
    slots: [Vec<f64>; 2],
    /// Steps of each element.
    t: Vec<u64>,
}

impl Reference {
    pub fn new(layout: &ModelLayout) -> Reference {
        let weights: Vec<f64> = decode(layout, &initial_weights(layout)).into_iter().map(f64::from).collect();
        let zeros = || vec![0.0; weights.len()];
        Reference { slots: [zeros(), zeros()], t: vec![0; weights.len()], weights }
    }

    /// One version from contributions decoded from what the learners wrote, of which each holds something of every
    /// tensor.
    pub fn step(&mut self, reducer: Reducer, h: &Hyper, contributions: &[Vec<f32>]) {
        let of = Constants::of(h);
        for i in 0..self.weights.len() {
            self.t[i] += 1;
            let sum: f64 = contributions.iter().map(|contribution| f64::from(contribution[i])).sum();
            let mean = sum / contributions.len() as f64;
            let gradient = if h.aggregation == Aggregation::Mean { mean } else { sum };
            let last = contributions.last().map(|last| f64::from(last[i]));
            let brought = Brought { sum, mean, gradient, total: sum, last };
            let slots = [0, 1].map(|slot| self.slots[slot][i]);
            // Layer-wise steps have the factor 1 here.
            let (w, slots) = formulas::step(reducer, &of, (self.t[i], 1.0), &brought, self.weights[i], slots);
            self.weights[i] = w;
            self.slots.iter_mut().zip(slots).for_each(|(slot, value)| slot[i] = value);
        }
    }

    /// Forget the optimizer's state.
    pub fn reset_state(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.fill(0.0));
        self.t.fill(0);
    }

    /// Within what rounding allows.
    pub fn check(&self, layout: &ModelLayout, bytes: &[u8], what: &str) {
        for ((at, i, dtype), got) in elements(layout).zip(decode(layout, bytes)) {
            let relative = match dtype {
                DType::F32 => 2e-5,
                DType::BF16 => 1.0 / 250.0,
                DType::E4M3 => 1.0 / 15.0,
                DType::E5M2 => 1.0 / 7.0,
                _ => 1.0 / 2_000.0,
            };
            let want = self.weights[i];
            let error = (f64::from(got) - want).abs();
            assert!(
                error <= relative * want.abs().max(0.25),
                "{what}: element {i} at byte {at} ({dtype}) is {got}, not {want}"
            );
        }
    }
}
