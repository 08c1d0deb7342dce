//! Snapshots of a model in one process, as its settings say.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::wire::Lineage;
use parking_lot::Mutex;
use serde_json::Value;

use super::LocalShard;
use crate::server::partition::StepWatch;
use crate::snapshot::{Head, Keep, SavedSnapshot, Shelf, SnapshotError, SnapshotSchedule};
use crate::stores::absolute_url;

/// How often it is looked whether a snapshot is due.
const TICK: Duration = Duration::from_millis(100);
/// The longest wait for a snapshot that is being written before the last one.
const LAST: Duration = Duration::from_secs(60);

/// What takes the snapshots of a model.
pub struct Saver {
    shard: Weak<LocalShard>,
    model: String,
    layout: Arc<ModelLayout>,
    metadata: BTreeMap<String, String>,
    /// The store that the model goes on from or owns, until it has taken that over.
    takes_over: Mutex<Option<String>>,
    started: Instant,
    /// Somebody waits for a snapshot.
    hurries: AtomicBool,
    /// Held while a snapshot is written.
    schedule: Mutex<SnapshotSchedule>,
    /// The schedule as the last snapshot left it. Readers of the status do not wait for one that is written.
    told: Mutex<SnapshotSchedule>,
}

impl Saver {
    /// Takes snapshots of the model of this shard. It `takes_over` a store, whoever has it, if it begins with that.
    pub fn new(
        shard: &Weak<LocalShard>,
        (model, layout): (&str, &Arc<ModelLayout>),
        metadata: BTreeMap<String, String>,
        takes_over: Option<String>,
    ) -> Arc<Saver> {
        let (of, model, layout) = (shard.clone(), model.to_owned(), Arc::clone(layout));
        let (takes_over, started) = (Mutex::new(takes_over), Instant::now());
        let (hurries, schedule, told) = (AtomicBool::new(false), Mutex::default(), Mutex::default());
        let saver =
            Saver { shard: of, model, layout, metadata, takes_over, started, hurries, schedule, told };
        let saver = Arc::new(saver);
        if let Some(shard) = shard.upgrade() {
            let _ = shard.saver.set(Arc::downgrade(&saver));
        }
        saver
    }

    /// Takes snapshots of some models when they are due, one after the other, until the models end.
    pub fn run(mut savers: Vec<Arc<Saver>>) {
        while !savers.is_empty() {
            std::thread::sleep(TICK);
            savers.retain(|saver| saver.look());
        }
    }

    /// Returns versions, seconds and bytes of the last snapshot, or none without a store.
    pub fn status(&self) -> Option<Value> {
        let told = self.told.lock();
        (!told.to().is_empty()).then(|| told.status(self.started.elapsed()))
    }

    /// Takes a snapshot if one is due. Returns whether the model is there.
    fn look(&self) -> bool {
        let Some(shard) = self.shard.upgrade() else { return false };
        let (version, settings) = shard.coordinator.snapshots();
        let mut schedule = self.schedule.lock();
        schedule.is_to(&settings.to);
        if !settings.to.is_empty() && schedule.is_due(settings.every, version, self.started.elapsed()) {
            self.save(&shard, &mut schedule);
        }
        true
    }

    /// Takes a snapshot of the newest version, unless there is one. Returns the version, or nothing if the job has no place
    /// for snapshots.
    ///
    /// # Errors
    /// Why there is none.
    pub fn save_now(&self) -> Result<Option<Version>, String> {
        let Some(shard) = self.shard.upgrade() else { return Ok(None) };
        let (version, settings) = shard.coordinator.snapshots();
        if settings.to.is_empty() {
            return Ok(None);
        }
        self.hurries.store(true, Ordering::Relaxed);
        let locked = self.schedule.try_lock_for(LAST);
        let Some(mut schedule) = locked else {
            self.hurries.store(false, Ordering::Relaxed);
            return Err(format!("{} takes what is written to it too slowly, or not at all", settings.to));
        };
        schedule.is_to(&settings.to);
        if schedule.newest() != Some(version) {
            self.save(&shard, &mut schedule);
        }
        self.hurries.store(false, Ordering::Relaxed);
        schedule.why().map_or(Ok(schedule.newest()), Err)
    }

    fn save(&self, shard: &LocalShard, schedule: &mut SnapshotSchedule) {
        let begun = self.started.elapsed();
        match self.write(shard) {
            Ok(saved) => {
                let SavedSnapshot { version, bytes: (of, written) } = saved;
                tracing::info!(model = self.model, %version, of, written, "a snapshot was saved");
                schedule.saved(saved, begun, self.started.elapsed());
                shard.coordinator.is_durable(version);
            }
            Err(error) => {
                if schedule.failed(error.to_string(), self.started.elapsed()) {
                    tracing::warn!(model = self.model, "no snapshot was saved, and the job goes on: {error}");
                }
            }
        }
        *self.told.lock() = schedule.clone();
    }

    fn write(&self, shard: &LocalShard) -> Result<SavedSnapshot, SnapshotError> {
        let (_, settings) = shard.coordinator.snapshots();
        let shelf = Shelf::open(&settings.to)?;
        let generation = shard.coordinator.life().0;
        let mut takes_over = self.takes_over.lock();
        let lineage = Lineage::new(generation, Version(0));
        let owns = takes_over.as_deref() == Some(&*absolute_url(shelf.url()));
        shelf.claim((&self.model, generation, &lineage), owns)?;
        // Once: another job may go on from there in turn.
        *takes_over = None;
        drop(takes_over);
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| SnapshotError::Invalid(error.to_string()))?;
        let (record, controls, copied) = shard.capture()?;
        let version = record.version;
        let head = Head::new(&self.model, &self.layout, self.metadata.clone(), &controls, record);
        let steps = StepWatch::of(&shard.partition);
        let is_stepping = || !self.hurries.load(Ordering::Relaxed) && steps.is_stepping();
        let snapshot = (u64::from_le_bytes(random), generation);
        let written = shelf.write_whole(snapshot, (head, &copied), &is_stepping)?;
        let keep = Keep::of(&settings);
        let collected = shelf.check_claim(generation).and_then(|_| shelf.collect(keep, generation));
        if let Err(error) = collected {
            tracing::warn!(model = self.model, "older snapshots are not removed: {error}");
        }
        Ok(SavedSnapshot { version, bytes: (copied.len(), written) })
    }
}
