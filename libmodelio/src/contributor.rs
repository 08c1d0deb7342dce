//! The client side of one learner: takes writes at any offset, ships whole blocks to the shard
//! while the program still writes the rest, and ends the contribution at fsync or close.
//!
//! Copies of a byte on this path: none where its block arrives whole and the shard reduces it on
//! arrival; one (into staging) where it does not.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fixedbitset::FixedBitSet;
use parking_lot::{Condvar, Mutex};

use crate::ids::{Incarnation, LearnerId, Step};
use crate::layout::ModelLayout;
use crate::mmap::Mapping;
use crate::tracker::{ContributionTracker, Piece, WriteRefused};
use crate::transport::{
    BlockSlot, Channel, CommitNotice, Completion, Device, Message, Placement, Region, Reply, ShardError,
};

/// Why a write or commit failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContributeError {
    /// Wrong use; nothing changed.
    #[error(transparent)]
    Refused(#[from] WriteRefused),
    /// The shard's word.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// An earlier contribution of this learner is still being committed.
    #[error("the previous contribution is still being committed")]
    Busy,
}

/// What an unwritten byte of a partly written block counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Zero: it is a gradient.
    Zero,
    /// Its present value: the contribution holds weights (reducer `assign`).
    Present,
}

/// Bytes through this client, for status and for counting copies.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Written by programs.
    pub written: AtomicU64,
    /// Reduced straight from the request buffer or the mapped region.
    pub reduced_on_arrival: AtomicU64,
    /// Copied once into staging.
    pub staged: AtomicU64,
}

struct State {
    tracker: ContributionTracker,
    /// The step that the open contribution is; `None` while none is open.
    step: Option<Step>,
    committing: bool,
    /// Why the open contribution cannot succeed any more.
    failed: Option<ShardError>,
    /// Where this contribution gathers what the shard does not reduce on arrival.
    staging: Region,
    /// A second one, for a learner that writes ahead while the shard still reads the first.
    spare: Option<Region>,
    /// Blocks that were completed with zeros at the end.
    unchecked: FixedBitSet,
}

/// One learner's contribution path. Shared by all its file handles.
pub struct Contributor {
    learner: LearnerId,
    incarnation: Incarnation,
    layout: Arc<ModelLayout>,
    device: Arc<dyn Device>,
    channel: Arc<dyn Channel>,
    /// What programs map through `gradients`. Never used for write(2), so that a mapping always is
    /// what its program stored.
    mapped: Region,
    state: Mutex<State>,
    /// Signalled when no piece is in flight.
    idle: Condvar,
    traffic: Arc<Traffic>,
}

/// Most pieces that one request can have without an allocation: 1 MiB over 64 KiB blocks, and two
/// ends where it is not aligned.
const PIECES: usize = 18;

impl Contributor {
    /// For a learner that has joined through `channel`. Its regions take memory when they are used.
    ///
    /// # Errors
    /// When memory cannot be had or registered.
    pub fn new(
        learner: LearnerId,
        incarnation: Incarnation,
        layout: Arc<ModelLayout>,
        device: Arc<dyn Device>,
        channel: Arc<dyn Channel>,
        traffic: Arc<Traffic>,
    ) -> Result<Contributor, ShardError> {
        let state = Mutex::new(State {
            tracker: ContributionTracker::new(layout.size(), layout.block_size()),
            step: None,
            committing: false,
            failed: None,
            staging: region(&*device, "gradfs-staging", &layout)?,
            spare: None,
            unchecked: FixedBitSet::with_capacity(layout.blocks() as usize),
        });
        let mapped = region(&*device, "gradfs-gradients", &layout)?;
        Ok(Contributor {
            learner,
            incarnation,
            layout,
            device,
            channel,
            mapped,
            state,
            idle: Condvar::new(),
            traffic,
        })
    }

    /// The learner.
    pub fn learner(&self) -> LearnerId {
        self.learner
    }

    /// Its life.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The region that programs map through `gradients`.
    pub fn mapped(&self) -> &Region {
        &self.mapped
    }

