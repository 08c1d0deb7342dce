//! Work that has begun and cannot be finished, and the work that begins in its place.
//!
//! A commit that is not steady can be taken out again until it is accumulated or part of a version, and with it the
//! plan or the accumulation that has it. The other contributions go back to where they can be read again. The earlier
//! contents of the accumulator stay.

use libmodelio::vocabulary::ids::{LearnerId, Step};
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::shard_error::ShardError;

use super::{Action, Committed, JobCore, Member, Now, PayloadPlace, Phase};

impl JobCore {
    /// The contributions of a plan that makes no version could not be added up, and nothing was added. The named
    /// commits fail with the error beside them, and are open again. The others are accumulated anew.
    pub fn accumulate_failed(
        &mut self,
        failed: Vec<(LearnerId, ShardError)>,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        self.stop_accumulation();
        self.fail(failed, actions);
        self.release_params();
        self.advance(now, actions);
    }

    /// The running plan found NaN or Inf in contributions that were not checked before. Their commits fail with the
    /// error beside them, and are taken back. The version is not made.
    pub fn refused(&mut self, bad: Vec<(LearnerId, ShardError)>, now: Now, actions: &mut Vec<Action>) {
        self.stop_plan();
        self.fail(bad, actions);
        self.release_params();
        self.advance(now, actions);
    }

    /// The payload of these learners' commits is lost. Commits fail that are neither steady (their payload is the
    /// shard's own) nor accumulated. Learners that are still in the job leave it with [`LeaveReason::Died`].
    ///
    /// Returns whether the plan or the accumulation under way needed one of the payloads. Then that work is void and
    /// must not be reported as done. `actions` may begin other work.
    pub fn lost(&mut self, learners: &[LearnerId], now: Now, actions: &mut Vec<Action>) -> bool {
        let is_gone = |committed: &Committed| {
            !committed.contribution.steady
                && committed.place != PayloadPlace::Accumulated
                && learners.contains(&committed.contribution.learner)
        };
        let gone: Vec<_> = self.committed.extract_if(.., |committed| is_gone(committed)).collect();
        let mut void = false;
        if gone.iter().any(|committed| committed.place == PayloadPlace::Accumulating) {
            self.stop_accumulation();
            void = true;
        }
        if gone.iter().any(|committed| self.reads(committed)) {
            self.stop_plan();
            void = true;
        }
        for committed in gone {
            let learner = committed.contribution.learner;
            if let Some((ticket, _)) = committed.ticket {
                actions.push(Action::Reply(ticket, Err(ShardError::UnknownLearner(learner))));
            }
            self.drop_provisional(learner, actions);
        }
        self.release_params();
        for &learner in learners {
            // A learner that had left before only has to be forgotten.
            let _ = self.depart(learner, LeaveReason::Died, actions);
        }
        self.after_departure(now, actions);
        void
    }

