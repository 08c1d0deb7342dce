//! The settings in use on a connected TCP socket, for status and log.

use std::fmt;
use std::io;
use std::net::IpAddr;

use socket2::SockRef;

/// The settings in use on a TCP socket, for status and log.
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

/// The settings in use on a connected TCP socket.
///
/// # Errors
/// The system's.
pub fn in_use(socket: &SockRef<'_>) -> io::Result<InUse> {
    let congestion = socket.tcp_congestion()?;
    Ok(InUse {
        same_host: is_same_host(socket)?,
        congestion: String::from_utf8_lossy(congestion_name(&congestion)).into_owned(),
        send_buffer: socket.send_buffer_size()?,
        receive_buffer: socket.recv_buffer_size()?,
    })
}

/// The name of a congestion control, which the kernel pads with zeros.
pub fn congestion_name(text: &[u8]) -> &[u8] {
    text.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// Whether both ends have one address, or the peer's is a loopback address.
pub fn is_same_host(socket: &SockRef<'_>) -> io::Result<bool> {
    let address = |of: socket2::SockAddr| of.as_socket().map(|a| a.ip().to_canonical());
    let (local, peer) = (address(socket.local_addr()?), address(socket.peer_addr()?));
    Ok(peer.is_some() && (local == peer || peer.is_some_and(|ip: IpAddr| ip.is_loopback())))
}
