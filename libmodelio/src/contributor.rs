//! The contribution of one learner. It takes writes at any offset, ships whole blocks to the shard while the program
//! still writes the rest, and ends the contribution at fsync or close.
//!
//! A byte is not copied if its block arrives whole and the shard reduces it on arrival. Otherwise it is copied once,
//! into staging.
//!
//! The job may call other requests' completions before it returns. So nothing is sent under the lock that could wake
//! them, except the opening of a contribution, which answers no other request.
//!
//! This module holds `unsafe` for entering the staging regions; see [`crate::bytes::mmap`] for the rule.

mod commit;
mod coverage;
mod final_parts;
mod mapping;
mod models;
mod opening;
mod replicas;
mod staging;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use parking_lot::{Condvar, Mutex, MutexGuard};

use self::coverage::Coverage;
use self::final_parts::FinalParts;
use self::models::Models;
use self::opening::Asking;
pub use self::opening::Wrote;
use self::staging::Staging;
use crate::bytes::available;
use crate::bytes::mmap::Mapping;
use crate::bytes::region::Region;
use crate::client::Job;
use crate::mapped::MappedMemory;
use crate::tracker::{BlockPart, WriteRefused};
use crate::vocabulary::block_slot::{BlockSlot, Placement};
use crate::vocabulary::ids::{BlockId, Incarnation, LearnerId, Step};
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::shard_error::ShardError;

/// Why a write or commit failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContributeError {
    /// The caller's error. Nothing changed.
    #[error(transparent)]
    Refused(#[from] WriteRefused),
    /// The shard's error.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// The written bytes end in the middle of an element.
    #[error("what was written ends at byte {0}, in the middle of an element; the contribution is dropped")]
    HalfElement(u64),
    /// An averaged tensor was written in part.
    #[error(
        "a part of tensor {0:?} was written, whose values a rule in control/tensors averages: write all of it or \
         nothing; the contribution is dropped"
    )]
    PartOfAveraged(String),
    /// An earlier contribution of this learner is still being committed.
    #[error("the previous contribution is still being committed")]
    Busy,
    /// Another program has failed or died, and the caller's bytes were dropped with its contribution.
    #[error("the contribution that this was part of was dropped: another program that wrote into it failed")]
    Dropped,
    /// A commit without an answer counts after all.
    #[error("step {0}, whose end had no answer, counts after all: its contribution is not to be made again")]
    Counts(Step),
    /// What was taken back may count all the same.
    #[error("not taken back yet, and it may count: {0}; the coordinator is told as soon as it answers")]
    MayCount(ShardError),
    /// The next commit ships what was written, and not the mapping.
    #[error(
        "write(2) was used since the last fsync: the next one ships what was written, and not the mapping"
    )]
    Writing,
}

impl ContributeError {
    /// What a program sees that calls by files, or by the C library.
    pub fn errno(&self) -> Errno {
        match self {
            ContributeError::Shard(error) => error.errno(),
            ContributeError::Refused(refused) => refused.errno(),
            ContributeError::HalfElement(_)
            | ContributeError::PartOfAveraged(_)
            | ContributeError::Writing => Errno::EINVAL,
            ContributeError::Busy => Errno::EBUSY,
            ContributeError::Dropped | ContributeError::Counts(_) | ContributeError::MayCount(_) => {
                Errno::EIO
            }
        }
    }
}

/// The contribution of a learner that a program has written into. Programs that share a learner share the
/// contribution and its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Share {
    /// None.
    #[default]
    None,
    /// The contribution of this number, from [`Contributor::write`].
    Of(u64),
}

/// The bytes that went through this client, for the status.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Bytes that programs have written.
    pub written: AtomicU64,
    /// Bytes that were reduced from the request buffer or the mapped region.
    pub reduced_on_arrival: AtomicU64,
    /// Bytes that were copied into staging.
    pub staged: AtomicU64,
}

struct ContributorState {
    coverage: Coverage,
    /// The step of the open contribution. `None` while none is open.
    step: Option<Step>,
    /// The question for its step, if only the coordinator knows that.
    asking: Asking,
    /// A commit or an abort is under way. Nothing else may touch the contribution.
    committing: bool,
    /// Why the open contribution can no longer succeed.
    failed: Option<ContributeError>,
    staging: Staging,
    /// The number of contributions that were opened.
    number: u64,
    /// Dropped contributions that several programs may have written into.
    dropped: BTreeSet<u64>,
    /// The message under way is an abort.
    aborting: bool,
    /// Others who wait for the commit that is under way.
    joined: Vec<Done>,
    /// What is final of the mapping, while nothing was written.
    finals: FinalParts,
    /// The tensors whose values were averaged when the contribution was opened.
    averaged: Arc<[usize]>,
    models: Models,
}

