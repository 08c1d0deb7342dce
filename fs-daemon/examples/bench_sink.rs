//! The filesystem to beat: one file of a fixed size that takes writes as fast as FUSE can give them.
//!
//! It does nothing but what every daemon on `fuser` must do, with every switch set that helps: direct
//! I/O, parallel and asynchronous direct writes, 1 MiB requests, one `/dev/fuse` descriptor a thread,
//! no flush at close, attributes cached for good, huge pages touched beforehand. In mode `copy` a request
//! is copied by memcpy(3) to its offset in a buffer of the file's size, in mode `stream` the same past the
//! caches, in mode `discard` it is dropped. Whatever a filesystem does with the bytes costs more, so the
//! ratio to this one says what its own work costs. `scripts/bench` measures that ratio; by hand:
//!
//! ```text
//! cargo run --release -p fs-daemon --example bench_sink -- --size 1073741824 --mode copy /mnt/sink
//! GRADFS=/mnt/sink BS=1m fio fio-jobs/gradients-write-libaio.fio
//! ```
//!
//! It prints one line once it is mounted, and unmounts on SIGINT, SIGTERM or SIGHUP.

// Cargo takes a file right beside this one for another example.
#[path = "bench_sink/buffer.rs"]
mod buffer;

use std::ffi::{CString, OsStr};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, SystemTime};

use clap::{Parser, ValueEnum};
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyWrite, Request, Session, WriteFlags,
};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{SigSet, Signal};

use buffer::Buffer;

/// The only file.
const FILE: INodeNo = INodeNo(2);
/// Nothing ever changes, so the kernel need not ask twice.
const FOREVER: Duration = Duration::from_secs(86_400);
/// Bytes a request, the most the kernel sends unless told otherwise.
const MAX_WRITE: u32 = 1 << 20;
/// Asynchronous requests in flight: more than any benchmark asks for.
const MAX_BACKGROUND: u16 = 64;

/// A filesystem of one file that takes writes as fast as FUSE can give them.
#[derive(Parser)]
#[command(about, max_term_width = 100)]
struct Args {
    /// Size of the file in bytes
    #[arg(long, default_value_t = 1 << 30)]
    size: usize,
    /// What becomes of a write
    #[arg(long, value_enum, default_value_t = Mode::Copy)]
    mode: Mode,
    /// Name of the file
    #[arg(long, default_value = "gradients")]
    name: String,
    /// Threads that serve requests
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// An existing directory
    mountpoint: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Copied to its offset in memory
    Copy,
    /// The same with streaming stores, which spare a read of what they overwrite
    Stream,
    /// Dropped; reading gives zeros
    Discard,
}

struct Sink {
    name: String,
    size: usize,
    mode: Mode,
    /// None: discard.
    buffer: Option<Buffer>,
}

impl Sink {
    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0o755, 0),
            FILE => (FileType::RegularFile, 0o644, self.size as u64),
            _ => return None,
        };
        let time = SystemTime::UNIX_EPOCH;
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: MAX_WRITE,
            flags: 0,
        })
    }
}

impl Filesystem for Sink {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let refused = |what: &str| io::Error::other(format!("the kernel refuses {what}"));
        config.set_max_write(MAX_WRITE).map_err(|_| refused("1 MiB requests"))?;
        config.set_max_background(MAX_BACKGROUND).map_err(|_| refused("the request limit"))?;
        config.add_capabilities(InitFlags::FUSE_ASYNC_DIO).map_err(|_| refused("asynchronous direct I/O"))?;
        // Nice to have: no tree to speak of depends on it.
        let _ = config.add_capabilities(InitFlags::FUSE_PARALLEL_DIROPS);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attributes(FILE) {
            Some(attributes) if parent == INodeNo::ROOT && name.as_bytes() == self.name.as_bytes() => {
                reply.entry(&FOREVER, &attributes, Generation(0));
            }
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Some(attributes) => reply.attr(&FOREVER, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let flags = FopenFlags::FOPEN_DIRECT_IO
            | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
            | FopenFlags::FOPEN_NOFLUSH;
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        static ZEROS: [u8; MAX_WRITE as usize] = [0; MAX_WRITE as usize];
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let wanted = (size as usize).min(self.size.saturating_sub(offset));
        match &self.buffer {
            Some(buffer) => reply.data(buffer.read(offset, wanted)),
            None => reply.data(&ZEROS[..wanted.min(ZEROS.len())]),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let fits = match &self.buffer {
            Some(buffer) => usize::try_from(offset).is_ok_and(|offset| match self.mode {
                Mode::Stream => buffer.stream(offset, data),
                _ => buffer.copy(offset, data),
            }),
            None => offset.checked_add(data.len() as u64).is_some_and(|end| end <= self.size as u64),
        };
        match fits {
            true => reply.written(data.len() as u32),
            false => reply.error(Errno::EFBIG),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn readdir(&self, _: &Request, _: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let entries = [
            (INodeNo::ROOT, FileType::Directory, "."),
            (INodeNo::ROOT, FileType::Directory, ".."),
            (FILE, FileType::RegularFile, self.name.as_str()),
        ];
        for (next, (inode, kind, name)) in (1..).zip(entries).skip(usize::try_from(offset).unwrap_or(3)) {
            if reply.add(inode, next, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}

/// Serves until a signal or the end of the mount.
fn run(args: Args) -> io::Result<()> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    // Before any thread starts, so that all inherit it and only `wait` below takes them.
    signals.thread_block()?;

    if args.size == 0 || CString::new(args.name.as_str()).is_err() || args.name.contains('/') {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the file needs a size and a plain name"));
    }
    let buffer = match args.mode {
        Mode::Copy | Mode::Stream => Some(Buffer::new(args.size)?),
        Mode::Discard => None,
    };
    let sink = Sink { name: args.name, size: args.size, mode: args.mode, buffer };
    let mut config = Config::default();
    config.mount_options =
        vec![MountOption::FSName("bench_sink".into()), MountOption::NoSuid, MountOption::NoDev];
    config.n_threads = Some(args.threads.max(1));
    config.clone_fd = true;
    let session = Session::new(sink, &args.mountpoint, &config)?.spawn()?;
    println!("mounted {}: {} bytes, {:?}", args.mountpoint.display(), args.size, args.mode);

    // Whichever comes first: a signal, or somebody unmounts it. The waiting thread ends with the process.
    let (sender, stopped) = mpsc::channel();
    thread::spawn(move || sender.send(signals.wait()));
    while !session.guard.is_finished() {
        if stopped.recv_timeout(Duration::from_millis(50)).is_ok() {
            return session.umount_and_join().or_else(|_| {
                // Busy: it goes away with its last user, who gets errors from now on.
                umount2(&args.mountpoint, MntFlags::MNT_DETACH).map_err(io::Error::from)
            });
        }
    }
    session.join()
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench_sink: {error}");
            ExitCode::FAILURE
        }
    }
}
