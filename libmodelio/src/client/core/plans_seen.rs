//! The plans that the client has heard of, but for the one that it sends blocks for.

use crate::vocabulary::ids::PlanId;

/// Plans by their numbers. Numbers of another coordinator's plans do not compare with these.
#[derive(Debug, Default)]
pub(super) struct PlansSeen {
    /// The plan under way that makes a version, if this client sends nothing for it.
    of_others: Option<PlanId>,
    /// The newest plan that is over.
    over: PlanId,
    /// A dropped provisional plan for which blocks were sent. No more blocks go to it.
    given_up: Option<PlanId>,
}

impl PlansSeen {
    /// Another coordinator may have the job, which numbers its plans anew.
    pub(super) fn begin_anew(&mut self) {
        (self.over, self.of_others) = (PlanId(0), None);
    }

    /// Others make a version by this plan.
    pub(super) fn others_begin(&mut self, plan: PlanId) {
        self.of_others = Some(plan);
    }

    /// The plan under way by which others make a version.
    pub(super) fn of_others(&self) -> Option<PlanId> {
        self.of_others
    }

    /// This plan is over, and so are all before it.
    pub(super) fn end(&mut self, plan: PlanId) {
        self.over = self.over.max(plan);
        self.of_others.take_if(|of_others| *of_others <= plan);
    }

    /// The newest plan that is over.
    pub(super) fn over(&self) -> PlanId {
        self.over
    }

    /// No more blocks go to this plan, nor to any before it.
    pub(super) fn give_up(&mut self, plan: Option<PlanId>) {
        self.given_up = self.given_up.max(plan);
    }

    /// The newest plan that no more blocks go to.
    pub(super) fn given_up(&self) -> Option<PlanId> {
        self.given_up
    }
}
