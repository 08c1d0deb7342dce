//! Answers and notices of the shards.

use libmodelio::vocabulary::block_map::PartitionIndex;
use libmodelio::vocabulary::ids::{ClientId, PlanId, ShardId};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{Granted, Message, Refusal};

use super::{Run, Stage};
use crate::coordinator::clients::given_up_at;
use crate::coordinator::progress::SENT_AGAIN;
use crate::coordinator::senders::Sender;
use crate::coordinator::{Action, CoordinatorCore};
use crate::core::Now;

impl CoordinatorCore {
    /// Takes an answer or a notice of a shard.
    pub fn from_partition(
        &mut self,
        partition: PartitionIndex,
        request: u64,
        message: Message,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let is_current = self.run.as_ref().is_some_and(|run| run.id.0 == request);
        match &message {
            // While the plan is concluded or dropped, the refusal has no effect, because that order is repeated.
            Message::Refused(Refusal::Plan { plan, newest }) => {
                let is_past = |run: &Run| run.id == *plan && newest >= plan && run.stage == Stage::Gathering;
                if self.run.as_ref().is_some_and(is_past) {
                    self.begin_again(now, actions);
                }
                return;
            }
            Message::Refused(refusal) if is_current || request == 0 => {
                return self.fail(partition, refusal, now, actions);
            }
            _ => {}
        }
        let Some(run) = &mut self.run else { return };
        match message {
            Message::Ready { plan }
                if plan == run.id
                    && run.stage == Stage::Gathering
                    && run.squares.is_none()
                    && !run.is_open
                    && !run.plan.is_provisional() =>
            {
                run.waiting.remove(&partition);
                if run.waiting.is_empty() {
                    self.conclude(now, actions);
                }
            }
            Message::Measured { plan, squares } if plan == run.id && run.stage == Stage::Gathering => {
                let waits = run.waiting.contains(&partition);
                if waits && run.squares.as_mut().is_some_and(|all| all.merge(&squares)) {
                    run.waiting.remove(&partition);
                    if run.waiting.is_empty() {
                        self.conclude(now, actions);
                    }
                }
            }
            Message::NonFinitePayload { plan, client, block }
                if plan == run.id && run.stage == Stage::Gathering =>
            {
                let sender = run.senders.iter().find(|sender| sender.client == client);
                let learner = sender.and_then(|sender| sender.learners.first().copied());
                self.refused(learner, ShardError::NonFinite(block), now, actions);
            }
            Message::Unmade { plan, why } if plan == run.id && run.stage == Stage::Gathering => {
                self.refused(None, why, now, actions);
            }
            Message::Lacking { plan, clients } => self.lacking(partition, plan, &clients, now, actions),
            Message::Torn { plan } if plan == run.id && run.stage == Stage::Gathering => {
                self.torn(now, actions)
            }
            Message::Done if request == run.id.0 && run.stage != Stage::Gathering => {
                run.waiting.remove(&partition);
                if run.waiting.is_empty() {
                    if run.stage == Stage::Concluding {
                        run.clients().for_each(|client| self.progress.forget(client));
                    }
                    self.run = None;
                    if self.local_shard.awaits_buffer() {
                        self.buffer(true, now, actions);
                    }
                    self.begin_next(now, actions);
                }
            }
            _ => {}
        }
    }

    /// A shard is connected again. Messages that it may have missed are repeated.
    pub fn partition_up(&mut self, partition: PartitionIndex, actions: &mut Vec<Action>) {
        if let Some(run) = &self.run
            && run.waiting.contains(&partition)
        {
            actions.extend(
                run.orders().map(|(request, message)| Action::ToPartition(partition, request, message)),
            );
        }
    }

    /// All shards are ready. The plan counts from here on.
    pub(in crate::coordinator) fn conclude(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.wind_up(Stage::Concluding, now, actions);
        self.counts();
        let mut wanted = Vec::new();
        match &self.run {
            Some(run) if run.plan.work.makes_version() => {
                let has_buffer = self.local_shard.version_is_made();
                self.core.reduced(has_buffer, now, &mut wanted);
            }
            Some(run) => {
                let learners: Vec<_> = run.plan.inputs.iter().map(|of| of.learner).collect();
                self.core.accumulated(&learners, run.squares.as_ref(), now, &mut wanted);
            }
            None => {}
        }
        self.perform(wanted, now, actions);
    }

    /// The contributions of the running plan count.
    pub(in crate::coordinator) fn counts(&mut self) {
        let Some(run) = &self.run else { return };
        let is_contribution = |sender: &&Sender| matches!(sender.payload, Granted::Contributions { .. });
        for sender in run.senders.iter().filter(is_contribution) {
            if let Some(client) = self.clients.get_mut(&sender.client) {
                client.counted = run.id;
            } else if let Some(at) = given_up_at(&self.given_up, sender.client) {
                self.given_up[at].1.counted = run.id;
            }
        }
    }

    pub(in crate::coordinator) fn begin_next(&mut self, now: Now, actions: &mut Vec<Action>) {
        match self.queue.take_first() {
            Some(plan) => self.begin(plan, now, actions),
            None => self.begin_waiting_weights(now, actions),
        }
    }

    /// A shard waits for payloads of the plan under way, which is sealed, or has waited for them until it was dropped.
    pub(in crate::coordinator) fn lacking(
        &mut self,
        partition: PartitionIndex,
        plan: PlanId,
        clients: &[(ClientId, u32)],
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let lease = self.core.controls().lease;
        // In one process nothing is sent, and an endless lease gives nobody up.
        let is_watched = !self.local_shard.is_there() && !lease.is_zero();
        let Some(run) = self.run.as_mut().filter(|_| is_watched) else { return };
        let sends: Vec<ClientId> = run.clients().filter(|client| self.clients.contains_key(client)).collect();
        let clients: Vec<_> = clients.iter().filter(|(client, _)| sends.contains(client)).copied().collect();
        if run.gathers(plan) {
            self.progress.lacks(partition, &clients, now);
        } else if run.drops(plan) {
            self.progress.dropped(partition, &clients, now);
        } else {
            return;
        }
        let Some(client) = self.progress.stuck(lease + SENT_AGAIN) else { return };
        let learners = run.learners_of(client);
        let named = |learner| self.core.member(learner, now).map(|member| member.name);
        let names: Vec<String> = learners.into_iter().filter_map(named).collect();
        let why = format!(
            "the client of {} was granted its contribution to plan {plan}, and has sent none of it for {:.1} s",
            if names.is_empty() { "new weights".to_owned() } else { names.join(", ") },
            (lease + SENT_AGAIN).as_secs_f64()
        );
        tracing::warn!(%client, "given up: {why}");
        self.client_gone(client, &why, now, actions);
    }

    /// Reports whether the next version has a buffer.
    pub fn buffer(&mut self, ready: bool, now: Now, actions: &mut Vec<Action>) {
        let mut wanted = Vec::new();
        self.local_shard.has_said();
        self.core.set_buffer_ready(ready, now, &mut wanted);
        self.perform(wanted, now, actions);
    }

    /// These shards have been out of reach for long, so waiting requests may wait for them.
    pub fn are_away(&mut self, shards: Vec<ShardId>, now: Now, actions: &mut Vec<Action>) {
        if self.health.are_away(shards) {
            self.send_state_to_all(now, actions);
        }
    }
}
