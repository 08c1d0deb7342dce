//! A coordinator while its model moves. It is held, frozen at the hand-over, and then retired; or it goes on.
use std::sync::atomic::Ordering;
use std::time::Duration;

use libmodelio::transport::frames::Link;
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::{Epoch, Generation, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::vocabulary::snapshots::SnapshotSettings;
use libmodelio::wire::Refusal;

use super::Coordinator;
use crate::coordinator::TakeOverError;
use crate::core::JobRecord;
use crate::server::redirect::Redirect;

impl Coordinator {
    /// The model's generation and block map.
    pub(in crate::server) fn life(&self) -> (Generation, Epoch) {
        (self.generation, self.epoch)
    }

    /// Holds the job: see `CoordinatorCore::hold`.
    pub(in crate::server) fn hold(&self) {
        self.with_core(|state, now, actions| state.core.hold(now, actions));
    }

    /// Lets the job go on.
    pub(in crate::server) fn release(&self) {
        self.with_core(|state, now, actions| state.core.release(now, actions));
    }

    /// The reason why the job is not held yet.
    pub(in crate::server) fn held_up_by(&self) -> Option<String> {
        let state = self.state.lock();
        (!state.core.is_held()).then(|| state.core.held_up_by())
    }

    /// Why the job has failed, if it has.
    pub(in crate::server) fn failed(&self) -> Option<Refusal> {
        self.state.lock().core.failed().cloned()
    }

    /// The newest version, the reducer whose optimizer state exists, and the settings.
    pub(in crate::server) fn facts(&self) -> (Version, Reducer, Controls) {
        let state = self.state.lock();
        let job = state.core.job();
        (job.version(), job.state_of(), job.controls().clone())
    }

    /// The newest version, and the settings of snapshots.
    pub(in crate::server) fn snapshots(&self) -> (Version, SnapshotSettings) {
        let state = self.state.lock();
        let job = state.core.job();
        (job.version(), job.controls().snapshots.clone())
    }

    /// The newest version, the settings of snapshots, and the version of the newest of these.
    pub(in crate::server) fn survival(&self) -> (Version, SnapshotSettings, Option<Version>) {
        let state = self.state.lock();
        let job = state.core.job();
        (job.version(), job.controls().snapshots.clone(), job.durable())
    }

    /// Versions have numbers below this one.
    pub(in crate::server) fn set_reserved(&self, numbers: Option<Version>) {
        self.with_core(|state, now, actions| state.core.set_reserved(numbers, now, actions));
    }

    /// A snapshot of this version is in its store.
    pub(in crate::server) fn is_durable(&self, version: Version) {
        self.with_core(|state, now, actions| state.core.is_durable(version, now, actions));
    }

    /// The record of the job at its newest version, and the settings.
    pub(in crate::server) fn record(&self) -> (JobRecord, Controls) {
        let state = self.state.lock();
        let job = state.core.job();
        (job.record(), job.controls().clone())
    }

    /// The core's whole state, and its time. The coordinator does nothing from now on. Clients repeat messages that
    /// it does not take.
    pub(in crate::server) fn freeze(&self) -> Result<(Vec<u8>, Duration), TakeOverError> {
        let mut state = self.state.lock();
        let bytes = state.core.hand_over()?;
        state.frozen = true;
        Ok((bytes, self.now()))
    }

    /// Goes on as before the hand-over, which is void.
    pub(in crate::server) fn thaw(&self) {
        let missed = {
            let mut state = self.state.lock();
            state.frozen = false;
            std::mem::take(&mut state.missed)
        };
        self.with_core(|state, now, actions| {
            state.core.forgive_silence(Duration::MAX, now);
            for client in missed {
                match state.clients.contains_key(&client) {
                    // The client is known, so it cannot be refused.
                    true => drop(state.core.client_up(client, now, actions)),
                    false => state.core.client_down(client, now, actions),
                }
            }
        });
    }

    /// Another block map is in force, with another coordinator. All connected clients get the redirect.
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
