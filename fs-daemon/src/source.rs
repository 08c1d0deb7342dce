//! The first weights of a model: safetensors files, or nothing but a size.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use libmodelio::formats::safetensors::{self, CopyRange, Header};
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::dtype::REDUCIBLE;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::{DType, ModelLayout};

use ps_backend::snapshot::{SnapshotError, Stored};
use ps_backend::stores;

use crate::checkpoint::Checkpoint;
use crate::config::ModelSource;
use crate::error::Error;
use crate::progress;

/// A model that is about to be loaded.
pub struct Source {
    /// Tensors and blocks.
    pub layout: ModelLayout,
    /// `__metadata__` of its files.
    pub metadata: BTreeMap<String, String>,
    /// The files; none for zeros.
    pub files: Vec<File>,
    /// The ranges of the files for each part of the layout.
    pub ranges: Vec<CopyRange>,
    /// The snapshot, if it is one.
    pub snapshot: Option<Stored>,
}

impl Source {
    /// Whether it goes on from a snapshot of model `name` in this store.
    pub fn goes_on_in(&self, store: &str, name: &str) -> bool {
        let snapshot = self.snapshot.as_ref().filter(|of| of.head().model == name);
        let url = snapshot.and_then(Stored::store).map(|shelf| shelf.url().to_owned());
        url.is_some_and(|url| stores::absolute_url(&url) == store)
    }

    /// Refuses a snapshot of another model than `name` where the store is to be that model's own.
    ///
    /// # Errors
    /// Names both.
    pub fn check_owner(&self, name: &str, owns_store: bool) -> Result<(), Error> {
        match self.snapshot.as_ref().map(|snapshot| &snapshot.head().model).filter(|_| owns_store) {
            Some(other) if other != name => {
                Err(Error::new(format!("the store has the snapshots of model {other:?}, not of {name:?}"))
                    .hint(format!("give {name} another --state, or go on with that model by --name {other}")))
            }
            _ => Ok(()),
        }
    }

    /// Looks at what model `name` starts from.
    ///
    /// # Errors
    /// A file that is none, or no model; a size that does not fit.
    pub fn open(name: &str, source: &ModelSource, block_size: u32) -> Result<Source, Error> {
        match source {
            ModelSource::Blank { bytes, dtype } => {
                let layout = ModelLayout::blank(*bytes, *dtype, block_size)
                    .map_err(|error| Error::usage(format!("model {name}: {error}")))?;
                let (files, ranges) = (Vec::new(), Vec::new());
                Ok(Source { layout, metadata: BTreeMap::new(), files, ranges, snapshot: None })
            }
            ModelSource::Snapshot { dir, expected } => {
                let reader = Stored::open(dir, Some(block_size))?;
                if let Some(expected) = expected {
                    let file = ModelSource::File(expected.clone());
                    let expected = Source::open(name, &file, block_size)?.layout;
                    reader.head().check_model(&expected).map_err(|error| {
                        let hint = Error::from(error);
                        Error { message: format!("{}: {}", dir.display(), hint.message), ..hint }
                    })?;
                }
                let (layout, metadata) = (reader.layout().clone(), reader.head().metadata.clone());
                let (files, ranges) = (Vec::new(), Vec::new());
                Ok(Source { layout, metadata, files, ranges, snapshot: Some(reader) })
            }
            ModelSource::File(path) => {
                let checkpoint = Checkpoint::find(path)?;
                let mut files = Vec::with_capacity(checkpoint.files.len());
                let mut headers = Vec::with_capacity(checkpoint.files.len());
                for path in &checkpoint.files {
                    let (file, header) = open(path)?;
                    files.push(file);
                    headers.push(header);
                }
                checkpoint.check(&headers)?;
                let (layout, ranges) = safetensors::plan_load(&headers, block_size).map_err(|error| {
                    Error::new(format!("cannot load {}", path.display())).caused_by(error)
                })?;
                // If several files have an entry, the first file's counts.
                let metadata = headers.into_iter().rev().flat_map(|header| header.metadata).collect();
                Ok(Source { layout, metadata, files, ranges, snapshot: None })
            }
        }
    }

