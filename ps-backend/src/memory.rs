//! What a model takes of a process's memory, and how much there is to take: better a clear word when a model is made than
//! the kernel's out-of-memory killer in the middle of a training run.

use std::fmt;
use std::fs::read_to_string;
use std::path::Path;

use libmodelio::vocabulary::layout::{DType, ModelLayout};

use libmodelio::vocabulary::controls::{Consistency, Controls};

use crate::state_copies::StateCopies;

/// Versions besides the retained ones: the newest, and the next. Readers that hold older ones take more.
const VERSIONS: u64 = 2;
/// Of a shard: what the running plan has added up. While contributions of concluded plans wait, there is a second one.
const SUMS: u64 = 1;

/// Bytes of memory, by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Versions, and the one that is made.
    pub versions: u64,
    /// fp32 masters of half-precision weights.
    pub masters: u64,
    /// Optimizer state.
    pub state: u64,
    /// Sums of contributions.
    pub sums: u64,
    /// Learners' staging.
    pub staging: u64,
}

impl MemoryUse {
    /// Of a model in this process (`gradfs up`) with `control/learners` learners, once all of them have contributed. A
    /// learner that maps `gradients` takes as much as one whose contribution is staged, but what is mapped by several is
    /// added up before the last of them has come. So is everything that is measured.
    pub fn of_one_process(layout: &ModelLayout, controls: &Controls, copies: StateCopies) -> MemoryUse {
        let staging = layout.size().saturating_mul(controls.learners.max(1).into());
        let adds_up = (controls.learners > 1 || controls.reducer.measures(&controls.hyper))
            && !sums_lie_in_versions(layout, controls, copies);
        let sums = if adds_up { layout.elements().saturating_mul(4) } else { 0 };
        MemoryUse { sums, staging, ..MemoryUse::kept(layout, controls, controls.retain.into(), copies) }
    }

    /// Of the blocks of a model that one shard owns.
    pub fn of_partition(layout: &ModelLayout, controls: &Controls, copies: StateCopies) -> MemoryUse {
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

    fn kept(layout: &ModelLayout, controls: &Controls, retained: u64, copies: StateCopies) -> MemoryUse {
        let halves = layout.tensors().iter().any(|tensor| matches!(tensor.dtype, DType::F16 | DType::BF16));
        // fp32, of all elements.
        let arrays = |count: usize| layout.elements().saturating_mul(4 * (copies.count() * count) as u64);
        MemoryUse {
            versions: layout.size().saturating_mul(VERSIONS + retained),
            masters: arrays(usize::from(halves)),
            state: arrays(controls.reducer.state_slots()),
            ..MemoryUse::default()
        }
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

/// Whether contributions are added up where the next version will be, as long as all learners are waited for.
fn sums_lie_in_versions(layout: &ModelLayout, controls: &Controls, copies: StateCopies) -> bool {
    let mut types = layout.tensors().iter().map(|tensor| tensor.dtype);
    copies == StateCopies::Single
        && controls.reducer.state_slots() > 0
        && !controls.reducer.measures(&controls.hyper)
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

/// Bytes this process can still take, as far as the system tells: of the machine, and of each control group that it is in.
pub fn available() -> Option<u64> {
    available_of(Path::new("/proc"), Path::new("/sys/fs/cgroup"))
}

fn available_of(proc: &Path, groups: &Path) -> Option<u64> {
    let meminfo = read_to_string(proc.join("meminfo")).ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let machine = kib.saturating_mul(1024);
    let membership = read_to_string(proc.join("self/cgroup")).unwrap_or_default();
    Some(membership.lines().filter_map(|line| group_available(groups, line)).fold(machine, u64::min))
}

/// What control groups call the same thing, in either version of their interface.
struct Files {
    limit: &'static str,
    used: &'static str,
    /// Of the files that were read and can be dropped, those of the groups below included.
    cache: [&'static str; 2],
}

const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: ["total_inactive_file", "total_active_file"],
};
const V2: Files =
    Files { limit: "memory.max", used: "memory.current", cache: ["inactive_file", "active_file"] };

/// The least that the group of a line of /proc/self/cgroup, or one above it, has left; `None` without a limit.
fn group_available(groups: &Path, line: &str) -> Option<u64> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    let (files, root) = match controllers {
        "" => (&V2, groups.to_owned()),
        _ if controllers.split(',').any(|name| name == "memory") => (&V1, groups.join("memory")),
        _ => return None,
    };
    // In a namespace of its own, a group may be shown as its root's.
    let group = root.join(path.trim_start_matches('/'));
    group
        .ancestors()
        .take_while(|group| group.starts_with(&root))
        .filter_map(|group| left(group, files))
        .min()
}

/// What the limit of one group leaves. What the kernel can drop at once is not counted as used.
fn left(group: &Path, files: &Files) -> Option<u64> {
    let number = |file| -> Option<u64> { read_to_string(group.join(file)).ok()?.trim().parse().ok() };
    let (limit, used) = (number(files.limit)?, number(files.used)?);
    let stat = read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cache = |name| -> u64 {
        let value = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or(0)
    };
    let reclaimable = files.cache.into_iter().map(cache).fold(0, u64::saturating_add);
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

#[cfg(test)]
mod tests;
