//! The directory that a save writes into. One save at a time has its lock. A file has a name of its own there until the
//! snapshot counts, so nothing that is in the directory is written over before.
//!
//! All changes are made in the directory that was locked, wherever its path leads meanwhile. Files are made, never opened,
//! so no link of somebody else is followed.

use std::fs::{File, TryLockError};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::SnapshotError;
use super::files::{MANIFEST, is_of_snapshot};

/// The name that a file has before it takes its place.
pub(super) fn own_name(name: &str, id: &str) -> String {
    format!("{name}.{id}")
}

/// Whether this can be the identity of a snapshot.
pub(super) fn is_id(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The identity in a name that [`own_name`] has made.
fn id_in(name: &str) -> Option<&str> {
    let (of, id) = name.rsplit_once('.')?;
    ((is_of_snapshot(of) || of == MANIFEST) && is_id(id)).then_some(id)
}

/// A directory that is locked, for one snapshot.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    /// The lock goes with it.
    file: File,
    /// The identity of the snapshot, which no other one has.
    id: String,
}

impl Directory {
    /// Locks a directory.
    pub(super) fn lock(path: &Path) -> Result<Directory, SnapshotError> {
        let failed = SnapshotError::file(path);
        let file = File::open(path).map_err(&failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(SnapshotError::Busy(path.to_owned())),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| SnapshotError::Invalid(error.to_string()))?;
        let id = format!("{:016x}", u64::from_le_bytes(random));
        Ok(Directory { path: path.to_owned(), file, id })
    }

    /// The identity of the snapshot.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    fn failed(&self, name: &str) -> impl Fn(Errno) -> SnapshotError + use<> {
        let failed = SnapshotError::file(&self.path.join(name));
        move |errno| failed(errno.into())
    }

    /// Makes a file that is to be called `name`, under its own name.
    pub(super) fn create(&self, name: &str) -> Result<(PathBuf, File), SnapshotError> {
        let name = own_name(name, &self.id);
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mode = Mode::from_bits_truncate(0o666);
        let file = openat(self.file.as_fd(), &*name, flags, mode).map_err(self.failed(&name))?;
        changed("create");
        Ok((self.path.join(name), File::from(file)))
    }

    /// Gives a file of this snapshot its place.
    pub(super) fn place(&self, name: &str) -> Result<(), SnapshotError> {
        let (own, dir) = (own_name(name, &self.id), self.file.as_fd());
        renameat(dir, &*own, dir, name).map_err(self.failed(name))?;
        changed(if name == MANIFEST { "switch" } else { "place" });
        Ok(())
    }

    /// Removes the files of other snapshots, but for those that are called `names`.
    pub(super) fn remove_others(&self, names: &[&str]) -> Result<(), SnapshotError> {
        self.remove(|name| is_of_snapshot(name) && !names.contains(&name) || id_in(name).is_some())
    }

    /// Removes files that have the names of saves that did not come to their end. `counts`: the identity of the snapshot that
    /// is there.
    pub(super) fn remove_leftovers(&self, counts: Option<&str>) -> Result<(), SnapshotError> {
        self.remove(|name| id_in(name).is_some_and(|id| Some(id) != counts))
    }

    /// Removes the files of this snapshot that have not taken their places.
    pub(super) fn remove_own(&self) -> Result<(), SnapshotError> {
        self.remove(|name| id_in(name) == Some(&self.id))
    }

    fn remove(&self, is_meant: impl Fn(&str) -> bool) -> Result<(), SnapshotError> {
        for name in names(&self.path)?.iter().filter(|name| is_meant(name)) {
            match unlinkat(self.file.as_fd(), &**name, UnlinkatFlags::NoRemoveDir) {
                Err(errno) if errno != Errno::ENOENT => return Err(self.failed(name)(errno)),
                _ => changed("remove"),
            }
        }
        Ok(())
    }

    /// Makes the changes so far durable.
    pub(super) fn sync(&self) -> Result<(), SnapshotError> {
        self.file.sync_all().map_err(SnapshotError::file(&self.path))?;
        changed("sync");
        Ok(())
    }
}

/// The names in a directory, in order.
pub(super) fn names(dir: &Path) -> Result<Vec<String>, SnapshotError> {
    let listed: std::io::Result<Vec<_>> =
        std::fs::read_dir(dir).and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect());
    let names = listed.map_err(SnapshotError::file(dir))?.into_iter();
    let mut names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
    names.sort_unstable();
    Ok(names)
}

/// The directory has changed. Tests hear of it.
#[cfg(not(test))]
pub(super) fn changed(_: &str) {}

#[cfg(test)]
pub(super) use watched::{changed, watch};

/// Tests look at a directory after each change of it: so would whoever comes after a command that was killed there.
#[cfg(test)]
mod watched {
    use std::cell::RefCell;

    type Watcher = Box<dyn FnMut(&str)>;

    thread_local! {
        static WATCHER: RefCell<Option<Watcher>> = const { RefCell::new(None) };
    }

    pub(in super::super) fn changed(what: &str) {
        WATCHER.with_borrow_mut(|watcher| {
            if let Some(watcher) = watcher {
                watcher(what);
            }
        });
    }

    /// Calls `watcher` after each change that this thread makes from now on.
    pub(in super::super) fn watch(watcher: Watcher) {
        WATCHER.set(Some(watcher));
    }
}
