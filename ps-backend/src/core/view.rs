//! What the job is doing, for whoever shows it or works for it: nothing here decides.
use libmodelio::transport::Attached;
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::{Incarnation, LearnerId, Step, Version};
use libmodelio::vocabulary::phase::JobPhase;
use libmodelio::vocabulary::tensor_steps::TensorSteps;

use super::{Member, Now, Phase, Place, ShardCore, Ticket};

/// A learner as the status shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberView {
    /// Its number.
    pub learner: LearnerId,
    /// Its name.
    pub name: String,
    /// Its life.
    pub incarnation: Incarnation,
    /// Committed steps.
    pub step: Step,
    /// The last of them waits for its version.
    pub unpublished: bool,
    /// The version that the last published step is part of; 0 before the first.
    pub published_in: Version,
    /// `idle`, `writing` or `committed`.
    pub phase: &'static str,
    /// Since its last request.
    pub silent: Now,
    /// Versions it takes part in begin after this one.
    pub joined_at: Version,
    /// Whether a process uses it, as far as was said.
    pub attached: Attached,
}

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

impl<S: Clone> ShardCore<S> {
    /// The newest complete version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The settings.
    pub fn controls(&self) -> &Controls {
        &self.controls
    }

    /// Contributions taken since the start.
    pub fn contributions_taken(&self) -> u64 {
        self.contributions_taken
    }

    /// Blocks that were reduced on arrival since the start.
    pub fn blocks_on_arrival(&self) -> u64 {
        self.blocks_on_arrival
    }

    /// Learners whose contribution to the coming version is in.
    pub fn committed(&self) -> usize {
        self.committed.len()
    }

    /// Where the contributions lie that are taken and still have to be read, by whose they are.
    pub fn unread(&self) -> impl Iterator<Item = (LearnerId, &S)> {
        let unread = self.committed.iter().filter(|c| !c.lendable && c.place != Place::Folded);
        unread.map(|c| (c.contribution.learner, &c.contribution.source))
    }

    /// Whether something of the coming version has been computed: the memory and the settings behind it
    /// must stay.
    pub fn is_under_way(&self) -> bool {
        self.params.is_some() || self.fusing.is_some() || self.fuses_in_flight > 0 || self.running.is_some()
    }

    /// Optimizer steps of each tensor since its state was zero.
    pub fn optimizer_steps(&self) -> &TensorSteps {
        &self.optimizer_steps
    }

    /// Whether the next version has a buffer, as far as the core was told.
    pub fn buffer_ready(&self) -> bool {
        self.buffer_ready
    }

    /// Whether a version is being made: [`super::Action::Reduce`] is under way.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// The version that is being made.
    pub fn running_version(&self) -> Option<Version> {
        self.running.as_ref().map(|plan| plan.version)
    }

    /// Whether contributions are being folded: [`super::Action::Fold`] is under way.
    pub fn is_folding(&self) -> bool {
        self.committed.iter().any(|c| c.place == Place::Folding)
    }

    /// When a request will have been answered; `None` once it is.
    pub fn deadline(&self, ticket: Ticket) -> Option<Now> {
        let pending = self.pending.iter().map(|pending| (pending.ticket, pending.deadline));
        let waiters = self.waiters.iter().map(|waiter| (waiter.ticket, waiter.deadline));
        let taken = self.committed.iter().filter_map(|committed| committed.ticket);
        let mut all = pending.chain(waiters).chain(taken).chain(self.running_ticket);
        all.find(|(known, _)| *known == ticket).map(|(_, deadline)| deadline)
    }

    /// Whether `learner` is in the job.
    pub fn has_learner(&self, learner: LearnerId) -> bool {
        self.members.contains_key(&learner)
    }

    /// Learners in the job, by number.
    pub fn members(&self, now: Now) -> Vec<MemberView> {
        self.members.iter().map(|(&learner, member)| view(learner, member, now)).collect()
    }

    /// One learner in the job.
    pub fn member(&self, learner: LearnerId, now: Now) -> Option<MemberView> {
        self.members.get(&learner).map(|member| view(learner, member, now))
    }

    /// Short description of what the job is doing.
    pub fn state(&self) -> JobPhase {
        if self.is_stopped() {
            JobPhase::Stopped
        } else if !self.formed {
            JobPhase::Forming
        } else if self.running.is_some() {
            JobPhase::Reducing
        } else {
            JobPhase::Running
        }
    }
}
