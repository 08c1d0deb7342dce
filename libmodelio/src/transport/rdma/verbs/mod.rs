//! libibverbs and librdmacm: devices, memory, queues and connections, each an object that gives back what it took.
//!
//! All calls of these libraries, and all else that is `unsafe` about RDMA, is in this folder, and what it offers is safe,
//! but for [`Slot::bytes`]. Whoever hands memory to it says so as to any transport, by
//! [`Piece::new`](crate::transport::stream::Piece::new) and [`Target::new`](crate::transport::stream::Target::new), where its owner is: in
//! `client/edge`, and in the shard's `part/blocks` and `fabric`. It rests on this:
//!
//! * **Objects outlive what is made of them.** Each holds the one that it was made of by an `Arc`, and is destroyed
//!   when the last holder lets go: a queue pair before its queues, a registration before its protection domain. Contexts
//!   of devices are librdmacm's and are never closed.
//! * **Memory of work that is posted stays.** Whatever the device may read or write for this end is held, with its
//!   registration, by the [`Work`] in its queue pair's list until the device reports it, or the queue pair is
//!   destroyed, upon which the device touches nothing of it any more.
//! * **Nobody else touches memory that a READ fills**, for that memory comes as a [`Target`](crate::transport::stream::Target), whose
//!   maker has promised it, or is a piece of an arena that belongs to the work.
//! * **Memory that peers write** (rings, granted slots) is never referred to by a Rust reference: it is copied out by
//!   raw pointers, or handed on under the contract of [`Slot::bytes`]. What a peer writes there at the wrong time
//!   changes numbers, never lengths or addresses.
//!
//! | module | holds |
//! |---|---|
//! | `context` | devices that there are, and what they can do |
//! | `registration` | protection domains and registrations |
//! | `device_memory` | memory of GPUs and the like |
//! | `arena` | pieces of large registered memory |
//! | `queue` | completion queues, shared receive queues |
//! | `pair` | queue pairs: work that is posted, and what became of it |
//! | `ring` | bytes that each end writes into the other's memory |
//! | `cm` | connections by rdma_cm |
//! | `join` | how their queue pairs get ready |

mod arena;
mod cm;
mod context;
mod device_memory;
mod join;
mod pair;
mod queue;
mod registration;
mod ring;

use std::io;

use nix::errno::Errno;

pub use arena::{Arena, Chunk, Pool, Slot};
pub use cm::{CmChannel, CmEvent, CmKind, Endpoint, PRIVATE_DATA, Parameters};
pub(crate) use context::Trouble;
pub use context::{Context, DeviceInfo, GidInfo, PortInfo, contexts, devices};
pub use pair::{Done, Finished, Pair, PairLimits, Work};
pub use queue::{Completion, Poller, Receives, Reserved};
pub use registration::{Access, Domain, Registration, Remote, Spare};
pub use ring::{Broken, Notify, RING, Rings};

/// What libibverbs or librdmacm refuse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerbsError {
    /// A call failed.
    #[error("{doing}: {errno}")]
    Call {
        /// What was to be done.
        doing: &'static str,
        /// Why not.
        errno: Errno,
    },
    /// There is no device.
    #[error(
        "there is no RDMA device (`rdma link` lists them; for software RDMA: rdma link add rxe0 type rxe netdev DEVICE)"
    )]
    NoDevice,
    /// There is a device, and no way to connect.
    #[error(
        "librdmacm cannot be used: {0} (is the module rdma_ucm loaded, and /dev/infiniband/rdma_cm there?)"
    )]
    NoCm(Errno),
    /// No device of that name.
    #[error("there is no RDMA device {wanted:?}; there is {there}")]
    UnknownDevice {
        /// As configured.
        wanted: String,
        /// What there is.
        there: String,
    },
    /// The port is not there, or is down.
    #[error("port {port} of {device} {why}")]
    Port {
        /// Of which device.
        device: String,
        /// Which.
        port: u8,
        /// What is wrong with it.
        why: String,
    },
    /// The GID index leads to no GID.
    #[error("GID index {index} of port {port} of {device} holds no GID (`gradfs rdma devices` lists them)")]
    Gid {
        /// Of which device.
        device: String,
        /// Of which port.
        port: u8,
        /// Which.
        index: u32,
    },
    /// Packets would come from another GID than was asked for.
    #[error(
        "{}, and --rdma-gid-index asks for GID {wanted}: choose one of the kind that rdma_cm takes (default_roce_mode), or \
         none",
        from.map_or_else(|| "packets come from no GID".to_owned(), |from| format!("packets come from GID {from}"))
    )]
    OtherGid {
        /// Its index.
        wanted: u32,
        /// That of the one that rdma_cm takes; none within a subnet of InfiniBand.
        from: Option<u32>,
    },
    /// A completion queue has no room for one more queue pair.
    #[error(
        "a completion queue holds {all} entries, and {wanted} are wanted: raise --rdma-queues, or lower --rdma-depth"
    )]
    QueueFull {
        /// As many as it holds.
        all: u32,
        /// As many as might wait at once.
        wanted: u32,
    },
    /// The kernel does not let so much memory be pinned.
    #[error(
        "{bytes} bytes cannot be registered: RLIMIT_MEMLOCK is {limit} bytes; raise it (ulimit -l unlimited, or \
         LimitMEMLOCK=infinity in a systemd unit)"
    )]
    Memlock {
        /// As many as were to be.
        bytes: usize,
        /// As many as may be.
        limit: u64,
    },
    /// The arena is full.
    #[error(
        "{bytes} bytes for rings or slots do not fit into the {all} bytes of registered memory, of which {available} \
         are free: raise --rdma-arena, or lower --rdma-slots"
    )]
    Arena {
        /// As many as were to be taken.
        bytes: u64,
        /// As many as nobody has, perhaps not in one piece.
        available: u64,
        /// As many as there are.
        all: u64,
    },
    /// A range that leaves the memory it is of.
    #[error("{len} bytes at {offset} leave {of} of {all} bytes")]
    OutOfRange {
        /// Where.
        offset: u64,
        /// How many.
        len: usize,
        /// What they leave.
        of: &'static str,
        /// How long that is.
        all: u64,
    },
    /// The queue takes no more until something is done.
    #[error("the queue pair has {0} pieces of work outstanding, its depth")]
    Full(usize),
    /// Another device does not give its memory away.
    #[error("memory of a device cannot be copied out: {0}")]
    CopyOut(String),
    /// The queue pair is broken, or its peer gone.
    #[error("{0}")]
    Broken(String),
}

impl VerbsError {
    fn last(doing: &'static str) -> VerbsError {
        VerbsError::Call { doing, errno: Errno::last() }
    }

    /// Of a call that returns 0 or -1 with `errno`.
    fn check(doing: &'static str, result: libc::c_int) -> Result<(), VerbsError> {
        if result == 0 { Ok(()) } else { Err(VerbsError::last(doing)) }
    }

    /// Of a call that returns 0 or an error's number.
    fn check_number(doing: &'static str, result: libc::c_int) -> Result<(), VerbsError> {
        match result {
            0 => Ok(()),
            -1 => Err(VerbsError::last(doing)),
            number => Err(VerbsError::Call { doing, errno: Errno::from_raw(number.abs()) }),
        }
    }
}

impl From<VerbsError> for io::Error {
    fn from(error: VerbsError) -> io::Error {
        io::Error::other(error.to_string())
    }
}
