//! Devices by the names that people give.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::{Accelerator, DeviceError};

/// The name of a device that computes versions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceName {
    /// The host's CPU.
    #[default]
    Cpu,
    /// The NVIDIA GPU of this number.
    Cuda(u32),
}

/// Another name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no device: use cpu, or cuda:0 for the first NVIDIA GPU")]
pub struct UnknownDevice(String);

impl FromStr for DeviceName {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<DeviceName, UnknownDevice> {
        if text == "cpu" {
            return Ok(DeviceName::Cpu);
        }
        let digits = text.strip_prefix("cuda:").filter(|digits| digits.bytes().all(|c| c.is_ascii_digit()));
        let number = digits.and_then(|digits| digits.parse().ok());
        number.map(DeviceName::Cuda).ok_or_else(|| UnknownDevice(text.to_owned()))
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Cpu => f.write_str("cpu"),
            DeviceName::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl DeviceName {
    /// Opens the device. `None` for the CPU.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn open(self) -> Result<Option<Arc<Accelerator>>, DeviceError> {
        match self {
            DeviceName::Cpu => Ok(None),
            #[cfg(feature = "cuda")]
            DeviceName::Cuda(number) => {
                let device = super::cuda::Cuda::open(number)?;
                Accelerator::new(device).map(Some)
            }
            #[cfg(not(feature = "cuda"))]
            DeviceName::Cuda(_) => Err(DeviceError::Missing(format!(
                "{self}: this gradfs was built without NVIDIA GPUs (cargo build --release --features cuda)"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_of_one_device() {
        for name in [DeviceName::Cpu, DeviceName::Cuda(0), DeviceName::Cuda(12)] {
            assert_eq!(name.to_string().parse(), Ok(name));
        }
        for text in ["", "gpu", "cuda", "cuda:", "cuda:-1", "cuda:+1", "CUDA:0", "cuda:99999999999", "cpu:0"]
        {
            let error = text.parse::<DeviceName>().unwrap_err().to_string();
            assert!(error.contains("cuda:0"), "{error}");
        }
    }
}
