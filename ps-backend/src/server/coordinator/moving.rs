//! A coordinator while its model moves: held, frozen once it was handed over, and then retired, or going on.
use std::sync::atomic::Ordering;
use std::time::Duration;

use libmodelio::transport::frames::Link;
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::{Epoch, Generation, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::Refusal;

use super::Coordinator;
use crate::coordinator::TakeOverError;
use crate::core::JobRecord;
use crate::server::redirect::Redirect;

impl Coordinator {
    /// Which life of the model, and under which block map.
    pub(in crate::server) fn life(&self) -> (Generation, Epoch) {
        (self.generation, self.epoch)
    }

    /// The job is to be held: see [`CoordinatorCore::hold`].
    pub(in crate::server) fn hold(&self) {
        self.with_core(|state, _, _| state.core.hold());
    }

    /// It goes on.
    pub(in crate::server) fn release(&self) {
        self.with_core(|state, now, actions| state.core.release(now, actions));
    }

    /// What keeps the job from being held, if something does.
    pub(in crate::server) fn held_up_by(&self) -> Option<String> {
        let state = self.state.lock();
        (!state.core.is_held()).then(|| state.core.held_up_by())
    }

    /// Why the job has failed, if it has.
    pub(in crate::server) fn failed(&self) -> Option<Refusal> {
        self.state.lock().core.failed().cloned()
    }

    /// The newest version, whose optimizer state there is, and the settings.
    pub(in crate::server) fn facts(&self) -> (Version, Reducer, Controls) {
        let state = self.state.lock();
        let job = state.core.job();
        (job.version(), job.state_of(), job.controls().clone())
    }

    /// What is true of the newest version, and the settings.
    pub(in crate::server) fn record(&self) -> (JobRecord, Controls) {
        let state = self.state.lock();
        let job = state.core.job();
        (job.record(), job.controls().clone())
    }

    /// All that it knows, and what time it is. From now on it does nothing: what clients say is not heard, and they
    /// say it again.
    pub(in crate::server) fn freeze(&self) -> Result<(Vec<u8>, Duration), TakeOverError> {
        let mut state = self.state.lock();
        let bytes = state.core.hand_over()?;
        state.frozen = true;
        Ok((bytes, self.now()))
    }

    /// It goes on as if nothing had been: what it handed over is void.
    pub(in crate::server) fn thaw(&self) {
        let missed = {
            let mut state = self.state.lock();
            state.frozen = false;
            std::mem::take(&mut state.missed)
        };
        self.with_core(|state, now, actions| {
            for client in missed {
                match state.clients.contains_key(&client) {
                    // It cannot be refused: it connects again.
                    true => drop(state.core.client_up(client, now, actions)),
                    false => state.core.client_down(client, now, actions),
                }
            }
        });
        self.forgive_silence();
    }

    /// Another block map is in force, and another coordinator: all who are connected are told.
    pub(in crate::server) fn retire(&self, to: &Redirect) {
        if self.moved.set(to.clone()).is_err() {
            return;
        }
        self.stopping.store(true, Ordering::Relaxed);
        let mut state = self.state.lock();
        state.frozen = true;
        state.clients.values().for_each(Link::wake);
        drop(state);
        self.leave_partitions();
    }

    /// Where the model is now, if it has moved.
    pub(in crate::server) fn moved(&self) -> Option<&Redirect> {
        self.moved.get()
    }
}
