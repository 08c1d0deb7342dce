//! Requests of learners: joining, contributing, waiting, leaving; and settings.
//!
//! A whole block is reduced from where it is if that is possible. Otherwise it is copied to the learner's staging
//! region, and the client sends it from there when the coordinator grants it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Job;
use crate::bytes::block;
use crate::bytes::region::{Region, RegionKey};
use crate::client::commit_notice::CommitNotice;
use crate::client::core::{Action, NO_TOKEN, Offered};
use crate::client::options::{Answered, Done, Opening, SetDone, Staged};
use crate::vocabulary::block_ranges;
use crate::vocabulary::block_slot::{BlockSlot, Placement};
use crate::vocabulary::controls::ControlError;
use crate::vocabulary::ids::{BlockId, Incarnation, LearnerId, Step, Version};
use crate::vocabulary::members::{LeaveReason, LifeSign};
use crate::vocabulary::partly::MAX_PIECES;
use crate::vocabulary::settings_json;
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{Message, ReduceOp, Refusal};

/// The timeout of requests that nobody waits for.
const BESIDE: Duration = Duration::from_secs(30);
/// The most blocks that are offered under the lock at once.
const OFFERED_AT_ONCE: usize = 256;

impl Job {
    /// Sends a request to the coordinator. `done` is called once, before `timeout` is over.
    pub fn request(&self, message: Message, timeout: Duration, done: Answered) {
        match self.shared.lifetime.refuse_if_ending() {
            Ok(()) => self.shared.request(message, timeout, done, |_| {}),
            Err(error) => done(Err(error.into())),
        }
    }

    /// Whether this client takes learners and new weights.
    ///
    /// # Errors
    /// [`ShardError::NotAllowed`] if it holds no versions, or what [`Self::request`] has.
    pub(super) fn may_write(&self) -> Result<(), ShardError> {
        if !self.shared.options.holds_versions {
            let why = "the model is not here, but only views of it: learners and publishers need a mount of the model";
            return Err(ShardError::NotAllowed(why.into()));
        }
        self.shared.lifetime.refuse_if_ending()
    }

    /// A learner joins under a name.
    pub fn join(&self, name: String, timeout: Duration, done: Done<(LearnerId, Incarnation)>) {
        if let Err(error) = self.may_write() {
            return done(Err(error));
        }
        self.shared.inner.lock().versions.writes();
        let joined = move |result| {
            done(match result {
                Ok(Message::Joined { learner, incarnation, .. }) => Ok((learner, incarnation)),
                other => Err(unexpected(other)),
            });
        };
        self.request(Message::Join { name }, timeout, Box::new(joined));
    }

    /// A learner leaves: its unfinished contribution is dropped, a committed one stays.
    pub fn leave(&self, learner: LearnerId, reason: LeaveReason, timeout: Duration, done: Done<()>) {
        self.request(Message::Leave { learner, reason }, timeout, plain(done));
    }

    /// Opens a contribution at its first write, and returns its step. If this client knows the step, `done` is called
    /// before this returns.
    pub fn open(&self, learner: LearnerId, timeout: Duration, done: Done<Opening>) {
        let shared = &self.shared;
        match self.open_known(learner, timeout) {
            Ok(None) => {}
            Ok(Some(opening)) => return done(Ok(opening)),
            Err(error) => return done(Err(error)),
        }
        let opened = move |result| {
            done(match result {
                Ok(Message::Opened { step, staging_lent }) => Ok(Opening { step, staging_lent }),
                other => Err(unexpected(other)),
            });
        };
        shared.ask(timeout, Box::new(opened), |inner, token, deadline, now, actions| {
            inner.core.open(token, learner, deadline, now, actions);
        });
    }

    /// Whether [`Self::open_known`] has an answer, which may be an error.
    pub fn knows_step(&self, learner: LearnerId) -> bool {
        let inner = self.shared.inner.lock();
        let core = &inner.core;
        let is_in = core.has_learner(learner) && !core.is_leaving(learner) && core.stopped().is_none();
        !is_in || core.next_step(learner).is_some() || core.lost_patience(self.shared.now()).is_some()
    }

