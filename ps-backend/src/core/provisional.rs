//! The provisional plan under way, and whether another may begin; within, the decisions about them.

mod speculation;

use std::collections::BTreeSet;

use libmodelio::vocabulary::ids::{LearnerId, Step, Version};
use serde::{Deserialize, Serialize};

use super::Now;

/// After how many failures in a row the pauses grow no more: 2^5 versions.
const MOST_DOUBLINGS: u32 = 5;

/// The provisional plan under way.
#[derive(Debug)]
struct Provisional {
    /// The learners whose contributions were still to be committed when it began.
    open: BTreeSet<LearnerId>,
    since: Now,
    /// Whether its blocks are staged, too. Then it gives way to whoever waits for it.
    staged: bool,
}

impl Provisional {
    /// Whether it takes a commit of `learner`.
    fn takes(&self, learner: LearnerId) -> bool {
        self.open.contains(&learner)
    }
}

/// Whether provisional plans may begin, by what became of earlier ones.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Speculation {
    /// The number of plans that were dropped since one counted, of those that others than their learner can drop.
    /// (Others succeed where these fail: when the others have committed, the last one has a plan of its own.)
    failures: u32,
    /// No such plan begins on top of an older version.
    resumes_at: Version,
    /// The contribution whose own plan failed. It is read after its commit.
    failed_alone: Option<(LearnerId, Step)>,
}

impl Speculation {
    fn is_on(&self, version: Version) -> bool {
        version >= self.resumes_at
    }

    /// The plan for the version after this one was dropped.
    fn fails(&mut self, version: Version) {
        let pause = 1 << self.failures.min(MOST_DOUBLINGS);
        self.failures = self.failures.saturating_add(1);
        self.resumes_at = Version(version.0.saturating_add(pause));
    }

    /// A plan counts that others than its learner could have dropped.
    fn succeeds(&mut self) {
        self.failures = 0;
    }
}

/// The provisional plans: whether any may begin, and the one under way.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct ProvisionalPlans {
    #[serde(skip)]
    under_way: Option<Provisional>,
    /// Whether plans begin while contributions to them are still written.
    may_begin: bool,
    /// Whether the blocks of every such plan lie elsewhere, too. That is so on a network.
    are_all_staged: bool,
    speculation: Speculation,
    /// How long a contribution whose memory is needed back waits for the others of its step.
    accumulate_patience: Now,
}

impl ProvisionalPlans {
    pub(super) fn allow(&mut self) {
        self.may_begin = true;
    }

    pub(super) fn stage_all(&mut self) {
        self.are_all_staged = true;
    }

    pub(super) fn set_accumulate_patience(&mut self, patience: Now) {
        self.accumulate_patience = patience;
    }

    pub(super) fn accumulate_patience(&self) -> Now {
        self.accumulate_patience
    }

    pub(super) fn are_all_staged(&self) -> bool {
        self.are_all_staged
    }

    /// Whether one is under way.
    pub(super) fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Whether the blocks of the one under way lie elsewhere, too.
    pub(super) fn is_staged(&self) -> bool {
        self.under_way.as_ref().is_some_and(|plan| plan.staged)
    }

    /// The learners whose contributions were still to be committed when the one under way began.
    pub(super) fn open(&self) -> impl Iterator<Item = &LearnerId> {
        self.under_way.iter().flat_map(|plan| &plan.open)
    }

    /// Whether the one under way takes a commit of `learner`.
    pub(super) fn takes(&self, learner: LearnerId) -> bool {
        self.under_way.as_ref().is_some_and(|plan| plan.takes(learner))
    }

    /// The plan for the version after this one is not carried out. Another provisional one would be sent in vain
    /// just as well.
    pub(super) fn fails(&mut self, version: Version) {
        self.speculation.fails(version);
        self.under_way = None;
    }
}
