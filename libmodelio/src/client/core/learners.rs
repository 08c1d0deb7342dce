//! The learners of this client: whether they are in the job, and how far each is with its step.
//!
//! A learner has one contribution open at a time. Each block of it is taken once ([`ClientCore::take`]), and is from then
//! on staged, or part of a plan. Its commit makes of it payload that is held, until the coordinator has answered for it.

use std::time::Duration;

use fixedbitset::FixedBitSet;

use super::{Action, ClientCore, Now, Token};
use crate::transport::{Attached, BlockSlot, LeaveReason, ShardError};
use crate::vocabulary::ids::{Incarnation, LearnerId, PlanId, Step, Version};
use crate::wire::{LearnerState, Message};

/// How long the coordinator is told beside what was answered here.
const BESIDE: Duration = Duration::from_secs(30);

/// Where a learner's last commit is, as far as this client can show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastCommit {
    /// It is not in a version, or that version is not here yet.
    Waits,
    /// Part of this version; 0 before the first one.
    In(Version),
}

/// A learner of this client.
#[derive(Debug)]
pub(super) struct Learner {
    /// As it has joined; none for one whose join was given up here.
    pub(super) name: Option<String>,
    /// As the coordinator last told it.
    pub(super) state: LearnerState,
    /// The number of the first state that names it.
    pub(super) since: u64,
    /// Whether a process uses it, where that is known.
    pub(super) attached: Option<Attached>,
    /// Its last step whose commit was answered with success, which the state may not show yet.
    pub(super) committed: Step,
    /// Its last step that is known to be taken.
    taken: Step,
    /// Its next step, and the request that has told. None where a commit was not answered with success: only the
    /// coordinator knows.
    next: (u64, Option<Step>),
    pub(super) open: Option<Open>,
}

/// The contribution that a learner has open.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) step: Step,
    /// Blocks of it that were taken.
    taken: FixedBitSet,
    /// What of it may be sent before its commit, once it has a whole block; afterwards that is held.
    pub(super) ahead: Option<Ahead>,
}

/// What is sent of a contribution while it is written.
#[derive(Debug)]
pub(super) struct Ahead {
    /// Blocks that lie where they can be sent from.
    pub(super) whole: FixedBitSet,
    /// The newest provisional plan for which blocks of it may have been sent.
    pub(super) sent_under: Option<PlanId>,
    /// Blocks of it that are nowhere but in a plan.
    pub(super) early: Option<Early>,
}

/// Blocks of a contribution that were reduced from where they are no more.
#[derive(Clone, Debug)]
pub(super) struct Early {
    /// For which plan; none if there were several, so that no plan has all of them.
    pub(super) plan: Option<PlanId>,
    pub(super) blocks: FixedBitSet,
}

