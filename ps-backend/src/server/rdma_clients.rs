//! Clients on other hosts, by RDMA. The shard fetches their blocks from their memory when it has room, or they write
//! blocks into granted slots. They fetch versions by themselves, without a message to this shard.
//!
//! | module | holds |
//! |---|---|
//! | `slots` | slots that connections share |
//!
//! This module holds `unsafe`: it reads slots that a client writes.

mod slots;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use libmodelio::transport::frames::{Conversation, Framed, Link, Outgoing, Take};
use libmodelio::transport::rdma::{
    Buffers, Device, DeviceMemory, Done, Endpoint, Finished, Placement, Pool, QueuePair, RdmaOptions,
    Registration, RemoteMemory, Slot, VerbsError, Work,
};
use libmodelio::transport::shm::{MAX_REGIONS, longest_region, longest_sum};
use libmodelio::transport::stream::Stream;
use libmodelio::vocabulary::ids::ClientId;
use libmodelio::wire::{Message, Protocol, Received, Refusal};
use parking_lot::Mutex;

use super::partition::{Partition, Push, Reservation, Reserved, Room, Sender, Shown, SumMemory};
use crate::partition::fetches::{Edge, Fetches, Turn};
use slots::{Seat, Slots};

/// The most bytes read from a ring at once.
const AHEAD: usize = 512;
/// The number of slots that a client is granted.
const GRANTED: usize = 8;
/// Longer blocks are not placed. No slots are granted for them, unless that is the only way.
const GRANT_UP_TO: usize = 1 << 20;

/// Fetches for a plan that is given up have this long to come. No other plan begins before.
const OVERDUE: Duration = Duration::from_millis(500);

/// The RDMA side of a shard.
pub(super) struct Rdma {
    endpoint: Arc<Endpoint>,
    /// The listening address.
    address: SocketAddr,
    /// The shared slots, by their size, as long as a connection uses them.
    slots: Mutex<HashMap<usize, Weak<Slots>>>,
}

impl Rdma {
    /// Opens the device, and listens at `listen`, or at `port` if that is given. `meets` makes this end of a
    /// connection to a peer, which is named for people. It returns `None` when the shard accepts no more connections.
    pub(super) fn start<C: Conversation + 'static>(
        mut listen: SocketAddr,
        port: Option<u16>,
        options: &RdmaOptions,
        far: Option<Arc<dyn DeviceMemory>>,
        meets: impl Fn(String, RdmaClient) -> Option<C> + Send + Sync + 'static,
    ) -> Result<Rdma, VerbsError> {
        let endpoint = Endpoint::over(Device::open_with(options, far)?, Protocol::NEWEST.number())?;
        // An iWARP port is a TCP port, and that one is in use.
        listen.set_port(port.unwrap_or(if endpoint.device().is_iwarp() { 0 } else { listen.port() }));
        let accept =
            move |queue_pair: &Arc<QueuePair>, peer: Option<SocketAddr>| -> Option<Box<dyn Stream>> {
                let address = peer.map_or_else(|| "an RDMA peer".to_owned(), |peer| format!("{peer} (RDMA)"));
                let end = meets(address, RdmaClient::new(queue_pair))?;
                Some(Box::new(Framed::new(end, Link::default(), AHEAD)))
            };
        let address = endpoint.listen(listen, accept)?;
        Ok(Rdma { endpoint, address, slots: Mutex::default() })
    }

    /// The listening address.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The name of the device and its port.
    pub(super) fn name(&self) -> String {
        format!("rdma on {} at {}", self.device(), self.address)
    }

    /// The name of the device.
    pub(super) fn device(&self) -> String {
        self.endpoint.device().name()
    }

    /// The number of connections.
    pub(super) fn connections(&self) -> usize {
        self.endpoint.connections()
    }

    pub(super) fn shut_down(&self, patience: Duration) {
        self.endpoint.shut_down(patience);
    }

    /// Slots for blocks of this size: as many as the options say or half of the memory left can hold, and at least
    /// two.
    fn slots(&self, bytes: usize) -> Result<Arc<Slots>, VerbsError> {
        const MIN_SLOTS: usize = 2;
        let options = self.endpoint.device().options();
        let make = || {
            let arena = self.endpoint.device().payload_arena();
            let fit = (arena.available() / 2) as usize / bytes.max(1);
            let count = options.slots.min(fit.max(MIN_SLOTS)).max(1);
            if count < options.slots {
                let wanted = options.slots;
                tracing::info!(count, wanted, bytes, "fewer slots than --rdma-slots fit into --rdma-arena");
            }
            let chunk = arena.take(bytes * count)?;
            let pool = Pool::new(chunk, bytes, options.buffers == Buffers::Looped);
            Ok(Slots::new(pool, options.buffers != Buffers::Own))
        };
        if options.buffers == Buffers::Own {
            return make();
        }
        let mut all = self.slots.lock();
        all.retain(|_, slots| slots.strong_count() > 0);
        if let Some(slots) = all.get(&bytes).and_then(Weak::upgrade) {
            return Ok(slots);
        }
        let slots = make()?;
        all.insert(bytes, Arc::downgrade(&slots));
        Ok(slots)
    }
}

