//! Work that waits until the present plan has ended, and the numbers of plans.

use std::collections::VecDeque;
use std::sync::Arc;

use libmodelio::vocabulary::ids::{ClientId, PlanId};
use serde::{Deserialize, Serialize};

use super::weight_writers::WeightWriters;
use crate::core::JobPlan;

/// The core's next plans, and the number of the next plan.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PlanQueue {
    #[serde(skip)]
    waiting: VecDeque<Arc<JobPlan>>,
    next: PlanId,
    /// New weights that a client writes, by its token, while other work is under way.
    #[serde(skip)]
    pub(super) open_next: Option<(ClientId, u64)>,
    #[serde(skip)]
    pub(super) writers: WeightWriters,
}

impl Default for PlanQueue {
    fn default() -> PlanQueue {
        PlanQueue {
            waiting: VecDeque::new(),
            next: PlanId(1),
            open_next: None,
            writers: WeightWriters::default(),
        }
    }
}

impl PlanQueue {
    /// The number of the next plan.
    pub(super) fn next(&self) -> PlanId {
        self.next
    }

    /// The number of a plan that begins.
    pub(super) fn number(&mut self) -> PlanId {
        let number = self.next;
        self.next = PlanId(number.0 + 1);
        number
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Work that waits for the other work in the queue.
    pub(super) fn push(&mut self, plan: Arc<JobPlan>) {
        self.waiting.push_back(plan);
    }

    /// Work that is done anew, before the other work.
    pub(super) fn push_first(&mut self, plan: Arc<JobPlan>) {
        self.waiting.push_front(plan);
    }

    /// The work that begins now.
    pub(super) fn take_first(&mut self) -> Option<Arc<JobPlan>> {
        self.waiting.pop_front()
    }

    /// Whether such work waits.
    pub(super) fn has(&self, is_it: impl Fn(&JobPlan) -> bool) -> bool {
        self.waiting.iter().any(|plan| is_it(plan))
    }

    /// The first such work, to be replaced.
    pub(super) fn find(&mut self, is_it: impl Fn(&JobPlan) -> bool) -> Option<&mut Arc<JobPlan>> {
        self.waiting.iter_mut().find(|plan| is_it(plan))
    }

    /// Drops the first such work. False if there is none.
    pub(super) fn drop_first(&mut self, is_it: impl Fn(&JobPlan) -> bool) -> bool {
        let at = self.waiting.iter().position(|plan| is_it(plan));
        at.and_then(|at| self.waiting.remove(at)).is_some()
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }
}
