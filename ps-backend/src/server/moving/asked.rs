//! What shards ask of each other when a model's blocks move, and when a snapshot is taken.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{Generation, ShardId};
use libmodelio::wire::{Message, Refusal};

use crate::server::shared::Shared;
use crate::server::unsent::AdminAnswer;

/// Longest wait for a move that is to stop. One that cannot be stopped any more may take longer.
const STOPPING: Duration = Duration::from_secs(5);

/// Whether a message is one of those by which shards move blocks, or of those about snapshots.
pub(in crate::server) fn is_between_shards(message: &Message) -> bool {
    matches!(
        message,
        Message::Adopt
            | Message::Fill { .. }
            | Message::Adopting { .. }
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
                self.fill(generation, attempt, version, reducer).map(done)
            }
            Message::Adopting { generation, attempt } => {
                let (blocks, of) = self.adopting(generation, attempt)?.progress()?;
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
            message @ (Message::Capture { .. }
            | Message::Pin { .. }
            | Message::Copy { .. }
            | Message::FetchCopy { .. }
            | Message::Release { .. }
            | Message::BeginAt { .. }) => self.of_snapshot(message, payload),
            Message::StopMove { model, generation, off } => self.stop_move(&model, generation, off).map(done),
            other => Err(Refusal::Role { what: other.name().to_owned() }),
        }
    }

    /// What moves the model off a shard stops, and is waited for; nothing happens if there is nothing, or if the model
    /// has moved.
    fn stop_move(&self, model: &str, generation: Generation, off: ShardId) -> Result<(), Refusal> {
        match self.coordinator_of(model, generation)?.moves.stop(off, Instant::now() + STOPPING) {
            true => Ok(()),
            false => Err(Refusal::other(
                "it cannot be stopped any more: the registry was asked to put the new block map in force, or has done so",
            )),
        }
    }
}
