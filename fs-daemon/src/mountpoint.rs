//! The directory to mount on: whether it can be had, and giving it back (edge module).
//!
//! A daemon that was killed leaves its mount behind, where every call answers ENOTCONN; the next daemon
//! clears it away. A daemon that hangs leaves a mount where calls do not answer at all, so nothing here
//! touches a path without a deadline. A lock that is held as long as the process lives keeps two daemons from
//! taking one directory.

mod lock;
mod mountinfo;

use std::fs;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Display, Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use nix::sys::statvfs::statvfs;
use nix::unistd::geteuid;
use parking_lot::Mutex;

use self::lock::{Lock, LockHolder};
use self::mountinfo::{Mount, OpenTable};
use crate::error::Error;

/// How long a path may take to answer.
const PATH_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a new mount may take to answer for the first time.
const ANSWER_PATIENCE: Duration = Duration::from_secs(30);
/// How long the kernel may take to unmount, and a daemon to end after that.
const UNMOUNT_PATIENCE: Duration = Duration::from_secs(10);
/// How long a daemon may take to end that writes a last snapshot.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(600);
const LIST_MOUNTS: &str = "findmnt --types fuse.gradfs lists what is mounted";
/// Most dead mounts on top of each other that are cleared away.
const MAX_STACKED: usize = 32;

/// A directory that is ready to be mounted on, and that no other daemon will take meanwhile.
#[derive(Debug)]
pub struct Mountpoint {
    path: PathBuf,
    mounts: Arc<Mutex<OpenTable>>,
    _lock: Lock,
}

impl Mountpoint {
    /// Takes the directory `path`, and clears away the mounts that dead daemons have left there.
    pub fn prepare(path: &Path) -> Result<Mountpoint, Error> {
        Mountpoint::prepare_with(path, &lock::directories())
    }

    fn prepare_with(path: &Path, lock_directories: &[PathBuf]) -> Result<Mountpoint, Error> {
        let path = resolve(path, |path| format!("create it: mkdir -p {path}"))?;
        let lock = match Lock::acquire(&path, lock_directories)? {
            Ok(lock) => lock,
            Err(held) => return Err(in_use(&path, &held)),
        };
        clear_dead(&path)?;
        check_directory(&path)?;
        let mounts = OpenTable::open().map_err(no_table)?;
        Ok(Mountpoint { path, mounts: Arc::new(Mutex::new(mounts)), _lock: lock })
    }

    /// The directory, absolute and free of symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of the device that is mounted here, as `/proc/<pid>/mountinfo` has it.
    pub fn device(&self) -> Option<String> {
        mountinfo::topmost(&self.path).ok().flatten().map(|mount| mount.device)
    }

