//! The coordinator of a model at work: the edge around [`CoordinatorCore`]. It owns the lock, the clock and the
//! connections to the shards.

mod moves;
mod moving;
mod remote;
mod sights;
mod small;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use libmodelio::timer::{self, Alarm, Timed};
use libmodelio::transport::frames::{Link, Outgoing};
use libmodelio::transport::local::{Mail, Mailbox, MailboxEnd, Recipient};
use libmodelio::transport::reactor::Handle;
use libmodelio::transport::stream::Close;
use libmodelio::vocabulary::ids::{ClientId, Epoch, Generation, LearnerId, PlanId, ShardId, Version};
use libmodelio::vocabulary::phase::JobPhase;
use libmodelio::vocabulary::readers::ReaderState;
use libmodelio::wire::{JobState, MAX_SMALL_MODEL, Message, ModelRecord, Refusal, ShardRecord};
use parking_lot::Mutex;

use super::partition::{Partition, ToCoordinator};
use super::redirect::Redirect;
use crate::coordinator::{AWAY, Action, CoordinatorCore};
use crate::core::{JobRecord, MemberView, WaitedFor};
use crate::moving::Progress;
use crate::relays::{RelayPlace, Relays};
use moves::Moves;
pub(super) use moves::Moving;
use remote::RemoteShard;
use sights::{Sight, Sights};
use small::Small;

/// So few clients get their messages from the thread that has decided, under the coordinator's lock.
const FEW_CLIENTS: usize = 2;

/// Finds a shard's address.
pub(super) type Resolve = Arc<dyn Fn(ShardId) -> Result<String, String> + Send + Sync>;

struct CoordinatorState {
    core: CoordinatorCore,
    clients: HashMap<ClientId, Link>,
    /// The client in this process.
    client_here: Option<ClientId>,
    /// When deadlines are checked again, unless the alarm is raised.
    checks_at: Duration,
    /// When deadlines were last checked.
    checked_at: Instant,
    /// The job was handed over and may go on elsewhere. Nothing changes the core.
    frozen: bool,
    /// Clients that have connected or disconnected meanwhile.
    missed: BTreeSet<ClientId>,
    /// The wait for learners that was logged last.
    late: Option<Duration>,
    /// Where learners are, and how fast.
    sights: Sights,
    /// What comes with commits, and goes with states.
    small: Small,
    /// Clients that pull from each other.
    relays: Relays,
}

/// The network, for reaching other shards.
pub(super) struct Network {
    pub(super) net: Handle,
    pub(super) resolve: Resolve,
}

enum ShardRoute {
    /// The coordinator's own partition, through the mailbox.
    Here,
    /// A shard on the network.
    There(Arc<RemoteShard>),
}

/// The beginning of a coordinator.
pub(super) enum Begins<'a> {
    /// A new job.
    Anew,
    /// The job's record in a snapshot.
    AtRecord(JobRecord),
    /// A job that was handed over at this time.
    HandedOver(&'a [u8], Duration),
}

/// The coordinator of a model.
pub struct Coordinator {
    /// The model's name.
    pub model: String,
    generation: Generation,
    epoch: Epoch,
    ways: Vec<ShardRoute>,
    /// The mailbox to its own partition.
    mailbox: Arc<Mailbox>,
    /// The coordinator's own partition.
    here: Weak<Partition>,
    state: Mutex<CoordinatorState>,
    network: Option<Network>,
    /// The core's time at the start.
    began_at: Duration,
    started: Instant,
    /// Raises the alarm to have deadlines checked.
    alarm: OnceLock<Alarm>,
    stopping: AtomicBool,
    /// Where the model is now, once another block map is in force.
    moved: OnceLock<Redirect>,
    /// Moves under way.
    pub(super) moves: Arc<Moves>,
    this: Weak<Coordinator>,
}

