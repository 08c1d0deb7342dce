//! [`Job`]: the interface to one model, wherever its shards are.
//!
//! | module | holds |
//! |---|---|
//! | `connect` | connecting |
//! | `changes` | what has changed from one version to another |
//! | `parts` | pieces of a version |
//! | `part` | a part of new weights |
//! | `requests` | requests of learners, and settings |
//! | `weights` | whole new weights |
//! | `status` | the status |
//!
//! It answers from what the coordinator has sent already. A call that needs another answer takes a completion.

mod changes;
mod connect;
mod part;
mod parts;
mod readers;
mod requests;
mod status;
mod weights;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;

use crate::bytes::block;
use crate::bytes::mmap::Mapping;
use crate::bytes::region::{Region, RegionKey};
use crate::client::core::LastCommit;
use crate::client::memory::JobMemory;
use crate::client::observed::Phases;
use crate::client::options::{Event, Listener};
use crate::client::shared::Shared;
use crate::observe::staleness::Staleness;
use crate::observe::trace::{Recorder, Recording};
use crate::transport::local::ShardMemory;
use crate::transport::reactor::Reactor;
use crate::transport::stream::{Guard, LentPayload};
use crate::transport::tally::Payloads;
use crate::vocabulary::controls::Controls;
use crate::vocabulary::ids::{ClientId, Generation, LearnerId, Step, Version};
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::members::LeaveReason;
use crate::vocabulary::meta::Meta;
use crate::vocabulary::reducer::{Content, Hyper, Reducer};
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{LearnerState, Lineage, Message, ReaderDoes};
pub use changes::ChangesError;
pub use part::PartError;
pub use parts::{PartsError, PartsPeers};
pub use requests::wait_for;
pub use status::{JobStatus, RelayView, ShardView};

/// A version that is in memory.
#[derive(Clone, Debug)]
pub struct VersionView {
    /// A memfd of the model's size that no other process may write. Its bytes stay unchanged only while the version
    /// is the newest or pinned.
    pub region: Region,
    /// When it was published.
    pub published: SystemTime,
}

impl VersionView {
    /// A range of its bytes. The caller holds a pin on the version.
    ///
    /// # Panics
    /// When `range` leaves the model.
    pub fn bytes(&self, range: Range<u64>) -> &[u8] {
        block::pinned_bytes(self.region.memory(), range)
    }

    /// A range of them, to be sent from where they lie. `pin` keeps the version pinned.
    ///
    /// # Panics
    /// When `range` leaves the model.
    pub fn piece(&self, range: Range<u64>, pin: Guard) -> LentPayload {
        LentPayload::of_version(block::pinned_bytes(self.region.memory(), range), pin)
    }
}

/// A job: one model, its versions in this process's memory, its settings and its learners.
///
/// # What may wait
/// Nothing does. The threads that answer the kernel make all of these calls, so each call returns from what this
/// process knows already: it takes short locks, and waits for no other process. A call that needs an answer from
/// elsewhere takes a completion ([`Self::set_control`]) or only sends a notice ([`Self::touch`]).
/// [`Self::check_finite`] computes in the calling thread, for as long as a pass over the bytes takes.
///
/// # Guarantees
/// If the coordinator is elsewhere, this process may know of changes late. But:
///
/// - [`Self::version`] never goes back. The version that it names is whole in this process's memory: it can be
///   pinned, got and read.
/// - [`Self::last_commit`] knows of a commit once the commit was answered. [`Self::version`] is at least that
///   commit's version once a request for it was answered.
/// - `Event::Published` comes after [`Self::version`] shows the version, and `Event::Left` after
///   [`Self::has_learner`] shows that the learner has left.
/// - Versions that are pinned here stay, whatever becomes of them elsewhere.
///
/// The kernel's threads wait for some requests. These are answered before the call returns, from what is known here:
/// [`Self::open`], unless its learner's last commit was not answered with success, [`Self::abort`],
/// [`Self::withdraw`], [`Self::withdraw_assign`] and [`Self::allocate`]. [`Self::join`] and [`Self::leave`] ask
/// others, and wait until their deadline at most.
pub struct Job {
    shared: Arc<Shared>,
    reactor: Mutex<Option<Arc<Reactor>>>,
    /// Buffers for new weights that were handed out and not returned.
    lent: Mutex<HashMap<RegionKey, Weak<Mapping>>>,
    /// The number of blocks that were reduced on arrival.
    on_arrival: AtomicU64,
    next_key: AtomicU64,
}

