//! Accepting connections.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::time::Duration;

use nix::errno::Errno;
use socket2::SockRef;

use super::handle::{Refused, Thread, Threads, add};
use super::sockets::{SocketOptions, errno};
use super::stream::Stream;

/// So many are accepted before others get their turn.
const AT_ONCE: usize = 16;
/// Without a descriptor or memory to spare, the next try is after this time.
pub(super) const PAUSE: Duration = Duration::from_millis(100);

/// What becomes of accepted connections.
pub(super) struct Accept {
    pub options: SocketOptions,
    pub factory: Box<dyn FnMut(SocketAddr) -> Option<Box<dyn Stream>> + Send>,
    pub threads: Threads,
}

/// A listening socket of a thread. Its descriptor is in its port.
pub(super) struct Listener {
    pub accept: Accept,
}

impl Listener {
    /// Accepts what is there.
    ///
    /// # Errors
    /// When it cannot go on before [`PAUSE`] is over.
    pub fn ready(&mut self, fd: &OwnedFd) -> Result<(), Errno> {
        for _ in 0..AT_ONCE {
            match SockRef::from(fd).accept4(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) {
                Ok((socket, peer)) => {
                    if let Some(peer) = peer.as_socket() {
                        self.accepted(socket.into(), peer);
                    }
                }
                Err(err) => match errno(&err) {
                    Errno::EAGAIN => return Ok(()),
                    // The peer was gone before it was accepted, or its network is: accept(2) passes that on.
                    Errno::ECONNABORTED
                    | Errno::EINTR
                    | Errno::ENETDOWN
                    | Errno::EPROTO
                    | Errno::EHOSTDOWN
                    | Errno::EHOSTUNREACH
                    | Errno::ENETUNREACH => {}
                    other => return Err(other),
                },
            }
        }
        Ok(())
    }

    fn accepted(&mut self, socket: OwnedFd, peer: SocketAddr) {
        if let Err(err) = self.accept.options.apply(&SockRef::from(&socket)) {
            // The connection may be gone already.
            tracing::debug!(%peer, %err, "accepted, but its socket cannot be set up");
            return;
        }
        let Some(stream) = (self.accept.factory)(peer) else { return };
        match add(&self.accept.threads, socket, stream, Thread::Any) {
            Ok(_) | Err(Refused::ShutDown) => {}
            Err(refused) => tracing::warn!(%peer, %refused, "a connection is not accepted"),
        }
    }
}

/// A listening socket with its buffers set, which those it accepts inherit, so that their windows are scaled for them.
///
/// # Errors
/// The system's: the address is taken, or not this host's.
pub fn bind(address: SocketAddr, options: &SocketOptions) -> std::io::Result<TcpListener> {
    let socket = socket2::Socket::new(
        socket2::Domain::for_address(address),
        socket2::Type::STREAM,
        Some(socket2::Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    options.apply_early(&SockRef::from(&socket))?;
    socket.bind(&address.into())?;
    socket.listen(1024)?;
    Ok(socket.into())
}
