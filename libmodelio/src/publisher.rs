//! Whole new weights: the client side of writing `weights` and `publish` (reducer `assign`, or to initialise).
//!
//! Bytes go straight into a buffer that becomes the version at commit: no copy besides that from the request, or from
//! memory that a program maps. That memory itself never becomes a version, because its program may go on storing into
//! it. Holds `unsafe` for entering the buffer; see [`crate::bytes::mmap`] for the rule.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use fixedbitset::FixedBitSet;
use parking_lot::{Condvar, Mutex, MutexGuard};
use smallvec::SmallVec;

use crate::bytes::block;
use crate::bytes::mmap::Mapping;
use crate::bytes::region::Region;
use crate::client::Job;
use crate::mapped::MappedMemory;
use crate::reader::Reader;
use crate::tracker::WriteRefused;
use crate::vocabulary::ids::{BlockId, Version};
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::meta::Meta;
use crate::vocabulary::ranges;
use crate::vocabulary::shard_error::ShardError;

/// The most threads that copy one mapping. More would not copy faster than memory can take it.
const MAX_COPIERS: usize = 4;
/// The system reads files to tell the number.
static CORES: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));
/// A thread is worth its start for this many bytes.
const BYTES_A_COPIER: u64 = 4 << 20;

#[derive(Debug, Default)]
struct PublisherState {
    written: Vec<Range<u64>>,
    /// What is being copied.
    in_flight: Vec<Range<u64>>,
    /// Blocks that may hold NaN or Inf.
    suspects: FixedBitSet,
    /// Blocks that the job may be sending.
    sent: FixedBitSet,
    /// A block was written again that the job may have sent. It is told of no other one.
    rewritten: bool,
    /// The job knows that something is written.
    begun: bool,
    sealed: bool,
    /// Nobody waits for the commit.
    withdrawn: bool,
    /// A write that was refused after others. The buffer lacks something that the program wanted to write.
    failed: Option<WriteRefused>,
}

/// A version being written.
pub struct Publisher {
    job: Arc<Job>,
    buffer: Region,
    size: u64,
    state: Mutex<PublisherState>,
    idle: Condvar,
}

impl Publisher {
    /// With a buffer from the shard.
    ///
    /// # Errors
    /// When the shard has none.
    pub fn new(job: Arc<Job>) -> Result<Publisher, ShardError> {
        let buffer = job.allocate()?;
        let size = buffer.memory().len() as u64;
        let none = FixedBitSet::with_capacity(job.layout().blocks() as usize);
        let rewritten = !job.uses_open_weights();
        let state =
            PublisherState { suspects: none.clone(), sent: none, rewritten, ..PublisherState::default() };
        let state = Mutex::new(state);
        Ok(Publisher { job, buffer, size, state, idle: Condvar::new() })
    }

