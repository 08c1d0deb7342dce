//! From commits to versions: opening, committing, folding, reducing, publishing, waiting.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use fixedbitset::FixedBitSet;
use libmodelio::ids::{LearnerId, Step};
use libmodelio::transport::ShardError;

use super::{
    Action, Answer, Committed, Contribution, Now, Opening, Pending, PendingKind, Phase, Place, Plan,
    ShardCore, Ticket, Waiter, Work,
};
use crate::controls::Consistency;
use crate::reducer::Reducer;

impl<S: Clone> ShardCore<S> {
    /// First write of a contribution of `learner`.
    ///
    /// # Errors
    /// For a learner that is gone, or a stopped job.
    pub fn open(&mut self, learner: LearnerId, now: Now) -> Result<Opening, ShardError> {
        self.refuse_if_stopped()?;
        let blocks = self.blocks;
        let staging_lent =
            self.committed.iter().any(|c| c.contribution.learner == learner && c.place == Place::Lent);
        let member = self.members.get_mut(&learner).ok_or(ShardError::UnknownLearner(learner))?;
        member.last_seen = now;
        if let Phase::Open { step, .. } = member.phase {
            return Ok(Opening { step, staging_lent });
        }
        let step = member.step.next();
        member.phase = Phase::Open {
            step,
            received: FixedBitSet::with_capacity(blocks),
            fused: FixedBitSet::with_capacity(blocks),
        };
        Ok(Opening { step, staging_lent })
    }

    /// The contribution of `learner` is complete. Answered by [`Action::Reply`], before `deadline`.
    #[allow(clippy::too_many_arguments)]
    pub fn commit(
        &mut self,
        ticket: Ticket,
        step: Step,
        contribution: Contribution<S>,
        lendable: bool,
        deadline: Now,
        now: Now,
        actions: &mut Vec<Action<S>>,
    ) {
        if let Err(error) = self.may_commit(contribution.learner, step) {
            actions.push(Action::Reply(ticket, Err(error)));
            return;
        }
        if let Some(member) = self.members.get_mut(&contribution.learner) {
            member.last_seen = now;
        }
        let kind = PendingKind::Commit { contribution, lendable };
        self.pending.push_back(Pending { ticket, deadline, kind });
        self.advance(now, actions);
    }

    fn may_commit(&self, learner: LearnerId, step: Step) -> Result<(), ShardError> {
        self.refuse_if_stopped()?;
        let member = self.members.get(&learner).ok_or(ShardError::UnknownLearner(learner))?;
        match member.phase {
            Phase::Open { step: open, .. } if open == step => Ok(()),
            _ => Err(ShardError::StepOutOfOrder { got: step, expected: member.step.next() }),
        }
    }

    /// New values for the whole model (`written` parts of it) become the next version.
    #[allow(clippy::too_many_arguments)]
    pub fn assign(
        &mut self,
        ticket: Ticket,
        buffer: S,
        written: Vec<Range<u64>>,
        deadline: Now,
        now: Now,
        actions: &mut Vec<Action<S>>,
    ) {
        if let Err(error) = self.may_assign() {
            actions.push(Action::Reply(ticket, Err(error)));
            return;
        }
        let kind = PendingKind::Assign { buffer, written };
        self.pending.push_back(Pending { ticket, deadline, kind });
        self.advance(now, actions);
    }

    /// Whether `weights` may be written: always with reducer `assign`, else only before the first
    /// version.
    ///
    /// # Errors
    /// [`ShardError::NotAllowed`] says what to set.
    pub fn may_assign(&self) -> Result<(), ShardError> {
        if self.controls.reducer == Reducer::Assign || self.version.0 == 0 {
            return Ok(());
        }
        Err(ShardError::NotAllowed(format!(
            "weights is read-only at version {} with reducer {}: write \"assign\" to control/reducer first",
            self.version, self.controls.reducer
        )))
    }

    /// `learner` wants a version that contains all it has committed.
    pub fn await_step(
        &mut self,
        ticket: Ticket,
        learner: LearnerId,
        deadline: Now,
        now: Now,
        actions: &mut Vec<Action<S>>,
    ) {
        let Some(member) = self.members.get_mut(&learner) else {
            actions.push(Action::Reply(ticket, Err(ShardError::UnknownLearner(learner))));
            return;
        };
        member.last_seen = now;
        if !member.unpublished {
            actions.push(Action::Reply(ticket, Ok(Answer::Version(self.version))));
        } else if let Err(error) = self.refuse_if_stopped() {
            actions.push(Action::Reply(ticket, Err(error)));
        } else {
            self.waiters.push(Waiter { ticket, learner, deadline });
        }
    }

    /// Whether a committed contribution of `learner` waits for its version.
    pub fn has_unpublished(&self, learner: LearnerId) -> bool {
        self.members.get(&learner).is_some_and(|member| member.unpublished)
    }