impl Job {
    /// The model's name.
    pub fn model(&self) -> &str {
        &self.shared.model
    }

    /// The life of the model's name, of which the job was told when it began.
    pub fn generation(&self) -> Generation {
        self.shared.record.generation
    }

    /// Whether versions are pulled and shown here. Otherwise their numbers alone are known.
    pub fn holds_versions(&self) -> bool {
        self.shared.options.holds_versions
    }

    /// The layout.
    pub fn layout(&self) -> &Arc<ModelLayout> {
        &self.shared.layout
    }

    /// The name of what moves the bytes.
    pub fn backend(&self) -> String {
        self.shared.shards.reactor().map_or("in this process".to_owned(), |net| net.backend().to_string())
    }

    /// The number of this client.
    pub fn id(&self) -> ClientId {
        self.shared.client
    }

    /// Payload that this process has pushed to shards elsewhere and pulled from them. `None` if the shard is in this
    /// process.
    pub fn payload(&self) -> Option<Payloads> {
        (!self.shared.shards.read_in_place()).then(|| self.shared.accounts.tally.read())
    }

    /// How long the phases of steps take that only this client sees, and whether its shard is in this process.
    pub fn phases(&self) -> (Arc<Phases>, bool) {
        let inner = self.shared.inner.lock();
        (Arc::clone(&inner.observed.phases), self.shared.shards.read_in_place())
    }

    /// What this client, and the mount around it, record while a trace runs.
    pub fn trace(&self) -> &Arc<Recorder> {
        &self.shared.timeline.trace
    }

    /// Ends a trace. None if none runs.
    pub fn end_trace(&self) -> Option<Recording> {
        let mut inner = self.shared.inner.lock();
        inner.observed.trace_rest(self.shared.now());
        self.shared.timeline.trace.end()
    }

    /// Makes `memory` addressable for shards. This takes a while: register at the start, and use the region again.
    pub fn register(&self, memory: Arc<Mapping>) -> Region {
        self.shared.accounts.staging.add(&memory);
        self.named_anew(memory)
    }

    /// `memory` under a name that no other region of this job has.
    fn named_anew(&self, memory: Arc<Mapping>) -> Region {
        Region::new(memory, RegionKey(self.next_key.fetch_add(1, Ordering::Relaxed)))
    }

    /// Registered memory was let go of. Shards on this host that have it mapped are told at once, for the kernel keeps
    /// it until they let go of it, too.
    pub fn tell_gone(&self) {
        self.shared.inner.lock().peers.wake_all();
    }

    /// Sets the listener for events. It replaces the earlier one.
    pub fn subscribe(&self, listener: Listener) {
        *self.shared.listener.lock() = Some(Arc::new(listener));
    }

    /// The lives of the model, as the job was told when it began.
    pub fn lineage(&self) -> &Lineage {
        &self.shared.record.lineage
    }

    /// The model goes on in another life. All that is asked of this one fails with [`ShardError::RolledBack`].
    pub fn roll_back(&self) {
        self.shared.roll_back();
    }

    /// Has the listener hear of an event of another job, in whose place this one stands.
    pub fn tell(&self, event: Event) {
        let listener = self.shared.listener.lock().clone();
        listener.inspect(|listener| listener(event));
    }

    /// The settings, as last received.
    pub fn controls(&self) -> Controls {
        self.shared.inner.lock().controls().clone()
    }

    /// Why requests fail, if the job has lost a shard's blocks, or its coordinator.
    pub fn lost(&self) -> Option<ShardError> {
        self.shared.inner.lock().core.lost()
    }

    /// What learners write, by the settings.
    pub fn content(&self) -> Content {
        self.shared.inner.lock().controls().reducer.content()
    }

