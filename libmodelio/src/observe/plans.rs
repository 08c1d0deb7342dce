//! The phases of the plans that a client sends blocks for, as the client sees them.
//!
//! What happens before a contribution is committed costs its learner nothing: the program is computing then. So the
//! phases of a plan are counted from its seal on, and that of a commit from the commit on.
//!
//! | phase | from | to |
//! |---|---|---|
//! | `others` | the commit | the seal of the plan that makes the version: the contributions of all whom it waits for are in |
//! | `wire` | the first block | the last block |
//! | `conclude` | the last block | the state that shows the version |

use std::collections::BTreeMap;
use std::time::Duration;

use super::Now;
use crate::vocabulary::ids::{LearnerId, PlanId, Step, Version};

/// A plan under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RunningPlan {
    plan: PlanId,
    granted: Now,
    /// When its contributions were complete.
    sealed: Option<Now>,
    /// When the first block was taken to be sent, and the last one was taken or read.
    sent: Option<(Now, Now)>,
    /// When it was seen to be over, whatever became of it.
    over: Option<Now>,
}

/// A plan that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanPhases {
    /// The plan.
    pub plan: PlanId,
    /// When it was granted.
    pub granted: Now,
    /// When it was sealed, if it was.
    pub sealed: Option<Now>,
    /// The first and the last block that was sent.
    pub sent: Option<(Now, Now)>,
    /// Its end.
    pub over: Now,
    /// The version that it has made. None if it was dropped, or is part of a later plan's version.
    pub version: Option<Version>,
}

impl PlanPhases {
    /// How long blocks were on their way after the seal.
    pub fn wire(&self) -> Option<Duration> {
        let ((first, last), sealed) = (self.sent?, self.sealed?);
        Some(last.max(sealed).saturating_sub(first.max(sealed)))
    }

    /// How long it took from then to the version.
    pub fn conclude(&self) -> Option<Duration> {
        let ((_, last), sealed) = (self.sent?, self.sealed?);
        self.version.map(|_| self.over.saturating_sub(last.max(sealed)))
    }
}

/// The plans and commits of one client.
#[derive(Debug, Default)]
pub struct PlanTimes {
    running: Option<RunningPlan>,
    /// The commits that are not part of a version.
    commits: BTreeMap<LearnerId, (Step, Now)>,
}

impl PlanTimes {
    /// A learner commits a step, perhaps not for the first time.
    pub fn committed(&mut self, learner: LearnerId, step: Step, now: Now) {
        let known = self.commits.entry(learner).or_insert((step, now));
        if known.0 != step {
            *known = (step, now);
        }
    }

    /// A learner is no longer in the job.
    pub fn forget(&mut self, learner: LearnerId) {
        self.commits.remove(&learner);
    }

    /// The plan that blocks are sent for, if one is under way. Returns the plan before it, if that is over by this.
    pub fn plan(&mut self, plan: Option<PlanId>, now: Now) -> Option<PlanPhases> {
        let Some(plan) = plan else {
            if let Some(running) = &mut self.running {
                running.over.get_or_insert(now);
            }
            return None;
        };
        if self.running.is_some_and(|running| running.plan == plan) {
            return None;
        }
        let before = self.end(None, now);
        self.running = Some(RunningPlan { plan, granted: now, sealed: None, sent: None, over: None });
        before
    }

    /// The contributions of the plan under way are complete.
    pub fn sealed(&mut self, now: Now) {
        if let Some(running) = &mut self.running {
            running.sealed.get_or_insert(now);
        }
    }

    /// Whether a plan is under way.
    pub fn is_running(&self) -> bool {
        self.running.is_some_and(|running| running.over.is_none())
    }

    /// Whether it is this one.
    pub fn is_running_as(&self, plan: PlanId) -> bool {
        self.running.is_some_and(|running| running.plan == plan)
    }

    /// Whether the plan under way is known to be sealed.
    pub fn is_sealed(&self) -> bool {
        self.running.is_some_and(|running| running.sealed.is_some())
    }

    /// A block of the plan is taken to be sent, or has been read.
    pub fn sent(&mut self, plan: PlanId, now: Now) {
        if let Some(running) = self.running.as_mut().filter(|running| running.plan == plan) {
            let (first, last) = running.sent.unwrap_or((now, now));
            running.sent = Some((first, last.max(now)));
        }
    }

    /// A newer version is known. Returns the plan that has made it, if the client had a part in that. `others` is called
    /// for each commit that `is_published`, with the learner, and with the commit and the end of its wait for others.
    pub fn version(
        &mut self,
        version: Version,
        now: Now,
        is_published: impl Fn(LearnerId, Step) -> bool,
        mut others: impl FnMut(LearnerId, Now, Now),
    ) -> Option<PlanPhases> {
        let plan = self.end(Some(version), now);
        // Where all that this client has sent was added up before, it hears of no last plan.
        let sealed = plan.and_then(|plan| plan.sealed).unwrap_or(now);
        self.commits.retain(|&learner, &mut (step, at)| {
            let waits = !is_published(learner, step);
            if !waits {
                others(learner, at, sealed.max(at));
            }
            waits
        });
        plan
    }

    /// The plan under way, as far as it is.
    pub fn so_far(&self, now: Now) -> Option<PlanPhases> {
        PlanTimes { running: self.running, ..PlanTimes::default() }.end(None, now)
    }

