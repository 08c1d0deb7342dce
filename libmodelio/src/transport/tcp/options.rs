//! The options of TCP sockets, and a connection that the caller waits for.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use crate::transport::stream::{InUse, congestion_name, in_use, is_same_host};

/// The options of a TCP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// SO_SNDBUF in bytes, of which the kernel makes twice as much; `None` lets the kernel tune it, which is as fast on
    /// loopback as any fixed size and follows the delay elsewhere.
    pub send_buffer: Option<usize>,
    /// SO_RCVBUF in bytes, as above.
    pub receive_buffer: Option<usize>,
    /// A peer that acknowledges nothing for this long, or keeps its window shut, is gone (TCP_USER_TIMEOUT).
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

impl SocketOptions {
    /// Sets the options that can be set before there is a connection: buffers, so that the window is scaled
    /// for them, and the congestion control of a peer on the same host. A connection that begins with a
    /// pacing control (BBR) is paced ever after, even if the control is changed later. A connection that
    /// begins without it can be given it later.
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
            // A namespace may lack it (ENOENT) or forbid it (EPERM): the control in use is reported.
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
        if self.same_host_congestion.is_some() && !is_same_host(socket)? {
            let fresh = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
            socket.set_tcp_congestion(congestion_name(&fresh.tcp_congestion()?))?;
        }
        in_use(socket)
    }
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
