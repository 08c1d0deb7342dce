//! Element types: those that are reduced, and all others that safetensors knows.

use std::fmt;
use std::str::FromStr;

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as ValueError, StrDeserializer};

/// The types that are reduced, as users write them.
pub const REDUCIBLE: &str = "f32, f64, bf16, f16, f8_e4m3, f8_e5m2";

/// A name that is no element type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown element type {0:?}: use {REDUCIBLE} or a safetensors name such as I64 or U8")]
pub struct UnknownDType(pub String);

/// The most that [`DType::widening`] says of any type.
pub const MOST_WIDENING: usize = 4;

/// Element type of a tensor, as safetensors names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// bfloat16.
    BF16,
    /// 8-bit float with 4 bits of exponent and no infinity: `float8_e4m3fn` of PyTorch.
    E4M3,
    /// 8-bit float with 5 bits of exponent: `float8_e5m2` of PyTorch.
    E5M2,
    /// Anything else: carried byte for byte, never reduced.
    Opaque(Dtype),
}

impl DType {
    /// Reads a type as users write it: the safetensors name in any case, or with `fp`, `float`, `int`,
    /// `uint` in front of the width as in PyTorch and NumPy (`fp32`, `bfloat16`, `int64`, `float8_e4m3fn`).
    ///
    /// # Errors
    /// [`UnknownDType`].
    pub fn parse(text: &str) -> Result<DType, UnknownDType> {
        let upper = text.to_ascii_uppercase();
        let name = match upper.as_str() {
            "FLOAT" => "F32".to_owned(),
            "HALF" => "F16".to_owned(),
            "DOUBLE" => "F64".to_owned(),
            _ => [("BFLOAT", "BF"), ("FLOAT", "F"), ("FP", "F"), ("UINT", "U"), ("INT", "I")]
                .iter()
                .find_map(|(long, short)| Some(format!("{short}{}", upper.strip_prefix(long)?)))
                .unwrap_or(upper),
        };
        // PyTorch says with `fn` that the type is finite, and has NaN.
        let name = if name == "F8_E4M3FN" { "F8_E4M3".to_owned() } else { name };
        DType::from_name(&name).ok_or_else(|| UnknownDType(text.to_owned()))
    }

    /// The type that safetensors calls exactly `name`.
    pub fn from_name(name: &str) -> Option<DType> {
        let name: StrDeserializer<'_, ValueError> = name.into_deserializer();
        Dtype::deserialize(name).ok().map(DType::from)
    }

    /// The name in safetensors: `F32`, `BF16`, `F8_E4M3`, …
    pub fn name(self) -> String {
        Dtype::from(self).to_string()
    }

    /// Size of one element in bits; 4 or 6 for the packed types.
    pub fn size_bits(self) -> usize {
        Dtype::from(self).bitsize()
    }

    /// Size of one element in bytes; `None` where elements do not fill bytes.
    pub fn size_bytes(self) -> Option<usize> {
        let bits = self.size_bits();
        bits.is_multiple_of(8).then_some(bits / 8)
    }

    /// The number of bytes that offsets of this type must be multiples of: the element size, 1 for packed
    /// types.
    pub fn alignment(self) -> usize {
        self.size_bytes().filter(|bytes| bytes.is_power_of_two()).unwrap_or(1)
    }

    /// The same type with `Opaque(F32)` and its like, which can be written down but would hide from the
    /// reducer, as `F32`.
    pub fn canonical(self) -> DType {
        DType::from(Dtype::from(self))
    }

    /// Whether its arithmetic is wider than the type: its weights have fp32 masters, and its sums are fp32.
    pub fn is_narrow(self) -> bool {
        matches!(self, DType::F16 | DType::BF16 | DType::E4M3 | DType::E5M2)
    }

    /// How many times the room of its elements their sums, masters and values of state take.
    pub fn widening(self) -> usize {
        match self {
            DType::F16 | DType::BF16 => 2,
            DType::E4M3 | DType::E5M2 => MOST_WIDENING,
            DType::F64 | DType::F32 | DType::Opaque(_) => 1,
        }
    }

    /// Values of 32 bits that a sum, or one slot of optimizer state, takes for each element.
    pub fn words(self) -> usize {
        if self == DType::F64 { 2 } else { 1 }
    }

    /// Whether contributions of this type can be summed.
    pub fn is_reducible(self) -> bool {
        !matches!(self, DType::Opaque(_))
    }
}

impl From<Dtype> for DType {
    fn from(dtype: Dtype) -> DType {
        match dtype {
            Dtype::F64 => DType::F64,
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            Dtype::F8_E4M3 => DType::E4M3,
            Dtype::F8_E5M2 => DType::E5M2,
            other => DType::Opaque(other),
        }
    }
}

