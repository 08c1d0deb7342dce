//! A connection that is being made without a thread that waits.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Instant;

use nix::errno::Errno;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::sockets::{SocketOptions, errno};
use super::stream::{Close, Stream};

/// Between the SYN and its answer.
pub(super) struct Connecting {
    pub address: SocketAddr,
    pub options: SocketOptions,
    pub deadline: Instant,
    pub stream: Box<dyn Stream>,
}

impl Connecting {
    /// With a socket that is not connected yet.
    pub fn new(
        address: SocketAddr,
        options: SocketOptions,
        deadline: Instant,
        stream: Box<dyn Stream>,
    ) -> Result<(Connecting, OwnedFd), Errno> {
        let socket =
            Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP));
        let socket = socket.map_err(|err| errno(&err))?;
        options.apply_early(&SockRef::from(&socket)).map_err(|err| errno(&err))?;
        Ok((Connecting { address, options, deadline, stream }, socket.into()))
    }

    /// Sends the SYN. When the socket becomes writable, [`outcome`](Self::outcome) says what came of it.
    pub fn start(&self, fd: &OwnedFd) -> Result<(), Close> {
        match SockRef::from(fd).connect(&self.address.into()) {
            Ok(()) => Ok(()),
            Err(err) if matches!(errno(&err), Errno::EINPROGRESS | Errno::EINTR) => Ok(()),
            Err(err) => Err(self.failed(errno(&err))),
        }
    }

    pub fn outcome(&self, fd: &OwnedFd) -> Result<(), Close> {
        let socket = SockRef::from(fd);
        match socket.take_error() {
            Ok(None) => {}
            Ok(Some(err)) | Err(err) => return Err(self.failed(errno(&err))),
        }
        self.options.apply(&socket).map(drop).map_err(|err| self.failed(errno(&err)))
    }

    pub fn failed(&self, errno: Errno) -> Close {
        Close::Connect { address: self.address, errno }
    }
}
