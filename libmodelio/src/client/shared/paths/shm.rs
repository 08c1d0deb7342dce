//! Connections to shards on this host, through shared memory. A model with one shard is shown from the shard's own
//! memory. For other models this end copies blocks of versions from the shard's memory into the back buffer.
//!
//! This module holds `unsafe`; the place says why it is sound.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

use super::Connection;
use super::named::{AHEAD, Named, PeerMemory};
use crate::bytes::mmap::Mapping;
use crate::bytes::region::{Region, RegionKey};
use crate::client::conversation::Data;
use crate::client::core::Whole;
use crate::client::options::ClientOptions;
use crate::client::peers::fallback::FastPath;
use crate::client::peers::peer::EndOfLoan;
use crate::client::peers::routes::Route;
use crate::client::shared::Shared;
use crate::transport::frames::{Framed, Link, Outgoing};
use crate::transport::shm::{self, Descriptors, Lender, Regions};
use crate::transport::stream::Close;
use crate::transport::tally::Flow;
use crate::vocabulary::ids::{BlockId, Epoch, Version};
use crate::wire::{Message, Received};

/// The longest wait for a shard to accept this end's rings.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(2);
/// The number of such waits before another path is taken, if the options allow one.
const TRIES: u32 = 2;

/// Memory that both ends map.
struct OfHost {
    descriptors: Descriptors,
    lent: Lender,
    borrowed: Regions,
    /// The log says that versions are shown where they lie.
    said: bool,
    kept: Kept,
}

/// Versions in the shard's memory that programs outside may have: its regions, and the requests that the shard waits for.
type Kept = Arc<Mutex<Vec<(u32, u64)>>>;

impl PeerMemory for OfHost {
    const FAST: FastPath = FastPath::SharedMemory;

    /// A shard has a mapping of its own, of memory that the client does not write again.
    const IS_READ_BY_DEVICE: bool = false;

    fn threads(options: &ClientOptions) -> usize {
        options.threads
    }

    fn lend(&mut self, memory: &Arc<Mapping>) -> Result<(u32, Option<Message>), String> {
        let (region, new) = self.lent.lend(memory, &self.descriptors).map_err(|error| error.to_string())?;
        Ok((region, new.map(|bytes| Message::Share { region, bytes })))
    }

    fn gone(&mut self) -> Vec<u32> {
        self.lent.gone()
    }

    fn end_of_loan(&self) -> EndOfLoan {
        let descriptors = self.descriptors.clone();
        // The shard checks the loan after it has read.
        Box::new(move || descriptors.hang_up())
    }

