//! Values of blocks that are written in part, against a copy of the model's bytes.

#![allow(clippy::single_range_in_vec_init)] // Lists of ranges that happen to have one.

use std::ops::Range;
use std::sync::Arc;

use common::{encode, initial_weights, noise};
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::Work;
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use ps_backend::partition::store::{BlockInput, Home, Limits, PartitionJob, PartitionStore, Payload};
use ps_backend::state_copies::StateCopies;
use test_devices::one_by_one::OneByOne;

use crate::common;
use crate::driver::{
    bytes_of, checked, conclude, loaded, loaded_with, model, partition_of, reduces_all, step,
};

/// Which blocks, by bit; how much of a block is written, in words of four bytes, from where, and how often; all of it
/// if nothing is said.
type Draw = (u16, Option<Vec<(u16, u16)>>);

#[derive(Clone, Debug)]
struct Plan {
    sources: Vec<Draw>,
    /// Of a sum: it is dropped when it is there.
    dropped: bool,
    /// The first payload of a block comes straight into the sum where it can.
    in_place: bool,
}

fn plan() -> impl Strategy<Value = Plan> {
    let pieces = prop::collection::vec((0..17_000u16, 1..3000u16), 1..5);
    let sources = prop::collection::vec((any::<u16>(), prop::option::weighted(0.8, pieces)), 0..5);
    (sources, prop::bool::weighted(0.2), any::<bool>()).prop_map(|(sources, dropped, in_place)| Plan {
        sources,
        dropped,
        in_place,
    })
}

struct Bench {
    store: PartitionStore,
    layout: ModelLayout,
    expected: Vec<u8>,
    version: Version,
    seed: usize,
}

/// What one source sends of a block.
struct Sent {
    block: BlockId,
    bytes: Vec<u8>,
    written: Option<Vec<Range<u32>>>,
}

impl Bench {
    fn new(layout: ModelLayout) -> Bench {
        let expected = initial_weights(&layout);
        let store = loaded(&layout, Reducer::Assign, &expected);
        Bench { store, layout, expected, version: Version(0), seed: 0 }
    }

    /// By source.
    fn sent(&mut self, plan: &Plan) -> Vec<Vec<Sent>> {
        let sources = plan.sources.iter().map(|(bits, pieces)| {
            self.seed += 1;
            let seed = self.seed;
            // Unwritten bytes are garbage where other data may lie.
            let all = encode(&self.layout, seed as u8, |i| noise(seed, i));
            let blocks = (0..self.layout.blocks()).filter(|block| bits >> (block % 16) & 1 == 1).map(BlockId);
            let sent = blocks.map(|block| {
                let bytes = all[bytes_of(&self.layout, block)].to_vec();
                let written = pieces.as_ref().map(|pieces| {
                    let mut written = Vec::new();
                    for &(from, words) in pieces {
                        // Some of it may be behind the end of a short block.
                        let from = 4 * u32::from(from);
                        libmodelio::vocabulary::ranges::insert(
                            &mut written,
                            from..from + 4 * u32::from(words),
                        );
                    }
                    written
                });
                Sent { block, bytes, written }
            });
            sent.collect()
        });
        sources.collect()
    }

    fn is_expected(&mut self, sent: &[Vec<Sent>]) {
        for Sent { block, bytes, written } in sent.iter().flatten() {
            let there = &mut self.expected[bytes_of(&self.layout, *block)];
            for range in written.clone().unwrap_or_else(|| vec![0..bytes.len() as u32]) {
                let range = (range.start as usize).min(bytes.len())..(range.end as usize).min(bytes.len());
                there[range.clone()].copy_from_slice(&bytes[range]);
            }
        }
    }

    fn add(job: &Arc<PartitionJob>, Sent { block, bytes, written }: &Sent, in_place: bool) {
        if in_place && let Some(mut target) = job.destination(*block, Form::Plain).unwrap() {
            target.bytes().copy_from_slice(bytes);
            assert!(target.complete(written.as_deref()));
            return;
        }
        assert!(job.add_written(*block, Payload::Plain(bytes), written.as_deref()).unwrap());
    }

    /// Adds up payloads for the next version, and shows nothing yet.
    fn keep(&mut self, plan: &Plan) -> Option<Vec<Vec<Sent>>> {
        let sent = self.sent(plan);
        let work = Work::Add { combine: Reducer::Assign.combine() };
        let job = self.store.begin(self.version, work, true).unwrap();
        sent.iter().flatten().for_each(|sent| Bench::add(&job, sent, plan.in_place));
        if plan.dropped {
            job.give_up();
            return None;
        }
        drop(conclude(&self.store, &job).unwrap());
        Some(sent)
    }

    /// New weights come in between: of one block, all of it.
    fn assign(&mut self) {
        let plan = Plan { sources: vec![(2, None)], dropped: false, in_place: false };
        let sent = self.sent(&plan);
        let job = self.store.begin(self.version, Work::Assign { token: 0 }, true).unwrap();
        for block in (0..self.layout.blocks()).map(BlockId) {
            let new = sent.iter().flatten().find(|sent| sent.block == block);
            assert!(job.finish(block, new.map(|sent| Payload::Plain(&sent.bytes))).unwrap());
        }
        conclude(&self.store, &job).unwrap();
        self.version = self.version.next();
        self.is_expected(&sent);
    }

