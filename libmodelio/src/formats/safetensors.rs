//! Safetensors files: reading the header of one to load a model.
//!
//! This module touches headers only. A plan maps bytes of files to the model's flat range, and the owner of
//! the buffers moves them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::vocabulary::layout::header::{MAX_HEADER_BYTES, PREFIX};
use crate::vocabulary::layout::{DType, LayoutError, ModelLayout, check_name, shown, tensor_bytes};

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileTensor {
    /// Name, unique in the file.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions; empty for a scalar.
    pub shape: Vec<usize>,
    /// Its data, in bytes from the beginning of the file.
    pub bytes: Range<u64>,
}

/// The header of a safetensors file, checked against the file's length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Tensors by rising offset; together they cover the file from `data_start` to its end.
    pub tensors: Vec<FileTensor>,
    /// The free-form `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// Bytes in front of the data.
    pub data_start: u64,
}

/// A range to copy from a file to the model; see [`plan_load`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// The index of the file among the model's files.
    pub file: usize,
    /// First byte in the file.
    pub file_offset: u64,
    /// First byte in the model's flat range.
    pub flat_offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// Why a file cannot be loaded as a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelFileError {
    /// The file cannot be read.
    #[error("cannot read the model file: {0}")]
    Io(#[from] io::Error),
    /// A directory, device, pipe or socket.
    #[error("not a regular file: give the path of a .safetensors file")]
    NotAFile,
    /// Some other kind of file.
    #[error("not a safetensors file: {0}")]
    NotSafetensors(String),
    /// The header's JSON is broken, or does not have the form safetensors prescribes.
    #[error("not a valid safetensors header: {0}")]
    InvalidHeader(#[from] serde_json::Error),
    /// The file ends too early.
    #[error("truncated: expected {expected} bytes, file has {actual} ({at} is cut off): copy the file again")]
    Truncated {
        /// Bytes the file needs (at least, where the header itself is cut off).
        expected: u64,
        /// Bytes it has.
        actual: u64,
        /// The first missing part: `the header`, or a tensor.
        at: String,
    },
    /// The file goes on behind the last tensor.
    #[error(
        "the last tensor ends at byte {expected}, but the file has {actual}: it is damaged or not finished"
    )]
    TrailingBytes {
        /// Bytes the header accounts for.
        expected: u64,
        /// Bytes the file has.
        actual: u64,
    },
    /// An element type this format does not have.
    #[error("tensor {name:?} has unknown dtype {dtype:?}")]
    UnknownDType {
        /// The tensor.
        name: String,
        /// The file's name for its type.
        dtype: String,
    },
    /// The offsets do not enclose as many bytes as shape and dtype need.
    #[error(
        "tensor {name:?} needs {expected} bytes for its shape of {dtype}, but its data_offsets are {begin}..{end}"
    )]
    WrongSize {
        /// The tensor.
        name: String,
        /// Its element type.
        dtype: DType,
        /// Bytes that dtype and shape need.
        expected: u64,
        /// Its first offset behind the header.
        begin: u64,
        /// Its end offset behind the header.
        end: u64,
    },
    /// Two tensors share bytes.
    #[error("tensor {name:?} overlaps tensor {other:?}")]
    Overlap {
        /// The tensor with the higher offset.
        name: String,
        /// The one before it.
        other: String,
    },
    /// Bytes that belong to no tensor.
    #[error("{bytes} bytes in front of tensor {name:?} belong to no tensor")]
    Gap {
        /// The tensor behind the gap.
        name: String,
        /// Its length.
        bytes: u64,
    },
    /// A tensor that lies outside the file.
    #[error("tensor {name:?} is out of range: its data ends at {end}, the file's at {data_len}")]
    OutOfRange {
        /// The tensor.
        name: String,
        /// Its end offset behind the header.
        end: u64,
        /// Bytes the file has behind the header.
        data_len: u64,
    },
    /// The tensors make no model: none at all, bad or double names, too many.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// Reads and checks the header of a safetensors file. Reads no data and leaves the file's cursor alone.