    /// Stores bytes that a program put into its mapping of `gradients`, where the kernel hands them over
    /// instead of mapping the region itself.
    ///
    /// # Errors
    /// [`WriteRefused::PastEnd`].
    pub fn store_mapped(&self, offset: u64, data: &[u8]) -> Result<(), WriteRefused> {
        let (size, end) = (self.layout.size(), offset.saturating_add(data.len() as u64));
        // The last page of a mapping reaches past the end; those bytes belong to nobody.
        let len = size.saturating_sub(offset).min(data.len() as u64) as usize;
        if len == 0 && !data.is_empty() {
            return Err(WriteRefused::PastEnd { offset, end, size });
        }
        // SAFETY: this is the program's own store; the shard reads the region only in its fsync.
        unsafe { self.mapped.memory().write(offset as usize, &data[..len]) };
        Ok(())
    }

    /// Reads the mapped region; bytes past its end stay as they are.
    pub fn load_mapped(&self, offset: u64, bytes: &mut [u8]) {
        let len = self.layout.size().saturating_sub(offset).min(bytes.len() as u64) as usize;
        if len > 0 {
            let start = offset as usize;
            // SAFETY: as good as any read(2) of a file that others have mapped: each byte is old or new.
            bytes[..len].copy_from_slice(unsafe { self.mapped.memory().bytes(start..start + len) });
        }
    }

    /// Takes the staging memory now rather than page by page under the first contribution.
    ///
    /// # Errors
    /// When the memory is not there.
    pub fn prefault(&self) -> std::io::Result<()> {
        let staging = Arc::clone(self.state.lock().staging.memory());
        staging.prefault()
    }

    /// Whether something was written since the last commit.
    pub fn is_open(&self) -> bool {
        self.state.lock().step.is_some()
    }

    /// Bytes of the open contribution so far.
    pub fn open_bytes(&self) -> u64 {
        self.state.lock().tracker.bytes()
    }

    /// Takes `data` at `offset`. Blocks that become complete go to the shard before this returns.
    ///
    /// # Errors
    /// [`ContributeError::Refused`] and [`ContributeError::Busy`] change nothing. A shard's refusal of
    /// a block spoils the contribution: later writes and the commit report it, and it counts nowhere.
    pub fn write(&self, offset: u64, data: &[u8], timeout: Duration) -> Result<(), ContributeError> {
        if data.is_empty() {
            return Ok(());
        }
        let mut pieces = PieceList::default();
        let (step, staging) = {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            if state.committing {
                return Err(ContributeError::Busy);
            }
            if let Some(failed) = &state.failed {
                return Err(failed.clone().into());
            }
            // Refusals come first, so that a wrong write opens nothing.
            state.tracker.begin(offset, data.len() as u64, |piece| pieces.push(piece))?;
            let step = match state.step {
                Some(step) => step,
                None => match self.open(state, timeout) {
                    Ok(step) => step,
                    Err(error) => {
                        state.tracker.reset();
                        return Err(error.into());
                    }
                },
            };
            (step, Arc::clone(state.staging.memory()))
        };
        self.traffic.written.fetch_add(data.len() as u64, Ordering::Relaxed);
        let mut outcome = Ok(());
        pieces.for_each(|piece| {
            let local = (piece.bytes.start - offset) as usize..(piece.bytes.end - offset) as usize;
            let result = self.take(piece, &data[local], step, &staging);
            if outcome.is_ok() {
                outcome = result;
            }
        });
        let mut state = self.state.lock();
        if let Err(error) = &outcome {
            state.failed.get_or_insert_with(|| error.clone());
        }
        if !state.tracker.is_busy() {
            self.idle.notify_all();
        }
        outcome.map_err(ContributeError::from)
    }

    fn open(&self, state: &mut State, timeout: Duration) -> Result<Step, ShardError> {
        let message = Message::Open { learner: self.learner };
        let Reply::Opened { step, staging_lent } = request(&*self.channel, message, timeout)? else {
            return Err(ShardError::Unreachable);
        };
        if staging_lent {
            let spare = match state.spare.take() {
                Some(spare) => spare,
                None => region(&*self.device, "gradfs-staging", &self.layout)?,
            };
            state.spare = Some(std::mem::replace(&mut state.staging, spare));
        }
        state.step = Some(step);
        Ok(step)
    }

