//! One memcpy: the model from this process's own memory into memory that it shares with another.
//!
//! The owner has a memfd, mapped and touched; the learner maps it as well and copies. Nothing can hand a model over
//! to another process with less, unless it was in shared memory to begin with.
//!
//! This file holds `unsafe` code: the copies.

use std::fs::OpenOptions;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
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
        /// How
        #[arg(long, value_enum, default_value_t = Way::Library)]
        way: Way,
        /// The owner's memfd
        memory: PathBuf,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Way {
    /// The C library's memcpy
    Library,
    /// The processor's string instruction
    String,
    /// Stores that pass the cache
    Streaming,
}

struct Copier {
    own: Memory,
    shared: Memory,
    way: Way,
}

impl Learner for Copier {
    fn round(&mut self, what: &str) -> Result<usize> {
        ensure!(what == "copy", "unknown round {what:?}");
        let length = self.own.len();
        // SAFETY: only this process touches either of them during a round.
        let (from, to) = unsafe { (self.own.bytes(0, length), self.shared.bytes_mut(0, length)) };
        match self.way {
            Way::Library => to.copy_from_slice(from),
            Way::String => string(to, from)?,
            Way::Streaming => streaming(to, from)?,
        }
        Ok(length)
    }

    fn check(&mut self, _: usize) -> Result<()> {
        // SAFETY: no round is under way.
        pattern::check(unsafe { self.shared.values_mut(0, self.shared.len()) }, 1, 1)
    }
}

#[cfg(target_arch = "x86_64")]
#[expect(clippy::unnecessary_wraps, reason = "other processors have no such instruction")]
fn string(to: &mut [u8], from: &[u8]) -> Result<()> {
    assert_eq!(to.len(), from.len());
    // SAFETY: both are as long as said, and the direction flag is clear in all Rust code.
    unsafe {
        std::arch::asm!("rep movsb", inout("rcx") from.len() => _, inout("rsi") from.as_ptr() => _,
            inout("rdi") to.as_mut_ptr() => _, options(nostack, preserves_flags));
    }
    Ok(())
}

#[cfg(target_arch = "x86_64")]
fn streaming(to: &mut [u8], from: &[u8]) -> Result<()> {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

    #[target_feature(enable = "avx")]
    unsafe fn copy(to: *mut __m256i, from: *const __m256i, count: usize) {
        for index in 0..count {
            // SAFETY: the caller answers for `count` of both, and for the alignment of `to`.
            unsafe { _mm256_stream_si256(to.add(index), _mm256_loadu_si256(from.add(index))) };
        }
        _mm_sfence();
    }

    ensure!(is_x86_feature_detected!("avx"), "streaming needs AVX");
    ensure!(to.len() == from.len() && to.len().is_multiple_of(32), "streaming is for multiples of 32 bytes");
    assert!(to.as_ptr().cast::<__m256i>().is_aligned());
    // SAFETY: AVX is there, lengths and alignment are as they must be.
    unsafe { copy(to.as_mut_ptr().cast(), from.as_ptr().cast(), to.len() / 32) };
    Ok(())
}

#[cfg(not(target_arch = "x86_64"))]
fn string(_: &mut [u8], _: &[u8]) -> Result<()> {
    anyhow::bail!("x86-64 only")
}

#[cfg(not(target_arch = "x86_64"))]
fn streaming(_: &mut [u8], _: &[u8]) -> Result<()> {
    anyhow::bail!("x86-64 only")
}

fn main() -> Result<()> {
    match Options::parse() {
        Options::Server { bytes } => {
            use std::os::fd::AsRawFd;
            let memory = Memory::new("shared", bytes)?;
            let path = format!("/proc/{}/fd/{}", std::process::id(), memory.file().as_raw_fd());
            serve(&json!({"what": "ready", "address": path}))
        }
        Options::Learner { way, memory } => {
            let file = OpenOptions::new().read(true).write(true).open(&memory);
            let shared = Memory::of(file.with_context(|| format!("opening {}", memory.display()))?)?;
            let mut own = Memory::new("own", shared.len())?;
            pattern::fill(&mut own, 0);
            learn(&mut Copier { own, shared, way })
        }
    }
}
