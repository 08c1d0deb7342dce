//! Clients elsewhere, by RDMA: blocks that they push are fetched from their memory when there is room for them, or lie in
//! slots that they were granted; versions are theirs to fetch, without a word to this shard.
//!
//! One of the modules that hold `unsafe`: slots that a client writes are read.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use libmodelio::ids::{ClientId, Version};
use libmodelio::link::{Framed, Link, Outgoing, Take};
use libmodelio::mmap::Mapping;
use libmodelio::net::Stream;
use libmodelio::published::Directory;
use libmodelio::rdma::verbs::{Done, Finished, Pool, Registration, Remote as Place, Slot, VerbsError, Work};
use libmodelio::rdma::{Buffers, Device, DeviceMemory, Fabric, Line, Placement, RdmaOptions};
use libmodelio::shm::{MAX_REGIONS, longest_region, longest_sum};
use libmodelio::transport::Region;
use libmodelio::wire::{Message, Received, Refusal};
use parking_lot::Mutex;

use super::Shared;
use super::conversation::Peer;
use super::part::Part;
use crate::part::store::{Payload, VersionWatch};
use crate::part::unheard::Unheard;

/// Bytes that are read from a ring at once.
const AHEAD: usize = 512;
/// Fetches that are under way on one connection, at most.
const FETCHES: usize = 16;
/// Slots that a client is granted.
const GRANTED: usize = 8;
/// Blocks longer than this are not placed: no slots are granted for them, unless that is the only way.
const GRANT_UP_TO: usize = 1 << 20;

/// RDMA of a shard.
pub(super) struct Rdma {
    fabric: Arc<Fabric>,
    /// Where it listens.
    address: SocketAddr,
    /// Slots that all connections have in common, by their size.
    pools: Mutex<HashMap<usize, Arc<Pool>>>,
}

impl Rdma {
    /// Opens the device, and takes connections at `listen`, at another port if that is given.
    pub(super) fn start(
        shared: &Arc<Shared>,
        mut listen: SocketAddr,
        port: Option<u16>,
        options: &RdmaOptions,
        far: Option<Arc<dyn DeviceMemory>>,
    ) -> Result<Rdma, VerbsError> {
        let fabric = Fabric::over(Device::open_with(options, far)?)?;
        // An iWARP port is a TCP port, and that is taken.
        listen.set_port(port.unwrap_or(if fabric.device().is_iwarp() { 0 } else { listen.port() }));
        let weak = Arc::downgrade(shared);
        let accept = move |line: &Arc<Line>, peer: Option<SocketAddr>| -> Option<Box<dyn Stream>> {
            let address = peer.map_or_else(|| "an RDMA peer".to_owned(), |peer| format!("{peer} (RDMA)"));
            let peer = Peer::by_rdma(weak.upgrade()?, address, Remote::new(line));
            Some(Box::new(Framed::new(peer, Link::default(), AHEAD)))
        };
        let address = fabric.listen(listen, accept)?;
        Ok(Rdma { fabric, address, pools: Mutex::default() })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// For people.
    pub(super) fn name(&self) -> String {
        format!("rdma on {} at {}", self.device(), self.address)
    }

    /// Its device, for people.
    pub(super) fn device(&self) -> String {
        self.fabric.device().name()
    }

    /// Connections that there are.
    pub(super) fn connections(&self) -> usize {
        self.fabric.lines()
    }

    pub(super) fn shut_down(&self, patience: Duration) {
        self.fabric.shut_down(patience);
    }

    /// Slots that blocks of such a size are fetched into.
    fn pool(&self, bytes: usize) -> Result<Arc<Pool>, VerbsError> {
        let options = self.fabric.device().options();
        let make = || {
            let chunk = self.fabric.device().payload_arena().take(bytes * options.slots.max(1))?;
            Ok(Pool::new(&chunk, bytes, options.buffers == Buffers::Looped))
        };
        if options.buffers == Buffers::Own {
            return make();
        }
        let mut pools = self.pools.lock();
        if let Some(pool) = pools.get(&bytes) {
            return Ok(Arc::clone(pool));
        }
        let pool = make()?;
        pools.insert(bytes, Arc::clone(&pool));
        Ok(pool)
    }
}

/// The versions of a part, as clients find them.
#[derive(Debug)]
pub(super) struct Shown {
    device: Arc<Device>,
    directory: Mutex<Directory>,
    memory: Arc<Mapping>,
}

impl Shown {
    /// Shows the versions of `part` from now on.
    pub(super) fn of(part: &Part, device: &Arc<Device>) -> Result<Arc<Shown>, Refusal> {
        let directory = Directory::new().map_err(Refusal::other)?;
        let memory = Arc::clone(directory.memory());
        device.register(&memory).map_err(Refusal::other)?;
        let shown = Arc::new(Shown { device: Arc::clone(device), directory: Mutex::new(directory), memory });
        part.store().watch(Arc::clone(&shown) as Arc<dyn VersionWatch>);
        Ok(shown)
    }

