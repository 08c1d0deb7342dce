//! The common state of a client's connections: the lock, the clock and the memory around [`ClientCore`], which
//! decides.
//!
//! One lock is held for decisions, and never for a copy. Completions and the listener are called after it is
//! released, on the thread that brought the message. That may be a reactor's thread, so they must not block.

mod blocks;
mod coding;
mod connections;
mod keeper;
mod paths;
mod redirect;
mod relaying;
mod small;

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use crate::bytes::available::{self, KeepsSpares};
use crate::client::callers::{Answers, Callers};
use crate::client::core::{Action, ClientCore, Now, Token};
use crate::client::lifetime::Lifetime;
use crate::client::memory::Accounts;
use crate::client::observed::{Observed, Timeline};
use crate::client::options::{Answered, ClientOptions, Done, Event, Listener};
use crate::client::payloads::Payloads;
use crate::client::payloads::wire_form::WireForm;
use crate::client::peers::Peers;
use crate::client::peers::routes::Routes;
use crate::client::shards::{Local, Shards};
use crate::client::versions::Versions;
use crate::transport::frames::{Link, Outgoing};
use crate::transport::local::{HeldVersion, Mail, MailboxEnd};
use crate::transport::stream::Close;
use crate::vocabulary::block_map::PartitionIndex;
use crate::vocabulary::controls::Controls;
use crate::vocabulary::controls::NonFinite;
use crate::vocabulary::ids::{ClientId, Version};
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{Message, ModelRecord, Refusal};

pub(super) use paths::{BlockPath, Connection};

/// The RDMA device, or why it could not be opened, and when.
pub(super) type Opened = Result<Arc<crate::transport::rdma::Endpoint>, (String, Instant)>;

pub(super) struct Inner {
    pub(super) core: ClientCore,
    pub(super) peers: Peers,
    pub(super) versions: Versions,
    pub(super) callers: Callers,
    pub(super) payloads: Payloads,
    pub(super) form: WireForm,
    pub(super) observed: Observed,
    /// The pushing threads, for a shard in this process.
    pub(super) pumps: Pumps,
    /// When the keeper next checks deadlines, unless it is woken.
    pub(super) checks_at: Now,
    /// When the client last sent the coordinator a sign of life.
    pub(super) alive_at: Instant,
}

/// The state of pushing to it, under the client's lock.
#[derive(Debug, Default)]
pub(super) struct Pumps {
    /// The number of pushing threads.
    pub(super) at_work: usize,
    /// How often the shard has let blocks go on that had to wait.
    pub(super) went_on: u64,
}

/// The work to do once the lock is released.
#[derive(Default)]
pub(super) struct After {
    answers: Answers,
    events: Vec<Event>,
    /// The mailbox has messages to a shard in this process,
    mail_left: bool,
    /// blocks may be ready for it,
    pushes: bool,
    /// or a version buffer may be given back to it.
    gives_back: bool,
}

/// The common state of a client's connections.
pub(super) struct Shared {
    pub(super) layout: Arc<ModelLayout>,
    pub(super) model: String,
    pub(super) client: ClientId,
    /// The record of the model at the time of connecting. A moved model is compared with it.
    pub(super) record: ModelRecord,
    pub(super) options: ClientOptions,
    pub(super) shards: Shards,
    pub(super) timeline: Timeline,
    pub(super) inner: Mutex<Inner>,
    pub(super) lifetime: Lifetime,
    pub(super) listener: Mutex<Option<Arc<Listener>>>,
    pub(super) accounts: Accounts,
    /// The RDMA device, once it was needed.
    pub(super) rdma_endpoint: Mutex<Option<Opened>>,
    pub(super) this: Weak<Shared>,
}

impl Inner {
    pub(super) fn new(core: ClientCore, versions: Versions, routes: Routes) -> Inner {
        Inner {
            core,
            peers: Peers::new(routes),
            versions,
            callers: Callers::new(),
            payloads: Payloads::default(),
            form: WireForm::default(),
            observed: Observed::new(),
            pumps: Pumps::default(),
            checks_at: Now::ZERO,
            alive_at: Instant::now(),
        }
    }

    /// Whether blocks go over this connection at the moment, in a client with this many threads.
    pub(super) fn uses(&self, partition: PartitionIndex, link: &Link, threads: usize) -> bool {
        let most = threads.div_ceil(self.peers.partitions.len()).max(1);
        self.peers.partitions[partition].uses(link, most, self.core.struggles(partition))
    }

    pub(super) fn controls(&self) -> &Controls {
        &self.core.state().controls
    }

