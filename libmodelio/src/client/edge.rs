//! The client at work: the edge around [`ClientCore`]. It owns the lock, the clock, the connections and the memory;
//! the core decides.
//!
//! One lock, held for decisions and never for a copy. Completions and the listener are called after it is released,
//! on whatever thread brought the news, a reactor's included, so they must not block.
//!
//! One of the modules that hold `unsafe`: blocks of the back buffer are handed to connections to be received into,
//! and blocks of staging regions to be sent from. What makes that sound is told at each place.

mod memory;

use std::collections::HashMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use fixedbitset::FixedBitSet;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::conversation::{Control, Data};
use super::core::{Action, ClientCore, LastCommit, Now, PULL_BLOCKS, Part, Token};
use super::sum;
use super::versions::{self, Versions};
use crate::ids::{BlockId, ClientId, Epoch, Generation, LearnerId, PlanId, Step, Version};
use crate::layout::ModelLayout;
use crate::link::{Framed, Guard, Link, Outgoing, Piece, Target};
use crate::net::{Choice, Close, Handle, Reactor, ReactorOptions, SocketOptions, Thread, Threads};
use crate::shm;
use crate::transport::{LeaveReason, Region, ShardError, TransportKind};
pub(super) use memory::Memory;
pub use memory::TransportChoice;

use crate::wire::{self, Granted, JobState, Message, ModelRecord, Refusal, ShardRecord};

/// When a client pulls versions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pulls {
    /// Each, as soon as it is published: whoever opens it finds it here.
    #[default]
    Published,
    /// The first, and then those that somebody waits for ([`Client::await_step`], [`Client::await_newest`]): for who
    /// contributes more often than it reads.
    Awaited,
}

/// What a client may be told to do otherwise.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Threads that move bytes.
    pub threads: usize,
    /// By which way.
    pub io: Choice,
    /// Whether they go through sockets at all.
    pub transport: TransportChoice,
    /// Connections to each shard for blocks.
    pub connections: usize,
    /// Bytes that may be asked for and on their way from one shard. They are received where they belong, so it costs no
    /// memory; too few leave a shard without work while this end is not running.
    pub window: usize,
    /// When versions are pulled.
    pub pulls: Pulls,
    /// How long to wait for shards, and the first version, when connecting.
    pub patience: Duration,
}

impl Default for ClientOptions {
    fn default() -> ClientOptions {
        ClientOptions {
            threads: 2,
            io: Choice::Auto,
            transport: TransportChoice::Auto,
            connections: 2,
            window: 64 << 20,
            pulls: Pulls::Published,
            patience: Duration::from_secs(10),
        }
    }
}

/// Why no client came about.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The record of the model cannot be used.
    #[error("model {model}: {why}")]
    Record {
        /// Which.
        model: String,
        /// What is wrong with it.
        why: String,
    },
    /// No threads or memory.
    #[error("cannot start: {0}")]
    Start(String),
    /// Bytes cannot go the way that is asked for.
    #[error("model {model}: {why}")]
    Transport {
        /// Which.
        model: String,
        /// Why not.
        why: String,
    },
    /// A shard does not answer, or not as it should.
    #[error("model {model}: {why}")]
    Unreachable {
        /// Which.
        model: String,
        /// What was seen last.
        why: String,
    },
}

/// What happens to a client, for whoever shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientEvent {
    /// A version is shown here.
    Published(Version),
    /// A learner of this client is no longer in the job.
    Left(LearnerId, LeaveReason),
    /// The lead has told the state of the job.
    State,
}

/// Called once for every event, with no lock held and without blocking.
pub type ClientListener = Box<dyn Fn(ClientEvent) + Send + Sync>;

/// Called once with the outcome of a request.
pub type Answered = Box<dyn FnOnce(Result<Message, Refusal>) + Send>;
/// Called once with the outcome of a wait for a version.
pub type Awaited = Box<dyn FnOnce(Result<Version, ShardError>) + Send>;

/// Blocks that may be asked for on one connection: even if each has a request of its own, a shard takes so many.
const DUE_MAX: usize = 128;

/// Where a contribution lies.
#[derive(Clone, Debug)]
pub struct Staged {
    /// The memory.
    pub region: Region,
    /// Nobody stores into it until the contribution is answered. False where a program has it mapped: it should not,
    /// but it can.
    pub steady: bool,
}

impl From<Region> for Staged {
    fn from(region: Region) -> Staged {
        Staged { region, steady: true }
    }
}

#[derive(Default)]
struct Peer {
    /// Connections that are greeted.
    links: Vec<Link>,
    /// Connections in existence or on their way.
    opened: usize,
    /// When to try again.
    retry_at: Option<Instant>,
    tries: u32,
    /// What was seen when the last one ended.
    trouble: Option<String>,
    /// Which of `links` is next.
    turn: usize,
    /// Why there is no memory in common with it, though it is on this host.
    no_memory: Option<String>,
}

