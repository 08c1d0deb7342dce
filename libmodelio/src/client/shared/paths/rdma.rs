//! Connections to shards by RDMA. The shard fetches the client's blocks, or the client places them in the shard's
//! slots. The client fetches blocks of versions from the shard's memory.
//!
//! This module holds `unsafe`; the place says why it is sound.

mod fetching;
mod unchanged;

use std::collections::HashMap;
use std::net::ToSocketAddrs;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use self::fetching::{Fetch, PUT};
use super::Connection;
use super::named::{AHEAD, Named, PeerMemory, Placed};
use crate::bytes::mmap::Mapping;
use crate::client::conversation::Data;
use crate::client::options::ClientOptions;
use crate::client::peers::fallback::FastPath;
use crate::client::peers::peer::EndOfLoan;
use crate::client::peers::routes::Route;
use crate::client::shared::Shared;
use crate::transport::frames::{Framed, Link};
use crate::transport::rdma::published::DIRECTORY;
use crate::transport::rdma::{Done, Endpoint, Placement, Pool, QueuePair, RemoteMemory, VerbsError};
use crate::transport::shm::MAX_REGIONS;
use crate::transport::stream::{Close, Guard, LentPayload, Stream};
use crate::vocabulary::ids::BlockId;
use crate::vocabulary::layout::PartitionLayout;
use crate::wire::{Message, Protocol, Received};

/// The most reads of the directory, or of its entries, that may be under way on one connection.
const MAX_DIRECTORY_READS: usize = 16;
/// By default, blocks up to this size are placed, and longer ones fetched. The best size on real devices is not
/// measured.
const PLACE_UP_TO: usize = 64 << 10;

/// The client's end of one connection by RDMA.
struct RdmaPath {
    queue_pair: Arc<QueuePair>,
    /// The layout of the shard's partition.
    layout: PartitionLayout,
    /// Memory that the shard may fetch from, by its address.
    shared: HashMap<usize, (u32, Weak<Mapping>)>,
    last: u32,
    directory: Option<RemoteMemory>,
    /// Memory that the directory is read into.
    directory_reads: Arc<Pool>,
    granted: Option<Granted>,
    pull: Fetch,
    done: Done,
    /// The log says that versions come through the ring.
    said: bool,
}

/// The shard's slots that this client writes.
struct Granted {
    start: RemoteMemory,
    bytes: u32,
    count: u32,
    free: Vec<u32>,
}

impl RdmaPath {
    fn new(queue_pair: &Arc<QueuePair>, layout: PartitionLayout) -> Result<RdmaPath, VerbsError> {
        let chunk = queue_pair.device().arena().take(MAX_DIRECTORY_READS * DIRECTORY)?;
        Ok(RdmaPath {
            queue_pair: Arc::clone(queue_pair),
            layout,
            shared: HashMap::new(),
            last: 0,
            directory: None,
            directory_reads: Pool::new(chunk, DIRECTORY, false),
            granted: None,
            pull: Fetch::default(),
            done: Vec::new(),
            said: false,
        })
    }

    /// Writes a range of `memory` into a free slot of the shard's, and returns its number.
    fn write(&mut self, memory: &Arc<Mapping>, range: Range<usize>) -> Result<Option<u32>, String> {
        let Some(granted) = self.granted.as_mut().filter(|_| self.queue_pair.room(1) > 0) else {
            return Ok(None);
        };
        let Some(slot) = granted.free.pop() else { return Ok(None) };
        // SAFETY: a block that is sent is whole, and nobody writes it again in this contribution. The next one lies
        // elsewhere if this one's plan was dropped. It goes without a checksum.
        let piece = unsafe { LentPayload::new(memory.bytes(range), None, Arc::clone(memory) as Guard) };
        let to = granted.start.at(u64::from(slot) * u64::from(granted.bytes));
        let placed = self.queue_pair.device().register(memory).and_then(|registration| {
            self.queue_pair.write(PUT, piece, registration, to)?;
            self.queue_pair.post()
        });
        match placed {
            Ok(()) => Ok(Some(slot)),
            Err(error) => {
                granted.free.push(slot);
                Err(error.to_string())
            }
        }
    }