    /// The reducer and its hyper-parameters, as they are set.
    pub fn reducer(&self) -> (Reducer, Hyper) {
        let inner = self.shared.inner.lock();
        (inner.controls().reducer, inner.controls().hyper.clone())
    }

    /// The tensors of which learners write values that are averaged, in a model of gradients. They are sorted.
    pub fn averaged(&self) -> Arc<[usize]> {
        Arc::clone(self.shared.inner.lock().form.averaged())
    }

    // -- versions

    /// The newest version that can be read here.
    pub fn version(&self) -> Version {
        self.shared.inner.lock().core.version()
    }

    /// The version that a program gets if it opens the newest one now. An open may have to wait for it
    /// ([`Self::await_fresh`]).
    pub fn offered_version(&self) -> Version {
        self.shared.inner.lock().core.offered_version()
    }

    /// The versions in this process's memory, in rising order. Pinned ones are included.
    pub fn versions(&self) -> Vec<Version> {
        self.shared.inner.lock().versions.numbers().collect()
    }

    /// Whether programs keep versions in memory that are not retained, and so many that it matters soon.
    pub fn keeps_old_versions(&self) -> bool {
        let inner = self.shared.inner.lock();
        // There is room for the newest version, the retained ones, one more, and the next (`max_versions`).
        inner.versions.numbers().count() > inner.controls().retain as usize + 2
    }

    /// The versions under `versions/`, the newest first.
    pub fn retained(&self) -> Vec<Version> {
        let inner = self.shared.inner.lock();
        let mut versions: Vec<Version> = inner.versions.numbers().collect();
        versions.reverse();
        versions.truncate(inner.controls().retain as usize + 1);
        versions
    }

    /// Pins `version`: its buffer is not recycled before [`Self::unpin`]. False if the version is gone.
    pub fn pin(&self, version: Version) -> bool {
        self.shared.inner.lock().versions.pin(version)
    }

    /// Takes back `count` pins of `version`.
    pub fn unpin(&self, version: Version, count: u64) {
        self.shared.unpin(version, count);
    }

    /// The kernel learns one more name of `version`, which keeps the version until its buffer is needed, or
    /// [`Self::forget`]. False if the version is gone.
    pub fn look_up(&self, version: Version) -> bool {
        self.shared.inner.lock().versions.look_up(version)
    }

    /// The kernel has forgotten `count` names of `version`.
    pub fn forget(&self, version: Version, count: u64) {
        self.shared.lets_go(version, |versions| versions.forget(version, count));
    }

    /// Pins `version` for a program that opens it, until [`Self::close_version`]. False if the version is gone.
    pub fn open_version(&self, version: Version) -> bool {
        self.shared.inner.lock().versions.open(version)
    }

    /// The program has closed it.
    pub fn close_version(&self, version: Version) {
        self.shared.inner.lock().versions.close(version);
        self.shared.unpin(version, 1);
    }

    /// The kernel opens one more file of `version` past this process: it may be mapped until [`Self::unmap_version`],
    /// and keeps the version as an open one does. False if the version is gone, or programs hold too many others.
    pub fn map_version(&self, version: Version) -> bool {
        let mut inner = self.shared.inner.lock();
        let most = inner.most_held();
        inner.versions.map(version, most)
    }

    /// The kernel knows such a file no more.
    pub fn unmap_version(&self, version: Version) {
        self.shared.lets_go(version, |versions| versions.unmap(version));
    }

    /// Why a program that is no learner may not open `version`, if programs hold as many others as they may.
    pub fn refuses_reader(&self, version: Version) -> Option<String> {
        let inner = self.shared.inner.lock();
        let most = inner.controls().max_versions;
        inner.versions.refuses(version, most as usize, inner.most_held()).then(|| {
            format!("programs hold {most} versions open (close old handles or raise control/max_versions)")
        })
    }

    /// A version in this process's memory.
    pub fn get(&self, version: Version) -> Option<VersionView> {
        let inner = self.shared.inner.lock();
        let shown = inner.versions.get(version)?;
        Some(VersionView { region: shown.buffer.clone(), published: shown.at })
    }

