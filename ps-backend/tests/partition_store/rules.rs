//! The rules of a partition's store, one for each test.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::{BLOCK, encode, floats_layout};
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::surplus::UNUSED_FOR;
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::{Hyper, Reducer};
use libmodelio::wire::Work;
use ps_backend::partition::store::{BlockInput, Home, Limits, PartitionError, Payload};
use test_devices::one_by_one::OneByOne;

use crate::common;
use crate::driver::{
    Source, Twin, WAYS, Way, checked, conclude, empty, loaded, loaded_with, model, partition_of, reduces_all,
    step,
};

fn twin(reducer: Reducer) -> Twin {
    Twin::new(partition_of(&model(), |_| true), reducer, Hyper::default(), Limits::default())
}

fn all(twin: &Twin, seed: usize, way: Way) -> Source {
    Source { seed, way, blocks: twin.blocks().collect() }
}

#[test]
fn wide_sums_lose_nothing() {
    let model = ModelLayout::blank(u64::from(BLOCK), DType::BF16, BLOCK).unwrap();
    let store = loaded(&model, Reducer::Sum, &encode(&model, 0, |_| -2.0));
    let job = store.begin(Version(0), reduces_all(&store, step(Reducer::Sum, 2), true), true).unwrap();
    // 2 and 2^-9: bfloat16 has no such number.
    let one = (1.0f32 + 1.0 / 1024.0).to_le_bytes().repeat(BLOCK as usize / 2);
    assert!(job.add(BlockId(0), Payload::Wide(&one)).unwrap());
    assert!(job.finish(BlockId(0), Some(Payload::Wide(&one))).unwrap());
    conclude(&store, &job).unwrap();
    let newest = store.newest().unwrap();
    assert!(common::decode(&model, newest.block(BlockId(0))).iter().all(|&value| value == 1.0 / 512.0));
}

#[test]
fn an_inf_in_a_checked_sum_is_nobodys_fault() {
    let model = ModelLayout::blank(u64::from(BLOCK), DType::F32, BLOCK).unwrap();
    let store = loaded(&model, Reducer::Sum, &encode(&model, 0, |_| 1.0));
    let job = store.begin(Version(0), reduces_all(&store, step(Reducer::Sum, 3), true), true).unwrap();
    let infinite = encode(&model, 0, |_| f32::INFINITY);
    // One learner's would be refused; a sum of two counts.
    assert!(!job.finish(BlockId(0), Some(Payload::Plain(&infinite))).unwrap());
    assert!(matches!(conclude(&store, &job), Err(PartitionError::Unfinished(_))));
    let unchecked = BlockInput { check: false, ..checked(&infinite) };
    assert_eq!(job.finish_all(BlockId(0), &[unchecked]).unwrap(), None);
    conclude(&store, &job).unwrap();
    let newest = store.newest().unwrap();
    assert!(common::decode(&model, newest.block(BlockId(0))).iter().all(|&value| value == f32::INFINITY));
}

#[test]
fn several_payloads_in_one_pass_equal_one_after_the_other() {
    several_in_one_pass(&model(), true);
    several_in_one_pass(&ModelLayout::blank(u64::from(BLOCK) + 8, DType::F64, BLOCK).unwrap(), false);
}

fn several_in_one_pass(model: &ModelLayout, with_wide: bool) {
    let zeros = vec![0; model.size() as usize];
    let [together, alone] = [(); 2].map(|()| loaded(model, Reducer::Sum, &zeros));
    let [one_pass, one_by_one] = [&together, &alone]
        .map(|store| store.begin(Version(0), reduces_all(store, step(Reducer::Sum, 6), true), true).unwrap());
    let layout = together.partition().layout();
    for block in (0..layout.blocks()).map(BlockId) {
        // Into an empty sum, and into one that holds something.
        for seeds in [[1, 2, 3], [4, 5, 6]] {
            let sources = seeds.map(|seed| Source { seed, way: Way::Plain, blocks: Vec::new() });
            let [first, second, third] = &sources;
            let first = first.plain(layout, block);
            let second = if with_wide { second.wide(layout, block) } else { second.plain(layout, block) };
            let third = [&[0][..], &third.plain(layout, block)].concat();
            let second = if with_wide { Payload::Wide(&second) } else { Payload::Plain(&second) };
            let payloads = [Payload::Plain(&first), second, Payload::Plain(&third[1..])];
            let parts = payloads.map(|payload| BlockInput { payload, written: None, check: true });
            assert_eq!(one_pass.add_all(block, &parts).unwrap(), None);
            for payload in payloads {
                assert!(one_by_one.add(block, payload).unwrap());
            }
        }
        for job in [&one_pass, &one_by_one] {
            assert!(job.finish(block, None).unwrap());
        }
    }
    for (store, job) in [(&together, &one_pass), (&alone, &one_by_one)] {
        conclude(store, job).unwrap();
    }
    let [together, alone] = [&together, &alone].map(|store| store.newest().unwrap());
    for block in (0..layout.blocks()).map(BlockId) {
        assert!(together.block(block) == alone.block(block), "{block}");
    }
}