    /// Like [`Self::open`], if this client knows the step.
    ///
    /// # Errors
    /// [`ShardError`]. Then nothing is opened.
    pub fn open_known(&self, learner: LearnerId, timeout: Duration) -> Result<Option<Opening>, ShardError> {
        let shared = &self.shared;
        shared.lifetime.refuse_if_ending()?;
        let mut inner = shared.inner.lock();
        if let Some(stopped) = inner.core.stopped() {
            return Err(stopped);
        }
        if !inner.core.has_learner(learner) || inner.core.is_leaving(learner) {
            return Err(ShardError::UnknownLearner(learner));
        }
        let (now, mut actions) = (shared.now(), Vec::new());
        if let Some(away) = inner.core.lost_patience(now) {
            return Err(away);
        }
        let opening = inner.core.open_known(learner, now + timeout, now, &mut actions);
        shared.rouse_keeper(&inner);
        shared.act(inner, actions);
        Ok(opening.map(|(step, staging_lent)| Opening { step, staging_lent }))
    }

    /// Offers one whole block of a contribution. It takes no lock for the length of a copy and allocates nothing.
    ///
    /// `room` is the learner's staging region: a payload that is not reduced on arrival has been placed there, at its
    /// block's offset, when this returns [`Placement::Deferred`]. Without `room` the payload lies there already.
    ///
    /// # Errors
    /// [`ShardError`]; then the block was not taken.
    pub fn write(
        &self,
        payload: &[u8],
        slot: BlockSlot,
        room: Option<&Region>,
    ) -> Result<Placement, ShardError> {
        let (shared, layout) = (&self.shared, self.layout());
        let bad = || ShardError::BadBlock { block: slot.block, bytes: payload.len() };
        if slot.block.0 >= layout.blocks() {
            return Err(bad());
        }
        let extent = layout.block_bytes(slot.block);
        if payload.len() as u64 != extent.end - extent.start {
            return Err(bad());
        }
        if room.is_some_and(|room| (room.memory().len() as u64) < extent.end) {
            return Err(ShardError::OutOfRange);
        }
        shared.lifetime.refuse_if_ending()?;
        let mut inner = shared.inner.lock();
        if let Some(stopped) = inner.core.stopped() {
            return Err(stopped);
        }
        if !inner.core.take(slot)? {
            return Ok(Placement::Duplicate);
        }
        let check = inner.rejects_nonfinite();
        match shared.shards.local() {
            Some(local) => {
                if shared.offer_here(local, inner, slot, payload)? == Placement::Reduced {
                    self.on_arrival.fetch_add(1, Ordering::Relaxed);
                    return Ok(Placement::Reduced);
                }
            }
            None => drop(inner),
        }
        if let Some(room) = room
            && let Err(error) = room.promise()
        {
            shared.inner.lock().core.give_back(slot);
            return Err(error);
        }
        let finite = match room {
            Some(room) => block::place(layout, slot.block, payload, room.memory(), check),
            None => !check || block::is_finite(layout, slot.block, payload),
        };
        if !finite {
            shared.inner.lock().core.give_back(slot);
            return Err(ShardError::NonFinite(slot.block));
        }
        if let Some(room) = room {
            self.staged_in(slot, room);
        }
        Ok(Placement::Deferred)
    }

    /// A staged block lies in this region. It is sent from there at once, if a provisional plan waits for it.
    pub fn staged_in(&self, slot: BlockSlot, region: &Region) {
        self.send_ahead(slot.learner, slot.step, &[slot.block], region, true);
    }

    /// Blocks of a learner's open contribution lie in this region, as a staged one does. But its program has the region
    /// mapped, and can change it: they were not searched for NaN and Inf, and are read as lent memory is.
    pub fn are_final(&self, learner: LearnerId, step: Step, blocks: &[BlockId], region: &Region) {
        self.send_ahead(learner, step, blocks, region, false);
    }

