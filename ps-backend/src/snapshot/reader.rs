//! A directory as a [`Source`]: opens a snapshot, verifies its checksums, and reads it piece by piece.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use libmodelio::formats::safetensors::{FileTensor, read_header};
use libmodelio::vocabulary::dtype::DType;
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::wire::DataKind;

use super::checked::{open, verify};
use super::directory::own_name;
use super::files::{Extent, Extents, MANIFEST, OPTIMIZER, StateTensor, state_tensors};
use super::manifest::Manifest;
use super::{Head, Piece, Sink, SnapshotError, Source, send_each};
use crate::partition::store::kept_range;

/// How often a directory is opened whose snapshot is replaced meanwhile.
const TRIES: u32 = 3;

/// A directory that holds a snapshot. All of its files are open, so one that replaces it disturbs nothing.
#[derive(Debug)]
pub struct Reader {
    dir: PathBuf,
    manifest: Manifest,
    layout: ModelLayout,
    /// In the order of the manifest.
    files: Vec<(PathBuf, File)>,
    extents: Extents,
}

impl Reader {
    /// Opens a snapshot, to be read in blocks of `block_size`, or of its own block size.
    ///
    /// # Errors
    /// [`SnapshotError`] for a directory that is no snapshot.
    pub fn open(dir: &Path, block_size: Option<u32>) -> Result<Reader, SnapshotError> {
        for _ in 0..TRIES {
            let manifest = Manifest::read(dir)?;
            let opened = Reader::of(dir, manifest.clone(), block_size);
            // The files of a snapshot go only when another manifest has taken the place of its own.
            if Manifest::read(dir).is_ok_and(|now| now == manifest) {
                return opened;
            }
        }
        Err(SnapshotError::Replaced(dir.to_owned()))
    }

    fn of(dir: &Path, manifest: Manifest, block_size: Option<u32>) -> Result<Reader, SnapshotError> {
        let head = &manifest.head;
        let in_manifest = |error: SnapshotError| {
            SnapshotError::damaged(&dir.join(MANIFEST), format!("it describes no snapshot: {error}"))
        };
        let stored = head.layout(head.block_size).map_err(in_manifest)?;
        head.controls().map_err(in_manifest)?;
        let layout = match block_size {
            Some(block_size) => head.layout(block_size)?,
            None => stored,
        };
        let mut reader =
            Reader { dir: dir.to_owned(), files: Vec::new(), extents: Extents::default(), layout, manifest };
        reader.find_tensors()?;
        Ok(reader)
    }

    /// The subject of the snapshot.
    pub fn head(&self) -> &Head {
        &self.manifest.head
    }

    /// The model.
    pub fn layout(&self) -> &ModelLayout {
        &self.layout
    }

    /// Bytes that [`Self::verify`] reads.
    pub fn len(&self) -> u64 {
        self.manifest.files.iter().map(|file| file.bytes).sum()
    }

    /// Whether the snapshot has no files.
    pub fn is_empty(&self) -> bool {
        self.manifest.files.is_empty()
    }

    /// Compares all bytes with their checksums. Calls `read` with the number of bytes that were read; it can
    /// return an interruption.
    ///
    /// # Errors
    /// [`SnapshotError::Damaged`] names the file and the block.
    pub fn verify(
        &self,
        read: &mut dyn FnMut(u64) -> Result<(), SnapshotError>,
    ) -> Result<(), SnapshotError> {
        let block_size = self.manifest.head.block_size;
        let mut files = self.files.iter().zip(&self.manifest.files);
        files.try_for_each(|(file, expected)| verify(file, expected, block_size, read))
    }

    /// Opens a file that the manifest names, in its place or before it has that.
    fn open_file(&self, name: &str) -> Result<(PathBuf, File), SnapshotError> {
        let own = self.manifest.id.as_ref().map(|id| self.dir.join(own_name(name, id)));
        for path in own.into_iter().chain([self.dir.join(name)]) {
            match open(&path) {
                Err(error) if error.is_missing() => {}
                opened => return Ok((path, opened?)),
            }
        }
        Err(SnapshotError::damaged(&self.dir.join(name), "it is missing, and the manifest names it"))
    }

