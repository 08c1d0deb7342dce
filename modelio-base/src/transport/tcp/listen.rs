//! Accepting connections, by TCP and through Unix sockets.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use socket2::SockRef;

use super::options::SocketOptions;
use crate::transport::reactor::{Handle, Kind, Readiness, Ready, Refused, Thread, Waiting, leaves_room};
use crate::transport::stream::{Close, Connection, Stream, errno};

/// The number of connections that are accepted before other descriptors get their turn.
const MAX_ACCEPTED_PER_TURN: usize = 16;
/// The pause before the next try when descriptors or memory are used up.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long it is not said again that connections are refused.
const SILENCE: Duration = Duration::from_secs(10);

impl Handle {
    /// Accepts connections with `options`, and serves the stream that `factory` returns for each, on the thread that
    /// [`Thread::Any`] selects. `factory` is called on a thread of the reactor, with the peer's address. `None` hangs
    /// up. Closing the returned connection stops the listener.
    ///
    /// # Errors
    /// [`Refused`]. Then the listener is closed.
    pub fn listen(
        &self,
        listener: TcpListener,
        options: SocketOptions,
        mut factory: impl FnMut(SocketAddr) -> Option<Box<dyn Stream>> + Send + 'static,
    ) -> Result<Connection, Refused> {
        listener.set_nonblocking(true).map_err(|err| Refused::Socket(errno(&err)))?;
        let factory = move |peer: Option<SocketAddr>| factory(peer?);
        self.accept_from(listener.into(), Options::Tcp(options), Box::new(factory))
    }

    /// Like [`Self::listen`], on a Unix socket.
    ///
    /// # Errors
    /// [`Refused`]. Then the listener is closed.
    pub fn listen_unix(
        &self,
        listener: UnixListener,
        send_buffer: usize,
        mut factory: impl FnMut() -> Option<Box<dyn Stream>> + Send + 'static,
    ) -> Result<Connection, Refused> {
        listener.set_nonblocking(true).map_err(|err| Refused::Socket(errno(&err)))?;
        self.accept_from(listener.into(), Options::Unix { send_buffer }, Box::new(move |_| factory()))
    }

    fn accept_from(
        &self,
        listener: OwnedFd,
        options: Options,
        factory: Factory,
    ) -> Result<Connection, Refused> {
        let accepting = Accepting { options, factory, reactor: self.clone(), said: None };
        self.place(listener, Kind::Waiting(Box::new(accepting)), Thread::Any)
    }
}

/// Makes the stream of a connection from this address, which only a peer by TCP has.
type Factory = Box<dyn FnMut(Option<SocketAddr>) -> Option<Box<dyn Stream>> + Send>;

/// The options of accepted sockets.
enum Options {
    Tcp(SocketOptions),
    Unix {
        /// SO_SNDBUF in bytes.
        send_buffer: usize,
    },
}

/// A listening socket of a reactor, and the function for the connections that it accepts.
struct Accepting {
    options: Options,
    factory: Factory,
    reactor: Handle,
    /// When it was last said that a connection is refused.
    said: Option<Instant>,
}

impl Waiting for Accepting {
    fn readiness(&self) -> Readiness {
        Readiness::Readable
    }

    fn ready(&mut self, fd: &OwnedFd) -> Result<Ready, Close> {
        Ok(match self.accept(fd) {
            Ok(()) => Ready::Again,
            Err(errno) => {
                tracing::warn!(%errno, "no connection can be accepted for now");
                Ready::After(ACCEPT_PAUSE)
            }
        })
    }
}

impl Accepting {
    /// Accepts the waiting connections.
    ///
    /// # Errors
    /// When it cannot go on before [`ACCEPT_PAUSE`] is over.
    fn accept(&mut self, fd: &OwnedFd) -> Result<(), Errno> {
        for _ in 0..MAX_ACCEPTED_PER_TURN {
            match SockRef::from(fd).accept4(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) {
                Ok((socket, peer)) => self.accepted(socket.into(), peer.as_socket()),
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

    fn accepted(&mut self, socket: OwnedFd, peer: Option<SocketAddr>) {
        let applied = match &self.options {
            Options::Tcp(options) => options.apply(&SockRef::from(&socket)).map(|_| ()),
            Options::Unix { send_buffer } => SockRef::from(&socket).set_send_buffer_size(*send_buffer),
        };
        if let Err(err) = applied {
            // The connection may be gone already.
            tracing::debug!(?peer, %err, "accepted, but its socket cannot be set up");
            return;
        }
        let placed = if leaves_room(&socket) {
            let Some(stream) = (self.factory)(peer) else { return };
            self.reactor.place(socket, Kind::Stream(stream), Thread::Any).map(drop)
        } else {
            Err(Refused::Socket(Errno::EMFILE))
        };
        match placed {
            Ok(()) | Err(Refused::ShutDown) => {}
            Err(refused) if self.said.is_none_or(|at| at.elapsed() > SILENCE) => {
                self.said = Some(Instant::now());
                tracing::warn!(?peer, %refused, "connections are not accepted");
            }
            Err(refused) => tracing::debug!(?peer, %refused, "a connection is not accepted"),
        }
    }
}

/// A listening socket with its buffers set. Accepted sockets inherit them, so that their windows are scaled for them.
///
/// # Errors
/// The system's: the address is in use, or does not belong to this host.
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
