//! A small model of mixed types, and a scalar reference to compare with.

use half::{bf16, f16};
use libmodelio::bytes::kernels::Wire;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::{Aggregation, Hyper, Reducer};
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
    t: Vec<i32>,
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
        let rate = f64::from(h.learning_rate);
        let [momentum, dampening, decay] = [h.momentum, h.dampening, h.weight_decay].map(f64::from);
        let [beta1, beta2, alpha, epsilon] = [h.beta1, h.beta2, h.alpha, h.epsilon].map(f64::from);
        for i in 0..self.weights.len() {
            self.t[i] += 1;
            let t = self.t[i];
            let sum: f64 = contributions.iter().map(|contribution| f64::from(contribution[i])).sum();
            let w = self.weights[i];
            let mean = match h.aggregation {
                Aggregation::Mean => sum / contributions.len() as f64,
                Aggregation::Sum => sum,
            };
            let decoupled = matches!(reducer, Reducer::AdamW | Reducer::Lamb | Reducer::Lion);
            let g = if decoupled { mean } else { mean + decay * w };
            let [m, v] = [0, 1].map(|slot| self.slots[slot][i]);
            self.weights[i] = match reducer {
                Reducer::Sum => f64::from(h.carry) * w + sum,
                Reducer::Sgd => w - rate * g,
                // Layer-wise steps have the factor 1 here.
                Reducer::Momentum | Reducer::Nesterov | Reducer::Lars => {
                    let m = if t == 1 { g } else { momentum * m + (1.0 - dampening) * g };
                    self.slots[0][i] = m;
                    w - rate * if reducer == Reducer::Nesterov { g + momentum * m } else { m }
                }
                Reducer::Adam | Reducer::AdamW | Reducer::Lamb => {
                    let m = beta1 * m + (1.0 - beta1) * g;
                    let v = beta2 * v + (1.0 - beta2) * g * g;
                    (self.slots[0][i], self.slots[1][i]) = (m, v);
                    let keep = if decoupled { 1.0 - rate * decay } else { 1.0 };
                    let (m, v) = (m / (1.0 - beta1.powi(t)), v / (1.0 - beta2.powi(t)));
                    keep * w - rate * m / (v.sqrt() + epsilon)
                }
                Reducer::RmsProp => {
                    let square = alpha * self.slots[0][i] + (1.0 - alpha) * g * g;
                    self.slots[0][i] = square;
                    w - rate * g / (square.sqrt() + epsilon)
                }
                Reducer::AdaGrad => {
                    let sum = self.slots[0][i] + g * g;
                    self.slots[0][i] = sum;
                    w - rate * g / (sum.sqrt() + epsilon)
                }
                Reducer::Lion => {
                    let update = beta1 * m + (1.0 - beta1) * g;
                    self.slots[0][i] = beta2 * m + (1.0 - beta2) * g;
                    let sign = if update == 0.0 { 0.0 } else { update.signum() };
                    w * (1.0 - rate * decay) - rate * sign
                }
                // What is sent of models and replicas.
                Reducer::Average => w + sum / contributions.len() as f64,
                Reducer::Easgd => w + sum,
                Reducer::Sma => {
                    self.slots[0][i] = if t == 1 { sum } else { momentum * m + sum };
                    w + self.slots[0][i]
                }
                Reducer::Diloco => {
                    let g = -sum / contributions.len() as f64;
                    let m = if t == 1 { g } else { momentum * m + g };
                    self.slots[0][i] = m;
                    w - rate * (g + momentum * m)
                }
                Reducer::Assign => contributions.last().map_or(w, |last| f64::from(last[i])),
            };
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
