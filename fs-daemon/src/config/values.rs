//! What the values of options mean. Each parser says what is wrong with a text, and what would do; who parses adds where
//! the text is from.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use libmodelio::vocabulary::layout::DType;
use ps_backend::device::DeviceName;

use crate::error::Error;

/// Element types of a blank model.
pub const DTYPES: &[&str] = &["f32", "f64", "f16", "bf16", "f8_e4m3", "f8_e5m2", "u8"];
const MIN_BLOCK_SIZE: u64 = 64 << 10;
const MAX_BLOCK_SIZE: u64 = 4 << 20;

/// A parser of whole numbers in `range`.
pub fn whole<T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static>(
    range: RangeInclusive<T>,
    hint: impl Into<String>,
) -> impl Fn(&str) -> Result<T, Error> + Clone + Send + Sync + 'static {
    let hint = hint.into();
    move |text| number(text, "a whole number", range.clone(), &hint)
}

/// The number in `range` that `text` is; `what` it is to be, in words.
pub fn number<T: FromStr + PartialOrd + Display>(
    text: &str,
    what: &str,
    range: RangeInclusive<T>,
    hint: &str,
) -> Result<T, Error> {
    text.trim().parse().ok().filter(|number| range.contains(number)).ok_or_else(|| {
        let (least, most) = range.into_inner();
        Error::usage(format!("{text:?} is not {what} from {least} to {most}")).hint(hint)
    })
}

/// A parser of one of `words`, each the text of a `T`.
pub fn word<T>(words: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err: std::error::Error + Send + Sync> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(words).try_map(|text| text.parse::<T>())
}

/// Whether something is on.
pub fn switch(text: &str) -> Result<bool, Error> {
    match text.trim() {
        "true" | "1" | "yes" | "on" => Ok(true),
        "false" | "0" | "no" | "off" => Ok(false),
        _ => Err(Error::usage(format!("{text:?} is not true or false")).hint("use true or false")),
    }
}

/// A device that computes versions.
pub fn device(text: &str) -> Result<DeviceName, Error> {
    text.parse().map_err(|error| Error::usage(format!("{error}")))
}

/// The number of the user that `text` is, or names.
pub fn user(text: &str) -> Result<u32, Error> {
    let named = |name: &str| Ok(nix::unistd::User::from_name(name)?.map(|user| user.uid.as_raw()));
    id(text, "user", named)
}

/// The number of the group that `text` is, or names.
pub fn group(text: &str) -> Result<u32, Error> {
    let named = |name: &str| Ok(nix::unistd::Group::from_name(name)?.map(|group| group.gid.as_raw()));
    id(text, "group", named)
}

fn id(text: &str, what: &str, named: impl Fn(&str) -> nix::Result<Option<u32>>) -> Result<u32, Error> {
    // The highest number means nobody to the kernel.
    if let Some(id) = text.parse().ok().filter(|id| *id != u32::MAX) {
        return Ok(id);
    }
    let found = named(text).map_err(|error| Error::new(format!("looking up {text:?}: {error}")))?;
    found.ok_or_else(|| {
        Error::usage(format!("there is no {what} {text:?}")).hint("use its name or its number")
    })
}

/// Permission bits that are taken away.
pub fn umask(text: &str) -> Result<u16, Error> {
    match u16::from_str_radix(text, 8) {
        Ok(umask @ 0..=0o777) => Ok(umask),
        _ => Err(Error::usage(format!("{text:?} is not an octal number from 0 to 777"))
            .hint("--umask 007 lets the group write, --umask 0 everybody")),
    }
}

/// The type of the elements of a blank model: as in [`DTYPES`], or as torch and NumPy call it, in any case.
pub fn element_type(text: &str) -> Result<DType, Error> {
    let plain = text.to_ascii_lowercase();
    match DType::parse(plain.strip_prefix("torch.").unwrap_or(&plain)) {
        Ok(dtype) if dtype.name() == "U8" => Ok(dtype),
        Ok(DType::Opaque(_)) | Err(_) => Err(not_a_word(text, DTYPES.iter())),
        Ok(dtype) => Ok(dtype),
    }
}

/// The complaint about a `text` that is none of `words`.
pub fn not_a_word(text: &str, words: impl Iterator<Item = impl Display>) -> Error {
    let words: Vec<String> = words.map(|word| word.to_string()).collect();
    Error::usage(format!("{text:?} is not valid")).hint(format!("use one of {}", words.join(", ")))
}

/// Bytes of a block.
pub fn block_size(text: &str) -> Result<u32, Error> {
    match size(text)? {
        bytes @ MIN_BLOCK_SIZE..=MAX_BLOCK_SIZE if bytes.is_power_of_two() => Ok(bytes as u32),
        bytes => Err(Error::usage(format!("{bytes} bytes is not a power of two from 64KiB to 4MiB"))
            .hint("use 64KiB, 128KiB, 256KiB (the default), 512KiB, 1MiB, 2MiB or 4MiB")),
    }
}

/// Bytes from `65536`, `64KiB`, `64K`, `1 GiB`: units are powers of 1024.
pub fn size(text: &str) -> Result<u64, Error> {
    let not_a_size = || {
        Error::usage(format!("{text:?} is not a size"))
            .hint("write a whole number of bytes, or one with KiB, MiB, GiB or TiB: 1048576, 256KiB, 1GiB")
    };
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        "kb" | "mb" | "gb" | "tb" => {
            return Err(Error::usage(format!("{text:?} uses a unit that has two meanings"))
                .hint("write KiB, MiB, GiB or TiB for powers of 1024, or plain bytes"));
        }
        _ => return Err(not_a_size()),
    };
    let number: u64 = number.replace('_', "").parse().map_err(|_| not_a_size())?;
    let bytes = number.checked_mul(1 << shift).filter(|bytes| i64::try_from(*bytes).is_ok());
    bytes.ok_or_else(|| Error::usage(format!("{text} is more than a file can hold")))
}
