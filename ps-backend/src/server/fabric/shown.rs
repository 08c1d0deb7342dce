//! The versions of a part, as clients find them: in a directory, with the keys to their memory.

use std::sync::Arc;

use libmodelio::ids::Version;
use libmodelio::mmap::Mapping;
use libmodelio::published::Directory;
use libmodelio::rdma::Device;
use libmodelio::rdma::verbs::Remote as Place;
use libmodelio::transport::Region;
use libmodelio::wire::Refusal;
use parking_lot::Mutex;

use super::Part;
use crate::part::store::VersionWatch;

/// The versions of a part, as clients find them.
#[derive(Debug)]
pub(in crate::server) struct Shown {
    device: Arc<Device>,
    directory: Mutex<Directory>,
    memory: Arc<Mapping>,
}

impl Shown {
    /// Shows the versions of `part` from now on.
    pub(in crate::server) fn of(part: &Part, device: &Arc<Device>) -> Result<Arc<Shown>, Refusal> {
        let directory = Directory::new().map_err(Refusal::other)?;
        let memory = Arc::clone(directory.memory());
        device.register(&memory).map_err(Refusal::other)?;
        let shown = Arc::new(Shown { device: Arc::clone(device), directory: Mutex::new(directory), memory });
        part.store().watch(Arc::clone(&shown) as Arc<dyn VersionWatch>);
        Ok(shown)
    }

    pub(super) fn place(&self) -> Result<Place, Refusal> {
        self.device.register(&self.memory).map(|registration| registration.remote()).map_err(Refusal::other)
    }
}

impl VersionWatch for Shown {
    fn published(&self, version: Version, memory: &Region) {
        match self.device.register(memory.memory()) {
            Ok(registration) => {
                let Place { address, key } = registration.remote();
                let bytes = memory.memory().len() as u64;
                self.directory.lock().publish(version, address, key, bytes);
            }
            // Clients look for it in vain, and say so.
            Err(error) => tracing::error!(%version, %error, "a version cannot be fetched by RDMA"),
        }
    }

    fn retired(&self, version: Version) {
        self.directory.lock().retire(version);
    }
}
