//! A STREAM-like add: new weights = old weights + gradients, all three in memory that was touched before.
//!
//! It moves the bytes that a shard moves for a push of one learner with the reducer `sum`, and nothing else: the gradient
//! and the old weight are read, the new weight is written to another buffer past the caches. The two buffers of weights
//! change places after each round, as a shard's do. Threads take pieces in turn, so none waits for a slower one.
//!
//! This file holds `unsafe` code: the adds, and slices of memory that the threads share by pieces.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    _mm_sfence, _mm256_add_ps, _mm256_loadu_ps, _mm256_stream_ps, _mm512_add_ps, _mm512_loadu_ps,
    _mm512_stream_ps,
};
use std::mem::swap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Result, ensure};
use clap::Parser;
use net_baselines::memory::Memory;
use net_baselines::pattern;
use net_baselines::rounds::{Learner, learn};

/// Bytes that a thread takes at once.
const PIECE: usize = 1 << 20;
/// Bytes of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

#[derive(Parser)]
#[command(about = "A STREAM-like add in memory")]
struct Options {
    /// Bytes of the model
    #[arg(long)]
    bytes: usize,
    /// Threads that add
    #[arg(long)]
    threads: usize,
}

struct Adder {
    threads: usize,
    gradients: Memory,
    old: Memory,
    new: Memory,
}

impl Adder {
    /// Adds pieces until none is left.
    fn work(&self, next: &AtomicUsize) {
        let length = self.new.len();
        loop {
            let at = next.fetch_add(PIECE, Ordering::Relaxed);
            if at >= length {
                break;
            }
            let count = PIECE.min(length - at);
            // SAFETY: `next` gives a piece to one thread alone, and nobody writes gradients or old weights in a round.
            unsafe {
                add(
                    self.new.values_mut(at, count),
                    self.old.values_mut(at, count),
                    self.gradients.values_mut(at, count),
                )
            };
        }
    }
}

impl Learner for Adder {
    fn round(&mut self, what: &str) -> Result<usize> {
        ensure!(what == "push", "unknown round {what:?}");
        let next = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 1..self.threads {
                scope.spawn(|| self.work(&next));
            }
            self.work(&next);
        });
        swap(&mut self.old, &mut self.new);
        Ok(self.gradients.len())
    }

    fn check(&mut self, pushes: usize) -> Result<()> {
        // SAFETY: no round is under way.
        pattern::check(unsafe { self.old.values_mut(0, self.old.len()) }, 1, pushes)
    }
}

/// `new = old + gradients` with the widest vectors that the processor has, as a shard does.
fn add(new: &mut [f32], old: &[f32], gradients: &[f32]) {
    assert!(new.len() == old.len() && new.len() == gradients.len(), "as many of each");
    #[cfg(target_arch = "x86_64")]
    if new.as_ptr().addr().is_multiple_of(LINE) {
        let whole = new.len() / (LINE / 4);
        let rest = whole * (LINE / 4);
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has it, `new` is aligned, and all three have as many lines.
            unsafe { stream_512(new.as_mut_ptr(), old.as_ptr(), gradients.as_ptr(), whole) };
            return plain(&mut new[rest..], &old[rest..], &gradients[rest..]);
        }
        if is_x86_feature_detected!("avx") {
            // SAFETY: as above.
            unsafe { stream_256(new.as_mut_ptr(), old.as_ptr(), gradients.as_ptr(), whole) };
            return plain(&mut new[rest..], &old[rest..], &gradients[rest..]);
        }
    }
    plain(new, old, gradients);
}

fn plain(new: &mut [f32], old: &[f32], gradients: &[f32]) {
    for ((new, old), gradient) in new.iter_mut().zip(old).zip(gradients) {
        *new = old + gradient;
    }
}

/// Adds `lines` of 16 values, and stores them past the caches.
///
/// # Safety
/// All three have as many, and `new` is aligned to a line.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream_512(new: *mut f32, old: *const f32, gradients: *const f32, lines: usize) {
    for at in (0..lines * 16).step_by(16) {
        // SAFETY: the caller answers for the lengths, and for the alignment of `new`.
        unsafe {
            let sum = _mm512_add_ps(_mm512_loadu_ps(old.add(at)), _mm512_loadu_ps(gradients.add(at)));
            _mm512_stream_ps(new.add(at), sum);
        }
    }
    _mm_sfence();
}

/// As [`stream_512`], half a line at a time.
///
/// # Safety
/// As for [`stream_512`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream_256(new: *mut f32, old: *const f32, gradients: *const f32, lines: usize) {
    for at in (0..lines * 16).step_by(8) {
        // SAFETY: as above.
        unsafe {
            let sum = _mm256_add_ps(_mm256_loadu_ps(old.add(at)), _mm256_loadu_ps(gradients.add(at)));
            _mm256_stream_ps(new.add(at), sum);
        }
    }
    _mm_sfence();
}

fn main() -> Result<()> {
    let Options { bytes, threads } = Options::parse();
    ensure!(threads > 0, "no threads");
    let memory = |name| Memory::new(name, bytes).inspect(Memory::gather);
    let (mut gradients, old, new) = (memory("gradients")?, memory("old")?, memory("new")?);
    pattern::fill(&mut gradients, 0);
    learn(&mut Adder { threads, gradients, old, new })
}