    /// The program of `learner` has its lent memory back. If the last commit is accumulated, it is answered now.
    /// Otherwise it fails with `why` and is open again.
    ///
    /// Returns whether the plan or the accumulation under way reads that memory. Then that work is void, as with
    /// [`Self::lost`].
    pub fn reclaim(
        &mut self,
        learner: LearnerId,
        why: ShardError,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> bool {
        self.take_out(learner, |committed| committed.contribution.lent, why, now, actions)
    }

    /// The program of `learner` takes back its last commit, unless that was answered with success: it fails with `why`,
    /// and is open again. Returns what [`Self::reclaim`] does.
    pub fn recall(
        &mut self,
        learner: LearnerId,
        why: ShardError,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> bool {
        // Once the next contribution is open, the taken one is not the last.
        let is_last = self.members.get(&learner).is_some_and(|member| matches!(member.phase, Phase::Idle));
        is_last && self.take_out(learner, |committed| committed.undo.is_some(), why, now, actions)
    }

    fn take_out(
        &mut self,
        learner: LearnerId,
        is_it: impl Fn(&Committed) -> bool,
        why: ShardError,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> bool {
        let found = self.committed.iter_mut().find(|c| c.contribution.learner == learner && is_it(c));
        let Some(committed) = found else { return false };
        if committed.place == PayloadPlace::Accumulated {
            let answer = committed.ticket.take().map(|(ticket, _)| Action::Reply(ticket, Ok(())));
            actions.extend(answer);
            return false;
        }
        let (place, is_read) = (committed.place, committed.is_read());
        match place {
            PayloadPlace::Accumulating => self.stop_accumulation(),
            PayloadPlace::Staged => self.stop_plan(),
            PayloadPlace::ToAccumulate | PayloadPlace::Accumulated => {}
        }
        self.fail(vec![(learner, why)], actions);
        self.release_params();
        self.advance(now, actions);
        is_read
    }

    /// The publication of new weights has failed. There is no new version.
    pub fn assign_failed(&mut self, error: ShardError, now: Now, actions: &mut Vec<Action>) {
        if let Some(ticket) = self.making.ends_publication() {
            actions.push(Action::Reply(ticket, Err(error)));
        }
        self.advance(now, actions);
    }

    /// Whether the plan under way reads this contribution.
    fn reads(&self, committed: &Committed) -> bool {
        let learner = committed.contribution.learner;
        self.making.inputs().any(|input| input.learner == learner) || self.is_read_provisionally(committed)
    }

    /// The version under way is not made.
    fn stop_plan(&mut self) {
        self.making.ends();
        // Another provisional plan would be sent in vain just as well.
        self.provisional.fails(self.version);
        self.put_back();
    }

    /// The contributions under way are not in the accumulator.
    fn stop_accumulation(&mut self) {
        self.measured.stops();
        for committed in self.committed.iter_mut().filter(|c| c.place == PayloadPlace::Accumulating) {
            committed.place =
                if committed.contribution.steady { PayloadPlace::Staged } else { PayloadPlace::ToAccumulate };
        }
    }

    fn fail(&mut self, failed: Vec<(LearnerId, ShardError)>, actions: &mut Vec<Action>) {
        for (learner, error) in failed {
            let of_learner = |c: &&mut Committed| c.contribution.learner == learner;
            let Some(committed) =
                self.committed.iter_mut().filter(|c| c.place == PayloadPlace::ToAccumulate).find(of_learner)
            else {
                continue;
            };
            if let Some((ticket, _)) = committed.ticket.take() {
                actions.push(Action::Reply(ticket, Err(error)));
            }
            self.take_back(learner, actions);
        }
    }

    /// Takes back a commit of which nothing was read. The contribution is open again, and its blocks of a provisional
    /// plan are dropped.
    pub(super) fn take_back(&mut self, learner: LearnerId, actions: &mut Vec<Action>) {
        let Some(at) = self.committed.iter().position(|c| c.contribution.learner == learner) else { return };
        let committed = self.committed.remove(at);
        let step = self.members.get(&learner).map_or(Step(0), |member| member.step);
        let early = ShardError::StepOutOfOrder { got: step.next(), expected: step };
        self.drop_pending_commit(learner, early, actions);
        if let Some(member) = self.members.get_mut(&learner)
            && let Some(phase) = committed.undo
        {
            member.step = Step(member.step.0.saturating_sub(1));
            member.pace = member.pace.saturating_sub(1);
            member.unpublished = false;
            member.phase = phase;
            member.activity.takes_back();
        }
        let is_open = |member: &Member| matches!(member.phase, Phase::Open { .. });
        if !self.members.get(&learner).is_some_and(is_open) {
            self.drop_provisional(learner, actions);
        }
    }

    /// The provisional plan under way could not take a block, so it is void. All contributions are read when they are
    /// committed.
    pub fn provisional_failed(&mut self, now: Now, actions: &mut Vec<Action>) {
        if self.end_provisional() {
            self.advance(now, actions);
        }
    }
}
