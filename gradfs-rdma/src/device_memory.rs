//! Memory of another device, such as a GPU. The network's device reads and writes it by itself (GPUDirect). The CPU
//! never touches it: its own device computes there, or copies data out.
//!
//! No command leads here yet. A shard's `--device` computes, and its payloads still pass through the host. To join both
//! takes a GPU beside an RDMA device, which nobody has tried. Tests have memory of the CPU in the GPU's place.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;

/// How the network's device reaches the memory.
#[derive(Clone, Copy, Debug)]
pub enum Export<'a> {
    /// A `dma_buf`, from this offset on (Linux 5.12, and a driver with support: mlx5, irdma).
    DmaBuf {
        /// The memory that its driver exports.
        fd: BorrowedFd<'a>,
        /// The offset in the region.
        offset: u64,
    },
    /// An address that its driver has registered with the kernel, as nvidia-peermem does. It need not be
    /// mapped.
    Address(u64),
}

/// Memory of another device.
///
/// # Safety
/// Rust has no references to the exported memory and does not hand it out otherwise, because the network's device
/// writes it. It stays valid as long as the object lives.
pub unsafe trait DeviceMemory: Debug + Send + Sync {
    /// Length in bytes.
    fn bytes(&self) -> usize;

    /// How to reach it. The answer stays the same as long as the object lives.
    fn export(&self) -> Export<'_>;

    /// Copies `into.len()` bytes from offset `at` to memory of the CPU.
    ///
    /// # Errors
    /// The driver's error.
    fn copy_out(&self, at: usize, into: &mut [u8]) -> io::Result<()>;
}
