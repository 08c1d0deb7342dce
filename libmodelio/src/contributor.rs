//! The client side of one learner: takes writes at any offset, ships whole blocks to the shard
//! while the program still writes the rest, and ends the contribution at fsync or close.
//!
//! Copies of a byte on this path: none where its block arrives whole and the shard reduces it on
//! arrival; one (into staging) where it does not.
//!
//! The job may run other requests' completions before it returns, so nothing is sent under the lock
//! that could wake somebody: only the opening of a contribution, which answers nobody else.
//!
//! Holds `unsafe` for entering the staging regions; see [`crate::bytes::mmap`] for the rule.

mod commit;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fixedbitset::FixedBitSet;
use parking_lot::{Condvar, Mutex};

use crate::bytes::mmap::Mapping;
use crate::client::{Job, Opening, wait_for};
use crate::tracker::{ContributionTracker, Piece, WriteRefused};
use crate::transport::{BlockSlot, Placement, Region, RegionKey, ShardError};
use crate::vocabulary::ids::{BlockId, Incarnation, LearnerId, Step};
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::partly::PartlyWritten;

/// Why a write or commit failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContributeError {
    /// Wrong use; nothing changed.
    #[error(transparent)]
    Refused(#[from] WriteRefused),
    /// The shard's word.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// What was written ends in the middle of an element.
    #[error("what was written ends at byte {0}, in the middle of an element; the contribution is dropped")]
    HalfElement(u64),
    /// An earlier contribution of this learner is still being committed.
    #[error("the previous contribution is still being committed")]
    Busy,
    /// Somebody else's failure, or death, took the caller's bytes along.
    #[error("the contribution that this was part of was dropped: another program that wrote into it failed")]
    Dropped,
}

/// Which of a learner's contributions somebody wrote into, for those who share one: its end is everybody's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Share {
    /// None.
    #[default]
    None,
    /// The one of this number, as [`Contributor::write`] has told.
    Of(u64),
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
    /// A commit or an abort is on its way: nobody else may touch the contribution.
    committing: bool,
    /// Why the open contribution cannot succeed any more.
    failed: Option<ContributeError>,
    /// Where this contribution gathers what the shard does not reduce on arrival.
    staging: Region,
    /// A second one, for a learner that writes ahead while the shard still reads the first.
    spare: Option<Region>,
    /// The last two steps that were committed, or tried to be, and where their payload lies.
    shipped: [Option<(Step, RegionKey)>; 2],
    /// Blocks that were completed with zeros at the end.
    unchecked: FixedBitSet,
    /// What of those was written.
    partly: PartlyWritten,
    /// Tensors of which something was written.
    tensors: FixedBitSet,
    /// Counts the contributions that were opened.
    number: u64,
    /// Those that were dropped and may have been several programs'.
    dropped: BTreeSet<u64>,
    /// What is `committing` is an abort.
    aborting: bool,
    /// Others who wait for the commit that is on its way.
    joined: Vec<Done>,
}

/// Whoever waits for the end of a contribution.
type Done = Box<dyn FnOnce(Result<(), ContributeError>) + Send>;

/// Dropped contributions that are remembered. Older ones have long been closed by all who wrote into them.
const MAX_DROPPED: usize = 1024;

impl State {
    /// Whether `share` is of a contribution that was dropped.
    fn has_dropped(&self, share: Share) -> bool {
        matches!(share, Share::Of(number) if self.dropped.contains(&number))
    }

    /// A commit of `step` goes off.
    fn ship(&mut self, step: Step, from: RegionKey) {
        if self.shipped[0].is_some_and(|(last, _)| last != step) {
            self.shipped[1] = self.shipped[0];
        }
        self.shipped[0] = Some((step, from));
    }

    /// Whether the step before `step` was committed from what is the staging region now.
    fn is_in_staging(&self, step: Step) -> bool {
        let before = self.shipped.iter().flatten().find(|(shipped, _)| shipped.next() == step);
        before.is_some_and(|(_, key)| *key == self.staging.key())
    }

