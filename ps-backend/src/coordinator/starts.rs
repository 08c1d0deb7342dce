//! How a core's action becomes a plan: its senders, and the message that starts it at the shards.
use libmodelio::vocabulary::controls::NonFinite;
use libmodelio::vocabulary::ids::{LearnerId, PlanId};
use libmodelio::vocabulary::partly::PartlyWritten;
use libmodelio::vocabulary::reducer::Combine;
use libmodelio::wire::{Granted, Message, Plan, PlanSource, Work};

use super::CoordinatorCore;
use super::senders::{Sender, ranges, senders};
use crate::core;

/// The purpose of a plan.
#[derive(Debug)]
pub(super) enum Kind {
    /// Contributions of these learners are added up.
    Accumulate(Vec<LearnerId>),
    /// A version is made from contributions.
    Reduce,
    /// A version is made from new weights.
    Assign,
}

impl CoordinatorCore {
    /// The senders of a core's action, and its message to the shards as the plan of this number. None for actions
    /// that are no work of shards.
    pub(super) fn plan_of(&self, work: &core::Action, id: PlanId) -> Option<(Kind, Vec<Sender>, Message)> {
        let (kind, mut senders, todo) = match work {
            core::Action::Accumulate { contributions, combine } => {
                let learners = contributions.iter().map(|c| c.learner).collect();
                let accumulated = self.core.accumulated_contributions();
                let senders = senders(contributions, accumulated, combine.replaces());
                (Kind::Accumulate(learners), senders, Work::Add { combine: *combine })
            }
            core::Action::Measure { contributions, step, tensors, groups, quantity } => {
                let learners = contributions.iter().map(|c| c.learner).collect();
                let senders = senders(contributions, std::iter::empty(), false);
                let (step, tensors) = (step.clone(), tensors.clone());
                let (groups, quantity) = (groups.clone(), *quantity);
                let work = Work::Measure { step, tensors, groups, quantity };
                (Kind::Accumulate(learners), senders, work)
            }
            core::Action::Reduce(plan) => match &plan.work {
                core::Work::Reduce { step, tensors, groups, factors, fresh_state, inputs } => {
                    let replaces = step.reducer.combine().replaces();
                    let (step, tensors) = (step.clone(), tensors.clone());
                    let (groups, factors, fresh_state) = (groups.clone(), factors.clone(), *fresh_state);
                    let mut senders = senders(inputs, self.core.accumulated_contributions(), replaces);
                    if let Some(open) = &plan.provisional {
                        self.add_open(open, &mut senders, replaces)?;
                    }
                    (Kind::Reduce, senders, Work::Reduce { step, tensors, groups, factors, fresh_state })
                }
                core::Work::Assign { buffer } => {
                    let sender = Sender {
                        client: buffer.client,
                        learners: Vec::new(),
                        payload: match plan.provisional {
                            None => Granted::Weights(buffer.name),
                            Some(_) => Granted::OpenWeights(buffer.name),
                        },
                        // The blocks were checked when the request came.
                        blocks: self.shape.block_set(&buffer.weights).unwrap_or_default(),
                        partly: PartlyWritten::default(),
                        counted: PlanId(0),
                    };
                    (Kind::Assign, vec![sender], Work::Assign { token: buffer.name })
                }
            },
            _ => return None,
        };
        for sender in &mut senders {
            sender.counted = self.newest_counted(sender.client);
        }
        let controls = self.core.controls();
        let reject = controls.nonfinite == NonFinite::Reject;
        let replaces = todo.combine().is_some_and(Combine::replaces);
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
            work: todo,
            sources: senders.iter().map(source).collect(),
            ordered: replaces || controls.deterministic,
        }));
        Some((kind, senders, start))
    }
}
