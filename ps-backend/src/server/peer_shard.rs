//! A shard that a model's coordinator sends requests to: this one, or another over the network.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::vocabulary::ids::ShardId;
use libmodelio::wire::{Message, ShardRecord};
use parking_lot::Mutex;

use super::shared::Shared;

/// The longest wait for a greeting.
const CONNECTING: Duration = Duration::from_secs(10);

/// The address of a shard, and an idle connection to it, if there is one.
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

    /// Sends the shard a request, and waits for the answer. The error is for people. If another request is under way,
    /// this one uses a connection of its own.
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
        // The request may take long, but connecting may not.
        let until = deadline.min(Instant::now() + CONNECTING);
        let mut peer = known.map_or_else(|| AdminPeer::connect(&self.record.address, until), Ok)?;
        let answer = peer.request(message, payload, deadline);
        if matches!(answer, Ok(_) | Err(AdminError::Refusal(_))) {
            *self.idle.lock() = Some(peer);
        }
        answer.map(|(message, _)| message)
    }
}