/// The status of a coordinator.
#[derive(Clone, Debug)]
pub struct CoordinatorStatus {
    /// The newest version.
    pub version: Version,
    /// `forming`, `running`, `reducing`, `stopped` or `failed`.
    pub state: JobPhase,
    /// Why it has failed, if it has.
    pub failed: Option<String>,
    /// Learners in the job.
    pub members: Vec<MemberView>,
    /// Where each is, and how fast.
    pub sights: BTreeMap<LearnerId, Sight>,
    /// The number of connected clients, and of all known ones.
    pub clients: (usize, usize),
    /// The number of contributions that are part of a version.
    pub contributions: u64,
    /// Readers of the job.
    pub readers: Vec<ReaderState>,
    /// Those that the next version waits for, by name.
    pub held_by: Vec<String>,
    /// The mounts that pull versions from each other.
    pub relays: Vec<RelayPlace>,
    /// The settings.
    pub controls: libmodelio::vocabulary::controls::Controls,
    /// The shards out of reach, for how long, and why.
    pub unreachable: Vec<(ShardId, Duration, String)>,
    /// The learners that others wait for, and for how long, if that is long.
    pub late: Option<(WaitedFor, Duration)>,
    /// The move under way.
    pub moving: Option<Progress>,
}

impl Coordinator {
    /// The coordinator of the model in `record`, whose own partition is `here`. The blocks of the `known` shards are
    /// certain to be there.
    ///
    /// # Errors
    /// When the record cannot be used, or there is no thread.
    pub(super) fn new(
        record: &ModelRecord,
        here: &Arc<Partition>,
        shard: ShardId,
        network: Option<Network>,
        job: Begins<'_>,
        known: &[ShardRecord],
    ) -> Result<Arc<Coordinator>, String> {
        let map = record.block_map().map_err(|error| error.to_string())?;
        let began_at = if let Begins::HandedOver(_, now) = job { now } else { Duration::ZERO };
        let ways: Vec<ShardRoute> = map
            .shares()
            .into_keys()
            .map(|other| match other {
                _ if other == shard => ShardRoute::Here,
                other => ShardRoute::There(Arc::new(RemoteShard::new(other, known, began_at))),
            })
            .collect();
        let layout = record.layout().map_err(|error| error.to_string())?;
        let goes_on = matches!(job, Begins::HandedOver(..));
        let new = || {
            let controls = record.controls.clone();
            CoordinatorCore::new(&layout, ways.len(), controls, patience(layout.size()))
                .map_err(|error| error.to_string())
        };
        let core = match job {
            Begins::Anew => new()?,
            Begins::AtRecord(begins) => {
                let core = new()?.restored(begins).map_err(|error| error.to_string())?;
                let lease = record.controls.lease;
                if record.lineage.restored > 0 { core.after_loss(layout.size(), lease) } else { core }
            }
            Begins::HandedOver(bytes, now) => {
                let core = CoordinatorCore::taken_over(bytes, &layout, ways.len(), now);
                core.map_err(|error| error.to_string())?
            }
        };
        let core = core.on_shards(map.shares().into_keys().collect());
        let core = match network {
            // With a small model, the version comes with the state.
            Some(_) if layout.size() <= u64::from(MAX_SMALL_MODEL) => core.with_provisional_plans(),
            Some(_) => core.with_provisional_plans().announces_plans(),
            None => core.with_local_shard(),
        };
        let state = CoordinatorState {
            core,
            clients: HashMap::new(),
            client_here: None,
            checks_at: Duration::ZERO,
            checked_at: Instant::now(),
            frozen: false,
            missed: BTreeSet::new(),
            late: None,
            sights: Sights::default(),
            small: Small::default(),
            relays: Relays::default(),
        };
        let own: Weak<dyn Recipient> = Arc::downgrade(here) as Weak<dyn Recipient>;
        let coordinator = Arc::new_cyclic(|this: &Weak<Coordinator>| Coordinator {
            model: record.name.clone(),
            generation: record.generation,
            epoch: map.epoch(),
            ways,
            mailbox: Arc::new(Mailbox::new(this.clone() as Weak<dyn Recipient>, own)),
            here: Arc::downgrade(here),
            state: Mutex::new(state),
            network,
            began_at,
            started: Instant::now(),
            alarm: OnceLock::new(),
            stopping: AtomicBool::new(false),
            moved: OnceLock::new(),
            moves: Arc::default(),
            this: this.clone(),
        });
        here.coordinated_by(ToCoordinator::Here(Arc::clone(&coordinator.mailbox)), coordinator.over());
        let timed = Arc::downgrade(&coordinator);
        let alarm = timer::watch(timed as Weak<dyn Timed>).map_err(|error| error.to_string())?;
        let _ = coordinator.alarm.set(alarm);
        if goes_on {
            coordinator.with_core(|state, now, actions| state.core.go_on(now, actions));
        }
        Ok(coordinator)
    }

