//! Whole new weights. The job hands out a buffer, a program writes it, the gaps are filled from the newest version,
//! and the buffer is published.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use fixedbitset::FixedBitSet;

use super::Job;
use super::requests::shard_error;
use crate::bytes::block;
use crate::bytes::mmap::Mapping;
use crate::bytes::region::Region;
use crate::client::options::Done;
use crate::client::payloads::NewWeights;
use crate::client::shared::Shared;
use crate::vocabulary::block_ranges;
use crate::vocabulary::ids::{BlockId, Version};
use crate::vocabulary::meta::Meta;
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{MAX_SMALL_MODEL, Message, Refusal};

impl Job {
    /// Checks that new weights may be written. Publishing them checks it again.
    ///
    /// # Errors
    /// [`ShardError::NotAllowed`].
    pub fn may_assign(&self) -> Result<(), ShardError> {
        self.may_write()?;
        self.may_take_weights()
    }

    /// Whether the job takes new weights now.
    pub(super) fn may_take_weights(&self) -> Result<(), ShardError> {
        let inner = self.shared.inner.lock();
        let (reducer, version) = (inner.controls().reducer, inner.core.version());
        if reducer.takes_weights() || version == Version(0) {
            return Ok(());
        }
        Err(ShardError::NotAllowed(format!(
            "weights is read-only at version {version} with reducer {reducer}: write \"assign\" to control/reducer first"
        )))
    }

    /// A buffer of the model's size that can become a version by [`Self::assign`].
    ///
    /// # Errors
    /// When too many are in use.
    pub fn allocate(&self) -> Result<Region, ShardError> {
        self.may_write()?;
        let buffer = match self.shared.shards.local() {
            Some(local) => loop {
                match local.shard.take_buffer() {
                    Err(_) if self.shared.take_from_names() => {}
                    outcome => break outcome?,
                }
            },
            None => {
                let mut inner = self.shared.inner.lock();
                let (retain, max) = inner.bounds();
                inner.versions.take_buffer(retain, max).map_err(|error| ShardError::no_memory(&error))?
            }
        };
        let mut lent = self.lent.lock();
        lent.retain(|_, memory| memory.strong_count() > 0);
        lent.insert(buffer.key(), Arc::downgrade(buffer.memory()));
        Ok(buffer)
    }

    /// Whether the job refuses NaN and Inf.
    pub fn rejects_nonfinite(&self) -> bool {
        self.shared.inner.lock().rejects_nonfinite()
    }

    /// Searches the `written` ranges of new weights for NaN and Inf, if the job refuses those. `buffer` is of the
    /// model's size. The ranges are sorted and disjoint.
    ///
    /// # Errors
    /// [`ShardError::NonFinite`].
    pub fn check_finite(&self, buffer: &Region, written: &[Range<u64>]) -> Result<(), ShardError> {
        if !self.rejects_nonfinite() {
            return Ok(());
        }
        match block::written_is_finite(self.layout(), buffer.memory(), written) {
            None => Ok(()),
            Some(block) => Err(ShardError::NonFinite(block)),
        }
    }

    /// Publishes `buffer` as the next version. Bytes outside `written`, which is sorted and disjoint, keep their
    /// value. A buffer is assigned once, whatever the outcome. `done` is called when this client shows the version,
    /// so the writer can read it.
    pub fn assign(&self, buffer: Region, written: &[Range<u64>], timeout: Duration, done: Done<()>) {
        self.publish(buffer, written, Meta::default(), false, timeout, done);
    }

    /// Like [`Self::assign`], with what their publisher says of them. `checked` buffers were searched for NaN and Inf, and
    /// hold none.
    pub(crate) fn publish(
        &self,
        buffer: Region,
        written: &[Range<u64>],
        meta: Meta,
        checked: bool,
        timeout: Duration,
        done: Done<()>,
    ) {
        if let Err(error) = self.shared.lifetime.refuse_if_ending() {
            return done(Err(error));
        }
        let layout = self.layout();
        let mut at = 0;
        let mut blocks = FixedBitSet::with_capacity(layout.blocks() as usize);
        for range in written {
            if range.start < at || range.end < range.start || range.end > layout.size() {
                return done(Err(ShardError::OutOfRange));
            }
            at = range.end;
            if !range.is_empty() {
                let last = layout.block_of(range.end - 1).index();
                blocks.insert_range(layout.block_of(range.start).index()..last + 1);
            }
        }
        if !self.claim(&buffer) {
            let why = "the buffer was not allocated for new weights, or is used up";
            return done(Err(ShardError::NotAllowed(why.into())));
        }
        let deadline = Instant::now() + timeout;
        let (this, written) = (self.shared.this.clone(), written.to_vec());
        let newest_is_here = move |result: Result<Version, ShardError>| {
            let Some(shared) = this.upgrade() else { return done(Err(ShardError::Unreachable)) };
            let completed = result.and_then(|_| complete(&shared, &buffer, &written, &blocks));
            if let Err(error) = completed {
                return done(Err(error));
            }
            let weights = NewWeights { buffer, checked, can_show: true };
            assign(&shared, weights, &blocks, meta, deadline, done);
        };
        self.shared.await_newest(timeout, Box::new(newest_is_here));
    }

    /// Publishes the newest version with these `blocks` of registered `memory`, which is of the model's size and stays
    /// the caller's: shards copy the blocks. The bytes that count are those that the memory has at some time before the
    /// answer; after a timeout they may be copied later. `done` is called when this client shows the version.
    pub fn assign_blocks(&self, memory: &Region, blocks: &FixedBitSet, timeout: Duration, done: Done<()>) {
        if let Err(error) = self.may_write() {
            return done(Err(error));
        }
        // A request that timed out may have been taken, and its blocks are those of its own region.
        let buffer = self.named_anew(Arc::clone(memory.memory()));
        let weights = NewWeights { buffer, checked: false, can_show: false };
        assign(&self.shared, weights, blocks, Meta::default(), Instant::now() + timeout, done);
    }