/// A shard as its client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerView {
    /// Where it listens.
    pub address: String,
    /// Whether it can be reached just now.
    pub connected: bool,
    /// Which way blocks go.
    pub transport: TransportKind,
    /// Why they do not go through shared memory, where they might.
    pub no_memory: Option<String>,
}

struct Inner {
    core: ClientCore,
    versions: Versions,
    answers: HashMap<Token, Answered>,
    waits: HashMap<Token, Awaited>,
    next_token: Token,
    sources: HashMap<(LearnerId, Step), Staged>,
    weights: HashMap<u64, Region>,
    lead: Peer,
    parts: Vec<Peer>,
    /// Sums that are on their way; the memory is used again.
    spare: Vec<Vec<u8>>,
}

/// What is to be sent of a block.
struct Payload {
    plan: PlanId,
    /// Where it lies, by learner.
    sources: Vec<Region>,
    /// Nobody stores into them meanwhile.
    steady: bool,
    learners: Vec<LearnerId>,
    /// The last one counts, and not the sum.
    replaces: bool,
}

/// What has to happen once the lock is released.
#[derive(Default)]
pub(super) struct After {
    answers: Vec<(Answered, Result<Message, Refusal>)>,
    waits: Vec<(Awaited, Result<Version, ShardError>)>,
    events: Vec<ClientEvent>,
}

/// What all connections of a client share.
pub(super) struct Shared {
    pub(super) layout: Arc<ModelLayout>,
    pub(super) model: String,
    pub(super) generation: Generation,
    pub(super) client: ClientId,
    pub(super) epoch: Epoch,
    options: ClientOptions,
    lead_address: String,
    part_addresses: Vec<String>,
    /// Whether each part is reached through shared memory, if that comes about.
    by_memory: Vec<bool>,
    /// Of connections through shared memory.
    threads: Arc<Threads>,
    net: Handle,
    started: Instant,
    inner: Mutex<Inner>,
    changed: Condvar,
    listener: Mutex<Option<Arc<ClientListener>>>,
    stopping: AtomicBool,
    this: Weak<Shared>,
}

/// A process that takes part in a job on a network: it joins learners, contributes for them, and shows versions.
pub struct Client {
    shared: Arc<Shared>,
    reactor: Mutex<Option<Reactor>>,
}

