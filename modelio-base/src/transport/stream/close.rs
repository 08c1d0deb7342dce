//! Why a connection ends.

use std::borrow::Cow;
use std::io;
use std::net::SocketAddr;

use nix::errno::Errno;

/// Why a connection is over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Close {
    /// The peer closed its end in an orderly way.
    #[error("closed by the peer")]
    Ended,
    /// A system call failed.
    #[error("{doing} failed: {errno}")]
    Socket {
        /// The operation that failed.
        doing: &'static str,
        /// The reason.
        errno: Errno,
    },
    /// No connection came about.
    #[error("no connection to {address}: {errno}")]
    Connect {
        /// The address of the peer.
        address: SocketAddr,
        /// The reason; `ETIMEDOUT` when the deadline passed.
        errno: Errno,
    },
    /// This end ends it, because of a protocol error of the peer, a deadline, or a connection that replaces it.
    #[error("{0}")]
    Asked(Cow<'static, str>),
    /// The stream asked for something impossible. This is a defect of this program.
    #[error("defect: {0}")]
    Misused(Cow<'static, str>),
    /// A callback panicked.
    #[error("panicked: {0}")]
    Panicked(String),
    /// The reactor ends.
    #[error("the program shuts down")]
    ShutDown,
}

/// The errno of an error that the system gave; EIO for one that it did not.
pub fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}
