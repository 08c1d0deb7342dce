//! The loops for doubles: eight at a time, in arrays that the compiler vectorises for the instruction set at hand.
//!
//! Elements are read and written at any address: in sums and states they may lie at a multiple of four only.

use std::ops::{Add, Div, Mul, Sub};

use super::Source;
use super::level::Kernel;
use super::line::{Lanes, Line, Scalar};
use super::op::Op;
use super::pass::bytes;
use crate::vocabulary::reducer::decimal;

const LANES: usize = 8;
const SIZE: usize = 8;

impl Scalar for f64 {
    fn meant(value: f32) -> f64 {
        decimal(value)
    }

    fn nearest(value: f64) -> f64 {
        value
    }
}

/// Eight doubles.
#[derive(Clone, Copy)]
pub(super) struct Eight([f64; LANES]);

macro_rules! lanewise {
    ($($trait:ident $method:ident $op:tt),*) => {$(
        impl $trait for Eight {
            type Output = Self;
            #[inline(always)]
            fn $method(mut self, other: Self) -> Self {
                for (a, b) in self.0.iter_mut().zip(other.0) {
                    *a $op b;
                }
                self
            }
        }
    )*};
}
lanewise!(Add add +=, Sub sub -=, Mul mul *=, Div div /=);

impl Lanes for Eight {
    type Scalar = f64;

    #[inline(always)]
    fn splat(value: f64) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        Self(self.0.map(f64::sqrt))
    }

    #[inline(always)]
    fn clamp(self, limit: f64) -> Self {
        Self(self.0.map(|x| {
            let below = if limit < x { limit } else { x };
            if -limit > below { -limit } else { below }
        }))
    }

    #[inline(always)]
    fn sign(self) -> Self {
        Self(self.0.map(|x| f64::from(u8::from(x > 0.0)) - f64::from(u8::from(x < 0.0))))
    }
}

impl Eight {
    /// The `count` elements from element `at`, and zeros behind them.
    #[inline(always)]
    fn load(src: &[u8], at: usize, count: usize) -> Self {
        let mut raw = [0; LANES * SIZE];
        let part = &src[at * SIZE..(at + count) * SIZE];
        match part.first_chunk() {
            Some(whole) => raw = *whole,
            None => raw[..part.len()].copy_from_slice(part),
        }
        let mut lanes = [0.0; LANES];
        for (lane, raw) in lanes.iter_mut().zip(raw.as_chunks::<SIZE>().0) {
            *lane = f64::from_le_bytes(*raw);
        }
        Self(lanes)
    }

    #[inline(always)]
    fn store(self, dst: &mut [u8], at: usize, count: usize) {
        let mut raw = [0; LANES * SIZE];
        for (raw, lane) in raw.as_chunks_mut::<SIZE>().0.iter_mut().zip(self.0) {
            *raw = lane.to_le_bytes();
        }
        let part = &mut dst[at * SIZE..(at + count) * SIZE];
        match part.first_chunk_mut() {
            Some(whole) => *whole = raw,
            None => part.copy_from_slice(&raw[..part.len()]),
        }
    }

    /// NaN in the lanes that have ever been infinite or NaN.
    #[inline(always)]
    fn seen(self, before: Self) -> Self {
        before + self * Self::splat(0.0)
    }

    #[inline(always)]
    fn is_finite(self) -> bool {
        self.0.iter().all(|lane| !lane.is_nan())
    }
}

/// Eight floats from element `at`, and zeros behind the last.
#[inline(always)]
fn floats(src: &[f32], at: usize) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    match src[at..].first_chunk() {
        Some(whole) => lanes = *whole,
        None => lanes[..src.len() - at].copy_from_slice(&src[at..]),
    }
    lanes
}

/// The start and length of each group of eight `elements`.
#[inline(always)]
fn eights(elements: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..elements).step_by(LANES).map(move |at| (at, LANES.min(elements - at)))
}

/// `out = scale * (model - base)`, or `scale * model` without a base.
pub(super) struct Difference<'a> {
    pub scale: f64,
    pub model: &'a [u8],
    pub base: Option<&'a [u8]>,
    pub out: &'a mut [u8],
}

impl Kernel for Difference<'_> {
    /// Whether the result is finite.
    type Output = bool;

    #[inline(always)]
    fn run<L: Line>(self) -> bool {
        let mut seen = Eight::splat(0.0);
        for (at, count) in eights(self.model.len() / SIZE) {
            let value = Eight::load(self.model, at, count);
            let difference = self.base.map_or(value, |base| value - Eight::load(base, at, count));
            let difference = Eight::splat(self.scale) * difference;
            seen = difference.seen(seen);
            difference.store(self.out, at, count);
        }
        seen.is_finite()
    }
}

