//! libibverbs and librdmacm: devices, memory, queues and connections, each an object that gives back what it took.
//!
//! All calls of these libraries, and everything else that is `unsafe` about RDMA, is in this folder, and its
//! interface is safe, except for [`Slot::bytes`]. The owners of memory hand it over as to any transport, by
//! [`Piece::new`](crate::transport::stream::Piece::new) and
//! [`Target::new`](crate::transport::stream::Target::new): in `client/blocks.rs` and `client/paths`, and in
//! the shard's `server/partition`. The safety rests on these rules:
//!
//! * **Objects outlive what is made of them.** Each holds the one that it was made of by an `Arc`, and is destroyed
//!   when the last holder is dropped: a queue pair before its queues, a registration before its protection domain.
//!   Contexts of devices are librdmacm's and are never closed.
//! * **Memory of work that is posted stays.** Whatever the device may read or write for this end is held, with its
//!   registration, by the [`Work`] in its queue pair's list until the device reports it, or the queue pair is
//!   destroyed, upon which the device touches nothing of it any more.
//! * **Nobody else touches memory that a READ fills**, because that memory comes as a
//!   [`Target`](crate::transport::stream::Target), whose maker has promised it, or is a piece of an arena
//!   that belongs to the work.
//! * **Memory that peers write** (rings, granted slots) is never referred to by a Rust reference: it is
//!   copied out by raw pointers, or handed on under the contract of [`Slot::bytes`]. A write of the peer at
//!   the wrong time changes numbers, never lengths or addresses.
//!
//! | module | holds |
//! |---|---|
//! | `error` | what is refused, and why |
//! | `context` | devices that there are, and what they can do |
//! | `registration` | protection domains and registrations |
//! | `device_memory` | memory of GPUs and the like |
//! | `arena` | pieces of large registered memory |
//! | `receives` | shared receive queues |
//! | `queue` | completion queues |
//! | `work` | what a queue pair has its device do |
//! | `posted` | the work of a queue pair that is not done yet |
//! | `pair` | queue pairs: work is posted, and what became of it is told |
//! | `ring` | bytes that each end writes into the other's memory |
//! | `cm_id`, `cm_channel`, `cm_event` | connections by rdma_cm, and what happens to them |
//! | `join` | how their queue pairs get ready |

mod arena;
mod cm_channel;
mod cm_event;
mod cm_id;
mod context;
mod device_memory;
mod error;
mod join;
mod pair;
mod posted;
mod queue;
mod receives;
mod registration;
mod ring;
mod work;

pub use arena::{Arena, Chunk, Pool, Slot};
pub use cm_channel::CmChannel;
pub use cm_event::{CmEvent, CmKind};
pub use cm_id::{CmId, PRIVATE_DATA, Parameters};
pub(crate) use context::Trouble;
pub use context::{Context, DeviceInfo, GidInfo, PortInfo, contexts, devices};
pub use error::VerbsError;
pub use pair::{Pair, PairLimits};
pub use queue::{Completion, Poller, Reserved};
pub use receives::Receives;
pub use registration::{Access, Domain, Registration, Remote, Spare};
pub use ring::{Broken, Notify, RING, Rings};
pub use work::{Done, Finished, Work};
