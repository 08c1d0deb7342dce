//! A safetensors file that is written by tensors' names: its bytes come front to back, and go to the model's offsets.
//!
//! Pure. The tensors may come in any order, and some may be missing. Elements become the model's where nothing is lost, or
//! where the model itself rounds to its type.

use std::collections::BTreeMap;
use std::sync::Arc;

use half::{bf16, f16};

use super::safetensors::{ModelFileError, parse_header};
use crate::bytes::kernels::{f32_to_e4m3, f32_to_e5m2};
use crate::vocabulary::layout::header::{MAX_HEADER_BYTES, PREFIX};
use crate::vocabulary::layout::{DType, ModelLayout, shown};

/// Bytes of the model that one call of a sink gets at most where elements are converted.
const PIECE: usize = 256 << 10;
/// The part of a file's header that other writers spend on a tensor besides its name, and on their metadata.
const ROOM_A_TENSOR: u64 = 256;
const METADATA_ROOM: u64 = 1 << 20;

/// Why a file is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NamedError {
    /// Bytes that do not follow those before them.
    #[error(
        "byte {offset} was written behind byte {at}: write a safetensors file front to back, in one piece"
    )]
    NotNext {
        /// Where the bytes were to go.
        offset: u64,
        /// The end of what was written.
        at: u64,
    },
    /// The header is broken.
    #[error(transparent)]
    Header(#[from] ModelFileError),
    /// A length of the header that no file for this model has.
    #[error("not a safetensors file: it claims a header of {0} bytes")]
    HeaderLength(u64),
    /// A name that the model does not have.
    #[error("the model has no tensor {0:?}")]
    Unknown(String),
    /// Another shape than the model's.
    #[error("tensor {name:?} has the shape {found:?}, and {expected:?} in the model")]
    Shape {
        /// The tensor.
        name: String,
        /// The shape in the file.
        found: Vec<usize>,
        /// The shape in the model.
        expected: Vec<usize>,
    },
    /// A type whose values the model's type does not have.
    #[error("tensor {name:?} is {found}, and {expected} in the model: convert it first")]
    Type {
        /// The tensor.
        name: String,
        /// The type in the file.
        found: DType,
        /// The type in the model.
        expected: DType,
    },
    /// The file ends too early.
    #[error("the file ends inside {0}: nothing of it counts")]
    Cut(String),
    /// The file goes on behind its last tensor.
    #[error("the last tensor ends at byte {0}, but the file goes on")]
    TooLong(u64),
}

/// Elements of one type as those of another: appends what `from` has.
pub(crate) type Convert = fn(from: &[u8], to: &mut Vec<u8>);

/// Where a tensor of the file goes.
#[derive(Debug)]
struct Target {
    name: String,
    /// The end of its bytes in the file.
    end: u64,
    /// The place of its next element in the model.
    flat: u64,
    /// The size of an element in the file, and how it becomes the model's. None: byte for byte.
    convert: Option<(usize, Convert)>,
}

#[derive(Debug)]
enum Part {
    Header(Vec<u8>),
    /// The tensors that are not whole yet, the next one last.
    Data(Vec<Target>),
}

/// A safetensors file that is being written for one model.
#[derive(Debug)]
pub struct NamedStream {
    layout: Arc<ModelLayout>,
    part: Part,
    /// Bytes of the file so far.
    at: u64,
    /// Where the file ends, once the header is known.
    end: Option<u64>,
    /// The header's `__metadata__`, until it is taken.
    metadata: Option<BTreeMap<String, String>>,
    /// The beginning of an element whose rest is to come.
    half: Vec<u8>,
    /// The elements that were converted last.
    converted: Vec<u8>,
}

impl NamedStream {
    /// A file of which nothing was written.
    pub fn new(layout: Arc<ModelLayout>) -> NamedStream {
        let part = Part::Header(Vec::new());
        NamedStream {
            layout,
            part,
            at: 0,
            end: None,
            metadata: None,
            half: Vec::new(),
            converted: Vec::new(),
        }
    }

    /// The most bytes that a file for this model may have.
    pub fn max_bytes(layout: &ModelLayout) -> u64 {
        layout.size() * layout.widening() as u64 + PREFIX as u64 + max_header(layout)
    }

    /// Whether nothing was written.
    pub fn is_untouched(&self) -> bool {
        self.at == 0
    }

