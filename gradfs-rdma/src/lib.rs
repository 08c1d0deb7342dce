//! RDMA for gradfs: a remote machine is a device (RPCH §3.1).
//!
//! Memory is registered with a `Device` once. A `QueuePair` moves bytes between registered memory of both ends, and
//! neither CPU works on them. Frames go through rings that each end writes into the other's
//! memory, so the messages on a connection are the same as by TCP or through shared memory. Payload is named
//! in frames, and the device fetches or places it.
//!
//! | module | holds |
//! |---|---|
//! | `options` | the options |
//! | `error`, `memory`, `device_info` | errors, the places of memory, what there is to say of devices |
//! | `device_memory` | memory of GPUs and the like |
//! | `published` | a directory of versions, for readers that do without the shard's CPU (`unsafe`) |
//! | `absent` | the rest, for a build without RDMA |
//! | `verbs` | libibverbs and librdmacm (all `unsafe`) |
//! | `device` | a device in use |
//! | `queue_pair` | one connection: a queue pair with its rings |
//! | `offer` | the data that both ends send when a connection begins |
//! | `assigned`, `served` | the queue pairs of a thread, and each one's work |
//! | `pump` | moving the bytes of a completion queue's queue pairs |
//! | `pollers` | the threads of completion queues |
//! | `endpoint` | a device with all of its connections |
//!
//! The first four rows are in every build. From `verbs` on, all need the feature of that name, and `absent` stands in
//! for them without it. It has the same names, and types of which there is no value. So whoever uses this crate is
//! compiled in every build, and asks nothing but [`IS_BUILT_IN`].

#![warn(unreachable_pub)]

#[cfg(not(feature = "verbs"))]
mod absent;
#[cfg(feature = "verbs")]
mod assigned;
#[cfg(feature = "verbs")]
mod device;
mod device_info;
mod device_memory;
#[cfg(feature = "verbs")]
mod endpoint;
mod error;
mod memory;
#[cfg(feature = "verbs")]
mod offer;
mod options;
#[cfg(feature = "verbs")]
mod pollers;
pub mod published;
#[cfg(feature = "verbs")]
mod pump;
#[cfg(feature = "verbs")]
mod queue_pair;
#[cfg(feature = "verbs")]
mod served;
#[cfg(feature = "verbs")]
pub mod verbs;

#[cfg(not(feature = "verbs"))]
pub use absent::{
    Arena, Chunk, Device, Done, Endpoint, Finished, Pool, QueuePair, Registration, Slot, Work, devices,
    usable,
};
#[cfg(feature = "verbs")]
pub use device::Device;
pub use device_info::{DeviceInfo, GidInfo, PortInfo};
pub use device_memory::{DeviceMemory, Export};
#[cfg(feature = "verbs")]
pub use endpoint::Endpoint;
pub use error::VerbsError;
pub use memory::{RemoteMemory, Spare};
#[cfg(feature = "verbs")]
pub use offer::{Offer, Shortage};
pub use options::{Buffers, Mtu, NoChoice, Notice, Placement, Polling, RdmaOptions};
#[cfg(feature = "verbs")]
pub use queue_pair::QueuePair;
#[cfg(feature = "verbs")]
pub use verbs::{Arena, Chunk, Done, Finished, Pool, Registration, Slot, Work, devices, usable};

/// Whether this build has RDMA.
pub const IS_BUILT_IN: bool = cfg!(feature = "verbs");
