//! The options of TCP sockets, and a blocking connect.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use crate::transport::stream::{InUse, congestion_name, in_use, is_same_host};

/// The options of a TCP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// SO_SNDBUF in bytes, which the kernel doubles. `None` lets the kernel tune it: on loopback that is as fast as
    /// any fixed size, and elsewhere it follows the delay.
    pub send_buffer: Option<usize>,
    /// SO_RCVBUF in bytes, likewise.
    pub receive_buffer: Option<usize>,
    /// A peer counts as gone after it has acknowledged nothing, or has kept its window shut, for this long
    /// (TCP_USER_TIMEOUT).
    pub user_timeout: Option<Duration>,
    /// Idle connections are probed after this time.
    pub keepalive: Option<Duration>,
    /// The congestion control for a peer on the same host. There is no congestion to control, and some controls cost
    /// throughput. The system's choice stays if the system does not have this one or does not allow it, and for peers
    /// on other hosts.
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
    /// Sets the options that can be set before there is a connection: the buffers, so that the window is scaled for
    /// them, and the congestion control of a peer on the same host. A connection that begins with a pacing control
    /// (BBR) stays paced, even if the control is changed later. A connection that begins without it can be given it
    /// later.
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
            // A namespace may lack it (ENOENT) or forbid it (EPERM). The status shows the control in use.
            let _ = socket.set_tcp_congestion(name.as_bytes());
        }
        Ok(())
    }

    /// Sets all options on a connected socket, and TCP_NODELAY. Returns the settings in use.
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

/// Connects with a deadline. The calling thread waits.
///
/// # Errors
/// `TimedOut` after `timeout`, else the system's.
pub fn connect(address: SocketAddr, options: &SocketOptions, timeout: Duration) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    options.apply_early(&SockRef::from(&socket))?;
    socket.connect_timeout(&address.into(), timeout)?;
    options.apply(&SockRef::from(&socket))?;
    Ok(socket.into())
}
