//! From commits to versions: taking commits, accumulating, reducing and publishing.

use std::collections::VecDeque;
use std::sync::Arc;

use libmodelio::vocabulary::ids::LearnerId;
use libmodelio::vocabulary::norm::{Quantity, Squares};

use super::{
    Action, Committed, Contribution, JobCore, JobPlan, Member, Now, OfTensors, PayloadPlace, Pending,
    PendingKind, Phase, Ticket, Work,
};

impl JobCore {
    /// Reports whether the next version has a buffer.
    pub fn set_buffer_ready(&mut self, ready: bool, now: Now, actions: &mut Vec<Action>) {
        self.making.set_buffer(ready);
        self.advance(now, actions);
    }

    /// The contributions of a plan that makes no version are in the accumulator. If it measures, `measured` has the
    /// sums of the squares.
    pub fn accumulated(
        &mut self,
        learners: &[LearnerId],
        measured: Option<&Squares>,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        self.measured.accumulated(measured);
        for committed in self.committed.iter_mut().filter(|c| c.place == PayloadPlace::Accumulating) {
            if !learners.contains(&committed.contribution.learner) {
                continue;
            }
            committed.place = PayloadPlace::Accumulated;
            committed.undo = None;
            // The version follows a measurement at once, and answers its commits.
            if let Some((ticket, _)) = committed.ticket.take_if(|_| measured.is_none()) {
                actions.push(Action::Reply(ticket, Ok(())));
            }
        }
        self.advance(now, actions);
    }

    /// The running plan is computed, and its version is published.
    pub fn reduced(&mut self, buffer_ready: bool, now: Now, actions: &mut Vec<Action>) {
        let Some(plan) = self.making.ends() else { return };
        self.making.set_buffer(buffer_ready);
        self.version = self.version.next();
        actions.push(Action::Published(self.version));
        match &plan.work {
            Work::Reduce { step, tensors, .. } => {
                self.measured.forget();
                let rate = self.divides_by_staleness().then_some(step.hyper.learning_rate);
                self.newest.reduced(self.committed.len(), step.norm, rate);
                self.recipe.reduced(tensors);
                self.end_step(now, actions);
            }
            _ => {
                let meta = plan.weights.as_ref().map(|weights| weights.meta.clone());
                self.newest.assigned(meta.unwrap_or_default());
                self.measured.forget_norms();
                // The step goes on: a learner that came in the middle of it still waits for the next one.
                let version = self.version;
                for member in self.members.values_mut().filter(|member| member.joined_at >= version) {
                    member.joined_at = version.next();
                }
                self.waits_go_on();
                if let Some(ticket) = self.making.published() {
                    actions.push(Action::Reply(ticket, Ok(())));
                }
            }
        }
        self.grace.begins(now);
        self.advance(now, actions);
    }

    fn end_step(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.grace.step_ended();
        for committed in std::mem::take(&mut self.committed) {
            if let Some((ticket, _)) = committed.ticket {
                actions.push(Action::Reply(ticket, Ok(())));
            }
            if let Some(member) = self.members.get_mut(&committed.contribution.learner) {
                member.unpublished = false;
                member.published_in = self.version;
                // The learner had no reason to send anything until now.
                member.last_seen = now;
                member.activity.counts(now);
            }
        }
        self.recipe.release();
        if !self.limits_head_start() {
            self.waits.moved_on();
        }
    }

    /// Takes the commits that can be taken, and begins the work that can begin.
    pub(super) fn advance(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.give_way(now, actions);
        self.settle();
        if !self.making.is_under_way() {
            self.take_pending(now, actions);
        }
        self.note_grace(now);
        if !self.making.is_under_way() {
            self.start_accumulation(now, actions);
            self.start_step(actions);
        }
        self.begin_provisional(now, actions);
        self.note_stall(now);
        self.note_readers(now);
    }

