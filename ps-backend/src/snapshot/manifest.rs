//! `manifest.json`: the subject of a snapshot, and the checksums of all of its files, its own last. It is
//! written last, so a directory without it is no snapshot.

use std::io::{Read as _, Write as _};
use std::path::Path;

use libmodelio::bytes::crc32c::crc32c;
use serde::{Deserialize, Serialize};

use super::checked::{Checksums, open, sync};
use super::directory::{Directory, is_id};
use super::files::MANIFEST;
use super::{Head, SnapshotError};

/// The format that this release writes and reads.
const FORMAT: u64 = 1;
/// The text before the manifest's own checksum.
const BEFORE_CHECKSUM: &str = ",\n\"checksum\": \"";
const AFTER_CHECKSUM: &str = "\"}\n";

/// All of it but its own checksum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub format: u64,
    #[serde(flatten)]
    pub head: Head,
    /// Until a file has its place, it has [`own_name`](super::directory::own_name) with this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    pub files: Vec<Checksums>,
}

impl Manifest {
    pub(super) fn new(head: Head, id: &str, files: Vec<Checksums>) -> Manifest {
        Manifest { format: FORMAT, head, id: Some(id.to_owned()), files }
    }

    /// Writes it under its own name. When it has its place, the directory is this snapshot.
    pub(super) fn write(&self, dir: &Directory) -> Result<(), SnapshotError> {
        let text = serde_json::to_string(self).map_err(|error| SnapshotError::Invalid(error.to_string()))?;
        let text = seal(text);
        let (path, mut file) = dir.create(MANIFEST)?;
        file.write_all(text.as_bytes()).map_err(SnapshotError::file(&path))?;
        sync(&path, &file)
    }

    /// Reads it.
    pub(super) fn read(dir: &Path) -> Result<Manifest, SnapshotError> {
        let path = dir.join(MANIFEST);
        let mut file = match open(&path) {
            Err(error) if error.is_missing() && dir.is_dir() => {
                return Err(SnapshotError::NoManifest(dir.to_owned()));
            }
            opened => opened?,
        };
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(SnapshotError::file(&path))?;
        let text = unseal(&path, bytes, FORMAT)?;
        let damaged = |why: String| SnapshotError::damaged(&path, why);
        let manifest: Manifest =
            serde_json::from_str(&text).map_err(|error| damaged(format!("it cannot be read: {error}")))?;
        match &manifest.id {
            Some(id) if !is_id(id) => Err(damaged(format!("{id:?} is no identity of a snapshot"))),
            _ => Ok(manifest),
        }
    }
}

/// A description with its own checksum at its end.
pub(super) fn seal(mut text: String) -> String {
    text.pop();
    let checksum = crc32c(text.as_bytes());
    text.push_str(&format!("{BEFORE_CHECKSUM}{checksum:08x}{AFTER_CHECKSUM}"));
    text
}

/// The text of a description of this format, if it is as it was written.
pub(super) fn unseal(path: &Path, bytes: Vec<u8>, expected: u64) -> Result<String, SnapshotError> {
    let damaged = |why: String| SnapshotError::damaged(path, why);
    // In another format, only the number can be relied on.
    #[derive(Deserialize)]
    struct Numbered {
        format: u64,
    }
    let text = String::from_utf8(bytes).map_err(|_| damaged("it is no text".into()))?;
    let Numbered { format: got } =
        serde_json::from_str(&text).map_err(|error| damaged(format!("it cannot be read: {error}")))?;
    let checked = text.strip_suffix(AFTER_CHECKSUM).and_then(|text| text.rsplit_once(BEFORE_CHECKSUM));
    let checked = checked.filter(|(_, checksum)| checksum.len() == 8);
    // The number itself may be damaged. All formats that end like this have this checksum.
    if let Some((body, checksum)) = checked
        && format!("{:08x}", crc32c(body.as_bytes())) != checksum
    {
        return Err(damaged("it is not what was written: its checksum is another one".into()));
    }
    if got != expected {
        return Err(SnapshotError::Format { path: path.to_owned(), expected, got });
    }
    if checked.is_none() {
        return Err(damaged("it has no checksum at its end".into()));
    }
    Ok(text)
}