    /// Warns once of tensors that look as if they could be trained and cannot: floats that no reducer sums.
    ///
    /// # Errors
    /// A model of which no tensor can be reduced, unless the reducer is `assign`: its training would change nothing.
    pub fn check_types(&self, name: &str, controls: &Controls) -> Result<(), Error> {
        let tensors = self.layout.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor.dtype));
        let of_tensors = controls.of_tensors(tensors);
        of_tensors.map_err(|error| Error::usage(format!("model {name}: {error}")))?;
        let tensors = self.layout.tensors();
        controls.check_trainable(self.layout.is_trainable()).map_err(|error| {
            let named = named(tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.dtype)));
            Error::usage(format!("model {name}: {error}, and {named}"))
                .hint("convert the model, or use --reducer assign, which replaces values")
        })?;
        if controls.reducer.takes_all_types() {
            return Ok(());
        }
        let left: Vec<_> = tensors
            .iter()
            .filter(|tensor| !tensor.dtype.is_reducible() && is_float(tensor.dtype))
            .map(|tensor| (tensor.name.as_str(), tensor.dtype))
            .collect();
        if !left.is_empty() {
            tracing::warn!(
                model = name,
                "{} never trained, as reducers take {REDUCIBLE}: {}",
                if left.len() == 1 { "a tensor is" } else { "some tensors are" },
                named(left.into_iter())
            );
        }
        Ok(())
    }

    /// The snapshot, if it is one. All bytes of a directory were compared with their checksums then; those of a store are when
    /// they are read.
    ///
    /// # Errors
    /// Fails with the fault of the snapshot; nothing was changed then.
    pub fn verified_snapshot(
        &mut self,
        go_on: &dyn Fn() -> Result<(), SnapshotError>,
    ) -> Result<Option<Stored>, Error> {
        let Some(reader) = self.snapshot.take() else { return Ok(None) };
        if reader.store().is_some() {
            return Ok(Some(reader));
        }
        let progress =
            progress::bar(progress::BYTES, reader.len(), format!("checking {}", reader.head().model));
        reader.verify(&mut |read| {
            progress.inc(read);
            go_on()
        })?;
        progress.finish_and_clear();
        Ok(Some(reader))
    }

    /// Fills `bytes` with a block of the layout.
    ///
    /// # Errors
    /// Fails with the error of reading.
    pub fn block(&self, block: BlockId, bytes: &mut Vec<u8>) -> Result<(), SnapshotError> {
        let Range { start: offset, end } = self.layout.block_bytes(block);
        bytes.clear();
        bytes.resize((end - offset) as usize, 0);
        for range in &self.ranges {
            let from = offset.max(range.flat_offset);
            let to = end.min(range.flat_offset + range.len);
            if from < to {
                let local = (from - offset) as usize..(to - offset) as usize;
                self.files[range.file]
                    .read_exact_at(&mut bytes[local], range.file_offset + (from - range.flat_offset))
                    .map_err(|error| SnapshotError::Invalid(error.to_string()))?;
            }
        }
        Ok(())
    }
}

/// A safetensors file and its header.
fn open(path: &Path) -> Result<(File, Header), Error> {
    let shown = path.display();
    let file = File::options()
        .read(true)
        // Opening a FIFO would wait for its writer; the reader refuses anything that is not a file.
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(|error| Error::new(format!("cannot open {shown}")).caused_by(error))?;
    let header = safetensors::read_header(&file)
        .map_err(|error| Error::new(format!("cannot load {shown}")).caused_by(error))?;
    Ok((file, header))
}

/// Whether gradients of this type exist: floats of any width, and complex numbers.
fn is_float(dtype: DType) -> bool {
    let name = dtype.name();
    name.starts_with('F') || name.starts_with("BF") || name.starts_with('C')
}

/// Some tensors with their types, and how many more there are.
fn named<'a>(tensors: impl ExactSizeIterator<Item = (&'a str, DType)>) -> String {
    const SHOWN: usize = 4;
    let more = tensors.len().saturating_sub(SHOWN);
    let mut text = String::new();
    for (name, dtype) in tensors.take(SHOWN) {
        let sign = if text.is_empty() { "" } else { ", " };
        text.push_str(&format!("{sign}{name} is {dtype}"));
    }
    if more > 0 {
        text.push_str(&format!(", and {more} more"));
    }
    text
}