#[test]
fn one_pass_names_the_first_checked_payload_with_nan() {
    let model = ModelLayout::blank(u64::from(BLOCK), DType::F32, BLOCK).unwrap();
    let store = loaded(&model, Reducer::Sum, &encode(&model, 0, |_| 1.0));
    let job = store.begin(Version(0), reduces_all(&store, step(Reducer::Sum, 4), true), true).unwrap();
    let good = encode(&model, 0, |_| 1.0);
    let last = BLOCK as usize / 4 - 1;
    let [early, late] = [0, last].map(|at| encode(&model, 0, |i| if i == at { f32::NAN } else { 1.0 }));
    let part = |bytes, check| BlockInput { check, ..checked(bytes) };
    let parts = [part(&good, true), part(&early, false), part(&late, true), part(&early, true)];
    assert_eq!(job.add_all(BlockId(0), &parts).unwrap(), Some(2));
}

/// Memory in which another thread keeps storing 1 and NaN, as a client may over shared memory.
struct Churn {
    memory: Arc<Mapping>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Churn {
    fn new(layout: &ModelLayout) -> Churn {
        let ones = encode(layout, 0, |_| 1.0);
        let nan = encode(layout, 0, |_| f32::NAN);
        let memory = Arc::new(Mapping::anonymous(ones.len()).unwrap());
        // SAFETY: nobody else knows the memory yet.
        unsafe { memory.write(0, &ones) };
        let (of_thread, over) = (Arc::clone(&memory), Arc::<AtomicBool>::default());
        let ends = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            let at = (ones.len() / 2).next_multiple_of(4);
            let word = |bytes: &[u8]| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            // SAFETY: in bounds, and aligned as pages are.
            let there = unsafe { AtomicU32::from_ptr(of_thread.start().as_ptr().add(at).cast()) };
            while !ends.load(Ordering::Relaxed) {
                for value in [&nan, &ones] {
                    there.store(word(value), Ordering::Relaxed);
                    // About as long as a block is read.
                    (0..100).for_each(|_| std::hint::spin_loop());
                }
            }
        });
        Churn { memory, over, thread: Some(thread) }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: they are numbers to add up, whichever they are.
        unsafe { self.memory.bytes(0..self.memory.len()) }
    }
}

impl Drop for Churn {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

#[test]
fn numbers_that_change_while_they_are_read_are_judged_as_they_are_taken() {
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2] {
        for reducer in [None, Some(Reducer::Assign), Some(Reducer::Sgd)] {
            let model = ModelLayout::blank(u64::from(BLOCK), dtype, BLOCK).unwrap();
            let store = loaded(&model, reducer.unwrap_or(Reducer::Sum), &encode(&model, 0, |_| 0.0));
            let churn = Churn::new(&model);
            let (mut taken, mut refused) = (0, 0);
            let until = Instant::now() + Duration::from_secs(600);
            while (taken < 200 || refused < 200) && Instant::now() < until {
                let base = store.newest().unwrap().version();
                let work = match reducer {
                    None => Work::Assign { token: 0 },
                    Some(reducer) => reduces_all(&store, step(reducer, 1), true),
                };
                let job = store.begin(base, work, true).unwrap();
                if job.finish(BlockId(0), Some(Payload::Plain(churn.bytes()))).unwrap() {
                    conclude(&store, &job).unwrap();
                    let newest = store.newest().unwrap();
                    let values = common::decode(&model, newest.block(BlockId(0)));
                    assert!(
                        values.iter().all(|value| value.is_finite()),
                        "{dtype:?} {reducer:?}: NaN counts"
                    );
                    taken += 1;
                } else {
                    job.give_up();
                    refused += 1;
                }
            }
            assert!(taken > 0 && refused > 0, "{dtype:?} {reducer:?}: {taken} taken, {refused} refused");
        }
    }
}

