//! The formula, and control groups as they lie in files.

use std::fs;

use super::*;
use crate::state_copies::StateCopies::{Double, Single};

fn layout(dtype: DType) -> ModelLayout {
    ModelLayout::blank(1 << 20, dtype, 256 << 10).unwrap()
}

fn with(settings: &[(&str, &str)]) -> Controls {
    Controls::default().with_all(settings.iter().copied()).unwrap()
}

#[test]
fn one_formula_counts_versions_masters_state_sums_and_staging() {
    let mib = |use_: MemoryUse| use_.items().map(|(_, bytes)| bytes >> 20);
    let process =
        |dtype, controls: &Controls, copies| mib(MemoryUse::of_one_process(&layout(dtype), controls, copies));
    let plain = Controls::default();
    let adam = with(&[("reducer", "adam"), ("learners", "2"), ("retain", "3")]);
    assert_eq!(process(DType::F32, &plain, Single), [2, 0, 0, 0, 1]);
    assert_eq!(process(DType::F32, &adam, Double), [5, 0, 4, 1, 2]);
    assert_eq!(process(DType::F32, &adam, Single), [5, 0, 2, 0, 2], "sums lie where the version will be");
    let clips = with(&[("clip_norm", "1")]);
    assert_eq!(process(DType::F32, &clips, Single), [2, 0, 0, 1, 1]);
    // Half as many bytes an element: masters, moments and sums weigh double.
    assert_eq!(process(DType::BF16, &adam, Double), [5, 4, 8, 2, 2]);
    assert_eq!(process(DType::BF16, &adam, Single), [5, 2, 4, 2, 2]);
    let shard = |controls, copies| mib(MemoryUse::of_partition(&layout(DType::F32), controls, copies));
    assert_eq!(shard(&adam, Double), [2, 0, 4, 1, 0]);
    assert_eq!(shard(&adam, Single), [2, 0, 2, 0, 0]);
    let asynchronous = with(&[("reducer", "adam"), ("consistency", "async")]);
    assert_eq!(shard(&asynchronous, Single), [2, 0, 2, 1, 0], "sums wait for the version after the next");
    assert_eq!(mib(MemoryUse::of_mount(1 << 20)), [2, 0, 0, 0, 1]);
    assert_eq!(MemoryUse::of_mount(1 << 20).total(), 3 << 20);
    let whole = MemoryUse::of_one_process(&layout(DType::F32), &adam, Single);
    assert!(MemoryUse::at_least(1 << 20, &adam).total() <= whole.total());
    assert_eq!(MemoryUse::at_least(u64::MAX, &adam).total(), u64::MAX, "no overflow");
}

#[test]
fn the_memory_of_a_model_has_a_name_for_each_use() {
    let text = MemoryUse { versions: 3 << 30, staging: 1 << 29, ..MemoryUse::default() }.to_string();
    assert_eq!(text, "versions 3.0 + staging 0.5 GiB");
}

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
