//! The descriptors that a process has, from `/proc` (edge module).
//!
//! A file in `/proc/<pid>/fdinfo` is read without asking the filesystem of the open file, and without the lock that a process
//! in execve(2) holds while its files are closed. So a thread that serves the mount may look. The links in `/proc/<pid>/fd`
//! take that lock (Linux 6.18): nobody would answer then.

use std::cell::LazyCell;
use std::fs::{self, File};
use std::io::{self, Read};

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

/// A file that descriptors lead to.
pub struct Sought<'a> {
    /// Its inode. Numbers of this filesystem's inodes are far above those of others, but all gradfs mounts have the same.
    pub ino: u64,
    /// The device of its mount, as mountinfo names it.
    pub device: Option<&'a str>,
}

/// Whether process `pid` has more than `most` descriptors that can write to the file.
///
/// # Errors
/// When they cannot be seen.
pub fn has_more(pid: u32, file: &Sought<'_>, most: usize) -> io::Result<bool> {
    let path = format!("/proc/{pid}/fdinfo");
    // A file is looked up from its directory: a path through the number of a process takes longer.
    let (dir, entries) = (File::open(&path)?, fs::read_dir(&path)?);
    let table = LazyCell::new(|| {
        let table = fs::read(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
        String::from_utf8_lossy(&table).into_owned()
    });
    let mut info = String::new();
    let is_one = |entry: &fs::DirEntry| {
        info.clear();
        let open = openat(&dir, &*entry.file_name(), OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty());
        if !open.is_ok_and(|fd| File::from(fd).read_to_string(&mut info).is_ok()) {
            return false;
        }
        let is_its = field(&info, "ino:").and_then(|ino| ino.parse().ok()) == Some(file.ino);
        let mount = field(&info, "mnt_id:").unwrap_or_default();
        is_its && can_write(&info) && file.device.is_none_or(|device| is_of(&table, mount, device))
    };
    Ok(entries.filter_map(Result::ok).filter(is_one).nth(most).is_some())
}

/// Whether a descriptor with this fdinfo can write.
fn can_write(info: &str) -> bool {
    let flags = field(info, "flags:").and_then(|flags| i32::from_str_radix(flags, 8).ok());
    flags.is_none_or(|flags| flags & libc::O_ACCMODE != libc::O_RDONLY)
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
    fn duplicates_that_can_write_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gradients");
        let file = File::create(&path).unwrap();
        let pid = std::process::id();
        let sought = Sought { ino: file.metadata().unwrap().ino(), device: None };
        let count = |sought: &Sought<'_>| (0..).find(|most| !has_more(pid, sought, *most).unwrap());
        assert_eq!(count(&sought), Some(1));
        let duplicates = [(); 3].map(|()| file.try_clone().unwrap());
        let _reads = File::open(&path).unwrap();
        let _namesake = File::create(dir.path().join("more gradients")).unwrap();
        assert_eq!(count(&sought), Some(4));
        fs::remove_file(&path).unwrap();
        assert_eq!(count(&sought), Some(4), "its name was dropped");
        drop(duplicates);
        assert_eq!(count(&sought), Some(1));
        assert_eq!(count(&Sought { ino: 1, ..sought }), Some(0));
        assert_eq!(count(&Sought { device: Some("no device"), ..sought }), Some(0));
        assert!(has_more(0, &sought, 0).is_err(), "of nobody");
    }

    #[test]
    fn descriptors_of_other_mounts_are_told_apart() {
        let info = "pos:\t0\nflags:\t0100002\nmnt_id:\t29\nino:\t1234\n";
        assert_eq!((field(info, "ino:"), field(info, "mnt_id:")), (Some("1234"), Some("29")));
        let table = "28 1 8:1 / / rw - ext4 /dev/sda1 rw\n29 28 0:35 / /mnt rw - fuse.gradfs gradfs rw\n";
        assert!(is_of(table, "29", "0:35") && !is_of(table, "29", "0:36") && !is_of(table, "30", "0:35"));
    }
}
