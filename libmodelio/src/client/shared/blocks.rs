//! Blocks on their way: from staging regions to shards, and from shards into the back buffer.
//!
//! This module holds `unsafe`: connections receive into blocks of the back buffer, and send from blocks of staging
//! regions. Each place says why that is sound.

use std::sync::{Arc, Weak};

use parking_lot::MutexGuard;

use crate::bytes::block::span;
use crate::bytes::changes::Changed;
use crate::bytes::crc32c::crc32c;
use crate::bytes::mmap::Mapping;
use crate::client::core::{PULL_BLOCKS, Push};
use crate::client::patching::{NotPatched, Patched, Patching};
use crate::client::payloads::Payload;
use crate::client::payloads::residual::NotCoded;
use crate::client::payloads::sum;
use crate::client::peers::routes::Route;
use crate::client::shared::{Inner, Shared};
use crate::client::versions;
use crate::transport::frames::{Link, Outgoing};
use crate::transport::stream::{Guard, LentPayload, Target};
use crate::transport::tally::Flow;
use crate::vocabulary::coding::Form;
use crate::vocabulary::ids::{BlockId, PlanId, Version};
use crate::wire::{Granted, Message, Role};

/// The forms that the path of a block takes.
#[derive(Clone, Copy, Debug)]
pub(in crate::client) struct Ways {
    /// Blocks may be coded.
    pub(in crate::client) codes: bool,
    /// Of new weights, what has changed may go alone.
    pub(in crate::client) patches: bool,
}

impl Ways {
    /// Blocks go in full.
    pub(in crate::client) const FULL: Ways = Ways { codes: false, patches: false };
}

/// The form of a block's payload.
#[derive(Clone, Copy, Debug)]
pub(in crate::client) enum SentAs {
    /// All of it.
    Whole(Form),
    /// What has changed in the block of this version, which has this checksum then.
    Changes { base: Version, crc: u32 },
}

/// The most blocks that one connection may have asked for. A shard takes this many requests, even if each asks for
/// one block.
pub(super) const DUE_MAX: usize = 128;

impl Shared {
    /// Takes memory for a version before it is pulled. A thread of its own does it, because it takes a while.
    pub(in crate::client) fn add_spare(&self) {
        {
            let mut inner = self.inner.lock();
            let (retain, max) = inner.bounds();
            if inner.versions.newest().is_none() || !inner.versions.wants_spare(retain, max) {
                return;
            }
        }
        let (this, size) = (self.this.clone(), self.layout.size() as usize);
        let take = move || match (versions::spare(size), this.upgrade()) {
            (Ok(memory), Some(shared)) => {
                let mut inner = shared.inner.lock();
                let (_, max) = inner.bounds();
                inner.versions.add_spare(memory, max);
            }
            // Pulls use the buffers that exist, or log that there is none.
            (Err(error), Some(shared)) => {
                if shared.inner.lock().versions.no_spare() {
                    tracing::warn!(model = %shared.model, %error, "no memory for a version ahead");
                }
            }
            (_, None) => {}
        };
        if let Err(error) = std::thread::Builder::new().name("client-memory".into()).spawn(take) {
            tracing::warn!(model = %self.model, %error, "no thread to take memory for a version ahead");
            self.inner.lock().versions.no_spare();
        }
    }