    fn reduce(&mut self, plan: &Plan, kept: &[Vec<Vec<Sent>>]) {
        let sent = self.sent(plan);
        let work = reduces_all(&self.store, step(Reducer::Assign, 1), false);
        let job = self.store.begin(self.version, work, true).unwrap();
        for block in (0..self.layout.blocks()).map(BlockId) {
            let of_block: Vec<_> = sent.iter().flatten().filter(|sent| sent.block == block).collect();
            match of_block.split_last() {
                None => assert!(job.finish(block, None).unwrap()),
                Some((Sent { bytes, written, .. }, before)) => {
                    before.iter().for_each(|sent| Bench::add(&job, sent, plan.in_place));
                    let last = BlockInput { written: written.as_deref(), ..checked(bytes) };
                    assert_eq!(job.finish_all(block, &[last]).unwrap(), None);
                }
            }
        }
        conclude(&self.store, &job).unwrap();
        self.version = self.version.next();
        kept.iter().for_each(|sent| self.is_expected(sent));
        self.is_expected(&sent);
    }

    fn check(&self) -> TestCaseResult {
        let newest = self.store.newest().unwrap();
        prop_assert_eq!(newest.version(), self.version);
        for block in (0..self.layout.blocks()).map(BlockId) {
            let (there, expected) = (newest.block(block), &self.expected[bytes_of(&self.layout, block)]);
            let wrong = there.iter().zip(expected).position(|(there, expected)| there != expected);
            prop_assert_eq!(wrong, None, "version {}, block {}", self.version, block);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_not_written_takes_no_part_in_assign(
        rounds in prop::collection::vec((prop::collection::vec(plan(), 0..4), any::<bool>(), plan()), 1..5),
    ) {
        let mut bench = Bench::new(model());
        for (adds, assigns, reduce) in rounds {
            let kept: Vec<_> = adds.iter().filter_map(|plan| bench.keep(plan)).collect();
            bench.check()?;
            if assigns {
                bench.assign();
                bench.check()?;
            }
            bench.reduce(&reduce, &kept);
            bench.check()?;
        }
    }
}

/// Half precision keeps what an fp32 master knows beyond the weights where new weights are the old ones.
#[test]
fn masters_of_unchanged_bytes_stay_as_they_are() {
    [StateCopies::Single, StateCopies::Double].into_iter().for_each(|copies| between_two_sums(copies, true));
}

/// Assigned values have no masters.
#[test]
fn masters_are_made_of_the_weights_when_a_reducer_first_needs_them() {
    [StateCopies::Single, StateCopies::Double].into_iter().for_each(|copies| between_two_sums(copies, false));
}

/// Adds up less than half precision shows, before and after some elements get new values: they are new weights, or
/// contributions to `assign`.
fn between_two_sums(copies: StateCopies, publishes: bool) {
    let layout = ModelLayout::blank(u64::from(common::BLOCK), DType::BF16, common::BLOCK).unwrap();
    let partition = partition_of(&layout, |_| true);
    let ones = encode(&layout, 0, |_| 1.0);
    let store = loaded_with(partition, Reducer::Sum, Limits::default(), Home::Host(copies), &ones);
    let small = encode(&layout, 0, |_| 1.0 / 1024.0);
    let make = |base: u64, reducer, payload: &[u8], written: Option<&[Range<u32>]>| {
        let work = reduces_all(&store, step(reducer, 1), true);
        let job = store.begin(Version(base), work, true).unwrap();
        let input = BlockInput { written, ..checked(payload) };
        assert_eq!(job.finish_all(BlockId(0), &[input]).unwrap(), None);
        conclude(&store, &job).unwrap();
    };
    // bfloat16 has no 1 + 2^-10, nor 1 + 3 * 2^-10. It has 1 + 2^-7, which is what 8 of them make.
    (0..4).for_each(|base| make(base, Reducer::Sum, &small, None));
    let is_new = |i: usize| (4..8).contains(&i);
    if publishes {
        let job = store.begin(Version(4), Work::Assign { token: 0 }, true).unwrap();
        let values = encode(&layout, 0, |i| if is_new(i) { 5.0 } else { 1.0 });
        assert!(job.finish(BlockId(0), Some(Payload::Plain(&values))).unwrap());
        conclude(&store, &job).unwrap();
    } else {
        make(4, Reducer::Assign, &encode(&layout, 0, |_| 5.0), Some(&[8..16]));
    }
    (5..9).for_each(|base| make(base, Reducer::Sum, &small, None));
    let newest = store.newest().unwrap();
    let values = common::decode(&layout, newest.block(BlockId(0)));
    let added = if publishes { 1.0 / 128.0 } else { 0.0 };
    let expected = |i: usize| if is_new(i) { 5.0 } else { 1.0 + added };
    let wrong = values.iter().enumerate().find(|(i, value)| **value != expected(*i));
    assert_eq!(wrong, None);
}
