//! One daemon per mountpoint: a file lock named after the directory, held as long as the process lives.
//!
//! The kernel drops it with the process, however that ends, so there is no stale lock to reason about.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;

use crate::error::Error;
use crate::proc::{field, flags_in_stat};

/// A killed daemon keeps its lock while the kernel frees its memory: many GiB take seconds.
const ENDING_PATIENCE: Duration = Duration::from_secs(15);
/// For a holder that seems to live: it may have been killed this very moment.
const GRACE: Duration = Duration::from_millis(100);
const INTERVAL: Duration = Duration::from_millis(10);

/// The holder of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockHolder {
    /// None while the holder has not written it down yet.
    pub pid: Option<u32>,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "gradfs pid {pid}"),
            None => f.write_str("another gradfs"),
        }
    }
}

/// The lock of one mountpoint, held until dropped.
#[derive(Debug)]
pub struct Lock {
    file: PathBuf,
    _flock: Flock<File>,
}

impl Lock {
    /// Takes the lock of `mountpoint` in the first of `directories` that will do. The inner error names the
    /// holder.
    pub fn acquire(mountpoint: &Path, directories: &[PathBuf]) -> Result<Result<Lock, LockHolder>, Error> {
        let mut failure = io::Error::other("there is no place for it");
        for directory in directories {
            match prepare_directory(directory) {
                Ok(()) => {
                    let file = directory.join(file_name(mountpoint));
                    return wait_for(&file).map_err(|e| {
                        Error::new(format!("cannot lock {}", file.display()))
                            .caused_by(e)
                            .hint("the file must belong to you: remove it if it does not")
                    });
                }
                Err(e) => {
                    let text = format!("{}: {e}", directory.display());
                    failure = io::Error::new(e.kind(), text);
                }
            }
        }
        Err(Error::new("cannot make a directory for lock files")
            .caused_by(failure)
            .hint("set XDG_RUNTIME_DIR to a directory that you own"))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Still locked, so nobody else's file goes; who waits for this one finds it gone and starts over.
        let _ = fs::remove_file(&self.file);
    }
}

/// Directories for lock files, the best first.
pub fn directories() -> Vec<PathBuf> {
    let user = geteuid();
    let mut directories = Vec::new();
    if user.is_root() {
        // XDG_RUNTIME_DIR does not serve root: a login has it and a service has not, and both must find the
        // same lock.
        directories.push("/run/gradfs".into());
    } else {
        let named = std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty());
        let named = named.map_or_else(|| PathBuf::from(format!("/run/user/{user}")), PathBuf::from);
        if named.is_dir() {
            directories.push(named.join("gradfs"));
        }
    }
    // TMPDIR does not serve, for the same reason.
    directories.push(format!("/tmp/gradfs-{user}").into());
    directories
}

/// The holder of the lock of `mountpoint`, if anybody holds it and we may know.
pub fn holder(mountpoint: &Path, directories: &[PathBuf]) -> Option<LockHolder> {
    directories.iter().find_map(|directory| {
        let file = File::open(directory.join(file_name(mountpoint))).ok()?;
        match Flock::lock(file, FlockArg::LockSharedNonblock) {
            Err((mut file, Errno::EWOULDBLOCK)) => Some(LockHolder { pid: read_pid(&mut file) }),
            _ => None,
        }
    })
}

/// Makes `directory` if need be; refuses one that others could have prepared for us.
fn prepare_directory(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => return Ok(()),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(e),
    }
    let found = fs::symlink_metadata(directory)?;
    if !found.is_dir() || found.uid() != geteuid().as_raw() || found.mode() & 0o022 != 0 {
        return Err(io::Error::other("is not a directory that only you can write to"));
    }
    Ok(())
}

/// FNV-1a: the same in every build, unlike the standard library's hashes.
fn file_name(mountpoint: &Path) -> String {
    let hash = mountpoint.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}.lock")
}

