//! A shard that is told what to do in a move: this one, or another over the network.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::ids::ShardId;
use libmodelio::wire::{Message, Refusal, ShardRecord};

use super::Shared;

/// Why it has not done what it was told.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It says why.
    Refused(String, Refusal),
    /// It does not answer.
    Silent(String, AdminError),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trouble::Refused(who, refusal) => write!(f, "{who}: {refusal}"),
            Trouble::Silent(who, error) => write!(f, "{who}: {error}"),
        }
    }
}

/// One shard, and the connection to it as long as there is one.
pub(super) struct Told {
    pub record: ShardRecord,
    peer: Option<AdminPeer>,
}

impl Told {
    pub(super) fn new(record: &ShardRecord) -> Told {
        Told { record: record.clone(), peer: None }
    }

    pub(super) fn shard(&self) -> ShardId {
        self.record.shard
    }

    /// Tells it something that can be told twice, and waits for the answer.
    pub(super) fn request(
        &mut self,
        shared: &Arc<Shared>,
        message: &Message,
        payload: &[u8],
        within: Duration,
    ) -> Result<Message, Trouble> {
        let who = || format!("shard {} at {}", self.record.shard, self.record.address);
        if self.record.shard == *shared.shard.lock() {
            let answer = shared.between_shards(message.clone(), payload);
            return answer.map(|(message, _)| message).map_err(|refusal| Trouble::Refused(who(), refusal));
        }
        let deadline = Instant::now() + within;
        let known = self.peer.take().filter(|peer| !peer.is_stale());
        let peer = known.map_or_else(|| AdminPeer::connect(&self.record.address, deadline), Ok);
        let mut peer = peer.map_err(|error| Trouble::Silent(who(), error))?;
        match peer.request(message, payload, deadline) {
            Ok((answer, _)) => {
                self.peer = Some(peer);
                Ok(answer)
            }
            Err(AdminError::Refusal(refusal)) => {
                self.peer = Some(peer);
                Err(Trouble::Refused(who(), refusal))
            }
            Err(error) => Err(Trouble::Silent(who(), error)),
        }
    }
}

/// The same to all of them at once; the first trouble counts.
pub(super) fn request_all(
    shared: &Arc<Shared>,
    all: &mut [Told],
    message: &Message,
    payload: &[u8],
    within: Duration,
) -> Result<Vec<Message>, Trouble> {
    std::thread::scope(|scope| {
        let mut asked = Vec::new();
        for told in all {
            let name = format!("shard {} at {}", told.record.shard, told.record.address);
            let asks = move || told.request(shared, message, payload, within);
            let spawned = std::thread::Builder::new().name("mover-asks".into()).spawn_scoped(scope, asks);
            asked.push((name, spawned));
        }
        let mut answers = Vec::new();
        let mut outcome = Ok(());
        for (name, spawned) in asked {
            let refused = |why: String| Trouble::Refused(name.clone(), Refusal::other(why));
            let answer = match spawned {
                Ok(thread) => thread.join().unwrap_or_else(|_| Err(refused("asking it panicked".into()))),
                Err(error) => Err(refused(format!("no thread to ask it: {error}"))),
            };
            match answer {
                Ok(answer) => answers.push(answer),
                Err(trouble) => outcome = outcome.and(Err(trouble)),
            }
        }
        outcome.map(|()| answers)
    })
}
