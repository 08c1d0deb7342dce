//! A move by the very code that carries it out in production. A mover has the world do something, and goes on when that is
//! done.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use libmodelio::vocabulary::ids::{ShardId, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::{Refusal, ShardRecord};
use ps_backend::moving::{Answers, Edge, Ends, JobFacts, MovePlan, Order, Progress, PutError, move_model};

use super::{Attempt, Moving, SHARDS, shard_record};
use crate::chaos::Fault;
use crate::world::{Event, Node, Now, World};

/// How long a move may take, at most.
const PATIENCE: u64 = 8_000_000;
/// The pause after which a command asks again whose move another one keeps from beginning, and how many do so.
const TURN: Now = Now::from_millis(300);
const MOST_WAITING: usize = 3;
/// How much longer than a shard may take its answer is waited for.
const GRACE: Duration = Duration::from_secs(1);
/// The registry may carry out what it was asked this much later, in microseconds.
const LATEST: u64 = 10_000_000;
/// What wakes a mover.
#[derive(Debug)]
pub(super) enum Woken {
    Over,
    Answers(Answers),
    Put(Result<(), PutError>),
}

/// The coordinator's process carries it out.
pub struct Mover {
    pub(super) of: usize,
    pub(super) process: ShardId,
    /// The move, unless it is being carried on.
    pub(super) moves: Option<Pin<Box<dyn Future<Output = ()>>>>,
    pub(super) exchange: Rc<Exchange>,
    /// The question that is out.
    pub(super) asked: Option<Asked>,
    /// What time it is there when it waits no longer.
    pub(super) until: Option<Now>,
    pub(super) stopped: bool,
    pub(super) finished: bool,
}

/// A change of the world that an edge asks for.
type WorldOrder = dyn FnOnce(&mut World);

/// Between a mover and the world.
#[derive(Default)]
pub(super) struct Exchange {
    /// What the world is to do.
    orders: RefCell<VecDeque<Box<WorldOrder>>>,
    woken: Cell<Option<Woken>>,
}

#[derive(Debug)]
pub(super) struct Asked {
    pub(super) number: u64,
    pub(super) of: usize,
    pub(super) is_step: bool,
    pub(super) answers: Answers,
}

/// The mover's end.
struct WorldEdge {
    of: usize,
    exchange: Rc<Exchange>,
}

impl WorldEdge {
    /// The world is to do something.
    fn order(&self, f: impl FnOnce(&mut World, usize) + 'static) {
        let of = self.of;
        self.exchange.orders.borrow_mut().push_back(Box::new(move |world| f(world, of)));
    }

    /// Has the world find something out.
    async fn has<R: 'static>(&self, f: impl FnOnce(&mut World, usize) -> R + 'static) -> R {
        let answer = Rc::new(Cell::new(None));
        let found = Rc::clone(&answer);
        self.order(move |world, of| found.set(Some(f(world, of))));
        poll_fn(|_| answer.take().map_or(Poll::Pending, Poll::Ready)).await
    }

    /// Has the world begin something, and waits for what comes of it.
    async fn waits(&self, f: impl FnOnce(&mut World, usize) + 'static) -> Woken {
        self.order(f);
        poll_fn(|_| self.exchange.woken.take().map_or(Poll::Pending, Poll::Ready)).await
    }
}

impl Edge for WorldEdge {
    async fn now(&mut self) -> Now {
        self.has(|world, of| world.clock(world.mover_node(of))).await
    }

    async fn pause(&mut self, time: Duration) -> Result<(), Ends> {
        self.waits(move |world, of| world.mover_waits(of, time, None)).await;
        Ok(())
    }

    async fn ask(&mut self, shards: &[ShardId], order: Order, within: Duration) -> Result<Answers, Ends> {
        let shards = shards.to_vec();
        match self.waits(move |world, of| world.mover_asks(of, &shards, &order, within)).await {
            Woken::Answers(answers) => Ok(answers),
            other => panic!("it asked shards, and {other:?} came"),
        }
    }

    fn show(&mut self, progress: Progress) {
        self.order(move |world, of| world.trace(|| format!("move {of}: {progress:?}")));
    }

    async fn unwanted(&mut self) -> Option<Refusal> {
        let stopped = self.has(|world, of| world.mover(of).is_some_and(|mover| mover.stopped)).await;
        stopped.then(|| Refusal::other("stopped"))
    }

    fn hold(&mut self) {
        self.order(|world, _| {
            world.on_coordinator(|coordinator, now, actions| coordinator.hold(now, actions));
        });
    }

    async fn held(&mut self) -> Result<(Version, Reducer), String> {
        self.has(|world, of| {
            let (attempt, job) = (&mut world.moves.attempts[of], world.coordinator.job());
            (attempt.version, attempt.reducer) = (job.version(), job.state_of());
            let held = (attempt.version, attempt.reducer);
            if world.coordinator.is_held() { Ok(held) } else { Err(world.coordinator.held_up_by()) }
        })
        .await
    }

