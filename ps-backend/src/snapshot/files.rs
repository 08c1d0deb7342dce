//! The files of a directory: `model.safetensors`, in pieces with an index if it is large, and
//! `optimizer.safetensors`, whose tensors are named as torch names its state. This module also knows the
//! place in them of each piece of a snapshot.

use std::collections::BTreeMap;
use std::ops::Range;

use libmodelio::vocabulary::dtype::DType;
use libmodelio::vocabulary::layout::header::header_bytes;
use libmodelio::vocabulary::layout::{ModelLayout, Tensor};
use libmodelio::wire::DataKind;

use super::{Head, kinds};

/// The description of a snapshot, which is written last.
pub const MANIFEST: &str = "manifest.json";
/// The file of the optimizer's state and of masters.
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";
const MODEL: &str = "model.safetensors";
/// Says in which file of several each tensor lies.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Whether a snapshot's file can have this name.
pub(super) fn is_of_snapshot(name: &str) -> bool {
    let piece = name.strip_prefix("model-").and_then(|name| name.strip_suffix(".safetensors"));
    let is_number = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_piece = |(number, of)| is_number(number) && is_number(of);
    [MODEL, OPTIMIZER, INDEX].contains(&name)
        || piece.and_then(|piece| piece.split_once("-of-")).is_some_and(is_piece)
}

/// Bytes of a kind, and where they lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// The range among all data of the kind.
    pub of_kind: Range<u64>,
    /// The number of the file.
    pub file: usize,
    /// The offset in the file.
    pub offset: u64,
}

/// The places of the data of each kind.
#[derive(Debug, Default)]
pub(super) struct Extents(BTreeMap<DataKind, Vec<Extent>>);

impl Extents {
    /// Adds the next place of data of a kind. Calls for a kind must rise.
    pub(super) fn push(&mut self, what: DataKind, next: Extent) {
        let of_kind = self.0.entry(what).or_default();
        match of_kind.last_mut() {
            Some(last)
                if last.file == next.file
                    && last.of_kind.end == next.of_kind.start
                    && last.offset + (last.of_kind.end - last.of_kind.start) == next.offset =>
            {
                last.of_kind.end = next.of_kind.end;
            }
            _ => of_kind.push(next),
        }
    }

    /// The places of these bytes of a kind, if they have any, each with its range among them.
    pub(super) fn of(
        &self,
        what: DataKind,
        bytes: Range<u64>,
    ) -> impl Iterator<Item = (Range<usize>, &Extent, u64)> {
        let all = self.0.get(&what).map_or(&[][..], Vec::as_slice);
        let first = all.partition_point(|extent| extent.of_kind.end <= bytes.start);
        all[first..].iter().take_while(move |extent| extent.of_kind.start < bytes.end).map(move |extent| {
            let from = bytes.start.max(extent.of_kind.start);
            let to = bytes.end.min(extent.of_kind.end);
            let within = (from - bytes.start) as usize..(to - bytes.start) as usize;
            (within, extent, extent.offset + (from - extent.of_kind.start))
        })
    }
}

/// A tensor of the optimizer's file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StateTensor {
    /// The name in the file.
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// The kind of its data, and the range among all of that kind; `None` for a count of steps.
    pub of: Option<(DataKind, Range<u64>)>,
}

/// The tensors of the optimizer's file, in their order, and the steps that the last of them count.
pub(super) fn state_tensors(head: &Head, layout: &ModelLayout) -> (Vec<StateTensor>, Vec<f32>) {
    let mut tensors = Vec::new();
    let reducible = || layout.tensors().iter().enumerate().filter(|(_, tensor)| tensor.dtype.is_reducible());
    for what in kinds(&head.record) {
        let mut at = 0;
        for (index, tensor) in reducible() {
            let bytes = state_bytes(tensor);
            let of = at..at + bytes;
            at += bytes;
            let kind = match what {
                DataKind::Masters if tensor.dtype.is_narrow() => "master",
                // The reducer of a tensor may keep less than those of others.
                DataKind::Slot(slot) => match head.record.reducer_of(index) {
                    reducer if usize::from(slot) < reducer.state_slots() => reducer.state_name(slot.into()),
                    _ => continue,
                },
                DataKind::Weights | DataKind::Masters => continue,
            };
            let dtype = if tensor.dtype == DType::F64 { DType::F64 } else { DType::F32 };
            let (name, shape) = (format!("{kind}.{}", tensor.name), tensor.shape.clone());
            tensors.push(StateTensor { name, dtype, shape, of: Some((what, of)) });
        }
    }
    let mut steps = Vec::new();
    for (index, tensor) in reducible() {
        let name = format!("step.{}", tensor.name);
        tensors.push(StateTensor { name, dtype: DType::F32, shape: Vec::new(), of: None });
        steps.push(head.record.steps.of(index) as f32);
    }
    (tensors, steps)
}