    /// Ships or stages one piece. Its in-flight mark is always taken back.
    fn take(&self, piece: &Piece, data: &[u8], step: Step, staging: &Mapping) -> Result<(), ShardError> {
        let slot = |block| BlockSlot { learner: self.learner, incarnation: self.incarnation, step, block };
        let start = piece.bytes.start as usize;
        if piece.whole {
            let placed = self.channel.write(data, slot(piece.block));
            if matches!(placed, Ok(Placement::Deferred)) {
                // SAFETY: the tracker marked the block as sent, so no other write enters its bytes, and the
                // shard reads them only after the commit, which waits for this piece.
                unsafe { staging.write(start, data) };
                self.traffic.staged.fetch_add(data.len() as u64, Ordering::Relaxed);
            } else {
                self.traffic.reduced_on_arrival.fetch_add(data.len() as u64, Ordering::Relaxed);
            }
            self.state.lock().tracker.sent(piece.block, matches!(placed, Ok(Placement::Deferred)));
            return placed.map(drop);
        }
        // SAFETY: nobody reads the block before it is complete and all its copies are in. Two writers of
        // the same bytes race as two write(2) calls on any file do: one of them wins, byte by byte.
        unsafe { staging.write(start, data) };
        self.traffic.staged.fetch_add(data.len() as u64, Ordering::Relaxed);
        if !self.state.lock().tracker.copied(piece.block) {
            return Ok(());
        }
        let block = self.layout.block_bytes(piece.block);
        // SAFETY: the block is complete, and marked as sent: no write enters it any more.
        let whole = unsafe { staging.bytes(block.start as usize..block.end as usize) };
        let placed = self.channel.write(whole, slot(piece.block));
        self.state.lock().tracker.sent(piece.block, matches!(placed, Ok(Placement::Deferred)));
        placed.map(drop)
    }

    /// Ends the contribution. `done` gets Ok once every block is taken for good; without anything
    /// written it gets Ok at once.
    ///
    /// After a timeout the contribution is still open: commit again, or [`Self::abort`].
    pub fn commit(
        self: &Arc<Self>,
        fill: Fill,
        timeout: Duration,
        done: impl FnOnce(Result<(), ContributeError>) + Send + 'static,
    ) {
        let (step, notice) = {
            let mut state = self.state.lock();
            if state.committing {
                drop(state);
                return done(Err(ContributeError::Busy));
            }
            let deadline = Instant::now() + timeout;
            while state.tracker.is_busy() {
                if self.idle.wait_until(&mut state, deadline).timed_out() {
                    drop(state);
                    return done(Err(ShardError::TimedOut("writes are still in flight").into()));
                }
            }
            if let Some(failed) = state.failed.clone() {
                drop(state);
                return done(Err(failed.into()));
            }
            let Some(step) = state.step else {
                drop(state);
                return done(Ok(()));
            };
            for gaps in state.tracker.seal() {
                state.unchecked.insert(gaps.block.index());
                for missing in gaps.missing {
                    if let Err(error) = self.fill(&state.staging, missing, fill) {
                        state.failed = Some(error.clone());
                        drop(state);
                        return done(Err(error.into()));
                    }
                }
            }
            state.committing = true;
            let notice = CommitNotice {
                sent: state.tracker.sent_blocks().clone(),
                deferred: state.tracker.deferred_blocks().clone(),
                unchecked: state.unchecked.clone(),
                staging: state.staging.clone(),
                lendable: true,
            };
            (step, notice)
        };
        self.send_commit(step, notice, timeout, done);
    }

    /// Ships the whole mapped region as one contribution: what a program stored through mmap. `done`
    /// gets the outcome as for [`Self::commit`], but a failed one leaves nothing open.
    pub fn commit_mapped(
        self: &Arc<Self>,
        timeout: Duration,
        done: impl FnOnce(Result<(), ContributeError>) + Send + 'static,
    ) {
        let mut state = self.state.lock();
        if state.committing || state.step.is_some() {
            drop(state);
            return done(Err(ContributeError::Busy));
        }
        let step = match self.open(&mut state, timeout) {
            Ok(step) => step,
            Err(error) => {
                drop(state);
                return done(Err(error.into()));
            }
        };
        let mut all = FixedBitSet::with_capacity(self.layout.blocks() as usize);
        all.insert_range(..);
        state.committing = true;
        drop(state);
        self.traffic.written.fetch_add(self.layout.size(), Ordering::Relaxed);
        self.traffic.reduced_on_arrival.fetch_add(self.layout.size(), Ordering::Relaxed);
        let notice = CommitNotice {
            sent: all.clone(),
            deferred: all.clone(),
            unchecked: all,
            staging: self.mapped.clone(),
            lendable: false,
        };
        let this = Arc::clone(self);
        self.send_commit(step, notice, timeout, move |result| {
            if result.is_err() {
                // The program still has the values in its mapping; nothing must linger for the next one.
                this.abort();
            }
            done(result);
        });
    }