    fn take_pending(&mut self, now: Now, actions: &mut Vec<Action>) {
        if self.pending.is_empty() {
            return;
        }
        let mut waiting = std::mem::take(&mut self.pending);
        let mut kept = VecDeque::with_capacity(waiting.len());
        while let Some(pending) = waiting.pop_front() {
            if self.making.is_under_way() {
                kept.push_back(pending);
                continue;
            }
            let Pending { ticket, deadline, kind } = pending;
            match kind {
                PendingKind::Commit { contribution } if self.takes_commit(contribution.learner) => {
                    self.accept((ticket, deadline), contribution, now);
                    if !self.gathers() {
                        self.start_step(actions);
                    }
                }
                // The first version may have come before a publication that was allowed when it was requested.
                PendingKind::Assign { buffer }
                    if !self.provisional.is_under_way()
                        && !self.is_held()
                        && !self.is_held_by_readers()
                        && !self.lacks_number() =>
                {
                    match self.may_assign() {
                        Ok(()) => {
                            self.making.publishes(ticket, deadline);
                            self.run(JobPlan::of_weights(buffer, None), actions);
                        }
                        Err(error) => actions.push(Action::Reply(ticket, Err(error))),
                    }
                }
                kind => kept.push_back(Pending { ticket, deadline, kind }),
            }
        }
        self.pending = kept;
    }

    fn accept(&mut self, ticket: (Ticket, Now), contribution: Contribution, now: Now) {
        let learner = contribution.learner;
        let mut undo = None;
        if let Some(member) = self.members.get_mut(&learner) {
            member.last_seen = now;
            member.activity.writes(now);
            member.step = member.step.next();
            member.pace += 1;
            member.unpublished = true;
            undo = Some(std::mem::replace(&mut member.phase, Phase::Idle)).filter(|_| !contribution.steady);
        }
        let is_kept = contribution.steady || self.provisional.is_staged();
        let left = ticket.1.saturating_sub(now);
        self.committed.push(Committed {
            place: if is_kept { PayloadPlace::Staged } else { PayloadPlace::ToAccumulate },
            contribution: Arc::new(contribution),
            ticket: Some(ticket),
            accumulate_at: now + self.provisional.accumulate_patience().min(left / 4),
            patient_until: now + left / 2,
            undo,
        });
        self.be_patient(now);
    }

    /// Begins the coming version if it is complete. Otherwise answers the commits whose payload is safe.
    fn start_step(&mut self, actions: &mut Vec<Action>) {
        if self.committed.is_empty() || self.making.is_under_way() {
            return;
        }
        if !self.is_complete() || self.is_busy() || !self.has_room() || self.is_held() {
            for committed in
                self.committed.iter_mut().filter(|c| c.contribution.steady && c.place == PayloadPlace::Staged)
            {
                if let Some((ticket, _)) = committed.ticket.take() {
                    actions.push(Action::Reply(ticket, Ok(())));
                }
            }
            return;
        }
        if let Some(quantity) = self.unmeasured() {
            return self.measure(quantity, actions);
        }
        // Contributions that would have been accumulated are read in place, because the version is made now.
        for committed in &mut self.committed {
            if committed.place == PayloadPlace::ToAccumulate {
                committed.place = PayloadPlace::Staged;
            }
        }
        self.run(self.reduce_plan(None), actions);
    }

    /// Whether the memory that the coming version is made in or from is still in use.
    fn is_busy(&self) -> bool {
        self.is_accumulating() || self.waits_for_provisional()
    }

    /// What the coming version must still know of its contributions, all of them together. The norms of tensors depend
    /// on that of the gradient.
    fn unmeasured(&self) -> Option<Quantity> {
        let (reducer, hyper, OfTensors { groups, .. }) = self.params();
        let all = self.committed.iter().all(|c| c.place == PayloadPlace::Accumulated);
        match (reducer.measures(&hyper), groups.are_layerwise(reducer)) {
            (true, _) if !all || self.measured.squares().is_none() => Some(Quantity::Gradient),
            (_, true) if !all || self.measured.norms().is_none() => Some(Quantity::Tensors),
            _ => None,
        }
    }

