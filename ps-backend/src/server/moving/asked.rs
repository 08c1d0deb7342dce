//! What shards ask of each other when a model's blocks move, and when a snapshot is taken.

use std::sync::Arc;
use std::time::Duration;

use libmodelio::vocabulary::ids::Generation;
use libmodelio::wire::{Adoption, Message, Refusal};

use super::adopting::Adopting;
use crate::server::partition::Partition;
use crate::server::shared::Shared;
use crate::server::unsent::AdminAnswer;

/// Whether a message is one of those by which shards move blocks, or of those about snapshots.
pub(in crate::server) fn is_between_shards(message: &Message) -> bool {
    matches!(
        message,
        Message::Adopt
            | Message::Fill { .. }
            | Message::Fetch { .. }
            | Message::HandOver { .. }
            | Message::Switch
            | Message::Abandon { .. }
            | Message::StopMove { .. }
            | Message::Capture { .. }
            | Message::Pin { .. }
            | Message::Copy { .. }
            | Message::FetchCopy { .. }
            | Message::Release { .. }
            | Message::BeginAt { .. }
    )
}

impl Shared {
    /// What shards ask of each other. May take time.
    pub(in crate::server) fn between_shards(
        self: &Arc<Shared>,
        message: Message,
        payload: &[u8],
    ) -> AdminAnswer {
        let done = |()| (Message::Done, None);
        match message {
            Message::Adopt => self.adopt(payload).map(done),
            Message::Fill { generation, attempt, version, reducer } => {
                let adopting = self.adopting(generation, attempt)?;
                let (shared, epoch) = (Arc::clone(self), adopting.epoch_in_force());
                let here =
                    move |(block, what)| shared.partition_of(generation)?.1.kept(epoch, version, block, what);
                adopting.fill(*self.shard.lock(), here, (version, reducer))?;
                let (blocks, of) = adopting.progress()?;
                Ok((Message::Adopted { blocks, of }, None))
            }
            Message::Fetch { generation, epoch, version, block, what } => {
                let bytes = self.partition_of(generation)?.1.kept(epoch, version, block, what)?;
                Ok((Message::Fetched, Some(bytes)))
            }
            Message::HandOver { generation, attempt, at, of, now } => {
                let adopting = self.adopting(generation, attempt)?;
                adopting.hand_over(at, of, Duration::from_nanos(now), payload).map(done)
            }
            Message::Switch => self.switch(payload).map(done),
            Message::Abandon { generation, attempt } => {
                self.adopting.abandon(generation, attempt);
                Ok((Message::Done, None))
            }
            Message::StopMove { model, generation, off } => self.stop_move(&model, generation, off).map(done),
            other => self.of_snapshot(other, payload),
        }
    }

    /// Takes the memory of a partition that is to be. Takes time.
    fn adopt(&self, payload: &[u8]) -> Result<(), Refusal> {
        let told = Adoption::decode(payload).map_err(Refusal::other)?;
        let (generation, attempt) = (told.record.generation, (told.attempt, told.epoch));
        let new = told.record.block_map().map_err(Refusal::other)?;
        let before = told.map_in_force().map_err(Refusal::other)?;
        self.adopting.take(generation, attempt, |earlier| {
            // The one before is of use if it is the same: else its memory is needed.
            let known = earlier.and_then(|earlier| earlier.untouched(&told.record));
            // From here on the number stays.
            let me = *self.shard.lock();
            let in_force = self.partition_in_force(&told, before.shares().contains_key(&me))?;
            if let Some(partition) = in_force.filter(|_| new.blocks_of(me).eq(before.blocks_of(me))) {
                let partition = partition.again(&told.record);
                return Ok(Adopting::new(told, partition, true));
            }
            let partition = known.map_or_else(|| Partition::new(&told.record, me, &self.executor), Ok);
            Ok(Adopting::new(told, partition.map_err(Refusal::other)?, false))
        })
    }

    /// The partition that there is, if there should be one.
    fn partition_in_force(&self, told: &Adoption, owns: bool) -> Result<Option<Arc<Partition>>, Refusal> {
        let (models, name) = (self.models.lock(), &told.record.name);
        match models.get(name) {
            Some(model) if model.generation != told.record.generation => Err(Refusal::Exists(name.clone())),
            Some(model) if model.partition.epoch != told.epoch => {
                Err(Refusal::Epoch { expected: model.partition.epoch, got: told.epoch })
            }
            Some(model) => Ok(Some(Arc::clone(&model.partition))),
            None if owns => Err(Refusal::NoModel(name.clone())),
            None => Ok(None),
        }
    }

    /// What an attempt is about.
    fn adopting(&self, generation: Generation, attempt: u64) -> Result<Arc<Adopting>, Refusal> {
        let adopting = self.adopting.of(generation).filter(|adopting| adopting.attempt() == attempt);
        adopting
            .ok_or_else(|| Refusal::other("this shard does not take part in the move, or was started anew"))
    }
}
