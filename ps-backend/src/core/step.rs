//! From commits to versions: taking what waits, folding, reducing, publishing.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use fixedbitset::FixedBitSet;
use libmodelio::transport::ShardError;
use libmodelio::vocabulary::ids::LearnerId;

use super::{
    Action, Answer, Committed, Contribution, Now, Pending, PendingKind, Phase, Place, Plan, ShardCore,
    Ticket, Work,
};

impl<S: Clone> ShardCore<S> {
    /// The next version's buffer is there, or not yet.
    pub fn set_buffer_ready(&mut self, ready: bool, now: Now, actions: &mut Vec<Action<S>>) {
        self.buffer_ready = ready;
        self.advance(now, actions);
    }

    /// The contributions of an [`Action::Fold`] are in the accumulator.
    pub fn folded(&mut self, learners: &[LearnerId], now: Now, actions: &mut Vec<Action<S>>) {
        for committed in self.committed.iter_mut().filter(|c| c.place == Place::Folding) {
            if !learners.contains(&committed.contribution.learner) {
                continue;
            }
            committed.place = Place::Folded;
            committed.undo = None;
            self.accumulated.union_with(&committed.contribution.deferred);
            if let Some((ticket, _)) = committed.ticket.take() {
                actions.push(Action::Reply(ticket, Ok(Answer::Committed)));
            }
        }
        self.advance(now, actions);
    }

    /// The running plan is computed; its version is published.
    pub fn reduced(&mut self, buffer_ready: bool, now: Now, actions: &mut Vec<Action<S>>) {
        let Some(plan) = self.running.take() else { return };
        self.buffer_ready = buffer_ready;
        match &plan.work {
            Work::Reduce { tensors, .. } => {
                self.version = plan.version;
                actions.push(Action::Published(self.version));
                self.optimizer_steps = self.optimizer_steps.after(tensors);
                self.end_step(now, actions);
            }
            Work::Assign { .. } => {
                // The step goes on: whoever came in the middle of it still waits for the one after.
                for member in self.members.values_mut().filter(|member| member.joined_at > self.version) {
                    member.joined_at = plan.version.next();
                }
                self.version = plan.version;
                self.stall = None;
                actions.push(Action::Published(self.version));
                if let Some((ticket, _)) = self.running_ticket.take() {
                    actions.push(Action::Reply(ticket, Ok(Answer::Committed)));
                }
            }
        }
        self.advance(now, actions);
    }

    fn end_step(&mut self, now: Now, actions: &mut Vec<Action<S>>) {
        self.contributions_taken += self.committed.len() as u64;
        for committed in std::mem::take(&mut self.committed) {
            if let Some((ticket, _)) = committed.ticket {
                actions.push(Action::Reply(ticket, Ok(Answer::Committed)));
            }
            if let Some(member) = self.members.get_mut(&committed.contribution.learner) {
                member.unpublished = false;
                member.published_in = self.version;
                // Until now it had nothing to say.
                member.last_seen = now;
            }
        }
        self.accumulated.clear();
        self.fusing = None;
        self.params = None;
        if !self.limits_head_start() {
            self.stall = None;
        }
        // Only what is committed makes its learner wait, and all of that is in.
        for waiter in self.waiters.drain(..) {
            actions.push(Action::Reply(waiter.ticket, Ok(Answer::Version(self.version))));
        }
    }

    /// Takes what can be taken and starts what can be started.
    pub(super) fn advance(&mut self, now: Now, actions: &mut Vec<Action<S>>) {
        self.settle();
        if self.running.is_none() {
            self.take_pending(now, actions);
        }
        if self.running.is_none() {
            self.start_fold(now, actions);
            self.start_step(actions);
        }
        self.fuser = self.find_fuser();
        self.begin_early(actions);
        self.note_stall(now);
    }

    fn take_pending(&mut self, now: Now, actions: &mut Vec<Action<S>>) {
        if self.pending.is_empty() {
            return;
        }
        let mut waiting = std::mem::take(&mut self.pending);
        let mut kept = VecDeque::with_capacity(waiting.len());
        while let Some(pending) = waiting.pop_front() {
            if self.running.is_some() {
                kept.push_back(pending);
                continue;
            }
            let Pending { ticket, deadline, kind } = pending;
            match kind {
                PendingKind::Commit { contribution, lendable } if self.takes_commit(contribution.learner) => {
                    if let Err(error) = self.check_fused(&contribution) {
                        actions.push(Action::Reply(ticket, Err(error)));
                        continue;
                    }
                    self.accept((ticket, deadline), contribution, lendable, now);
                    if !self.gathers() {
                        self.start_step(actions);
                    }
                }
                // What was allowed when it was asked for may have been overtaken by the first version.
                PendingKind::Assign { buffer, written }
                    if self.fusing.is_none() && self.fuses_in_flight == 0 && !self.is_held() =>
                {
                    match self.may_assign() {
                        Ok(()) => self.start_assign((ticket, deadline), buffer, written, actions),
                        Err(error) => actions.push(Action::Reply(ticket, Err(error))),
                    }
                }
                kind => kept.push_back(Pending { ticket, deadline, kind }),
            }
        }
        self.pending = kept;
    }

