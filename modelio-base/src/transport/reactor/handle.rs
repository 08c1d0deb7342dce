//! A [`Handle`] adds connections to a reactor, from any thread.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use nix::sys::resource::{Resource, getrlimit};

use super::backend::Backend;
use super::inbox::{Refused, ThreadState};
use super::waiting::Kind;
use crate::transport::stream::{Connection, Stream};

/// The thread of a reactor that serves a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thread {
    /// The thread with the fewest busy connections, and among those the one with the fewest connections.
    Any,
    /// The thread of this number, modulo the number of threads. So related connections can be on one thread, or on
    /// different ones.
    Number(usize),
}

/// Adds connections to a reactor, from any thread. It is cheap to clone, and does not keep the reactor running.
#[derive(Clone)]
pub struct Handle {
    pub(super) threads: Arc<[Arc<ThreadState>]>,
    pub(super) backend: Arc<Backend>,
}

impl Handle {
    /// The backend.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// The number of connections, with those that are being added and the listeners.
    pub fn connections(&self) -> usize {
        self.threads.iter().map(|thread| thread.load().1).sum()
    }

    /// Serves a connected stream socket. Its options are left as they are (see
    /// [`SocketOptions::apply`](crate::transport::tcp::SocketOptions::apply)), except O_NONBLOCK, which is set.
    ///
    /// # Errors
    /// [`Refused`]. Then the socket is closed and the stream dropped, without a call.
    pub fn add(
        &self,
        socket: impl Into<OwnedFd>,
        stream: Box<dyn Stream>,
        at: Thread,
    ) -> Result<Connection, Refused> {
        let fd = socket.into();
        nonblocking(&fd)?;
        self.place(fd, Kind::Stream(stream), at)
    }

    /// Serves a descriptor that does not block.
    pub fn place(&self, fd: OwnedFd, kind: Kind, at: Thread) -> Result<Connection, Refused> {
        let thread = match at {
            Thread::Number(number) => &self.threads[number % self.threads.len()],
            Thread::Any => {
                let least = self.threads.iter().min_by_key(|thread| thread.load());
                least.expect("a reactor has a thread")
            }
        };
        thread.place(fd, kind)
    }
}

/// The descriptors that connections leave to the process, for versions, regions and its own connections. Half of them, if
/// it may have few.
const OWN_DESCRIPTORS: u64 = 256;

/// Whether a connection with this new descriptor leaves the process enough of them. The kernel gives the lowest free
/// number, so the number tells how many are in use.
pub fn leaves_room(descriptor: &OwnedFd) -> bool {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    (descriptor.as_raw_fd() as u64) < limit - OWN_DESCRIPTORS.min(limit / 2)
}

fn nonblocking(fd: &OwnedFd) -> Result<(), Refused> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = fcntl(fd, FcntlArg::F_GETFL).map_err(Refused::Socket)?;
    let flags = OFlag::from_bits_retain(flags) | OFlag::O_NONBLOCK;
    fcntl(fd, FcntlArg::F_SETFL(flags)).map(drop).map_err(Refused::Socket)
}
