//! New weights that a client still writes: a plan takes their blocks as they come, and gives way to any other work.
//!
//! The core of the job does not know of such a plan. The request to publish seals it ([`CoordinatorCore::want`]) if it
//! names the plan. If not, the plan is dropped, and the weights are sent as a whole.

use std::collections::BTreeSet;
use std::sync::Arc;

use libmodelio::vocabulary::ids::ClientId;

use super::plans::Run;
use super::{Action, CoordinatorCore, Source};
use crate::core::{self, Now};

impl CoordinatorCore {
    /// A client has a whole block of new weights, and writes others. If no other work is there, a plan begins that takes
    /// the blocks as they come.
    pub(super) fn begin_open_weights(
        &mut self,
        client: ClientId,
        token: u64,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let is_idle = self.run.is_none() && self.queue.is_empty() && !self.core.is_held();
        if !self.announces || !is_idle || self.core.may_assign().is_err() {
            return;
        }
        let weights = std::iter::once(0..self.blocks).collect();
        let buffer = Source { client, name: token, weights, ahead: None };
        let plan = core::Plan { work: core::Work::Assign { buffer }, provisional: Some(BTreeSet::new()) };
        self.begin(core::Action::Reduce(Arc::new(plan)), now, actions);
    }

    /// Drops the plan of new weights that one of these clients still writes, if such a plan is under way.
    pub(super) fn drop_open_weights(
        &mut self,
        of: impl Fn(ClientId) -> bool,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        if self.run.as_ref().and_then(Run::open_weights).is_some_and(|open| of(open.client)) {
            self.drop_run(now, actions);
        }
    }
}
