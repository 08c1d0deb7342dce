//! The coordinator while its model's blocks move. It holds the job between two versions, and its state goes to
//! another shard.

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::layout::ModelLayout;

use super::shape::Shape;
use super::{Action, CoordinatorCore, Now};
use crate::core::JobRecord;

/// Mounts that live bring their learners back within this, and the time in which they have the weights, however long their
/// steps take.
const COME_BACK: Now = Now::from_secs(5);
/// Mounts have weights at this rate at least: a link of 1 Gbit/s has.
const BYTES_PER_SECOND: u64 = 100_000_000;

/// The received state does not fit this model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the state of the model's coordinator cannot be used: {0}")]
pub struct TakeOverError(String);

impl CoordinatorCore {
    /// Begins to hold the job: see [`crate::core::JobCore::hold`].
    pub fn hold(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.drop_open_weights(|_| true, now, actions);
        let mut wanted = Vec::new();
        self.core.hold(now, &mut wanted);
        self.perform(wanted, now, actions);
    }

    /// Lets the job go on.
    pub fn release(&mut self, now: Now, actions: &mut Vec<Action>) {
        let mut wanted = Vec::new();
        self.core.release(now, &mut wanted);
        self.perform(wanted, now, actions);
    }

    /// Whether no new work begins, and all shards have carried out all earlier work.
    pub fn is_held(&self) -> bool {
        self.core.is_held() && self.run.is_none() && self.queue.is_empty()
    }

    /// Why the job is not held yet, for people.
    pub fn held_up_by(&self) -> String {
        if let Some(failed) = self.health.failed() {
            return format!("the job has failed: {failed}");
        }
        if let Some(run) = &self.run {
            let clients: Vec<String> = run.clients().map(|client| format!("{:x}", client.0)).collect();
            return format!(
                "plan {} is under way, for which {} shard(s) wait for client(s) {}",
                run.id(),
                run.waiting().count(),
                clients.join(", ")
            );
        }
        let (committed, version) = (self.core.committed(), self.core.version().next());
        match &self.core.missing_names()[..] {
            [] => format!("version {version} has {committed} contribution(s) and waits for more learners"),
            names => format!("version {version} waits for the learner(s) {}", names.join(", ")),
        }
    }

    /// The whole state, for another shard. It is allowed only while [`Self::is_held`].
    ///
    /// # Errors
    /// [`TakeOverError`] if the job is not held.
    pub fn hand_over(&self) -> Result<Vec<u8>, TakeOverError> {
        if !self.is_held() {
            return Err(TakeOverError(self.held_up_by()));
        }
        postcard::to_stdvec(self).map_err(|error| TakeOverError(error.to_string()))
    }

    /// A coordinator from a hand-over at `now`, for a model of this layout on `partitions` shards. It goes on at
    /// once, and clients come back to it.
    ///
    /// # Errors
    /// [`TakeOverError`] for anything that [`Self::hand_over`] does not make.
    pub fn taken_over(
        bytes: &[u8],
        layout: &ModelLayout,
        partitions: usize,
        now: Now,
    ) -> Result<CoordinatorCore, TakeOverError> {
        let (blocks, tensors) = (layout.blocks(), layout.tensors().len());
        let mut coordinator: CoordinatorCore =
            postcard::from_bytes(bytes).map_err(|error| TakeOverError(error.to_string()))?;
        if !coordinator.shape.is_of(layout) || !coordinator.core.is_sound(blocks, tensors) {
            let what = format!("it is not of a model of {blocks} blocks and {tensors} tensors");
            return Err(TakeOverError(what));
        }
        coordinator.shape = Shape::new(layout, partitions);
        coordinator.states.taken_over(now);
        coordinator.clients.values_mut().for_each(|client| client.taken_over(now));
        coordinator.core.taken_over(now);
        Ok(coordinator)
    }

    /// Begins at a snapshot's record of a job, with this job's settings. The job must have just begun.
    ///
    /// # Errors
    /// [`TakeOverError`] for the record of another model.
    pub fn restored(mut self, record: JobRecord) -> Result<CoordinatorCore, TakeOverError> {
        self.core.restore(record).map_err(|error| TakeOverError(error.to_string()))?;
        Ok(self)
    }

    /// The job was restored after blocks were lost: after a time for its bytes of weights, and after `lease` at the latest, it
    /// goes on without learners that do not come back.
    #[must_use]
    pub fn after_loss(mut self, weights: u64, lease: Now) -> CoordinatorCore {
        let pulled = Now::from_millis(weights.saturating_mul(1000) / BYTES_PER_SECOND);
        self.core.goes_on_at(COME_BACK.saturating_add(pulled), lease);
        self.core.set_durable(self.core.version());
        self
    }

    /// Versions have numbers below this one: see [`crate::core::JobCore::set_reserved`].
    pub fn set_reserved(&mut self, numbers: Option<Version>, now: Now, actions: &mut Vec<Action>) {
        let mut wanted = Vec::new();
        self.core.set_reserved(numbers, now, &mut wanted);
        self.perform(wanted, now, actions);
    }

    /// Begins waiting work after [`Self::taken_over`].
    pub fn go_on(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.hold(now, actions);
        self.release(now, actions);
    }
}
