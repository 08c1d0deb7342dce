//! One memcpy: the model from this process's own memory into memory that it shares with another.
//!
//! The owner has a memfd, mapped and touched; the learner maps it as well and copies. Nothing can hand a model over
//! to another process with less, unless it was in shared memory to begin with.
//!
//! This file holds `unsafe` code: the copies.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
use std::fs::OpenOptions;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use net_baselines::memory::Memory;
use net_baselines::pattern;
use net_baselines::rounds::{Learner, learn, serve};
use serde_json::json;

#[derive(Parser)]
#[command(about = "One memcpy through a memfd")]
enum Options {
    /// Owns the memory
    Server {
        /// Bytes of the model
        #[arg(long)]
        bytes: usize,
    },
    /// Copies into it
    Learner {
        /// The owner's memfd
        memory: PathBuf,
    },
}

struct Copier {
    own: Memory,
    shared: Memory,
}

impl Learner for Copier {
    fn round(&mut self, what: &str) -> Result<usize> {
        ensure!(what == "copy", "unknown round {what:?}");
        let length = self.own.len();
        // SAFETY: only this process touches either of them during a round.
        let (from, to) = unsafe { (self.own.bytes(0, length), self.shared.bytes_mut(0, length)) };
        copy(to, from);
        Ok(length)
    }

    fn check(&mut self, _: usize) -> Result<()> {
        // SAFETY: no round is under way.
        pattern::check(unsafe { self.shared.values_mut(0, self.shared.len()) }, 1, 1)
    }
}

/// With stores that pass the cache where the processor has them: the C library takes to those only for more than
/// its share of the last cache, and was slower by half for 64 MiB on a processor with 260 MiB of that.
fn copy(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "as much to copy as there is place");
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx") && to.as_ptr().cast::<__m256i>().is_aligned() {
        let whole = to.len() & !31;
        // SAFETY: AVX is there, `to` is aligned, and both are at least as long.
        unsafe { stream(to.as_mut_ptr().cast(), from.as_ptr().cast(), whole / 32) };
        to[whole..].copy_from_slice(&from[whole..]);
        return;
    }
    to.copy_from_slice(from);
}

/// Copies `count` vectors.
///
/// # Safety
/// Both have as many, and `to` is aligned.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream(to: *mut __m256i, from: *const __m256i, count: usize) {
    for index in 0..count {
        // SAFETY: the caller answers for `count` of both, and for the alignment of `to`.
        unsafe { _mm256_stream_si256(to.add(index), _mm256_loadu_si256(from.add(index))) };
    }
    _mm_sfence();
}

fn main() -> Result<()> {
    match Options::parse() {
        Options::Server { bytes } => {
            use std::os::fd::AsRawFd;
            let memory = Memory::new("shared", bytes)?;
            let path = format!("/proc/{}/fd/{}", std::process::id(), memory.file().as_raw_fd());
            serve(&json!({"what": "ready", "address": path}))
        }
        Options::Learner { memory } => {
            let file = OpenOptions::new().read(true).write(true).open(&memory);
            let shared = Memory::of(file.with_context(|| format!("opening {}", memory.display()))?)?;
            let mut own = Memory::new("own", shared.len())?;
            pattern::fill(&mut own, 0);
            learn(&mut Copier { own, shared })
        }
    }
}
