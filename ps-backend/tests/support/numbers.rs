//! Numbers as bytes, in each type that a model may have.

use half::{bf16, f16};
use libmodelio::bytes::kernels::Wire;

use crate::fp8;

/// The bytes of values. A value of a half must be one of fp32, which makes sure that it is rounded once.
pub fn encode(wire: Wire, values: impl IntoIterator<Item = f64>) -> Vec<u8> {
    let one = |value: f64| match wire {
        Wire::F64 => value.to_le_bytes().to_vec(),
        Wire::F32 => (value as f32).to_le_bytes().to_vec(),
        Wire::F16 => f16::from_f32(value as f32).to_le_bytes().to_vec(),
        Wire::BF16 => bf16::from_f32(value as f32).to_le_bytes().to_vec(),
        Wire::E4M3 | Wire::E5M2 => vec![fp8::code(wire, value)],
    };
    values.into_iter().flat_map(one).collect()
}

/// The values that bytes stand for.
pub fn decode(wire: Wire, bytes: &[u8]) -> Vec<f64> {
    let one = |bytes: &[u8]| match wire {
        Wire::F64 => f64::from_le_bytes(bytes.try_into().unwrap()),
        Wire::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
        Wire::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
        Wire::BF16 => bf16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
        Wire::E4M3 | Wire::E5M2 => fp8::value(wire, bytes[0]),
    };
    bytes.chunks_exact(wire.size()).map(one).collect()
}
