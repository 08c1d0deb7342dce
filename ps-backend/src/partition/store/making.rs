//! Making a version that changes optimizer state in place.
//!
//! This module holds `unsafe`; the module above explains why it is sound.

use std::sync::Arc;

use libmodelio::vocabulary::ids::BlockId;
use smallvec::SmallVec;

use super::accumulator::Accumulator;
use super::builder::{VersionBuilder, Written};
use super::job::{Claim, FINISHED, MADE, PartitionJob};
use super::places::block_span;
use super::{PartitionError, PartitionStore};
use crate::device::Runs;

/// A version that counts, and is being made: its blocks are computed, and the state of each is changed in place. That
/// cannot be undone.
#[derive(Debug)]
pub struct Making(Arc<PartitionJob>);

impl Making {
    /// Makes a block. Blocks are made in any order, each of them once.
    ///
    /// # Errors
    /// [`PartitionError::NoBlock`]; [`PartitionError::Claimed`] or [`PartitionError::Unfinished`] if another thread is
    /// at work on the block, or has made it.
    pub fn block(&self, block: BlockId) -> Result<(), PartitionError> {
        if self.is_on_device() {
            return self.blocks(&[block]).map_err(|(_, error)| error);
        }
        let job = &self.0;
        if job.sums_first() {
            job.compute(block, &[])?;
        }
        let claim = job.claim_computed(block)?;
        if let Some(builder) = job.builder.as_ref().filter(|_| !job.sums_first()) {
            // SAFETY: the block is claimed.
            unsafe { builder.keep_masters(block) };
        }
        claim.set(MADE);
        Ok(())
    }

    /// Whether a device makes the version. It takes many blocks at once, and the more, the faster.
    pub fn is_on_device(&self) -> bool {
        self.0.builder.as_ref().is_some_and(|builder| builder.arrays.is_some())
    }

    /// Makes blocks on the device, or has it take over weights that were written whole. Returns when the host's memory
    /// has the weights.
    ///
    /// # Errors
    /// The errors of [`Self::block`], with a block that has one; [`PartitionError::Device`]: then the model is lost.
    pub fn blocks(&self, blocks: &[BlockId]) -> Result<(), (BlockId, PartitionError)> {
        let job = &self.0;
        let Some(&first) = blocks.first() else { return Ok(()) };
        let builder = job.builder.as_ref().ok_or((first, PartitionError::AddsOnly))?;
        let claim = |block: BlockId| match job.sums_first() {
            true => job.claim(block),
            false => job.claim_computed(block),
        };
        let claims: Result<Vec<Claim<'_>>, _> =
            blocks.iter().map(|&block| claim(block).map_err(|error| (block, error))).collect();
        let claims = claims?;
        let mut runs = Runs::new(blocks.iter().map(|&block| block_span(&job.layout, block).len()).sum());
        let mut computed = Vec::new();
        for (&block, claim) in blocks.iter().zip(&claims) {
            if !job.sums_first() {
                builder.take_over(block, &mut runs);
            } else if self.lay_out(builder, block, claim, &mut runs) {
                computed.push(block);
            }
        }
        // SAFETY: the blocks are claimed, and with them their sums. No plan can be dropped whose version is made.
        if let Err(error) = unsafe { builder.run(&job.steps, &runs) } {
            let _ = job.failed.set(error.clone());
            return Err((first, error.into()));
        }
        computed.into_iter().for_each(|block| builder.approve(block));
        claims.iter().for_each(|claim| claim.set(FINISHED | MADE));
        Ok(())
    }

    /// Adds what the device computes of a block. Returns whether the block is void until it is approved.
    fn lay_out(&self, builder: &VersionBuilder, block: BlockId, claim: &Claim<'_>, runs: &mut Runs) -> bool {
        let held = self.0.sums_of(block, claim);
        let sums: SmallVec<[&Accumulator; 2]> = held.iter().map(|(sum, _)| *sum).collect();
        let mut written = SmallVec::<[Written<'_>; 2]>::new();
        if held.iter().any(|(_, written)| written.is_some()) {
            written.extend(held.iter().map(|(_, written)| written.as_deref()));
        }
        // SAFETY: the block is claimed, and with it its sums.
        unsafe { builder.lay_out(block, &self.0.steps, &sums, &written, runs) }
    }
}

impl PartitionStore {
    /// The plan of this job counts, and its version is to be made. From now on the newest version's state gets no more
    /// readers.
    ///
    /// # Errors
    /// [`PartitionError::Over`] if the job was concluded or given up. [`PartitionError::Busy`] as long as the state is
    /// being read.
    pub fn make(&self, job: &Arc<PartitionJob>) -> Result<Making, PartitionError> {
        let mut inner = self.shared.inner.lock();
        inner.check_running(job)?;
        inner.making = job.is_in_place();
        if inner.making && inner.readers > 0 {
            return Err(PartitionError::Busy);
        }
        Ok(Making(Arc::clone(job)))
    }
}
