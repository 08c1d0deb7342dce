//! The shard's end of a connection. The greeting decides which messages are allowed on it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::transport::frames::{Conversation, Link, Outgoing, Take};
use libmodelio::transport::stream::{Close, LentPayload};
use libmodelio::transport::tally::Flow;
use libmodelio::vocabulary::ids::{BlockId, ClientId, Epoch, PlanId, Version};
use libmodelio::vocabulary::layout::MAX_BLOCK_SIZE;
use libmodelio::wire::{
    Limits, MAX_PARTS_BYTES, MAX_PAYLOAD, MAX_SMALL_MODEL, Message, Protocol, Received, Refusal,
    RegistryRequest, Role,
};

use super::coordinator::Coordinator;
use super::errands::{self, Errand};
use super::origins::{Origin, OriginPlace};
use super::partition::{Followed, Partition, Reservation, Reserved, Room, Sender, Sending, ToCoordinator};
use super::parts::Reading;
use super::rdma_clients::RdmaClient;
use super::redirect::{Redirect, TurnedAway};
use super::shared::Shared;
use super::shm_clients::ShmClient;
use super::unsent::{AdminAnswer, Unsent, UnsentAll, answer, answer_counted};
use super::{admin, models, moving};
use crate::partition::brought::Part;

/// The longest silence on a connection.
const SILENCE: Duration = Duration::from_secs(10);
/// The most requests for blocks, and about them, that may wait on one connection.
const MAX_PULLS: usize = 256;

/// The kind of a connection, from its greeting.
enum PeerKind {
    Strange,
    Control { client: ClientId, coordinator: Arc<Coordinator> },
    Data(Box<Data>),
    Coordinator(Arc<Partition>),
    Admin,
}

/// A request for blocks, or about them.
struct Asked {
    version: Version,
    what: What,
    /// The version that the client has.
    base: Option<Version>,
}

/// The part of a request that says what of the version is wanted.
enum What {
    /// All of it at once.
    Whole,
    /// Blocks.
    Blocks(Range<u32>),
    /// The list of blocks that are the same in this version, which the client has.
    Unchanged(Version),
}

/// A client's connection for blocks.
struct Data {
    sender: Sender,
    partition: Arc<Partition>,
    /// The reservation of the payload that is being received.
    reservation: Option<Reservation>,
    /// When to check blocks again that wait for an unknown plan.
    rouse_at: Option<Instant>,
    /// What was requested.
    pulls: VecDeque<Asked>,
    /// The plan whose blocks are sent as they are computed.
    follows: Option<PlanId>,
    /// The version that is being sent.
    pinned: Option<Sending>,
    /// The shared memory, if the client is on this host.
    memory: Option<Box<ShmClient>>,
    /// The RDMA connection, if the client uses one.
    remote: Option<Box<RdmaClient>>,
}

/// The shard's end of a connection.
pub(super) struct Peer {
    shared: Arc<Shared>,
    /// The peer's address, for the log.
    address: String,
    /// The peer's address, for limits. A peer on this host or by RDMA has limits of its own.
    origin: Option<Origin>,
    /// Its place among those that have greeted.
    place: Option<OriginPlace>,
    link: Link,
    kind: PeerKind,
    epoch: Epoch,
    /// Kept here until the greeting.
    memory: Option<Box<ShmClient>>,
    /// Kept here until the greeting.
    remote: Option<Box<RdmaClient>>,
    unsent: Arc<UnsentAll>,
    /// The version that it reads pieces of.
    reading: Reading,
    /// The part of new weights that it brings.
    brings: Option<Arc<Part>>,
}

impl Peer {
    pub(super) fn new(shared: Arc<Shared>, address: SocketAddr) -> Peer {
        Peer { origin: Some(Origin::of(address.ip())), ..Peer::of(shared, address.to_string(), None) }
    }

    pub(super) fn through_memory(shared: Arc<Shared>, memory: ShmClient) -> Peer {
        Peer::of(shared, "this host".into(), Some(Box::new(memory)))
    }

    pub(super) fn by_rdma(shared: Arc<Shared>, address: String, remote: RdmaClient) -> Peer {
        Peer { remote: Some(Box::new(remote)), ..Peer::of(shared, address, None) }
    }

