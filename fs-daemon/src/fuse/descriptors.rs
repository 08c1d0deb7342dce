//! The descriptors that a process has, from `/proc` (edge module).
//!
//! Neither reading a link in `/proc/<pid>/fd` nor a file in `/proc/<pid>/fdinfo` asks the filesystem of the open file. So a
//! thread that serves the mount may look.

use std::ffi::OsStr;
use std::fs;

/// The number of descriptors of process `pid` that lead to an inode `ino` of `device`, as mountinfo names it. None if they
/// cannot be seen. Numbers of this filesystem's inodes are far above those of others, but all gradfs mounts have the same.
pub fn count(pid: u32, ino: u64, device: Option<&str>) -> Option<usize> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let leads_there = |number: &OsStr| {
        let number = number.to_str()?;
        // Sockets, pipes and the like are told apart by the link alone.
        let link = fs::read_link(format!("/proc/{pid}/fd/{number}")).ok()?;
        let info =
            link.is_absolute().then(|| fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")))?.ok()?;
        let is_it = field(&info, "ino:")?.parse() == Ok(ino);
        is_it.then(|| field(&info, "mnt_id:").unwrap_or_default().to_owned())
    };
    let mounts: Vec<String> =
        entries.filter_map(Result::ok).filter_map(|entry| leads_there(&entry.file_name())).collect();
    let Some(device) = device.filter(|_| !mounts.is_empty()) else { return Some(mounts.len()) };
    let table = fs::read(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
    let table = String::from_utf8_lossy(&table);
    Some(mounts.iter().filter(|id| is_of(&table, id, device)).count())
}

/// What the text of an fdinfo has behind `name`.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// Whether the mount of this number is of the device.
fn is_of(table: &str, id: &str, device: &str) -> bool {
    let mut mounts = table.lines().map(|line| line.split(' '));
    mounts.any(|mut fields| fields.next() == Some(id) && fields.nth(1) == Some(device))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn duplicates_of_a_descriptor_are_counted() {
        let file = tempfile::tempfile().unwrap();
        let (pid, ino) = (std::process::id(), file.metadata().unwrap().ino());
        let before = count(pid, ino, None).unwrap();
        assert!(before >= 1);
        let duplicates = [(); 3].map(|()| file.try_clone().unwrap());
        assert_eq!(count(pid, ino, None), Some(before + 3));
        drop(duplicates);
        assert_eq!(count(pid, ino, None), Some(before));
        assert_eq!(count(0, ino, None), None, "of nobody");
        assert_eq!(count(pid, ino, Some("no device")), Some(0));
    }

    #[test]
    fn descriptors_of_other_mounts_are_told_apart() {
        let info = "pos:\t0\nflags:\t0100002\nmnt_id:\t29\nino:\t1234\n";
        assert_eq!((field(info, "ino:"), field(info, "mnt_id:")), (Some("1234"), Some("29")));
        let table = "28 1 8:1 / / rw - ext4 /dev/sda1 rw\n29 28 0:35 / /mnt rw - fuse.gradfs gradfs rw\n";
        assert!(is_of(table, "29", "0:35") && !is_of(table, "29", "0:36") && !is_of(table, "30", "0:35"));
    }
}
