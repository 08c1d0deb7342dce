//! RDMA: a remote machine is a device (RPCH §3.1).
//!
//! Memory is registered with a `Device` once, and a `Line` to a peer moves bytes between registered memory of both,
//! with neither CPU at work on them. Frames go through rings that each end writes into the other's memory, so that what
//! is said on a connection is the same as by TCP or through shared memory; payload is named in frames, and fetched or
//! placed by the device.
//!
//! | module | holds |
//! |---|---|
//! | `options` | how it is to be used |
//! | `device_memory` | memory of GPUs and the like |
//! | `device` | a device in use |
//! | `line` | one connection |
//! | `offer` | what both ends say of themselves when a connection begins |
//! | `endpoint` | a device with all of its connections, and how they come about |
//! | `verbs` | libibverbs and librdmacm (all `unsafe`) |
//!
//! All but the first two is there with the feature `rdma` alone: how it is to be used can be said, and is checked, in any
//! build.

#[cfg(feature = "rdma")]
mod device;
mod device_memory;
#[cfg(feature = "rdma")]
mod endpoint;
#[cfg(feature = "rdma")]
mod line;
#[cfg(feature = "rdma")]
mod lines;
#[cfg(feature = "rdma")]
mod offer;
mod options;
#[cfg(feature = "rdma")]
mod pollers;
pub mod published;
#[cfg(feature = "rdma")]
mod pump;
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
pub use line::Line;
#[cfg(feature = "rdma")]
pub use offer::{Lack, Offer};
pub use options::{Buffers, Mtu, NoChoice, Notice, Placement, Polling, RdmaOptions};
