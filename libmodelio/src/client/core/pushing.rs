//! The blocks that the client sends for the plan under way.

use fixedbitset::FixedBitSet;

use super::learners::{Ahead, OnlyInPlan};
use super::{Action, ClientCore, Now, REPEAT_AFTER};
use crate::vocabulary::block_map::PartitionIndex;
use crate::vocabulary::coding::Coding;
use crate::vocabulary::ids::{BlockId, LearnerId, PlanId, Step};
use crate::wire::{Granted, MAX_NUMBER, Message};

/// So many blocks of a contribution that is still written are sent together, if they come fast. Each wake-up of
/// connections costs CPU time, and the commit wakes them for the rest.
const AHEAD_BLOCKS: usize = 4;

/// A block is sent at once if connections have not been woken for so long.
const AHEAD_PAUSE: Now = Now::from_millis(1);

/// The plan under way, and what was sent for it.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) plan: PlanId,
    pub(super) payload: Granted,
    pub(super) blocks: FixedBitSet,
    pub(super) partitions: Vec<Sending>,
    /// For a provisional plan, those of this client's contributions that were still being written when it was granted.
    /// No partition is done before the plan is sealed.
    pub(super) open: Option<Vec<(LearnerId, Step)>>,
    /// Blocks that were sent, perhaps in vain.
    pub(super) sent: FixedBitSet,
    /// The form in which blocks cross a network by TCP. `None`: in full. A new setting counts from the next plan.
    pub(super) coding: Option<Coding>,
}

impl Outgoing {
    pub(super) fn is_provisional(&self) -> bool {
        self.open.is_some()
    }

    /// Whether the plan is provisional and has, or will have, this contribution, which was open when it was granted.
    pub(super) fn has_open(&self, key: (LearnerId, Step)) -> bool {
        self.open.as_ref().is_some_and(|open| open.contains(&key))
    }

    /// Whether it has no other contribution of this client's that was open.
    fn has_open_alone(&self, key: (LearnerId, Step)) -> bool {
        self.open.as_deref() == Some(&[key])
    }

    /// Whether a contribution of the learner to this step or a later one was open.
    pub(super) fn has_open_from(&self, learner: LearnerId, step: Step) -> bool {
        self.open.as_ref().is_some_and(|open| open.iter().any(|key| key.0 == learner && key.1 >= step))
    }

    pub(super) fn contributions(&self) -> &[(LearnerId, Step)] {
        match &self.payload {
            Granted::Contributions { of, .. } => of,
            Granted::Weights(_) | Granted::OpenWeights(_) => &[],
        }
    }

    /// These blocks may be sent from now on, too.
    fn add(&mut self, blocks: &FixedBitSet, owned: &[FixedBitSet]) {
        self.blocks.union_with(blocks);
        for (sending, owned) in self.partitions.iter_mut().zip(owned) {
            let mut more = blocks & owned;
            more.difference_with(&self.sent);
            sending.todo.union_with(&more);
            (sending.at, sending.round) = (0, true);
        }
    }
}

/// What the client does with a block that a learner has just written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// Reduce it for this plan, which has no other contribution that is still written. It counts as sent:
    /// [`ClientCore::sent_own`] or [`ClientCore::not_sent`] must follow.
    Send(PlanId),
    /// It is the contribution's first whole block. Tell the coordinator, which may begin a plan, and ask again.
    Announce,
    /// Stage it, and offer it then.
    Stage,
}

/// A block to send to a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Push {
    /// The plan.
    pub plan: PlanId,
    /// The block, in the model.
    pub block: BlockId,
    /// Whether the plan is still provisional.
    pub ahead: bool,
    /// The block was sent before, perhaps in vain.
    pub again: bool,
}

/// A block that its learner has just staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offered {
    /// No block of the contribution was offered before.
    pub is_first: bool,
    /// This and earlier blocks may be sent to this shard now.
    pub wakes: Option<PartitionIndex>,
}

