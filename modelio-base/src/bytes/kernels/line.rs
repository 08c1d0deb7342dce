//! A cache line of sixteen fp32 lanes, over which every kernel is written.
//!
//! [`Line`] is one line in registers. Its operations are IEEE operations on each lane, never fused or
//! reassociated, so that every implementation gives the same bits. [`Portable`] is the one that any CPU
//! can run; the compiler vectorises it for the target's baseline.

use std::array::from_fn;
use std::ops::{Add, Div, Mul, Sub};

use super::fp8;

/// Lanes of a line.
pub(super) const LANES: usize = 16;

/// Sixteen fp32 values as bytes, at any address.
pub(super) type Raw = [u8; 64];

/// Sixteen half-precision values as bytes, at any address.
pub(super) type RawHalf = [u8; 32];

/// Sixteen values of 8 bits as bytes, at any address.
pub(super) type RawQuarter = [u8; 16];

/// The unit that arithmetic is written over: several numbers of one type.
pub trait Lanes:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// The type of each.
    type Scalar: Scalar;
    /// The same value in all lanes.
    fn splat(value: Self::Scalar) -> Self;
    /// Square root of each lane.
    fn sqrt(self) -> Self;
    /// Lanes beyond a limit are set to it, with their sign. NaN stays NaN.
    fn clamp(self, limit: Self::Scalar) -> Self;
    /// 1 in lanes above zero, -1 in those below, and 0 in the others, NaN among them.
    fn sign(self) -> Self;
}

/// A type that constants are rounded to.
pub trait Scalar: Copy {
    /// A hyper-parameter, which is fp32, as arithmetic of this precision means it.
    fn meant(value: f32) -> f64;
    /// The nearest value.
    fn nearest(value: f64) -> Self;
}

impl Scalar for f32 {
    fn meant(value: f32) -> f64 {
        f64::from(value)
    }

    fn nearest(value: f64) -> f32 {
        value as f32
    }
}

/// Sixteen fp32 lanes in registers.
pub(super) trait Line: Lanes<Scalar = f32> {
    fn load(src: &Raw) -> Self;
    fn load_f16(src: &RawHalf) -> Self;
    fn load_bf16(src: &RawHalf) -> Self;
    fn load_e4m3(src: &RawQuarter) -> Self;
    fn load_e5m2(src: &RawQuarter) -> Self;

    fn store(self, dst: &mut Raw);
    /// Round to nearest even, NaNs stay NaNs.
    fn to_f16(self) -> RawHalf;
    /// Round to nearest even, NaNs stay NaNs.
    fn to_bf16(self) -> RawHalf;
    /// As [`super::fp8`] says.
    fn to_e4m3(self) -> RawQuarter;
    /// As [`super::fp8`] says.
    fn to_e5m2(self) -> RawQuarter;

    /// Store past the caches.
    ///
    /// # Safety
    /// `dst` is 64-byte aligned, and [`Line::fence`] follows before another thread may look.
    unsafe fn stream(self, dst: &mut Raw);
    /// Like [`Line::stream`], for half a line.
    ///
    /// # Safety
    /// `dst` is 32-byte aligned, and [`Line::fence`] follows before another thread may look.
    unsafe fn stream_half(half: RawHalf, dst: &mut RawHalf);
    /// Like [`Line::stream`], for a quarter of a line.
    ///
    /// # Safety
    /// `dst` is 16-byte aligned, and [`Line::fence`] follows before another thread may look.
    unsafe fn stream_quarter(quarter: RawQuarter, dst: &mut RawQuarter);
    /// Order streamed stores before what follows.
    fn fence();
    /// Ask for the line at `ptr`, which may point anywhere.
    fn prefetch(ptr: *const u8);

    /// Bits that say, gathered over many lines, whether a lane was infinite or NaN.
    type Exponents: Copy;
    /// The exponents of no line.
    fn no_exponents() -> Self::Exponents;
    /// `seen` and this line.
    fn exponents(self, seen: Self::Exponents) -> Self::Exponents;
    /// Whether all lanes seen were finite.
    fn finite(seen: Self::Exponents) -> bool;
}

/// Bits of fp32 infinity; magnitudes at or above it are not finite.
pub(super) const INFINITY: u32 = 0x7f80_0000;
/// All but the sign.
pub(super) const MAGNITUDE: u32 = 0x7fff_ffff;

/// Plain arrays, for any CPU.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(from_fn(|i| f(self.0[i], other.0[i])))
    }
}

macro_rules! lanewise {
    ($($trait:ident $method:ident $op:tt),*) => {$(
        impl $trait for Portable {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                self.zip(other, |a, b| a $op b)
            }
        }
    )*};
}
lanewise!(Add add +, Sub sub -, Mul mul *, Div div /);

