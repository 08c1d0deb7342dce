//! What a model takes of a process's memory: better a clear word when a model is made than the kernel's out-of-memory
//! killer in the middle of a training run.

use std::fmt;

pub use libmodelio::bytes::available::available;

use libmodelio::bytes::available::unpromised;
use libmodelio::vocabulary::controls::{Consistency, Controls};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use parking_lot::Mutex;

use crate::state_copies::StateCopies;

/// Versions besides the retained ones: the newest, and the next. Readers that hold older ones take more.
const VERSIONS: u64 = 2;
/// Of a shard: what the running plan has added up. While contributions of concluded plans wait, there is a second one.
const SUMS: u64 = 1;

/// Memory that a shard's models leave of what is available: for its connections, and for what its operator does there.
/// It is a sixteenth of that, and at most so many bytes.
const MAX_RESERVE: u64 = 1 << 30;

/// Held by whoever takes memory for a partition, or for a copy of one. Two that look at once would count on the same pages.
static TAKING: Mutex<()> = Mutex::new(());

/// The memory that models of a shard may take, if that can be told. What is promised to others is theirs.
pub fn for_models() -> Option<u64> {
    unpromised().map(less_reserve)
}

/// Has `take` take `needed` bytes of what `available` tells, if they are there. One at a time looks and takes.
///
/// # Errors
/// The bytes that are available, if they are too few. Nothing is taken then.
pub fn take<T>(
    needed: u64,
    available: impl FnOnce() -> Option<u64>,
    take: impl FnOnce() -> T,
) -> Result<T, u64> {
    let _taking = TAKING.lock();
    match available().filter(|&available| available < needed) {
        Some(available) => Err(available),
        None => Ok(take()),
    }
}

fn less_reserve(available: u64) -> u64 {
    available - (available / 16).min(MAX_RESERVE)
}

/// Bytes of memory, by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Versions, and the one that is made.
    pub versions: u64,
    /// fp32 masters of narrower weights.
    pub masters: u64,
    /// Optimizer state.
    pub state: u64,
    /// Sums of contributions.
    pub sums: u64,
    /// Learners' staging.
    pub staging: u64,
}

impl MemoryUse {
    /// Of a model in this process (`gradfs up`) with `control/learners` learners, once all of them have contributed.
    /// The host's memory has so many copies of optimizer state, or a device has it. A learner that maps `gradients`
    /// takes as much as one whose contribution is staged, but what is mapped by several is added up before the last of
    /// them has come. So is everything that is measured.
    pub fn of_one_process(
        layout: &ModelLayout,
        controls: &Controls,
        copies: Option<StateCopies>,
    ) -> MemoryUse {
        let staging = layout.size().saturating_mul(controls.learners.max(1).into());
        let several = controls.learners > 1 || controls.measures();
        let first = several || changes_in_place(layout, controls, copies);
        let adds_up = first && !sums_lie_in_versions(layout, controls, copies);
        let sums = if adds_up { layout.elements().saturating_mul(4) } else { 0 };
        MemoryUse { sums, staging, ..MemoryUse::kept(layout, controls, controls.retain.into(), copies) }
    }

    /// Of the blocks of a model that one shard owns, in the same way.
    pub fn of_partition(layout: &ModelLayout, controls: &Controls, copies: Option<StateCopies>) -> MemoryUse {
        let adds_up = !sums_lie_in_versions(layout, controls, copies);
        let sums = if adds_up { layout.elements().saturating_mul(4 * SUMS) } else { 0 };
        MemoryUse { sums, ..MemoryUse::kept(layout, controls, 0, copies) }
    }

    /// Of a mount that shows a model of `bytes`, held by shards: the version that is shown, the one that comes, and a
    /// learner's staging.
    pub fn of_mount(bytes: u64) -> MemoryUse {
        MemoryUse { versions: bytes.saturating_mul(VERSIONS), staging: bytes, ..MemoryUse::default() }
    }

    /// The least that a model of `bytes` takes in one process, which is known before the tables of its blocks are made.
    pub fn at_least(bytes: u64, controls: &Controls) -> MemoryUse {
        let versions = bytes.saturating_mul(VERSIONS + u64::from(controls.retain));
        MemoryUse { versions, ..MemoryUse::default() }
    }

    fn kept(
        layout: &ModelLayout,
        controls: &Controls,
        retained: u64,
        copies: Option<StateCopies>,
    ) -> MemoryUse {
        let copies = copies.map_or(0, StateCopies::count);
        let halves = layout.tensors().iter().any(|tensor| tensor.dtype.is_narrow());
        // fp32, of all elements.
        let arrays = |count: usize| layout.elements().saturating_mul(4 * (copies * count) as u64);
        MemoryUse {
            versions: layout.size().saturating_mul(VERSIONS + retained),
            masters: arrays(usize::from(halves && controls.widest_reducer().keeps_masters())),
            state: arrays(controls.widest_reducer().state_slots()),
            ..MemoryUse::default()
        }
    }

    /// The bytes that a model takes of a device which has its state: its weights or their masters, and the state.
    pub fn on_device(layout: &ModelLayout, controls: &Controls) -> u64 {
        layout.elements().saturating_mul(4).saturating_mul(1 + controls.widest_reducer().state_slots() as u64)
    }

    /// Of two models together.
    #[must_use]
    pub fn with(self, other: MemoryUse) -> MemoryUse {
        MemoryUse {
            versions: self.versions.saturating_add(other.versions),
            masters: self.masters.saturating_add(other.masters),
            state: self.state.saturating_add(other.state),
            sums: self.sums.saturating_add(other.sums),
            staging: self.staging.saturating_add(other.staging),
        }
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.items().iter().fold(0, |total, (_, bytes)| total.saturating_add(*bytes))
    }

    /// Each with its name.
    pub fn items(&self) -> [(&'static str, u64); 5] {
        let MemoryUse { versions, masters, state, sums, staging } = *self;
        [("versions", versions), ("masters", masters), ("state", state), ("sums", sums), ("staging", staging)]
    }
}

/// Whether a version changes state or masters in place. Then it is computed once it counts, and contributions are added up
/// until then.
fn changes_in_place(layout: &ModelLayout, controls: &Controls, copies: Option<StateCopies>) -> bool {
    let reducer = controls.widest_reducer();
    let is_narrow = || layout.tensors().iter().any(|tensor| tensor.dtype.is_narrow());
    match copies {
        None => true,
        Some(StateCopies::Single) => reducer.state_slots() > 0 || reducer.keeps_masters() && is_narrow(),
        Some(StateCopies::Double) => false,
    }
}

/// Whether contributions are added up where the next version will be, as long as all learners are waited for.
fn sums_lie_in_versions(layout: &ModelLayout, controls: &Controls, copies: Option<StateCopies>) -> bool {
    let mut types = layout.tensors().iter().map(|tensor| tensor.dtype);
    let in_place = match copies {
        None => !controls.reducer.combine().replaces(),
        Some(copies) => copies == StateCopies::Single && controls.widest_reducer().state_slots() > 0,
    };
    in_place
        && !controls.measures()
        && controls.consistency == Consistency::Sync
        && types.all(|dtype| matches!(dtype, DType::F32 | DType::F64))
}

/// A line: what is not nothing, by its name, in GiB.
impl fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        for (name, bytes) in self.items().into_iter().filter(|(_, bytes)| *bytes > 0) {
            let sign = if std::mem::take(&mut first) { "" } else { " + " };
            write!(f, "{sign}{name} {:.1}", gib(bytes))?;
        }
        f.write_str(" GiB")
    }
}

/// Bytes as GiB.
pub fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

#[cfg(test)]
mod tests;
