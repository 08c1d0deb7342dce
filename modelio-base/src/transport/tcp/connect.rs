//! Connecting without a thread that waits.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Instant;

use nix::errno::Errno;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::options::SocketOptions;
use crate::transport::reactor::{Handle, Kind, Readiness, Ready, Refused, Thread, Waiting};
use crate::transport::stream::{Close, Connection, Stream, errno};

impl Handle {
    /// Connects, and then serves the connection. If it does not come about before `deadline`, [`Stream::closed`] with
    /// [`Close::Connect`] is the stream's only call.
    ///
    /// # Errors
    /// [`Refused`]. Then the stream is dropped without a call.
    pub fn connect(
        &self,
        address: SocketAddr,
        options: SocketOptions,
        deadline: Instant,
        stream: Box<dyn Stream>,
        at: Thread,
    ) -> Result<Connection, Refused> {
        let fd = unconnected(address, &options).map_err(Refused::Socket)?;
        let connecting = Connecting { address, options, deadline, stream: Some(stream) };
        self.place(fd, Kind::Waiting(Box::new(connecting)), at)
    }
}

/// A socket that is not connected yet.
fn unconnected(address: SocketAddr, options: &SocketOptions) -> Result<OwnedFd, Errno> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP));
    let socket = socket.map_err(|err| errno(&err))?;
    options.apply_early(&SockRef::from(&socket)).map_err(|err| errno(&err))?;
    Ok(socket.into())
}

/// A socket between the SYN and its answer. It becomes writable when the answer comes.
struct Connecting {
    address: SocketAddr,
    options: SocketOptions,
    deadline: Instant,
    /// The stream, until there is a connection.
    stream: Option<Box<dyn Stream>>,
}

impl Connecting {
    fn failed(&self, errno: Errno) -> Close {
        Close::Connect { address: self.address, errno }
    }
}

impl Waiting for Connecting {
    /// Sends the SYN.
    fn start(&mut self, fd: &OwnedFd) -> Result<(), Close> {
        match SockRef::from(fd).connect(&self.address.into()) {
            Ok(()) => Ok(()),
            Err(err) if matches!(errno(&err), Errno::EINPROGRESS | Errno::EINTR) => Ok(()),
            Err(err) => Err(self.failed(errno(&err))),
        }
    }

    fn readiness(&self) -> Readiness {
        Readiness::Writable
    }

    fn deadline(&self) -> Option<(Instant, Close)> {
        Some((self.deadline, self.failed(Errno::ETIMEDOUT)))
    }

    fn ready(&mut self, fd: &OwnedFd) -> Result<Ready, Close> {
        let socket = SockRef::from(fd);
        match socket.take_error() {
            Ok(None) => {}
            Ok(Some(err)) | Err(err) => return Err(self.failed(errno(&err))),
        }
        self.options.apply(&socket).map_err(|err| self.failed(errno(&err)))?;
        Ok(self.stream.take().map_or(Ready::Again, Ready::Stream))
    }

    fn closed(&mut self, why: &Close) {
        if let Some(mut stream) = self.stream.take() {
            stream.closed(why);
        }
    }
}
