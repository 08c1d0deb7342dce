//! libibverbs and librdmacm: devices, memory, queues and connections. Each is an object that frees its resource when it
//! is dropped.
//!
//! This folder has all calls of these libraries, and all other `unsafe` code of RDMA. Its interface is safe, except for
//! [`Slot::bytes`]. Owners hand memory over as to any transport, with
//! [`LentPayload::new`](modelio_base::transport::stream::LentPayload::new) and
//! [`Target::new`](modelio_base::transport::stream::Target::new): in libmodelio's `client/shared/blocks.rs`
//! and `client/shared/paths`, and in the shard's `server/partition`. The safety rests on these rules:
//!
//! * **An object lives longer than all that are made of it.** They hold it by an `Arc`, and it is destroyed with its
//!   last holder: a queue pair before its queues, a registration before its protection domain. Contexts of devices are
//!   librdmacm's and are never closed.
//! * **The memory of posted work stays.** The [`Work`] in a queue pair's list holds the memory that the device may read
//!   or write for it, and the registration. It stays in the list until the device reports it, or the queue pair is
//!   destroyed. After that the device does not touch the memory.
//! * **Nobody else touches memory that a READ fills.** That memory is a [`Target`](modelio_base::transport::stream::Target),
//!   whose maker has promised it, or a piece of an arena that belongs to the work.
//! * **No Rust reference leads to memory that peers write** (rings, granted slots). It is copied out by raw pointers,
//!   or handed on under the contract of [`Slot::bytes`]. A write of the peer at the wrong time changes numbers, and
//!   never lengths or addresses.
//!
//! | module | holds |
//! |---|---|
//! | `error` | errors out of what calls return |
//! | `context` | devices and their capabilities |
//! | `registration` | protection domains and registrations |
//! | `device_memory` | memory of GPUs and the like |
//! | `arena` | pieces of large registered memory |
//! | `receives` | shared receive queues |
//! | `queue` | completion queues |
//! | `work` | the work of a queue pair's device |
//! | `posted` | the work of a queue pair that is not done yet |
//! | `pair` | queue pairs, which take work and report its outcome |
//! | `ring` | bytes that each end writes into the other's memory |
//! | `cm_id`, `cm_channel`, `cm_event` | connections by rdma_cm, and their events |
//! | `join` | getting their queue pairs ready |

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
pub use context::{Context, contexts, devices, usable};
pub use pair::{Pair, PairLimits};
pub use queue::{Completion, Poller, Reserved};
pub use receives::Receives;
pub use registration::{Access, Domain, Registration};
pub use ring::{Broken, Notify, RING, Rings};
pub use work::{Done, Finished, Work};

pub use crate::error::VerbsError;
pub use crate::memory::{RemoteMemory, Spare};
