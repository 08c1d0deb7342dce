//! Memory of another device, such as a GPU, that the network's device reads and writes by itself (GPUDirect).
//! The CPU never touches it: its own device computes there, or copies data out.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;

/// How the network's device gets at memory of another one.
#[derive(Clone, Copy, Debug)]
pub enum Export<'a> {
    /// A `dma_buf`, from this byte of it on (Linux 5.12, and a driver that can: mlx5, irdma).
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
/// The exported memory is no memory that Rust has references to, or may hand out otherwise: the network's
/// device writes it. It stays valid as long as the object lives.
pub unsafe trait DeviceMemory: Debug + Send + Sync {
    /// Length in bytes.
    fn bytes(&self) -> usize;

    /// How to get at it. The same as long as it lives.
    fn export(&self) -> Export<'_>;

    /// Copies `into.len()` bytes from `at` on to where the CPU has them.
    ///
    /// # Errors
    /// The driver's.
    fn copy_out(&self, at: usize, into: &mut [u8]) -> io::Result<()>;
}
