//! Waiting learners: since when they wait, and who is named as the cause.

use std::collections::BTreeMap;

use libmodelio::vocabulary::ids::LearnerId;
use libmodelio::vocabulary::phase::NAMED_AFTER;
use serde::{Deserialize, Serialize};

use super::state::{Stall, Wait};
use super::{JobCore, Member, Now, Pending, PendingKind, WaitedFor};

/// The most names in a report.
pub(super) const MAX_NAMES: usize = 16;
/// A wait goes on if a learner waits again within this time: requests that time out come again.
const SAME_WAIT_WITHIN: Now = Now::from_secs(1);

/// Whether `limit` has passed between two times. A limit of zero never passes.
pub(super) fn lasts(since: Now, until: Now, limit: Now) -> bool {
    !limit.is_zero() && until.saturating_sub(since) >= limit
}

/// The waits for other learners.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Waits {
    stall: Option<Stall>,
    wait: Option<Wait>,
    numbers: Numbers,
}

/// The waits for numbers that all learners give: [`JobCore::gives_numbers`]. They have nothing to do with versions.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Numbers {
    /// The beginning of the wait, which may have pauses.
    since: Option<Now>,
    /// The learners that have given numbers and wait. A time says since when one has waited in vain: it may come again.
    given: BTreeMap<LearnerId, Option<Now>>,
}

impl Numbers {
    /// Since when others have waited for this learner, if they do.
    fn lacks(&self, learner: LearnerId) -> Option<Now> {
        self.since.filter(|_| !self.given.is_empty() && !self.given.contains_key(&learner))
    }

    /// Time passes. Who has waited in vain may be back within `pause`.
    fn pass(&mut self, pause: Now, now: Now) {
        self.given.retain(|_, ended| ended.is_none_or(|ended| now.saturating_sub(ended) < pause));
        self.since.take_if(|_| self.given.is_empty());
    }
}

impl Waits {
    /// Learners wait for nobody's progress any more.
    pub(super) fn moved_on(&mut self) {
        self.stall = None;
    }

    /// Whether the learner waits for the numbers of others.
    pub(super) fn has_numbers_of(&self, learner: LearnerId) -> bool {
        self.numbers.given.get(&learner).is_some_and(Option::is_none)
    }

    /// The learner has left.
    pub(super) fn forget_numbers(&mut self, learner: LearnerId) {
        self.numbers.given.remove(&learner);
    }

    /// Whether others have waited for numbers of this learner for `patience`. A patience of zero has no end.
    pub(super) fn lack_numbers_of(&self, learner: LearnerId, patience: Now, now: Now) -> bool {
        self.numbers.lacks(learner).is_some_and(|since| lasts(since, now, patience))
    }

    /// The wait under way.
    pub(super) fn under_way(&self) -> Option<Wait> {
        self.wait.filter(|wait| wait.paused.is_none())
    }

    /// Whether a learner has waited for the progress of others for `patience`. A patience of zero has no end.
    pub(super) fn have_lasted(&self, patience: Now) -> bool {
        self.stall.is_some_and(|stall| lasts(stall.since, stall.until, patience))
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

/// The names of these, as many as a report has.
fn named<'a>(members: impl Iterator<Item = &'a Member>) -> WaitedFor {
    let mut names = members.map(|member| member.name.clone());
    WaitedFor { learners: names.by_ref().take(MAX_NAMES).collect(), more: names.count() }
}

impl JobCore {
    /// There are new weights. Contributions that wait do so for the same learners as before, and for as long already.
    pub(super) fn waits_go_on(&mut self) {
        let is_commit = |pending: &Pending| matches!(pending.kind, PendingKind::Commit { .. });
        if self.committed.is_empty() && !self.pending.iter().any(is_commit) {
            return self.waits.moved_on();
        }
        let (before, version) = (self.version.0.saturating_sub(1), self.version.0);
        if !self.limits_head_start() {
            self.waits.wait.iter_mut().filter(|wait| wait.at == before).for_each(|wait| wait.at = version);
        }
    }