    fn of(shared: Arc<Shared>, address: String, memory: Option<Box<ShmClient>>) -> Peer {
        Peer {
            shared,
            address,
            origin: None,
            place: None,
            link: Link::default(),
            kind: PeerKind::Strange,
            epoch: Epoch(0),
            memory,
            remote: None,
            unsent: Arc::default(),
            reading: Reading::default(),
            brings: None,
        }
    }

    fn answer(&self, request: u64, message: Message) {
        self.link.send(Outgoing { epoch: self.epoch, ..Outgoing::new(request, message) });
    }

    /// Sends the peer the model's new place, and ends the connection.
    fn send_redirect(&self, request: u64, to: &Redirect) -> Close {
        let payload = Some(LentPayload::owned(to.payload.to_vec()));
        self.link.send_last(Outgoing { message: Message::Moved, request, epoch: to.epoch, payload });
        Close::Asked("the model has moved".into())
    }

    /// Where the model of this connection is now, if it has moved since the greeting.
    fn moved(&self) -> Option<Redirect> {
        match &self.kind {
            PeerKind::Control { coordinator, .. } => coordinator.moved().cloned(),
            PeerKind::Data(data) => data.partition.moved().cloned(),
            PeerKind::Strange | PeerKind::Coordinator(_) | PeerKind::Admin => None,
        }
    }

    /// Refuses a request, and ends the connection.
    fn refuse(&self, request: u64, refusal: Refusal) -> Close {
        let why = refusal.to_string();
        self.shared.limits.complaints.turned_away(&self.address, &why);
        self.link
            .send_last(Outgoing { epoch: self.epoch, ..Outgoing::new(request, Message::Refused(refusal)) });
        Close::Asked(why.into())
    }

    /// Blocks have come. The client has left their checksum out.
    fn unchecked(&self, bytes: usize) {
        match &self.kind {
            PeerKind::Data(data) => data.partition.store().tally().unchecked(bytes),
            PeerKind::Control { coordinator, .. } => coordinator.unchecked(bytes),
            PeerKind::Strange | PeerKind::Coordinator(_) | PeerKind::Admin => {}
        }
    }

    fn greet(&mut self, received: &Received) -> Result<(), TurnedAway> {
        let Message::Hello { protocol, role, model, generation, client } = &received.message else {
            return Err(Refusal::Role { what: received.message.name().to_owned() }.into());
        };
        let expected = Protocol::NEWEST.number();
        if *protocol != expected {
            return Err(Refusal::Protocol { expected, got: *protocol }.into());
        }
        if let Some(origin) = self.origin {
            self.place = Some(self.shared.limits.origins.greeted(origin, *role, &self.link)?);
        }
        if *role != Role::Data && self.memory.is_some() {
            return Err(Refusal::Role { what: format!("{role:?} by shared memory") }.into());
        }
        if *role != Role::Data && self.remote.is_some() {
            return Err(Refusal::Role { what: format!("{role:?} by RDMA") }.into());
        }
        if *role == Role::Admin {
            self.kind = PeerKind::Admin;
            return Ok(());
        }
        let got = received.header.epoch();
        let models = self.shared.models.lock();
        let Some(found) = models.get(model) else {
            return Err(models::not_here(&self.shared, model, *generation, *role, got));
        };
        if found.generation != *generation {
            let (model, expected, got) = (model.clone(), found.generation, *generation);
            return Err(Refusal::Generation { model, expected, got }.into());
        }
        let epoch = found.partition.epoch;
        match &found.redirect {
            Some(to) if got < epoch && *role != Role::Coordinator => {
                return Err(TurnedAway::Moved(to.clone()));
            }
            _ if epoch != got => return Err(Refusal::Epoch { expected: epoch, got }.into()),
            _ => {}
        }
        self.epoch = epoch;
        let partition = Arc::clone(&found.partition);
        self.kind = match role {
            Role::Control => {
                let coordinator = found.coordinator.clone();
                let coordinator =
                    coordinator.ok_or_else(|| Refusal::other("this shard does not coordinate the model"))?;
                PeerKind::Control { client: *client, coordinator }
            }
            Role::Data => {
                self.link.expect_much();
                let mut memory = self.memory.take();
                if let Some(memory) = &mut memory {
                    memory.serve(&partition);
                }
                PeerKind::Data(Box::new(Data {
                    sender: Sender::over(&self.link, *client),
                    partition,
                    reservation: None,
                    rouse_at: None,
                    pulls: VecDeque::new(),
                    follows: None,
                    pinned: None,
                    memory,
                    remote: self.remote.take(),
                }))
            }
            Role::Coordinator if found.coordinator.is_some() => {
                return Err(Refusal::other("this shard coordinates the model itself").into());
            }
            Role::Coordinator => {
                partition.coordinated_by(ToCoordinator::There(self.link.clone()), PlanId(client.0));
                PeerKind::Coordinator(partition)
            }
            Role::Admin => PeerKind::Admin,
            Role::Relay => return Err(Refusal::other("this is a shard, and no relay").into()),
        };
        Ok(())
    }

