//! A model as a disk (reducer `assign`): what is written is read at once, may be written again, and becomes a version
//! when it is published.
//!
//! A disk has memory of its own for the parts that were written. Reads of the rest see the newest version.
//! [`Chunks`] decides which part lies where.
//!
//! This module holds `unsafe` for entering that memory. Writers of the same bytes race as they do on any disk, and so
//! do a reader and a writer of the same bytes. Chunks are copied from a version only before anybody writes them, under
//! the lock.

mod chunks;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use self::chunks::{Begun, Chunks, Source};
use crate::bytes::available;
use crate::bytes::block::{self, span};
use crate::bytes::mmap::Mapping;
use crate::bytes::region::Region;
use crate::client::{Done, Job};
use crate::reader::Reader;
use crate::transport::stream::{Guard, LentPayload, Target};
use crate::vocabulary::block_ranges::MAX_RANGES;
use crate::vocabulary::ids::Version;
use crate::vocabulary::shard_error::ShardError;
use crate::vocabulary::transport_kind::TransportKind;

/// The length of a chunk, in bytes, if blocks are not shorter. A write of less copies the rest of its chunk once.
const CHUNK: u64 = 64 << 10;
/// The most bytes that are copied or zeroed under the lock.
const MAX_BYTES_UNDER_LOCK: u64 = 1 << 20;

struct DiskState {
    chunks: Chunks,
    /// The version that unwritten bytes are read from.
    base: Arc<Reader>,
    /// Those that wait for the publication that is on its way.
    now: Vec<Done<()>>,
    /// Those that wait for the one after it.
    next: Vec<Done<()>>,
}

/// A disk.
pub struct Disk {
    job: Arc<Job>,
    memory: Arc<Mapping>,
    /// The same, registered once.
    region: Region,
    state: Mutex<DiskState>,
}

impl Disk {
    /// The disk of a job's model.
    ///
    /// # Errors
    /// When there is no memory, or no version yet.
    pub fn new(job: Arc<Job>) -> Result<Disk, ShardError> {
        let size = job.layout().size();
        let memory = match job.kind() {
            // Huge pages.
            TransportKind::InProcess => Mapping::anonymous(size as usize),
            // Shards on this host map it.
            _ => Mapping::memfd("gradfs-disk", size as usize),
        };
        let memory = memory.map_err(|error| ShardError::no_memory(&error))?;
        let base = Arc::new(Reader::newest(&job).ok_or(ShardError::Unreachable)?);
        let chunk = CHUNK.min(job.layout().block_size().into());
        let chunks = Chunks::new(size, chunk, base.version());
        let state = DiskState { chunks, base, now: Vec::new(), next: Vec::new() };
        let memory = Arc::new(memory);
        let region = job.register(Arc::clone(&memory));
        Ok(Disk { job, memory, region, state: Mutex::new(state) })
    }

    /// Promises the memory of what is written to whoever is about to write. It costs nothing once that is done.
    ///
    /// # Errors
    /// [`ShardError::OutOfMemory`], with the reason.
    pub fn promise(&self) -> Result<(), ShardError> {
        let refused =
            |error| ShardError::OutOfMemory(format!("no memory for what is written to the disk: {error}"));
        available::promise_before_spares(&self.memory).map_err(refused)
    }

    /// The version that unwritten bytes are read from.
    pub fn version(&self) -> Version {
        self.state.lock().chunks.version()
    }

    /// Whether something was written that is in no version.
    pub fn is_changed(&self) -> bool {
        self.state.lock().chunks.is_changed()
    }

