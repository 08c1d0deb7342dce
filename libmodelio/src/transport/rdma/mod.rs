//! RDMA: a remote machine is a device (RPCH §3.1).
//!
//! Memory is registered with a `Device` once. A `QueuePair` moves bytes between registered memory of both ends, and
//! neither CPU works on them. Frames go through rings that each end writes into the other's
//! memory, so the messages on a connection are the same as by TCP or through shared memory. Payload is named
//! in frames, and the device fetches or places it.
//!
//! | module | holds |
//! |---|---|
//! | `options` | the options |
//! | `device_memory` | memory of GPUs and the like |
//! | `published` | a directory of versions, for readers that do without the shard's CPU (`unsafe`) |
//! | `verbs` | libibverbs and librdmacm (all `unsafe`) |
//! | `device` | a device in use |
//! | `queue_pair` | one connection: a queue pair with its rings |
//! | `offer` | the data that both ends send when a connection begins |
//! | `assigned`, `served` | the queue pairs of a thread, and each one's work |
//! | `pump` | moving the bytes of a completion queue's queue pairs |
//! | `pollers` | the threads of completion queues |
//! | `endpoint` | a device with all of its connections |
//!
//! The first three modules are in every build, so that the options are always checked. The others need the feature
//! `rdma`.

#[cfg(feature = "rdma")]
mod assigned;
#[cfg(feature = "rdma")]
mod device;
mod device_memory;
#[cfg(feature = "rdma")]
mod endpoint;
#[cfg(feature = "rdma")]
mod offer;
mod options;
#[cfg(feature = "rdma")]
mod pollers;
pub mod published;
#[cfg(feature = "rdma")]
mod pump;
#[cfg(feature = "rdma")]
mod queue_pair;
#[cfg(feature = "rdma")]
mod served;
#[cfg(feature = "rdma")]
pub mod verbs;

#[cfg(feature = "rdma")]
pub use device::Device;
pub use device_memory::{DeviceMemory, Export};
#[cfg(feature = "rdma")]
pub use endpoint::Endpoint;
#[cfg(feature = "rdma")]
pub use offer::{Offer, Shortage};
pub use options::{Buffers, Mtu, NoChoice, Notice, Placement, Polling, RdmaOptions};
#[cfg(feature = "rdma")]
pub use queue_pair::QueuePair;
