//! What is sent of what a learner writes, where that is not the same: of models and replicas, and of contributions that
//! count more or less than others.
//!
//! A learner begins from a version, trains, and writes the weights that it has come to. Its client sends the difference
//! to what it began from. Of a replica (`easgd`, `sma`) it sends the correction `c = α(w - z)` between what the learner
//! has read of its replica and of the central model, and takes `c` off what was written: that is the next replica
//! (*Crossbow*, Algorithm 2; Zhang et al., *Deep learning with Elastic Averaging SGD*, equations 3 and 4). So the
//! replica loses exactly what the central model gets.
//!
//! What is sent of a contribution with a weight is multiplied by that, and sent after the commit: a plan that begins
//! before it counts every contribution once.
//!
//! What is sent lies in staging, and what was written of blocks that come in parts in memory of its own. A payload
//! depends on nothing but what was written and what the learner has read, so it may be made again.
//!
//! This module holds `unsafe` for entering these regions; see [`crate::bytes::mmap`] for the rule.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::replicas::Replicas;
use super::{Contributor, ContributorState, region};
use crate::bytes::block::span;
use crate::bytes::kernels::{self, Wire};
use crate::bytes::region::Region;
use crate::reader::Reader;
use crate::tracker::BlockPart;
use crate::vocabulary::block_slot::Placement;
use crate::vocabulary::ids::{BlockId, Step, Version};
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::reducer::{Content, Reducer, decimal};
use crate::vocabulary::shard_error::ShardError;
use crate::vocabulary::weight::Weight;

/// What a learner began from: the version that it has read, and its replica of the model if it has one.
pub(super) struct Began {
    pub(super) version: Reader,
    pub(super) replica: Option<Region>,
}

impl Began {
    /// The learner's weights in these bytes.
    fn weights(&self, bytes: Range<u64>) -> &[u8] {
        match &self.replica {
            // SAFETY: a replica that is shown is not written. Its memory is used again once no version is held with
            // which it was shown, and `version` is one.
            Some(replica) => unsafe { replica.memory().bytes(span(&bytes)) },
            None => self.version.bytes(bytes),
        }
    }
}

/// How the payload of an open contribution is made.
pub(super) struct Made {
    way: SentForm,
    /// How much the contribution counts.
    weight: Weight,
    /// What was written of blocks that came in parts.
    pub(super) written: Region,
    /// NaN and Inf are refused.
    rejects: bool,
}

/// What is sent.
enum SentForm {
    /// What is written.
    Same,
    /// The difference to what the learner began from.
    Difference(Arc<Began>),
    /// The correction of the learner's replica. `next` is the memory of the next one.
    Correction { began: Arc<Began>, next: Region, elasticity: f64 },
}

impl Made {
    /// What its learner began from, if that matters.
    pub(super) fn began(&self) -> Option<&Arc<Began>> {
        match &self.way {
            SentForm::Same => None,
            SentForm::Difference(began) | SentForm::Correction { began, .. } => Some(began),
        }
    }

    /// What its learner has written.
    pub(super) fn content(&self) -> Content {
        match &self.way {
            SentForm::Same => Content::Gradient,
            SentForm::Difference(_) => Content::Model,
            SentForm::Correction { .. } => Content::Replica,
        }
    }

    /// How much it counts.
    pub(super) fn weight(&self) -> Weight {
        self.weight
    }

    /// The next replica.
    pub(super) fn next(&self) -> Option<&Region> {
        match &self.way {
            SentForm::Correction { next, .. } => Some(next),
            SentForm::Same | SentForm::Difference(_) => None,
        }
    }

    /// Promises the memory that [`Self::make`] stores into.
    ///
    /// # Errors
    /// [`ShardError::OutOfMemory`].
    pub(super) fn promise(&self, staging: &Region) -> Result<(), ShardError> {
        staging.promise()?;
        self.next().map_or(Ok(()), Region::promise)
    }

    /// Makes the payload of a block in `staging` from `written`. False if that holds NaN or Inf, and they are refused.
    /// Elements that cannot be reduced are left out.
    pub(super) fn make(
        &self,
        layout: &ModelLayout,
        block: BlockId,
        written: &[u8],
        staging: &Region,
    ) -> bool {
        let start = layout.block_bytes(block).start;
        let mut finite = true;
        for segment in layout.segments(block) {
            let bytes = segment.bytes.clone();
            let Some(wire) = Wire::of(segment.dtype) else {
                self.keep(bytes);
                continue;
            };
            let written = &written[span(&(bytes.start - start..bytes.end - start))];
            // SAFETY: one thread at a time makes the payload of a block. The shard and the program come later.
            let out = unsafe { staging.memory().bytes_mut(span(&bytes)) };
            let weight = self.weight.get();
            finite &= match &self.way {
                SentForm::Same => kernels::difference(wire, weight, written, None, out),
                SentForm::Difference(began) => {
                    kernels::difference(wire, weight, written, Some(began.weights(bytes)), out)
                }
                SentForm::Correction { began, next, elasticity } => {
                    let from = [began.weights(bytes.clone()), began.version.bytes(bytes.clone())];
                    // SAFETY: the same, and nobody knows the next replica yet.
                    let next = unsafe { next.memory().bytes_mut(span(&bytes)) };
                    kernels::correction(wire, *elasticity, written, from, [out, next])
                }
            };
        }
        finite || !self.rejects
    }

