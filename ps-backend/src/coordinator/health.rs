//! What keeps the job from going on: failure, and shards that are out of reach.

use libmodelio::vocabulary::ids::ShardId;
use libmodelio::vocabulary::phase::JobPhase;
use libmodelio::wire::Refusal;
use serde::{Deserialize, Serialize};

#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Health {
    /// Why the job has failed.
    failed: Option<Refusal>,
    /// The shards that have been out of reach for long.
    #[serde(skip)]
    away: Vec<ShardId>,
    /// Blocks are lost, and the job goes on from a snapshot, in another life.
    #[serde(skip)]
    is_restored: bool,
}

impl Health {
    /// The job has failed for this reason.
    pub(super) fn fail(&mut self, why: Refusal) {
        self.failed = Some(why);
    }

    /// Blocks are lost, and the job is restored. Returns whether that is new.
    pub(super) fn restores(&mut self) -> bool {
        !std::mem::replace(&mut self.is_restored, true)
    }

    /// Why the job has failed, if it has.
    pub(super) fn failed(&self) -> Option<&Refusal> {
        self.failed.as_ref()
    }

    /// These shards are out of reach. Returns whether others were before.
    pub(super) fn are_away(&mut self, shards: Vec<ShardId>) -> bool {
        let is_new = self.away != shards;
        self.away = shards;
        is_new
    }

    /// The shards that have been out of reach for long.
    pub(super) fn away(&self) -> &[ShardId] {
        &self.away
    }

    /// The phase of the job, whose core says that it is in this one.
    pub(super) fn phase(&self, of_core: JobPhase) -> JobPhase {
        match (&self.failed, self.away.is_empty()) {
            (Some(_), _) => JobPhase::Failed,
            _ if self.is_restored => JobPhase::Restoring,
            (None, false) => JobPhase::Waiting,
            (None, true) => of_core,
        }
    }
}