    /// What the publisher of a version in this process's memory has said of it. Nothing of one that is not there.
    pub fn meta(&self, version: Version) -> Meta {
        self.shared.inner.lock().versions.meta(version)
    }

    /// Reads `local.len()` bytes of the newest version at `offset` of the model.
    ///
    /// # Errors
    /// [`ShardError::OutOfRange`] past the end.
    pub fn read(&self, offset: u64, local: &mut [u8]) -> Result<Version, ShardError> {
        let end = offset.checked_add(local.len() as u64).filter(|&end| end <= self.layout().size());
        let end = end.ok_or(ShardError::OutOfRange)?;
        let version = self.shared.pin_newest().ok_or(ShardError::Unreachable)?;
        let found = self.get(version);
        if let Some(view) = &found {
            local.copy_from_slice(view.bytes(offset..end));
        }
        self.unpin(version, 1);
        found.map(|_| version).ok_or(ShardError::Unreachable)
    }

    /// The number of version buffers, and of free ones.
    pub fn buffers(&self) -> (usize, usize) {
        match self.shared.shards.local() {
            Some(local) => local.shard.buffers(),
            None => self.shared.inner.lock().versions.buffers(),
        }
    }

    /// Why there is no memory for another version, if there is none and one is needed.
    pub fn shortage(&self) -> Option<String> {
        match self.shared.shards.local() {
            Some(local) => local.shard.shortage(),
            None => self.shared.inner.lock().core.shortage().map(str::to_owned),
        }
    }

    /// Why no program but a learner may begin to hold a version now: the next one of this process waits for memory.
    pub fn refuses_readers(&self) -> Option<String> {
        self.shared.shards.local().and_then(|local| local.shard.shortage())
    }

    /// The memory that the model takes in this process.
    pub fn memory(&self) -> JobMemory {
        let staging = self.shared.accounts.staging.taken();
        if let Some(local) = self.shared.shards.local() {
            let ShardMemory { versions, state, sums } = local.shard.memory();
            return JobMemory { versions, state, sums, residuals: 0, staging, connections: 0 };
        }
        let inner = self.shared.inner.lock();
        let links: usize = inner.peers.all().map(|peer| peer.links.len()).sum();
        let (own, sums) =
            (inner.versions.own(), inner.payloads.spare.iter().map(|sum| sum.capacity() as u64).sum());
        let residuals = inner.form.taken();
        drop(inner);
        JobMemory {
            versions: own.iter().map(|memory| memory.taken()).sum(),
            state: 0,
            sums,
            residuals,
            staging,
            connections: self.shared.accounts.connections(links),
        }
    }

    // -- learners

    /// Whether `learner` belongs to this client and is in the job, and is not about to leave.
    pub fn has_learner(&self, learner: LearnerId) -> bool {
        let inner = self.shared.inner.lock();
        inner.core.has_learner(learner) && !inner.core.is_leaving(learner)
    }

    /// The state of the last commit of `learner`, one of this process's learners.
    pub fn last_commit(&self, learner: LearnerId) -> LastCommit {
        self.shared.inner.lock().core.last_commit(learner)
    }

    /// The number of learners in the job, on all mounts.
    pub fn learners(&self) -> usize {
        self.shared.inner.lock().core.state().members as usize
    }

    /// Replicas of the model begin anew with this version: from it on, no older ones are shown.
    pub fn replicas_since(&self) -> Version {
        self.shared.inner.lock().core.state().replicas_since
    }

    /// A version with this step of `learner`, if there is one here: the step's own, or that of a later step.
    pub fn published_in(&self, learner: LearnerId, step: Step) -> Option<Version> {
        self.shared.inner.lock().core.published_in(learner, step)
    }

    /// Whether an open as `learner`, or as none, shows what it must ([`Self::await_fresh`]).
    pub fn freshness(&self, learner: Option<LearnerId>) -> LastCommit {
        self.shared.inner.lock().core.freshness(learner)
    }