impl Lanes for Portable {
    type Scalar = f32;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        Self(self.0.map(f32::sqrt))
    }

    #[inline(always)]
    fn clamp(self, limit: f32) -> Self {
        Self(self.0.map(|x| {
            let below = if limit < x { limit } else { x };
            if -limit > below { -limit } else { below }
        }))
    }

    #[inline(always)]
    fn sign(self) -> Self {
        Self(self.0.map(|x| f32::from(u8::from(x > 0.0)) - f32::from(u8::from(x < 0.0))))
    }
}

impl Line for Portable {
    #[inline(always)]
    fn load(src: &Raw) -> Self {
        Self(from_fn(|i| f32::from_le_bytes([src[4 * i], src[4 * i + 1], src[4 * i + 2], src[4 * i + 3]])))
    }

    #[inline(always)]
    fn load_f16(src: &RawHalf) -> Self {
        Self(from_fn(|i| f16_to_f32(u16::from_le_bytes([src[2 * i], src[2 * i + 1]]))))
    }

    #[inline(always)]
    fn load_bf16(src: &RawHalf) -> Self {
        Self(from_fn(|i| f32::from_le_bytes([0, 0, src[2 * i], src[2 * i + 1]])))
    }

    #[inline(always)]
    fn load_e4m3(src: &RawQuarter) -> Self {
        Self(src.map(fp8::e4m3_to_f32))
    }

    #[inline(always)]
    fn load_e5m2(src: &RawQuarter) -> Self {
        Self(src.map(fp8::e5m2_to_f32))
    }

    #[inline(always)]
    fn store(self, dst: &mut Raw) {
        for (dst, lane) in dst.as_chunks_mut::<4>().0.iter_mut().zip(self.0) {
            *dst = lane.to_le_bytes();
        }
    }

    #[inline(always)]
    fn to_f16(self) -> RawHalf {
        halves(self.0.map(f32_to_f16))
    }

    #[inline(always)]
    fn to_bf16(self) -> RawHalf {
        halves(self.0.map(f32_to_bf16))
    }

    #[inline(always)]
    fn to_e4m3(self) -> RawQuarter {
        self.0.map(fp8::f32_to_e4m3)
    }

    #[inline(always)]
    fn to_e5m2(self) -> RawQuarter {
        self.0.map(fp8::f32_to_e5m2)
    }

    #[inline(always)]
    unsafe fn stream(self, dst: &mut Raw) {
        self.store(dst);
    }

    #[inline(always)]
    unsafe fn stream_half(half: RawHalf, dst: &mut RawHalf) {
        *dst = half;
    }

    #[inline(always)]
    unsafe fn stream_quarter(quarter: RawQuarter, dst: &mut RawQuarter) {
        *dst = quarter;
    }

    #[inline(always)]
    fn fence() {}

    #[inline(always)]
    fn prefetch(_: *const u8) {}

    type Exponents = [u32; LANES];

    #[inline(always)]
    fn no_exponents() -> Self::Exponents {
        [0; LANES]
    }

    #[inline(always)]
    fn exponents(self, seen: Self::Exponents) -> Self::Exponents {
        from_fn(|i| seen[i].max(self.0[i].to_bits() & MAGNITUDE))
    }

    #[inline(always)]
    fn finite(seen: Self::Exponents) -> bool {
        seen.iter().all(|&magnitude| magnitude < INFINITY)
    }
}

#[inline(always)]
fn halves(lanes: [u16; LANES]) -> RawHalf {
    let mut raw = [0; 32];
    for (raw, lane) in raw.as_chunks_mut::<2>().0.iter_mut().zip(lanes) {
        *raw = lane.to_le_bytes();
    }
    raw
}

/// `yes` where `mask` holds, else `no`: both are computed, so that loops vectorise.
#[inline(always)]
fn select(mask: bool, yes: u32, no: u32) -> u32 {
    if mask { yes } else { no }
}

#[inline(always)]
fn f16_to_f32(half: u16) -> f32 {
    let magnitude = u32::from(half & 0x7fff) << 13;
    // Moves the exponent from binary16's bias to binary32's, and normalises subnormals on the way.
    let scaled = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let quiet = select(magnitude > 0x0f80_0000, 0x0040_0000, 0);
    let special = magnitude | INFINITY | quiet;
    let sign = u32::from(half & 0x8000) << 16;
    f32::from_bits(select(magnitude >= 0x0f80_0000, special, scaled) | sign)
}

#[inline(always)]
fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & MAGNITUDE;
    let rounded = magnitude.wrapping_add(0xfff + ((magnitude >> 13) & 1)).wrapping_sub(112 << 23) >> 13;
    // One ulp of 0.5 is binary16's smallest subnormal: the addition rounds to a multiple of it.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    let finite = select(magnitude < 0x3880_0000, subnormal, rounded.min(0x7c00));
    (select(magnitude > INFINITY, nan, finite) | ((bits >> 16) & 0x8000)) as u16
}

#[inline(always)]
fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    select(bits & MAGNITUDE > INFINITY, (bits >> 16) | 0x40, rounded) as u16
}
