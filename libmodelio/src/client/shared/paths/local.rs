//! A model whose shard is in this process: messages go through a mailbox, blocks are reduced where they lie, and
//! versions are shown where they were made.
//!
//! This module holds `unsafe`: it makes slices of staging regions. Each place says why that is sound.

use std::sync::Arc;

use parking_lot::MutexGuard;
use smallvec::SmallVec;

use crate::client::callers::Answers;
use crate::client::core::{Action, Own, Push};
use crate::client::payloads::{Others, Payload};
use crate::client::shards::Local;
use crate::client::shared::{Inner, Shared};
use crate::transport::local::{Mail, MailboxEnd, Pushed, Recipient, SharedBlock, SharedPayload};
use crate::transport::tally::Flow;
use crate::vocabulary::block_map::PartitionIndex;
use crate::vocabulary::block_slot::{BlockSlot, Placement};
use crate::vocabulary::ids::{BlockId, PlanId};
use crate::vocabulary::shard_error::ShardError;
use crate::wire::Message;

/// The only partition: the shard has all blocks.
const ALL: PartitionIndex = 0;

/// As many payloads of a block fit into the list without an allocation.
const INLINE: usize = 16;

/// Takes messages of the coordinator and the partition.
impl Recipient for Shared {
    fn receive(self: Arc<Shared>, from: MailboxEnd, mail: Mail) {
        // After its shutdown, the client shows no newer version.
        if self.lifetime.is_stopping() {
            return;
        }
        match (from, mail) {
            (MailboxEnd::Coordinator, Mail::Message(request, message)) => {
                let mut inner = self.inner.lock();
                let mut actions = Vec::new();
                inner.core.from_coordinator(request, message, self.now(), &mut actions);
                let answers = self.act_unanswered(inner, actions);
                match self.shards.local() {
                    Some(local) => local.unanswered.lock().push(answers),
                    None => answers.give(),
                }
            }
            (MailboxEnd::Partition, Mail::Retry) => {
                let mut inner = self.inner.lock();
                inner.pumps.went_on += 1;
                self.act(inner, vec![Action::Wake(ALL)]);
            }
            // No end sends a client anything else.
            _ => {}
        }
    }

    fn answer_callers(&self) {
        let Some(local) = self.shards.local() else { return };
        let answers = std::mem::take(&mut *local.unanswered.lock());
        answers.into_iter().for_each(Answers::give);
    }
}

/// So many bytes of new weights that lie in the version's buffer are little work: nothing is copied.
const IN_PLACE_BYTES: usize = 16 << 20;

impl Shared {
    /// Pushes the blocks that are left: what is little work in this thread, the rest on the shard's threads.
    pub(in crate::client) fn pump(&self, local: &Local) {
        let (is_little, threads) = {
            let mut inner = self.inner.lock();
            let left = inner.core.left_to_push(ALL);
            let is_little = left == 1
                || left * self.layout.block_size() as usize <= IN_PLACE_BYTES
                    && inner.payloads.are_in_place(&inner.core);
            let idle = local.shard.threads().saturating_sub(inner.pumps.at_work);
            let threads = left.min(idle).min(if is_little { 1 } else { usize::MAX });
            inner.pumps.at_work += threads;
            (is_little, threads)
        };
        // This thread must not be busy for long: it may be delivering messages, or be the timer.
        match (is_little, threads) {
            (_, 0) => {}
            (true, _) => self.push_all(local),
            _ => {
                for _ in 0..threads {
                    let this = self.this.clone();
                    local.shard.execute(Box::new(move || {
                        if let Some(shared) = this.upgrade()
                            && let Some(local) = shared.shards.local()
                        {
                            shared.push_all(local);
                        }
                    }));
                }
            }
        }
    }

