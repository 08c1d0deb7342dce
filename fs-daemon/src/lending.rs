//! Lends the memory of versions to programs on this host that want to read it with nothing in the way.
//!
//! A program connects to a Unix socket that keeps messages apart (SOCK_SEQPACKET), in the abstract namespace: a socket
//! that is bound in the mount would keep it from being unmounted. The attribute `user.gradfs.memory` of `weights` has
//! the socket's name and the model's key. Only who may read `weights` can read it, and whoever has the key may borrow.
//!
//! A connection is one loan:
//!
//! | program | daemon |
//! |---|---|
//! | `KEY newest` or `KEY VERSION` | `VERSION GENERATION SIZE` with a descriptor, or `error: NUMBER WORDS` |
//! | `done`: nobody has the memory any more | ends the connection |
//!
//! The version is held as by an open file until the connection ends. If that ends without `done`, nobody knows who has
//! the memory, so it is let go of and never written again ([`libmodelio::bytes::loan`]).

use std::io::{self, ErrorKind, IoSlice, Read as _};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use libmodelio::bytes::loan::Loan;
use libmodelio::reader::Reader;
use libmodelio::vocabulary::ids::Version;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    self, AddressFamily, Backlog, ControlMessage, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, sendmsg,
};

use crate::fs::Fs;
use crate::fs::model_tree::{ModelTree, unguessable};
use crate::session::error::{CallError, CallResult};

/// The most loans at a time.
const MAX_LOANS: usize = 256;
/// The most programs that have connected and not asked yet. For one more, the one goes that has waited longest.
const MAX_SILENT: usize = 64;
/// The longest time in which a program has to ask.
const PATIENCE: Duration = Duration::from_secs(5);
/// More bytes than any request has.
const MAX_REQUEST: usize = 128;
/// The pause before the next program is accepted when descriptors are used up.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Lends until it is dropped.
pub struct Lending(Arc<UnixListener>);

impl Lending {
    /// Begins to lend the memory of the models of `fs`, on a thread of its own.
    ///
    /// # Errors
    /// When there is no socket, or no thread.
    pub fn start(fs: &Arc<Fs>) -> io::Result<Lending> {
        let name = format!("gradfs-memory-{}", unguessable()?);
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let made = socket::socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
        socket::bind(made.as_raw_fd(), &UnixAddr::new_abstract(name.as_bytes())?)?;
        socket::listen(&made, Backlog::MAXCONN)?;
        let listener = Arc::new(UnixListener::from(made));
        let lender =
            Lender { listener: Arc::clone(&listener), fs: Arc::downgrade(fs), borrowers: Vec::new() };
        std::thread::Builder::new().name("gradfs-lending".into()).spawn(move || {
            if let Err(error) = lender.run() {
                tracing::error!(%error, "the memory of versions is not lent any more");
            }
        })?;
        fs.lends_at(name);
        Ok(Lending(listener))
    }
}

impl Drop for Lending {
    fn drop(&mut self) {
        // This wakes the thread.
        let _ = socket::shutdown(self.0.as_raw_fd(), Shutdown::Both);
    }
}

/// What the thread has.
struct Lender {
    listener: Arc<UnixListener>,
    fs: Weak<Fs>,
    borrowers: Vec<Borrower>,
}