    fn welcome(&mut self) -> Result<(), Refusal> {
        if let PeerKind::Data(data) = &mut self.kind
            && let Data { sender, partition, remote: Some(remote), .. } = &mut **data
        {
            let rdma = self
                .shared
                .fast
                .rdma
                .get()
                .ok_or_else(|| Refusal::other("the shard is starting or shutting down"))?;
            let served = remote.serve(sender.client, partition, rdma, &self.link);
            served.map_err(|refusal| Refusal::NoRdma(refusal.to_string()))?;
        }
        let silence_ms = SILENCE.as_millis() as u32;
        let (protocol, shard) = (Protocol::NEWEST.number(), self.shared.identity.number());
        self.answer(0, Message::Welcome { protocol, shard, epoch: self.epoch, silence_ms });
        match &self.kind {
            PeerKind::Control { client, coordinator } => {
                coordinator.client_up(*client, &self.link, &self.address)?
            }
            PeerKind::Data(data) => data.partition.client_up(data.sender.client, &self.link),
            _ => {}
        }
        Ok(())
    }

    /// Has a request answered on a thread that moves no bytes, and that no job waits for.
    fn send_off(
        &self,
        request: u64,
        kind: errands::ErrandKind,
        payload: &[u8],
        answers: impl FnOnce(&[u8]) -> AdminAnswer + Send + 'static,
    ) -> Result<(), Refusal> {
        let origin = self.origin.ok_or_else(|| Refusal::other("such requests come by TCP"))?;
        // The answer to most requests is short.
        let bytes = match kind {
            errands::ErrandKind::Changes => admin::CHANGES_BYTES,
            errands::ErrandKind::Parts => MAX_PARTS_BYTES as usize,
            _ => payload.len(),
        };
        let unsent = Unsent::one_more(&self.unsent, bytes)?;
        let (link, payload) = (self.link.clone(), payload.to_vec());
        let work = move |unsent| answer_counted(&link, request, answers(&payload), Some(unsent));
        self.shared.limits.errands.run(origin, Errand { kind, unsent, work: Box::new(work) })
    }

