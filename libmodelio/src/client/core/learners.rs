//! This client's learners: whether they are in the job, and how far each is with its step.
//!
//! A learner has one contribution open at a time. The client takes each of its blocks once ([`ClientCore::take`]),
//! and then stages it or makes it part of a plan. A commit turns the contribution into held payload, until the
//! coordinator has answered for it.

use fixedbitset::FixedBitSet;

use super::{Action, ClientCore, Now};
use crate::vocabulary::block_slot::BlockSlot;
use crate::vocabulary::ids::{LearnerId, PlanId, Step, Version};
use crate::vocabulary::members::{Attached, LeaveReason, LifeSign};
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{LearnerState, Message};

/// The state of a learner's last commit, as far as this client knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastCommit {
    /// The commit is not part of a version, or that version is not here yet.
    Waits,
    /// The commit is part of this version. 0 before the first commit.
    In(Version),
}

/// A learner of this client.
#[derive(Debug)]
pub(super) struct Learner {
    /// The name under which it joined. None if the client gave its join up.
    pub(super) name: Option<String>,
    /// The newest state of the learner that the coordinator has sent.
    pub(super) state: LearnerState,
    /// The number of the first state that includes the learner.
    pub(super) since: u64,
    /// Whether a process uses the learner, if that is known.
    pub(super) attached: Option<Attached>,
    /// The last step whose commit was answered with success. The coordinator's state may not show that yet.
    pub(super) committed: Step,
    /// The version that its program has last opened.
    pub(super) opened: Option<Version>,
    /// The last step that is known to be taken.
    taken: Step,
    /// The next step, and the number of the request whose answer named it. After a commit without success the step is
    /// `None`: only the coordinator knows it then.
    pub(super) next: (u64, Option<Step>),
    pub(super) open: Option<Open>,
    /// The newest provisional plan that staged blocks may be sent for, until that plan is sealed.
    sends_for: Option<PlanId>,
    /// An earlier provisional plan was dropped. Blocks that were sent for it may still be on their way.
    strays: bool,
}

/// A learner's open contribution.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) step: Step,
    /// The blocks that were taken.
    taken: FixedBitSet,
    /// The blocks that may be sent before the commit, once one is whole. The commit moves this to the held payload.
    pub(super) ahead: Option<Ahead>,
}

/// The part of a contribution that is sent while it is still written.
#[derive(Debug)]
pub(super) struct Ahead {
    /// Blocks that lie where they can be sent from.
    pub(super) whole: FixedBitSet,
    /// The newest provisional plan for which its blocks may have been sent.
    pub(super) sent_under: Option<PlanId>,
    /// The blocks that exist nowhere but in a plan.
    pub(super) only_in_plan: Option<OnlyInPlan>,
}

/// Blocks of a contribution that were reduced from memory which no longer holds them.
#[derive(Clone, Debug)]
pub(super) struct OnlyInPlan {
    /// The plan that includes them. None if several plans did, so that no plan has all of them.
    pub(super) plan: Option<PlanId>,
    pub(super) blocks: FixedBitSet,
}

impl Ahead {
    /// An empty set for a model of this many blocks.
    pub(super) fn new(blocks: usize) -> Ahead {
        Ahead { whole: FixedBitSet::with_capacity(blocks), sent_under: None, only_in_plan: None }
    }
}

impl Learner {
    pub(super) fn new(name: Option<String>, state: LearnerState, since: u64) -> Learner {
        Learner {
            name,
            state,
            since,
            attached: None,
            committed: Step(0),
            opened: None,
            taken: Step(0),
            next: (0, None),
            open: None,
            sends_for: None,
            strays: false,
        }
    }

    /// The blocks that may be sent before the commit, if the contribution to `step` is open.
    pub(super) fn ahead(&self, step: Step) -> Option<&Ahead> {
        self.open.as_ref().filter(|open| open.step == step)?.ahead.as_ref()
    }

