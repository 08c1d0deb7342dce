//! The device that computes versions.

use std::sync::Arc;

use ps_backend::device::{Accelerator, DeviceName};

use crate::error::Error;

/// Opens the device. `None` for the CPU.
///
/// # Errors
/// If there is no such device, or it cannot be used.
pub fn open(name: DeviceName) -> Result<Option<Arc<Accelerator>>, Error> {
    let opened = name.open().map_err(|error| Error::new(error.to_string()))?;
    if let Some(accelerator) = &opened {
        tracing::info!(device = %accelerator.name(), "computes versions");
    }
    Ok(opened)
}
