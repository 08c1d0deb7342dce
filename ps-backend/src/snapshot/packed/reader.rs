//! A snapshot in a store as a [`Source`]. Each piece is compared with its hash as it comes.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::wire::DataKind;
use parking_lot::Mutex;

use super::description::Description;
use super::places::{Place, Places, hash_of};
use crate::partition::store::kept_range;
use crate::snapshot::{Head, Piece, Sink, SnapshotError, Source, send_each};
use crate::stores::Objects;

/// What is read at once. A request to an object store costs a round trip.
const WINDOW_BYTES: u64 = 32 << 20;
/// Windows that are held: shards load at somewhat different paces.
const WINDOWS: usize = 4;
/// Requests for one window that are under way at once.
const REQUESTS: usize = 4;

/// A piece among all data of its kind.
#[derive(Debug)]
struct Extent {
    bytes: Range<u64>,
    piece: Piece,
}

/// Data of a kind that were read.
#[derive(Debug)]
struct Window {
    kind: DataKind,
    start: u64,
    bytes: Vec<u8>,
}

/// A snapshot in a store.
#[derive(Debug)]
pub struct PackedReader {
    store: Arc<dyn Objects>,
    description: Description,
    /// In blocks of the size that is asked for.
    layout: ModelLayout,
    extents: BTreeMap<DataKind, Vec<Extent>>,
    windows: Mutex<VecDeque<Arc<Window>>>,
    /// Held while a window is read, so that nobody reads it a second time.
    reading: Mutex<()>,
}

impl PackedReader {
    /// A snapshot, to be read in blocks of `block_size`, or of its own block size.
    ///
    /// # Errors
    /// [`SnapshotError`] for a block size that does not suit the model.
    pub fn new(
        store: Arc<dyn Objects>,
        description: Description,
        block_size: Option<u32>,
    ) -> Result<PackedReader, SnapshotError> {
        let head = &description.head;
        let stored = head.layout(head.block_size)?;
        let layout = match block_size {
            Some(block_size) => head.layout(block_size)?,
            None => stored.clone(),
        };
        let mut extents: BTreeMap<DataKind, Vec<Extent>> = BTreeMap::new();
        for (piece, _) in description.places.pieces() {
            let bytes = kept_range(&stored, piece.0, piece.1);
            extents.entry(piece.1).or_default().push(Extent { bytes, piece });
        }
        Ok(PackedReader {
            store,
            description,
            layout,
            extents,
            windows: Mutex::default(),
            reading: Mutex::new(()),
        })
    }

    /// The store.
    pub fn store(&self) -> &Arc<dyn Objects> {
        &self.store
    }

    /// Where its pieces lie.
    pub(super) fn places(&self) -> &Places {
        &self.description.places
    }

    /// The subject of the snapshot.
    pub fn head(&self) -> &Head {
        &self.description.head
    }

    /// The model.
    pub fn layout(&self) -> &ModelLayout {
        &self.layout
    }

    /// Whether it is read in blocks of its own size.
    pub fn has_its_own_blocks(&self) -> bool {
        self.layout.block_size() == self.head().block_size
    }

    /// Bytes that [`Self::verify`] reads.
    pub fn len(&self) -> u64 {
        self.description.places.pieces().map(|(_, place)| u64::from(place.bytes)).sum()
    }

    /// Whether the snapshot has no data.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Compares all pieces with their hashes. Calls `read` with the number of bytes that were read; it can return an
    /// interruption.
    ///
    /// # Errors
    /// [`SnapshotError::Damaged`] names the pack and the block.
    pub fn verify(
        &self,
        read: &mut dyn FnMut(u64) -> Result<(), SnapshotError>,
    ) -> Result<(), SnapshotError> {
        for extents in self.extents.values() {
            let mut at = 0;
            while at < extents.len() {
                let some = &extents[window(extents, at)];
                self.fetch(some)?;
                at += some.len();
                read(some.iter().map(|extent| extent.bytes.end - extent.bytes.start).sum())?;
            }
        }
        Ok(())
    }