/// A block in a client's memory.
struct Named {
    push: Push,
    /// The request that is answered when the client's memory is not needed any more, if the client wants to know.
    request: u64,
    from: RemoteMemory,
}

/// The shard's end of an RDMA connection to a client.
pub(super) struct RdmaClient {
    queue_pair: Arc<QueuePair>,
    /// The client's memory, by its numbers.
    regions: HashMap<u32, (RemoteMemory, u64)>,
    most_bytes: u64,
    seat: Option<Seat>,
    granted: Option<Granted>,
    /// Payloads that are fetched into slots.
    fetches: Fetches<Named, Slot>,
    /// Payloads that are fetched into their place, in order, by the token of the work.
    fetching: VecDeque<(u64, Arc<Reservation>)>,
    /// The connection ends if fetches into sums whose plan is given up have not come by then.
    overdue: Option<Instant>,
    /// The versions, and the memory that they are made in.
    shown: Option<Arc<Shown>>,
    /// Payloads that the client has written into granted slots, in order, with the request and the slot.
    placed: VecDeque<(Push, u64, u32)>,
    ready: VecDeque<Outgoing>,
    done: Done,
    /// Memory for copies out of another device's memory.
    room: Vec<u8>,
}

struct Granted {
    registration: Arc<Registration>,
    slots: Vec<Slot>,
    /// Whether each slot is in use.
    busy: Vec<bool>,
}

impl RdmaClient {
    fn new(queue_pair: &Arc<QueuePair>) -> RdmaClient {
        RdmaClient {
            queue_pair: Arc::clone(queue_pair),
            regions: HashMap::new(),
            most_bytes: 0,
            seat: None,
            granted: None,
            fetches: Fetches::default(),
            fetching: VecDeque::new(),
            overdue: None,
            shown: None,
            placed: VecDeque::new(),
            ready: VecDeque::new(),
            done: Vec::new(),
            room: Vec::new(),
        }
    }