    /// Takes the pages of a buffer that is pulled into already, beside the pull. Readers held all that have pages.
    fn touch(&self, memory: Arc<Mapping>) {
        let model = self.model.clone();
        let take = move || {
            if let Err(error) = memory.prefault() {
                tracing::warn!(%model, %error, "no memory for all of a version");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("client-memory".into()).spawn(take) {
            tracing::warn!(model = %self.model, %error, "no thread to take memory for a version");
        }
    }

    /// The next request for blocks and how many it asks for, or else the next block to push to a shard. There is no
    /// request if the connection already waits for `due` blocks and that is enough. A request is short and its blocks
    /// come the other way, so it does not wait for pushes. `followed` is the plan that was last followed over the
    /// connection.
    pub(in crate::client) fn next_sent(
        &self,
        route: &Route,
        link: &Link,
        due: usize,
        followed: &mut PlanId,
    ) -> Option<(Outgoing, usize)> {
        let mut inner = self.inner.lock();
        if inner.peers.is_in_force(route) && !inner.uses(route.partition, link, self.options.threads) {
            return None;
        }
        if let Some(follow) = self.follow(&mut inner, route, followed) {
            return Some((follow, 0));
        }
        if let Some(request) = self.pull_request(&mut inner, route, due, DUE_MAX) {
            return Some(request);
        }
        let now = self.now();
        let frame = |message, payload| Outgoing { message, request: 0, epoch: route.epoch(), payload };
        // The map in force numbers the partitions.
        while inner.peers.is_in_force(route)
            && let Some(Push { plan, block, ahead, again }) = inner.core.next_push(route.partition, now)
        {
            inner.observed.sent(plan, now);
            let (began, shard) = (self.timeline.moment(), inner.core.shards()[route.partition]);
            let ways = Ways { codes: true, patches: !again };
            if let Some((sent, piece)) = self.push(inner, plan, block, ways)? {
                self.timeline.sent(began, plan, block, shard);
                let message = match sent {
                    SentAs::Whole(form) => Message::Push { plan, block, form, ahead },
                    SentAs::Changes { base, crc } => Message::PushChanges { plan, block, base, crc, ahead },
                };
                return Some((frame(message, Some(piece)), 0));
            }
            inner = self.inner.lock();
        }
        None
    }

    /// Whether there is a buffer to pull into. Another thread takes the pages of a new one.
    fn finds_back(&self, inner: &mut Inner) -> bool {
        let (retain, max) = inner.bounds();
        let is_there = match inner.versions.back(retain, max) {
            Ok(back) => back.is_some(),
            Err(error) => {
                // Each connection tries again and again, so the log says this only now and then.
                if inner.core.lacks_memory(error.to_string(), self.now()) {
                    tracing::error!(model = %self.model, %error, "no memory for another version here: opens that need a newer one fail");
                }
                self.rouse_keeper(inner);
                return false;
            }
        };
        inner.core.has_memory();
        inner.core.set_no_buffer(!is_there);
        if let Some(memory) = inner.versions.take_untouched() {
            self.touch(memory);
        }
        is_there
    }

    /// The request to follow the plan that makes the next version, if that is pulled while it is made.
    fn follow(&self, inner: &mut Inner, route: &Route, followed: &mut PlanId) -> Option<Outgoing> {
        if !inner.peers.is_in_force(route) || !inner.core.follows(*followed) {
            return None;
        }
        // Without a buffer, the version is pulled once it exists.
        if !self.finds_back(inner) {
            return None;
        }
        let message = inner.core.next_follow(route.partition, *followed)?;
        if let &Message::Follow { plan, .. } = &message {
            *followed = plan;
        }
        Some(Outgoing { epoch: route.epoch(), ..Outgoing::new(0, message) })
    }

    /// The next request for blocks of one shard, and how many blocks it asks for. The connection waits for `due`
    /// blocks already. It may wait for `most`, or for those of one request.
    pub(in crate::client) fn pull_request(
        &self,
        inner: &mut Inner,
        route: &Route,
        due: usize,
        most: usize,
    ) -> Option<(Outgoing, usize)> {
        if !inner.peers.is_in_force(route) {
            return None;
        }
        inner.core.pulling()?;
        let window = (self.options.window / self.layout.block_size() as usize).max(1);
        // Each connection has its share of the window, so that no connection waits for another. It asks for several
        // blocks at once.
        let share = window.div_ceil(self.options.connections.max(1)).min(most);
        if due > 0 && due + PULL_BLOCKS > share {
            return None;
        }
        // If all buffers are held, the request comes when one is given back.
        if !self.finds_back(inner) {
            return None;
        }
        let message = match route.role {
            Role::Relay => inner.core.next_of_relay(window, self.now()),
            _ => inner.core.next_pull(route.partition, window, self.now()),
        }?;
        let asked = match &message {
            Message::Pull { blocks, .. } if route.role == Role::Relay => blocks.len(),
            Message::Pull { blocks, .. } => inner.core.asked_in(route.partition, blocks),
            _ => 0,
        };
        Some((Outgoing { epoch: route.epoch(), ..Outgoing::new(0, message) }, asked))
    }

    /// The payload of a block of the plan under way, and what it is. The bytes are read without the lock. `Some(None)`
    /// if this client has refused the plan.
    pub(in crate::client) fn push(
        &self,
        mut inner: MutexGuard<'_, Inner>,
        plan: PlanId,
        block: BlockId,
        ways: Ways,
    ) -> Option<Option<(SentAs, LentPayload)>> {
        let extent = self.layout.block_bytes(block);
        let span = extent.start as usize..extent.end as usize;
        let Payload { sources, steady, learners, replaces, written, coding, .. } =
            inner.payloads.granted(&inner.core, block)?;
        let coding = coding.filter(|_| ways.codes);
        let coding = coding.and_then(|coding| self.codes(&mut inner, plan, block, coding, sources.len()));
        // Only new weights have no learner.
        let base = (ways.patches && learners.is_empty()).then(|| self.hold_base(&mut inner)).flatten();
        // A steady source is sent from where it lies. Others could change between the checksum and the kernel's copy,
        // so they are copied here.
        if let ([source], true, None) = (&sources[..], steady, &coding) {
            let memory = Arc::clone(source.memory());
            drop(inner);
            // SAFETY: a block that is sent is whole, and nobody writes it again in this contribution. The next one lies
            // elsewhere if this one's plan was dropped ([`crate::client::Job::take_strays`]).
            let bytes = unsafe { memory.bytes(span) };
            if let Some(patch) = base.and_then(|base| base.patch(block, bytes)) {
                return Some(Some(patch));
            }
            self.accounts.tally.moved(Flow::Push, bytes.len());
            let crc = self.options.checksum.of(bytes);
            // SAFETY: as above, and the guard keeps the memory.
            let piece = unsafe { LentPayload::new(bytes, crc, Arc::clone(&memory) as Guard) };
            return Some(Some((SentAs::Whole(Form::Plain), piece)));
        }
        // What is wrong with a published block of a disk, the shard says.
        let of_disk = |(_, granted): (PlanId, &Granted)| matches!(granted, Granted::Weights(_));
        let check = inner.rejects_nonfinite() && !inner.core.outgoing().is_some_and(of_disk);
        let mut out = inner.payloads.spare.pop().unwrap_or_default();
        drop(inner);
        // SAFETY: as above. A program can store into memory that it has mapped: then each byte is old or new, and the
        // copy is what is checked and sent. The control flow depends on lengths alone.
        let payloads: Vec<&[u8]> =
            sources.iter().map(|source| unsafe { source.memory().bytes(span.clone()) }).collect();
        let summed = match &coding {
            Some((coding, residuals)) => residuals
                .encode(&self.layout, (block, plan), *coding, (&payloads, &written), check, &mut out)
                .map(|()| Form::Coded(*coding)),
            None => sum::sum(&self.layout, block, &payloads, (replaces, &written), check, &mut out)
                .map(Form::full)
                .map_err(NotCoded::NonFinite),
        };
        if !self.still_sends(plan) {
            self.inner.lock().payloads.spare.push(out);
            return Some(None);
        }
        match summed {
            Ok(form) => {
                if let Some(patch) = base.and_then(|base| base.patch(block, &out)) {
                    self.accounts.tally.copied(Flow::Push, out.len());
                    self.inner.lock().payloads.spare.push(out);
                    return Some(Some(patch));
                }
                self.accounts.tally.moved(Flow::Push, out.len());
                // Of a coded block, what is not reduced is copied.
                let count = if coding.is_some() { 2 } else { payloads.len() };
                self.accounts.tally.copied(Flow::Push, sum::copied(&self.layout, block, count, replaces));
                let pooled = Arc::new(Pooled { bytes: out, home: self.this.clone() });
                let crc = self.options.checksum.of(&pooled.bytes);
                // SAFETY: nobody writes the vector while the guard lives.
                let piece = unsafe { LentPayload::new(&pooled.bytes, crc, Arc::clone(&pooled) as Guard) };
                Some(Some((SentAs::Whole(form), piece)))
            }
            Err(NotCoded::Over) => {
                self.inner.lock().payloads.spare.push(out);
                Some(None)
            }
            Err(NotCoded::NonFinite(bad)) => {
                let mut inner = self.inner.lock();
                inner.payloads.spare.push(out);
                let mut actions = Vec::new();
                // New weights that are written again meanwhile are searched once more when they are published.
                if let Some(&learner) = learners.get(bad) {
                    inner.core.non_finite(plan, learner, block, &mut actions);
                }
                self.act(inner, actions);
                Some(None)
            }
        }
    }

    /// The newest version, if it is shown here and new weights may go as what they change in it. The shards have it as
    /// long as the plan runs, for it is the one that the plan begins with.
    fn hold_base(&self, inner: &mut Inner) -> Option<Base<'_>> {
        let state = inner.core.state();
        let (delta, newest) = (state.controls.delta, state.version);
        let (version, shown) = inner.versions.newest().filter(|(shown, _)| delta && *shown == newest)?;
        let memory = Arc::clone(shown.buffer.memory());
        inner.versions.pin(version);
        Some(Base { version, memory, home: self })
    }

    /// Whether a plan is still under way. It is checked after contributions were read for it: a lent contribution may
    /// have ended meanwhile, and then its memory may hold other data.
    pub(in crate::client) fn still_sends(&self, plan: PlanId) -> bool {
        let mut inner = self.inner.lock();
        inner.observed.sent(plan, self.now());
        inner.core.outgoing().is_some_and(|(of, _)| of == plan)
    }

    /// The memory that the client pulls into.
    pub(in crate::client) fn back_buffer(&self) -> Option<Arc<Mapping>> {
        let mut inner = self.inner.lock();
        let (retain, max) = inner.bounds();
        let back = inner.versions.back(retain, max).ok().flatten();
        back.map(|back| Arc::clone(back.memory()))
    }

    /// Ends the reservation of a block that was being received.
    pub(in crate::client) fn end_reservation(&self, version: Version, block: BlockId, whole: bool) {
        let mut inner = self.inner.lock();
        let (now, mut actions) = (self.now(), Vec::new());
        if whole {
            inner.observed.received(version, block, now);
        }
        inner.core.end_reservation(version, block, whole, now, &mut actions);
        inner.peers.wake_followers();
        self.act(inner, actions);
    }

    /// The place to receive a block of a version into. `None` if the block is not wanted.
    pub(in crate::client) fn reserve(
        &self,
        route: &Route,
        version: Version,
        block: BlockId,
    ) -> Option<Target> {
        self.reserve_in(self.inner.lock(), route, version, (block, None)).map(|(target, _)| target)
    }

    /// A block of a version that is patched. `None` if the block is not wanted, or not from this base.
    pub(in crate::client) fn reserve_patched(
        &self,
        route: &Route,
        version: Version,
        block: BlockId,
        base: Version,
    ) -> Option<Patched> {
        let (target, patching) = self.reserve_in(self.inner.lock(), route, version, (block, Some(base)))?;
        // SAFETY: the block is reserved for the caller.
        Some(unsafe { Patched::new(target, patching?, version, block) })
    }

    /// The place to receive a block into that a shard sends for a plan which the client follows.
    pub(in crate::client) fn reserve_ahead(
        &self,
        route: &Route,
        plan: PlanId,
        block: BlockId,
    ) -> Option<(Version, Target)> {
        let inner = self.inner.lock();
        let version = inner.core.followed(plan)?;
        let (target, _) = self.reserve_in(inner, route, version, (block, None))?;
        Some((version, target))
    }

    /// The version that a plan makes which the client follows.
    pub(in crate::client) fn followed(&self, plan: PlanId) -> Option<Version> {
        self.inner.lock().core.followed(plan)
    }

    /// A patched block does not count. From now on, this version is pulled whole.
    pub(in crate::client) fn not_patched(&self, version: Version, block: BlockId, why: &NotPatched) {
        tracing::warn!(model = %self.model, %version, %block, "a patch has not made the shard's block, so the rest of the version is pulled whole: {why}");
        self.with_core(|core, _, actions| core.pulls_whole(version, actions));
    }

    fn reserve_in(
        &self,
        mut inner: MutexGuard<'_, Inner>,
        route: &Route,
        version: Version,
        (block, base): (BlockId, Option<Version>),
    ) -> Option<(Target, Option<Arc<Patching>>)> {
        let (retain, max) = inner.bounds();
        if !inner.peers.is_in_force(route)
            || base.is_some() && base != inner.core.base_of(version)
            || !inner.core.reserve(version, block)
        {
            return None;
        }
        if inner.core.has_pulled_none() {
            inner.versions.begin_back();
        }
        let back = inner.versions.back(retain, max).ok().flatten();
        let extent = self.layout.block_bytes(block);
        let blocks = self.layout.blocks();
        let patching = base.filter(|_| back.is_some()).and_then(|base| inner.versions.patching(base, blocks));
        let Some(back) = back.filter(|_| base.is_none() || patching.is_some()) else {
            let mut actions = Vec::new();
            inner.core.end_reservation(version, block, false, self.now(), &mut actions);
            self.act(inner, actions);
            return None;
        };
        let memory = Arc::clone(back.memory());
        if let Some(shard) = inner.core.owner(block) {
            inner.observed.receives(block, shard, || self.now());
        }
        if patching.is_none() {
            inner.versions.comes_whole(block);
        }
        // SAFETY: only connections write the back buffer, and the core reserves each of its blocks for one of them at
        // a time. The buffer is published when no block is reserved any more. The range is within the model.
        let target = unsafe {
            let bytes = memory.bytes_mut(extent.start as usize..extent.end as usize);
            let (start, len) = (bytes.as_mut_ptr(), bytes.len());
            Target::new(start, len, memory as Guard)
        };
        Some((target, patching))
    }
}

/// The version that new weights change. It is pinned.
struct Base<'a> {
    version: Version,
    memory: Arc<Mapping>,
    home: &'a Shared,
}

