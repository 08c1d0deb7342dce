//! Who has made the newest version.

use libmodelio::vocabulary::ids::{ClientId, PlanId};

use super::plans::Run;

/// What clients must know of the newest version to tell whether they have it already.
#[derive(Debug, Default)]
pub(super) struct MadeFrom {
    /// It was made from these new weights: the client, and its token for them.
    weights: Option<(ClientId, u64)>,
    /// The plan that has made it. 0 if another coordinator has run it.
    plan: PlanId,
}

impl MadeFrom {
    /// The plan under way has made it.
    pub(super) fn of(run: Option<&Run>) -> MadeFrom {
        MadeFrom { weights: run.and_then(Run::new_weights), plan: run.map_or(PlanId(0), Run::id) }
    }

    /// The token of `client` for the new weights that it was made from.
    pub(super) fn weights_of(&self, client: ClientId) -> Option<u64> {
        self.weights.filter(|(of, _)| *of == client).map(|(_, token)| token)
    }

    /// The plan that has made it.
    pub(super) fn plan(&self) -> PlanId {
        self.plan
    }
}