/// `out` is the correction `elasticity * (replica - central)`, and `next` is `model` less the correction.
pub(super) struct Correction<'a> {
    pub elasticity: f64,
    pub model: &'a [u8],
    pub replica: &'a [u8],
    pub central: &'a [u8],
    pub out: &'a mut [u8],
    pub next: &'a mut [u8],
}

impl Kernel for Correction<'_> {
    /// Whether the model and the correction are finite.
    type Output = bool;

    #[inline(always)]
    fn run<L: Line>(self) -> bool {
        let mut seen = Eight::splat(0.0);
        for (at, count) in eights(self.model.len() / SIZE) {
            let value = Eight::load(self.model, at, count);
            seen = value.seen(seen);
            let apart = Eight::load(self.replica, at, count) - Eight::load(self.central, at, count);
            let correction = Eight::splat(self.elasticity) * apart;
            seen = correction.seen(seen);
            correction.store(self.out, at, count);
            (value - correction).store(self.next, at, count);
        }
        seen.is_finite()
    }
}

/// One reducer over one segment. All lengths were checked to agree.
pub(super) struct Reduce<'a, O> {
    pub op: O,
    pub sources: &'a [Source<'a>],
    pub weights: (&'a [u8], &'a mut [u8]),
    /// The slots, as many as the operation has.
    pub slots: [(&'a [u8], &'a mut [u8]); 2],
}

impl<O: Op<Scalar = f64>> Kernel for Reduce<'_, O> {
    /// Whether all sources were finite.
    type Output = bool;

    #[inline(always)]
    fn run<L: Line>(self) -> bool {
        let zero = Eight::splat(0.0);
        let [(old0, new0), (old1, new1)] = self.slots;
        let mut seen = zero;
        for (at, count) in eights(self.weights.0.len() / SIZE) {
            let mut sum = zero;
            for (i, source) in self.sources.iter().enumerate() {
                let value = match source {
                    Source::Wire(src) => Eight::load(src, at, count),
                    Source::Acc(acc) => Eight::load(bytes(acc), at, count),
                };
                seen = value.seen(seen);
                sum = if i == 0 { value } else { sum + value };
            }
            let w = if O::READS_WEIGHTS { Eight::load(self.weights.0, at, count) } else { zero };
            let mut slots = [zero; 2];
            if O::READS_SLOTS && O::SLOTS > 0 {
                slots[0] = Eight::load(old0, at, count);
            }
            if O::READS_SLOTS && O::SLOTS > 1 {
                slots[1] = Eight::load(old1, at, count);
            }
            let (w, slots) = self.op.step(sum, w, slots);
            w.store(self.weights.1, at, count);
            if O::SLOTS > 0 {
                slots[0].store(new0, at, count);
            }
            if O::SLOTS > 1 {
                slots[1].store(new1, at, count);
            }
        }
        seen.is_finite()
    }
}

/// Added to an accumulator, or stored there.
pub(super) struct Accumulate<'a> {
    pub src: &'a [u8],
    pub acc: &'a mut [u8],
    pub first: bool,
}

impl Kernel for Accumulate<'_> {
    /// Whether the source was finite.
    type Output = bool;

    #[inline(always)]
    fn run<L: Line>(self) -> bool {
        let mut seen = Eight::splat(0.0);
        for (at, count) in eights(self.src.len() / SIZE) {
            let value = Eight::load(self.src, at, count);
            seen = value.seen(seen);
            let sum = if self.first { value } else { Eight::load(self.acc, at, count) + value };
            sum.store(self.acc, at, count);
        }
        seen.is_finite()
    }
}

/// Whether all elements are finite.
pub(super) struct Finite<'a> {
    pub src: &'a [u8],
}

impl Kernel for Finite<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<L: Line>(self) -> bool {
        let elements = eights(self.src.len() / SIZE);
        let seen =
            elements.fold(Eight::splat(0.0), |seen, (at, count)| Eight::load(self.src, at, count).seen(seen));
        seen.is_finite()
    }
}

/// The sum of the squares of the sum of some accumulators, which have floats or doubles. Each lane adds up every eighth
/// element, and the lanes are added up in their order.
pub(super) struct Squares<'a> {
    pub doubles: bool,
    pub sums: &'a [&'a [f32]],
}

impl Kernel for Squares<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<L: Line>(self) -> f64 {
        let (first, others) = self.sums.split_first().expect("an accumulator");
        let mut squares = Eight::splat(0.0);
        if self.doubles {
            for (at, count) in eights(first.len() / 2) {
                let load = |sum: &[f32]| Eight::load(bytes(sum), at, count);
                let value = others.iter().fold(load(first), |sum, other| sum + load(other));
                squares = squares + value * value;
            }
        } else {
            for (at, _) in eights(first.len()) {
                let mut value = floats(first, at);
                for other in others {
                    value.iter_mut().zip(floats(other, at)).for_each(|(sum, other)| *sum += other);
                }
                let value = Eight(value.map(f64::from));
                squares = squares + value * value;
            }
        }
        squares.0.iter().sum()
    }
}
