//! Memory of another device, registered with the network's.

use std::sync::Arc;

use super::{Access, Domain, Registration, VerbsError};
use crate::{DeviceMemory, Export};

impl Registration {
    /// Registers `len` bytes at `start` of memory that belongs to another device.
    ///
    /// # Errors
    /// [`VerbsError::OutOfRange`]; [`VerbsError::Call`] if the device or the kernel cannot do it, or the memory does
    /// not belong to the other device.
    pub fn of_device(
        domain: &Arc<Domain>,
        memory: &dyn DeviceMemory,
        start: usize,
        len: usize,
        access: Access,
    ) -> Result<Arc<Registration>, VerbsError> {
        let all = memory.bytes();
        if len == 0 || start.checked_add(len).is_none_or(|end| end > all) {
            let offset = start as u64;
            return Err(VerbsError::OutOfRange { offset, len, of: "memory of a device", all: all as u64 });
        }
        match memory.export() {
            Export::DmaBuf { fd, offset } => {
                // Addresses count from the start of the memory, so that each piece has its own.
                Registration::of_dma_buf(domain, fd, offset + start as u64, len, start as u64, access)
            }
            Export::Address(address) => {
                Registration::of_address(domain, address.wrapping_add(start as u64), len, access)
            }
        }
    }
}
