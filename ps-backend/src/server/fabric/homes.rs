//! The memory of a part's sums, registered for READs to fill: a first contribution is where it belongs when it is there.
//!
//! It is registered when it is first wanted, by a thread that may take its time; what comes until then goes into slots. All
//! else that is registered comes first: where no more memory may be pinned, sums give way ([`Spare`]). Nor are there homes
//! with iWARP, where peers may write what READs fill: a sum is everybody's.

use std::fmt;
use std::sync::{Arc, Weak};

use libmodelio::mmap::Mapping;
use libmodelio::rdma::Device;
use libmodelio::rdma::verbs::{Registration, Spare};
use parking_lot::Mutex;

use crate::part::store::PartStore;

/// Where first contributions are fetched to.
pub(in crate::server) struct Homes {
    device: Arc<Device>,
    /// For people.
    model: String,
    sums: [Arc<Mapping>; 2],
    states: Mutex<[State; 2]>,
    pool: Arc<rayon::ThreadPool>,
    this: Weak<Homes>,
}

impl fmt::Debug for Homes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Homes").field("model", &self.model).field("sums", &self.sums).finish_non_exhaustive()
    }
}

enum State {
    /// Nobody has wanted it yet.
    Idle,
    Registering,
    Registered(Arc<Registration>),
    /// It could not be, gave way, or is not to be.
    None,
}

impl Homes {
    /// The sums of a part. There are none where payload is to go into another device's memory.
    pub(super) fn of(
        model: &str,
        store: &PartStore,
        device: &Arc<Device>,
        pool: &Arc<rayon::ThreadPool>,
    ) -> Arc<Homes> {
        let homes = Arc::new_cyclic(|this: &Weak<Homes>| Homes {
            device: Arc::clone(device),
            model: model.to_owned(),
            sums: store.sum_memory(),
            states: Mutex::new([State::None, State::None]),
            pool: Arc::clone(pool),
            this: this.clone(),
        });
        let weak: Weak<Homes> = Arc::downgrade(&homes);
        device.spare(weak);
        homes.try_again();
        homes
    }

    /// What had no place may have one now.
    pub(super) fn try_again(&self) {
        if self.device.is_iwarp() || !Arc::ptr_eq(self.device.payload_arena(), self.device.arena()) {
            return;
        }
        for state in self.states.lock().iter_mut().filter(|state| matches!(state, State::None)) {
            *state = State::Idle;
        }
    }

    /// The registration of that memory. If there is none yet, there may be one later.
    pub(super) fn around(&self, start: *const u8, len: usize) -> Option<Arc<Registration>> {
        let index = self.sums.iter().position(|sum| {
            let offset = start.addr().checked_sub(sum.start().as_ptr().addr());
            offset.is_some_and(|offset| offset + len <= sum.len())
        })?;
        let mut states = self.states.lock();
        match &states[index] {
            State::Registered(registration) => return Some(Arc::clone(registration)),
            State::Registering | State::None => return None,
            State::Idle => states[index] = State::Registering,
        }
        drop(states);
        let homes = self.this.upgrade()?;
        self.pool.spawn(move || homes.register(index));
        None
    }

    fn register(&self, index: usize) {
        let registered = self.device.register_to_fill(&self.sums[index]);
        let mut states = self.states.lock();
        if !matches!(states[index], State::Registering) {
            // It has given way meanwhile.
            drop(states);
            return self.device.forget_to_fill(&self.sums[index]);
        }
        states[index] = match registered {
            Ok(registration) => State::Registered(registration),
            Err(error) => {
                let model = &self.model;
                tracing::info!(
                    model,
                    "first contributions go into slots, and not straight into sums: {error}"
                );
                State::None
            }
        };
    }
}

impl Spare for Homes {
    fn give_up(&self) -> bool {
        let mut any = false;
        let states = std::mem::replace(&mut *self.states.lock(), [State::None, State::None]);
        for (state, sum) in states.iter().zip(&self.sums) {
            if let State::Registered(_) = state {
                any = true;
                self.device.forget_to_fill(sum);
            }
        }
        drop(states);
        if any {
            let model = &self.model;
            tracing::info!(model, "no more memory may be pinned: sums give way, contributions go into slots");
        }
        any
    }
}
