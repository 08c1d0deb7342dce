//! A shard that is told what to do in a move: this one, or another over the network.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::wire::{Message, ShardRecord};
use parking_lot::Mutex;

use crate::moving::Told;
use crate::server::shared::Shared;

/// The way to one shard, and a connection as long as there is one that nobody uses.
pub(super) struct Line {
    record: ShardRecord,
    idle: Mutex<Option<AdminPeer>>,
}

impl Line {
    pub(super) fn new(record: &ShardRecord) -> Line {
        Line { record: record.clone(), idle: Mutex::new(None) }
    }

    /// Tells the shard something, and waits for the answer; why there is none is for people. Another question may be
    /// under way: then this one goes over a connection of its own.
    pub(super) fn request(
        &self,
        shared: &Arc<Shared>,
        message: &Message,
        payload: &[u8],
        within: Duration,
    ) -> Result<Told, String> {
        let is_here = self.record.shard == *shared.shard.lock();
        let answer = match is_here {
            true => match message {
                Message::Delete { model, generation } => shared.delete(model, *generation),
                other => shared.between_shards(other.clone(), payload),
            }
            .map(|(answer, _)| answer)
            .map_err(|refusal| refusal.to_string()),
            false => self.ask(message, payload, Instant::now() + within).map_err(|error| error.to_string()),
        }?;
        match answer {
            Message::Adopted { blocks, of } => Ok(Told::Adopted { blocks, of }),
            // To `Delete`: it is elsewhere, where it is deleted, too.
            Message::Done | Message::Moved => Ok(Told::Done),
            other => Err(format!("it answers with {}", other.name())),
        }
    }

    fn ask(&self, message: &Message, payload: &[u8], deadline: Instant) -> Result<Message, AdminError> {
        let known = self.idle.lock().take().filter(|peer| !peer.is_stale());
        let mut peer = known.map_or_else(|| AdminPeer::connect(&self.record.address, deadline), Ok)?;
        let answer = peer.request(message, payload, deadline);
        if matches!(answer, Ok(_) | Err(AdminError::Refusal(_))) {
            *self.idle.lock() = Some(peer);
        }
        answer.map(|(message, _)| message)
    }
}