    /// The next version's buffer is there, or not yet.
    pub fn set_buffer_ready(&mut self, ready: bool, now: Now, actions: &mut Vec<Action<S>>) {
        self.buffer_ready = ready;
        self.advance(now, actions);
    }

    /// A contribution is in the accumulator.
    pub fn folded(&mut self, learner: LearnerId, now: Now, actions: &mut Vec<Action<S>>) {
        if let Some(committed) =
            self.committed.iter_mut().find(|c| c.contribution.learner == learner && c.place == Place::Folding)
        {
            committed.place = Place::Folded;
            self.accumulated.union_with(&committed.contribution.sent);
            if let Some(ticket) = committed.ticket.take() {
                actions.push(Action::Reply(ticket, Ok(Answer::Committed)));
            }
        }
        self.advance(now, actions);
    }

    /// The running plan is computed; its version is published.
    pub fn reduced(&mut self, buffer_ready: bool, now: Now, actions: &mut Vec<Action<S>>) {
        let Some(plan) = self.running.take() else { return };
        self.version = plan.version;
        self.buffer_ready = buffer_ready;
        actions.push(Action::Published(self.version));
        if let Some(ticket) = self.running_ticket.take() {
            actions.push(Action::Reply(ticket, Ok(Answer::Committed)));
        }
        if let Work::Reduce { .. } = plan.work {
            self.optimizer_steps += 1;
            self.contributions_taken += self.committed.len() as u64;
            for committed in std::mem::take(&mut self.committed) {
                if let Some(ticket) = committed.ticket {
                    actions.push(Action::Reply(ticket, Ok(Answer::Committed)));
                }
                if let Some(member) = self.members.get_mut(&committed.contribution.learner) {
                    member.unpublished = false;
                }
            }
            self.accumulated.clear();
            self.fusing = None;
            self.waiting_since = None;
            if std::mem::take(&mut self.reform) {
                self.formed = self.members.len() >= self.controls.learners as usize;
            }
            for waiter in self.waiters.drain(..) {
                actions.push(Action::Reply(waiter.ticket, Ok(Answer::Version(self.version))));
            }
        }
        self.advance(now, actions);
    }

    /// Whether some request waits for its deadline or a learner for its lease.
    pub fn has_deadlines(&self) -> bool {
        !self.pending.is_empty() || !self.waiters.is_empty() || !self.members.is_empty()
    }

    /// Time passes: deadlines and leases.
    pub fn tick(&mut self, now: Now, actions: &mut Vec<Action<S>>) {
        let mut kept = VecDeque::new();
        for pending in self.pending.drain(..) {
            if pending.deadline <= now {
                let what = match pending.kind {
                    PendingKind::Commit { .. } if !self.buffer_ready => {
                        "every version buffer is held open (close old handles or raise control/max_versions)"
                    }
                    PendingKind::Commit { .. } => "the step before this one still waits for other learners",
                    PendingKind::Assign { .. } => "a contribution is still being written",
                };
                actions.push(Action::Reply(pending.ticket, Err(ShardError::TimedOut(what))));
            } else {
                kept.push_back(pending);
            }
        }
        self.pending = kept;
        self.waiters.retain(|waiter| {
            let over = waiter.deadline <= now;
            if over {
                let what = "other learners have not contributed to this step";
                actions.push(Action::Reply(waiter.ticket, Err(ShardError::TimedOut(what))));
            }
            !over
        });
        self.expire_leases(now, actions);
    }

    /// Takes what can be taken and starts what can be started.
    pub(super) fn advance(&mut self, now: Now, actions: &mut Vec<Action<S>>) {
        if self.running.is_none() {
            self.take_pending(now, actions);
        }
        if self.running.is_none() {
            self.start_fold(actions);
            self.start_step(actions);
        }
        self.fuser = self.find_fuser();
    }

    fn take_pending(&mut self, now: Now, actions: &mut Vec<Action<S>>) {
        let mut waiting = std::mem::take(&mut self.pending);
        let mut kept = VecDeque::with_capacity(waiting.len());
        while let Some(pending) = waiting.pop_front() {
            if self.running.is_some() {
                kept.push_back(pending);
                continue;
            }
            match pending.kind {
                PendingKind::Commit { contribution, lendable } => {
                    if self.takes_commit(contribution.learner) {
                        self.accept(pending.ticket, contribution, lendable, now);
                        if self.controls.consistency == Consistency::Async {
                            self.start_step(actions);
                        }
                    } else {
                        let kind = PendingKind::Commit { contribution, lendable };
                        kept.push_back(Pending { kind, ..pending });
                    }
                }
                PendingKind::Assign { buffer, written } => {
                    let free = self.fusing.is_none() && self.fuses_in_flight == 0;
                    if free {
                        let ticket = pending.ticket;
                        self.start_assign(ticket, buffer, written, actions);
                    } else {
                        let kind = PendingKind::Assign { buffer, written };
                        kept.push_back(Pending { kind, ..pending });
                    }
                }
            }
        }
        self.pending = kept;
    }

