//! The connection to the coordinator, whether the job has one, and the messages that get no answer.

use std::collections::VecDeque;

use super::readers::KnownReaders;
use super::{Action, ClientCore, Now};
use crate::vocabulary::ids::{Incarnation, Version};
use crate::vocabulary::phase::JobPhase;
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{LearnerRecord, Message};

/// What the client knows of the coordinator's process.
#[derive(Debug, Default)]
pub(super) struct Coordination {
    is_up: bool,
    /// The newest connection has not brought a state yet.
    is_anew: bool,
    /// Why the job has no coordinator any more, and the job's phase before that.
    lost: Option<(ShardError, JobPhase)>,
    /// When the coordinator first reported that the job has failed.
    failed_at: Option<Now>,
    /// The readers that it has told of.
    pub(super) readers: KnownReaders,
    /// What it has told of the learners, as of the newest versions.
    told: VecDeque<ToldLearners>,
}

/// What the job knew of learners, as of a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToldLearners {
    /// The version.
    pub version: Version,
    /// Contributions that are part of it or of an earlier one.
    pub contributions: u64,
    /// The learners.
    pub learners: Vec<LearnerRecord>,
    /// The highest incarnation of a name that is not among them.
    pub unlisted: Incarnation,
}

impl Coordination {
    /// Whether it is connected.
    pub(super) fn is_up(&self) -> bool {
        self.is_up
    }

    /// It is connected. The first state that comes counts, whatever an earlier connection brought.
    pub(super) fn up(&mut self) {
        (self.is_up, self.is_anew) = (true, true);
    }

    /// It is not connected.
    pub(super) fn down(&mut self) {
        self.is_up = false;
    }

    /// A state comes. Whether it is the first one over the newest connection.
    pub(super) fn takes_first_state(&mut self) -> bool {
        std::mem::take(&mut self.is_anew)
    }

    /// The job has no coordinator any more.
    pub(super) fn lose(&mut self, why: ShardError, phase_before: JobPhase) {
        self.lost = Some((why, phase_before));
    }

    /// The job has one after all, or again. Returns the phase before it was lost.
    pub(super) fn find(&mut self) -> Option<JobPhase> {
        self.lost.take().map(|(_, before)| before)
    }

    /// Why the job has none, if that is so.
    pub(super) fn lost(&self) -> Option<&ShardError> {
        self.lost.as_ref().map(|(why, _)| why)
    }

    /// It reports whether the job has failed.
    pub(super) fn reports(&mut self, has_failed: bool, now: Now) {
        self.failed_at = has_failed.then(|| self.failed_at.unwrap_or(now));
    }

    /// When it first reported that the job has failed.
    pub(super) fn failed_at(&self) -> Option<Now> {
        self.failed_at
    }
}

impl ClientCore {
    /// What the job knew of learners as of a version, if the coordinator has told that lately.
    pub fn told_learners(&self, version: Version) -> Option<&ToldLearners> {
        self.coordination.told.iter().rfind(|told| told.version == version)
    }

    pub(super) fn take_learners(&mut self, told: ToldLearners) {
        /// Of versions that are neither shown nor pulled, so many are kept.
        const KEPT: usize = 8;
        let (shown, pulled) = (self.version(), self.pull.as_ref().map(|pull| pull.version));
        let all = &mut self.coordination.told;
        all.push_back(told);
        all.retain(|told| told.version >= shown);
        if all.len() > KEPT
            && let Some(at) =
                all.iter().position(|told| told.version != shown && Some(told.version) != pulled)
        {
            all.remove(at);
        }
    }

    /// Sends a message that has no answer.
    pub fn notify(&mut self, message: Message, actions: &mut Vec<Action>) {
        if self.coordination.is_up() {
            actions.push(Action::ToCoordinator(0, message));
        }
    }

    /// The numbers of the client's requests, for the coordinator.
    pub(super) fn numbers(&self) -> Action {
        Action::ToCoordinator(
            0,
            Message::AckThrough { request: self.requests.acked_through(), newest: self.requests.newest() },
        )
    }
}