    /// Stops the coordinator. Clients get `why`.
    pub(super) fn stop(&self, why: &Refusal) {
        self.stopping.store(true, Ordering::Relaxed);
        let clients: Vec<Link> = self.state.lock().clients.drain().map(|(_, link)| link).collect();
        for link in clients {
            link.close(Close::Asked(why.to_string().into()));
        }
        self.leave_partitions();
    }

    fn leave_partitions(&self) {
        for way in &self.ways {
            if let ShardRoute::There(remote) = way
                && let Some(link) = remote.link.lock().take()
            {
                link.close(Close::ShutDown);
            }
        }
        self.rouse();
    }

    /// The known addresses of the model's other shards.
    pub(super) fn addresses(&self) -> Vec<(ShardId, String)> {
        let address = |way: &ShardRoute| match way {
            ShardRoute::There(remote) => remote.address().map(|address| (remote.shard, address)),
            ShardRoute::Here => None,
        };
        self.ways.iter().filter_map(address).collect()
    }

    /// Whether the job was handed over, and is decided elsewhere.
    pub(super) fn is_frozen(&self) -> bool {
        self.state.lock().frozen
    }

    /// Whether the coordinator was stopped.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// The newest plan that is over.
    fn over(&self) -> PlanId {
        self.state.lock().core.over()
    }

    /// The status.
    pub fn status(&self) -> CoordinatorStatus {
        let state = self.state.lock();
        let job = state.core.job();
        let now = self.now();
        CoordinatorStatus {
            version: job.version(),
            state: state.core.doing(),
            failed: state.core.failed().map(Refusal::to_string),
            members: job.members(now),
            sights: state.sights.of(now, &state.core),
            clients: state.core.client_count(),
            contributions: job.contributions_taken(),
            readers: job.readers(None),
            held_by: job.held_by(),
            relays: state.relays.chain(),
            controls: job.controls().clone(),
            unreachable: self.gone(now),
            late: job.late(now).map(|(since, late)| (late, now.saturating_sub(since))),
            moving: self.moves.progress(),
        }
    }

    /// Shards without a connection, for how long, and why.
    fn gone(&self, now: Duration) -> Vec<(ShardId, Duration, String)> {
        let gone = |way: &ShardRoute| match way {
            ShardRoute::There(remote) => remote.is_gone(now).map(|(gone, why)| (remote.shard, gone, why)),
            ShardRoute::Here => None,
        };
        self.ways.iter().filter_map(gone).collect()
    }