    /// A program opens the newest version here, as `learner` or as none. Pulls are timed by that.
    pub fn version_opened(&self, learner: Option<LearnerId>) {
        let mut inner = self.shared.inner.lock();
        inner.observed.opened(self.shared.now());
        if self.shared.shards.show_their_buffers() {
            return;
        }
        // A pull is due later than before, if anything changes.
        inner.core.version_opened(learner, self.shared.now());
    }

    /// The program of `learner` has opened this version: its next contribution is computed from it.
    pub fn has_opened(&self, learner: LearnerId, version: Version) {
        self.shared.inner.lock().core.has_opened(learner, version);
    }

    /// How far `version`, which is opened now, is behind the newest one that this process knows of.
    pub fn staleness(&self, version: Version) -> Staleness {
        let now = self.shared.now();
        self.shared.inner.lock().observed.staleness(version, now)
    }

    /// Whether a version with the last commit of `learner` is complete elsewhere, and on its way here.
    pub fn is_coming(&self, learner: LearnerId) -> bool {
        let inner = self.shared.inner.lock();
        let shown = inner.core.version();
        let is_coming = |known: &LearnerState| !known.unpublished && known.published_in > shown;
        inner.core.state().learners.iter().find(|known| known.learner == learner).is_some_and(is_coming)
    }

    /// Whether an open as `learner` would wait for its last commit, and a version with that is being pulled already.
    pub fn is_pulled_for(&self, learner: LearnerId) -> bool {
        let inner = self.shared.inner.lock();
        let pulled = inner.core.pulling();
        let is_in = |known: &&LearnerState| !known.unpublished && pulled >= Some(known.published_in);
        pulled.is_some()
            && inner.core.freshness(Some(learner)) == LastCommit::Waits
            && inner.core.state().learners.iter().filter(is_in).any(|known| known.learner == learner)
    }

    /// How long a learner has been silent, if that is known.
    fn silence(&self, learner: LearnerId) -> Duration {
        self.shared.shards.local().map(|local| local.shard.silence(learner)).unwrap_or_default()
    }

    // -- the end

    /// Shuts the job down: the learners leave, waiting requests are answered, and all connections end.
    pub fn shut_down(&self) {
        let shared = &self.shared;
        shared.lifetime.ends();
        // Waiting requests are answered before the learners leave. Their leaving would be the answer otherwise.
        shared.dismiss();
        let farewells: Vec<Message> = {
            let inner = shared.inner.lock();
            let learners = inner.core.state().learners.iter().map(|learner| learner.learner);
            let leaves = learners.map(|learner| Message::Leave { learner, reason: LeaveReason::Asked });
            let readers = inner.core.readers().filter(|reader| reader.is_own);
            let ends = readers.map(|of| Message::Reader { name: of.name.clone(), does: ReaderDoes::Ends });
            leaves.chain(ends).collect()
        };
        let (sender, receiver) = std::sync::mpsc::channel();
        let patience = Duration::from_secs(1);
        let deadline = Instant::now() + patience;
        let asked = farewells.len();
        for farewell in farewells {
            let sender = sender.clone();
            let left = Box::new(move |_| sender.send(()).unwrap_or_default());
            shared.request(farewell, patience, left, |_| {});
        }
        drop(sender);
        for _ in 0..asked {
            // The lease ends for a learner or reader whose answer does not come.
            let _ = receiver.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
        shared.stop();
        let threads = Arc::clone(&shared.inner.lock().peers.routes.threads);
        if let Err(error) = threads.shut_down(Duration::from_secs(2)) {
            tracing::warn!(model = %shared.model, %error, "connections through shared memory");
        }
        let endpoint = shared.rdma_endpoint.lock().clone();
        if let Some(Ok(endpoint)) = endpoint {
            endpoint.shut_down(Duration::from_secs(2));
        }
        // The last of those who share it ends it.
        if let Some(reactor) = self.reactor.lock().take().and_then(Arc::into_inner)
            && let Err(error) = reactor.shut_down(Duration::from_secs(2))
        {
            tracing::warn!(model = %shared.model, %error, "connections");
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.shared.stop();
    }
}
