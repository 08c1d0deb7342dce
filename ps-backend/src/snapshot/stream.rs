//! A snapshot as one file that is read from start to end: the length of its head in 8 bytes, little-endian; the head, as
//! JSON; and then, for each kind that the head's record has, what is kept of it, block by block.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use libmodelio::vocabulary::layout::ModelLayout;
use serde::{Deserialize, Serialize};

use super::{Head, Piece, Sink, SnapshotError, Source};
use crate::partition::store::kept_range;

/// Longest head.
const MAX_HEAD: u64 = 1 << 30;

/// The head of such a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamHead {
    /// The snapshot follows.
    Here(Box<Head>),
    /// The model is on shards, which a registry knows.
    Elsewhere {
        /// The address of the registry.
        registry: String,
        /// The model's name there.
        model: String,
    },
}

/// The bytes before the data.
///
/// # Errors
/// The error of encoding.
pub fn head_bytes(head: &StreamHead) -> io::Result<Vec<u8>> {
    let json = serde_json::to_vec(head)?;
    Ok([&(json.len() as u64).to_le_bytes(), &json[..]].concat())
}

/// A file of this kind.
pub struct Stream {
    path: PathBuf,
    file: BufReader<File>,
    layout: ModelLayout,
}

impl Stream {
    /// Opens one: the snapshot is taken now.
    ///
    /// # Errors
    /// The system's error, and the error for a file of another kind.
    pub fn open(path: &Path) -> Result<(StreamHead, Option<Stream>), SnapshotError> {
        let failed = SnapshotError::file(path);
        // As many bytes as the kernel asks a filesystem for at once.
        const READ_BYTES: usize = 1 << 20;
        let file = File::open(path).map_err(&failed)?;
        let mut file = BufReader::with_capacity(READ_BYTES, file);
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(&failed)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEAD {
            return Err(SnapshotError::damaged(path, format!("it claims a head of {length} bytes")));
        }
        let mut json = vec![0; length as usize];
        file.read_exact(&mut json).map_err(&failed)?;
        let head: StreamHead = serde_json::from_slice(&json)
            .map_err(|error| SnapshotError::damaged(path, format!("its head cannot be read: {error}")))?;
        let stream = match &head {
            StreamHead::Here(of) => {
                let layout = of.layout(of.block_size)?;
                Some(Stream { path: path.to_owned(), file, layout })
            }
            StreamHead::Elsewhere { .. } => None,
        };
        Ok((head, stream))
    }
}

/// Pieces can be had in the order of `pieces` only.
impl Source for Stream {
    fn send(
        &mut self,
        wanted: &mut dyn Iterator<Item = Piece>,
        sink: &mut dyn Sink,
    ) -> Result<(), SnapshotError> {
        let mut bytes = Vec::new();
        for (block, what) in wanted {
            let range = kept_range(&self.layout, block, what);
            bytes.resize((range.end - range.start) as usize, 0);
            self.file.read_exact(&mut bytes).map_err(SnapshotError::file(&self.path))?;
            sink.take((block, what), &bytes)?;
        }
        Ok(())
    }
}
