//! Lines in AVX2 and AVX-512 registers.
//!
//! The methods carry no `target_feature` of their own, so that traits can hold them: they are always
//! inlined into the entry functions of [`super::level`], which enable the features. Those entry functions
//! are the only callers, and run only where the CPU was seen to have the features; every SAFETY comment
//! below that says "entered" rests on that.

mod codes;

use std::arch::x86_64::*;
use std::ops::{Add, Div, Mul, Sub};

use super::fp8;
use super::line::{INFINITY, Lanes, Line, MAGNITUDE, Raw, RawHalf, RawQuarter};
use codes::{e4m3_halves, e5m2_halves};

/// One 512-bit register. Needs avx512f.
#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

/// Two 256-bit registers. Needs avx2 and f16c.
#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256, __m256);

macro_rules! lanewise {
    ($($trait:ident $method:ident $avx512:ident $avx2:ident),*) => {$(
        impl $trait for Avx512 {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                // SAFETY: entered with avx512f.
                Self(unsafe { $avx512(self.0, other.0) })
            }
        }
        impl $trait for Avx2 {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                // SAFETY: entered with avx2.
                unsafe { Self($avx2(self.0, other.0), $avx2(self.1, other.1)) }
            }
        }
    )*};
}
lanewise!(
    Add add _mm512_add_ps _mm256_add_ps,
    Sub sub _mm512_sub_ps _mm256_sub_ps,
    Mul mul _mm512_mul_ps _mm256_mul_ps,
    Div div _mm512_div_ps _mm256_div_ps
);

impl Lanes for Avx512 {
    type Scalar = f32;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: entered with avx512f.
        Self(unsafe { _mm512_set1_ps(value) })
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        // SAFETY: entered with avx512f.
        Self(unsafe { _mm512_sqrt_ps(self.0) })
    }

    #[inline(always)]
    fn clamp(self, limit: f32) -> Self {
        // SAFETY: entered with avx512f. The second operand is the result if one is NaN, or both are equal.
        unsafe {
            let below = _mm512_min_ps(_mm512_set1_ps(limit), self.0);
            Self(_mm512_max_ps(_mm512_set1_ps(-limit), below))
        }
    }

    #[inline(always)]
    fn sign(self) -> Self {
        // SAFETY: entered with avx512f.
        unsafe {
            let (zero, one) = (_mm512_setzero_ps(), _mm512_set1_ps(1.0));
            let above = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, zero), one);
            let below = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, zero), one);
            Self(_mm512_sub_ps(above, below))
        }
    }
}

impl Line for Avx512 {
    #[inline(always)]
    fn load(src: &Raw) -> Self {
        // SAFETY: entered with avx512f; 64 readable bytes, and the load takes any address.
        Self(unsafe { _mm512_loadu_ps(src.as_ptr().cast()) })
    }