    /// Takes the next bytes of the file. `sink` gets bytes of the model with their offset.
    ///
    /// # Errors
    /// [`NamedError`], and those of `sink`. The file cannot go on then.
    pub fn write<E: From<NamedError>>(
        &mut self,
        offset: u64,
        mut data: &[u8],
        mut sink: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        if offset != self.at {
            return Err(NamedError::NotNext { offset, at: self.at }.into());
        }
        if let Part::Header(header) = &mut self.part {
            let taken = take_header(header, &mut data, max_header(&self.layout))?;
            self.at += taken as u64;
            if let Some(json) = whole_header(header) {
                let (targets, metadata) = targets(&self.layout, json)?;
                self.metadata = Some(metadata);
                self.end = Some(targets.first().map_or(self.at, |last| last.end));
                self.part = Part::Data(targets);
            }
        }
        while !data.is_empty() {
            let Part::Data(targets) = &mut self.part else { break };
            let Some(target) = targets.last_mut() else { return Err(NamedError::TooLong(self.at).into()) };
            let (now, later) = data.split_at(data.len().min((target.end - self.at) as usize));
            match target.convert {
                None => {
                    sink(target.flat, now)?;
                    target.flat += now.len() as u64;
                }
                Some((size, convert)) => {
                    let mut rest = now;
                    if !self.half.is_empty() {
                        let missing = rest.len().min(size - self.half.len());
                        self.half.extend_from_slice(&rest[..missing]);
                        rest = &rest[missing..];
                        if self.half.len() == size {
                            self.converted.clear();
                            convert(&self.half, &mut self.converted);
                            self.half.clear();
                            sink(target.flat, &self.converted)?;
                            target.flat += self.converted.len() as u64;
                        }
                    }
                    let (whole, half) = rest.split_at(rest.len() / size * size);
                    for piece in whole.chunks(PIECE / size * size) {
                        self.converted.clear();
                        convert(piece, &mut self.converted);
                        sink(target.flat, &self.converted)?;
                        target.flat += self.converted.len() as u64;
                    }
                    self.half.extend_from_slice(half);
                }
            }
            self.at += now.len() as u64;
            data = later;
            let at = self.at;
            while targets.pop_if(|target| target.end == at).is_some() {}
        }
        Ok(())
    }

    /// The file's `__metadata__`, once after its header has come.
    pub fn take_metadata(&mut self) -> Option<BTreeMap<String, String>> {
        self.metadata.take()
    }

    /// Where the file ends, if its header has come.
    pub fn end(&self) -> Option<u64> {
        self.end
    }

    /// A file whose header was written has this size.
    ///
    /// # Errors
    /// If that is not its size.
    pub fn check_size(&self, size: u64) -> Result<(), NamedError> {
        match self.end {
            Some(end) if size > end => Err(NamedError::TooLong(end)),
            Some(end) if size < end => {
                Err(NamedError::Cut(format!("its data, which is to end at byte {end}")))
            }
            Some(_) => Ok(()),
            None => self.check_end(),
        }
    }

    /// The program writes no more.
    ///
    /// # Errors
    /// If the file is not whole.
    pub fn check_end(&self) -> Result<(), NamedError> {
        match &self.part {
            Part::Data(targets) => match targets.last() {
                None => Ok(()),
                Some(target) => Err(NamedError::Cut(format!("tensor {:?}", shown(&target.name)))),
            },
            Part::Header(_) => Err(NamedError::Cut("its header".to_owned())),
        }
    }
}

/// The longest header that a file for this model may have.
fn max_header(layout: &ModelLayout) -> u64 {
    let names: u64 = layout.tensors().iter().map(|tensor| tensor.name.len() as u64 * 6 + ROOM_A_TENSOR).sum();
    (names + METADATA_ROOM).min(MAX_HEADER_BYTES as u64)
}

/// Moves what belongs to the header from `data` to its end, and returns how many bytes that are.
fn take_header(header: &mut Vec<u8>, data: &mut &[u8], max: u64) -> Result<usize, NamedError> {
    let before = header.len();
    let mut take = |until: u64| {
        let (now, later) = data.split_at(data.len().min((until as usize).saturating_sub(header.len())));
        header.extend_from_slice(now);
        *data = later;
        header.first_chunk().map(|length| u64::from_le_bytes(*length))
    };
    if let Some(length) = take(PREFIX as u64) {
        if !(2..=max).contains(&length) {
            return Err(NamedError::HeaderLength(length));
        }
        take(PREFIX as u64 + length);
    }
    Ok(header.len() - before)
}

/// The JSON of a header that has all its bytes.
fn whole_header(header: &[u8]) -> Option<&[u8]> {
    let (length, json) = header.split_first_chunk()?;
    (json.len() as u64 == u64::from_le_bytes(*length)).then_some(json)
}