/// The completion of a contribution's end.
type Done = Box<dyn FnOnce(Result<(), ContributeError>) + Send>;

/// The deadline for waits that end at once unless the machine is stuck.
const STUCK: Duration = Duration::from_secs(10);

/// The most dropped contributions that are remembered. All programs have long closed older ones.
const MAX_DROPPED: usize = 1024;

impl ContributorState {
    /// Whether `share` is of a dropped contribution.
    fn has_dropped(&self, share: Share) -> bool {
        matches!(share, Share::Of(number) if self.dropped.contains(&number))
    }

    /// Closes the contribution. It is `taken`, or dropped.
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
        self.coverage.clear();
        self.finals.clear();
        self.models.end(taken);
        self.step = None;
        self.failed = None;
        self.asking.forget();
    }
}

/// The contribution path of one learner. All its file handles share it.
pub struct Contributor {
    learner: LearnerId,
    incarnation: Incarnation,
    layout: Arc<ModelLayout>,
    job: Arc<Job>,
    /// The region that programs map through `gradients`. A write(2) never uses it, so a mapping always holds what its
    /// program stored.
    mapped: MappedMemory,
    state: Mutex<ContributorState>,
    /// The staging region has its pages, or gets them.
    has_pages: AtomicBool,
    /// Signalled when no piece is in flight.
    idle: Condvar,
    traffic: Arc<Traffic>,
    waits: OnceLock<WaitHook>,
    /// Whether the learner has ever had a replica.
    has_replicas: AtomicBool,
    /// Whether its program reads weights of its own, and can have a replica.
    has_own_weights: bool,
}

/// Told when a write begins to wait for others (true), and when it no longer does (false).
pub type WaitHook = Box<dyn Fn(bool) + Send + Sync>;

/// The most pieces of a request that need no allocation: 1 MiB over blocks of 64 KiB, and two ends if it is not
/// aligned.
const PIECES: usize = 18;