#[test]
fn whatever_does_not_fit_is_refused_and_changes_nothing() {
    let mut twin = twin(Reducer::Sum);
    let job = twin.begin_reduce(1).unwrap();
    let blocks = twin.layout.blocks();
    let bytes = vec![0; BLOCK as usize];
    for block in [blocks, u32::MAX].map(BlockId) {
        assert!(matches!(job.add(block, Payload::Plain(&bytes)), Err(PartitionError::NoBlock { .. })));
        assert!(matches!(job.finish(block, None), Err(PartitionError::NoBlock { .. })));
        assert!(matches!(job.destination(block, Form::Plain), Err(PartitionError::NoBlock { .. })));
        assert!(matches!(twin.store.load(block, &bytes), Err(PartitionError::NoBlock { .. })));
    }
    // Block 6 is bfloat16: its wide payload is longer.
    for payload in [Payload::Plain(&bytes[1..]), Payload::Wide(&bytes)] {
        let error = job.add(BlockId(6), payload).expect_err("wrong length");
        assert!(matches!(error, PartitionError::Length { block: BlockId(6), .. }), "{error}");
        let error = job.finish(BlockId(6), Some(payload)).expect_err("wrong length");
        assert!(matches!(error, PartitionError::Length { .. }), "{error}");
    }
    assert!(!job.holds(BlockId(6)));
    assert!(matches!(conclude(&twin.store, &job), Err(PartitionError::Unfinished(BlockId(0)))));
    drop(job);
    let base = Version(7);
    let error =
        twin.store.begin(base, Work::Add { combine: Reducer::Sum.combine() }, true).expect_err("base");
    assert!(matches!(error, PartitionError::Base { expected: Version(0), got: Version(7) }));
    assert!(matches!(twin.store.load(BlockId(0), &bytes), Err(PartitionError::Loaded)));
    let source = all(&twin, 1, Way::Plain);
    twin.reduce(&[source]);
    twin.check("after refusals");
}

#[test]
fn nothing_is_read_or_begun_before_all_is_loaded() {
    let model = floats_layout(3 * BLOCK as usize / 4);
    let store = empty(partition_of(&model, |_| true), Reducer::Sgd);
    let bytes = vec![0; BLOCK as usize];
    assert!(store.load(BlockId(0), &bytes).unwrap());
    assert!(!store.load(BlockId(0), &bytes).unwrap(), "once");
    assert!(store.load(BlockId(2), &bytes).unwrap());
    assert!(matches!(store.finish_loading(), Err(PartitionError::NotLoaded(BlockId(1)))));
    assert!(store.newest().is_none() && store.version(Version(0)).is_none());
    let begun = store.begin(Version(0), Work::Add { combine: Reducer::Sgd.combine() }, true);
    assert!(matches!(begun, Err(PartitionError::Loading)));
    assert!(store.load(BlockId(1), &bytes).unwrap());
    store.finish_loading().unwrap();
    store.finish_loading().unwrap();
    assert!(store.newest().is_some());
}

#[test]
fn only_what_an_accumulator_holds_is_received_in_place() {
    let twin = twin(Reducer::Sum);
    let job = twin.begin_add().unwrap();
    for block in twin.blocks() {
        let segments = twin.layout.segments(block);
        let is_f32 = segments.iter().all(|segment| segment.dtype == DType::F32);
        let is_reduced = segments.iter().all(|segment| segment.dtype.is_reducible());
        assert_eq!(job.destination(block, Form::Plain).unwrap().is_some(), is_f32, "{block}");
        assert_eq!(job.destination(block, Form::Wide).unwrap().is_some(), is_reduced, "{block}");
        // These targets were dropped: nothing has come.
        assert!(!job.holds(block));
    }
    let block = twin.blocks().find(|&block| job.destination(block, Form::Plain).unwrap().is_some()).unwrap();
    let target = job.destination(block, Form::Plain).unwrap().unwrap();
    let source = all(&twin, 1, Way::Plain);
    let payload = source.plain(&twin.layout, block);
    assert!(matches!(job.add(block, Payload::Plain(&payload)), Err(PartitionError::Claimed(_))));
    assert!(matches!(conclude(&twin.store, &job), Err(PartitionError::Claimed(_))));
    drop(target);
    assert!(job.add(block, Payload::Plain(&payload)).unwrap());
    assert!(job.destination(block, Form::Plain).unwrap().is_none(), "not the first");
}

