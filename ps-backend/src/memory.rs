//! How much memory there is to take: better a clear word when a model is made than the kernel's out-of-memory killer
//! in the middle of a training run.

use std::fs::read_to_string;

/// Bytes this process can still take, as far as the system tells.
pub fn available() -> Option<u64> {
    let meminfo = read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let machine = kib.saturating_mul(1024);
    Some(group_available().map_or(machine, |group| group.min(machine)))
}

/// The same within the control group, if it has a limit.
fn group_available() -> Option<u64> {
    let groups = read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let number = |file: &str| -> Option<u64> {
        read_to_string(format!("/sys/fs/cgroup{path}/{file}")).ok()?.trim().parse().ok()
    };
    Some(number("memory.max")?.saturating_sub(number("memory.current")?))
}

#[cfg(test)]
mod tests {
    use super::available;

    #[test]
    fn this_machine_has_some_memory() {
        assert!(available().is_none_or(|bytes| bytes > 1 << 20));
    }
}
