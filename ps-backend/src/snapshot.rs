//! Snapshots: weights, masters, optimizer state and the coordinator's record of one version, in a form that can be
//! kept, sent and taken over.
//!
//! A [`Source`] has them piece by piece: the data of one block, of one kind ([`DataKind`]). A [`Sink`] takes
//! them. Between them a snapshot goes anywhere: from a running job into a directory, from a directory into a
//! new job, on any number of shards, and from the shards of one block map to those of another.
//!
//! | module | holds |
//! |---|---|
//! | `head` | what a snapshot is of: tensors, settings, and the record of the job |
//! | `copied` | a copy in memory, so that the job goes on: a source |
//! | `stream` | a copy as one file to be read from start to end: a source |
//! | `shards` | the copies on the shards of a model, over the network: a source |
//! | `files` | which files a directory has, and where in them each piece lies |
//! | `manifest` | `manifest.json`, without which a directory is no snapshot |
//! | `directory` | a directory that is written into: its lock, names, and removals |
//! | `checked` | files with a checksum for each block |
//! | `writer`, `reader` | a directory as a sink, and as a source |
//! | `packed` | a snapshot in a store of objects, which several processes write |
//! | `asked` | asking the shards of a model for one in a store |
//! | `stored` | a snapshot at a place that a user names: a directory, or a store |
//! | `schedule` | when the next snapshot of a job is taken |
//! | `load` | the memory of a partition as a sink |

mod asked;
mod checked;
mod copied;
mod directory;
mod files;
mod head;
mod load;
mod manifest;
mod packed;
mod reader;
mod schedule;
mod shards;
mod stored;
mod stream;
mod writer;

use std::io;
use std::path::{Path, PathBuf};

use libmodelio::admin::AdminError;
use libmodelio::formats::safetensors::ModelFileError;
use libmodelio::vocabulary::ids::{BlockId, Generation, ShardId};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::{DataKind, Refusal};

use crate::core::JobRecord;
use crate::memory::gib;
use crate::partition::store::PartitionError;
use crate::partition::store::kept_range;
use crate::stores::StoreError;

pub use asked::AskedSnapshot;
pub use copied::Copied;
pub use files::MANIFEST;
pub use head::{Head, settings};
pub use load::Load;
pub(crate) use packed::now;
pub use packed::{
    Description, Filling, Keep, Pace, Pack, PackedReader, Part, PieceHash, Place, Places, Shelf, Stepping,
    write_part,
};
pub use reader::Reader;
pub use schedule::{SavedSnapshot, SnapshotSchedule};
pub use shards::{Fetched, Shards};
pub use stored::Stored;
pub use stream::{Stream, StreamHead, head_bytes};
pub use writer::{PIECE_SIZE, Writer};

/// Why a snapshot cannot be taken, written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The system's error on a file.
    #[error("{}: {error}", path.display())]
    File {
        /// The path.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// A directory without a manifest.
    #[error(
        "{} has no {MANIFEST}: it is no snapshot, or the command that wrote it did not get to its end", .0.display()
    )]
    NoManifest(PathBuf),
    /// A store without the snapshot that is asked for.
    #[error("{0}")]
    Nothing(String),
    /// A store has the snapshots of another job.
    #[error(
        "{store} has the snapshots of model {model:?} in its life {generation}: another job saves there, or has gone on from there"
    )]
    Claimed {
        /// The store.
        store: String,
        /// The other model.
        model: String,
        /// Its life.
        generation: Generation,
    },
    /// A directory that has a snapshot.
    #[error("{} holds a snapshot already", .0.display())]
    Exists(PathBuf),
    /// A directory without a snapshot that has a file of which a snapshot's would take the place.
    #[error("{} is there, and belongs to no snapshot", .0.display())]
    Occupied(PathBuf),
    /// A directory that has another one inside, where a snapshot has a file.
    #[error("{} is a directory, and the snapshot has a file of that name", .0.display())]
    Nested(PathBuf),
    /// Another save has the lock of the directory.
    #[error("another gradfs save writes into {}", .0.display())]
    Busy(PathBuf),
    /// A directory whose snapshot was replaced, again and again, while it was opened.
    #[error("the snapshot in {} is being replaced", .0.display())]
    Replaced(PathBuf),
    /// A file that is not as it was written.
    #[error("{}: {why}", path.display())]
    Damaged {
        /// The path.
        path: PathBuf,
        /// The fault.
        why: String,
    },
    /// A file that is not one of safetensors.
    #[error("{}: {error}", path.display())]
    Tensors {
        /// The path.
        path: PathBuf,
        /// The fault.
        error: ModelFileError,
    },
    /// Its manifest is of another release.
    #[error("{}: a snapshot of format {got}, this release reads format {expected}", path.display())]
    Format {
        /// The path.
        path: PathBuf,
        /// This release's.
        expected: u64,
        /// The manifest's.
        got: u64,
    },
    /// The snapshot is of another model than is expected.
    #[error("a snapshot of another model: {0}")]
    OtherModel(String),
    /// The snapshot's description of the model or the job is wrong.
    #[error("{0}")]
    Invalid(String),
    /// The store of a snapshot.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The system gives no memory.
    #[error("no memory for it: {0}")]
    Memory(#[from] io::Error),
    /// There is not enough memory for the copy.
    #[error(
        "not enough memory: a snapshot is copied first, which takes {:.1} GiB, and {:.1} GiB are available",
        gib(*.needed), gib(*.available)
    )]
    Room {
        /// Bytes that it takes.
        needed: u64,
        /// Bytes that there are.
        available: u64,
    },
    /// Pieces do not come as they were asked for.
    #[error("block {block} came where another piece was expected")]
    Order {
        /// The block.
        block: BlockId,
    },
    /// A partition does not take it.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// The request is refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A shard refuses, or cannot be asked.
    #[error("blocks cannot be fetched from shard {shard} at {address}: {error}")]
    Shard {
        /// The shard.
        shard: ShardId,
        /// The address.
        address: String,
        /// The shard's error, or its silence.
        error: AdminError,
    },
    /// Somebody wants no more of it.
    #[error("interrupted")]
    Interrupted,
}

