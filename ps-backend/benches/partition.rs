//! Blocks as they come from a socket, beside a plain memcpy of the same bytes.
//!
//! A receive buffer of 256 KiB is filled by a copy (not timed), so that it is in cache, and then stored, added, or made
//! the last of its block; versions and sums are too large for any cache. `pull` copies blocks of a version out, as a
//! send does, with and without the checksum that is computed the first time. `compare` finds what has changed in blocks of
//! bf16 of which 1% has, with and without the checksum that is made while the block is in the cache.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use libmodelio::bytes::changes::Changed;
use libmodelio::bytes::crc32c::crc32c;
use libmodelio::vocabulary::groups::Groups;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::{Hyper, Reducer, Step};
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use libmodelio::wire::Work;
use ps_backend::partition::store::{Home, Limits, PartitionJob, PartitionStore, Payload};
use test_devices::one_by_one::OneByOne;

const BLOCK: usize = 256 << 10;
const SIZE: usize = 128 << 20;
const BLOCKS: u32 = (SIZE / BLOCK) as u32;

/// A partition that is trained for ever, and a receive buffer.
struct Bench {
    store: PartitionStore,
    reducer: Reducer,
    program: Vec<u8>,
    buffer: Vec<u8>,
    other: Vec<u8>,
}

impl Bench {
    fn new(reducer: Reducer, dtype: DType) -> Bench {
        let model = ModelLayout::blank(SIZE as u64, dtype, BLOCK as u32).unwrap();
        let all: Vec<_> = (0..BLOCKS).map(BlockId).collect();
        let store =
            PartitionStore::new(model.partition(&all).unwrap(), reducer, Limits::default(), Home::default())
                .unwrap();
        for block in all {
            store.load(block, &[0x3c; BLOCK]).unwrap();
        }
        store.finish_loading().unwrap();
        // 0x3c3c is a small number in every type.
        let [program, buffer, other] = [32 << 20, BLOCK, 64 << 20].map(|len| vec![0x3c; len]);
        Bench { store, reducer, program, buffer, other }
    }

    fn begin(&self, adds: bool) -> Arc<PartitionJob> {
        let base = self.store.newest().unwrap().version();
        let step = Step {
            reducer: self.reducer,
            hyper: Hyper::default(),
            contributions: 3,
            t: base.0 + 1,
            ..Step::default()
        };
        let work = match adds {
            true => Work::Add { combine: self.reducer.combine() },
            false => {
                let tensors = TensorSteps::uniform(self.store.partition().tensor_ends().len(), step.t);
                Work::Reduce {
                    step,
                    tensors,
                    groups: Groups::default(),
                    factors: Default::default(),
                    fresh_state: base.0 == 0,
                }
            }
        };
        self.store.begin(base, work, true).unwrap()
    }

    fn receive(&mut self, block: u32) {
        let from = block as usize * BLOCK % self.program.len();
        self.buffer.copy_from_slice(&self.program[from..][..BLOCK]);
    }

    /// Times `work` on `count` blocks, each after the payload has come; `before` starts a plan of all blocks, and
    /// `after` ends it.
    fn time<T>(
        &mut self,
        count: u64,
        before: impl Fn(&Bench) -> T,
        work: impl Fn(&T, BlockId, &[u8]),
        after: impl Fn(&Bench, T),
    ) -> Duration {
        let (mut spent, mut left) = (Duration::ZERO, count);
        while left > 0 {
            let plan = before(self);
            for block in 0..BLOCKS {
                if left > 0 {
                    self.receive(block);
                    let start = Instant::now();
                    work(&plan, BlockId(block), &self.buffer);
                    spent += start.elapsed();
                    left -= 1;
                } else {
                    work(&plan, BlockId(block), &self.buffer);
                }
            }
            after(self, plan);
        }
        spent
    }
}

fn add_all(job: &PartitionJob, payload: &[u8]) {
    for block in (0..BLOCKS).map(BlockId) {
        job.add(block, Payload::Plain(payload)).unwrap();
    }
}

