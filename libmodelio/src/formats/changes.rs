//! What has changed in a model from one version to another, as files: a sparse safetensors file, and a patch of `weights`.
//!
//! Only positions are kept. The values are read from the newer version when a part of a file is read. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;

use crate::bytes::block::span;
use crate::bytes::changes::{Changed, Runs, RunsBuilder};
use crate::bytes::crc64::Crc64;
use crate::formats::patch::{self, PatchHead};
use crate::vocabulary::ids::{BlockId, Version};
use crate::vocabulary::layout::header::{MAX_HEADER_BYTES, header_bytes};
use crate::vocabulary::layout::{DType, ModelLayout, Tensor};

/// The positions take this share of the model's bytes at most, and as many more.
const SHARE: u64 = 4;
const MORE: u64 = 1 << 20;
/// The bytes that a checksum is computed of at once.
const SUMMED: u64 = 1 << 20;

/// Why there are no files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("so much has changed that a file of the changes is no use: read weights")]
pub struct TooMuch;

/// What has changed from one version to another.
#[derive(Debug)]
pub struct ModelChanges {
    base: Version,
    version: Version,
    size: u64,
    /// The elements that have changed. None crosses the end of a tensor.
    runs: Runs,
    /// The header of the safetensors file, and what follows it.
    header: Vec<u8>,
    parts: Vec<Part>,
    checksum: OnceLock<u64>,
}

/// A tensor of the safetensors file.
#[derive(Debug)]
struct Part {
    /// Where it is, behind the header.
    file: Range<u64>,
    /// The values of the model's tensor, among all values.
    values: Range<u64>,
    what: What,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Values,
    /// Numbers of elements, in so many bytes each.
    Indices {
        width: usize,
        /// The tensor's first byte in the model.
        start: u64,
        of: Granule,
    },
}

/// The least bytes of a tensor that are a whole number of elements.
#[derive(Clone, Copy, Debug)]
struct Granule {
    bytes: u64,
    elements: u64,
}

impl Granule {
    fn of(dtype: DType) -> Granule {
        let bits = dtype.size_bits() as u64;
        let elements = (1..=8).find(|count| (bits * count).is_multiple_of(8)).unwrap_or(8);
        Granule { bytes: bits * elements / 8, elements }
    }
}

/// Collects what has changed, block by block.
pub struct Collector<'a> {
    layout: &'a ModelLayout,
    runs: RunsBuilder,
    /// The number of values before each tensor that was begun.
    before: Vec<u64>,
}

