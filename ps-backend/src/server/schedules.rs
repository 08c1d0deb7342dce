//! When the snapshots of the models that are coordinated here are taken.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::Generation;
use parking_lot::Mutex;
use serde_json::Value;

use crate::snapshot::SnapshotSchedule;

/// The schedule of each model that has a store, by its life.
#[derive(Debug)]
pub(super) struct Schedules {
    started: Instant,
    of: Mutex<BTreeMap<Generation, SnapshotSchedule>>,
}

impl Default for Schedules {
    fn default() -> Schedules {
        Schedules { started: Instant::now(), of: Mutex::default() }
    }
}

impl Schedules {
    /// The time since this process began.
    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Calls `f` with the schedule of a model.
    pub(super) fn with<T>(&self, model: Generation, f: impl FnOnce(&mut SnapshotSchedule) -> T) -> T {
        f(self.of.lock().entry(model).or_default())
    }

    /// Forgets all models but these.
    pub(super) fn retain(&self, is_there: impl Fn(Generation) -> bool) {
        self.of.lock().retain(|model, _| is_there(*model));
    }

    /// What has come of the snapshots of a model. None if it has no store.
    pub(super) fn status(&self, model: Generation) -> Option<Value> {
        let now = self.now();
        self.of.lock().get(&model).map(|schedule| schedule.status(now))
    }
}
