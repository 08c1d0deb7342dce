//! Files with a checksum for each block: written from start to end, and read to be compared.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use libmodelio::bytes::crc32c::{Crc32c, crc32c};
use serde::{Deserialize, Serialize};

use super::SnapshotError;
use super::directory::{Directory, changed};

/// The manifest's facts about a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Checksums {
    pub name: String,
    pub bytes: u64,
    /// CRC32C of each block, 8 hexadecimal digits one behind the other.
    pub crc32c: String,
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
    /// Begins `name` in `dir`.
    pub(super) fn create(dir: &Directory, name: &str, block_size: u32) -> Result<Writing, SnapshotError> {
        let (path, file) = dir.create(name)?;
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
        sync(&self.path, &self.file)?;
        Ok(self.checksums)
    }
}

/// Has a file on its disk.
pub(super) fn sync(path: &Path, file: &File) -> Result<(), SnapshotError> {
    file.sync_all().map_err(SnapshotError::file(path))?;
    changed("synced");
    Ok(())
}

/// Opens a file of a snapshot. What is no regular file could keep its reader waiting.
pub(super) fn open(path: &Path) -> Result<File, SnapshotError> {
    let failed = SnapshotError::file(path);
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(&failed)?;
    match file.metadata().map_err(&failed)?.is_file() {
        true => Ok(file),
        false => Err(SnapshotError::damaged(path, "it is no regular file")),
    }
}

/// Compares a file with its checksums. Calls `read` with the number of bytes that were read.
pub(super) fn verify(
    (path, file): &(PathBuf, File),
    expected: &Checksums,
    block_size: u32,
    read: &mut dyn FnMut(u64) -> Result<(), SnapshotError>,
) -> Result<(), SnapshotError> {
    let failed = SnapshotError::file(path);
    let len = file.metadata().map_err(&failed)?.len();
    let blocks = expected.bytes.div_ceil(u64::from(block_size));
    if expected.crc32c.len() as u64 != blocks * 8 || !expected.crc32c.is_ascii() {
        let why = format!("the manifest has no checksums of its {blocks} blocks");
        return Err(SnapshotError::damaged(path, why));
    }
    if len != expected.bytes {
        let why = format!("it has {len} bytes, not {}", expected.bytes);
        return Err(SnapshotError::damaged(path, why));
    }
    let mut bytes = vec![0; block_size as usize];
    let mut at = 0;
    for (block, sum) in expected.crc32c.as_bytes().chunks(8).enumerate() {
        let bytes = &mut bytes[..(len - at).min(block_size.into()) as usize];
        file.read_exact_at(bytes, at).map_err(&failed)?;
        let got = format!("{:08x}", crc32c(bytes));
        if got.as_bytes() != sum {
            let why = format!("block {block} of it (from byte {at} on) is not what was written");
            return Err(SnapshotError::damaged(path, why));
        }
        at += bytes.len() as u64;
        read(bytes.len() as u64)?;
    }
    Ok(())
}
