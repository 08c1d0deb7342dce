//! Checks whether a job fits this machine: a clear word at the start is better than the kernel's
//! out-of-memory killer in the middle of a training run.

use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::layout::ModelLayout;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use ps_backend::memory::{MemoryUse, available, gib};
use ps_backend::state_copies::StateCopies;

use crate::error::Error;

/// Refuses a model that the machine has no memory for.
///
/// # Errors
/// The error names the needed and the available memory.
pub fn check(
    name: &str,
    layout: &ModelLayout,
    controls: &Controls,
    copies: Option<StateCopies>,
) -> Result<(), Error> {
    refuse_above_available(name, MemoryUse::of_one_process(layout, controls, copies))
}

/// Refuses models that the machine has no memory for together.
///
/// # Errors
/// Fails as [`check`] does.
pub fn check_together(needed: MemoryUse) -> Result<(), Error> {
    refuse_above_available("of all together", needed)
}

/// Refuses to show a model of `size` bytes, held elsewhere, that the machine has no memory for.
///
/// # Errors
/// Fails as [`check`] does.
pub fn check_shown(name: &str, size: u64) -> Result<(), Error> {
    refuse_above_available(name, MemoryUse::of_mount(size))
}

/// The same by size alone, before even the tables of blocks are made.
///
/// # Errors
/// Fails as [`check`] does.
pub fn check_size(name: &str, size: u64, controls: &Controls) -> Result<(), Error> {
    refuse_above_available(name, MemoryUse::at_least(size, controls))
}

fn refuse_above_available(name: &str, needed: MemoryUse) -> Result<(), Error> {
    let Some(available) = available().filter(|&available| available < needed.total()) else { return Ok(()) };
    Err(Error::new(format!(
        "model {name}: not enough memory: it takes {:.1} GiB ({needed}), {:.1} GiB are available",
        gib(needed.total()),
        gib(available)
    ))
    .hint(
        "use a smaller model, fewer learners or retained versions (--learners 1, --retain 0) or a reducer with less state; \
         `gradfs up --dry-run` shows what each takes",
    ))
}

/// A table for people of the memory that the model takes.
pub fn table(name: &str, layout: &ModelLayout, controls: &Controls, copies: Option<StateCopies>) -> String {
    let needed = MemoryUse::of_one_process(layout, controls, copies);
    let blocks = layout.blocks();
    let mut text = format!(
        "{name}: {} bytes in {blocks} block(s), reducer {}, {} learner(s)\n",
        layout.size(),
        controls.get("reducer").unwrap_or_default(),
        controls.learners,
    );
    let items = needed.items().into_iter().filter(|(_, bytes)| *bytes > 0);
    for (item, bytes) in items.chain([("in all", needed.total())]) {
        text.push_str(&format!("  {item:<10}{bytes:>16}  {:>8.3} GiB\n", gib(bytes)));
    }
    text
}

/// Says how much memory there is beside `needed` bytes.
///
/// # Errors
/// If it is less.
pub fn compare(needed: u64) -> Result<(), Error> {
    let Some(available) = available() else { return Ok(()) };
    println!("{:<12}{available:>16}  {:>8.3} GiB", "available", gib(available));
    if needed <= available {
        return Ok(());
    }
    Err(Error::new(format!(
        "not enough memory: {:.1} GiB are needed, {:.1} available",
        gib(needed),
        gib(available)
    )))
}

/// Allows as much memory to be pinned for RDMA as the system lets us. The devices say whether that suffices.
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
