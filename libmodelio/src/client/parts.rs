//! Which shard is asked for which pieces of a version, and where they belong. Pure.

use std::ops::Range;

use crate::vocabulary::block_map::PartitionIndex;
use crate::vocabulary::strided::Strided;
use crate::wire::{MAX_PARTS, MAX_PARTS_BYTES};

/// One request to a shard. All of its pieces lie in the shard's blocks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) parts: Vec<Strided>,
    /// Where the answer's bytes belong, in their order.
    pub(super) places: Vec<Range<usize>>,
    pub(super) bytes: usize,
}

/// The requests to all shards.
#[derive(Debug)]
pub(super) struct Asks {
    /// The end of each run of bytes that lie with one shard, and that shard.
    runs: Vec<(u64, PartitionIndex)>,
    of: Vec<Vec<Ask>>,
}

impl Asks {
    /// No requests yet. `owned` has the runs of blocks of each shard.
    pub(super) fn new<'a>(owned: impl Iterator<Item = &'a [Range<u32>]>, block_size: u32) -> Asks {
        let (mut runs, mut shards) = (Vec::new(), 0);
        for (partition, owned) in owned.enumerate() {
            runs.extend(owned.iter().map(|run| (u64::from(run.end) * u64::from(block_size), partition)));
            shards = partition + 1;
        }
        runs.sort_unstable();
        Asks { runs, of: (0..shards).map(|_| Vec::new()).collect() }
    }

    /// The requests, by shard.
    pub(super) fn of(self) -> Vec<Vec<Ask>> {
        self.of
    }

    /// Asks for sound pieces of the model, whose bytes belong at `place` and behind.
    pub(super) fn add(&mut self, part: Strided, mut place: usize) {
        const MOST: u64 = MAX_PARTS_BYTES as u64;
        let mut index = 0;
        while index < part.count {
            let start = part.start + index * part.stride;
            let (end, partition) = self.run(start);
            let fits = part.run <= MOST && start + part.run <= end;
            if fits {
                let room = self.room(partition, part.run);
                let here = (end - start - part.run) / part.stride + 1;
                let count = here.min(room / part.run).min(part.count - index);
                self.push(partition, Strided { start, count, ..part }, &mut place);
                index += count;
                continue;
            }
            // A piece that lies with several shards, or is too long for one request.
            let mut piece = start..start + part.run;
            while !piece.is_empty() {
                let (end, partition) = self.run(piece.start);
                let cut = piece.end.min(end).min(piece.start + self.room(partition, 1));
                self.push(partition, Strided::contiguous(piece.start..cut), &mut place);
                piece.start = cut;
            }
            index += 1;
        }
    }

    /// The run of bytes around `at`: where it ends, and the shard.
    fn run(&self, at: u64) -> (u64, PartitionIndex) {
        self.runs[self.runs.partition_point(|(end, _)| *end <= at)]
    }

    /// The bytes that fit in the newest request to a shard, which is a new one if fewer than `least` do.
    fn room(&mut self, partition: PartitionIndex, least: u64) -> u64 {
        let room = |ask: &Ask| match ask.parts.len() < MAX_PARTS {
            true => u64::from(MAX_PARTS_BYTES) - ask.bytes as u64,
            false => 0,
        };
        let newest = self.of[partition].last().map_or(0, room);
        if newest >= least {
            return newest;
        }
        self.of[partition].push(Ask::default());
        MAX_PARTS_BYTES.into()
    }

    fn push(&mut self, partition: PartitionIndex, part: Strided, place: &mut usize) {
        let Some(ask) = self.of[partition].last_mut() else { return };
        let bytes = (part.run * part.count) as usize;
        let at = *place..*place + bytes;
        match ask.places.last_mut() {
            Some(last) if last.end == at.start => last.end = at.end,
            _ => ask.places.push(at.clone()),
        }
        ask.parts.push(part);
        ask.bytes += bytes;
        *place = at.end;
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const BLOCK: u32 = 64;
    const BLOCKS: u32 = 40_000;

    fn asks(shards: usize, parts: &[Strided]) -> Vec<Vec<Ask>> {
        let of =
            |shard: u32| (shard..BLOCKS).step_by(shards).map(|block| block..block + 1).collect::<Vec<_>>();
        let apart: Vec<Vec<Range<u32>>> = (0..shards as u32).map(of).collect();
        let owned = if shards == 1 { vec![std::iter::once(0..BLOCKS).collect()] } else { apart };
        let mut asks = Asks::new(owned.iter().map(Vec::as_slice), BLOCK);
        let mut place = 0;
        for part in parts {
            asks.add(*part, place);
            place += part.bytes().unwrap() as usize;
        }
        asks.of()
    }

    fn strided() -> impl Strategy<Value = Strided> {
        (0..1u64 << 16, 1..300u64, 0..300u64, 1..200u64).prop_map(|(start, run, gap, count)| Strided {
            start,
            run,
            stride: run + gap,
            count,
        })
    }

    /// The offset in the model that each byte of the output is read from, by the requests, which keep to their limits.
    fn sources(of: &[Vec<Ask>], bytes: usize) -> Vec<u64> {
        let mut sources = vec![u64::MAX; bytes];
        for (shard, ask) in
            of.iter().enumerate().flat_map(|(shard, asks)| asks.iter().map(move |ask| (shard, ask)))
        {
            assert!(ask.parts.len() <= MAX_PARTS && (1..=MAX_PARTS_BYTES as usize).contains(&ask.bytes));
            let from: Vec<u64> = ask.parts.iter().flat_map(Strided::pieces).flatten().collect();
            let to: Vec<usize> = ask.places.iter().cloned().flatten().collect();
            assert!(from.len() == ask.bytes && to.len() == ask.bytes);
            for (from, to) in from.into_iter().zip(to) {
                assert_eq!((from / u64::from(BLOCK)) as usize % of.len(), shard);
                assert_eq!(std::mem::replace(&mut sources[to], from), u64::MAX, "asked for twice");
            }
        }
        sources
    }

    proptest! {
        #[test]
        fn each_byte_is_asked_of_its_shard_once(shards in 1..4usize, parts in vec(strided(), 1..5)) {
            let wanted: Vec<u64> = parts.iter().flat_map(Strided::pieces).flatten().collect();
            prop_assert_eq!(sources(&asks(shards, &parts), wanted.len()), wanted);
        }
    }

    #[test]
    fn long_pieces_and_many_are_several_requests() {
        let model = Strided::contiguous(0..2_000_000);
        let of = asks(1, &[model]);
        assert_eq!(of[0].iter().map(|ask| ask.bytes).collect::<Vec<_>>(), [1 << 20, 2_000_000 - (1 << 20)]);
        let columns = vec![Strided { start: 0, run: 2, stride: 4, count: 1 }; 2 * MAX_PARTS + 1];
        assert_eq!(
            asks(2, &columns)[0].iter().map(|ask| ask.parts.len()).collect::<Vec<_>>(),
            [MAX_PARTS, MAX_PARTS, 1]
        );
        assert!(asks(2, &columns)[1].is_empty());
        let rows = Strided { start: 0, run: 4, stride: 8, count: 600_000 >> 1 };
        assert_eq!(asks(1, &[rows])[0].len(), 2, "strided pieces take one place each in a request");
    }
}
