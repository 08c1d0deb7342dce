//! What is sent of the weights that a learner writes, where the reducer takes models or replicas.
//!
//! A learner begins from a version, trains, and writes the weights that it has come to. Its client sends the difference
//! to what it began from. Of a replica (`easgd`, `sma`) it sends the correction `c = α(w - z)` between what the learner has
//! read of its replica and of the central model, and takes `c` off what was written: that is the next replica (*Crossbow*,
//! Algorithm 2; Zhang et al., *Deep learning with Elastic Averaging SGD*, equations 3 and 4). So the replica loses exactly
//! what the central model gets.
//!
//! What is sent lies in staging, and what was written of blocks that come in parts in memory of its own. A payload depends
//! on nothing but what was written and what the learner has read, so it may be made again.
//!
//! This module holds `unsafe` for entering these regions; see [`crate::bytes::mmap`] for the rule.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::replicas::Replicas;
use super::{Contributor, State, region};
use crate::bytes::block::span;
use crate::bytes::kernels::{self, Wire};
use crate::reader::Reader;
use crate::tracker::Piece;
use crate::transport::{Region, ShardError};
use crate::vocabulary::ids::{BlockId, Step, Version};
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::reducer::{Form, decimal};

/// What a learner began from: the version that it has read, and its replica of the model if it has one.
pub(super) struct Began {
    pub(super) version: Reader,
    pub(super) replica: Option<Region>,
}

impl Began {
    /// The learner's weights in these bytes.
    fn weights(&self, bytes: Range<u64>) -> &[u8] {
        match &self.replica {
            // SAFETY: a replica that is shown is not written. Its memory is used again once no version is held with which
            // it was shown, and `version` is one.
            Some(replica) => unsafe { replica.memory().bytes(span(&bytes)) },
            None => self.version.bytes(bytes),
        }
    }
}

/// How the payload of an open contribution is made.
pub(super) struct Made {
    began: Arc<Began>,
    /// The memory of the next replica, and by how much replica and model attract each other.
    replica: Option<(Region, f64)>,
    /// What was written of blocks that came in parts.
    pub(super) written: Region,
    /// NaN and Inf are refused.
    rejects: bool,
}

impl Made {
    /// For models.
    pub(super) fn differences(began: Arc<Began>, written: Region, rejects: bool) -> Made {
        Made { began, replica: None, written, rejects }
    }

    /// For replicas: the next one goes to `next`.
    pub(super) fn corrections(
        began: Arc<Began>,
        written: Region,
        rejects: bool,
        next: Region,
        elasticity: f64,
    ) -> Made {
        Made { began, replica: Some((next, elasticity)), written, rejects }
    }

    /// What its learner began from.
    pub(super) fn began(&self) -> &Arc<Began> {
        &self.began
    }

    /// What its learner has written.
    pub(super) fn form(&self) -> Form {
        if self.replica.is_some() { Form::Replica } else { Form::Model }
    }

    /// The next replica.
    pub(super) fn next(&self) -> Option<&Region> {
        self.replica.as_ref().map(|(next, _)| next)
    }

    /// Makes the payload of a block in `staging` from `model`, what was written of it. False if that holds NaN or Inf, and
    /// they are refused. Elements that cannot be reduced are left out.
    pub(super) fn make(&self, layout: &ModelLayout, block: BlockId, model: &[u8], staging: &Region) -> bool {
        let start = layout.block_bytes(block).start;
        let mut finite = true;
        for segment in layout.segments(block) {
            let bytes = segment.bytes.clone();
            let Some(wire) = Wire::of(segment.dtype) else {
                self.keep(bytes);
                continue;
            };
            let local = span(&(bytes.start - start..bytes.end - start));
            let (model, began) = (&model[local], self.began.weights(bytes.clone()));
            // SAFETY: one thread at a time makes the payload of a block. The shard and the program come later.
            let out = unsafe { staging.memory().bytes_mut(span(&bytes)) };
            finite &= match &self.replica {
                None => kernels::difference(wire, 1.0, model, Some(began), out),
                Some((next, elasticity)) => {
                    let central = self.began.version.bytes(bytes.clone());
                    // SAFETY: the same, and nobody knows the next replica yet.
                    let next = unsafe { next.memory().bytes_mut(span(&bytes)) };
                    kernels::correction(wire, *elasticity, model, [began, central], [out, next])
                }
            };
        }
        finite || !self.rejects
    }

    /// Nothing is sent of these bytes, which were not written: the learner's weights stay as it has read them.
    pub(super) fn leave_out(&self, bytes: Range<u64>, staging: &Region) {
        // SAFETY: the contribution is sealed, and its commit not sent.
        unsafe { staging.memory().bytes_mut(span(&bytes)) }.fill(0);
        self.keep(bytes);
    }

