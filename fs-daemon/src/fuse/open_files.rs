//! Files that programs have open, by the number the kernel knows them by.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;

use super::descriptors::Sought;
use super::endings::Candidate;
use super::users::FileUsers;
use super::{descriptors, endings};
use crate::fs::node::{MapsTo, Node};
use crate::fs::open_file::OpenFile;
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

    /// Whether a process that closes a descriptor of the open file `fh` has another one of that file. `owners`: the process,
    /// and whom it has inherited descriptors from. None if its descriptors cannot be seen.
    pub fn has_duplicate(&self, fh: u64, ino: u64, owners: &[u32]) -> Option<bool> {
        let file = Sought { ino, device: self.device.get().map(String::as_str) };
        let pid = *owners.first()?;
        let others = self.others(fh, ino, owners);
        let seen = descriptors::has_more(pid, &file, others).and_then(|more| {
            // Another thread may have opened one meanwhile.
            let now = self.others(fh, ino, owners);
            if more && now > others { descriptors::has_more(pid, &file, now) } else { Ok(more) }
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

    /// The number of other open files of the inode that may have descriptors of the owners and can be written. Files whose
    /// last descriptor was closed are in the table until the kernel says so.
    pub(super) fn others(&self, fh: u64, ino: u64, owners: &[u32]) -> usize {
        // Where its opener cannot be seen, a file may be theirs.
        let is_theirs = |users: &FileUsers| users.opener.is_none_or(|opener| owners.contains(&opener));
        let has_some = |users: &FileUsers| is_theirs(users) && !users.is_closed();
        let open = self.open.read();
        let of_inode = open.iter().filter(|(other, file)| **other != fh && file.ino == ino);
        of_inode.filter(|(_, file)| file.users.as_ref().is_some_and(has_some)).count()
    }
}
