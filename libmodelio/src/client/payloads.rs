//! What the client sends: contributions and new weights, where they lie until nobody needs them any more.

pub(super) mod averaged;
pub(super) mod residual;
pub(super) mod sum;
pub(super) mod wire_form;

use std::collections::HashMap;

use smallvec::{SmallVec, smallvec};

use crate::bytes::region::Region;
use crate::client::core::ClientCore;
use crate::client::options::Staged;
use crate::client::payloads::sum::Written;
use crate::vocabulary::coding::Coding;
use crate::vocabulary::ids::{BlockId, LearnerId, PlanId, Step};
use crate::wire::Granted;

/// The payloads of learners' contributions and of new weights.
#[derive(Default)]
pub(super) struct Payloads {
    pub(super) sources: HashMap<(LearnerId, Step), Staged>,
    /// New weights, by their tokens.
    pub(super) weights: HashMap<u64, NewWeights>,
    /// Memory of sums, which is used again.
    pub(super) spare: Vec<Vec<u8>>,
}

/// New weights, which shards may have to be sent.
pub(super) struct NewWeights {
    /// Their memory.
    pub(super) buffer: Region,
    /// They were searched for NaN and Inf, and hold none.
    pub(super) checked: bool,
    /// The buffer is a version's, and is not written any more: if the version is all of it, the client may show it.
    pub(super) can_show: bool,
}

/// Contributions of learners to a block, each with its learner.
pub(super) type Others = SmallVec<[(LearnerId, Region); 4]>;

/// The payload of one block for the plan under way.
pub(super) struct Payload {
    pub(super) plan: PlanId,
    /// The memory that holds it, one region for each learner.
    pub(super) sources: Vec<Region>,
    /// No program stores into the sources while they are read.
    pub(super) steady: bool,
    /// For each source, whether its contribution has been searched for NaN and Inf.
    pub(super) checked: SmallVec<[bool; 16]>,
    pub(super) learners: Vec<LearnerId>,
    /// The shard searches what is sent for NaN and Inf. It does so if the client sends one contribution for the plan.
    pub(super) shard_checks: bool,
    /// The last source counts, and not the sum.
    pub(super) replaces: bool,
    /// The written ranges of each source, if there are several sources and the last one counts, or if the block is coded.
    pub(super) written: Vec<Written>,
    /// The form in which it crosses a network by TCP, if not in full.
    pub(super) coding: Option<Coding>,
}

impl Payloads {
    /// The payload of a block for the plan under way. `None` without a plan, or if the payload is gone.
    pub(super) fn granted(&self, core: &ClientCore, block: BlockId) -> Option<Payload> {
        let (plan, granted) = core.outgoing()?;
        let is_open = granted.is_provisional();
        match granted.clone() {
            Granted::Weights(token) | Granted::OpenWeights(token) => {
                let NewWeights { buffer, checked, can_show } = self.weights.get(&token)?;
                let (sources, checked) = (vec![buffer.clone()], smallvec![*checked]);
                Some(Payload {
                    plan,
                    sources,
                    // A program may write a block again while that is being sent: before it has published, and a disk's
                    // at any time.
                    steady: !is_open && *can_show,
                    checked,
                    learners: Vec::new(),
                    shard_checks: true,
                    replaces: false,
                    written: Vec::new(),
                    coding: None,
                })
            }
            Granted::Contributions { mut of, replaces, .. } => {
                let shard_checks = of.len() == 1;
                of.retain(|&(learner, step)| core.holds(learner, step, block));
                let staged: Option<Vec<&Staged>> = of.iter().map(|key| self.sources.get(key)).collect();
                let staged = staged?;
                let checked: SmallVec<_> = staged.iter().map(|staged| staged.steady).collect();
                let steady = checked.iter().all(|checked| *checked);
                let written = |staged: &&Staged| staged.partly.as_ref()?.of(block).map(<[_]>::to_vec);
                let coding = core.coding();
                let written = match &staged[..] {
                    several @ [_, _, ..] if replaces => several.iter().map(written).collect(),
                    all if coding.is_some() => all.iter().map(written).collect(),
                    _ => Vec::new(),
                };
                let sources = staged.into_iter().map(|staged| staged.region.clone()).collect();
                let learners = of.iter().map(|(learner, _)| *learner).collect();
                Some(Payload {
                    plan,
                    sources,
                    steady,
                    checked,
                    learners,
                    shard_checks,
                    replaces,
                    written,
                    coding,
                })
            }
        }
    }

    /// The committed contributions of other learners to a block for the plan under way, in their order. Their commits
    /// have checked them for NaN.
    pub(super) fn others(&self, core: &ClientCore, learner: LearnerId, block: BlockId) -> Others {
        let Some((_, Granted::Contributions { of, .. })) = core.outgoing() else { return Others::new() };
        let others = of.iter().filter(|&&(of, step)| of != learner && core.holds(of, step, block));
        others.filter_map(|key| Some((key.0, self.sources.get(key)?.region.clone()))).collect()
    }

    /// Whether the plan under way is of new weights that lie in the version's buffer, and need no check.
    pub(super) fn are_in_place(&self, core: &ClientCore) -> bool {
        let Some((_, Granted::Weights(token))) = core.outgoing() else { return false };
        self.weights.get(token).is_some_and(|weights| weights.checked)
    }
}