    /// The state, in which unwritten bytes are those of the newest version. A version is let go of outside of the lock,
    /// because that may call others back.
    fn up_to_date(&self) -> MutexGuard<'_, DiskState> {
        let newest = self.job.version();
        let mut state = self.state.lock();
        if state.chunks.would_see(newest) {
            let opened = MutexGuard::unlocked(&mut state, || Reader::open(&self.job, newest));
            let Some(reader) = opened.map(Arc::new) else { return state };
            let old = match state.chunks.see(newest) {
                true => std::mem::replace(&mut state.base, reader),
                false => reader,
            };
            MutexGuard::unlocked(&mut state, || drop(old));
        }
        state
    }

    /// The bytes of `range`, from where they lie.
    ///
    /// # Panics
    /// When `range` leaves the model.
    pub fn read(self: &Arc<Self>, range: Range<u64>, mut piece: impl FnMut(LentPayload)) {
        let state = self.up_to_date();
        let DiskState { chunks, base, .. } = &*state;
        chunks.read(range, |range, source| {
            piece(match source {
                Source::Version => base.piece(range),
                // SAFETY: the disk keeps the memory. A client that writes what it reads at the same time gets
                // something in between, as from any disk.
                Source::Memory => unsafe {
                    let bytes = self.memory.bytes(span(&range));
                    LentPayload::new(bytes, None, Arc::clone(&self.memory) as Guard)
                },
            });
        });
    }

    /// Begins to write `range`. The result has the memory, and the write lasts until it is dropped.
    ///
    /// # Panics
    /// When `range` leaves the model.
    pub fn write(self: &Arc<Self>, range: Range<u64>) -> Write {
        assert!(range.start <= range.end && range.end <= self.memory.len() as u64, "{range:?}");
        let mut state = self.up_to_date();
        let DiskState { chunks, base, .. } = &mut *state;
        let begun = chunks.write(&range, |gap| self.fill(base, gap));
        Write { disk: Arc::clone(self), range, begun }
    }

    /// Writes zeros to `range`.
    ///
    /// # Panics
    /// When `range` leaves the model.
    pub fn write_zeros(&self, range: &Range<u64>) {
        let mut start = range.start;
        while start < range.end {
            let piece = start..range.end.min((start / MAX_BYTES_UNDER_LOCK + 1) * MAX_BYTES_UNDER_LOCK);
            start = piece.end;
            let mut state = self.up_to_date();
            let DiskState { chunks, base, .. } = &mut *state;
            chunks.write_at_once(&piece, |gap| self.fill(base, gap));
            let bytes = span(&piece);
            assert!(bytes.end <= self.memory.len(), "{piece:?}");
            // SAFETY: it is in the memory, and no reference is made. Others may read or write it as far as clients of a
            // disk race.
            unsafe { self.memory.start().as_ptr().add(bytes.start).write_bytes(0, bytes.len()) };
        }
    }

    fn fill(&self, base: &Reader, gap: Range<u64>) {
        block::copy_gap(base.region().memory(), &self.memory, gap);
    }

    /// Copies the unwritten parts of blocks that were written, which a publication needs. Returns false when it has
    /// copied some and more are left.
    pub fn prepare(&self) -> bool {
        let mut state = self.up_to_date();
        let block = u64::from(self.job.layout().block_size());
        let DiskState { chunks, base, .. } = &mut *state;
        chunks.prepare(block, MAX_BYTES_UNDER_LOCK, |gap| self.fill(base, gap))
    }

    /// Publishes all writes that are over as a version, which takes the blocks that they have changed. `done` hears
    /// whether it did. After an error the bytes are published with the next call. [`Self::prepare`] keeps this short.
    pub fn publish(self: &Arc<Self>, timeout: Duration, done: Done<()>) {
        let mut state = self.up_to_date();
        if state.chunks.is_publishing() {
            state.next.push(done);
            return;
        }
        let block = u64::from(self.job.layout().block_size());
        let DiskState { chunks, base, now, .. } = &mut *state;
        let Some(blocks) = chunks.publish(block, MAX_RANGES, |gap| self.fill(base, gap)) else {
            drop(state);
            return done(Ok(()));
        };
        now.push(done);
        drop(state);
        let this = Arc::clone(self);
        let published = move |outcome| this.published(outcome, timeout);
        self.job.assign_blocks(&self.region, &blocks, timeout, Box::new(published));
    }

    fn published(self: &Arc<Self>, outcome: Result<(), ShardError>, timeout: Duration) {
        let newest = outcome.is_ok().then(|| Reader::newest(&self.job)).flatten().map(Arc::new);
        let mut state = self.state.lock();
        let old = match newest {
            Some(newest) if state.chunks.published(newest.version()) => {
                Some(std::mem::replace(&mut state.base, newest))
            }
            // Without a version that can be read, its chunks are published once more.
            unread => {
                state.chunks.refused();
                unread
            }
        };
        let now = std::mem::take(&mut state.now);
        let mut next = std::mem::take(&mut state.next);
        drop(state);
        drop(old);
        for done in now {
            done(outcome.clone());
        }
        // One publication serves all who have asked for it by now.
        let Some(first) = next.pop() else { return };
        let all = move |outcome: Result<(), ShardError>| {
            for done in next {
                done(outcome.clone());
            }
            first(outcome);
        };
        self.publish(timeout, Box::new(all));
    }
}

/// A write that has begun, and lasts until this is dropped.
pub struct Write {
    disk: Arc<Disk>,
    range: Range<u64>,
    begun: Begun,
}

impl Write {
    /// The memory to receive it in.
    pub fn target(&self) -> Target {
        let bytes = span(&self.range);
        let memory = &self.disk.memory;
        // SAFETY: the range was checked, and the guard keeps the memory. Others may read or write these bytes as far
        // as clients of a disk race.
        unsafe {
            let start = memory.start().as_ptr().add(bytes.start);
            Target::new(start, bytes.len(), Arc::clone(memory) as Guard)
        }
    }
}

impl Drop for Write {
    fn drop(&mut self) {
        self.disk.state.lock().chunks.wrote(&self.begun);
    }
}