    /// The number of versions to retain, and the most buffers that may exist.
    pub(super) fn bounds(&self) -> (usize, usize) {
        (self.controls().retain as usize, self.controls().most_buffers())
    }

    /// The most versions that programs may hold, so that the newest one, the retained ones and the next have buffers.
    pub(super) fn most_held(&self) -> usize {
        let (retain, max) = self.bounds();
        max.saturating_sub(retain + 2)
    }

    /// The coordinator gives a client up after this silence, if ever.
    pub(super) fn lease(&self) -> Option<Duration> {
        Some(self.controls().lease).filter(|lease| !lease.is_zero())
    }

    /// Shows the version that is being pulled. Its memory is in this process.
    pub(super) fn show_here(&mut self, local: &Local, now: Now, more: &mut Vec<Action>) {
        let Some(version) = self.core.pulling() else { return };
        match local.shard.version(version) {
            Ok(HeldVersion { region, published, hold }) => {
                self.versions.show(version, region, published, hold);
                self.core.is_here(version, more);
            }
            // The version is still being made.
            Err(newest) if newest < version => {}
            Err(newest) => {
                let gone = Message::Refused(Refusal::NoVersion { wanted: version, newest });
                self.core.from_shard(0, gone, now, more);
            }
        }
    }

    pub(super) fn rejects_nonfinite(&self) -> bool {
        self.controls().nonfinite == NonFinite::Reject
    }
}

impl KeepsSpares for Shared {
    fn give_back(&self) {
        if let Some(mut inner) = self.inner.try_lock_for(available::LOCKED_FOR_LONG) {
            let (retain, max) = inner.bounds();
            inner.versions.give_back(retain, max);
        }
    }
}

impl Shared {
    /// For the client of this number and the model of this record.
    pub(super) fn new(
        (client, record): (ClientId, &ModelRecord),
        layout: Arc<ModelLayout>,
        inner: Inner,
        options: ClientOptions,
        shards: Shards,
    ) -> Arc<Shared> {
        let shared = Arc::new_cyclic(|this| Shared {
            layout,
            model: record.name.clone(),
            client,
            record: record.clone(),
            options,
            shards,
            timeline: inner.observed.timeline.clone(),
            inner: Mutex::new(inner),
            lifetime: Lifetime::default(),
            listener: Mutex::new(None),
            accounts: Accounts::default(),
            rdma_endpoint: Mutex::new(None),
            this: this.clone(),
        });
        let keeper = shared.this.clone();
        available::asks_for_spares(keeper);
        shared
    }

    pub(super) fn now(&self) -> Now {
        self.timeline.now()
    }

    /// Pins the newest version here, in one step: a version that was only asked for could be gone before it is
    /// pinned.
    pub(super) fn pin_newest(&self) -> Option<Version> {
        let mut inner = self.inner.lock();
        let version = inner.core.version();
        inner.versions.pin(version).then_some(version)
    }

    /// Takes pins back. A pull that waits for a buffer may then go on.
    pub(super) fn unpin(&self, version: Version, count: u64) {
        self.lets_go(version, |versions| versions.unpin(version, count));
    }

    /// Somebody lets go of `version`.
    pub(super) fn lets_go(&self, version: Version, how: impl FnOnce(&mut Versions)) {
        let mut inner = self.inner.lock();
        how(&mut inner.versions);
        let is_old = version < inner.core.version();
        if is_old {
            let (retain, max) = inner.bounds();
            inner.versions.recycle(retain, max);
        }
        match self.shards.local() {
            // A pull that has found no buffer has noted so under this lock, so it is still under way.
            None if inner.core.pulling().is_some() => inner.peers.wake_all(),
            Some(local) if is_old => {
                drop(inner);
                local.shard.find_buffer();
            }
            _ => {}
        }
    }

    /// Checks whether the next version of the shard in this process has a buffer. If not, versions that names alone
    /// keep give theirs. No lock may be held.
    pub(super) fn find_buffer(&self, local: &Local) -> bool {
        loop {
            let found = local.shard.find_buffer();
            if found || !self.take_from_names() {
                return found;
            }
        }
    }

    /// A buffer is needed: the oldest version that names alone keep goes. False if there is none.
    pub(super) fn take_from_names(&self) -> bool {
        let mut inner = self.inner.lock();
        let (retain, _) = inner.bounds();
        inner.versions.take_from_names(retain)
    }

    /// Calls `done` when the newest version that the coordinator has announced, or a newer one, is here, or `timeout`
    /// is over.
    pub(super) fn await_newest(&self, timeout: Duration, done: Done<Version>) {
        self.wait(done, |core, token, now, actions| core.await_newest(token, now + timeout, now, actions));
    }

