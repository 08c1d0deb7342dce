//! RDMA: a remote machine is a device (RPCH §3.1).
//!
//! Memory is registered with a [`Device`] once, and a [`Line`] to a peer moves bytes between registered memory of both,
//! with neither CPU at work on them. Frames go through rings that each end writes into the other's memory, so that what
//! is said on a connection is the same as by TCP or through shared memory; payload is named in frames, and fetched or
//! placed by the device.
//!
//! | module | holds |
//! |---|---|
//! | `options` | how it is to be used |
//! | `device` | a device in use |
//! | `line` | one connection |
//! | `fabric` | how connections come about |
//! | `verbs` | libibverbs and librdmacm (all `unsafe`) |

mod device;
mod fabric;
mod line;
mod options;
pub mod verbs;

pub use device::Device;
pub use fabric::{Fabric, Offer};
pub use line::Line;
pub use options::{Buffers, NoChoice, Notice, Placement, Polling, RdmaOptions};