    async fn freeze(&mut self) -> Result<(Vec<u8>, Now), String> {
        self.has(|world, _| {
            world.frozen = true;
            Ok((world.coordinator.hand_over().expect("it is held"), world.clock(world.coordinator_node())))
        })
        .await
    }

    fn release(&mut self) {
        self.order(World::release);
    }

    async fn put(&mut self, _: bool) -> Result<(), PutError> {
        match self.waits(World::asks_to_put).await {
            Woken::Put(put) => put,
            other => panic!("it asked the registry, and {other:?} came"),
        }
    }

    async fn is_deleted(&mut self) -> bool {
        false
    }

    fn warn(&mut self, what: String) {
        self.order(move |world, of| world.trace(|| format!("move {of}: {what}")));
    }

    fn finish(&mut self, outcome: Result<(), Refusal>) {
        self.order(move |world, of| {
            world.trace(|| format!("move {of}: {outcome:?}"));
            world.mover(of).expect("it acts").finished = true;
        });
    }
}

impl World {
    /// Whether somebody waits for a move.
    pub fn is_moving(&self) -> bool {
        self.moves.waiting > 0 || self.moves.movers.iter().any(|mover| !mover.finished)
    }

    fn mover_node(&self, of: usize) -> Node {
        Node::Coordinator(self.moves.attempts[of].from)
    }

    pub(super) fn mover(&mut self, of: usize) -> Option<&mut Mover> {
        self.moves.movers.iter_mut().find(|mover| mover.of == of)
    }

    /// A coordinator moves its model once at a time; other commands ask again. One that was frozen may still be at it
    /// when the next one begins.
    pub fn begin_move(&mut self) {
        let goes_on =
            |mover: &Mover| !mover.finished && self.moves.attempts[mover.of].from == self.coordinated;
        if !self.moves.movers.iter().any(goes_on) {
            self.begins_move();
        } else if self.moves.waiting < MOST_WAITING {
            self.moves.waiting += 1;
            self.after(TURN, Event::Moves(Moving::Turn));
        }
    }

    fn begins_move(&mut self) {
        let from = self.coordinated;
        if !self.is_coordinated() || self.coordinator.failed().is_some() {
            return;
        }
        let before = self.courses[self.current()].record.clone();
        let epoch = self.courses[from].record.epoch;
        let owners: Vec<ShardId> = self.courses[from].map.shares().into_keys().collect();
        let off = owners[self.rng.usize(0..owners.len())];
        // Of the others some take blocks.
        let mut shards: Vec<ShardRecord> = (1..=SHARDS).map(shard_record).collect();
        for record in &mut shards {
            record.draining = record.shard == off || self.rng.u8(0..3) == 0;
        }
        let controls = self.coordinator.job().controls().clone();
        let job = JobFacts { generation: before.generation, epoch, controls: &controls };
        let of = self.moves.attempts.len();
        let number = u64::try_from(self.clock(self.coordinator_node()).as_nanos()).expect("a short run");
        let numbers = self.moves.attempts.iter().map(|attempt| attempt.plan.attempt).max();
        assert!(numbers < Some(number), "attempt {number} to move the model comes after {numbers:?}");
        let process = before.coordinator;
        let plan = match MovePlan::new(off, before, &shards, &job, number) {
            Ok(plan) => Arc::new(plan.expect("it has blocks")),
            Err(why) => return self.trace(|| format!("no move: {why}")),
        };
        let (version, reducer) = (Version(0), controls.reducer);
        let attempt = Attempt { plan: Arc::clone(&plan), from, version, reducer };
        self.moves.attempts.push(attempt);
        let now = self.clock(self.coordinator_node());
        let deadline = now + Now::from_secs(3) + self.some_time(PATIENCE);
        let hold = Duration::from_secs(1) + self.some_time(PATIENCE);
        self.trace(|| format!("move {of} off shard {off} to {:?}", plan.after.owners));
        self.moves.competed += u64::from(self.moves.movers.iter().any(|mover| !mover.finished));
        let exchange = Rc::<Exchange>::default();
        let mut edge = WorldEdge { of, exchange: Rc::clone(&exchange) };
        let moves = async move { move_model(&mut edge, &plan, deadline, Some(hold)).await };
        let (moves, asked, until) = (Some(Box::pin(moves) as Pin<Box<dyn Future<Output = ()>>>), None, None);
        let (stopped, finished) = (false, false);
        self.moves.movers.push(Mover { of, process, moves, exchange, asked, until, stopped, finished });
        self.mover_goes_on(of);
        if self.chance(0.1) {
            let after = self.some_time(PATIENCE / 4);
            self.after(after, Event::Moves(Moving::Halt(of)));
        }
        if self.settings.kills && self.rng.bool() {
            let after = self.some_time(1_500_000);
            self.after(after, Event::Fault(Fault::Kill));
        }
    }