#[test]
fn the_next_plan_waits_for_unfinished_receives() {
    let twin = twin(Reducer::Sum);
    let job = twin.begin_add().unwrap();
    let target = twin.blocks().find_map(|block| job.destination(block, Form::Wide).unwrap()).unwrap();
    job.give_up();
    assert!(job.is_over());
    drop(job);
    let error = twin.begin_add().expect_err("somebody still writes");
    assert!(matches!(error, PartitionError::Busy) && error.is_transient());
    drop(target);
    twin.begin_add().unwrap();
}

#[test]
fn non_finite_payload_is_reported_and_a_dropped_plan_leaves_no_trace() {
    for way in WAYS {
        let mut twin = twin(Reducer::Momentum);
        let source = all(&twin, 5, way);
        let last = BlockId(twin.layout.blocks() - 1);
        let (mut plain, mut wide) = (source.plain(&twin.layout, last), source.wide(&twin.layout, last));
        let (end, wide_end) = (plain.len(), wide.len());
        plain[end - 2..].copy_from_slice(&0x7c00u16.to_le_bytes());
        wide[wide_end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
        let job = twin.begin_reduce(2).unwrap();
        if way == Way::InPlace {
            let mut target = job.destination(last, Form::Wide).unwrap().unwrap();
            target.bytes().copy_from_slice(&wide);
            assert!(!target.complete(None));
        } else {
            let payload = if way == Way::Plain { Payload::Plain(&plain) } else { Payload::Wide(&wide) };
            assert!(!job.finish(last, Some(payload)).unwrap());
            assert!(!job.add(last, payload).unwrap());
        }
        drop(job);
        twin.check("refused");
        twin.reduce(&[source]);
        twin.check("without it");
    }
}

#[test]
fn non_finite_values_may_be_accepted() {
    let twin = twin(Reducer::Sum);
    let source = all(&twin, 5, Way::Plain);
    let last = BlockId(twin.layout.blocks() - 1);
    let mut plain = source.plain(&twin.layout, last);
    // Infinity of the last tensor's type.
    *plain.last_mut().unwrap() = 0x7c;
    let work = reduces_all(&twin.store, step(Reducer::Sum, 1), false);
    let job = twin.store.begin(Version(0), work, false).unwrap();
    for block in twin.blocks().filter(|&block| block != last) {
        assert!(job.finish(block, None).unwrap());
    }
    assert!(job.finish(last, Some(Payload::Plain(&plain))).unwrap());
    conclude(&twin.store, &job).unwrap();
    let newest = twin.store.newest().unwrap();
    assert_eq!(newest.block(last).last(), Some(&0x7c));
}

#[test]
fn an_overflowing_sum_is_nobodys_fault() {
    let model = floats_layout(BLOCK as usize / 4);
    let store = loaded(&model, Reducer::Sum, &vec![0; BLOCK as usize]);
    let large = f32::MAX.to_le_bytes().repeat(BLOCK as usize / 4);
    let job = store.begin(Version(0), reduces_all(&store, step(Reducer::Sum, 3), false), true).unwrap();
    assert!(job.add(BlockId(0), Payload::Plain(&large)).unwrap());
    assert!(job.add(BlockId(0), Payload::Plain(&large)).unwrap());
    assert!(job.finish(BlockId(0), Some(Payload::Plain(&large))).unwrap());
    conclude(&store, &job).unwrap();
    let newest = store.newest().unwrap();
    assert!(common::decode(&model, newest.block(BlockId(0))).iter().all(|value| *value == f32::INFINITY));
}

#[test]
fn a_job_is_concluded_once() {
    let mut twin = twin(Reducer::Sum);
    let job = twin.begin_add().unwrap();
    assert!(conclude(&twin.store, &job).unwrap().is_none());
    assert!(matches!(conclude(&twin.store, &job), Err(PartitionError::Over)));
    assert!(matches!(job.finish(BlockId(0), None), Err(PartitionError::AddsOnly)));
    let payload = all(&twin, 1, Way::Plain).plain(&twin.layout, BlockId(0));
    assert!(matches!(job.add(BlockId(0), Payload::Plain(&payload)), Err(PartitionError::Complete(_))));
    drop(job);
    let job = twin.begin_reduce(0).unwrap();
    twin.blocks().for_each(|block| assert!(job.finish(block, None).unwrap()));
    assert!(matches!(job.finish(BlockId(0), None), Err(PartitionError::Complete(_))));
    job.give_up();
    assert!(matches!(conclude(&twin.store, &job), Err(PartitionError::Over)));
    drop(job);
    twin.reduce(&[]);
    twin.check("given up once, concluded once");
}

#[test]
fn held_versions_stay_and_buffers_are_bounded() {
    let limits = Limits { retain: 1, buffers: 4 };
    let mut twin = Twin::new(partition_of(&model(), |_| true), Reducer::Sgd, Hyper::default(), limits);
    let mut held = vec![(twin.store.newest().unwrap(), twin.check("loaded"))];
    let source = |twin: &Twin, seed| vec![all(twin, seed, Way::Plain)];
    for seed in 1..=3 {
        let sources = source(&twin, seed);
        twin.reduce(&sources);
        held.push((twin.store.newest().unwrap(), twin.check("held")));
    }
    assert_eq!(twin.store.versions(), [0, 1, 2, 3].map(Version));
    let error = twin.begin_reduce(1).expect_err("no buffer");
    assert!(matches!(error, PartitionError::NoBuffer { max: 4 }) && error.is_transient());
    // Adding up needs none.
    drop(twin.begin_add().unwrap());
    for (version, bytes) in &held {
        let now: Vec<u8> = twin.blocks().flat_map(|block| version.block(block).to_vec()).collect();
        assert!(now == *bytes, "version {} has changed", version.version());
    }
    held.remove(1);
    let sources = source(&twin, 9);
    twin.reduce(&sources);
    twin.check("a buffer was given back");
    assert!(twin.store.version(Version(1)).is_none() && twin.store.version(Version(0)).is_some());
    drop(held);
    for seed in 20..30 {
        let sources = source(&twin, seed);
        twin.reduce(&sources);
        twin.check("steady");
        assert_eq!(twin.store.versions().len(), 2, "the newest and the retained");
    }
    assert_eq!(twin.store.bytes().versions, 3 * twin.layout.size(), "what nobody needs any more has gone");
}

#[test]
fn a_sum_that_no_plan_needs_any_more_gives_its_memory_back() {
    // The kernel may fill a huge page around memory that was given back.
    nix::sys::prctl::set_thp_disable(true).unwrap();
    let mut twin = twin(Reducer::Sgd);
    let sums = twin.layout.elements() * 4;
    let two = [1, 2].map(|seed| all(&twin, seed, Way::Plain)).to_vec();
    twin.add(&two);
    twin.add(&two);
    twin.reduce(&two);
    twin.check("with earlier plans");
    assert_eq!(twin.store.bytes().sums, 2 * sums);
    for (versions, left) in [(UNUSED_FOR - 1, 2), (1, 1)] {
        for _ in 0..versions {
            twin.reduce(&two);
            twin.check("one sum");
        }
        assert_eq!(twin.store.bytes().sums, left * sums);
    }
    for _ in 0..=UNUSED_FOR {
        twin.reduce(&two[..1]);
        twin.check("no sum");
    }
    assert_eq!((twin.store.bytes().sums, twin.store.taken().sums), (0, 0));
    // Either comes again.
    twin.add(&two);
    twin.add(&two);
    twin.reduce(&two);
    twin.check("with earlier plans again");
    assert_eq!(twin.store.bytes().sums, 2 * sums);
}

#[test]
fn only_used_memory_is_taken() {
    let mut twin = twin(Reducer::Sgd);
    let (size, sums) = (twin.layout.size(), twin.layout.elements() * 4);
    let start = twin.store.bytes();
    assert_eq!((start.versions, start.masters, start.state, start.sums), (2 * size, 2 * sums, 0, 0));
    assert_eq!(start.total(), 2 * size + 2 * sums);
    let one = vec![all(&twin, 1, Way::Plain)];
    twin.reduce(&one);
    assert_eq!(twin.store.bytes(), start, "a lone sender needs no sum");
    // However many there are, one sum serves them; and one more where plans come before.
    for count in [2, 5, 11] {
        let sources: Vec<_> = (0..count).map(|i| all(&twin, i, WAYS[i % 4])).collect();
        twin.reduce(&sources);
        assert_eq!(twin.store.bytes().sums, sums, "{count} sources");
    }
    for count in [2, 5] {
        let sources: Vec<_> = (0..count).map(|i| all(&twin, i, WAYS[i % 4])).collect();
        (0..count).for_each(|_| twin.add(&sources));
        twin.reduce(&sources);
        twin.check("many plans");
        assert_eq!(twin.store.bytes().sums, 2 * sums, "{count} sources, {count} plans");
    }
    twin.change(Reducer::Assign);
    let sources = vec![all(&twin, 1, Way::Plain); 2];
    twin.reduce(&sources);
    twin.check("assigned");
    assert_eq!(twin.store.bytes().sums, 2 * (sums + 80_008), "with what is not reduced");
    twin.change(Reducer::Adam);
    drop(twin.begin_reduce(1).unwrap());
    assert_eq!(twin.store.bytes().state, 4 * sums);
    assert!(!twin.store.add_spare(1).unwrap(), "the next version has a buffer");
    assert!(twin.store.add_spare(2).unwrap());
    assert_eq!(twin.store.bytes().versions, 3 * size);
}

#[test]
fn blocks_that_nobody_sends_are_carried_over_without_another_copy() {
    let mut twin = twin(Reducer::Sum);
    let blocks: Vec<_> = twin.blocks().collect();
    for round in 0..9 {
        let one = Source { seed: round, way: WAYS[round % 4], blocks: vec![blocks[round % blocks.len()]] };
        twin.reduce(&[one]);
        twin.check(&format!("round {round}"));
    }
    let newest = Arc::new(twin.store.newest().unwrap());
    assert_eq!(newest.version(), Version(9));
}

#[test]
fn sums_may_be_prefaulted_while_a_plan_runs() {
    let mut twin = twin(Reducer::Adam);
    let sources: Vec<_> = (0..3).map(|i| all(&twin, i, Way::InPlace)).collect();
    let job = twin.begin_reduce(3).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| twin.store.sum_memory().iter().for_each(|sums| sums.prefault().unwrap()));
        twin.blocks().for_each(|block| twin.finish_block(&job, block, &sources));
    });
    twin.concludes(job, &sources);
    twin.check("prefaulted beside");
}

