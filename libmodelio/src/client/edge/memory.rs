//! Connections to shards on this host, through shared memory: blocks are named, not sent.
//!
//! A learner's staging region is shared with the shard once, and blocks of it are reduced where they lie. Sums of
//! several learners are made in slots of a region that belongs to the connection; the shard says when it is done with
//! one. If the connection ends before that, the slot is not used again, for the shard may still be reading it. Blocks
//! of versions are copied from the shard's memory into the back buffer, by this end.
//!
//! Holds `unsafe`; what makes it sound is told at each place.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::MutexGuard;

use super::connections::EndOfLoan;
#[cfg(feature = "rdma")]
use super::fabric::{self, Remote};
use super::{Inner, Shared, Shortcut, Way};
use crate::bytes::mmap::Mapping;
use crate::client::ClientOptions;
use crate::client::conversation::Data;
use crate::client::core::Part;
use crate::client::sum;
use crate::transport::frames::{Framed, Link, Outgoing};
use crate::transport::shm::{self, Descriptors, Lender, Meeting, RegionError, Regions};
use crate::transport::stream::Close;
#[cfg(feature = "rdma")]
use crate::transport::stream::{Guard, Piece};
use crate::transport::tally::Flow;
use crate::vocabulary::ids::{BlockId, PlanId, Version};
use crate::wire::{Message, Received};

/// Longest wait for a shard to take this end's rings.
const PATIENCE: Duration = Duration::from_secs(2);
/// Times that this is waited for before bytes go another way, if they may.
const TRIES: u32 = 2;
/// Bytes that are read from a ring at once: some frames, so that what they ask for is answered between.
const AHEAD: usize = 512;
/// Blocks that are named before the shard hears of them: it is to begin soon, and on all connections.
const AT_ONCE: u32 = 4;
/// After so many bytes that were named the shard is asked to say when it has used them,
const SAY_AFTER: u32 = 1 << 20;
/// and so many times it may be asked without having said so: what one connection has not named, another one can.
const UNSAID: usize = 2;
/// Bytes of a version that one connection asks for ahead, for the same reason.
const ASKED: u32 = 2 << 20;
/// Sums that the shard may have before it.
const SLOTS: u32 = shm::SUMS;

/// Which way bytes are to go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// Shared memory to shards on this host; RDMA to others that take it; TCP where neither comes about, and the log says
    /// why.
    #[default]
    Auto,
    /// TCP, to all of them.
    Tcp,
    /// Shared memory, or not at all.
    SharedMemory,
    /// RDMA, or not at all.
    Rdma,
}

/// What one connection has in common with a shard.
pub(in crate::client) struct Memory {
    pub(super) way: Way,
    pub(super) common: Common,
    /// What is to be said next.
    ready: VecDeque<Outgoing>,
    /// A block whose sum waits for a slot.
    held: Option<(PlanId, BlockId)>,
    slots: Option<Slots>,
    /// Blocks that were named since the shard could last hear of them.
    named: u32,
    /// Blocks that were named since the shard was last asked to say when it has used them.
    since_asked: u32,
    /// The requests by which it was, and has not said so.
    unsaid: VecDeque<u64>,
    /// Of pushes from slots are those up to [`SLOTS`].
    last_request: u64,
    /// It was said that contributions go through the ring.
    said: bool,
}

/// How the two ends come by each other's memory.
pub(super) enum Common {
    /// Both see it.
    Host { descriptors: Descriptors, lent: Lender, borrowed: Regions },
    /// Their devices reach it.
    #[cfg(feature = "rdma")]
    Rdma(Box<Remote>),
}

impl Common {
    /// What the shard shares, and how its descriptors come.
    fn host(&mut self) -> Result<(&mut Regions, &Descriptors), Close> {
        match self {
            Common::Host { borrowed, descriptors, .. } => Ok((borrowed, descriptors)),
            #[cfg(feature = "rdma")]
            Common::Rdma(_) => Err(Close::Asked("there is no memory in common".into())),
        }
    }
}

/// Memory for sums.
struct Slots {
    memory: Arc<Mapping>,
    bytes: usize,
    free: Vec<u32>,
}