    /// Fills bytes that were not written with those that give no change.
    pub(super) fn fill(&self, bytes: Range<u64>, gap: &mut [u8]) {
        match &self.way {
            SentForm::Same => gap.fill(0),
            SentForm::Difference(began) | SentForm::Correction { began, .. } => {
                gap.copy_from_slice(began.weights(bytes));
            }
        }
    }

    /// Nothing is sent of these bytes, which were not written: the learner's weights stay as it has read them.
    pub(super) fn leave_out(&self, bytes: Range<u64>, staging: &Region) {
        // SAFETY: the contribution is sealed, and its commit not sent.
        unsafe { staging.memory().bytes_mut(span(&bytes)) }.fill(0);
        self.keep(bytes);
    }

    /// The next replica has these bytes of the last one.
    pub(super) fn keep(&self, bytes: Range<u64>) {
        if let SentForm::Correction { began, next, .. } = &self.way {
            // SAFETY: as above.
            let next = unsafe { next.memory().bytes_mut(span(&bytes)) };
            kernels::stream_copy(began.weights(bytes), next);
        }
    }
}

/// What a learner's models and replicas are made from, and where.
#[derive(Default)]
pub(super) struct Models {
    /// What the learner has read since its last contribution, where that matters.
    began: Option<Arc<Began>>,
    /// How the payload of the open contribution is made, if it is not what is written.
    pub(super) made: Option<Arc<Made>>,
    /// Where parts of blocks are kept that a payload is made of.
    written: Option<Region>,
    replicas: Replicas,
    /// How much the next contribution counts.
    pub(super) weight: Weight,
    /// What is let go of once the state is not locked: a version that is held no more may let commits be taken, whose
    /// completions lock states.
    pub(super) gone: Vec<Arc<Began>>,
}

impl Models {
    /// A commit of `step` is sent, and makes the learner's next replica.
    pub(super) fn commits(&mut self, step: Step) {
        if let Some(next) = self.made.as_ref().and_then(|made| made.next()) {
            self.replicas.committing(step, next.clone());
        }
    }

    /// The contribution ends. It is `taken`, or dropped.
    pub(super) fn end(&mut self, taken: bool) {
        let Some(made) = self.made.take() else { return };
        // Who writes again without reading has begun from the newest version then.
        let is_its = |began: &mut Arc<Began>| made.began().is_some_and(|of| Arc::ptr_eq(of, began));
        let read = self.began.take_if(|began| taken && is_its(began));
        self.gone.extend(read.into_iter().chain(made.began().cloned()));
    }
}

impl Contributor {
    /// Its program reads the weights that all read, so it can have no replica of the model.
    #[must_use]
    pub fn without_own_weights(self) -> Contributor {
        Contributor { has_own_weights: false, ..self }
    }

    /// The learner's program opens this version, and begins its next contribution from it.
    pub fn begins_from(&self, version: Version) {
        if !self.job.content().is_weights() {
            return;
        }
        let reader = Reader::open(&self.job, version);
        let mut state = self.state.lock();
        let began = reader.map(|reader| {
            let replica = self.replica_at(&mut state, version);
            Arc::new(Began { version: reader, replica })
        });
        let before = std::mem::replace(&mut state.models.began, began);
        let gone = std::mem::take(&mut state.models.gone);
        drop(state);
        drop((before, gone));
    }

    /// The replica that this version shows to the learner's program. None if it shows the model.
    pub fn replica(&self, version: Version) -> Option<Region> {
        if !self.has_replicas.load(Ordering::Relaxed) {
            return None;
        }
        self.replica_at(&mut self.state.lock(), version)
    }

    fn replica_at(&self, state: &mut ContributorState, version: Version) -> Option<Region> {
        self.show_replicas(state);
        state.models.replicas.at(version, self.job.replicas_since()).cloned()
    }

    /// Commits that are part of a version now: it shows their replicas.
    pub(super) fn show_replicas(&self, state: &mut ContributorState) {
        while let Some(step) = state.models.replicas.waiting()
            && let Some(version) = self.job.published_in(self.learner, step)
        {
            state.models.replicas.show(version);
        }
    }

    /// How much the learner's next contributions count.
    pub fn weight(&self) -> Weight {
        self.state.lock().models.weight
    }

    /// Sets how much contributions count that are begun from now on.
    ///
    /// # Errors
    /// [`ShardError::NotAllowed`] if the reducer takes no weights.
    pub fn set_weight(&self, weight: Weight) -> Result<(), ShardError> {
        self.check_weight(weight)?;
        self.state.lock().models.weight = weight;
        Ok(())
    }

