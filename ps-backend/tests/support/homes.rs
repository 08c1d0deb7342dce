//! The places where a test has optimizer state: the host's memory, a device in software, and a GPU if there is one.

use std::sync::Arc;

use ps_backend::device::Accelerator;
use ps_backend::partition::store::Home;
use ps_backend::state_copies::StateCopies;

use super::software_device::software;

/// The memory of the device in software.
const ROOM: u64 = 1 << 30;

/// A GPU, if this is built for one and has one. The first caller prints why not.
pub fn gpu() -> Option<Arc<Accelerator>> {
    use std::sync::OnceLock;
    static GPU: OnceLock<Option<Arc<Accelerator>>> = OnceLock::new();
    GPU.get_or_init(|| match ps_backend::device::DeviceName::Cuda(0).open() {
        Ok(accelerator) => accelerator,
        Err(why) => {
            println!("skipped on a GPU: {why}");
            None
        }
    })
    .clone()
}

/// A device in software and, if there is one, a GPU.
pub fn devices() -> Vec<Arc<Accelerator>> {
    [software(ROOM).1].into_iter().chain(gpu()).collect()
}

/// The homes in which a version changes state in place.
pub fn in_place() -> Vec<Home> {
    let devices = devices().into_iter().map(Home::Device);
    [Home::Host(StateCopies::Single)].into_iter().chain(devices).collect()
}

/// All homes.
pub fn all() -> Vec<Home> {
    [Home::Host(StateCopies::Double)].into_iter().chain(in_place()).collect()
}