#[derive(Debug)]
pub(super) struct Sending {
    /// Blocks that must be sent.
    pub(super) todo: FixedBitSet,
    /// Where to begin. The search goes round the end once.
    pub(super) at: usize,
    pub(super) round: bool,
    /// The blocks that were offered since the connections were last woken for some.
    gathered: usize,
    /// When that was.
    woken: Now,
    /// There is something to send.
    pub(super) any: bool,
    /// The shard has all of it.
    pub(super) done: bool,
    /// When a block or a question was last sent.
    pub(super) moved: Now,
    /// A block was lost, or the push does not progress.
    pub(super) struggles: bool,
}

impl Sending {
    /// One more block may be sent. Whether the connections are to be woken for it.
    pub(super) fn wakes(&mut self, now: Now) -> bool {
        self.gathered += 1;
        let wakes = self.gathered == AHEAD_BLOCKS || now >= self.woken + AHEAD_PAUSE;
        if wakes {
            (self.gathered, self.woken) = (0, now);
        }
        wakes
    }
}

/// How contributions reach their shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendMode {
    /// Blocks are sent as soon as they are whole.
    Ahead,
    /// None of their blocks goes before the commit, which takes them along.
    WithCommits,
    /// The shard is in this process. It reads contributions where they lie until they are part of a version, even after
    /// their commits are answered.
    InPlace,
}

/// How this client's contributions reach their shards.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) kind: SendMode,
    /// The blocks of tensors whose values are averaged.
    averaged: FixedBitSet,
}

impl Delivery {
    pub(super) fn new() -> Delivery {
        Delivery { kind: SendMode::Ahead, averaged: FixedBitSet::new() }
    }

    pub(super) fn is_in_place(&self) -> bool {
        self.kind == SendMode::InPlace
    }
}

impl ClientCore {
    pub(super) fn granted(
        &mut self,
        plan: PlanId,
        payload: Granted,
        counted: PlanId,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        if plan.0 > MAX_NUMBER {
            return;
        }
        let known =
            self.outgoing.as_ref().map_or(self.plans.over(), |outgoing| outgoing.plan.max(self.plans.over()));
        if plan <= known {
            let waits = |outgoing: &Outgoing| outgoing.plan == plan && outgoing.is_provisional();
            return match self.outgoing.as_ref().is_some_and(waits) {
                true if !payload.is_provisional() => self.sealed(plan, payload, now, actions),
                true => {}
                false => self.recheck(plan, now, actions),
            };
        }
        // The coordinator does not know yet that the contribution was dropped.
        if payload.is_provisional() && self.plans.given_up().is_some_and(|given_up| given_up >= plan) {
            return;
        }
        // The coordinator runs one plan at a time.
        self.plan_over(PlanId(plan.0 - 1), actions);
        let open = match &payload {
            Granted::Contributions { of, open: Some(open), .. } => {
                Some(of.iter().filter(|(of, _)| open.contains(of)).copied().collect::<Vec<_>>())
            }
            Granted::OpenWeights(_) => Some(Vec::new()),
            _ => None,
        };
        let blocks = match self.granted_blocks(plan, &payload, open.as_deref()) {
            Ok(blocks) => blocks,
            Err(learner) => return self.notify(Message::SourceGone { plan, learner }, actions),
        };
        let adds_up = matches!(payload, Granted::Contributions { replaces: false, .. });
        let coding = self.state.controls.wire.filter(|_| adds_up && !self.way.is_in_place());
        if !self.way.is_in_place() {
            actions.push(Action::Begins { plan, counted });
        }
        // In a deterministic job all clients send in the order of addition: a client that is ahead would only wait.
        let first = if self.state.controls.deterministic { 0 } else { self.owners.first() };
        let partitions = self.owners.owned().iter().map(|owned| {
            let todo = owned & &blocks;
            let any = open.is_none() && !todo.is_clear();
            Sending {
                any,
                done: !any,
                todo,
                at: first,
                round: false,
                gathered: 0,
                woken: now,
                moved: now,
                struggles: false,
            }
        });
        let (partitions, sent) = (partitions.collect(), self.owners.no_blocks());
        let outgoing = Outgoing { plan, payload, blocks, partitions, open, sent, coding };
        if outgoing.is_provisional() {
            for &key in outgoing.contributions() {
                self.sends_ahead(key, plan);
            }
        }
        self.outgoing = Some(outgoing);
        actions.extend(self.owners.partitions().map(Action::Wake));
        self.start_pull(now, actions);
    }

