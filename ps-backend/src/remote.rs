//! A job whose shards are on a network, as a mount sees it: a [`Job`], with the [`Device`] and the [`Channel`] that
//! learners contribute by.
//!
//! It answers from what its [`Client`] mirrors. A block that a program has written whole is put into the learner's
//! staging region, from which the client sends it when the coordinator says so.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use fixedbitset::FixedBitSet;
use libmodelio::bytes::block;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::client::{self, Client, ClientEvent, LastCommit, Offered, PeerView};
use libmodelio::transport::tally::Payloads;
use libmodelio::transport::{
    Attached, BlockSlot, Channel, CommitNotice, Completion, Device, Message, Placement, Region, RegionKey,
    Reply, ShardError, TransportKind,
};
use libmodelio::vocabulary::controls::{ControlError, Controls, NonFinite};
use libmodelio::vocabulary::ids::{BlockId, LearnerId, ShardId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::phase::{JobPhase, LONG};
use libmodelio::vocabulary::reducer::Combine;
use libmodelio::wire::{self, Refusal};
use parking_lot::Mutex;

use crate::coordinator::AWAY;
use crate::core::{MemberView, WaitedFor};
use crate::job::{Event, Job, JobStatus, Listener, SetDone, ShardView, VersionMemory, VersionView};

/// For requests that nobody waits for.
const BESIDE: Duration = Duration::from_secs(30);

/// A model on a network, as this process takes part in it.
pub struct RemoteJob {
    client: Client,
    layout: Arc<ModelLayout>,
    controls: Mutex<Controls>,
    /// `nonfinite` is `reject`, for the hot path.
    rejects: AtomicBool,
    /// The job has too few learners, for the hot path.
    stopped: AtomicBool,
    /// It is shut down.
    ends: AtomicBool,
    /// Buffers for new weights that were handed out and have not come back.
    lent: Mutex<HashMap<RegionKey, Weak<Mapping>>>,
    listener: Mutex<Option<Arc<Listener>>>,
    waits: Mutex<Waits>,
    /// Blocks that were reduced from where they came.
    on_arrival: AtomicU64,
    next_key: AtomicU64,
    this: Weak<RemoteJob>,
}

/// What the coordinator says that the job waits for, and since when it does.
#[derive(Default)]
struct Waits {
    learners: Option<Instant>,
    shards: BTreeMap<ShardId, Instant>,
}

impl Waits {
    /// The coordinator says so when it has waited for a while.
    fn hear(&mut self, state: &wire::JobState) {
        let ago = |waited| Instant::now().checked_sub(waited).unwrap_or_else(Instant::now);
        if state.late.is_empty() && state.late_more == 0 {
            self.learners = None;
        } else {
            self.learners.get_or_insert_with(|| ago(LONG));
        }
        self.shards.retain(|shard, _| state.away.contains(shard));
        for &shard in &state.away {
            self.shards.entry(shard).or_insert_with(|| ago(AWAY));
        }
    }
}

impl RemoteJob {
    /// Over a connected client.
    pub fn new(client: Client) -> Arc<RemoteJob> {
        let job = Arc::new_cyclic(|this: &Weak<RemoteJob>| RemoteJob {
            layout: Arc::clone(client.layout()),
            client,
            controls: Mutex::new(Controls::default()),
            rejects: AtomicBool::new(true),
            stopped: AtomicBool::new(false),
            ends: AtomicBool::new(false),
            lent: Mutex::default(),
            listener: Mutex::new(None),
            waits: Mutex::default(),
            on_arrival: AtomicU64::new(0),
            next_key: AtomicU64::new(1 << 32),
            this: this.clone(),
        });
        job.mirror();
        let this = Arc::downgrade(&job);
        job.client.subscribe(Box::new(move |event| {
            if let Some(job) = this.upgrade() {
                job.hear(event);
            }
        }));
        // What came before anybody listened.
        job.mirror();
        job
    }

    /// What moves the bytes, to be named loudly.
    pub fn backend(&self) -> String {
        self.client.backend()
    }

    fn hear(&self, event: ClientEvent) {
        let event = match event {
            ClientEvent::State => return self.mirror(),
            ClientEvent::Published(version) => Event::Published(version),
            ClientEvent::Left(learner, reason) => Event::Left(learner, reason),
        };
        let listener = self.listener.lock().clone();
        if let Some(listener) = listener {
            listener(event);
        }
    }

    /// Takes over what the coordinator has told.
    fn mirror(&self) {
        let state = self.client.state();
        self.rejects.store(state.controls.nonfinite == NonFinite::Reject, Ordering::Relaxed);
        self.stopped.store(state.phase == JobPhase::Stopped, Ordering::Relaxed);
        self.waits.lock().hear(&state);
        *self.controls.lock() = state.controls;
    }

    fn refuse_if_ending(&self) -> Result<(), ShardError> {
        if self.ends.load(Ordering::Relaxed) { Err(ShardError::Unreachable) } else { Ok(()) }
    }

    fn refuse_if_stopped(&self) -> Result<(), ShardError> {
        match self.stopped.load(Ordering::Relaxed).then(|| self.client.stopped()).flatten() {
            Some(stopped) => Err(stopped),
            None => Ok(()),
        }
    }

    /// Asks the coordinator for what nobody waits for.
    fn ask_beside(&self, message: wire::Message) {
        let what = message.name();
        let done = move |result| {
            if let Err(error) = result {
                tracing::debug!(what, %error, "refused");
            }
        };
        self.client.request(message, BESIDE, Box::new(done));
    }

    fn open(&self, learner: LearnerId, timeout: Duration, done: Completion) {
        if let Err(error) = self.refuse_if_stopped() {
            return done(Err(error));
        }
        if !self.has_learner(learner) {
            return done(Err(ShardError::UnknownLearner(learner)));
        }
        let opened = move |result| {
            done(match result {
                Ok(wire::Message::Opened { step, staging_lent }) => Ok(Reply::Opened { step, staging_lent }),
                other => Err(unexpected(other)),
            });
        };
        self.client.open(learner, timeout, Box::new(opened));
    }

    /// Publishes what was written into `buffer`, whose blocks are completed with what the newest version holds. Done
    /// when it is shown here, too: whoever has written it reads it.
    fn assign(&self, buffer: Region, written: &[Range<u64>], timeout: Duration, done: Completion) {
        let size = self.layout.size();
        let mut at = 0;
        let mut blocks = FixedBitSet::with_capacity(self.layout.blocks() as usize);
        for range in written {
            if range.start < at || range.end < range.start || range.end > size {
                return done(Err(ShardError::OutOfRange));
            }
            at = range.end;
            if !range.is_empty() {
                let last = self.layout.block_of(range.end - 1).index();
                blocks.insert_range(self.layout.block_of(range.start).index()..last + 1);
            }
        }
        if !self.claim(&buffer) {
            let why = "the buffer was not allocated for new weights, or is used up";
            return done(Err(ShardError::NotAllowed(why.into())));
        }
        let deadline = Instant::now() + timeout;
        let left = move || deadline.saturating_duration_since(Instant::now());
        let (this, written) = (self.this.clone(), written.to_vec());
        let newest_is_here = move |result: Result<Version, ShardError>| {
            let Some(job) = this.upgrade() else { return done(Err(ShardError::Unreachable)) };
            let completed = result.and_then(|_| job.complete(&buffer, &written, &blocks));
            if let Err(error) = completed {
                return done(Err(error));
            }
            let answered = move |result: Result<wire::Message, Refusal>| {
                match (result, this.upgrade()) {
                    (Err(refusal), _) => done(Err(shard_error(refusal))),
                    (Ok(_), None) => done(Ok(Reply::Done)),
                    // It counts, even if it cannot be shown in time.
                    (Ok(_), Some(job)) => {
                        job.client.await_newest(left(), Box::new(move |_| done(Ok(Reply::Done))));
                    }
                }
            };
            job.client.assign(buffer, &blocks, left(), Box::new(answered));
        };
        self.client.await_newest(timeout, Box::new(newest_is_here));
    }

    /// Whether `buffer` was handed out for new weights and comes back for the first time.
    fn claim(&self, buffer: &Region) -> bool {
        let is_it = |memory: &Weak<Mapping>| memory.as_ptr() == Arc::as_ptr(buffer.memory());
        let mut lent = self.lent.lock();
        let claimed = lent.get(&buffer.key()).is_some_and(is_it);
        if claimed {
            lent.remove(&buffer.key());
        }
        claimed
    }

    /// Bytes of `blocks` that were not written get their present values.
    fn complete(
        &self,
        buffer: &Region,
        written: &[Range<u64>],
        blocks: &FixedBitSet,
    ) -> Result<(), ShardError> {
        let newest = self.client.pin_newest().ok_or(ShardError::Unreachable)?;
        if let Some((weights, _)) = self.client.get(newest) {
            for block in blocks.ones().map(|block| BlockId(block as u32)) {
                let extent = self.layout.block_bytes(block);
                let mut at = extent.start;
                let first = written.partition_point(|range| range.end <= extent.start);
                for range in written[first..].iter().take_while(|range| range.start < extent.end) {
                    copy(&weights, buffer, at..range.start);
                    at = range.end;
                }
                copy(&weights, buffer, at..extent.end);
            }
        }
        self.client.unpin(newest, 1);
        Ok(())
    }
}

/// Copies a gap, if it is one.
fn copy(from: &Region, to: &Region, gap: Range<u64>) {
    if gap.start < gap.end {
        block::copy_gap(from, to, gap);
    }
}

fn shard_error(refusal: Refusal) -> ShardError {
    match refusal {
        Refusal::Shard(error) => error,
        Refusal::NoModel(_) | Refusal::Generation { .. } => ShardError::Unreachable,
        other => ShardError::NotAllowed(other.to_string()),
    }
}

fn unexpected(result: Result<wire::Message, Refusal>) -> ShardError {
    match result {
        Err(refusal) => shard_error(refusal),
        Ok(message) => ShardError::NotAllowed(format!("the coordinator answers with {}", message.name())),
    }
}

impl Channel for RemoteJob {
    fn write(&self, payload: &[u8], slot: BlockSlot, room: Option<&Region>) -> Result<Placement, ShardError> {
        if slot.block.0 >= self.layout.blocks() {
            return Err(ShardError::BadBlock { block: slot.block, bytes: payload.len() });
        }
        let extent = self.layout.block_bytes(slot.block);
        if payload.len() as u64 != extent.end - extent.start {
            return Err(ShardError::BadBlock { block: slot.block, bytes: payload.len() });
        }
        if room.is_some_and(|room| (room.memory().len() as u64) < extent.end) {
            return Err(ShardError::OutOfRange);
        }
        self.refuse_if_ending()?;
        self.refuse_if_stopped()?;
        match self.client.offer(slot, payload)? {
            Offered::Stage => {}
            Offered::Again => return Ok(Placement::Duplicate),
            Offered::Reduced => {
                self.on_arrival.fetch_add(1, Ordering::Relaxed);
                return Ok(Placement::Reduced);
            }
            Offered::NonFinite => return Err(ShardError::NonFinite(slot.block)),
            Offered::UnknownLearner => return Err(ShardError::UnknownLearner(slot.learner)),
        }
        let check = self.rejects.load(Ordering::Relaxed);
        let finite = match room {
            Some(room) => block::place(&self.layout, slot.block, payload, room, check),
            None => !check || block::is_finite(&self.layout, slot.block, payload),
        };
        if !finite {
            self.client.give_back(slot);
            return Err(ShardError::NonFinite(slot.block));
        }
        Ok(Placement::Deferred)
    }

    fn read(&self, offset: u64, local: &mut [u8]) -> Result<Version, ShardError> {
        let end = offset.checked_add(local.len() as u64).filter(|&end| end <= self.layout.size());
        let end = end.ok_or(ShardError::OutOfRange)?;
        let version = self.client.pin_newest().ok_or(ShardError::Unreachable)?;
        let found = Job::get(self, version);
        if let Some(view) = &found {
            local.copy_from_slice(view.memory.bytes(offset..end));
        }
        self.client.unpin(version, 1);
        found.map(|_| version).ok_or(ShardError::Unreachable)
    }

    fn send(&self, message: Message, timeout: Duration, done: Completion) {
        if let Err(error) = self.refuse_if_ending() {
            return done(Err(error));
        }
        let plain = |done: Completion| -> client::Answered {
            Box::new(move |result| {
                done(match result {
                    Ok(wire::Message::Done) => Ok(Reply::Done),
                    other => Err(unexpected(other)),
                });
            })
        };
        match message {
            Message::Join { name } => {
                let joined = move |result| {
                    done(match result {
                        Ok(wire::Message::Joined { learner, incarnation, .. }) => {
                            Ok(Reply::Joined { learner, incarnation })
                        }
                        other => Err(unexpected(other)),
                    });
                };
                self.client.request(wire::Message::Join { name }, timeout, Box::new(joined));
            }
            Message::Leave { learner, reason } => {
                self.client.request(wire::Message::Leave { learner, reason }, timeout, plain(done));
            }
            Message::Open { learner } => self.open(learner, timeout, done),
            Message::Commit { learner, step, notice } => {
                let fits = notice.check(&self.layout);
                if let Err(error) = fits.and_then(|()| self.client.may_commit(learner, step)) {
                    return done(Err(error));
                }
                // What was never offered whole was looked at by nobody. What is mapped is judged when it is read.
                let unchecked = notice.unchecked.ones().filter(|_| notice.lendable);
                let mut unchecked = unchecked.map(|block| BlockId(block as u32));
                let rejects = self.rejects.load(Ordering::Relaxed);
                let is_bad =
                    |block: &BlockId| !block::region_is_finite(&self.layout, *block, &notice.staging);
                if rejects && let Some(bad) = unchecked.find(is_bad) {
                    return done(Err(ShardError::NonFinite(bad)));
                }
                let CommitNotice { sent, tensors, partly, staging, lendable, .. } = notice;
                let staged = client::Staged { region: staging, steady: lendable, partly };
                self.client.commit(learner, step, (&sent, &tensors), staged, timeout, plain(done));
            }
            Message::Abort { learner } | Message::Withdraw { learner } if !self.has_learner(learner) => {
                done(Err(ShardError::UnknownLearner(learner)));
            }
            // What follows is answered at once; the outcome is that of the request it ends.
            Message::Abort { learner } => {
                self.ask_beside(wire::Message::Abort { learner });
                done(Ok(Reply::Done));
            }
            Message::Withdraw { learner } => {
                self.ask_beside(wire::Message::Withdraw { learner });
                done(Ok(Reply::Done));
            }
            Message::WithdrawAssign { buffer } => {
                self.ask_beside(wire::Message::WithdrawAssign { token: buffer.0 });
                done(Ok(Reply::Done));
            }
            Message::AwaitStep { learner } => {
                let awaited = move |result: Result<Version, ShardError>| done(result.map(Reply::Version));
                self.client.await_step(learner, timeout, Box::new(awaited));
            }
            Message::Allocate => {
                let buffer = self.client.take_buffer();
                if let Ok(buffer) = &buffer {
                    let mut lent = self.lent.lock();
                    lent.retain(|_, memory| memory.strong_count() > 0);
                    lent.insert(buffer.key(), Arc::downgrade(buffer.memory()));
                }
                done(buffer.map(Reply::Buffer));
            }
            Message::Assign { buffer, written } => self.assign(buffer, &written, timeout, done),
        }
    }
}

impl Device for RemoteJob {
    fn kind(&self) -> TransportKind {
        // What carries all of them: TCP where it is the way to one at least, RDMA where that is.
        let peers = self.client.peers();
        let any = |kind| peers.iter().any(|peer| peer.transport == kind);
        match (any(TransportKind::Tcp), any(TransportKind::Rdma)) {
            (true, _) => TransportKind::Tcp,
            (false, true) => TransportKind::Rdma,
            (false, false) if any(TransportKind::InProcess) => TransportKind::InProcess,
            (false, false) => TransportKind::SharedMemory,
        }
    }

    fn register(&self, memory: Arc<Mapping>) -> Result<Region, ShardError> {
        Ok(Region::new(memory, RegionKey(self.next_key.fetch_add(1, Ordering::Relaxed))))
    }

    fn connect(&self) -> Result<Arc<dyn Channel>, ShardError> {
        let this = self.this.upgrade().ok_or(ShardError::Unreachable)?;
        Ok(this)
    }
}

/// A version's memory, as the client has pulled it.
#[derive(Debug)]
struct Pulled(Region);

impl VersionMemory for Pulled {
    fn region(&self) -> &Region {
        &self.0
    }

    fn bytes(&self, range: Range<u64>) -> &[u8] {
        block::pinned_bytes(&self.0, range)
    }
}

impl Job for RemoteJob {
    fn layout(&self) -> &Arc<ModelLayout> {
        &self.layout
    }

    fn version(&self) -> Version {
        self.client.version()
    }

    fn payload(&self) -> Option<Payloads> {
        (self.kind() != TransportKind::InProcess).then(|| self.client.payload())
    }

    fn pin(&self, version: Version) -> bool {
        self.client.pin(version)
    }

    fn unpin(&self, version: Version, count: u64) {
        self.client.unpin(version, count);
    }

    fn get(&self, version: Version) -> Option<VersionView> {
        let (region, published) = self.client.get(version)?;
        Some(VersionView { memory: Arc::new(Pulled(region)), published })
    }

    fn versions(&self) -> Vec<Version> {
        self.client.versions()
    }

    fn retained(&self) -> Vec<Version> {
        let count = self.controls.lock().retain as usize + 1;
        self.client.versions().into_iter().rev().take(count).collect()
    }

    fn controls(&self) -> Controls {
        self.controls.lock().clone()
    }

    fn set_control(&self, name: &str, value: &str, timeout: Duration, done: SetDone) {
        // What is wrong by itself is said at once.
        if let Err(error) = self.controls.lock().with(name, value)
            && !matches!(error, ControlError::Conflict(_))
        {
            return done(Err(error.into()));
        }
        let (setting, text) = (name.to_owned(), value.trim().to_owned());
        let this = self.this.clone();
        let answered = move |result| {
            done(match result {
                Ok(wire::Message::Done) => {
                    if let Some(job) = this.upgrade() {
                        let mut controls = job.controls.lock();
                        if let Ok(new) = controls.with(&setting, &text) {
                            *controls = new;
                        }
                    }
                    Ok(())
                }
                Err(Refusal::Control(why)) => Err(ControlError::Conflict(why).into()),
                other => Err(unexpected(other).into()),
            });
        };
        let (name, value) = (name.to_owned(), value.to_owned());
        self.client.request(wire::Message::SetControl { name, value }, timeout, Box::new(answered));
    }

    fn may_assign(&self) -> Result<(), ShardError> {
        let reducer = self.controls.lock().reducer;
        let version = self.version();
        if reducer.combine() == Combine::Last || version == Version(0) {
            return Ok(());
        }
        Err(ShardError::NotAllowed(format!(
            "weights is read-only at version {version} with reducer {reducer}: write \"assign\" to control/reducer first"
        )))
    }

    fn check_finite(&self, buffer: &Region, written: &[Range<u64>]) -> Result<(), ShardError> {
        if !self.rejects.load(Ordering::Relaxed) {
            return Ok(());
        }
        match block::written_is_finite(&self.layout, buffer, written) {
            None => Ok(()),
            Some(block) => Err(ShardError::NonFinite(block)),
        }
    }

    fn has_learner(&self, learner: LearnerId) -> bool {
        self.client.has_learner(learner)
    }

    fn last_commit(&self, learner: LearnerId) -> LastCommit {
        self.client.last_commit(learner)
    }

    fn is_coming(&self, learner: LearnerId) -> bool {
        let (state, shown) = (self.client.state(), self.client.version());
        let is_coming = |known: &wire::LearnerState| !known.unpublished && known.published_in > shown;
        state.learners.iter().find(|known| known.learner == learner).is_some_and(is_coming)
    }

    fn touch(&self, learner: LearnerId, attached: Option<Attached>) {
        self.client.touch(vec![learner], attached);
    }

    fn status(&self) -> JobStatus {
        let state = self.client.newest_state();
        let member = |learner: &wire::LearnerState| {
            let (name, incarnation, is_writing) = self.client.identity(learner.learner)?;
            Some(MemberView {
                learner: learner.learner,
                name,
                incarnation,
                step: learner.step,
                unpublished: learner.unpublished,
                published_in: learner.published_in,
                phase: match is_writing {
                    true => "writing",
                    false if learner.unpublished => "committed",
                    false => "idle",
                },
                silent: self.client.silence(learner.learner).unwrap_or_default(),
                joined_at: learner.joined_at,
                attached: learner.attached,
            })
        };
        // Those of the block map in force, which may be another one by now.
        let waits = self.waits.lock();
        let shard = |peer: PeerView| ShardView {
            away: {
                let told = waits.shards.get(&peer.shard).map(Instant::elapsed);
                peer.gone.filter(|gone| *gone >= AWAY).into_iter().chain(told).max()
            },
            shard: peer.shard,
            address: peer.address,
            transport: peer.transport,
            no_memory: peer.no_memory,
            no_rdma: peer.no_rdma,
            lost: peer.lost,
            blocks: peer.blocks,
            connected: peer.connected,
        };
        let shards: Vec<ShardView> = self.client.peers().into_iter().map(shard).collect();
        let is_away = shards.iter().any(|shard| shard.away.is_some());
        JobStatus {
            state: match state.phase {
                JobPhase::Failed => JobPhase::Failed,
                _ if is_away => JobPhase::Waiting,
                phase => phase,
            },
            late: waits.learners.map(|since| {
                let late = WaitedFor { learners: state.late.clone(), more: state.late_more as usize };
                (late, since.elapsed())
            }),
            version: self.version(),
            members: state.learners.iter().filter_map(member).collect(),
            committed: state.committed as usize,
            contributions: state.contributions,
            blocks_on_arrival: self.on_arrival.load(Ordering::Relaxed),
            buffers: self.client.buffers(),
            versions: self.client.versions(),
            shards,
        }
    }

    fn subscribe(&self, listener: Listener) {
        *self.listener.lock() = Some(Arc::new(listener));
    }

    fn shut_down(&self) {
        self.ends.store(true, Ordering::Relaxed);
        self.client.shut_down();
    }
}
