//! A partition's versions for RDMA clients: a directory, with the keys to their memory.
//!
//! The memory that exists when a client greets must be registered, or the client is refused and takes another path.
//! The system may refuse to register memory that is taken later, because a process may pin only so much. A version in
//! such memory is in the directory without a place. Clients ask for its blocks, which come through the rings. That is
//! slower.

use std::collections::BTreeMap;
use std::sync::Arc;

use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::Region;
use libmodelio::transport::rdma::published::Directory;
use libmodelio::transport::rdma::{Device, RemoteMemory, VerbsError};
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
    /// The model's name, for the log.
    model: String,
    /// The memory of sums, for fetching payload into.
    sum_memory: Arc<SumMemory>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    directory: Directory,
    /// Versions whose memory could not be registered.
    asked_for: BTreeMap<Version, Region>,
    /// Whether the log says so.
    said: bool,
}

impl Shown {
    /// Publishes the versions of the store from now on.
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

    /// The place of the directory, for one more client. All memory of versions is readable at this moment.
    pub(in crate::server) fn place(&self, store: &PartitionStore) -> Result<RemoteMemory, Refusal> {
        // The store notifies watchers of versions under its lock, so the first of the two calls takes effect first.
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

    /// The memory of sums, for fetching payload into.
    pub(in crate::server) fn sum_memory(&self) -> &Arc<SumMemory> {
        &self.sum_memory
    }
}

/// Registers all memory of versions. If it is too much, the new registrations are given up again. The caller makes
/// sure that nobody else registers any of it meanwhile.
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
    let RemoteMemory { address, key } = device.register(memory.memory())?.remote();
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
            tracing::warn!(%model, %version, "a version cannot be read by RDMA, so its blocks are sent, as those of others may be: {error}");
        }
    }

    fn retired(&self, version: Version) {
        let mut inner = self.inner.lock();
        inner.asked_for.remove(&version);
        inner.directory.retire(version);
    }
}