impl Client {
    /// Connects to the shards of a model and waits until a first version is here.
    ///
    /// # Errors
    /// [`ClientError`], after `options.patience` at the latest.
    pub fn connect(
        record: &ModelRecord,
        shards: &[ShardRecord],
        options: ClientOptions,
    ) -> Result<Client, ClientError> {
        let model = record.name.clone();
        let bad = |why: String| ClientError::Record { model: model.clone(), why };
        let layout = Arc::new(record.layout().map_err(|error| bad(error.to_string()))?);
        let map = record.block_map().map_err(|error| bad(error.to_string()))?;
        let core = match options.pulls {
            Pulls::Published => ClientCore::new(&map),
            Pulls::Awaited => ClientCore::new(&map).on_demand(),
        };
        let address = |shard| {
            let known = shards.iter().find(|record| record.shard == shard);
            known
                .map(|record| record.address.clone())
                .ok_or_else(|| bad(format!("shard {shard} is not there")))
        };
        let part_addresses =
            core.shards().iter().map(|&shard| address(shard)).collect::<Result<Vec<_>, _>>()?;
        let here = shm::host();
        let is_here = |shard| shards.iter().any(|record| record.shard == shard && record.host == here);
        if options.transport == TransportChoice::SharedMemory
            && let Some(part) = core.shards().iter().position(|&shard| !is_here(shard))
        {
            let (shard, address) = (core.shards()[part], &part_addresses[part]);
            let why = format!("shard {shard} at {address} is on another host, with no memory in common");
            return Err(ClientError::Transport { model, why });
        }
        let wanted = options.transport != TransportChoice::Tcp;
        let by_memory: Vec<bool> = core.shards().iter().map(|&shard| wanted && is_here(shard)).collect();
        let start = |error: &dyn std::fmt::Display| ClientError::Start(error.to_string());
        let reactor =
            ReactorOptions { threads: options.threads, choice: options.io, ..ReactorOptions::default() };
        let reactor = Reactor::start(&reactor).map_err(|error| start(&error))?;
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| start(&error))?;
        let size = layout.size() as usize;
        let mut versions = Versions::new(size);
        versions.add_spare(versions::spare(size).map_err(|error| start(&error))?);
        let inner = Inner {
            versions,
            answers: HashMap::new(),
            waits: HashMap::new(),
            next_token: 1,
            sources: HashMap::new(),
            weights: HashMap::new(),
            lead: Peer::default(),
            parts: part_addresses.iter().map(|_| Peer::default()).collect(),
            spare: Vec::new(),
            core,
        };
        let lead_address = address(record.lead)?;
        let net = reactor.handle();
        let shared = Arc::new_cyclic(|this| Shared {
            layout,
            model: record.name.clone(),
            generation: record.generation,
            client: ClientId(u64::from_le_bytes(random)),
            epoch: map.epoch(),
            lead_address,
            threads: Threads::new(2 * by_memory.len() * options.connections),
            part_addresses,
            by_memory,
            net,
            started: Instant::now(),
            inner: Mutex::new(inner),
            changed: Condvar::new(),
            listener: Mutex::new(None),
            stopping: AtomicBool::new(false),
            this: this.clone(),
            options,
        });
        let keeper = Arc::downgrade(&shared);
        let spawned = std::thread::Builder::new().name("client-keeper".into()).spawn(move || keep(&keeper));
        spawned.map_err(|error| start(&error))?;
        let client = Client { shared, reactor: Mutex::new(Some(reactor)) };
        client.await_first()?;
        Ok(client)
    }

    fn await_first(&self) -> Result<(), ClientError> {
        let deadline = Instant::now() + self.shared.options.patience;
        let mut inner = self.shared.inner.lock();
        while inner.versions.newest().is_none() {
            if self.shared.changed.wait_until(&mut inner, deadline).timed_out() {
                let peers = std::iter::once((&self.shared.lead_address, &inner.lead));
                let peers = peers.chain(self.shared.part_addresses.iter().zip(&inner.parts));
                let troubled = peers.filter(|(_, peer)| peer.links.is_empty());
                let why: Vec<String> = troubled
                    .map(|(address, peer)| {
                        format!("{address}: {}", peer.trouble.as_deref().unwrap_or("no answer"))
                    })
                    .collect();
                let why = if why.is_empty() { "no version came".to_owned() } else { why.join("; ") };
                let why = format!("{why} (waited {:?})", self.shared.options.patience);
                return Err(ClientError::Unreachable { model: self.shared.model.clone(), why });
            }
        }
        Ok(())
    }

    /// The layout.
    pub fn layout(&self) -> &Arc<ModelLayout> {
        &self.shared.layout
    }

    /// What moves the bytes, for status and log.
    pub fn backend(&self) -> String {
        self.shared.net.backend().to_string()
    }

    /// This life of the process.
    pub fn id(&self) -> ClientId {
        self.shared.client
    }

    /// The shards, in the order of the block map's owners.
    pub fn peers(&self) -> Vec<PeerView> {
        let inner = self.shared.inner.lock();
        let view = |(part, peer): (Part, &Peer)| PeerView {
            address: self.shared.part_addresses[part].clone(),
            connected: !peer.links.is_empty(),
            transport: match self.shared.by_memory[part] && peer.no_memory.is_none() {
                true => TransportKind::SharedMemory,
                false => TransportKind::Tcp,
            },
            no_memory: peer.no_memory.clone(),
        };
        inner.parts.iter().enumerate().map(view).collect()
    }

    /// Who is told of events.
    pub fn subscribe(&self, listener: ClientListener) {
        *self.shared.listener.lock() = Some(Arc::new(listener));
    }

    /// The job as the lead last told it.
    pub fn state(&self) -> JobState {
        self.shared.inner.lock().core.state().clone()
    }

    /// Why requests fail just now, if the job is stopped.
    pub fn stopped(&self) -> Option<ShardError> {
        self.shared.inner.lock().core.stopped()
    }

    /// The next step of `learner`, and whether the payload of the last one is still needed where it lies. None when
    /// only the lead knows, or `learner` is not one of this client's.
    pub fn next_step(&self, learner: LearnerId) -> Option<(Step, bool)> {
        self.shared.inner.lock().core.next_step(learner)
    }

    /// The newest version that is here.
    pub fn version(&self) -> Version {
        self.shared.inner.lock().core.version()
    }

    /// Whether `learner` is one of this client's and in the job.
    pub fn has_learner(&self, learner: LearnerId) -> bool {
        self.shared.inner.lock().core.has_learner(learner)
    }

    /// Where the last commit of `learner` is.
    pub fn last_commit(&self, learner: LearnerId) -> LastCommit {
        self.shared.inner.lock().core.last_commit(learner)
    }

    /// Sends a request to the lead; `done` is called once, before `timeout` is over.
    pub fn request(&self, message: Message, timeout: Duration, done: Answered) {
        self.shared.request(message, timeout, done, |_| {});
    }

    /// Commits a contribution that lies in `source`, where it stays until the answer, and if that is a timeout until
    /// the learner's next opening says that it is not lent.
    pub fn commit(
        &self,
        learner: LearnerId,
        step: Step,
        blocks: &FixedBitSet,
        source: impl Into<Staged>,
        timeout: Duration,
        done: Answered,
    ) {
        let source = source.into();
        let Ok(blocks) = wire::ranges::from_bits(blocks) else {
            return done(Err(ShardError::NotAllowed("the contribution is too scattered".into()).into()));
        };
        let message = Message::Commit { learner, step, blocks, timeout_ms: millis(timeout) };
        self.shared.request(message, timeout, done, |inner| {
            inner.sources.insert((learner, step), source);
        });
    }

    /// Publishes the whole blocks of `buffer` as the next version.
    pub fn assign(&self, buffer: Region, blocks: &FixedBitSet, timeout: Duration, done: Answered) {
        let Ok(blocks) = wire::ranges::from_bits(blocks) else {
            return done(Err(ShardError::NotAllowed("the new weights are too scattered".into()).into()));
        };
        let token = buffer.key().0;
        let message = Message::Assign { token, blocks, timeout_ms: millis(timeout) };
        let this = Arc::downgrade(&self.shared);
        let done = Box::new(move |result| {
            if let Some(shared) = this.upgrade() {
                shared.inner.lock().weights.remove(&token);
            }
            done(result);
        });
        self.shared.request(message, timeout, done, |inner| {
            inner.weights.insert(token, buffer);
        });
    }

    /// `done` is called when a version that holds the last commit of `learner` is here, or `timeout` is over.
    pub fn await_step(&self, learner: LearnerId, timeout: Duration, done: Awaited) {
        self.wait(done, |core, token, now, actions| {
            core.await_step(token, learner, now + timeout, now, actions);
        });
    }

    /// `done` is called when the newest version that the lead has told of, or a newer one, is here, or `timeout` is
    /// over.
    pub fn await_newest(&self, timeout: Duration, done: Awaited) {
        self.wait(done, |core, token, now, actions| core.await_newest(token, now + timeout, now, actions));
    }

    fn wait(&self, done: Awaited, begin: impl FnOnce(&mut ClientCore, Token, Now, &mut Vec<Action>)) {
        let shared = &self.shared;
        let mut inner = shared.inner.lock();
        if shared.is_stopping() {
            drop(inner);
            return done(Err(ShardError::Unreachable));
        }
        let token = inner.next_token();
        inner.waits.insert(token, done);
        let mut actions = Vec::new();
        begin(&mut inner.core, token, shared.now(), &mut actions);
        shared.act(inner, actions);
        shared.changed.notify_all();
    }

    /// Signs of life of learners.
    pub fn touch(&self, learners: Vec<LearnerId>, attached: Option<bool>) {
        let mut inner = self.shared.inner.lock();
        let mut actions = Vec::new();
        inner.core.notify(Message::Touch { learners, attached }, &mut actions);
        self.shared.act(inner, actions);
    }

    /// Pins `version`. False when it is gone.
    pub fn pin(&self, version: Version) -> bool {
        self.shared.inner.lock().versions.pin(version)
    }

    /// Takes pins back; a pull that waits for a buffer may go on then.
    pub fn unpin(&self, version: Version, count: u64) {
        let mut inner = self.shared.inner.lock();
        inner.versions.unpin(version, count);
        inner.wake_all();
    }

    /// A version's bytes, and since when it is here.
    pub fn get(&self, version: Version) -> Option<(Region, SystemTime)> {
        self.shared.inner.lock().versions.get(version).map(|shown| (shown.buffer.clone(), shown.at))
    }

    /// Versions in memory, rising.
    pub fn versions(&self) -> Vec<Version> {
        self.shared.inner.lock().versions.numbers().collect()
    }

    /// Version buffers in existence, and free ones.
    pub fn buffers(&self) -> (usize, usize) {
        self.shared.inner.lock().versions.buffers()
    }

    /// A buffer for [`Self::assign`].
    ///
    /// # Errors
    /// When too many are in use.
    pub fn take_buffer(&self) -> Result<Region, ShardError> {
        let mut inner = self.shared.inner.lock();
        let (_, max) = inner.bounds();
        inner.versions.take_buffer(max).map_err(|error| ShardError::OutOfMemory(error.to_string()))
    }

    /// Leaves: tells the lead that its learners go, answers what waits, ends all connections.
    pub fn shut_down(&self) {
        let shared = &self.shared;
        let learners: Vec<LearnerId> =
            shared.inner.lock().core.state().learners.iter().map(|learner| learner.learner).collect();
        let (sender, receiver) = std::sync::mpsc::channel();
        let patience = Duration::from_secs(1);
        for &learner in &learners {
            let sender = sender.clone();
            let leave = Message::Leave { learner, reason: LeaveReason::Asked };
            self.request(leave, patience, Box::new(move |_| sender.send(()).unwrap_or_default()));
        }
        drop(sender);
        for _ in &learners {
            // Whoever does not answer is left with the lease.
            let _ = receiver.recv_timeout(patience);
        }
        shared.stop();
        if let Err(error) = shared.threads.shut_down(Duration::from_secs(2)) {
            tracing::warn!(%error, "connections through shared memory");
        }
        if let Some(reactor) = self.reactor.lock().take()
            && let Err(error) = reactor.shut_down(Duration::from_secs(2))
        {
            tracing::warn!(%error, "connections");
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shared.stop();
    }
}