    /// Tells clients and the log which shards have been away for long, and logs which learners are waited for.
    fn log_waits(&self) {
        // In one process the mount logs the wait.
        if self.is_frozen() || self.network.is_none() {
            return;
        }
        let now = self.now();
        let mut gone = self.gone(now);
        gone.retain(|(_, gone, _)| *gone >= AWAY);
        let away: Vec<ShardId> = gone.iter().map(|(shard, ..)| *shard).collect();
        let (mut before, mut late) = (Vec::new(), None);
        self.with_core(|state, now, actions| {
            before = state.core.away().to_vec();
            state.core.are_away(away.clone(), now, actions);
            late = state.core.job().late(now);
            let known = std::mem::replace(&mut state.late, late.as_ref().map(|(since, _)| *since));
            late.take_if(|(since, _)| known == Some(*since));
        });
        for (shard, gone, why) in gone.iter().filter(|(shard, ..)| !before.contains(shard)) {
            tracing::warn!(
                model = %self.model, %shard, "waiting for this shard, which has not been reached for {:.0} s: {why}",
                gone.as_secs_f64()
            );
        }
        for shard in before.iter().filter(|shard| !away.contains(shard)) {
            tracing::info!(model = %self.model, %shard, "this shard is there again");
        }
        if let Some((since, late)) = late {
            let seconds = now.saturating_sub(since).as_secs();
            tracing::warn!(model = %self.model, "learners have been waiting for {seconds} s for {late}");
        }
    }

    /// Has deadlines checked now.
    fn rouse(&self) {
        if let Some(alarm) = self.alarm.get() {
            alarm.rouse();
        }
    }

    pub(super) fn now(&self) -> Duration {
        self.began_at + self.started.elapsed()
    }

    fn with_core(&self, change: impl FnOnce(&mut CoordinatorState, Duration, &mut Vec<Action>)) {
        self.with_core_or(change, |_| {});
    }

    /// Like [`Self::with_core`]. Returns `frozen` if nothing may change the core.
    fn with_core_or(
        &self,
        change: impl FnOnce(&mut CoordinatorState, Duration, &mut Vec<Action>),
        frozen: impl FnOnce(&mut CoordinatorState),
    ) {
        let mut actions = Vec::new();
        let mut orders = Vec::new();
        let mut drains = false;
        let is_due = {
            let mut state = self.state.lock();
            if state.frozen {
                return frozen(&mut state);
            }
            change(&mut state, self.now(), &mut actions);
            let is_few = state.clients.len() <= FEW_CLIENTS;
            for action in actions {
                match action {
                    Action::ToClient(client, request, message) => {
                        if state.client_here == Some(client) {
                            let mail = Mail::Message(request, message);
                            self.mailbox.put(MailboxEnd::Coordinator, MailboxEnd::Client, mail);
                            drains = true;
                        } else if self.grants_here(&mut state, client, &message) {
                            drains = true;
                        } else if state.clients.contains_key(&client) {
                            let payload = match &message {
                                Message::State(sent) => self.version_with(&mut state, client, sent),
                                _ => None,
                            };
                            let outgoing = Outgoing { message, request, epoch: self.epoch, payload };
                            let Some(link) = state.clients.get(&client) else { continue };
                            if is_few { link.send_now(outgoing) } else { link.send(outgoing) }
                        }
                    }
                    Action::Close(client, why) => {
                        if let Some(link) = state.clients.remove(&client) {
                            link.close(Close::Asked(why.to_string().into()));
                        }
                    }
                    Action::ToPartition(partition, request, message) => match &self.ways[partition] {
                        ShardRoute::Here => {
                            let mail = Mail::Message(request, message);
                            self.mailbox.put(MailboxEnd::Coordinator, MailboxEnd::Partition, mail);
                            drains = true;
                        }
                        ShardRoute::There(remote) => orders.push((remote, request, message)),
                    },
                    Action::Published(version) => {
                        tracing::debug!(model = %self.model, %version, "published");
                    }
                }
            }
            state.core.next_deadline() < state.checks_at
        };
        for (remote, request, message) in orders {
            if let Some(link) = &*remote.link.lock() {
                link.send(Outgoing { epoch: self.epoch, ..Outgoing::new(request, message) });
            }
        }
        if is_due {
            self.rouse();
        }
        if drains {
            self.mailbox.drain();
        }
    }

    fn partition_message(&self, partition: usize, request: u64, message: Message) {
        self.with_core(|state, now, actions| {
            state.core.from_partition(partition, request, message, now, actions)
        });
    }

    // -- clients