impl Slots {
    fn new(bytes: usize) -> std::io::Result<Slots> {
        let memory = Arc::new(Mapping::memfd("gradfs-sums", bytes * SLOTS as usize)?);
        Ok(Slots { memory, bytes, free: (0..SLOTS).rev().collect() })
    }
}

impl Memory {
    /// Of a connection of a model, of `bytes` bytes in blocks of `block` bytes.
    fn new(way: Way, meeting: &Meeting, bytes: u64, block: u32) -> Memory {
        let descriptors = Descriptors::new(Arc::clone(&meeting.socket));
        let borrowed = Regions::new(shm::longest_region(bytes, block));
        Memory::with(way, Common::Host { descriptors, lent: Lender::default(), borrowed })
    }

    /// Of a connection by RDMA.
    #[cfg(feature = "rdma")]
    pub(super) fn by_rdma(way: Way, remote: Box<Remote>) -> Memory {
        Memory::with(way, Common::Rdma(remote))
    }

    /// What ends the shard's reading of this end's memory.
    pub(in crate::client) fn end_of_loan(&self) -> EndOfLoan {
        match &self.common {
            Common::Host { descriptors, .. } => {
                let descriptors = descriptors.clone();
                // The shard looks after it has read.
                Box::new(move || descriptors.hang_up())
            }
            #[cfg(feature = "rdma")]
            Common::Rdma(remote) => {
                let queue_pair = remote.queue_pair();
                Box::new(move || {
                    // What the device has not read by then, it never reads.
                    queue_pair.end();
                    queue_pair.break_off("memory that was lent is needed back".into());
                })
            }
        }
    }

    /// Whether devices reach it.
    pub(in crate::client) fn is_by_rdma(&self) -> bool {
        match self.common {
            Common::Host { .. } => false,
            #[cfg(feature = "rdma")]
            Common::Rdma(_) => true,
        }
    }

    /// Threads that serve connections of its kind.
    fn threads(&self, options: &ClientOptions) -> usize {
        if self.is_by_rdma() { options.rdma.queues } else { options.threads }
    }

    fn with(way: Way, common: Common) -> Memory {
        Memory {
            way,
            common,
            ready: VecDeque::new(),
            held: None,
            slots: None,
            named: 0,
            since_asked: 0,
            unsaid: VecDeque::new(),
            last_request: u64::from(SLOTS),
            said: false,
        }
    }

    fn saying(&self, request: u64, message: Message) -> Outgoing {
        Outgoing { epoch: self.way.epoch(), ..Outgoing::new(request, message) }
    }

    /// Says what the shard must know of `memory`, and the number under which it does.
    fn lend(&mut self, memory: &Arc<Mapping>) -> Result<u32, String> {
        let (region, new) = match &mut self.common {
            Common::Host { descriptors, lent, .. } => {
                let (region, new) = lent.lend(memory, descriptors).map_err(|error| error.to_string())?;
                (region, new.map(|bytes| Message::Share { region, bytes }))
            }
            #[cfg(feature = "rdma")]
            Common::Rdma(remote) => remote.lend(memory)?,
        };
        if let Some(message) = new {
            self.ready.push_back(self.saying(0, message));
        }
        Ok(region)
    }

    /// The request's number of the next block that is named where it lies: 0 unless the shard is to say when it, and
    /// what was named before, is used.
    fn asks(&mut self, block: u32) -> u64 {
        self.since_asked += 1;
        if self.since_asked < SAY_AFTER / block {
            return 0;
        }
        self.since_asked = 0;
        self.last_request += 1;
        self.unsaid.push_back(self.last_request);
        self.last_request
    }

    /// What is said when nothing presses: regions that are no longer there.
    fn tidy(&mut self) {
        let gone = match &mut self.common {
            Common::Host { lent, .. } => lent.gone(),
            #[cfg(feature = "rdma")]
            Common::Rdma(remote) => remote.gone(),
        };
        for region in gone {
            self.ready.push_back(self.saying(0, Message::Unshare { region }));
        }
    }
}