    /// Blocks of its staged contribution may be sent for this provisional plan.
    pub(super) fn sends_for(&mut self, plan: PlanId) {
        self.strays |= self.sends_for.replace(plan).is_some_and(|before| before != plan);
    }

    /// A plan may go on to read its staged contribution, though its commit is answered.
    pub(super) fn is_still_read(&mut self) {
        self.strays = true;
    }

    /// This plan is sealed. Its shards read the sent blocks before the coordinator answers the commit, or another plan
    /// does.
    pub(super) fn sealed(&mut self, plan: PlanId) {
        self.sends_for.take_if(|of| *of == plan);
    }

    /// An answer names the next step. Returns false for an answer that comes too late to count.
    fn next_is(&mut self, request: u64, step: Option<Step>) -> bool {
        let is_news = request > self.next.0;
        if is_news {
            self.next = (request, step);
        }
        is_news
    }

    /// A commit was answered with success.
    fn has_committed(&mut self, step: Step) {
        self.committed = step;
        self.taken = self.taken.max(step);
        self.open.take_if(|open| open.step <= step);
    }
}

impl ClientCore {
    /// Whether staged blocks of `learner` may still be on their way for a plan that was dropped. The caller must not
    /// write that memory again. The second call returns false. In one process it is always false: whoever reads staged
    /// memory asks afterwards whether the plan is still under way.
    pub fn take_strays(&mut self, learner: LearnerId) -> bool {
        let Some(known) = self.learners.get_mut(&learner) else { return false };
        (known.sends_for.take().is_some() | std::mem::take(&mut known.strays)) && !self.way.is_in_place()
    }

    /// The program of `learner` has opened this version.
    pub fn has_opened(&mut self, learner: LearnerId, version: Version) {
        if let Some(known) = self.learners.get_mut(&learner) {
            known.opened = Some(version);
        }
    }

    /// The contribution to `step` is open, and may have been open before. The coordinator decides this. It holds even
    /// if the step was committed: the coordinator has taken back a commit that nobody waits for.
    pub(super) fn opened(&mut self, learner: LearnerId, step: Step, actions: &mut Vec<Action>) {
        self.opens(learner, step, actions);
        if let Some(known) = self.learners.get_mut(&learner) {
            known.taken = Step(step.0.saturating_sub(1));
        }
    }

    /// Makes `step` the open contribution of `learner`. The payload of another open step is dropped.
    pub(super) fn opens(&mut self, learner: LearnerId, step: Step, actions: &mut Vec<Action>) {
        let open = self.learners.get(&learner).and_then(|known| known.open.as_ref());
        if open.is_some_and(|open| open.step != step) {
            self.drop_open(learner, actions);
        }
        if let Some(known) = self.learners.get_mut(&learner) {
            let taken = || self.owners.no_blocks();
            known.open.get_or_insert_with(|| Open { step, taken: taken(), ahead: None });
        }
    }

    /// Takes a block that the model has. False if it was taken before.
    ///
    /// # Errors
    /// When the learner is gone or has another incarnation, or when its contribution to that step is not open.
    pub fn take(&mut self, slot: BlockSlot) -> Result<bool, ShardError> {
        let known = self.learners.get_mut(&slot.learner);
        let known = known.filter(|known| known.state.incarnation == slot.incarnation);
        let known = known.ok_or(ShardError::UnknownLearner(slot.learner))?;
        if slot.step <= known.taken {
            return Ok(false);
        }
        match &mut known.open {
            Some(open) if open.step == slot.step => Ok(!open.taken.put(slot.block.index())),
            _ => Err(ShardError::StepOutOfOrder { got: slot.step, expected: known.taken.next() }),
        }
    }

    /// Gives back a block that was refused after it was taken. It may be taken again.
    pub fn give_back(&mut self, slot: BlockSlot) {
        let known = self.learners.get_mut(&slot.learner);
        let open = known.and_then(|known| known.open.as_mut()).filter(|open| open.step == slot.step);
        if let Some(open) = open {
            open.taken.remove(slot.block.index());
        }
    }