    /// A client's control connection is open.
    pub(super) fn client_up(&self, client: ClientId, link: &Link, address: &str) -> Result<(), Refusal> {
        let mut outcome = Ok(());
        let met = |state: &mut CoordinatorState| {
            state.sights.client_up(client, address);
            if let Some(old) = state.clients.insert(client, link.clone()) {
                // A newer connection has replaced this one: its messages do not count.
                old.close(Close::Asked("the client has connected again".into()));
            }
        };
        self.with_core_or(
            |state, now, actions| {
                met(state);
                outcome = state.core.client_up(client, now, actions);
            },
            |state| {
                met(state);
                state.missed.insert(client);
            },
        );
        if self.moved.get().is_some() {
            link.wake();
        }
        outcome
    }

    /// A client in this process joins.
    pub(super) fn client_here(&self, client: ClientId) -> Result<(), Refusal> {
        let mut outcome = Ok(());
        self.with_core(|state, now, actions| {
            state.client_here = Some(client);
            outcome = state.core.client_up(client, now, actions);
        });
        outcome
    }

    /// How long a learner has been silent.
    pub(super) fn silence(&self, learner: LearnerId) -> Duration {
        let now = self.now();
        self.state.lock().core.job().member(learner, now).map_or(Duration::ZERO, |member| member.silent)
    }

    /// The state of the job for the client in this process.
    pub(super) fn state_here(&self) -> JobState {
        let now = self.now();
        let state = self.state.lock();
        state.client_here.map(|client| state.core.state(client, now)).unwrap_or_default()
    }

    /// The mailbox for its messages and those to its own partition.
    pub(super) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }

    /// A client's control connection has ended.
    pub(super) fn client_down(&self, client: ClientId, link: &Link) {
        let known = |state: &mut CoordinatorState| {
            let known = state.clients.get(&client).is_some_and(|known| known.is(link));
            let is_over = known && state.clients.remove(&client).is_some();
            if is_over {
                state.small.leaves(client);
            }
            is_over
        };
        self.with_core_or(
            |state, now, actions| {
                if known(state) {
                    state.core.client_down(client, now, actions);
                    state.tell_relays(now, actions);
                }
            },
            |state| {
                if known(state) {
                    state.missed.insert(client);
                }
            },
        );
    }

    /// Takes a message of a client. With a commit, blocks may have come.
    pub(super) fn client_message(
        &self,
        client: ClientId,
        link: &Link,
        request: u64,
        message: Message,
        bytes: &[u8],
    ) {
        let bytes = if bytes.is_empty() || self.is_small() { bytes } else { &[] };
        self.with_core(|state, now, actions| {
            if state.checked_at.elapsed() > AWAY {
                state.wakes(now, actions);
            }
            if !state.clients.get(&client).is_some_and(|known| known.is(link)) {
                return;
            }
            match state.relays.takes(client, &message, now) {
                Ok(true) => state.tell_relays(now, actions),
                Ok(false) => {
                    state.small.commits(client, &message, bytes);
                    state.core.from_client(client, request, message, now, actions);
                }
                Err(why) => actions.push(Action::Close(client, Refusal::Other(why))),
            }
        });
    }

    /// A client has sent bytes.
    pub(super) fn client_alive(&self, client: ClientId) {
        let mut state = self.state.lock();
        let now = self.now();
        state.core.client_alive(client, now);
    }

    // -- shards

    fn connect_missing(&self) {
        let now = self.now();
        for (index, way) in self.ways.iter().enumerate() {
            let ShardRoute::There(remote) = way else { continue };
            remote.look(now);
            if !remote.is_due(now) {
                continue;
            }
            if remote.is_at_hand() {
                self.connect(index, remote);
                continue;
            }
            // The registry and the resolver of names may take a while. No lease and no deadline waits for them.
            let (coordinator, of_thread) = (self.this.clone(), Arc::clone(remote));
            let connects = move || {
                if let Some(coordinator) = coordinator.upgrade() {
                    coordinator.connect(index, &of_thread);
                }
            };
            if let Err(error) = std::thread::Builder::new().name("coord-connect".into()).spawn(connects) {
                remote.is_lost(format!("no thread to check for it: {error}"), now);
            }
        }
    }

    /// Connects. This may take a while unless the address is known.
    fn connect(&self, index: usize, remote: &Arc<RemoteShard>) {
        if let Err(why) = self.try_connect(index, remote) {
            remote.is_lost(why, self.now());
        }
    }
}