    fn find_tensors(&mut self) -> Result<(), SnapshotError> {
        let mut found: [HashMap<String, (usize, FileTensor)>; 2] = Default::default();
        for file in &self.manifest.files {
            let is_plain = Path::new(&file.name).file_name() == Some(file.name.as_ref());
            if !is_plain {
                let why = format!("it names the file {:?}: a plain name is expected", file.name);
                return Err(SnapshotError::damaged(&self.dir.join(MANIFEST), why));
            }
            let (path, opened) = self.open_file(&file.name)?;
            if !file.name.ends_with(".safetensors") {
                self.files.push((path, opened));
                continue;
            }
            let len = opened.metadata().map_err(SnapshotError::file(&path))?.len();
            if len != file.bytes {
                let why = format!("it has {len} bytes, not {}", file.bytes);
                return Err(SnapshotError::damaged(&path, why));
            }
            let header =
                read_header(&opened).map_err(|error| SnapshotError::Tensors { path: path.clone(), error })?;
            let of = &mut found[usize::from(file.name == OPTIMIZER)];
            of.extend(header.tensors.into_iter().map(|t| (t.name.clone(), (self.files.len(), t))));
            self.files.push((path, opened));
        }
        let [mut weights, mut states] = found;
        let head = &self.manifest.head;
        for tensor in self.layout.tensors() {
            let (file, offset) = take(&self.dir, &mut weights, &tensor.name, tensor.dtype, &tensor.shape)?;
            if !tensor.bytes.is_empty() {
                self.extents.push(DataKind::Weights, Extent { of_kind: tensor.bytes.clone(), file, offset });
            }
        }
        let (wanted, _) = state_tensors(head, &self.layout);
        for StateTensor { name, dtype, shape, of } in wanted {
            let (file, offset) = take(&self.dir, &mut states, &name, dtype, &shape)?;
            if let Some((what, of_kind)) = of
                && !of_kind.is_empty()
            {
                self.extents.push(what, Extent { of_kind, file, offset });
            }
        }
        Ok(())
    }
}

/// The place of a tensor, if it is there as it should be.
fn take(
    dir: &Path,
    found: &mut HashMap<String, (usize, FileTensor)>,
    name: &str,
    dtype: DType,
    shape: &[usize],
) -> Result<(usize, u64), SnapshotError> {
    match found.remove(name) {
        Some((file, tensor)) if tensor.dtype == dtype && tensor.shape == shape => {
            Ok((file, tensor.bytes.start))
        }
        Some((_, tensor)) => {
            let why = format!(
                "tensor {name:?} is {} {:?}; the manifest has {dtype} {shape:?}",
                tensor.dtype, tensor.shape
            );
            Err(SnapshotError::damaged(dir, why))
        }
        None => Err(SnapshotError::damaged(dir, format!("no file has tensor {name:?}"))),
    }
}

impl Reader {
    /// Fills a buffer with a piece, or leaves it empty where that is zero.
    ///
    /// # Errors
    /// The system's error.
    pub fn piece(&self, (block, what): Piece, bytes: &mut Vec<u8>) -> Result<(), SnapshotError> {
        let range = kept_range(&self.layout, block, what);
        bytes.clear();
        let mut any = false;
        for (within, extent, at) in self.extents.of(what, range.clone()) {
            if !std::mem::replace(&mut any, true) {
                bytes.resize((range.end - range.start) as usize, 0);
            }
            let (path, file) = &self.files[extent.file];
            file.read_exact_at(&mut bytes[within], at).map_err(SnapshotError::file(path))?;
        }
        Ok(())
    }
}

impl Source for Reader {
    fn send(
        &mut self,
        wanted: &mut dyn Iterator<Item = Piece>,
        sink: &mut dyn Sink,
    ) -> Result<(), SnapshotError> {
        send_each(wanted, sink, |piece, bytes| self.piece(piece, bytes))
    }
}
