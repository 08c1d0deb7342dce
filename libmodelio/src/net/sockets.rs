//! TCP sockets as the data plane wants them, and what is in use on one.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use nix::errno::Errno;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

/// What is set on a TCP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// SO_SNDBUF in bytes, of which the kernel makes twice as much; `None` lets the kernel tune it, which is as fast on
    /// loopback as any fixed size and follows the delay elsewhere.
    pub send_buffer: Option<usize>,
    /// SO_RCVBUF in bytes, as above.
    pub receive_buffer: Option<usize>,
    /// A peer that acknowledges nothing for so long, or keeps its window shut, is gone (TCP_USER_TIMEOUT).
    pub user_timeout: Option<Duration>,
    /// Idle connections are probed after this time.
    pub keepalive: Option<Duration>,
    /// Congestion control for a peer on the same host, where there is no congestion to control and some of them cost
    /// throughput. Left as it is where the system does not have it or does not allow it. Peers elsewhere get what the
    /// system chose.
    pub same_host_congestion: Option<&'static str>,
}

impl Default for SocketOptions {
    fn default() -> SocketOptions {
        SocketOptions {
            send_buffer: None,
            receive_buffer: None,
            user_timeout: Some(Duration::from_secs(30)),
            keepalive: Some(Duration::from_secs(10)),
            same_host_congestion: Some("cubic"),
        }
    }
}

/// What a TCP socket uses, for status and log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InUse {
    /// Whether both ends are on this host.
    pub same_host: bool,
    /// The congestion control.
    pub congestion: String,
    /// SO_SNDBUF in bytes, as the kernel counts.
    pub send_buffer: usize,
    /// SO_RCVBUF in bytes, as the kernel counts.
    pub receive_buffer: usize,
}

impl fmt::Display for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.same_host { "same host" } else { "another host" };
        write!(
            f,
            "{place}, {}, buffers {}+{} KiB",
            self.congestion,
            self.send_buffer >> 10,
            self.receive_buffer >> 10
        )
    }
}

impl SocketOptions {
    /// Sets what can be set before there is a connection: buffers, so that the window is scaled for them, and the
    /// congestion control of a peer on the same host. A connection that begins with one that paces (BBR) is paced
    /// ever after, whatever it is switched to; one that begins without it can be given it later.
    ///
    /// # Errors
    /// The system's.
    pub fn apply_early(&self, socket: &SockRef<'_>) -> io::Result<()> {
        if let Some(bytes) = self.send_buffer {
            socket.set_send_buffer_size(bytes)?;
        }
        if let Some(bytes) = self.receive_buffer {
            socket.set_recv_buffer_size(bytes)?;
        }
        if let Some(name) = self.same_host_congestion {
            // A namespace may lack it (ENOENT) or forbid it (EPERM): what is in use is reported.
            let _ = socket.set_tcp_congestion(name.as_bytes());
        }
        Ok(())
    }

    /// Sets everything on a connected socket, TCP_NODELAY besides, and says what is in use.
    ///
    /// # Errors
    /// The system's.
    pub fn apply(&self, socket: &SockRef<'_>) -> io::Result<InUse> {
        socket.set_tcp_nodelay(true)?;
        self.apply_early(socket)?;
        socket.set_tcp_user_timeout(self.user_timeout)?;
        if let Some(idle) = self.keepalive {
            let probes =
                TcpKeepalive::new().with_time(idle).with_interval(Duration::from_secs(5)).with_retries(3);
            socket.set_tcp_keepalive(&probes)?;
        }
        if self.same_host_congestion.is_some() && !same_host(socket)? {
            let fresh = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
            socket.set_tcp_congestion(name(&fresh.tcp_congestion()?))?;
        }
        in_use(socket)
    }
}

/// What a connected TCP socket uses.
///
/// # Errors
/// The system's.
pub fn in_use(socket: &SockRef<'_>) -> io::Result<InUse> {
    let congestion = socket.tcp_congestion()?;
    Ok(InUse {
        same_host: same_host(socket)?,
        congestion: String::from_utf8_lossy(name(&congestion)).into_owned(),
        send_buffer: socket.send_buffer_size()?,
        receive_buffer: socket.recv_buffer_size()?,
    })
}

/// What the kernel's text holds before its zeros.
fn name(text: &[u8]) -> &[u8] {
    text.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// Whether both ends have one address, or the peer's is a loopback address.
fn same_host(socket: &SockRef<'_>) -> io::Result<bool> {
    let address = |of: socket2::SockAddr| of.as_socket().map(|a| a.ip().to_canonical());
    let (local, peer) = (address(socket.local_addr()?), address(socket.peer_addr()?));
    Ok(peer.is_some() && (local == peer || peer.is_some_and(|ip: IpAddr| ip.is_loopback())))
}

/// Connects with a deadline, for callers that have a thread to wait on.
///
/// # Errors
/// `TimedOut` after `timeout`; else the system's.
pub fn connect(address: SocketAddr, options: &SocketOptions, timeout: Duration) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    options.apply_early(&SockRef::from(&socket))?;
    socket.connect_timeout(&address.into(), timeout)?;
    options.apply(&SockRef::from(&socket))?;
    Ok(socket.into())
}

/// The errno of an error that the system gave; EIO for one that it did not.
pub(super) fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}
