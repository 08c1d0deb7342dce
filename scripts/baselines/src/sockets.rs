//! TCP sockets, set up for one machine.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result};
use socket2::{Domain, SockAddr, Socket, Type};

/// Nothing that is waited for takes longer than this.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// What is chosen for each socket.
#[derive(Clone, Debug, clap::Args)]
pub struct Tuning {
    /// Congestion control; BBR, the default of some systems, paces where there is nothing to be careful of
    #[arg(long, default_value = "cubic")]
    pub congestion: String,
    /// Bytes of the kernel's buffers, 0 to have them grow by themselves
    #[arg(long, default_value_t = 0)]
    pub socket_buffer: usize,
}

impl Tuning {
    fn socket(&self) -> Result<Socket> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket
            .set_tcp_congestion(self.congestion.as_bytes())
            .with_context(|| format!("congestion control {}", self.congestion))?;
        if self.socket_buffer > 0 {
            socket.set_recv_buffer_size(self.socket_buffer)?;
            socket.set_send_buffer_size(self.socket_buffer)?;
        }
        socket.set_tcp_nodelay(true)?;
        Ok(socket)
    }

    /// Listens on a port of loopback that the kernel chooses. What it accepts is tuned alike.
    pub fn listen(&self) -> Result<(TcpListener, SocketAddr)> {
        let socket = self.socket()?;
        socket.bind(&SockAddr::from(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))))?;
        socket.listen(128)?;
        let listener = TcpListener::from(socket);
        let address = listener.local_addr()?;
        Ok((listener, address))
    }

    /// Connects.
    pub fn connect(&self, address: SocketAddr) -> Result<TcpStream> {
        let socket = self.socket()?;
        socket
            .connect_timeout(&SockAddr::from(address), DEADLINE)
            .with_context(|| format!("to {address}"))?;
        Ok(socket.into())
    }
}