    fn receive(&mut self, to: &Connection, received: &Received) -> Result<bool, Close> {
        let asked = |error: shm::RegionError| Close::Asked(error.to_string().into());
        match received.message {
            Message::Share { region, bytes } => {
                self.borrowed.share(region, bytes, &self.descriptors).map_err(asked)?;
            }
            Message::Unshare { region } => self.borrowed.unshare(region).map_err(asked)?,
            Message::VersionAt { version, region } => {
                let memory = self.borrowed.whole(region, to.shared.layout.size() as usize).map_err(asked)?;
                if !std::mem::replace(&mut self.said, true) {
                    let (model, address) = (&to.shared.model, to.route.address());
                    tracing::info!(%model, address, "versions are shown where they lie, in the shard's memory");
                }
                let (link, epoch, request) = (to.link.clone(), to.route.epoch(), received.header.request());
                let shown = Region::new(memory, RegionKey(region.into()));
                let hold = Hold { link, epoch, request, region: shown.clone(), kept: Arc::clone(&self.kept) };
                to.shared.show_at(&to.route, version, shown, hold);
                // Where the shard has let go of the memory, it may know that nothing is shown.
                for (_, request) in self.kept.lock().extract_if(.., |(of, _)| !self.borrowed.has(*of)) {
                    to.link
                        .send(Outgoing { epoch: to.route.epoch(), ..Outgoing::new(request, Message::Done) });
                }
            }
            Message::BlockAt { version, block, region, offset } => {
                let layout = &to.shared.layout;
                if block.0 >= layout.blocks() {
                    return Err(Close::Asked(format!("block {block} is outside of the model").into()));
                }
                let extent = layout.block_bytes(block);
                let len = (extent.end - extent.start) as usize;
                let piece = self.borrowed.piece(region, offset, len).map_err(asked)?;
                copy(to, version, block, &piece)?;
                let done = Outgoing::new(received.header.request(), Message::Done);
                to.link.send(Outgoing { epoch: to.route.epoch(), ..done });
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn fetches(&mut self, to: &Connection) -> bool {
        let Connection { shared, route, link } = to;
        let mut inner = shared.inner.lock();
        // One connection asks, so that each of the shard's buffers is mapped once.
        let asks = inner.peers.is_in_force(route) && inner.uses(route.partition, link, 1);
        let (retain, max) = inner.bounds();
        let wants = asks && inner.core.pulling().is_some();
        // Without room, the version is asked for when another one is given back.
        let asks = wants && inner.versions.has_room(retain, max);
        if wants {
            inner.core.set_no_buffer(!asks);
        }
        match inner.core.pull_whole(asks, shared.now()) {
            Whole::Ask(version) => {
                let pull = Outgoing::new(0, Message::PullWhole { version });
                link.send(Outgoing { epoch: route.epoch(), ..pull });
                true
            }
            Whole::Awaited => true,
            Whole::Not => false,
        }
    }
}

/// Keeps a version in the shard's memory unchanged.
struct Hold {
    link: Link,
    epoch: Epoch,
    request: u64,
    region: Region,
    kept: Kept,
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A program outside may go on reading it: to the shard, this end goes on showing it.
        if self.region.memory().is_lent() {
            return self.kept.lock().push((self.region.key().0 as u32, self.request));
        }
        // If the connection has ended, the shard never writes that memory again.
        let done = Outgoing::new(self.request, Message::Done);
        self.link.send(Outgoing { epoch: self.epoch, ..done });
    }
}

fn copy(to: &Connection, version: Version, block: BlockId, from: &shm::BorrowedRange) -> Result<(), Close> {
    let shared = &to.shared;
    let Some(mut target) = shared.reserve(&to.route, version, block) else { return Ok(()) };
    let (start, len) = from.raw();
    // SAFETY: the region is mapped as long as the piece lives, and the back buffer is other memory.
    let copied = unsafe { target.copy_from(start, len) };
    drop(target);
    let whole = copied.is_ok();
    if whole {
        shared.accounts.tally.moved(Flow::Pull, len);
        shared.accounts.tally.copied(Flow::Pull, len);
    }
    shared.end_reservation(version, block, whole);
    copied
}

impl Shared {
    /// Shows a version in the shard's memory, if it is the one that is pulled.
    fn show_at(&self, route: &Route, version: Version, region: Region, hold: Hold) {
        let mut inner = self.inner.lock();
        let mut actions = Vec::new();
        if inner.peers.is_in_force(route) && inner.core.is_here(version, &mut actions) {
            self.accounts.tally.moved(Flow::Pull, region.memory().len());
            inner.versions.show(version, region, SystemTime::now(), Arc::new(hold));
        }
        self.act(inner, actions);
    }

    /// Opens a connection to a shard on this host: by shared memory, or by TCP if that fails and the options allow
    /// it.
    pub(in crate::client) fn connect_by_memory(&self, route: Route) {
        let Some(this) = self.this.upgrade() else { return };
        let of_thread = route.clone();
        let spawned = route.routes.threads.spawn(move |threads| {
            let route = of_thread;
            let meeting = match shm::meet(route.address(), ACCEPT_TIMEOUT) {
                Ok(meeting) => meeting,
                Err(error) if error.is_transient() && this.meets_again(&route) => {
                    let why = format!("shared memory: {error}");
                    return this.ended(&route, &Link::default(), &why);
                }
                Err(error) => return this.without(FastPath::SharedMemory, route, &error.to_string()),
            };
            let longest = shm::longest_region(this.layout.size(), &this.layout);
            let memory = OfHost {
                descriptors: Descriptors::new(Arc::clone(&meeting.socket)),
                lent: Lender::default(),
                borrowed: Regions::new(longest),
                said: false,
                kept: Kept::default(),
            };
            let conversation = Data::new(this, route, Named::new(memory));
            threads.serve(meeting, Box::new(Framed::new(conversation, Link::default(), AHEAD)));
        });
        if let Err(error) = spawned {
            self.without(FastPath::SharedMemory, route, &error.to_string());
        }
    }

    /// Whether to try a shard again that did not answer. A shard that is stopped or overloaded may answer later.
    /// Another process that has taken its socket never does.
    fn meets_again(&self, route: &Route) -> bool {
        let mut inner = self.inner.lock();
        if !inner.peers.is_in_force(route) {
            return true;
        }
        let peer = &mut inner.peers.partitions[route.partition];
        peer.unmet += 1;
        peer.unmet < TRIES
    }
}