///
/// # Errors
/// [`ModelFileError`]. The reference implementation accepts every header that passes.
pub fn read_header(file: &File) -> Result<Header, ModelFileError> {
    let stat = file.metadata()?;
    if !stat.is_file() {
        return Err(ModelFileError::NotAFile);
    }
    let not = |reason: String| Err(ModelFileError::NotSafetensors(reason));
    let file_len = stat.len();
    // Anything shorter than a length and `{}` is no such file.
    if file_len < PREFIX as u64 + 2 {
        return not(format!("it has {file_len} bytes, too few for a header"));
    }
    let (mut prefix, mut brace) = ([0; PREFIX], [0; 1]);
    file.read_exact_at(&mut prefix, 0)?;
    file.read_exact_at(&mut brace, PREFIX as u64)?;
    let header_len = u64::from_le_bytes(prefix);
    if brace != *b"{" {
        return not("it does not begin with a JSON header".to_owned());
    }
    if header_len < 2 || header_len > MAX_HEADER_BYTES as u64 {
        return not(format!(
            "it claims a header of {header_len} bytes (2 to {MAX_HEADER_BYTES} are allowed)"
        ));
    }
    let data_start = PREFIX as u64 + header_len;
    if data_start > file_len {
        let at = "the header".to_owned();
        return Err(ModelFileError::Truncated { expected: data_start, actual: file_len, at });
    }
    let mut json = vec![0; header_len as usize];
    file.read_exact_at(&mut json, PREFIX as u64)?;
    parse_header(&json, Some(file_len))
}

/// Checks the JSON of a header: what stands behind the eight bytes of its length. Where the file's length is not known,
/// it is what the tensors need.
///
/// # Errors
/// [`ModelFileError`].
pub fn parse_header(json: &[u8], file_len: Option<u64>) -> Result<Header, ModelFileError> {
    let data_start = (PREFIX + json.len()) as u64;
    let raw: RawHeader = serde_json::from_slice(json)?;
    let needed = raw.tensors.iter().map(|(_, tensor)| tensor.data_offsets.1).max().unwrap_or_default();
    let file_len = file_len.unwrap_or_else(|| data_start.saturating_add(needed));
    let tensors = checked(raw.tensors, data_start, file_len)?;
    // The reference implementation has the last word on its format.
    serde_json::from_slice::<safetensors::tensor::Metadata>(json)?;
    Ok(Header { tensors, metadata: raw.metadata, data_start })
}

/// The layout of the model in some files, one behind the other, and the place of their bytes in its flat
/// range.
///
/// The ranges cover the flat range once, by rising `flat_offset`; ranges adjacent on both sides are one. If
/// the files' order needs no change (see [`ModelLayout::new`]), there is a single range of each.
///
/// # Errors
/// [`ModelFileError::Layout`].
pub fn plan_load(
    headers: &[Header],
    block_size: u32,
) -> Result<(ModelLayout, Vec<CopyRange>), ModelFileError> {
    let tensors = || {
        headers.iter().enumerate().flat_map(|(file, header)| header.tensors.iter().map(move |t| (file, t)))
    };
    let specs = tensors().map(|(_, t)| (t.name.clone(), t.dtype, t.shape.clone())).collect();
    let layout = ModelLayout::new(specs, block_size)?;
    let sources: HashMap<&str, (usize, u64)> =
        tensors().map(|(file, t)| (t.name.as_str(), (file, t.bytes.start))).collect();
    let mut plan: Vec<CopyRange> = Vec::new();
    for tensor in layout.tensors().iter().filter(|tensor| !tensor.bytes.is_empty()) {
        // The layout was made of these very names.
        let Some(&(file, file_offset)) = sources.get(tensor.name.as_str()) else { continue };
        let len = tensor.bytes.end - tensor.bytes.start;
        match plan.last_mut() {
            // The flat range has no gaps, so only the files' side can break a run.
            Some(last) if last.file == file && last.file_offset + last.len == file_offset => last.len += len,
            _ => plan.push(CopyRange { file, file_offset, flat_offset: tensor.bytes.start, len }),
        }
    }
    Ok((layout, plan))
}

/// A tensor as the file states it.
#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// A header as the file states it: in the file's order, and with duplicates, which a map would hide.
#[derive(Default)]
struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RawHeader, D::Error> {
        struct Tensors;

        impl<'de> Visitor<'de> for Tensors {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader::default();
                while let Some(name) = map.next_key::<String>()? {
                    let at = |error| A::Error::custom(format_args!("{:?}: {error}", shown(&name)));
                    if name == "__metadata__" {
                        let metadata: Option<_> = map.next_value().map_err(at)?;
                        header.metadata = metadata.unwrap_or_default();
                    } else {
                        let tensor = map.next_value().map_err(at)?;
                        header.tensors.push((name, tensor));
                    }
                }
                Ok(header)
            }
        }

        deserializer.deserialize_map(Tensors)
    }
}

