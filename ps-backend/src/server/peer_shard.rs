//! A shard that a model's coordinator sends requests to: this one, or another over the network.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::vocabulary::ids::ShardId;
use libmodelio::wire::{Message, Refusal, ShardRecord};
use parking_lot::Mutex;

use super::shared::Shared;
use super::unsent::AdminAnswer;

/// The longest wait for a greeting.
const CONNECTING: Duration = Duration::from_secs(10);

/// How this process answers a request between shards.
pub(super) type AnswersHere = fn(&Arc<Shared>, Message, &[u8]) -> AdminAnswer;

/// The address of a shard, and an idle connection to it, if there is one.
pub(super) struct PeerShard {
    record: ShardRecord,
    here: AnswersHere,
    idle: Mutex<Option<AdminPeer>>,
}

impl PeerShard {
    /// `here` answers if the shard is this process.
    pub(super) fn new(record: &ShardRecord, here: AnswersHere) -> PeerShard {
        PeerShard { record: record.clone(), here, idle: Mutex::new(None) }
    }

    pub(super) fn shard(&self) -> ShardId {
        self.record.shard
    }

    pub(super) fn address(&self) -> &str {
        &self.record.address
    }

    /// Sends the shard a request, and waits for the answer. If another request is under way, this one opens another
    /// connection. The error is a text for the log.
    pub(super) fn request(
        &self,
        shared: &Arc<Shared>,
        message: &Message,
        payload: &[u8],
        within: Duration,
    ) -> Result<Message, String> {
        if self.record.shard == shared.identity.number() {
            let answered = (self.here)(shared, message.clone(), payload);
            return answered.map(|(answer, _)| answer).map_err(|refusal| refusal.to_string());
        }
        self.ask(message, payload, Instant::now() + within).map_err(|error| error.to_string())
    }

    /// Sends another shard a request, and waits for the answer, or the refusal.
    pub(super) fn refused(&self, message: &Message, within: Duration) -> Result<Message, Refusal> {
        self.ask(message, &[], Instant::now() + within).map_err(|error| match error {
            AdminError::Refusal(refusal) => refusal,
            error => Refusal::other(error),
        })
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

/// Asks shards, all at once, each on a thread of its own. The answers come over the channel, which ends with the last
/// one. Nobody has to wait for them.
pub(super) fn ask_all(
    shared: &Arc<Shared>,
    peers: impl IntoIterator<Item = Arc<PeerShard>>,
    message: &Message,
    payload: &Arc<[u8]>,
    within: Duration,
) -> Receiver<(ShardId, Result<Message, String>)> {
    let (sender, answers) = channel();
    for peer in peers {
        let (shared, message, payload) = (Arc::clone(shared), message.clone(), Arc::clone(payload));
        let (shard, answered) = (peer.shard(), sender.clone());
        let asks = move || {
            let _ = answered.send((peer.shard(), peer.request(&shared, &message, &payload, within)));
        };
        if let Err(error) = std::thread::Builder::new().name("asks-shard".into()).spawn(asks) {
            let _ = sender.send((shard, Err(format!("no thread to ask it: {error}"))));
        }
    }
    answers
}
