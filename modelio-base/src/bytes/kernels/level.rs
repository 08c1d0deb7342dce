//! The instruction set of the kernels, chosen at run time.

#[cfg(target_arch = "aarch64")]
use std::arch::is_aarch64_feature_detected;
use std::cell::Cell;

use super::line::{Line, Portable};
#[cfg(target_arch = "aarch64")]
use super::neon::Neon;
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512};

/// Instruction set of the kernels. All levels give the same bits.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The target's baseline.
    Portable,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512F.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Level {
    /// Every level this CPU has, best first. The standard library caches what the CPU says.
    pub fn available() -> impl Iterator<Item = Self> {
        [
            #[cfg(target_arch = "x86_64")]
            is_x86_feature_detected!("avx512f").then_some(Self::Avx512),
            #[cfg(target_arch = "x86_64")]
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(Self::Avx2),
            #[cfg(target_arch = "aarch64")]
            is_aarch64_feature_detected!("neon").then_some(Self::Neon),
            Some(Self::Portable),
        ]
        .into_iter()
        .flatten()
    }
}

thread_local! {
    static FORCED: Cell<Option<Level>> = const { Cell::new(None) };
}

/// Run `f` with this thread's kernels at `level`; None, and `f` not run, where the CPU lacks it.
#[doc(hidden)]
pub fn with_level<R>(level: Level, f: impl FnOnce() -> R) -> Option<R> {
    Level::available().any(|have| have == level).then(|| {
        let before = FORCED.replace(Some(level));
        let result = f();
        FORCED.set(before);
        result
    })
}

/// A computation written once for all levels.
pub(super) trait Kernel {
    type Output;
    /// Implementations are `#[inline(always)]`: they must end up in the entry functions below.
    fn run<L: Line>(self) -> Self::Output;
}

/// Run `kernel` at the best level of this CPU.
pub(super) fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    // Only available levels are ever forced.
    match FORCED.get().or_else(|| Level::available().next()) {
        // SAFETY: the level is available, so the CPU has avx512f.
        #[cfg(target_arch = "x86_64")]
        Some(Level::Avx512) => unsafe { enter_avx512(kernel) },
        // SAFETY: the level is available, so the CPU has avx2 and f16c.
        #[cfg(target_arch = "x86_64")]
        Some(Level::Avx2) => unsafe { enter_avx2(kernel) },
        // SAFETY: the level is available, so the CPU has neon.
        #[cfg(target_arch = "aarch64")]
        Some(Level::Neon) => unsafe { enter_neon(kernel) },
        Some(Level::Portable) | None => kernel.run::<Portable>(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn enter_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn enter_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn enter_neon<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Neon>()
}
