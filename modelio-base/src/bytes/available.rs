//! How much memory there is to take: of the machine, and of the control groups that this process is in.
//!
//! A process that touches a page beyond its group's limit gets no error: the kernel's out-of-memory killer ends a process
//! of the group. So whoever takes memory for a version, or for what a learner writes, asks here first. Pages are taken when
//! they are touched, so what was promised to others and is not taken yet counts, too.

use std::fs::read_to_string;
use std::io;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::mmap::Mapping;

/// Memory of this process whose pages are promised, and not all taken yet.
static PROMISED: Mutex<Vec<Weak<Mapping>>> = Mutex::new(Vec::new());

/// A lock that is taken for longer may be the caller's own.
pub const LOCKED_FOR_LONG: Duration = Duration::from_millis(10);

/// Whoever keeps memory that nobody needs at present.
static KEEPERS: Mutex<Vec<Weak<dyn KeepsSpares>>> = Mutex::new(Vec::new());

/// Keeps free buffers, so that the next versions find theirs with their pages.
pub trait KeepsSpares: Send + Sync {
    /// Others lack memory: gives back the buffers that are free now. Does nothing if its lock is taken for long.
    fn give_back(&self);
}

/// The memory that stays for everything else when a version takes some: stacks, tables, and what programs read.
const MARGIN: u64 = 16 << 20;

/// Bytes this process can still take beside what it has promised, as far as the system tells.
pub fn unpromised() -> Option<u64> {
    left_by(&mut PROMISED.lock())
}

/// Whether `bytes` more can be taken. Nobody keeps them for the caller.
///
/// # Errors
/// `OutOfMemory`, with both numbers.
pub fn check(bytes: u64) -> io::Result<()> {
    is_enough(bytes, left_by(&mut PROMISED.lock()))
}

/// Promises the caller all pages of `memory`, before it touches the first one. It costs nothing once that is done.
///
/// # Errors
/// `OutOfMemory`, with both numbers.
pub fn promise(memory: &Arc<Mapping>) -> io::Result<()> {
    if memory.is_promised() {
        return Ok(());
    }
    let mut promised = PROMISED.lock();
    if !memory.is_promised() {
        is_enough(missing(memory), left_by(&mut promised))?;
        memory.set_promised();
        promised.push(Arc::downgrade(memory));
    }
    Ok(())
}

/// Like [`promise`], for what a program writes. If there is too little memory, free buffers of versions are given back. Of
/// those that the kernel still has open, a later call finds the memory. The caller holds no lock of a [`KeepsSpares`].
///
/// # Errors
/// `OutOfMemory`, with both numbers.
pub fn promise_before_spares(memory: &Arc<Mapping>) -> io::Result<()> {
    promise(memory).or_else(|_| {
        let keepers: Vec<_> = KEEPERS.lock().iter().filter_map(Weak::upgrade).collect();
        // A client may show memory of a shard in this process. The shard gives it back once the client has let go.
        for keeper in keepers.iter().chain(&keepers) {
            keeper.give_back();
        }
        promise(memory)
    })
}

/// A keeper is asked from now on, for as long as it lives.
pub fn asks_for_spares(keeper: Weak<dyn KeepsSpares>) {
    let mut keepers = KEEPERS.lock();
    keepers.retain(|known| known.strong_count() > 0);
    keepers.push(keeper);
}

/// The bytes of it that are not taken yet.
fn missing(memory: &Mapping) -> u64 {
    (memory.len() as u64).saturating_sub(memory.taken())
}

/// What is available beside all that is promised. What is taken for good is forgotten.
fn left_by(promised: &mut Vec<Weak<Mapping>>) -> Option<u64> {
    let mut all = 0;
    promised.retain(|memory| {
        let missing = memory.upgrade().map_or(0, |memory| missing(&memory));
        all += missing;
        missing > 0
    });
    available().map(|available| available.saturating_sub(all))
}

