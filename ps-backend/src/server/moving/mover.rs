//! Moving a model's blocks off a shard: the edge around [`MoveCore`], on a thread of the coordinator's.
//!
//! It asks shards, each question on a thread of its own, and the registry; it holds the coordinator, and stops when it
//! is told to.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::registry::RegistryError;
use libmodelio::vocabulary::ids::{Generation, ShardId};
use libmodelio::wire::{Fate, Message, ModelRecord, Moved, Refusal, RegistryAnswer, RegistryRequest};
use parking_lot::MutexGuard;

use crate::moving::{Action, Job, Looked, MoveCore, PIECE, PROMPT, Plan, Put, Sight, Tell, Told};
use crate::server::coordinator::{Coordinator, MAX_MOVES, Moving};
use crate::server::peer_shard::PeerShard;
use crate::server::shared::Shared;
use crate::server::unsent::AdminAnswer;

/// How often it is looked whether the process, or the model, ends.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// How often it is looked whether another move is over, or this one is to be stopped.
const TURN: Duration = Duration::from_millis(20);

/// What the thread is told.
enum Event {
    Answered(u64, Result<Told, String>),
}

/// A model that moves.
struct Mover<'a> {
    shared: &'a Arc<Shared>,
    coordinator: &'a Arc<Coordinator>,
    plan: Arc<Plan>,
    attempt: u64,
    peers: BTreeMap<ShardId, Arc<PeerShard>>,
    /// The coordinator's, once it is frozen, and what time it was there.
    state: Arc<[u8]>,
    frozen_at: Duration,
    events: Sender<Event>,
    /// Nobody else moves the model meanwhile.
    alone: Option<MutexGuard<'a, ()>>,
    /// Whoever waits for it.
    asker: Option<(Moving, Answers)>,
}

/// Called when it is over.
type Answers = Box<dyn FnOnce(AdminAnswer) + Send>;

impl Shared {
    /// Begins to move a model's blocks off a shard, in so much time and holding the job no longer than that; `answer` is
    /// called when it is over.
    pub(in crate::server) fn move_model(
        self: &Arc<Shared>,
        model: &str,
        generation: Generation,
        off: ShardId,
        (timeout, hold): (Duration, Option<Duration>),
        answer: impl FnOnce(AdminAnswer) + Send + 'static,
    ) -> Result<(), Refusal> {
        let coordinator = self.coordinator_of(model, generation)?;
        // Before the registry is asked: whoever wants to stop it finds it from here on.
        let moving = coordinator.moves.begin(off).ok_or_else(|| {
            Refusal::other(format!(
                "{MAX_MOVES} moves of model {model:?} are under way or wait: run the command again later"
            ))
        })?;
        let shared = Arc::clone(self);
        let moves = move || run(&shared, &coordinator, moving, timeout, hold, Box::new(answer));
        let spawned = std::thread::Builder::new().name("mover".into()).spawn(moves);
        spawned.map(drop).map_err(|error| Refusal::other(format!("no thread to move it: {error}")))
    }
}

/// Moves the model of `coordinator` off a shard, in so much time, and holds the job for `hold` at most.
fn run(
    shared: &Arc<Shared>,
    coordinator: &Arc<Coordinator>,
    moving: Moving,
    timeout: Duration,
    hold: Option<Duration>,
    answer: Answers,
) {
    let off = moving.off();
    let until = Instant::now() + timeout;
    let deadline = coordinator.now() + timeout;
    let begun = wait_for_turn(coordinator, &moving, until)
        .and_then(|alone| Ok((alone, begin(shared, coordinator, off)?)));
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
    let (events, told) = channel();
    let (attempt, plan) = (plan.0, Arc::new(plan.1));
    let records = plan.owners.iter().chain([&plan.leaving]);
    let peers = records.map(|record| (record.shard, Arc::new(PeerShard::new(record)))).collect();
    let mover = Mover {
        shared,
        coordinator,
        plan,
        attempt,
        peers,
        state: Arc::default(),
        frozen_at: Duration::ZERO,
        events,
        alone: Some(alone),
        asker: Some((moving, answer)),
    };
    mover.drive(&told, deadline, hold);
}

/// Waits until no other move of the model is under way.
fn wait_for_turn<'a>(
    coordinator: &'a Coordinator,
    moving: &Moving,
    until: Instant,
) -> Result<MutexGuard<'a, ()>, Refusal> {
    loop {
        if let Some(alone) = coordinator.moves.alone.try_lock_for(TURN) {
            return Ok(alone);
        }
        if moving.is_stopped() {
            return Err(Refusal::other("the move was stopped before it began"));
        }
        if Instant::now() >= until {
            let other = coordinator.moves.progress().map_or(moving.off(), |progress| progress.off);
            return Err(Refusal::other(format!(
                "the model is being moved off shard {other}: when that is over, run the command again"
            )));
        }
    }
}

