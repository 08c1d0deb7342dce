//! A copy of a partition's newest version. While it is made no plan begins; afterwards the job goes on.

use std::io;
use std::sync::Arc;

use libmodelio::bytes::available::unpromised;
use libmodelio::bytes::pages::Pages;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::wire::DataKind;
use parking_lot::Mutex;

use super::{Piece, SnapshotError, pieces};
use crate::memory;
use crate::partition::executor::Executor;
use crate::partition::store::PinnedState;
use crate::partition::store::kept_range;

/// A copy, by blocks of the partition.
pub struct Copied {
    layout: Arc<ModelLayout>,
    kinds: Vec<CopyKind>,
}

/// The data of one kind: blocks lie one behind the other.
struct CopyKind {
    what: DataKind,
    starts: Vec<usize>,
    bytes: Pages,
}

impl CopyKind {
    fn new(layout: &ModelLayout, what: DataKind) -> io::Result<CopyKind> {
        let mut starts = vec![0];
        for block in (0..layout.blocks()).map(BlockId) {
            let range = kept_range(layout, block, what);
            starts.push(starts[block.index()] + (range.end - range.start) as usize);
        }
        // Its pages are there: to take them costs more than the copy does.
        let bytes = Pages::new(starts[layout.blocks() as usize])?;
        Ok(CopyKind { what, starts, bytes })
    }

    fn fill(&mut self, kept: &PinnedState, executor: &dyn Executor) -> Result<(), SnapshotError> {
        let mut left = &mut self.bytes[..];
        let mut blocks = Vec::with_capacity(self.starts.len() - 1);
        for (block, ends) in (0..).map(BlockId).zip(self.starts.windows(2)) {
            let (room, rest) = left.split_at_mut(ends[1] - ends[0]);
            blocks.push((block, Mutex::new(room)));
            left = rest;
        }
        let what = self.what;
        let copy = |block, room: &mut [u8]| {
            if room.is_empty() {
                return Ok(());
            }
            match &*kept.bytes(block, what)? {
                bytes if bytes.len() == room.len() => room.copy_from_slice(bytes),
                // Nothing of the kind has been needed yet.
                [] => room.fill(0),
                bytes => {
                    let why = format!("{} bytes are kept of block {block}", bytes.len());
                    return Err(SnapshotError::Invalid(why));
                }
            }
            Ok(())
        };
        let failed = Mutex::new(None);
        executor.for_each(blocks.len(), &|at| {
            let (block, room) = &blocks[at];
            if let Err(error) = copy(*block, &mut room.lock()) {
                failed.lock().get_or_insert(error);
            }
        });
        failed.into_inner().map_or(Ok(()), Err)
    }
}

impl Copied {
    /// Reserves memory for data of these kinds. Takes time.
    ///
    /// # Errors
    /// [`SnapshotError::Room`] if it is not there.
    pub fn reserve(
        layout: &Arc<ModelLayout>,
        kinds: impl Iterator<Item = DataKind>,
    ) -> Result<Copied, SnapshotError> {
        let kinds: Vec<DataKind> = kinds.collect();
        let len = |(block, what)| {
            let range = kept_range(layout, block, what);
            range.end - range.start
        };
        let needed = pieces(layout, kinds.iter().copied()).map(len).sum();
        let make = || kinds.into_iter().map(|what| CopyKind::new(layout, what)).collect::<io::Result<_>>();
        let made = memory::take(needed, unpromised, make);
        let kinds = made.map_err(|available| SnapshotError::Room { needed, available })??;
        Ok(Copied { layout: Arc::clone(layout), kinds })
    }

    /// Copies the data of these kinds and no others, however long it takes.
    ///
    /// # Errors
    /// [`SnapshotError::Partition`].
    pub fn fill(
        &mut self,
        kept: &PinnedState,
        kinds: impl Iterator<Item = DataKind>,
        executor: &dyn Executor,
    ) -> Result<(), SnapshotError> {
        let kinds: Vec<DataKind> = kinds.collect();
        self.kinds.retain(|kind| kinds.contains(&kind.what));
        for what in kinds {
            if !self.kinds.iter().any(|kind| kind.what == what) {
                self.kinds.push(CopyKind::new(&self.layout, what)?);
            }
        }
        self.kinds.iter_mut().try_for_each(|kind| kind.fill(kept, executor))
    }

    /// The data of a block; empty if it has none of that kind.
    pub fn bytes(&self, block: BlockId, what: DataKind) -> &[u8] {
        let kind = self.kinds.iter().find(|kind| kind.what == what);
        let ends = kind.and_then(|kind| Some((kind, kind.starts.get(block.index()..block.index() + 2)?)));
        ends.map_or(&[], |(kind, ends)| &kind.bytes[ends[0]..ends[1]])
    }

    /// All data: kind by kind, and of each kind block by block.
    pub fn pieces(&self) -> impl Iterator<Item = (Piece, &[u8])> {
        let of = pieces(&self.layout, self.kinds.iter().map(|kind| kind.what));
        of.map(|piece| (piece, self.bytes(piece.0, piece.1)))
    }

    /// All that is kept of a kind, block by block.
    pub fn all(&self, what: DataKind) -> &[u8] {
        self.kinds.iter().find(|kind| kind.what == what).map_or(&[], |kind| &kind.bytes)
    }

    /// How much memory it takes.
    pub fn len(&self) -> u64 {
        self.kinds.iter().map(|kind| kind.bytes.len() as u64).sum()
    }

    /// Whether the copy is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
