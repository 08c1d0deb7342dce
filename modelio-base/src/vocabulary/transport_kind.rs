//! The ways by which bytes go.

use std::fmt;

/// The transport that bytes go by. It is named at start, in `status.json` and in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportKind {
    /// Shard and mount share one address space.
    InProcess,
    /// Streams over a network.
    Tcp,
    /// Memory that processes of one host share.
    SharedMemory,
    /// Memory that the devices of both ends reach.
    Rdma,
}

/// The reason when a program without RDMA support does not use RDMA.
pub const NO_RDMA: &str = "this gradfs was built without RDMA (cargo build --release --features rdma)";

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TransportKind::InProcess => "in-process",
            TransportKind::Tcp => "tcp",
            TransportKind::SharedMemory => "shm",
            TransportKind::Rdma => "rdma",
        })
    }
}
