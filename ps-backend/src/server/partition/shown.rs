//! The versions of a partition, as clients find them: in a directory, with the keys to their memory.
//!
//! Memory that there is when a client greets must be registered, or the client is refused and goes another way. Memory
//! that is taken later may be refused by the system, for how much of it a process may pin is limited. A version that
//! lies there is in the directory with no place, and clients ask for its blocks, which come through their connections'
//! rings: slower, and whole.

use std::collections::BTreeMap;
use std::sync::Arc;

use libmodelio::bytes::mmap::Mapping;
use libmodelio::transport::Region;
use libmodelio::transport::rdma::Device;
use libmodelio::transport::rdma::published::Directory;
use libmodelio::transport::rdma::verbs::{Remote as Place, VerbsError};
use libmodelio::vocabulary::ids::Version;
use libmodelio::wire::Refusal;
use parking_lot::Mutex;

use super::sum_memory::SumMemory;
use crate::partition::store::{PartitionStore, VersionWatch};

/// The versions of a partition.
#[derive(Debug)]
pub(in crate::server) struct Shown {
    device: Arc<Device>,
    memory: Arc<Mapping>,
    /// For people.
    model: String,
    /// Where what others send can be fetched to.
    sum_memory: Arc<SumMemory>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    directory: Directory,
    /// Versions whose memory could not be registered.
    asked_for: BTreeMap<Version, Region>,
    /// It was said.
    said: bool,
}

impl Shown {
    /// Shows the versions of the store from now on.
    pub(in crate::server) fn of(
        model: &str,
        store: &PartitionStore,
        device: &Arc<Device>,
    ) -> Result<Arc<Shown>, Refusal> {
        let directory = Directory::new().map_err(Refusal::other)?;
        let memory = Arc::clone(directory.memory());
        device.register(&memory).map_err(Refusal::other)?;
        register_all(&store.buffers(), device)?;
        let sum_memory = SumMemory::of(model, store, device);
        let inner = Inner { directory, asked_for: BTreeMap::new(), said: false };
        let (device, model) = (Arc::clone(device), model.to_owned());
        let shown = Arc::new(Shown { device, memory, model, sum_memory, inner: Mutex::new(inner) });
        store.watch(Arc::clone(&shown) as Arc<dyn VersionWatch>);
        Ok(shown)
    }

    /// Where the directory is, for one more client: all memory that versions may lie in can be read just now.
    pub(in crate::server) fn place(&self, store: &PartitionStore) -> Result<Place, Refusal> {
        // The store tells of versions under its lock, so that one comes first.
        let buffers = store.buffers();
        let mut inner = self.inner.lock();
        register_all(&buffers, &self.device)?;
        let Inner { directory, asked_for, said } = &mut *inner;
        while let Some((&version, memory)) = asked_for.first_key_value() {
            show(&self.device, directory, version, memory).map_err(Refusal::other)?;
            asked_for.remove(&version);
        }
        *said = false;
        self.device.register(&self.memory).map(|registration| registration.remote()).map_err(Refusal::other)
    }

    /// Where what others send can be fetched to.
    pub(in crate::server) fn sum_memory(&self) -> &Arc<SumMemory> {
        &self.sum_memory
    }
}

/// All memory of versions that there is. If it is too much, what was not registered before is given up again. Nobody else
/// registers any of it meanwhile.
fn register_all(buffers: &[Arc<Mapping>], device: &Arc<Device>) -> Result<(), Refusal> {
    let new: Vec<_> = buffers.iter().filter(|buffer| !device.knows(buffer)).collect();
    for buffer in &new {
        if let Err(error) = device.register(buffer) {
            new.iter().for_each(|buffer| device.forget(buffer));
            return Err(Refusal::other(error));
        }
    }
    Ok(())
}

fn show(
    device: &Arc<Device>,
    directory: &mut Directory,
    version: Version,
    memory: &Region,
) -> Result<(), VerbsError> {
    let Place { address, key } = device.register(memory.memory())?.remote();
    directory.publish(version, address, key, memory.memory().len() as u64);
    Ok(())
}

impl VersionWatch for Shown {
    fn published(&self, version: Version, memory: &Region) {
        let mut inner = self.inner.lock();
        let Inner { directory, asked_for, said } = &mut *inner;
        let Err(error) = show(&self.device, directory, version, memory) else { return };
        directory.publish_unreadable(version);
        asked_for.insert(version, memory.clone());
        if !std::mem::replace(said, true) {
            let model = &self.model;
            tracing::warn!(%model, %version, "is sent, as are others that cannot be read by RDMA: {error}");
        }
    }

    fn retired(&self, version: Version) {
        let mut inner = self.inner.lock();
        inner.asked_for.remove(&version);
        inner.directory.retire(version);
    }
}