impl Ahead {
    /// Nothing yet, of a model of so many blocks.
    pub(super) fn new(blocks: usize) -> Ahead {
        Ahead { whole: FixedBitSet::with_capacity(blocks), sent_under: None, early: None }
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
            taken: Step(0),
            next: (0, None),
            open: None,
        }
    }

    /// What is sent ahead of a contribution, if that is open.
    pub(super) fn ahead(&self, step: Step) -> Option<&Ahead> {
        self.open.as_ref().filter(|open| open.step == step)?.ahead.as_ref()
    }

    /// An answer tells which step is next; one that comes late tells nothing, which is false.
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
    /// Whether `learner` is one of this client's and in the job.
    pub fn has_learner(&self, learner: LearnerId) -> bool {
        self.learners.contains_key(&learner)
    }

    /// Whether it has asked to leave, and there is no answer yet.
    pub fn is_leaving(&self, learner: LearnerId) -> bool {
        self.requests
            .values()
            .any(|request| matches!(request.message, Message::Leave { learner: of, .. } if of == learner))
    }

    /// The name and the life of a learner that has joined here.
    pub fn identity(&self, learner: LearnerId) -> Option<(&str, Incarnation)> {
        let known = self.learners.get(&learner)?;
        Some((known.name.as_deref()?, known.state.incarnation))
    }

    /// Whether it writes a contribution.
    pub fn is_writing(&self, learner: LearnerId) -> bool {
        let open = self.learners.get(&learner).and_then(|known| known.open.as_ref());
        open.is_some_and(|open| !self.is_committing(learner, open.step))
    }

    /// The next step of `learner`, and whether the payload of the last one may still be needed. None when it is not
    /// known here: the outcome of its last commit is not, or it is not one of this client's.
    pub fn next_step(&self, learner: LearnerId) -> Option<(Step, bool)> {
        let step = self.learners.get(&learner)?.next.1?;
        let lent = self.held.range((learner, Step(0))..=(learner, Step(u64::MAX))).next().is_some();
        Some((step, lent))
    }

    /// Where the last commit of `learner` is.
    pub fn last_commit(&self, learner: LearnerId) -> LastCommit {
        let Some(Learner { state, committed, .. }) = self.learners.get(&learner) else {
            return LastCommit::In(Version(0));
        };
        match state.step < *committed || state.unpublished || state.published_in > self.version() {
            true => LastCommit::Waits,
            false => LastCommit::In(state.published_in),
        }
    }

    /// Opens the next contribution of `learner`. Where its step is known here, that is answered at once, and the
    /// coordinator is told beside.
    pub fn open(
        &mut self,
        token: Token,
        learner: LearnerId,
        deadline: Now,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        match self.open_known(learner, deadline, now, actions) {
            Some((step, staging_lent)) => {
                actions.push(Action::Answer(token, Ok(Message::Opened { step, staging_lent })));
            }
            None => self.request(token, Message::Open { learner }, deadline, now, actions),
        }
    }

    /// As [`Self::open`], if the step is known here: which one it is, and whether the staging memory is still lent.
    pub fn open_known(
        &mut self,
        learner: LearnerId,
        deadline: Now,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> Option<(Step, bool)> {
        let known = self.next_step(learner)?;
        self.opened(learner, known.0, actions);
        let message = Message::Open { learner };
        // In one process no message is lost, so none has to be answered.
        match self.in_process {
            true => self.notify(message, actions),
            false => self.request(Token::MAX, message, deadline.max(now + BESIDE), now, actions),
        }
        Some(known)
    }

    /// The contribution to `step` is open; it may have been before. That is the coordinator's word, and holds also if the
    /// step was taken: the coordinator has taken it back then, as one that nobody waits for any more.
    pub(super) fn opened(&mut self, learner: LearnerId, step: Step, actions: &mut Vec<Action>) {
        self.opens(learner, step, actions);
        if let Some(known) = self.learners.get_mut(&learner) {
            known.taken = Step(step.0.saturating_sub(1));
        }
    }

    /// From now on `learner` has that step open; what it has of another one is dropped.
    pub(super) fn opens(&mut self, learner: LearnerId, step: Step, actions: &mut Vec<Action>) {
        let open = self.learners.get(&learner).and_then(|known| known.open.as_ref());
        if open.is_some_and(|open| open.step != step) {
            self.drop_open(learner, actions);
        }
        if let Some(known) = self.learners.get_mut(&learner) {
            let taken = || FixedBitSet::with_capacity(self.blocks);
            known.open.get_or_insert_with(|| Open { step, taken: taken(), ahead: None });
        }
    }

    /// A block that the model has is offered. False if it was before.
    ///
    /// # Errors
    /// When the learner is gone, or in another life, or its contribution to that step is not open.
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

    /// A block that was taken is refused after all: it may be offered again.
    pub fn give_back(&mut self, slot: BlockSlot) {
        let known = self.learners.get_mut(&slot.learner);
        let open = known.and_then(|known| known.open.as_mut()).filter(|open| open.step == slot.step);
        if let Some(open) = open {
            open.taken.remove(slot.block.index());
        }
    }

    /// Whether `step` can be committed, or was and can be again.
    ///
    /// # Errors
    /// When it is neither open nor was taken, or the learner is gone.
    pub fn may_commit(&self, learner: LearnerId, step: Step) -> Result<(), ShardError> {
        let known = self.learners.get(&learner).ok_or(ShardError::UnknownLearner(learner))?;
        let is_open = known.open.as_ref().is_some_and(|open| open.step == step);
        if is_open || step != Step(0) && step <= known.taken {
            return Ok(());
        }
        Err(ShardError::StepOutOfOrder { got: step, expected: known.taken.next() })
    }

    /// Sign of life of these learners. `attached` says whether a process uses them, where that is known anew: the
    /// coordinator is told until it knows.
    pub fn touch(&mut self, learners: Vec<LearnerId>, attached: Option<Attached>, actions: &mut Vec<Action>) {
        if attached.is_some() {
            for learner in &learners {
                if let Some(known) = self.learners.get_mut(learner) {
                    known.attached = attached;
                }
            }
        }
        self.notify(Message::Touch { learners, attached }, actions);
    }

    /// An answer tells which step of `learner` is next. False if that is not so any more, or it is gone.
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

    /// What `learner` has open never counts.
    pub(super) fn drop_open(&mut self, learner: LearnerId, actions: &mut Vec<Action>) {
        self.drop_ahead(learner, actions);
        if let Some(known) = self.learners.get_mut(&learner) {
            known.open = None;
        }
    }

    /// What was sent ahead of what `learner` has open never counts: its payload is not needed, and nothing more is sent
    /// for the provisional plan that waits for it, or did when blocks of it were sent.
    pub(super) fn drop_ahead(&mut self, learner: LearnerId, actions: &mut Vec<Action>) {
        let waits = self.outgoing.take_if(|outgoing| outgoing.open.is_some_and(|(of, _)| of == learner));
        let waits = waits.map(|outgoing| outgoing.plan);
        let all = (learner, Step(0))..=(learner, Step(u64::MAX));
        let held = self.held.range(all).filter_map(|(_, held)| held.sent_under);
        let open = self.learners.get_mut(&learner).and_then(|known| known.open.as_mut());
        let ahead = open.and_then(|open| Some((open.step, open.ahead.take()?)));
        let sent = ahead.as_ref().and_then(|(_, ahead)| ahead.sent_under);
        self.given_up = self.given_up.into_iter().chain(waits).chain(held).chain(sent).max();
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
        // What it has committed stays: its payload is needed until the coordinator has answered for it, or, in one
        // process, until it is in a version.
        let contributions = self.state.contributions;
        for (_, held) in self.held.range_mut((learner, Step(0))..=(learner, Step(u64::MAX))) {
            held.left_at.get_or_insert(contributions);
        }
        self.release_left(actions);
        actions.push(Action::Left(learner, reason));
        self.answer_waits(now, actions);
    }
}