    /// Whether a commit of `learner` can be taken now.
    fn takes_commit(&self, learner: LearnerId) -> bool {
        let Some(member) = self.members.get(&learner).filter(|member| !member.unpublished) else {
            return false;
        };
        match self.controls.consistency {
            Consistency::Sync => {
                let completes = self.formed
                    && self
                        .members
                        .iter()
                        .all(|(&id, other)| id == learner || !self.takes_part(other) || other.unpublished);
                self.takes_part(member) && (!completes || self.buffer_ready)
            }
            Consistency::Async => {
                self.formed
                    && self.buffer_ready
                    && self.committed.is_empty()
                    && self.fusing.as_ref().is_none_or(|fusing| fusing.owner == learner)
                    && self.fuses_in_flight == 0
            }
        }
    }

    fn accept(&mut self, ticket: Ticket, contribution: Contribution<S>, lendable: bool, now: Now) {
        let learner = contribution.learner;
        self.waiting_since.get_or_insert(now);
        self.committed.push(Committed {
            contribution: Arc::new(contribution),
            place: if lendable { Place::Lent } else { Place::ToFold },
            ticket: Some(ticket),
        });
        // The blocks that were reduced on arrival are no longer to do.
        if let Some(member) = self.members.get_mut(&learner) {
            member.step = member.step.next();
            member.last_seen = now;
            member.unpublished = true;
            let open = std::mem::replace(&mut member.phase, Phase::Idle);
            if let Phase::Open { fused, .. } = open
                && let Some(fusing) = &mut self.fusing
                && fusing.owner == learner
            {
                Arc::make_mut(&mut fusing.plan).todo.difference_with(&fused);
            }
        }
    }

    /// Starts the coming version if all that it waits for is there; otherwise answers the commits
    /// whose payload is safe where it is.
    fn start_step(&mut self, actions: &mut Vec<Action<S>>) {
        if self.committed.is_empty() || self.running.is_some() {
            return;
        }
        let complete = match self.controls.consistency {
            Consistency::Sync => {
                let enough = self.controls.min_learners as usize;
                self.nobody_missing() && self.committed.len().max(self.members.len()) >= enough
            }
            Consistency::Async => true,
        };
        let busy = self.fuses_in_flight > 0 || self.committed.iter().any(|c| c.place == Place::Folding);
        if !complete || busy || !self.buffer_ready {
            for committed in &mut self.committed {
                if committed.place == Place::Lent
                    && let Some(ticket) = committed.ticket.take()
                {
                    actions.push(Action::Reply(ticket, Ok(Answer::Committed)));
                }
            }
            return;
        }
        // What was to be folded is read in place instead: the version is made now.
        for committed in &mut self.committed {
            if committed.place == Place::ToFold {
                committed.place = Place::Lent;
            }
        }
        let mut plan = self.reduce_plan(0);
        if let Some(fusing) = &self.fusing {
            // Blocks already in the buffer were computed under this plan's parameters.
            let early = &fusing.plan;
            plan.todo.clone_from(&early.todo);
            if let (Work::Reduce { step, .. }, Work::Reduce { step: early, .. }) =
                (&mut plan.work, &early.work)
            {
                debug_assert_eq!(step.contributions, early.contributions);
                step.clone_from(early);
            }
        }
        self.run(plan, actions);
    }

    fn start_assign(
        &mut self,
        ticket: Ticket,
        buffer: S,
        written: Vec<Range<u64>>,
        actions: &mut Vec<Action<S>>,
    ) {
        let mut todo = FixedBitSet::with_capacity(self.blocks);
        todo.insert_range(..);
        let plan = Plan { version: self.version.next(), work: Work::Assign { buffer, written }, todo };
        self.running_ticket = Some(ticket);
        self.run(plan, actions);
    }

    fn run(&mut self, plan: Plan<S>, actions: &mut Vec<Action<S>>) {
        let plan = Arc::new(plan);
        self.running = Some(Arc::clone(&plan));
        actions.push(Action::Reduce(plan));
    }

    /// Folds the next contribution whose memory is needed back, one at a time.
    fn start_fold(&mut self, actions: &mut Vec<Action<S>>) {
        // When the version is made now anyway, the memory is read in place.
        let now_anyway = self.nobody_missing() && self.buffer_ready && self.fuses_in_flight == 0;
        if now_anyway || self.committed.iter().any(|c| c.place == Place::Folding) {
            return;
        }
        let Some(committed) = self.committed.iter_mut().find(|c| c.place == Place::ToFold) else { return };
        committed.place = Place::Folding;
        let contribution = Arc::clone(&committed.contribution);
        actions.push(Action::Fold { contribution, accumulated: self.accumulated.clone() });
    }

    /// Whether every learner of this step has committed.
    fn nobody_missing(&self) -> bool {
        self.formed && self.members.values().all(|member| !self.takes_part(member) || member.unpublished)
    }
}