/// What came of a block that is to be named.
enum Named {
    /// It is in `ready`.
    Ready,
    /// It is not wanted any more, or its payload was refused here.
    Dropped,
    /// There is no slot just now.
    Held,
}

impl Shared {
    /// Opens a connection to a shard on this host: by shared memory, or if that may be and must be, by TCP.
    pub(super) fn connect_by_memory(&self, way: Way, part: Part) {
        let Some(this) = self.this.upgrade() else { return };
        let of_thread = way.clone();
        let spawned = way.map.threads.spawn(move |threads| {
            let way = of_thread;
            let meeting = match shm::meet(way.address(), PATIENCE) {
                Ok(meeting) => meeting,
                Err(error) if error.is_transient() && this.meets_again(&way, part) => {
                    let why = format!("shared memory: {error}");
                    return this.ended(&way, &Link::default(), &why);
                }
                Err(error) => return this.without(Shortcut::Memory, way, part, &error.to_string()),
            };
            let memory = Memory::new(way.clone(), &meeting, this.layout.size(), this.layout.block_size());
            let conversation = Data::new(this, way, part, Some(memory));
            threads.serve(meeting, Box::new(Framed::new(conversation, Link::default(), AHEAD)));
        });
        if let Err(error) = spawned {
            self.without(Shortcut::Memory, way, part, &error.to_string());
        }
    }

    /// Whether somebody who does not answer is to be tried again. A shard that is stopped or overrun for a moment may
    /// answer then; another process that has taken its name never does.
    fn meets_again(&self, way: &Way, part: Part) -> bool {
        let mut inner = self.inner.lock();
        if !inner.is_in_force(way) {
            return true;
        }
        let peer = &mut inner.parts[part];
        peer.unmet += 1;
        peer.unmet < TRIES
    }

    /// The next to say on a connection through shared memory, and how many blocks it asks for; `due` are those that
    /// the connection waits for already.
    pub(in crate::client) fn next_by_memory(
        &self,
        part: Part,
        memory: &mut Memory,
        link: &Link,
        due: usize,
    ) -> Option<(Outgoing, usize)> {
        if let Some(outgoing) = memory.ready.pop_front() {
            return Some((outgoing, 0));
        }
        if memory.named >= AT_ONCE {
            // What was named goes out; then this is asked again.
            memory.named = 0;
            link.wake();
            return None;
        }
        loop {
            let mut inner = self.inner.lock();
            // Parts are numbered by the map in force.
            if !inner.is_in_force(&memory.way) {
                return None;
            }
            // What it holds is this connection's own; all else is taken by those that are used.
            if memory.held.is_none() && !inner.uses(part, link, memory.threads(&self.options)) {
                memory.named = 0;
                drop(inner);
                memory.tidy();
                return memory.ready.pop_front().map(|ready| (ready, 0));
            }
            let now = self.now();
            let next = match memory.unsaid.len() < UNSAID {
                true => memory.held.take().or_else(|| inner.core.next_push(part, now)),
                false => None,
            };
            let Some((plan, block)) = next else {
                memory.named = 0;
                drop(inner);
                memory.tidy();
                let ready = memory.ready.pop_front().map(|ready| (ready, 0));
                #[cfg(feature = "rdma")]
                if matches!(memory.common, Common::Rdma(_)) && !self.pull_by_rdma(memory, part) {
                    return ready;
                }
                let most = ASKED / self.layout.block_size();
                return ready.or_else(|| {
                    self.next_pull_for(self.inner.lock(), &memory.way, part, due, most as usize)
                });
            };
            match self.name(inner, memory, plan, block) {
                Named::Ready => {
                    memory.named += 1;
                    return memory.ready.pop_front().map(|ready| (ready, 0));
                }
                Named::Dropped => {}
                Named::Held => {
                    memory.held = Some((plan, block));
                    memory.named = 0;
                    return None;
                }
            }
        }
    }

