//! The forms in which a contribution's blocks cross a network: what each form keeps of an element, and how many bytes
//! it takes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::vocabulary::dtype::DType;
use crate::vocabulary::ids::BlockId;
use crate::vocabulary::layout::{ModelLayout, Segment};

/// So many elements of a tensor have a common scale.
pub const GROUP: usize = 256;

/// The values of `wire`.
pub const CODINGS: &str = "full, bf16, fp16, int8, fp8, or topk(f) with f above 0 and up to 1";

/// A lossy form of elements. F64 elements, and those that cannot be reduced, have none: they travel as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Coding {
    /// The upper half of an fp32.
    Bf16,
    /// IEEE binary16.
    Fp16,
    /// Whole numbers from -127 to 127, times the scale of their group.
    Int8,
    /// Numbers with four bits of exponent and three of mantissa, times the scale of their group.
    Fp8,
    /// This share of the elements: those of the largest magnitude, as fp32.
    TopK(Fraction),
}

/// A share of elements, in millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Fraction(u32);

/// The number is no share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} millionths are no share: it is above 0 and up to 1000000")]
pub struct NoFraction(u32);

impl Fraction {
    const WHOLE: u32 = 1_000_000;

    /// The number of elements that are kept of `elements`: one at least.
    pub fn of(self, elements: usize) -> usize {
        let share = (elements as u64 * u64::from(self.0)).div_ceil(u64::from(Fraction::WHOLE));
        share as usize
    }
}

impl TryFrom<u32> for Fraction {
    type Error = NoFraction;

    fn try_from(millionths: u32) -> Result<Fraction, NoFraction> {
        if (1..=Fraction::WHOLE).contains(&millionths) {
            Ok(Fraction(millionths))
        } else {
            Err(NoFraction(millionths))
        }
    }
}

impl From<Fraction> for u32 {
    fn from(of: Fraction) -> u32 {
        of.0
    }
}

impl Coding {
    /// The bytes of so many elements of one tensor.
    pub fn bytes(self, elements: usize) -> usize {
        match self {
            Coding::Bf16 | Coding::Fp16 => 2 * elements,
            Coding::Int8 | Coding::Fp8 => 4 * elements.div_ceil(GROUP) + elements,
            Coding::TopK(share) => 8 * share.of(elements),
        }
    }

    /// Whether tensors of this type have elements that are coded.
    pub fn is_of(dtype: DType) -> bool {
        dtype == DType::F32 || dtype.is_narrow()
    }

    /// The elements of a segment that this is the form of. `None` if the segment travels as it is.
    pub fn elements(segment: &Segment) -> Option<usize> {
        let bytes = (segment.bytes.end - segment.bytes.start) as usize;
        match segment.dtype {
            DType::F32 => Some(bytes / 4),
            DType::F16 | DType::BF16 => Some(bytes / 2),
            DType::E4M3 | DType::E5M2 => Some(bytes),
            DType::F64 | DType::Opaque(_) => None,
        }
    }

    /// The bytes of a segment.
    pub fn segment_bytes(self, segment: &Segment) -> usize {
        match Coding::elements(segment) {
            Some(elements) => self.bytes(elements),
            None => (segment.bytes.end - segment.bytes.start) as usize,
        }
    }

    /// The bytes of a block: its segments one behind the other.
    pub fn block_bytes(self, layout: &ModelLayout, block: BlockId) -> usize {
        layout.segments(block).iter().map(|segment| self.segment_bytes(segment)).sum()
    }
}

impl fmt::Display for Coding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Coding::Bf16 => f.write_str("bf16"),
            Coding::Fp16 => f.write_str("fp16"),
            Coding::Int8 => f.write_str("int8"),
            Coding::Fp8 => f.write_str("fp8"),
            Coding::TopK(share) => {
                write!(f, "topk({})", f64::from(share.0) / f64::from(Fraction::WHOLE))
            }
        }
    }
}

/// The text is no coding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not {CODINGS}")]
pub struct NoCoding;

impl FromStr for Coding {
    type Err = NoCoding;