    fn send_ahead(&self, learner: LearnerId, step: Step, blocks: &[BlockId], region: &Region, steady: bool) {
        // Other threads take the lock in between.
        for blocks in blocks.chunks(OFFERED_AT_ONCE) {
            let mut inner = self.shared.inner.lock();
            let (now, mut actions) = (self.shared.now(), Vec::new());
            for &block in blocks {
                let Some(Offered { is_first, wakes }) =
                    inner.core.offered(learner, step, block, now, &mut actions)
                else {
                    return self.shared.act(inner, actions);
                };
                if is_first {
                    let staged = Staged { region: region.clone(), steady, partly: None };
                    inner.payloads.sources.insert((learner, step), staged);
                }
                match wakes {
                    Some(partition) if self.shared.shards.read_in_place() => {
                        actions.push(Action::Wake(partition))
                    }
                    Some(partition) => inner.peers.wake(partition),
                    None => {}
                }
            }
            self.shared.act(inner, actions);
        }
    }

    /// Whether staged blocks of the learner may still be read for a plan that was dropped. The caller stages in other
    /// memory from now on. The second call returns false.
    pub fn take_strays(&self, learner: LearnerId) -> bool {
        self.shared.inner.lock().core.take_strays(learner)
    }

    /// Commits a contribution. Its payload stays in the staging region until the answer. If the answer is a timeout,
    /// it stays until the learner's next opening reports that it is not lent.
    ///
    /// Memory that is not lendable is lent only until the answer. If the answer is an error, nothing counts that is
    /// read of it later.
    pub fn commit(
        &self,
        learner: LearnerId,
        step: Step,
        notice: CommitNotice,
        timeout: Duration,
        done: Done<()>,
    ) {
        let (shared, layout) = (&self.shared, self.layout());
        let fits = shared.lifetime.refuse_if_ending().and_then(|()| notice.check(layout));
        let may_commit = || {
            let inner = shared.inner.lock();
            inner.core.may_commit(learner, step)?;
            inner.core.lost_patience(shared.now()).map_or(Ok(()), Err)
        };
        if let Err(error) = fits.and_then(|()| may_commit()) {
            return done(Err(error));
        }
        let rejects = shared.inner.lock().rejects_nonfinite();
        // Blocks that were never offered whole have not been searched for NaN and Inf. Mapped blocks are searched
        // when they are read.
        let unchecked = notice.unchecked.ones().filter(|_| notice.lendable && rejects);
        let mut unchecked = unchecked.map(|block| BlockId(block as u32));
        if let Some(bad) =
            unchecked.find(|block| !block::is_finite_in(layout, *block, notice.staging.memory()))
        {
            return done(Err(ShardError::NonFinite(bad)));
        }
        let CommitNotice { sent, tensors, partly, contents, weight, staging, lendable, .. } = notice;
        let ranges = block_ranges::from_bits(&sent)
            .and_then(|blocks| Ok((blocks, block_ranges::from_bits(&tensors)?)));
        let Ok((blocks, tensors)) = ranges else {
            return done(Err(ShardError::NotAllowed("the contribution is too scattered".into())));
        };
        let (timeout_ms, lent) = (millis(timeout), !lendable);
        let source = Staged { region: staging, steady: lendable, partly };
        let partly = source.partly.clone().filter(|partly| partly.pieces() <= MAX_PIECES);
        let given_up = None;
        let base = shared.inner.lock().core.last_opened(learner);
        let message = Message::Commit {
            learner,
            step,
            blocks,
            tensors,
            partly,
            contents,
            weight,
            timeout_ms,
            lent,
            given_up,
            base,
        };
        let now = shared.now();
        shared.request(message, timeout, plain(done), |inner| {
            inner.observed.committed(learner, step, now);
            inner.payloads.sources.insert((learner, step), source);
        });
    }

