//! The senders of a plan: the client of each contribution, the blocks that it sends, and the bytes of them that count.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::block_ranges::BlockRanges;
use libmodelio::vocabulary::ids::{ClientId, LearnerId, PlanId, Step};
use libmodelio::vocabulary::partly::PartlyWritten;
use libmodelio::wire::Granted;

use super::CoordinatorCore;
use super::shares::{Share, Values, shares};
use crate::core::{Contribution, Now};

/// One client's part of a plan.
#[derive(Debug)]
pub(super) struct Sender {
    pub(super) client: ClientId,
    /// The learners whose contributions it sends, in the order of addition. None for new weights.
    pub(super) learners: Vec<LearnerId>,
    pub(super) payload: Granted,
    pub(super) blocks: FixedBitSet,
    /// The ranges that count, of blocks that others send, too, or that nobody has written as a whole.
    pub(super) partly: PartlyWritten,
    /// The newest plan with contributions of the client's that counts.
    pub(super) counted: PlanId,
}

impl Sender {
    /// Whether some of what it sends is still written.
    pub(super) fn is_provisional(&self) -> bool {
        match &self.payload {
            Granted::Contributions { open, .. } => open.as_ref().is_some_and(|open| !open.is_empty()),
            Granted::Weights(_) => false,
            Granted::OpenWeights(_) => true,
        }
    }
}

impl CoordinatorCore {
    /// Adds learners that have not committed yet: each to its client, with the client's other contributions. All senders
    /// learn that the plan is provisional.
    pub(super) fn add_open(
        &self,
        learners: &BTreeSet<LearnerId>,
        senders: &mut Vec<Sender>,
        replaces: bool,
    ) -> Option<()> {
        let mut by_client: BTreeMap<ClientId, Vec<(LearnerId, Step)>> = BTreeMap::new();
        for &learner in learners {
            // If the plan has waited for the end of another one, some may have committed meanwhile, and left since.
            let committed = self.core.unread().find(|(of, _)| *of == learner);
            let (client, step) = match committed {
                Some((_, source)) => (source.client, Step(source.name)),
                None => (*self.owners.get(&learner)?, self.core.member(learner, Now::ZERO)?.step.next()),
            };
            by_client.entry(client).or_default().push((learner, step));
        }
        for sender in senders.iter_mut() {
            if let Granted::Contributions { open, .. } = &mut sender.payload {
                *open = Some(Vec::new());
            }
        }
        for (client, added) in by_client {
            let mut blocks = FixedBitSet::with_capacity(self.shape.blocks() as usize);
            blocks.insert_range(..);
            let before =
                senders.iter().position(|sender| sender.client == client).map(|at| senders.remove(at));
            let mut of = match before.map(|sender| sender.payload) {
                Some(Granted::Contributions { of, .. }) => of,
                _ => Vec::new(),
            };
            let open = added.iter().map(|(learner, _)| *learner).collect();
            of.extend(added);
            of.sort_unstable();
            let all = of.iter().map(|(learner, _)| *learner).collect();
            let payload = Granted::Contributions { of, replaces, open: Some(open) };
            let partly = PartlyWritten::default();
            senders.push(Sender { client, learners: all, payload, blocks, partly, counted: PlanId(0) });
        }
        senders.sort_by_key(|sender| sender.learners.first().copied());
        Some(())
    }
}

/// The senders of contributions: the clients, in the order of their first learners. If the last contribution
/// `replaces` the others, each byte gets the value of the highest learner that has written it, whether it is sent now
/// or was sent before (`accumulated`).
pub(super) fn senders<'a>(
    contributions: &'a [Arc<Contribution>],
    accumulated: impl Iterator<Item = &'a Arc<Contribution>>,
    replaces: bool,
) -> Vec<Sender> {
    let mut sorted: Vec<_> = contributions.iter().collect();
    sorted.sort_by_key(|contribution| contribution.learner);
    let mut by_client: BTreeMap<ClientId, (Vec<(LearnerId, Step)>, FixedBitSet)> = BTreeMap::new();
    for contribution in &sorted {
        let (of, blocks) = by_client.entry(contribution.source.client).or_default();
        of.push((contribution.learner, Step(contribution.source.name)));
        blocks.grow(contribution.sent.len());
        if !replaces {
            blocks.union_with(&contribution.sent);
        }
    }
    let mut shares = if replaces { shares(values(&sorted, accumulated)) } else { BTreeMap::new() };
    let mut senders: Vec<Sender> = by_client
        .into_iter()
        .map(|(client, (of, mut blocks))| {
            let Share { blocks: share, partly } = shares.remove(&client).unwrap_or_default();
            blocks.union_with(&share);
            let learners = of.iter().map(|(learner, _)| *learner).collect();
            Sender {
                client,
                learners,
                payload: Granted::Contributions { of, replaces, open: None },
                blocks,
                partly,
                counted: PlanId(0),
            }
        })
        .collect();
    senders.sort_by_key(|sender| sender.learners.first().copied());
    senders
}

fn values<'a>(
    sending: &[&'a Arc<Contribution>],
    accumulated: impl Iterator<Item = &'a Arc<Contribution>>,
) -> Vec<Values<'a>> {
    let values = |of: &'a Contribution, sender| Values {
        learner: of.learner,
        sender,
        sent: &of.sent,
        partly: of.partly.as_ref(),
    };
    let sending = sending.iter().map(|of| values(of, Some(of.source.client)));
    sending.chain(accumulated.map(|of| values(of, None))).collect()
}

/// A set of blocks as ranges.
pub(super) fn ranges(blocks: &FixedBitSet) -> BlockRanges {
    let mut ranges = BlockRanges::new();
    for block in blocks.ones().map(|block| block as u32) {
        match ranges.last_mut() {
            Some(last) if last.end == block => last.end += 1,
            _ => ranges.push(block..block + 1),
        }
    }
    ranges
}