/// Bytes of masters, or of one kind of state, of a tensor.
fn state_bytes(tensor: &Tensor) -> u64 {
    let element = tensor.dtype.size_bytes().unwrap_or(1) as u64;
    (tensor.bytes.end - tensor.bytes.start) / element * tensor.dtype.words() as u64 * 4
}

/// A file that is to be written: a header, pieces of the snapshot, and a tail.
#[derive(Debug)]
pub(super) struct Planned {
    pub name: String,
    /// The bytes in front of the tensors.
    pub header: Vec<u8>,
    /// The bytes after the pieces of the snapshot.
    pub tail: Vec<u8>,
    /// The length of the whole file, in bytes.
    pub len: u64,
}

/// The files of a directory, and where each piece goes.
#[derive(Debug, Default)]
pub(super) struct FileLayout {
    pub files: Vec<Planned>,
    pub extents: Extents,
    /// The contents of [`INDEX`], if there are several files of the model.
    pub index: Option<Vec<u8>>,
}

impl FileLayout {
    /// A model in files of `piece_size` bytes of tensors at most; a tensor is never cut.
    pub(super) fn new(head: &Head, layout: &ModelLayout, piece_size: u64) -> FileLayout {
        let mut file_layout = FileLayout::default();
        let mut pieces: Vec<Vec<&Tensor>> = vec![Vec::new()];
        let mut taken = 0;
        for tensor in layout.tensors() {
            let bytes = tensor.bytes.end - tensor.bytes.start;
            if taken > 0 && taken + bytes > piece_size {
                pieces.push(Vec::new());
                taken = 0;
            }
            taken += bytes;
            if let Some(last) = pieces.last_mut() {
                last.push(tensor);
            }
        }
        let of = pieces.len();
        let mut map = BTreeMap::new();
        for (number, tensors) in (1..).zip(pieces) {
            let name = match of {
                1 => MODEL.to_owned(),
                _ => format!("model-{number:05}-of-{of:05}.safetensors"),
            };
            let start = tensors.first().map_or(0, |tensor| tensor.bytes.start);
            let end = tensors.last().map_or(0, |tensor| tensor.bytes.end);
            map.extend(tensors.iter().map(|tensor| (tensor.name.clone(), name.clone())));
            let moved = |tensor: &&Tensor| {
                let bytes = tensor.bytes.start - start..tensor.bytes.end - start;
                Tensor { bytes, ..(*tensor).clone() }
            };
            let tensors: Vec<Tensor> = tensors.iter().map(moved).collect();
            let file = file_layout.add(name, &tensors, &head.metadata, Vec::new());
            let offset = file_layout.files[file].header.len() as u64;
            file_layout.extents.push(DataKind::Weights, Extent { of_kind: start..end, file, offset });
        }
        if of > 1 {
            let index = serde_json::json!({ "metadata": { "total_size": layout.size() }, "weight_map": map });
            file_layout.index = Some(index.to_string().into_bytes());
        }
        file_layout.add_optimizer(head, layout);
        file_layout
    }

    fn add_optimizer(&mut self, head: &Head, layout: &ModelLayout) {
        let (states, steps) = state_tensors(head, layout);
        if states.is_empty() {
            return;
        }
        let mut at = 0;
        let mut placed = Vec::with_capacity(states.len());
        for StateTensor { name, dtype, shape, of } in &states {
            let len = of.as_ref().map_or(4, |(_, range)| range.end - range.start);
            let (name, shape, bytes) = (name.clone(), shape.clone(), at..at + len);
            placed.push(Tensor { name, dtype: *dtype, shape, bytes });
            at += len;
        }
        let tail = steps.iter().flat_map(|step| step.to_le_bytes()).collect();
        let file = self.add(OPTIMIZER.to_owned(), &placed, &BTreeMap::new(), tail);
        let start = self.files[file].header.len() as u64;
        for (StateTensor { of, .. }, tensor) in states.into_iter().zip(placed) {
            if let Some((what, of_kind)) = of
                && !of_kind.is_empty()
            {
                self.extents.push(what, Extent { of_kind, file, offset: start + tensor.bytes.start });
            }
        }
    }

    fn add(
        &mut self,
        name: String,
        tensors: &[Tensor],
        metadata: &BTreeMap<String, String>,
        tail: Vec<u8>,
    ) -> usize {
        let header = header_bytes(tensors, metadata);
        let len = header.len() as u64 + tensors.last().map_or(0, |tensor| tensor.bytes.end);
        self.files.push(Planned { name, header, tail, len });
        self.files.len() - 1
    }
}
