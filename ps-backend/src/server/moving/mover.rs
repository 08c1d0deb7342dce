//! Moving a model's blocks off a shard: the [`Edge`] of [`crate::moving`], on a thread of the coordinator's.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::registry::RegistryError;
use libmodelio::vocabulary::ids::{Generation, ShardId, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::{Fate, Message, ModelRecord, Refusal, RegistryAnswer, RegistryRequest, ShardRecord};
use parking_lot::MutexGuard;

use crate::moving::{
    self, ANSWER_TIMEOUT, Answers, Edge, Ends, JobFacts, MovePlan, Now, Order, Progress, PutError,
};
use crate::server::coordinator::{Coordinator, Moving};
use crate::server::models;
use crate::server::peer_shard::{AnswersHere, PeerShard, ask_all};
use crate::server::shared::Shared;
use crate::server::unsent::AdminAnswer;

/// How often it is looked whether the process ends, or the move is to stop.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// A shard's connection gives up by itself and says why. If it does not, it is given up after this additional time.
const GRACE: Duration = Duration::from_secs(1);

/// The longest wait for the end of a snapshot. It is shorter than that for a move that is to stop.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(3);

/// A model that moves.
struct Mover<'a> {
    shared: &'a Arc<Shared>,
    coordinator: &'a Arc<Coordinator>,
    plan: &'a MovePlan,
    peers: BTreeMap<ShardId, Arc<PeerShard>>,
    /// Whoever waits for it, and has nobody else touch the model meanwhile.
    asker: Option<(Moving, MutexGuard<'a, ()>, Answer)>,
}

/// Called when it is over.
type Answer = Box<dyn FnOnce(AdminAnswer) + Send>;

/// Begins to move a model's blocks off a shard, in so much time and holding the job no longer than that; `answer` is
/// called when it is over.
pub(in crate::server) fn move_model(
    shared: &Arc<Shared>,
    model: &str,
    generation: Generation,
    off: ShardId,
    times: (Duration, Option<Duration>),
    here: AnswersHere,
    answer: impl FnOnce(AdminAnswer) + Send + 'static,
) -> Result<(), Refusal> {
    let coordinator = models::coordinator_of(shared, model, generation)?;
    // Before the registry is asked: whoever wants to stop it finds it from here on.
    let moving = coordinator.moves.begin(off)?;
    let shared = Arc::clone(shared);
    let moves = move || run(&shared, &coordinator, off, times, here, (moving, Box::new(answer)));
    let spawned = std::thread::Builder::new().name("mover".into()).spawn(moves);
    spawned.map(drop).map_err(|error| Refusal::other(format!("no thread to move it: {error}")))
}

/// What moves the model off a shard stops, and is waited for; nothing happens if there is nothing, or if the model
/// has moved.
pub(super) fn stop_move(
    shared: &Shared,
    model: &str,
    generation: Generation,
    off: ShardId,
) -> Result<(), Refusal> {
    /// Longest wait for a move that is to stop. One that cannot be stopped any more may take longer.
    const STOPPING: Duration = Duration::from_secs(5);
    match models::coordinator_of(shared, model, generation)?.moves.stop(off, Instant::now() + STOPPING) {
        true => Ok(()),
        false => Err(Refusal::other(
            "it cannot be stopped any more: the registry was asked to put the new block map in force, or has done so",
        )),
    }
}

fn run(
    shared: &Arc<Shared>,
    coordinator: &Arc<Coordinator>,
    off: ShardId,
    (timeout, hold): (Duration, Option<Duration>),
    here: AnswersHere,
    (moving, answer): (Moving, Answer),
) {
    let deadline = coordinator.now() + timeout;
    let alone = coordinator.moves.alone.try_lock_for(SNAPSHOT_PATIENCE);
    let busy = || Refusal::other("a snapshot of the model is being taken: run the command again");
    let begun = alone.ok_or_else(busy).and_then(|alone| Ok((alone, begin(shared, coordinator, off)?)));
    let (alone, plan) = match begun {
        Ok((alone, Some(plan))) => (alone, plan),
        Ok((_, None)) => {
            drop(moving);
            return answer(Ok((Message::Done, None)));
        }
        Err(refusal) => {
            tracing::warn!(model = %coordinator.model, %off, %refusal, "not moved");
            drop(moving);
            return answer(Err(refusal));
        }
    };
    let peer = |record: &ShardRecord| (record.shard, Arc::new(PeerShard::new(record, here)));
    let peers = plan.shards.iter().map(peer).collect();
    let asker = Some((moving, alone, answer));
    let mut mover = Mover { shared, coordinator, plan: &plan, peers, asker };
    moving::run(&mut mover, &plan, deadline, hold);
}

/// Where the blocks go; `None` if there are none on the shard.
fn begin(shared: &Shared, coordinator: &Coordinator, off: ShardId) -> Result<Option<MovePlan>, Refusal> {
    let said =
        |error: RegistryError| Refusal::other(format!("the registry cannot be asked, or refuses: {error}"));
    let shards = shared.directory.ask(|registry, deadline| registry.shards(deadline)).map_err(said)?;
    let before = shared.directory.ask(|registry, deadline| registry.model(&coordinator.model, deadline));
    let before = before.map_err(said)?;
    if let Some(why) = coordinator.failed() {
        return Err(Refusal::other(format!("{why}: nothing of it can be moved, delete it")));
    }
    let ((generation, epoch), (_, _, controls)) = (coordinator.life(), coordinator.facts());
    let attempt = u64::try_from(coordinator.now().as_nanos()).unwrap_or(u64::MAX);
    let job = JobFacts { generation, epoch, controls: &controls };
    MovePlan::new(off, before, &shards, &job, attempt)
}

impl Edge for Mover<'_> {
    async fn now(&mut self) -> Now {
        self.coordinator.now()
    }

    async fn pause(&mut self, time: Duration) -> Result<(), Ends> {
        let until = Instant::now() + time;
        while let left = until.saturating_duration_since(Instant::now())
            && !left.is_zero()
        {
            std::thread::sleep(left.min(CHECK_INTERVAL));
            self.goes_on()?;
        }
        Ok(())
    }

    async fn ask(&mut self, shards: &[ShardId], order: Order, within: Duration) -> Result<Answers, Ends> {
        let asked = shards.iter().filter_map(|shard| self.peers.get(shard).cloned());
        let coming = ask_all(self.shared, asked, &order.message, &order.payload, within);
        let until = Instant::now() + within + GRACE;
        let mut answers = Answers::new();
        loop {
            let failed = match coming.recv_timeout(CHECK_INTERVAL) {
                Ok(answer) => {
                    answers.push(answer);
                    answers.iter().any(|(_, answer)| answer.is_err())
                }
                Err(RecvTimeoutError::Timeout) => self.unwanted().await.is_some(),
                Err(RecvTimeoutError::Disconnected) => return Ok(answers),
            };
            self.goes_on()?;
            if failed && order.is_step || Instant::now() >= until {
                return Ok(answers);
            }
        }
    }

    fn show(&mut self, progress: Progress) {
        self.asker.iter().for_each(|(moving, ..)| moving.show(progress.clone()));
    }

    async fn unwanted(&mut self) -> Option<Refusal> {
        if self.coordinator.is_stopping() {
            return Some(Refusal::NoModel(self.coordinator.model.clone()));
        }
        let stopped = self.asker.as_ref().is_some_and(|(moving, ..)| moving.is_stopped());
        stopped.then(|| Refusal::other("the move was stopped; the model stays where it is"))
    }

    fn hold(&mut self) {
        self.coordinator.hold();
    }

    async fn held(&mut self) -> Result<(Version, Reducer), String> {
        if let Some(why) = self.coordinator.held_up_by() {
            return Err(why);
        }
        // No version comes while the job is held, but one may have come just before.
        let (version, reducer, _) = self.coordinator.facts();
        Ok((version, reducer))
    }

    async fn freeze(&mut self) -> Result<(Vec<u8>, Now), String> {
        self.coordinator.freeze().map_err(|error| error.to_string())
    }

    fn release(&mut self) {
        self.coordinator.thaw();
        self.coordinator.release();
    }

    async fn put(&mut self, restores: bool) -> Result<(), PutError> {
        let request = match restores {
            false => RegistryRequest::Put { replaces: Some(self.plan.before.epoch) },
            true => {
                RegistryRequest::Restore { shards: self.plan.shards[..self.plan.shards.len() - 1].to_vec() }
            }
        };
        put(self.shared, request, &self.plan.after)
    }

    async fn is_deleted(&mut self) -> bool {
        self.shared.fate(&self.plan.after).is_ok_and(|fate| fate == Fate::Deleted)
    }

    fn warn(&mut self, what: String) {
        tracing::warn!(model = %self.coordinator.model, "{what}");
    }

    /// Another move can begin.
    fn finish(&mut self, outcome: Result<(), Refusal>) {
        let Some((moving, alone, answer)) = self.asker.take() else { return };
        let (model, off) = (&self.coordinator.model, self.plan.off);
        match &outcome {
            Ok(()) => tracing::info!(%model, %off, "moved"),
            Err(refusal) => tracing::warn!(%model, %off, %refusal, "not moved"),
        }
        drop((moving, alone));
        answer(outcome.map(|()| (Message::Done, None)));
    }
}

