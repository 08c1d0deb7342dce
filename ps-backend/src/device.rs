//! Computing on a device that has its own memory, such as a GPU.
//!
//! A model on a device has its optimizer state there, its fp32 masters, and a copy of its newest weights ([`Arrays`]).
//! Contributions are added up in the host's memory, as for every model. When a version counts, its sums are copied to
//! the device, a kernel computes weights and state in place, and the weights are copied to the version's buffer in the
//! host's memory, where all readers find them (iRDMA §IV-A). These copies and kernels overlap ([`lanes`]).
//!
//! [`Device`] is all that this needs of a device. `cuda` is the one of NVIDIA GPUs, behind the feature of that name.
//! Tests have one in software, which checks bounds, lifetimes and the order of streams.
//!
//! | module | holds |
//! |---|---|
//! | `accelerator` | a device with what all its models share |
//! | `arrays` | a model's memory there (`unsafe`) |
//! | `lanes` | copies and kernels that overlap (`unsafe`) |
//! | `runs` | elements that one kernel computes |
//! | `choice` | devices by their names |
//! | `cuda` | NVIDIA GPUs (`unsafe`) |
//! | `kernels` | their kernels |

mod accelerator;
mod arrays;
mod choice;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(any(feature = "cuda", test))]
mod kernels;
pub mod lanes;
mod memory;
mod runs;
mod traits;

pub use accelerator::Accelerator;
pub use arrays::{Array, Arrays};
pub use choice::{DeviceName, UnknownDevice};
pub use memory::Memory;
pub use runs::{Does, Run, Runs};
pub use traits::{Address, Adoption, Device, DeviceError, Event, Launch, Room, Stream};
