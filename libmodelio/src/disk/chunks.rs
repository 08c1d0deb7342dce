//! The parts of a disk, chunk by chunk: which of them the disk's own memory holds, and which changed since a version
//! was published (pure).

use std::ops::Range;

use fixedbitset::FixedBitSet;

use crate::vocabulary::ids::Version;

/// The memory that has the present bytes of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The disk's own.
    Memory,
    /// The version that unwritten bytes are read from.
    Version,
}

/// A write that has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Begun {
    chunks: Range<usize>,
    /// The number of publications before it.
    publications: u64,
}

/// The chunks of a disk. A chunk that the memory does not hold is as in the version.
#[derive(Debug)]
pub(super) struct Chunks {
    size: u64,
    /// The length of a chunk, in bytes.
    chunk: u64,
    /// The version that unwritten bytes are read from. A held chunk that did not change equals it.
    version: Version,
    held: FixedBitSet,
    /// Chunks that were written since the last publication began. All are held.
    changed: FixedBitSet,
    /// Chunks that are being published, if some are.
    leaving: Option<FixedBitSet>,
    /// The writes that have begun and are not over.
    writes: Vec<Begun>,
    publications: u64,
}

impl Chunks {
    /// `size` bytes, which are those of `version`, in chunks of `chunk` bytes.
    pub(super) fn new(size: u64, chunk: u64, version: Version) -> Chunks {
        let none = FixedBitSet::with_capacity(size.div_ceil(chunk) as usize);
        let (held, changed) = (none.clone(), none);
        Chunks { size, chunk, version, held, changed, leaving: None, writes: Vec::new(), publications: 0 }
    }

    /// The version that unwritten bytes are read from.
    pub(super) fn version(&self) -> Version {
        self.version
    }

    /// Whether something changed that is in no version yet.
    pub(super) fn is_changed(&self) -> bool {
        self.leaving.is_some() || !self.changed.is_clear()
    }

    /// Whether a publication is on its way.
    pub(super) fn is_publishing(&self) -> bool {
        self.leaving.is_some()
    }

    /// `newest` is the newest version now. Returns whether unwritten bytes are to be read from it from now on: somebody
    /// else has published it. While a publication is on its way, it may be that one's.
    pub(super) fn see(&mut self, newest: Version) -> bool {
        if !self.would_see(newest) {
            return false;
        }
        self.version = newest;
        self.forget();
        true
    }

    /// Whether [`Self::see`] would say so.
    pub(super) fn would_see(&self, newest: Version) -> bool {
        self.leaving.is_none() && newest > self.version
    }

    /// Forgets chunks that may differ from the version, but for what is written here.
    fn forget(&mut self) {
        let mut kept = self.changed.clone();
        for write in &self.writes {
            kept.insert_range(write.chunks.clone());
        }
        self.held.intersect_with(&kept);
    }

    /// The chunks of `bytes`, which may be empty.
    fn of(&self, bytes: &Range<u64>) -> Range<usize> {
        let end = bytes.end.div_ceil(self.chunk);
        (bytes.start / self.chunk).min(end) as usize..end as usize
    }

    fn bytes_of(&self, chunk: usize) -> Range<u64> {
        let start = chunk as u64 * self.chunk;
        start..self.size.min(start + self.chunk)
    }

    /// `bytes` are going to be written. `fill` gets the ranges that must be copied from the version into the memory
    /// first: chunks that it does not hold.
    pub(super) fn write(&mut self, bytes: &Range<u64>, fill: impl FnMut(Range<u64>)) -> Begun {
        let chunks = self.of(bytes);
        self.hold(chunks.clone(), fill);
        self.changed.insert_range(chunks.clone());
        let begun = Begun { chunks, publications: self.publications };
        self.writes.push(begun.clone());
        begun
    }

    fn hold(&mut self, chunks: Range<usize>, mut fill: impl FnMut(Range<u64>)) {
        for chunk in chunks {
            if !self.held.put(chunk) {
                fill(self.bytes_of(chunk));
            }
        }
    }

