//! Every request of the kernel, passed on to [`Calls`](super::calls::Calls) or [`Fs`](crate::fs::Fs), and the refusals
//! of those it does not have.

use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, PollEvents, PollFlags, PollNotifier,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow,
    WriteFlags,
};

use super::Binding;
use super::calls::{Opened, Wake};
use super::refusals::Caller;
use super::users::Holder;
use crate::fs::node::FileKind;
use crate::fs::{Attributes, Keep};
use crate::session::error::{CallResult, Done};

/// Bytes of a request: the kernel's limit unless it was raised, and the best size for throughput.
const MAX_WRITE: u32 = 1 << 20;
/// Requests the kernel may have under way in the background: asynchronous I/O of several programs.
const MAX_BACKGROUND: u16 = 128;
/// Answers with what a call came to, or with its error.
macro_rules! answered {
    ($caller:expr, $reply:ident, $outcome:expr, $value:pat => $answer:expr) => {
        match $outcome {
            Ok($value) => $answer,
            Err(error) => $reply.error(Errno::from_i32($caller.refused(&error))),
        }
    };
}

impl Filesystem for Binding {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = [
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        ];
        for flag in wanted {
            if config.add_capabilities(flag).is_err() {
                tracing::info!(?flag, "the kernel does not have this");
            }
        }
        if self.fs().passthrough {
            config
                .add_capabilities(InitFlags::FUSE_PASSTHROUGH)
                .map_err(|_| io::Error::other("this kernel has no FUSE passthrough: use --no-passthrough"))?;
            // A memfd is no stacked filesystem; passthrough itself needs depth 1.
            let _ = config.set_max_stack_depth(1);
        }
        let _ = config.set_max_write(MAX_WRITE);
        let _ = config.set_max_background(MAX_BACKGROUND);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let caller = self.caller("lookup", parent, request);
        if let Some(wanted) = self.fs().wants_changes(parent.0, name) {
            let fs = Arc::clone(&self.calls.fs);
            let answer = move |outcome: CallResult<Attributes>| match outcome {
                Ok(a) => {
                    fs.tells(a.ino);
                    reply.entry_with_ttls(&attr_ttl(&a), &Duration::ZERO, &attr(&a), Generation(0));
                }
                Err(error) => {
                    caller.warn(&error);
                    reply.error(Errno::from_i32(error.errno));
                }
            };
            return self.calls.look_up_changes(
                parent.0,
                name.to_owned(),
                wanted,
                request.pid(),
                Box::new(answer),
            );
        }
        match self.calls.lookup(parent.0, name, request.pid()) {
            Ok(a) => {
                let name_ttl = self.name_ttl(parent.0, a.ino);
                self.fs().tells(a.ino);
                reply.entry_with_ttls(&attr_ttl(&a), &name_ttl, &attr(&a), Generation(0));
            }
            Err(error) => match self.calls.lookup_dropped(parent.0, name, request.pid()) {
                Some(Ok(a)) => {
                    self.fs().tells(a.ino);
                    reply.entry_with_ttls(&Duration::ZERO, &Duration::ZERO, &attr(&a), Generation(0))
                }
                Some(Err(error)) => reply.error(Errno::from_i32(caller.refused(&error))),
                None => reply.error(Errno::from_i32(caller.refused(&error))),
            },
        }
    }

    fn forget(&self, _request: &Request, ino: INodeNo, count: u64) {
        self.fs().is_forgotten(ino.0, count);
    }

    fn getattr(&self, request: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        let caller = self.caller("getattr", ino, request);
        answered!(caller, reply, self.fs().attributes(ino.0), a => reply.attr(&attr_ttl(&a), &attr(&a)))
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let caller = self.caller("setattr", ino, request);
        // Times: cp -p and touch may set them; they show the version's all the same. A learner that is touched lives.
        let fs = Arc::clone(&self.calls.fs);
        let done: Done<()> = Box::new(move |outcome| {
            let outcome = outcome.and_then(|()| fs.attributes(ino.0));
            answered!(caller, reply, outcome, a => reply.attr(&attr_ttl(&a), &attr(&a)))
        });
        let changes = self.fs().check_change(ino.0, mode, uid, gid);
        let changes = if mtime.is_some() { changes.and_then(|()| self.fs().touch(ino.0)) } else { changes };
        match (changes, size) {
            (Ok(()), Some(size)) => {
                self.calls.truncate(ino.0, fh.map(|fh| fh.0), size, request.pid(), done);
            }
            (outcome, _) => done(outcome),
        }
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let (caller, fs) = (self.caller("mkdir", parent, request), Arc::clone(&self.calls.fs));
        self.fs().make_dir(
            parent.0,
            name,
            (request.uid(), request.gid()),
            Box::new(move |outcome| {
                let ttl = Duration::ZERO;
                outcome.iter().for_each(|a| fs.tells(a.ino));
                answered!(caller, reply, outcome, a => reply.entry_with_ttls(&ttl, &ttl, &attr(&a), Generation(0)))
            }),
        );
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let caller = self.caller("rmdir", parent, request);
        self.fs().remove_dir(parent.0, name, answer(caller, reply));
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let outcome = self.fs().remove_file(parent.0, name);
        answer(self.caller("unlink", parent, request), reply)(outcome);
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        let caller = self.caller("readlink", ino, request);
        self.calls.read_link(
            ino.0,
            request.pid(),
            Box::new(move |outcome| answered!(caller, reply, outcome, path => reply.data(path.as_bytes()))),
        );
    }

    fn mknod(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        reply.error(Errno::EPERM);
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let owner = (request.uid(), request.gid());
        match self.calls.create(parent.0, name, owner, request.pid()) {
            Ok((a, Opened { fh, .. })) => {
                let (handle, flags) = (FileHandle(fh), FopenFlags::FOPEN_DIRECT_IO);
                self.fs().tells(a.ino);
                reply.created(&attr_ttl(&a), &attr(&a), Generation(0), handle, flags);
            }
            Err(error) => {
                self.caller("create", parent, request).warn(&error);
                reply.error(Errno::from_i32(error.errno));
            }
        }
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        if !flags.is_empty() {
            return reply.error(Errno::EINVAL);
        }
        let done = answer(self.caller("rename", parent, request), reply);
        self.calls.rename((parent.0, name), (newparent.0, newname), request.pid(), done);
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let caller = self.caller("open", ino, request);
        let this = Binding { calls: Arc::clone(&self.calls), backings: Arc::clone(&self.backings) };
        self.calls.open(
            ino.0,
            flags.0,
            request.pid(),
            Box::new(move |outcome| answered!(caller, reply, outcome, opened => this.opened(reply, &opened))),
        );
    }

    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let caller = self.caller("read", ino, request);
        let answer =
            |outcome: CallResult<&[u8]>| answered!(caller, reply, outcome, bytes => reply.data(bytes));
        self.calls.read(fh.0, offset, size as usize, answer);
    }

    fn write(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        _flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let caller = self.caller("write", ino, request);
        let from_mapping = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let written = data.len() as u32;
        let by = Holder { tid: request.pid(), lock: lock_owner.map_or(0, |owner| owner.0) };
        let answer = move |outcome| answered!(caller, reply, outcome, () => reply.written(written));
        self.calls.write(fh.0, offset, data, from_mapping, by, answer);
    }

    fn flush(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let caller = self.caller("close", ino, request);
        let by = Holder { tid: request.pid(), lock: lock_owner.0 };
        self.calls.flush(fh.0, by, answer(caller, reply));
    }

    fn fsync(&self, request: &Request, ino: INodeNo, fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let caller = self.caller("fsync", ino, request);
        self.calls.fsync(fh.0, request.pid(), answer(caller, reply));
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.calls.release(fh.0);
        self.backings.lock().retain(|_, (_, memory)| memory.strong_count() > 0);
        reply.ok();
    }

    fn readdir(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let caller = self.caller("readdir", ino, request);
        let listed = self.fs().list(ino.0, offset, |entry| {
            !reply.add(INodeNo(entry.ino), entry.next, file_type(entry.node.kind()), &entry.name)
        });
        answered!(caller, reply, listed, () => reply.ok())
    }

    fn readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let caller = self.caller("readdirplus", ino, request);
        let listed = self.fs().list(ino.0, offset, |entry| {
            // The kernel takes no interest in these two, and never forgets them.
            let is_dots = entry.name == "." || entry.name == "..";
            let name = OsStr::new(&entry.name);
            let found = if is_dots { self.fs().attributes(entry.ino) } else { self.fs().lookup(ino.0, name) };
            // An entry that has gone by now is left out.
            let Ok(a) = found else { return true };
            let ttl = attr_ttl(&a).min(self.name_ttl(ino.0, a.ino));
            let is_full = reply.add(INodeNo(a.ino), entry.next, name, &ttl, &attr(&a), Generation(0));
            match (is_full, is_dots) {
                (true, false) => self.fs().forget(a.ino, 1),
                (false, false) => self.fs().tells(a.ino),
                (_, true) => {}
            }
            !is_full
        });
        answered!(caller, reply, listed, () => reply.ok())
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let space = self.fs().space();
        let size = space.block_size;
        let (files, free_files) = (space.files, space.free_files);
        reply.statfs(space.blocks, space.free, space.free, files, free_files, size, 255, size);
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let caller = self.caller("getxattr", ino, request);
        let value = self.fs().xattr(ino.0, name.to_str().unwrap_or_default());
        answered!(caller, reply, value, value => send_xattr(reply, size, value.as_bytes()))
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let caller = self.caller("listxattr", ino, request);
        match self.fs().xattrs(ino.0) {
            Ok(names) => {
                let list: Vec<u8> = names.iter().flat_map(|name| [name.as_bytes(), b"\0"].concat()).collect();
                send_xattr(reply, size, &list);
            }
            Err(error) => reply.error(Errno::from_i32(caller.refused(&error))),
        }
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        _flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let outcome = self.fs().set_xattr(ino.0, name.to_str().unwrap_or_default(), value);
        answer(self.caller("setxattr", ino, request), reply)(outcome);
    }

    fn poll(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        notifier: PollNotifier,
        events: PollEvents,
        flags: PollFlags,
        reply: ReplyPoll,
    ) {
        let caller = self.caller("poll", ino, request);
        let wake = flags.contains(PollFlags::FUSE_POLL_SCHEDULE_NOTIFY).then(|| {
            Box::new(move || {
                if let Err(error) = notifier.notify() {
                    tracing::debug!(%error, "waking a poller");
                }
            }) as Wake
        });
        match self.calls.poll(fh.0, wake) {
            Ok(true) => {
                // Writing never blocks; io_uring asks for that before each write.
                let reading = PollEvents::POLLIN | PollEvents::POLLRDNORM | PollEvents::POLLPRI;
                reply.poll(events & (reading | PollEvents::POLLOUT | PollEvents::POLLWRNORM))
            }
            Ok(false) => reply.poll(PollEvents::empty()),
            Err(error) => reply.error(Errno::from_i32(caller.refused(&error))),
        }
    }

    fn removexattr(&self, _request: &Request, _ino: INodeNo, _name: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn ioctl(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        // Python's open() asks whether it is a terminal.
        reply.error(Errno::ENOTTY);
    }

    fn fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let outcome = self.calls.fallocate(fh.0, mode, offset, length);
        answer(self.caller("fallocate", ino, request), reply)(outcome);
    }
}

