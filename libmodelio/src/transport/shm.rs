//! Shared memory between a client and a shard on one host: frames in rings, payload by reference.
//!
//! Two processes that find each other on a Unix socket share a memfd with two rings of bytes, one each way, which
//! carry the frames that a socket would (see [`Threads`]). Payload is not in them: a message names a
//! region, memory that its owner has shared by its descriptor, and where in there the bytes lie.
//!
//! A peer can change memory that both see at any time. So everything from there is read once and checked:
//! positions of a ring, and bytes, which are copied out before they are parsed. Regions are mapped to be read
//! only, and only if nobody can make them shorter. Bytes of payload are numbers to add up, and decide
//! nothing.
//!
//! | module | holds |
//! |---|---|
//! | `ring` | the two rings and their bells (`unsafe`) |
//! | `setup` | how two processes come to share them |
//! | `owner` | whose a socket is |
//! | `descriptors` | descriptors that are sent over a Unix socket (`unsafe`) |
//! | `region` | regions: those that are lent, those that are borrowed (`unsafe`) |
//! | `pump` | moves the bytes of a connection (`unsafe`) |
//! | `threads` | the threads of connections |

mod descriptors;
mod owner;
mod pump;
mod region;
mod ring;
mod setup;
mod threads;

pub use descriptors::{DescriptorError, Descriptors};
pub use region::{Borrowed, BorrowedRange, Lender, MAX_REGIONS, RegionError, Regions};
pub use ring::{Broken, RING, RingEnd, Wants};
pub use setup::{Meeting, SetupError, listen, meet, receive};
pub use threads::Threads;

use crate::vocabulary::layout::ModelLayout;

/// The identity of this machine: processes with the same one can share memory. It has the boot ID and the
/// network namespace, because names of sockets belong to the namespace.
pub fn host() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}

/// The most sums that a client makes ahead on one connection.
pub const SUMS: u32 = 16;

/// The length of the longest sum of a block. Elements of narrow types take more than their size: most often twice that.
pub fn longest_sum(layout: &ModelLayout) -> usize {
    layout.widening().max(2) * layout.block_size() as usize
}

/// The length of the longest useful region for a model of `bytes` bytes in blocks of `layout`: a contribution, a
/// version, or the sums of a connection.
pub fn longest_region(bytes: u64, layout: &ModelLayout) -> u64 {
    bytes.max(u64::from(SUMS) * longest_sum(layout) as u64)
}
