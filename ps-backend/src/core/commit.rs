//! Requests that begin or end a contribution or publication, and blocks that are whole.

use libmodelio::vocabulary::ids::{LearnerId, Step};
use libmodelio::vocabulary::partly::{MAX_PIECES, PartlyWritten};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::weight::Weight;

use super::{
    Action, Committed, Contribution, JobCore, MAX_ASSIGNS, Now, Opening, PayloadPlace, Pending, PendingKind,
    Phase, Source, Ticket,
};

impl JobCore {
    /// Opens a contribution of `learner`, at its first write.
    ///
    /// # Errors
    /// When the learner is gone, or the job is stopped.
    pub fn open(&mut self, learner: LearnerId, now: Now) -> Result<Opening, ShardError> {
        let stopped = self.refuse_if_stopped();
        let staging_lent = self
            .committed
            .iter()
            .any(|c| c.contribution.learner == learner && c.place != PayloadPlace::Accumulated);
        let member = self.members.get_mut(&learner).ok_or(ShardError::UnknownLearner(learner))?;
        stopped?;
        member.is_used(now);
        if let Phase::Open { step, .. } = member.phase {
            return Ok(Opening { step, staging_lent });
        }
        member.activity.writes(now);
        let step = member.step.next();
        member.phase = Phase::Open { step, has_block: false };
        Ok(Opening { step, staging_lent })
    }

    /// Commits the contribution of `learner`. [`Action::Reply`] answers before `deadline`. A repeated commit is
    /// answered again and counts once. If the earlier request still waits, it gets an error.
    #[allow(clippy::too_many_arguments)]
    pub fn commit(
        &mut self,
        ticket: Ticket,
        step: Step,
        mut contribution: Contribution,
        deadline: Now,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let learner = contribution.learner;
        if let Some(member) = self.members.get_mut(&learner) {
            member.is_used(now);
            contribution.base.get_or_insert(member.joined_with);
            if step == member.step && step != Step(0) {
                return self.commit_again(ticket, &contribution, deadline, actions);
            }
        }
        if let Err(error) = self.may_commit(&contribution, step) {
            actions.push(Action::Reply(ticket, Err(error)));
            return;
        }
        // Its weight was not known when the plan began.
        if contribution.weight != Weight::ONE {
            self.drop_provisional(learner, actions);
        }
        let superseded = ShardError::NotAllowed("the same commit was sent again".into());
        self.drop_pending_commit(learner, superseded, actions);
        let kind = PendingKind::Commit { contribution };
        self.pending.push_back(Pending { ticket, deadline, kind });
        self.advance(now, actions);
    }

    fn may_commit(&self, contribution: &Contribution, step: Step) -> Result<(), ShardError> {
        let learner = contribution.learner;
        let member = self.members.get(&learner).ok_or(ShardError::UnknownLearner(learner))?;
        self.refuse_if_stopped()?;
        if !matches!(member.phase, Phase::Open { step: open, .. } if open == step) {
            return Err(ShardError::StepOutOfOrder { got: step, expected: member.step.next() });
        }
        self.refuse_contents(contribution.contents, contribution.weight)?;
        let Contribution { sent, tensors, .. } = contribution;
        if sent.len() != self.recipe.blocks() {
            return Err(ShardError::NotAllowed(
                "the commit names blocks that the model does not have".into(),
            ));
        }
        let reducers = [self.params().0, self.controls.reducer];
        if reducers.iter().any(|reducer| reducer.combine().replaces()) {
            let pieces = contribution.partly.as_ref().map(PartlyWritten::pieces);
            let all = pieces.and_then(|pieces| Some(pieces + self.pieces(Some(learner))?));
            if all.is_none_or(|all| all > MAX_PIECES) {
                return Err(ShardError::Scattered(MAX_PIECES));
            }
        }
        if let Some(base) = contribution.base.filter(|base| *base > self.version) {
            return Err(ShardError::NotAllowed(format!(
                "the commit says that its learner has version {base}, and the newest is {}",
                self.version
            )));
        }
        if tensors.len() != self.recipe.tensors() {
            return Err(ShardError::NotAllowed(
                "the commit names tensors that the model does not have".into(),
            ));
        }
        Ok(())
    }