    /// Handles a request for administration, with its payload.
    fn administer(&mut self, request: u64, message: Message, payload: &[u8]) -> Result<(), Refusal> {
        let shared = Arc::clone(&self.shared);
        let answer = match message {
            Message::Load { generation, block, what } => {
                return admin::load(&shared, generation, (block, what), payload);
            }
            // Records may be long. Reading one must not hold up the thread that moves bytes.
            Message::Registry(
                asked @ (RegistryRequest::Put { .. }
                | RegistryRequest::Restore { .. }
                | RegistryRequest::Succeed { .. }
                | RegistryRequest::Keep { .. }
                | RegistryRequest::Model { .. }),
            ) if shared.directory.table().is_some() => {
                let (of_asked, from) = (Arc::clone(&shared), self.origin);
                return self.send_off(request, errands::ErrandKind::Record, payload, move |payload| {
                    of_asked.directory.answer(from, &asked, payload)
                });
            }
            Message::Registry(asked) if shared.directory.passes_on() => {
                let (of_asked, from) = (Arc::clone(&shared), self.origin);
                return self.send_off(request, errands::ErrandKind::Others, payload, move |payload| {
                    of_asked.directory.answer(from, &asked, payload)
                });
            }
            Message::Registry(asked) => shared.directory.answer(self.origin, &asked, payload),
            Message::Status => {
                let (link, unsent) = (self.link.clone(), Unsent::one_more(&self.unsent, 0)?);
                let answer = move |text: &str| {
                    let text = Ok((Message::Text, Some(text.as_bytes().to_vec())));
                    answer_counted(&link, request, text, Some(unsent));
                };
                let of_status = Arc::clone(&shared);
                shared.limits.status.ask(Box::new(answer), move || admin::status(&of_status).to_string());
                return Ok(());
            }
            Message::Move { model, generation, off, timeout_ms, hold_ms } => {
                let (link, timeout) = (self.link.clone(), Duration::from_millis(timeout_ms.into()));
                let hold = (hold_ms > 0).then(|| Duration::from_millis(hold_ms.into()));
                let answer = move |result| answer(&link, request, result);
                match moving::move_model(
                    &shared,
                    &model,
                    generation,
                    off,
                    (timeout, hold),
                    moving::between_shards,
                    answer,
                ) {
                    Ok(()) => return Ok(()),
                    Err(refusal) => Err(refusal),
                }
            }
            // Fetches are short and frequent, so they run on the executor.
            message @ (Message::Fetch { .. } | Message::FetchCopy { .. }) if shared.options.holds_blocks => {
                let (link, unsent) = (self.link.clone(), Unsent::one_more(&self.unsent, 0)?);
                let executor = shared.executor.clone();
                executor.spawn(Box::new(move || {
                    answer_counted(
                        &link,
                        request,
                        moving::between_shards(&shared, message, &[]),
                        Some(unsent),
                    );
                }));
                return Ok(());
            }
            message if moving::is_between_shards(&message) && shared.options.holds_blocks => {
                return self.send_off(request, moving::kind_of(&message), payload, move |payload| {
                    moving::between_shards(&shared, message, payload)
                });
            }
            Message::Create if shared.options.holds_blocks => {
                return self.send_off(request, errands::ErrandKind::Memory, payload, move |payload| {
                    admin::create(&shared, payload)
                });
            }
            Message::Loaded { generation } if shared.options.holds_blocks => {
                return self.send_off(request, errands::ErrandKind::Short, payload, move |_| {
                    admin::loaded(&shared, generation)
                });
            }
            Message::ChangedSince { generation, base, version, first } if shared.options.holds_blocks => {
                return self.send_off(request, errands::ErrandKind::Changes, payload, move |_| {
                    admin::changed_since(&shared, generation, (base, version), first)
                });
            }
            Message::ReadParts { generation, version, base, parts } if shared.options.holds_blocks => {
                match self.reading.of(&shared, generation, version) {
                    Ok(of) => {
                        let kind = errands::ErrandKind::Parts;
                        return self.send_off(request, kind, payload, move |_| of.gather(base, &parts));
                    }
                    Err(refusal) => Err(refusal),
                }
            }
            Message::WritePart { generation, epoch, client, token, patched, parts }
                if shared.options.holds_blocks =>
            {
                match models::partition_of(&shared, generation) {
                    Ok((_, partition)) => {
                        let part = partition.part(client, token);
                        self.brings = Some(Arc::clone(&part));
                        let kind = errands::ErrandKind::Short;
                        return self.send_off(request, kind, payload, move |payload| {
                            partition
                                .keep_part(&part, epoch, (&parts, patched, payload))
                                .map(|()| (Message::Done, None))
                        });
                    }
                    Err(refusal) => Err(refusal),
                }
            }
            Message::Delete { model, generation } if shared.options.holds_blocks => {
                return self.send_off(request, errands::ErrandKind::Short, payload, move |_| {
                    models::delete(&shared, &model, generation)
                });
            }
            other => Err(Refusal::Role { what: other.name().to_owned() }),
        };
        self::answer(&self.link, request, answer);
        Ok(())
    }
}

impl Data {
    /// Whether the payload of blocks goes through a ring, unless the message only names their place.
    fn goes_through_rings(&self) -> bool {
        if self.remote.is_some() {
            return true;
        }
        self.memory.is_some()
    }