    /// Whether a block of this length in `memory` is placed, and whether that is the only way.
    fn places(&self, len: usize, memory: &Arc<Mapping>) -> (bool, bool) {
        let fits = self.granted.as_ref().is_some_and(|granted| len <= granted.bytes as usize)
            && self.queue_pair.device().register(memory).is_ok();
        match self.queue_pair.device().options().placement {
            Placement::Static => (fits, fits),
            Placement::Dynamic => (false, false),
            Placement::Auto => (fits && len <= PLACE_UP_TO, false),
        }
    }
}

impl PeerMemory for RdmaPath {
    const FAST: FastPath = FastPath::Rdma;

    const IS_READ_BY_DEVICE: bool = true;

    fn threads(options: &ClientOptions) -> usize {
        options.rdma.queues
    }

    fn lend(&mut self, memory: &Arc<Mapping>) -> Result<(u32, Option<Message>), String> {
        let key = Arc::as_ptr(memory).addr();
        if let Some((number, known)) = self.shared.get(&key)
            && known.strong_count() > 0
        {
            return Ok((*number, None));
        }
        if self.shared.len() >= MAX_REGIONS {
            return Err(format!("more than {MAX_REGIONS} regions on one connection"));
        }
        let registration = self.queue_pair.device().register(memory).map_err(|error| error.to_string())?;
        self.last = self.last.wrapping_add(1);
        let RemoteMemory { address, key: remote_key } = registration.remote();
        let (region, bytes) = (self.last, memory.len() as u64);
        self.shared.insert(key, (region, Arc::downgrade(memory)));
        Ok((region, Some(Message::ShareAt { region, bytes, address, key: remote_key })))
    }

    fn gone(&mut self) -> Vec<u32> {
        // One pass: another thread may let go of the last reference at any time.
        let gone = self.shared.extract_if(|_, (_, memory)| memory.strong_count() == 0);
        gone.map(|(_, (number, _))| number).collect()
    }

    fn end_of_loan(&self) -> EndOfLoan {
        let queue_pair = Arc::clone(&self.queue_pair);
        Box::new(move || {
            // The device never reads what it has not read by then.
            queue_pair.end();
            queue_pair.break_off("memory that was lent is needed back".into());
        })
    }

    fn place(&mut self, from: &Arc<Mapping>, range: Range<usize>) -> Placed {
        let (may, must) = self.places(range.len(), from);
        if !may {
            return Placed::Not;
        }
        match self.write(from, range) {
            Ok(Some(slot)) => Placed::In(slot),
            Ok(None) if !must => Placed::Not,
            Ok(None) => Placed::Later,
            Err(error) => {
                // The connection is broken. Another one sends its blocks.
                tracing::debug!(error, "a block is not placed");
                Placed::Later
            }
        }
    }

    fn freed(&mut self, slot: u64) -> bool {
        let (Ok(slot), Some(granted)) = (u32::try_from(slot), &mut self.granted) else { return false };
        let was_used = slot < granted.count && !granted.free.contains(&slot);
        if was_used {
            granted.free.push(slot);
        }
        was_used
    }

    fn receive(&mut self, to: &Connection, received: &Received) -> Result<bool, Close> {
        match &received.message {
            &Message::Directory { address, key } => self.directory = Some(RemoteMemory { address, key }),
            Message::Unchanged { version, base, blocks } => self.take_unchanged(*version, *base, blocks),
            &Message::Slots { count, bytes, address, key } => {
                if self.granted.is_some() || count > 1 << 16 {
                    return Err(Close::Asked("slots were granted before, or too many".into()));
                }
                let (start, free) = (RemoteMemory { address, key }, (0..count).rev().collect());
                self.granted = Some(Granted { start, bytes, count, free });
            }
            Message::Share { .. } | Message::Unshare { .. } | Message::BlockAt { .. } => {
                return Err(Close::Asked("there is no memory in common".into()));
            }
            _ => return Ok(false),
        }
        to.link.wake();
        Ok(true)
    }

    fn fetches(&mut self, to: &Connection) -> bool {
        let Some(directory) = self.directory else { return true };
        if let Err(error) = self.fetch(to, directory) {
            self.queue_pair.give_up(&error);
        }
        !self.pull.by_ring
    }

