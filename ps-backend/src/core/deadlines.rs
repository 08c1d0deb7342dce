//! The passing of time: deadlines of requests, leases, and periodic checks.

use std::borrow::Cow;
use std::collections::VecDeque;

use libmodelio::vocabulary::ids::LearnerId;
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::shard_error::{ALL_BUFFERS_HELD, HELD_BY_READERS, NOT_COMMITTED, ShardError};

use super::waits::{MAX_NAMES, lasts};
use super::{Action, Committed, JobCore, Member, Now, PayloadPlace, PendingKind, Ticket};

const NO_NUMBER: &str = "the registry, which reserves numbers of versions, is out of reach";

impl JobCore {
    /// The latest moment for the next [`Self::tick`], by requests, accumulations and the grace window. Leases need
    /// additional checks now and then.
    pub fn next_deadline(&self) -> Option<Now> {
        let pending = self.pending.iter().map(|pending| pending.deadline);
        // The reader of lent memory checks its deadline itself: see `overdue`.
        let taken = self.committed.iter().filter(|c| !c.is_read_on_loan());
        let taken =
            taken.filter_map(|c| c.ticket).map(|(_, deadline)| deadline).chain(self.making.deadline());
        pending
            .chain(taken)
            .chain(self.next_accumulation())
            .chain(self.grace_ends())
            .chain(self.readers_are_due())
            .min()
    }

