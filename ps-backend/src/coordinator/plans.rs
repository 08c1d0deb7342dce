//! The coordinator's plans: the core's accumulating and reducing, done by clients that send and shards that add;
//! within, what shards answer, and what cannot go on.

mod answers;
mod setbacks;

use std::collections::BTreeSet;
use std::sync::Arc;

use libmodelio::vocabulary::block_map::PartitionIndex;
use libmodelio::vocabulary::ids::{ClientId, LearnerId, PlanId};
use libmodelio::vocabulary::norm::Squares;
use libmodelio::wire::{Granted, Message, PlanSource, Work};

use super::senders::Sender;
use super::{Action, CoordinatorCore, NOBODY, REPEAT};
use crate::core::{self, Now, Source};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The shards gather blocks, until all are ready.
    Gathering,
    /// The plan counts, and not all shards know yet.
    Concluding,
    /// The plan is void, and not all shards know yet.
    Dropping,
}

/// A plan under way.
#[derive(Debug)]
pub(super) struct Run {
    id: PlanId,
    plan: Arc<core::JobPlan>,
    senders: Vec<Sender>,
    start: Message,
    stage: Stage,
    /// The plan takes new weights that are still being written. The job's core does not know of such a plan.
    is_open: bool,
    /// The squares that shards have measured, added up, if the plan measures.
    squares: Option<Squares>,
    /// The shards that have not answered the stage's message.
    waiting: BTreeSet<PartitionIndex>,
    repeat_at: Now,
}

impl Run {
    pub(super) fn id(&self) -> PlanId {
        self.id
    }

    pub(super) fn clients(&self) -> impl Iterator<Item = ClientId> {
        self.senders.iter().map(|sender| sender.client)
    }

    /// The new weights that it publishes, if it does: the client, and its token for them.
    pub(super) fn new_weights(&self) -> Option<(ClientId, u64)> {
        self.senders.iter().find_map(|sender| match sender.payload {
            Granted::Weights(token) => Some((sender.client, token)),
            Granted::Contributions { .. } | Granted::OpenWeights(_) => None,
        })
    }

    /// The new weights that are still being written, if the plan takes such.
    pub(super) fn open_weights(&self) -> Option<&Source> {
        self.plan.weights.as_ref().filter(|_| self.is_open && self.stage == Stage::Gathering)
    }

    pub(super) fn waiting(&self) -> impl Iterator<Item = PartitionIndex> {
        self.waiting.iter().copied()
    }

    pub(super) fn repeat_at(&self) -> Now {
        self.repeat_at
    }

    /// Whether it is this plan, is sealed, and waits for payloads.
    pub(super) fn gathers(&self, plan: PlanId) -> bool {
        self.is_sealed(plan) && self.stage == Stage::Gathering
    }

    /// Whether it is this plan, was sealed, and is dropped.
    pub(super) fn drops(&self, plan: PlanId) -> bool {
        self.is_sealed(plan) && self.stage == Stage::Dropping
    }

    fn is_sealed(&self, plan: PlanId) -> bool {
        self.id == plan && !self.is_open && !self.plan.is_provisional()
    }

    /// The learners whose contributions a client sends for it.
    pub(super) fn learners_of(&self, client: ClientId) -> Vec<LearnerId> {
        let of = |sender: &&Sender| sender.client == client;
        self.senders.iter().filter(of).flat_map(|sender| sender.learners.iter().copied()).collect()
    }

    fn grant(&self, at: usize) -> Option<Action> {
        let sender = self.senders.get(at).filter(|sender| sender.client != NOBODY)?;
        let payload = sender.payload.clone();
        Some(Action::ToClient(
            sender.client,
            0,
            Message::Grant { plan: self.id, payload, counted: sender.counted },
        ))
    }

    fn grants(&self) -> impl Iterator<Item = Action> {
        (0..self.senders.len()).filter_map(|at| self.grant(at))
    }

    /// The message of the present stage to the shards.
    fn order(&self) -> (u64, Message) {
        match self.stage {
            Stage::Gathering => (self.id.0, self.start.clone()),
            Stage::Concluding => (self.id.0, Message::Conclude { plan: self.id }),
            Stage::Dropping => (self.id.0, Message::Drop { plan: self.id }),
        }
    }