    fn tick(&mut self, to: &Connection) -> Option<Instant> {
        self.take_finished(to)
    }

    fn closed(&mut self, to: &Connection) {
        self.give_up_fetching(to);
    }
}

impl Shared {
    /// Opens a connection by RDMA, or another one if that does not come about and is not required.
    pub(in crate::client) fn connect_by_rdma(&self, route: Route) {
        match self.open_rdma_endpoint() {
            Ok(endpoint) => self.connect_over(&endpoint, route),
            Err(why) => self.without(FastPath::Rdma, route, &why),
        }
    }

    /// The RDMA device. It is opened when it is first needed. If that fails, it is tried again a while later.
    fn open_rdma_endpoint(&self) -> Result<Arc<Endpoint>, String> {
        const RETRY_AFTER: Duration = Duration::from_secs(2);
        let mut known = self.rdma_endpoint.lock();
        match &*known {
            Some(Ok(endpoint)) => return Ok(Arc::clone(endpoint)),
            Some(Err((why, at))) if at.elapsed() < RETRY_AFTER => return Err(why.clone()),
            Some(Err(_)) | None => {}
        }
        let opened =
            Endpoint::open(&self.options.rdma, Protocol::NEWEST.number()).map_err(|error| error.to_string());
        *known = Some(opened.clone().map_err(|why| (why, Instant::now())));
        opened
    }

    fn connect_over(&self, endpoint: &Arc<Endpoint>, route: Route) {
        let (Some(this), endpoint) = (self.this.upgrade(), Arc::clone(endpoint)) else { return };
        let patience = self.options.patience.min(Duration::from_secs(5));
        let of_failure = route.clone();
        let begin = move || {
            if let Err(why) = this.register_next(&endpoint) {
                return this.without(FastPath::Rdma, route, &why);
            }
            let address = route.routes.partitions[route.partition].record.rdma.clone();
            let to = match address.to_socket_addrs().map(|mut all| all.next()) {
                Ok(Some(to)) => to,
                Ok(None) => return this.without(FastPath::Rdma, route, "its address leads nowhere"),
                Err(error) => return this.without(FastPath::Rdma, route, &format!("{address}: {error}")),
            };
            let number = route.partition + route.number;
            endpoint.connect(to, Instant::now() + patience, number, move |queue_pair| {
                let queue_pair = match queue_pair {
                    Ok(queue_pair) => queue_pair,
                    Err(why) => {
                        this.without(FastPath::Rdma, route, &why);
                        return None;
                    }
                };
                let remote = this
                    .partition_layout(&route)
                    .and_then(|layout| RdmaPath::new(queue_pair, layout).map_err(|error| error.to_string()));
                match remote {
                    Ok(remote) => {
                        let conversation = Data::new(this, route, Named::new(remote));
                        Some(Box::new(Framed::new(conversation, Link::default(), AHEAD)) as Box<dyn Stream>)
                    }
                    Err(why) => {
                        this.without(FastPath::Rdma, route, &why);
                        None
                    }
                }
            });
        };
        // A thread of its own resolves names, because that may take a while.
        if let Err(error) = std::thread::Builder::new().name("client-resolver".into()).spawn(begin) {
            self.ended(&of_failure, &Link::default(), &format!("no thread to connect by RDMA: {error}"));
        }
    }

    /// Registers the memory that the next version is pulled into. It is better to know before the connection is made
    /// whether that works.
    fn register_next(&self, endpoint: &Endpoint) -> Result<(), String> {
        let next = self.inner.lock().versions.next_memory();
        next.map_or(Ok(()), |next| {
            endpoint.device().register_to_fill(&next).map(drop).map_err(|error| error.to_string())
        })
    }

    fn partition_layout(&self, route: &Route) -> Result<PartitionLayout, String> {
        let blocks: Vec<BlockId> = route.routes.partitions[route.partition]
            .owned
            .iter()
            .flat_map(|run| run.clone().map(BlockId))
            .collect();
        self.layout.partition(&blocks).map_err(|error| error.to_string())
    }
}
