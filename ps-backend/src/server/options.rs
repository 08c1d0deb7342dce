//! What a process is to be, and why it does not come about.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use libmodelio::registry::RegistryError;
use libmodelio::transport::rdma::{DeviceMemory, RdmaOptions};
use libmodelio::transport::reactor::Choice;

/// What a process is to be.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Where it listens.
    pub listen: SocketAddr,
    /// The address by which others find it; `None` for the one that it listens on.
    pub advertise: Option<String>,
    /// The registry's address; `None` if this process is the registry.
    pub registry: Option<String>,
    /// It holds blocks; otherwise it is only the registry.
    pub holds_blocks: bool,
    /// Threads that move bytes, and as many that compute.
    pub threads: usize,
    /// By which way bytes are moved.
    pub io: Choice,
    /// Whether connections by RDMA are taken.
    pub rdma: RdmaUse,
    /// The port for them; `None` for the same number as the other one (with iWARP, any).
    pub rdma_port: Option<u16>,
    /// How RDMA is used.
    pub rdma_options: RdmaOptions,
    /// Memory of another device, such as a GPU, for payload that comes by RDMA; `None` for the host's. Versions, which
    /// are read, are in the host's in any case (iRDMA §IV-A).
    pub device_memory: Option<Arc<dyn DeviceMemory>>,
}

/// Whether a shard takes connections by RDMA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RdmaUse {
    /// No.
    Off,
    /// If there is a device. Why not, the log says: loudly only if there is one that cannot be used.
    #[default]
    Auto,
    /// Yes, or the shard does not start.
    On,
}

/// Why a process does not come about.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// The system's word.
        error: io::Error,
    },
    /// RDMA must be, and cannot.
    #[error("RDMA: {0}")]
    Rdma(String),
    /// No threads.
    #[error("cannot start threads: {0}")]
    Threads(String),
    /// The registry does not know this shard.
    #[error("the registry does not take this shard: {0}")]
    Registry(#[from] RegistryError),
}

/// Why a shard takes no connections by RDMA.
#[derive(Clone, Debug)]
pub(super) struct NoRdma {
    pub why: String,
    /// It is to be expected that it does: there is a device.
    pub hindered: bool,
}

impl NoRdma {
    pub(super) fn off() -> NoRdma {
        NoRdma { why: "it is switched off (--rdma off)".to_owned(), hindered: false }
    }
}