    /// The start of the plan and the message of the present stage, for a shard that may have missed the start, or that
    /// has another coordinator's messages.
    fn orders(&self) -> impl Iterator<Item = (u64, Message)> {
        let start = (self.stage != Stage::Gathering).then(|| (self.id.0, self.start.clone()));
        start.into_iter().chain([self.order()])
    }
}

impl CoordinatorCore {
    /// Whether the plan under way lacks blocks that are committed, and whose memory the shard has for as long as it
    /// needs it: those of this learner, or new weights.
    pub(super) fn needs(&self, plan: PlanId, learner: Option<LearnerId>) -> bool {
        let is_lent = |learner| self.core.unread().any(|(of, _)| of == learner);
        self.run.as_ref().is_some_and(|run| run.id == plan && run.stage == Stage::Gathering)
            && self.provisional_plan() != Some(plan)
            && !learner.is_some_and(is_lent)
    }

    /// Begins a plan that the core wants.
    pub(super) fn begin(&mut self, plan: Arc<core::JobPlan>, now: Now, actions: &mut Vec<Action>) {
        if self.health.failed().is_some() {
            return;
        }
        let Some((senders, start)) = self.start_of(&plan, self.queue.next()) else { return };
        let id = self.queue.number();
        let waiting = self.shape.partitions().collect();
        let stage = Stage::Gathering;
        let squares = match &plan.work {
            Work::Measure { quantity, tensors, .. } => {
                Some(Squares::new(*quantity, tensors.tensors() as usize))
            }
            _ => None,
        };
        let makes_version = plan.work.makes_version();
        let is_open = senders.iter().any(|sender| matches!(sender.payload, Granted::OpenWeights(_)));
        let repeat_at = now;
        self.progress.begin(now);
        self.run = Some(Run { id, plan, senders, start, stage, is_open, squares, waiting, repeat_at });
        self.repeat(now, actions);
        if makes_version && self.states.announces_plans() {
            self.announce(id, actions);
        }
    }

    /// Tells the clients that send nothing for the plan under way that it begins. If the message is lost, they pull the
    /// version once it counts.
    fn announce(&self, plan: PlanId, actions: &mut Vec<Action>) {
        let sends = |client: ClientId| self.run.iter().flat_map(Run::clients).any(|of| of == client);
        let readers = self.clients.iter().filter(|(client, known)| known.connected && !sends(**client));
        actions.extend(readers.map(|(&client, _)| Action::ToClient(client, 0, Message::Begun { plan })));
    }

    /// Seals the provisional plan under way. Shards get the final plan, and clients are granted all of it.
    pub(super) fn seal(&mut self, plan: Arc<core::JobPlan>, now: Now, actions: &mut Vec<Action>) {
        // The provisional plan has not begun: it waits for the end of the plan before.
        if let Some(waits) = self.queue.find(core::JobPlan::is_provisional) {
            *waits = plan;
            return;
        }
        let Some(id) = self.provisional_plan() else {
            debug_assert!(false, "the plan that is sealed has not begun");
            return self.want(plan, now, actions);
        };
        self.seal_as(plan, id, now, actions);
    }

    /// The plan under way becomes this one, which has all that was sent for it.
    fn seal_as(&mut self, plan: Arc<core::JobPlan>, id: PlanId, now: Now, actions: &mut Vec<Action>) {
        if let Some((senders, mut start)) = self.start_of(&plan, id)
            && let Some(run) = &mut self.run
        {
            // New settings count from the next plan.
            if let (Message::Start(begun), Message::Start(sealed)) = (&run.start, &mut start) {
                sealed.ordered = begun.ordered;
                let same = |source: &mut PlanSource| {
                    let before = begun.sources.iter().find(|before| before.client == source.client);
                    source.check = before.map_or(source.check, |before| before.check);
                };
                sealed.sources.iter_mut().for_each(same);
            }
            (run.plan, run.senders, run.start, run.repeat_at) = (plan, senders, start, now);
            run.is_open = false;
            self.progress.begin(now);
        }
        self.repeat(now, actions);
    }

    /// The plan under way, if its last contribution is still being written.
    pub(super) fn provisional_plan(&self) -> Option<PlanId> {
        let is_it = |run: &&Run| run.plan.is_provisional() && run.stage == Stage::Gathering;
        self.run.as_ref().filter(is_it).map(Run::id)
    }