impl Mover<'_> {
    fn goes_on(&self) -> Result<(), Ends> {
        if self.shared.ending.has_begun() { Err(Ends) } else { Ok(()) }
    }
}

fn put(shared: &Shared, request: RegistryRequest, record: &ModelRecord) -> Result<(), PutError> {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let payload = record.encode().map_err(|error| PutError::Refused(Refusal::other(error)))?;
    if let Some(table) = shared.directory.table() {
        return table.handle(&request, &payload).map(drop).map_err(PutError::Refused);
    }
    let Some(address) = shared.directory.process().map(str::to_owned) else {
        let asked = shared.directory.ask(|registry, _| registry.ask(request, &payload, deadline));
        return asked.map(drop).map_err(|error| match Refusal::try_from(error) {
            Ok(refusal) => PutError::Refused(refusal),
            Err(error) => PutError::Unknown(error.to_string()),
        });
    };
    // Not over a connection that is kept: if that ends, it is not known whether it was before.
    let mut peer =
        AdminPeer::connect(&address, deadline).map_err(|error| PutError::NotSent(error.to_string()))?;
    match peer.request(&Message::Registry(request), &payload, deadline) {
        Ok((Message::Registered(RegistryAnswer::Done), _)) => Ok(()),
        Ok((other, _)) => {
            Err(PutError::Unknown(AdminError::Unexpected { address, what: other.name() }.to_string()))
        }
        Err(AdminError::Refusal(refusal)) => Err(PutError::Refused(refusal)),
        Err(error) => Err(PutError::Unknown(error.to_string())),
    }
}
