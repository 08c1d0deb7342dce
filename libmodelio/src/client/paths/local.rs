//! A model whose shard is in this process: words go by a mailbox, blocks are reduced where they lie, and versions are
//! shown where they were made.
//!
//! Holds `unsafe`: staging regions become slices. What makes that sound is told at each place.

use std::sync::Arc;

use parking_lot::MutexGuard;
use smallvec::SmallVec;

use crate::client::blocks::Payload;
use crate::client::core::{Action, Now, Own, Part, Push};
use crate::client::shared::{Answers, Inner, Local, Shared};
use crate::transport::local::{End, HeldVersion, Mail, Pushed, Recipient, SharedBlock, SharedPayload};
use crate::transport::tally::Flow;
use crate::transport::{BlockSlot, Placement, Region, ShardError};
use crate::vocabulary::ids::{BlockId, LearnerId, PlanId};
use crate::wire::{Granted, Message, Refusal};

/// The shard's only part.
const ALL: Part = 0;

/// Payloads of a block that are listed on the stack.
const INLINE: usize = 16;

/// Contributions of others to a block, which are committed, by their learners.
type Others = SmallVec<[(LearnerId, Region); 4]>;

/// What the coordinator and the partition say.
impl Recipient for Shared {
    fn receive(self: Arc<Shared>, from: End, mail: Mail) {
        // It shows no newer version than it did when it was shut down.
        if self.is_stopping() {
            return;
        }
        match (from, mail) {
            (End::Coordinator, Mail::Message(request, message)) => {
                let mut inner = self.inner.lock();
                let mut actions = Vec::new();
                inner.core.from_coordinator(request, message, self.now(), &mut actions);
                let answers = self.act_unanswered(inner, actions);
                self.unanswered.lock().push(answers);
            }
            (End::Partition, Mail::Retry) => {
                let mut inner = self.inner.lock();
                inner.pumps.went_on += 1;
                self.act(inner, vec![Action::Wake(ALL)]);
            }
            // Nobody says anything else to a client.
            _ => {}
        }
    }

    fn answer_callers(&self) {
        let answers = std::mem::take(&mut *self.unanswered.lock());
        answers.into_iter().for_each(Answers::give);
    }
}

impl Inner {
    /// What others contribute to a block for the plan under way, in their order. Whoever has committed it, for good, has
    /// looked for NaN in it.
    fn others(&self, learner: LearnerId, block: BlockId) -> Others {
        let Some((_, Granted::Contributions { of, .. })) = self.core.outgoing() else { return Others::new() };
        let others = of.iter().filter(|&&(of, step)| of != learner && self.core.holds(of, step, block));
        others.filter_map(|key| Some((key.0, self.sources.get(key)?.region.clone()))).collect()
    }

    /// Shows the version that is to be pulled: it is here.
    pub(in crate::client) fn show_here(&mut self, local: &Local, now: Now, more: &mut Vec<Action>) {
        let Some(version) = self.core.pulling() else { return };
        match local.shard.version(version) {
            Ok(HeldVersion { region, published, hold }) => {
                self.versions.show(version, region, published, hold);
                self.core.is_here(version, more);
            }
            Err(newest) => {
                let gone = Message::Refused(Refusal::NoVersion { wanted: version, newest });
                self.core.from_shard(ALL, gone, now, more);
            }
        }
    }
}

impl Shared {
    /// Pushes what there is to push: a single block in this thread, more of them on the shard's.
    pub(in crate::client) fn pump(&self, local: &Local) {
        let (left, threads) = {
            let mut inner = self.inner.lock();
            let left = inner.core.left_to_push(ALL);
            let idle = local.shard.threads().saturating_sub(inner.pumps.at_work);
            let threads = left.min(idle);
            inner.pumps.at_work += threads;
            (left, threads)
        };
        // This thread may be the one that hands messages over, or the timer.
        match (left, threads) {
            (_, 0) => {}
            (1, _) => self.push_all(local),
            _ => {
                for _ in 0..threads {
                    let this = self.this.clone();
                    local.shard.execute(Box::new(move || {
                        if let Some(shared) = this.upgrade()
                            && let Some(local) = &shared.local
                        {
                            shared.push_all(local);
                        }
                    }));
                }
            }
        }
    }