    /// The connection is for this model. The client gets the place of the versions, and its slots.
    pub(super) fn serve(
        &mut self,
        client: ClientId,
        partition: &Partition,
        rdma: &Rdma,
        link: &Link,
    ) -> Result<(), Refusal> {
        let block = partition.layout().block_size();
        self.most_bytes = longest_region(partition.model_bytes(), partition.layout());
        self.seat =
            Some(rdma.slots(longest_sum(partition.layout())).map_err(Refusal::other)?.join(client, link));
        let shown = partition.shown(self.queue_pair.device())?;
        let RemoteMemory { address, key } = shown.place(partition.store())?;
        self.shown = Some(shown);
        self.ready.push_back(outgoing(partition, 0, Message::Directory { address, key }));
        let bytes = block as usize;
        let granted = match self.queue_pair.device().options().placement {
            Placement::Dynamic => None,
            Placement::Static => Some(self.grant(bytes).map_err(Refusal::other)?),
            Placement::Auto if bytes > GRANT_UP_TO => None,
            Placement::Auto => match self.grant(bytes) {
                Err(error @ VerbsError::Arena { .. }) => {
                    let model = &partition.model;
                    tracing::info!(%model, %error, "no slots are granted: blocks of a connection are fetched");
                    None
                }
                granted => Some(granted.map_err(Refusal::other)?),
            },
        };
        if let Some(granted) = granted {
            let RemoteMemory { address, key } = granted.registration.remote();
            let (count, bytes) = (granted.slots.len() as u32, bytes as u32);
            self.ready.push_back(outgoing(partition, 0, Message::Slots { count, bytes, address, key }));
            self.granted = Some(granted);
        }
        Ok(())
    }

    /// When to go on at the latest, if a block waits for an unknown plan.
    pub(super) fn until(&self, sender: &Sender, now: Instant) -> Option<Instant> {
        sender.until(now).into_iter().chain(self.overdue).min()
    }

    fn grant(&self, bytes: usize) -> Result<Granted, VerbsError> {
        let chunk = self.queue_pair.device().payload_arena().take(bytes * GRANTED)?;
        let registration = chunk.open()?;
        let pool = Pool::new(chunk, bytes, false);
        // The slots are in the order in which the client counts them.
        let slots: Vec<Slot> = (0..GRANTED).filter_map(|_| pool.take(None)).collect();
        Ok(Granted { registration, busy: vec![false; slots.len()], slots })
    }

    /// The message that must be sent before all others.
    pub(super) fn ready(&mut self) -> Option<Outgoing> {
        self.ready.pop_front()
    }

    /// Takes a message about RDMA. `None` if it is another one.
    pub(super) fn message(
        &mut self,
        partition: &Arc<Partition>,
        received: &Received,
    ) -> Result<Option<Take>, Refusal> {
        let request = received.header.request();
        match received.message {
            Message::ShareAt { region, bytes, address, key } => {
                let refused = |what: &str| Err(Refusal::other(format!("region {region} {what}")));
                if self.regions.len() >= MAX_REGIONS {
                    return Err(Refusal::other(format!("more than {MAX_REGIONS} regions on one connection")));
                }
                if bytes == 0 || bytes > self.most_bytes || address.checked_add(bytes).is_none() {
                    return refused(&format!("has {bytes} bytes, expected 1 to {}", self.most_bytes));
                }
                if self.regions.insert(region, (RemoteMemory { address, key }, bytes)).is_some() {
                    return refused("is there already");
                }
            }
            Message::Unshare { region } => {
                if self.regions.remove(&region).is_none() {
                    return Err(Refusal::other(format!("there is no region {region}")));
                }
            }
            Message::PushAt { region, offset, .. } => {
                let push = partition.push(received)?;
                let len = push.len;
                let Some((start, bytes)) = self.regions.get(&region) else {
                    return Err(Refusal::other(format!("there is no region {region}")));
                };
                // The place must lie within the region, whatever the client says.
                if offset.checked_add(len as u64).is_none_or(|end| end > *bytes) {
                    return Err(Refusal::other(format!("{len} bytes at {offset} leave region {region}")));
                }
                self.is_bounded(partition)?;
                self.fetches.name(Named { push, request, from: start.at(offset) });
            }
            Message::PushIn { slot, .. } => {
                let push = partition.push(received)?;
                self.is_bounded(partition)?;
                let granted = self.granted.as_mut();
                let busy = granted.and_then(|granted| granted.busy.get_mut(slot as usize));
                match busy {
                    Some(busy) if !*busy && push.len <= partition.layout().block_size() as usize => {
                        *busy = true
                    }
                    _ => return Err(Refusal::other(format!("slot {slot} is not the client's to fill"))),
                }
                self.placed.push_back((push, request, slot));
            }
            _ => return Ok(None),
        }
        Ok(Some(Take::Nothing))
    }