impl<'a> Collector<'a> {
    /// Nothing yet.
    pub fn new(layout: &'a ModelLayout) -> Collector<'a> {
        Collector { layout, runs: RunsBuilder::default(), before: vec![0] }
    }

    /// The next block, and its bytes in both versions, if the older one is at hand. Then only elements that differ count.
    ///
    /// # Errors
    /// [`TooMuch`].
    pub fn block(
        &mut self,
        block: BlockId,
        changed: &Changed,
        versions: Option<(&[u8], &[u8])>,
    ) -> Result<(), TooMuch> {
        let bytes = self.layout.block_bytes(block);
        let (len, unit) = (span(&bytes).len(), self.layout.unit(block));
        let versions = versions.map(|(old, new)| (old, new, unit));
        changed.each_range(len, versions, |range| {
            self.add(bytes.start + range.start as u64..bytes.start + range.end as u64);
        });
        let most = self.layout.size() / SHARE + MORE;
        if self.runs.taken() as u64 > most { Err(TooMuch) } else { Ok(()) }
    }

    /// Adds the elements that these bytes are of.
    fn add(&mut self, mut bytes: Range<u64>) {
        let tensors = self.layout.tensors();
        while !bytes.is_empty() {
            let mut tensor = &tensors[self.before.len() - 1];
            while tensor.bytes.end <= bytes.start {
                self.before.push(self.runs.split());
                tensor = &tensors[self.before.len() - 1];
            }
            let (start, granule) = (tensor.bytes.start, Granule::of(tensor.dtype).bytes);
            let end = bytes.end.min(tensor.bytes.end);
            let first = (bytes.start - start) / granule * granule;
            let last = (end - start).next_multiple_of(granule);
            self.runs.add(start + first..start + last);
            bytes.start = end;
        }
    }

    /// All blocks were collected. `metadata` are the safetensors file's own.
    ///
    /// # Errors
    /// [`TooMuch`].
    pub fn finish(
        mut self,
        (base, version): (Version, Version),
        metadata: &BTreeMap<String, String>,
    ) -> Result<ModelChanges, TooMuch> {
        let tensors = self.layout.tensors();
        let total = self.runs.split();
        self.before.resize(tensors.len() + 1, total);
        let mut parts: Vec<(Tensor, Part)> = Vec::new();
        for (tensor, values) in tensors.iter().zip(self.before.windows(2)) {
            let (values, of) = (values[0]..values[1], Granule::of(tensor.dtype));
            let count = (values.end - values.start) / of.bytes * of.elements;
            if count == 0 {
                continue;
            }
            let elements = (tensor.bytes.end - tensor.bytes.start) / of.bytes * of.elements;
            let (name, width) = if elements < 1 << 31 { ("I32", 4) } else { ("I64", 8) };
            let dtype = DType::from_name(name).unwrap_or(tensor.dtype);
            let mut part = |suffix: &str, dtype, len, what| {
                let tensor = Tensor {
                    name: format!("{}.{suffix}", tensor.name),
                    dtype,
                    shape: vec![count as usize],
                    bytes: 0..len,
                };
                parts.push((tensor, Part { file: 0..len, values: values.clone(), what }));
            };
            let indices = What::Indices { width, start: tensor.bytes.start, of };
            part("indices", dtype, count * width as u64, indices);
            part("values", tensor.dtype, values.end - values.start, What::Values);
        }
        // So each begins at a multiple of its element's size, as in files that the library of safetensors writes.
        parts.sort_by_key(|(tensor, _)| Reverse(tensor.dtype.alignment()));
        let mut at = 0;
        for (tensor, part) in &mut parts {
            part.file = at..at + part.file.end;
            at = part.file.end;
            tensor.bytes = part.file.clone();
        }
        let (shown, parts): (Vec<Tensor>, Vec<Part>) = parts.into_iter().unzip();
        let mut metadata = metadata.clone();
        metadata.insert("gradfs.base".into(), base.to_string());
        metadata.insert("gradfs.version".into(), version.to_string());
        let header = header_bytes(&shown, &metadata);
        if header.len() > MAX_HEADER_BYTES {
            return Err(TooMuch);
        }
        let (size, runs) = (self.layout.size(), self.runs.finish());
        Ok(ModelChanges { base, version, size, runs, header, parts, checksum: OnceLock::new() })
    }
}

impl ModelChanges {
    /// The older version, and the newer one.
    pub fn versions(&self) -> (Version, Version) {
        (self.base, self.version)
    }

    /// The memory that it takes, in bytes.
    pub fn taken(&self) -> u64 {
        (self.runs.encoded().len() + self.header.len()) as u64
    }

    /// The length of the safetensors file.
    pub fn sparse_len(&self) -> u64 {
        self.header.len() as u64 + self.parts.last().map_or(0, |part| part.file.end)
    }

    /// The length of the patch.
    pub fn patch_len(&self) -> u64 {
        patch::HEAD as u64 + self.runs.encoded().len() as u64 + self.runs.bytes()
    }

