//! A directory as a [`Sink`]: writes the files of a snapshot.
//!
//! Files are written under names of their own. When all of them are on the disk, the manifest takes its place, and that
//! alone decides what the directory holds: the snapshot before, or this one. After that the files take their places, and
//! those that no manifest names go.

use std::path::{Path, PathBuf};

use libmodelio::vocabulary::layout::ModelLayout;

use super::checked::{Checksums, Writing};
use super::directory::{Directory, names};
use super::files::{FileLayout, INDEX, MANIFEST, is_of_snapshot};
use super::manifest::Manifest;
use super::{Head, Piece, Sink, SnapshotError, Source, kinds, pieces};
use crate::partition::store::kept_range;

/// Bytes of tensors in one file of the model, unless somebody says otherwise.
pub const PIECE_SIZE: u64 = 5_000_000_000;

/// A directory that is being written.
pub struct Writer {
    dir: Directory,
    path: PathBuf,
    /// Whether the directory was made for this snapshot.
    made: bool,
    head: Head,
    layout: ModelLayout,
    file_layout: FileLayout,
    /// The file that is being written, by number.
    writing: Option<(usize, Writing)>,
    done: Vec<Checksums>,
    complete: bool,
}

impl Writer {
    /// Refuses a directory that holds a snapshot, or a file with the name of a snapshot's, unless they are to be replaced.
    ///
    /// # Errors
    /// [`SnapshotError::Exists`], [`SnapshotError::Occupied`], [`SnapshotError::Nested`]; the system's error.
    pub fn check(dir: &Path, replaces: bool) -> Result<(), SnapshotError> {
        if !dir.is_dir() {
            return Ok(());
        }
        for name in names(dir)? {
            let path = dir.join(&name);
            let is_manifest = name == MANIFEST;
            if !is_manifest && !is_of_snapshot(&name) {
                continue;
            }
            if path.symlink_metadata().is_ok_and(|entry| entry.is_dir()) {
                return Err(SnapshotError::Nested(path));
            }
            match replaces {
                true => {}
                false if is_manifest => return Err(SnapshotError::Exists(dir.to_owned())),
                false => return Err(SnapshotError::Occupied(path)),
            }
        }
        Ok(())
    }

    /// Begins one, in files of the model of `piece_size` bytes at most. `replaces`: a snapshot that is there goes when this
    /// one is complete, and so do files with the names of a snapshot's.
    ///
    /// # Errors
    /// As [`Self::check`], and [`SnapshotError::Busy`].
    pub fn create(dir: &Path, head: Head, piece_size: u64, replaces: bool) -> Result<Writer, SnapshotError> {
        let layout = head.layout(head.block_size)?;
        let file_layout = FileLayout::new(&head, &layout, piece_size);
        let path = dir.to_owned();
        let made = match std::fs::create_dir(dir) {
            Ok(()) => true,
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && dir.is_dir() => false,
            Err(error) => return Err(SnapshotError::file(dir)(error)),
        };
        let dir = Directory::lock(&path)?;
        let done = Vec::new();
        let writer =
            Writer { dir, path, made, head, layout, file_layout, writing: None, done, complete: false };
        Writer::check(&writer.path, replaces)?;
        match Manifest::read(&writer.path) {
            Ok(before) => writer.dir.remove_leftovers(before.id.as_deref())?,
            Err(SnapshotError::NoManifest(_)) => writer.dir.remove_leftovers(None)?,
            // It may name any of them. They go when it has been replaced.
            Err(_) => {}
        }
        Ok(writer)
    }

    /// Bytes that are to be written.
    pub fn len(&self) -> u64 {
        self.file_layout.files.iter().map(|file| file.len).sum()
    }

    /// Whether nothing is to be written.
    pub fn is_empty(&self) -> bool {
        self.file_layout.files.is_empty()
    }

