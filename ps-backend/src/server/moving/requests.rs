//! Requests of shards to each other when a model's blocks move, and when a snapshot is taken.

use std::sync::Arc;
use std::time::Duration;

use libmodelio::vocabulary::ids::{BlockId, Epoch, Generation, ShardId};
use libmodelio::wire::{Message, Moved, Refusal};

use super::incoming::{IncomingPartition, epoch_before};
use super::{mover, switching};
use crate::server::capturing;
use crate::server::errands::ErrandKind;
use crate::server::models;
use crate::server::partition::Partition;
use crate::server::shared::Shared;
use crate::server::snapshots;
use crate::server::unsent::AdminAnswer;

/// Whether a message is one of those by which shards move blocks, or of those about snapshots.
pub(in crate::server) fn is_between_shards(message: &Message) -> bool {
    matches!(
        message,
        Message::Prepare { .. }
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
            | Message::TakeSnapshot { .. }
            | Message::SaveCopy { .. }
            | Message::LoadCopy { .. }
            | Message::Offer { .. }
    )
}

/// What such a request may wait for. The first `Pin` of a snapshot takes the memory of its copy, and holds nobody up.
pub(in crate::server) fn kind_of(message: &Message) -> ErrandKind {
    match message {
        Message::Prepare { .. } | Message::Pin { holds: false, .. } => ErrandKind::Memory,
        Message::Capture { .. } | Message::StopMove { .. } => ErrandKind::Others,
        _ => ErrandKind::Short,
    }
}

/// Answers a request between shards. This may take time.
pub(in crate::server) fn between_shards(
    shared: &Arc<Shared>,
    message: Message,
    payload: &[u8],
) -> AdminAnswer {
    let done = |()| (Message::Done, None);
    match message {
        Message::Prepare { attempt, off } => prepare(shared, (attempt, off), payload).map(done),
        Message::Fill { generation, attempt, version, reducer } => {
            let incoming = incoming_of(shared, generation, attempt)?;
            incoming.fill(version, reducer)?;
            let (blocks, of) = incoming.progress()?;
            Ok((Message::Filled { blocks, of }, None))
        }
        Message::Fetch { generation, epoch, version, block, what } => {
            let bytes = models::partition_of(shared, generation)?.1.kept(epoch, version, block, what)?;
            Ok((Message::Fetched, Some(bytes)))
        }
        Message::HandOver { generation, attempt, at, of, now } => {
            let incoming = incoming_of(shared, generation, attempt)?;
            incoming.hand_over(at, of, Duration::from_nanos(now), payload).map(done)
        }
        Message::Switch => switching::switch(shared, payload).map(done),
        Message::Abandon { generation, attempt } => {
            shared.incoming.abandon(generation, attempt);
            Ok((Message::Done, None))
        }
        Message::StopMove { model, generation, off } => {
            mover::stop_move(shared, &model, generation, off).map(done)
        }
        Message::TakeSnapshot { model, generation, epoch, snapshot, to, hurries } => {
            let life = (&*model, generation, epoch);
            Ok((snapshots::take(shared, life, (snapshot, to, hurries), between_shards)?, None))
        }
        Message::SaveCopy { generation, snapshot, to, before, hurries } => {
            Ok((snapshots::save_copy(shared, (generation, snapshot), (to, before, hurries))?, None))
        }
        Message::LoadCopy { generation, from, name } => {
            Ok((snapshots::load_copy(shared, generation, (from, name))?, None))
        }
        Message::Offer { generation, client, version, brings } => {
            shared.snapshots.offers.offered(generation, (client, version), brings, payload)
        }
        other => capturing::of_snapshot(shared, other, payload, between_shards),
    }
}

/// Takes the memory of a partition that is to be. Takes time.
fn prepare(shared: &Shared, (attempt, off): (u64, ShardId), payload: &[u8]) -> Result<(), Refusal> {
    let moved = Moved::decode(payload).map_err(Refusal::other)?;
    let (generation, in_force) = (moved.record.generation, epoch_before(&moved.record));
    let map = moved.record.block_map().map_err(Refusal::other)?;
    shared.incoming.take(generation, (attempt, in_force), || {
        // From here on the number stays.
        let me = shared.identity.number();
        let blocks: Vec<BlockId> = map.blocks_of(me).collect();
        let before = partition_in_force(shared, &moved.record.name, generation, in_force)?;
        let record = moved.record.clone();
        let options = shared.of_partitions();
        let make = || Partition::new(&record, me, &shared.executor, options).map_err(Refusal::other);
        IncomingPartition::new((attempt, off), moved, before, (&blocks, make))
    })
}

/// The partition under the block map in force, if this shard has one.
fn partition_in_force(
    shared: &Shared,
    name: &str,
    generation: Generation,
    got: Epoch,
) -> Result<Option<Arc<Partition>>, Refusal> {
    match shared.models.lock().get(name) {
        Some(model) if model.generation != generation => Err(Refusal::Exists(name.to_owned())),
        Some(model) if model.partition.epoch != got => {
            Err(Refusal::Epoch { expected: model.partition.epoch, got })
        }
        found => Ok(found.map(|model| Arc::clone(&model.partition))),
    }
}

/// The partition that comes by this attempt.
fn incoming_of(
    shared: &Shared,
    generation: Generation,
    attempt: u64,
) -> Result<Arc<IncomingPartition>, Refusal> {
    let incoming = shared.incoming.of(generation).filter(|incoming| incoming.attempt == attempt);
    incoming.ok_or_else(|| Refusal::other("this shard does not take part in the move, or was started anew"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_take_memory_leave_threads_to_those_that_take_none() {
        let pin = |holds| {
            let (generation, epoch) = (Generation(1), Epoch(1));
            kind_of(&Message::Pin { generation, epoch, snapshot: 7, slots: 1, holds })
        };
        assert_eq!(
            [pin(false), pin(true)],
            [ErrandKind::Memory, ErrandKind::Short],
            "the job waits for the second one"
        );
    }
}