    /// Like [`Self::write`] for a write that is done before anything else happens: chunks that are written whole need
    /// not be filled.
    pub(super) fn write_at_once(&mut self, bytes: &Range<u64>, fill: impl FnMut(Range<u64>)) {
        let whole = bytes.start.div_ceil(self.chunk) as usize..if bytes.end == self.size {
            self.held.len()
        } else {
            (bytes.end / self.chunk) as usize
        };
        if whole.start < whole.end {
            self.held.insert_range(whole);
        }
        let begun = self.write(bytes, fill);
        self.wrote(&begun);
    }

    /// The write is over. Bytes of it may have come after a publication that has begun meanwhile.
    pub(super) fn wrote(&mut self, begun: &Begun) {
        if let Some(index) = self.writes.iter().position(|write| write == begun) {
            self.writes.swap_remove(index);
        }
        if begun.publications != self.publications {
            self.changed.insert_range(begun.chunks.clone());
        }
    }

    /// The memory that has `bytes`, piece by piece, in their order.
    pub(super) fn read(&self, bytes: Range<u64>, mut piece: impl FnMut(Range<u64>, Source)) {
        let source = |chunk| if self.held.contains(chunk) { Source::Memory } else { Source::Version };
        let chunks = self.of(&bytes);
        let mut start = bytes.start;
        for chunk in chunks.clone() {
            let is_last = chunk + 1 == chunks.end;
            if is_last || source(chunk) != source(chunk + 1) {
                let end = bytes.end.min(self.bytes_of(chunk).end);
                piece(start..end, source(chunk));
                start = end;
            }
        }
    }

    /// Prepares a publication: fills blocks, of `block` bytes each, in which something changed, until that has taken
    /// `most` bytes. Returns whether all are filled. [`Self::publish`] fills the rest at once.
    pub(super) fn prepare(&mut self, block: u64, most: u64, mut fill: impl FnMut(Range<u64>)) -> bool {
        let (mut filled, mut end) = (0, 0);
        for chunk in self.changed.ones() {
            let start = self.bytes_of(chunk).start / block * block;
            if start < end {
                continue;
            }
            end = self.size.min(start + block);
            for chunk in self.of(&(start..end)) {
                if filled >= most {
                    return false;
                }
                if !self.held.put(chunk) {
                    let gap = self.bytes_of(chunk);
                    filled += gap.end - gap.start;
                    fill(gap);
                }
            }
        }
        true
    }

    /// Begins a publication. Returns the blocks, of `block` bytes each, in which something changed; none if nothing
    /// did, or a publication is on its way. They are at most `most` runs of adjacent blocks: if there are more, blocks
    /// between them are published, too. `fill` gets the ranges of them that must be copied from the version into the
    /// memory first.
    pub(super) fn publish(
        &mut self,
        block: u64,
        most: usize,
        mut fill: impl FnMut(Range<u64>),
    ) -> Option<FixedBitSet> {
        if self.leaving.is_some() || self.changed.is_clear() {
            return None;
        }
        self.publications += 1;
        let none = FixedBitSet::with_capacity(self.changed.len());
        let leaving = std::mem::replace(&mut self.changed, none);
        let mut blocks = FixedBitSet::with_capacity(self.size.div_ceil(block) as usize);
        for chunk in leaving.ones() {
            let bytes = self.bytes_of(chunk);
            blocks.insert_range((bytes.start / block) as usize..bytes.end.div_ceil(block) as usize);
        }
        let mut group = 1;
        while runs(&blocks) > most {
            group *= 2;
            for first in (0..blocks.len()).step_by(group) {
                let group = first..blocks.len().min(first + group);
                if blocks.contains_any_in_range(group.clone()) {
                    blocks.insert_range(group);
                }
            }
        }
        for index in blocks.ones() {
            let start = index as u64 * block;
            let chunks = self.of(&(start..self.size.min(start + block)));
            self.hold(chunks, &mut fill);
        }
        self.leaving = Some(leaving);
        Some(blocks)
    }

    /// The publication was refused, or may have been: its chunks are published again with the next one.
    pub(super) fn refused(&mut self) {
        if let Some(leaving) = self.leaving.take() {
            self.changed.union_with(&leaving);
        }
    }