impl Contributor {
    /// For a learner that has joined `job`. Its regions take memory when they are first used.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(
        job: Arc<Job>,
        (learner, incarnation): (LearnerId, Incarnation),
        traffic: Arc<Traffic>,
    ) -> Result<Contributor, ShardError> {
        let layout = Arc::clone(job.layout());
        let state = Mutex::new(ContributorState {
            coverage: Coverage::new(&layout),
            step: None,
            asking: Asking::default(),
            committing: false,
            failed: None,
            staging: Staging::new(&job)?,
            number: 1,
            dropped: BTreeSet::new(),
            aborting: false,
            joined: Vec::new(),
            finals: FinalParts::new(layout.blocks()),
            averaged: Arc::default(),
            models: Models::default(),
        });
        let mapped = MappedMemory::new(&job, "gradfs-gradients")?;
        Ok(Contributor {
            learner,
            incarnation,
            layout,
            job,
            mapped,
            state,
            has_pages: AtomicBool::new(false),
            idle: Condvar::new(),
            traffic,
            waits: OnceLock::new(),
            has_replicas: AtomicBool::new(false),
            has_own_weights: true,
        })
    }

    /// Has `hook` told of the waits of [`Self::write`]. Only the first hook counts.
    pub fn tell_waits(&self, hook: WaitHook) {
        let _ = self.waits.set(hook);
    }

    /// The number of contributions that have ended here.
    pub fn ended(&self) -> u64 {
        self.state.lock().number - 1
    }

    /// The learner.
    pub fn learner(&self) -> LearnerId {
        self.learner
    }

    /// The learner's incarnation.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Whether [`Self::prefault`] should be called: it was not called since the staging memory was given back.
    pub fn wants_pages(&self) -> bool {
        !self.has_pages.load(Ordering::Relaxed)
    }

    /// Takes the staging memory now, and not page by page during the first contribution. A second call does nothing.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn prefault(&self) -> std::io::Result<()> {
        if self.has_pages.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let staging = Arc::clone(self.state.lock().staging.region().memory());
        available::promise_before_spares(&staging)?;
        staging.prefault()
    }

    /// Whether something was written since the last commit.
    pub fn is_open(&self) -> bool {
        self.state.lock().step.is_some()
    }

    /// Whether `share` is the contribution that is open.
    pub fn is_open_for(&self, share: Share) -> bool {
        let state = self.state.lock();
        state.step.is_some() && share == Share::Of(state.number)
    }

    /// Whether others have dropped the contribution that `share` is.
    pub fn has_dropped(&self, share: Share) -> bool {
        self.state.lock().has_dropped(share)
    }

    /// The number of bytes that the open contribution has.
    pub fn open_bytes(&self) -> u64 {
        self.state.lock().coverage.tracker.bytes()
    }

    /// Takes `data` at `offset`. Blocks that become whole go to the shard before this returns. `share` names the
    /// contribution that the same program has written into, if that has not ended. It is set even by a write that
    /// fails after part of it was taken. It waits for nobody: see [`Wrote`].
    ///
    /// # Errors
    /// [`ContributeError::Refused`], [`ContributeError::Busy`] and [`ContributeError::Dropped`] change nothing,
    /// except [`WriteRefused::PastEnd`] after earlier writes. That error, and a shard's refusal of a block, make the
    /// contribution fail: later writes and the commit report it, and it counts nowhere. Blocks of the mapping that were
    /// sent ahead are dropped in any case, which changes nothing of what the next commit ships.
    pub fn write(
        &self,
        share: &mut Share,
        offset: u64,
        data: &[u8],
        timeout: Duration,
    ) -> Result<Wrote, ContributeError> {
        if data.is_empty() {
            return Ok(Wrote::Taken);
        }
        let mut pieces = PieceList::default();
        let (step, staging, made) = {
            let mut guard = self.without_finals();
            let state = &mut *guard;
            if state.has_dropped(*share) {
                return Err(ContributeError::Dropped);
            }
            if state.committing {
                return Err(ContributeError::Busy);
            }
            if let Some(failed) = self.failure(state) {
                return Err(failed);
            }
            // A refused write opens nothing.
            let begun = state.coverage.tracker.begin(offset, data.len() as u64, |piece| pieces.push(piece));
            if let Err(refused) = begun {
                // An array that is too long is not the array that was meant. What was written of it before is wrong,
                // too.
                if state.step.is_some() && matches!(refused, WriteRefused::PastEnd { .. }) {
                    state.failed = Some(refused.into());
                }
                return Err(refused.into());
            }
            let step = match state.step {
                Some(step) => step,
                None => match self.open(state, timeout) {
                    Ok(Some(step)) => {
                        state.staging.is_written();
                        step
                    }
                    Ok(None) => {
                        state.coverage.tracker.reset();
                        return Ok(Wrote::Asks);
                    }
                    Err(error) => {
                        state.coverage.tracker.reset();
                        // The commit must not report success.
                        state.failed = Some(error.clone().into());
                        return Err(error.into());
                    }
                },
            };
            let written = offset..offset + data.len() as u64;
            state.coverage.tensors.insert_range(self.layout.tensors_in(&written));
            *share = Share::Of(state.number);
            (step, state.staging.region().clone(), state.models.made.clone())
        };
        self.traffic.written.fetch_add(data.len() as u64, Ordering::Relaxed);
        let mut outcome = Ok(());
        pieces.for_each(|piece| {
            let local = (piece.bytes.start - offset) as usize..(piece.bytes.end - offset) as usize;
            let result = match &made {
                None => self.take(piece, &data[local], step, &staging),
                Some(made) => self.take_made(piece, &data[local], step, &staging, made),
            };
            if outcome.is_ok() {
                outcome = result;
            }
        });
        outcome.map(|()| Wrote::Taken).map_err(ContributeError::from)
    }

    /// Why the contribution fails, if it does. A job that has failed since is the better reason.
    fn failure(&self, state: &ContributorState) -> Option<ContributeError> {
        let failed = state.failed.clone()?;
        Some(self.job.lost().map_or(failed, ContributeError::from))
    }

    /// Writes zeros to all bytes that nobody has written, as [`Self::write`] does.
    ///
    /// # Errors
    /// Those of [`Self::write`], and [`ContributeError::Busy`] if [`Self::ask_step`] must be called first.
    pub fn write_zeros(&self, share: &mut Share, timeout: Duration) -> Result<(), ContributeError> {
        const PIECE: u64 = 1 << 20;
        let missing = self.state.lock().coverage.tracker.missing();
        let zeros = vec![0; PIECE.min(self.layout.size()) as usize];
        for range in missing {
            let mut at = range.start;
            while at < range.end {
                // The next pieces begin with a block.
                let end = ((at / PIECE + 1) * PIECE).min(range.end);
                match self.write(share, at, &zeros[..(end - at) as usize], timeout)? {
                    Wrote::Taken => at = end,
                    Wrote::Asks => return Err(ContributeError::Busy),
                }
            }
        }
        Ok(())
    }

    /// Ships or stages one piece. It always takes the in-flight mark back.
    fn take(&self, piece: &BlockPart, data: &[u8], step: Step, staging: &Region) -> Result<(), ShardError> {
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
        if let Err(error) = staging.promise() {
            return self.not_staged(piece, error);
        }
        // SAFETY: nobody reads the block before it is whole and all copies into it have ended. Two writers of the
        // same bytes race like two write(2) calls on any file: one of them wins, byte by byte.
        unsafe { staging.memory().write(start, data) };
        self.traffic.staged.fetch_add(data.len() as u64, Ordering::Relaxed);
        {
            let mut state = self.state.lock();
            if !state.coverage.tracker.copied(piece.block) {
                self.wake_if_idle(&state);
                return Ok(());
            }
        }
        self.offer_staged(piece, step, staging)
    }

    /// Offers a block that lies whole in staging.
    fn offer_staged(&self, piece: &BlockPart, step: Step, staging: &Region) -> Result<(), ShardError> {
        let block = self.layout.block_bytes(piece.block);
        // SAFETY: the block is whole and marked as sent, so no write enters it any more.
        let whole = unsafe { staging.memory().bytes(block.start as usize..block.end as usize) };
        let placed = self.offer(piece.block, whole, step, None);
        if matches!(placed, Ok(Placement::Deferred)) {
            self.job.staged_in(self.slot(step, piece.block), staging);
        }
        self.placed(piece, placed)
    }

    fn slot(&self, step: Step, block: BlockId) -> BlockSlot {
        BlockSlot { learner: self.learner, incarnation: self.incarnation, step, block }
    }

    /// Offers a whole block, for the first time in this contribution.
    fn offer(
        &self,
        block: BlockId,
        data: &[u8],
        step: Step,
        room: Option<&Region>,
    ) -> Result<Placement, ShardError> {
        match self.job.write(data, self.slot(step, block), room)? {
            // The shard has taken this step without this block: a commit that timed out here had reached it.
            Placement::Duplicate => Err(ShardError::NotAllowed(format!(
                "step {step} was already taken: block {block} came too late"
            ))),
            placed => Ok(placed),
        }
    }

    /// Records the outcome of an offered block. A failure is recorded in the same moment, so a commit that finds
    /// nothing in flight finds all failures.
    fn placed(&self, piece: &BlockPart, placed: Result<Placement, ShardError>) -> Result<(), ShardError> {
        let mut state = self.state.lock();
        state.coverage.tracker.sent(piece.block, matches!(placed, Ok(Placement::Deferred)));
        if let Err(error) = &placed {
            state.failed.get_or_insert_with(|| error.clone().into());
        }
        self.wake_if_idle(&state);
        placed.map(drop)
    }

    /// A part of a block cannot be staged. The contribution fails.
    fn not_staged(&self, piece: &BlockPart, error: ShardError) -> Result<(), ShardError> {
        let mut state = self.state.lock();
        if state.coverage.tracker.copied(piece.block) {
            state.coverage.tracker.sent(piece.block, false);
        }
        state.failed.get_or_insert_with(|| error.clone().into());
        self.wake_if_idle(&state);
        Err(error)
    }

    /// Locks the state. An abort that is under way ends before that: it takes microseconds.
    fn settled(&self) -> MutexGuard<'_, ContributorState> {
        let mut state = self.state.lock();
        let deadline = Instant::now() + STUCK;
        while state.aborting && !self.idle.wait_until(&mut state, deadline).timed_out() {}
        state
    }

    fn wake_if_idle(&self, state: &ContributorState) {
        if !state.coverage.tracker.is_busy() {
            self.idle.notify_all();
        }
    }
}

fn region(job: &Job, name: &str) -> Result<Region, ShardError> {
    let memory = Mapping::memfd(name, job.layout().size() as usize);
    Ok(job.register(Arc::new(memory.map_err(|error| ShardError::no_memory(&error))?)))
}

/// The pieces of one request. They are on the stack unless there are very many.
struct PieceList {
    inline: [Option<BlockPart>; PIECES],
    len: usize,
    more: Vec<BlockPart>,
}

impl Default for PieceList {
    fn default() -> PieceList {
        PieceList { inline: [const { None }; PIECES], len: 0, more: Vec::new() }
    }
}

impl PieceList {
    fn push(&mut self, piece: BlockPart) {
        if let Some(slot) = self.inline.get_mut(self.len) {
            *slot = Some(piece);
            self.len += 1;
        } else {
            self.more.push(piece);
        }
    }

    fn for_each(&self, mut each: impl FnMut(&BlockPart)) {
        self.inline[..self.len].iter().flatten().chain(&self.more).for_each(&mut each);
    }
}