    /// Time passes. Handles deadlines and leases.
    pub fn tick(&mut self, now: Now, actions: &mut Vec<Action>) {
        // Leases come first: a request that waited for a learner may be in time once that learner is gone.
        self.note_stall(now);
        self.expire_leases(now, actions);
        self.expire_lingering(now, actions);
        if self.give_up_readers(now) {
            self.advance(now, actions);
        }
        self.form_without_lost(now, actions);
        if self.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.expire_requests(now, actions);
            self.advance(now, actions);
        }
    }

    /// The learners whose commits are past their deadlines while their lent memory is being read. The core does not
    /// answer such a commit: the caller calls [`Self::reclaim`], or ends the reading soon.
    pub fn overdue(&self, now: Now) -> Vec<LearnerId> {
        let on_loan = self.committed.iter().filter(|c| c.is_read_on_loan());
        let is_over = |c: &&Committed| c.ticket.is_some_and(|(_, deadline)| deadline <= now);
        on_loan.filter(is_over).map(|c| c.contribution.learner).collect()
    }

    /// When [`Self::overdue`] next has a learner.
    pub fn next_overdue(&self) -> Option<Now> {
        let on_loan = self.committed.iter().filter(|c| c.is_read_on_loan());
        on_loan.filter_map(|c| c.ticket).map(|(_, deadline)| deadline).min()
    }

    fn expire_requests(&mut self, now: Now, actions: &mut Vec<Action>) {
        let over = |ticket: &mut (Ticket, Now)| ticket.1 <= now;
        // Learners did not commit in time, so nothing that waits for them is read for now.
        let is_late = |c: &Committed| {
            !c.contribution.lent
                && self.is_read_provisionally(c)
                && c.ticket.is_some_and(|(_, deadline)| deadline <= now)
        };
        if self.waits_for_provisional() && self.committed.iter().any(is_late) && self.end_provisional() {
            actions.push(Action::Drop);
        }
        // An accumulated contribution is safe. Its answer waits for the version, but not beyond the deadline.
        for committed in self.committed.iter_mut().filter(|c| c.place == PayloadPlace::Accumulated) {
            let ticket = committed.ticket.take_if(over);
            actions.extend(ticket.map(|(ticket, _)| Action::Reply(ticket, Ok(()))));
        }
        let mut timed_out = |ticket, what: Cow<'static, str>| {
            actions.push(Action::Reply(ticket, Err(ShardError::TimedOut(what))));
        };
        let held = self.is_held_by_readers();
        // A learner that has waited until now was not silent.
        let mut alive = Vec::new();
        let mut kept = VecDeque::new();
        for pending in std::mem::take(&mut self.pending) {
            if pending.deadline > now {
                kept.push_back(pending);
                continue;
            }
            if let PendingKind::Commit { contribution, .. } = &pending.kind {
                alive.push(contribution.learner);
            }
            let what = match pending.kind {
                _ if self.lacks_number() => NO_NUMBER,
                PendingKind::Assign { .. } if held => HELD_BY_READERS,
                PendingKind::Assign { .. } => "a contribution is still being written",
                _ if !self.formation.is_formed() => "the job still waits for its learners (control/learners)",
                _ if !self.making.has_buffer() => ALL_BUFFERS_HELD,
                _ if held => HELD_BY_READERS,
                PendingKind::Commit { ref contribution, .. }
                    if self.is_too_far_ahead(contribution.learner) =>
                {
                    "the slowest learner is more steps behind than control/consistency lets it be"
                }
                _ if !self.gathers() => "another learner is still writing",
                _ => "the step before this one still waits for other learners",
            };
            timed_out(pending.ticket, what.into());
        }
        self.pending = kept;
        if let Some(ticket) = self.making.late(now) {
            timed_out(ticket, "the version is still being made; it will come".into());
        }
        let missing =
            match self.committed.iter().any(|c| c.ticket.is_some_and(|(_, deadline)| deadline <= now)) {
                true => self
                    .waited_for()
                    .map(|(_, member)| format!("{:?}", member.name))
                    .take(MAX_NAMES)
                    .collect(),
                false => Vec::new(),
            };
        let mut back = Vec::new();
        for committed in self.committed.iter_mut().filter(|c| !c.is_read_on_loan()) {
            if let Some((ticket, _)) = committed.ticket.take_if(over) {
                if committed.place == PayloadPlace::ToAccumulate {
                    back.push(committed.contribution.learner);
                    let what = match &missing[..] {
                        [] => "contributions of other learners are still being added up".into(),
                        names => format!("{NOT_COMMITTED}{}", names.join(", ")).into(),
                    };
                    timed_out(ticket, what);
                } else {
                    timed_out(
                        ticket,
                        "the contribution is taken, but its version is still being made".into(),
                    );
                }
            }
        }
        for learner in back {
            alive.push(learner);
            self.take_back(learner, actions);
        }
        for learner in alive {
            if let Some(member) = self.members.get_mut(&learner) {
                member.last_seen = now;
                member.activity.counts(now);
            }
        }
    }

    /// Removes learners whose last process exited this long ago, and for whom another learner has been waiting for as
    /// long.
    pub(super) fn expire_lingering(&mut self, now: Now, actions: &mut Vec<Action>) {
        let Some(wait) = self.waits.under_way().filter(|_| self.formation.is_formed()) else { return };
        let linger = self.controls.linger;
        let lingers = |member: &Member| {
            let since = member.exited.map(|at| at.max(member.last_seen).max(wait.since));
            since.is_some_and(|since| now.saturating_sub(since) >= linger)
        };
        let gone: Vec<LearnerId> =
            self.waited_for().filter(|(_, member)| lingers(member)).map(|(learner, _)| learner).collect();
        for learner in gone {
            // Cannot fail: the learner was just found.
            let _ = self.leave(learner, LeaveReason::Exited, now, actions);
        }
    }

    /// Removes silent learners: those that no process is known to use, after the lease; and those whose processes live
    /// and have made no progress, if another learner has been waiting for them, or for their numbers, for as long as
    /// patience lasts.
    pub(super) fn expire_leases(&mut self, now: Now, actions: &mut Vec<Action>) {
        let [lease, patience] = [self.controls.lease, self.controls.patience];
        let stalled = self.formation.is_formed() && self.waits.have_lasted(patience);
        let why = |learner: LearnerId, member: &Member| match member.attached {
            true => {
                let holds_up = stalled && self.holds_up(learner, member)
                    || self.waits.lack_numbers_of(learner, patience, now);
                let is_over = lasts(member.activity.at, now, patience) && holds_up;
                is_over.then_some(LeaveReason::PatienceOver)
            }
            false => {
                let is_silent = lasts(member.last_seen, now, lease) && !self.waits.has_numbers_of(learner);
                is_silent.then_some(LeaveReason::LeaseExpired)
            }
        };
        let expired: Vec<(LearnerId, LeaveReason)> = self
            .members
            .iter()
            .filter(|&(&learner, member)| !member.unpublished && !self.waits(learner))
            .filter_map(|(&learner, member)| Some((learner, why(learner, member)?)))
            .collect();
        for (learner, reason) in expired {
            // Cannot fail: the learner was just found.
            let _ = self.leave(learner, reason, now, actions);
        }
    }
}
