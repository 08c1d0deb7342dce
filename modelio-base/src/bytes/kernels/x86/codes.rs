//! The types of 8 bits in AVX2 and AVX-512 registers.
//!
//! As in the module above, the functions are always inlined into entry functions that enable the features.

use std::arch::x86_64::*;

use super::super::fp8::{self, Format};
use super::super::line::{MAGNITUDE, RawQuarter};
use super::{Avx2, Avx512};

impl Avx512 {
    #[inline(always)]
    fn all(bits: u32) -> __m512i {
        // SAFETY: entered with avx512f.
        unsafe { _mm512_set1_epi32(bits as i32) }
    }

    /// The lanes in a type of 8 bits, as [`fp8`] does it for one number.
    #[inline(always)]
    pub(super) fn narrow<const SHIFT: u32>(self, of: Format) -> RawQuarter {
        // SAFETY: entered with avx512f; the register is 16 plain bytes.
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let magnitude = _mm512_and_si512(bits, Self::all(MAGNITUDE));
            let odd = _mm512_and_si512(_mm512_srli_epi32::<SHIFT>(bits), Self::all(1));
            let sum = _mm512_add_epi32(_mm512_add_epi32(magnitude, Self::all(of.round(SHIFT))), odd);
            let rounded = _mm512_min_epu32(_mm512_srli_epi32::<SHIFT>(sum), Self::all(of.most));
            let sum = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(of.rounder));
            let subnormal = _mm512_sub_epi32(_mm512_castps_si512(sum), Self::all(of.rounder.to_bits()));
            let is_small = _mm512_cmplt_epi32_mask(magnitude, Self::all(of.normal));
            let number = _mm512_mask_mov_epi32(rounded, is_small, subnormal);
            let is_nan = _mm512_cmpge_epi32_mask(magnitude, Self::all(of.nan_from));
            let number = _mm512_mask_mov_epi32(number, is_nan, Self::all(fp8::NAN));
            let sign = _mm512_and_si512(_mm512_srli_epi32::<24>(bits), Self::all(0x80));
            std::mem::transmute(_mm512_cvtepi32_epi8(_mm512_or_si512(number, sign)))
        }
    }
}

/// Sixteen numbers of E4M3 as those of binary16 that are smaller by a factor.
#[inline(always)]
pub(super) fn e4m3_halves(src: &RawQuarter) -> __m256i {
    // SAFETY: entered with avx2; 16 readable bytes, and the load takes any address.
    unsafe {
        let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(src.as_ptr().cast()));
        _mm256_and_si256(_mm256_slli_epi16::<7>(wide), _mm256_set1_epi16(fp8::E4M3_HALF as i16))
    }
}

/// Sixteen numbers of E5M2 as the same of binary16.
#[inline(always)]
pub(super) fn e5m2_halves(src: &RawQuarter) -> __m256i {
    // SAFETY: entered with avx2; 16 readable bytes, and the load takes any address.
    unsafe { _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(_mm_loadu_si128(src.as_ptr().cast()))) }
}

impl Avx2 {
    #[inline(always)]
    fn all(bits: u32) -> __m256i {
        // SAFETY: entered with avx2.
        unsafe { _mm256_set1_epi32(bits as i32) }
    }

    /// Half of the lanes in a type of 8 bits, as [`fp8`] does it for one number.
    #[inline(always)]
    fn narrow_lanes<const SHIFT: i32>(lanes: __m256, of: Format) -> __m256i {
        // SAFETY: entered with avx2.
        unsafe {
            let bits = _mm256_castps_si256(lanes);
            let magnitude = _mm256_and_si256(bits, Self::all(MAGNITUDE));
            let odd = _mm256_and_si256(_mm256_srli_epi32::<SHIFT>(bits), Self::all(1));
            let sum = _mm256_add_epi32(_mm256_add_epi32(magnitude, Self::all(of.round(SHIFT as u32))), odd);
            let rounded = _mm256_min_epu32(_mm256_srli_epi32::<SHIFT>(sum), Self::all(of.most));
            let sum = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(of.rounder));
            let subnormal = _mm256_sub_epi32(_mm256_castps_si256(sum), Self::all(of.rounder.to_bits()));
            let is_small = _mm256_cmpgt_epi32(Self::all(of.normal), magnitude);
            let number = _mm256_blendv_epi8(rounded, subnormal, is_small);
            let is_nan = _mm256_cmpgt_epi32(magnitude, Self::all(of.nan_from - 1));
            let number = _mm256_blendv_epi8(number, Self::all(fp8::NAN), is_nan);
            let sign = _mm256_and_si256(_mm256_srli_epi32::<24>(bits), Self::all(0x80));
            _mm256_or_si256(number, sign)
        }
    }

    #[inline(always)]
    pub(super) fn narrow<const SHIFT: i32>(self, of: Format) -> RawQuarter {
        let (low, high) = (Self::narrow_lanes::<SHIFT>(self.0, of), Self::narrow_lanes::<SHIFT>(self.1, of));
        // SAFETY: entered with avx2; the register is 16 plain bytes.
        unsafe {
            // The pack works within 128-bit halves: the permutation puts the quarters in order.
            let halves = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            let [low, high] = [_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves)];
            std::mem::transmute(_mm_packus_epi16(low, high))
        }
    }

    /// Sixteen numbers of binary16.
    #[inline(always)]
    pub(super) fn of_halves(halves: __m256i) -> Self {
        // SAFETY: entered with avx2 and f16c.
        unsafe {
            let [low, high] = [_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves)];
            Self(_mm256_cvtph_ps(low), _mm256_cvtph_ps(high))
        }
    }

    /// What E4M3 would have as 480 is NaN.
    #[inline(always)]
    pub(super) fn with_nan(lanes: __m256) -> __m256 {
        // SAFETY: entered with avx2.
        unsafe {
            let is_nan = _mm256_cmpeq_epi32(Self::magnitudes(lanes), _mm256_set1_epi32(fp8::E4M3_480 as i32));
            let quiet = _mm256_and_si256(is_nan, _mm256_set1_epi32(fp8::QUIET as i32));
            _mm256_or_ps(lanes, _mm256_castsi256_ps(quiet))
        }
    }
}
