//! The job's state, for reading, and what is refused in it. Nothing here changes it.
use std::sync::Arc;

use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::{LearnerId, Version};
use libmodelio::vocabulary::members::Attached;
use libmodelio::vocabulary::meta::Meta;
use libmodelio::vocabulary::norm::Norm;
use libmodelio::vocabulary::partly::PartlyWritten;
use libmodelio::vocabulary::phase::JobPhase;
use libmodelio::vocabulary::shard_error::ShardError;

use super::recipe::Params;
use super::{
    Committed, Contribution, JobCore, Member, MemberView, Now, PayloadPlace, PendingKind, Phase, Source,
};

fn view(learner: LearnerId, member: &Member, now: Now) -> MemberView {
    MemberView {
        learner,
        name: member.name.clone(),
        incarnation: member.incarnation,
        step: member.step,
        unpublished: member.unpublished,
        published_in: member.published_in,
        phase: match member.phase {
            Phase::Open { .. } => "writing",
            Phase::Idle if member.unpublished => "committed",
            Phase::Idle => "idle",
        },
        silent: now.saturating_sub(member.last_seen),
        joined_at: member.joined_at,
        attached: match member.exited {
            Some(_) => Attached::Exited,
            None if member.attached => Attached::Yes,
            None => Attached::No,
        },
    }
}

impl JobCore {
    /// The newest complete version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The norm of the gradient behind the newest version, if its step had to know it.
    pub fn norm(&self) -> Option<Norm> {
        self.newest.norm
    }

    /// The settings.
    pub fn controls(&self) -> &Controls {
        &self.controls
    }

    /// The number of contributions taken since the start.
    pub fn contributions_taken(&self) -> u64 {
        self.newest.all_contributions
    }

    /// Replicas of the model begin anew with this version.
    pub fn replicas_since(&self) -> Version {
        self.recipe.replicas_since()
    }

    /// The number of contributions that the newest version has added. 0 if new weights were published.
    pub fn newest_of(&self) -> u32 {
        self.newest.contributions
    }

    /// What the publisher of the newest version has said of it.
    pub fn meta(&self) -> &Meta {
        &self.newest.meta
    }

    /// The newest version of which there is a snapshot in the job's store.
    pub fn durable(&self) -> Option<Version> {
        self.newest.durable
    }

    /// The number of learners whose contribution to the coming version is in.
    pub fn committed(&self) -> usize {
        self.committed.len()
    }

    /// The places of taken contributions that still have to be read, by learner.
    pub fn unread(&self) -> impl Iterator<Item = (LearnerId, &Source)> {
        let unread =
            self.committed.iter().filter(|c| !c.contribution.steady && c.place != PayloadPlace::Accumulated);
        unread.map(|c| (c.contribution.learner, &c.contribution.source))
    }

    /// Whether contributions are being accumulated: a plan that makes no version is under
    /// way.
    pub(super) fn is_accumulating(&self) -> bool {
        self.measured.is_under_way() || self.committed.iter().any(|c| c.place == PayloadPlace::Accumulating)
    }

    /// The contributions to the coming version that are in the accumulator.
    pub(crate) fn accumulated_contributions(&self) -> impl Iterator<Item = &Arc<Contribution>> {
        let accumulated =
            self.committed.iter().filter(|committed| committed.place == PayloadPlace::Accumulated);
        accumulated.map(|committed| &committed.contribution)
    }

    /// Whether a version is being made of contributions. Nobody can join it, even if all learners have left meanwhile.
    pub(super) fn is_reducing(&self) -> bool {
        self.making.is_reducing()
    }

    /// Whether part of the coming version has been computed, or is being computed.
    pub(super) fn is_under_way(&self) -> bool {
        self.making.is_under_way()
            || self.provisional.is_under_way()
            || self.is_accumulating()
            || self.has_accumulated()
    }

    /// Whether the accumulator holds contributions to the coming version.
    pub(super) fn has_accumulated(&self) -> bool {
        self.committed.iter().any(|c| c.place == PayloadPlace::Accumulated && !c.contribution.sent.is_clear())
    }

    /// The learners in the job, by number.
    pub fn members(&self, now: Now) -> Vec<MemberView> {
        self.members.iter().map(|(&learner, member)| view(learner, member, now)).collect()
    }