    /// The next requested block.
    fn next_block(&mut self, link: &Link) -> Option<Outgoing> {
        if let Some(ready) = self.remote.as_mut().and_then(|remote| remote.ready()) {
            return Some(ready);
        }
        if let Some(memory) = &mut self.memory {
            if let Some(ready) = memory.ready() {
                return Some(ready);
            }
            if memory.is_full() {
                return None;
            }
        }
        loop {
            let Some(Asked { version, what, base }) = self.pulls.front_mut() else {
                let followed = self.next_followed(link);
                if followed.is_none() {
                    // An idle connection must not keep its version's buffer. If several did, each with another version,
                    // no buffer would be left for the next one.
                    self.pinned = None;
                }
                return followed;
            };
            let (version, base) = (*version, *base);
            if self.pinned.as_ref().is_none_or(|pinned| !pinned.is_of(version, base)) {
                self.pinned = None;
                match self.partition.version(version, base, link) {
                    Ok(Some(pinned)) => self.pinned = Some(pinned),
                    Ok(None) => return None,
                    Err(refusal) => {
                        self.pulls.pop_front();
                        let message = Message::Refused(refusal);
                        return Some(Outgoing { epoch: self.partition.epoch, ..Outgoing::new(0, message) });
                    }
                }
            }
            let Some(pinned) = &self.pinned else { continue };
            let blocks = match what {
                What::Blocks(blocks) => blocks,
                What::Whole => {
                    let whole = self
                        .memory
                        .as_mut()
                        .and_then(|memory| memory.whole(&self.partition, &pinned.version));
                    if whole.is_some() {
                        self.pulls.pop_front();
                        return whole;
                    }
                    *what = What::Blocks(0..self.partition.layout().blocks());
                    continue;
                }
                What::Unchanged(base) => {
                    let message = self.partition.unchanged(pinned, *base);
                    self.pulls.pop_front();
                    return Some(Outgoing { epoch: self.partition.epoch, ..Outgoing::new(0, message) });
                }
            };
            let Some(block) = blocks.next() else {
                self.pulls.pop_front();
                continue;
            };
            let outgoing = match &mut self.memory {
                Some(memory) => {
                    let changes = self.partition.changes(pinned, BlockId(block));
                    changes.or_else(|| memory.block(&self.partition, &pinned.version, BlockId(block)))
                }
                None => self.partition.block(pinned, BlockId(block)),
            };
            if let (Some(_), Some(Outgoing { payload: Some(piece), .. })) = (&self.remote, &outgoing) {
                // The block goes through the ring, because the client has asked for it instead of reading it.
                self.partition.store().tally().copied(Flow::Pull, piece.len());
            }
            if outgoing.is_some() {
                return outgoing;
            }
        }
    }

    /// The next block of the plan that the client follows.
    fn next_followed(&mut self, link: &Link) -> Option<Outgoing> {
        match self.partition.follow(self.sender.client, self.follows?, &mut self.pinned, link) {
            Followed::Block(block) => Some(block),
            Followed::Wait => None,
            Followed::Gone(refusal) => {
                self.follows = None;
                let message = Message::Refused(refusal);
                Some(Outgoing { epoch: self.partition.epoch, ..Outgoing::new(0, message) })
            }
            Followed::Over => {
                self.follows = None;
                None
            }
        }
    }

    /// Time passes. Returns when to call again.
    fn tick(&mut self, now: Instant, link: &Link) -> Result<Option<Instant>, Refusal> {
        if let Some(memory) = &mut self.memory {
            memory.again(&self.partition, &mut self.sender)?;
        }
        if self.rouse_at.take_if(|at| *at <= now).is_some() {
            // The wake-up makes the connection receive again.
            link.wake();
        }
        if let Some(remote) = &mut self.remote {
            remote.again(&self.partition, &mut self.sender)?;
            return Ok(remote.until(&self.sender, now));
        }
        Ok(self.rouse_at)
    }

    /// The connection receives nothing more.
    fn given_up(&mut self) {
        self.reservation = None;
        if let Some(remote) = &mut self.remote {
            remote.given_up();
        }
    }

