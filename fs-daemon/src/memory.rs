//! Whether what is asked for fits this machine: better a clear word at the start than the kernel's
//! out-of-memory killer in the middle of a training run.

use libmodelio::layout::{DType, ModelLayout};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use ps_backend::controls::Controls;
use ps_backend::memory::available;

use crate::error::Error;

/// Refuses a model that the machine has no memory for.
///
/// # Errors
/// With what is needed and what is there.
pub fn check(name: &str, layout: &ModelLayout, controls: &Controls) -> Result<(), Error> {
    refuse_above_available(name, needed(layout, controls))
}

/// Refuses to show a model of `size` bytes, held elsewhere, that the machine has no memory for: the version that is
/// shown, the one that comes, and one that is read.
///
/// # Errors
/// As [`check`].
pub fn check_shown(name: &str, size: u64) -> Result<(), Error> {
    refuse_above_available(name, 3 * u128::from(size))
}

/// The same by size alone, before even the tables of blocks are made.
///
/// # Errors
/// As [`check`].
pub fn check_size(name: &str, size: u64, controls: &Controls) -> Result<(), Error> {
    refuse_above_available(name, u128::from(size) * (3 + u128::from(controls.retain)))
}

fn refuse_above_available(name: &str, needed: u128) -> Result<(), Error> {
    let Some(available) = available() else { return Ok(()) };
    if needed <= u128::from(available) {
        return Ok(());
    }
    let gib = |bytes: u128| bytes as f64 / (1u64 << 30) as f64;
    Err(Error::new(format!(
        "model {name}: not enough memory: it takes {:.1} GiB, {:.1} GiB are available",
        gib(needed),
        gib(u128::from(available))
    ))
    .hint("use a smaller model, fewer retained versions (--retain 0) or a reducer with less state"))
}

/// Bytes that are in use once a few versions have been made: versions (the newest, the next, the retained
/// ones and one to spare), and masters and optimizer state, each twice.
fn needed(layout: &ModelLayout, controls: &Controls) -> u128 {
    let halves = layout.tensors().iter().any(|t| matches!(t.dtype, DType::F16 | DType::BF16));
    let arrays = 2 * (controls.reducer.state_slots() + usize::from(halves));
    u128::from(layout.size()) * (3 + u128::from(controls.retain))
        + u128::from(layout.elements()) * 4 * arrays as u128
}

/// Allows as much memory to be pinned for RDMA as the system lets us. Whether that suffices, the devices say.
pub fn raise_lock_limit() {
    let raised = getrlimit(Resource::RLIMIT_MEMLOCK)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_MEMLOCK, hard, hard));
    if let Err(error) = raised {
        tracing::debug!(%error, "the limit on pinned memory stays as it is");
    }
}

/// Allows as many open files as the system lets us: each learner has two regions, each version one.
pub fn raise_file_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit on open files stays as it is; many learners may not fit");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_count_versions_masters_and_state() {
        let layout = |dtype| ModelLayout::blank(1 << 20, dtype, 256 << 10).unwrap();
        let controls = Controls::default().with("reducer", "adam").unwrap();
        assert_eq!(needed(&layout(DType::F32), &Controls::default()), 4 << 20);
        assert_eq!(needed(&layout(DType::F32), &controls), 8 << 20);
        // Half as many bytes an element: masters and moments weigh double.
        assert_eq!(needed(&layout(DType::BF16), &controls), 16 << 20);
    }
}