impl Lender {
    fn run(mut self) -> io::Result<()> {
        loop {
            let now = Instant::now();
            self.borrowers.retain(|one| one.until.is_none_or(|until| now < until));
            let next = self.borrowers.iter().filter_map(|one| one.until).min();
            let left = next.map(|until| until.saturating_duration_since(now) + Duration::from_millis(1));
            let timeout = left.map_or(Ok(PollTimeout::NONE), PollTimeout::try_from);
            let sockets = self.borrowers.iter().map(|one| one.socket.as_fd());
            let mut asked: Vec<PollFd<'_>> = [self.listener.as_fd()]
                .into_iter()
                .chain(sockets)
                .map(|socket| PollFd::new(socket, PollFlags::POLLIN))
                .collect();
            match poll(&mut asked, timeout.unwrap_or(PollTimeout::MAX)) {
                Ok(_) => {}
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
            let heard: Vec<bool> = asked.iter().map(|one| one.any().unwrap_or(true)).collect();
            let Some(fs) = self.fs.upgrade() else { return Ok(()) };
            let mut loans = self.borrowers.iter().filter(|one| one.until.is_none()).count();
            let mut of_borrowers = heard[1..].iter();
            self.borrowers.retain_mut(|one| {
                !of_borrowers.next().is_some_and(|heard| *heard) || one.hears(&fs, &mut loans)
            });
            if heard[0] && !self.accept()? {
                return Ok(());
            }
        }
    }

    /// Takes the programs that have connected. False at the end.
    fn accept(&mut self) -> io::Result<bool> {
        // Those who come now are heard before they have to go for others.
        for _ in 0..MAX_SILENT / 2 {
            match self.listener.accept() {
                Ok((socket, _)) => {
                    socket.set_nonblocking(true)?;
                    let mut silent = self.borrowers.iter().enumerate().filter(|(_, one)| one.until.is_some());
                    let first = silent.next().map(|(at, _)| at);
                    if silent.count() + 1 >= MAX_SILENT {
                        first.map(|at| self.borrowers.remove(at));
                    }
                    let until = Some(Instant::now() + PATIENCE);
                    self.borrowers.push(Borrower { socket, until, lent: None });
                }
                Err(error) => match Errno::from_raw(error.raw_os_error().unwrap_or(0)) {
                    Errno::EAGAIN => return Ok(true),
                    Errno::EINTR | Errno::ECONNABORTED => {}
                    Errno::EINVAL => return Ok(false),
                    Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM => {
                        tracing::warn!(%error, "nobody can borrow memory for now");
                        std::thread::sleep(ACCEPT_PAUSE);
                        return Ok(true);
                    }
                    _ => return Err(error),
                },
            }
        }
        Ok(true)
    }
}

/// A program that has connected.
struct Borrower {
    socket: UnixStream,
    /// When it must have asked. None once it has.
    until: Option<Instant>,
    lent: Option<Lent>,
}

impl Borrower {
    /// Takes what the program says. False if the connection ends; `loans` are there now.
    fn hears(&mut self, fs: &Fs, loans: &mut usize) -> bool {
        let mut bytes = [0; MAX_REQUEST];
        let len = match self.socket.read(&mut bytes) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                return true;
            }
            outcome => outcome.unwrap_or(0),
        };
        let said = str::from_utf8(&bytes[..len]).unwrap_or_default();
        if let Some(lent) = self.lent.take() {
            match said.trim_end() {
                "done" => lent.loan.give_back(),
                _ => lent.lose(),
            }
            return false;
        }
        let asked = match *loans < MAX_LOANS {
            true => Lent::asked(fs, said),
            false => Err(CallError::new(libc::EAGAIN, format!("{MAX_LOANS} programs borrow memory already"))),
        };
        match asked {
            Ok((lent, memory)) => match self.answer(&lent.described(), Some(&memory)) {
                Ok(()) => {
                    *loans += 1;
                    (self.until, self.lent) = (None, Some(lent));
                    true
                }
                // It has not got the descriptor.
                Err(_) => {
                    lent.loan.give_back();
                    false
                }
            },
            Err(error) => {
                let _ = self.answer(&format!("error: {} {error}\n", error.errno), None);
                false
            }
        }
    }

    fn answer(&self, text: &str, memory: Option<&OwnedFd>) -> Result<(), Errno> {
        let fds: Vec<_> = memory.iter().map(|memory| memory.as_raw_fd()).collect();
        let control = [ControlMessage::ScmRights(&fds)];
        let control = if fds.is_empty() { &control[..0] } else { &control[..] };
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let socket = self.socket.as_raw_fd();
        sendmsg::<UnixAddr>(socket, &[IoSlice::new(text.as_bytes())], control, flags, None).map(drop)
    }
}

/// A version that a program has borrowed.
struct Lent {
    loan: Loan,
    reader: Reader,
    tree: Arc<ModelTree>,
}

impl Lent {
    fn asked(fs: &Fs, request: &str) -> CallResult<(Lent, OwnedFd)> {
        let wrong = || CallError::new(libc::EINVAL, "expected KEY newest, or KEY VERSION");
        let (key, which) = request.trim_end().split_once(' ').ok_or_else(wrong)?;
        let newest = which == "newest";
        let version = if newest { None } else { Some(Version(which.parse().map_err(|_| wrong())?)) };
        let tree = fs.with_key(key).ok_or_else(|| {
            CallError::new(libc::EACCES, "no model has this key: read user.gradfs.memory of its weights")
        })?;
        let job = &tree.model.job;
        let version = version.unwrap_or_else(|| job.version());
        tree.model.refuse_reader(version)?;
        // The newest one may have been replaced since.
        let open = |_| if newest { Reader::newest(job) } else { Reader::open(job, version) };
        let gone = || CallError::new(libc::ENOENT, format!("version {version} is not here"));
        let reader = (0..3).find_map(open).ok_or_else(gone)?;
        let lending = |error: io::Error| {
            CallError::new(error.raw_os_error().unwrap_or(libc::EIO), format!("cannot lend memory: {error}"))
        };
        let (loan, memory) = reader.lend().map_err(lending)?;
        Ok((Lent { loan, reader, tree }, memory))
    }

    fn described(&self) -> String {
        let model = &self.tree.model;
        format!("{} {} {}\n", self.reader.version(), model.job.generation(), model.layout.size())
    }

    fn lose(self) {
        let (model, version) = (&self.tree.model.name, self.reader.version());
        tracing::info!(model, %version, "lent memory was not given back, so it is not used again");
    }
}
