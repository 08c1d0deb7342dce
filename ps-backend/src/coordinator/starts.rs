//! How a plan of the core begins: its senders, and the message that starts it at the shards.
use libmodelio::vocabulary::controls::NonFinite;
use libmodelio::vocabulary::ids::PlanId;
use libmodelio::vocabulary::partly::PartlyWritten;
use libmodelio::vocabulary::reducer::Combine;
use libmodelio::wire::{Granted, Message, Plan, PlanSource};

use super::CoordinatorCore;
use super::senders::{Sender, ranges, senders};
use crate::core;

impl CoordinatorCore {
    /// The senders of a core's plan, and its message to the shards under this number. None if a learner is gone whose
    /// contribution was still written.
    pub(super) fn start_of(&self, plan: &core::JobPlan, id: PlanId) -> Option<(Vec<Sender>, Message)> {
        let replaces = plan.work.combine().is_some_and(Combine::replaces);
        let mut senders = match &plan.weights {
            None => senders(&plan.inputs, self.core.accumulated_contributions(), replaces),
            Some(weights) => vec![Sender {
                client: weights.client,
                learners: Vec::new(),
                payload: match plan.provisional {
                    None => Granted::Weights(weights.name),
                    Some(_) => Granted::OpenWeights(weights.name),
                },
                // The blocks were checked when the request came.
                blocks: self.shape.block_set(&weights.weights).unwrap_or_default(),
                partly: PartlyWritten::default(),
                counted: PlanId(0),
            }],
        };
        if let Some(open) = plan.provisional.as_ref().filter(|_| plan.is_provisional()) {
            self.add_open(open, &mut senders, replaces)?;
        }
        for sender in &mut senders {
            sender.counted = self.newest_counted(sender.client);
        }
        let controls = self.core.controls();
        let reject = controls.nonfinite == NonFinite::Reject;
        let source = |sender: &Sender| PlanSource {
            client: sender.client,
            blocks: ranges(&sender.blocks),
            // Clients check the parts of their sums themselves.
            check: reject && (self.local_shard.is_there() || sender.learners.len() <= 1),
            partly: sender.partly.clone(),
            provisional: sender.is_provisional(),
        };
        let start = Message::Start(Box::new(Plan {
            plan: id,
            base: self.core.version(),
            work: plan.work.clone(),
            sources: senders.iter().map(source).collect(),
            ordered: replaces || controls.deterministic,
            changes: controls.changes,
            parts: plan.weights.as_ref().and_then(|weights| weights.parts.clone()),
        }));
        Some((senders, start))
    }
}
