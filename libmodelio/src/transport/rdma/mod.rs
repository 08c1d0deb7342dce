//! RDMA: a remote machine is a device (RPCH §3.1).
//!
//! Memory is registered with a `Device` once, and a `QueuePair` moves bytes between registered memory of both
//! ends, with neither CPU at work on them. Frames go through rings that each end writes into the other's
//! memory, so the messages on a connection are the same as by TCP or through shared memory. Payload is named
//! in frames, and the device fetches or places it.
//!
//! | module | holds |
//! |---|---|
//! | `options` | how it is to be used |
//! | `device_memory` | memory of GPUs and the like |
//! | `published` | a directory of versions, for those who read them past the shard's CPU (`unsafe`) |
//! | `verbs` | libibverbs and librdmacm (all `unsafe`) |
//! | `device` | a device in use |
//! | `queue_pair` | one connection: a queue pair with its rings |
//! | `offer` | what both ends say of themselves when a connection begins |
//! | `assigned`, `served` | the queue pairs of a thread, and what each has to do |
//! | `pump` | moves the bytes of a completion queue's queue pairs |
//! | `pollers` | the threads of completion queues |
//! | `endpoint` | a device with all of its connections, and how they come about |
//!
//! All but the first three is there with the feature `rdma` alone: how it is to be used can be said, and is checked, in
//! any build.

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