    /// Fills a buffer with a piece, or leaves it empty where that is zero.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn piece(&self, (block, kind): Piece, bytes: &mut Vec<u8>) -> Result<(), SnapshotError> {
        bytes.clear();
        let Range { start, end } = kept_range(&self.layout, block, kind);
        let extents = self.extents.get(&kind).map_or(&[][..], Vec::as_slice);
        let mut at = extents.partition_point(|extent| extent.bytes.end <= start);
        while let Some(extent) = extents.get(at).filter(|extent| extent.bytes.start < end) {
            bytes.resize((end - start) as usize, 0);
            let (from, to) = (start.max(extent.bytes.start), end.min(extent.bytes.end));
            let window = self.window(extents, at)?;
            let there = (from - window.start) as usize..(to - window.start) as usize;
            bytes[(from - start) as usize..(to - start) as usize].copy_from_slice(&window.bytes[there]);
            at += 1;
        }
        Ok(())
    }

    /// The window with this extent: one that was read before, or the one that begins there.
    fn window(&self, extents: &[Extent], at: usize) -> Result<Arc<Window>, SnapshotError> {
        let Extent { bytes, piece: (_, kind) } = &extents[at];
        let has = |window: &&Arc<Window>| {
            let all = window.start..window.start + window.bytes.len() as u64;
            window.kind == *kind && all.contains(&bytes.start) && bytes.end <= all.end
        };
        let known = || self.windows.lock().iter().find(has).cloned();
        if let Some(found) = known() {
            return Ok(found);
        }
        let _reading = self.reading.lock();
        if let Some(found) = known() {
            return Ok(found);
        }
        let fetched = Arc::new(self.fetch(&extents[window(extents, at)])?);
        let mut windows = self.windows.lock();
        windows.truncate(WINDOWS - 1);
        windows.push_front(Arc::clone(&fetched));
        Ok(fetched)
    }

    /// Reads extents, with few requests: what lies together in a pack comes together.
    fn fetch(&self, extents: &[Extent]) -> Result<Window, SnapshotError> {
        let (first, last) = (&extents[0], &extents[extents.len() - 1]);
        let (kind, start) = (first.piece.1, first.bytes.start);
        let mut bytes = vec![0; (last.bytes.end - start) as usize];
        let mut rooms: Vec<(&Place, &str, Piece, &mut [u8])> = Vec::with_capacity(extents.len());
        let (mut left, mut at) = (bytes.as_mut_slice(), start);
        for extent in extents {
            let (_, behind) = left.split_at_mut((extent.bytes.start - at) as usize);
            let (room, behind) = behind.split_at_mut((extent.bytes.end - extent.bytes.start) as usize);
            (left, at) = (behind, extent.bytes.end);
            let found = self.description.places.of(extent.piece);
            let (place, pack) = found.ok_or_else(|| SnapshotError::Invalid("a piece has no place".into()))?;
            rooms.push((place, &pack.name, extent.piece, room));
        }
        rooms.sort_unstable_by_key(|(place, ..)| (place.pack, place.offset));
        let follows = |(before, ..): &(&Place, &str, Piece, &mut [u8]),
                       (next, ..): &(&Place, &str, Piece, &mut [u8])| {
            before.pack == next.pack && before.offset + u64::from(before.bytes) == next.offset
        };
        let runs: Vec<_> = rooms.chunk_by_mut(follows).collect();
        let (left, failed) = (Mutex::new(runs), Mutex::new(Ok(())));
        std::thread::scope(|scope| {
            for _ in 0..REQUESTS {
                scope.spawn(|| {
                    loop {
                        let next = left.lock().pop();
                        let Some(run) = next else { return };
                        if let Err(error) = self.fetch_run(run) {
                            *failed.lock() = Err(error);
                            left.lock().clear();
                        }
                    }
                });
            }
        });
        failed.into_inner()?;
        Ok(Window { kind, start, bytes })
    }

    /// Reads pieces that lie one behind the other in a pack.
    fn fetch_run(&self, run: &mut [(&Place, &str, Piece, &mut [u8])]) -> Result<(), SnapshotError> {
        let Some(&mut (Place { offset, .. }, name, ..)) = run.first_mut() else { return Ok(()) };
        let mut bytes = vec![0; run.iter().map(|(.., room)| room.len()).sum()];
        self.store.read_at(name, *offset, &mut bytes)?;
        let mut left = bytes.as_slice();
        for (place, _, piece, room) in run {
            let (now, behind) = left.split_at(room.len());
            if hash_of(now) != place.hash {
                return Err(place.damaged(*piece, name));
            }
            room.copy_from_slice(now);
            left = behind;
        }
        Ok(())
    }
}

/// The extents of the window that begins with one.
fn window(extents: &[Extent], at: usize) -> Range<usize> {
    let start = extents[at].bytes.start;
    let count = extents[at..].partition_point(|extent| extent.bytes.end <= start + WINDOW_BYTES);
    at..at + count.max(1)
}

impl Source for PackedReader {
    fn send(
        &mut self,
        wanted: &mut dyn Iterator<Item = Piece>,
        sink: &mut dyn Sink,
    ) -> Result<(), SnapshotError> {
        send_each(wanted, sink, |piece, bytes| self.piece(piece, bytes))
    }
}