impl Base<'_> {
    /// The patch that makes a block of the new weights, if that is shorter than the block.
    fn patch(self, block: BlockId, new: &[u8]) -> Option<(SentAs, LentPayload)> {
        let (home, layout) = (self.home, &self.home.layout);
        // SAFETY: the version is pinned, and one that is shown does not change.
        let old = unsafe { self.memory.bytes(span(&layout.block_bytes(block))) };
        let mut patch = Vec::new();
        let is_shorter = Changed::between(old, new, layout.unit(block)).patch(new, &mut patch);
        is_shorter.then(|| {
            home.accounts.tally.moved(Flow::Push, patch.len());
            (SentAs::Changes { base: self.version, crc: crc32c(new) }, LentPayload::owned(patch))
        })
    }
}

impl Drop for Base<'_> {
    fn drop(&mut self) {
        self.home.unpin(self.version, 1);
    }
}

/// The memory of a sum, which returns to the pool when the sum is sent.
struct Pooled {
    bytes: Vec<u8>,
    home: Weak<Shared>,
}

impl Drop for Pooled {
    fn drop(&mut self) {
        /// About how many sums are on their way at once.
        const SPARE: usize = 64;
        if let Some(home) = self.home.upgrade()
            // If the lock is held at this moment, the memory is freed instead.
            && let Some(mut inner) = home.inner.try_lock()
            && inner.payloads.spare.len() < SPARE
        {
            inner.payloads.spare.push(std::mem::take(&mut self.bytes));
        }
    }
}