    /// Puts a block of the plan under way where the shard sees it, unless it is there, and names it.
    fn name(&self, inner: MutexGuard<'_, Inner>, memory: &mut Memory, plan: PlanId, block: BlockId) -> Named {
        let Some(payload) = inner.granted(block).filter(|payload| payload.plan == plan) else {
            return Named::Dropped;
        };
        let check = inner.rejects_nonfinite();
        drop(inner);
        let extent = self.layout.block_bytes(block);
        #[cfg(feature = "rdma")]
        if let [source] = &payload.sources[..]
            && let Some(named) = self.place(memory, plan, block, (source.memory(), extent.start as usize))
        {
            if matches!(named, Named::Ready) {
                self.tally.moved(Flow::Push, (extent.end - extent.start) as usize);
            }
            return named;
        }
        if let [source] = &payload.sources[..]
            && let Ok(region) = memory.lend(source.memory())
        {
            let push = Message::PushAt { plan, block, wide: false, region, offset: extent.start };
            let request = memory.asks(self.layout.block_size());
            memory.ready.push_back(memory.saying(request, push));
            self.tally.moved(Flow::Push, (extent.end - extent.start) as usize);
            return Named::Ready;
        }
        // A sum, or what cannot be shared: private memory, or one region too many.
        let count = payload.sources.len();
        let (wide, len) = sum::shape(&self.layout, block, count, payload.replaces);
        let made = match memory.slots.take() {
            Some(slots) => Ok(slots),
            None => Slots::new(shm::longest_sum(self.layout.block_size())),
        };
        let mut slots = match made {
            Ok(slots) => slots,
            Err(error) => {
                tracing::error!(%error, "no memory for sums");
                return Named::Dropped;
            }
        };
        let region = match memory.lend(&slots.memory) {
            Ok(region) => region,
            Err(error) => {
                memory.slots = Some(slots);
                return self.send_by_ring(memory, plan, block, &error);
            }
        };
        let Some(slot) = slots.free.pop() else {
            memory.slots = Some(slots);
            return Named::Held;
        };
        let start = slot as usize * slots.bytes;
        let span = extent.start as usize..extent.end as usize;
        // SAFETY: a committed payload stays untouched until the plan that sends it is over.
        let parts: Vec<&[u8]> =
            payload.sources.iter().map(|source| unsafe { source.memory().bytes(span.clone()) }).collect();
        // SAFETY: the slot is free: nobody here has it, and the shard has said that it does not read it any more (it
        // cannot write there: its mapping is for reading).
        let out = unsafe { slots.memory.bytes_mut(start..start + len) };
        let check = check && count > 1;
        let summed =
            sum::sum_to(&self.layout, block, &parts, (payload.replaces, &payload.written), check, out);
        let named = match summed {
            _ if !self.still_sends(plan) => {
                slots.free.push(slot);
                Named::Dropped
            }
            Ok(()) => {
                let push = Message::PushAt { plan, block, wide, region, offset: start as u64 };
                memory.ready.push_back(memory.saying(u64::from(slot) + 1, push));
                self.tally.moved(Flow::Push, len);
                self.tally.copied(Flow::Push, sum::copied(&self.layout, block, count, payload.replaces));
                Named::Ready
            }
            Err(bad) => {
                slots.free.push(slot);
                self.with_core(|core, _, actions| core.unfit(plan, payload.learners[bad], block, actions));
                Named::Dropped
            }
        };
        memory.slots = Some(slots);
        named
    }

    /// Has a block sent through the connection's ring: there is no memory for it that the shard could get at.
    fn send_by_ring(&self, memory: &mut Memory, plan: PlanId, block: BlockId, why: &str) -> Named {
        if !std::mem::replace(&mut memory.said, true) {
            let (model, address) = (&self.model, memory.way.address());
            tracing::warn!(%model, address, "contributions are sent, for their memory cannot be shared: {why}");
        }
        let Some(Some((wide, piece))) = self.push(self.inner.lock(), plan, block) else {
            return Named::Dropped;
        };
        self.tally.copied(Flow::Push, piece.len());
        let push = memory.saying(0, Message::Push { plan, block, wide });
        memory.ready.push_back(Outgoing { payload: Some(piece), ..push });
        Named::Ready
    }

