//! Lines in NEON registers.
//!
//! As in `x86`, the methods are always inlined into the entry function of [`super::level`], which enables the feature,
//! and runs only where the CPU was seen to have it; every SAFETY comment below that says "entered" rests on that.
//! Instructions that the standard library has no stable function for, or only one that asks for half-precision
//! arithmetic, are written as assembly. All of them are in every ARMv8 with NEON.

use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;
use std::ops::{Add, Div, Mul, Sub};

use super::fp8::{self, Format};
use super::line::{INFINITY, Lanes, Line, MAGNITUDE, Raw, RawHalf, RawQuarter};

/// Registers of a line.
const QUARTERS: usize = 4;

/// Four 128-bit registers. Needs neon.
#[derive(Clone, Copy)]
pub struct Neon([float32x4_t; QUARTERS]);

macro_rules! lanewise {
    ($($trait:ident $method:ident $neon:ident),*) => {$(
        impl $trait for Neon {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                // SAFETY: entered with neon.
                Self(from_fn(|i| unsafe { $neon(self.0[i], other.0[i]) }))
            }
        }
    )*};
}
lanewise!(Add add vaddq_f32, Sub sub vsubq_f32, Mul mul vmulq_f32, Div div vdivq_f32);

impl Lanes for Neon {
    type Scalar = f32;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: entered with neon.
        Self([unsafe { vdupq_n_f32(value) }; QUARTERS])
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        // SAFETY: entered with neon.
        Self(self.0.map(|lanes| unsafe { vsqrtq_f32(lanes) }))
    }

    #[inline(always)]
    fn clamp(self, limit: f32) -> Self {
        // SAFETY: entered with neon. The choice is the lane itself if one is NaN, or both are equal.
        Self(self.0.map(|lanes| unsafe {
            let (most, least) = (vdupq_n_f32(limit), vdupq_n_f32(-limit));
            let below = vbslq_f32(vcltq_f32(most, lanes), most, lanes);
            vbslq_f32(vcgtq_f32(least, below), least, below)
        }))
    }

    #[inline(always)]
    fn sign(self) -> Self {
        // SAFETY: entered with neon.
        Self(self.0.map(|lanes| unsafe {
            let one = vreinterpretq_u32_f32(vdupq_n_f32(1.0));
            let above = vreinterpretq_f32_u32(vandq_u32(vcgtzq_f32(lanes), one));
            let below = vreinterpretq_f32_u32(vandq_u32(vcltzq_f32(lanes), one));
            vsubq_f32(above, below)
        }))
    }
}

/// Four halves of binary16 become four floats.
#[inline(always)]
fn widened(halves: uint16x4_t) -> float32x4_t {
    let wide;
    // SAFETY: entered with neon; registers alone are read and written.
    unsafe {
        asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) wide, in(vreg) halves, options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// Four floats become the nearest four halves of binary16.
#[inline(always)]
fn narrowed(lanes: float32x4_t) -> uint16x4_t {
    let halves;
    // SAFETY: entered with neon; registers alone are read and written.
    unsafe {
        asm!("fcvtn {0:v}.4h, {1:v}.4s", out(vreg) halves, in(vreg) lanes, options(pure, nomem, nostack, preserves_flags));
    }
    halves
}

/// Four floats become the nearest four halves of bfloat16.
#[inline(always)]
fn shortened(lanes: float32x4_t) -> uint16x4_t {
    // SAFETY: entered with neon.
    unsafe {
        let bits = vreinterpretq_u32_f32(lanes);
        let high = vshrq_n_u32::<16>(bits);
        let odd = vandq_u32(high, vdupq_n_u32(1));
        let rounded = vshrq_n_u32::<16>(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd));
        let quiet = vorrq_u32(high, vdupq_n_u32(0x40));
        vmovn_u32(vbslq_u32(vceqq_f32(lanes, lanes), rounded, quiet))
    }
}

/// Four floats each of the halves at `src`, by `wide`.
#[inline(always)]
fn load_halves(src: &RawHalf, wide: impl Fn(uint16x4_t) -> float32x4_t) -> Neon {
    let parts = src.as_chunks::<8>().0;
    // SAFETY: entered with neon; 8 readable bytes each, and the load of bytes takes any address.
    Neon(from_fn(|i| wide(unsafe { vreinterpret_u16_u8(vld1_u8(parts[i].as_ptr())) })))
}