    /// Pushes until no block is left, or the rest must wait. The caller counts this thread in `at_work`.
    fn push_all(&self, local: &Local) {
        loop {
            let mut inner = self.inner.lock();
            let now = self.now();
            let Some(Push { plan, block, ahead, .. }) = inner.core.next_push(ALL, now) else {
                inner.pumps.at_work -= 1;
                return;
            };
            inner.observed.sent(plan, now);
            let Some(payload) =
                inner.payloads.granted(&inner.core, block).filter(|payload| payload.plan == plan)
            else {
                continue;
            };
            let went_on = inner.pumps.went_on;
            let shard = inner.core.shards()[ALL];
            drop(inner);
            let began = self.timeline.moment();
            let pushed = self.push_here(local, &payload, (block, ahead));
            if pushed == Pushed::Taken {
                self.timeline.sent(began, plan, block, shard);
            }
            if pushed == Pushed::Later {
                let mut inner = self.inner.lock();
                inner.core.not_sent(plan, block);
                // The partition may have announced room before the block was put back. Then this thread tries again.
                if inner.pumps.went_on == went_on {
                    inner.pumps.at_work -= 1;
                    return;
                }
            }
        }
    }

    fn push_here(&self, local: &Local, payload: &Payload, (block, ahead): (BlockId, bool)) -> Pushed {
        let extent = self.layout.block_bytes(block);
        let span = extent.start as usize..extent.end as usize;
        let Payload { plan, sources, learners, written, checked, .. } = payload;
        let payloads: SmallVec<[SharedPayload<'_>; INLINE]> = sources
            .iter()
            .enumerate()
            .map(|(at, source)| SharedPayload {
                // SAFETY: nobody changes a whole block of a payload until its plan is over. A learner that aborts, or
                // gets lent memory back, may change it earlier: then `still_sends` below is false, and the bytes do not
                // count.
                bytes: unsafe { source.memory().bytes(span.clone()) },
                written: written.get(at).and_then(Option::as_deref),
                check: !checked.get(at).copied().unwrap_or_default(),
            })
            .collect();
        self.accounts.tally.moved(Flow::Push, span.len() * payloads.len());
        let (client, plan) = (self.client, *plan);
        let is_weights = learners.is_empty();
        let shared = SharedBlock { client, plan, block, payloads: &payloads, ahead, is_weights };
        let pushed = local.shard.push(shared, &|| self.still_sends(plan));
        if let Pushed::NonFinite(index) = pushed
            && let Some(&learner) = learners.get(index)
        {
            self.with_core(|core, _, actions| core.non_finite(plan, learner, block, actions));
        }
        pushed
    }

    /// Has the learner's block reduced from `payload`, if a plan that may take it is under way. Otherwise the caller
    /// must stage the block.
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
            mailbox.put(MailboxEnd::Client, MailboxEnd::Coordinator, Mail::Message(0, announces));
            drop(inner);
            mailbox.drain();
            inner = self.inner.lock();
            own = inner.core.next_own(learner, step, block);
        }
        let Own::Send(plan) = own else { return Ok(Placement::Deferred) };
        let (others, shard) = (inner.payloads.others(&inner.core, learner, block), inner.core.shards()[ALL]);
        drop(inner);
        let began = self.timeline.moment();
        let pushed = self.push_own(local, plan, slot, payload, &others);
        let mut inner = self.inner.lock();
        inner.observed.sent(plan, self.now());
        if pushed == Pushed::Taken {
            self.timeline.sent(began, plan, block, shard);
        }
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
            // SAFETY: nobody changes a committed payload until its plan is over.
            let bytes = unsafe { region.memory().bytes(span.clone()) };
            payloads.push(SharedPayload { bytes, written: None, check: false });
        }
        payloads.extend(own);
        self.accounts.tally.moved(Flow::Push, span.len() * payloads.len());
        let (client, payloads) = (self.client, &payloads[..]);
        let block = SharedBlock { client, plan, block, payloads, ahead: true, is_weights: false };
        local.shard.push(block, &|| true)
    }
}