impl SnapshotError {
    fn file(path: &Path) -> impl Fn(io::Error) -> SnapshotError + use<> {
        let path = path.to_owned();
        move |error| SnapshotError::File { path: path.clone(), error }
    }

    /// Whether the snapshot is not as it was written, so that another one may be better.
    pub(crate) fn is_damage(&self) -> bool {
        matches!(
            self,
            SnapshotError::Damaged { .. }
                | SnapshotError::Invalid(_)
                | SnapshotError::Store(StoreError::Missing(_))
        )
    }

    /// Whether a file is not there.
    fn is_missing(&self) -> bool {
        matches!(self, SnapshotError::File { error, .. } if error.kind() == io::ErrorKind::NotFound)
    }

    fn damaged(path: &Path, why: impl Into<String>) -> SnapshotError {
        SnapshotError::Damaged { path: path.to_owned(), why: why.into() }
    }
}

/// A piece of a snapshot: a block of the model, and the kind of data.
pub type Piece = (BlockId, DataKind);

/// Something that has a snapshot.
pub trait Source {
    /// Gives `sink` these pieces, in this order.
    ///
    /// # Errors
    /// [`SnapshotError`], the source's own or the sink's.
    fn send(
        &mut self,
        wanted: &mut dyn Iterator<Item = Piece>,
        sink: &mut dyn Sink,
    ) -> Result<(), SnapshotError>;
}

/// Gives `sink` pieces that are read one by one into the same buffer.
fn send_each(
    wanted: &mut dyn Iterator<Item = Piece>,
    sink: &mut dyn Sink,
    mut read: impl FnMut(Piece, &mut Vec<u8>) -> Result<(), SnapshotError>,
) -> Result<(), SnapshotError> {
    let mut bytes = Vec::new();
    for piece in wanted {
        read(piece, &mut bytes)?;
        sink.take(piece, &bytes)?;
    }
    Ok(())
}

/// Something that takes a snapshot.
pub trait Sink {
    /// Takes a piece. Without bytes, optimizer state is zero.
    ///
    /// # Errors
    /// [`SnapshotError`].
    fn take(&mut self, piece: Piece, bytes: &[u8]) -> Result<(), SnapshotError>;
}

/// The kinds of data of a snapshot besides weights: the state of the optimizer if it has stepped, and
/// masters.
pub fn kinds(record: &JobRecord) -> impl Iterator<Item = DataKind> + use<> {
    let slots = if record.steps.highest() > 0 { slots(record.optimizer) } else { 0 };
    [DataKind::Weights].into_iter().chain((0..slots).map(DataKind::Slot)).chain([DataKind::Masters])
}

/// The kinds of data that a partition has room for if `reducer` trains it.
pub fn all_kinds(reducer: Reducer) -> impl Iterator<Item = DataKind> {
    [DataKind::Weights].into_iter().chain((0..slots(reducer)).map(DataKind::Slot)).chain([DataKind::Masters])
}

fn slots(reducer: Reducer) -> u8 {
    reducer.state_slots() as u8
}

/// All pieces of these kinds that there are of a model, in the order in which files have them.
pub fn pieces<'a>(
    layout: &'a ModelLayout,
    kinds: impl Iterator<Item = DataKind> + 'a,
) -> impl Iterator<Item = Piece> + 'a {
    let blocks = move |what| (0..layout.blocks()).map(move |block| (BlockId(block), what));
    kinds.flat_map(blocks).filter(|&(block, what)| !kept_range(layout, block, what).is_empty())
}

#[cfg(test)]
mod tests;