fn said(error: RegistryError) -> Refusal {
    Refusal::other(format!("the registry cannot be asked, or refuses: {error}"))
}

/// Where the blocks go, and which attempt that is; `None` if there are none on the shard.
fn begin(shared: &Shared, coordinator: &Coordinator, off: ShardId) -> Result<Option<(u64, Plan)>, Refusal> {
    if let Some(to) = coordinator.moved() {
        let moved = Moved::decode(&to.payload).map_err(Refusal::other)?;
        return match moved.record.owners.iter().any(|(owner, _)| *owner == off) {
            true => Err(Refusal::other("the model has moved meanwhile: ask its coordinator")),
            false => Ok(None),
        };
    }
    let shards = shared.registry(|registry, deadline| registry.shards(deadline)).map_err(said)?;
    let before = shared.registry(|registry, deadline| registry.model(&coordinator.model, deadline));
    let before = before.map_err(said)?;
    if let Some(why) = coordinator.failed() {
        return Err(Refusal::other(format!("{why}: nothing of it can be moved, delete it")));
    }
    let ((generation, epoch), (_, _, controls)) = (coordinator.life(), coordinator.facts());
    let attempt = u64::try_from(coordinator.now().as_nanos()).unwrap_or(u64::MAX);
    let job = Job { generation, epoch, controls: &controls };
    Ok(Plan::new(off, before, &shards, &job, attempt)?.map(|plan| (attempt, plan)))
}

impl Mover<'_> {
    fn drive(mut self, told: &Receiver<Event>, deadline: Duration, hold: Option<Duration>) {
        let mut actions = Vec::new();
        let plan = Arc::clone(&self.plan);
        let mut core = MoveCore::new(plan, deadline, hold, self.coordinator.now(), &mut actions);
        loop {
            // What is done may have to be answered at once, which may lead to more.
            while !actions.is_empty() {
                for action in std::mem::take(&mut actions) {
                    self.act(action, &mut core, &mut actions);
                }
            }
            if core.is_over() {
                return;
            }
            if self.asker.is_some() {
                self.coordinator.moves.report(Some(core.progress()));
            }
            let now = self.coordinator.now();
            let pause =
                core.next_deadline(now).saturating_sub(now).clamp(Duration::from_millis(1), CHECK_INTERVAL);
            let event =
                told.recv_timeout(pause.min(if self.asker.is_some() { TURN } else { CHECK_INTERVAL }));
            let now = self.coordinator.now();
            if let Ok(Event::Answered(number, answer)) = event {
                core.answered(number, answer, now, &mut actions);
            }
            if self.asker.as_ref().is_some_and(|(moving, _)| moving.is_stopped()) {
                core.stop(now, &mut actions);
            }
            core.tick(now, &self.sight(), &mut actions);
        }
    }

    fn sight(&self) -> Sight {
        Sight {
            held_up_by: self.coordinator.held_up_by(),
            wanted: !self.coordinator.is_stopping(),
            ends: self.shared.is_stopping(),
        }
    }

    fn act(&mut self, action: Action, core: &mut MoveCore, actions: &mut Vec<Action>) {
        match action {
            Action::Tell { number, shard, what, within } => self.tell(number, shard, what, within),
            Action::Hold => self.coordinator.hold(),
            Action::Freeze => {
                let state = self.coordinator.freeze().map(|(bytes, at)| {
                    (self.state, self.frozen_at) = (bytes.into(), at);
                    self.state.len() as u64
                });
                core.frozen(state.map_err(|error| error.to_string()), self.coordinator.now(), actions);
            }
            Action::Release => {
                self.coordinator.thaw();
                self.coordinator.release();
            }
            Action::Put { restores } => {
                self.coordinator.moves.report(Some(core.progress()));
                let request = match restores {
                    false => RegistryRequest::Put { replaces: Some(self.plan.before.epoch) },
                    true => RegistryRequest::Restore { shards: self.plan.owners.clone() },
                };
                let answer = put(self.shared, request, &self.plan.after);
                core.put(answer, self.coordinator.now(), actions);
            }
            Action::Look => {
                core.looked(&look(self.shared, &self.plan.after), self.coordinator.now(), actions)
            }
            Action::Warn(what) => tracing::warn!(model = %self.coordinator.model, "{what}"),
            Action::Finished(outcome) => self.finished(outcome),
        }
    }

    /// Whoever has asked is answered, and another move can begin.
    fn finished(&mut self, outcome: Result<(), Refusal>) {
        let Some((moving, answer)) = self.asker.take() else { return };
        let off = moving.off();
        self.coordinator.moves.report(None);
        self.alone = None;
        match &outcome {
            Ok(()) => tracing::info!(model = %self.coordinator.model, %off, "moved"),
            Err(refusal) => tracing::warn!(model = %self.coordinator.model, %off, %refusal, "not moved"),
        }
        drop(moving);
        answer(outcome.map(|()| (Message::Done, None)));
    }

    fn message(&self, what: Tell) -> (Message, Payload) {
        let (generation, attempt) = (self.plan.after.generation, self.attempt);
        let plan = || Arc::clone(&self.plan);
        match what {
            Tell::Adopt => (Message::Adopt, Payload::Adoption(plan())),
            Tell::Fill => {
                let (version, reducer, _) = self.coordinator.facts();
                (Message::Fill { generation, attempt, version, reducer }, Payload::None)
            }
            Tell::Adopting => (Message::Adopting { generation, attempt }, Payload::None),
            Tell::HandOver { at } => {
                let of = self.state.len() as u64;
                let now = u64::try_from(self.frozen_at.as_nanos()).unwrap_or(u64::MAX);
                let piece = Payload::Piece(Arc::clone(&self.state), at, of.min(at.saturating_add(PIECE)));
                (Message::HandOver { generation, attempt, at, of, now }, piece)
            }
            Tell::Switch => (Message::Switch, Payload::Moved(plan())),
            Tell::Abandon => (Message::Abandon { generation, attempt }, Payload::None),
            Tell::Delete => {
                (Message::Delete { model: self.plan.after.name.clone(), generation }, Payload::None)
            }
        }
    }

    fn tell(&self, number: u64, shard: ShardId, what: Tell, within: Duration) {
        let Some(peer) = self.peers.get(&shard).map(Arc::clone) else { return };
        let ((message, payload), shared) = (self.message(what), Arc::clone(self.shared));
        let events = self.events.clone();
        let asks = move || {
            let answer = peer.request(&shared, &message, payload.bytes(), within).and_then(told);
            if what == Tell::Delete
                && let Err(why) = &answer
            {
                tracing::warn!(%shard, %why, "was not told that the model is deleted");
            }
            // Nobody waits any more.
            let _ = events.send(Event::Answered(number, answer));
        };
        if let Err(error) = std::thread::Builder::new().name("mover-asks".into()).spawn(asks) {
            let _ = self.events.send(Event::Answered(number, Err(format!("no thread to ask it: {error}"))));
        }
    }
}