fn millis(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX)
}

impl Inner {
    fn next_token(&mut self) -> Token {
        let token = self.next_token;
        self.next_token += 1;
        token
    }

    fn control(&self, name: &str) -> Option<usize> {
        let found = self.core.state().controls.iter().find(|(known, _)| known == name);
        found.and_then(|(_, value)| value.parse().ok())
    }

    /// Versions to retain, and buffers that may exist.
    fn bounds(&self) -> (usize, usize) {
        (self.control("retain").unwrap_or(1), self.control("max_versions").unwrap_or(16))
    }

    /// Silence after which the lead gives a client up, if it ever does.
    fn lease(&self) -> Option<Duration> {
        let found = self.core.state().controls.iter().find(|(known, _)| known == "lease");
        let seconds = found.and_then(|(_, value)| value.parse().ok()).filter(|&seconds| seconds > 0.0);
        seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
    }

    fn rejects_nonfinite(&self) -> bool {
        self.core.state().controls.iter().any(|(name, value)| name == "nonfinite" && value == "reject")
    }

    /// What is to be sent of a block for the plan under way. None without a plan, or if its payload is gone.
    fn granted(&self, block: BlockId) -> Option<Payload> {
        let (plan, granted) = self.core.outgoing()?;
        match granted.clone() {
            Granted::Weights(token) => {
                let sources = vec![self.weights.get(&token)?.clone()];
                Some(Payload { plan, sources, steady: true, learners: Vec::new(), replaces: false })
            }
            Granted::Contributions { mut of, replaces } => {
                of.retain(|&(learner, step)| self.core.holds(learner, step, block));
                let staged: Option<Vec<&Staged>> = of.iter().map(|key| self.sources.get(key)).collect();
                let staged = staged?;
                let steady = staged.iter().all(|staged| staged.steady);
                let sources = staged.into_iter().map(|staged| staged.region.clone()).collect();
                let learners = of.iter().map(|(learner, _)| *learner).collect();
                Some(Payload { plan, sources, steady, learners, replaces })
            }
        }
    }