    /// Part of the safetensors file. `bytes` are the newer version's.
    pub fn read_sparse<'a>(
        &self,
        offset: u64,
        len: usize,
        bytes: impl Fn(Range<u64>) -> &'a [u8],
    ) -> Vec<u8> {
        let wanted = offset..offset.saturating_add(len as u64).min(self.sparse_len());
        let (mut out, header) = (Vec::new(), self.header.len() as u64);
        append(&self.header, &wanted, 0, &mut out);
        let behind = wanted.start.saturating_sub(header)..wanted.end.saturating_sub(header);
        let first = self.parts.partition_point(|part| part.file.end <= behind.start);
        for part in self.parts[first..].iter().take_while(|part| part.file.start < behind.end) {
            let from = behind.start.saturating_sub(part.file.start);
            let to = behind.end.min(part.file.end) - part.file.start;
            match part.what {
                What::Values => {
                    self.runs.values(part.values.start + from..part.values.start + to, &bytes, &mut out);
                }
                What::Indices { width, start, of } => {
                    self.indices(part.values.start, (width, start, of), from..to, &mut out);
                }
            }
        }
        out
    }

    /// Appends bytes of a tensor's indices. Its values begin behind `before` others.
    fn indices(
        &self,
        before: u64,
        (width, start, of): (usize, u64, Granule),
        wanted: Range<u64>,
        out: &mut Vec<u8>,
    ) {
        let a_granule = of.elements * width as u64;
        let (first, last) = (wanted.start / a_granule, wanted.end.div_ceil(a_granule));
        // The granules that the bytes are of, as values.
        let (mut value, end) = (before + first * of.bytes, before + last * of.bytes);
        let (from, mut encoded) = (first * a_granule, Vec::new());
        for (run, values) in self.runs.from(value) {
            let mut at = run.start + (value - values);
            while at < run.end && value < end {
                let element = (at - start) / of.bytes * of.elements;
                for element in element..element + of.elements {
                    encoded.extend_from_slice(&element.to_le_bytes()[..width]);
                }
                at += of.bytes;
                value += of.bytes;
            }
            if value >= end {
                break;
            }
        }
        append(&encoded, &wanted, from, out);
    }

    /// The checksum of the newer version. It is computed once.
    pub fn checksum<'a>(&self, bytes: impl Fn(Range<u64>) -> &'a [u8]) -> u64 {
        *self.checksum.get_or_init(|| {
            let mut crc = Crc64::new();
            let mut at = 0;
            while at < self.size {
                let end = self.size.min(at + SUMMED);
                crc.update(bytes(at..end));
                at = end;
            }
            crc.finish()
        })
    }

    /// Whether [`Self::checksum`] takes no time any more.
    pub fn is_summed(&self) -> bool {
        self.checksum.get().is_some()
    }

    /// Part of the patch. `bytes` are the newer version's.
    pub fn read_patch<'a>(&self, offset: u64, len: usize, bytes: impl Fn(Range<u64>) -> &'a [u8]) -> Vec<u8> {
        let wanted = offset..offset.saturating_add(len as u64).min(self.patch_len());
        let (encoded, values) = (self.runs.encoded(), self.runs.bytes());
        let mut out = Vec::new();
        if wanted.start < patch::HEAD as u64 {
            let (size, base, version, checksum) = (self.size, self.base, self.version, self.checksum(&bytes));
            let head = PatchHead { size, base, version, runs: encoded.len() as u64, values, checksum };
            append(&head.encode(), &wanted, 0, &mut out);
        }
        append(encoded, &wanted, patch::HEAD as u64, &mut out);
        let before = (patch::HEAD + encoded.len()) as u64;
        if wanted.end > before {
            self.runs.values(wanted.start.saturating_sub(before)..wanted.end - before, &bytes, &mut out);
        }
        out
    }
}

/// Appends what is wanted of `bytes`, which begin at `at`.
fn append(bytes: &[u8], wanted: &Range<u64>, at: u64, out: &mut Vec<u8>) {
    let within = |end: u64| end.saturating_sub(at).min(bytes.len() as u64) as usize;
    out.extend_from_slice(bytes.get(within(wanted.start)..within(wanted.end)).unwrap_or_default());
}

#[cfg(test)]
mod tests;