fn file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::Dir => FileType::Directory,
        FileKind::File => FileType::RegularFile,
        FileKind::Link => FileType::Symlink,
    }
}

/// How long the kernel may keep a name or attributes that do not change.
pub(super) const FOREVER: Duration = Duration::from_secs(86_400);
/// Long enough for a thousand paths through a directory, and too short for a person to see.
const BRIEFLY: Duration = Duration::from_millis(10);

/// The attributes of a file in the kernel's form.
pub(super) fn attr(a: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(a.ino),
        size: a.size,
        blocks: a.size.div_ceil(512),
        atime: a.modified,
        mtime: a.modified,
        ctime: a.modified,
        crtime: a.modified,
        kind: file_type(a.kind),
        perm: a.mode,
        nlink: a.links,
        uid: a.uid,
        gid: a.gid,
        rdev: 0,
        blksize: a.block_size,
        flags: 0,
    }
}

/// How long it may believe that.
pub(super) fn attr_ttl(a: &Attributes) -> Duration {
    match a.keep {
        Keep::No => Duration::ZERO,
        Keep::Briefly => BRIEFLY,
        Keep::Forever => FOREVER,
    }
}

/// Answers a call that has no result but its end.
pub(super) fn answer(caller: Caller, reply: ReplyEmpty) -> Done<()> {
    Box::new(move |outcome| answered!(caller, reply, outcome, () => reply.ok()))
}

/// A value or a list of names; its length where only that is asked for.
pub(super) fn send_xattr(reply: ReplyXattr, size: u32, value: &[u8]) {
    if size == 0 {
        reply.size(value.len() as u32);
    } else if value.len() <= size as usize {
        reply.data(value);
    } else {
        reply.error(Errno::ERANGE);
    }
}
