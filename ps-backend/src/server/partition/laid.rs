//! New weights in parts, which clients have brought before they are published ([`crate::partition::brought`]). The
//! executor makes each block of a set that a plan lays over the newest version. It comes to its place as if somebody had
//! sent it.

use std::cell::RefCell;
use std::sync::Arc;

use libmodelio::bytes::changes::Changed;
use libmodelio::bytes::crc32c::crc32c;
use libmodelio::transport::tally::Flow;
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::ids::{BlockId, ClientId, Epoch, PlanId, Version};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::strided::Strided;
use libmodelio::wire::{Message, Refusal, SetOfParts};

use super::reservation::{Reserved, Room, Sender};
use super::{Partition, PartitionState};
use crate::coordinator::NOBODY;
use crate::partition::brought::{Laid, Part, Sizes};
use crate::partition::executor::{Batch, Pass};
use crate::partition::store::pieces;

impl Partition {
    /// A place for a part, or what has come of it.
    pub(in crate::server) fn part(&self, client: ClientId, token: u64) -> Arc<Part> {
        self.brought.lock().part(client, token)
    }

    /// Keeps packed pieces of a part, which `patched` says how to make from those of a version.
    ///
    /// # Errors
    /// If they do not lie here, or not by this block map, or are no pieces, or the part has more bytes than there are.
    /// [`Refusal::NoVersion`] if they cannot be made.
    pub(in crate::server) fn keep_part(
        &self,
        part: &Part,
        epoch: Epoch,
        (parts, patched, payload): (&[Strided], Option<(Version, u32)>, &[u8]),
    ) -> Result<(), Refusal> {
        if self.epoch != epoch {
            return Err(Refusal::Epoch { expected: self.epoch, got: epoch });
        }
        let made = patched.map(|(base, crc)| {
            let refused = || Refusal::NoVersion { wanted: base, newest: self.progress().0 };
            let base = self.store.version(base).ok_or_else(refused)?;
            let mut made = pieces::packed(&base, self.model_bytes, parts)?;
            let is_right = Changed::apply(payload, &mut made).is_ok() && crc32c(&made) == crc;
            is_right.then_some(made).ok_or_else(refused)
        });
        let made = made.transpose()?;
        let packed = made.as_deref().unwrap_or(payload);
        let (layout, partition) = (self.layout(), self.store.partition());
        let sizes = Sizes { model: self.model_bytes, block: layout.block_size().into(), part: layout.size() };
        part.keep(sizes, |block| partition.local(block), (parts, packed))?;
        self.store.tally().moved(Flow::Push, payload.len());
        self.store.tally().copied(Flow::Push, packed.len());
        Ok(())
    }

    /// A plan on top of `base` publishes this set, or no parts.
    pub(super) fn takes_parts(&self, plan: PlanId, set: Option<SetOfParts>, base: Version) {
        self.brought.lock().takes(plan, set, base, self.store.partition().blocks());
    }

    /// Why the parts of this plan make no version, if that is known.
    pub(super) fn parts_fail(&self, plan: PlanId) -> Option<ShardError> {
        self.brought.lock().why_not(plan)
    }

    /// A plan is over. The caller drops its parts once it holds no lock, because freeing them takes a while.
    pub(super) fn lets_parts_go(&self, plan: PlanId) -> impl Sized + use<> {
        self.brought.lock().lets_go(plan)
    }

    /// Has the executor make the blocks of a plan that publishes parts, once it has its memory.
    pub(super) fn lay(self: &Arc<Partition>, plan: PlanId) {
        let laid = self.brought.lock().laid(plan).map(Arc::clone);
        let Some(laid) = laid else { return };
        let blocks = laid.blocks(self.layout().blocks() as usize);
        let partition = Arc::clone(self);
        let lays = Box::new(move |block| partition.lay_block(plan, &laid, block));
        let blocks = blocks.ones().map(|block| BlockId(block as u32)).collect();
        self.executor.execute(Batch { pass: Pass::Gather(lays, blocks), done: Box::new(drop) });
    }

    fn lay_block(self: &Arc<Partition>, plan: PlanId, laid: &Laid, block: BlockId) {
        thread_local!(static MADE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) });
        let Some(global) = self.store.partition().global(block) else { return };
        let reserved = self
            .push_of(plan, global, Form::Plain, false)
            .and_then(|push| self.reserve(&mut Sender::here(NOBODY), push, Room::None));
        // If not, the plan was dropped.
        let Ok(Reserved::Ready(reservation)) = reserved else { return };
        let start = u64::from(global.0) * u64::from(self.layout().block_size());
        let base = self.store.version(laid.base()).ok_or(ShardError::Unreachable);
        let outcome = MADE.with_borrow_mut(|made| {
            laid.block(base?.block(block), (block, start), made)?;
            let failed = |refusal| ShardError::Lost(format!("block {global} cannot be made: {refusal}"));
            reservation.complete(made, || true).map_err(failed)
        });
        if let Err(why) = outcome
            && laid.fails(why.clone())
        {
            let state = self.state.lock();
            state.send(self.epoch, 0, Message::Unmade { plan, why });
            PartitionState::deliver(state);
        }
    }
}