/// The places of the file's tensors in the model, the first one last, and the file's metadata.
fn targets(layout: &ModelLayout, json: &[u8]) -> Result<(Vec<Target>, BTreeMap<String, String>), NamedError> {
    let header = parse_header(json, None)?;
    let target = |tensor: super::safetensors::FileTensor| {
        let (name, found) = (tensor.name, tensor.dtype);
        let Some(index) = layout.tensor_index(&name) else {
            return Err(NamedError::Unknown(shown(&name)));
        };
        let of = &layout.tensors()[index];
        if tensor.shape != of.shape {
            return Err(NamedError::Shape { name, found: tensor.shape, expected: of.shape.clone() });
        }
        let convert = match found.canonical() == of.dtype.canonical() {
            true => None,
            false => match (found.size_bytes(), conversion(found, of.dtype)) {
                (Some(size), Some(convert)) => Some((size, convert)),
                _ => return Err(NamedError::Type { name, found, expected: of.dtype }),
            },
        };
        Ok(Target { name, end: tensor.bytes.end, flat: of.bytes.start, convert })
    };
    let is_empty = |tensor: &super::safetensors::FileTensor| tensor.bytes.is_empty();
    let (empty, mut tensors): (Vec<_>, Vec<_>) = header.tensors.into_iter().partition(is_empty);
    tensors.reverse();
    // Names and shapes of tensors without elements are checked, too.
    empty.into_iter().try_for_each(|tensor| target(tensor).map(drop))?;
    let targets: Result<Vec<_>, _> = tensors.into_iter().map(target).collect();
    Ok((targets?, header.metadata))
}

