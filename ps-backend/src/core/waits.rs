//! Waiting learners: who is named as the cause, and who leaves because others wait.

use libmodelio::vocabulary::ids::LearnerId;
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::phase::NAMED_AFTER;
use serde::{Deserialize, Serialize};

use super::state::{Stall, Wait};
use super::{Action, JobCore, Member, Now, PendingKind, WaitedFor};

/// The most names in a report.
pub(super) const MAX_NAMES: usize = 16;
/// A wait goes on if a learner waits again within this time: requests that time out come again.
const SAME_WAIT_WITHIN: Now = Now::from_secs(1);

/// The waits for other learners.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Waits {
    stall: Option<Stall>,
    wait: Option<Wait>,
}

impl Waits {
    /// Learners wait for nobody's progress any more.
    pub(super) fn moved_on(&mut self) {
        self.stall = None;
    }

    /// Whether a learner waits now, at what pace of the slowest one. Whoever waits in vain, and hears so, may be back
    /// within `pause` for the rest of the time.
    fn note_stall(&mut self, waits: bool, slowest: u64, pause: Now, now: Now) {
        // If the slowest learner has moved on or left, the wait is for others now.
        self.stall.take_if(|stall| stall.slowest != slowest);
        if waits {
            self.stall.get_or_insert(Stall { since: now, until: now, slowest }).until = now;
        } else {
            self.stall.take_if(|stall| now.saturating_sub(stall.until) >= pause);
        }
    }

    /// Whether a learner waits now, for what comes behind `at`.
    fn note(&mut self, waits: bool, at: u64, now: Now) {
        let is_long =
            |wait: &mut Wait| wait.paused.is_some_and(|since| now.saturating_sub(since) >= SAME_WAIT_WITHIN);
        self.wait.take_if(|wait| wait.at != at || is_long(wait));
        match &mut self.wait {
            Some(wait) if waits => wait.paused = None,
            Some(wait) => _ = wait.paused.get_or_insert(now),
            None => self.wait = waits.then_some(Wait { since: now, paused: None, at }),
        }
    }
}

impl JobCore {
    /// Notes whether a learner waits for others at the moment.
    pub(super) fn note_stall(&mut self, now: Now) {
        let step_waits = self.gathers() && !self.committed.is_empty();
        // Without a buffer learners wait for readers, and while the job is held they wait for nobody in it.
        let waits = !self.making.is_under_way()
            && !self.measured.is_under_way()
            && self.making.has_buffer()
            && !self.is_held()
            && (step_waits || !self.pending.is_empty());
        let slowest = if self.limits_head_start() { self.slowest() } else { 0 };
        let [lease, patience] = [self.controls.lease, self.controls.patience];
        let pause = if lease.is_zero() { patience } else { lease.min(patience) };
        self.waits.note_stall(waits, slowest, pause, now);
        let at = match self.formation.is_formed() {
            false => u64::MAX,
            true if self.limits_head_start() => slowest,
            true => self.version.0,
        };
        self.waits.note(waits, at, now);
    }

    /// Removes learners whose last process exited this long ago, and for whom another learner has been waiting for as
    /// long.
    pub(super) fn expire_lingering(&mut self, now: Now, actions: &mut Vec<Action>) {
        let Some(wait) = self.waits.wait.filter(|wait| self.formation.is_formed() && wait.paused.is_none())
        else {
            return;
        };
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

    /// The learners that a waiting learner may be waiting for.
    pub(super) fn waited_for(&self) -> impl Iterator<Item = (LearnerId, &Member)> {
        let is_one = |&(&learner, member): &(&LearnerId, &Member)| {
            !member.unpublished && self.holds_up(learner, member) && !self.waits(learner)
        };
        self.members.iter().filter(is_one).map(|(&learner, member)| (learner, member))
    }

    /// The learners that others wait for, if the wait has lasted long, and its beginning. The beginning tells waits
    /// apart.
    pub fn late(&self, now: Now) -> Option<(Now, WaitedFor)> {
        let wait = self.waits.wait.filter(|wait| now.saturating_sub(wait.since) >= NAMED_AFTER)?;
        let late = if self.formation.is_formed() {
            let mut names = self.waited_for().map(|(_, member)| member.name.clone());
            WaitedFor { learners: names.by_ref().take(MAX_NAMES).collect(), more: names.count() }
        } else {
            let more = (self.controls.learners as usize).saturating_sub(self.members.len());
            WaitedFor { learners: Vec::new(), more }
        };
        (late != WaitedFor::default()).then_some((wait.since, late))
    }

    /// Removes silent learners: those that no process is known to use, after the lease; and those whose processes live and
    /// have made no progress, if another learner has been waiting for them for as long as patience lasts.
    pub(super) fn expire_leases(&mut self, now: Now, actions: &mut Vec<Action>) {
        let [lease, patience] = [self.controls.lease, self.controls.patience];
        let lasted =
            |since: Now, until: Now, limit: Now| !limit.is_zero() && until.saturating_sub(since) >= limit;
        let is_over = |stall: Stall| lasted(stall.since, stall.until, patience);
        let stalled = self.formation.is_formed() && self.waits.stall.is_some_and(is_over);
        let why = |learner: LearnerId, member: &Member| match member.attached {
            true => {
                let is_over = stalled && lasted(member.activity.at, now, patience);
                (is_over && self.holds_up(learner, member)).then_some(LeaveReason::PatienceOver)
            }
            false => lasted(member.last_seen, now, lease).then_some(LeaveReason::LeaseExpired),
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

    /// Whether `learner` is silent because its own request has no answer yet.
    fn waits(&self, learner: LearnerId) -> bool {
        self.pending.iter().any(|pending| {
            matches!(&pending.kind, PendingKind::Commit { contribution, .. } if contribution.learner == learner)
        })
    }
}