    fn message(&mut self, received: &Received, link: &Link) -> Result<Take, Refusal> {
        if let Some(memory) = &mut self.memory
            && let Some(take) = memory.message(&self.partition, received, &mut self.sender)?
        {
            self.rouse_at = self.sender.until(Instant::now());
            return Ok(take);
        }
        if let Some(remote) = &mut self.remote
            && let Some(take) = remote.message(&self.partition, received)?
        {
            remote.again(&self.partition, &mut self.sender)?;
            return Ok(take);
        }
        match &received.message {
            Message::Push { .. } | Message::PushChanges { .. } => {
                let push = self.partition.push(received)?;
                let reserved = self.partition.reserve(&mut self.sender, push, Room::Stream)?;
                self.rouse_at = self.sender.until(Instant::now());
                let is_patch = matches!(received.message, Message::PushChanges { .. });
                return Ok(match reserved {
                    Reserved::Ready(reservation) if is_patch && !reservation.is_of_weights() => {
                        return Err(Refusal::other("only new weights come as what they change"));
                    }
                    Reserved::Ready(reservation) => {
                        let target = self.reservation.insert(reservation).target();
                        target.map_or(Take::Buffered, Take::Into)
                    }
                    Reserved::Later => Take::Later,
                    Reserved::Kept | Reserved::Skip => Take::Nothing,
                });
            }
            Message::Probe { plan } => {
                if let Some(missing) = self.partition.missing(self.sender.client, *plan) {
                    link.send(Outgoing { epoch: self.partition.epoch, ..Outgoing::new(0, missing) });
                }
            }
            Message::Pull { .. } | Message::PullWhole { .. } | Message::WhichChanged { .. }
                if self.pulls.len() >= MAX_PULLS =>
            {
                return Err(Refusal::other(format!("more than {MAX_PULLS} pulls on one connection")));
            }
            Message::Pull { version, blocks, base } => {
                // The client waits no longer for what it has followed.
                self.follows = None;
                let what = What::Blocks(blocks.clone());
                self.pulls.push_back(Asked { version: *version, what, base: *base });
            }
            Message::WhichChanged { version, base } => {
                let what = What::Unchanged(*base);
                self.pulls.push_back(Asked { version: *version, what, base: Some(*base) });
            }
            Message::Follow { plan, base } if !self.goes_through_rings() => {
                self.partition.begin_following(self.sender.client, *plan, *base);
                self.follows = Some(*plan);
            }
            // Its region is the model's bytes.
            Message::PullWhole { version }
                if self.memory.is_some()
                    && self.partition.layout().size() == self.partition.model_bytes() =>
            {
                self.pulls.push_back(Asked { version: *version, what: What::Whole, base: None });
            }
            other => return Err(Refusal::Role { what: other.name().to_owned() }),
        }
        Ok(Take::Nothing)
    }
}

impl Conversation for Peer {
    fn opened(&mut self, link: &Link) -> Result<(), Close> {
        self.link = link.clone();
        if let Some(origin) = self.origin {
            self.shared.limits.origins.opened(origin, link);
        }
        Ok(())
    }

    fn message(&mut self, received: &Received) -> Result<Take, Close> {
        let request = received.header.request();
        if matches!(self.kind, PeerKind::Strange) {
            let greeted = self.greet(received).and_then(|()| self.welcome().map_err(TurnedAway::from));
            return match greeted {
                Ok(()) => Ok(Take::Nothing),
                Err(TurnedAway::Moved(to)) => Err(self.send_redirect(request, &to)),
                Err(TurnedAway::Refused(refusal)) => Err(self.refuse(request, refusal)),
            };
        }
        if let Some(to) = self.moved() {
            return Err(self.send_redirect(request, &to));
        }
        let epoch = received.header.epoch();
        if !matches!(self.kind, PeerKind::Admin) && epoch != self.epoch && received.message != Message::Pong {
            return Err(self.refuse(request, Refusal::Epoch { expected: self.epoch, got: epoch }));
        }
        let outcome = match &mut self.kind {
            PeerKind::Strange => Ok(Take::Nothing),
            PeerKind::Control { .. } if received.header.payload_len() > 0 => match &received.message {
                Message::Commit { .. } => Ok(Take::Buffered),
                _ => received.expect_payload(0).map(|()| Take::Nothing).map_err(|error| error.to_refusal()),
            },
            PeerKind::Control { client, coordinator } => {
                coordinator.client_message(*client, &self.link, request, received.message.clone(), &[]);
                Ok(Take::Nothing)
            }
            PeerKind::Data(data) => data.message(received, &self.link),
            PeerKind::Coordinator(partition) => {
                partition.from_coordinator(request, received.message.clone(), Some(&self.link));
                Ok(Take::Nothing)
            }
            PeerKind::Admin if received.header.payload_len() > 0 => Ok(Take::Buffered),
            PeerKind::Admin => {
                self.administer(request, received.message.clone(), &[]).map(|()| Take::Nothing)
            }
        };
        outcome.map_err(|refusal| self.refuse(request, refusal))
    }