/// How elements of one type become those of another. None if values would be lost that the model could not round itself:
/// it rounds fp32 to its type.
pub(crate) fn conversion(from: DType, to: DType) -> Option<Convert> {
    macro_rules! each {
        ($from:ty, $to:ty, |$value:ident| $convert:expr) => {
            |from: &[u8], to: &mut Vec<u8>| {
                let (elements, _) = from.as_chunks::<{ size_of::<$from>() }>();
                to.extend(elements.iter().flat_map(|bytes| {
                    let $value = <$from>::from_le_bytes(*bytes);
                    let converted: $to = $convert;
                    converted.to_le_bytes()
                }));
            }
        };
    }
    Some(match (from, to) {
        (DType::BF16, DType::F32) => each!(u16, u32, |bits| u32::from(bits) << 16),
        (DType::F16, DType::F32) => each!(f16, f32, |value| value.to_f32()),
        (DType::F32, DType::F64) => each!(f32, f64, |value| value.into()),
        (DType::BF16, DType::F64) => each!(bf16, f64, |value| value.to_f64()),
        (DType::F16, DType::F64) => each!(f16, f64, |value| value.to_f64()),
        (DType::F32, DType::BF16) => each!(f32, bf16, |value| bf16::from_f32(value)),
        (DType::F32, DType::F16) => each!(f32, f16, |value| f16::from_f32(value)),
        (DType::F32, DType::E4M3) => each!(f32, u8, |value| f32_to_e4m3(value)),
        (DType::F32, DType::E5M2) => each!(f32, u8, |value| f32_to_e5m2(value)),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::layout::MIN_BLOCK_SIZE;
    use crate::vocabulary::layout::header::header_bytes;

    const F32: DType = DType::F32;

    fn layout(tensors: &[(&str, DType, &[usize])]) -> Arc<ModelLayout> {
        let tensors = tensors.iter().map(|(name, dtype, shape)| ((*name).to_owned(), *dtype, shape.to_vec()));
        Arc::new(ModelLayout::new(tensors.collect(), MIN_BLOCK_SIZE).unwrap())
    }

    /// A file with these tensors, all of whose elements have the value's bytes.
    fn file(tensors: &[(&str, DType, &[usize], &[u8])]) -> Vec<u8> {
        let of = layout(
            &tensors.iter().map(|(name, dtype, shape, _)| (*name, *dtype, *shape)).collect::<Vec<_>>(),
        );
        let mut bytes = header_bytes(of.tensors(), &std::collections::BTreeMap::new());
        for tensor in of.tensors() {
            let value = tensors.iter().find(|of| of.0 == tensor.name).unwrap().3;
            bytes.extend(value.repeat((tensor.bytes.end - tensor.bytes.start) as usize / value.len().max(1)));
        }
        bytes
    }

    /// What the model gets of a file that comes in pieces of this size.
    fn written(model: &Arc<ModelLayout>, file: &[u8], piece: usize) -> Result<Vec<Option<u8>>, NamedError> {
        let (mut stream, mut bytes) =
            (NamedStream::new(Arc::clone(model)), vec![None; model.size() as usize]);
        let mut sink = |at: u64, data: &[u8]| -> Result<(), NamedError> {
            bytes[at as usize..][..data.len()].iter_mut().zip(data).for_each(|(byte, new)| {
                assert_eq!(byte.replace(*new), None, "each byte once");
            });
            Ok(())
        };
        for (i, data) in file.chunks(piece).enumerate() {
            stream.write((i * piece) as u64, data, &mut sink)?;
        }
        stream.check_end()?;
        Ok(bytes)
    }

    fn refusal(model: &[(&str, DType, &[usize])], file: &[u8]) -> String {
        written(&layout(model), file, file.len()).expect_err("must be refused").to_string()
    }

    #[test]
    fn tensors_come_in_any_order_and_some_are_missing() {
        let model = layout(&[("a", F32, &[3]), ("b", F32, &[2, 2]), ("c", F32, &[1]), ("none", F32, &[0])]);
        let (one, two) = (1f32.to_le_bytes(), 2f32.to_le_bytes());
        let file = file(&[("c", F32, &[1], &two), ("none", F32, &[0], &[]), ("a", F32, &[3], &one)]);
        let expected = [one, one, one].concat().into_iter().map(Some);
        let expected: Vec<_> = expected.chain([None; 16]).chain(two.into_iter().map(Some)).collect();
        for piece in 1..=file.len() {
            assert_eq!(written(&model, &file, piece).unwrap(), expected, "{piece}");
        }
    }

    #[test]
    fn elements_become_the_models_where_nothing_is_lost_or_the_model_rounds() {
        let half = |value: f32| f16::from_f32(value).to_le_bytes();
        let brain = |value: f32| bf16::from_f32(value).to_le_bytes();
        let cases: [(DType, Vec<u8>, DType, Vec<u8>); 9] = [
            (DType::BF16, brain(-1.5).into(), F32, (-1.5f32).to_le_bytes().into()),
            (DType::F16, half(0.1).into(), F32, f16::from_f32(0.1).to_f32().to_le_bytes().into()),
            (DType::F16, half(3.0).into(), DType::F64, 3f64.to_le_bytes().into()),
            (DType::BF16, brain(3.0).into(), DType::F64, 3f64.to_le_bytes().into()),
            (F32, 0.1f32.to_le_bytes().into(), DType::F64, f64::from(0.1f32).to_le_bytes().into()),
            (F32, 0.1f32.to_le_bytes().into(), DType::BF16, brain(0.1).into()),
            (F32, 0.1f32.to_le_bytes().into(), DType::F16, half(0.1).into()),
            (F32, 448f32.to_le_bytes().into(), DType::E4M3, vec![0x7e]),
            (F32, 1f32.to_le_bytes().into(), DType::E5M2, vec![0x3c]),
        ];
        for (from, value, to, expected) in cases {
            let (model, shape) = (layout(&[("w", to, &[PIECE + 1])]), [PIECE + 1]);
            let file = file(&[("w", from, &shape, &value)]);
            let expected: Vec<_> = expected.repeat(PIECE + 1).into_iter().map(Some).collect();
            for piece in [7, 4096, file.len()] {
                assert!(written(&model, &file, piece).unwrap() == expected, "{from} to {to} by {piece}");
            }
        }
    }

    #[test]
    fn a_refusal_names_the_tensor() {
        let model: &[(&str, DType, &[usize])] = &[("w", F32, &[2, 3])];
        let zeros = |name, dtype, shape| file(&[(name, dtype, shape, &[0])]);
        for (file, expected) in [
            (zeros("v", F32, &[2, 3]), r#"no tensor "v""#),
            (zeros("w", F32, &[3, 2]), r#""w" has the shape [3, 2], and [2, 3]"#),
            (zeros("w", DType::F64, &[2, 3]), r#""w" is F64, and F32 in the model"#),
            (zeros("w", DType::E4M3, &[2, 3]), r#""w" is F8_E4M3, and F32"#),
            (zeros("w", DType::from_name("I32").unwrap(), &[2, 3]), r#""w" is I32, and F32"#),
        ] {
            let message = refusal(model, &file);
            assert!(message.contains(expected), "{message}");
        }
        let narrow = refusal(&[("w", DType::BF16, &[1])], &zeros("w", DType::F16, &[1]));
        assert!(narrow.contains("is F16, and BF16"), "{narrow}");
    }

    #[test]
    fn a_file_that_is_not_whole_or_not_one_is_refused() {
        let model: &[(&str, DType, &[usize])] = &[("w", F32, &[2])];
        let whole = file(&[("w", F32, &[2], &[0])]);
        assert!(refusal(model, &whole[..whole.len() - 1]).contains(r#"inside tensor "w""#));
        assert!(refusal(model, &whole[..20]).contains("inside its header"));
        assert!(refusal(model, &[&whole[..], &[0]].concat()).contains("the file goes on"));
        assert!(refusal(model, &[0xff; 64]).contains("claims a header of"));
        assert!(refusal(model, b"\x03\0\0\0\0\0\0\0{a}").contains("not a valid safetensors header"));
        let mut stream = NamedStream::new(layout(model));
        let gap = stream.write(8, &whole[8..], |_, _| Ok::<(), NamedError>(())).unwrap_err();
        assert!(gap.to_string().contains("front to back") && stream.is_untouched(), "{gap}");
        assert!(NamedStream::max_bytes(&layout(model)) >= whole.len() as u64);
    }
}
