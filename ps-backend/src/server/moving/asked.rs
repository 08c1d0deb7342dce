//! What shards ask of each other when a model's blocks move, and when a snapshot is taken.

use std::sync::Arc;
use std::time::Duration;

use libmodelio::wire::Message;

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
                adopting.fill(self, version, reducer)?;
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
}