    /// Registers a wait for a version with the core.
    pub(super) fn wait(
        &self,
        done: Done<Version>,
        begin: impl FnOnce(&mut ClientCore, Token, Now, &mut Vec<Action>),
    ) {
        let mut inner = self.inner.lock();
        if self.lifetime.is_stopping() {
            drop(inner);
            return done(Err(ShardError::Unreachable));
        }
        let token = inner.callers.waits(done);
        let mut actions = Vec::new();
        begin(&mut inner.core, token, self.now(), &mut actions);
        self.rouse_keeper(&inner);
        self.act(inner, actions);
    }

    /// Answers all waiting requests: nothing comes any more.
    pub(super) fn dismiss(&self) {
        self.with_core(|core, _, actions| core.end_loans(actions));
        let answers = self.inner.lock().callers.dismiss();
        answers.give();
    }

    pub(super) fn stop(&self) {
        self.lifetime.stops();
        let threads = {
            let inner = self.inner.lock();
            let links = inner.peers.all().chain([&inner.peers.relay.1]).flat_map(|peer| &peer.links);
            links.for_each(|link| link.close(Close::ShutDown));
            Arc::clone(&inner.peers.routes.threads)
        };
        if let Some(relay) = &self.options.relay {
            relay.ends(&self.model, self.record.generation);
        }
        // Their threads end soon.
        let _ = threads.shut_down(Duration::ZERO);
        self.dismiss();
        self.lifetime.rouse();
    }

    pub(super) fn request(
        &self,
        message: Message,
        timeout: Duration,
        done: Answered,
        with: impl FnOnce(&mut Inner),
    ) {
        self.ask(timeout, done, |inner, token, deadline, now, actions| {
            with(inner);
            inner.core.request(token, message, deadline, now, actions);
        });
    }

    /// Sends the core a request that is answered once, before a deadline.
    pub(super) fn ask(
        &self,
        timeout: Duration,
        done: Answered,
        ask: impl FnOnce(&mut Inner, Token, Now, Now, &mut Vec<Action>),
    ) {
        let mut inner = self.inner.lock();
        if self.lifetime.is_stopping() {
            drop(inner);
            return done(Err(ShardError::Unreachable.into()));
        }
        let token = inner.callers.asks(done);
        let now = self.now();
        let mut actions = Vec::new();
        // The coordinator answers in time unless it is out of reach.
        let deadline = now + timeout + Duration::from_millis(250);
        ask(&mut inner, token, deadline, now, &mut actions);
        self.rouse_keeper(&inner);
        self.act(inner, actions);
    }

    /// Wakes the keeper if a deadline comes before its next check.
    pub(super) fn rouse_keeper(&self, inner: &Inner) {
        if inner.core.next_deadline().is_some_and(|due| due < inner.checks_at) {
            self.lifetime.rouse();
        }
    }

    /// Changes the core, and carries out the actions.
    pub(super) fn with_core(&self, change: impl FnOnce(&mut ClientCore, Now, &mut Vec<Action>)) {
        let mut inner = self.inner.lock();
        let mut actions = Vec::new();
        change(&mut inner.core, self.now(), &mut actions);
        self.act(inner, actions);
    }

    /// Carries out actions, releases the lock, and then calls listener and completions.
    pub(super) fn act(&self, inner: MutexGuard<'_, Inner>, actions: Vec<Action>) {
        self.act_unanswered(inner, actions).give();
    }

    /// Like [`Self::act`], but returns the completions.
    pub(super) fn act_unanswered(&self, mut inner: MutexGuard<'_, Inner>, actions: Vec<Action>) -> Answers {
        let Inner { core, observed, .. } = &mut *inner;
        observed.look(core, || self.now());
        let mut after = After::default();
        let mut queue = std::collections::VecDeque::from(actions);
        let mut more = Vec::new();
        while let Some(action) = queue.pop_front() {
            self.perform(&mut inner, action, &mut after, &mut more);
            queue.extend(more.drain(..));
        }
        // A version that is shown may have the next pull begun.
        let Inner { core, observed, .. } = &mut *inner;
        observed.look(core, || self.now());
        drop(inner);
        let After { answers, events, mail_left, pushes, gives_back } = after;
        for event in events {
            let listener = self.listener.lock().clone();
            if let Some(listener) = listener {
                listener(event);
            }
        }
        if let Some(local) = self.shards.local() {
            if gives_back {
                self.find_buffer(local);
            }
            if pushes {
                self.pump(local);
            }
            if mail_left {
                local.shard.mailbox().drain();
            }
        }
        answers
    }