    /// Adds up what is not accumulated, and measures all of it.
    fn measure(&mut self, quantity: Quantity, actions: &mut Vec<Action>) {
        self.measured.begins(quantity);
        let Work::Reduce { step, groups, .. } = self.reduce_plan(None).work else { return };
        // Values of averaged tensors are no part of the gradient.
        let mut counts = self.written(&self.params().2.frozen, false);
        groups.averaged(step.reducer).for_each(|averaged| counts.set_range(averaged, false));
        let tensors = self.recipe.next_steps(&counts);
        let work = Work::Measure { step, tensors, groups, quantity };
        self.accumulate(|place| place != PayloadPlace::Accumulated, work, actions);
    }

    fn run(&mut self, plan: JobPlan, actions: &mut Vec<Action>) {
        let plan = Arc::new(plan);
        self.making.begins(&plan);
        if self.seal_provisional() {
            actions.push(Action::Seal(plan));
        } else {
            actions.push(Action::Begin(plan));
        }
    }

    /// When the next contribution is accumulated.
    pub(super) fn next_accumulation(&self) -> Option<Now> {
        // Accumulation adds contributions in the order in which they come.
        if self.making.is_under_way()
            || self.is_accumulating()
            || self.controls.deterministic
            || self.making.holds()
        {
            return None;
        }
        self.committed
            .iter()
            .filter(|c| c.place == PayloadPlace::ToAccumulate || self.is_read_provisionally(c))
            .map(|committed| committed.accumulate_at)
            .min()
    }

    /// Accumulates contributions whose memory is needed back. When the first one is due, all are accumulated.
    fn start_accumulation(&mut self, now: Now, actions: &mut Vec<Action>) {
        // If the version is made now anyway, the memory is read in place.
        let now_anyway = self.is_complete() && self.has_room() && !self.is_busy();
        if now_anyway || self.provisional.is_under_way() || self.next_accumulation().is_none_or(|at| at > now)
        {
            return;
        }
        let work = Work::Add { combine: self.params().0.combine() };
        self.accumulate(|place| place == PayloadPlace::ToAccumulate, work, actions);
    }

    /// The contributions in these places are being accumulated from now on.
    fn accumulate(&mut self, from: impl Fn(PayloadPlace) -> bool, work: Work, actions: &mut Vec<Action>) {
        let mut inputs = Vec::new();
        for committed in self.committed.iter_mut().filter(|c| from(c.place)) {
            committed.place = PayloadPlace::Accumulating;
            inputs.push(Arc::clone(&committed.contribution));
        }
        inputs.sort_by_key(|contribution| contribution.learner);
        self.fix_params();
        let plan = JobPlan { work, inputs, weights: None, provisional: None };
        actions.push(Action::Begin(Arc::new(plan)));
    }

    /// Lets new settings take effect and new learners take part, if nothing that has begun depends on the old ones.
    pub(super) fn settle(&mut self) {
        if self.making.is_under_way() || self.provisional.is_under_way() {
            return;
        }
        self.follow_consistency();
        self.recipe.settle(self.version);
        if self.committed.is_empty() {
            self.formation.step_is_over(self.members.len() >= self.controls.learners as usize);
        }
        let version = self.version;
        let is_open = |member: &Member| matches!(member.phase, Phase::Open { .. });
        let writes = |member: &Member| self.takes_part(member) && is_open(member);
        let has_begun = !self.committed.is_empty() || self.members.values().any(writes);
        // If no step has begun, learners that came in a dropped one need not wait for the next. Before the job is
        // formed, all take part.
        if !(self.formation.is_formed() && has_begun) {
            for member in self.members.values_mut() {
                member.joined_at = member.joined_at.min(version);
            }
        }
    }
}
