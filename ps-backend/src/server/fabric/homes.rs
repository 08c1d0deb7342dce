//! The memory of a part's sums, registered once, for READs to fill: a first contribution is where it belongs when it is
//! there.
//!
//! Versions come first: if the system lets no more memory be pinned, what is fetched goes into slots. So it does with iWARP,
//! where peers may write what READs fill: a sum is everybody's.

use std::sync::Arc;

use libmodelio::link::Target;
use libmodelio::mmap::Mapping;
use libmodelio::rdma::Device;
use libmodelio::rdma::verbs::Registration;
use parking_lot::Mutex;

use crate::part::store::PartStore;

/// Where first contributions are fetched to.
#[derive(Debug)]
pub(super) struct Homes {
    device: Arc<Device>,
    sums: [Arc<Mapping>; 2],
    registered: Mutex<Vec<Arc<Registration>>>,
}

impl Homes {
    /// The sums of a part, or none of them, where that cannot be, or where payload is to go into another device's memory.
    pub(super) fn of(model: &str, store: &PartStore, device: &Arc<Device>) -> Homes {
        let homes =
            Homes { device: Arc::clone(device), sums: store.sum_memory(), registered: Mutex::default() };
        if device.is_iwarp() || !Arc::ptr_eq(device.payload_arena(), device.arena()) {
            return homes;
        }
        let registered: Result<Vec<_>, _> =
            homes.sums.iter().map(|memory| device.register_to_fill(memory)).collect();
        match registered {
            Ok(registered) => *homes.registered.lock() = registered,
            Err(error) => {
                tracing::info!(model, "blocks are fetched into slots, and never into sums: {error}");
                homes.give_up();
            }
        }
        homes
    }

    /// Whether there are any.
    pub(super) fn are_there(&self) -> bool {
        !self.registered.lock().is_empty()
    }

    /// Which of them a target is in.
    pub(super) fn around(&self, target: &Target) -> Option<Arc<Registration>> {
        self.registered.lock().iter().find(|registration| registration.is_around(target)).cloned()
    }

    /// What they have pinned is needed for something else. False if it was nothing.
    pub(super) fn give_up(&self) -> bool {
        let registered = std::mem::take(&mut *self.registered.lock());
        self.sums.iter().for_each(|memory| self.device.forget_to_fill(memory));
        !registered.is_empty()
    }
}