    /// Whether every block that a contribution holds is either to be read or was reduced on arrival.
    fn check_fused(&self, contribution: &Contribution<S>) -> Result<(), ShardError> {
        if self.provisional {
            return Ok(());
        }
        let Some(member) = self.members.get(&contribution.learner) else { return Ok(()) };
        let Phase::Open { fused, .. } = &member.phase else { return Ok(()) };
        let lost = contribution.sent.difference(&contribution.deferred).find(|&block| !fused.contains(block));
        match lost {
            None => Ok(()),
            Some(block) => Err(ShardError::NotAllowed(format!(
                "block {block} is named in the commit, but was neither reduced nor is it in staging"
            ))),
        }
    }

    fn accept(&mut self, ticket: (Ticket, Now), contribution: Contribution<S>, lendable: bool, now: Now) {
        let learner = contribution.learner;
        let mut undo = None;
        if let Some(member) = self.members.get_mut(&learner) {
            member.last_seen = now;
            member.step = member.step.next();
            member.pace += 1;
            member.unpublished = true;
            let open = std::mem::replace(&mut member.phase, Phase::Idle);
            // The blocks that were reduced on arrival are no longer to do.
            if let Phase::Open { fused, .. } = &open
                && let Some(fusing) = &mut self.fusing
                && fusing.owner == learner
            {
                Arc::make_mut(&mut fusing.plan).todo.difference_with(fused);
            }
            undo = Some(open).filter(|_| !lendable);
        }
        self.committed.push(Committed {
            contribution: Arc::new(contribution),
            place: if lendable { Place::Lent } else { Place::ToFold },
            lendable,
            ticket: Some(ticket),
            fold_at: now + self.fold_patience.min(ticket.1.saturating_sub(now) / 4),
            undo,
        });
    }

    /// Starts the coming version if all that it waits for is there; otherwise answers the commits
    /// whose payload is safe where it is.
    fn start_step(&mut self, actions: &mut Vec<Action<S>>) {
        if self.committed.is_empty() || self.running.is_some() {
            return;
        }
        if !self.is_complete() || self.is_busy() || !self.buffer_ready || self.is_held() {
            for committed in self.committed.iter_mut().filter(|c| c.place == Place::Lent) {
                if let Some((ticket, _)) = committed.ticket.take() {
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
            if let (Work::Reduce { step, .. }, Work::Reduce { step: early, .. }) = (&plan.work, &early.work) {
                debug_assert_eq!((step.reducer, &step.hyper), (early.reducer, &early.hyper));
                debug_assert_eq!(step.contributions, early.contributions);
            }
        }
        self.run(plan, actions);
    }

    /// Whether something still goes on in the memory that the coming version would be made in or from.
    fn is_busy(&self) -> bool {
        let committed = |learner| self.committed.iter().any(|c| c.contribution.learner == learner);
        self.fuses_in_flight > 0
            || self.committed.iter().any(|c| c.place == Place::Folding)
            || self.fusing.as_ref().is_some_and(|fusing| !committed(fusing.owner))
    }

    fn start_assign(
        &mut self,
        ticket: (Ticket, Now),
        buffer: S,
        written: Vec<Range<u64>>,
        actions: &mut Vec<Action<S>>,
    ) {
        let mut todo = FixedBitSet::with_capacity(self.blocks);
        todo.insert_range(..);
        let work = Work::Assign { buffer, written };
        let plan = Plan { version: self.version.next(), work, todo, provisional: None };
        self.running_ticket = Some(ticket);
        self.run(plan, actions);
    }

    fn run(&mut self, plan: Plan<S>, actions: &mut Vec<Action<S>>) {
        let plan = Arc::new(plan);
        self.running = Some(Arc::clone(&plan));
        let seals = self.provisional && self.fusing.is_some();
        actions.push(if seals { Action::Seal(plan) } else { Action::Reduce(plan) });
    }

    /// When the next contribution is to be folded.
    pub(super) fn next_fold(&self) -> Option<Now> {
        let folding = self.committed.iter().any(|c| c.place == Place::Folding);
        // What is folded is added up in the order in which it came.
        if self.running.is_some() || folding || self.controls.deterministic || self.holds {
            return None;
        }
        self.committed.iter().filter(|c| c.place == Place::ToFold).map(|committed| committed.fold_at).min()
    }

    /// Folds contributions whose memory is needed back: when the first is due, as many as go at once.
    fn start_fold(&mut self, now: Now, actions: &mut Vec<Action<S>>) {
        // When the version is made now anyway, the memory is read in place.
        let now_anyway = self.is_complete() && self.buffer_ready && !self.is_busy();
        if now_anyway || self.next_fold().is_none_or(|at| at > now) {
            return;
        }
        let mut due: Vec<_> = self.committed.iter_mut().filter(|c| c.place == Place::ToFold).collect();
        due.sort_by_key(|committed| committed.fold_at);
        due.truncate(self.fold_batch);
        due.sort_by_key(|committed| committed.contribution.learner);
        let mut contributions = Vec::with_capacity(due.len());
        for committed in due {
            committed.place = Place::Folding;
            contributions.push(Arc::clone(&committed.contribution));
        }
        let params = self.params();
        actions.push(Action::Fold {
            contributions,
            accumulated: self.accumulated.clone(),
            combine: params.0.combine(),
        });
        self.params = Some(params);
    }
}