    /// Takes words in any case.
    fn from_str(text: &str) -> Result<Coding, NoCoding> {
        let plain = text.to_ascii_lowercase();
        match plain.as_str() {
            "bf16" => return Ok(Coding::Bf16),
            "fp16" => return Ok(Coding::Fp16),
            "int8" => return Ok(Coding::Int8),
            "fp8" => return Ok(Coding::Fp8),
            _ => {}
        }
        let share = plain.strip_prefix("topk(").and_then(|text| text.strip_suffix(')')).ok_or(NoCoding)?;
        // `parse` would take signs, NaN and Inf.
        let is_number = share.bytes().all(|byte| byte.is_ascii_digit() || b".e-".contains(&byte));
        let share = share.parse().ok().filter(|share: &f64| is_number && *share > 0.0 && *share <= 1.0);
        let millionths = (share.ok_or(NoCoding)? * f64::from(Fraction::WHOLE)).round();
        // A share below a millionth is one.
        Fraction::try_from(millionths.max(1.0) as u32).map(Coding::TopK).map_err(|_| NoCoding)
    }
}

/// The form of one block's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Form {
    /// The block as it lies in the model.
    Plain,
    /// The same segments in the same order, with narrower elements as fp32.
    Wide,
    /// The same segments in the same order, with fp32 and narrower elements in this form.
    Coded(Coding),
}

impl Form {
    /// A block's form if it is not coded.
    pub fn full(wide: bool) -> Form {
        if wide { Form::Wide } else { Form::Plain }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn top(millionths: u32) -> Coding {
        Coding::TopK(Fraction::try_from(millionths).unwrap())
    }

    #[test]
    fn words_are_read_and_shown() {
        for (text, coding, shown) in [
            ("bf16", Coding::Bf16, "bf16"),
            ("FP16", Coding::Fp16, "fp16"),
            ("Int8", Coding::Int8, "int8"),
            ("fp8", Coding::Fp8, "fp8"),
            ("topk(0.01)", top(10_000), "topk(0.01)"),
            ("TopK(1)", top(1_000_000), "topk(1)"),
            ("topk(1e-9)", top(1), "topk(0.000001)"),
        ] {
            assert_eq!(text.parse(), Ok(coding), "{text}");
            assert_eq!(coding.to_string(), shown);
            assert_eq!(shown.parse(), Ok(coding));
        }
        for text in
            ["", "int4", "topk", "topk()", "topk(0)", "topk(-0.1)", "topk(1.01)", "topk(nan)", "topk(+1)"]
        {
            assert_eq!(text.parse::<Coding>(), Err(NoCoding), "{text}");
        }
    }

    #[test]
    fn a_share_outside_of_its_range_is_refused() {
        for bad in [0, 1_000_001, u32::MAX] {
            assert_eq!(Fraction::try_from(bad), Err(NoFraction(bad)));
            let bytes = postcard::to_stdvec(&bad).unwrap();
            assert!(postcard::from_bytes::<Fraction>(&bytes).is_err());
        }
        assert_eq!(top(1).bytes(10), 8, "one element at least");
    }

    #[test]
    fn segments_without_a_form_travel_as_they_are() {
        let tensors = vec![
            ("a".into(), DType::F32, vec![300]),
            ("b".into(), DType::F64, vec![3]),
            ("c".into(), DType::Opaque(safetensors::Dtype::U8), vec![5]),
            ("d".into(), DType::BF16, vec![256]),
            ("e".into(), DType::E4M3, vec![100]),
        ];
        let layout = ModelLayout::new(tensors, 64 << 10).unwrap();
        let bytes = |coding: Coding| coding.block_bytes(&layout, BlockId(0));
        let as_they_are = 24 + 5;
        assert_eq!(bytes(Coding::Bf16), 600 + 512 + 200 + as_they_are);
        assert_eq!(bytes(Coding::Int8), 300 + 8 + 256 + 4 + 100 + 4 + as_they_are);
        assert_eq!(bytes(top(100_000)), 8 * (30 + 26 + 10) + as_they_are);
    }
}
