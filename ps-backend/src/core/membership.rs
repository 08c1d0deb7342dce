//! Membership of the job: joining, leaving, and too few learners.

use libmodelio::vocabulary::ids::{Incarnation, LearnerId, Step, Version};
use libmodelio::vocabulary::members::{Attached, LeaveReason, LifeSign};
use libmodelio::vocabulary::shard_error::ShardError;

use super::incarnations::check_name;
use super::state::Activity;
use super::{Action, JobCore, Member, Now, Phase};

impl JobCore {
    /// A learner joins as `name`. In the middle of a step it takes part from the next one on.
    ///
    /// # Errors
    /// [`ShardError::NameTaken`], [`ShardError::TooManyLearners`]; [`ShardError::NotAllowed`] for an invalid name.
    pub fn join(
        &mut self,
        name: &str,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> Result<(LearnerId, Incarnation), ShardError> {
        check_name(name)?;
        if self.members.values().any(|member| member.name == name) {
            return Err(ShardError::NameTaken(name.to_owned()));
        }
        let most = self.controls.max_learners as usize;
        if self.members.len() >= most {
            return Err(ShardError::TooManyLearners(most));
        }
        let none_left = || ShardError::NotAllowed("the job has no number left for a learner".into());
        let (learner, incarnation) = self.incarnations.begin(name).ok_or_else(none_left)?;
        let in_mid_step = self.is_reducing()
            || self.formation.is_formed()
                && (!self.committed.is_empty()
                    || self.making.is_under_way()
                    || self.members.values().any(|member| matches!(member.phase, Phase::Open { .. })));
        let member = Member {
            name: name.to_owned(),
            incarnation,
            joined_at: if in_mid_step { self.version.next() } else { self.version },
            joined_with: self.version,
            last_seen: now,
            activity: Activity::since(now),
            attached: false,
            exited: None,
            step: Step(0),
            unpublished: false,
            published_in: Version(0),
            // The learner neither holds others up nor may run ahead of them.
            pace: self.slowest(),
            phase: Phase::Idle,
        };
        self.members.insert(learner, member);
        self.form(now);
        self.advance(now, actions);
        Ok((learner, incarnation))
    }

    /// The job is formed if all learners are there. Then its first step begins.
    pub(super) fn form(&mut self, now: Now) {
        if self.formation.form(self.members.len() >= self.controls.learners as usize) {
            self.grace.begins(now);
        }
    }

    /// The job was restored after blocks were lost. It waits for its learners until `soon`, if enough have come back by
    /// then. If not, or if the job is deterministic, it waits until `at`.
    pub fn goes_on_at(&mut self, soon: Now, at: Now) {
        let soon = if self.controls.deterministic { at } else { soon.min(at) };
        self.formation.goes_on_at(soon, at);
    }

    /// Those learners that have come back go on.
    pub(super) fn form_without_lost(&mut self, now: Now, actions: &mut Vec<Action>) {
        let least = self.controls.min_learners.max(1) as usize;
        let has_enough = self.members.len() >= least;
        if self.formation.goes_on(now, has_enough) && self.formation.form(true) {
            self.grace.begins(now);
            self.advance(now, actions);
        }
    }

    /// A learner leaves. Its committed contribution stays; its open one is dropped.
    ///
    /// # Errors
    /// [`ShardError::UnknownLearner`].
    pub fn leave(
        &mut self,
        learner: LearnerId,
        reason: LeaveReason,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> Result<(), ShardError> {
        self.depart(learner, reason, actions)?;
        self.after_departure(now, actions);
        Ok(())
    }

    pub(super) fn depart(
        &mut self,
        learner: LearnerId,
        reason: LeaveReason,
        actions: &mut Vec<Action>,
    ) -> Result<(), ShardError> {
        self.drop_open(learner, ShardError::UnknownLearner(learner), actions)?;
        // The plan may wait for the learner though nothing of its contribution is written.
        self.drop_provisional(learner, actions);
        self.waits.forget_numbers(learner);
        if let Some(member) = self.members.remove(&learner) {
            let is_member = |name: &str| self.members.values().any(|member| member.name == name);
            self.incarnations.end(member.name, is_member);
        }
        actions.push(Action::Left { learner, reason });
        Ok(())
    }

    /// The consequences of learners leaving.
    pub(super) fn after_departure(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.stop_if_too_few(actions);
        self.advance(now, actions);
        if self.members.is_empty() {
            // The next learners form a new job, which waits again until all are there. If the committed contributions
            // make a version by themselves, they need not wait for that.
            let flushes = self.committed.len() >= self.controls.min_learners as usize;
            let flushes = flushes && self.formation.is_formed() && !self.committed.is_empty();
            self.formation.all_have_left(flushes);
        }
    }

    /// Drops the open contribution of `learner`, if it has one.
    ///
    /// # Errors
    /// [`ShardError::UnknownLearner`].
    pub fn abort(
        &mut self,
        learner: LearnerId,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> Result<(), ShardError> {
        let why = ShardError::NotAllowed("the contribution was dropped".into());
        self.drop_open(learner, why, actions)?;
        self.advance(now, actions);
        Ok(())
    }

    fn drop_open(
        &mut self,
        learner: LearnerId,
        why: ShardError,
        actions: &mut Vec<Action>,
    ) -> Result<(), ShardError> {
        let member = self.members.get_mut(&learner).ok_or(ShardError::UnknownLearner(learner))?;
        if matches!(member.phase, Phase::Open { .. }) {
            member.phase = Phase::Idle;
            member.activity.takes_back();
            self.drop_provisional(learner, actions);
            self.drop_pending_commit(learner, why, actions);
        } else if let Some(taken) = self.committed.iter_mut().find(|c| c.contribution.learner == learner)
            && taken.undo.is_some()
        {
            // The commit is taken. But if it fails, the contribution must not be open again.
            taken.undo = Some(Phase::Idle);
        }
        Ok(())
    }

    /// A sign of life of `learner`.
    pub fn touch(&mut self, learner: LearnerId, sign: LifeSign, now: Now) {
        if let Some(member) = self.members.get_mut(&learner) {
            member.last_seen = now;
            match sign {
                LifeSign::Writes if matches!(member.phase, Phase::Open { .. }) => member.activity.writes(now),
                LifeSign::Writes => {}
                LifeSign::Works => member.activity.works(now),
                LifeSign::Process(attached) => {
                    // The first process that uses it has just begun.
                    if attached == Attached::Yes && !member.attached && member.exited.is_none() {
                        member.activity.writes(now);
                    }
                    member.attached = attached == Attached::Yes;
                    // A repeated report does not change the time of the exit.
                    let since = member.exited.unwrap_or(now);
                    member.exited = (attached == Attached::Exited).then_some(since);
                }
            }
        }
    }

    /// No sign of life was taken during this pause, which has just ended.
    pub fn forgive_silence(&mut self, pause: Now, now: Now) {
        for member in self.members.values_mut() {
            member.last_seen = member.last_seen.saturating_add(pause).min(now);
            member.activity.at = member.activity.at.saturating_add(pause).min(now);
        }
    }
}