fn told(answer: Message) -> Result<Told, String> {
    match answer {
        Message::Adopted { blocks, of } => Ok(Told::Adopted { blocks, of }),
        // To `Delete`: it is elsewhere, where it is deleted, too.
        Message::Done | Message::Moved => Ok(Told::Done),
        other => Err(format!("it answers with {}", other.name())),
    }
}

/// What is sent with a message.
enum Payload {
    None,
    Adoption(Arc<Plan>),
    Moved(Arc<Plan>),
    Piece(Arc<[u8]>, u64, u64),
}

impl Payload {
    fn bytes(&self) -> &[u8] {
        match self {
            Payload::None => &[],
            Payload::Adoption(plan) => &plan.adoption,
            Payload::Moved(plan) => &plan.moved,
            Payload::Piece(state, at, end) => &state[*at as usize..*end as usize],
        }
    }
}

fn look(shared: &Shared, record: &ModelRecord) -> Looked {
    let forgotten = shared.fate(record).ok().map(|fate| fate == Fate::Deleted);
    let shards = shared.registry(|registry, deadline| registry.shards(deadline));
    Looked { forgotten, listed: shards.ok().map(|all| all.iter().map(|shard| shard.shard).collect()) }
}

fn put(shared: &Shared, request: RegistryRequest, record: &ModelRecord) -> Put {
    let deadline = Instant::now() + PROMPT;
    let refused = |refusal: Refusal| match refusal {
        Refusal::Epoch { expected, .. } => Put::Other(expected),
        Refusal::NoModel(_) => Put::Gone,
        Refusal::Exists(_) | Refusal::Generation { .. } => Put::Taken(refusal.to_string()),
        other => Put::Refused(other.to_string()),
    };
    let payload = match record.encode() {
        Ok(payload) => payload,
        Err(error) => return Put::Refused(error.to_string()),
    };
    if let Some(table) = &shared.table {
        return table.handle(&request, &payload).map_or_else(refused, |_| Put::Done);
    }
    let address = shared.options.registry.clone().unwrap_or_default();
    // Not over a connection that is kept: if that ends, it is not known whether it was before.
    let mut peer = match AdminPeer::connect(&address, deadline) {
        Ok(peer) => peer,
        Err(error) => return Put::NotSent(error.to_string()),
    };
    match peer.request(&Message::Registry(request), &payload, deadline) {
        Ok((Message::Registered(RegistryAnswer::Done), _)) => Put::Done,
        Ok((other, _)) => Put::Unknown(AdminError::Unexpected { address, what: other.name() }.to_string()),
        Err(AdminError::Refusal(refusal)) => refused(refusal),
        Err(error) => Put::Unknown(error.to_string()),
    }
}
