//! Weights of this mount, for a model that is restored and goes on with the newest ones there are (`on_loss`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::client::{Job, VersionView};
use libmodelio::vocabulary::ids::{Generation, Version};
use libmodelio::wire::{Brings, DataKind, Message, Moved, ShardRecord};
use ps_backend::offers::KnownOf;

use crate::error::{self, Error};
use crate::session::model::Model;

/// The time for a small request.
const PROMPT: Duration = Duration::from_secs(10);
/// The time to send a block. A link may be slow.
const SENDING: Duration = Duration::from_secs(60);
/// An offer ends after this time, whatever the shard says.
const LONGEST: Duration = Duration::from_secs(600);
/// The pause before the shard is told again that this mount lives.
const AGAIN: Duration = Duration::from_millis(200);

/// The newest version here, which stays as long as this lives.
pub(super) struct WeightsOffer {
    job: Arc<Job>,
    version: Version,
    view: VersionView,
    /// What the job knew of it, encoded.
    known: Vec<u8>,
    generation: Generation,
    /// Where the shard that restores the model listens.
    by: String,
}

impl WeightsOffer {
    /// The offer to this life of the model. None if the mount has no whole version, or does not know what is part of it.
    pub(super) fn of(model: &Model, generation: Generation, by: &str) -> Option<WeightsOffer> {
        let job = &model.job;
        let version = job.version();
        let told = job.told_learners(version).filter(|_| job.holds_versions())?;
        let meta = job.meta(version);
        let known = KnownOf {
            contributions: told.contributions,
            learners: told.learners,
            unlisted: told.unlisted,
            meta,
        };
        let known = serde_json::to_vec(&known).ok()?;
        let view = job.get(version).filter(|_| job.pin(version))?;
        Some(WeightsOffer { job: Arc::clone(job), version, view, known, generation, by: by.to_owned() })
    }

    /// Offers them, and brings them if they are wanted, on a thread of its own.
    pub(super) fn make(self) {
        let model = self.job.model().to_owned();
        let make = move || match self.offered() {
            Ok(true) => tracing::warn!(
                model = self.job.model(), version = %self.version,
                "the restored model was brought the weights that this mount had; its optimizer state is older"
            ),
            Ok(false) => {}
            Err(error) => {
                let why = error::chain(&error);
                tracing::warn!(model = self.job.model(), version = %self.version, "its weights were not brought: {why}");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("gradfs-offer".into()).spawn(make) {
            tracing::warn!(%model, "no thread to offer its weights: {error}");
        }
    }

    /// Returns whether they were wanted.
    fn offered(&self) -> Result<bool, Error> {
        let failed = |error: AdminError| Error::new("cannot offer them").caused_by(error);
        let mut peer = AdminPeer::connect(&self.by, Instant::now() + PROMPT).map_err(failed)?;
        let until = Instant::now() + LONGEST;
        while Instant::now() < until {
            match self.says(&mut peer, Brings::Soon) {
                Ok(Some(to)) => {
                    let outcome = self.bring(&mut peer, &to).map(|()| true);
                    if outcome.is_err() {
                        let _ = self.says(&mut peer, Brings::Failed);
                    }
                    return outcome;
                }
                Ok(None) => std::thread::sleep(AGAIN),
                // Another mount has newer ones.
                Err(AdminError::Refusal(_)) => return Ok(false),
                Err(error) => return Err(failed(error)),
            }
        }
        Err(Error::new(format!("the shard at {} does not say whether it wants them", self.by)))
    }

    /// Tells that this mount lives. Returns the shards that want the weights, once they do.
    fn says(&self, peer: &mut AdminPeer, brings: Brings) -> Result<Option<Moved>, AdminError> {
        let (generation, client, version) = (self.generation, self.job.id(), self.version);
        let offer = Message::Offer { generation, client, version, brings };
        match peer.request(&offer, &self.known, Instant::now() + PROMPT)? {
            (Message::Offered { wanted: true }, to) => Ok(Moved::decode(&to).ok()),
            _ => Ok(None),
        }
    }

    /// Brings each shard the weights of its blocks, all at once.
    fn bring(&self, peer: &mut AdminPeer, to: &Moved) -> Result<(), Error> {
        let over = AtomicBool::new(false);
        let failed = |error: AdminError| Error::new("the shard that restores the model").caused_by(error);
        std::thread::scope(|scope| {
            let bring = |shard| {
                let outcome = self.bring_to(shard, to, &over);
                over.fetch_or(outcome.is_err(), Ordering::Relaxed);
                outcome
            };
            let threads: Vec<_> = to.shards.iter().map(|shard| scope.spawn(move || bring(shard))).collect();
            while !threads.iter().all(|thread| thread.is_finished()) {
                std::thread::sleep(AGAIN);
                if let Err(error) = self.says(peer, Brings::Soon) {
                    over.store(true, Ordering::Relaxed);
                    return Err(failed(error));
                }
            }
            let joined = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|_| Err(Error::new("a thread that sends them has panicked")))
            };
            threads.into_iter().try_for_each(joined)?;
            self.says(peer, Brings::Sent).map(drop).map_err(failed)
        })
    }

    fn bring_to(&self, shard: &ShardRecord, to: &Moved, over: &AtomicBool) -> Result<(), Error> {
        let ShardRecord { shard, address, .. } = shard;
        let failed = |why: AdminError| Error::new(format!("shard {shard} at {address}")).caused_by(why);
        let map = to.record.block_map().map_err(|why| Error::new("the block map").caused_by(why))?;
        let mut peer = AdminPeer::connect(address, Instant::now() + PROMPT).map_err(failed)?;
        let generation = to.record.generation;
        for block in map.blocks_of(*shard) {
            let weights = self.view.bytes(self.job.layout().block_bytes(block));
            // Masters are made of the weights.
            for (what, bytes) in [(DataKind::Weights, weights), (DataKind::Masters, &[])] {
                let load = Message::Load { generation, block, what };
                peer.notify(&load, bytes, Instant::now() + SENDING).map_err(failed)?;
            }
            if over.load(Ordering::Relaxed) {
                return Err(Error::new("they are not wanted any more"));
            }
        }
        // Answered after all that came before it.
        peer.request(&Message::Status, &[], Instant::now() + SENDING).map(drop).map_err(failed)
    }
}

impl Drop for WeightsOffer {
    fn drop(&mut self) {
        self.job.unpin(self.version, 1);
    }
}