    fn wake_all(&self) {
        self.parts.iter().flat_map(|peer| &peer.links).for_each(Link::wake);
    }
}

impl Shared {
    pub(super) fn now(&self) -> Now {
        self.started.elapsed()
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        let mut after = After::default();
        {
            let mut inner = self.inner.lock();
            let gone = || Refusal::Shard(ShardError::Unreachable);
            after.answers = inner.answers.drain().map(|(_, done)| (done, Err(gone()))).collect();
            after.waits = inner.waits.drain().map(|(_, done)| (done, Err(ShardError::Unreachable))).collect();
            let links = inner.parts.iter().chain([&inner.lead]).flat_map(|peer| &peer.links);
            links.for_each(|link| link.close(Close::ShutDown));
        }
        // Their threads end soon.
        let _ = self.threads.shut_down(Duration::ZERO);
        self.finish(after);
        self.changed.notify_all();
    }

    fn request(&self, message: Message, timeout: Duration, done: Answered, with: impl FnOnce(&mut Inner)) {
        let mut inner = self.inner.lock();
        if self.is_stopping() {
            drop(inner);
            return done(Err(ShardError::Unreachable.into()));
        }
        with(&mut inner);
        let token = inner.next_token();
        inner.answers.insert(token, done);
        let now = self.now();
        let mut actions = Vec::new();
        // The lead answers in time unless it is out of reach.
        let deadline = now + timeout + Duration::from_millis(250);
        inner.core.request(token, message, deadline, now, &mut actions);
        self.act(inner, actions);
        self.changed.notify_all();
    }

    /// Changes the core and carries out what comes of it.
    pub(super) fn with_core(&self, change: impl FnOnce(&mut ClientCore, Now, &mut Vec<Action>)) {
        let mut inner = self.inner.lock();
        let mut actions = Vec::new();
        change(&mut inner.core, self.now(), &mut actions);
        self.act(inner, actions);
    }

    /// Carries out actions, releases the lock, then tells and answers.
    fn act(&self, mut inner: MutexGuard<'_, Inner>, actions: Vec<Action>) {
        let mut after = After::default();
        let mut queue = std::collections::VecDeque::from(actions);
        let mut more = Vec::new();
        while let Some(action) = queue.pop_front() {
            self.perform(&mut inner, action, &mut after, &mut more);
            queue.extend(more.drain(..));
        }
        drop(inner);
        self.finish(after);
    }