    /// No contribution is open any more; the one that was is `taken`, or dropped.
    fn reset(&mut self, taken: bool) {
        if self.step.is_some() {
            if !taken {
                self.dropped.insert(self.number);
                if self.dropped.len() > MAX_DROPPED {
                    self.dropped.pop_first();
                }
            }
            self.number += 1;
        }
        self.tracker.reset();
        self.unchecked.clear();
        self.partly.clear();
        self.tensors.clear();
        self.step = None;
        self.failed = None;
    }
}

/// One learner's contribution path. Shared by all its file handles.
pub struct Contributor {
    learner: LearnerId,
    incarnation: Incarnation,
    layout: Arc<ModelLayout>,
    job: Arc<Job>,
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
    /// For a learner that has joined `job`. Its regions take memory when they are used.
    ///
    /// # Errors
    /// When memory cannot be had.
    pub fn new(
        job: Arc<Job>,
        (learner, incarnation): (LearnerId, Incarnation),
        traffic: Arc<Traffic>,
    ) -> Result<Contributor, ShardError> {
        let layout = Arc::clone(job.layout());
        let state = Mutex::new(State {
            tracker: ContributionTracker::new(layout.size(), layout.block_size()),
            step: None,
            committing: false,
            failed: None,
            staging: region(&job, "gradfs-staging")?,
            spare: None,
            shipped: [None; 2],
            unchecked: FixedBitSet::with_capacity(layout.blocks() as usize),
            partly: PartlyWritten::default(),
            tensors: FixedBitSet::with_capacity(layout.tensors().len()),
            number: 1,
            dropped: BTreeSet::new(),
            aborting: false,
            joined: Vec::new(),
        });
        let mapped = region(&job, "gradfs-gradients")?;
        Ok(Contributor { learner, incarnation, layout, job, mapped, state, idle: Condvar::new(), traffic })
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

    /// Takes `data` at `offset`. Blocks that become complete go to the shard before this returns. `share` is what
    /// the same program's writes have written into, if that has not ended for it; it is told by a write that fails,
    /// too, once something of it was taken.
    ///
    /// # Errors
    /// [`ContributeError::Refused`], [`ContributeError::Busy`] and [`ContributeError::Dropped`] change nothing, but for
    /// [`WriteRefused::PastEnd`] where something was written before. That, and a shard's refusal of a block, spoil the
    /// contribution: later writes and the commit report it, and it counts nowhere.
    pub fn write(
        &self,
        share: &mut Share,
        offset: u64,
        data: &[u8],
        timeout: Duration,
    ) -> Result<(), ContributeError> {
        if data.is_empty() {
            return Ok(());
        }
        let mut pieces = PieceList::default();
        let (step, staging) = {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            if state.has_dropped(*share) {
                return Err(ContributeError::Dropped);
            }
            if state.committing {
                return Err(ContributeError::Busy);
            }
            if let Some(failed) = &state.failed {
                return Err(failed.clone());
            }
            // Refusals come first, so that a wrong write opens nothing.
            let begun = state.tracker.begin(offset, data.len() as u64, |piece| pieces.push(piece));
            if let Err(refused) = begun {
                // An array that is too long is another one than was meant, and so is what came of it before.
                if state.step.is_some() && matches!(refused, WriteRefused::PastEnd { .. }) {
                    state.failed = Some(refused.into());
                }
                return Err(refused.into());
            }
            let step = match state.step {
                Some(step) => step,
                None => match self.open(state, timeout) {
                    Ok(step) => step,
                    Err(error) => {
                        state.tracker.reset();
                        // So that fsync or close does not say that all is well.
                        state.failed = Some(error.clone().into());
                        return Err(error.into());
                    }
                },
            };
            let written = offset..offset + data.len() as u64;
            state.tensors.insert_range(self.layout.tensors_in(&written));
            *share = Share::Of(state.number);
            (step, state.staging.clone())
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
        outcome.map_err(ContributeError::from)
    }

    /// Called with the state locked: the shard answers an opening without answering anybody else.
    fn open(&self, state: &mut State, timeout: Duration) -> Result<Step, ShardError> {
        let Opening { step, staging_lent } = match self.job.open_known(self.learner, timeout)? {
            Some(opening) => opening,
            None => wait_for(timeout, |done| self.job.open(self.learner, timeout, done))?,
        };
        // The shard still reads the step before this one. That need not be what was committed last: a commit
        // that timed out may have been taken or not, and this may be the second try after an abort.
        if staging_lent && state.is_in_staging(step) {
            let spare = match state.spare.take() {
                Some(spare) => spare,
                None => region(&self.job, "gradfs-staging")?,
            };
            state.spare = Some(std::mem::replace(&mut state.staging, spare));
        }
        state.step = Some(step);
        Ok(step)
    }

    /// Ships or stages one piece. Its in-flight mark is always taken back.
    fn take(&self, piece: &Piece, data: &[u8], step: Step, staging: &Region) -> Result<(), ShardError> {
        let start = piece.bytes.start as usize;
        if piece.whole {
            let placed = self.offer(piece.block, data, step, Some(staging));
            if matches!(placed, Ok(Placement::Deferred)) {
                self.traffic.staged.fetch_add(data.len() as u64, Ordering::Relaxed);
            } else if placed.is_ok() {
                self.traffic.reduced_on_arrival.fetch_add(data.len() as u64, Ordering::Relaxed);
            }
            return self.placed(piece, placed);
        }
        // SAFETY: nobody reads the block before it is complete and all its copies are in. Two writers of
        // the same bytes race as two write(2) calls on any file do: one of them wins, byte by byte.
        unsafe { staging.memory().write(start, data) };
        self.traffic.staged.fetch_add(data.len() as u64, Ordering::Relaxed);
        {
            let mut state = self.state.lock();
            if !state.tracker.copied(piece.block) {
                self.wake_if_idle(&state);
                return Ok(());
            }
        }
        let block = self.layout.block_bytes(piece.block);
        // SAFETY: the block is complete, and marked as sent: no write enters it any more.
        let whole = unsafe { staging.memory().bytes(block.start as usize..block.end as usize) };
        let placed = self.offer(piece.block, whole, step, None);
        self.placed(piece, placed)
    }

    /// Offers a whole block, for the first time in this contribution.
    fn offer(
        &self,
        block: BlockId,
        data: &[u8],
        step: Step,
        room: Option<&Region>,
    ) -> Result<Placement, ShardError> {
        let slot = BlockSlot { learner: self.learner, incarnation: self.incarnation, step, block };
        match self.job.write(data, slot, room)? {
            // The shard took this step without this block: a commit that timed out here had arrived there.
            Placement::Duplicate => Err(ShardError::NotAllowed(format!(
                "step {step} was already taken: block {block} came too late"
            ))),
            placed => Ok(placed),
        }
    }

    /// Notes what became of an offered block, and a failure in the same moment: a commit that finds nothing
    /// in flight finds all failures.
    fn placed(&self, piece: &Piece, placed: Result<Placement, ShardError>) -> Result<(), ShardError> {
        let mut state = self.state.lock();
        state.tracker.sent(piece.block, matches!(placed, Ok(Placement::Deferred)));
        if let Err(error) = &placed {
            state.failed.get_or_insert_with(|| error.clone().into());
        }
        self.wake_if_idle(&state);
        placed.map(drop)
    }

    fn wake_if_idle(&self, state: &State) {
        if !state.tracker.is_busy() {
            self.idle.notify_all();
        }
    }
}

fn region(job: &Job, name: &str) -> Result<Region, ShardError> {
    let memory = Mapping::memfd(name, job.layout().size() as usize);
    Ok(job.register(Arc::new(memory.map_err(|error| ShardError::no_memory(&error))?)))
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
