//! Facts about a process from `/proc`.

/// The text behind `name:` in `/proc/<pid>/status`.
pub fn line_of_status<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// A set of bits in `/proc/<pid>/status`, such as that of the ignored signals, `SigIgn`.
pub fn mask_in_status(status: &str, name: &str) -> u64 {
    line_of_status(status, name).and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0)
}

/// Field 9 of a `/proc/<pid>/stat`: the kernel's flags of the process.
pub fn flags_in_stat(stat: &str) -> u64 {
    field(stat, 9).and_then(|flags| flags.parse().ok()).unwrap_or(0)
}

/// A field of `/proc/<pid>/stat`, counted from 1, behind the name.
pub fn field(stat: &str, number: usize) -> Option<&str> {
    // The name, field 2, may hold anything, brackets and spaces too: the fields behind its last bracket
    // count.
    stat[stat.rfind(')')? + 1..].split_ascii_whitespace().nth(number.checked_sub(3)?)
}
