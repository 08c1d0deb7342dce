//! The rules in which the consistencies differ: which commits can be taken, when a version has everything it
//! waits for, who is waited for.
//!
//! | | a version has | whose commit waits |
//! |---|---|---|
//! | `sync` | all learners that take part | a joiner's, until the next version |
//! | `quorum(k)` | those that are in when k are, or when nobody is missing | nobody's |
//! | `grace(k, factor)` | those that are in a while after k are, or when nobody is missing | nobody's |
//! | `ssp(s)` | one contribution | who has committed more than s steps more than the slowest learner |
//! | `async` | one contribution | nobody's |
//!
//! Besides, a commit waits for a buffer, for its learner's last one to be published, and for another contribution that
//! is part of a provisional plan whose blocks are nowhere else.
use libmodelio::vocabulary::controls::Consistency;
use libmodelio::vocabulary::ids::LearnerId;

use super::{JobCore, Member, PayloadPlace, PendingKind, Phase};

impl JobCore {
    /// Takes over the consistency that is set. Learners that ran ahead under another one start level with the
    /// others.
    pub(super) fn follow_consistency(&mut self) {
        let before = std::mem::replace(&mut self.consistency, self.controls.consistency);
        if before != self.consistency {
            self.grace.forget();
        }
        if self.limits_head_start() && !matches!(before, Consistency::Ssp(_)) {
            for member in self.members.values_mut() {
                member.pace = 0;
            }
        }
    }

    /// Whether a version waits for several contributions.
    pub(super) fn gathers(&self) -> bool {
        matches!(self.consistency, Consistency::Sync | Consistency::Quorum(_) | Consistency::Grace(..))
    }

    /// Whether learners wait for slower ones.
    pub(super) fn limits_head_start(&self) -> bool {
        matches!(self.consistency, Consistency::Ssp(_))
    }

    /// Whether the coming version waits for `member`, unless it has as many as it needs without it.
    pub(super) fn takes_part(&self, member: &Member) -> bool {
        member.joined_at <= self.version
    }

    /// Whether a commit of `learner` can be taken now.
    pub(super) fn takes_commit(&self, learner: LearnerId) -> bool {
        // A provisional plan was computed without it.
        (!self.provisional.is_under_way() || self.provisional.takes(learner))
            && self.would_take_commit(learner)
    }

    /// Whether it could be if no provisional plan had begun for another learner.
    pub(super) fn would_take_commit(&self, learner: LearnerId) -> bool {
        self.takes_commit_with(learner, self.has_room())
    }

    /// Whether it could be if there was room for the next version, or was none.
    pub(super) fn takes_commit_with(&self, learner: LearnerId, has_room: bool) -> bool {
        let Some(member) = self.members.get(&learner).filter(|member| !member.unpublished) else {
            return false;
        };
        match self.consistency {
            Consistency::Sync => self.takes_part(member) && (has_room || !self.has_enough_with(learner)),
            Consistency::Quorum(_) | Consistency::Grace(..) => has_room || !self.has_enough_with(learner),
            Consistency::Async | Consistency::Ssp(_) => {
                self.formation.is_formed()
                    && has_room
                    && self.committed.is_empty()
                    && !self.is_too_far_ahead(learner)
            }
        }
    }

    /// Whether the coming version has all contributions that it waits for.
    pub(super) fn is_complete(&self) -> bool {
        if !self.gathers() {
            return true;
        }
        let least = self.controls.min_learners as usize;
        let missing = self.missing().next().is_some();
        self.has_enough(self.committed.len(), missing)
            && (!missing || !self.is_in_grace())
            && self.committed.len().max(self.members.len()) >= least
    }

    fn has_enough_with(&self, learner: LearnerId) -> bool {
        self.has_enough(self.committed.len() + 1, self.missing().any(|missing| missing != learner))
    }

    fn has_enough(&self, contributions: usize, missing: bool) -> bool {
        let quorum = match self.consistency {
            Consistency::Quorum(quorum) | Consistency::Grace(quorum, _) => contributions >= quorum as usize,
            _ => false,
        };
        self.formation.is_formed() && (quorum || !missing)
    }

    /// Learners who take part in the coming version and have not committed.
    pub(super) fn missing(&self) -> impl Iterator<Item = LearnerId> {
        let missing = |member: &Member| self.takes_part(member) && !member.unpublished;
        self.members.iter().filter(move |(_, member)| missing(member)).map(|(&learner, _)| learner)
    }

    /// The only learner who can still add to the coming version, if there is one: a plan may begin while it
    /// writes.
    pub(super) fn last_outstanding(&self) -> Option<LearnerId> {
        if !self.gathers() {
            return self.only_writer();
        }
        if !self.committed.iter().all(|c| matches!(c.place, PayloadPlace::Staged | PayloadPlace::Accumulated))
        {
            return None;
        }
        let all = self.consistency == Consistency::Sync;
        // With a quorum, who joined in mid-step may commit like everybody else.
        let outstanding = |member: &Member| !member.unpublished && (self.takes_part(member) || !all);
        let mut left = self.members.iter().filter(|(_, member)| outstanding(member));
        match (left.next(), left.next()) {
            (Some((&learner, _)), None) => Some(learner),
            _ => None,
        }
    }

    /// The only learner who writes, if every contribution makes a version. Where its blocks lie nowhere else, it must
    /// also be the only one who may commit: the plan cannot give way then.
    fn only_writer(&self) -> Option<LearnerId> {
        if !self.committed.is_empty() || !self.provisional.are_all_staged() && self.members.len() > 1 {
            return None;
        }
        let mut writers = self.members.keys().copied().filter(|learner| self.has_block(*learner));
        match (writers.next(), writers.next()) {
            (Some(learner), None) if !self.is_too_far_ahead(learner) => Some(learner),
            _ => None,
        }
    }

    /// How far the slowest learner is.
    pub(super) fn slowest(&self) -> u64 {
        self.members.values().map(|member| member.pace).min().unwrap_or(0)
    }

    /// Whether the next commit of `learner` has to wait for slower ones.
    pub(super) fn is_too_far_ahead(&self, learner: LearnerId) -> bool {
        let Consistency::Ssp(most) = self.consistency else { return false };
        let pace = self.members.get(&learner).map_or(0, |member| member.pace);
        pace.saturating_sub(self.slowest()) > u64::from(most)
    }

    /// Whether a waiting learner may be waiting for `learner`.
    pub(super) fn holds_up(&self, learner: LearnerId, member: &Member) -> bool {
        // Where a provisional plan gives way, nobody waits for it.
        if self.writes_provisionally(learner) && !self.provisional.is_staged() {
            return true;
        }
        match self.consistency {
            Consistency::Sync => self.takes_part(member) || matches!(member.phase, Phase::Open { .. }),
            Consistency::Async => matches!(member.phase, Phase::Open { .. }),
            Consistency::Quorum(_) | Consistency::Grace(..) => self.takes_part(member),
            Consistency::Ssp(most) => self.pending.iter().any(|pending| match &pending.kind {
                PendingKind::Commit { contribution, .. } => {
                    let waits = self.members.get(&contribution.learner);
                    waits.is_some_and(|waits| waits.pace.saturating_sub(member.pace) > u64::from(most))
                }
                PendingKind::Assign { .. } => false,
            }),
        }
    }
}