    fn finish(&self, after: After) {
        for event in after.events {
            let listener = self.listener.lock().clone();
            if let Some(listener) = listener {
                listener(event);
            }
        }
        after.waits.into_iter().for_each(|(done, result)| done(result));
        after.answers.into_iter().for_each(|(done, result)| done(result));
    }

    fn perform(&self, inner: &mut Inner, action: Action, after: &mut After, more: &mut Vec<Action>) {
        match action {
            Action::ToLead(request, message) => {
                if let Some(link) = inner.lead.links.first() {
                    link.send(Outgoing { epoch: self.epoch, ..Outgoing::new(request, message) });
                }
            }
            Action::ToShard(part, message) => {
                let peer = &mut inner.parts[part];
                peer.turn += 1;
                if let Some(link) = peer.links.get(peer.turn % peer.links.len().max(1)) {
                    link.send(Outgoing { epoch: self.epoch, ..Outgoing::new(0, message) });
                }
            }
            Action::Wake(part) => inner.parts[part].links.iter().for_each(Link::wake),
            Action::Answer(token, result) => {
                if let Some(done) = inner.answers.remove(&token) {
                    after.answers.push((done, result));
                }
            }
            Action::Awaited(token, result) => {
                if let Some(done) = inner.waits.remove(&token) {
                    after.waits.push((done, result));
                }
            }
            Action::Release(learner, step) => {
                inner.sources.remove(&(learner, step));
            }
            Action::ReleaseWeights(token) => {
                inner.weights.remove(&token);
            }
            Action::State => after.events.push(ClientEvent::State),
            Action::Left(learner, reason) => after.events.push(ClientEvent::Left(learner, reason)),
            Action::Pulled(version) => {
                inner.versions.publish(version);
                let (retain, max) = inner.bounds();
                inner.versions.recycle(retain, max);
                inner.core.shown(version, self.now(), more);
                after.events.push(ClientEvent::Published(version));
                self.changed.notify_all();
            }
        }
    }

    // -- connections

    /// The greeting of a connection for control (`None`) or for blocks of a part.
    pub(super) fn greeted(&self, part: Option<Part>, link: &Link, by_memory: bool) {
        let mut inner = self.inner.lock();
        let mut actions = Vec::new();
        let now = self.now();
        match part {
            None => {
                inner.lead.tries = 0;
                inner.lead.trouble = None;
                inner.lead.links = vec![link.clone()];
                inner.core.lead_up(now, &mut actions);
            }
            Some(part) => {
                let peer = &mut inner.parts[part];
                peer.tries = 0;
                peer.trouble = None;
                if by_memory {
                    peer.no_memory = None;
                }
                peer.links.push(link.clone());
                inner.core.shard_up(part, now, &mut actions);
                // For the next connection.
                self.changed.notify_all();
            }
        }
        self.act(inner, actions);
    }

    /// A connection is over.
    pub(super) fn ended(&self, part: Option<Part>, link: &Link, why: &str) {
        let mut inner = self.inner.lock();
        let mut actions = Vec::new();
        let now = self.now();
        let peer = match part {
            None => &mut inner.lead,
            Some(part) => &mut inner.parts[part],
        };
        peer.opened = peer.opened.saturating_sub(1);
        let before = peer.links.len();
        peer.links.retain(|known| !known.is(link));
        let was_up = before > peer.links.len();
        let alone = peer.links.is_empty();
        if !self.is_stopping() && (was_up || peer.trouble.as_deref() != Some(why)) {
            let address = part.map_or(&self.lead_address, |part| &self.part_addresses[part]);
            tracing::warn!(model = %self.model, %address, "connection lost: {why}");
        }
        peer.trouble = Some(why.to_owned());
        let pause = Duration::from_millis(50 << peer.tries.min(5));
        peer.tries += 1;
        peer.retry_at = Some(Instant::now() + pause);
        match part {
            None if was_up => inner.core.lead_down(),
            Some(part) if was_up && alone => inner.core.shard_down(part),
            Some(part) if was_up => inner.core.look_after(part, now, &mut actions),
            _ => {}
        }
        self.act(inner, actions);
        self.changed.notify_all();
    }