    fn end(&mut self, version: Option<Version>, now: Now) -> Option<PlanPhases> {
        let RunningPlan { plan, granted, sealed, sent, over } = self.running.take()?;
        let over = if version.is_some() { now } else { over.unwrap_or(now) };
        Some(PlanPhases { plan, granted, sealed, sent, over, version })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: PlanId = PlanId(7);
    const A: (LearnerId, Step) = (LearnerId(1), Step(3));
    const B: (LearnerId, Step) = (LearnerId(2), Step(3));

    const fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    /// A version that has the commits of these learners, and for how long each of them has waited for others.
    fn version(
        times: &mut PlanTimes,
        of: &[(LearnerId, Step)],
        now: Now,
    ) -> (Option<PlanPhases>, Vec<(LearnerId, Duration)>) {
        let mut waited = Vec::new();
        let is_in = |learner, step| of.contains(&(learner, step));
        let plan =
            times.version(Version(4), now, is_in, |learner, from, to| waited.push((learner, to - from)));
        (plan, waited)
    }

    #[test]
    fn a_step_falls_into_phases_from_the_commit_on() {
        let mut times = PlanTimes::default();
        times.committed(A.0, A.1, ms(10));
        assert_eq!(times.plan(Some(PLAN), ms(20)), None, "it is provisional, and B still writes");
        times.sent(PLAN, ms(25));
        times.committed(B.0, B.1, ms(100));
        assert!(!times.is_sealed());
        times.sealed(ms(101));
        times.sealed(ms(102));
        times.sent(PLAN, ms(103));
        times.sent(PLAN, ms(120));
        times.plan(None, ms(125));
        let (phases, waited) = version(&mut times, &[A, B], ms(130));
        let phases = phases.unwrap();
        assert_eq!(waited, [(A.0, ms(91)), (B.0, ms(1))]);
        assert_eq!((phases.wire(), phases.conclude()), (Some(ms(19)), Some(ms(10))));
        assert_eq!((phases.granted, phases.over, phases.version), (ms(20), ms(130), Some(Version(4))));
        assert_eq!(version(&mut times, &[A, B], ms(200)), (None, vec![]), "others have made that one");
    }

    #[test]
    fn what_was_added_up_before_waits_for_the_plan_that_makes_the_version() {
        let mut times = PlanTimes::default();
        times.committed(A.0, A.1, ms(10));
        times.plan(Some(PLAN), ms(11));
        times.sealed(ms(11));
        times.plan(None, ms(15));
        times.committed(B.0, B.1, ms(50));
        let sum = times.plan(Some(PlanId(8)), ms(52)).unwrap();
        assert_eq!((sum.plan, sum.over, sum.version, sum.conclude()), (PLAN, ms(15), None, None));
        times.sealed(ms(52));
        assert_eq!(version(&mut times, &[A], ms(60)).1, [(A.0, ms(42))], "B is not in it");
        // Of the next version, another client makes the last plan.
        assert_eq!(version(&mut times, &[B], ms(90)), (None, vec![(B.0, ms(40))]));
    }

    #[test]
    fn a_plan_whose_blocks_were_sent_before_the_commit_has_no_wire() {
        let mut times = PlanTimes::default();
        times.plan(Some(PLAN), ms(0));
        times.sent(PLAN, ms(1));
        times.sent(PLAN, ms(50));
        times.sealed(ms(80));
        let phases = version(&mut times, &[A], ms(95)).0.unwrap();
        assert_eq!((phases.wire(), phases.conclude()), (Some(ms(0)), Some(ms(15))));
    }

    #[test]
    fn a_plan_that_is_dropped_ends_when_that_is_seen_and_has_made_nothing() {
        let mut times = PlanTimes::default();
        times.plan(Some(PLAN), ms(0));
        times.sent(PLAN, ms(1));
        times.plan(None, ms(10));
        let dropped = times.plan(Some(PlanId(8)), ms(50)).unwrap();
        assert_eq!((dropped.plan, dropped.over, dropped.version), (PLAN, ms(10), None));
        assert_eq!((dropped.wire(), dropped.conclude()), (None, None));
        times.sent(PLAN, ms(51));
        let next = version(&mut times, &[], ms(60)).0.unwrap();
        assert_eq!((next.plan, next.sent, next.conclude()), (PlanId(8), None, None));
    }

    #[test]
    fn a_commit_counts_from_its_first_try_and_not_for_another_step() {
        let mut times = PlanTimes::default();
        times.committed(A.0, A.1, ms(10));
        times.committed(A.0, A.1, ms(50));
        times.committed(B.0, Step(2), ms(20));
        times.committed(B.0, B.1, ms(30));
        times.plan(Some(PLAN), ms(60));
        times.sealed(ms(60));
        assert_eq!(version(&mut times, &[A, (B.0, Step(2))], ms(70)).1, [(A.0, ms(50))]);
        times.forget(B.0);
        assert!(times.commits.is_empty());
    }

    #[test]
    fn a_clock_that_jumps_back_makes_no_phase_negative() {
        let mut times = PlanTimes::default();
        times.committed(A.0, A.1, ms(100));
        times.plan(Some(PLAN), ms(90));
        times.sealed(ms(80));
        times.sent(PLAN, ms(95));
        times.sent(PLAN, ms(70));
        let (phases, waited) = version(&mut times, &[A], ms(60));
        let phases = phases.unwrap();
        assert_eq!(waited, [(A.0, ms(0))]);
        assert_eq!((phases.wire(), phases.conclude()), (Some(ms(0)), Some(ms(0))));
    }
}