    fn place(&self) -> Result<Place, Refusal> {
        self.device.register(&self.memory).map(|registration| registration.remote()).map_err(Refusal::other)
    }
}

impl VersionWatch for Shown {
    fn published(&self, version: Version, memory: &Region) {
        match self.device.register(memory.memory()) {
            Ok(registration) => {
                let Place { address, key } = registration.remote();
                let bytes = memory.memory().len() as u64;
                self.directory.lock().publish(version, address, key, bytes);
            }
            // Clients look for it in vain, and say so.
            Err(error) => tracing::error!(%version, %error, "a version cannot be fetched by RDMA"),
        }
    }

    fn retired(&self, version: Version) {
        self.directory.lock().retire(version);
    }
}

/// Where a payload is.
enum Payloads {
    /// It was fetched.
    Fetched(Slot),
    /// The client has put it into a slot that it was granted.
    Placed(u32),
}

/// What one connection has in common with a client elsewhere.
pub(super) struct Remote {
    line: Arc<Line>,
    /// The client's memory, by its numbers.
    regions: HashMap<u32, (Place, u64)>,
    most_bytes: u64,
    pool: Option<Arc<Pool>>,
    granted: Option<Granted>,
    /// Named, and not being fetched yet.
    named: VecDeque<(Received, Place, usize)>,
    /// Being fetched, in order.
    fetching: VecDeque<(Received, usize)>,
    /// There, in order.
    there: VecDeque<(Received, Payloads, usize)>,
    ready: VecDeque<Outgoing>,
    done: Done,
    /// For what is copied out of another device's memory.
    room: Vec<u8>,
}

struct Granted {
    registration: Arc<Registration>,
    slots: Vec<Slot>,
    /// Being used, by slot.
    busy: Vec<bool>,
}

impl Remote {
    fn new(line: &Arc<Line>) -> Remote {
        Remote {
            line: Arc::clone(line),
            regions: HashMap::new(),
            most_bytes: 0,
            pool: None,
            granted: None,
            named: VecDeque::new(),
            fetching: VecDeque::new(),
            there: VecDeque::new(),
            ready: VecDeque::new(),
            done: Vec::new(),
            room: Vec::new(),
        }
    }

    /// It is of this model: the client hears where versions are, and which slots are its own.
    pub(super) fn serve(&mut self, part: &Part, rdma: &Rdma) -> Result<(), Refusal> {
        let block = part.layout().block_size();
        self.most_bytes = longest_region(part.model_bytes(), block);
        self.pool = Some(rdma.pool(longest_sum(block)).map_err(Refusal::other)?);
        let Place { address, key } = part.shown(self.line.device())?.place()?;
        self.ready.push_back(saying(part, 0, Message::Directory { address, key }));
        let bytes = block as usize;
        let grant = match self.line.device().options().placement {
            Placement::Dynamic => false,
            Placement::Static => true,
            Placement::Auto => bytes <= GRANT_UP_TO,
        };
        if grant {
            let granted = self.grant(bytes).map_err(Refusal::other)?;
            let Place { address, key } = granted.registration.remote();
            let (count, bytes) = (granted.slots.len() as u32, bytes as u32);
            self.ready.push_back(saying(part, 0, Message::Slots { count, bytes, address, key }));
            self.granted = Some(granted);
        }
        Ok(())
    }

    fn grant(&self, bytes: usize) -> Result<Granted, VerbsError> {
        let chunk = self.line.device().payload_arena().take(bytes * GRANTED)?;
        let registration = chunk.open()?;
        let pool = Pool::new(&chunk, bytes, false);
        // In order, as the client counts them.
        let slots: Vec<Slot> = (0..GRANTED).filter_map(|_| pool.take(None)).collect();
        Ok(Granted { registration, busy: vec![false; slots.len()], slots })
    }

    /// What is to be said before anything else.
    pub(super) fn ready(&mut self) -> Option<Outgoing> {
        self.ready.pop_front()
    }

