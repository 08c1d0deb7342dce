//! Blocks that are named where they lie, and not sent: the common part of shared memory and RDMA.
//!
//! A learner's staging region is lent to the shard once, and its blocks are reduced where they lie. Sums of several
//! learners are made in slots of a region that belongs to the connection. The shard says when it is done with a slot.
//! If the connection ends before that, the slot is not used again, because the shard may still be reading it.
//!
//! This module holds `unsafe`; each place says why it is sound.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::MutexGuard;

use super::{BlockPath, Connection};
use crate::bytes::mmap::Mapping;
use crate::client::core::Push;
use crate::client::options::ClientOptions;
use crate::client::payloads::sum;
use crate::client::peers::fallback::FastPath;
use crate::client::peers::peer::EndOfLoan;
use crate::client::shared::Inner;
use crate::client::shared::blocks::{SentAs, Ways};
use crate::transport::frames::Outgoing;
use crate::transport::shm;
use crate::transport::stream::Close;
use crate::transport::tally::Flow;
use crate::wire::{Message, Received};

/// The most bytes read from a ring at once. A few frames fit, so that answers go out between them.
pub(super) const AHEAD: usize = 512;
/// The most blocks that are named before the messages go out. The shard must begin soon, and on all connections.
const MAX_NAMED_AT_ONCE: u32 = 4;
/// When a connection has named this part of the blocks that are left to push, it asks the shard to answer once it has
/// used them. So most blocks are named in a few long runs, whose answers wake few threads, and the last ones in short
/// runs, so that all connections end together.
const SAY_AFTER: usize = 8;
/// The shortest and the longest such run, in bytes.
const RUN: (usize, usize) = (512 << 10, 16 << 20);
/// So many of the shard's answers may be outstanding. Another connection can name the blocks that this one may not.
const MAX_UNANSWERED: usize = 2;
/// The most bytes of a version that one connection asks for ahead, so that others have work, too.
const ASKED: u32 = 2 << 20;
/// The most sums that the shard may have at once.
const SLOTS: u32 = shm::SUMS;
/// The first request number of blocks that were placed in the shard's slots.
const PLACED: u64 = 1 << 32;

/// How the two ends reach each other's memory.
pub(super) trait PeerMemory: Send {
    /// The path.
    const FAST: FastPath;

    /// Whether a device reads lent memory, which it can do only as long as that is in this process. A shard that maps
    /// it has it for itself.
    const IS_READ_BY_DEVICE: bool;

    /// The number of threads that serve such connections.
    fn threads(options: &ClientOptions) -> usize;

    /// Lends `memory` to the shard. Returns its number, and a message for the shard if that is new.
    ///
    /// # Errors
    /// Why the memory cannot be lent.
    fn lend(&mut self, memory: &Arc<Mapping>) -> Result<(u32, Option<Message>), String>;

    /// The numbers of memory that no longer exists.
    fn gone(&mut self) -> Vec<u32>;

    /// Ends the shard's reading of lent memory.
    fn end_of_loan(&self) -> EndOfLoan;

    /// Takes a message of the shard's. False if it does not concern memory.
    ///
    /// # Errors
    /// The connection ends.
    fn receive(&mut self, to: &Connection, received: &Received) -> Result<bool, Close>;

    /// Puts a block, which lies in a range of `from`, into one of the shard's slots, if it goes that way.
    fn place(&mut self, from: &Arc<Mapping>, range: Range<usize>) -> Placed {
        let _ = (from, range);
        Placed::Not
    }

    /// The shard has used what was placed in a slot. False if nothing was.
    fn freed(&mut self, slot: u64) -> bool {
        let _ = slot;
        false
    }

    /// Fetches the wanted blocks of a version. False if the client must ask the shard for them.
    fn fetches(&mut self, to: &Connection) -> bool {
        let _ = to;
        false
    }

    /// Like [`BlockPath::tick`].
    fn tick(&mut self, to: &Connection) -> Option<Instant> {
        let _ = to;
        None
    }