    /// Puts a block of `from`, which lies at an offset there, into a slot of the shard's, if that is the way for it.
    /// `None` if it is not.
    #[cfg(feature = "rdma")]
    fn place(
        &self,
        memory: &mut Memory,
        plan: PlanId,
        block: BlockId,
        (from, offset): (&Arc<Mapping>, usize),
    ) -> Option<Named> {
        let Common::Rdma(remote) = &mut memory.common else { return None };
        let extent = self.layout.block_bytes(block);
        let len = (extent.end - extent.start) as usize;
        let (may, must) = remote.places(len, from);
        if !may {
            return None;
        }
        // SAFETY: a committed payload stays untouched until the plan that sends it is over. Nothing looks at the checksum.
        let piece =
            unsafe { Piece::new(from.bytes(offset..offset + len), Some(0), Arc::clone(from) as Guard) };
        match remote.place(piece, from) {
            Ok(Some(slot)) => {
                let push = Message::PushIn { plan, block, wide: false, slot };
                memory.ready.push_back(memory.saying(fabric::PLACED + u64::from(slot), push));
                Some(Named::Ready)
            }
            Ok(None) => must.then_some(Named::Held),
            Err(error) => {
                // The connection is broken: what it has not said is sent by another one.
                tracing::debug!(error, "a block is not placed");
                Some(Named::Held)
            }
        }
    }

    /// A message of a shard that has memory in common with this end. False if it is one that has nothing to do with
    /// that.
    pub(in crate::client) fn hear_by_memory(
        &self,
        received: &Received,
        memory: &mut Memory,
        link: &Link,
    ) -> Result<bool, Close> {
        let request = received.header.request();
        #[cfg(feature = "rdma")]
        if let Common::Rdma(remote) = &mut memory.common {
            if remote.hear(&received.message)? {
                link.wake();
                return Ok(true);
            }
            if matches!(received.message, Message::Done) && request >= fabric::PLACED {
                remote.freed(request)?;
                return Ok(true);
            }
        }
        match received.message {
            Message::Share { region, bytes } => {
                let (borrowed, descriptors) = memory.common.host()?;
                borrowed.share(region, bytes, descriptors).map_err(asked)?;
            }
            Message::Unshare { region } => {
                let (borrowed, _) = memory.common.host()?;
                borrowed.unshare(region).map_err(asked)?;
            }
            Message::Done => {
                if memory.unsaid.front() == Some(&request) {
                    memory.unsaid.pop_front();
                    return Ok(true);
                }
                let slot = u32::try_from(request).ok().and_then(|request| request.checked_sub(1));
                match (slot.filter(|&slot| slot < SLOTS), &mut memory.slots) {
                    (Some(slot), Some(slots)) if !slots.free.contains(&slot) => slots.free.push(slot),
                    _ => return Err(Close::Asked(format!("request {request} was not asked").into())),
                }
            }
            Message::BlockAt { version, block, region, offset } => {
                if block.0 >= self.layout.blocks() {
                    return Err(Close::Asked(format!("block {block} is outside of the model").into()));
                }
                let extent = self.layout.block_bytes(block);
                let len = (extent.end - extent.start) as usize;
                let (borrowed, _) = memory.common.host()?;
                let piece = borrowed.piece(region, offset, len).map_err(asked)?;
                self.copy(&memory.way, version, block, &piece)?;
                link.send(memory.saying(request, Message::Done));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn copy(&self, way: &Way, version: Version, block: BlockId, from: &shm::Piece) -> Result<(), Close> {
        let Some(mut target) = self.lands(way, version, block) else { return Ok(()) };
        let (start, len) = from.raw();
        // SAFETY: the region is mapped as long as the piece lives, and the back buffer is other memory.
        let copied = unsafe { target.copy_from(start, len) };
        drop(target);
        let whole = copied.is_ok();
        if whole {
            self.tally.moved(Flow::Pull, len);
            self.tally.copied(Flow::Pull, len);
        }
        self.with_core(|core, now, actions| core.landed(version, block, whole, now, actions));
        copied
    }
}

fn asked(error: RegionError) -> Close {
    Close::Asked(error.to_string().into())
}