    /// Waits until what is mounted here now answers.
    pub fn await_answer(&self) -> Result<(), Error> {
        let deadline = Instant::now() + ANSWER_PATIENCE;
        while probe(&self.path) != Probe::Alive {
            if Instant::now() > deadline {
                return Err(Error::new(format!("the mount on {} does not answer", self.path.display())));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Takes the mount away even while it is used, as the daemon does on its way out.
    pub fn detach(&self) -> Result<(), Error> {
        detach_mounted(&self.path, &self.mounts)
    }

    /// Does what [`Mountpoint::detach`] does, from any thread, as long as this lives.
    pub fn detacher(&self) -> impl Fn() -> Result<(), Error> + Send + Sync + 'static {
        let (path, mounts) = (self.path.clone(), Arc::clone(&self.mounts));
        move || detach_mounted(&path, &mounts)
    }
}

fn detach_mounted(path: &Path, mounts: &Mutex<OpenTable>) -> Result<(), Error> {
    let mount = mounts.lock().topmost(path).map_err(no_table)?;
    if mount.is_some_and(|mount| mount.is_gradfs()) { detach(path) } else { Ok(()) }
}

/// Unmounts the gradfs mount at `path` and waits for its daemon to end. A mount whose daemon is dead is
/// detached even if used; a mount whose daemon lives, only if `lazy`.
pub fn unmount(path: &Path, lazy: bool) -> Result<(), Error> {
    unmount_with(path, lazy, &lock::directories())
}

fn unmount_with(path: &Path, lazy: bool, lock_directories: &[PathBuf]) -> Result<(), Error> {
    let path = resolve(path, |_| LIST_MOUNTS.into())?;
    let shown = path.display();
    let device = match topmost(&path)? {
        None => {
            return Err(Error::new(format!("nothing is mounted on {shown}")).hint(LIST_MOUNTS));
        }
        Some(mount) if !mount.is_gradfs() => {
            return Err(Error::new(format!("{shown} is a mount of {mount}, not of gradfs"))
                .hint(format!("if you are sure: umount {shown}")));
        }
        Some(mount) => mount.device,
    };
    if probe(&path) == Probe::Dead {
        return clear_dead(&path);
    }
    if lazy {
        return detach(&path);
    }
    let holder = lock::holder(&path, lock_directories);
    take_away(&path, MntFlags::empty()).map_err(|e| {
        let failed = Error::new(format!("cannot unmount {shown}")).caused_by(e);
        failed.hint(format!(
            "files may be open there: close them (fuser -vm {shown} lists who has them), or use \
             gradfs unmount --lazy {shown}"
        ))
    })?;
    let Some(held) = holder else { return Ok(()) };
    let begun = Instant::now();
    let mut has_said = false;
    while lock::holder(&path, lock_directories).as_ref() == Some(&held) {
        let late = || Error::new(format!("{shown} is unmounted, but {held} has not ended"));
        if begun.elapsed() > SNAPSHOT_PATIENCE {
            return Err(late().hint("see its log"));
        }
        if begun.elapsed() > UNMOUNT_PATIENCE && !has_said {
            if let Some(process) = mountinfo::elsewhere(&device) {
                return Err(late().hint(format!(
                    "{process} has a copy of the mount in its mount namespace: end it, or {held}"
                )));
            }
            eprintln!(
                "gradfs: {shown} is unmounted; {held} has not ended yet: it may be writing a last snapshot"
            );
            has_said = true;
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// The gradfs mount on `path`, whose daemon answers.
pub fn serving(path: &Path) -> Result<PathBuf, Error> {
    let path = resolve(path, |_| LIST_MOUNTS.into())?;
    let shown = path.display();
    match topmost(&path)? {
        None => Err(Error::new(format!("nothing is mounted on {shown}")).hint(LIST_MOUNTS)),
        Some(mount) if !mount.is_gradfs() => {
            Err(Error::new(format!("{shown} is a mount of {mount}, not of gradfs")).hint(LIST_MOUNTS))
        }
        Some(mount) => match probe(&path) {
            Probe::Alive => Ok(path),
            Probe::Dead => Err(Error::new(format!("the daemon of the mount on {shown} is dead"))
                .hint(format!("unmount it: {}", unmount_command(&mount)))),
            Probe::Late => Err(Error::new(format!("the mount on {shown} does not answer"))),
        },
    }
}

/// The gradfs mount that `path` is in, whose daemon answers, and the way from there to `path`.
pub fn of(path: &Path) -> Result<(PathBuf, PathBuf), Error> {
    let path = resolve(path, |_| LIST_MOUNTS.into())?;
    let failed = |e| Error::new(format!("cannot resolve {}", path.display())).caused_by(e);
    let mount = mountinfo::containing(&path).map_err(failed)?;
    let Some(mount) = mount.filter(Mount::is_gradfs) else {
        let error = Error::new(format!("{} is in no mount of gradfs", path.display()));
        return Err(error.hint(LIST_MOUNTS));
    };
    let rest = path.strip_prefix(&mount.point).map(Path::to_owned).unwrap_or_default();
    Ok((serving(&mount.point)?, rest))
}

/// Reads a small file of a mount, unless that takes too long.
pub fn text(path: &Path) -> io::Result<String> {
    let asked = path.to_owned();
    bounded(PATH_TIMEOUT, move || fs::read_to_string(asked))
}

/// The names in a directory of a mount, unless that takes too long.
pub fn names(path: &Path) -> io::Result<Vec<String>> {
    let asked = path.to_owned();
    bounded(PATH_TIMEOUT, move || {
        fs::read_dir(asked)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    })
}

/// Opens a file of a mount to read it, unless that takes too long.
pub fn opened(path: &Path) -> io::Result<fs::File> {
    let asked = path.to_owned();
    bounded(PATH_TIMEOUT, move || fs::File::open(asked))
}

/// `path` without symbolic links, found without trusting any mount on the way to answer. `missing`
/// gives the hint for a path that does not exist.
fn resolve(path: &Path, missing: impl Fn(Display<'_>) -> String) -> Result<PathBuf, Error> {
    let failed = |e| Error::new(format!("cannot resolve {}", path.display())).caused_by(e);
    // Without a slash at the end, which would make the lookup look into the mount.
    let absolute: PathBuf = std::path::absolute(path).map_err(failed)?.components().collect();
    let asked = absolute.clone();
    let error = match bounded(PATH_TIMEOUT, move || fs::canonicalize(asked)) {
        Ok(path) => return Ok(path),
        Err(error) => error,
    };
    let shown = absolute.display();
    if error.kind() == io::ErrorKind::NotFound {
        let message = format!("the mountpoint {shown} does not exist");
        return Err(Error::new(message).hint(missing(shown)));
    }
    if error.kind() == io::ErrorKind::NotADirectory {
        return Err(not_a_directory(&absolute));
    }
    // A mount without a living daemon: at the path itself, or on the way to it.
    match mountinfo::containing(&absolute).map_err(failed)? {
        Some(mount) if mount.point == absolute => Ok(absolute),
        Some(mount) => Err(inside_dead(&absolute, &mount, &error).unwrap_or_else(|| failed(error))),
        None => Err(failed(error)),
    }
}

/// Why `path` cannot be used: `mount`, in which it lies, has answered `error` because its daemon is gone.
fn inside_dead(path: &Path, mount: &Mount, error: &io::Error) -> Option<Error> {
    let state = if is_dead(error) { "is dead" } else { "does not answer" };
    let (shown, point) = (path.display(), mount.point.display());
    (mount.is_fuse() && (is_dead(error) || is_late(error))).then(|| {
        Error::new(format!("{shown} is inside {point}, a mount of {mount} that {state}"))
            .hint(format!("unmount that first: {}", unmount_command(mount)))
    })
}

fn in_use(path: &Path, held: &LockHolder) -> Error {
    let shown = path.display();
    let mounted = mountinfo::topmost(path).is_ok_and(|mount| mount.is_some());
    let what = if mounted { "is already mounted by" } else { "is being mounted or unmounted by" };
    Error::new(format!("{shown} {what} {held}"))
        .hint(format!("use another directory, or unmount it: gradfs unmount {shown}"))
}

/// Detaches dead gradfs mounts from `path`. Any other mount there that is dead, or another gradfs, is an error.
fn clear_dead(path: &Path) -> Result<(), Error> {
    let shown = path.display();
    for _ in 0..MAX_STACKED {
        let Some(mount) = topmost(path)? else { return Ok(()) };
        let hint = format!("use another directory, or unmount it: {}", unmount_command(&mount));
        let error = match probe(path) {
            // A volume, as a container has it. It has to be empty, as any directory.
            Probe::Alive if !mount.is_gradfs() => return Ok(()),
            Probe::Dead if mount.is_gradfs() => {
                detach(path)?;
                tracing::warn!("unmounted {shown}, which a dead gradfs daemon had left behind");
                continue;
            }
            Probe::Dead => format!("{shown} is a dead mount of {mount}"),
            Probe::Late => format!("{shown} is a mount of {mount} that does not answer"),
            Probe::Alive => format!("{shown} is already mounted by another gradfs"),
        };
        return Err(Error::new(error).hint(hint));
    }
    Err(Error::new(format!("more than {MAX_STACKED} mounts are stacked on {shown}"))
        .hint("use another directory"))
}

fn check_directory(path: &Path) -> Result<(), Error> {
    let shown = path.display();
    let asked = path.to_owned();
    // `None`: not a directory.
    let empty = bounded(PATH_TIMEOUT, move || {
        if !fs::metadata(&asked)?.is_dir() {
            return Ok(None);
        }
        Ok(Some(fs::read_dir(&asked)?.next().transpose()?.is_none()))
    });
    match empty {
        Ok(Some(true)) => Ok(()),
        Ok(Some(false)) => Err(Error::new(format!("the mountpoint {shown} is not empty"))
            .hint("the mount would hide what is in it: use an empty directory")),
        Ok(None) => Err(not_a_directory(path)),
        Err(e) => {
            // The kernel's memory of a dead mount can have led here.
            let mount = mountinfo::containing(path).ok().flatten();
            Err(mount.and_then(|mount| inside_dead(path, &mount, &e)).unwrap_or_else(|| {
                Error::new(format!("cannot look into the mountpoint {shown}"))
                    .caused_by(e)
                    .hint("use a directory that you own")
            }))
        }
    }
}

fn not_a_directory(path: &Path) -> Error {
    Error::new(format!("the mountpoint {} is not a directory", path.display()))
        .hint("name an empty directory as the last argument")
}

fn topmost(path: &Path) -> Result<Option<Mount>, Error> {
    mountinfo::topmost(path).map_err(no_table)
}

fn no_table(error: io::Error) -> Error {
    Error::new("cannot read the table of mounts").caused_by(error)
}

fn unmount_command(mount: &Mount) -> String {
    let command = match (mount.is_gradfs(), mount.is_fuse()) {
        (true, _) => "gradfs unmount",
        (_, true) => "fusermount3 -u",
        _ => "umount",
    };
    format!("{command} {}", mount.point.display())
}

/// The answer of a mount to a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Probe {
    /// The daemon answered, or the kernel gave any answer but the one for a dead daemon.
    Alive,
    /// Its daemon is gone.
    Dead,
    /// No answer in time.
    Late,
}

fn probe(path: &Path) -> Probe {
    let asked = path.to_owned();
    // statfs is never answered from a cache, unlike stat; stat tells where statfs is not passed on.
    let answer = bounded(PATH_TIMEOUT, move || {
        statvfs(&asked).map_err(io::Error::from)?;
        fs::symlink_metadata(&asked).map(drop)
    });
    match answer {
        Err(e) if is_dead(&e) => Probe::Dead,
        Err(e) if is_late(&e) => Probe::Late,
        _ => Probe::Alive,
    }
}

fn is_dead(error: &io::Error) -> bool {
    // The second, where the daemon died while the request waited for it.
    matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED))
}

/// Whether [`bounded`] gave up.
fn is_late(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::TimedOut
}

/// The result of `work`, or TimedOut. After a timeout, a thread stays behind until the kernel lets it go: a
/// call into a mount that does not answer cannot be taken back.
fn bounded<T: Send + 'static>(
    patience: Duration,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    thread::Builder::new().name("gradfs-bounded".into()).spawn(move || {
        // Sending fails only if nobody waits any more, because it took too long.
        let _ = sender.send(work());
    })?;
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("no answer in {patience:?}"));
    receiver.recv_timeout(patience).map_err(late)?
}

fn detach(path: &Path) -> Result<(), Error> {
    take_away(path, MntFlags::MNT_DETACH).map_err(|e| {
        Error::new(format!("cannot detach the mount on {}", path.display()))
            .caused_by(e)
            .hint("only root and the user who mounted it can")
    })
}

/// umount2, or the helper that does it for users.
fn take_away(path: &Path, flags: MntFlags) -> io::Result<()> {
    let asked = path.to_owned();
    bounded(UNMOUNT_PATIENCE, move || {
        if geteuid().is_root() {
            match umount2(&asked, flags | MntFlags::UMOUNT_NOFOLLOW) {
                // Root without the capability, as in some containers: the helper may still do.
                Err(Errno::EPERM) => {}
                result => return result.map_err(io::Error::from),
            }
        }
        let option = if flags.contains(MntFlags::MNT_DETACH) { "-uz" } else { "-u" };
        for helper in ["fusermount3", "fusermount"] {
            let mut command = Command::new(helper);
            command.arg(option).arg("--").arg(&asked).stdin(Stdio::null());
            // In a group of its own, lest a signal to ours ends the helper before it is done.
            command.process_group(0);
            match command.output() {
                Ok(output) if output.status.success() => return Ok(()),
                Ok(output) => {
                    let said = String::from_utf8_lossy(&output.stderr);
                    return Err(io::Error::other(said.trim().to_owned()));
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Err(io::Error::other("fusermount3 is not installed"))
    })
}

#[cfg(test)]
mod tests;