    /// The publication is in a version, and `newest` is the newest one that can be read. Returns whether unwritten
    /// bytes are to be read from it from now on.
    pub(super) fn published(&mut self, newest: Version) -> bool {
        if newest <= self.version {
            // The version that has it cannot be read yet.
            self.refused();
            return false;
        }
        self.leaving = None;
        if newest != self.version.next() {
            // Somebody else has published, too.
            self.forget();
        }
        self.version = newest;
        true
    }
}

/// The number of runs of adjacent members.
fn runs(of: &FixedBitSet) -> usize {
    of.ones().filter(|&index| index == 0 || !of.contains(index - 1)).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CHUNK: u64 = 4;
    const BLOCK: u64 = 8;
    const SIZE: u64 = 30;

    /// A disk of single bytes, and what may be read from it.
    struct Model {
        chunks: Chunks,
        memory: Vec<u32>,
        versions: Vec<Vec<u32>>,
        /// The value that was written last to each byte, and what others have published since.
        allowed: Vec<Vec<u32>>,
        /// The blocks of a publication that is on its way.
        coming: Option<FixedBitSet>,
        /// Writes that have begun.
        writes: Vec<(Range<u64>, Begun, u32)>,
    }

    fn slots(bytes: &Range<u64>) -> Range<usize> {
        bytes.start as usize..bytes.end as usize
    }

    impl Model {
        fn new() -> Model {
            let first = vec![0; SIZE as usize];
            Model {
                chunks: Chunks::new(SIZE, CHUNK, Version(0)),
                // What the memory has before it is filled must never be seen.
                memory: vec![u32::MAX; SIZE as usize],
                versions: vec![first],
                allowed: vec![vec![0]; SIZE as usize],
                coming: None,
                writes: Vec::new(),
            }
        }

        fn newest(&self) -> Version {
            Version(self.versions.len() as u64 - 1)
        }

        fn begin(&mut self, bytes: Range<u64>, value: u32) {
            self.chunks.see(self.newest());
            let base = &self.versions[self.chunks.version().0 as usize];
            let memory = &mut self.memory;
            let fill = |gap: Range<u64>| memory[slots(&gap)].copy_from_slice(&base[slots(&gap)]);
            let begun = self.chunks.write(&bytes, fill);
            self.writes.push((bytes, begun, value));
        }

        /// The oldest write that has begun stores its bytes, and is over.
        fn finish(&mut self) {
            if self.writes.is_empty() {
                return;
            }
            let (bytes, begun, value) = self.writes.remove(0);
            self.store(&bytes, value);
            self.chunks.wrote(&begun);
        }

        fn at_once(&mut self, bytes: Range<u64>, value: u32) {
            self.chunks.see(self.newest());
            let base = &self.versions[self.chunks.version().0 as usize];
            let memory = &mut self.memory;
            let fill = |gap: Range<u64>| memory[slots(&gap)].copy_from_slice(&base[slots(&gap)]);
            self.chunks.write_at_once(&bytes, fill);
            self.store(&bytes, value);
        }

        fn store(&mut self, bytes: &Range<u64>, value: u32) {
            self.memory[slots(bytes)].fill(value);
            self.allowed[slots(bytes)].fill(vec![value]);
        }

        /// Somebody else publishes a version.
        fn others(&mut self, value: u32) {
            self.versions.push(vec![value; SIZE as usize]);
            self.allowed.iter_mut().for_each(|allowed| allowed.push(value));
        }

        fn publish(&mut self, prepares: bool) {
            self.chunks.see(self.newest());
            let base = &self.versions[self.chunks.version().0 as usize];
            let memory = &mut self.memory;
            let mut fill = |gap: Range<u64>| memory[slots(&gap)].copy_from_slice(&base[slots(&gap)]);
            if prepares {
                while !self.chunks.prepare(BLOCK, 1, &mut fill) {}
            }
            if let Some(blocks) = self.chunks.publish(BLOCK, 2, fill) {
                self.coming = Some(blocks);
            }
        }

        /// The shard makes the version.
        fn conclude(&mut self, outcome: bool) {
            let Some(blocks) = self.coming.take() else { return };
            if !outcome {
                return self.chunks.refused();
            }
            let mut next = self.versions.last().unwrap().clone();
            for block in blocks.ones().map(|block| block as u64 * BLOCK) {
                let bytes = slots(&(block..SIZE.min(block + BLOCK)));
                next[bytes.clone()].copy_from_slice(&self.memory[bytes]);
            }
            self.versions.push(next);
            assert!(self.chunks.published(self.newest()));
        }

        fn read(&self, bytes: Range<u64>) -> Vec<u32> {
            let base = &self.versions[self.chunks.version().0 as usize];
            let mut read = Vec::new();
            let mut at = bytes.start;
            self.chunks.read(bytes.clone(), |piece, source| {
                assert_eq!(piece.start, at);
                at = piece.end;
                read.extend_from_slice(match source {
                    Source::Memory => &self.memory[slots(&piece)],
                    Source::Version => &base[slots(&piece)],
                });
            });
            assert_eq!(at, bytes.end);
            read
        }

        fn check(&self) {
            // A byte that a write has begun to change may be anything in between.
            let unsure = |at: usize| self.writes.iter().any(|(bytes, ..)| slots(bytes).contains(&at));
            for (at, got) in self.read(0..SIZE).into_iter().enumerate() {
                assert!(
                    self.allowed[at].contains(&got) || unsure(at),
                    "{at}: {got}, not {:?}",
                    self.allowed[at]
                );
            }
        }
    }

    fn ranges() -> impl Strategy<Value = Range<u64>> {
        (0..SIZE, 1..=SIZE).prop_map(|(start, len)| start..SIZE.min(start + len))
    }

    proptest! {
        #[test]
        fn a_disk_reads_what_was_written_last_and_publishes_all_of_it(
            steps in prop::collection::vec((0..7_u8, ranges()), 1..60)
        ) {
            let mut model = Model::new();
            for (value, (step, bytes)) in (1..).zip(steps) {
                match step {
                    0 => model.begin(bytes, value),
                    1 => model.finish(),
                    2 => model.at_once(bytes, value),
                    3 => model.publish(value % 2 == 0),
                    4 => model.conclude(true),
                    5 => model.conclude(false),
                    _ => model.others(1000 + value),
                }
                model.check();
            }
            while !model.writes.is_empty() {
                model.finish();
            }
            model.conclude(true);
            model.publish(false);
            model.conclude(true);
            prop_assert!(!model.chunks.is_changed());
            model.chunks.see(model.newest());
            model.check();
            prop_assert_eq!(&model.read(0..SIZE), model.versions.last().unwrap());
        }
    }

    #[test]
    fn unwritten_bytes_are_those_of_the_newest_version() {
        let mut model = Model::new();
        model.begin(1..2, 7);
        model.finish();
        model.others(9);
        assert!(model.chunks.see(model.newest()) && !model.chunks.see(model.newest()));
        // What is written stays, with the chunk that it is in.
        assert_eq!(model.read(0..6), [0, 7, 0, 0, 9, 9]);
        // Somebody else publishes while a publication is on its way.
        model.publish(false);
        model.others(9);
        assert!(!model.chunks.see(model.newest()));
        model.conclude(true);
        assert_eq!(model.read(0..10), [0, 7, 0, 0, 9, 9, 9, 9, 9, 9]);
        assert!(!model.chunks.is_changed());
    }

    #[test]
    fn scattered_blocks_are_published_with_those_between_them() {
        let mut chunks = Chunks::new(64, 4, Version(0));
        for start in [0, 20, 24, 60] {
            let begun = chunks.write(&(start..start + 1), |_| {});
            chunks.wrote(&begun);
        }
        let blocks = chunks.publish(4, 2, |_| {}).unwrap();
        assert_eq!(blocks.ones().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]);
        chunks.refused();
        let blocks = chunks.publish(4, 3, |_| {}).unwrap();
        assert_eq!(blocks.ones().collect::<Vec<_>>(), [0, 5, 6, 15]);
    }

    #[test]
    fn a_version_that_cannot_be_read_yet_keeps_its_chunks() {
        let mut model = Model::new();
        model.begin(0..4, 7);
        model.finish();
        model.publish(false);
        assert!(!model.chunks.published(Version(0)) && model.chunks.is_changed());
        assert_eq!(model.read(0..5), [7, 7, 7, 7, 0]);
    }
}