    /// Like [`BlockPath::closed`].
    fn closed(&mut self, to: &Connection) {
        let _ = to;
    }
}

/// The outcome of placing a block.
pub(super) enum Placed {
    /// The block goes another way.
    Not,
    /// The block is in this slot.
    In(u32),
    /// No slot is free.
    Later,
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

/// The blocks that are named on one connection.
pub(super) struct Named<M> {
    memory: M,
    /// Messages that wait to be sent.
    ready: VecDeque<Outgoing>,
    /// A block that waits for a slot.
    held: Option<Push>,
    slots: Option<Slots>,
    /// The number of blocks that were named since messages last went out.
    named: u32,
    /// The number of blocks that were named since the shard was last asked for an answer.
    since_asked: usize,
    /// The bytes that are named before it is asked again.
    run: usize,
    /// The requests that asked for an answer, and have none yet. Each keeps the memory that a device may read till
    /// then.
    unsaid: VecDeque<(u64, Option<Arc<Mapping>>)>,
    /// The number of the last request. Pushes from slots have numbers up to [`SLOTS`].
    last_request: u64,
    /// The log says that contributions go through the ring.
    said: bool,
}

/// The outcome of naming a block.
enum Outcome {
    /// The message is in `ready`.
    Ready,
    /// The block is not wanted any more, or this client has refused its payload.
    Dropped,
    /// No slot is free.
    Held,
}

impl<M: PeerMemory> Named<M> {
    /// For a connection whose ends reach each other's memory through `memory`.
    pub(super) fn new(memory: M) -> Named<M> {
        Named {
            memory,
            ready: VecDeque::new(),
            held: None,
            slots: None,
            named: 0,
            since_asked: 0,
            run: 0,
            unsaid: VecDeque::new(),
            last_request: u64::from(SLOTS),
            said: false,
        }
    }

    fn send(&mut self, to: &Connection, request: u64, message: Message) {
        self.ready.push_back(Outgoing { epoch: to.route.epoch(), ..Outgoing::new(request, message) });
    }

    /// Lends `memory` to the shard, and returns its number.
    fn lend(&mut self, to: &Connection, memory: &Arc<Mapping>) -> Result<u32, String> {
        let (region, new) = self.memory.lend(memory)?;
        if let Some(message) = new {
            self.send(to, 0, message);
        }
        Ok(region)
    }

    /// The request number of the next block that is named where it lies, in `memory`. It is 0 unless the shard must
    /// answer when it has used this block and those before it.
    ///
    /// It must for each block of a contribution that is still written, if a device reads it. The end of a plan that is
    /// dropped says nothing of reads that are under way. Only the answer does, so the memory is kept until it comes.
    fn asks(&mut self, block: u32, memory: &Arc<Mapping>, ahead: bool) -> u64 {
        let kept = (M::IS_READ_BY_DEVICE && ahead).then(|| Arc::clone(memory));
        self.since_asked += 1;
        if self.since_asked * (block as usize) < self.run && kept.is_none() {
            return 0;
        }
        self.since_asked = 0;
        self.last_request += 1;
        self.unsaid.push_back((self.last_request, kept));
        self.last_request
    }

    /// A message that is not urgent: a region that no longer exists.
    fn tidy(&mut self, to: &Connection) -> Option<(Outgoing, usize)> {
        self.named = 0;
        for region in self.memory.gone() {
            self.send(to, 0, Message::Unshare { region });
        }
        self.ready.pop_front().map(|ready| (ready, 0))
    }