    /// Notes whether a learner waits for others at the moment.
    pub(super) fn note_stall(&mut self, now: Now) {
        let step_waits = self.gathers() && !self.committed.is_empty();
        // Without room for a version learners wait for readers, and while the job is held they wait for nobody in it.
        let waits = !self.making.is_under_way()
            && !self.measured.is_under_way()
            && self.has_room()
            && !self.is_held()
            && (step_waits || !self.pending.is_empty());
        let slowest = if self.limits_head_start() { self.slowest() } else { 0 };
        let [lease, patience] = [self.controls.lease, self.controls.patience];
        let pause = if lease.is_zero() { patience } else { lease.min(patience) };
        self.waits.note_stall(waits, slowest, pause, now);
        self.waits.numbers.pass(pause, now);
        let at = match self.formation.is_formed() {
            false => u64::MAX,
            true if self.limits_head_start() => slowest,
            true => self.version.0,
        };
        self.waits.note(waits, at, now);
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
        let is_long = |since: &Now| now.saturating_sub(*since) >= NAMED_AFTER;
        let step = self.waits.wait.map(|wait| wait.since).filter(is_long);
        let step = step.map(|since| match self.formation.is_formed() {
            true => (since, named(self.waited_for().map(|(_, member)| member))),
            false => {
                let more = (self.controls.learners as usize).saturating_sub(self.members.len());
                (since, WaitedFor { learners: Vec::new(), more })
            }
        });
        let numbers = self.waits.numbers.since.filter(is_long).map(|since| {
            let lacks = |learner| self.waits.numbers.lacks(learner).is_some();
            let late = self.members.iter().filter(|&(&learner, _)| lacks(learner));
            (since, named(late.map(|(_, member)| member)))
        });
        step.into_iter().chain(numbers).find(|(_, late)| *late != WaitedFor::default())
    }

    /// Whether `learner` is silent because its own request has no answer yet.
    pub(super) fn waits(&self, learner: LearnerId) -> bool {
        self.pending.iter().any(|pending| {
            matches!(&pending.kind, PendingKind::Commit { contribution, .. } if contribution.learner == learner)
        })
    }

    /// A learner has given numbers, and waits for those of the others.
    pub fn gives_numbers(&mut self, learner: LearnerId, now: Now) {
        if let Some(member) = self.members.get_mut(&learner) {
            member.is_used(now);
            self.waits.numbers.since.get_or_insert(now);
            self.waits.numbers.given.insert(learner, None);
        }
    }

    /// It has waited in vain for the numbers of others.
    pub fn numbers_are_late(&mut self, learner: LearnerId, now: Now) {
        if let Some(member) = self.members.get_mut(&learner) {
            member.is_used(now);
            self.waits.numbers.given.insert(learner, Some(now));
        }
    }

    /// All numbers were there. That is progress of each learner.
    pub fn numbers_are_reduced(&mut self, now: Now) {
        self.waits.numbers = Numbers::default();
        for member in self.members.values_mut() {
            member.is_used(now);
            member.activity.works(now);
        }
    }

    /// Notes whether somebody waits for readers. Who gives up may come again, so the wait goes on.
    pub(super) fn note_readers(&mut self, now: Now) {
        let held = self.is_held_by_readers() && self.making.has_buffer();
        let waits = held && self.waits_for_room();
        self.making.readers.note_wait(held.then_some(self.version), waits, now);
    }

    /// Whether a request has all that it needs but room for the next version.
    fn waits_for_room(&self) -> bool {
        !self.making.is_under_way()
            && (!self.committed.is_empty() && self.is_complete()
                || self.pending.iter().any(|pending| match &pending.kind {
                    PendingKind::Assign { .. } => true,
                    PendingKind::Commit { contribution } => {
                        !self.provisional.is_under_way() && self.takes_commit_with(contribution.learner, true)
                    }
                }))
    }
}
