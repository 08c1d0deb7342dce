//! Lines in NEON registers.
//!
//! As in `x86`, the methods are always inlined into the entry function of [`super::level`], which enables the feature, and
//! runs only where the CPU was seen to have it; every SAFETY comment below that says "entered" rests on that. Instructions
//! that the standard library has no stable function for, or only one that asks for half-precision arithmetic, are written
//! as assembly. All of them are in every ARMv8 with NEON.

use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;
use std::ops::{Add, Div, Mul, Sub};

use super::line::{INFINITY, Lanes, Line, MAGNITUDE, Raw, RawHalf};

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
