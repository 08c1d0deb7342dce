//! Readers of a version that is still being made: they get each block as soon as it is computed.

use std::collections::{BTreeSet, VecDeque};

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::ids::{PlanId, Version};

use super::{PartitionCore, Stage};

/// The most numbers that are known of plans that were given up or dropped.
const MAX_LOST: usize = 16;
/// The most plans of which it is known which version they have made. Memory does not hold more versions.
const MAX_MADE: usize = 64;

/// The decision about a reader that wants the blocks of the version that a plan makes, before that is the newest one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// This block is computed. It counts if the plan is concluded.
    Computed(u32),
    /// The plan is concluded, and made this version. There may be newer ones.
    Made(Version),
    /// Nothing yet. Ask again when [`PartitionCore::has_news_for_readers`].
    Wait,
    /// The plan is over. It makes no version, or made one that is long over.
    Over,
}

/// What readers must know of plans that are over.
#[derive(Debug, Default)]
pub(super) struct Readers {
    /// Plans that made a version here, and the version, in their order.
    made: VecDeque<(PlanId, Version)>,
    /// Plans that were given up or dropped here, and may have been computed in part.
    lost: BTreeSet<PlanId>,
    /// [`PartitionCore::ahead`] may answer something else than before.
    has_news: bool,
}

impl Readers {
    /// There may be something for readers.
    pub(super) fn notify(&mut self) {
        self.has_news = true;
    }

    /// The plan has made this version.
    pub(super) fn made(&mut self, plan: PlanId, version: Version) {
        self.made.push_back((plan, version));
        if self.made.len() > MAX_MADE {
            self.made.pop_front();
        }
    }

    /// The plan is concluded. The numbers up to its own are not used again.
    pub(super) fn concluded(&mut self, plan: PlanId) {
        self.lost.retain(|lost| *lost > plan);
        self.notify();
    }

    /// Nothing of this plan counts.
    pub(super) fn lost(&mut self, plan: PlanId) {
        self.notify();
        self.lost.insert(plan);
        // A number that is not of this job is higher than the coordinator's own.
        if self.lost.len() > MAX_LOST {
            self.lost.pop_last();
        }
    }

    /// Whether blocks may have been computed under this number for nothing. Readers may have them, and a second pass may
    /// add up in another order.
    pub(super) fn is_lost(&self, plan: PlanId) -> bool {
        self.lost.contains(&plan)
    }

    /// The coordinator has a new connection. It may give numbers above `over` to other plans, and conclude the last
    /// `concluded` one again.
    pub(super) fn coordinated_anew(&mut self, over: PlanId, concluded: Option<PlanId>) {
        self.made.retain(|(made_by, _)| *made_by <= over || Some(*made_by) == concluded);
    }
}

impl PartitionCore {
    /// The next block for a reader of the version that `plan` makes. It has these blocks already.
    pub fn ahead(&self, plan: PlanId, has: &FixedBitSet) -> Ahead {
        let Some(running) = self.running.as_ref().filter(|running| running.plan.id == plan) else {
            return match self.readers.made.iter().find(|(made_by, _)| *made_by == plan) {
                Some(&(_, version)) => Ahead::Made(version),
                _ if plan > self.newest => Ahead::Wait,
                _ => Ahead::Over,
            };
        };
        match running.stage {
            Stage::Beginning => Ahead::Wait,
            _ if !running.plan.work.makes_version() => Ahead::Wait,
            Stage::Gathering | Stage::Ready | Stage::Making => {
                let computed = |block: &usize| !running.busy.contains(*block);
                let next = running.last.difference(has).find(computed);
                next.map_or(Ahead::Wait, |block| Ahead::Computed(block as u32))
            }
            Stage::NonFinite { .. } | Stage::Torn | Stage::Dropped | Stage::Disowned => Ahead::Over,
        }
    }

    /// Whether [`Self::ahead`] may answer something else than at the last call of this.
    pub fn has_news_for_readers(&mut self) -> bool {
        std::mem::take(&mut self.readers.has_news)
    }
}