    /// Commits the last taken step again.
    fn commit_again(
        &mut self,
        ticket: Ticket,
        contribution: &Contribution,
        deadline: Now,
        actions: &mut Vec<Action>,
    ) {
        let learner = contribution.learner;
        let Some(taken) = self.committed.iter_mut().find(|c| c.contribution.learner == learner) else {
            actions.push(Action::Reply(ticket, Ok(())));
            return;
        };
        let same = taken.contribution.sent == contribution.sent
            && taken.contribution.tensors == contribution.tensors
            && taken.contribution.partly == contribution.partly;
        if !same {
            let what = "the contribution was already taken, without what was written since";
            actions.push(Action::Reply(ticket, Err(ShardError::NotAllowed(what.into()))));
        } else if taken.contribution.steady || taken.place == PayloadPlace::Accumulated {
            actions.push(Action::Reply(ticket, Ok(())));
        } else if let Some((earlier, _)) = taken.ticket.replace((ticket, deadline)) {
            let what = "the same commit was sent again";
            actions.push(Action::Reply(earlier, Err(ShardError::NotAllowed(what.into()))));
        }
    }

    /// Refuses a commit of `learner` that is not taken yet. Its payload is about to be overwritten.
    pub fn withdraw_untaken(&mut self, learner: LearnerId, now: Now, actions: &mut Vec<Action>) {
        if self.drop_pending_commit(learner, ShardError::Interrupted, actions) {
            self.advance(now, actions);
        }
    }

    /// Nobody waits for the last commit of `learner` any more. If it is not taken yet, or if nothing of it was read,
    /// it fails and the contribution is open again.
    ///
    /// # Errors
    /// [`ShardError::UnknownLearner`].
    pub fn withdraw(
        &mut self,
        learner: LearnerId,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> Result<(), ShardError> {
        let member = self.members.get_mut(&learner).ok_or(ShardError::UnknownLearner(learner))?;
        member.last_seen = now;
        member.activity.writes(now);
        // Once the next contribution is open, the taken one is not the last.
        let is_last = matches!(member.phase, Phase::Idle);
        let dropped = self.drop_pending_commit(learner, ShardError::Interrupted, actions);
        let is_read = |c: &Committed| c.contribution.learner == learner && self.is_read_provisionally(c);
        if !dropped && is_last && self.committed.iter().any(is_read) && self.end_provisional() {
            actions.push(Action::Drop);
        }
        let waits =
            |c: &&mut Committed| c.contribution.learner == learner && c.place == PayloadPlace::ToAccumulate;
        if !dropped
            && is_last
            && let Some(committed) = self.committed.iter_mut().find(waits)
        {
            if let Some((ticket, _)) = committed.ticket.take() {
                actions.push(Action::Reply(ticket, Err(ShardError::Interrupted)));
            }
            self.take_back(learner, actions);
        }
        self.advance(now, actions);
        Ok(())
    }

    /// Nobody waits any more for the publication of the buffers that `is_it` matches. Publications that have not
    /// begun do not take place.
    pub fn withdraw_assign(&mut self, is_it: impl Fn(&Source) -> bool, now: Now, actions: &mut Vec<Action>) {
        let is_it =
            |pending: &Pending| matches!(&pending.kind, PendingKind::Assign { buffer, .. } if is_it(buffer));
        self.pending.retain(|pending| {
            let over = is_it(pending);
            if over {
                actions.push(Action::Reply(pending.ticket, Err(ShardError::Interrupted)));
            }
            !over
        });
        self.advance(now, actions);
    }

    /// Publishes new values for the whole model as the next version.
    pub fn assign(
        &mut self,
        ticket: Ticket,
        buffer: Source,
        deadline: Now,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        if let Err(error) = self.may_assign() {
            actions.push(Action::Reply(ticket, Err(error)));
            return;
        }
        let waits = |pending: &&Pending| matches!(pending.kind, PendingKind::Assign { .. });
        if self.pending.iter().filter(waits).count() >= MAX_ASSIGNS {
            let why = format!("{MAX_ASSIGNS} writes of new weights wait already, the limit");
            actions.push(Action::Reply(ticket, Err(ShardError::OutOfMemory(why))));
            return;
        }
        let kind = PendingKind::Assign { buffer };
        self.pending.push_back(Pending { ticket, deadline, kind });
        self.advance(now, actions);
    }

    /// The contribution that `learner` writes to `step` has a whole block. A plan may begin that takes its blocks as
    /// they come.
    pub fn is_whole(&mut self, learner: LearnerId, step: Step, now: Now, actions: &mut Vec<Action>) {
        let phase = self.members.get_mut(&learner).map(|member| &mut member.phase);
        if let Some(Phase::Open { step: open, has_block }) = phase
            && *open == step
            && !std::mem::replace(has_block, true)
        {
            self.advance(now, actions);
        }
    }
}