/// Takes messages of its own partition and of a client in this process.
impl Recipient for Coordinator {
    fn receive(self: Arc<Coordinator>, from: MailboxEnd, mail: Mail) {
        match (from, mail) {
            (MailboxEnd::Partition, Mail::Message(request, message)) => {
                if let Some(own) = self.ways.iter().position(|way| matches!(way, ShardRoute::Here)) {
                    self.partition_message(own, request, message);
                }
            }
            (MailboxEnd::Partition, Mail::Granted(granted)) => self.not_taken(granted),
            (MailboxEnd::Partition, Mail::Buffer(ready)) => {
                self.with_core(|state, now, actions| state.core.buffer(ready, now, actions));
            }
            (MailboxEnd::Client, Mail::Message(request, message)) => {
                self.with_core(|state, now, actions| {
                    if let Some(client) = state.client_here {
                        state.core.from_client(client, request, message, now, actions);
                    }
                });
            }
            _ => {}
        }
    }
}

/// About the time that moving a contribution takes.
fn patience(bytes: u64) -> Duration {
    const BYTES_PER_SECOND: f64 = 4e9;
    const MAX_PATIENCE: Duration = Duration::from_millis(50);
    Duration::from_secs_f64(bytes as f64 / BYTES_PER_SECOND).min(MAX_PATIENCE)
}

impl CoordinatorState {
    /// Tells clients that are relays from where they pull, where that has changed.
    fn tell_relays(&mut self, now: Duration, actions: &mut Vec<Action>) {
        let news = self.relays.tell(|client| self.clients.contains_key(client), now);
        actions.extend(news.into_iter().map(|(client, message)| Action::ToClient(client, 0, message)));
    }

    /// Somebody looks at the clock. If this process was stopped or starved, what was sent to it in that time is still
    /// to be read. Its clients may have given up by now what they sent before that, so nothing of it counts if the
    /// pause was long: they connect again, and repeat what they still want.
    fn wakes(&mut self, now: Duration, actions: &mut Vec<Action>) {
        const STALLED: Duration = Duration::from_millis(500);
        let pause = std::mem::replace(&mut self.checked_at, Instant::now()).elapsed();
        if pause <= STALLED {
            return;
        }
        self.core.forgive_silence(pause, now);
        if pause <= AWAY {
            return;
        }
        for (client, link) in std::mem::take(&mut self.clients) {
            link.close(Close::Asked("this shard has stood still: connect again".into()));
            self.small.leaves(client);
            self.core.client_down(client, now, actions);
        }
    }
}

impl Timed for Coordinator {
    fn check(&self) -> Option<Duration> {
        const IDLE: Duration = Duration::from_millis(200);
        if self.is_stopping() {
            return None;
        }
        // All deadlines are checked now, so nobody needs to raise the alarm meanwhile.
        self.state.lock().checks_at = Duration::ZERO;
        self.connect_missing();
        self.with_core(|state, now, actions| {
            state.wakes(now, actions);
            state.core.tick(now, actions);
            state.tell_relays(now, actions);
        });
        self.log_waits();
        let mut state = self.state.lock();
        let CoordinatorState { core, sights, clients, .. } = &mut *state;
        sights.look(self.now(), core, |client| clients.contains_key(&client));
        let due = state.core.next_deadline().saturating_sub(self.now());
        let pause = due.clamp(Duration::from_millis(1), IDLE);
        state.checks_at = self.now() + pause;
        Some(pause)
    }
}

#[cfg(test)]
mod tests;