    /// Refuses too many named blocks. A client names a block of a plan twice at most.
    fn is_bounded(&self, partition: &Partition) -> Result<(), Refusal> {
        let most = 2 * partition.store().partition().blocks().len();
        match self.fetches.len() + self.placed.len() < most {
            true => Ok(()),
            false => Err(Refusal::other(format!("more than {most} blocks of plans to come"))),
        }
    }

    /// Continues: fetches named blocks while there is room, and reduces those that have come. The first one that must
    /// wait holds up the others.
    pub(super) fn again(&mut self, partition: &Arc<Partition>, sender: &mut Sender) -> Result<(), Refusal> {
        self.take_finished()?;
        let (Some(seat), Some(shown)) = (&self.seat, &self.shown) else { return Ok(()) };
        let now = Instant::now();
        let is_abandoned = self.fetching.front().is_some_and(|(_, reservation)| reservation.is_abandoned());
        self.overdue = is_abandoned.then(|| self.overdue.unwrap_or(now + OVERDUE));
        if self.overdue.is_some_and(|at| at <= now) {
            sender.close("a plan was given up in mid-block");
        }
        let (queue_pair, room, fetching) = (&self.queue_pair, &mut self.room, &mut self.fetching);
        let (sum_memory, waits, any) = (shown.sum_memory(), false, false);
        let mut at_work =
            AtWork { partition, sender, queue_pair, seat, sum_memory, fetching, room, waits, any };
        let stand = self.fetches.advance(&mut at_work)?;
        if at_work.any {
            queue_pair.post().map_err(Refusal::other)?;
        }
        if seat.stands(stand) {
            drop(self.fetches.give_back());
        }
        while !at_work.waits
            && let Some(&(push, request, slot)) = self.placed.front()
        {
            let Some(granted) = &mut self.granted else {
                return Err(Refusal::other("no slots were granted"));
            };
            if !at_work.reduce(push, &granted.slots[slot as usize])? {
                break;
            }
            granted.busy[slot as usize] = false;
            at_work.sender.is_done(partition, request);
            self.placed.pop_front();
        }
        Ok(())
    }

    /// Takes all fetches that have come into slots or sums, even after an error. Returns the first error.
    fn take_finished(&mut self) -> Result<(), Refusal> {
        self.queue_pair.take(&mut self.done);
        let (mut came, mut outcome) = (0, Ok(()));
        for Finished { token, work } in self.done.drain(..) {
            match work {
                Work::Read { slot, .. } => {
                    self.fetches.came(Some(slot));
                    came += 1;
                }
                Work::ReadTo { target, .. } => {
                    drop(target);
                    let counts = match self.fetching.pop_front_if(|(of, _)| *of == token) {
                        Some((_, reservation)) => reservation.complete_fetched(),
                        None => Err(Refusal::other("a block came that was not fetched")),
                    };
                    self.fetches.came(None);
                    outcome = outcome.and(counts);
                }
                Work::Write { .. } | Work::Ring { .. } => {}
            }
        }
        if came > 0
            && let Some(seat) = &self.seat
        {
            seat.came(came);
        }
        outcome
    }

    /// This end takes nothing more, though the connection stays for a while. Finished fetches into sums count. Slots
    /// are given back, so that nobody waits for them.
    pub(super) fn given_up(&mut self) {
        // The connection is being refused already.
        drop(self.take_finished());
        drop(self.fetches.give_back());
    }

    /// The connection has ended, and with it the fetches under way.
    pub(super) fn closed(&mut self) {
        // Until this is done, nobody may use the memory for anything else.
        self.queue_pair.end();
        self.queue_pair.take(&mut self.done);
        self.done.clear();
        self.fetching.clear();
    }
}