    /// Whether all learners that the job waits for have joined.
    pub fn is_formed(&self) -> bool {
        self.formation.is_formed()
    }

    /// The learners in the job.
    pub fn learners(&self) -> impl Iterator<Item = LearnerId> {
        self.members.keys().copied()
    }

    /// A learner in the job.
    pub fn member(&self, learner: LearnerId, now: Now) -> Option<MemberView> {
        self.members.get(&learner).map(|member| view(learner, member, now))
    }

    /// The job's phase.
    pub fn state(&self) -> JobPhase {
        if self.is_stopped() {
            JobPhase::Stopped
        } else if !self.formation.is_formed() {
            JobPhase::Forming
        } else if self.making.is_under_way() || self.measured.is_under_way() {
            JobPhase::Reducing
        } else {
            JobPhase::Running
        }
    }

    /// Whether `learner` is writing a contribution that has a whole block.
    pub(super) fn has_block(&self, learner: LearnerId) -> bool {
        let phase = self.members.get(&learner).map(|member| &member.phase);
        matches!(phase, Some(Phase::Open { has_block: true, .. }))
    }

    /// Whether `learner` still writes to the provisional plan.
    pub(super) fn writes_provisionally(&self, learner: LearnerId) -> bool {
        self.provisional.takes(learner) && !self.has_committed(learner)
    }

    pub(super) fn has_committed(&self, learner: LearnerId) -> bool {
        self.committed.iter().any(|committed| committed.contribution.learner == learner)
    }

    /// Whether contributions to the provisional plan are still written.
    pub(super) fn waits_for_provisional(&self) -> bool {
        self.provisional.open().any(|learner| !self.has_committed(*learner))
    }

    /// A committed contribution whose memory is read for the provisional plan: it can be taken out with that.
    pub(super) fn is_read_provisionally(&self, committed: &Committed) -> bool {
        self.provisional.is_under_way()
            && committed.place == PayloadPlace::Staged
            && !committed.contribution.steady
    }

    /// Whether no work begins any more, and all earlier work is done.
    pub fn is_held(&self) -> bool {
        self.making.holds() && !self.is_under_way()
    }

    /// Whether the next version has no number: more have to be reserved.
    pub(super) fn lacks_number(&self) -> bool {
        self.newest.reserved.is_some_and(|reserved| self.version.next() >= reserved)
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.formation.is_formed() && (self.members.len() as u32) < self.controls.min_learners
    }

    pub(super) fn refuse_if_stopped(&self) -> Result<(), ShardError> {
        if self.is_stopped() { Err(self.stopped()) } else { Ok(()) }
    }

    pub(super) fn stopped(&self) -> ShardError {
        ShardError::Stopped { active: self.members.len() as u32, needed: self.controls.min_learners }
    }

    /// Whether `weights` may be written: always with reducer `assign`, else only before the first
    /// version.
    ///
    /// # Errors
    /// [`ShardError::NotAllowed`] says what to set.
    pub fn may_assign(&self) -> Result<(), ShardError> {
        if self.controls.reducer.takes_weights() || self.version.0 == 0 {
            return Ok(());
        }
        Err(ShardError::NotAllowed(format!(
            "weights is read-only at version {} with reducer {}: write \"assign\" to control/reducer first",
            self.version, self.controls.reducer
        )))
    }

    /// The number of pieces of partly written blocks, in contributions to the coming version and in those that wait
    /// to be taken, without that of `sender`. None if one of the numbers is unknown.
    pub(super) fn pieces(&self, sender: Option<LearnerId>) -> Option<usize> {
        let waiting = self.pending.iter().filter_map(|pending| match &pending.kind {
            PendingKind::Commit { contribution, .. } => {
                Some(contribution).filter(|of| sender != Some(of.learner))
            }
            PendingKind::Assign { .. } => None,
        });
        let committed = self.committed.iter().map(|committed| &*committed.contribution);
        committed.chain(waiting).map(|of| of.partly.as_ref().map(PartlyWritten::pieces)).sum()
    }

    /// The parameters of the coming version.
    pub(super) fn params(&self) -> Params {
        self.recipe.of_next(&self.controls, self.version)
    }
}