    /// Whether [`Self::set_weight`] takes this weight.
    ///
    /// # Errors
    /// As that has them.
    pub fn check_weight(&self, weight: Weight) -> Result<(), ShardError> {
        self.refuse_weight(self.job.reducer().0, weight)
    }

    fn refuse_weight(&self, reducer: Reducer, weight: Weight) -> Result<(), ShardError> {
        if weight == Weight::ONE || reducer.takes_weighted() {
            return Ok(());
        }
        Err(ShardError::NotAllowed(format!(
            "reducer {reducer} takes contributions of weight 1 alone, and this is {weight}"
        )))
    }

    /// How the payload of the next contribution is made, if it is not what is written.
    pub(super) fn made(&self, state: &mut ContributorState) -> Result<Option<Arc<Made>>, ShardError> {
        let (reducer, hyper) = self.job.reducer();
        let (content, weight) = (reducer.content(), state.models.weight);
        self.refuse_weight(reducer, weight)?;
        if !content.is_weights() {
            let began = state.models.began.take();
            state.models.gone.extend(began);
            if self.has_replicas.load(Ordering::Relaxed) {
                let held = self.job.versions();
                let is_held = |range: Range<Version>| held.iter().any(|version| range.contains(version));
                state.models.replicas.let_go(self.job.replicas_since(), is_held);
            }
            if weight == Weight::ONE {
                state.models.written = None;
                return Ok(None);
            }
        }
        if content == Content::Replica && !self.has_own_weights {
            return Err(ShardError::NotAllowed(format!(
                "with reducer {reducer} each learner has a replica of its own: mkdir learners/NAME, and use the files in it"
            )));
        }
        let written = match &state.models.written {
            Some(written) => written.clone(),
            None => region(&self.job, "gradfs-written")?,
        };
        state.models.written = Some(written.clone());
        let way = match content {
            Content::Gradient | Content::Values => SentForm::Same,
            Content::Model => SentForm::Difference(self.began(state)?),
            Content::Replica => {
                let began = self.began(state)?;
                let held = self.job.versions();
                let is_held = |range: Range<Version>| held.iter().any(|version| range.contains(version));
                let next = match state.models.replicas.take_free(self.job.replicas_since(), is_held) {
                    Some(free) => free,
                    None => region(&self.job, "gradfs-replica")?,
                };
                self.has_replicas.store(true, Ordering::Relaxed);
                SentForm::Correction {
                    began,
                    next,
                    elasticity: elasticity(hyper.elasticity, self.job.learners()),
                }
            }
        };
        Ok(Some(Arc::new(Made { way, weight, written, rejects: self.job.rejects_nonfinite() })))
    }

    /// What the learner begins its next contribution from: what it has read, or else the newest version.
    fn began(&self, state: &mut ContributorState) -> Result<Arc<Began>, ShardError> {
        if let Some(began) = &state.models.began {
            return Ok(Arc::clone(began));
        }
        let newest = Reader::newest(&self.job).ok_or(ShardError::Unreachable)?;
        let replica = self.replica_at(state, newest.version());
        Ok(Arc::clone(state.models.began.insert(Arc::new(Began { version: newest, replica }))))
    }

    /// Like [`Self::take`], where the payload is made of what is written.
    pub(super) fn take_made(
        &self,
        piece: &BlockPart,
        data: &[u8],
        step: Step,
        staging: &Region,
        made: &Made,
    ) -> Result<(), ShardError> {
        self.traffic.staged.fetch_add(data.len() as u64, Ordering::Relaxed);
        if piece.whole {
            return self.offer_made(piece, data, step, staging, made);
        }
        if let Err(error) = made.written.promise() {
            return self.not_staged(piece, error);
        }
        let memory = made.written.memory();
        // SAFETY: as in `take`: the block is read when it is whole.
        unsafe { memory.write(piece.bytes.start as usize, data) };
        {
            let mut state = self.state.lock();
            if !state.coverage.tracker.copied(piece.block) {
                self.wake_if_idle(&state);
                return Ok(());
            }
        }
        let block = self.layout.block_bytes(piece.block);
        // SAFETY: as in `take`.
        let whole = unsafe { memory.bytes(block.start as usize..block.end as usize) };
        self.offer_made(piece, whole, step, staging, made)
    }

    /// Makes the payload of a block that is whole, and offers it.
    fn offer_made(
        &self,
        piece: &BlockPart,
        model: &[u8],
        step: Step,
        staging: &Region,
        made: &Made,
    ) -> Result<(), ShardError> {
        if let Err(error) = made.promise(staging) {
            return self.placed(piece, Err(error));
        }
        if !made.make(&self.layout, piece.block, model, staging) {
            return self.placed(piece, Err(ShardError::NonFinite(piece.block)));
        }
        if made.weight != Weight::ONE {
            return self.placed(piece, Ok(Placement::Deferred));
        }
        self.offer_staged(piece, step, staging)
    }
}

/// The share by which a replica and the model attract each other: the setting, or one by the number of learners.
fn elasticity(setting: f32, learners: usize) -> f64 {
    if setting == 0.0 { 1.0 / learners.max(1) as f64 } else { decimal(setting) }
}