fn wait_for(file: &Path) -> io::Result<Result<Lock, LockHolder>> {
    let start = Instant::now();
    loop {
        let held = match try_lock(file)? {
            Ok(lock) => return Ok(Ok(lock)),
            Err(held) => held,
        };
        let patience = if held.pid.is_some_and(is_ending) { ENDING_PATIENCE } else { GRACE };
        if start.elapsed() >= patience {
            return Ok(Err(held));
        }
        thread::sleep(INTERVAL);
    }
}

fn try_lock(path: &Path) -> io::Result<Result<Lock, LockHolder>> {
    loop {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)?;
        let mut flock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(flock) => flock,
            Err((mut file, Errno::EWOULDBLOCK)) => return Ok(Err(LockHolder { pid: read_pid(&mut file) })),
            Err((_, e)) => return Err(e.into()),
        };
        // Its last holder removed it after we opened it: a lock on it would keep nobody out.
        if flock.metadata()?.nlink() == 0 {
            continue;
        }
        flock.set_len(0)?;
        flock.write_all(format!("{}\n", std::process::id()).as_bytes())?;
        return Ok(Ok(Lock { file: path.to_owned(), _flock: flock }));
    }
}

fn read_pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.strip_suffix('\n')?.parse().ok()
}

/// Whether `pid` is ending or gone.
fn is_ending(pid: u32) -> bool {
    const PF_EXITING: u64 = 0x4;
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return true };
    flags_in_stat(&stat) & PF_EXITING != 0 || matches!(field(&stat, 3), Some("Z" | "X"))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn acquire(mountpoint: &str, directory: &Path) -> Result<Lock, LockHolder> {
        Lock::acquire(Path::new(mountpoint), &[directory.join("locks")]).unwrap()
    }

    #[test]
    fn one_holder_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let lock = acquire("/mnt/a", directory.path()).unwrap();
        let own = LockHolder { pid: Some(std::process::id()) };
        assert_eq!(acquire("/mnt/a", directory.path()).unwrap_err(), own);
        assert_eq!(holder(Path::new("/mnt/a"), &[directory.path().join("locks")]), Some(own));
        let other = acquire("/mnt/b", directory.path()).unwrap();
        drop(lock);
        assert_eq!(holder(Path::new("/mnt/a"), &[directory.path().join("locks")]), None);
        let again = acquire("/mnt/a", directory.path()).unwrap();
        drop((other, again));
        assert_eq!(fs::read_dir(directory.path().join("locks")).unwrap().count(), 0, "no files are left");
    }

    #[test]
    fn of_many_that_race_one_wins_each_time() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("x.lock");
        let inside = std::sync::atomic::AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        if let Ok(lock) = try_lock(&file).unwrap() {
                            assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                            inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                            drop(lock);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_directory_of_others_is_passed_over() {
        let directory = tempfile::tempdir().unwrap();
        let (link, open, good) =
            (directory.path().join("link"), directory.path().join("open"), directory.path().join("good"));
        std::os::unix::fs::symlink(directory.path(), &link).unwrap();
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let missing = Path::new("/nonexistent/gradfs").to_owned();
        let lock = Lock::acquire(Path::new("/m"), &[link.clone(), open.clone(), missing, good.clone()]);
        let lock = lock.unwrap().unwrap();
        assert!(lock.file.starts_with(&good));
        let error = Lock::acquire(Path::new("/m"), &[link, open]).unwrap_err();
        assert!(error.hint.unwrap().contains("XDG_RUNTIME_DIR"));
    }

    #[test]
    fn dead_and_dying_processes_are_distinguished_from_living_ones() {
        assert!(!is_ending(std::process::id()));
        assert!(is_ending(u32::MAX));
        let mut child = Command::new("sh").args(["-c", "exit 0"]).stdin(Stdio::null()).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is_ending(child.id()) {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(2));
        }
        child.wait().unwrap();
    }

    #[test]
    fn names_differ() {
        assert_eq!(file_name(Path::new("")), "cbf29ce484222325.lock");
        assert_ne!(file_name(Path::new("/mnt/a")), file_name(Path::new("/mnt/b")));
    }
}