    /// Takes all of a snapshot, and completes the directory. Calls `written` with the number of bytes; it can
    /// return an interruption.
    ///
    /// # Errors
    /// [`SnapshotError`]; the directory's old contents are still there.
    pub fn write(
        mut self,
        source: &mut dyn Source,
        written: &mut dyn FnMut(u64) -> Result<(), SnapshotError>,
    ) -> Result<(), SnapshotError> {
        let layout = self.layout.clone();
        let mut wanted = pieces(&layout, kinds(&self.head.record));
        source.send(&mut wanted, &mut Observed { sink: &mut self, of: written })?;
        while self.done.len() < self.file_layout.files.len() {
            let next = self.writing.as_ref().map_or(self.done.len(), |(file, _)| *file);
            self.open(next)?;
            self.close()?;
        }
        if let Some(index) = &self.file_layout.index {
            let mut file = Writing::create(&self.dir, INDEX, self.head.block_size)?;
            file.write(index)?;
            self.done.push(file.finish()?);
        }
        self.complete()
    }

    /// The file with this number is the one that is written.
    fn open(&mut self, file: usize) -> Result<&mut Writing, SnapshotError> {
        while self.writing.as_ref().is_none_or(|(of, _)| *of != file) {
            if self.writing.is_some() {
                self.close()?;
            }
            let next = self.done.len();
            let planned = &self.file_layout.files[next];
            let mut writing = Writing::create(&self.dir, &planned.name, self.head.block_size)?;
            writing.write(&planned.header)?;
            self.writing = Some((next, writing));
        }
        self.writing.as_mut().map(|(_, writing)| writing).ok_or(SnapshotError::Interrupted)
    }

    fn close(&mut self) -> Result<(), SnapshotError> {
        let Some((file, mut writing)) = self.writing.take() else { return Ok(()) };
        let planned = &self.file_layout.files[file];
        writing.write(&planned.tail)?;
        if writing.len() != planned.len {
            let why = format!("{} has {} bytes, not {}", planned.name, writing.len(), planned.len);
            return Err(SnapshotError::Invalid(why));
        }
        self.done.push(writing.finish()?);
        Ok(())
    }

    fn complete(&mut self) -> Result<(), SnapshotError> {
        let manifest = Manifest::new(self.head.clone(), self.dir.id(), std::mem::take(&mut self.done));
        manifest.write(&self.dir)?;
        // The names of all files are on the disk before the manifest's place is.
        self.dir.sync()?;
        self.dir.place(MANIFEST)?;
        self.complete = true;
        self.dir.sync()?;
        let names: Vec<_> = manifest.files.iter().map(|file| &*file.name).collect();
        names.iter().try_for_each(|name| self.dir.place(name))?;
        self.dir.remove_others(&names)?;
        self.dir.sync()
    }
}

impl Sink for Writer {
    fn take(&mut self, (block, what): Piece, bytes: &[u8]) -> Result<(), SnapshotError> {
        let range = kept_range(&self.layout, block, what);
        let zeros;
        let bytes = match bytes {
            [] => {
                zeros = vec![0; (range.end - range.start) as usize];
                &zeros[..]
            }
            bytes => bytes,
        };
        if bytes.len() as u64 != range.end - range.start {
            return Err(SnapshotError::Invalid(format!("block {block} came with {} bytes", bytes.len())));
        }
        let places: Vec<_> = self
            .file_layout
            .extents
            .of(what, range)
            .map(|(within, extent, at)| (within, extent.file, at))
            .collect();
        for (within, file, at) in places {
            let writing = self.open(file)?;
            if writing.len() != at {
                return Err(SnapshotError::Order { block });
            }
            writing.write(&bytes[within])?;
        }
        Ok(())
    }
}

/// Removes everything that was not completed.
impl Drop for Writer {
    fn drop(&mut self) {
        if self.complete {
            return;
        }
        // Files that cannot be removed are no part of any snapshot.
        let _ = self.dir.remove_own();
        if self.made {
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}

/// A sink, and an observer of the bytes that it takes.
struct Observed<'a> {
    sink: &'a mut Writer,
    of: &'a mut dyn FnMut(u64) -> Result<(), SnapshotError>,
}

impl Sink for Observed<'_> {
    fn take(&mut self, piece: Piece, bytes: &[u8]) -> Result<(), SnapshotError> {
        self.sink.take(piece, bytes)?;
        (self.of)(bytes.len() as u64)
    }
}
