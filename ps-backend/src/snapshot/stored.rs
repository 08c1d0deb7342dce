//! A snapshot at a place that a user names: a directory, or a store.

use std::path::Path;

use libmodelio::vocabulary::layout::ModelLayout;

use super::packed::{Description, PackedReader, Shelf};
use super::{Filling, Head, Load, MANIFEST, Piece, Reader, Sink, SnapshotError, Source, all_kinds, pieces};
use crate::partition::store::PartitionStore;
use crate::stores::path_of;

/// A snapshot that is read.
#[derive(Debug)]
pub enum Stored {
    /// A directory that `gradfs save` has written.
    Directory(Box<Reader>),
    /// One of a store, and its name there.
    Packed(Box<PackedReader>, String),
}

/// A store, and the version that is meant there, if one is: it stands behind a `#`.
fn parts_of(place: &str) -> (&str, Option<&str>) {
    match place.rsplit_once('#') {
        Some((store, version)) if !version.is_empty() && version.bytes().all(|b| b.is_ascii_digit()) => {
            (store, Some(version))
        }
        _ => (place, None),
    }
}

/// The description of the snapshot that is meant at a place: the newest, or that of a version.
fn described(shelf: &Shelf, version: Option<&str>) -> Result<(Description, String), SnapshotError> {
    let names = shelf.names()?;
    let is_meant = |name: &&String| {
        version.is_none_or(|version| Shelf::version_of(name).is_some_and(|of| of.to_string() == version))
    };
    let name = names.iter().rfind(is_meant).ok_or_else(|| match version {
        Some(version) => SnapshotError::Nothing(format!("{} has no version {version}", shelf.url())),
        None => SnapshotError::Nothing(format!("{} has no snapshot", shelf.url())),
    })?;
    Ok((shelf.description(name)?, name.clone()))
}

impl Stored {
    /// Opens the snapshot at a place, to be read in blocks of `block_size`, or of its own block size. The place is a directory
    /// of `gradfs save`, or a store, where `#12` means version 12, and otherwise the newest is meant.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn open(place: &Path, block_size: Option<u32>) -> Result<Stored, SnapshotError> {
        let directory = |dir: &Path| Ok(Stored::Directory(Box::new(Reader::open(dir, block_size)?)));
        let Some(text) = place.to_str() else { return directory(place) };
        let (store, version) = parts_of(text);
        let dir = path_of(text).unwrap_or_else(|| place.to_owned());
        let is_store = match path_of(store) {
            None => true,
            Some(path) => !dir.join(MANIFEST).exists() && Shelf::is_in(&path),
        };
        if !is_store {
            return directory(&dir);
        }
        let shelf = Shelf::open(store)?;
        let (description, name) = described(&shelf, version)?;
        let reader = PackedReader::new(shelf.store().clone(), description, block_size)?;
        Ok(Stored::Packed(Box::new(reader), name))
    }

    /// Opens the snapshot of this name in a store, whose packs are all there in their whole length. Several may be of one
    /// version.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn named(shelf: &Shelf, name: &str, block_size: Option<u32>) -> Result<Stored, SnapshotError> {
        let description = shelf.description(name)?;
        shelf.check_packs(&description.places)?;
        let reader = PackedReader::new(shelf.store().clone(), description, block_size)?;
        Ok(Stored::Packed(Box::new(reader), name.to_owned()))
    }

    /// The store that it is in, if it is in one.
    pub fn store(&self) -> Option<Shelf> {
        match self {
            Stored::Directory(_) => None,
            Stored::Packed(reader, _) => Some(Shelf::of(reader.store().clone())),
        }
    }

    /// The address of the store that it is in, and its name there, if shards can read it by themselves in blocks of the size
    /// that it was opened with.
    pub fn place(&self) -> Option<(&str, &str)> {
        match self {
            Stored::Packed(reader, name) if reader.has_its_own_blocks() => Some((reader.store().url(), name)),
            _ => None,
        }
    }

    /// Fills a partition that begins at this snapshot's version, and completes it.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn fill(&self, store: &PartitionStore) -> Result<(), SnapshotError> {
        let optimizer = self.head().record.optimizer;
        match self {
            Stored::Packed(reader, _) if reader.has_its_own_blocks() => {
                Filling::of(reader, store, &|_| Ok(())).run(optimizer)?;
            }
            _ => {
                let mut bytes = Vec::new();
                for piece in pieces(self.layout(), all_kinds(optimizer)) {
                    self.piece(piece, &mut bytes)?;
                    Load::of(store).take(piece, &bytes)?;
                }
            }
        }
        Ok(store.finish_loading()?)
    }

    /// The subject of the snapshot.
    pub fn head(&self) -> &Head {
        match self {
            Stored::Directory(reader) => reader.head(),
            Stored::Packed(reader, _) => reader.head(),
        }
    }

    /// The model, in blocks of the size that it was opened with.
    pub fn layout(&self) -> &ModelLayout {
        match self {
            Stored::Directory(reader) => reader.layout(),
            Stored::Packed(reader, _) => reader.layout(),
        }
    }

    /// Bytes that [`Self::verify`] reads.
    pub fn len(&self) -> u64 {
        match self {
            Stored::Directory(reader) => reader.len(),
            Stored::Packed(reader, _) => reader.len(),
        }
    }

    /// Whether the snapshot has no data.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Compares all bytes with their checksums. Calls `read` with the number of bytes that were read; it can return an
    /// interruption.
    ///
    /// # Errors
    /// [`SnapshotError`] names the file and the block.
    pub fn verify(
        &self,
        read: &mut dyn FnMut(u64) -> Result<(), SnapshotError>,
    ) -> Result<(), SnapshotError> {
        match self {
            Stored::Directory(reader) => reader.verify(read),
            Stored::Packed(reader, _) => reader.verify(read),
        }
    }

    /// Fills a buffer with a piece, or leaves it empty where that is zero.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn piece(&self, piece: Piece, bytes: &mut Vec<u8>) -> Result<(), SnapshotError> {
        match self {
            Stored::Directory(reader) => reader.piece(piece, bytes),
            Stored::Packed(reader, _) => reader.piece(piece, bytes),
        }
    }
}

impl Source for Stored {
    fn send(
        &mut self,
        wanted: &mut dyn Iterator<Item = Piece>,
        sink: &mut dyn Sink,
    ) -> Result<(), SnapshotError> {
        match self {
            Stored::Directory(reader) => reader.send(wanted, sink),
            Stored::Packed(reader, _) => reader.send(wanted, sink),
        }
    }
}
