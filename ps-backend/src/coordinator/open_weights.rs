//! New weights that a client still writes: a plan takes their blocks as they come, and gives way to any other work.
//!
//! The core of the job does not know of such a plan. The request to publish seals it ([`CoordinatorCore::want`]) if it
//! names the plan. If not, the plan is dropped, and the weights are sent as a whole.

use std::collections::BTreeSet;
use std::sync::Arc;

use libmodelio::vocabulary::ids::ClientId;
use libmodelio::vocabulary::meta::Meta;

use super::plans::Run;
use super::{Action, CoordinatorCore};
use crate::core::{JobPlan, Now, Source};

impl CoordinatorCore {
    /// A client has a whole block of new weights, and writes others. A plan begins that takes the blocks as they come,
    /// once no other work is there.
    pub(super) fn begin_open_weights(
        &mut self,
        client: ClientId,
        token: u64,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        if !self.states.announces_plans() || self.core.is_held() || self.core.may_assign().is_err() {
            return;
        }
        if self.run.is_some() || !self.queue.is_empty() {
            self.queue.open_next = Some((client, token));
            return;
        }
        let weights = std::iter::once(0..self.shape.blocks()).collect();
        let meta = Meta::default();
        let buffer = Source { client, name: token, weights, ahead: None, meta, parts: None };
        self.begin(Arc::new(JobPlan::of_weights(buffer, Some(BTreeSet::new()))), now, actions);
    }

    /// No work is left. A plan begins for the new weights that have waited for that, if their client still writes them.
    pub(super) fn begin_waiting_weights(&mut self, now: Now, actions: &mut Vec<Action>) {
        if let Some((client, token)) = self.queue.open_next.take()
            && self.clients.get(&client).is_some_and(|client| client.connected)
        {
            self.begin_open_weights(client, token, now, actions);
        }
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