    /// Blocks of the provisional plan under way may be ready to be sent that were not before.
    fn add_ready(&mut self, actions: &mut Vec<Action>) {
        let Some(mut outgoing) = self.outgoing.take() else { return };
        let all_committed = outgoing.open.as_ref().is_some_and(Vec::is_empty);
        let ready = match all_committed {
            true => self.all_held(outgoing.contributions()),
            false => self.ready(outgoing.contributions()),
        };
        outgoing.add(&ready, self.owners.owned());
        let some_left = |(_, sending): &(usize, &Sending)| !sending.todo.is_clear();
        let left = outgoing.partitions.iter().enumerate().filter(some_left);
        actions.extend(left.map(|(partition, _)| Action::Wake(partition)));
        self.outgoing = Some(outgoing);
    }

    /// Blocks of a contribution may be sent for a provisional plan from now on.
    fn sends_ahead(&mut self, (learner, step): (LearnerId, Step), plan: PlanId) {
        let Some(known) = self.learners.get_mut(&learner) else { return };
        let open = known.open.as_mut().filter(|open| open.step == step);
        let has_some = match (self.held.get_mut(&(learner, step)), open.and_then(|open| open.ahead.as_mut()))
        {
            (Some(held), _) => {
                held.sent_under = Some(plan);
                !held.blocks.is_clear()
            }
            (None, Some(ahead)) => {
                ahead.sent_under = Some(plan);
                !ahead.whole.is_clear()
            }
            (None, None) => false,
        };
        if has_some {
            known.sends_for(plan);
        }
    }

    /// A contribution is committed while its plan is still provisional. Blocks of others may have waited for it, and
    /// its own may be sent.
    pub(super) fn commits_ahead(&mut self, key: (LearnerId, Step), actions: &mut Vec<Action>) {
        let waits = |outgoing: &Outgoing| {
            // Without another contribution in it, the plan of one process is about to be sealed.
            outgoing.has_open(key) && !(self.way.is_in_place() && outgoing.has_open_alone(key))
        };
        if let Some(plan) =
            self.outgoing.as_ref().filter(|outgoing| waits(outgoing)).map(|outgoing| outgoing.plan)
        {
            self.sends_ahead(key, plan);
            self.add_ready(actions);
        }
    }

    /// The blocks that may be sent while the plan is provisional: those that each contribution has as a whole which is
    /// not committed yet, and of which one contribution at least has a whole. (Before the plan is sealed, nobody knows
    /// what is written of a block that is whole nowhere.) Of averaged tensors, each one must have it as a whole: nobody
    /// knows before who brings no values.
    fn ready(&self, of: &[(LearnerId, Step)]) -> FixedBitSet {
        let mut some = self.owners.no_blocks();
        let mut all = self.owners.no_blocks();
        all.insert_range(..);
        for key in of {
            match (self.held.get(key), self.learners.get(&key.0).and_then(|known| known.ahead(key.1))) {
                (Some(held), _) => {
                    some.union_with(&held.whole);
                    all.difference_with(&held.lacks(&self.way.averaged));
                }
                (None, Some(ahead)) => {
                    some.union_with(&ahead.whole);
                    all.intersect_with(&ahead.whole);
                }
                (None, None) => all.clear(),
            }
        }
        some.intersect_with(&all);
        some
    }

    /// The blocks of tensors whose values are averaged, by the newest settings.
    pub fn set_averaged(&mut self, blocks: FixedBitSet) {
        self.way.averaged = blocks;
    }

    /// Whether values of such a tensor are in the block.
    pub fn averages(&self, block: BlockId) -> bool {
        self.way.averaged.contains(block.index())
    }