    /// A program begins to write new weights in `buffer`.
    pub(crate) fn begins_weights(&self, buffer: &Region) {
        let mut inner = self.shared.inner.lock();
        let mut actions = Vec::new();
        inner.core.notify(Message::BeginWeights { token: buffer.key().0 }, &mut actions);
        self.shared.act(inner, actions);
    }

    /// These blocks of new weights in `buffer` are whole. They may be sent, or compared, before they are published.
    pub(crate) fn wrote_weights(&self, buffer: &Region, blocks: &[BlockId]) {
        if let Some(local) = self.shared.shards.local() {
            return local.shard.wrote(buffer.key(), blocks);
        }
        let mut inner = self.shared.inner.lock();
        let (token, now, mut actions) = (buffer.key().0, self.shared.now(), Vec::new());
        let new = || NewWeights { buffer: buffer.clone(), checked: false, can_show: true };
        inner.payloads.weights.entry(token).or_insert_with(new);
        for &block in blocks {
            if let Some(partition) = inner.core.wrote_weights(token, block, now, &mut actions) {
                inner.peers.wake(partition);
            }
        }
        self.shared.act(inner, actions);
    }

    /// The program writes new weights in `buffer` again, or gives them up. Blocks that were sent of them do not count.
    pub(crate) fn rewrites_weights(&self, buffer: &Region) {
        if let Some(local) = self.shared.shards.local() {
            return local.shard.rewrites(buffer.key());
        }
        let mut inner = self.shared.inner.lock();
        let mut actions = Vec::new();
        inner.core.rewrites_weights(buffer.key().0, &mut actions);
        self.shared.act(inner, actions);
    }

    /// Whether blocks of new weights may be sent, or compared, before they are published.
    pub(crate) fn uses_open_weights(&self) -> bool {
        let shards = &self.shared.shards;
        (shards.local().is_some() || !shards.read_in_place())
            && self.layout().size() > u64::from(MAX_SMALL_MODEL)
    }

    /// Takes back `buffer`. True if it was handed out for new weights and not returned yet.
    fn claim(&self, buffer: &Region) -> bool {
        let is_it = |memory: &Weak<Mapping>| memory.as_ptr() == Arc::as_ptr(buffer.memory());
        let mut lent = self.lent.lock();
        let claimed = lent.get(&buffer.key()).is_some_and(is_it);
        if claimed {
            lent.remove(&buffer.key());
        }
        claimed
    }
}

/// Publishes whole blocks of `weights` as the next version. A request that timed out may have been taken: its
/// payload stays here while a plan sends it. `done` is called when this client shows the version.
fn assign(
    shared: &Shared,
    weights: NewWeights,
    blocks: &FixedBitSet,
    meta: Meta,
    deadline: Instant,
    done: Done<()>,
) {
    let Ok(blocks) = block_ranges::from_bits(blocks) else {
        return done(Err(ShardError::NotAllowed("the new weights are too scattered".into())));
    };
    let left = move || deadline.saturating_duration_since(Instant::now());
    let (this, token, timeout_ms) =
        (shared.this.clone(), weights.buffer.key().0, super::requests::millis(left()));
    let buffer = Some(weights.buffer.clone()).filter(|_| weights.can_show && !shared.shards.read_in_place());
    let answered = move |result: Result<Message, Refusal>| {
        match (result, this.upgrade()) {
            (Err(refusal), _) => done(Err(shard_error(refusal))),
            (Ok(_), None) => done(Ok(())),
            // The version counts, even if this client cannot show it in time.
            (Ok(_), Some(shared)) => {
                let this = shared.this.clone();
                let shown = move |_| {
                    if let (Some(buffer), Some(shared)) = (buffer, this.upgrade()) {
                        shared.inner.lock().versions.keep(buffer);
                    }
                    done(Ok(()));
                };
                shared.await_newest(left(), Box::new(shown));
            }
        }
    };
    let message = Message::Assign { token, blocks, timeout_ms, ahead: None, meta };
    shared.request(message, left(), Box::new(answered), |inner| {
        let can_show = weights.can_show;
        inner.payloads.weights.insert(token, weights);
        // If the shard's own memory is shown, nothing is pulled, and this buffer is not needed.
        if can_show && !inner.versions.shows_shards_memory() {
            inner.core.can_show(token);
        }
    });
}

/// Fills the unwritten bytes of `blocks` with their present values.
fn complete(
    shared: &Shared,
    buffer: &Region,
    written: &[Range<u64>],
    blocks: &FixedBitSet,
) -> Result<(), ShardError> {
    let newest = shared.pin_newest().ok_or(ShardError::Unreachable)?;
    let weights = shared.inner.lock().versions.get(newest).map(|shown| shown.buffer.clone());
    if let Some(weights) = weights {
        let copy = |gap: Range<u64>| {
            if gap.start < gap.end {
                block::copy_gap(weights.memory(), buffer.memory(), gap);
            }
        };
        for block in blocks.ones().map(|block| BlockId(block as u32)) {
            let extent = shared.layout.block_bytes(block);
            let mut at = extent.start;
            let first = written.partition_point(|range| range.end <= extent.start);
            for range in written[first..].iter().take_while(|range| range.start < extent.end) {
                copy(at..range.start);
                at = range.end;
            }
            copy(at..extent.end);
        }
    }
    shared.unpin(newest, 1);
    Ok(())
}
