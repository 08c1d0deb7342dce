//! Bytes of contributions reduced a second, beside a plain memcpy of the same bytes.
//!
//! As in the daemon, a 1 MiB request buffer is filled by a copy (not timed) and then reduced in blocks of
//! 256 KiB, while weights, state and outputs lie in arrays too large for any cache. The payload starts 80
//! bytes into a page, where FUSE puts it. (Some bytes *before* the place of the output in its page would
//! be up to twice as slow: the CPU takes such loads to depend on the stores before them.)

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use libmodelio::bytes::kernels::{
    Input, Operands, Output, Source, Wire, accumulate, all_finite, copy_checked, stream_copy,
};
use libmodelio::vocabulary::reducer::{Hyper, Reducer, Step};
use ps_backend::reducers::apply;

/// The types that are measured.
const WIRES: [Wire; 5] = [Wire::F32, Wire::F16, Wire::BF16, Wire::E4M3, Wire::E5M2];
const REQUEST: usize = 1 << 20;
const BLOCK: usize = 256 << 10;
const PAGE: usize = 4096;
/// Of the payload in a request.
const HEADER: usize = 80;
/// Elements of each large array: 256 MiB of fp32.
const ELEMENTS: usize = 64 << 20;

/// `len` elements and room to align them. Not of zeros, which would be pages not there yet when the clock
/// runs.
fn large<T: Copy>(value: T, len: usize) -> Vec<T> {
    vec![value; len + PAGE]
}

/// `len` elements from the first page boundary on, as a shard places them.
fn aligned<T>(values: &mut [T], len: usize) -> &mut [T] {
    let start = values.as_ptr().align_offset(PAGE);
    &mut values[start..][..len]
}

/// A request buffer and where the next request goes.
struct Requests<'a> {
    program: Vec<u8>,
    buffer: &'a mut [u8],
    next: usize,
}

impl Requests<'_> {
    /// Time `block` on the blocks of `iterations` requests; it gets one and its byte offset, below `end`.
    fn time(&mut self, iterations: u64, end: usize, mut block: impl FnMut(&[u8], usize)) -> Duration {
        let mut spent = Duration::ZERO;
        for _ in 0..iterations {
            self.next = if self.next + REQUEST <= end { self.next } else { 0 };
            let from = self.next % self.program.len();
            self.buffer.copy_from_slice(&self.program[from..][..REQUEST]);
            let start = Instant::now();
            for (i, bytes) in self.buffer.chunks(BLOCK).enumerate() {
                block(bytes, self.next + i * BLOCK);
            }
            spent += start.elapsed();
            self.next += REQUEST;
        }
        spent
    }
}

fn benches(c: &mut Criterion) {
    // 0x3c3c is a small number in every type.
    let mut bytes = [0x3c, 1].map(|value| large(value, ELEMENTS * 4));
    let mut arrays = [0.5, 1.0, 0.1, 1.0, 0.2, 1.0].map(|value| large(value, ELEMENTS));
    let [weights, weights_out] = bytes.each_mut().map(|array| aligned(array, ELEMENTS * 4));
    let [master, master_out, slot0, slot0_out, slot1, slot1_out] =
        arrays.each_mut().map(|array| aligned(array, ELEMENTS));
    let mut request = large(0, HEADER + REQUEST);
    let buffer = &mut aligned(&mut request, HEADER + REQUEST)[HEADER..];
    let mut requests = Requests { program: vec![0x3c; 64 << 20], buffer, next: 0 };

    let mut group = c.benchmark_group("copy");
    group.throughput(Throughput::Bytes(REQUEST as u64));
    let end = weights_out.len();
    group.bench_function("memcpy", |b| {
        b.iter_custom(|n| requests.time(n, end, |src, at| weights_out[at..][..BLOCK].copy_from_slice(src)))
    });
    group.bench_function("stream_copy", |b| {
        b.iter_custom(|n| requests.time(n, end, |src, at| stream_copy(src, &mut weights_out[at..][..BLOCK])))
    });
    group.finish();

    let mut group = c.benchmark_group("accumulate");
    group.throughput(Throughput::Bytes(REQUEST as u64));
    for wire in WIRES {
        let (count, end) = (BLOCK / wire.size(), ELEMENTS * wire.size());
        for (name, first) in [("first", true), ("add", false)] {
            group.bench_function(BenchmarkId::new(name, format!("{wire:?}")), |b| {
                b.iter_custom(|n| {
                    requests.time(n, end, |src, at| {
                        accumulate(wire, src, &mut master_out[at / wire.size()..][..count], first);
                    })
                })
            });
        }
    }
    for wire in WIRES {
        group.bench_function(BenchmarkId::new("all_finite", format!("{wire:?}")), |b| {
            b.iter_custom(|n| requests.time(n, end, |src, _| assert!(all_finite(wire, src))))
        });
        group.bench_function(BenchmarkId::new("copy_checked", format!("{wire:?}")), |b| {
            b.iter_custom(|n| {
                requests.time(n, end, |src, at| {
                    assert!(copy_checked(wire, src, &mut weights_out[at..][..BLOCK]));
                })
            })
        });
    }
    group.finish();

    let mut group = c.benchmark_group("apply");
    group.throughput(Throughput::Bytes(REQUEST as u64));
    for (reducer, wire) in Reducer::all().flat_map(|r| WIRES.map(|w| (r, w))) {
        let step = Step { reducer, hyper: Hyper::default(), contributions: 1, t: 3, ..Step::default() };
        let end = ELEMENTS * wire.size();
        let has_master = wire != Wire::F32;
        group.bench_function(BenchmarkId::new(reducer.name(), format!("{wire:?}")), |b| {
            b.iter_custom(|n| {
                requests.time(n, end, |src, at| {
                    let from = at / wire.size();
                    let block = from..from + BLOCK / wire.size();
                    let slot = |i| if i < reducer.state_slots() { block.clone() } else { 0..0 };
                    let input = Input {
                        weights: &weights[at..][..BLOCK],
                        master: has_master.then(|| &master[block.clone()]),
                        slots: [&slot0[slot(0)], &slot1[slot(1)]],
                    };
                    let output = Output {
                        weights: &mut weights_out[at..][..BLOCK],
                        master: has_master.then(|| &mut master_out[block.clone()]),
                        slots: [&mut slot0_out[slot(0)], &mut slot1_out[slot(1)]],
                    };
                    assert!(apply(
                        &step,
                        Operands { wire, sources: &[Source::Wire(src)], input, output },
                        true
                    ));
                })
            })
        });
    }
    group.finish();
}

criterion_group! {
    name = reduce;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(500))
        .without_plots();
    targets = benches
}
criterion_main!(reduce);