    /// Does what the mover wants until it waits for something, or ends.
    fn mover_goes_on(&mut self, of: usize) {
        while let Some(mover) = self.mover(of)
            && let Some(mut moves) = mover.moves.take()
        {
            let ended = moves.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
            mover.moves = (!ended).then_some(moves);
            let orders = mover.exchange.orders.take();
            if orders.is_empty() && !ended {
                return;
            }
            orders.into_iter().for_each(|order| order(self));
            if ended {
                self.moves.movers.retain(|mover| mover.of != of);
            }
        }
    }

    pub(super) fn wake(&mut self, of: usize, what: Woken) {
        let Some(mover) = self.mover(of) else { return };
        mover.until = None;
        mover.exchange.woken.set(Some(what));
        self.mover_goes_on(of);
    }

    fn mover_waits(&mut self, of: usize, time: Duration, asked: Option<Asked>) {
        let node = self.mover_node(of);
        let until = self.clock(node) + time;
        let mover = self.mover(of).expect("it waits");
        (mover.asked, mover.until) = (asked, Some(until));
        self.at(self.when(node, until), Event::Moves(Moving::Tick(of)));
    }

    fn mover_asks(&mut self, of: usize, shards: &[ShardId], order: &Order, within: Duration) {
        self.moves.questions += 1;
        let (number, is_step) = (self.moves.questions, order.is_step);
        self.trace(|| format!("move {of}: {shards:?} get {:?}", order.message));
        for &shard in shards {
            if !self.chance(0.01) {
                let after = self.some_delay();
                self.after(after, Event::Moves(Moving::Order(of, number, shard, order.clone())));
            }
        }
        let asked = Asked { number, of: shards.len(), is_step, answers: Answers::new() };
        self.mover_waits(of, within + GRACE, Some(asked));
    }

    /// Something has happened that a mover may wait for.
    pub(super) fn mover_looks(&mut self, of: usize) {
        let now = self.clock(self.mover_node(of));
        let Some(mover) = self.mover(of) else { return };
        let Some(until) = mover.until else { return };
        let ends = |asked: &Asked| {
            let fails = mover.stopped || asked.answers.iter().any(|(_, answer)| answer.is_err());
            asked.answers.len() == asked.of || asked.is_step && fails
        };
        if until <= now || mover.asked.as_ref().is_some_and(ends) {
            let asked = mover.asked.take();
            self.wake(of, asked.map_or(Woken::Over, |asked| Woken::Answers(asked.answers)));
        }
    }

    /// The coordinator goes on where it was: the old map is in force, and stays so.
    pub(super) fn release(&mut self, of: usize) {
        let from = self.moves.attempts[of].from;
        assert_eq!(self.current(), from, "a coordinator goes on though another block map is in force");
        if std::mem::take(&mut self.frozen) {
            for index in std::mem::take(&mut self.moves.missed) {
                let up = self.network.connection(Node::Client(index), self.coordinator_node()).acceptor_up;
                let id = self.clients[index].id;
                self.on_coordinator(|coordinator, now, actions| match up {
                    true => coordinator.client_up(id, now, actions).expect("room for a client"),
                    false => coordinator.client_down(id, now, actions),
                });
            }
            self.on_coordinator(|coordinator, now, _| coordinator.forgive_silence(Now::MAX, now));
        }
        self.on_coordinator(|coordinator, now, actions| coordinator.release(now, actions));
        self.arm(self.coordinator_node());
    }

    /// How long something takes on its way: now and then longer than anybody waits.
    pub(super) fn some_delay(&mut self) -> Now {
        let most = if self.chance(0.02) { 15_000_000 } else { 50_000 };
        self.some_time(most)
    }

    /// The request may be lost, come late, or be carried out without an answer.
    fn asks_to_put(&mut self, of: usize) {
        let comes = |after, is_answered| (after, Event::Moves(Moving::PutComes(of, is_answered)));
        let answered = |after, answer| (after, Event::Moves(Moving::Put(of, answer)));
        let lost = || Err(PutError::Unknown("no answer".into()));
        let after = self.some_delay();
        let kind = if self.healed { 9 } else { self.rng.u8(0..20) };
        let events = match kind {
            0 => vec![answered(after, Err(PutError::NotSent("nobody listens".into())))],
            1 => vec![answered(after, lost())],
            2 => vec![comes(after, false), answered(after + after, lost())],
            // It is carried out long after it was asked again.
            3..5 => vec![answered(after, lost()), comes(after + self.some_time(LATEST), false)],
            _ => vec![comes(after, true)],
        };
        events.into_iter().for_each(|(after, event)| self.after(after, event));
    }
}
