//! Files with a checksum for each block: written from start to end under a temporary name, and read to be compared.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use libmodelio::bytes::crc32c::{Crc32c, crc32c};
use serde::{Deserialize, Serialize};

use super::SnapshotError;

/// The manifest's facts about a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Checksums {
    pub name: String,
    pub bytes: u64,
    /// CRC32C of each block, 8 hexadecimal digits one behind the other.
    pub crc32c: String,
}

/// The suffix of files that are not finished.
const PARTIAL: &str = ".partial";

/// The temporary name of a file.
pub(super) fn partial(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(PARTIAL);
    path.with_file_name(name)
}

/// A file that is being written.
pub(super) struct Writing {
    path: PathBuf,
    file: File,
    block_size: usize,
    crc: Crc32c,
    in_block: usize,
    checksums: Checksums,
}

impl Writing {
    /// Begins `name` in `dir`, under its temporary name.
    pub(super) fn create(dir: &Path, name: &str, block_size: u32) -> Result<Writing, SnapshotError> {
        let path = partial(&dir.join(name));
        let file = File::create(&path).map_err(SnapshotError::file(&path))?;
        let checksums = Checksums { name: name.to_owned(), bytes: 0, crc32c: String::new() };
        Ok(Writing {
            path,
            file,
            block_size: block_size as usize,
            crc: Crc32c::new(),
            in_block: 0,
            checksums,
        })
    }

    /// Bytes that are there.
    pub(super) fn len(&self) -> u64 {
        self.checksums.bytes
    }

    pub(super) fn write(&mut self, mut bytes: &[u8]) -> Result<(), SnapshotError> {
        self.file.write_all(bytes).map_err(SnapshotError::file(&self.path))?;
        self.checksums.bytes += bytes.len() as u64;
        while !bytes.is_empty() {
            let (now, rest) = bytes.split_at(bytes.len().min(self.block_size - self.in_block));
            self.crc.update(now);
            self.in_block += now.len();
            bytes = rest;
            if self.in_block == self.block_size {
                self.end_block();
            }
        }
        Ok(())
    }

    fn end_block(&mut self) {
        let crc = std::mem::take(&mut self.crc).finish();
        self.checksums.crc32c.push_str(&format!("{crc:08x}"));
        self.in_block = 0;
    }

    /// All of it is there, and on its disk.
    pub(super) fn finish(mut self) -> Result<Checksums, SnapshotError> {
        if self.in_block > 0 {
            self.end_block();
        }
        self.file.sync_all().map_err(SnapshotError::file(&self.path))?;
        Ok(self.checksums)
    }
}

/// Opens a file that a manifest names.
pub(super) fn open(path: &Path) -> Result<File, SnapshotError> {
    File::open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => SnapshotError::damaged(path, "it is missing, and the manifest names it"),
        _ => SnapshotError::file(path)(error),
    })
}

/// Compares a file with its checksums. Calls `read` with the number of bytes that were read.
pub(super) fn verify(
    dir: &Path,
    expected: &Checksums,
    block_size: u32,
    read: &mut dyn FnMut(u64) -> Result<(), SnapshotError>,
) -> Result<(), SnapshotError> {
    let path = dir.join(&expected.name);
    let failed = SnapshotError::file(&path);
    let mut file = open(&path)?;
    let len = file.metadata().map_err(&failed)?.len();
    let blocks = expected.bytes.div_ceil(u64::from(block_size));
    if expected.crc32c.len() as u64 != blocks * 8 || !expected.crc32c.is_ascii() {
        let why = format!("the manifest has no checksums of its {blocks} blocks");
        return Err(SnapshotError::damaged(&path, why));
    }
    if len != expected.bytes {
        let why = format!("it has {len} bytes, not {}", expected.bytes);
        return Err(SnapshotError::damaged(&path, why));
    }
    let mut bytes = vec![0; block_size as usize];
    let mut left = len;
    for (block, sum) in expected.crc32c.as_bytes().chunks(8).enumerate() {
        let bytes = &mut bytes[..left.min(block_size.into()) as usize];
        file.read_exact(bytes).map_err(&failed)?;
        let got = format!("{:08x}", crc32c(bytes));
        if got.as_bytes() != sum {
            let from = block as u64 * u64::from(block_size);
            let why = format!("block {block} of it (from byte {from} on) is not what was written");
            return Err(SnapshotError::damaged(&path, why));
        }
        left -= bytes.len() as u64;
        read(bytes.len() as u64)?;
    }
    Ok(())
}

/// Makes renames in a directory durable.
pub(super) fn sync_dir(dir: &Path) -> Result<(), SnapshotError> {
    let synced = File::open(dir).and_then(|dir| dir.sync_all());
    synced.map_err(SnapshotError::file(dir))
}

/// Removes a file that may not be there.
pub(super) fn remove(path: &Path) -> Result<(), SnapshotError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(SnapshotError::file(path)(error)),
        _ => Ok(()),
    }
}