    /// The newest version, which has or has not been pulled, is shown from now on.
    fn shown(
        &self,
        inner: &mut Inner,
        version: Version,
        is_pulled: bool,
        after: &mut After,
        more: &mut Vec<Action>,
    ) {
        let (retain, max) = inner.bounds();
        inner.versions.recycle(retain, max);
        after.gives_back = true;
        let now = self.now();
        inner.observed.shown(version, is_pulled, now);
        inner.peers.wake_followers();
        inner.core.shown(version, now, more);
        after.events.push(Event::Published(version));
    }

    pub(super) fn perform(
        &self,
        inner: &mut Inner,
        action: Action,
        after: &mut After,
        more: &mut Vec<Action>,
    ) {
        match action {
            Action::ToCoordinator(request, message) => {
                if let Some(local) = self.shards.local() {
                    local.shard.mailbox().put(
                        MailboxEnd::Client,
                        MailboxEnd::Coordinator,
                        Mail::Message(request, message),
                    );
                    after.mail_left = true;
                } else if let Some(link) = inner.peers.coordinator.links.first() {
                    let payload = self.blocks_with(inner, &message);
                    link.send_now(Outgoing { message, request, epoch: inner.peers.routes.epoch, payload });
                }
            }
            // Nothing is lost on the way to a shard in this process.
            Action::ToShard(..) if self.shards.local().is_some() => {}
            Action::ToShard(partition, message) => inner.peers.send(partition, message),
            Action::Wake(partition) => match self.shards.local() {
                Some(local) => {
                    inner.show_here(local, self.now(), more);
                    after.pushes = true;
                }
                None => inner.peers.wake(partition),
            },
            Action::Relay => {
                if inner.peers.relay.0.as_ref() != inner.core.relay_address() {
                    // The keeper connects to the other one.
                    inner.peers.pulls_by(None);
                    self.lifetime.rouse();
                }
                inner.peers.relay.1.links.iter().for_each(Link::wake);
            }
            Action::Answer(token, result) => {
                after.answers.answer(&mut inner.callers, token, result);
            }
            Action::Awaited(token, result) => {
                after.answers.awaited(&mut inner.callers, token, result);
            }
            Action::Begins { plan, counted } => {
                inner.form.begin(plan, counted);
                inner.form.follow(&self.layout, &mut inner.core);
            }
            Action::Release(learner, step) => {
                inner.payloads.sources.remove(&(learner, step));
            }
            Action::ReleaseWeights(token) => {
                inner.payloads.weights.remove(&token);
            }
            Action::EndLoans => {
                inner
                    .peers
                    .partitions
                    .iter_mut()
                    .flat_map(|peer| peer.loans.drain(..))
                    .for_each(|(_, end)| end());
            }
            Action::State => {
                let (retain, max) = inner.bounds();
                inner.versions.recycle(retain, max);
                let (state, pulled) = (inner.core.state(), inner.core.pulling());
                inner.versions.announced(state.version, &state.meta, pulled);
                if let Some(local) = self.shards.local() {
                    local.shard.set_buffers(max);
                    after.gives_back = true;
                }
                inner.peers.late.update(inner.core.state());
                inner.form.follow(&self.layout, &mut inner.core);
                self.say_coding(inner);
                // A pull that is put off may be due before the keeper would look.
                if inner.core.pull_due().is_some_and(|due| due < inner.checks_at) {
                    self.lifetime.rouse();
                }
            }
            Action::Offered(version) => after.events.push(Event::Published(version)),
            Action::Readers => after.events.push(Event::Readers),
            Action::Durable => after.events.push(Event::Durable),
            Action::Left(learner, reason) => {
                inner.observed.left(learner);
                after.events.push(Event::Left(learner, reason));
            }
            Action::Pulled(version) => {
                let is_first = !inner.core.shows_any();
                inner.versions.publish(version);
                let pulls = !self.shards.show_their_buffers() && self.options.holds_versions;
                self.shown(inner, version, pulls, after, more);
                // A thread waits for the first version. The keeper takes a spare buffer for those that are pulled: if
                // one is lacking only later, its next check by itself finds that. The next pull may be put off, and due
                // soon.
                let (retain, max) = inner.bounds();
                if is_first || pulls && inner.versions.lacks_spare(retain, max) {
                    self.lifetime.rouse();
                } else {
                    self.rouse_keeper(inner);
                }
            }
            Action::Own(version, token) => {
                if let Some(buffer) = inner.payloads.weights.get(&token).map(|weights| weights.buffer.clone())
                {
                    inner.versions.show_own(version, buffer);
                }
                self.shown(inner, version, false, after, more);
            }
        }
    }
}
