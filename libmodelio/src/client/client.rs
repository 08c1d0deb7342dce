//! [`Client`]: what a process does with a model on a network.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

use fixedbitset::FixedBitSet;
use parking_lot::{Condvar, Mutex};

use super::fallback::FastPath;
use super::options::{
    Answered, Awaited, ClientError, ClientListener, ClientOptions, Offered, PeerView, Pulls, Staged,
    TransportChoice,
};
use super::peer::Peer;
use super::routes::{Routes, ShardRoute};
use super::shared::{Inner, Local, Shared, keep};
use crate::client::core::{Action, ClientCore, LastCommit, Now, Token};
use crate::client::versions::{self, Versions};
use crate::transport::local::{Hears, Shard};
use crate::transport::reactor::{Reactor, ReactorOptions};
use crate::transport::tally::{Payloads, Tally};
use crate::transport::{Attached, BlockSlot, LeaveReason, Region, ShardError, TransportKind};
use crate::vocabulary::block_ranges;
use crate::vocabulary::ids::{ClientId, Incarnation, LearnerId, Step, Version};
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::partly::MAX_PIECES;
use crate::wire::{JobState, Message, ModelRecord, ShardRecord};

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
        let start = |error: &dyn std::fmt::Display| ClientError::Start(error.to_string());
        let id = random_id()?;
        let core = ClientCore::new(&map).apart(id);
        let core = match options.pulls {
            Pulls::Published => core,
            Pulls::Awaited => core.on_demand(),
        };
        let (transport, connections) = (options.transport, options.connections);
        if transport == TransportChoice::Rdma && !cfg!(feature = "rdma") {
            return Err(ClientError::Transport { model, why: crate::transport::NO_RDMA.to_owned() });
        }
        let routes = Routes::new(&map, record.coordinator, shards, transport, connections).map_err(bad)?;
        if let Some(why) = routes.parts.iter().find_map(|place| place.barred.clone()) {
            return Err(ClientError::Transport { model, why });
        }
        let reactor =
            ReactorOptions { threads: options.threads, choice: options.io, ..ReactorOptions::default() };
        let reactor = Reactor::start(&reactor).map_err(|error| start(&error))?;
        let size = layout.size() as usize;
        #[cfg(feature = "rdma")]
        let mut endpoint = None;
        #[cfg(feature = "rdma")]
        if transport == TransportChoice::Rdma {
            // What must be is found out at once.
            let opened = crate::transport::rdma::Endpoint::open(&options.rdma);
            let opened = opened
                .map_err(|error| ClientError::Transport { model: model.clone(), why: error.to_string() })?;
            endpoint = Some(Ok(opened));
        }
        let mut versions = Versions::new(size);
        versions.add_spare(versions::spare(size).map_err(|error| start(&error))?, usize::MAX);
        let inner = Inner::new(core, versions, routes);
        let net = reactor.handle();
        let shared = Arc::new_cyclic(|this| Shared {
            layout,
            model: record.name.clone(),
            generation: record.generation,
            client: id,
            record: record.clone(),
            net: Some(net),
            local: None,
            started: Instant::now(),
            inner: Mutex::new(inner),
            unanswered: Mutex::default(),
            changed: Condvar::new(),
            listener: Mutex::new(None),
            stopping: AtomicBool::new(false),
            tally: Tally::default(),
            #[cfg(feature = "rdma")]
            rdma_endpoint: Mutex::new(endpoint),
            this: this.clone(),
            options,
        });
        Client::begin(shared, Some(reactor))
    }

    /// A client of a model whose only shard is in this process. `meet` introduces it there.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn of_shard_here(
        record: &ModelRecord,
        layout: Arc<ModelLayout>,
        shard: Arc<dyn Shard>,
        meet: impl FnOnce(ClientId),
    ) -> Result<Client, ClientError> {
        let bad = |why: &dyn std::fmt::Display| {
            let (model, why) = (record.name.clone(), why.to_string());
            ClientError::Record { model, why }
        };
        let map = record.block_map().map_err(|error| bad(&error))?;
        let id = random_id()?;
        let mut core = ClientCore::new(&map).in_process();
        let mut actions = Vec::new();
        core.coordinator_up(Now::ZERO, &mut actions);
        core.shard_up(0, Now::ZERO, &mut actions);
        let inner = Inner::new(core, Versions::new(layout.size() as usize), Routes::here(map.epoch()));
        let shared = Arc::new_cyclic(|this| Shared {
            layout,
            model: record.name.clone(),
            generation: record.generation,
            client: id,
            record: record.clone(),
            net: None,
            local: Some(Local { shard: Arc::clone(&shard) }),
            started: Instant::now(),
            inner: Mutex::new(inner),
            unanswered: Mutex::default(),
            changed: Condvar::new(),
            listener: Mutex::new(None),
            stopping: AtomicBool::new(false),
            tally: Tally::default(),
            #[cfg(feature = "rdma")]
            rdma_endpoint: Mutex::new(None),
            this: this.clone(),
            options: ClientOptions::default(),
        });
        let ears: std::sync::Weak<dyn Hears> = Arc::downgrade(&shared) as std::sync::Weak<dyn Hears>;
        if !shard.mailbox().join(ears) {
            return Err(bad(&"the shard in this process has a client already"));
        }
        meet(id);
        shared.with_core(|_, _, taken| taken.append(&mut actions));
        Client::begin(shared, None)
    }

    fn begin(shared: Arc<Shared>, reactor: Option<Reactor>) -> Result<Client, ClientError> {
        let keeper = Arc::downgrade(&shared);
        let spawned = std::thread::Builder::new().name("client-keeper".into()).spawn(move || keep(&keeper));
        spawned.map_err(|error| ClientError::Start(error.to_string()))?;
        let client = Client { shared, reactor: Mutex::new(reactor) };
        client.await_first()?;
        Ok(client)
    }

    fn await_first(&self) -> Result<(), ClientError> {
        let deadline = Instant::now() + self.shared.options.patience;
        let mut inner = self.shared.inner.lock();
        while inner.versions.newest().is_none() {
            if self.shared.changed.wait_until(&mut inner, deadline).timed_out() {
                let routes = &inner.routes;
                let peers = std::iter::once((routes.address(routes.coordinator), &inner.coordinator));
                let parts = inner.parts.iter().enumerate();
                let peers: Vec<_> =
                    peers.chain(parts.map(|(part, peer)| (routes.address(part), peer))).collect();
                let mut why: Vec<String> = peers
                    .iter()
                    .filter(|(_, peer)| peer.links.is_empty())
                    .map(|(address, peer)| {
                        format!("{address}: {}", peer.trouble.as_deref().unwrap_or("no answer"))
                    })
                    .collect();
                if why.is_empty() {
                    // Connections may come about again and again, only to be lost before it has come.
                    why.push("no version came".to_owned());
                    let lost =
                        peers.iter().filter_map(|(address, peer)| Some((address, peer.lost.as_ref()?)));
                    why.extend(lost.map(|(address, lost)| format!("{address}: connection lost: {lost}")));
                }
                let why = why.join("; ");
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
        self.shared.net.as_ref().map_or("in this process".to_owned(), |net| net.backend().to_string())
    }

    /// This life of the process.
    pub fn id(&self) -> ClientId {
        self.shared.client
    }

    /// The shards, in the order of the block map's owners.
    pub fn peers(&self) -> Vec<PeerView> {
        if self.shared.local.is_some() {
            let (shards, blocks) = (self.shared.inner.lock().core.shards().to_vec(), self.layout().blocks());
            return shards.into_iter().map(|shard| PeerView::here(shard, blocks)).collect();
        }
        let inner = self.shared.inner.lock();
        let now = Instant::now();
        let view = |(part, (place, peer)): (usize, (&ShardRoute, &Peer))| {
            let coordinator = Some(&inner.coordinator).filter(|_| part == inner.routes.coordinator);
            let gone_since =
                [Some(peer), coordinator].into_iter().flatten().filter_map(|peer| peer.gone_since).min();
            // What must not go another way does not.
            let must = self.shared.options.transport;
            let no = |fast: FastPath| {
                let barred = place.barred.clone().filter(|_| must == fast.alone());
                barred.or_else(|| peer.fallbacks.why(fast).map(str::to_owned))
            };
            let (no_memory, no_rdma) = (no(FastPath::SharedMemory), no(FastPath::Rdma));
            let transport = match place.fast {
                Some(FastPath::SharedMemory) if no_memory.is_none() || must != TransportChoice::Auto => {
                    TransportKind::SharedMemory
                }
                Some(FastPath::Rdma) if no_rdma.is_none() || must != TransportChoice::Auto => {
                    TransportKind::Rdma
                }
                _ => TransportKind::Tcp,
            };
            PeerView {
                shard: place.record.shard,
                blocks: place.blocks,
                address: Some(place.record.address.clone()),
                connected: !peer.links.is_empty(),
                gone: gone_since.map(|since| now.saturating_duration_since(since)),
                transport,
                no_memory,
                no_rdma,
                lost: peer.lost.clone(),
            }
        };
        inner.routes.parts.iter().zip(&inner.parts).enumerate().map(view).collect()
    }

    /// Payload that has gone to shards and come from them.
    pub fn payload(&self) -> Payloads {
        self.shared.tally.read()
    }

    /// Who is told of events.
    pub fn subscribe(&self, listener: ClientListener) {
        *self.shared.listener.lock() = Some(Arc::new(listener));
    }

    /// The job as the coordinator last told it.
    pub fn state(&self) -> JobState {
        self.shared.inner.lock().core.state().clone()
    }

    /// The job at this moment, where its coordinator is in this process; as it last told, elsewhere.
    pub fn newest_state(&self) -> JobState {
        match &self.shared.local {
            Some(local) => local.shard.state(),
            None => self.state(),
        }
    }

    /// Why requests fail just now, if the job is stopped.
    pub fn stopped(&self) -> Option<ShardError> {
        self.shared.inner.lock().core.stopped()
    }

    /// The newest version that is here.
    pub fn version(&self) -> Version {
        self.shared.inner.lock().core.version()
    }

    /// Whether `learner` is one of this client's and in the job, and does not leave it.
    pub fn has_learner(&self, learner: LearnerId) -> bool {
        let inner = self.shared.inner.lock();
        inner.core.has_learner(learner) && !inner.core.is_leaving(learner)
    }

    /// The name and the life of a learner that has joined here, and whether it writes a contribution.
    pub fn identity(&self, learner: LearnerId) -> Option<(String, Incarnation, bool)> {
        let inner = self.shared.inner.lock();
        let (name, incarnation) = inner.core.identity(learner)?;
        Some((name.to_owned(), incarnation, inner.core.is_writing(learner)))
    }

    /// Where the last commit of `learner` is.
    pub fn last_commit(&self, learner: LearnerId) -> LastCommit {
        self.shared.inner.lock().core.last_commit(learner)
    }

    /// Sends a request to the coordinator; `done` is called once, before `timeout` is over.
    pub fn request(&self, message: Message, timeout: Duration, done: Answered) {
        self.shared.request(message, timeout, done, |_| {});
    }

    /// Commits a contribution that lies in `source`, where it stays until the answer, and if that is a timeout until
    /// the learner's next opening says that it is not lent. What is not steady is lent until the answer and no longer: if
    /// that is an error, nothing counts of which anything was read later.
    pub fn commit(
        &self,
        learner: LearnerId,
        step: Step,
        (blocks, tensors): (&FixedBitSet, &FixedBitSet),
        source: impl Into<Staged>,
        timeout: Duration,
        done: Answered,
    ) {
        let source = source.into();
        let ranges = block_ranges::from_bits(blocks).and_then(|blocks| {
            let tensors = block_ranges::from_bits(tensors)?;
            Ok((blocks, tensors))
        });
        let Ok((blocks, tensors)) = ranges else {
            return done(Err(ShardError::NotAllowed("the contribution is too scattered".into()).into()));
        };
        let (timeout_ms, lent) = (millis(timeout), !source.steady);
        let partly = source.partly.clone().filter(|partly| partly.pieces() <= MAX_PIECES);
        let message =
            Message::Commit { learner, step, blocks, tensors, partly, timeout_ms, lent, under: None };
        self.shared.request(message, timeout, done, |inner| {
            inner.sources.insert((learner, step), source);
        });
    }

    /// Publishes the whole blocks of `buffer` as the next version. A write that has timed out may have been taken: while a
    /// plan sends it, it stays here until that is over.
    pub fn assign(&self, buffer: Region, blocks: &FixedBitSet, timeout: Duration, done: Answered) {
        let Ok(blocks) = block_ranges::from_bits(blocks) else {
            return done(Err(ShardError::NotAllowed("the new weights are too scattered".into()).into()));
        };
        let token = buffer.key().0;
        let message = Message::Assign { token, blocks, timeout_ms: millis(timeout) };
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

    /// `done` is called when the newest version that the coordinator has told of, or a newer one, is here, or `timeout`
    /// is over.
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
        shared.rouse_keeper(&inner);
        shared.act(inner, actions);
    }

    /// Signs of life of learners.
    pub fn touch(&self, learners: Vec<LearnerId>, attached: Option<Attached>) {
        let mut inner = self.shared.inner.lock();
        let mut actions = Vec::new();
        inner.core.touch(learners, attached, &mut actions);
        self.shared.act(inner, actions);
    }

    /// Pins `version`. False when it is gone.
    pub fn pin(&self, version: Version) -> bool {
        self.shared.inner.lock().versions.pin(version)
    }

    /// The newest version that is here, pinned: between asking for it and pinning it, it might be gone.
    pub fn pin_newest(&self) -> Option<Version> {
        let mut inner = self.shared.inner.lock();
        let version = inner.core.version();
        inner.versions.pin(version).then_some(version)
    }

    /// Takes pins back; a pull that waits for a buffer may go on then.
    pub fn unpin(&self, version: Version, count: u64) {
        let mut inner = self.shared.inner.lock();
        inner.versions.unpin(version, count);
        match &self.shared.local {
            None => inner.wake_all(),
            Some(local) if version < inner.core.version() => {
                let (retain, max) = inner.bounds();
                inner.versions.recycle(retain, max);
                drop(inner);
                local.shard.find_buffer();
            }
            Some(_) => {}
        }
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
        match &self.shared.local {
            Some(local) => local.shard.buffers(),
            None => self.shared.inner.lock().versions.buffers(),
        }
    }

    /// Opens the next contribution of a learner.
    pub fn open(&self, learner: LearnerId, timeout: Duration, done: Answered) {
        self.shared.ask(timeout, done, |inner, token, deadline, now, actions| {
            inner.core.open(token, learner, deadline, now, actions);
        });
    }

    /// Takes a block of a contribution that is open, once. It is reduced from where it is if it can be: the shard is in
    /// this process, and waits for nobody else.
    ///
    /// # Errors
    /// When the learner is gone, or in another life, or its contribution to that step is not open.
    pub fn offer(&self, slot: BlockSlot, payload: &[u8]) -> Result<Offered, ShardError> {
        let mut inner = self.shared.inner.lock();
        if !inner.core.take(slot)? {
            return Ok(Offered::Again);
        }
        Ok(match &self.shared.local {
            Some(local) => self.shared.offer_here(local, inner, slot, payload),
            None => Offered::Stage,
        })
    }

    /// A block that was to be staged is refused: it may be offered again.
    pub fn give_back(&self, slot: BlockSlot) {
        self.shared.inner.lock().core.give_back(slot);
    }

    /// Whether `step` can be committed, or was and can be again.
    ///
    /// # Errors
    /// When it is neither open nor was taken, or the learner is gone.
    pub fn may_commit(&self, learner: LearnerId, step: Step) -> Result<(), ShardError> {
        self.shared.inner.lock().core.may_commit(learner, step)
    }

    /// For how long nothing was heard of a learner, where that is known.
    pub fn silence(&self, learner: LearnerId) -> Option<Duration> {
        self.shared.local.as_ref().map(|local| local.shard.silence(learner))
    }

    /// A buffer for [`Self::assign`].
    ///
    /// # Errors
    /// When too many are in use.
    pub fn take_buffer(&self) -> Result<Region, ShardError> {
        if let Some(local) = &self.shared.local {
            return local.shard.take_buffer();
        }
        let mut inner = self.shared.inner.lock();
        let (_, max) = inner.bounds();
        inner.versions.take_buffer(max).map_err(|error| ShardError::no_memory(&error))
    }

    /// Leaves: tells the coordinator that its learners go, answers what waits, ends all connections.
    pub fn shut_down(&self) {
        let shared = &self.shared;
        // Before their learners leave, which would be their answer otherwise.
        shared.dismiss();
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
        let threads = Arc::clone(&shared.inner.lock().routes.threads);
        if let Err(error) = threads.shut_down(Duration::from_secs(2)) {
            tracing::warn!(%error, "connections through shared memory");
        }
        #[cfg(feature = "rdma")]
        let endpoint = shared.rdma_endpoint.lock().clone();
        #[cfg(feature = "rdma")]
        if let Some(Ok(endpoint)) = endpoint {
            endpoint.shut_down(Duration::from_secs(2));
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

fn random_id() -> Result<ClientId, ClientError> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|error| ClientError::Start(error.to_string()))?;
    Ok(ClientId(u64::from_le_bytes(random)))
}

fn millis(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX)
}
