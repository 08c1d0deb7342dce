//! The errors of libibverbs and librdmacm, with their causes.

use std::io;

use modelio_base::vocabulary::transport_kind::NO_RDMA;
use nix::errno::Errno;

/// An error of libibverbs or librdmacm.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerbsError {
    /// A call failed.
    #[error("{doing}: {errno}")]
    Call {
        /// The operation.
        doing: &'static str,
        /// The error.
        errno: Errno,
    },
    /// The build has no RDMA.
    #[error("{NO_RDMA}")]
    NotBuilt,
    /// The host has no device.
    #[error(
        "there is no RDMA device (`rdma link` lists them; for software RDMA: rdma link add rxe0 type rxe netdev DEVICE)"
    )]
    NoDevice,
    /// There is a device, but librdmacm cannot make connections.
    #[error(
        "librdmacm cannot be used: {0} (is the module rdma_ucm loaded, and /dev/infiniband/rdma_cm there?)"
    )]
    NoCm(Errno),
    /// No device of that name.
    #[error("there is no RDMA device {wanted:?}; there is {there}")]
    UnknownDevice {
        /// The configured devices.
        wanted: String,
        /// The devices that exist.
        there: String,
    },
    /// The port does not exist, or is down.
    #[error("port {port} of {device} {why}")]
    Port {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The fault.
        why: String,
    },
    /// The GID index leads to no GID.
    #[error("GID index {index} of port {port} of {device} holds no GID (`gradfs rdma devices` lists them)")]
    Gid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The index.
        index: u32,
    },
    /// Packets would come from another GID than was asked for.
    #[error(
        "{}, and --rdma-gid-index asks for GID {wanted}: choose one of the kind that rdma_cm takes (default_roce_mode), or \
         none",
        from.map_or_else(|| "packets come from no GID".to_owned(), |from| format!("packets come from GID {from}"))
    )]
    OtherGid {
        /// The index of that GID.
        wanted: u32,
        /// The index that rdma_cm chooses. `None` within a subnet of InfiniBand.
        from: Option<u32>,
    },
    /// A completion queue has no room for one more queue pair.
    #[error(
        "a completion queue holds {all} entries, and {wanted} are wanted: raise --rdma-queues, or lower --rdma-depth"
    )]
    QueueFull {
        /// The number that the queue holds.
        all: u32,
        /// The number that might wait at once.
        wanted: u32,
    },
    /// The kernel does not allow so much memory to be pinned.
    #[error(
        "{bytes} bytes cannot be registered: RLIMIT_MEMLOCK is {limit} bytes; raise it (ulimit -l unlimited, or \
         LimitMEMLOCK=infinity in a systemd unit)"
    )]
    Memlock {
        /// The requested number of bytes.
        bytes: usize,
        /// The largest number of bytes.
        limit: u64,
    },
    /// The arena is full.
    #[error(
        "{bytes} bytes for rings or slots do not fit into the {all} bytes of registered memory, of which {available} \
         are free: raise --rdma-arena, or lower --rdma-slots"
    )]
    Arena {
        /// The requested number of bytes.
        bytes: u64,
        /// The free bytes, perhaps not in one piece.
        available: u64,
        /// The number of bytes in all.
        all: u64,
    },
    /// A range that exceeds its memory.
    #[error("{len} bytes at {offset} exceed {of} of {all} bytes")]
    OutOfRange {
        /// The offset.
        offset: u64,
        /// The length.
        len: usize,
        /// The name of the memory.
        of: &'static str,
        /// The length of the memory.
        all: u64,
    },
    /// The queue pair takes no more work until some is done.
    #[error("the queue pair has {0} pieces of work outstanding, its depth")]
    Full(usize),
    /// Memory of another device cannot be copied out.
    #[error("memory of a device cannot be copied out: {0}")]
    CopyOut(String),
    /// The queue pair is broken, or its peer has gone.
    #[error("{0}")]
    Broken(String),
}

impl From<VerbsError> for io::Error {
    fn from(error: VerbsError) -> io::Error {
        io::Error::other(error.to_string())
    }
}
