//! The clock and the lock around [`Offers`].

use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{ClientId, Generation, Version};
use libmodelio::wire::{Brings, Lineage, Message, Refusal};
use parking_lot::{Condvar, Mutex};

use crate::core::Now;
use crate::offers::{KnownOf, Offers, Told};

use super::unsent::AdminAnswer;

/// What mounts offer for the models that this shard restores.
pub(super) struct HeardOffers {
    offers: Mutex<Offers>,
    /// A mount has said something.
    heard: Condvar,
    began: Instant,
}

impl Default for HeardOffers {
    fn default() -> HeardOffers {
        HeardOffers { offers: Mutex::default(), heard: Condvar::new(), began: Instant::now() }
    }
}

impl HeardOffers {
    pub(super) fn begin(&self, generation: Generation, lineage: &Lineage, snapshot: Version) {
        self.offers.lock().begin(generation, lineage, snapshot, self.began.elapsed());
    }

    pub(super) fn ask(&self, generation: Generation, shards: Vec<u8>) {
        self.offers.lock().ask(generation, shards, self.began.elapsed());
    }

    pub(super) fn end(&self, generation: Generation) {
        self.offers.lock().end(generation);
    }

    /// Waits until there is an answer, for as long as `asks` says in place of one.
    pub(super) fn wait<T>(&self, asks: impl Fn(&mut Offers, Now) -> Result<T, Duration>) -> T {
        let mut offers = self.offers.lock();
        loop {
            match asks(&mut offers, self.began.elapsed()) {
                Ok(answer) => return answer,
                Err(wait) => drop(self.heard.wait_for(&mut offers, wait)),
            }
        }
    }

    /// A mount offers a version of a model, whose record is `payload`.
    pub(super) fn offered(
        &self,
        generation: Generation,
        (client, version): (ClientId, Version),
        brings: Brings,
        payload: &[u8],
    ) -> AdminAnswer {
        let known: KnownOf = serde_json::from_slice(payload)
            .map_err(|error| Refusal::other(format!("the record of the version cannot be read: {error}")))?;
        let now = self.began.elapsed();
        let told = self.offers.lock().offered(generation, (client, version, known), brings, now);
        self.heard.notify_all();
        match told {
            Some(Told::Wait) => Ok((Message::Offered { wanted: false }, None)),
            Some(Told::Bring(shards)) => Ok((Message::Offered { wanted: true }, Some(shards))),
            None => Err(Refusal::other("these weights are not wanted here")),
        }
    }
}