    /// Begins a plan, or queues it until the present one has ended. A plan of new weights that are still being written
    /// gives way, unless the new one publishes these.
    pub(super) fn want(&mut self, plan: Arc<core::JobPlan>, now: Now, actions: &mut Vec<Action>) {
        let Some(run) = &self.run else { return self.begin(plan, now, actions) };
        let (id, open) = (run.id, run.open_weights());
        let is_of = |open: &Source, source: &Source| {
            (source.client, source.name, source.ahead) == (open.client, open.name, Some(id))
        };
        if open.zip(plan.weights.as_ref()).is_some_and(|(open, source)| is_of(open, source)) {
            return self.seal_as(plan, id, now, actions);
        }
        let gives_way = open.is_some();
        self.queue.push(plan);
        if gives_way {
            self.drop_run(now, actions);
        }
    }

    /// Drops the running plan. Its results are void.
    pub(super) fn drop_run(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.wind_up(Stage::Dropping, now, actions);
    }

    fn wind_up(&mut self, stage: Stage, now: Now, actions: &mut Vec<Action>) {
        let Some(run) = &mut self.run else { return };
        run.stage = stage;
        run.waiting = self.shape.partitions().collect();
        // With a new version clients get the state, which says so, too.
        if stage == Stage::Dropping || !run.plan.work.makes_version() {
            for sender in run.senders.iter().filter(|sender| sender.client != NOBODY) {
                actions.push(Action::ToClient(sender.client, 0, Message::Over { plan: run.id }));
            }
        }
        run.repeat_at = now + REPEAT;
        let (request, message) = run.order();
        actions.extend(
            run.waiting.iter().map(|&partition| Action::ToPartition(partition, request, message.clone())),
        );
    }

    /// A shard cannot complete the plan, perhaps after another coordinator's messages. Another plan replaces it.
    fn begin_again(&mut self, now: Now, actions: &mut Vec<Action>) {
        let Some(run) = &self.run else { return };
        if !run.is_open {
            self.queue.push_first(Arc::clone(&run.plan));
        }
        self.drop_run(now, actions);
    }

    /// Repeats messages that have had no answer for a while.
    pub(super) fn repeat(&mut self, now: Now, actions: &mut Vec<Action>) {
        let Some(run) = self.run.as_mut().filter(|run| run.repeat_at <= now) else { return };
        run.repeat_at = now + REPEAT;
        for (request, message) in run.orders() {
            actions.extend(
                run.waiting.iter().map(|&partition| Action::ToPartition(partition, request, message.clone())),
            );
        }
        if run.stage == Stage::Gathering {
            actions.extend(run.grants());
        }
    }

    /// Repeats the grant to a client that has come back and may have missed it.
    pub(super) fn grant_again(&mut self, client: ClientId, actions: &mut Vec<Action>) {
        if let Some(run) = self.run.as_ref().filter(|run| run.stage == Stage::Gathering) {
            let mine = run.senders.iter().position(|sender| sender.client == client);
            actions.extend(mine.and_then(|at| run.grant(at)));
        }
    }

    /// Drops the core's present work. The core makes one sum or version at a time, and perhaps new weights besides a
    /// sum. The work is under way, or is queued.
    pub(super) fn drop_work(
        &mut self,
        is_it: impl Fn(&core::JobPlan) -> bool,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        if !self.queue.drop_first(is_it) {
            self.drop_run(now, actions);
        }
    }

    /// The number up to which plans are over.
    pub fn over(&self) -> PlanId {
        let gathers = self.run.as_ref().is_some_and(|run| run.stage == Stage::Gathering);
        PlanId(self.queue.next().0 - 1 - u64::from(gathers))
    }

    /// Whether the core publishes new weights of `client`.
    pub(super) fn assigns_from(&self, client: ClientId) -> bool {
        let is_it = |plan: &core::JobPlan| plan.weights.as_ref().is_some_and(|of| of.client == client);
        let runs = |run: &Run| run.stage == Stage::Gathering && !run.is_open && is_it(&run.plan);
        self.queue.has(is_it) || self.run.as_ref().is_some_and(runs)
    }
}
