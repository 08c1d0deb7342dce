//! Blocks as they come: which are reduced on arrival, which are deferred. The hot path.

use std::sync::Arc;

use libmodelio::transport::{BlockSlot, ShardError};
use libmodelio::vocabulary::ids::LearnerId;
use libmodelio::vocabulary::reducer::Combine;

use super::{Action, Arrival, Fusing, Now, PendingKind, Phase, Plan, ShardCore};

impl<S: Clone> ShardCore<S> {
    /// A block was offered. Allocates nothing, but for the first block of a version.
    ///
    /// # Errors
    /// For a learner that is gone, a step out of order, a block out of range, a stopped job.
    pub fn arrive(&mut self, slot: BlockSlot, now: Now) -> Result<Arrival<S>, ShardError> {
        if slot.block.index() >= self.blocks {
            return Err(ShardError::BadBlock { block: slot.block, bytes: 0 });
        }
        let stopped = self.refuse_if_stopped();
        let may_fuse = self.fuser == Some(slot.learner);
        let Some(member) =
            self.members.get_mut(&slot.learner).filter(|member| member.incarnation == slot.incarnation)
        else {
            return Err(ShardError::UnknownLearner(slot.learner));
        };
        stopped?;
        member.last_seen = now;
        if slot.step <= member.step {
            return Ok(Arrival::Duplicate);
        }
        let expected = member.step.next();
        let Phase::Open { step, received, .. } = &mut member.phase else {
            return Err(ShardError::StepOutOfOrder { got: slot.step, expected });
        };
        if slot.step != *step {
            return Err(ShardError::StepOutOfOrder { got: slot.step, expected: *step });
        }
        if received.put(slot.block.index()) {
            return Ok(Arrival::Duplicate);
        }
        if !may_fuse {
            return Ok(Arrival::Defer);
        }
        if self.fusing.is_none() {
            self.params = Some(self.params());
            let plan = Arc::new(self.reduce_plan(1));
            self.fusing = Some(Fusing { owner: slot.learner, plan });
        }
        match &self.fusing {
            Some(fusing) => {
                self.fuses_in_flight += 1;
                Ok(Arrival::Fuse(Arc::clone(&fusing.plan)))
            }
            None => Ok(Arrival::Defer),
        }
    }

    /// A block that [`Self::arrive`] said to fuse was computed (`ok`), or refused.
    pub fn fused(&mut self, slot: BlockSlot, ok: bool, now: Now, actions: &mut Vec<Action<S>>) {
        debug_assert!(self.fuses_in_flight > 0, "{slot:?} was not in flight");
        self.fuses_in_flight = self.fuses_in_flight.saturating_sub(1);
        self.blocks_on_arrival += u64::from(ok);
        // If the contribution was dropped meanwhile, the result is void, and must not be taken for a block
        // of the learner's next one, which may be open by now: that one begins to fuse only when all
        // blocks of this one are in.
        let live = self.fusing.as_ref().is_some_and(|fusing| fusing.owner == slot.learner);
        if live
            && let Some(member) = self.members.get_mut(&slot.learner)
            && let Phase::Open { step, received, fused } = &mut member.phase
            && *step == slot.step
        {
            if ok {
                fused.insert(slot.block.index());
            } else {
                received.remove(slot.block.index());
            }
        }
        // While its owner is writing and nobody waits, nothing can move: spare the look.
        if self.fuses_in_flight == 0 && (self.fusing.is_none() || !self.pending.is_empty()) {
            self.advance(now, actions);
        }
    }

    /// A block that was to be deferred is refused (NaN): it may be offered again.
    pub fn refuse(&mut self, slot: BlockSlot) {
        if let Some(member) = self.members.get_mut(&slot.learner)
            && let Phase::Open { step, received, .. } = &mut member.phase
            && *step == slot.step
        {
            received.remove(slot.block.index());
        }
    }

    /// Whose blocks may go straight into the next version: nobody else can still change what they
    /// are added to.
    pub(super) fn find_fuser(&self) -> Option<LearnerId> {
        if self.running.is_some() || !self.buffer_ready || !self.formed {
            return None;
        }
        if self.provisional && self.fusing.is_none() && (self.holds || !self.may_begin_early()) {
            return None;
        }
        match &self.fusing {
            Some(fusing) => return Some(fusing.owner),
            // A learner that is gone has a block under way into the same buffer.
            None if self.fuses_in_flight > 0 => return None,
            None => {}
        }
        // New weights come first; they would wait for as long as blocks are reduced on arrival.
        if self.pending.iter().any(|pending| matches!(pending.kind, PendingKind::Assign { .. })) {
            return None;
        }
        self.last_outstanding()
    }

    /// Whether what a plan makes of whole blocks does not depend on what is committed later: values of several learners
    /// replace each other byte by byte, so those wait.
    fn may_begin_early(&self) -> bool {
        self.params().0.combine() != Combine::Last || self.committed.is_empty()
    }

    /// Begins the coming version's plan if the last learner that it waits for is writing.
    pub(super) fn begin_early(&mut self, actions: &mut Vec<Action<S>>) {
        let Some(owner) = self.fuser.filter(|_| self.provisional && self.fusing.is_none()) else { return };
        let step = match self.members.get(&owner).map(|member| &member.phase) {
            Some(Phase::Open { step, received, .. }) if !self.of_whole_blocks || !received.is_clear() => {
                *step
            }
            _ => return,
        };
        if self.unfit == Some((owner, step)) {
            return;
        }
        self.params = Some(self.params());
        let plan = Arc::new(Plan { provisional: Some(owner), ..self.reduce_plan(1) });
        self.fusing = Some(Fusing { owner, plan: Arc::clone(&plan) });
        actions.push(Action::Reduce(plan));
    }

    /// The contribution that `learner` writes has a whole block: a plan may begin that takes its blocks as they come.
    pub fn is_whole(&mut self, learner: LearnerId, now: Now, actions: &mut Vec<Action<S>>) {
        let phase = self.members.get_mut(&learner).map(|member| &mut member.phase);
        if let Some(Phase::Open { received, .. }) = phase
            && received.is_clear()
        {
            // Which one it is does not matter: nobody asks `arrive`.
            received.insert_range(..1);
            self.advance(now, actions);
        }
    }

    /// Whose contribution to the plan under way is still written.
    pub fn provisional(&self) -> Option<LearnerId> {
        self.fusing.as_ref().filter(|_| self.provisional && self.running.is_none()).map(|fusing| fusing.owner)
    }

    /// What the provisional plan under way has taken of `learner` is of another contribution than is committed: it is
    /// void, and what is committed is read.
    pub fn drop_provisional(&mut self, learner: LearnerId, actions: &mut Vec<Action<S>>) {
        self.drop_fusing(learner, actions);
    }

    /// The provisional plan under way could not take what its learner has written: it is void. The contribution is
    /// read when it is committed.
    pub fn provisional_failed(&mut self, now: Now, actions: &mut Vec<Action<S>>) {
        let Some(Fusing { owner, .. }) = self.fusing.take_if(|_| self.running.is_none()) else { return };
        let open = self.members.get(&owner).map(|member| member.step.next());
        self.unfit = open.map(|step| (owner, step));
        self.release_params();
        self.advance(now, actions);
    }
}