    fn payload(&mut self, received: &Received, bytes: &[u8]) -> Result<(), Close> {
        if received.header.payload_crc().is_none() {
            self.unchecked(received.header.payload_len() as usize);
        }
        let outcome = match &mut self.kind {
            PeerKind::Data(data) => match data.reservation.take() {
                Some(reservation) => {
                    if data.goes_through_rings() {
                        let len = received.header.payload_len() as usize;
                        data.partition.store().tally().copied(Flow::Push, len);
                    }
                    match received.message {
                        Message::PushChanges { base, crc, .. } => {
                            reservation.complete_changes((base, crc), bytes)
                        }
                        _ => reservation.complete(bytes, || true),
                    }
                }
                None => Ok(()),
            },
            PeerKind::Admin => self.administer(received.header.request(), received.message.clone(), bytes),
            PeerKind::Control { client, coordinator } => {
                let (request, message) = (received.header.request(), received.message.clone());
                coordinator.client_message(*client, &self.link, request, message, bytes);
                Ok(())
            }
            _ => Ok(()),
        };
        outcome.map_err(|refusal| self.refuse(received.header.request(), refusal))
    }

    fn copied(&mut self, bytes: usize) {
        if let PeerKind::Data(data) = &self.kind {
            data.partition.store().tally().copied(Flow::Push, bytes);
        }
    }

    fn next(&mut self) -> Option<Outgoing> {
        match &mut self.kind {
            PeerKind::Data(data) => data.next_block(&self.link),
            _ => None,
        }
    }

    fn limits(&self) -> Limits {
        match &self.kind {
            PeerKind::Strange => Limits::GREETING,
            PeerKind::Control { .. } => Limits { payload: MAX_SMALL_MODEL, ..Limits::MAX },
            PeerKind::Coordinator(_) => Limits { payload: 0, ..Limits::MAX },
            PeerKind::Data(data) => {
                let layout = data.partition.layout();
                // Two, because blocks of fp32 have forms of that length.
                let most = layout.widening().max(2) as u32;
                Limits { payload: most * layout.block_size().min(MAX_BLOCK_SIZE), ..Limits::MAX }
            }
            PeerKind::Admin => Limits { payload: MAX_PAYLOAD, ..Limits::MAX },
        }
    }

    fn silence(&self) -> Option<Duration> {
        (!matches!(self.kind, PeerKind::Strange)).then_some(SILENCE)
    }

    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        if let Some(to) = self.moved() {
            return Err(self.send_redirect(0, &to));
        }
        match &mut self.kind {
            PeerKind::Data(data) => data.tick(now, &self.link).map_err(|refusal| self.refuse(0, refusal)),
            _ => Ok(self.reading.until(now)),
        }
    }

    fn alive(&mut self) {
        if let PeerKind::Control { client, coordinator } = &self.kind {
            coordinator.client_alive(*client);
        }
    }

    fn farewell(&mut self, refusal: Refusal) -> Option<Outgoing> {
        self.shared.limits.complaints.turned_away(&self.address, &refusal);
        Some(Outgoing { epoch: self.epoch, ..Outgoing::new(0, Message::Refused(refusal)) })
    }

    fn given_up(&mut self) {
        if let PeerKind::Data(data) = &mut self.kind {
            data.given_up();
        }
    }

    fn closed(&mut self, why: &Close) {
        tracing::debug!(peer = %self.address, %why, "connection over");
        self.unsent.end();
        self.brings = None;
        if self.place.take().is_none() {
            self.shared.limits.origins.ended(&self.link);
        }
        match std::mem::replace(&mut self.kind, PeerKind::Strange) {
            PeerKind::Control { client, coordinator } => coordinator.client_down(client, &self.link),
            PeerKind::Data(data) => {
                data.partition.client_down(&self.link);
                if let Some(mut remote) = data.remote {
                    remote.closed();
                }
            }
            _ => {}
        }
    }
}