/// The halves that `short` makes of the lanes.
#[inline(always)]
fn store_halves(line: Neon, short: impl Fn(float32x4_t) -> uint16x4_t) -> RawHalf {
    let mut raw = [0; 32];
    for (part, lanes) in raw.as_chunks_mut::<8>().0.iter_mut().zip(line.0) {
        // SAFETY: entered with neon; 8 writable bytes, and the store of bytes takes any address.
        unsafe { vst1_u8(part.as_mut_ptr(), vreinterpret_u8_u16(short(lanes))) };
    }
    raw
}

/// Sixteen floats of the codes at `src`, which `halves` makes numbers of binary16.
#[inline(always)]
fn load_quarters(src: &RawQuarter, halves: impl Fn(uint8x8_t) -> uint16x8_t) -> Neon {
    let parts = src.as_chunks::<8>().0;
    // SAFETY: entered with neon; 8 readable bytes each, and the load of bytes takes any address.
    let [low, high] = [0, 1].map(|i| halves(unsafe { vld1_u8(parts[i].as_ptr()) }));
    // SAFETY: entered with neon.
    let quarters =
        unsafe { [vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high)] };
    Neon(quarters.map(widened))
}

/// Four floats in a type of 8 bits, as [`fp8`] does it for one number.
#[inline(always)]
fn codes<const SHIFT: i32>(lanes: float32x4_t, of: Format) -> uint16x4_t {
    // SAFETY: entered with neon.
    unsafe {
        let bits = vreinterpretq_u32_f32(lanes);
        let magnitude = vandq_u32(bits, vdupq_n_u32(MAGNITUDE));
        let odd = vandq_u32(vshrq_n_u32::<SHIFT>(bits), vdupq_n_u32(1));
        let sum = vaddq_u32(vaddq_u32(magnitude, vdupq_n_u32(of.round(SHIFT as u32))), odd);
        let rounded = vminq_u32(vshrq_n_u32::<SHIFT>(sum), vdupq_n_u32(of.most));
        let sum = vaddq_f32(vreinterpretq_f32_u32(magnitude), vdupq_n_f32(of.rounder));
        let subnormal = vsubq_u32(vreinterpretq_u32_f32(sum), vdupq_n_u32(of.rounder.to_bits()));
        let number = vbslq_u32(vcltq_u32(magnitude, vdupq_n_u32(of.normal)), subnormal, rounded);
        let is_nan = vcgeq_u32(magnitude, vdupq_n_u32(of.nan_from));
        let number = vbslq_u32(is_nan, vdupq_n_u32(fp8::NAN), number);
        vmovn_u32(vorrq_u32(number, vandq_u32(vshrq_n_u32::<24>(bits), vdupq_n_u32(0x80))))
    }
}

/// The codes of all lanes.
#[inline(always)]
fn store_quarters<const SHIFT: i32>(line: Neon, of: Format) -> RawQuarter {
    let [a, b, c, d] = line.0.map(|lanes| codes::<SHIFT>(lanes, of));
    let mut raw = [0; 16];
    // SAFETY: entered with neon; 16 writable bytes, and the store of bytes takes any address.
    unsafe {
        let [low, high] = [vmovn_u16(vcombine_u16(a, b)), vmovn_u16(vcombine_u16(c, d))];
        vst1q_u8(raw.as_mut_ptr(), vcombine_u8(low, high));
    }
    raw
}

/// Stores two registers past the caches.
///
/// # Safety
/// 32 bytes can be written at `dst`.
#[inline(always)]
unsafe fn stream_pair(first: uint8x16_t, second: uint8x16_t, dst: *mut u8) {
    // SAFETY: entered with neon; the caller has the 32 bytes.
    unsafe {
        asm!(
            "stnp {0:q}, {1:q}, [{2}]",
            in(vreg) first,
            in(vreg) second,
            in(reg) dst,
            options(nostack, preserves_flags)
        );
    }
}

impl Line for Neon {
    #[inline(always)]
    fn load(src: &Raw) -> Self {
        let parts = src.as_chunks::<16>().0;
        // SAFETY: entered with neon; 16 readable bytes each, and the load of bytes takes any address.
        Self(from_fn(|i| unsafe { vreinterpretq_f32_u8(vld1q_u8(parts[i].as_ptr())) }))
    }

    #[inline(always)]
    fn load_f16(src: &RawHalf) -> Self {
        load_halves(src, widened)
    }