    /// Pushes until nothing is left, or what is left has to wait. One of those who are at work.
    fn push_all(&self, local: &Local) {
        loop {
            let mut inner = self.inner.lock();
            let Some(Push { plan, block, .. }) = inner.core.next_push(ALL, self.now()) else {
                inner.pumps.at_work -= 1;
                return;
            };
            let Some(payload) = inner.granted(block).filter(|payload| payload.plan == plan) else { continue };
            let went_on = inner.pumps.went_on;
            drop(inner);
            if self.push_here(local, &payload, block) == Pushed::Later {
                let mut inner = self.inner.lock();
                inner.core.not_sent(plan, block);
                // Who says that it may be taken may have said so before it was put back.
                if inner.pumps.went_on == went_on {
                    inner.pumps.at_work -= 1;
                    return;
                }
            }
        }
    }

    fn push_here(&self, local: &Local, payload: &Payload, block: BlockId) -> Pushed {
        let extent = self.layout.block_bytes(block);
        let span = extent.start as usize..extent.end as usize;
        let Payload { plan, sources, learners, written, checked, .. } = payload;
        let payloads: SmallVec<[SharedPayload<'_>; INLINE]> = sources
            .iter()
            .enumerate()
            .map(|(at, source)| SharedPayload {
                // SAFETY: a committed payload stays untouched until the plan that sends it is over, or is found to be
                // lent no more below.
                bytes: unsafe { source.memory().bytes(span.clone()) },
                written: written.get(at).and_then(Option::as_deref),
                check: !checked.get(at).copied().unwrap_or_default(),
            })
            .collect();
        self.tally.moved(Flow::Push, span.len() * payloads.len());
        let (client, plan) = (self.client, *plan);
        let shared = SharedBlock { client, plan, block, payloads: &payloads, is_own: false };
        let pushed = local.shard.push(shared, &|| self.still_sends(plan));
        if let Pushed::NonFinite(index) = pushed
            && let Some(&learner) = learners.get(index)
        {
            self.with_core(|core, _, actions| core.non_finite(plan, learner, block, actions));
        }
        pushed
    }

    /// Has a block that was taken of its learner reduced from where it is, if its plan is under way. Otherwise it is to be
    /// staged.
    pub(in crate::client) fn offer_here<'a>(
        &'a self,
        local: &Local,
        mut inner: MutexGuard<'a, Inner>,
        slot: BlockSlot,
        payload: &[u8],
    ) -> Result<Placement, ShardError> {
        let BlockSlot { learner, step, block, .. } = slot;
        let mut own = inner.core.next_own(learner, step, block);
        if own == Own::Announce {
            let mailbox = local.shard.mailbox();
            let announces = Message::WholeBlock { learner, step };
            mailbox.put(End::Client, End::Coordinator, Mail::Message(0, announces));
            drop(inner);
            mailbox.drain();
            inner = self.inner.lock();
            own = inner.core.next_own(learner, step, block);
        }
        let Own::Send(plan) = own else { return Ok(Placement::Deferred) };
        let others = inner.others(learner, block);
        drop(inner);
        let pushed = self.push_own(local, plan, slot, payload, &others);
        let mut inner = self.inner.lock();
        match pushed {
            Pushed::Taken if inner.core.sent_own(learner, step, plan, block) => Ok(Placement::Reduced),
            Pushed::Taken => Err(ShardError::UnknownLearner(learner)),
            Pushed::NonFinite(_) => {
                inner.core.not_sent(plan, block);
                inner.core.give_back(slot);
                Err(ShardError::NonFinite(block))
            }
            Pushed::Later | Pushed::Unwanted => {
                inner.core.not_sent(plan, block);
                Ok(Placement::Deferred)
            }
        }
    }

    fn push_own(
        &self,
        local: &Local,
        plan: PlanId,
        BlockSlot { learner, block, .. }: BlockSlot,
        payload: &[u8],
        others: &Others,
    ) -> Pushed {
        let extent = self.layout.block_bytes(block);
        let span = extent.start as usize..extent.end as usize;
        let own = SharedPayload { bytes: payload, written: None, check: true };
        let mut payloads = SmallVec::<[SharedPayload<'_>; INLINE]>::new();
        let mut own = Some(own);
        for (of, region) in others {
            if *of > learner {
                payloads.extend(own.take());
            }
            // SAFETY: a committed payload stays untouched until the plan that sends it is over.
            let bytes = unsafe { region.memory().bytes(span.clone()) };
            payloads.push(SharedPayload { bytes, written: None, check: false });
        }
        payloads.extend(own);
        self.tally.moved(Flow::Push, span.len() * payloads.len());
        let block = SharedBlock { client: self.client, plan, block, payloads: &payloads, is_own: true };
        local.shard.push(block, &|| true)
    }
}