    /// Checks that `step` can be committed, or committed again.
    ///
    /// # Errors
    /// When the step is neither open nor committed, or the learner is gone.
    pub fn may_commit(&self, learner: LearnerId, step: Step) -> Result<(), ShardError> {
        let known = self.learners.get(&learner).ok_or(ShardError::UnknownLearner(learner))?;
        let is_open = known.open.as_ref().is_some_and(|open| open.step == step);
        if is_open || step != Step(0) && step <= known.taken {
            return Ok(());
        }
        Err(ShardError::StepOutOfOrder { got: step, expected: known.taken.next() })
    }

    /// A sign of life of these learners. Whether a process uses them the client repeats until the coordinator knows.
    pub fn touch(&mut self, learners: Vec<LearnerId>, sign: LifeSign, actions: &mut Vec<Action>) {
        if let LifeSign::Process(attached) = sign {
            if attached == Attached::Exited {
                self.pull_times.begin_anew();
            }
            for learner in &learners {
                if let Some(known) = self.learners.get_mut(learner) {
                    known.attached = Some(attached);
                }
            }
        }
        self.notify(Message::Touch { learners, sign }, actions);
    }

    /// An answer names the next step of `learner`. False if the answer no longer counts, or the learner is gone.
    pub(super) fn next_is(&mut self, learner: LearnerId, request: u64, step: Option<Step>) -> bool {
        self.learners.get_mut(&learner).is_some_and(|known| known.next_is(request, step))
    }

    /// A commit was answered with success.
    pub(super) fn has_committed(&mut self, learner: LearnerId, step: Step, request: u64) {
        if let Some(known) = self.learners.get_mut(&learner) {
            known.has_committed(step);
            known.next_is(request, Some(step.next()));
        }
    }

    /// Drops the open contribution of `learner`: it will never count.
    pub(super) fn drop_open(&mut self, learner: LearnerId, actions: &mut Vec<Action>) {
        self.drop_ahead(learner, actions);
        if let Some(known) = self.learners.get_mut(&learner) {
            known.open = None;
        }
    }

    /// Drops the blocks that were sent before the commit. Their payload is not needed, and no more blocks go to the
    /// provisional plan they were sent for.
    pub(super) fn drop_ahead(&mut self, learner: LearnerId, actions: &mut Vec<Action>) {
        let Some(known) = self.learners.get_mut(&learner) else { return };
        // Commits that were answered with success stay.
        let from = known.open.as_ref().map_or(known.committed.next(), |open| open.step);
        let ahead = known.open.as_mut().and_then(|open| Some((open.step, open.ahead.take()?)));
        let waits = self.outgoing.take_if(|outgoing| outgoing.has_open_from(learner, from));
        let waits = waits.map(|outgoing| outgoing.plan);
        let held = self.held.range((learner, from)..=(learner, Step(u64::MAX)));
        let held = held.filter_map(|(_, held)| held.sent_under);
        let sent = ahead.as_ref().and_then(|(_, ahead)| ahead.sent_under);
        self.plans.give_up(waits.into_iter().chain(held).chain(sent).max());
        if let Some((step, _)) = ahead {
            actions.push(Action::Release(learner, step));
        }
    }

    /// A learner is no longer in the job.
    pub(super) fn learner_left(
        &mut self,
        learner: LearnerId,
        reason: LeaveReason,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        if !self.has_learner(learner) {
            return;
        }
        self.drop_open(learner, actions);
        self.learners.remove(&learner);
        self.pull_times.begin_anew();
        // Its committed payload stays until the coordinator has answered for it or, in one process, until it is part
        // of a version.
        let contributions = self.state.contributions;
        for (_, held) in self.held.range_mut((learner, Step(0))..=(learner, Step(u64::MAX))) {
            held.left_at.get_or_insert(contributions);
        }
        self.release_left(actions);
        actions.push(Action::Left(learner, reason));
        self.answer_waits(now, actions);
    }
}
