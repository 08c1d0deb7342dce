//! Memory of a device, which is given back when it is dropped.

use std::ops::Range;
use std::sync::Arc;

use super::{Address, Device, DeviceError};

/// A run of bytes in a device's memory. All work that uses them is done before this is dropped.
#[derive(Debug)]
pub struct Memory {
    device: Arc<dyn Device>,
    start: Address,
    bytes: usize,
}

impl Memory {
    /// Takes so many bytes (> 0).
    ///
    /// # Errors
    /// [`DeviceError::Room`], [`DeviceError::Failed`].
    pub fn take(device: &Arc<dyn Device>, bytes: usize) -> Result<Memory, DeviceError> {
        let start = device.allocate(bytes)?;
        Ok(Memory { device: Arc::clone(device), start, bytes })
    }

    /// The number of bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// The place of these bytes.
    ///
    /// # Panics
    /// When they are out of bounds.
    pub fn at(&self, range: Range<usize>) -> Address {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of {} bytes", self.bytes);
        self.start.plus(range.start)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.device.free(self.start);
    }
}
