//! A shard that is told what to do by the coordinator of a model: this one, or another over the network.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::vocabulary::ids::ShardId;
use libmodelio::wire::{Message, ShardRecord};
use parking_lot::Mutex;

use super::shared::Shared;

/// Longest wait for a greeting.
const CONNECTING: Duration = Duration::from_secs(10);

/// The way to one shard, and a connection as long as there is one that nobody uses.
pub(super) struct PeerShard {
    record: ShardRecord,
    idle: Mutex<Option<AdminPeer>>,
}

impl PeerShard {
    pub(super) fn new(record: &ShardRecord) -> PeerShard {
        PeerShard { record: record.clone(), idle: Mutex::new(None) }
    }

    pub(super) fn shard(&self) -> ShardId {
        self.record.shard
    }

    pub(super) fn address(&self) -> &str {
        &self.record.address
    }

    /// Tells the shard something, and waits for the answer; why there is none is for people. Another question may be
    /// under way: then this one goes over a connection of its own.
    pub(super) fn request(
        &self,
        shared: &Arc<Shared>,
        message: &Message,
        payload: &[u8],
        within: Duration,
    ) -> Result<Message, String> {
        let is_here = self.record.shard == *shared.shard.lock();
        match is_here {
            true => match message {
                Message::Delete { model, generation } => shared.delete(model, *generation),
                other => shared.between_shards(other.clone(), payload),
            }
            .map(|(answer, _)| answer)
            .map_err(|refusal| refusal.to_string()),
            false => self.ask(message, payload, Instant::now() + within).map_err(|error| error.to_string()),
        }
    }

    fn ask(&self, message: &Message, payload: &[u8], deadline: Instant) -> Result<Message, AdminError> {
        let known = self.idle.lock().take().filter(|peer| !peer.is_stale());
        // What is asked for may take long, but not to be heard.
        let until = deadline.min(Instant::now() + CONNECTING);
        let mut peer = known.map_or_else(|| AdminPeer::connect(&self.record.address, until), Ok)?;
        let answer = peer.request(message, payload, deadline);
        if matches!(answer, Ok(_) | Err(AdminError::Refusal(_))) {
            *self.idle.lock() = Some(peer);
        }
        answer.map(|(message, _)| message)
    }
}