    fn send_commit(
        self: &Arc<Self>,
        step: Step,
        notice: CommitNotice,
        timeout: Duration,
        done: impl FnOnce(Result<(), ContributeError>) + Send + 'static,
    ) {
        let this = Arc::clone(self);
        let completion: Completion = Box::new(move |result| {
            let mut state = this.state.lock();
            state.committing = false;
            if result.is_ok() {
                state.tracker.reset();
                state.unchecked.clear();
                state.step = None;
            }
            drop(state);
            done(result.map(drop).map_err(ContributeError::from));
        });
        self.channel.send(Message::Commit { learner: self.learner, step, notice }, timeout, completion);
    }

    /// Drops the open contribution; the shard forgets what it took of it.
    pub fn abort(&self) {
        let mut state = self.state.lock();
        // A copy that still runs ends within microseconds; the deadline is for a stuck machine.
        let deadline = Instant::now() + Duration::from_secs(10);
        while state.tracker.is_busy() && !self.idle.wait_until(&mut state, deadline).timed_out() {}
        if state.committing {
            return;
        }
        if state.step.take().is_some() {
            self.channel.send(
                Message::Abort { learner: self.learner },
                Duration::from_secs(10),
                Box::new(|_| {}),
            );
        }
        state.tracker.reset();
        state.unchecked.clear();
        state.failed = None;
    }

    fn fill(&self, staging: &Region, missing: std::ops::Range<u64>, fill: Fill) -> Result<(), ShardError> {
        let range = missing.start as usize..missing.end as usize;
        // SAFETY: called with the state locked and nothing in flight: no write is in these bytes.
        let bytes = unsafe { staging.memory().bytes_mut(range) };
        match fill {
            Fill::Zero => bytes.fill(0),
            Fill::Present => {
                self.channel.read(missing.start, bytes)?;
            }
        }
        Ok(())
    }
}

fn region(device: &dyn Device, name: &str, layout: &ModelLayout) -> Result<Region, ShardError> {
    let memory = Mapping::memfd(name, layout.size() as usize)
        .map_err(|error| ShardError::OutOfMemory(error.to_string()))?;
    device.register(Arc::new(memory))
}

/// Sends `message` and waits for the answer, for at most `timeout` and a second.
///
/// # Errors
/// What the shard says, or [`ShardError::TimedOut`].
pub fn request(channel: &dyn Channel, message: Message, timeout: Duration) -> Result<Reply, ShardError> {
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    channel.send(
        message,
        timeout,
        Box::new(move |result| {
            let _ = sender.send(result);
        }),
    );
    receiver
        .recv_timeout(timeout.saturating_add(Duration::from_secs(1)))
        .unwrap_or(Err(ShardError::TimedOut("the shard did not answer")))
}

/// Pieces of one request, on the stack for all but outsized ones.
struct PieceList {
    inline: [Option<Piece>; PIECES],
    len: usize,
    more: Vec<Piece>,
}

impl Default for PieceList {
    fn default() -> PieceList {
        PieceList { inline: [const { None }; PIECES], len: 0, more: Vec::new() }
    }
}

impl PieceList {
    fn push(&mut self, piece: Piece) {
        if let Some(slot) = self.inline.get_mut(self.len) {
            *slot = Some(piece);
            self.len += 1;
        } else {
            self.more.push(piece);
        }
    }

    fn for_each(&self, mut each: impl FnMut(&Piece)) {
        self.inline[..self.len].iter().flatten().chain(&self.more).for_each(&mut each);
    }
}
