//! `manifest.json`: the subject of a snapshot, and the checksums of all of its files, its own last. It is
//! written last, so a directory without it is no snapshot.

use std::path::Path;

use libmodelio::bytes::crc32c::crc32c;
use serde::{Deserialize, Serialize};

use super::checked::{Checksums, partial, sync_dir};
use super::{Head, SnapshotError};

/// Its name.
pub const MANIFEST: &str = "manifest.json";
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
    pub files: Vec<Checksums>,
}

impl Manifest {
    pub(super) fn new(head: Head, files: Vec<Checksums>) -> Manifest {
        Manifest { format: FORMAT, head, files }
    }

    fn encode(&self) -> Result<String, serde_json::Error> {
        let mut text = serde_json::to_string(self)?;
        text.pop();
        let checksum = crc32c(text.as_bytes());
        text.push_str(&format!("{BEFORE_CHECKSUM}{checksum:08x}{AFTER_CHECKSUM}"));
        Ok(text)
    }

    /// Writes it. From now on the directory is a snapshot.
    pub(super) fn write(&self, dir: &Path) -> Result<(), SnapshotError> {
        let path = dir.join(MANIFEST);
        let failed = SnapshotError::file(&path);
        let text = self.encode().map_err(|error| SnapshotError::Invalid(error.to_string()))?;
        let temporary = partial(&path);
        std::fs::write(&temporary, text).map_err(&failed)?;
        let synced = std::fs::File::open(&temporary).and_then(|file| file.sync_all());
        synced.and_then(|()| std::fs::rename(&temporary, &path)).map_err(&failed)?;
        sync_dir(dir)
    }

    /// Reads it.
    pub(super) fn read(dir: &Path) -> Result<Manifest, SnapshotError> {
        let path = dir.join(MANIFEST);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && dir.is_dir() => {
                return Err(SnapshotError::NoManifest(dir.to_owned()));
            }
            Err(error) => return Err(SnapshotError::file(&path)(error)),
        };
        let damaged = |why: String| SnapshotError::damaged(&path, why);
        // In another format, only the number can be relied on.
        #[derive(Deserialize)]
        struct Numbered {
            format: u64,
        }
        let text = String::from_utf8(bytes).map_err(|_| damaged("it is no text".into()))?;
        let Numbered { format } =
            serde_json::from_str(&text).map_err(|error| damaged(format!("it cannot be read: {error}")))?;
        if format != FORMAT {
            return Err(SnapshotError::Format { path, expected: FORMAT, got: format });
        }
        let checked = text.strip_suffix(AFTER_CHECKSUM).and_then(|text| text.rsplit_once(BEFORE_CHECKSUM));
        let (body, checksum) = checked.ok_or_else(|| damaged("it has no checksum at its end".into()))?;
        if format!("{:08x}", crc32c(body.as_bytes())) != checksum {
            return Err(damaged("it is not what was written: its checksum is another one".into()));
        }
        serde_json::from_str(&text).map_err(|error| damaged(format!("it cannot be read: {error}")))
    }
}
