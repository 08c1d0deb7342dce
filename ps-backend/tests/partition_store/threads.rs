//! Many threads bring blocks of one plan.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::reducer::{Hyper, Reducer};
use ps_backend::partition::store::{Limits, PartitionError};
use test_devices::one_by_one::OneByOne;

use crate::driver::{Source, Twin, WAYS, conclude, empty, model, partition_of};

/// What `begin` gives once the last job is gone, which other threads may hold a little longer.
fn soon<T>(mut begin: impl FnMut() -> Result<T, PartitionError>) -> T {
    let deadline = Instant::now() + Duration::from_secs(600);
    loop {
        match begin() {
            Err(error) if error.is_transient() && Instant::now() < deadline => std::thread::yield_now(),
            other => return other.unwrap(),
        }
    }
}

#[test]
fn threads_finish_different_blocks() {
    for reducer in [Reducer::Sum, Reducer::AdamW] {
        let partition = partition_of(&model(), |_| true);
        let mut twin = Twin::new(partition, reducer, Hyper::default(), Limits::default());
        for round in 0..6 {
            let all: Vec<_> = twin.blocks().collect();
            let source = |i: usize| Source { seed: 10 * round + i, way: WAYS[i % 4], blocks: all.clone() };
            let sources: Vec<_> = (0..3).map(source).collect();
            let job = soon(|| twin.begin_reduce(3));
            let next = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        while let Some(&block) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                            twin.finish_block(&job, block, &sources);
                        }
                    });
                }
                // Readers go on meanwhile, and all find the same checksums.
                scope.spawn(|| {
                    let newest = twin.store.newest().unwrap();
                    assert_eq!(newest.version(), twin.version);
                    all.iter().for_each(|&block| _ = newest.checksum(block));
                });
            });
            assert!(conclude(&twin.store, &job).unwrap().is_none());
            drop(job);
            twin.published(&sources);
            twin.check(&format!("{reducer}, round {round}"));
        }
    }
}

#[test]
fn a_block_is_one_threads_at_a_time() {
    let partition = partition_of(&model(), |_| true);
    let twin = Twin::new(partition, Reducer::Sgd, Hyper::default(), Limits::default());
    let job = twin.begin_reduce(1).unwrap();
    let (block, source) = (BlockId(0), Source { seed: 3, way: WAYS[0], blocks: vec![BlockId(0)] });
    let payload = source.plain(&twin.layout, block);
    let outcomes = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let payload = ps_backend::partition::store::Payload::Plain(&payload);
                    job.finish(block, Some(payload))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let taken = outcomes.iter().filter(|outcome| matches!(outcome, Ok(true))).count();
    assert_eq!(taken, 1, "{outcomes:?}");
    let refused = |outcome: &&Result<bool, PartitionError>| {
        matches!(outcome, Err(PartitionError::Claimed(BlockId(0)) | PartitionError::Complete(BlockId(0))))
    };
    assert_eq!(outcomes.iter().filter(refused).count(), 7, "{outcomes:?}");
}

#[test]
fn blocks_are_loaded_once_from_any_source() {
    let model = model();
    let partition = partition_of(&model, |block| block % 2 == 0);
    let layout = partition.layout().clone();
    let weights = crate::common::initial_weights(&layout);
    let store = empty(partition, Reducer::Adam);
    let taken = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for block in (0..layout.blocks()).map(BlockId) {
                    let bytes = &weights[crate::driver::bytes_of(&layout, block)];
                    taken.fetch_add(usize::from(store.load(block, bytes).unwrap()), Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(taken.into_inner(), layout.blocks() as usize);
    store.finish_loading().unwrap();
    let newest = store.newest().unwrap();
    for block in (0..layout.blocks()).map(BlockId) {
        assert!(newest.block(block) == &weights[crate::driver::bytes_of(&layout, block)]);
    }
}
