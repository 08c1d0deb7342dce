//! Work that cannot go on: payloads that are refused, withheld, torn or taken back, clients that are lost, and jobs
//! that fail.

use libmodelio::vocabulary::block_map::PartitionIndex;
use libmodelio::vocabulary::ids::{ClientId, LearnerId, PlanId};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{Message, Refusal, Work};

use super::{Run, Stage};
use crate::coordinator::senders::Sender;
use crate::coordinator::{Action, CoordinatorCore};
use crate::core::{self, Now};

impl CoordinatorCore {
    /// A client does not send its granted contribution, or its new weights.
    pub(in crate::coordinator) fn withheld(
        &mut self,
        client: ClientId,
        plan: PlanId,
        learner: Option<LearnerId>,
        why: ShardError,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let Some(run) = &self.run else { return };
        let of = |sender: &Sender| {
            sender.client == client && learner.is_none_or(|learner| sender.learners.contains(&learner))
        };
        if run.id == plan && run.stage == Stage::Gathering && run.senders.iter().any(of) {
            self.refused(learner, why, now, actions);
        }
    }

    /// A contribution of the running plan, or its new weights, are refused.
    pub(in crate::coordinator) fn refused(
        &mut self,
        learner: Option<LearnerId>,
        error: ShardError,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let Some(run) = &self.run else { return };
        if run.is_open {
            return self.drop_run(now, actions);
        }
        let mut wanted = Vec::new();
        match (&run.plan.work, learner) {
            (Work::Assign { .. }, _) => self.core.assign_failed(error, now, &mut wanted),
            _ if run.plan.is_provisional() => self.core.provisional_failed(now, &mut wanted),
            (Work::Reduce { .. }, Some(learner)) => {
                self.core.refused(vec![(learner, error)], now, &mut wanted);
            }
            (_, Some(learner)) => self.core.accumulate_failed(vec![(learner, error)], now, &mut wanted),
            // The shard names a client that sends nothing.
            (_, None) => return,
        }
        self.drop_run(now, actions);
        self.perform(wanted, now, actions);
    }

    /// A shard has read a client's memory whose loan may have ended, or has what is no part of the plan. Another plan
    /// reads everything again.
    pub(in crate::coordinator) fn torn(&mut self, now: Now, actions: &mut Vec<Action>) {
        let Some(run) = &self.run else { return };
        let mut wanted = Vec::new();
        match &run.plan.work {
            // A shard has blocks of new weights that are not among those which are published.
            Work::Assign { .. } => return self.begin_again(now, actions),
            _ if run.plan.is_provisional() => self.core.provisional_failed(now, &mut wanted),
            Work::Reduce { .. } => self.core.refused(Vec::new(), now, &mut wanted),
            _ => self.core.accumulate_failed(Vec::new(), now, &mut wanted),
        }
        self.drop_run(now, actions);
        self.perform(wanted, now, actions);
    }

    /// `learner` has the memory back that it lent for its last commit. Work that reads the memory is void.
    pub(in crate::coordinator) fn reclaim(
        &mut self,
        learner: LearnerId,
        why: ShardError,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let mut wanted = Vec::new();
        let is_read = self.core.reclaim(learner, why, now, &mut wanted);
        self.taken_out(is_read, wanted, now, actions);
    }

    /// The client of `learner` takes back its last commit, unless that counts.
    pub(in crate::coordinator) fn recall(&mut self, learner: LearnerId, now: Now, actions: &mut Vec<Action>) {
        let mut wanted = Vec::new();
        let is_read = self.core.recall(learner, ShardError::Interrupted, now, &mut wanted);
        self.taken_out(is_read, wanted, now, actions);
    }

    /// The client takes back these new weights, unless they count.
    pub(in crate::coordinator) fn recall_assign(
        &mut self,
        client: ClientId,
        token: u64,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let is_it = |plan: &core::JobPlan| {
            plan.weights.as_ref().is_some_and(|of| (of.client, of.name) == (client, token))
        };
        let runs = |run: &Run| run.stage == Stage::Gathering && !run.is_open && is_it(&run.plan);
        if !self.queue.has(is_it) && !self.run.as_ref().is_some_and(runs) {
            return;
        }
        let mut wanted = Vec::new();
        self.core.assign_failed(ShardError::Interrupted, now, &mut wanted);
        self.drop_work(is_it, now, actions);
        self.perform(wanted, now, actions);
    }

    /// A contribution was taken out again. If it `is_read`, the work that reads it is void.
    pub(in crate::coordinator) fn taken_out(
        &mut self,
        is_read: bool,
        wanted: Vec<core::Action>,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        if is_read {
            self.drop_work(|plan| plan.weights.is_none(), now, actions);
        }
        self.perform(wanted, now, actions);
    }

    /// A client is lost, with all payload that it holds. Contributions of these learners are among it.
    pub(in crate::coordinator) fn lose(
        &mut self,
        client: ClientId,
        learners: &[LearnerId],
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        self.drop_open_weights(|of| of == client, now, actions);
        let mut wanted = Vec::new();
        let assigns = self.assigns_from(client);
        if self.core.lost(learners, now, &mut wanted) {
            self.drop_work(|plan| plan.weights.is_none(), now, actions);
        }
        if assigns {
            let gone = ShardError::NotAllowed("the client that held the new weights is gone".into());
            self.core.assign_failed(gone, now, &mut wanted);
            self.drop_work(|plan| plan.weights.is_some(), now, actions);
        }
        self.perform(wanted, now, actions);
    }

    /// The job fails: a partition contradicts the coordinator. It has lost its blocks, or belongs to another job.
    pub(in crate::coordinator) fn fail(
        &mut self,
        partition: PartitionIndex,
        refusal: &Refusal,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let whose = self.shape.shard(partition);
        // Whoever restores the job ends this life of it. Requests wait for that until their deadlines.
        if self.core.controls().snapshots.restores() && self.core.durable().is_some() {
            if self.health.restores() {
                tracing::warn!("{whose} does not have this job's blocks any more: {refusal}");
                self.send_state_to_all(now, actions);
            }
            return;
        }
        let why = Refusal::Shard(ShardError::Lost(format!(
            "{whose} does not have this job's blocks any more: {refusal}"
        )));
        self.health.fail(why.clone());
        self.run = None;
        self.queue.clear();
        let gathering = self.sets.take_all();
        for (client, asked) in self.tickets.take_all().chain(gathering) {
            self.answer(client, asked, Message::Refused(why.clone()), actions);
        }
        self.send_state_to_all(now, actions);
    }
}