/// A connection with its partition, at work.
struct AtWork<'a> {
    partition: &'a Arc<Partition>,
    sender: &'a mut Sender,
    queue_pair: &'a QueuePair,
    seat: &'a Seat,
    sum_memory: &'a Arc<SumMemory>,
    fetching: &'a mut VecDeque<(u64, Arc<Reservation>)>,
    room: &'a mut Vec<u8>,
    /// Whether the first named block must wait.
    waits: bool,
    /// Whether there is work to post.
    any: bool,
}

impl AtWork<'_> {
    /// Reduces a block. False if it has to wait.
    fn reduce(&mut self, push: Push, slot: &Slot) -> Result<bool, Refusal> {
        match self.partition.reserve(self.sender, push, Room::None)? {
            Reserved::Later => return Ok(false),
            Reserved::Ready(reservation) => {
                let bytes = match slot.copied_out(push.len, self.room).map_err(Refusal::other)? {
                    Some(copied) => copied,
                    // SAFETY: the kernels only add the bytes and check whether they are finite. Their control flow
                    // depends on the length alone.
                    None => unsafe { slot.bytes(push.len) },
                };
                reservation.complete(bytes, || true)?;
            }
            Reserved::Kept | Reserved::Skip => {}
        }
        Ok(true)
    }
}

impl Edge<Named, Slot> for AtWork<'_> {
    type Error = Refusal;

    fn turn(&mut self, what: &Named) -> Result<Turn, Refusal> {
        let turn = self.partition.turn(self.sender, &what.push);
        self.waits = turn == Turn::Later;
        Ok(turn)
    }

    fn is_due(&mut self, what: &Named) -> bool {
        self.partition.is_due(self.sender, &what.push)
    }

    fn reduce_fetched(&mut self, what: &Named, slot: &Slot) -> Result<bool, Refusal> {
        let reduced = self.reduce(what.push, slot)?;
        self.waits = !reduced;
        Ok(reduced)
    }

    fn over(&mut self, what: Named) {
        self.sender.is_done(self.partition, what.request);
    }

    fn fetch_direct(&mut self, what: &Named) -> Result<bool, Refusal> {
        if !self.sum_memory.may_be_registered() || self.queue_pair.room(1) == 0 {
            return Ok(false);
        }
        let mut registration = None;
        let mut suits = |start, len| {
            registration = self.sum_memory.registration_of(start, len);
            registration.is_some()
        };
        let reserved = self.partition.reserve(self.sender, what.push, Room::Sum(&mut suits))?;
        let (Reserved::Ready(reservation), Some(registration)) = (reserved, registration) else {
            return Ok(false);
        };
        let (Some(target), reservation) = reservation.fetch() else { return Ok(false) };
        let token = self.fetching.back().map_or(0, |(token, _)| token + 1);
        self.queue_pair.read_to(token, target, registration, what.from).map_err(Refusal::other)?;
        self.fetching.push_back((token, reservation));
        self.any = true;
        Ok(true)
    }

    fn has_room(&self) -> bool {
        self.queue_pair.room(1) > 0 && self.seat.may_begin()
    }

    fn is_pressed(&self) -> bool {
        self.seat.is_pressed()
    }

    fn slot(&mut self) -> Option<Slot> {
        self.seat.take(self.queue_pair.connection())
    }

    fn fetch(&mut self, what: &Named, slot: Slot) -> Result<(), Refusal> {
        let read = self.queue_pair.read(0, slot, what.push.len, what.from, false);
        read.map_err(|(error, _)| Refusal::other(error))?;
        self.seat.began();
        self.any = true;
        Ok(())
    }
}

fn outgoing(partition: &Partition, request: u64, message: Message) -> Outgoing {
    Outgoing { epoch: partition.epoch, ..Outgoing::new(request, message) }
}