    /// Drops the open contribution, and takes its commit back unless that counts. `done` hears of the coordinator's answer,
    /// behind which [`Self::taken_step`] is news. If there is none before `timeout` is over, `done` gets an error, and the
    /// coordinator is told when it is back.
    pub fn abort(&self, learner: LearnerId, timeout: Duration, done: Done<()>) {
        if !self.has_learner(learner) {
            return done(Err(ShardError::UnknownLearner(learner)));
        }
        self.request(Message::Abort { learner }, timeout, plain(done));
    }

    /// The last step of `learner` that the coordinator has taken.
    pub fn taken_step(&self, learner: LearnerId) -> Option<Step> {
        self.shared.inner.lock().core.taken_step(learner)
    }

    /// Ends the wait for the learner's commit within half a second, as if its deadline had passed. A commit that is
    /// answered by then is answered as usual.
    ///
    /// # Errors
    /// When there is no such learner.
    pub fn withdraw(&self, learner: LearnerId) -> Result<(), ShardError> {
        self.send_beside(learner, Message::Withdraw { learner })
    }

    fn send_beside(&self, learner: LearnerId, message: Message) -> Result<(), ShardError> {
        self.shared.lifetime.refuse_if_ending()?;
        if !self.has_learner(learner) {
            return Err(ShardError::UnknownLearner(learner));
        }
        self.ask_beside(message);
        Ok(())
    }

    /// Like [`Self::withdraw`], for an [`Self::assign`] of this buffer.
    pub fn withdraw_assign(&self, buffer: RegionKey) {
        self.ask_beside(Message::WithdrawAssign { token: buffer.0 });
    }

    /// Sends a request whose answer nobody waits for.
    fn ask_beside(&self, message: Message) {
        let what = message.name();
        let done = move |result| {
            if let Err(error) = result {
                tracing::debug!(what, %error, "refused");
            }
        };
        self.request(message, BESIDE, Box::new(done));
    }

    /// Calls `done` when a version with the last commit of `learner` is here, or `timeout` is over.
    pub fn await_step(&self, learner: LearnerId, timeout: Duration, done: Done<Version>) {
        if let Err(error) = self.shared.lifetime.refuse_if_ending() {
            return done(Err(error));
        }
        self.shared.wait(done, |core, token, now, actions| {
            core.await_step(token, learner, now + timeout, now, actions);
        });
    }

    /// Calls `done` when an open as `learner`, or as none, shows what it must, or `timeout` is over. That is the
    /// version with the learner's own step, if the settings say so, and the newest one if versions are pulled on
    /// demand.
    pub fn await_fresh(&self, learner: Option<LearnerId>, timeout: Duration, done: Done<Version>) {
        if let Err(error) = self.shared.lifetime.refuse_if_ending() {
            return done(Err(error));
        }
        self.shared.wait(done, |core, token, now, actions| {
            core.await_fresh(token, learner, now + timeout, now, actions);
        });
    }

    /// Calls `done` when the newest version that the coordinator has announced, or a newer one, is here, or `timeout`
    /// is over.
    pub fn await_newest(&self, timeout: Duration, done: Done<Version>) {
        self.shared.await_newest(timeout, done);
    }

    /// A sign of life of `learner`.
    pub fn touch(&self, learner: LearnerId, sign: LifeSign) {
        let mut inner = self.shared.inner.lock();
        let mut actions = Vec::new();
        inner.core.touch(vec![learner], sign, &mut actions);
        self.shared.act(inner, actions);
    }

