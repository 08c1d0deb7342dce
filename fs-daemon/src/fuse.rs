//! The mount's binding to the kernel: requests in, replies out (`requests`), and knowledge that only
//! the kernel's side has: who has files open, and what a process's death means (`calls`).
//!
//! Only `requests` and this file know the `fuser` crate, so that another loop on the FUSE descriptor can take
//! its place. This file has the mount itself and its state.

pub mod access;
pub mod calls;

mod endings;
mod lookups;
mod open_files;
mod pending_exits;
mod process;
mod refusals;
mod requests;
mod users;
mod waits;
mod watches;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use fuser::{
    Config, Errno, FileHandle, FopenFlags, INodeNo, MountOption, Notifier, ReplyOpen, Request, Session,
    SessionACL,
};
use libmodelio::bytes::mmap::Mapping;
use nix::mount::MsFlags;
use nix::unistd::{getgid, getuid};
use parking_lot::Mutex;

use self::calls::Calls;
use self::calls::Opened;
use self::refusals::Caller;
use crate::config::Mounting;
use crate::fs::Fs;
use crate::fs::Way;
use crate::fs::model_tree::Kernel;

/// The kernel's names for memory that files bypass the daemon to.
type Backings = Mutex<HashMap<usize, (Arc<fuser::BackingId>, Weak<Mapping>)>>;

struct Binding {
    calls: Arc<Calls>,
    backings: Arc<Backings>,
}

/// Mounts the filesystem of `calls` on `path`.
///
/// # Errors
/// Fails with the error of mount(2) or fusermount3. The caller unmounts, as it does in the end.
pub fn mount(calls: Arc<Calls>, path: &Path, mounting: &Mounting) -> io::Result<Mounted> {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("gradfs".into()),
        MountOption::Subtype("gradfs".into()),
        MountOption::DefaultPermissions,
        MountOption::NoDev,
        MountOption::NoSuid,
        MountOption::NoAtime,
    ];
    config.acl = if mounting.allow_other { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(mounting.threads);
    config.clone_fd = true;
    let binding = Binding { calls, backings: Arc::default() };
    let session = match mount_directly(path, mounting.allow_other)? {
        Some(device) => Session::from_fd(binding, device, config.acl, config.clone()),
        None => Session::new(binding, path, &config),
    }?;
    let kernel = Arc::new(Announcer(session.notifier()));
    Ok(Mounted { session, kernel })
}

/// Mounts by mount(2), with the subtype in the name of the type: `fuser` leaves it out there, and `findmnt` and
/// monitoring go by it. `None` if only the setuid helper may mount, to which `fuser` tells the subtype.
///
/// The caller unmounts, whatever follows.
fn mount_directly(path: &Path, allow_other: bool) -> io::Result<Option<OwnedFd>> {
    let device = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse")?;
    let (mode, descriptor) = (fs::metadata(path)?.mode(), device.as_raw_fd());
    let (uid, gid) = (getuid(), getgid());
    let mut options =
        format!("fd={descriptor},rootmode={mode:o},user_id={uid},group_id={gid},default_permissions");
    if allow_other {
        options.push_str(",allow_other");
    }
    let flags = MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOATIME;
    match nix::mount::mount(Some("gradfs"), path, Some("fuse.gradfs"), flags, Some(options.as_str())) {
        Ok(()) => Ok(Some(device.into())),
        Err(nix::errno::Errno::EPERM) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A mount that is not served yet.
pub struct Mounted {
    session: Session<Binding>,
    /// The way to tell the kernel about changes.
    pub kernel: Arc<dyn Kernel>,
}

impl Mounted {
    /// Serves requests on threads of its own; the handle ends when the mount is gone.
    ///
    /// # Errors
    /// When threads cannot be started.
    pub fn serve(self, ended: impl FnOnce() + Send + 'static) -> io::Result<std::thread::JoinHandle<()>> {
        let session = self.session;
        std::thread::Builder::new().name("gradfs-fuse".into()).spawn(move || {
            if let Err(error) = session.run() {
                tracing::warn!(%error, "the FUSE session ended");
            }
            refusals::log_rest();
            ended();
        })
    }
}

struct Announcer(Notifier);

impl Kernel for Announcer {
    fn forget_name(&self, parent: u64, name: &str) {
        if let Err(error) = self.0.inval_entry(INodeNo(parent), OsStr::new(name)) {
            // The mount may be on its way out.
            tracing::debug!(%error, name, "telling the kernel about a moved name");
        }
    }
}

impl Binding {
    fn fs(&self) -> &Arc<Fs> {
        &self.calls.fs
    }

    /// Who makes a call, on the file that it names.
    fn caller(&self, call: &'static str, ino: INodeNo, request: &Request) -> Caller {
        Caller { fs: Arc::clone(&self.calls.fs), call, ino: ino.0, tid: request.pid() }
    }

    /// How long the kernel may keep the name in `parent` that led to `ino`.
    fn name_ttl(&self, parent: u64, ino: u64) -> Duration {
        if self.fs().is_fixed(parent, ino) { requests::FOREVER } else { Duration::ZERO }
    }

    /// The kernel's name for `memory`, made once.
    fn backing(&self, reply: &ReplyOpen, memory: &Arc<Mapping>) -> io::Result<Arc<fuser::BackingId>> {
        // While the entry's Weak exists no other mapping can have its address.
        let key = Arc::as_ptr(memory) as usize;
        let mut backings = self.backings.lock();
        if let Some((id, _)) = backings.get(&key) {
            return Ok(Arc::clone(id));
        }
        backings.retain(|_, (_, memory)| memory.strong_count() > 0);
        let fd = memory.fd().ok_or_else(|| io::Error::other("memory without a descriptor"))?;
        let id = Arc::new(reply.open_backing(fd)?);
        backings.insert(key, (Arc::clone(&id), Arc::downgrade(memory)));
        Ok(id)
    }

    fn opened(&self, reply: ReplyOpen, opened: &Opened) {
        let fh = FileHandle(opened.fh);
        let parallel = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        let (memory, flags) = match &opened.way {
            Way::Cached => {
                return reply.opened(fh, FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH);
            }
            Way::Direct => return reply.opened(fh, parallel),
            Way::Bypass(region) => (region.memory(), FopenFlags::FOPEN_NOFLUSH),
            Way::MapBypass(region) => (region.memory(), parallel),
        };
        match self.backing(&reply, memory) {
            Ok(id) => reply.opened_passthrough(fh, flags | FopenFlags::FOPEN_PASSTHROUGH, &id),
            Err(error) => {
                tracing::error!(%error, "passthrough was promised and is refused; try --no-passthrough");
                self.calls.release(opened.fh);
                reply.error(Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO)));
            }
        }
    }
}