    /// Names a block of the plan under way. It is first put where the shard sees it, unless it is there.
    fn name(&mut self, to: &Connection, inner: MutexGuard<'_, Inner>, push: Push) -> Outcome {
        let Push { plan, block, ahead, .. } = push;
        let Some(payload) = inner.payloads.granted(&inner.core, block).filter(|payload| payload.plan == plan)
        else {
            return Outcome::Dropped;
        };
        let (shared, layout) = (&to.shared, &to.shared.layout);
        let check = inner.rejects_nonfinite();
        if self.since_asked == 0 {
            let left = inner.core.left_to_push(to.route.partition) * layout.block_size() as usize;
            self.run = (left / SAY_AFTER).clamp(RUN.0, RUN.1);
        }
        drop(inner);
        let extent = layout.block_bytes(block);
        let span = extent.start as usize..extent.end as usize;
        // What was searched for NaN, or the shard searches, is named where it lies.
        let is_searched = payload.steady || payload.shard_checks || !check;
        if let [source] = &payload.sources[..]
            && is_searched
        {
            let (request, push) = match self.memory.place(source.memory(), span.clone()) {
                Placed::In(slot) => {
                    let push = Message::PushIn { plan, block, wide: false, ahead, slot };
                    (PLACED + u64::from(slot), Some(push))
                }
                Placed::Later => return Outcome::Held,
                Placed::Not => match self.lend(to, source.memory()) {
                    Ok(region) => {
                        let push =
                            Message::PushAt { plan, block, wide: false, ahead, region, offset: extent.start };
                        (self.asks(layout.block_size(), source.memory(), ahead), Some(push))
                    }
                    Err(_) => (0, None),
                },
            };
            if let Some(push) = push {
                self.send(to, request, push);
                shared.accounts.tally.moved(Flow::Push, span.len());
                return Outcome::Ready;
            }
        }
        // The block is a sum, or was not searched, or lies in memory that cannot be lent: private memory, or one region
        // too many.
        let count = payload.sources.len();
        let (wide, len) = sum::shape(layout, block, count, payload.replaces);
        let made = match self.slots.take() {
            Some(slots) => Ok(slots),
            None => Slots::new(shm::longest_sum(layout))
                .inspect(|slots| shared.accounts.of_connections.add(&slots.memory)),
        };
        let mut slots = match made {
            Ok(slots) => slots,
            Err(error) => {
                tracing::error!(model = %shared.model, %error, "no memory for sums");
                return Outcome::Dropped;
            }
        };
        let region = match self.lend(to, &slots.memory) {
            Ok(region) => region,
            Err(error) => {
                self.slots = Some(slots);
                return self.send_by_ring(to, push, &error);
            }
        };
        let Some(slot) = slots.free.pop() else {
            self.slots = Some(slots);
            return Outcome::Held;
        };
        let start = slot as usize * slots.bytes;
        // SAFETY: a block that is sent is whole, and nobody writes it again in this contribution. The next one lies
        // elsewhere if this one's plan was dropped ([`crate::client::Job::take_strays`]).
        let payloads: Vec<&[u8]> =
            payload.sources.iter().map(|source| unsafe { source.memory().bytes(span.clone()) }).collect();
        // SAFETY: the slot is free. Nothing in this process uses it, and the shard has said that it no longer reads
        // it. The shard cannot write it, because its mapping is read-only.
        let out = unsafe { slots.memory.bytes_mut(start..start + len) };
        let check = check && (count > 1 || !is_searched);
        let summed = sum::sum_to(layout, block, &payloads, (payload.replaces, &payload.written), check, out);
        let outcome = match summed {
            _ if !shared.still_sends(plan) => {
                slots.free.push(slot);
                Outcome::Dropped
            }
            Ok(()) => {
                let push = Message::PushAt { plan, block, wide, ahead, region, offset: start as u64 };
                self.send(to, u64::from(slot) + 1, push);
                shared.accounts.tally.moved(Flow::Push, len);
                shared.accounts.tally.copied(Flow::Push, sum::copied(layout, block, count, payload.replaces));
                Outcome::Ready
            }
            Err(bad) => {
                slots.free.push(slot);
                shared.with_core(|core, _, actions| {
                    core.non_finite(plan, payload.learners[bad], block, actions)
                });
                Outcome::Dropped
            }
        };
        self.slots = Some(slots);
        outcome
    }

