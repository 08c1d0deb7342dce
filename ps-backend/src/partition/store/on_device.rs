//! Blocks of a version that a device makes.
//!
//! This module holds `unsafe`; the module above explains why it is sound.

use libmodelio::vocabulary::ids::BlockId;
use smallvec::SmallVec;

use super::PartitionError;
use super::job::{Claim, FINISHED, MADE, PartitionJob};
use crate::device::Runs;
use crate::region_store::accumulator::Accumulator;
use crate::region_store::{VersionBuilder, Written};

impl PartitionJob {
    /// The version counts: has the device compute `blocks` and their state, which cannot be undone, or take over weights
    /// that were written whole. Returns when the version has the weights.
    ///
    /// # Errors
    /// The errors of [`Self::make`], with a block that has one; [`PartitionError::Device`].
    pub(super) fn make_on_device(&self, blocks: &[BlockId]) -> Result<(), (BlockId, PartitionError)> {
        let Some(&first) = blocks.first() else { return Ok(()) };
        let builder = self.builder().ok_or((first, PartitionError::AddsOnly))?;
        let claim = |block: BlockId| match self.sums_first() {
            true => self.claim(block),
            false => self.claim_computed(block),
        };
        let claims: Result<Vec<Claim<'_>>, _> =
            blocks.iter().map(|&block| claim(block).map_err(|error| (block, error))).collect();
        let claims = claims?;
        let words = blocks.iter().map(|&block| builder.words(block)).sum();
        let mut runs = Runs::new(words);
        let mut computed = Vec::new();
        for (&block, claim) in blocks.iter().zip(&claims) {
            if !self.sums_first() {
                builder.take_over(block, &mut runs);
            } else if self.lay_out(builder, block, claim, &mut runs) {
                computed.push(block);
            }
        }
        // SAFETY: the blocks are claimed, and with them their sums. No plan can be dropped whose version is made.
        if let Err(error) = unsafe { builder.run(self.steps(), &runs) } {
            self.has_failed(&error);
            return Err((first, error.into()));
        }
        computed.into_iter().for_each(|block| builder.approve(block));
        claims.iter().for_each(|claim| claim.set(FINISHED | MADE));
        Ok(())
    }

    /// Adds what the device computes of a block. Returns whether the block is void until it is approved.
    fn lay_out(&self, builder: &VersionBuilder, block: BlockId, claim: &Claim<'_>, runs: &mut Runs) -> bool {
        let (sealed, open) = (self.sums().sealed(block), claim.holds().then(|| self.open(block)));
        let sums: SmallVec<[&Accumulator; 2]> = sealed.into_iter().chain(open).collect();
        let of_sealed = sealed.and_then(|_| self.sums().sealed_written(block));
        let of_open = open.and_then(|_| self.sums().open_written(block));
        let mut written = SmallVec::<[Written<'_>; 2]>::new();
        if of_sealed.is_some() || of_open.is_some() {
            written.extend(sealed.map(|_| of_sealed.as_deref()));
            written.extend(open.map(|_| of_open.as_deref()));
        }
        // SAFETY: the block is claimed, and with it its sums.
        unsafe { builder.lay_out(block, self.steps(), &sums, &written, runs) }
    }
}