    /// Stores `data` at `offset`. Bytes may be written again until the commit.
    ///
    /// # Errors
    /// [`WriteRefused::PastEnd`]; nothing is stored then. If something was written before, it has
    /// [failed](Self::failed).
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), WriteRefused> {
        let end = offset.saturating_add(data.len() as u64);
        if end > self.size {
            let refused = WriteRefused::PastEnd { offset, end, size: self.size };
            let mut state = self.state.lock();
            if !state.written.is_empty() {
                state.failed = Some(refused);
            }
            return Err(refused);
        }
        let layout = self.job.layout();
        self.begin(offset..end)?;
        // NaN may still be overwritten, so it is not refused here.
        let mut bad = SmallVec::<[BlockId; 2]>::new();
        block::place_at(layout, offset, data, self.buffer.memory(), |block| bad.push(block));
        let mut whole = SmallVec::<[BlockId; 8]>::new();
        {
            let mut state = self.state.lock();
            bad.iter().for_each(|block| state.suspects.insert(block.index()));
            ranges::insert(&mut state.written, offset..end);
            if !state.rewritten {
                whole.extend(layout.blocks_of(offset..end).filter(|&block| state.is_whole(layout, block)));
                whole.iter().for_each(|block| state.sent.insert(block.index()));
            }
        }
        if !whole.is_empty() {
            self.job.wrote_weights(&self.buffer, &whole);
            // Another thread may write one of them again, and may have told the job so before it knew of the block.
            if self.state.lock().rewritten {
                self.job.rewrites_weights(&self.buffer);
            }
        }
        // A commit waits for this.
        self.end(offset..end, |_| ());
        Ok(())
    }

    /// Notes that a range is being copied, in this or another thread.
    fn begin(&self, range: Range<u64>) -> Result<(), WriteRefused> {
        let mut state = self.state.lock();
        if state.sealed {
            return Err(WriteRefused::Sealed);
        }
        // Of bytes that two writers copy at once, an element may be mixed.
        let is_mixed = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        if state.in_flight.iter().any(is_mixed) {
            let layout = self.job.layout();
            let last = layout.block_of(range.end - 1).index();
            state.suspects.insert_range(layout.block_of(range.start).index()..last + 1);
        }
        let layout = self.job.layout();
        let is_sent = |block: BlockId| state.sent.contains(block.index());
        let rewrites = layout.blocks_of(range.clone()).any(is_sent);
        let is_first = !std::mem::replace(&mut state.begun, true);
        state.in_flight.push(range);
        if is_first {
            drop(state);
            self.job.begins_weights(&self.buffer);
        } else if rewrites {
            state.rewritten = true;
            state.sent.clear();
            drop(state);
            self.job.rewrites_weights(&self.buffer);
        }
        Ok(())
    }

    /// The range was copied.
    fn end(&self, range: Range<u64>, note: impl FnOnce(&mut PublisherState)) {
        let mut state = self.state.lock();
        note(&mut state);
        if let Some(at) = state.in_flight.iter().position(|other| *other == range) {
            state.in_flight.swap_remove(at);
        }
        if state.in_flight.is_empty() {
            self.idle.notify_all();
        }
    }

    /// Stores all of `memory`, and checks what it stores for NaN and Inf if the job refuses those. Several threads copy a
    /// large model. What the program stores into `memory` meanwhile may count or not, byte by byte.
    ///
    /// # Errors
    /// [`ShardError::NonFinite`]: this publisher must not be committed then. [`ShardError::NotAllowed`] after a commit,
    /// and for memory of another model.
    pub fn write_all(&self, memory: &MappedMemory) -> Result<(), ShardError> {
        let memory = memory.region().memory();
        if memory.len() as u64 != self.size {
            return Err(ShardError::OutOfRange);
        }
        self.begin(0..self.size).map_err(|sealed| ShardError::NotAllowed(sealed.to_string()))?;
        let check = self.job.rejects_nonfinite();
        let sends = {
            let mut state = self.state.lock();
            let sends = !state.rewritten;
            state.sent.set_range(.., sends);
            sends
        };
        let bad = self.copy_all(memory, check, sends);
        // Another thread may write meanwhile, too.
        if sends && (bad.is_some() || self.state.lock().rewritten) {
            self.job.rewrites_weights(&self.buffer);
        }
        self.end(0..self.size, |state| {
            if !check {
                state.suspects.insert_range(..);
            }
            if bad.is_none() {
                ranges::insert(&mut state.written, 0..self.size);
            }
        });
        bad.map_or(Ok(()), |block| Err(ShardError::NonFinite(block)))
    }

    /// Copies all blocks, and has each of them sent if the job `sends` them before they are published. Returns one that
    /// holds NaN or Inf, if that matters.
    fn copy_all(&self, memory: &Mapping, check: bool, sends: bool) -> Option<BlockId> {
        let layout = self.job.layout();
        let (next, bad) = (AtomicU32::new(0), AtomicU32::new(u32::MAX));
        let copy = || {
            while let block @ BlockId(number) = BlockId(next.fetch_add(1, Ordering::Relaxed))
                && number < layout.blocks()
                && bad.load(Ordering::Relaxed) == u32::MAX
            {
                // SAFETY: a program's stores race with this as with read(2) of a file that is mapped.
                let payload = unsafe { memory.bytes(block::span(&layout.block_bytes(block))) };
                match block::place(layout, block, payload, self.buffer.memory(), check) {
                    true if sends => self.job.wrote_weights(&self.buffer, &[block]),
                    true => {}
                    false => bad.store(number, Ordering::Relaxed),
                }
            }
        };
        let threads = CORES.min(MAX_COPIERS).min((self.size / BYTES_A_COPIER) as usize).max(1);
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // This thread copies all that no other one does.
                let _ = std::thread::Builder::new().name("publishes".into()).spawn_scoped(scope, copy);
            }
            copy();
        });
        Some(bad.into_inner()).filter(|&bad| bad != u32::MAX).map(BlockId)
    }

    /// Whether [`Self::write_all`] is quick: it takes about as long as a few large writes. It needs no other thread then.
    pub fn is_short(&self) -> bool {
        self.size <= BYTES_A_COPIER
    }

    /// Whether something was written.
    pub fn is_open(&self) -> bool {
        let state = self.state.lock();
        !state.sealed && !state.written.is_empty()
    }

    /// Whether nobody waits for its commit any more.
    pub fn is_withdrawn(&self) -> bool {
        self.state.lock().withdrawn
    }

    /// The refused write because of which the written bytes must not become a version.
    pub fn failed(&self) -> Option<WriteRefused> {
        self.state.lock().failed
    }

    /// The memory that becomes the version.
    pub fn buffer(&self) -> &Region {
        &self.buffer
    }

    /// Ranges written so far, sorted and disjoint.
    pub fn written(&self) -> Vec<Range<u64>> {
        self.state.lock().written.clone()
    }

    /// Searches what was written for NaN and Inf, if the job refuses those. Most of it was searched when it was copied.
    ///
    /// # Errors
    /// [`ShardError::NonFinite`].
    pub fn check_finite(&self) -> Result<(), ShardError> {
        if !self.job.rejects_nonfinite() {
            return Ok(());
        }
        let (suspects, ranges) = {
            let mut state = self.state.lock();
            let suspects = state.suspects.clone();
            // What is written meanwhile adds others.
            state.suspects.clear();
            let blocks = suspects.ones().map(|block| self.job.layout().block_bytes(BlockId(block as u32)));
            let ranges: Vec<Range<u64>> = blocks.flat_map(|block| within(&state.written, &block)).collect();
            (suspects, ranges)
        };
        let checked = self.job.check_finite(&self.buffer, &ranges);
        checked.inspect_err(|_| self.state.lock().suspects.union_with(&suspects))
    }

    /// Whether every byte was written.
    pub fn is_complete(&self) -> bool {
        matches!(&self.state.lock().written[..], [all] if *all == (0..self.size))
    }

    /// Publishes what was written as the next version; the rest keeps its value. `done` gets Ok once the
    /// version is out. Whatever the outcome, this publisher is done. `meta` says something of the version.
    pub fn commit(
        &self,
        meta: Meta,
        timeout: Duration,
        done: impl FnOnce(Result<(), ShardError>) + Send + 'static,
    ) {
        let (written, checked) = {
            let mut state = match self.seal(timeout) {
                Ok(state) => state,
                Err(error) => return done(Err(error)),
            };
            let is_whole = matches!(&state.written[..], [all] if *all == (0..self.size));
            let checked = is_whole && state.suspects.is_clear();
            (std::mem::take(&mut state.written), checked)
        };
        let (job, buffer) = (Arc::clone(&self.job), self.buffer.clone());
        let done = move |result: Result<(), ShardError>| {
            if result.is_err() {
                job.rewrites_weights(&buffer);
            }
            done(result);
        };
        self.job.publish(self.buffer.clone(), &written, meta, checked, timeout, Box::new(done));
    }

    /// Ends the writing of a part of another job's weights, and hands all of its bytes to `publish`, with those of the
    /// newest version here.
    ///
    /// # Errors
    /// [`ShardError::TimedOut`] if writes are still in flight after `timeout`.
    ///
    /// # Panics
    /// If not all bytes were written.
    pub fn commit_part<R>(
        &self,
        timeout: Duration,
        publish: impl FnOnce(&[u8], Option<(Version, &[u8])>) -> R,
    ) -> Result<R, ShardError> {
        drop(self.seal(timeout)?);
        assert!(self.is_complete(), "a part that is published");
        let newest = Reader::newest(&self.job);
        let newest = newest.as_ref().map(|newest| (newest.version(), newest.bytes(0..self.size)));
        // SAFETY: all was written, and nobody writes after the seal.
        Ok(publish(unsafe { self.buffer.memory().bytes(0..self.size as usize) }, newest))
    }

    /// Nothing is written any more.
    fn seal(&self, timeout: Duration) -> Result<MutexGuard<'_, PublisherState>, ShardError> {
        let (mut state, deadline) = (self.state.lock(), Instant::now() + timeout);
        while !state.in_flight.is_empty() {
            if self.idle.wait_until(&mut state, deadline).timed_out() {
                return Err(ShardError::TimedOut("writes are still in flight".into()));
            }
        }
        state.sealed = true;
        state.sent.clear();
        Ok(state)
    }

    /// Ends the wait for a commit, also for one to come: unless it has begun, it does not take place.
    pub fn withdraw(&self) {
        self.state.lock().withdrawn = true;
        self.job.withdraw_assign(self.buffer.key());
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if !self.state.get_mut().sent.is_clear() {
            self.job.rewrites_weights(&self.buffer);
        }
    }
}

impl PublisherState {
    /// Whether all of a block was written, and nobody but the caller writes it at the moment. What may have to be refused
    /// does not count.
    fn is_whole(&self, layout: &ModelLayout, block: BlockId) -> bool {
        let all = layout.block_bytes(block);
        let has = |range: &Range<u64>| range.start <= all.start && range.end >= all.end;
        let touches = |range: &Range<u64>| range.start < all.end && all.start < range.end;
        let at = self.written.partition_point(|range| range.end < all.end);
        self.written.get(at).is_some_and(has)
            && self.in_flight.iter().filter(|range| touches(range)).count() <= 1
            && !self.suspects.contains(block.index())
    }
}

/// The parts of sorted, disjoint ranges in `block`.
fn within(written: &[Range<u64>], block: &Range<u64>) -> Vec<Range<u64>> {
    let first = written.partition_point(|range| range.end <= block.start);
    let inside = written[first..].iter().take_while(|range| range.start < block.end);
    inside.map(|range| range.start.max(block.start)..range.end.min(block.end)).collect()
}
