//! A device with what all its models share: lanes, and a stream for single copies.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libmodelio::bytes::mmap::Mapping;
use parking_lot::Mutex;

use super::lanes::{self, Lanes};
use super::{Device, DeviceError, Room, Stream};

/// A device that computes versions of models.
#[derive(Debug)]
pub struct Accelerator {
    // Dropped before the device's last user.
    pub(super) lanes: Mutex<Lanes>,
    /// For copies of single blocks.
    pub(super) single: Mutex<Stream>,
    device: Arc<dyn Device>,
    /// Whether the log has told that memory cannot be pinned.
    said: AtomicBool,
}

impl Accelerator {
    /// Takes what all models need of a device: streams, and the memory of lanes.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn new(device: Arc<dyn Device>) -> Result<Arc<Accelerator>, DeviceError> {
        let room = device.room()?;
        if room.free < lanes::BYTES {
            let name = device.name().to_owned();
            return Err(DeviceError::Room { device: name, needed: lanes::BYTES, free: room.free });
        }
        let lanes = Mutex::new(Lanes::new(&device)?);
        let single = Mutex::new(device.open_stream()?);
        Ok(Arc::new(Accelerator { lanes, single, device, said: AtomicBool::new(false) }))
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The device's name, for people.
    pub fn name(&self) -> &str {
        self.device.name()
    }

    /// Checks that the device has this much memory free.
    ///
    /// # Errors
    /// [`DeviceError::Room`], [`DeviceError::Failed`].
    pub fn check(&self, needed: u64) -> Result<(), DeviceError> {
        let Room { free, .. } = self.device.room()?;
        if needed <= free {
            return Ok(());
        }
        Err(DeviceError::Room { device: self.name().to_owned(), needed, free })
    }

    /// Makes the host's memory such that copies of it are fast, as long as it exists. Its pages must not be given back to
    /// the system meanwhile: whoever has that in mind sees by the count of owners that it must not.
    pub(super) fn pin(&self, memory: &Mapping) {
        let key = Arc::as_ptr(&self.device).cast::<()>().addr();
        let pinned = memory.attached(key, || Pinned::new(&self.device, memory).map(Arc::new));
        if let Err(error) = pinned
            && !self.said.swap(true, Ordering::Relaxed)
        {
            let device = self.name();
            tracing::warn!(%device, %error, "memory cannot be pinned, so copies are slow");
        }
    }
}

impl Drop for Accelerator {
    fn drop(&mut self) {
        self.device.close_stream(*self.single.get_mut());
    }
}

/// The host's memory is pinned. This is attached to it.
struct Pinned {
    device: Arc<dyn Device>,
    /// The address, as a number: it is not used to get at the memory.
    start: usize,
}

impl Pinned {
    fn new(device: &Arc<dyn Device>, memory: &Mapping) -> Result<Pinned, DeviceError> {
        // SAFETY: this is dropped before the memory is unmapped, and the caller keeps its pages.
        unsafe { device.pin(memory.start(), memory.len())? };
        Ok(Pinned { device: Arc::clone(device), start: memory.start().as_ptr().expose_provenance() })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(start) = NonNull::new(std::ptr::with_exposed_provenance_mut(self.start)) {
            self.device.unpin(start);
        }
    }
}