#[test]
fn a_computed_block_that_somebody_reads_is_not_written_by_the_plans_after_it() {
    let model = ModelLayout::blank(2 * u64::from(BLOCK), DType::F32, BLOCK).unwrap();
    let limits = Limits { retain: 0, buffers: 3 };
    let zeros = vec![0; 2 * BLOCK as usize];
    let store = loaded_with(partition_of(&model, |_| true), Reducer::Sum, limits, Home::default(), &zeros);
    let block_of = |value: f32| value.to_le_bytes().repeat(BLOCK as usize / 4);
    let work = reduces_all(&store, step(Reducer::Sum, 1), true);
    let begin = |base| store.begin(Version(base), work.clone(), true).expect("a buffer");
    let adds = |job: &ps_backend::partition::store::PartitionJob, block, value| {
        assert!(job.finish(BlockId(block), Some(Payload::Plain(&block_of(value)))).unwrap());
    };
    let is_all = |bytes: &[u8], value: f32| bytes == block_of(value);
    let job = begin(0);
    assert!(job.early(BlockId(0)).is_none(), "it is not computed");
    adds(&job, 0, 1.0);
    let early = job.early(BlockId(0)).expect("it is computed");
    assert_eq!(early.checksum(), libmodelio::bytes::crc32c::crc32c(early.bytes()));
    // The plan is dropped, and another one makes the version.
    job.give_up();
    drop(job);
    let job = begin(0);
    adds(&job, 0, 2.0);
    assert!(is_all(early.bytes(), 1.0));
    let second = job.early(BlockId(0)).expect("it is computed");
    adds(&job, 1, 2.0);
    conclude(&store, &job).unwrap();
    drop(job);
    // The version is over, and is read for longer than it lasts.
    for version in 1..4 {
        let job = begin(version);
        [0, 1].into_iter().for_each(|block| adds(&job, block, 1.0));
        conclude(&store, &job).unwrap();
        assert!(is_all(early.bytes(), 1.0) && is_all(second.bytes(), 2.0), "at version {version}");
    }
    drop((early, second));
    assert!(is_all(store.newest().unwrap().block(BlockId(1)), 5.0));
    assert!(store.buffer_counts().0 <= 3, "{:?}", store.buffer_counts());
    // Slow readers do not take more and more memory.
    let mut read = Vec::new();
    for _ in 0..3 {
        let job = begin(4);
        adds(&job, 0, 1.0);
        read.push(job.early(BlockId(0)).expect("it is computed"));
    }
    let job = begin(4);
    adds(&job, 0, 1.0);
    read.push(job.early(BlockId(0)).expect("it is computed"));
    drop(job);
    let again = || store.begin(Version(4), work.clone(), true);
    assert!(matches!(again(), Err(PartitionError::Busy)));
    read.pop();
    assert!(again().is_ok(), "the buffer is not read");
}