    /// A message that has to do with RDMA. `None` if it is another one.
    pub(super) fn message(&mut self, part: &Arc<Part>, received: &Received) -> Result<Option<Take>, Refusal> {
        match received.message {
            Message::ShareAt { region, bytes, address, key } => {
                let refused = |what: &str| Err(Refusal::other(format!("region {region} {what}")));
                if self.regions.len() >= MAX_REGIONS {
                    return Err(Refusal::other(format!("more than {MAX_REGIONS} regions on one connection")));
                }
                if bytes == 0 || bytes > self.most_bytes || address.checked_add(bytes).is_none() {
                    return refused(&format!("has {bytes} bytes, expected 1 to {}", self.most_bytes));
                }
                if self.regions.insert(region, (Place { address, key }, bytes)).is_some() {
                    return refused("is there already");
                }
            }
            Message::Unshare { region } => {
                if self.regions.remove(&region).is_none() {
                    return Err(Refusal::other(format!("there is no region {region}")));
                }
            }
            Message::PushAt { block, wide, region, offset, .. } => {
                let len = wanted(part, block, wide)?;
                let Some((start, bytes)) = self.regions.get(&region) else {
                    return Err(Refusal::other(format!("there is no region {region}")));
                };
                // Wherever it is said to lie, it lies within the region.
                if offset.checked_add(len as u64).is_none_or(|end| end > *bytes) {
                    return Err(Refusal::other(format!("{len} bytes at {offset} leave region {region}")));
                }
                self.is_bounded(part)?;
                self.named.push_back((received.clone(), start.at(offset), len));
            }
            Message::PushIn { block, wide, slot, .. } => {
                let len = wanted(part, block, wide)?;
                self.is_bounded(part)?;
                let granted = self.granted.as_mut();
                let busy = granted.and_then(|granted| granted.busy.get_mut(slot as usize));
                match busy {
                    Some(busy) if !*busy && len <= part.layout().block_size() as usize => *busy = true,
                    _ => return Err(Refusal::other(format!("slot {slot} is not the client's to fill"))),
                }
                self.there.push_back((received.clone(), Payloads::Placed(slot), len));
            }
            _ => return Ok(None),
        }
        Ok(Some(Take::Nothing))
    }

    /// A client names each block of a plan once, and once more when it has looked after it.
    fn is_bounded(&self, part: &Part) -> Result<(), Refusal> {
        let most = 2 * part.store().part().blocks().len();
        match self.named.len() + self.fetching.len() + self.there.len() < most {
            true => Ok(()),
            false => Err(Refusal::other(format!("more than {most} blocks of plans to come"))),
        }
    }

    /// Goes on: fetches what was named, as there is room, and reduces what is there. The first one that has to wait
    /// holds up the others.
    pub(super) fn again(
        &mut self,
        client: ClientId,
        part: &Arc<Part>,
        unheard: &mut Unheard,
        link: &Link,
    ) -> Result<(), Refusal> {
        self.line.take(&mut self.done);
        for Finished { work, .. } in self.done.drain(..) {
            if let (Work::Read { slot, .. }, Some((received, len))) = (work, self.fetching.pop_front()) {
                self.there.push_back((received, Payloads::Fetched(slot), len));
            }
        }
        self.fetch()?;
        while let Some((received, payload, len)) = self.there.front() {
            let slot = match payload {
                Payloads::Fetched(slot) => slot,
                Payloads::Placed(slot) => {
                    match self.granted.as_ref().map(|granted| &granted.slots[*slot as usize]) {
                        Some(slot) => slot,
                        None => return Err(Refusal::other("no slots were granted")),
                    }
                }
            };
            match part.arrive(client, received, unheard, link)? {
                (Take::Later, _) => break,
                (_, Some(landing)) => {
                    let bytes = match slot.copied_out(*len, &mut self.room).map_err(Refusal::other)? {
                        Some(copied) => copied,
                        // SAFETY: what is made of it is sums, and whether all of it is finite. The kernels' ways through
                        // it are those of its length.
                        None => unsafe { slot.bytes(*len) },
                    };
                    part.landed(landing, bytes, link)?;
                }
                (_, None) => {}
            }
            let request = received.header.request();
            if let (Payloads::Placed(slot), Some(granted)) = (payload, &mut self.granted) {
                granted.busy[*slot as usize] = false;
            }
            self.there.pop_front();
            if request != 0 {
                link.send(saying(part, request, Message::Done));
            }
        }
        // There may be slots now.
        self.fetch()
    }

    fn fetch(&mut self) -> Result<(), Refusal> {
        let Some(pool) = &self.pool else { return Ok(()) };
        let mut any = false;
        while self.fetching.len() < FETCHES && self.line.room() > 0 && !self.named.is_empty() {
            let Some(slot) = pool.take(self.line.connection()) else { break };
            let Some((received, from, len)) = self.named.pop_front() else { break };
            self.line.read(0, slot, len, from, false).map_err(|(error, _)| Refusal::other(error))?;
            self.fetching.push_back((received, len));
            any = true;
        }
        if any { self.line.post().map_err(Refusal::other) } else { Ok(()) }
    }
}

/// Bytes of a block's payload.
fn wanted(part: &Part, block: libmodelio::ids::BlockId, wide: bool) -> Result<usize, Refusal> {
    let local = part.store().part().local(block).ok_or(Refusal::NotMine { block })?;
    let payload = if wide { Payload::Wide(&[]) } else { Payload::Plain(&[]) };
    Ok(payload.wanted_len(part.layout(), local))
}

fn saying(part: &Part, request: u64, message: Message) -> Outgoing {
    Outgoing { epoch: part.epoch, ..Outgoing::new(request, message) }
}