    /// Sends a block through the connection's ring, because the shard cannot reach memory for it.
    fn send_by_ring(&mut self, to: &Connection, push: Push, why: &str) -> Outcome {
        let Push { plan, block, ahead, .. } = push;
        let shared = &to.shared;
        if !std::mem::replace(&mut self.said, true) {
            let (model, address) = (&shared.model, to.route.address());
            tracing::warn!(%model, address, "contributions are sent, for their memory cannot be shared: {why}");
        }
        let pushed = shared.push(shared.inner.lock(), plan, block, Ways::FULL);
        let Some(Some((SentAs::Whole(form), piece))) = pushed else { return Outcome::Dropped };
        shared.accounts.tally.copied(Flow::Push, piece.len());
        let push = Outgoing::new(0, Message::Push { plan, block, form, ahead });
        self.ready.push_back(Outgoing { epoch: to.route.epoch(), payload: Some(piece), ..push });
        Outcome::Ready
    }
}

impl<M: PeerMemory> BlockPath for Named<M> {
    fn next(&mut self, to: &Connection, due: usize) -> Option<(Outgoing, usize)> {
        if let Some(outgoing) = self.ready.pop_front() {
            return Some((outgoing, 0));
        }
        if self.named >= MAX_NAMED_AT_ONCE {
            // The named blocks go out first; then this is called again.
            self.named = 0;
            to.link.wake();
            return None;
        }
        let Connection { shared, route, link } = to;
        loop {
            let mut inner = shared.inner.lock();
            // The routes in force number the partitions.
            if !inner.peers.is_in_force(route) {
                return None;
            }
            // A held block belongs to this connection. Other blocks go by the connections that are in use.
            if self.held.is_none() && !inner.uses(route.partition, link, M::threads(&shared.options)) {
                drop(inner);
                return self.tidy(to);
            }
            let now = shared.now();
            let next = match self.unsaid.len() < MAX_UNANSWERED {
                true => self.held.take().or_else(|| inner.core.next_push(route.partition, now)),
                false => None,
            };
            let Some(push) = next else {
                drop(inner);
                let ready = self.tidy(to);
                if self.memory.fetches(to) {
                    return ready;
                }
                let most = ASKED / shared.layout.block_size();
                return ready
                    .or_else(|| shared.pull_request(&mut shared.inner.lock(), route, due, most as usize));
            };
            inner.observed.sent(push.plan, now);
            let (began, shard) = (shared.timeline.moment(), inner.core.shards()[route.partition]);
            match self.name(to, inner, push) {
                Outcome::Ready => {
                    shared.timeline.sent(began, push.plan, push.block, shard);
                    self.named += 1;
                    return self.ready.pop_front().map(|ready| (ready, 0));
                }
                Outcome::Dropped => {}
                Outcome::Held => {
                    self.held = Some(push);
                    self.named = 0;
                    return None;
                }
            }
        }
    }

    fn receive(&mut self, to: &Connection, received: &Received) -> Result<bool, Close> {
        if !matches!(received.message, Message::Done) {
            return self.memory.receive(to, received);
        }
        let request = received.header.request();
        if self.unsaid.pop_front_if(|(asked, _)| *asked == request).is_some() {
            return Ok(true);
        }
        if let Some(slot) = request.checked_sub(PLACED) {
            if self.memory.freed(slot) {
                return Ok(true);
            }
        } else if let (Some(slot), Some(slots)) = (request.checked_sub(1), &mut self.slots)
            && slot < SLOTS.into()
            && !slots.free.contains(&(slot as u32))
        {
            slots.free.push(slot as u32);
            return Ok(true);
        }
        Err(Close::Asked(format!("request {request} was not asked").into()))
    }

    fn tick(&mut self, to: &Connection) -> Option<Instant> {
        self.memory.tick(to)
    }

    fn closed(&mut self, to: &Connection) {
        self.memory.closed(to);
    }

    fn fast(&self) -> Option<FastPath> {
        Some(M::FAST)
    }

    fn end_of_loan(&self) -> Option<EndOfLoan> {
        Some(self.memory.end_of_loan())
    }
}