/// The tensors by rising offset, if each has the size it needs and all together fill the file.
fn checked(
    raw: Vec<(String, RawTensor)>,
    data_start: u64,
    file_len: u64,
) -> Result<Vec<FileTensor>, ModelFileError> {
    if raw.is_empty() {
        return Err(LayoutError::NoTensors.into());
    }
    let mut names = HashSet::new();
    for (name, _) in &raw {
        check_name(name)?;
        if !names.insert(name) {
            return Err(LayoutError::DuplicateName(name.clone()).into());
        }
    }
    // Offsets count from the end of the header here; they are made absolute below.
    let mut tensors = Vec::with_capacity(raw.len());
    for (name, RawTensor { dtype, shape, data_offsets: (begin, end) }) in raw {
        let Some(dtype) = DType::from_name(&dtype) else {
            return Err(ModelFileError::UnknownDType { name, dtype: shown(&dtype) });
        };
        let expected = tensor_bytes(&name, dtype, &shape)?;
        if end.checked_sub(begin) != Some(expected) {
            return Err(ModelFileError::WrongSize { name, dtype, expected, begin, end });
        }
        tensors.push(FileTensor { name, dtype, shape, bytes: begin..end });
    }
    // Stable, so empty tensors at one offset keep the header's order.
    tensors.sort_by_key(|tensor| (tensor.bytes.start, tensor.bytes.end));

    let data_len = file_len - data_start;
    let (mut reached, mut cut, mut before) = (0, None, "");
    for FileTensor { name, bytes, .. } in &tensors {
        if bytes.start < reached {
            return Err(ModelFileError::Overlap { name: name.clone(), other: before.to_owned() });
        }
        if bytes.start > reached && bytes.end > data_len {
            return Err(ModelFileError::OutOfRange { name: name.clone(), end: bytes.end, data_len });
        }
        if bytes.start > reached {
            return Err(ModelFileError::Gap { name: name.clone(), bytes: bytes.start - reached });
        }
        if bytes.end > data_len {
            cut = cut.or(Some(name));
        }
        (reached, before) = (bytes.end, name);
    }
    if let Some(name) = cut {
        let (expected, at) = (data_start.saturating_add(reached), format!("tensor {name:?}"));
        return Err(ModelFileError::Truncated { expected, actual: file_len, at });
    }
    let expected = data_start + reached;
    if expected < file_len {
        return Err(ModelFileError::TrailingBytes { expected, actual: file_len });
    }
    for tensor in &mut tensors {
        tensor.bytes = data_start + tensor.bytes.start..data_start + tensor.bytes.end;
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::layout::MIN_BLOCK_SIZE;
    use crate::vocabulary::layout::header::header_bytes;

    fn file_of(header: &str, data: usize) -> File {
        let file = tempfile::tempfile().unwrap();
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![7; data]].concat();
        file.write_all_at(&bytes, 0).unwrap();
        file
    }

    fn refusal(header: &str, data: usize) -> String {
        read_header(&file_of(header, data)).expect_err("must be refused").to_string()
    }

    /// `name: F32 of n elements at begin`.
    fn entry(name: &str, n: u64, begin: u64) -> String {
        format!(r#""{name}":{{"dtype":"F32","shape":[{n}],"data_offsets":[{begin},{}]}}"#, begin + 4 * n)
    }

    #[test]
    fn a_header_is_read_in_offset_order() {
        let json = format!(
            r#"{{{},"__metadata__":{{"format":"pt","note":"ü\n"}},{},{}}}   "#,
            entry("late", 2, 4),
            entry("early", 1, 0),
            entry("none", 0, 4)
        );
        let header = read_header(&file_of(&json, 12)).unwrap();
        let names: Vec<&str> = header.tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["early", "none", "late"]);
        let start = 8 + json.len() as u64;
        assert_eq!(header.data_start, start);
        assert_eq!(header.tensors[2].bytes, start + 4..start + 12);
        assert_eq!((header.tensors[2].dtype, &header.tensors[2].shape), (DType::F32, &vec![2]));
        assert_eq!(header.metadata["format"], "pt");
        assert_eq!(header.metadata["note"], "ü\n");
        let (layout, plan) = plan_load(std::slice::from_ref(&header), MIN_BLOCK_SIZE).unwrap();
        assert_eq!(plan, [CopyRange { file: 0, file_offset: start, flat_offset: 0, len: 12 }]);
        assert_eq!(layout.size(), 12);
    }

    #[test]
    fn refusals_name_the_trouble() {
        let one = format!("{{{}}}", entry("w", 4, 0));
        let whole = 8 + one.len() + 16;
        let cases = [
            (one.clone(), 15, format!("expected {whole} bytes, file has {} (tensor \"w\"", whole - 1)),
            (one.clone(), 17, format!("ends at byte {whole}, but the file has {}", whole + 1)),
            ("{}".into(), 0, "no tensors".into()),
            (r#"{"__metadata__":{"a":"b"}}"#.into(), 0, "no tensors".into()),
            (one.replace("F32", "Q4"), 16, r#"tensor "w" has unknown dtype "Q4""#.into()),
            (one.replace("[4]", "[5]"), 16, r#"tensor "w" needs 20 bytes"#.into()),
            (one.replace("[0,16]", "[16,0]"), 16, r#"tensor "w" needs 16 bytes"#.into()),
            (one.replace("\"w\"", "\"a//b\""), 16, r#"tensor name "a//b" begins or ends with '/'"#.into()),
            (one.replace("\"w\"", "\"..\""), 16, r#"tensor name "..""#.into()),
            (one.replace("[4]", "[4611686018427387904,8]"), 16, r#"tensor "w" takes"#.into()),
            (one.replace("[4]", "[-4]"), 16, r#""w": invalid value"#.into()),
            (one.replace(r#""dtype":"F32","#, ""), 16, r#""w": missing field `dtype`"#.into()),
            (
                one.replace("{\"w\"", "{\"__metadata__\":{\"a\":1},\"w\""),
                16,
                r#""__metadata__": invalid"#.into(),
            ),
            (one.replace(']', ""), 16, "not a valid safetensors header".into()),
            (format!("{{{},{}}}", entry("w", 4, 0), entry("w", 4, 16)), 32, "two tensors are named".into()),
            (
                format!("{{{},{}}}", entry("a", 4, 0), entry("b", 2, 8)),
                16,
                r#""b" overlaps tensor "a""#.into(),
            ),
            (
                format!("{{{},{}}}", entry("a", 4, 0), entry("b", 1, 20)),
                24,
                r#"4 bytes in front of tensor "b""#.into(),
            ),
            (
                format!("{{{},{}}}", entry("a", 4, 0), entry("b", 1, 99)),
                24,
                r#"tensor "b" is out of range"#.into(),
            ),
        ];
        for (header, data, expected) in cases {
            let message = refusal(&header, data);
            assert!(message.contains(&expected), "{header} gave: {message}\nexpected: {expected}");
        }
    }

    #[test]
    fn other_files_are_recognised() {
        let read = |bytes: &[u8]| {
            let file = tempfile::tempfile().unwrap();
            file.write_all_at(bytes, 0).unwrap();
            read_header(&file)
        };
        for bytes in [&b""[..], b"hello", b"a text file, longer than its length", &[0; 64], &[0xff; 64]] {
            assert!(matches!(read(bytes), Err(ModelFileError::NotSafetensors(_))), "{bytes:?}");
        }
        for len in [0, 1, 100_000_001, u64::MAX] {
            let bytes = [&len.to_le_bytes()[..], b"{}      "].concat();
            assert!(matches!(read(&bytes), Err(ModelFileError::NotSafetensors(_))), "{len}");
        }
        let cut = read(b"\x80\0\0\0\0\0\0\0{\"w\":");
        assert!(matches!(cut, Err(ModelFileError::Truncated { expected: 136, actual: 13, .. })), "{cut:?}");
        let directory = read_header(&File::open("/").unwrap());
        assert!(matches!(directory, Err(ModelFileError::NotAFile)), "{directory:?}");
    }

    #[test]
    fn a_written_header_is_aligned_and_keeps_metadata() {
        let name = "we\"ird\n\\näme".to_owned();
        let layout = ModelLayout::new(vec![(name.clone(), DType::BF16, vec![])], MIN_BLOCK_SIZE).unwrap();
        let metadata = BTreeMap::from([("version".into(), "12".into()), ("a\"b".into(), "\0".into())]);
        let mut bytes = header_bytes(layout.tensors(), &metadata);
        assert_eq!(bytes.len() % 64, 0);
        bytes.extend([1, 2]);
        let parsed = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(parsed.tensor(&name).unwrap().data(), [1, 2]);
        let (_, parsed) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let parsed: BTreeMap<String, String> = parsed.metadata().clone().unwrap().into_iter().collect();
        assert_eq!(parsed, metadata);
    }
}