    /// The next replica has these bytes of the last one.
    pub(super) fn keep(&self, bytes: Range<u64>) {
        if let Some((next, _)) = &self.replica {
            // SAFETY: as above.
            let next = unsafe { next.memory().bytes_mut(span(&bytes)) };
            kernels::stream_copy(self.began.weights(bytes), next);
        }
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
        if !self.job.form().is_weights() {
            return;
        }
        let reader = Reader::open(&self.job, version);
        let mut state = self.state.lock();
        let began = reader.map(|reader| {
            let replica = self.replica_at(&mut state, version);
            Arc::new(Began { version: reader, replica })
        });
        let before = std::mem::replace(&mut state.began, began);
        let gone = std::mem::take(&mut state.gone);
        drop(state);
        drop((before, gone));
    }

    /// The replica that this version shows to the learner's program. None if it shows the model.
    pub fn replica(&self, version: Version) -> Option<Region> {
        if self.job.form() != Form::Replica || !self.has_own_weights {
            return None;
        }
        self.replica_at(&mut self.state.lock(), version)
    }

    fn replica_at(&self, state: &mut State, version: Version) -> Option<Region> {
        let (reducer, hyper) = self.job.reducer();
        if reducer.form() != Form::Replica {
            return None;
        }
        state.replicas.follow(reducer, hyper.learning_rate);
        self.show_replicas(state);
        state.replicas.at(version).cloned()
    }

    /// Commits that are part of a version now: it shows their replicas.
    pub(super) fn show_replicas(&self, state: &mut State) {
        while let Some(step) = state.replicas.waiting()
            && let Some(version) = self.job.published_in(self.learner, step)
        {
            state.replicas.show(version);
        }
    }

    /// How the payload of the next contribution is made, if it is not what is written.
    pub(super) fn made(&self, state: &mut State) -> Result<Option<Arc<Made>>, ShardError> {
        let form = self.job.form();
        if !form.is_weights() {
            state.written = None;
            let began = state.began.take();
            state.gone.extend(began);
            state.replicas = Replicas::default();
            return Ok(None);
        }
        let (reducer, hyper) = self.job.reducer();
        if form == Form::Replica && !self.has_own_weights {
            return Err(ShardError::NotAllowed(format!(
                "with reducer {reducer} each learner has a replica of its own: mkdir learners/NAME, and use the files in it"
            )));
        }
        if state.began.is_none() {
            let newest = Reader::newest(&self.job).ok_or(ShardError::Unreachable)?;
            let replica = self.replica_at(state, newest.version());
            state.began = Some(Arc::new(Began { version: newest, replica }));
        }
        let Some(began) = state.began.clone() else { return Ok(None) };
        let written = match &state.written {
            Some(written) => written.clone(),
            None => region(&self.job, "gradfs-written")?,
        };
        state.written = Some(written.clone());
        let rejects = self.job.rejects_nonfinite();
        if form == Form::Model {
            return Ok(Some(Arc::new(Made::differences(began, written, rejects))));
        }
        let held = self.job.versions();
        let free = state.replicas.take_free(|range| held.iter().any(|version| range.contains(version)));
        let next = match free {
            Some(free) => free,
            None => region(&self.job, "gradfs-replica")?,
        };
        let elasticity = elasticity(hyper.elasticity, self.job.learners());
        Ok(Some(Arc::new(Made::corrections(began, written, rejects, next, elasticity))))
    }

    /// Like [`Self::take`], where the payload is made of what is written.
    pub(super) fn take_made(
        &self,
        piece: &Piece,
        data: &[u8],
        step: Step,
        staging: &Region,
        made: &Made,
    ) -> Result<(), ShardError> {
        self.traffic.staged.fetch_add(data.len() as u64, Ordering::Relaxed);
        if piece.whole {
            return self.offer_made(piece, data, step, staging, made);
        }
        let memory = made.written.memory();
        // SAFETY: as in `take`: the block is read when it is whole.
        unsafe { memory.write(piece.bytes.start as usize, data) };
        {
            let mut state = self.state.lock();
            if !state.tracker.copied(piece.block) {
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
        piece: &Piece,
        model: &[u8],
        step: Step,
        staging: &Region,
        made: &Made,
    ) -> Result<(), ShardError> {
        if !made.make(&self.layout, piece.block, model, staging) {
            return self.placed(piece, Err(ShardError::NonFinite(piece.block)));
        }
        self.offer_staged(piece, step, staging)
    }
}

/// The share by which a replica and the model attract each other: the setting, or one by the number of learners.
fn elasticity(setting: f32, learners: usize) -> f64 {
    if setting == 0.0 { 1.0 / learners.max(1) as f64 } else { decimal(setting) }
}