    #[inline(always)]
    fn load_f16(src: &RawHalf) -> Self {
        // SAFETY: entered with avx512f; 32 readable bytes, and the load takes any address.
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(src.as_ptr().cast())) })
    }

    #[inline(always)]
    fn load_bf16(src: &RawHalf) -> Self {
        // SAFETY: entered with avx512f; 32 readable bytes, and the load takes any address.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(src.as_ptr().cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }

    #[inline(always)]
    fn load_e4m3(src: &RawQuarter) -> Self {
        // SAFETY: entered with avx512f.
        unsafe {
            let wide = _mm512_mul_ps(_mm512_cvtph_ps(e4m3_halves(src)), _mm512_set1_ps(fp8::E4M3_SCALE));
            let bits = _mm512_castps_si512(wide);
            let magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(MAGNITUDE as i32));
            let is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(fp8::E4M3_480 as i32));
            let quiet = _mm512_set1_epi32(fp8::QUIET as i32);
            Self(_mm512_castsi512_ps(_mm512_mask_or_epi32(bits, is_nan, bits, quiet)))
        }
    }

    #[inline(always)]
    fn load_e5m2(src: &RawQuarter) -> Self {
        // SAFETY: entered with avx512f.
        Self(unsafe { _mm512_cvtph_ps(e5m2_halves(src)) })
    }

    #[inline(always)]
    fn store(self, dst: &mut Raw) {
        // SAFETY: entered with avx512f; 64 writable bytes, and the store takes any address.
        unsafe { _mm512_storeu_ps(dst.as_mut_ptr().cast(), self.0) }
    }

    #[inline(always)]
    fn to_f16(self) -> RawHalf {
        // SAFETY: entered with avx512f; the register is 32 plain bytes.
        unsafe { std::mem::transmute(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
    }

    #[inline(always)]
    fn to_bf16(self) -> RawHalf {
        // SAFETY: entered with avx512f; the register is 32 plain bytes.
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let high = _mm512_srli_epi32::<16>(bits);
            let odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
            let quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            let result = _mm512_mask_mov_epi32(_mm512_srli_epi32::<16>(rounded), nan, quiet);
            std::mem::transmute(_mm512_cvtepi32_epi16(result))
        }
    }

    #[inline(always)]
    fn to_e4m3(self) -> RawQuarter {
        self.narrow::<{ fp8::E4M3_SHIFT }>(fp8::E4M3)
    }

    #[inline(always)]
    fn to_e5m2(self) -> RawQuarter {
        self.narrow::<{ fp8::E5M2_SHIFT }>(fp8::E5M2)
    }

    #[inline(always)]
    unsafe fn stream(self, dst: &mut Raw) {
        // SAFETY: entered with avx512f; 64 writable bytes, which the caller has aligned.
        unsafe { _mm512_stream_ps(dst.as_mut_ptr().cast(), self.0) }
    }

    #[inline(always)]
    unsafe fn stream_half(half: RawHalf, dst: &mut RawHalf) {
        // SAFETY: the caller aligned `dst`.
        unsafe { Avx2::stream_half(half, dst) }
    }

    #[inline(always)]
    unsafe fn stream_quarter(quarter: RawQuarter, dst: &mut RawQuarter) {
        // SAFETY: the caller aligned `dst`.
        unsafe { Avx2::stream_quarter(quarter, dst) }
    }

    #[inline(always)]
    fn fence() {
        Avx2::fence();
    }

    #[inline(always)]
    fn prefetch(ptr: *const u8) {
        Avx2::prefetch(ptr);
    }

    type Exponents = __m512i;

    #[inline(always)]
    fn no_exponents() -> Self::Exponents {
        // SAFETY: entered with avx512f.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    fn exponents(self, seen: Self::Exponents) -> Self::Exponents {
        // SAFETY: entered with avx512f.
        unsafe {
            let magnitude =
                _mm512_and_si512(_mm512_castps_si512(self.0), _mm512_set1_epi32(MAGNITUDE as i32));
            _mm512_max_epi32(seen, magnitude)
        }
    }

    #[inline(always)]
    fn finite(seen: Self::Exponents) -> bool {
        // SAFETY: entered with avx512f.
        unsafe { _mm512_cmplt_epi32_mask(seen, _mm512_set1_epi32(INFINITY as i32)) == u16::MAX }
    }
}

impl Avx2 {
    #[inline(always)]
    fn bf16_lanes(lanes: __m256) -> __m256i {
        // SAFETY: entered with avx2.
        unsafe {
            let bits = _mm256_castps_si256(lanes);
            let high = _mm256_srli_epi32::<16>(bits);
            let odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
            let quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(lanes, lanes));
            _mm256_blendv_epi8(_mm256_srli_epi32::<16>(rounded), quiet, nan)
        }
    }

    #[inline(always)]
    fn signs(lanes: __m256) -> __m256 {
        // SAFETY: entered with avx2.
        unsafe {
            let (zero, one) = (_mm256_setzero_ps(), _mm256_set1_ps(1.0));
            let above = _mm256_and_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(lanes, zero), one);
            let below = _mm256_and_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(lanes, zero), one);
            _mm256_sub_ps(above, below)
        }
    }

    #[inline(always)]
    fn magnitudes(lanes: __m256) -> __m256i {
        // SAFETY: entered with avx2.
        unsafe { _mm256_and_si256(_mm256_castps_si256(lanes), _mm256_set1_epi32(MAGNITUDE as i32)) }
    }
}

impl Lanes for Avx2 {
    type Scalar = f32;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: entered with avx2.
        let lanes = unsafe { _mm256_set1_ps(value) };
        Self(lanes, lanes)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        // SAFETY: entered with avx2.
        unsafe { Self(_mm256_sqrt_ps(self.0), _mm256_sqrt_ps(self.1)) }
    }

    #[inline(always)]
    fn clamp(self, limit: f32) -> Self {
        // SAFETY: entered with avx2. The second operand is the result if one is NaN, or both are equal.
        unsafe {
            let (most, least) = (_mm256_set1_ps(limit), _mm256_set1_ps(-limit));
            Self(
                _mm256_max_ps(least, _mm256_min_ps(most, self.0)),
                _mm256_max_ps(least, _mm256_min_ps(most, self.1)),
            )
        }
    }

    #[inline(always)]
    fn sign(self) -> Self {
        Self(Self::signs(self.0), Self::signs(self.1))
    }
}

impl Line for Avx2 {
    #[inline(always)]
    fn load(src: &Raw) -> Self {
        let src = src.as_ptr().cast::<f32>();
        // SAFETY: entered with avx2; 64 readable bytes, and the loads take any address.
        unsafe { Self(_mm256_loadu_ps(src), _mm256_loadu_ps(src.add(8))) }
    }