    /// Opens the connections that are missing, and says when to look again.
    fn connect_missing(&self) -> Option<Instant> {
        let mut missing = Vec::new();
        let mut next = None;
        {
            let mut inner = self.inner.lock();
            let connections = self.options.connections;
            let now = Instant::now();
            let mut look = |peer: &mut Peer, wanted: usize, part: Option<Part>| {
                if peer.opened >= wanted {
                    return;
                }
                match peer.retry_at.filter(|&at| at > now) {
                    Some(at) => next = Some(next.map_or(at, |next: Instant| next.min(at))),
                    None => {
                        missing.extend((peer.opened..wanted).map(|_| part));
                        peer.opened = wanted;
                    }
                }
            };
            look(&mut inner.lead, 1, None);
            for (part, peer) in inner.parts.iter_mut().enumerate() {
                // One after the other, so that either end knows what the last one is for and puts the next elsewhere.
                let greeted = peer.links.len();
                look(peer, connections.min(greeted + 1), Some(part));
            }
        }
        for part in missing {
            match part.filter(|&part| self.by_memory[part]) {
                Some(part) => self.connect_by_memory(part),
                None => self.connect_one(part),
            }
        }
        next
    }

    fn connect_one(&self, part: Option<Part>) {
        let Some(this) = self.this.upgrade() else { return };
        let link = Link::default();
        let address = part.map_or(&self.lead_address, |part| &self.part_addresses[part]);
        let resolved = address.to_socket_addrs().map(|mut all| all.next());
        let resolved: SocketAddr = match resolved {
            Ok(Some(resolved)) => resolved,
            Ok(None) => return self.ended(part, &link, "the address leads nowhere"),
            Err(error) => return self.ended(part, &link, &error.to_string()),
        };
        let deadline = Instant::now() + self.options.patience;
        let options = SocketOptions::default();
        let connected = match part {
            None => {
                let stream = Framed::new(Control::new(this), link.clone(), 16 << 10);
                self.net.connect(resolved, options, deadline, Box::new(stream), Thread::Number(0))
            }
            Some(part) => {
                let stream = Framed::new(Data::new(this, part, None), link.clone(), 128);
                self.net.connect(resolved, options, deadline, Box::new(stream), Thread::Any)
            }
        };
        if let Err(error) = connected {
            self.ended(part, &link, &error.to_string());
        }
    }

    /// Takes the memory of a version that is going to be pulled before it is needed, on a thread of its own: that
    /// takes a while.
    fn add_spare(&self) {
        {
            let mut inner = self.inner.lock();
            let (retain, max) = inner.bounds();
            if inner.versions.newest().is_none() || !inner.versions.wants_spare(retain, max) {
                return;
            }
        }
        let (this, size) = (self.this.clone(), self.layout.size() as usize);
        let take = move || match (versions::spare(size), this.upgrade()) {
            (Ok(memory), Some(shared)) => shared.inner.lock().versions.add_spare(memory),
            // Pulls make do with what there is, or say so.
            (Err(error), _) => tracing::warn!(%error, "no memory for a version ahead"),
            (Ok(_), None) => {}
        };
        if let Err(error) = std::thread::Builder::new().name("client-memory".into()).spawn(take) {
            tracing::warn!(%error, "no thread to take memory for a version ahead");
        }
    }

    // -- blocks

    /// The next block to push to a part, or the next request for blocks, with how many those are, unless `due` are
    /// many already.
    pub(super) fn next_for(&self, part: Part, due: usize) -> Option<(Outgoing, usize)> {
        let mut inner = self.inner.lock();
        let now = self.now();
        let frame = |message, payload| Outgoing { message, request: 0, epoch: self.epoch, payload };
        while let Some((plan, block)) = inner.core.next_push(part, now) {
            if let Some((wide, piece)) = self.push(inner, plan, block)? {
                return Some((frame(Message::Push { plan, block, wide }, Some(piece)), 0));
            }
            inner = self.inner.lock();
        }
        self.next_pull_for(inner, part, due)
    }

    /// The next request for blocks of a part, and how many blocks it asks for; `due` are those that the connection
    /// waits for already.
    fn next_pull_for(
        &self,
        mut inner: MutexGuard<'_, Inner>,
        part: Part,
        due: usize,
    ) -> Option<(Outgoing, usize)> {
        inner.core.pulling()?;
        let window = (self.options.window / self.layout.block_size() as usize).max(1);
        // Each connection has its share of the window, so that none has to wait for another, and asks for several
        // blocks at once.
        let share = window.div_ceil(self.options.connections.max(1)).min(DUE_MAX);
        if due > 0 && due + PULL_BLOCKS > share {
            return None;
        }
        let (retain, max) = inner.bounds();
        match inner.versions.back(retain, max) {
            Ok(Some(_)) => {}
            // All buffers are held: asked again when one is given back.
            Ok(None) => return None,
            Err(error) => {
                tracing::error!(%error, "no memory for a version");
                return None;
            }
        }
        let message = inner.core.next_pull(part, window, self.now())?;
        let asked = match &message {
            Message::Pull { blocks, .. } => inner.core.asked_in(part, blocks),
            _ => 0,
        };
        Some((Outgoing { epoch: self.epoch, ..Outgoing::new(0, message) }, asked))
    }