fn is_enough(bytes: u64, available: Option<u64>) -> io::Result<()> {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    match available.filter(|&available| available < bytes.saturating_add(MARGIN)) {
        None => Ok(()),
        Some(available) => {
            let (wanted, margin, left) = (mib(bytes), mib(MARGIN), mib(available));
            let why = format!(
                "it takes {wanted:.1} MiB and {margin:.0} MiB are to be left, {left:.1} MiB are available"
            );
            Err(io::Error::new(io::ErrorKind::OutOfMemory, why))
        }
    }
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

/// The names of a control group's files. The two versions of the interface have different ones.
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

/// The bytes that the limit of one group leaves. Cache that the kernel can drop at once does not count as used.
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
mod tests {
    use std::fs;

    use super::*;

    /// A machine with 1 GiB available, whose process is in the groups `membership`; `files` are those of the groups.
    fn available_with(membership: &str, files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        let (proc, groups) = (root.path().join("proc"), root.path().join("cgroup"));
        fs::create_dir_all(proc.join("self")).unwrap();
        fs::write(proc.join("meminfo"), "MemTotal: 4194304 kB\nMemAvailable:    1048576 kB\n").unwrap();
        fs::write(proc.join("self/cgroup"), membership).unwrap();
        for (path, text) in files {
            let path = groups.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        available_of(&proc, &groups)
    }

    #[test]
    fn without_a_limit_the_machines_memory_counts() {
        assert_eq!(available_with("", &[]), Some(1 << 30));
        assert_eq!(
            available_with("0::/a\n", &[("a/memory.max", "max\n"), ("a/memory.current", "5\n")]),
            Some(1 << 30)
        );
        // Where the interface of version 1 has no limit, it says a number that no machine has.
        let unlimited = [
            ("memory/a/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/a/memory.usage_in_bytes", "5\n"),
        ];
        assert_eq!(available_with("4:memory:/a\n", &unlimited), Some(1 << 30));
    }

    #[test]
    fn the_tightest_of_a_group_and_those_above_it_counts() {
        let files = [
            ("slice/memory.max", "1000\n"),
            ("slice/memory.current", "900\n"),
            ("slice/job/memory.max", "500\n"),
            ("slice/job/memory.current", "300\n"),
        ];
        assert_eq!(available_with("0::/slice/job\n", &files), Some(100));
        assert_eq!(available_with("0::/slice/job\n", &files[2..]), Some(200));
        // A group of its own may have no limit, and no files.
        assert_eq!(available_with("0::/slice/job/none\n", &files), Some(100));
    }

    #[test]
    fn cache_that_can_be_reclaimed_is_not_counted_as_used() {
        let files = [
            ("a/memory.max", "1000\n"),
            ("a/memory.current", "900\n"),
            ("a/memory.stat", "anon 100\nfile 800\ninactive_file 600\nactive_file 100\nshmem 100\n"),
        ];
        assert_eq!(available_with("0::/a\n", &files), Some(800));
    }

    #[test]
    fn groups_of_version_1_are_read_as_well() {
        let files = [
            ("memory/docker/memory.limit_in_bytes", "700\n"),
            ("memory/docker/memory.usage_in_bytes", "600\n"),
            ("memory/docker/memory.stat", "inactive_file 1\ntotal_inactive_file 50\ntotal_active_file 40\n"),
            ("memory/docker/one/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/docker/one/memory.usage_in_bytes", "600\n"),
        ];
        let membership = "7:cpu,cpuacct:/docker/one\n4:hugetlb,memory:/docker/one\n0::/\n";
        assert_eq!(available_with(membership, &files), Some(190));
    }

    #[test]
    fn this_machine_has_some_memory() {
        assert!(available().is_none_or(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn memory_that_is_promised_and_not_taken_yet_is_promised_to_nobody_else() {
        const PAGES: usize = 4 << 20;
        let mapping = || Arc::new(Mapping::memfd("test", PAGES).unwrap());
        let (memory, gone) = (mapping(), mapping());
        let mut promised = vec![Arc::downgrade(&memory), Arc::downgrade(&gone)];
        drop(gone);
        // SAFETY: this thread alone knows the memory.
        unsafe { memory.write(0, &[1]) };
        assert!(missing(&memory) < PAGES as u64);
        left_by(&mut promised);
        assert_eq!(promised.len(), 1, "what is gone needs nothing");
        memory.prefault().unwrap();
        left_by(&mut promised);
        assert_eq!((missing(&memory), promised.len()), (0, 0));
        // As much as this cannot be taken, and so can nothing be promised of it.
        let huge = Arc::new(Mapping::memfd("test", 1 << 46).unwrap());
        assert_eq!(promise(&huge).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        assert!(!huge.is_promised());
        promise(&memory).unwrap();
        assert!(memory.is_promised());
    }

    #[test]
    fn memory_is_taken_only_if_some_is_left_for_the_rest() {
        assert!(is_enough(u64::MAX, None).is_ok(), "nobody knows");
        assert!(is_enough(1 << 20, Some((1 << 20) + MARGIN)).is_ok());
        let error = is_enough(1 << 20, Some((1 << 20) + MARGIN - 1)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
        assert_eq!(error.to_string(), "it takes 1.0 MiB and 16 MiB are to be left, 17.0 MiB are available");
        assert!(is_enough(u64::MAX, Some(u64::MAX - 1)).is_err(), "no overflow");
    }
}