fn benches(c: &mut Criterion) {
    let f32 = DType::F32;
    for (name, reducer, dtype) in [
        ("sgd F32", Reducer::Sgd, f32),
        ("adamw F32", Reducer::AdamW, f32),
        ("sgd BF16", Reducer::Sgd, DType::BF16),
    ] {
        let mut bench = Bench::new(reducer, dtype);
        let mut group = c.benchmark_group(name);
        group.throughput(Throughput::Bytes(BLOCK as u64));
        group.bench_function("memcpy", |b| {
            b.iter_custom(|n| {
                let mut spent = Duration::ZERO;
                for i in 0..n {
                    bench.receive(i as u32);
                    let at = i as usize * BLOCK % bench.other.len();
                    let start = Instant::now();
                    bench.other[at..][..BLOCK].copy_from_slice(&bench.buffer);
                    spent += start.elapsed();
                }
                spent
            })
        });
        let add = |job: &Arc<PartitionJob>, block, payload: &[u8]| {
            assert!(job.add(block, Payload::Plain(payload)).unwrap());
        };
        group.bench_function("store", |b| {
            b.iter_custom(|n| bench.time(n, |bench| bench.begin(true), add, |_, job| job.give_up()))
        });
        group.bench_function("add", |b| {
            b.iter_custom(|n| {
                let before = |bench: &Bench| {
                    let job = bench.begin(true);
                    add_all(&job, &bench.program[..BLOCK]);
                    job
                };
                bench.time(n, before, add, |_, job| job.give_up())
            })
        });
        for sums in 0..=2 {
            group.bench_function(BenchmarkId::new("finish", sums), |b| {
                b.iter_custom(|n| {
                    let before = |bench: &Bench| {
                        let payload = &bench.program[..BLOCK];
                        if sums > 1 {
                            let job = bench.begin(true);
                            add_all(&job, payload);
                            bench.store.conclude(&job).unwrap();
                        }
                        let job = bench.begin(false);
                        if sums > 0 {
                            add_all(&job, payload);
                        }
                        job
                    };
                    let finish = |job: &Arc<PartitionJob>, block, payload: &[u8]| {
                        assert!(job.finish(block, Some(Payload::Plain(payload))).unwrap());
                    };
                    let after = |bench: &Bench, job: Arc<PartitionJob>| {
                        bench.store.conclude(&job).unwrap();
                    };
                    bench.time(n, before, finish, after)
                })
            });
        }
        group.finish();
    }

    let mut bench = Bench::new(Reducer::Sgd, f32);
    let mut group = c.benchmark_group("pull");
    group.throughput(Throughput::Bytes(BLOCK as u64));
    for (name, checks) in [("copy", false), ("first checksum and copy", true)] {
        group.bench_function(name, |b| {
            b.iter_custom(|n| {
                let (mut spent, mut left) = (Duration::ZERO, n);
                while left > 0 {
                    let job = bench.begin(false);
                    for block in (0..BLOCKS).map(BlockId) {
                        job.finish(block, Some(Payload::Plain(&bench.program[..BLOCK]))).unwrap();
                    }
                    bench.store.conclude(&job).unwrap();
                    let newest = bench.store.newest().unwrap();
                    for block in (0..BLOCKS).map(BlockId).take(left.min(u64::from(BLOCKS)) as usize) {
                        let start = Instant::now();
                        if checks {
                            newest.checksum(block);
                        }
                        bench.buffer.copy_from_slice(newest.block(block));
                        spent += start.elapsed();
                        left -= 1;
                    }
                }
                spent
            })
        });
    }
    group.finish();

    let old = vec![0x3c; SIZE];
    let mut new = old.clone();
    new.iter_mut().step_by(200).for_each(|byte| *byte ^= 1);
    let mut group = c.benchmark_group("compare");
    group.throughput(Throughput::Bytes(SIZE as u64));
    for (name, sums) in [("alone", false), ("checksum", true)] {
        group.bench_function(name, |b| {
            b.iter(|| {
                let blocks = old.chunks(BLOCK).zip(new.chunks(BLOCK));
                let found = |(old, new)| (Changed::between(old, new, 2), sums.then(|| crc32c(new)));
                blocks.map(found).for_each(|found| drop(black_box(found)));
            })
        });
    }
    group.finish();
}

criterion_group! {
    name = partition;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(500))
        .without_plots();
    targets = benches
}
criterion_main!(partition);