    /// The payload of a block of the plan under way, and whether it is wide. Bytes are looked at without the lock.
    /// `Some(None)` if the plan has been refused here.
    fn push(
        &self,
        mut inner: MutexGuard<'_, Inner>,
        plan: PlanId,
        block: BlockId,
    ) -> Option<Option<(bool, Piece)>> {
        let extent = self.layout.block_bytes(block);
        let span = extent.start as usize..extent.end as usize;
        let Payload { sources, steady, learners, replaces, .. } = inner.granted(block)?;
        // What may change between its checksum and the kernel's copy is copied here.
        if let ([source], true) = (&sources[..], steady) {
            let memory = Arc::clone(source.memory());
            drop(inner);
            // SAFETY: a committed payload stays untouched until the plan that sends it is over.
            let piece = unsafe { Piece::new(memory.bytes(span), None, Arc::clone(&memory) as Guard) };
            return Some(Some((false, piece)));
        }
        let check = inner.rejects_nonfinite();
        let mut out = inner.spare.pop().unwrap_or_default();
        drop(inner);
        // SAFETY: as above.
        let parts: Vec<&[u8]> =
            sources.iter().map(|source| unsafe { source.memory().bytes(span.clone()) }).collect();
        match sum::sum(&self.layout, block, &parts, replaces, check, &mut out) {
            Ok(wide) => {
                let pooled = Arc::new(Pooled { bytes: out, home: self.this.clone() });
                // SAFETY: nobody writes the vector while the guard lives.
                let piece = unsafe { Piece::new(&pooled.bytes, None, Arc::clone(&pooled) as Guard) };
                Some(Some((wide, piece)))
            }
            Err(bad) => {
                let mut inner = self.inner.lock();
                inner.spare.push(out);
                let mut actions = Vec::new();
                inner.core.unfit(plan, learners[bad], block, &mut actions);
                self.act(inner, actions);
                Some(None)
            }
        }
    }

    /// Where a block of a version is to be received; `None` if it is not wanted.
    pub(super) fn lands(&self, version: Version, block: BlockId) -> Option<Target> {
        let mut inner = self.inner.lock();
        let (retain, max) = inner.bounds();
        if !inner.core.lands(version, block) {
            return None;
        }
        let back = inner.versions.back(retain, max).ok().flatten();
        let extent = self.layout.block_bytes(block);
        let Some(back) = back else {
            let mut actions = Vec::new();
            inner.core.landed(version, block, false, self.now(), &mut actions);
            self.act(inner, actions);
            return None;
        };
        let memory = Arc::clone(back.memory());
        // SAFETY: the back buffer is written by connections only, and the core lets each of its blocks land once;
        // it is published when nothing is landing any more. The range is within the model.
        Some(unsafe {
            let bytes = memory.bytes_mut(extent.start as usize..extent.end as usize);
            let (start, len) = (bytes.as_mut_ptr(), bytes.len());
            Target::new(start, len, memory as Guard)
        })
    }
}

/// A sum's memory, which comes home when it is sent.
struct Pooled {
    bytes: Vec<u8>,
    home: Weak<Shared>,
}

impl Drop for Pooled {
    fn drop(&mut self) {
        /// Sums on their way at once, about.
        const SPARE: usize = 64;
        if let Some(home) = self.home.upgrade()
            // Where the lock is held just now, the memory is simply freed.
            && let Some(mut inner) = home.inner.try_lock()
            && inner.spare.len() < SPARE
        {
            inner.spare.push(std::mem::take(&mut self.bytes));
        }
    }
}

/// Keeps connections up and time passing until the client is gone.
fn keep(shared: &Weak<Shared>) {
    const IDLE: Duration = Duration::from_millis(200);
    let mut alive_at = Instant::now();
    loop {
        let Some(shared) = shared.upgrade() else { return };
        if shared.is_stopping() {
            return;
        }
        let retry = shared.connect_missing();
        shared.add_spare();
        let mut inner = shared.inner.lock();
        // The connection's own pings know nothing of leases.
        let alive = inner.lease().map(|lease| alive_at + lease / 4);
        if alive.is_some_and(|at| at <= Instant::now()) {
            alive_at = Instant::now();
            inner.lead.links.iter().for_each(|link| link.say(0, Message::Ping));
        }
        let now = shared.now();
        let mut actions = Vec::new();
        inner.core.tick(now, &mut actions);
        let due = inner.core.next_deadline().map(|at| at.saturating_sub(now));
        shared.act(inner, actions);
        let [retry, alive] = [retry, alive].map(|at| Some(at?.saturating_duration_since(Instant::now())));
        let pause = [due, retry, alive].into_iter().flatten().min().unwrap_or(IDLE);
        let pause = pause.clamp(Duration::from_millis(5), IDLE);
        let mut inner = shared.inner.lock();
        shared.changed.wait_for(&mut inner, pause);
    }
}