    #[inline(always)]
    fn load_f16(src: &RawHalf) -> Self {
        let src = src.as_ptr().cast::<__m128i>();
        // SAFETY: entered with f16c; 32 readable bytes, and the loads take any address.
        unsafe { Self(_mm256_cvtph_ps(_mm_loadu_si128(src)), _mm256_cvtph_ps(_mm_loadu_si128(src.add(1)))) }
    }

    #[inline(always)]
    fn load_bf16(src: &RawHalf) -> Self {
        let src = src.as_ptr().cast::<__m128i>();
        // SAFETY: entered with avx2; `at` gets 0 or 1, within the 32 readable bytes, at any address.
        let lanes = |at| unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(src.add(at)));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        };
        Self(lanes(0), lanes(1))
    }

    #[inline(always)]
    fn load_e4m3(src: &RawQuarter) -> Self {
        let wide = Self::of_halves(e4m3_halves(src)) * Self::splat(fp8::E4M3_SCALE);
        Self(Self::with_nan(wide.0), Self::with_nan(wide.1))
    }

    #[inline(always)]
    fn load_e5m2(src: &RawQuarter) -> Self {
        Self::of_halves(e5m2_halves(src))
    }

    #[inline(always)]
    fn store(self, dst: &mut Raw) {
        let dst = dst.as_mut_ptr().cast::<f32>();
        // SAFETY: entered with avx2; 64 writable bytes, and the stores take any address.
        unsafe {
            _mm256_storeu_ps(dst, self.0);
            _mm256_storeu_ps(dst.add(8), self.1);
        }
    }

    #[inline(always)]
    fn to_f16(self) -> RawHalf {
        // SAFETY: entered with f16c; the registers are 32 plain bytes.
        unsafe {
            std::mem::transmute([
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1),
            ])
        }
    }

    #[inline(always)]
    fn to_bf16(self) -> RawHalf {
        // SAFETY: entered with avx2; the register is 32 plain bytes.
        unsafe {
            // The pack works within 128-bit halves: the permutation puts the quarters in order.
            let packed = _mm256_packus_epi32(Self::bf16_lanes(self.0), Self::bf16_lanes(self.1));
            std::mem::transmute(_mm256_permute4x64_epi64::<0b11_01_10_00>(packed))
        }
    }

    #[inline(always)]
    fn to_e4m3(self) -> RawQuarter {
        self.narrow::<{ fp8::E4M3_SHIFT as i32 }>(fp8::E4M3)
    }

    #[inline(always)]
    fn to_e5m2(self) -> RawQuarter {
        self.narrow::<{ fp8::E5M2_SHIFT as i32 }>(fp8::E5M2)
    }

    #[inline(always)]
    unsafe fn stream(self, dst: &mut Raw) {
        let dst = dst.as_mut_ptr().cast::<f32>();
        // SAFETY: entered with avx2; 64 writable bytes, which the caller has aligned.
        unsafe {
            _mm256_stream_ps(dst, self.0);
            _mm256_stream_ps(dst.add(8), self.1);
        }
    }

    #[inline(always)]
    unsafe fn stream_half(half: RawHalf, dst: &mut RawHalf) {
        // SAFETY: entered with avx2; 32 writable bytes, which the caller has aligned.
        unsafe { _mm256_stream_si256(dst.as_mut_ptr().cast(), std::mem::transmute::<RawHalf, __m256i>(half)) }
    }

    #[inline(always)]
    unsafe fn stream_quarter(quarter: RawQuarter, dst: &mut RawQuarter) {
        // SAFETY: sse2 is part of x86_64; 16 writable bytes, which the caller has aligned.
        unsafe {
            _mm_stream_si128(dst.as_mut_ptr().cast(), std::mem::transmute::<RawQuarter, __m128i>(quarter))
        }
    }

    #[inline(always)]
    fn fence() {
        // SAFETY: sse is part of x86_64.
        unsafe { _mm_sfence() }
    }

    #[inline(always)]
    fn prefetch(ptr: *const u8) {
        // SAFETY: a hint, which never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ptr.cast()) }
    }

    type Exponents = __m256i;

    #[inline(always)]
    fn no_exponents() -> Self::Exponents {
        // SAFETY: entered with avx2.
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    fn exponents(self, seen: Self::Exponents) -> Self::Exponents {
        // SAFETY: entered with avx2.
        unsafe {
            _mm256_max_epi32(seen, _mm256_max_epi32(Self::magnitudes(self.0), Self::magnitudes(self.1)))
        }
    }

    #[inline(always)]
    fn finite(seen: Self::Exponents) -> bool {
        // SAFETY: entered with avx2.
        unsafe {
            let bad = _mm256_cmpgt_epi32(seen, _mm256_set1_epi32(INFINITY as i32 - 1));
            _mm256_testz_si256(bad, bad) == 1
        }
    }
}