    /// The blocks of committed contributions that may be sent while contributions of other clients are open. Those that
    /// are written in part are among them, except of averaged tensors.
    fn all_held(&self, of: &[(LearnerId, Step)]) -> FixedBitSet {
        let mut all = self.owners.no_blocks();
        let held = || of.iter().filter_map(|key| self.held.get(key));
        held().for_each(|held| all.union_with(&held.blocks));
        held().for_each(|held| all.difference_with(&held.lacks(&self.way.averaged)));
        all
    }

    /// Like [`Self::ready`], for one block.
    fn is_ready(&self, of: &[(LearnerId, Step)], block: BlockId) -> bool {
        let mut some = false;
        for key in of {
            some |= match (self.held.get(key), self.learners.get(&key.0).and_then(|known| known.ahead(key.1)))
            {
                (Some(held), _) if self.averages(block) && !held.whole.contains(block.index()) => {
                    return false;
                }
                (Some(held), _) => held.whole.contains(block.index()),
                (None, Some(ahead)) if ahead.whole.contains(block.index()) => true,
                (None, _) => return false,
            };
        }
        some
    }

    /// The blocks to send, as far as they may be sent while these contributions are `open`.
    ///
    /// # Errors
    /// The learner whose payload is gone. `None` for new weights.
    fn granted_blocks(
        &mut self,
        plan: PlanId,
        payload: &Granted,
        open: Option<&[(LearnerId, Step)]>,
    ) -> Result<FixedBitSet, Option<LearnerId>> {
        let mut blocks = self.owners.no_blocks();
        let open = open.unwrap_or_default();
        match payload {
            Granted::Contributions { of, .. } => {
                for key in of.iter().filter(|key| !open.contains(key)) {
                    let held = self.held.get(key).filter(|held| !held.is_taken_back).ok_or(Some(key.0))?;
                    if held.only_in_plan.as_ref().is_some_and(|only_in_plan| only_in_plan.plan != Some(plan))
                    {
                        return Err(Some(key.0));
                    }
                    blocks.union_with(&held.blocks);
                }
                if !open.is_empty() {
                    blocks = self.ready(of);
                }
            }
            Granted::Weights(token) => blocks.union_with(self.weights.published(*token).ok_or(None)?),
            Granted::OpenWeights(token) => blocks = self.take_open_weights(*token, plan).ok_or(None)?,
        }
        Ok(blocks)
    }

    /// The blocks of a contribution that can be sent: the whole ones while it is written, all of them afterwards.
    fn whole(&self, (learner, step): (LearnerId, Step)) -> Option<&FixedBitSet> {
        let ahead = self.learners.get(&learner).and_then(|known| known.ahead(step));
        self.held.get(&(learner, step)).map(|held| &held.blocks).or(ahead.map(|ahead| &ahead.whole))
    }

