//! The coordinator's plans: the core's accumulating and reducing, done by clients that send and shards that add.
use std::collections::BTreeSet;
use std::sync::Arc;

use libmodelio::vocabulary::block_map::PartitionIndex;
use libmodelio::vocabulary::ids::{ClientId, LearnerId, PlanId};
use libmodelio::vocabulary::norm::Squares;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{Granted, Message, PlanSource, Refusal, Work};

use super::clients::given_up_at;
use super::senders::Sender;
use super::{Action, CoordinatorCore, REPEAT};
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
        let sender = self.senders.get(at)?;
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

    /// Whether the plan under way lacks blocks that are committed, and whose memory the shard has for as long as it
    /// needs it: those of this learner, or new weights.
    pub(super) fn needs(&self, plan: PlanId, learner: Option<LearnerId>) -> bool {
        let is_lent = |learner| self.core.unread().any(|(of, _)| of == learner);
        self.run.as_ref().is_some_and(|run| run.id == plan && run.stage == Stage::Gathering)
            && self.provisional_plan() != Some(plan)
            && !learner.is_some_and(is_lent)
    }

    /// A client does not send its granted contribution, or its new weights.
    pub(super) fn withheld(
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
    fn refused(
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
    fn torn(&mut self, now: Now, actions: &mut Vec<Action>) {
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
    pub(super) fn reclaim(
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
    pub(super) fn recall(&mut self, learner: LearnerId, now: Now, actions: &mut Vec<Action>) {
        let mut wanted = Vec::new();
        let is_read = self.core.recall(learner, ShardError::Interrupted, now, &mut wanted);
        self.taken_out(is_read, wanted, now, actions);
    }

    /// The client takes back these new weights, unless they count.
    pub(super) fn recall_assign(
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
    fn taken_out(&mut self, is_read: bool, wanted: Vec<core::Action>, now: Now, actions: &mut Vec<Action>) {
        if is_read {
            self.drop_work(|plan| plan.weights.is_none(), now, actions);
        }
        self.perform(wanted, now, actions);
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
        if makes_version && self.announces {
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

    /// All shards are ready. The plan counts from here on.
    fn conclude(&mut self, now: Now, actions: &mut Vec<Action>) {
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
    fn counts(&mut self) {
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
            for sender in &run.senders {
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

    fn begin_next(&mut self, now: Now, actions: &mut Vec<Action>) {
        match self.queue.take_first() {
            Some(plan) => self.begin(plan, now, actions),
            None => self.begin_waiting_weights(now, actions),
        }
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

    /// A client is lost, with all payload that it holds. Contributions of these learners are among it.
    pub(super) fn lose(
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

    /// The job fails: a partition contradicts the coordinator. It has lost its blocks, or belongs to another job.
    pub(super) fn fail(
        &mut self,
        partition: PartitionIndex,
        refusal: &Refusal,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let whose = self.shape.shard(partition);
        let why = Refusal::Shard(ShardError::Lost(format!(
            "{whose} does not have this job's blocks any more: {refusal}"
        )));
        self.health.fail(why.clone());
        self.run = None;
        self.queue.clear();
        for (client, asked) in self.tickets.take_all() {
            self.answer(client, asked, Message::Refused(why.clone()), actions);
        }
        self.send_state_to_all(now, actions);
    }
}
