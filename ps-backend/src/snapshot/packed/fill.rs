//! The memory of a partition is filled from a snapshot in a store. Several threads read, compare what they read with its
//! hashes, and copy it to its place.

use libmodelio::bytes::pages::Pages;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::DataKind;
use parking_lot::Mutex;

use super::places::{Place, hash_of};
use super::reader::PackedReader;
use crate::partition::store::{PartitionStore, kept_range};
use crate::snapshot::{Load, Piece, Sink as _, SnapshotError, all_kinds};

/// The most threads that read: while some wait for the store, others compute.
const THREADS: usize = 4;
/// What a thread reads at once, if a piece is not longer. A request to an object store costs a round trip.
const READ_BYTES: u64 = 8 << 20;

/// A piece that is wanted, and the name of its pack.
type Wanted<'a> = (Piece, Place, &'a str);

/// Told of bytes that are there. It can return an interruption.
type Told<'a> = dyn Fn(u64) -> Result<(), SnapshotError> + Sync + 'a;

/// The filling of a partition that begins at the version of a snapshot.
pub struct Filling<'a> {
    reader: &'a PackedReader,
    store: &'a PartitionStore,
    told: &'a Told<'a>,
}

impl<'a> Filling<'a> {
    /// Begins.
    pub fn of(reader: &'a PackedReader, store: &'a PartitionStore, told: &'a Told<'a>) -> Filling<'a> {
        Filling { reader, store, told }
    }

    /// Fills the partition, with the state of `optimizer`.
    ///
    /// # Errors
    /// [`SnapshotError::Damaged`] names the pack and the block; [`SnapshotError::Invalid`] if the snapshot has blocks of
    /// another size.
    pub fn run(&self, optimizer: Reducer) -> Result<(), SnapshotError> {
        let (reader, partition) = (self.reader, self.store.partition());
        let (ours, theirs) = (partition.layout().block_size(), reader.head().block_size);
        if ours != theirs {
            return Err(SnapshotError::Invalid(format!("its blocks have {theirs} bytes, not {ours}")));
        }
        let lengths = || reader.places().pieces().map(|(_, place)| u64::from(place.bytes));
        let (longest, all) = (lengths().max().unwrap_or(0), lengths().sum::<u64>());
        // A small model takes little memory for it.
        let room = |_| Pages::new(longest.max(READ_BYTES.min(all)) as usize);
        let threads = (all.div_ceil(READ_BYTES) as usize).clamp(1, THREADS);
        let mut rooms = (0..threads).map(room).collect::<Result<Vec<_>, _>>()?;
        std::thread::scope(|scope| {
            // Without it, the pages are taken at the end.
            let takes = || self.store.take_later_pages();
            let _ = std::thread::Builder::new().name("takes-pages".into()).spawn_scoped(scope, takes);
            // The weights of a block come before its other data.
            for what in all_kinds(optimizer) {
                let wanted = self.wanted(what)?;
                self.read_all(&runs(&wanted), &mut rooms)?;
            }
            Ok(())
        })
    }

    /// The places of the partition's data of a kind, in the order of the packs.
    fn wanted(&self, what: DataKind) -> Result<Vec<Wanted<'a>>, SnapshotError> {
        let mut wanted: Vec<Wanted<'a>> = Vec::new();
        for (local, &block) in (0..).map(BlockId).zip(self.store.partition().blocks()) {
            // A mount has brought it.
            if self.store.has_loaded(local, what) {
                continue;
            }
            match self.reader.places().of((block, what)) {
                Some((place, pack)) => wanted.push(((block, what), *place, &pack.name)),
                None if kept_range(self.reader.layout(), block, what).is_empty() => {}
                None => Load::of(self.store).take((block, what), &[])?,
            }
        }
        wanted.sort_unstable_by_key(|(_, place, _)| (place.pack, place.offset));
        Ok(wanted)
    }

    /// Reads on several threads, of which each has its room.
    fn read_all(&self, runs: &[&[Wanted<'_>]], rooms: &mut [Pages]) -> Result<(), SnapshotError> {
        let (left, failed) = (Mutex::new(runs.iter()), Mutex::new(None));
        let work = |room: &mut Pages| {
            loop {
                let Some(run) = left.lock().next() else { return };
                if failed.lock().is_some() {
                    return;
                }
                if let Err(error) = self.read(run, room).and_then(self.told) {
                    failed.lock().get_or_insert(error);
                }
            }
        };
        std::thread::scope(|scope| rooms.iter_mut().for_each(|room| drop(scope.spawn(|| work(room)))));
        failed.into_inner().map_or(Ok(()), Err)
    }

    /// Reads pieces that lie one behind the other in a pack, and puts them in their places. Returns their bytes.
    fn read(&self, run: &[Wanted<'_>], room: &mut Pages) -> Result<u64, SnapshotError> {
        let Some((_, first, pack)) = run.first() else { return Ok(0) };
        let bytes = &mut room[..run.iter().map(|(_, place, _)| place.bytes as usize).sum()];
        self.reader.store().read_at(pack, first.offset, bytes)?;
        let (mut load, mut left) = (Load::of(self.store), &*bytes);
        for (piece, place, pack) in run {
            let (now, behind) = left.split_at(place.bytes as usize);
            if hash_of(now) != place.hash {
                return Err(place.damaged(*piece, pack));
            }
            load.take(*piece, now)?;
            left = behind;
        }
        Ok(bytes.len() as u64)
    }
}

/// What lies one behind the other, in parts that are read at once.
fn runs<'a, 'b>(wanted: &'b [Wanted<'a>]) -> Vec<&'b [Wanted<'a>]> {
    let mut read = 0;
    let goes_on = |(_, before, _): &Wanted<'_>, (_, next, _): &Wanted<'_>| {
        read += u64::from(before.bytes);
        let is_behind = before.pack == next.pack && before.offset + u64::from(before.bytes) == next.offset;
        let goes_on = is_behind && read + u64::from(next.bytes) <= READ_BYTES;
        read = if goes_on { read } else { 0 };
        goes_on
    };
    wanted.chunk_by(goes_on).collect()
}
