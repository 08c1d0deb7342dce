//! The two types of 8 bits, of OCP's "8-bit floating point specification": what narrowing to them needs, and both ways
//! for one number.
//!
//! | | sign, exponent, mantissa | largest | smallest | Inf | NaN |
//! |---|---|---|---|---|---|
//! | E4M3 | 1, 4 (bias 7), 3 | 448 | 2^-9 | none | 0x7f |
//! | E5M2 | 1, 5 (bias 15), 2 | 57344 | 2^-16 | 0x7c | 0x7d to 0x7f |
//!
//! Narrowing rounds to nearest even. E4M3 has no infinity: a finite number beyond the largest becomes the largest, and
//! infinity NaN. So a finite number stays finite, and one that is not can be seen. E5M2 is the upper half of a
//! binary16, and overflows to infinity as that does. NaN becomes 0x7f. All keep their sign.

/// Bits of fp32: infinity, and all but the sign.
const INFINITY: u32 = f32::INFINITY.to_bits();
const MAGNITUDE: u32 = 0x7fff_ffff;

/// A type of 8 bits, as the bits of fp32 are brought into it.
#[derive(Clone, Copy)]
pub(super) struct Format {
    /// The difference of the exponents' biases, in the place of fp32's exponent.
    pub bias: u32,
    /// The smallest normal number.
    pub normal: u32,
    /// One ulp of it is the type's smallest number: adding it rounds to a multiple of that.
    pub rounder: f32,
    /// The code of the largest number, or of infinity if there is one.
    pub most: u32,
    /// Magnitudes from here on become NaN.
    pub nan_from: u32,
}

/// Bits of an fp32's mantissa that a type does not have.
pub(super) const E4M3_SHIFT: u32 = 20;
pub(super) const E5M2_SHIFT: u32 = 21;

pub(super) const E4M3: Format =
    Format { bias: 120 << 23, normal: 121 << 23, rounder: 16_384.0, most: 0x7e, nan_from: INFINITY };
pub(super) const E5M2: Format =
    Format { bias: 112 << 23, normal: 113 << 23, rounder: 128.0, most: 0x7c, nan_from: INFINITY + 1 };

/// The code of NaN.
pub(super) const NAN: u32 = 0x7f;

impl Format {
    /// The number to add to a magnitude, besides the lowest bit that is kept, before the lower bits are cut off. So it
    /// is rounded.
    #[inline(always)]
    pub(super) const fn round(self, shift: u32) -> u32 {
        ((1 << (shift - 1)) - 1_u32).wrapping_sub(self.bias)
    }
}

/// The bits that E4M3's NaN would have if it were a number, which is 480, and those that make it NaN.
pub(super) const E4M3_480: u32 = 0x43f0_0000;
pub(super) const QUIET: u32 = 0x7fc0_0000;
/// E4M3 is binary16 without its lower bits but for this factor.
pub(super) const E4M3_SCALE: f32 = 256.0;
/// A code of E4M3 that was widened with its sign and shifted left by 7 has these bits of a binary16.
pub(super) const E4M3_HALF: u16 = 0xbf80;

/// The nearest number of E4M3.
#[inline(always)]
pub fn f32_to_e4m3(value: f32) -> u8 {
    narrow::<E4M3_SHIFT>(E4M3, value)
}

/// The nearest number of E5M2.
#[inline(always)]
pub fn f32_to_e5m2(value: f32) -> u8 {
    narrow::<E5M2_SHIFT>(E5M2, value)
}

#[inline(always)]
fn narrow<const SHIFT: u32>(of: Format, value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & MAGNITUDE;
    let odd = (magnitude >> SHIFT) & 1;
    let rounded = magnitude.wrapping_add(of.round(SHIFT)).wrapping_add(odd) >> SHIFT;
    let subnormal = (f32::from_bits(magnitude) + of.rounder).to_bits().wrapping_sub(of.rounder.to_bits());
    // Both are computed, so that loops vectorise.
    let number = if magnitude < of.normal { subnormal } else { rounded.min(of.most) };
    let code = if magnitude >= of.nan_from { NAN } else { number };
    (code | ((bits >> 24) & 0x80)) as u8
}

#[inline(always)]
pub(super) fn e4m3_to_f32(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    // The smallest number is 2^-9. Nothing here is a subnormal of fp32, which CPUs multiply slowly.
    let subnormal = (magnitude as f32 * (1.0 / 512.0)).to_bits();
    let normal = (magnitude << E4M3_SHIFT) + E4M3.bias;
    let number = if magnitude < 8 { subnormal } else { normal };
    let quiet = if magnitude == NAN { QUIET } else { 0 };
    f32::from_bits(number | quiet | (u32::from(code & 0x80) << 24))
}

#[inline(always)]
pub(super) fn e5m2_to_f32(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    // The smallest number is 2^-16.
    let subnormal = (magnitude as f32 * (1.0 / 65_536.0)).to_bits();
    let bits = magnitude << E5M2_SHIFT;
    let number = if magnitude < 4 { subnormal } else { bits + E5M2.bias };
    let quiet = if magnitude > E5M2.most { QUIET } else { INFINITY };
    let value = if magnitude >= E5M2.most { bits | quiet } else { number };
    f32::from_bits(value | (u32::from(code & 0x80) << 24))
}
