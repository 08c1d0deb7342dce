//! The memory of a partition's sums, registered for READs to fill. A first contribution is then fetched straight into
//! its place.
//!
//! The memory is registered when it is first needed, by a thread of its own, because that takes a while. Until then
//! payload goes into slots. All other registrations come first: if no more memory may be pinned, sums give theirs up
//! ([`Spare`]) and try again later. With iWARP the memory is never registered: peers may write memory that READs
//! fill, and a sum belongs to all clients.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use libmodelio::bytes::mmap::Mapping;
use libmodelio::transport::rdma::{Device, Registration, Spare};
use parking_lot::Mutex;

use crate::partition::store::PartitionStore;

/// The pause before the next try to register memory, after a failure or after the registration was given up.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// The memory of a partition's sums.
pub(in crate::server) struct SumMemory {
    device: Arc<Device>,
    /// The model's name, for the log.
    model: String,
    sums: [Arc<Mapping>; 2],
    /// Empty if the memory is never registered.
    states: Mutex<Vec<SumState>>,
    /// Whether the log says that the memory is not registered.
    said: AtomicBool,
}

enum SumState {
    /// The memory was not needed yet.
    Idle,
    /// A thread is registering the memory. It compares this value with its own to see whether the result is still
    /// wanted.
    Registering(Arc<()>),
    Registered(Arc<Registration>),
    /// Registering failed, or the registration was given up, at that time.
    None(Instant),
}

impl fmt::Debug for SumMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SumMemory")
            .field("model", &self.model)
            .field("sums", &self.sums)
            .finish_non_exhaustive()
    }
}

impl SumMemory {
    /// The memory of a partition's sums. It is never registered with iWARP, nor if payload goes into another device's
    /// memory.
    pub(in crate::server) fn of(model: &str, store: &PartitionStore, device: &Arc<Device>) -> Arc<SumMemory> {
        let never = device.is_iwarp() || !Arc::ptr_eq(device.payload_arena(), device.arena());
        let states = if never { Vec::new() } else { vec![SumState::Idle, SumState::Idle] };
        let (device, model) = (Arc::clone(device), model.to_owned());
        let (sums, states, said) = (store.sum_memory(), Mutex::new(states), AtomicBool::new(false));
        let memory = Arc::new(SumMemory { device, model, sums, states, said });
        let spare: Weak<SumMemory> = Arc::downgrade(&memory);
        memory.device.spare(spare);
        memory
    }

    /// Whether some of it may be registered at the moment.
    pub(in crate::server) fn may_be_registered(&self) -> bool {
        let is_there = |state: &SumState| !matches!(state, SumState::None(at) if at.elapsed() < RETRY_AFTER);
        self.states.lock().iter().any(is_there)
    }

    /// The registration of this memory. If there is none, there may be one later.
    pub(in crate::server) fn registration_of(
        self: &Arc<SumMemory>,
        start: *const u8,
        len: usize,
    ) -> Option<Arc<Registration>> {
        let index = self.sums.iter().position(|sum| {
            let offset = start.addr().checked_sub(sum.start().as_ptr().addr());
            offset.is_some_and(|offset| offset + len <= sum.len())
        })?;
        let mut states = self.states.lock();
        let state = states.get_mut(index)?;
        match state {
            SumState::Registered(registration) => return Some(Arc::clone(registration)),
            SumState::Registering(_) => return None,
            SumState::None(at) if at.elapsed() < RETRY_AFTER => return None,
            SumState::Idle | SumState::None(_) => {}
        }
        let who = Arc::new(());
        *state = SumState::Registering(Arc::clone(&who));
        drop(states);
        let memory = Arc::clone(self);
        let registers = move || memory.register(index, &who);
        if let Err(error) = std::thread::Builder::new().name("sum-memory".into()).spawn(registers) {
            self.log(&format!("no thread that registers them: {error}"));
            self.give_up();
        }
        None
    }

    /// Logs the reason once.
    fn log(&self, why: &str) {
        if !self.said.swap(true, Ordering::Relaxed) {
            let model = &self.model;
            tracing::warn!(model, "sums are not registered, and all contributions go into slots: {why}");
        }
    }

    fn register(&self, index: usize, who: &Arc<()>) {
        let is_wanted =
            |state: &SumState| matches!(state, SumState::Registering(other) if Arc::ptr_eq(who, other));
        if !self.states.lock().get(index).is_some_and(is_wanted) {
            return;
        }
        let registered = self.device.register_to_fill(&self.sums[index]);
        let mut states = self.states.lock();
        let Some(state) = states.get_mut(index).filter(|state| is_wanted(state)) else {
            // The registration was given up meanwhile. If another thread is registering the memory, the registration
            // is that thread's.
            return self.device.forget_to_fill(&self.sums[index]);
        };
        let (next, error) = match registered {
            Ok(registration) => (SumState::Registered(registration), None),
            Err(error) => (SumState::None(Instant::now()), Some(error)),
        };
        *state = next;
        drop(states);
        if let Some(error) = error {
            self.log(&error.to_string());
        }
    }
}

impl Spare for SumMemory {
    fn give_up(&self) {
        let mut any = false;
        let mut states = self.states.lock();
        for (state, sum) in states.iter_mut().zip(&self.sums) {
            match std::mem::replace(state, SumState::None(Instant::now())) {
                SumState::Idle => *state = SumState::Idle,
                SumState::Registering(_) => any = true,
                SumState::Registered(_) => {
                    any = true;
                    self.device.forget_to_fill(sum);
                }
                SumState::None(at) => *state = SumState::None(at),
            }
        }
        drop(states);
        if any {
            self.log("RLIMIT_MEMLOCK allows no more pinned memory, and other registrations come first");
        }
    }
}