    /// A block of the contribution that `learner` writes is whole. It lies where it can be sent from until
    /// [`Action::Release`]. Returns `None`, and does nothing, if the learner is gone, the step is not open, or its
    /// commit was sent. Only the first block allocates memory.
    pub fn offered(
        &mut self,
        learner: LearnerId,
        step: Step,
        block: BlockId,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> Option<Offered> {
        if self.held.contains_key(&(learner, step)) {
            return None;
        }
        let known = self.learners.get_mut(&learner)?;
        let open = known.open.as_mut().filter(|open| open.step == step)?;
        // In one process, a block that a program has written was announced before.
        let mut announces = !self.way.is_in_place() || open.ahead.is_none();
        let ahead = open.ahead.get_or_insert_with(|| Ahead::new(self.owners.blocks()));
        let is_first = ahead.whole.is_clear();
        ahead.whole.insert(block.index());
        let mut wakes = None;
        let is_part = |outgoing: &Outgoing| outgoing.has_open((learner, step));
        if let Some(plan) = self.outgoing.as_ref().filter(|of| is_part(of)).map(|of| of.plan) {
            // In one process, the coordinator wants to know who has a block.
            announces &= self.way.is_in_place();
            ahead.sent_under = Some(plan);
            known.sends_for(plan);
            let is_ready = |of: &Outgoing| self.is_ready(of.contributions(), block);
            let is_ready = self.outgoing.as_ref().is_some_and(is_ready);
            let partition = self.owners.of(block);
            if let Some(outgoing) = self.outgoing.as_mut().filter(|_| is_ready)
                && let Some(partition) = partition.filter(|_| !outgoing.sent.contains(block.index()))
            {
                outgoing.blocks.insert(block.index());
                let sending = &mut outgoing.partitions[partition];
                sending.todo.insert(block.index());
                (sending.at, sending.round) = (sending.at.min(block.index()), false);
                wakes = sending.wakes(now).then_some(partition);
            }
        }
        // A contribution of one block is about to be committed.
        if announces && is_first && self.owners.blocks() > 1 && self.way.kind != SendMode::WithCommits {
            self.notify(Message::WholeBlock { learner, step }, actions);
        }
        Some(Offered { is_first, wakes })
    }

    /// Whether a block that was taken can be reduced at once, from where it is.
    pub fn next_own(&mut self, learner: LearnerId, step: Step, block: BlockId) -> Own {
        // The plan under way may be for a contribution to the same step that was dropped, and end with it.
        if self.is_aborting(learner) {
            return Own::Stage;
        }
        let is_held = self.held.contains_key(&(learner, step));
        let open = self.learners.get_mut(&learner).and_then(|known| known.open.as_mut());
        let Some(open) = open.filter(|open| open.step == step && !is_held) else { return Own::Stage };
        let is_first = open.ahead.is_none();
        let ahead = open.ahead.get_or_insert_with(|| Ahead::new(self.owners.blocks()));
        match self.outgoing.as_mut().filter(|outgoing| outgoing.has_open_alone((learner, step))) {
            Some(outgoing) => {
                if outgoing.sent.put(block.index()) {
                    return Own::Stage;
                }
                outgoing.blocks.insert(block.index());
                ahead.sent_under = Some(outgoing.plan);
                Own::Send(outgoing.plan)
            }
            None if is_first => Own::Announce,
            None => Own::Stage,
        }
    }

    /// The block is part of the plan, and exists nowhere else. False if its learner, and with it the contribution, is
    /// gone.
    pub fn sent_own(&mut self, learner: LearnerId, step: Step, plan: PlanId, block: BlockId) -> bool {
        let Some(known) = self.learners.get_mut(&learner) else { return false };
        if let Some(open) = known.open.as_mut().filter(|open| open.step == step) {
            let ahead = open.ahead.get_or_insert_with(|| Ahead::new(self.owners.blocks()));
            let new = || OnlyInPlan { plan: Some(plan), blocks: self.owners.no_blocks() };
            let only_in_plan = ahead.only_in_plan.get_or_insert_with(new);
            only_in_plan.plan = only_in_plan.plan.filter(|known| *known == plan);
            only_in_plan.blocks.insert(block.index());
        }
        true
    }

    /// A block that was taken for sending was not sent.
    pub fn not_sent(&mut self, plan: PlanId, block: BlockId) {
        let Some(outgoing) = self.outgoing.as_mut().filter(|outgoing| outgoing.plan == plan) else { return };
        outgoing.sent.set(block.index(), false);
        // A block that lies nowhere else is staged now, and then offered.
        let lies_there = |of: &Outgoing| !of.is_provisional() || self.is_ready(of.contributions(), block);
        let lies_there = self.outgoing.as_ref().is_some_and(lies_there);
        if let Some(outgoing) = self.outgoing.as_mut().filter(|_| lies_there)
            && let Some(partition) = self.owners.of(block)
        {
            let sending = &mut outgoing.partitions[partition];
            sending.todo.insert(block.index());
            (sending.at, sending.round) = (sending.at.min(block.index()), false);
        }
    }

    /// The number of blocks left to send to a shard.
    pub fn left_to_push(&self, partition: PartitionIndex) -> usize {
        self.outgoing.as_ref().map_or(0, |outgoing| outgoing.partitions[partition].todo.count_ones(..))
    }

    /// The provisional plan under way is sealed: its contributions are complete.
    fn sealed(&mut self, plan: PlanId, payload: Granted, now: Now, actions: &mut Vec<Action>) {
        let blocks = match self.granted_blocks(plan, &payload, None) {
            Ok(blocks) => blocks,
            Err(learner) => return self.notify(Message::SourceGone { plan, learner }, actions),
        };
        let Some(outgoing) = &mut self.outgoing else { return };
        for (learner, _) in outgoing.contributions() {
            self.learners.get_mut(learner).into_iter().for_each(|known| known.sealed(plan));
        }
        for (partition, (owned, sending)) in
            self.owners.owned().iter().zip(&mut outgoing.partitions).enumerate()
        {
            let mine = owned & &blocks;
            (sending.any, sending.done) = (!mine.is_clear(), mine.is_clear());
            sending.todo = mine;
            sending.todo.difference_with(&outgoing.sent);
            (sending.round, sending.moved) = (false, now);
            if sending.struggles && sending.any {
                actions.push(Action::ToShard(partition, Message::Probe { plan }));
            }
            actions.push(Action::Wake(partition));
        }
        (outgoing.payload, outgoing.blocks, outgoing.open) = (payload, blocks, None);
        self.start_pull(now, actions);
    }

    /// The coordinator still waits for the plan under way. A shard that had all of it may have begun it again.
    fn recheck(&mut self, plan: PlanId, now: Now, actions: &mut Vec<Action>) {
        let Some(outgoing) = self.outgoing.as_mut().filter(|outgoing| outgoing.plan == plan) else { return };
        for (partition, sending) in outgoing.partitions.iter_mut().enumerate() {
            if sending.any && sending.done && sending.moved + REPEAT_AFTER <= now {
                sending.moved = now;
                actions.push(Action::ToShard(partition, Message::Probe { plan }));
            }
        }
    }

    pub(super) fn plan_over(&mut self, plan: PlanId, actions: &mut Vec<Action>) {
        if plan.0 > MAX_NUMBER {
            return;
        }
        self.plans.end(plan);
        if self.outgoing.take_if(|outgoing| outgoing.plan <= plan).is_some() {
            self.release_weights(actions);
        }
        self.release_left(actions);
    }

    /// Whether the contribution to `step` holds `block`. True for all blocks of new weights.
    pub fn holds(&self, learner: LearnerId, step: Step, block: BlockId) -> bool {
        self.whole((learner, step)).is_some_and(|whole| whole.contains(block.index()))
    }

    /// The next block to send to a shard. It counts as sent: call [`Self::shard_down`] if it may not have been.
    pub fn next_push(&mut self, partition: PartitionIndex, now: Now) -> Option<Push> {
        let outgoing = self.outgoing.as_mut()?;
        let sending = &mut outgoing.partitions[partition];
        // The search continues at `at`, so that a whole round costs one pass over the set.
        let block = loop {
            if let Some(block) = (sending.at..sending.todo.len()).find(|&block| sending.todo.contains(block))
            {
                break block;
            }
            sending.at = sending.todo.len();
            if std::mem::replace(&mut sending.round, true) {
                return None;
            }
            sending.at = 0;
        };
        sending.todo.set(block, false);
        let again = outgoing.sent.put(block);
        sending.at = block + 1;
        sending.moved = now;
        let (plan, ahead) = (outgoing.plan, outgoing.is_provisional());
        Some(Push { plan, block: BlockId(block as u32), ahead, again })
    }

    /// A contribution of `learner` holds NaN or Inf, and the job refuses those. The coordinator must know.
    pub fn non_finite(
        &mut self,
        plan: PlanId,
        learner: LearnerId,
        block: BlockId,
        actions: &mut Vec<Action>,
    ) {
        self.notify(Message::NonFiniteContribution { plan, learner, block }, actions);
    }
}
