//! The options of a server process, and why it does not start.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use libmodelio::registry::RegistryError;
use libmodelio::transport::rdma::{DeviceMemory, RdmaOptions};
use libmodelio::transport::reactor::Choice;
use libmodelio::wire::Checksum;

use crate::device::Accelerator;
use crate::state_copies::StateCopies;

/// The options of a server process.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// The address for other processes. `None` for the listening address.
    pub advertise: Option<String>,
    /// The registry's address. `None` if this process is the registry.
    pub registry: Option<String>,
    /// Where the registry's table is kept for a restart, if this process is the registry.
    pub registry_state: Option<PathBuf>,
    /// Whether it holds blocks. Otherwise it is only the registry, or passes on what the one at another address is asked.
    pub holds_blocks: bool,
    /// The number of threads that move bytes, and also of those that compute.
    pub threads: usize,
    /// How many copies of optimizer state it has in the host's memory.
    pub state: StateCopies,
    /// The device that has the state instead, and makes versions.
    pub device: Option<Arc<Accelerator>>,
    /// The system calls that move bytes.
    pub io: Choice,
    /// Whether blocks are sent with a checksum.
    pub checksum: Checksum,
    /// Whether to accept RDMA connections.
    pub rdma: RdmaUse,
    /// Their port. `None` for the same number as the TCP port (with iWARP, any port).
    pub rdma_port: Option<u16>,
    /// The options of RDMA.
    pub rdma_options: RdmaOptions,
    /// Memory of another device, such as a GPU, for payload that comes by RDMA. `None` for the host's memory.
    /// Versions, which are read, are always in the host's memory (iRDMA §IV-A).
    pub device_memory: Option<Arc<dyn DeviceMemory>>,
    /// The most bytes a second that are written into the stores of snapshots.
    pub snapshot_rate: Option<u64>,
}

/// Whether a shard accepts RDMA connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RdmaUse {
    /// No.
    Off,
    /// Yes, if there is a device. The log says why not; as a warning only if there is a device that cannot be used.
    #[default]
    Auto,
    /// Yes. The shard does not start without RDMA.
    On,
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// It cannot listen on the address.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        error: io::Error,
    },
    /// RDMA is required, and not available.
    #[error("RDMA: {0}")]
    Rdma(String),
    /// The system has no threads.
    #[error("cannot start threads: {0}")]
    Threads(String),
    /// The registry's state file cannot be used.
    #[error("cannot use the registry's state {}: {error}", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// The registry refuses this shard, or is out of reach.
    #[error("the registry does not take this shard: {0}")]
    Registry(#[from] RegistryError),
}

/// Why a shard accepts no RDMA connections.
#[derive(Clone, Debug)]
pub(super) struct NoRdma {
    pub why: String,
    /// The host has a device, so RDMA was to be expected.
    pub hindered: bool,
}

impl NoRdma {
    pub(super) fn off() -> NoRdma {
        NoRdma { why: "it is switched off (--rdma off)".to_owned(), hindered: false }
    }
}