impl From<DType> for Dtype {
    fn from(dtype: DType) -> Dtype {
        match dtype {
            DType::F64 => Dtype::F64,
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            DType::E4M3 => Dtype::F8_E4M3,
            DType::E5M2 => Dtype::F8_E5M2,
            DType::Opaque(other) => other,
        }
    }
}

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(text: &str) -> Result<DType, UnknownDType> {
        DType::parse(text)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Dtype::from(*self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_spellings_are_understood() {
        for text in ["f32", "F32", "fp32", "float32", "float"] {
            assert_eq!(DType::parse(text), Ok(DType::F32), "{text}");
        }
        for text in ["f16", "fp16", "Float16", "half"] {
            assert_eq!(DType::parse(text), Ok(DType::F16), "{text}");
        }
        for text in ["bf16", "bfloat16", "BF16"] {
            assert_eq!(text.parse(), Ok(DType::BF16), "{text}");
        }
        assert_eq!(DType::parse("int64"), Ok(DType::Opaque(Dtype::I64)));
        assert_eq!(DType::parse("uint8"), Ok(DType::Opaque(Dtype::U8)));
        assert_eq!(DType::parse("double"), Ok(DType::F64));
        assert_eq!(DType::parse("bool"), Ok(DType::Opaque(Dtype::BOOL)));
        for text in ["f8_e4m3", "fp8_e4m3", "FP8_E4M3", "float8_e4m3", "float8_e4m3fn", "F8_E4M3"] {
            assert_eq!(DType::parse(text), Ok(DType::E4M3), "{text}");
        }
        for text in ["f8_e5m2", "fp8_e5m2", "float8_e5m2", "Float8_E5M2", "F8_E5M2"] {
            assert_eq!(DType::parse(text), Ok(DType::E5M2), "{text}");
        }
        assert_eq!(DType::parse("float8_e4m3fnuz"), Ok(DType::Opaque(Dtype::F8_E4M3FNUZ)));
        assert_eq!(DType::parse("float8_e5m2fn").ok(), None);
        for text in ["", "f8", "fp8", "f8_e3m4", "f", "f33", "fp", "tf32", "f32 ", "q4_0"] {
            assert_eq!(DType::parse(text), Err(UnknownDType(text.to_owned())));
        }
    }

    #[test]
    fn names_are_those_of_safetensors() {
        for name in [
            "F32",
            "F16",
            "BF16",
            "F64",
            "F8_E4M3",
            "F8_E5M2",
            "I8",
            "BOOL",
            "C64",
            "F4",
            "F6_E2M3",
            "F8_E5M2FNUZ",
        ] {
            let dtype = DType::from_name(name).expect(name);
            assert_eq!((dtype.name(), dtype.to_string()), (name.to_owned(), name.to_owned()));
            assert_eq!(DType::parse(name), Ok(dtype));
        }
        assert_eq!(DType::from_name("f32"), None, "a file must spell it as the format does");
    }

    #[test]
    fn sizes() {
        let facts = |dtype: DType| (dtype.size_bits(), dtype.size_bytes(), dtype.alignment());
        assert_eq!(facts(DType::F32), (32, Some(4), 4));
        assert_eq!(facts(DType::BF16), (16, Some(2), 2));
        assert_eq!(facts(DType::E4M3), (8, Some(1), 1));
        assert_eq!(facts(DType::Opaque(Dtype::C64)), (64, Some(8), 8));
        assert_eq!(facts(DType::Opaque(Dtype::BOOL)), (8, Some(1), 1));
        assert_eq!(facts(DType::Opaque(Dtype::F4)), (4, None, 1));
        assert_eq!(facts(DType::Opaque(Dtype::F6_E3M2)), (6, None, 1));
    }

    #[test]
    fn six_types_are_reducible() {
        for name in REDUCIBLE.split(", ") {
            let dtype = DType::parse(name).expect(name);
            assert!(dtype.is_reducible(), "{name}");
            assert_eq!(dtype.is_narrow(), dtype.widening() > 1, "{name}");
            assert_eq!(
                dtype.size_bytes().map(|size| size * dtype.widening()),
                Some(4 * dtype.words()),
                "{name}"
            );
        }
        assert!(
            [Dtype::C64, Dtype::F8_E4M3FNUZ, Dtype::F4].iter().all(|of| !DType::from(*of).is_reducible())
        );
        assert_eq!(DType::Opaque(Dtype::F16).canonical(), DType::F16);
    }
}