    /// Gives numbers of `learner` (at most [`MAX_ALL_REDUCE`](crate::wire::MAX_ALL_REDUCE)), to be reduced with those of
    /// all learners in the job. `done` hears the results once all have given theirs, or before `timeout` is over an error;
    /// these numbers do not count then. Numbers that the learner gives again take the place of the earlier ones.
    pub fn all_reduce(
        &self,
        learner: LearnerId,
        op: ReduceOp,
        values: Vec<f64>,
        timeout: Duration,
        done: Done<Vec<f64>>,
    ) {
        if !self.has_learner(learner) {
            return done(Err(ShardError::UnknownLearner(learner)));
        }
        let timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        let answered = move |result| {
            done(match result {
                Ok(Message::AllReduced { values }) => Ok(values),
                other => Err(unexpected(other)),
            });
        };
        let message = Message::AllReduce { learner, op, values, timeout_ms };
        self.request(message, timeout, Box::new(answered));
    }

    /// Checks a value of a setting as far as this client can judge it. The coordinator may still refuse it, because of
    /// contributions that are in or of settings that have changed meanwhile.
    ///
    /// # Errors
    /// Why it does not fit.
    pub fn check_control(&self, name: &str, value: &str) -> Result<(), ControlError> {
        let controls = settings_json::with(&self.controls(), name, value)?;
        controls.check_trainable(self.layout().is_trainable())?;
        let tensors = self.layout().tensors().iter().map(|tensor| (tensor.name.as_str(), tensor.dtype));
        controls.of_tensors(tensors).map(drop)
    }

    /// Calls `done` once [`Self::controls`] shows each change that was answered before this call, on any mount. At the
    /// latest it is called when `timeout` is over, with an error.
    pub fn await_controls(&self, timeout: Duration, done: Done<()>) {
        self.request(Message::WithdrawAssign { token: NO_TOKEN }, timeout, plain(done));
    }

    /// Changes one setting of the whole job, or several as one change ([`crate::vocabulary::settings_json`]). It takes
    /// effect at the next version. `done` is called before `timeout` is over. If it is called with success,
    /// [`Self::controls`] shows the new value.
    pub fn set_control(&self, name: &str, value: &str, timeout: Duration, done: SetDone) {
        // A value that is wrong by itself is refused at once.
        if let Err(error) = settings_json::with(&self.controls(), name, value)
            && !matches!(error, ControlError::Conflict(_))
        {
            return done(Err(error.into()));
        }
        let answered = move |result| {
            done(match result {
                Ok(Message::Done) => Ok(()),
                Err(Refusal::Control(why)) => Err(ControlError::Conflict(why).into()),
                other => Err(unexpected(other).into()),
            });
        };
        let (name, value) = (name.to_owned(), value.to_owned());
        self.request(Message::SetControl { name, value }, timeout, Box::new(answered));
    }
}

/// Starts a request, and waits for its answer, for at most `timeout` and a second.
///
/// # Errors
/// The answer's error, or [`ShardError::TimedOut`].
pub fn wait_for<T: Send + 'static, E: From<ShardError> + Send + 'static>(
    timeout: Duration,
    ask: impl FnOnce(Box<dyn FnOnce(Result<T, E>) + Send>),
) -> Result<T, E> {
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    ask(Box::new(move |result| {
        let _ = sender.send(result);
    }));
    receiver
        .recv_timeout(timeout.saturating_add(Duration::from_secs(1)))
        .unwrap_or_else(|_| Err(ShardError::TimedOut("the shard did not answer".into()).into()))
}

pub(super) fn plain(done: Done<()>) -> Answered {
    Box::new(move |result| {
        done(match result {
            Ok(Message::Done) => Ok(()),
            other => Err(unexpected(other)),
        });
    })
}

pub(super) fn shard_error(refusal: Refusal) -> ShardError {
    match refusal {
        Refusal::Shard(error) => error,
        Refusal::NoModel(_) | Refusal::Generation { .. } => ShardError::Unreachable,
        other => ShardError::NotAllowed(other.to_string()),
    }
}

fn unexpected(result: Result<Message, Refusal>) -> ShardError {
    match result {
        Err(refusal) => shard_error(refusal),
        Ok(message) => ShardError::NotAllowed(format!("the coordinator answers with {}", message.name())),
    }
}

pub(super) fn millis(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX)
}