    #[inline(always)]
    fn load_bf16(src: &RawHalf) -> Self {
        // SAFETY: entered with neon.
        load_halves(src, |halves| unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(halves)) })
    }

    #[inline(always)]
    fn load_e4m3(src: &RawQuarter) -> Self {
        // Numbers of binary16 that are smaller by a factor.
        // SAFETY: entered with neon.
        let small = load_quarters(src, |codes| unsafe {
            let wide = vreinterpretq_u16_s16(vmovl_s8(vreinterpret_s8_u8(codes)));
            vandq_u16(vshlq_n_u16::<7>(wide), vdupq_n_u16(fp8::E4M3_HALF))
        });
        let wide = small * Self::splat(fp8::E4M3_SCALE);
        // SAFETY: entered with neon. What would be 480 is NaN.
        Self(wide.0.map(|lanes| unsafe {
            let bits = vreinterpretq_u32_f32(lanes);
            let magnitude = vandq_u32(bits, vdupq_n_u32(MAGNITUDE));
            let is_nan = vceqq_u32(magnitude, vdupq_n_u32(fp8::E4M3_480));
            vreinterpretq_f32_u32(vorrq_u32(bits, vandq_u32(is_nan, vdupq_n_u32(fp8::QUIET))))
        }))
    }

    #[inline(always)]
    fn load_e5m2(src: &RawQuarter) -> Self {
        // SAFETY: entered with neon.
        load_quarters(src, |codes| unsafe { vshlq_n_u16::<8>(vmovl_u8(codes)) })
    }

    #[inline(always)]
    fn store(self, dst: &mut Raw) {
        for (part, lanes) in dst.as_chunks_mut::<16>().0.iter_mut().zip(self.0) {
            // SAFETY: entered with neon; 16 writable bytes, and the store of bytes takes any address.
            unsafe { vst1q_u8(part.as_mut_ptr(), vreinterpretq_u8_f32(lanes)) };
        }
    }

    #[inline(always)]
    fn to_f16(self) -> RawHalf {
        store_halves(self, narrowed)
    }

    #[inline(always)]
    fn to_bf16(self) -> RawHalf {
        store_halves(self, shortened)
    }

    #[inline(always)]
    fn to_e4m3(self) -> RawQuarter {
        store_quarters::<{ fp8::E4M3_SHIFT as i32 }>(self, fp8::E4M3)
    }

    #[inline(always)]
    fn to_e5m2(self) -> RawQuarter {
        store_quarters::<{ fp8::E5M2_SHIFT as i32 }>(self, fp8::E5M2)
    }

    #[inline(always)]
    unsafe fn stream(self, dst: &mut Raw) {
        let [a, b, c, d] = self.0;
        let [first, second] = [(a, b), (c, d)];
        let dst = dst.as_mut_ptr();
        // SAFETY: entered with neon; 64 writable bytes.
        unsafe {
            stream_pair(vreinterpretq_u8_f32(first.0), vreinterpretq_u8_f32(first.1), dst);
            stream_pair(vreinterpretq_u8_f32(second.0), vreinterpretq_u8_f32(second.1), dst.add(32));
        }
    }

    #[inline(always)]
    unsafe fn stream_half(half: RawHalf, dst: &mut RawHalf) {
        let src = half.as_ptr();
        // SAFETY: entered with neon; 32 readable and 32 writable bytes.
        unsafe { stream_pair(vld1q_u8(src), vld1q_u8(src.add(16)), dst.as_mut_ptr()) }
    }

    #[inline(always)]
    unsafe fn stream_quarter(quarter: RawQuarter, dst: &mut RawQuarter) {
        // There is no such store of one register.
        *dst = quarter;
    }

    #[inline(always)]
    fn fence() {
        // Such stores are ordered as others are: what releases them to another thread is enough.
    }

    #[inline(always)]
    fn prefetch(ptr: *const u8) {
        // SAFETY: a hint, which never faults.
        unsafe { asm!("prfm pldl1keep, [{0}]", in(reg) ptr, options(nostack, preserves_flags, readonly)) }
    }

    type Exponents = uint32x4_t;

    #[inline(always)]
    fn no_exponents() -> Self::Exponents {
        // SAFETY: entered with neon.
        unsafe { vdupq_n_u32(0) }
    }

    #[inline(always)]
    fn exponents(self, seen: Self::Exponents) -> Self::Exponents {
        // SAFETY: entered with neon.
        self.0.into_iter().fold(seen, |seen, lanes| unsafe {
            vmaxq_u32(seen, vandq_u32(vreinterpretq_u32_f32(lanes), vdupq_n_u32(MAGNITUDE)))
        })
    }

    #[inline(always)]
    fn finite(seen: Self::Exponents) -> bool {
        // SAFETY: entered with neon.
        unsafe { vmaxvq_u32(seen) < INFINITY }
    }
}
