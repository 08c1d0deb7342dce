//! Files that programs have open, by the number the kernel knows them by.

use std::cell::LazyCell;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use parking_lot::RwLock;

use super::endings::{self, Candidate};
use super::users::FileUsers;
use crate::fs::OpenFile;
use crate::fs::node::{MapsTo, Node};
use crate::session::error::{CallError, CallResult};

/// A file that programs have open.
pub struct ProgramFile {
    /// The file's function.
    pub file: OpenFile,
    /// Its inode.
    pub ino: u64,
    /// The thread that opened it.
    pub opener: u32,
    /// The file's writers, if it was opened to write.
    pub users: Option<FileUsers>,
}

impl ProgramFile {
    /// Whether programs that map `gradients` by it store into the learner's memory itself.
    pub fn maps_memory(&self) -> bool {
        matches!(Node::from_ino(self.ino), Some(Node::Model(_, file)) if file.maps() == Some(MapsTo::Memory))
    }
}

/// All open files.
#[derive(Default)]
pub struct OpenFiles {
    next: AtomicU64,
    open: RwLock<HashMap<u64, Arc<ProgramFile>>>,
    /// The device of the mount.
    device: OnceLock<String>,
    /// Said once that the descriptors of some process cannot be seen.
    warned: AtomicBool,
}

/// Most files open at once.
const MAX_OPEN: usize = 1 << 20;

impl OpenFiles {
    /// The mount has this device.
    pub fn mounted_as(&self, device: Option<String>) {
        if let Some(device) = device {
            self.device.get_or_init(|| device);
        }
    }

    /// Takes a file in; `None` when there are too many.
    pub fn insert(&self, file: Arc<ProgramFile>) -> Option<u64> {
        let mut open = self.open.write();
        if open.len() >= MAX_OPEN {
            return None;
        }
        let fh = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        open.insert(fh, file);
        Some(fh)
    }

    /// The file with this number.
    ///
    /// # Errors
    /// EBADF.
    pub fn get(&self, fh: u64) -> CallResult<Arc<ProgramFile>> {
        let file = self.open.read().get(&fh).cloned();
        file.ok_or_else(|| CallError::new(libc::EBADF, format!("no open file {fh}")))
    }

    /// Closes it.
    pub fn remove(&self, fh: u64) -> Option<Arc<ProgramFile>> {
        self.open.write().remove(&fh)
    }

    /// Files open now.
    pub fn len(&self) -> usize {
        self.open.read().len()
    }

    /// The file of this inode that a truncation by thread `tid` is of, if it names none.
    pub fn truncated(&self, ino: u64, tid: u32) -> Option<Arc<ProgramFile>> {
        let open = self.open.read();
        let of_inode = open.iter().filter(|(_, file)| file.ino == ino).map(|(&fh, file)| Candidate {
            fh,
            opener: file.opener,
            is_writable: file.users.is_some(),
            is_written: file.file.is_written(),
        });
        endings::truncated(of_inode, tid).and_then(|fh| open.get(&fh).cloned())
    }

    /// Whether a process that closes a descriptor of the open file `fh` has another one of that file. `owners`: the
    /// process, and whom it has inherited descriptors from. None if its descriptors cannot be seen.
    pub fn has_duplicate(&self, fh: u64, ino: u64, owners: &[u32]) -> Option<bool> {
        let file = Sought { ino, device: self.device.get().map(String::as_str) };
        let pid = *owners.first()?;
        let others = self.others(fh, ino, owners);
        let seen = has_more(pid, &file, others).and_then(|more| {
            // Another thread may have opened one meanwhile.
            let now = self.others(fh, ino, owners);
            if more && now > others { has_more(pid, &file, now) } else { Ok(more) }
        });
        if seen.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                pid,
                "the descriptors of a process cannot be seen: there the close of a duplicate ends what was written \
                 (NumPy's tofile). Start gradfs as root, or as that process's user"
            );
        }
        seen.ok()
    }

    /// The number of other open files of the inode that may have descriptors of the owners and can be written. Files
    /// whose last descriptor was closed are in the table until the kernel says so.
    pub(super) fn others(&self, fh: u64, ino: u64, owners: &[u32]) -> usize {
        // Where its opener cannot be seen, a file may be theirs.
        let is_theirs = |users: &FileUsers| users.opener.is_none_or(|opener| owners.contains(&opener));
        let has_some = |users: &FileUsers| is_theirs(users) && !users.is_closed();
        let open = self.open.read();
        let of_inode = open.iter().filter(|(other, file)| **other != fh && file.ino == ino);
        of_inode.filter(|(_, file)| file.users.as_ref().is_some_and(has_some)).count()
    }
}

/// A file that descriptors lead to.
struct Sought<'a> {
    /// Its inode. Numbers of this filesystem's inodes are far above those of others, but all gradfs mounts have the
    /// same.
    pub ino: u64,
    /// The device of its mount, as mountinfo names it.
    pub device: Option<&'a str>,
}

/// Whether process `pid` has more than `most` descriptors that can write to the file.
///
/// # Errors
/// When they cannot be seen.
fn has_more(pid: u32, file: &Sought<'_>, most: usize) -> io::Result<bool> {
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
